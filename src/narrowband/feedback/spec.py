"""``codec[+feedback]``: a whole spec string, such as ``topk:density=0.01+ef``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from narrowband import codecs
from narrowband.feedback.base import Feedback
from narrowband.feedback.ef import ErrorFeedback

if TYPE_CHECKING:
    from narrowband.codecs import Codec

__all__ = ["Compression", "available", "compression"]

_FEEDBACKS: tuple[type[Feedback], ...] = (ErrorFeedback,)


def available() -> dict[str, type[Feedback]]:
    """Every feedback by its name in a spec string."""
    return {kind.name: kind for kind in _FEEDBACKS}


@dataclass(frozen=True)
class Compression:
    """A codec, and the feedback around it if any. ``compression(str(c)) == c``."""

    codec: Codec
    feedback: Feedback | None = None

    def new_feedback(self) -> Feedback | None:
        """A feedback of this configuration, with no state yet."""
        return replace(self.feedback) if self.feedback is not None else None  # type: ignore[type-var]

    def __str__(self) -> str:
        return str(self.codec) if self.feedback is None else f"{self.codec}+{codecs.format_term(self.feedback)}"


def compression(spec: str | Codec | Compression) -> Compression:
    """The codec and feedback that a spec string names.

    Raises:
        ValueError: unknown name or key, or a value out of range.

    Example:
        >>> nb.compression("topk:density=0.01+ef").codec
        TopK(density=0.01, select='exact', scope='tensor', values='fp32', indices='elias-fano')
    """
    if isinstance(spec, Compression):
        return spec
    if not isinstance(spec, str):
        return Compression(codecs.codec(spec))
    text, plus, feedback = spec.partition("+")
    return Compression(codecs.codec(text), codecs.parse_term(feedback, available(), "feedback") if plus else None)
