"""Check which specs may be mixed in one model."""

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
    """Return the codec and feedback of a spec, if it can compress gradients.

    Raises:
        UnsupportedError: the spec is for something else, such as activations.
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
    """Return the codec of a spec for a part of a model. It may differ from the model's default only in the codec's
    settings.

    Raises:
        ValueError: the spec has another codec, or another feedback.
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
    """Return a layer's spec in a model with this default, with the model's feedback if the spec names none.

    Args:
        default: of the model.
        name: of the layer, for errors.
        spec: the layer's wanted spec.
        collective: the one that users ask for.
        states: the model's feedback states, by name; the name of the default's state is ''.

    Raises:
        ValueError: the layer cannot have this spec in this model.
        UnsupportedError: the spec is not for gradients.
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
    """Raise ValueError unless a layer can have this feedback in a model with this default and these states."""
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
