"""Who computes what: algorithm 2, the loads of equations 19 and 28, and every sample computed exactly r times."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowband.coded.assignment import MAX_BLOCKS, Assignment, CodedSampler


def assignments(max_nodes=9):
    def fits(n, r):
        return [g for g in range(r, n + 1) if n % g == 0]

    return (
        st.integers(2, max_nodes)
        .flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1)))
        .flatmap(lambda nr: st.tuples(st.just(nr[0]), st.just(nr[1]), st.sampled_from(fits(*nr))))
        .map(lambda nrg: Assignment(*nrg))
    )


@given(assignments())
def test_every_block_is_on_r_nodes_of_one_group_and_nodes_have_equally_many(a):
    assert len(a.holders) == a.blocks == a.nodes // a.group * comb(a.group, a.redundancy)
    assert len(set(a.holders)) == a.blocks
    for nodes in a.holders:
        assert len(set(nodes)) == a.redundancy
        assert list(nodes) == sorted(nodes)
        assert set(nodes) <= set(a.members(nodes[0]))
    for rank in range(a.nodes):
        assert rank in a.members(rank)
        assert len(a.held(rank)) == a.blocks_per_node == comb(a.group - 1, a.redundancy - 1)
        assert all(rank in a.holders[block] for block in a.held(rank))


@given(assignments(), st.integers(0, 300))
def test_every_sample_is_computed_exactly_r_times_however_uneven_the_batch(a, more):
    samples = a.blocks + more
    sizes = a.sizes(samples)
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    computed = Counter()
    for rank in range(a.nodes):
        rows, work = a.rows(rank, samples), a.work(samples)
        assert len(rows) == max(work)
        assert work[rank] == sum(sizes[block] for block in a.held(rank))
        computed.update(rows[: work[rank]])
        assert rows[work[rank] :] == [rows[work[rank] - 1]] * (max(work) - work[rank])
    assert computed == dict.fromkeys(range(samples), a.redundancy)


@pytest.mark.parametrize("n", range(4, 9))
@pytest.mark.parametrize("r", range(1, 5))
def test_load_is_that_of_equations_19_and_28(n, r):
    if r >= n:
        with pytest.raises(
            ValueError, match=f"redundancy={r} must be at least 1 and less than the number of ranks, {n}"
        ):
            Assignment(n, r)
        return
    sent = n * Fraction(comb(n - 1, r), r)
    assert Assignment(n, r).load() == pytest.approx(float(sent / n))
    assert sent == Fraction(comb(n, r + 1) * (r + 1), r)
    assert sent / ((n - 1) * comb(n, r)) == Fraction(n - r, (n - 1) * r)


def test_load_of_groups():
    assert Assignment(8, 2, group=2).load() == 0.5  # fractional repetition: 1/r
    assert Assignment(8, 4, group=4).load() == 0.25
    assert Assignment(8, 1, group=1).load() == 1.0  # plain, sent once
    assert Assignment(8, 1, group=1).load(multicast=False) == 7.0
    assert Assignment(8, 2, group=4).load() == comb(3, 2) / 2 + 1 / 4
    assert Assignment(8, 2, group=4).load(multicast=False) == comb(3, 2) + 4 / 4
    assert Assignment(8, 2).load(multicast=False) == comb(7, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 0), "redundancy=0 must be at least 1 and less than the number of ranks, 4"),
        ((4, 4), "redundancy=4 must be at least 1 and less than the number of ranks, 4"),
        ((1, 1), "one rank has nobody to send to; start two or more"),
        ((8, 2, 3), "group=3 must divide the number of ranks, 8, and be at least redundancy=2; use 2 or 4 or 8"),
        ((8, 3, 2), "group=2 must divide .* redundancy=3; use 4 or 8"),
        ((16, 4), "redundancy=4 among 16 nodes .* into 1,820 blocks, and 256 are allowed; use group=4 or 8"),
        ((13, 4), "redundancy=4 among 13 nodes .* 715 blocks, .*; use redundancy=1 or 2"),
        ((257, 2), "redundancy=2 among 257 nodes .*; use redundancy=1, group=1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_what_would(arguments, message):
    with pytest.raises(ValueError, match=message):
        Assignment(*arguments)


def test_what_is_advised_is_accepted():
    for numbers in ((16, 4, 4), (16, 4, 8), (13, 1), (13, 2), (257, 1, 1)):
        assert comb(Assignment(*numbers).group, numbers[1]) <= MAX_BLOCKS


@given(assignments(6), st.integers(0, 40), st.integers(0, 60), st.booleans(), st.booleans())
def test_an_epoch_has_every_sample_once_on_r_nodes_and_rows_tell_its_size(a, more, rest, shuffle, drop_last):
    batch_size = a.blocks + more
    rest = a.blocks + rest if rest else 0
    rest = min(rest, batch_size - 1) if batch_size > a.blocks else 0
    length = 2 * batch_size + rest
    seen, sizes = Counter(), []
    for rank in range(a.nodes):
        lengths = {}
        sampler = CodedSampler(
            range(length), batch_size, a, rank, shuffle=shuffle, seed=3, drop_last=drop_last, lengths=lengths
        )
        sampler.set_epoch(1)
        batches = list(sampler)
        assert len(batches) == len(sampler) == 2 + (rest > 0 and not drop_last)
        sizes.append([lengths[len(rows)] for rows in batches])
        for rows, samples in zip(batches, sizes[-1], strict=True):
            seen.update(rows[: a.work(samples)[rank]])
    kept = length - (rest if drop_last else 0)
    assert sizes == [([batch_size] * 2 + [rest] * (rest > 0))[: len(batches)]] * a.nodes
    assert sum(seen.values()) == a.redundancy * kept
    assert set(seen.values()) == {a.redundancy}
    if not drop_last or not shuffle:
        assert set(seen) == set(range(kept))


def test_epochs_differ_and_are_the_same_on_all_nodes():
    a = Assignment(3, 2)
    samplers = [CodedSampler(range(30), 30, a, rank, seed=1) for rank in range(3)]
    first = [next(iter(sampler)) for sampler in samplers]
    assert first[0][:10] == first[1][:10]  # block 0 is on nodes 0 and 1
    assert first[0][10:] == first[2][:10]
    samplers[0].set_epoch(1)
    assert next(iter(samplers[0])) != first[0]
    samplers[0].set_epoch(0)
    assert next(iter(samplers[0])) == first[0]


@pytest.mark.parametrize("batch_size", [5, 25])
def test_batches_smaller_than_the_blocks_are_refused_at_set_up(batch_size):
    with pytest.raises(ValueError, match="a mini-batch of 5 samples is smaller than the 6 blocks that nodes=4"):
        CodedSampler(range(30), batch_size, Assignment(4, 2), 0)
    if batch_size == 25:
        assert len(CodedSampler(range(30), batch_size, Assignment(4, 2), 0, drop_last=True)) == 1
