"""How much redundancy pays: the formula, what it picks, and times measured on real ranks."""

from __future__ import annotations

from math import comb
from unittest.mock import patch

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import narrowband as nb
from narrowband.coded import Assignment, choose, predict
from narrowband.transport import Broadcast
from tests.gradients.training import refusal
from tests.ranks import run_ranks

seconds = st.floats(0.001, 10)


@given(
    nodes=st.integers(2, 12),
    compute=seconds,
    communicate=seconds,
    multicast=st.booleans(),
    bits=st.sampled_from([32, 16, 8]),
    more=st.integers(0, 200),
)
def test_every_prediction_is_the_formula_and_the_choice_is_the_fastest_that_is_worth_it(
    nodes, compute, communicate, multicast, bits, more
):
    choice = predict(
        nodes,
        nodes + more,
        compute_s=compute,
        communicate_s=communicate,
        all_reduce_s=1,
        multicast=multicast,
        bits=bits,
    )
    plain = 1 if multicast else nodes - 1
    for c in choice.candidates:
        n, r, g = nodes, c.redundancy, c.group
        inside = comb(g - 1, r) * bits / 32
        across = (1 / g if n > g else 0) if multicast else (n - g) / g
        assert c.load == pytest.approx((inside / r if multicast else inside) + across)
        assert c.seconds == pytest.approx(r * compute + communicate * c.load / plain)
        assert Assignment(n, r, g).blocks <= nodes + more
    assert [c.seconds for c in choice.candidates] == sorted(c.seconds for c in choice.candidates)
    by_scheme = {(c.redundancy, c.group): c.seconds for c in choice.candidates}
    chosen = by_scheme[choice.redundancy, choice.group]
    simple = min(seconds for (r, _), seconds in by_scheme.items() if r == 1)
    if choice.redundancy == 1:
        assert chosen == simple
        assert choice.candidates[0].seconds >= 0.95 * simple - 1e-12
    else:
        assert chosen == choice.candidates[0].seconds <= 0.95 * simple + 1e-12


def test_plain_wins_on_a_fast_link_and_repetition_on_a_slow_one():
    fast = predict(4, 64, compute_s=1.0, communicate_s=0.1, all_reduce_s=2.0, multicast=True)
    assert (fast.redundancy, fast.group) == (1, 1)
    assert fast.verdict == (
        "redundancy=1 wins: redundancy=1, group=1 takes 1100.0 ms a step, redundancy=2, group=2 would take 2050.0 ms."
    )
    slow = predict(4, 64, compute_s=0.5, communicate_s=2.0, all_reduce_s=9.0, multicast=True)
    assert (slow.redundancy, slow.group) == (2, 2)
    assert slow.verdict == (
        "redundancy=2, group=2 is predicted to take 2000.0 ms a step, against 2500.0 ms with redundancy=1, group=1: "
        "1.25 times as fast. Groups compute the same and need no coding; the best that codes is redundancy=3, group=4, "
        "2166.7 ms."
    )


def test_it_says_when_an_all_reduce_would_be_better():
    choice = predict(4, 64, compute_s=0.1, communicate_s=2.0, all_reduce_s=0.5, multicast=False)
    assert "A plain all-reduce is faster: DistributedDataParallel would take 600.0 ms" in choice.verdict


def test_it_says_when_one_rank_alone_would_be_better():
    slow = {"communicate_s": 2.0, "all_reduce_s": 3.0, "multicast": True}
    assert "by itself is faster: 400.0 ms, and nothing is sent." in predict(4, 64, compute_s=0.1, **slow).verdict
    assert "by itself" not in predict(4, 64, compute_s=0.9, **slow).verdict


def test_where_groups_do_not_divide_the_nodes_coding_is_chosen():
    choice = predict(5, 64, compute_s=0.01, communicate_s=5.0, all_reduce_s=9.0, multicast=True)
    assert (choice.redundancy, choice.group) == (4, 5)
    assert choice.candidates[0].load == 0.25


