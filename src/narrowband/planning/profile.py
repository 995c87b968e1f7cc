"""The measured times of a model and of codecs with its gradients, as plain numbers: nothing here needs the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

__all__ = ["Bucket", "Codec", "Content", "Line", "Piece", "Profile", "Share", "Trained", "total"]


@dataclass(frozen=True)
class Line:
    """A duration that is linear in the number of ranks N: ``fixed + each · N`` seconds."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, ranks: int) -> float:
        """Return the seconds among ``ranks`` ranks."""
        return self.fixed + self.each * ranks

    def __mul__(self, factor: float) -> Line:
        return Line(self.fixed * factor, self.each * factor)

    def __add__(self, other: Line) -> Line:
        return Line(self.fixed + other.fixed, self.each + other.each)

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Line:
        """Return the line through the first and the last point; a constant, the minimum, if more ranks took less time.

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
    """How long the work on a bucket's layers takes with one codec and one collective.

    Attributes:
        encode: encoding, before the layers are part of a message.
        begin: the work on that message before its first transfer.
        calls: the names of the collectives that are called, in order.
        work: the work after each of these calls.
        deliver: decoding, and the feedback's work at the end.
    """

    encode: Line = field(default_factory=Line)
    begin: Line = field(default_factory=Line)
    calls: tuple[str, ...] = ()
    work: tuple[Line, ...] = ()
    deliver: Line = field(default_factory=Line)

    @classmethod
    def together(cls, pieces: Sequence[Piece]) -> Piece:
        """Return the times of the layers of several buckets that make one message."""
        lines = {name: total(getattr(piece, name) for piece in pieces) for name in ("encode", "begin", "deliver")}
        work = itertools.zip_longest(*(piece.work for piece in pieces), fillvalue=Line())
        return cls(calls=max((piece.calls for piece in pieces), key=len), work=tuple(map(total, work)), **lines)

    def __mul__(self, factor: float) -> Piece:
        work = tuple(line * factor for line in self.work)
        lines = {name: getattr(self, name) * factor for name in ("encode", "begin", "deliver")}
        return replace(self, work=work, **lines)


class Share(NamedTuple):
    """Identifies shards of the parameters: those of the rank at ``place`` among ``ranks`` ranks that share them."""

    place: int
    ranks: int


#: The share of a rank that has all parameters.
WHOLE = Share(0, 1)


@dataclass(frozen=True)
class Codec:
    """The times of a spec with one collective.

    Attributes:
        spec: the spec string.
        collective: the name of the collective.
        pieces: one per bucket.
        residual_nbytes: memory that the feedback takes on a rank.
        share: the share of the profile whose gradients were measured.
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
        shape: of the parameter, or of the rank's shard where a profile is a share.
        norm: whether it belongs to a normalization layer.
    """

    name: str
    shape: tuple[int, ...]
    norm: bool = False


class Content(NamedTuple):
    """The part of a bucket that a rank averages; see :class:`Bucket` for the fields."""

    layers: tuple[tuple[str, tuple[int, ...]], ...]
    numel: int
    vectors: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """A bucket of DDP.

    Attributes:
        ready_s: seconds from the start of backward until it is complete.
        layers: name and shape of the parameters that are compressed.
        numel: number of elements, compressed or not.
        divide_s: seconds to divide it by the number of ranks, the only work on an uncompressed bucket.
        copy_s: seconds to copy it. On two levels it is copied a few times.
        vectors: bytes of the small parameters that are sent once this bucket is complete, one entry per message. In the
            last bucket, the last entry is for those that can only be sent at the end, or zero.
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
    """The times of a model's step, and of codecs with its gradients.

    Attributes:
        forward_s, backward_s, optimizer_s: seconds, with nothing sent. See :meth:`accumulated`.
        buckets: in the order in which backward completes them.
        trained: the parameters in the buckets, in the model's order, by which ranks of a machine share them on two
            levels.
        share: which shards of the model's parameters ``trained`` has.
        buffers: the buffers that rounds average besides parameters.
        codecs: what was measured, by spec and collective.
        threads: number of threads that arithmetic used.
        spread: relative difference between the quartiles of the measured steps, an estimate of the noise.
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
        """Seconds of a step without communication."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def numel(self) -> int:
        """Number of elements that are averaged."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def layers(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of all parameters that are compressed, in the order of backward."""
        return [layer for bucket in self.buckets for layer in bucket.layers]

    def accumulated(self, micro_batches: int) -> Profile:
        """Return the profile of a step that accumulates gradients, with only the last backward pass synchronized.

        All that comes before that backward pass counts as ``forward_s``.
        """
        before_s = (micro_batches - 1) * (self.forward_s + self.backward_s)
        return replace(self, forward_s=self.forward_s + before_s)

    def on_slower(self, factor: float) -> Profile:
        """Return the profile of a processor that takes ``factor`` times as long for everything."""
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
        """Return the times of a spec with this share of the parameters.

        Raises:
            KeyError: the spec was not measured with this collective and share.
        """
        for codec in self.codecs:
            if (codec.spec, codec.collective, codec.share) == (spec, collective, self.share):
                return codec
        raise KeyError(f"{spec} was not measured with the collective {collective} and {self.share}")


def total(lines: Iterable[Line]) -> Line:
    """Return the sum of lines."""
    return sum(lines, Line())
