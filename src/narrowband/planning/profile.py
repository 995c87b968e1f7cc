"""What was measured of a model, and of codecs with its gradients. Plain numbers: nothing here needs the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

__all__ = ["Bucket", "Codec", "Content", "Line", "Piece", "Profile", "Share", "Trained", "total"]


@dataclass(frozen=True)
class Line:
    """Seconds among N ranks: ``fixed + each · N``."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, ranks: int) -> float:
        """Among so many ranks."""
        return self.fixed + self.each * ranks

    def __mul__(self, factor: float) -> Line:
        return Line(self.fixed * factor, self.each * factor)

    def __add__(self, other: Line) -> Line:
        return Line(self.fixed + other.fixed, self.each + other.each)

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Line:
        """The line through what was measured among few and among many ranks; level where more of them took less.

        Example:
            >>> Line.through([(2, 0.5), (6, 1.5)]).at(10)
            2.5
        """
        (few, low), (many, high) = points[0], points[-1]
        if many == few or high <= low:
            return cls(min(low, high))
        each = (high - low) / (many - few)
        return cls(max(0.0, low - each * few), each)


@dataclass(frozen=True)
class Piece:
    """What the layers of a bucket take with a codec, by one collective.

    Attributes:
        encode: before they are part of a message.
        begin: of that message, before its first transfer.
        calls: the collectives, by name, one after the other.
        work: after each.
        deliver: decoding, and what feedback does at the end.
    """

    encode: Line = field(default_factory=Line)
    begin: Line = field(default_factory=Line)
    calls: tuple[str, ...] = ()
    work: tuple[Line, ...] = ()
    deliver: Line = field(default_factory=Line)

    @classmethod
    def together(cls, pieces: Sequence[Piece]) -> Piece:
        """What the layers of several buckets take that make one message."""
        lines = {name: total(getattr(piece, name) for piece in pieces) for name in ("encode", "begin", "deliver")}
        work = itertools.zip_longest(*(piece.work for piece in pieces), fillvalue=Line())
        return cls(calls=max((piece.calls for piece in pieces), key=len), work=tuple(map(total, work)), **lines)

    def __mul__(self, factor: float) -> Piece:
        work = tuple(line * factor for line in self.work)
        lines = {name: getattr(self, name) * factor for name in ("encode", "begin", "deliver")}
        return replace(self, work=work, **lines)


class Share(NamedTuple):
    """Which shards of the parameters: those of the rank at a place, of so many ranks that share them."""

    place: int
    ranks: int


#: All of the parameters.
WHOLE = Share(0, 1)


@dataclass(frozen=True)
class Codec:
    """A spec, by one collective.

    Attributes:
        spec: its string.
        collective: the name.
        pieces: one per bucket.
        residual_nbytes: memory that its feedback takes on a rank.
        share: of the profile whose gradients it was measured with.
    """

    spec: str
    collective: str
    pieces: tuple[Piece, ...]
    residual_nbytes: int
    share: Share = WHOLE


class Trained(NamedTuple):
    """A parameter that is averaged.

    Attributes:
        name: in the model.
        shape: of all of it.
        norm: whether it belongs to a normalization layer.
    """

    name: str
    shape: tuple[int, ...]
    norm: bool = False


class Content(NamedTuple):
    """What a rank averages of a bucket; see :class:`Bucket`."""

    layers: tuple[tuple[str, tuple[int, ...]], ...]
    numel: int
    vectors: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """A bucket of DDP's.

    Attributes:
        ready_s: when it is complete, from the start of backward.
        layers: name and shape of what is compressed.
        numel: elements in all.
        divide_s: what dividing it by the number of ranks takes, which is all that is done to it uncompressed.
        copy_s: what copying it takes; on two levels it is copied a few times.
        vectors: bytes of the small parameters that travel once this bucket is there, one entry per message; of the last
            bucket the last entry is of those that can only go then, or zero.
        names: of all parameters that DDP puts into it.
    """

    ready_s: float
    layers: tuple[tuple[str, tuple[int, ...]], ...]
    numel: int
    divide_s: float = 0.0
    copy_s: float = 0.0
    vectors: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """A model's step, and codecs with it.

    Attributes:
        forward_s, backward_s, optimizer_s: alone, with nothing sent.
        buckets: in the order in which backward completes them.
        trained: what they hold, in the model's order; ranks of a machine share it by that on two levels.
        share: which part of the model's parameters that is.
        buffers: what rounds average beside it.
        codecs: what was measured, by spec and collective.
        threads: that arithmetic had.
        spread: by how much the middle half of the measured steps differed; what to expect of noise.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    buckets: tuple[Bucket, ...]
    codecs: tuple[Codec, ...] = ()
    trained: tuple[Trained, ...] = ()
    share: Share = WHOLE
    buffers: tuple[Trained, ...] = ()
    threads: int = 1
    spread: float = 0.0

    @property
    def compute_s(self) -> float:
        """A step without communication."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def numel(self) -> int:
        """Elements of all that is averaged."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def layers(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of all that is compressed, in the order of backward."""
        return [layer for bucket in self.buckets for layer in bucket.layers]

    def on_slower(self, factor: float) -> Profile:
        """What would have been measured on a processor that takes so many times as long for everything."""
        buckets = tuple(
            replace(
                bucket,
                ready_s=bucket.ready_s * factor,
                divide_s=bucket.divide_s * factor,
                copy_s=bucket.copy_s * factor,
            )
            for bucket in self.buckets
        )
        codecs = tuple(replace(codec, pieces=tuple(x * factor for x in codec.pieces)) for codec in self.codecs)
        return replace(
            self,
            forward_s=self.forward_s * factor,
            backward_s=self.backward_s * factor,
            optimizer_s=self.optimizer_s * factor,
            buckets=buckets,
            codecs=codecs,
        )

    def codec(self, spec: str, collective: str) -> Codec:
        """What was measured of a spec with this share of the parameters.

        Raises:
            KeyError: it was not, by this collective.
        """
        for codec in self.codecs:
            if (codec.spec, codec.collective, codec.share) == (spec, collective, self.share):
                return codec
        raise KeyError(f"{spec} was not measured by {collective}")


def total(lines: Iterable[Line]) -> Line:
    """The sum."""
    return sum(lines, Line())
