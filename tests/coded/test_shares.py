"""Uneven shares: which nodes can have, and that each computes its own, to the sample."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from math import comb

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from narrowband.coded.assignment import Assignment

SCHEMES = st.sampled_from(
    [(n, r, g) for n in range(2, 9) for g in range(1, n + 1) if n % g == 0 for r in range(1, g + 1) if r < n]
)


@st.composite
def uneven(draw):
    """Assignments with shares of up to 1/r of a group's, and equal ones where all nodes of a group compute the same."""
    n, r, g = draw(SCHEMES)
    most = 1_000 if r == 1 else 100 * (g - r) // (r - 1)
    shares = []
    for _ in range(n // g):
        unit = draw(st.sampled_from([0.1, 1, 7]))
        shares += [unit * (100 + more) for more in draw(st.lists(st.integers(0, most), min_size=g, max_size=g))]
    exact = list(map(Fraction, shares))  # products of floats may be too large in the last digit
    groups = [exact[first : first + g] for first in range(0, n, g)]
    assume(all(r * max(group) <= sum(group) for group in groups))
    return Assignment(n, r, g, tuple(shares))


@given(uneven(), st.integers(0, 500))
def test_every_sample_is_on_r_nodes_and_every_node_computes_its_share(a, more):
    samples = a.blocks + more
    sizes, work = a.sizes(samples), a.work(samples)
    assert sum(sizes) == samples
    assert min(sizes) >= 1
    assert sum(work) == a.redundancy * samples
    computed = Counter()
    for rank, own in enumerate(work):
        rows = a.rows(rank, samples)
        assert len(rows) == max(work)
        assert len(set(rows)) == len(set(rows[:own])) == own, "no sample twice on a node"
        computed.update(rows[:own])
    assert computed == dict.fromkeys(range(samples), a.redundancy)


@given(uneven(), st.integers(0, 500))
def test_work_is_proportional_to_the_sample_unless_blocks_would_be_empty(a, more):
    samples = a.blocks + more
    work, sizes = a.work(samples), a.sizes(samples)
    least, lacked = a.blocks_per_node, comb(a.group - 1, a.redundancy)
    for first in range(0, a.nodes, a.group):
        members = a.members(first)
        share = sum(Fraction(a.shares[node]) for node in members)
        own = sum(sizes[block] for block, nodes in enumerate(a.holders) if nodes[0] in members)
        wanted = [a.redundancy * own * Fraction(a.shares[node]) / share for node in members]
        if all(least <= one <= own - lacked for one in wanted):
            assert all(abs(work[node] - one) < 1 for node, one in zip(members, wanted, strict=True))
        for one, other in pairwise(members):
            if a.shares[one] > a.shares[other]:
                assert work[one] >= work[other]


@given(SCHEMES, st.lists(st.integers(1, 9), min_size=8, max_size=8))
def test_shares_can_be_had_if_and_only_if_no_node_would_compute_a_sample_twice(numbers, shares):
    n, r, g = numbers
    shares = tuple(shares[:n])
    possible = all(r * max(shares[at : at + g]) <= sum(shares[at : at + g]) for at in range(0, n, g))
    if possible:
        assert Assignment(n, r, g, shares).shares == shares
    else:
        with pytest.raises(ValueError, match="every sample once"):
            Assignment(n, r, g, shares)


def test_blocks_are_about_as_even_as_shares_let_them_be():
    # Level by level: all 6 blocks until the last node is done; then the 3 without it.
    assert Assignment(4, 2, shares=(3, 3, 3, 1)).sizes(600) == (160, 160, 40, 160, 40, 40)
    assert Assignment(4, 2, shares=(1, 1, 1, 1)).sizes(600) == Assignment(4, 2).sizes(600) == (100,) * 6
    assert Assignment(4, 3, shares=(2, 2, 2, 1)).work(1024) == (878, 878, 877, 439)


def test_what_is_sent_does_not_depend_on_shares():
    assert Assignment(4, 2, shares=(3, 2, 2, 1)).load() == Assignment(4, 2).load()
    assert Assignment(4, 2, shares=(3, 2, 2, 1)).holders == Assignment(4, 2).holders


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 2, 0, (1, 1, 1)), r"shares=\(1, 1, 1\) must be a positive number for each of the 4 nodes"),
        ((2, 1, 0, (1, 0)), "must be a positive number for each of the 2 nodes"),
        ((2, 1, 0, (1, float("nan"))), "must be a positive number"),
        (
            (4, 3, 0, (1, 1, 2, 1)),
            "node 2 would do 0.4 of the work of all nodes. With redundancy=3 it can do 0.333 .* redundancy=2, or",
        ),
        (
            (6, 2, 3, (1, 1, 1, 1, 1, 4)),
            "node 5 would do 0.667 of the work of nodes 3 to 5, its group. .* Use redundancy=1, larger groups, or",
        ),
    ],
)
def test_shares_that_nodes_cannot_have_are_refused_with_what_would_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        Assignment(*arguments)