def test_schemes_of_more_blocks_than_samples_are_left_out():
    few = predict(8, 8, compute_s=0.01, communicate_s=5.0, all_reduce_s=9.0, multicast=True)
    assert {(c.redundancy, c.group) for c in few.candidates} >= {(1, 1), (1, 8), (2, 2), (4, 4), (7, 8)}
    assert (2, 8) not in {(c.redundancy, c.group) for c in few.candidates}
    with pytest.raises(ValueError, match="batch_size=7 is smaller than the 8 nodes"):
        predict(8, 7, compute_s=1, communicate_s=1, all_reduce_s=1, multicast=True)


class Clock:
    """Time passes only where a test says so: on a busy machine nothing takes as long as it should."""

    now = 0.0

    @staticmethod
    def perf_counter():
        return Clock.now

    @staticmethod
    def sleep(seconds):
        Clock.now += seconds


class Slow(Broadcast):
    """A link on which a byte takes a microsecond."""

    name = "slow"

    def exchange(self, outgoing, incoming, wanted):
        super().exchange(outgoing, incoming, wanted)
        Clock.sleep(outgoing.numel() * 1e-6)


def measured(rank, world_size):
    net = nn.Linear(100, 500)  # 0.2 MB

    def nothing():
        pass

    def long():
        Clock.sleep(0.5 if rank == 1 else 0.0)  # the slowest rank counts

    with patch.object(choose, "time", Clock):
        slow = nb.choose_redundancy(net, nothing, batch_size=16, transport=Slow(dist.group.WORLD), steps=2)
        fast = nb.choose_redundancy(net, long, batch_size=16, steps=1)
    wrong = [
        refusal(lambda: nb.choose_redundancy(net, nothing, batch_size=16, steps=0)),
        refusal(lambda: nb.choose_redundancy(net, nothing, batch_size=2, steps=1)),
    ]
    return slow, fast, wrong


def test_times_are_measured_and_all_ranks_choose_the_same():
    results = run_ranks(measured, 4)
    assert [result[:2] for result in results] == [results[0][:2]] * 4
    slow, fast, wrong = results[0]
    assert slow.communicate_s == pytest.approx(4 * 50_500 * 1e-6, rel=1e-3)
    assert slow.redundancy > 1
    assert "A plain all-reduce is faster" in slow.verdict
    assert fast.compute_s == pytest.approx(0.5)
    assert fast.redundancy == 1
    assert [kind for kind, _ in wrong] == ["ValueError"] * 2


class SlowMulticast(Slow):
    """As if what is sent to all left its sender once, slowly."""

    name = "slow multicast"
    multicast = True


class Behind(Broadcast):
    """A process group behind a link on which a byte to each of the others takes a tenth of a microsecond, or three."""

    per_byte = 1e-7

    def exchange(self, outgoing, incoming, wanted):
        super().exchange(outgoing, incoming, wanted)
        Clock.sleep(3 * outgoing.numel() * Behind.per_byte)


def by_what_is_faster(rank, world_size, per_byte):
    def nothing():
        pass

    def slow_multicast(name, group, timeout):
        assert name == "auto"
        return SlowMulticast(group, timeout)

    Behind.per_byte = per_byte
    with (
        patch.object(choose, "time", Clock),
        patch.object(choose, "connect", slow_multicast),
        patch.object(choose, "Broadcast", Behind),
    ):
        return nb.choose_redundancy(nn.Linear(100, 500), nothing, batch_size=16, steps=2)


@pytest.mark.parametrize(
    ("per_byte", "best", "other"), [(1e-7, "broadcast", "slow multicast"), (3e-6, "slow multicast", "broadcast")]
)
def test_auto_takes_the_transport_that_is_measured_to_be_faster(per_byte, best, other):
    choices = run_ranks(by_what_is_faster, 4, per_byte)
    assert choices == [choices[0]] * 4
    assert choices[0].transport == best
    assert f" This is by {best}. By {other} the best, redundancy=" in choices[0].verdict
    assert choices[0].seconds == choices[0].candidates[0].seconds
