"""Uneven shares: how many samples each block has, so that every node computes what it is capable of.

The paper cuts a mini-batch into blocks of equal size, and says that the samples of a node can be adjusted to what the
node is capable of (section 2.1 of CSSGD; a₁ … a_p in section 2.4 are blocks of any size), but not how. Here it is done
by the sizes of blocks alone: who holds a block, and what travels, stays as it is.

A group of g nodes with B samples computes r·B, of which node i computes ℓᵢ = r·B·wᵢ, where wᵢ is its share of the
group's shares. Sizes a_S ≥ 0 of all C(g, r) blocks with Σ_{S∋i} a_S = ℓᵢ exist if and only if no node computes more
than all samples: ℓᵢ ≤ B, or wᵢ ≤ 1/r. (Each sample is on r *different* nodes, so more is impossible.) They are found in
two parts:

1. All blocks get equally many samples, as many as all can have; then those that can have more, again equally many; and
   so on. So blocks are about as even as shares let them be, which fewer bits need: the largest block sets the unit.
2. The few samples that are left are put where the ℓᵢ are not met yet. What they lack is laid end to end on a line, and
   the line is cut into r pieces of equal length. A sample goes to the r nodes that lie at its place in each of the
   pieces. No node lies there twice, since none is longer than a piece (McNaughton 1959, *Scheduling with deadlines and
   loss functions*, DOI 10.1287/mnsc.6.1.1).

So every ℓᵢ is met to the sample. All arithmetic is that of whole numbers and fractions: nodes of different kinds find
the same sizes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

__all__ = ["check_shares", "uneven_sizes"]


def check_shares(shares: Sequence[float], nodes: int, group: int, redundancy: int) -> None:
    """Raise ValueError for shares that nodes cannot have, and say what would do.

    Args:
        shares: of each node.
        nodes: how many there are, n.
        group: how many share blocks, g.
        redundancy: on how many of these each block is computed, r.
    """
    if len(shares) != nodes or not all(0 < share < math.inf for share in shares):
        raise ValueError(
            f"shares={tuple(shares)} must be a positive number for each of the {nodes} nodes, such as the samples that "
            "it computes in a second"
        )
    for first in range(0, nodes, group):
        own = list(map(Fraction, shares[first : first + group]))
        largest = max(own)
        if largest * redundancy > sum(own):
            among = "all nodes" if group == nodes else f"nodes {first} to {first + group - 1}, its group"
            fewer = max(r for r in range(1, redundancy + 1) if largest * r <= sum(own))
            raise ValueError(
                f"shares={tuple(shares)}: node {first + own.index(largest)} would do {float(largest / sum(own)):.3g} "
                f"of the work of {among}. With redundancy={redundancy} it can do {1 / redundancy:.3g} at most, every "
                f"sample once. Use redundancy={fewer}, {'larger groups, ' if group < nodes else ''}or a smaller share "
                "for this node"
            )


def uneven_sizes(shares: Sequence[float], group: int, redundancy: int, samples: int) -> tuple[int, ...]:
    """How many samples each block has, one at least; groups one after another, blocks in lexicographic order.

    Args:
        shares: of each node; :func:`check_shares` has accepted them.
        group: how many nodes share blocks, g.
        redundancy: on how many of these each block is computed, r.
        samples: of the mini-batch; at least as many as there are blocks.

    Example:
        Blocks of nodes 0 and 1, 0 and 2, 1 and 2; the last node computes 4 samples, and the others 8 each.

        >>> uneven_sizes([2, 2, 1], group=3, redundancy=2, samples=10)
        (6, 2, 2)
    """
    exact = list(map(Fraction, shares))
    groups = [exact[first : first + group] for first in range(0, len(exact), group)]
    held, lacked = math.comb(group - 1, redundancy - 1), math.comb(group - 1, redundancy)
    of_groups = _apportioned(samples, [sum(own, Fraction()) for own in groups], held + lacked, samples)
    sizes = list[int]()
    for own, of_group in zip(groups, of_groups, strict=True):
        work = _apportioned(redundancy * of_group, own, held, of_group - lacked)
        sizes += _sizes_of_group(work, of_group, redundancy)
    return tuple(sizes)


def _sizes_of_group(work: Sequence[int], samples: int, redundancy: int) -> list[int]:
    """Samples of each block of a group whose nodes compute so many each (see the top of this file)."""
    nodes = range(len(work))
    blocks = list(combinations(nodes, redundancy))
    sizes = dict.fromkeys(blocks, 0)
    rest, left = list(work), samples
    while blocks:
        held = [sum(node in block for block in blocks) for node in nodes]
        lacked = [len(blocks) - number for number in held]
        can_be_more = [rest[node] // held[node] for node in nodes if held[node]]
        can_be_more += [(left - rest[node]) // lacked[node] for node in nodes if lacked[node]]
        even = min(can_be_more)
        sizes |= {block: sizes[block] + even for block in blocks}
        rest, left = [rest[node] - even * held[node] for node in nodes], left - even * len(blocks)
        full = {node for node in nodes if rest[node] < held[node]}
        needed = {node for node in nodes if left - rest[node] < lacked[node]}
        blocks = [block for block in blocks if needed <= set(block) and not full & set(block)]
    ends = list(accumulate(rest))
    places = sorted({0, left, *(end % left for end in ends)}) if left else []
    for begin, end in pairwise(places):
        sizes[tuple(sorted(bisect_right(ends, begin + piece * left) for piece in range(redundancy)))] += end - begin
    return list(sizes.values())


def _apportioned(total: int, shares: Sequence[Fraction], least: int, most: int) -> list[int]:
    """Whole numbers in [least, most] with this sum, as near to proportional to ``shares`` as that allows."""
    bound = dict[int, int]()  # which would be out of bounds, and at which of the two they are instead
    while True:
        free = [at for at in range(len(shares)) if at not in bound]
        rate = (total - sum(bound.values())) / sum((shares[at] for at in free), Fraction()) if free else Fraction()
        lack = {at: least - rate * shares[at] for at in free if rate * shares[at] < least}
        excess = {at: rate * shares[at] - most for at in free if rate * shares[at] > most}
        if not lack and not excess:
            break
        # Where more is lacking than is too much, the rate falls from here on, and what lacks now lacks then, too.
        if sum(lack.values()) >= sum(excess.values()):
            bound.update(dict.fromkeys(lack, least))
        if sum(excess.values()) >= sum(lack.values()):
            bound.update(dict.fromkeys(excess, most))
    wanted = [Fraction(bound[at]) if at in bound else rate * share for at, share in enumerate(shares)]
    numbers = [math.floor(number) for number in wanted]
    furthest = sorted(range(len(shares)), key=lambda at: numbers[at] - wanted[at])
    for at in furthest[: total - sum(numbers)]:
        numbers[at] += 1
    return numbers
