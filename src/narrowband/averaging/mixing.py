"""Which specs the layers of one model can have beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from narrowband.collectives import Collective, check
from narrowband.errors import UnsupportedError
from narrowband.feedback import Compression, compression

if TYPE_CHECKING:
    from collections.abc import Mapping

    from narrowband.codecs import Codec
    from narrowband.feedback import Method, State

__all__ = ["codec_like", "for_gradients", "spec_beside"]


def for_gradients(spec: str | Codec | Compression | Method) -> Compression:
    """What a spec names, if gradients can be compressed with it.

    Raises:
        UnsupportedError: it is for something else.
    """
    chosen = compression(spec)
    if chosen.feedback is not None and chosen.feedback.per_sample:
        raise UnsupportedError(
            f"{str(chosen)!r} cannot compress gradients: {chosen.feedback.name} keeps buffers per sample, and "
            "gradients are sums over samples; it is for activations between pipeline stages. Use a codec with '+ef' "
            "here"
        )
    return chosen


def codec_like(default: Compression, spec: str | Codec | Compression | Method, name: str) -> Codec:
    """The codec of a spec for a part of a model, which may differ from the model's default in its codec's numbers only.

    Raises:
        ValueError: a spec of another kind.
    """
    layer = for_gradients(spec)
    same_codec = type(layer.codec) is type(default.codec)
    same_feedback = layer.feedback is None or type(layer.feedback) is type(default.feedback)
    if layer.feedback is not None and not layer.feedback.mixes:
        raise ValueError(
            f"{name!r} cannot have {str(layer)!r}: the settings of {layer.feedback.name} are the whole model's, so "
            f"name the codec alone, as in {str(layer.codec)!r}"
        )
    if not (same_codec and same_feedback):
        raise ValueError(f"{name!r} cannot have {str(layer)!r} in a model that has {str(default)!r}")
    return layer.codec


def spec_beside(
    default: Compression,
    name: str,
    spec: str | Codec | Compression | Method,
    *,
    collective: Collective | Literal["auto"],
    states: Mapping[str, State],
) -> Compression:
    """What a layer can have in a model with this default: the spec, with the model's feedback where it names none.

    Args:
        default: of the model.
        name: of the layer, for errors.
        spec: wanted for the layer.
        collective: the one that users ask for.
        states: feedback states of the model, by name; that of the default is ''.

    Raises:
        ValueError: it cannot have that.
        UnsupportedError: no gradient can.
    """
    layer = for_gradients(spec)
    if layer == default:
        return layer
    if collective != "auto":
        if layer.feedback is not None and layer.feedback.collective is not None:
            raise ValueError(f"{name!r} cannot have {str(layer)!r} with collective={collective!r}")
        check(layer.codec, collective, states.get(""))
    if default.feedback is None:
        if layer.feedback is not None:
            raise ValueError(
                f"{name!r} cannot have {str(layer)!r} in a model that has {str(default)!r}, without feedback: "
                "give the model one, and every layer has it"
            )
        return layer
    if not default.feedback.mixes:
        if layer.feedback == default.feedback:
            return layer
        return Compression(codec_like(default, layer, name), default.feedback)
    layer = layer.beside(default)
    _check_feedback(default, name, layer, states)
    return layer


def _check_feedback(default: Compression, name: str, layer: Compression, states: Mapping[str, State]) -> None:
    """Raise ValueError unless a layer with this feedback can be in a model with these."""
    assert layer.feedback is not None
    assert default.feedback is not None
    if not layer.feedback.mixes:
        raise ValueError(
            f"{name!r} cannot have {str(layer)!r}: {layer.feedback.name} is for a whole model, not for one layer of it"
        )
    if layer.feedback.incremental != default.feedback.incremental:
        raise ValueError(
            f"{name!r} cannot have {str(layer)!r} in a model that has {str(default)!r}: the state of "
            "incremental feedback cannot become a residual, nor a residual such a state; leave this feedback out"
        )
    if not layer.feedback.compensates:
        raise ValueError(f"{name!r} cannot have {str(layer)!r}: in this model every layer has feedback")
    there = next((state for state in states.values() if type(state) is type(layer.feedback)), None)
    if there is not None and not there.shares_state_with(layer.feedback):
        raise ValueError(
            f"{name!r} cannot have {str(layer)!r} in a model that has {str(there)!r}: {there.name} keeps one state "
            "for all layers that have it, which these settings cannot share"
        )
