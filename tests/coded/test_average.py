"""The average: the same bits on all nodes and in one place, the bytes of equation 19, and what all nodes learn."""

from __future__ import annotations

import logging
import math
from fractions import Fraction
from math import comb

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband.coded.assignment import Assignment
from narrowband.coded.header import Header, header_nbytes
from tests.coded.simulation import averages_of, exactly, gradients_of, on_all, put
from tests.thorough import thorough

EVERY = [(n, r, g) for n in range(2, 7) for r in range(1, n) for g in range(r, n + 1) if n % g == 0]


def assert_same(results, expected):
    for result in results:
        if isinstance(result, Exception):
            raise result
        assert torch.equal(result, expected)


@pytest.mark.parametrize(("n", "r", "g"), EVERY)
@pytest.mark.parametrize("bits", [32, 16, 8])
def test_all_nodes_get_the_bits_that_one_place_computes(n, r, g, bits):
    a = Assignment(n, r, g)
    numels = [7, 50, 1]
    simulation, averages = averages_of(a, numels, bits=bits, span=1.0)
    gradients = gradients_of(a, numels, scale=0.1 / a.blocks)
    put(averages, gradients)
    node = averages[0]
    expected = exactly(gradients, math.ldexp(1.0, node.unit.exponent), node.unit.limit)
    assert_same(on_all(n, lambda rank: averages[rank].average(48)), expected)
    assert simulation.sent == [node.nbytes for node in averages] == [node.last.sent_bytes for node in averages]
    assert [one.step for one in averages] == [1] * n
    # Coarser in fewer bits, but by no more than half a unit for each block.
    exact = sum(torch.cat(block).double() for block in gradients)
    assert (expected.double() - exact).abs().max() <= a.blocks * node.unit.reach / node.unit.limit / 2 + 1e-7


@given(
    numbers=st.sampled_from(EVERY),
    numels=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    bits=st.sampled_from([32, 16, 8]),
    segment=st.integers(1, 200),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_segments_and_layers_of_any_size_change_nothing(numbers, numels, bits, segment, seed):
    a = Assignment(*numbers)
    simulation, averages = averages_of(a, numels, bits=bits, span=1.0, segment_nbytes=segment)
    gradients = gradients_of(a, numels, seed, scale=0.1 / a.blocks)
    put(averages, gradients)
    expected = exactly(gradients, math.ldexp(1.0, averages[0].unit.exponent))
    assert_same(on_all(a.nodes, lambda rank: averages[rank].average(48)), expected)
    assert simulation.sent == [node.nbytes for node in averages]


@pytest.mark.parametrize(
    ("n", "r", "bits"),
    [
        *((n, r, (32, 16, 8)[(n + r) % 3]) for n in range(4, 9) for r in range(1, 5) if r < n),
        *thorough(
            *(
                (n, r, bits)
                for n in range(4, 9)
                for r in range(1, 5)
                for bits in (32, 16, 8)
                if r < n and bits != (32, 16, 8)[(n + r) % 3]
            )
        ),
    ],
)
def test_bytes_are_those_of_equation_19_and_the_header(n, r, bits):
    a = Assignment(n, r)
    numel = 840 * 32  # whole slices for every r
    simulation, averages = averages_of(a, [numel], bits=bits, span=1.0, segment_nbytes=20_000)
    header = 20 + 4 * comb(n - 1, r - 1)
    assert header == header_nbytes(a.blocks_per_node)
    gradient = numel * bits // 8
    usual = (n - 1) * comb(n, r) * gradient  # every node sends the gradients of its blocks to everybody else
    coded = usual * Fraction(n - r, (n - 1) * r)
    assert n * averages[0].nbytes == coded + n * header
    assert averages[0].nbytes == a.load() * gradient + header
    if n <= 6:
        put(averages, gradients_of(a, [numel], scale=0.1 / a.blocks))
        on_all(n, lambda rank: averages[rank].average(8))
        assert simulation.sent == [averages[0].nbytes] * n
        assert simulation.received == [a.load(multicast=False) * gradient + (n - 1) * header] * n


def test_bytes_of_groups():
    a = Assignment(8, 2, group=4)
    simulation, averages = averages_of(a, [4096], segment_nbytes=5000)
    put(averages, gradients_of(a, [4096]))
    on_all(8, lambda rank: averages[rank].average(8))
    assert simulation.sent == [node.nbytes for node in averages]
    assert sum(simulation.sent) == 8 * (a.load() * 4 * 4096 + header_nbytes(3) + header_nbytes(0))
    repeated = averages_of(Assignment(8, 2, group=2), [4096])[1][0]
    assert repeated.nbytes == 4 * 4096 / 2 + header_nbytes(1)


@given(
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**31 - 1),
    st.integers(-126, 126),
    st.integers(-1, 256),
    st.floats(width=32),
    st.lists(st.integers(0, 2**32 - 1), max_size=9),
)
def test_headers_say_what_they_were_told(step, samples, exponent, trouble, magnitude, checksums):
    header = Header(step, samples, exponent, trouble, magnitude, tuple(checksums))
    data = header.to_bytes()
    assert len(data) == header_nbytes(len(checksums))
    again = Header.from_bytes(data)
    assert again.to_bytes() == data
    assert again == header or math.isnan(magnitude)


