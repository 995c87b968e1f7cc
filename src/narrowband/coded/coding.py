"""Encode and decode the packets of a step: sums of slices inside a group, then sums across groups (algorithms 3 and 4).

A node holds the gradient of each of its blocks as whole numbers of a fixed unit, flattened over the whole model. In a
set S of r+1 nodes of a group, there is a block for every r of these nodes. Each node of S lacks exactly one of these
r+1 blocks: the one that the r others share. A block is cut into r slices, one for each of its holders, ascending. Node
k sends the sum of its r slices (equation 12). A receiver knows all of these slices but one, and subtracts them
(equation 15). So it gets one slice of the block that it lacks from each of the r others (equation 16): one packet of
1/r of a gradient serves r nodes.

All arithmetic is on whole numbers modulo 2**bits, so the subtraction gives the missing slice exactly. Decoded slices
are added to the total at once (equation 17): blocks that a node does not hold are never kept.

A model's vector is sent in *segments*, so that memory for packets does not grow with the model.
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
#: The most bytes that a node sends at a time. The packets of each other node take as much memory.
SEGMENT_NBYTES = 16 << 20


@dataclass(frozen=True)
class Segment:
    """A part of the vector that is exchanged at once.

    Attributes:
        begin: index of its first element.
        numel: number of elements; r slices.
        slice: number of elements of a slice.
    """

    begin: int
    numel: int
    slice: int


def cut(numel: int, assignment: Assignment, itemsize: int, nbytes: int = SEGMENT_NBYTES) -> list[Segment]:
    """Cut a vector of ``numel`` elements into segments for each of which a node sends at most ``nbytes``.

    The last segment extends beyond the vector such that its slices are equally long, and multiples of 4 bytes: the
    vector must be padded with zeros.
    """
    r = assignment.redundancy
    step = r * (ALIGN // itemsize)
    padded = -(-max(numel, 1) // step) * step
    whole = max(step, int(nbytes / (4 * max(assignment.load(bits=8 * itemsize), 1 / r))) // step * step)
    return [
        Segment(begin, min(whole, padded - begin), min(whole, padded - begin) // r) for begin in range(0, padded, whole)
    ]


def cut_whole(numel: int, nbytes: int = SEGMENT_NBYTES) -> list[Segment]:
    """Cut a padded vector of ``numel`` elements into segments that are sent uncoded, in int32."""
    whole = max(1, nbytes // 4)
    return [Segment(begin, size, size) for begin in range(0, numel, whole) for size in (min(whole, numel - begin),)]


class Round(ABC):
    """One exchange of a segment: what each node sends, which part this node wants, and how it adds that to the sum."""

    #: The nodes whose headers this node wants.
    heard: tuple[int, ...]
    #: Rows of this node's own blocks that are added to the total first; None: all.
    own: tuple[int, ...] | None = None

    @abstractmethod
    def nbytes(self, segment: Segment, sender: int) -> int:
        """Return the number of bytes that a node sends."""

    @abstractmethod
    def wanted(self, segment: Segment, sender: int) -> list[Range]:
        """Return the half-open ranges of the sender's bytes that this node wants, ascending."""

    @abstractmethod
    def fill(self, segment: Segment, held: Tensor, total: Tensor, out: Tensor) -> None:
        """Write what this node sends into ``out`` (uint8).

        Args:
            segment: the segment that is exchanged.
            held: the codes of this node's blocks, one after the other, flat.
            total: int32; the sum of these codes, and of everything that has arrived since.
            out: the buffer for this node's bytes.
        """

    @abstractmethod
    def take(self, segment: Segment, sender: int, received: Tensor, held: Tensor, total: Tensor) -> None:
        """Decode the bytes that a node sent, and add them to ``total``."""


class Inside(Round):
    """Coded packets among the nodes of a group.

    Args:
        assignment: blocks and nodes.
        rank: this node.
        dtype: dtype of codes and packets: int32, int16 or int8.
        stride: number of elements of a padded vector.
    """

    def __init__(self, assignment: Assignment, rank: int, dtype: torch.dtype, stride: int) -> None:
        self.heard = members = assignment.members(rank)
        self._rank, self._dtype, self._stride = rank, dtype, stride
        self._row = {assignment.holders[block]: row for row, block in enumerate(assignment.held(rank))}
        sets = list(combinations(members, assignment.redundancy + 1))
        #: For each node, the sets of r+1 nodes for which it sends a packet, in the order of the packets.
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
        """Return where, in the codes of this node's blocks, the slices begin that ``sender`` adds up in a packet: one
        slice of each block that the sender shares with these nodes, except the block that ``lacking`` does not hold.
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
    """Sums across groups: node i of each group sends the i-th of g parts of its group's sum, in int32, to all other
    groups.

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
        """Return the first and last (exclusive) element of the part that a node sends."""
        at = node % self._group
        first, last = (segment.begin + segment.numel * k // self._group for k in (at, at + 1))
        return first, last


class Around(Round):
    """Sums without coding, after a node is lost: the first remaining holder of each block is responsible for it. Every
    node adds up the blocks that it is responsible for, and sends the sum, in int32, to all others.

    Args:
        assignment: blocks and nodes; each block is held by at least two nodes.
        rank: this node.
        lost: the node that the others go on without.
    """

    def __init__(self, assignment: Assignment, rank: int, lost: int) -> None:
        self.heard = tuple(node for node in range(assignment.nodes) if node != lost)
        #: The node that is responsible for each block.
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
