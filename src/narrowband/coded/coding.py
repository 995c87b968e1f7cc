"""What travels in a step: packets that are sums of slices inside a group, then sums across groups (algorithms 3 and 4).

A node holds the gradient of each of its blocks as whole numbers of a fixed unit, flattened over the whole model. In
every set S of r+1 nodes of a group, each node lacks exactly one of the r+1 blocks that r of them share: that of the
others. A block is cut into r slices, one for each of its holders, ascending. Node k sends the sum of the r slices that
are its own (equation 12). Whoever receives it knows all of them but one, subtracts these (equation 15), and so gets,
from each of the r others, its slice of the block it lacked (equation 16): one packet of 1/r of a gradient serves r
nodes.

All arithmetic is that of whole numbers modulo 2**bits, so what is left after subtracting is the slice, to the bit. What
is decoded is added to the total at once (equation 17): blocks that a node does not hold are never kept.

A model's vector is sent in *segments*, so that memory for packets does not grow with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from narrowband import kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.coded.assignment import Assignment
    from narrowband.transport.contract import Range

__all__ = ["Across", "Around", "Inside", "Round", "Segment", "cut", "cut_whole"]

#: Packets start at multiples of this many bytes.
ALIGN = 4
#: What a node sends at a time, in bytes, at most; others' packets take as much from each of them.
SEGMENT_NBYTES = 16 << 20


@dataclass(frozen=True)
class Segment:
    """A part of the vector that is exchanged at once.

    Attributes:
        begin: its first element.
        numel: how many it has; r slices.
        slice: elements of a slice.
    """

    begin: int
    numel: int
    slice: int


def cut(numel: int, assignment: Assignment, itemsize: int, nbytes: int = SEGMENT_NBYTES) -> list[Segment]:
    """Segments of a vector of ``numel`` elements, of which a node's packets take at most ``nbytes`` each.

    The last is longer than the vector by what makes its slices equally long and multiples of 4 bytes: the vector has to
    be padded with zeros.
    """
    r = assignment.redundancy
    step = r * (ALIGN // itemsize)
    padded = -(-max(numel, 1) // step) * step
    whole = max(step, int(nbytes / (4 * max(assignment.load(bits=8 * itemsize), 1 / r))) // step * step)
    return [
        Segment(begin, min(whole, padded - begin), min(whole, padded - begin) // r) for begin in range(0, padded, whole)
    ]


def cut_whole(numel: int, nbytes: int = SEGMENT_NBYTES) -> list[Segment]:
    """Segments of a padded vector of ``numel`` elements that are sent in int32, as they are."""
    whole = max(1, nbytes // 4)
    return [Segment(begin, size, size) for begin in range(0, numel, whole) for size in (min(whole, numel - begin),)]


class Round(ABC):
    """One exchange of a segment: what each node sends, which of it this node wants, and what it does with that."""

    #: The nodes whose news (headers) this node wants.
    heard: tuple[int, ...]
    #: Which of this node's blocks, by their place among them, are added up first; None: all.
    own: tuple[int, ...] | None = None

    @abstractmethod
    def nbytes(self, segment: Segment, sender: int) -> int:
        """Bytes that a node sends."""

    @abstractmethod
    def wanted(self, segment: Segment, sender: int) -> list[Range]:
        """The half-open ranges of these that this node wants, ascending."""

    @abstractmethod
    def fill(self, segment: Segment, held: Tensor, total: Tensor, out: Tensor) -> None:
        """Write what this node sends into ``out`` (uint8).

        Args:
            held: the codes of this node's blocks, one after the other, flat.
            total: int32; their sum, and of whatever arrived since.
        """

    @abstractmethod
    def take(self, segment: Segment, sender: int, received: Tensor, held: Tensor, total: Tensor) -> None:
        """Add what a node sent to ``total``."""


class Inside(Round):
    """Coded packets among the nodes of a group.

    Args:
        assignment: blocks and nodes.
        rank: this node.
        dtype: of codes and packets: int32, int16 or int8.
        stride: elements of a padded vector.
    """

    def __init__(self, assignment: Assignment, rank: int, dtype: torch.dtype, stride: int) -> None:
        self.heard = members = assignment.members(rank)
        self._rank, self._dtype, self._stride = rank, dtype, stride
        self._row = {assignment.holders[block]: row for row, block in enumerate(assignment.held(rank))}
        sets = list(combinations(members, assignment.redundancy + 1))
        #: For each node the sets that it sends a packet in, in their order.
        self._sets = {node: [nodes for nodes in sets if node in nodes] for node in members}

    def nbytes(self, segment: Segment, sender: int) -> int:
        return len(self._sets[self._rank]) * self._packet_nbytes(segment)  # all nodes send equally much

    def wanted(self, segment: Segment, sender: int) -> list[Range]:
        nbytes, ranges = self._packet_nbytes(segment), list[tuple[int, int]]()
        for at, nodes in enumerate(self._sets.get(sender, ())):
            if self._rank in nodes and sender != self._rank:
                ranges.append((at * nbytes, (at + 1) * nbytes))
        return ranges

    def fill(self, segment: Segment, held: Tensor, total: Tensor, out: Tensor) -> None:
        for nodes, packet in zip(self._sets[self._rank], self._packets(segment, out), strict=True):
            kernels.fixed_sum(held, self._slices(segment, nodes, self._rank, lacking=None), packet)

    def take(self, segment: Segment, sender: int, received: Tensor, held: Tensor, total: Tensor) -> None:
        if sender not in self._sets:
            return
        for nodes, packet in zip(self._sets[sender], self._packets(segment, received), strict=True):
            if self._rank in nodes:
                lacked = tuple(node for node in nodes if node != self._rank)
                first = segment.begin + lacked.index(sender) * segment.slice
                subtracted = self._slices(segment, nodes, sender, lacking=self._rank)
                kernels.fixed_decode(packet, held, subtracted, total[first : first + segment.slice])

    def _slices(self, segment: Segment, nodes: tuple[int, ...], sender: int, *, lacking: int | None) -> list[int]:
        """Where the slices begin, among the codes of this node's blocks, that a packet of ``sender`` is the sum of: of
        all blocks that the sender shares with these nodes, but for the one that ``lacking`` does not hold.
        """
        starts = []
        for left_out in nodes:
            if left_out not in (sender, lacking):
                block = tuple(node for node in nodes if node != left_out)
                first = self._row[block] * self._stride + segment.begin
                starts.append(first + block.index(sender) * segment.slice)
        return starts

    def _packet_nbytes(self, segment: Segment) -> int:
        return segment.slice * self._dtype.itemsize

    def _packets(self, segment: Segment, buffer: Tensor) -> Sequence[Tensor]:
        return buffer.view(self._dtype).view(-1, segment.slice).unbind() if buffer.numel() else ()


class Across(Round):
    """Sums of groups: node i of each group sends the i-th g-th of its group's sum, in int32, to all other groups.

    Args:
        assignment: blocks and nodes.
        rank: this node.
    """

    def __init__(self, assignment: Assignment, rank: int) -> None:
        self.heard = tuple(range(assignment.nodes))
        self._rank, self._group = rank, assignment.group

    def nbytes(self, segment: Segment, sender: int) -> int:
        first, last = self._share(segment, sender)
        return 4 * (last - first)

    def wanted(self, segment: Segment, sender: int) -> list[Range]:
        nbytes = self.nbytes(segment, sender)
        return [(0, nbytes)] if nbytes and not self._own(sender) else []

    def fill(self, segment: Segment, held: Tensor, total: Tensor, out: Tensor) -> None:
        first, last = self._share(segment, self._rank)
        out.view(torch.int32).copy_(total[first:last])

    def take(self, segment: Segment, sender: int, received: Tensor, held: Tensor, total: Tensor) -> None:
        if not self._own(sender):
            first, last = self._share(segment, sender)
            total[first:last] += received.view(torch.int32)

    def _own(self, sender: int) -> bool:
        return sender // self._group == self._rank // self._group

    def _share(self, segment: Segment, node: int) -> tuple[int, int]:
        """The elements that this node of its group sends."""
        at = node % self._group
        first, last = (segment.begin + segment.numel * k // self._group for k in (at, at + 1))
        return first, last


class Around(Round):
    """Without coding, where a node is lost: for each block the first of its other holders answers. Every node adds up
    the blocks that it answers for, and sends the sum, in int32, to all others.

    Args:
        assignment: blocks and nodes; each block is held by two nodes at least.
        rank: this node.
        lost: the node that the others go on without.
    """

    def __init__(self, assignment: Assignment, rank: int, lost: int) -> None:
        self.heard = tuple(node for node in range(assignment.nodes) if node != lost)
        #: The node that answers for each block.
        self.answering = tuple(next(k for k in nodes if k != lost) for nodes in assignment.holders)
        self.own = tuple(row for row, block in enumerate(assignment.held(rank)) if self.answering[block] == rank)
        self._rank = rank

    def nbytes(self, segment: Segment, sender: int) -> int:
        return 4 * segment.numel if sender in self.answering else 0

    def wanted(self, segment: Segment, sender: int) -> list[Range]:
        nbytes = self.nbytes(segment, sender)
        return [(0, nbytes)] if nbytes and sender != self._rank else []

    def fill(self, segment: Segment, held: Tensor, total: Tensor, out: Tensor) -> None:
        if self.own:
            out.view(torch.int32).copy_(total[segment.begin : segment.begin + segment.numel])

    def take(self, segment: Segment, sender: int, received: Tensor, held: Tensor, total: Tensor) -> None:
        total[segment.begin : segment.begin + segment.numel] += received.view(torch.int32)
