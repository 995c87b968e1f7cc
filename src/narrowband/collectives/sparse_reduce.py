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
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband import kernels
from narrowband.codecs import SelectingCodec
from narrowband.codecs.base import aligned, numel_of
from narrowband.collectives.engine import QueueName, Transfer
from narrowband.collectives.exchange import TRAILER, Exchange, Sent
from narrowband.collectives.primitives import all_gather, all_to_all, spans_of
from narrowband.errors import UnsupportedError
from narrowband.kernels import Findings

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

    def __init__(self, operands: Sequence[Operand], peers: Peers, *, measure: bool, state: State | None = None) -> None:
        super().__init__(operands, peers, measure=measure, state=state)
        #: Index of operand → (indices, values): payloads that had to be decoded to count their elements.
        self._elements: dict[int, tuple[Tensor, Tensor]] = {}

    def _commits_early(self, operand: Operand) -> bool:
        return False  # which elements are delivered is known at the end only

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
        self.finite = not bool(arrived[:, -1].any())
        if self.finite:
            self._read(arrived)

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
        self._shares = spans_of(shares)
        self._rooms = spans_of([_room(k, size) if k else 0 for k in numbers])
        self._sums = spans_of([_sums(k, share, size) for k, share in zip(numbers, shares, strict=True)])
        self._share, self._room, self._number = (spans[-1].stop for spans in (self._shares, self._rooms, self._sums))
        self._row = _row_nbytes(self._room, self._share)
        if self._share > _MOST:
            raise UnsupportedError(
                f"a message has {self._share} elements per owner, more than 32-bit indices can address; give a smaller "
                "message_nbytes"
            )

    def _write_rows(self, rows: Tensor) -> None:
        """Write this rank's elements into ``rows``, one row for each owner."""
        if not self._locally_finite:
            rows[:, -TRAILER:] = 1
            return
        size, device = self.peers.size, rows.device
        self._own = torch.empty(size, self._room, dtype=torch.int32, device=device)
        self._own_values = torch.empty(size, self._room, dtype=torch.float32, device=device)
        sent = [i for i, room in enumerate(self._rooms) if room.stop > room.start]
        tables = {i: (self._own[:, self._rooms[i]], self._own_values[:, self._rooms[i]]) for i in sent}
        most = []
        with Findings(device).noting(Findings.OWN):  # what this rank has encoded is not damaged
            for i in sent:
                operand, payload = self.operands[i], self._payloads[i]
                if i not in self._elements:
                    self._elements[i] = operand.codec.elements(payload, operand.shape)
                n, turn = operand.x.numel(), operand.index
                most.append(kernels.split_shares(*self._elements[i], *tables[i], n=n, turn=turn))
        for i, number in zip(sent, torch.stack(most).tolist() if most else (), strict=True):  # waits once for all
            local, values = tables[i]
            if number > local.shape[1]:
                _deal_largest(self.operands[i], self._elements[i], local, values, number)
            local += self._shares[i].start
        self._elements.clear()
        for row, at, values in zip(rows, self._own, self._own_values, strict=True):
            _write_row(at, values, self._share, row)

    def _add_up(self, received: Tensor, second: Tensor) -> None:
        """Average the elements that this rank owns, and write the largest means into ``second``."""
        second[-TRAILER:] = 1  # until it is known to be finite
        if bool(received[:, -1].any()):
            return
        total = torch.empty(self._share, dtype=torch.float32, device=received.device)
        found = Findings(received.device)
        with found.noting(Findings.OWN):
            kernels.sparse_sum_rows(total, received[:, : self._row], self._room, 1.0 / self.peers.size)
            finite = kernels.all_finite(total)
        if not (found.answer() and finite):
            return
        at = torch.empty(self._number, dtype=torch.int32, device=received.device)
        for share, sums in zip(self._shares, self._sums, strict=True):
            if sums.stop > sums.start:
                at[sums] = kernels.select_topk(total[share], sums.stop - sums.start).add_(share.start)
        _write_row(at, total.index_select(0, at), self._share, second)
        second[-TRAILER:] = 0

    def _read(self, arrived: Tensor) -> None:
        """Decode the delivered means and their indices, and find which of this rank's elements are among them."""
        number = self._number
        self._means = arrived[:, : 4 * number].view(torch.float32)
        coded = arrived[:, 4 * number : 4 * number + kernels.elias_fano_nbytes(number, self._share)]
        noted = Findings(arrived.device)
        with noted.noting(Findings.OWN):
            rows = [kernels.elias_fano_decode(row, number, self._share) for row in coded.contiguous()]
        self._places = torch.stack(rows)
        found = torch.searchsorted(self._places, self._own).clamp_(max=number - 1)
        # Padding of a row has a value of zero.
        self._there = (self._places.gather(1, found) == self._own) & (self._own_values != 0)
        ends = torch.tensor([room.stop for room in self._rooms], dtype=torch.int64, device=arrived.device)
        until = torch.nn.functional.pad(self._there.sum(0).cumsum(0), (1, 0)).index_select(0, ends).tolist()
        self._delivered = [end - begin for begin, end in pairwise([0, *until])]
        noted.answer()

    def _finish_feedback(self, good: bool) -> None:
        if not good:
            super()._finish_feedback(good)
            return
        parts = zip(self.operands, self._shares, self._rooms, self._delivered, strict=True)
        for operand, share, room, number in parts:
            if not operand.compensated:
                continue
            assert operand.feedback is not None
            whole = kernels.from_share(self._own[:, room] - share.start, turn=operand.index)
            at, order = whole.masked_fill_(~self._there[:, room], _MOST).view(-1).sort()  # how many: the host knows
            at, values = at[:number], self._own_values[:, room].reshape(-1)[order[:number]]
            norms = operand.feedback.commit_arrived(operand.key, operand.x, at, values, measure=self.measure)
            if norms is not None:
                self.norms[operand.key] = norms

    def _write(self, good: bool) -> None:
        for operand, share, sums in zip(self.operands, self._shares, self._sums, strict=True):
            at = kernels.from_share(self._places[:, sums] - share.start, turn=operand.index).view(-1)
            means = self._means[:, sums].reshape(-1)
            n = operand.x.numel()
            means.masked_fill_(at >= n, 0.0)  # a share has whole blocks: the last may reach beyond the tensor
            with self._mean_of(operand, good) as mean:
                flat = mean.view(-1).zero_()
                if n:
                    flat.index_add_(0, at.clamp_(max=n - 1), means.to(flat.dtype))
        del self._means, self._places


