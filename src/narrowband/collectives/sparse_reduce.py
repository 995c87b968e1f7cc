"""Sparse reduce: each rank adds up the elements that it owns, and sends the largest sums to all ranks.

Among few ranks, payloads of top-k are all-gathered: every rank receives all N payloads, (N−1) · P bytes per rank.
Sparse reduce sends each of a rank's k elements to the element's owner only. The owner adds up the elements that it
receives, and sends its 2·k/N largest sums to all ranks. So a rank sends about (k + 2·k) · (N−1)/N elements, as in
Ok-Topk (Li & Hoefler, PPoPP'22, arXiv 2201.07598), whose bound is 6k numbers, where an element is two numbers.

A sum that is not among the largest is not delivered. Every rank that contributed to it keeps its contribution in its
own residual, as in Ok-Topk's algorithm 2. So the sum is kept: what was delivered, plus the mean of all residuals, is
the mean of all gradients. Sums travel in float32, so that nothing is lost on the way back.

Ok-Topk cuts the tensor into N ranges, and moves their bounds from step to step until owners have about as many elements
each. Here an owner's elements are spread over the whole tensor in small blocks (:mod:`narrowband.kernels.shares`),
which balances owners wherever the largest elements lie. There are no bounds to move, to communicate or to store.

Message sizes are fixed as soon as the number of elements is known. A codec with a threshold keeps another number on
every rank, so ranks exchange these numbers and use the largest. Where a rank has m elements for an owner on average, a
message has room for m + √m. The smallest elements, if there are more, wait in the residual.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband import kernels
from narrowband.codecs import SelectingCodec
from narrowband.codecs.base import aligned, numel_of
from narrowband.collectives.engine import QueueName, Transfer
from narrowband.collectives.exchange import TRAILER, Exchange, Sent, alike, give_means
from narrowband.collectives.primitives import all_gather, all_to_all, spans_of
from narrowband.errors import UnsupportedError
from narrowband.feedback.arrivals import Arrivals
from narrowband.kernels import Findings, Shared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.codecs import Codec, Shape
    from narrowband.collectives.engine import Job
    from narrowband.collectives.operand import Operand
    from narrowband.collectives.peers import Peers
    from narrowband.feedback import State

__all__ = ["SparseReduce"]

#: Sums that all owners together deliver, as a multiple of the elements that one rank sends.
_DELIVERED = 2

_MOST = 2**31 - 1  # indices have 32 bits


def _room(k: int, size: int) -> int:
    """Return how many elements of a tensor a message to one owner has room for, where a rank sends k in all."""
    return -(-k // size) + math.isqrt(k // size) + 1


def _sums(k: int, share: int, size: int) -> int:
    """Return how many sums of that tensor an owner delivers."""
    return min(share, -(-_DELIVERED * k // size))


def _row_nbytes(k: int, n: int) -> int:
    """Return the bytes of k float32 values and their indices, which are below n."""
    return 4 * k + aligned(kernels.elias_fano_nbytes(k, n))


class SparseReduce(Exchange):
    """Average sparse tensors by their elements' owners; see the module."""

    name: ClassVar[str] = "sparse_reduce"
    overhead_nbytes: ClassVar[int] = 1 << 16
    asks_late: ClassVar[bool] = True
    measures_late: ClassVar[bool] = True
    delivers_all: ClassVar[bool] = False
    #: An all-gather delivers everything that was sent, so it is preferred up to twice the traffic.
    handicap: ClassVar[float] = 2.0

    @staticmethod
    def traffic_nbytes(nbytes: int, size: int) -> int:
        return (size - 1) * nbytes * (1 + _DELIVERED) // size

    @classmethod
    def layer_traffic_nbytes(cls, codec: Codec, shape: Shape, nbytes: int, size: int) -> int:
        if not isinstance(codec, SelectingCodec) or size == 1:
            return cls.traffic_nbytes(nbytes, size)
        k, share = codec.kept(shape), kernels.share_numel(numel_of(shape), size)
        return (size - 1) * (_row_nbytes(_room(k, size), share) + _row_nbytes(_sums(k, share, size), share))

    @classmethod
    def message_nbytes(cls, layers: Sequence[Sent], size: int, state: State | None) -> tuple[float, ...]:  # noqa: ARG003
        shares = [kernels.share_numel(numel_of(each.shape), size) for each in layers]
        kept = [each.codec.kept(each.shape) for each in layers if isinstance(each.codec, SelectingCodec)]
        room = sum(_room(k, size) for k in kept)
        sums = sum(_sums(k, share, size) for k, share in zip(kept, shares, strict=True))
        return tuple((size - 1) * (_row_nbytes(number, sum(shares)) + TRAILER) for number in (room, sums))

    @classmethod
    def first_of(cls, layers: Sequence[Sent], size: int, state: State | None) -> float:  # noqa: ARG003
        return (size - 1) * sum(each.codec.payload_nbytes(each.shape) for each in layers) // size

    @staticmethod
    def uses_pairs(size: int) -> bool:
        return size > 1

    @staticmethod
    def obstacle(codec: Codec, feedback: State | None) -> str | None:
        if not codec.keeps_elements:
            return (
                "collective='sparse_reduce' needs a codec that sends elements of the whole tensor unchanged, in "
                f"float32, and takes the mean over all ranks; {codec} does not. Use 'all_gather' or 'auto'"
            )
        if feedback is None or not feedback.commits_arrivals:
            return (
                "collective='sparse_reduce' delivers only the largest sums, and needs a feedback that keeps the rest; "
                "use '+ef' or dgc, or 'all_gather'"
            )
        return None

    @staticmethod
    def goes_ahead(codec: Codec) -> bool:
        return isinstance(codec, SelectingCodec) and codec.encodes_several

    def __init__(self, operands: Sequence[Operand], peers: Peers, *, measure: bool, state: State | None = None) -> None:
        super().__init__(operands, peers, measure=measure, state=state)
        #: Index of operand → (indices, values): payloads that had to be decoded to count their elements.
        self._elements: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def first_nbytes(self) -> int:
        nbytes = sum(operand.codec.payload_nbytes(operand.shape) for operand in self.operands)
        return (self.peers.size - 1) * nbytes // self.peers.size

    def job(self) -> Job:
        size, device = self.peers.size, self.operands[0].x.device
        numbers = [_kept(operand) for operand in self.operands]
        if None in numbers:
            mine = self._counted(numbers)
            of_all = torch.empty(size, len(mine), dtype=torch.int64, device=device)
            yield Transfer(lambda: all_gather(of_all, mine, self.peers), later=["group", "pairs"])
            self._count((size - 1) * mine.nbytes, [(operand, 8) for operand in self.operands])
            numbers = of_all.amax(0).tolist()
        begin = time.perf_counter()
        self._lay_out([number or 0 for number in numbers])
        send = torch.zeros(size, self._row + TRAILER, dtype=torch.uint8, device=device)
        self._write_rows(send)
        received = torch.empty_like(send)
        self.encode_seconds += time.perf_counter() - begin
        self._count(send.numel() - self._row - TRAILER, _widths(self.operands, self._rooms))
        queue: QueueName = "group" if self.peers.pairs is None else "pairs"
        sizes = [self._row + TRAILER] * size
        yield Transfer(lambda: all_to_all(received, send.view(-1), sizes, sizes, self.peers), queue, later=["group"])
        begin = time.perf_counter()
        second = torch.zeros(_row_nbytes(self._number, self._share) + TRAILER, dtype=torch.uint8, device=device)
        self._add_up(received, second)
        arrived = torch.empty(size, second.numel(), dtype=torch.uint8, device=device)
        self.decode_seconds += time.perf_counter() - begin
        self._count((size - 1) * second.numel(), _widths(self.operands, self._sums))
        yield Transfer(lambda: all_gather(arrived, second, self.peers))
        self.finite = self._are_finite(arrived)
        if self.finite:
            self._read(arrived)

    def _are_finite(self, rows: Tensor) -> bool:
        """Return whether the trailers of these rows say that all is finite; True where it is noted on the device."""
        bad = rows[:, -TRAILER:].any()
        if self.findings is None:
            return not bool(bad)
        self.findings.note(Findings.ANY, bad)
        return True

    def _counted(self, numbers: Sequence[int | None]) -> Tensor:
        """Return how many elements of each tensor this rank sends."""
        counts = []
        for at, (number, operand, payload) in enumerate(zip(numbers, self.operands, self._payloads, strict=True)):
            if number is None and self._locally_finite:
                self._elements[at] = operand.codec.elements(payload, operand.shape)
                counts.append(max(1, self._elements[at][0].numel()))
            else:
                counts.append(1 if number is None else number)  # at least one: no empty message
        return torch.tensor(counts, dtype=torch.int64, device=self.operands[0].x.device)

    def _lay_out(self, numbers: Sequence[int]) -> None:
        """Compute where each tensor lies in an owner's share, in the rows of the first message, and in the second."""
        size = self.peers.size
        shares = [kernels.share_numel(operand.x.numel(), size) for operand in self.operands]
        spans = spans_of(shares)
        self._rooms = spans_of([_room(k, size) if k else 0 for k in numbers])
        self._sums = spans_of([_sums(k, share, size) for k, share in zip(numbers, shares, strict=True)])
        self._share, self._room, self._number = (own[-1].stop for own in (spans, self._rooms, self._sums))
        self._row = _row_nbytes(self._room, self._share)
        #: The tensors that have elements, and where they lie in both messages.
        self._full = [at for at, number in enumerate(numbers) if number]
        self._mine = self._shared(spans, self._rooms)
        self._delivered = self._shared(spans, self._sums)
        if self._share > _MOST:
            raise UnsupportedError(
                f"a message has {self._share} elements per owner, more than 32-bit indices can address; give a smaller "
                "message_nbytes"
            )

    def _shared(self, shares: Sequence[slice], columns: Sequence[slice]) -> list[Shared]:
        parts = zip(self.operands, shares, columns, strict=True)
        return [Shared(operand.x.numel(), operand.index, own, share.start) for operand, share, own in parts]

    def _write_rows(self, rows: Tensor) -> None:
        """Write this rank's elements into ``rows``, one row for each owner."""
        size, device = self.peers.size, rows.device
        rows[:, -TRAILER:] = self._trailer(device)
        if self.findings is None and not self._locally_finite:
            return
        self._own = torch.empty(size, self._room, dtype=torch.int32, device=device)
        self._own_values = torch.empty(size, self._room, dtype=torch.float32, device=device)
        with (self.findings or Findings(device)).noting(Findings.OWN):  # what this rank has encoded is not damaged
            for own in alike(self.operands):
                some = [at for at in own if at in self._full and at not in self._elements]
                payloads, shapes = [self._payloads[at] for at in some], [self.operands[at].shape for at in some]
                if some:
                    found = self.operands[some[0]].codec.elements_all(payloads, shapes)
                    self._elements.update(zip(some, found, strict=True))
        indices, values = ([self._elements[at][part] for at in self._full] for part in (0, 1))
        kernels.split_shares_all([self._mine[at] for at in self._full], indices, values, self._own, self._own_values)
        self._elements.clear()
        _write(self._own, self._own_values, self._share, rows)

    def _add_up(self, received: Tensor, second: Tensor) -> None:
        """Average the elements that this rank owns, and write the largest means into ``second``."""
        second[-TRAILER:] = 1  # until it is known to be finite
        if not self._are_finite(received):
            return
        total = torch.empty(self._share, dtype=torch.float32, device=received.device)
        found = self.findings or Findings(received.device)
        with found.noting(Findings.OWN):
            kernels.sparse_sum_rows(total, received[:, : self._row], self._room, 1.0 / self.peers.size)
            finite = kernels.all_finite(total)
        found.note(Findings.OWN, bad=not finite)  # of loops that know at once
        if self.findings is None and not found.answer():
            return
        chosen = [self._delivered[at] for at in self._full]
        shares = [total[own.first : own.first + kernels.share_numel(own.n, self.peers.size)] for own in chosen]
        indices = kernels.select_topk_all(shares, [own.room for own in chosen])
        torch._foreach_add_(indices, [own.first for own in chosen])
        at = torch.cat([total.new_empty(0, dtype=torch.int32), *indices])
        _write(at[None], total.index_select(0, at)[None], self._share, second[None])
        second[-TRAILER:] = self._trailer(second.device)

    def _read(self, arrived: Tensor) -> None:
        """Decode the delivered means and their indices, and find which of this rank's elements are among them."""
        number = self._number
        self._means = arrived[:, : 4 * number].view(torch.float32)
        noted = self.findings or Findings(arrived.device)
        with noted.noting(Findings.ANY):
            (self._places,) = kernels.elias_fano_decode_all(arrived, [4 * number], [number], [self._share])
        found = torch.searchsorted(self._places, self._own).clamp_(max=number - 1)
        there = self._places.gather(1, found) == self._own
        self._arrivals = Arrivals(self._mine, self._own, torch.where(there, self._own_values, 0.0))
        if self.findings is None:
            noted.answer()

    def _finish_feedback(self, good: bool) -> None:
        if not good:
            super()._finish_feedback(good)
            return
        bad = None if self.findings is None else self.findings.place(Findings.ANY)
        for own in alike(self.operands):
            some = [at for at in own if self.operands[at].compensated]
            if some:
                keys, xs = zip(*((self.operands[at].key, self.operands[at].x) for at in some), strict=True)
                feedback = self.operands[own[0]].feedback
                assert feedback is not None
                with self._noting(Findings.ANY):
                    norms = feedback.commit_arrived(keys, xs, self._arrivals.of(some), bad=bad, measure=self.measure)
                self.norms.update(zip(keys, norms, strict=False))

    def _write(self, good: bool) -> None:
        for own in alike(self.operands):
            several = all(self.operands[at].average.dtype == torch.float32 for at in own)
            for some in [own] if several else [[at] for at in own]:  # float32 for one tensor in 16 bits at a time
                operands = [self.operands[at] for at in some]
                means = [
                    x if x.dtype == torch.float32 else torch.empty(x.numel(), dtype=torch.float32, device=x.device)
                    for x in (operand.average for operand in operands)
                ]
                torch._foreach_zero_(means)
                kernels.add_shares_all(means, [self._delivered[at] for at in some], self._places, self._means)
                give_means(operands, means, good, self.findings)
        del self._means, self._places


def _widths(operands: Sequence[Operand], spans: Sequence[slice]) -> list[tuple[Operand, int]]:
    """Return how many elements each operand has in a message."""
    return [(operand, span.stop - span.start) for operand, span in zip(operands, spans, strict=True)]


def _kept(operand: Operand) -> int | None:
    """Return how many elements every rank sends of an operand; None where this depends on the data."""
    codec = operand.codec
    if not operand.x.numel():
        return 0
    return codec.kept(operand.shape) if isinstance(codec, SelectingCodec) else None


def _write(at: Tensor, values: Tensor, n: int, rows: Tensor) -> None:
    """Write elements into rows of a message: for each row, indices below n, and values."""
    k = at.shape[1]
    rows[:, : 4 * k].view(torch.float32).copy_(values)
    tails = rows[:, 4 * k : 4 * k + kernels.elias_fano_nbytes(k, n)]
    kernels.elias_fano_encode_all(list(at), [n] * len(at), list(tails))
