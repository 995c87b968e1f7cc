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
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband import kernels
from narrowband.codecs.base import numel_of
from narrowband.collectives.chunked import Chunked
from narrowband.collectives.engine import QueueName, Transfer
from narrowband.collectives.exchange import TRAILER, Exchange, Sent
from narrowband.collectives.primitives import all_gather, all_to_all, spans_of
from narrowband.collectives.traffic import all_gather_nbytes, all_reduce_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.codecs import Codec
    from narrowband.collectives.engine import Job
    from narrowband.collectives.operand import Operand
    from narrowband.feedback import State

__all__ = ["ScatterReduce"]

_FP16_MAX = torch.finfo(torch.float16).max

#: XORed with the seed, so that the second encoding draws other random numbers than the first.
_SECOND_DRAW = 0x5BD1E995


class ScatterReduce(Exchange):
    """Average by all-to-all and all-gather of chunks; see the module."""

    name: ClassVar[str] = "scatter_reduce"
    overhead_nbytes: ClassVar[int] = 1 << 16  # 0.5 ms at 1 Gbit/s
    has_owners: ClassVar[bool] = True

    @staticmethod
    def traffic_nbytes(nbytes: int, size: int) -> int:
        return all_reduce_nbytes(nbytes, size)

    @classmethod
    def message_nbytes(cls, layers: Sequence[Sent], size: int, state: State | None) -> tuple[float, ...]:  # noqa: ARG003
        sizes = [Chunked(each.codec, size, each.place).all_sizes(numel_of(each.shape)) for each in layers]
        to_each = torch.stack(sizes).sum(0) + TRAILER
        return (size - 1) * int(to_each.sum()) / size, all_gather_nbytes(int(to_each.max()), size)

    @classmethod
    def first_of(cls, layers: Sequence[Sent], size: int, state: State | None) -> float:  # noqa: ARG003
        sizes = [Chunked(each.codec, size, each.place).all_sizes(numel_of(each.shape)) for each in layers]
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

    def _codec(self, operand: Operand) -> Chunked:
        return Chunked(operand.codec, self.peers.size, operand.index)

    @property
    def first_nbytes(self) -> int:
        size = self.peers.size
        return all_gather_nbytes(sum(payload.numel() + TRAILER for payload in self._payloads), size) // size

    def job(self) -> Job:
        size, rank, device = self.peers.size, self.peers.rank, self.operands[0].x.device
        begin = time.perf_counter()
        sizes = [self._codec(operand).sizes(operand.x.numel()) for operand in self.operands]
        self._columns = [[row[j] for row in sizes] for j in range(size)]  # payload sizes of each rank's chunks
        to_each = [sum(column) + TRAILER for column in self._columns]
        send = self._by_owner(sizes, torch.empty(sum(to_each), dtype=torch.uint8, device=device))
        received = torch.empty(size, to_each[rank], dtype=torch.uint8, device=device)
        self.encode_seconds += time.perf_counter() - begin
        to_others = [(operand, sum(row) - row[rank]) for operand, row in zip(self.operands, sizes, strict=True)]
        self._count(send.numel() - to_each[rank], to_others)
        queue: QueueName = "group" if self.peers.pairs is None else "pairs"
        from_each = [to_each[rank]] * size
        yield Transfer(lambda: all_to_all(received, send, from_each, to_each, self.peers), queue, later=["group"])
        begin = time.perf_counter()
        second = torch.zeros(max(to_each), dtype=torch.uint8, device=device)
        self._average_own(received, second)
        self._received = torch.empty(size, second.numel(), dtype=torch.uint8, device=device)
        self.decode_seconds += time.perf_counter() - begin
        self._count(all_gather_nbytes(second.numel(), size), zip(self.operands, self._columns[rank], strict=True))
        yield Transfer(lambda: all_gather(self._received, second, self.peers))
        self.finite = not bool(self._received[:, -1].any())

    def _by_owner(self, sizes: Sequence[Sequence[int]], send: Tensor) -> Tensor:
        """Write the payloads of all chunks into ``send``, owner by owner, with one trailer for each owner."""
        spans = [spans_of(row) for row in sizes]
        at = 0
        for owner in range(self.peers.size):
            for payload, row in zip(self._payloads, spans, strict=True):
                chunk = payload[row[owner]]
                send[at : at + chunk.numel()] = chunk
                at += chunk.numel()
            send[at : at + TRAILER] = 0 if self._locally_finite else 1
            at += TRAILER
        return send

    def _average_own(self, received: Tensor, second: Tensor) -> None:
        """Average the chunks that this rank owns, and encode the means into ``second``, with a trailer."""
        size, rank = self.peers.size, self.peers.rank
        finite = not bool(received[:, -1].any())
        self._errors: list[Tensor | None] = []  # of encoding the means; None without feedback
        for operand, span in zip(self.operands, spans_of(self._columns[rank]), strict=True):
            cut = self._codec(operand).cut(operand.x.numel())[rank]
            mean = torch.empty(cut.stop - cut.start, dtype=torch.float32, device=received.device)
            operand.codec.decode_mean(received[:, span], mean, seeds=[0] * size)
            feedback = operand.feedback
            if feedback is not None and kernels.all_zero(mean):
                feedback = None  # no rank used the layer, so DDP ignores its average: keep the error for later
            before = None if feedback is None else feedback.owner_error(operand.key, cut)
            if before is not None:
                mean += before
            seed = operand.seed_of(rank) ^ _SECOND_DRAW
            operand.codec.encode(mean, seed=seed, out=second[span])
            finite &= operand.codec.is_finite(second[span], mean.numel())
            if feedback is None:
                self._errors.append(None)
            elif operand.dtype == torch.float32:
                self._errors.append(operand.codec.decode(second[span], mean, seed=seed, weight=-1.0, accumulate=True))
            else:
                arrived = torch.empty(mean.numel(), dtype=operand.dtype, device=mean.device)
                self._errors.append(mean.sub_(_decode(operand.codec, second[span], arrived)))
        second[-TRAILER:] = 0 if finite else 1

    def _finish_feedback(self, good: bool) -> None:
        super()._finish_feedback(good)
        if not good:
            return
        for operand, error in zip(self.operands, self._errors, strict=True):
            if error is not None:
                assert operand.feedback is not None
                numel, ranks = operand.x.numel(), self.peers.size
                cut = self._codec(operand).cut(numel)[self.peers.rank]
                operand.feedback.set_owner_error(operand.key, cut, error, numel=numel, ranks=ranks)

    def _write(self, good: bool) -> None:
        spans = [spans_of(column) for column in self._columns]
        for i, operand in enumerate(self.operands):
            with self._mean_of(operand, good) as mean:
                for j, cut in enumerate(self._codec(operand).cut(operand.x.numel())):
                    _decode(operand.codec, self._received[j, spans[j][i]], mean.view(-1)[cut])
        del self._received


def _decode(codec: Codec, payload: Tensor, out: Tensor) -> Tensor:
    """Decode a mean as it is delivered. In float16 it is clamped: the mean plus an owner's error, or the codec's own
    error, may exceed the range. The owner sends the rest later.
    """
    codec.decode(payload, out)
    return out.clamp_(-_FP16_MAX, _FP16_MAX) if out.dtype == torch.float16 else out
