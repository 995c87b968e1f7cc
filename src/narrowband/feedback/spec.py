"""Parse whole spec strings: ``codec[+feedback]``, or a method that brings both.

Examples are ``topk:density=0.01+ef`` and ``dgc:density=0.001``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, TypeAlias

from narrowband import codecs
from narrowband.codecs.registry import Registry
from narrowband.codecs.spec import check_plus
from narrowband.feedback.aqsgd import AQSGD
from narrowband.feedback.base import State
from narrowband.feedback.dgc import DGC
from narrowband.feedback.ef import ErrorFeedback
from narrowband.feedback.ef21 import EF21
from narrowband.feedback.mixed import MixedFeedback
from narrowband.feedback.powersgd import PowerSGD

if TYPE_CHECKING:
    from narrowband.codecs import Codec, Shape

__all__ = ["Compression", "Method", "available", "compression", "methods", "register_feedback"]

#: A feedback that brings its own codec, see :attr:`State.brings_codec`.
Method: TypeAlias = State

_REGISTRY: Registry[State] = Registry(
    "feedback",
    "narrowband.feedbacks",
    State,  # type: ignore[type-abstract]
    (ErrorFeedback, MixedFeedback, EF21, AQSGD, DGC, PowerSGD),
)


def register_feedback(kind: type[State]) -> type[State]:
    """Register a feedback or method, so that spec strings can name it by ``kind.name``.

    An installed package can declare the class as an entry point of the group ``narrowband.feedbacks`` instead.

    Args:
        kind: a dataclass whose fields are the keys of the spec; :class:`Feedback` says what it has to implement.

    Returns:
        ``kind``, so that this function can be used as a decorator.

    Raises:
        TypeError: the class is not a dataclass that derives from :class:`State`, has no hash, or has a field that is
            not int, float, bool, str or a Literal of strings.
        ValueError: it has no name, a name that a spec string cannot hold, or that of another codec or feedback.

    ``docs/how-to/own-codec.md`` shows how to write one.
    """
    return _REGISTRY.register(kind)


def available() -> dict[str, type[State]]:
    """Return every feedback that can stand behind the ``+`` of a spec string: name → class."""
    return {name: kind for name, kind in _REGISTRY.all().items() if not kind.brings_codec}


def methods() -> dict[str, type[State]]:
    """Return every method, which brings its own codec: name in a spec string → class."""
    return {name: kind for name, kind in _REGISTRY.all().items() if kind.brings_codec}


@dataclass(frozen=True)
class Compression:
    """A codec, and the feedback behind it, if any. ``compression(str(c)) == c``.

    Raises:
        UnsupportedError: the feedback cannot stand behind that codec.

    Attributes:
        codec: turns tensors into bytes.
        feedback: compensates for the codec's error; None: nothing does.

    Example:
        >>> chosen = nb.compression("topk:density=0.01+ef")
        >>> str(chosen.codec), str(chosen)
        ('topk:density=0.01', 'topk:density=0.01+ef')
    """

    codec: Codec
    feedback: State | None = None

    def __post_init__(self) -> None:
        if self.feedback is not None:
            self.feedback.check(self.codec)

    def beside(self, model: Compression) -> Compression:
        """Return what a layer with this spec gets in a model with another spec: the model's feedback if it has none.

        Example:
            >>> str(nb.compression("qsgd:bits=4").beside(nb.compression("powersgd:rank=4")))
            'qsgd:bits=4+ef'
        """
        if self.feedback is not None or model.feedback is None:
            return self
        if not model.feedback.mixes:
            return Compression(self.codec, model.feedback)
        behind = model.feedback.behind(self.codec) or ErrorFeedback()
        return Compression(behind.codec if behind.brings_codec else self.codec, behind)

    def new_feedback(self) -> State | None:
        """Return a new feedback of this configuration, without state."""
        return replace(self.feedback) if self.feedback is not None else None  # type: ignore[type-var]

    def codec_at(self, step: int, epoch: int | None = None) -> Codec:
        """Return the codec of a step (from 0), which differs from ``codec`` while a method warms up."""
        changed = None if self.feedback is None else self.feedback.codec_at(step, epoch)
        return self.codec if changed is None else changed

    def layer_nbytes(self, shape: Shape) -> int:
        """Return the bytes of one rank's payload for a layer of this shape."""
        if self.feedback is None:
            return self.codec.payload_nbytes(shape)
        return self.feedback.layer_nbytes(self.codec, shape)

    def kept_rank(self, shape: Shape) -> int | None:
        """As :meth:`~narrowband.codecs.Codec.kept_rank`, for a layer of this shape."""
        return self.codec.kept_rank(shape) if self.feedback is None else self.feedback.kept_rank(self.codec, shape)

    def __str__(self) -> str:
        if self.feedback is not None and self.feedback.brings_codec:
            return codecs.format_term(self.feedback)
        return str(self.codec) if self.feedback is None else f"{self.codec}+{codecs.format_term(self.feedback)}"


def compression(spec: str | Codec | Compression | State) -> Compression:
    """Return the codec and feedback that a spec string names.

    Args:
        spec: ``codec[+feedback]`` or a method, such as ``topk:density=0.01+ef`` or ``dgc:density=0.001``; or a codec,
            or a method's configuration, such as ``nb.DGC(density=0.001)``.

    Raises:
        ValueError: unknown name or key, or a value out of range.
        UnsupportedError: a feedback that cannot stand behind that codec.

    Example:
        >>> nb.compression("qsgd:bits=2+ef").codec
        QSGD(bits=2, bucket=128, norm='max')
    """
    if isinstance(spec, Compression):
        return spec
    if isinstance(spec, State):
        return Compression(spec.codec, spec)
    if isinstance(spec, PathLike):
        raise TypeError(
            f"{str(spec)!r} is a path, not a spec; if the file holds a plan, pass nb.Plan.load({str(spec)!r})"
        )
    if not isinstance(spec, str):
        return Compression(codecs.codec(spec))
    if spec.endswith(".json"):
        raise ValueError(f"{spec!r} is a file, not a spec; if it holds a plan, pass nb.Plan.load({spec!r})")
    check_plus(spec)
    text, plus, feedback = spec.partition("+")
    behind = _feedback(feedback) if plus else None
    name = codecs.name_of(text)
    if codecs.find(name) is not None:
        return Compression(codecs.codec(text), behind)
    _REGISTRY.find(name)
    method = codecs.parse_term(text, {**codecs.available(), **methods()}, "codec")
    assert isinstance(method, State)
    if behind is not None and not method.includes(behind):
        raise ValueError(f"{method.name} has a feedback of its own; leave out '+{feedback}'")
    return Compression(method.codec, method)


def _feedback(text: str) -> State:
    """Parse the part of a spec string behind the '+'."""
    _REGISTRY.find(codecs.name_of(text))
    return codecs.parse_term(text, available(), "feedback")