# ---- what all nodes learn in the same step ---------------------------------------------------------------------------

SOME = [(4, 2, 4), (5, 3, 5), (4, 2, 2), (6, 2, 3), (4, 1, 1)]
some = pytest.mark.parametrize("numbers", SOME)


@some
@pytest.mark.parametrize(
    ("times", "bits"),
    [
        *((1.01, 32), (3.0, 16), (1e6, 8), (1e30, 32)),
        *thorough((1.01, 16), (1.01, 8), (3.0, 32), (3.0, 8), (1e6, 32), (1e6, 16), (1e30, 16), (1e30, 8)),
    ],
)
def test_out_of_reach_is_seen_by_all_and_nothing_wraps(numbers, bits, times, caplog):
    a = Assignment(*numbers)
    _, averages = averages_of(a, [40], bits=bits, span=1.0)
    reach, before = averages[0].unit.reach, averages[0].unit.exponent
    assert reach >= 1.0 / a.blocks
    gradients = gradients_of(a, [40], scale=0.01 / a.blocks)
    gradients[-1][0][7] = -reach * times  # of one block, on r of the nodes
    put(averages, gradients)
    with caplog.at_level(logging.WARNING, "narrowband"):
        results = on_all(a.nodes, lambda rank: averages[rank].average(48))
    exponents = {node.unit.exponent for node in averages}
    assert len(exponents) == 1
    wider = exponents.pop() - before
    assert 2.0 ** (wider - 1) < times <= 2.0**wider
    assert_same(results, exactly(gradients, math.ldexp(1.0, before + wider)))
    assert [node.last.exchanges for node in averages] == [2] * a.nodes
    assert len(caplog.messages) == a.nodes
    assert f"span is now {2**wider} times as wide" in caplog.messages[0]
    # The step after is exchanged once, in the wider span.
    put(averages, gradients)
    assert_same(on_all(a.nodes, lambda rank: averages[rank].average(48)), results[0])
    assert [node.last.exchanges for node in averages] == [1] * a.nodes


