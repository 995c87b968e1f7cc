"""Uneven shares: choose the number of samples of each block such that every node computes as much as it can.

The paper cuts a mini-batch into blocks of equal size. It says that the samples of a node can be adjusted to the node's
capability (section 2.1 of CSSGD; a₁ … a_p in section 2.4 are blocks of any size), but not how. Here only the sizes of
blocks are adjusted: which nodes hold a block, and what is sent, stay as they are.

A group of g nodes with B samples computes r·B, of which node i computes ℓᵢ = r·B·wᵢ, where wᵢ is its share of the
group's shares. Sizes a_S ≥ 0 of all C(g, r) blocks with Σ_{S∋i} a_S = ℓᵢ exist if and only if no node computes more
than all samples: ℓᵢ ≤ B, or wᵢ ≤ 1/r. (Each sample is on r *different* nodes, so more is impossible.) The sizes are
found in two parts:

1. All blocks get equally many samples, as many as all can have; then the blocks that can have more get more, again
   equally many; and so on. So block sizes are about as even as shares allow. With few bits this matters: the largest
   block sets the unit.
2. The few remaining samples go to nodes whose ℓᵢ is not reached yet. The samples that nodes lack are laid end to end on
   a line, and the line is cut into r pieces of equal length. The sample at some place goes to the r nodes that lie at
   this place in each of the pieces. These are different nodes, since no node lacks more than the length of a piece
   (McNaughton 1959, *Scheduling with deadlines and loss functions*, DOI 10.1287/mnsc.6.1.1).

So every ℓᵢ is reached exactly. All arithmetic is on whole numbers and fractions, so machines of different kinds find
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
    """Raise ValueError for impossible shares; the message says what is possible.

    Args:
        shares: the share of each node.
        nodes: number of nodes, n.
        group: number of nodes that share blocks, g.
        redundancy: number of nodes on which each block is computed, r.
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
    """Return how many samples each block has, at least one; group after group, blocks in lexicographic order.

    Args:
        shares: the share of each node, accepted by :func:`check_shares`.
        group: number of nodes that share blocks, g.
        redundancy: number of nodes on which each block is computed, r.
        samples: number of samples of the mini-batch; at least the number of blocks.

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
    """Return the samples of each block of a group whose nodes compute ``work`` samples (see the top of this file)."""
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
    """Return whole numbers in [least, most] with sum ``total``, as nearly proportional to ``shares`` as possible."""
    bound = dict[int, int]()  # indices whose numbers would be out of bounds → the bound that they get instead
    while True:
        free = [at for at in range(len(shares)) if at not in bound]
        rate = (total - sum(bound.values())) / sum((shares[at] for at in free), Fraction()) if free else Fraction()
        lack = {at: least - rate * shares[at] for at in free if rate * shares[at] < least}
        excess = {at: rate * shares[at] - most for at in free if rate * shares[at] > most}
        if not lack and not excess:
            break
        # If the lacks exceed the excesses, the rate falls from here on, so numbers that are too small now stay so.
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
