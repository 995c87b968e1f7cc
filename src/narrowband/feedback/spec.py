"""``codec[+feedback]``, or a method that is both: a whole spec string, such as ``topk:density=0.01+ef`` or
``dgc:density=0.001``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from narrowband import codecs
from narrowband.feedback.aqsgd import AQSGD
from narrowband.feedback.base import State
from narrowband.feedback.dgc import DGC
from narrowband.feedback.ef import ErrorFeedback
from narrowband.feedback.ef21 import EF21
from narrowband.feedback.mixed import MixedFeedback
from narrowband.feedback.powersgd import PowerSGD

if TYPE_CHECKING:
    from narrowband.codecs import Codec

__all__ = ["Compression", "Method", "available", "compression", "methods"]

#: What names its codec itself.
Method: TypeAlias = DGC | PowerSGD

_FEEDBACKS: tuple[type[State], ...] = (ErrorFeedback, MixedFeedback, EF21, AQSGD)
_METHODS: tuple[type[Method], ...] = (DGC, PowerSGD)


def available() -> dict[str, type[State]]:
    """Every feedback by its name behind the ``+`` of a spec string."""
    return {kind.name: kind for kind in _FEEDBACKS}


def methods() -> dict[str, type[Method]]:
    """Every method that brings codec and feedback along, by its name in a spec string."""
    return {kind.name: kind for kind in _METHODS}


@dataclass(frozen=True)
class Compression:
    """A codec, and the feedback around it if any. ``compression(str(c)) == c``.

    Raises:
        UnsupportedError: the feedback cannot stand behind that codec.
    """

    codec: Codec
    feedback: State | None = None

    def __post_init__(self) -> None:
        if self.feedback is not None:
            self.feedback.check(self.codec)

    def new_feedback(self) -> State | None:
        """A feedback of this configuration, with no state yet."""
        return replace(self.feedback) if self.feedback is not None else None  # type: ignore[type-var]

    def codec_at(self, step: int, epoch: int | None = None) -> Codec:
        """The codec of a step (from 0): another one while a method warms up."""
        return self.feedback.codec_at(step, epoch) if isinstance(self.feedback, DGC) else self.codec

    def __str__(self) -> str:
        if isinstance(self.feedback, DGC | PowerSGD):
            return codecs.format_term(self.feedback)
        return str(self.codec) if self.feedback is None else f"{self.codec}+{codecs.format_term(self.feedback)}"


def compression(spec: str | Codec | Compression | Method) -> Compression:
    """The codec and feedback that a spec string names.

    Raises:
        ValueError: unknown name or key, or a value out of range.
        UnsupportedError: a feedback that cannot stand behind that codec.

    Example:
        >>> nb.compression("topk:density=0.01+ef").codec
        TopK(density=0.01, select='exact', scope='tensor', values='fp32', indices='elias-fano')
    """
    if isinstance(spec, Compression):
        return spec
    if isinstance(spec, str):
        text, plus, feedback = spec.partition("+")
        kept = codecs.parse_term(feedback, available(), "feedback") if plus else None
        if text.strip().partition(":")[0] not in methods():
            return Compression(_codec(text), kept)
        spec = codecs.parse_term(text, methods(), "method")
        if plus and not (isinstance(spec, PowerSGD) and type(kept) is ErrorFeedback and spec.ef):
            raise ValueError(f"{spec.name} keeps what it does not send in its own way; leave out '+{feedback}'")
    if isinstance(spec, DGC | PowerSGD):
        return Compression(spec.codec, spec)
    return Compression(codecs.codec(spec))


def _codec(text: str) -> Codec:
    """The codec of that name; an error lists the methods, too."""
    kinds: dict[str, type[Codec | Method]] = {**codecs.available(), **methods()}
    found = codecs.parse_term(text, kinds, "codec")
    assert isinstance(found, codecs.Codec)
    return found
