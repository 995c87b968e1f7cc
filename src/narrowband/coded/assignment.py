"""Assign the blocks of a mini-batch to nodes: every block is computed on r nodes (algorithm 2 of CSSGD).

n nodes form n/g groups of g. A mini-batch of B samples is cut into blocks, C(g, r) for each group. Block i of a group
is computed by combination i of r of its nodes, in lexicographic order. With one group (g = n) this is the paper's
scheme: C(n, r) blocks, of which a node has C(n−1, r−1) (equation 20). The number of blocks grows faster than that of
nodes; groups keep it small. Inside a group packets are coded. Across groups, sums are exchanged: each node of a group
sends a g-th of its group's sum.

What a node sends in a step, in gradients of the whole model:

===============  ======================  ==============================================
                 sent once (multicast)   sent to each node that needs it (unicast)
===============  ======================  ==============================================
inside a group   C(g−1, r) / r           C(g−1, r)
across groups    1/g, if n > g           (n − g) / g
===============  ======================  ==============================================

With one group and multicast, n nodes send (n−r) / ((n−1)·r) of what they would send if each of C(n, r) blocks were
computed once, and its gradient sent to each other node separately (equation 19). Nodes that add up their own blocks
first and send the sum once send 1 gradient (r = g = 1: plain data parallelism). In groups of g = r all nodes compute
the same (*fractional repetition*), and each sends 1/r.

Nodes of different speed may get different *shares* of the work. The size of a block's gradient does not depend on the
number of its samples. So shares change only the sizes of blocks (:mod:`.shares`), not which nodes compute them, nor
what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, combinations

import torch
from torch.utils.data import Sampler

from narrowband.coded.shares import check_shares, uneven_sizes

__all__ = ["Assignment", "CodedSampler"]

#: The most blocks of a group in one mini-batch. A node keeps a gradient of the whole model for each block that it has.
MAX_BLOCKS = 256


@dataclass(frozen=True)
class Assignment:
    """The blocks of a mini-batch, and which nodes compute them.

    Args:
        nodes: number of nodes, n.
        redundancy: number of nodes on which each block is computed, r.
        group: number of nodes that share blocks, g; a divisor of n, and at least r. By default all.
        shares: how much of the work each node does, in any unit, such as samples per second; by default all do equally
            much. No share may exceed 1/r of the sum of its group's. Inside groups of g = r shares are equal, since all
            nodes of such a group compute the same.

    Raises:
        ValueError: numbers that do not fit together, or too many blocks; the message says what is possible.

    Example:
        >>> four = Assignment(nodes=4, redundancy=2)
        >>> four.holders
        ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
        >>> four.held(1), four.sizes(100)
        ((0, 3, 4), (17, 17, 17, 17, 16, 16))
        >>> four.load(), Assignment(4, 2, group=2).load(), Assignment(4, 1, group=1).load()
        (1.5, 0.5, 1.0)

        The last node is half as fast as the others, and computes half as many of 700 samples; it sends as much:

        >>> uneven = Assignment(nodes=4, redundancy=2, shares=(2, 2, 2, 1))
        >>> uneven.work(700), uneven.sizes(700), uneven.load()
        ((400, 400, 400, 200), (166, 168, 66, 166, 68, 66), 1.5)
    """

    nodes: int
    redundancy: int
    group: int = 0
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        n, r, g = self.nodes, self.redundancy, self.group or self.nodes
        object.__setattr__(self, "group", g)
        if n == 1:
            raise ValueError("one rank has nobody to send to; start two or more, as with torchrun --nproc-per-node 3")
        if not 1 <= r < n:
            raise ValueError(
                f"redundancy={r} must be at least 1 and less than the number of ranks, {n}: with {n}, every rank would "
                "compute everything and have nothing to send"
            )
        if n % g or not r <= g <= n:
            fit = [d for d in _divisors(n) if d >= r]
            raise ValueError(
                f"group={g} must divide the number of ranks, {n}, and be at least redundancy={r}; use {_listed(fit)}"
            )
        if math.comb(g, r) > MAX_BLOCKS:
            fit = [d for d in _divisors(n) if d >= r and math.comb(d, r) <= MAX_BLOCKS]
            less = [s for s in range(1, r) if math.comb(g, s) <= MAX_BLOCKS]
            advice = (
                f"group={_listed(fit)}" if fit else f"redundancy={_listed(less)}" if less else "redundancy=1, group=1"
            )
            raise ValueError(
                f"redundancy={r} among {g} nodes cuts a mini-batch into {math.comb(g, r):,} blocks, and "
                f"{MAX_BLOCKS} are allowed; use {advice}"
            )
        if self.shares:
            check_shares(self.shares, n, g, r)

    # ---- blocks ------------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.nodes // self.group

    @property
    def blocks(self) -> int:
        """Number of blocks of a mini-batch."""
        return self.groups * math.comb(self.group, self.redundancy)

    @property
    def blocks_per_node(self) -> int:
        """Number of blocks that a node computes, the same on all nodes."""
        return math.comb(self.group - 1, self.redundancy - 1)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each block the nodes that compute it, ascending."""
        groups = [self.members(first) for first in range(0, self.nodes, self.group)]
        return tuple(nodes for members in groups for nodes in combinations(members, self.redundancy))

    def held(self, rank: int) -> tuple[int, ...]:
        """Return the blocks that a node computes, ascending."""
        return tuple(block for block, nodes in enumerate(self.holders) if rank in nodes)

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the nodes of a node's group, ascending."""
        first = rank // self.group * self.group
        return tuple(range(first, first + self.group))

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Return how many samples each block of a mini-batch of ``samples`` has, at least one. Without shares, sizes
        are as even as possible, larger ones first; with shares, they give every node the samples of :meth:`work`.

        Raises:
            ValueError: fewer samples than blocks.
        """
        return _sizes(self, samples)

    def work(self, samples: int) -> tuple[int, ...]:
        """Return how many samples of a mini-batch of ``samples`` each node computes: ``redundancy * samples`` in all.
        With shares, as nearly proportional to them as whole numbers, and at least one sample per block, allow.
        """
        sizes = self.sizes(samples)
        return tuple(sum(sizes[block] for block in self.held(rank)) for rank in range(self.nodes))

    def rows(self, rank: int, samples: int, length: int = 0) -> list[int]:
        """Return the indices, within a mini-batch, of the samples that a node computes, block after block.

        All nodes have equally many rows, so that a mean over rows divides by the same number everywhere. If a node
        computes fewer samples, its last row is repeated. Repeated rows are not computed, and have no part in the
        gradient.

        Args:
            rank: the node.
            samples: number of samples of the mini-batch.
            length: number of rows; by default the samples of the node with most work.
        """
        sizes = self.sizes(samples)
        starts = list(accumulate(sizes, initial=0))
        own = [place for block in self.held(rank) for place in range(starts[block], starts[block + 1])]
        return own + own[-1:] * ((length or max(self.work(samples))) - len(own))

    def length(self, samples: int, taken: Mapping[int, int]) -> int:
        """Return the number of rows of all nodes: the smallest that no mini-batch of another size has taken, so that
        the number of rows identifies the size of the mini-batch.

        Args:
            samples: number of samples of the mini-batch.
            taken: number of rows → samples of the mini-batches that have it.
        """
        length = max(self.work(samples))
        while taken.get(length, samples) != samples:
            length += 1
        return length

    # ---- load --------------------------------------------------------------------------------------------------------

    def load(self, *, multicast: bool = True, bits: int = 32) -> float:
        """Return what a node sends in a step, in gradients of the whole model in float32 (the table is in
        :mod:`narrowband.coded.assignment`).

        Args:
            multicast: whether a packet that several nodes need is sent once.
            bits: bits of a number inside a group; across groups numbers have 32.
        """
        n, r, g = self.nodes, self.redundancy, self.group
        inside, across = math.comb(g - 1, r) * bits / 32, (n - g) / g
        return inside / r + (1 / g if n > g else 0.0) if multicast else inside + across

    def __str__(self) -> str:
        groups = "" if self.group == self.nodes else f", group={self.group}"
        shares = f", shares={self.shares}" if self.shares else ""
        return f"nodes={self.nodes}, redundancy={self.redundancy}{groups}{shares}"


class CodedSampler(Sampler[list[int]]):
    """A ``batch_sampler`` for a DataLoader: yields, for every mini-batch, the rows that one node computes.

    :meth:`CodedDataParallel.sampler` creates it, and shares ``lengths`` with it, by which the model knows how many
    samples each mini-batch has. All nodes draw the same order. Every sample of an epoch is in exactly one mini-batch,
    on ``redundancy`` nodes.

    Args:
        dataset: anything that has a length.
        batch_size: samples of a mini-batch, over all nodes; the last may have fewer.
        assignment: blocks and nodes.
        rank: this node.
        shuffle: draw a new order for each epoch.
        seed: seed of the order; the same on all nodes.
        drop_last: leave out the last mini-batch if it is smaller.
        lengths: the ``taken`` of :meth:`Assignment.length`, by which the model identifies mini-batches. An epoch
            adds to it when it begins: until then the model may load that of the run that it goes on with.

    Raises:
        ValueError: a mini-batch with fewer samples than there are blocks.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        assignment: Assignment,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        lengths: dict[int, int] | None = None,
    ) -> None:
        self._numel = len(dataset)
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0
        full, rest = divmod(self._numel, batch_size)
        self._batches = [batch_size] * full + [rest] * (rest > 0 and not drop_last)
        self._assignment, self._rank = assignment, rank
        self._lengths = {} if lengths is None else lengths
        for samples in dict.fromkeys(self._batches):
            assignment.sizes(samples)  # raises for too small mini-batches

    def set_epoch(self, epoch: int) -> None:
        """Draw another order, as with a DistributedSampler. Call it before each epoch, on all nodes."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        if self._shuffle:
            draw = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._numel, generator=draw, device="cpu")
        else:
            order = torch.arange(self._numel, dtype=torch.int64, device="cpu")
        rows, begin = {samples: self._rows(samples) for samples in dict.fromkeys(self._batches)}, 0
        for samples in self._batches:
            yield order[begin:][rows[samples]].tolist()
            begin += samples

    def _rows(self, samples: int) -> torch.Tensor:
        """Return the indices, within a mini-batch of this size, of this node's rows."""
        length = self._assignment.length(samples, self._lengths)
        self._lengths[length] = samples
        return torch.tensor(self._assignment.rows(self._rank, samples, length), dtype=torch.int64, device="cpu")


@lru_cache(maxsize=1024)  # called in every step, with few different sizes of mini-batches
def _sizes(assignment: Assignment, samples: int) -> tuple[int, ...]:
    if samples < assignment.blocks:
        raise ValueError(
            f"a mini-batch of {samples} samples is smaller than the {assignment.blocks} blocks that {assignment} cuts "
            "it into; use larger batches, less redundancy or smaller groups (and drop_last=True, if it is the last one)"
        )
    if assignment.shares:
        return uneven_sizes(assignment.shares, assignment.group, assignment.redundancy, samples)
    least, more = divmod(samples, assignment.blocks)
    return tuple(least + (block < more) for block in range(assignment.blocks))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _listed(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
