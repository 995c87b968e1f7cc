"""Scatter-reduce: each rank owns one chunk of every tensor, averages it, and sends the average to all ranks.

An all-to-all brings the chunks to their owners. Each owner decodes the payloads of its chunk, averages them, and
encodes the mean again. An all-gather brings the means to all ranks. For payloads of P bytes, a rank among N sends
2·(N−1)/N · P bytes: less than 2·P, however many ranks there are.

Encoding the mean is lossy, too. With feedback, the owner keeps that error and adds it to the next mean of its chunk
(1-bit Adam's server error), which takes 1/N of a residual's memory. The error must not go into the owner's residual
instead. There it would have to be multiplied by N, because one rank's residual counts 1/N in the mean; the owner would
then encode a tensor N times as large as a gradient, and lose N times as much.

With feedback, a codec's squared error has to be smaller than the squared norm of its input, see
:attr:`~narrowband.codecs.Codec.lost_share`. A mean of payloads is harder to encode than a gradient: owners' errors may
grow with codecs whose residuals stay bounded under all-gather.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import torch

from narrowband import kernels
from narrowband.codecs.base import numel_of
from narrowband.collectives.chunked import Chunked
from narrowband.collectives.engine import QueueName, Transfer
from narrowband.collectives.exchange import TRAILER, Exchange, Sent, alike, give_means, runs_behind, take_means
from narrowband.collectives.primitives import all_gather, all_to_all, spans_of
from narrowband.collectives.traffic import all_gather_nbytes, all_reduce_nbytes
from narrowband.kernels import Findings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.codecs import Codec
    from narrowband.collectives.engine import Job
    from narrowband.collectives.operand import Operand
    from narrowband.collectives.peers import Peers
    from narrowband.feedback import State

__all__ = ["ScatterReduce"]

_T = TypeVar("_T")

_FP16_MAX = torch.finfo(torch.float16).max

#: XORed with the seed, so that the second encoding draws other random numbers than the first.
_SECOND_DRAW = 0x5BD1E995


class ScatterReduce(Exchange):
    """Average by all-to-all and all-gather of chunks; see the module."""

    name: ClassVar[str] = "scatter_reduce"
    overhead_nbytes: ClassVar[int] = 1 << 16  # 0.5 ms at 1 Gbit/s
    has_owners: ClassVar[bool] = True
    measures_late: ClassVar[bool] = True

    @staticmethod
    def traffic_nbytes(nbytes: int, size: int) -> int:
        return all_reduce_nbytes(nbytes, size)

    @classmethod
    def message_nbytes(cls, layers: Sequence[Sent], size: int, state: State | None) -> tuple[float, ...]:  # noqa: ARG003
        sizes = [Chunked(each.codec, size).all_sizes(numel_of(each.shape)).roll(-each.place) for each in layers]
        to_each = torch.stack(sizes).sum(0) + TRAILER
        return (size - 1) * int(to_each.sum()) / size, all_gather_nbytes(int(to_each.max()), size)

    @classmethod
    def first_of(cls, layers: Sequence[Sent], size: int, state: State | None) -> float:  # noqa: ARG003
        sizes = [Chunked(each.codec, size).all_sizes(numel_of(each.shape)) for each in layers]
        return all_gather_nbytes(sum(int(own.sum()) + TRAILER for own in sizes), size) // size

    @staticmethod
    def uses_pairs(size: int) -> bool:
        return size > 1

    @staticmethod
    def obstacle(codec: Codec, feedback: State | None) -> str | None:
        if feedback is not None and feedback.incremental:
            return (
                f"collective='scatter_reduce' encodes sums again, and {feedback.name} would add up the errors of that "
                "from step to step; use 'all_gather' or 'auto'"
            )
        if not codec.requantizes:
            return (
                f"collective='scatter_reduce' encodes sums again, and {codec} would drop most of a sum; use "
                "'all_gather' or 'auto'"
            )
        if feedback is None or codec.exact:
            return None
        if not feedback.keeps_owner_errors:
            return (
                f"collective='scatter_reduce' encodes sums again, and {feedback.name} cannot keep the error of that; "
                "use 'all_gather' or 'auto'"
            )
        if codec.lost_share >= 1:
            return (
                f"collective='scatter_reduce' encodes sums again, and with {codec} the error of that would grow from "
                f"step to step: its square is {codec.lost_share:.3g} times the squared norm of normally distributed "
                "values; use 'all_gather' or 'auto', or more bits"
            )
        return None

    @staticmethod
    def goes_ahead(codec: Codec) -> bool:
        return codec.fixed_size

    def __init__(self, operands: Sequence[Operand], peers: Peers, *, measure: bool, state: State | None = None) -> None:
        super().__init__(operands, peers, measure=measure, state=state)
        #: The chunks whose means this rank has encoded with feedback, and their new errors.
        self._errors: list[tuple[_Chunk, Tensor]] = []

    def _codec(self, operand: Operand) -> Chunked:
        return Chunked(operand.codec, self.peers.size)

    def _by_owner(self, operand: Operand, of_chunks: Sequence[_T]) -> list[_T]:
        """Return what each rank's chunk has, from what the chunks have in order.

        Which ranks own the longer chunks rotates from tensor to tensor, because the rank with the most bytes sets the
        length of the all-gather.
        """
        turn = operand.index % self.peers.size
        return [*of_chunks[turn:], *of_chunks[:turn]]

    def _cuts(self, operand: Operand) -> list[slice]:
        """Return where the chunk of each rank lies."""
        return self._by_owner(operand, self._codec(operand).cut(operand.x.numel()))

    @property
    def first_nbytes(self) -> int:
        size = self.peers.size
        return all_gather_nbytes(sum(payload.numel() + TRAILER for payload in self._payloads), size) // size

    def job(self) -> Job:
        size, rank, device = self.peers.size, self.peers.rank, self.operands[0].x.device
        begin = time.perf_counter()
        sizes = [self._codec(operand).sizes(operand.x.numel()) for operand in self.operands]
        of_ranks = [self._by_owner(operand, row) for operand, row in zip(self.operands, sizes, strict=True)]
        self._columns = [[row[j] for row in of_ranks] for j in range(size)]  # payload sizes of each rank's chunks
        to_each = [sum(column) + TRAILER for column in self._columns]
        send = self._to_owners([spans_of(row) for row in sizes])
        received = torch.empty(size, to_each[rank], dtype=torch.uint8, device=device)
        self.encode_seconds += time.perf_counter() - begin
        to_others = [(operand, sum(row) - row[rank]) for operand, row in zip(self.operands, of_ranks, strict=True)]
        self._count(send.numel() - to_each[rank], to_others)
        queue: QueueName = "group" if self.peers.pairs is None else "pairs"
        from_each = [to_each[rank]] * size
        yield Transfer(lambda: all_to_all(received, send, from_each, to_each, self.peers), queue, later=["group"])
        begin = time.perf_counter()
        second = torch.zeros(max(to_each), dtype=torch.uint8, device=device)
        bad = received[:, -TRAILER:].any()
        with self._noting(Findings.OWN):
            finite = self._average_own(received, second)
        if self.findings is None:
            self._locally_finite = finite and not bool(bad)
        else:
            self.findings.note(Findings.OWN, bad=not finite)  # of loops that knew at once
            self.findings.note(Findings.ANY, bad)
        second[-TRAILER:] = self._trailer(device)
        self._received = torch.empty(size, second.numel(), dtype=torch.uint8, device=device)
        self.decode_seconds += time.perf_counter() - begin
        self._count(all_gather_nbytes(second.numel(), size), zip(self.operands, self._columns[rank], strict=True))
        yield Transfer(lambda: all_gather(self._received, second, self.peers))
        bad = self._received[:, -TRAILER:].any()
        if self.findings is None:
            self.finite = not bool(bad)
        else:
            self.findings.note(Findings.ANY, bad)

    def _to_owners(self, spans: Sequence[Sequence[slice]]) -> Tensor:
        """Return the payloads of all chunks, owner by owner, with one trailer for each owner.

        Args:
            spans: of each operand's payload, where those of its chunks lie.
        """
        trailer = self._trailer(self.operands[0].x.device)
        chunks = [
            self._by_owner(operand, [payload[span] for span in own])
            for operand, payload, own in zip(self.operands, self._payloads, spans, strict=True)
        ]
        return torch.cat([part for owner in zip(*chunks, strict=True) for part in (*owner, trailer)])

    def _average_own(self, received: Tensor, second: Tensor) -> bool:
        """Average the chunks that this rank owns, and encode the means into ``second``.

        Returns:
            Whether all of them are finite; True where kernels record it on the device.
        """
        spans = spans_of(self._columns[self.peers.rank])
        cuts = [self._cuts(operand)[self.peers.rank] for operand in self.operands]
        lengths = [cut.stop - cut.start for cut in cuts]
        means = torch.split(torch.empty(sum(lengths), dtype=torch.float32, device=received.device), lengths)
        chunks = [
            _Chunk(operand, cut, span, mean, second[span], operand.seed_of(self.peers.rank) ^ _SECOND_DRAW)
            for operand, cut, span, mean in zip(self.operands, cuts, spans, means, strict=True)
        ]
        finite = True
        for own in alike(self.operands):
            some = [chunks[at] for at in own if lengths[at]]
            self._decode_all(received, [(chunk.operand, chunk.span, chunk.mean) for chunk in some])
            feedback = self.operands[own[0]].feedback
            if feedback is None:
                finite &= self._encode_plain(some)
            else:  # if no rank used the layer, DDP ignores its average: keep the error for later
                unused = [c.operand.key in self._zeros and kernels.all_zero(c.mean) for c in some]
                finite &= self._encode_plain([c for c, idle in zip(some, unused, strict=True) if idle])
                kept = [c for c, idle in zip(some, unused, strict=True) if not idle]
                finite &= self._encode_with_errors(kept, feedback.owner_decay)
        return finite

    def _encode_plain(self, chunks: Sequence[_Chunk]) -> bool:
        """Encode means of one codec; return whether all are finite, or True where kernels record it on the device."""
        if not chunks:
            return True
        codec = chunks[0].operand.codec
        if self.findings is not None and codec.encodes_several:
            seeds = [chunk.seed for chunk in chunks]
            return codec.encode_all([chunk.mean for chunk in chunks], [chunk.out for chunk in chunks], seeds=seeds)
        finite = True
        for chunk in chunks:
            codec.encode(chunk.mean, seed=chunk.seed, out=chunk.out)
            finite &= codec.is_finite(chunk.out, chunk.mean.numel())
        return finite

    def _encode_with_errors(self, chunks: Sequence[_Chunk], decay: float) -> bool:
        """As :meth:`_encode_plain`, after the errors of the last means have been added; keep those of these means."""
        if not chunks:
            return True
        codec, errors = chunks[0].operand.codec, [self._owned(chunk) for chunk in chunks]
        wide = chunks[0].operand.dtype == torch.float32
        if self.findings is not None and codec.encodes_several and wide:
            seeds, outs = [chunk.seed for chunk in chunks], [chunk.out for chunk in chunks]
            means = [chunk.mean for chunk in chunks]
            return codec.encode_all(means, outs, seeds=seeds, residuals=errors, decay=decay)
        finite = True
        for chunk, error in zip(chunks, errors, strict=True):
            finite &= _encode_with_error(chunk, error, decay)
        return finite

    def _owned(self, chunk: _Chunk) -> Tensor:
        """Return this rank's error of a chunk's last mean, of zeros at first, and let the next one take its place."""
        feedback = chunk.operand.feedback
        assert feedback is not None
        error = feedback.owner_error(chunk.operand.key, chunk.cut)
        self._errors.append((chunk, torch.zeros_like(chunk.mean) if error is None else error))
        return self._errors[-1][1]

    def _finish_feedback(self, good: bool) -> None:
        super()._finish_feedback(good)
        errors, former = [error for _, error in self._errors], [chunk.mean for chunk, _ in self._errors]
        if not good:
            for error, before in zip(errors, former, strict=True):
                error.copy_(before)
            return
        if self.findings is not None:
            kernels.restore_all_if(self.findings.place(Findings.ANY), errors, former)
        for chunk, error in self._errors:
            operand = chunk.operand
            assert operand.feedback is not None
            numel, ranks = operand.x.numel(), self.peers.size
            operand.feedback.set_owner_error(operand.key, chunk.cut, error, numel=numel, ranks=ranks)

    def _write(self, good: bool) -> None:
        spans = [spans_of(column) for column in self._columns]
        for own in alike(self.operands):
            some = [self.operands[at] for at in own]
            means = take_means(some) if self._ahead(self._received) else None
            if means is not None:
                flat, width = self._received.view(1, -1), self._received.shape[1]
                chunks = []
                for operand, at, mean in zip(some, own, means, strict=True):
                    for j, cut in enumerate(self._cuts(operand)):
                        place = slice(j * width + spans[j][at].start, j * width + spans[j][at].stop)
                        chunks += [(operand, place, mean[cut])] if cut.stop > cut.start else []
                self._decode_all(flat, chunks)
                give_means(some, means, good, self.findings)
                for operand in some:
                    _clamp(operand.average)
                continue
            for at in own:
                with self._mean_of(self.operands[at], good) as mean:
                    for j, cut in enumerate(self._cuts(self.operands[at])):
                        _decode(self.operands[at].codec, self._received[j, spans[j][at]], mean.view(-1)[cut])
        del self._received

    def _decode_all(self, rows: Tensor, chunks: Sequence[tuple[Operand, slice, Tensor]]) -> None:
        """Decode means of chunks of one codec, with few kernel launches on a GPU.

        Args:
            rows: the payloads of each rank.
            chunks: for each, its operand, the bytes of a row that hold its payload, and memory for the mean.
        """
        if not chunks:
            return
        codec, size = chunks[0][0].codec, len(rows)
        if self._ahead(rows) and codec.decodes_several:
            _, places, outs = zip(*chunks, strict=True)
            shapes, seeds = [(out.numel(),) for out in outs], [[0] * size] * len(outs)
            codec.decode_means(rows, places, outs, shapes=shapes, seeds=seeds)
        else:
            for _, span, mean in chunks:
                codec.decode_mean(rows[:, span], mean, seeds=[0] * size)

    def _ahead(self, x: Tensor) -> bool:
        return self.findings is not None or runs_behind(x)


class _Chunk(NamedTuple):
    """A chunk that this rank owns.

    Attributes:
        operand: what it is a part of.
        cut: where it lies in that.
        span: where its payload lies among those of the rank's chunks.
        mean: its mean; after encoding with an error, the former error.
        out: memory for the payload of the mean.
        seed: for that payload.
    """

    operand: Operand
    cut: slice
    span: slice
    mean: Tensor
    out: Tensor
    seed: int


def _encode_with_error(chunk: _Chunk, error: Tensor, decay: float) -> bool:
    """Encode a mean with the error of the last one, and write the new error in its place; return whether all is finite.

    The mean's memory then holds the former error.
    """
    codec, mean, out, dtype = chunk.operand.codec, chunk.mean, chunk.out, chunk.operand.dtype
    if dtype == torch.float32:
        return codec.encode_compensated(
            mean, error, shape=mean.numel(), seed=chunk.seed, out=out, decay=decay, subtract=True
        )[0]
    kernels.compensate(mean, error, decay=decay)
    codec.encode(error, seed=chunk.seed, out=out)
    error.sub_(_decode(codec, out, torch.empty(mean.numel(), dtype=dtype, device=mean.device)))
    return codec.is_finite(out, mean.numel())


def _decode(codec: Codec, payload: Tensor, out: Tensor) -> Tensor:
    """Decode a mean, which was encoded in float32, as it is delivered. In float16 it is clamped: the mean plus an
    owner's error, or the codec's own error, may exceed the range. The owner sends the rest later.
    """
    if out.dtype == torch.float32:
        return codec.decode(payload, out)
    out.copy_(codec.decode(payload, torch.empty_like(out, dtype=torch.float32)))
    return _clamp(out)


def _clamp(x: Tensor) -> Tensor:
    return x.clamp_(-_FP16_MAX, _FP16_MAX) if x.dtype == torch.float16 else x
