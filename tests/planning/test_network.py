"""Links between machines, measured among real ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from narrowband.planning import network
from narrowband.planning.links import PAYLOAD_SHARE
from narrowband.planning.network import FIRST_NBYTES, Pair, link_of, measure_pairs, routes
from tests.ranks import run_ranks
from tests.thorough import thorough


def pairs_of(rank, world_size, nodes, per_node):
    """The pairs, and the ranks that this one has measured round trips with."""
    trips, others = network.measure_trips, []

    def measured(wire, peer, *, sends):
        others.append(peer)
        return trips(wire, peer, sends=sends)

    network.measure_trips = measured
    try:
        return measure_pairs(nodes, per_node), others
    finally:
        network.measure_trips = trips


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), *thorough((3, 1))])
def test_every_pair_is_measured_in_both_directions_and_all_ranks_know(nodes, per_node):
    answers = run_ranks(pairs_of, nodes * per_node, nodes, per_node)
    pairs = answers[0][0]
    assert all(found == pairs for found, _ in answers)
    assert [(pair.source, pair.target) for pair in pairs] == list(itertools.permutations(range(nodes), 2))
    assert all(pair.rate > 0 and pair.latency_s > 0 for pair in pairs)
    firsts = range(0, nodes * per_node, per_node)
    for rank, (_, others) in enumerate(answers):
        assert set(others) == (set(firsts) - {rank} if rank in firsts else set())


def test_among_many_machines_only_neighbours_are_measured():
    assert routes(6) == list(itertools.permutations(range(6), 2))
    assert routes(7) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 0)]


def test_what_counts_is_the_slowest_link_of_the_ring():
    pairs = [Pair(0, 1, 40e6, 0.01), Pair(1, 2, 20e6, 0.02), Pair(2, 0, 30e6, 0.03), Pair(0, 2, 1e6, 1.0)]
    link, latency_s = link_of(pairs, 3)
    assert link.rate == pytest.approx(20e6 / PAYLOAD_SHARE)  # the last is in no ring
    assert latency_s == 0.03


class SlowWire:
    """A link in one direction, seen from its sender: what is sent takes time by a clock of its own."""

    def __init__(self, rate, latency_s, hiccups=()):
        self.now, self.sent = 0.0, []
        self._rate, self._latency_s, self._hiccups = rate, latency_s, list(hiccups)

    def perf_counter(self):
        return self.now

    def send(self, tensors, to, tag):
        (x,) = tensors
        if x.dtype == torch.uint8:
            self.sent.append(x.numel())
            self.now += 8 * x.numel() / self._rate + (self._hiccups.pop(0) if self._hiccups else 0.0)
        self.now += self._latency_s
        return self

    def recv(self, tensors, source, tag):
        self.now += self._latency_s
        return self

    def wait(self):
        return True


@pytest.mark.parametrize("rate", [4e6, 1e9, 1e12])
def test_a_rate_is_that_of_messages_that_take_long_without_their_round_trip(rate, monkeypatch):
    wire = SlowWire(rate, 0.04)
    monkeypatch.setattr(network, "time", wire)
    assert network.measure_rate(wire, 1, 0.08, sends=True) == pytest.approx(rate, rel=1e-3)
    doubled = [FIRST_NBYTES << at for at in range(len(wire.sent))]
    if rate < 1e12:  # the last is sent once more
        assert wire.sent == [*doubled[:-1], doubled[-2]]
        assert 8 * wire.sent[-2] / rate + 0.08 >= 0.25 > 8 * wire.sent[-3] / rate + 0.08
    else:  # never takes long
        assert wire.sent == doubled
        assert wire.sent[-1] == 1 << 26


def test_one_slow_transfer_is_not_the_rate(monkeypatch):
    for hiccups in ((0.0, 3.0), (0.0, 0.0, 3.0)):  # of the message that took long, and of its like
        wire = SlowWire(4e6, 0.04, hiccups)
        monkeypatch.setattr(network, "time", wire)
        assert network.measure_rate(wire, 1, 0.08, sends=True) == pytest.approx(4e6, rel=1e-3)
