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

__all__ = ["for_gradients", "spec_beside"]


def for_gradients(spec: str | Codec | Compression | Method) -> Compression:
    """Return the codec and feedback of a spec, if it can compress gradients.

    Raises:
        UnsupportedError: the spec is for something else, such as activations.
    """
    chosen = compression(spec)
    if chosen.feedback is not None and chosen.feedback.per_sample:
        raise UnsupportedError(
            f"{str(chosen)!r} cannot compress gradients: {chosen.feedback.name} keeps a buffer for each sample, but "
            f"gradients are sums over samples; {chosen.feedback.name} is for activations between pipeline stages. For "
            "gradients use a codec with '+ef'"
        )
    return chosen


def _codec_like(default: Compression, spec: str | Codec | Compression | Method, name: str) -> Codec:
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
            f"{name!r} cannot have {str(layer)!r}: the settings of {layer.feedback.name} apply to the whole model; "
            f"give the codec alone, as in {str(layer.codec)!r}"
        )
    if not (same_codec and same_feedback):
        raise ValueError(
            f"{name!r} cannot have {str(layer)!r} in a model that has {str(default)!r}: only the settings of the codec "
            "may differ"
        )
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
            raise ValueError(
                f"{name!r} cannot have {str(layer)!r} with collective={collective!r}: {layer.feedback.name} has a "
                "collective of its own; use collective='auto'"
            )
        check(layer.codec, collective, states.get(""))
    if default.feedback is None:
        if layer.feedback is not None:
            raise ValueError(
                f"{name!r} cannot have {str(layer)!r} in a model that has {str(default)!r}, without feedback: add "
                "feedback to the model's spec, and every layer has it"
            )
        return layer
    if not default.feedback.mixes:
        if layer.feedback == default.feedback:
            return layer
        return Compression(_codec_like(default, layer, name), default.feedback)
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
            "incremental feedback (ef21) and a residual cannot be converted into each other; leave the feedback out of "
            "the layer's spec"
        )
    if not layer.feedback.compensates:
        raise ValueError(
            f"{name!r} cannot have {str(layer)!r}: every layer of this model has feedback, and this spec has none"
        )
    there = next((state for state in states.values() if type(state) is type(layer.feedback)), None)
    if there is not None and not there.shares_state_with(layer.feedback):
        raise ValueError(
            f"{name!r} cannot have {str(layer)!r} in a model that has {str(there)!r}: all layers with {there.name} "
            "share one state, and these settings differ too much to share it"
        )