@some
@pytest.mark.parametrize(
    ("bits", "span"), [(32, "auto"), (16, 1.0), (8, "auto"), *thorough((32, 1.0), (16, "auto"), (8, 1.0))]
)
def test_one_large_gradient_spoils_no_later_one(numbers, bits, span):
    a = Assignment(*numbers)
    _, averages = averages_of(a, [40], bits=bits, span=span)
    fine = averages[0].unit.exponent
    exchanges = []
    for step, scale in enumerate([1.0, 1e10, 1.0, 1.0]):
        gradients = gradients_of(a, [40], seed=step, scale=scale * 0.01 / a.blocks)
        put(averages, gradients)
        results = on_all(a.nodes, lambda rank: averages[rank].average(48))
        assert_same(results, results[0])
        exact = sum(block[0].double() for block in gradients)
        largest = max(float(block[0].abs().max()) for block in gradients)
        assert (results[0].double() - exact).abs().max() <= a.blocks * largest * (64 / averages[0].unit.limit + 1e-7)
        exchanges.append(averages[0].last.exchanges)
    assert exchanges[1:] == [2, 2, 1]
    assert {node.unit.exponent for node in averages} == {averages[0].unit.exponent}
    assert span == "auto" or averages[0].unit.exponent == fine


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_a_span_that_is_wider_than_stated_stays_so_as_long_as_gradients_need_it(bits):
    a = Assignment(4, 2)
    _, averages = averages_of(a, [40], bits=bits, span=1.0)
    for step, scale in enumerate([100.0, 40.0, 80.0, 30.0]):
        put(averages, gradients_of(a, [40], seed=step, scale=scale))
        on_all(4, lambda rank: averages[rank].average(48))
        assert averages[0].last.exchanges == (2 if step == 0 else 1)


@pytest.mark.parametrize("numbers", [numbers for numbers in SOME if numbers[1] > 1])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_block_that_is_not_finite_on_one_of_its_nodes_is_said_to_be_that_on_all(numbers, bad):
    a = Assignment(*numbers)
    _, averages = averages_of(a, [40])
    put(averages, gradients_of(a, [40]))
    block = a.blocks - 1
    last = averages[a.holders[block][-1]]
    last._exchange._contributions[a.held(last.rank).index(block), 5] = bad
    for error in on_all(a.nodes, lambda rank: averages[rank].average(48)):
        assert isinstance(error, RuntimeError)
        assert f"the gradients of block {block} of the mini-batch hold inf or NaN on" in str(error)
        assert str(a.holders[block]) in str(error)
        if a.group == a.nodes:  # otherwise those of other groups are told the block only
            assert f"on rank(s) {last.rank} of the ranks" in str(error)


@some
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nan_on_all_nodes_in_that_step_and_forgotten_in_the_next(numbers, bad):
    a = Assignment(*numbers)
    _, averages = averages_of(a, [40])
    gradients = gradients_of(a, [40])
    fine = gradients[0][0].clone()
    gradients[0][0][3] = bad
    put(averages, gradients)
    for result in on_all(a.nodes, lambda rank: averages[rank].average(48)):
        assert result.isnan().all()
    gradients[0][0] = fine
    put(averages, gradients)
    expected = exactly(gradients, math.ldexp(1.0, averages[0].unit.exponent))
    assert_same(on_all(a.nodes, lambda rank: averages[rank].average(48)), expected)
    assert [node.last.exchanges for node in averages] == [1] * a.nodes


@pytest.mark.parametrize("n", [2, 3, 5, 6])
def test_the_largest_contributions_there_may_be_add_up_without_wrapping(n):
    for r in range(1, n):
        a = Assignment(n, r)
        _, averages = averages_of(a, [9], span=10.0)
        reach = averages[0].unit.reach
        assert a.blocks * reach >= 10.0
        assert a.blocks * averages[0].unit.limit < 2**31
        for sign in (1.0, -1.0):
            put(averages, [[torch.full((9,), sign * reach)] for _ in range(a.blocks)])
            results = on_all(n, lambda rank, averages=averages: averages[rank].average(48))
            assert_same(results, torch.full((9,), sign * reach * a.blocks))
            assert averages[0].last.exchanges == 1