def _deal_largest(operand: Operand, elements: tuple[Tensor, Tensor], local: Tensor, values: Tensor, most: int) -> None:
    """Write the largest elements of a tensor into their owners' rows, which have no room for all.

    Args:
        operand: the tensor.
        elements: all of its elements: indices and values.
        local, values: the rows.
        most: the largest number of elements of an owner.
    """
    ranks, room = local.shape
    table, table_values = local.new_empty(ranks, most), values.new_empty(ranks, most)
    kernels.split_shares(*elements, table, table_values, n=operand.x.numel(), turn=operand.index)
    largest = table_values.abs().topk(room, dim=1).indices.sort(dim=1).values
    local.copy_(table.gather(1, largest))
    values.copy_(table_values.gather(1, largest))


def _widths(operands: Sequence[Operand], spans: Sequence[slice]) -> list[tuple[Operand, int]]:
    """Return how many elements each operand has in a message."""
    return [(operand, span.stop - span.start) for operand, span in zip(operands, spans, strict=True)]


def _kept(operand: Operand) -> int | None:
    """Return how many elements every rank sends of an operand; None where this depends on the data."""
    codec = operand.codec
    if not operand.x.numel():
        return 0
    return codec.kept(operand.shape) if isinstance(codec, SelectingCodec) else None


def _write_row(at: Tensor, values: Tensor, n: int, out: Tensor) -> None:
    """Write values and indices (below n) of elements into a row of a message."""
    k = at.numel()
    out[: 4 * k].view(torch.float32).copy_(values)
    kernels.elias_fano_encode(at, n, out[4 * k : 4 * k + kernels.elias_fano_nbytes(k, n)])
