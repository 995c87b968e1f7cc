"""One exchange of a step: round contributions, fill packets, send and decode them, and add everything up."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch

from narrowband import kernels
from narrowband.coded.coding import Across, Around, Inside, cut, cut_whole
from narrowband.coded.header import NONE, NOT_FINITE, Header, conclusion, header_nbytes, largest_of, what_differs
from narrowband.coded.stats import CodedStepStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.coded.assignment import Assignment
    from narrowband.coded.coding import Round, Segment
    from narrowband.coded.fixed_point import FixedPoint
    from narrowband.transport.contract import Range, Transport

__all__ = ["BlockExchange"]


class BlockExchange:
    """Collects the contributions of one node's blocks, and adds them up with those of all nodes.

    Args:
        assignment: blocks and nodes.
        rank: this node.
        numels: numbers of elements of the parameters, in their order.
        transport: transport to the other nodes.
        unit: the unit of contributions.
        device: device of the gradients.
        segment_nbytes: the most bytes that a node sends at a time.

    Attributes:
        assignment, rank, transport, device: the arguments.
        numel: number of elements of all parameters together.
        stats: statistics of the current step.
        under_way: whether this node has begun to exchange something in the current step.
    """

    def __init__(
        self,
        assignment: Assignment,
        rank: int,
        numels: Sequence[int],
        transport: Transport,
        unit: FixedPoint,
        device: torch.device,
        segment_nbytes: int | None = None,
    ) -> None:
        self.assignment, self.rank, self.transport, self.device = assignment, rank, transport, device
        self.numel = sum(numels)
        self.stats = CodedStepStats()
        self.under_way = False
        self._unit, self._numels = unit, list(numels)
        self._sizes = {} if segment_nbytes is None else {"nbytes": segment_nbytes}
        self._segments = cut(self.numel, assignment, unit.dtype.itemsize, **self._sizes)
        stride = self._segments[-1].begin + self._segments[-1].numel
        held = assignment.blocks_per_node
        self._contributions = torch.zeros(held, stride, dtype=torch.float32, device=device)
        self._empty = [True] * held
        self._codes = torch.zeros(held * stride, dtype=unit.dtype, device=device)
        self._rounds: list[Round] = []
        if assignment.group > assignment.redundancy:
            self._rounds.append(Inside(assignment, rank, unit.dtype, stride))
        if assignment.groups > 1:
            self._rounds.append(Across(assignment, rank))
        self._coded = self._rounds, self._segments
        self._sum = torch.empty(stride, dtype=torch.int32, device=device)
        self._pool: dict[int, Tensor] = {}

    @property
    def bits(self) -> int:
        """Bits of a number on the wire."""
        return 8 * self._codes.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes of packets and headers that this node hands to the transport in one exchange."""
        packets = sum(this.nbytes(segment, self.rank) for this in self._rounds for segment in self._segments)
        return packets + header_nbytes(self.assignment.blocks_per_node) + header_nbytes(0) * (len(self._rounds) - 1)

    # ---- contributions -----------------------------------------------------------------------------------------------

    def add(self, row: int, gradients: Sequence[Tensor | None], weight: float) -> None:
        """Add ``weight`` times the gradients of all parameters to the contribution of this node's ``row``-th block."""
        begin = 0
        for numel, gradient in zip(self._numels, gradients, strict=True):
            part = self._contributions[row, begin : begin + numel]
            begin += numel
            if gradient is None:
                if self._empty[row]:
                    part.zero_()
            elif not self._empty[row]:
                part.view(gradient.shape).add_(gradient, alpha=weight)
            elif gradient.dtype == torch.float32:
                torch.mul(gradient, weight, out=part.view(gradient.shape))
            else:
                part.view(gradient.shape).copy_(gradient).mul_(weight)
        self._empty[row] = False

    def clear(self) -> None:
        """Reset the contributions to zero."""
        self._empty = [True] * len(self._empty)

    # ---- with whom ---------------------------------------------------------------------------------------------------

    @property
    def goes_around(self) -> bool:
        """Whether a node is lost, so that the others add up without it and without coding."""
        return isinstance(self._rounds[0], Around)

    def go_around(self, lost: int) -> tuple[int, ...]:
        """Add up without a lost node, and without coding, from now on. Return the remaining nodes."""
        around = Around(self.assignment, self.rank, lost)
        self._rounds, self._segments = [around], cut_whole(self._sum.numel(), **self._sizes)
        self._pool.clear()
        return around.heard

    def take_all(self) -> None:
        """Add up with all nodes, with coding, from now on."""
        self._rounds, self._segments = self._coded
        self._pool.clear()

    # ---- one exchange ------------------------------------------------------------------------------------------------

    def run(self, step: int, samples: int) -> float:
        """Round, send, receive and add up. Return the largest contribution of all nodes. If the unit does not fit it,
        the exchange stops early, and the sum is incomplete.

        Raises:
            RuntimeError: on all nodes, if they are not in the same step, or computed different bits for the same block.
            RanksLostError: a node did not answer.
        """
        self.stats.exchanges += 1
        began = time.perf_counter()
        own_header = self._quantize(step, samples)
        own = self._rounds[0].own
        rows = range(self.assignment.blocks_per_node) if own is None else own
        if rows:
            kernels.fixed_sum(self._codes, [row * self._sum.numel() for row in rows], self._sum)
        else:
            self._sum.zero_()
        self.stats.encode_s += time.perf_counter() - began
        headers = {self.rank: own_header}
        for this in self._rounds:
            headers = self._pass(this, self._segments[0], own_header)
            own_header = conclusion(headers, self.rank, self.assignment)
        if own_header.trouble:
            raise RuntimeError(what_differs(own_header.trouble, headers, self.assignment))
        if self._unit.fits(own_header.magnitude):
            for segment in self._segments[1:]:
                for this in self._rounds:
                    self._pass(this, segment, None)
        return own_header.magnitude

    def average_into(self, out: Tensor) -> None:
        """Write the sum into ``out``, in float32."""
        kernels.fixed_dequantize(self._sum[: out.numel()], out, self._unit.unit)

    def _quantize(self, step: int, samples: int) -> Header:
        """Round the contributions of this node's blocks to codes. Return the header about them."""
        stride = self._contributions.shape[1]
        found = [
            kernels.fixed_quantize(contribution, codes, self._unit.unit, self._unit.limit)
            for contribution, codes in zip(self._contributions, self._codes.view(-1, stride), strict=True)
        ]
        largest = largest_of(magnitude for magnitude, _ in found)
        checksums = tuple(checksum if math.isfinite(magnitude) else NOT_FINITE for magnitude, checksum in found)
        return Header(step, samples, self._unit.exponent, NONE, largest, checksums)

    def _pass(self, this: Round, segment: Segment, header: Header | None) -> dict[int, Header]:
        """Run one round of a segment. Return the headers of the nodes that this one hears, itself included; none if
        ``header`` is None.
        """
        began = time.perf_counter()
        head = b"" if header is None else header.to_bytes()
        nodes = range(self.assignment.nodes)
        buffers = [self._buffer(node, len(head) + this.nbytes(segment, node)) for node in nodes]
        outgoing = buffers[self.rank]
        if head:
            outgoing[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        packets = outgoing[len(head) :]
        if packets.device == self.device:
            this.fill(segment, self._codes, self._sum, packets)
        else:
            here = torch.empty_like(packets, device=self.device)
            this.fill(segment, self._codes, self._sum, here)
            packets.copy_(here)
        others = [node for node in nodes if node != self.rank]
        wanted = [_behind(head, this.wanted(segment, k), hears=k in this.heard) if k in others else [] for k in nodes]
        incoming = [buffers[k] if k in others else None for k in nodes]
        encoded = time.perf_counter()
        self.under_way = True
        self.transport.exchange(outgoing, incoming, wanted)
        arrived = time.perf_counter()
        for node in others:
            if this.wanted(segment, node):
                this.take(segment, node, buffers[node][len(head) :].to(self.device), self._codes, self._sum)
        self.stats.sent_bytes += outgoing.numel()
        self.stats.encode_s += encoded - began
        self.stats.exchange_s += arrived - encoded
        self.stats.decode_s += time.perf_counter() - arrived
        if not head:
            return {}
        return {node: Header.from_bytes(buffers[node][: len(head)].cpu().numpy().tobytes()) for node in this.heard}

    def _buffer(self, node: int, nbytes: int) -> Tensor:
        if node not in self._pool or self._pool[node].numel() < nbytes:
            self._pool[node] = torch.empty(nbytes, dtype=torch.uint8, device=self.transport.device)
        return self._pool[node][:nbytes]

    # ---- numbers for one node ----------------------------------------------------------------------------------------

    def hand_over(self, numbers: Tensor, giver: int, taker: int) -> None:
        """Send int32 numbers from one node to another. All nodes take part in the exchanges."""
        others = [node for node in range(self.assignment.nodes) if node != self.rank]
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        for part in cut_whole(numbers.numel(), **self._sizes):
            piece = numbers[part.begin : part.begin + part.numel].view(torch.uint8)
            places: list[Tensor | None] = [nothing if node in others else None for node in range(self.assignment.nodes)]
            wanted: list[list[Range]] = [[] for _ in places]
            if self.rank != giver:
                places[giver] = piece
            if self.rank == taker:
                wanted[giver] = [(0, piece.numel())]
            self.transport.exchange(piece if self.rank == giver else nothing, places, wanted)
            self.stats.sent_bytes += piece.numel() * (self.rank == giver)


def _behind(head: bytes, ranges: Sequence[Range], *, hears: bool) -> list[Range]:
    """Shift ranges behind the header that a buffer begins with, and add the header's own range if it is wanted.
    Adjacent ranges are merged.
    """
    joined = [(0, len(head))] if head and hears else []
    for start, stop in ((start + len(head), stop + len(head)) for start, stop in ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