@pytest.mark.parametrize("numbers", [numbers for numbers in SOME if numbers[1] > 1])
def test_nodes_that_computed_other_bits_for_a_block_are_found_by_all(numbers):
    a = Assignment(*numbers)
    _, averages = averages_of(a, [40])
    put(averages, gradients_of(a, [40]))
    block = a.blocks - 1
    last = averages[a.holders[block][-1]]
    last._exchange._contributions[a.held(last.rank).index(block), 5] += 1e-7
    for error in on_all(a.nodes, lambda rank: averages[rank].average(48)):
        assert isinstance(error, RuntimeError)
        assert f"the gradients of block {block} of the mini-batch differ" in str(error)
        assert str(a.holders[block]) in str(error)


@some
@pytest.mark.parametrize("what", ["step", "samples", "exponent"])
def test_nodes_out_of_step_are_found_by_all(numbers, what):
    a = Assignment(*numbers)
    _, averages = averages_of(a, [40])
    put(averages, gradients_of(a, [40]))
    if what != "samples":
        at = averages[-1].unit if what == "exponent" else averages[-1]
        setattr(at, what, getattr(at, what) + 1)
    for error in on_all(a.nodes, lambda rank: averages[rank].average(48 - (what == "samples" and rank == a.nodes - 1))):
        assert isinstance(error, RuntimeError)
        assert "ranks are not in the same step" in str(error)


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_auto_follows_gradients_that_grow_and_shrink(bits):
    a = Assignment(4, 2)
    _, averages = averages_of(a, [200], bits=bits, span="auto")
    for step, scale in enumerate([1e-3, 1.1e-3, 1e-3, 1e-6, 1e-6, 40.0, 0.0, 40.0, 1e-30]):
        gradients = gradients_of(a, [200], seed=step, scale=scale)
        put(averages, gradients)
        results = on_all(4, lambda rank: averages[rank].average(48))
        exact = sum(block[0].double() for block in gradients)
        largest = max(float(block[0].abs().max()) for block in gradients)
        assert_same(results, results[0])
        steady = 1e-4 < scale < 1.0
        if steady or scale == 40.0:  # a step that follows a like one, or one that was exchanged twice
            assert (results[0].double() - exact).abs().max() <= a.blocks * 2 * largest / averages[0].unit.limit * 16
        if step in (1, 2, 4, 7):
            assert averages[0].last.exchanges == 1
        if step in (0, 5):
            assert averages[0].last.exchanges == 2
    assert len({node.unit.exponent for node in averages}) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 12}, "bits=12; expected one of 32, 16, 8"),
        ({"span": 0.0}, "span=0.0; expected 'auto' or a positive number"),
        ({"span": math.inf}, "span=inf; expected"),
        ({"span": math.nan}, "span=nan; expected"),
    ],
)
def test_what_does_not_exist_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        averages_of(Assignment(3, 2), [4], **options)


def test_gradients_of_several_backward_passes_add_up_with_their_weights():
    a = Assignment(3, 2)
    _, averages = averages_of(a, [4, 2])
    first, second = gradients_of(a, [4, 2], 0), gradients_of(a, [4, 2], 1)
    put(averages, first, 0.5)
    put(averages, second, 0.25)
    summed = [
        [0.5 * x + 0.25 * y for x, y in zip(one, other, strict=True)] for one, other in zip(first, second, strict=True)
    ]
    expected = exactly(summed, math.ldexp(1.0, averages[0].unit.exponent))
    assert_same(on_all(3, lambda rank: averages[rank].average(24)), expected)
    # A parameter without a gradient contributes nothing, whatever it did in the step before.
    for node in averages:
        for row, block in enumerate(a.held(node.rank)):
            node.add(row, [None, second[block][1]], 1.0)
    without = [[torch.zeros(4), block[1]] for block in second]
    expected = exactly(without, math.ldexp(1.0, averages[0].unit.exponent))
    assert_same(on_all(3, lambda rank: averages[rank].average(24)), expected)
