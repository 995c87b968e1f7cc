"""Links between machines, measured among real ranks."""

from __future__ import annotations

import itertools

import pytest

from narrowband.planning.links import PAYLOAD_SHARE
from narrowband.planning.network import Pair, link_of, measure_pairs
from tests.ranks import run_ranks
from tests.thorough import thorough


def pairs_of(rank, world_size, nodes, per_node):
    return measure_pairs(nodes, per_node)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), *thorough((3, 1))])
def test_every_pair_is_measured_in_both_directions_and_all_ranks_know(nodes, per_node):
    answers = run_ranks(pairs_of, nodes * per_node, nodes, per_node)
    assert all(answer == answers[0] for answer in answers)
    assert [(pair.source, pair.target) for pair in answers[0]] == list(itertools.permutations(range(nodes), 2))
    assert all(pair.rate > 0 and pair.latency_s > 0 for pair in answers[0])


def test_what_counts_is_the_slowest_link_of_the_ring():
    pairs = [Pair(0, 1, 40e6, 0.01), Pair(1, 2, 20e6, 0.02), Pair(2, 0, 30e6, 0.03), Pair(0, 2, 1e6, 1.0)]
    link, latency_s = link_of(pairs, 3)
    assert link.rate == pytest.approx(20e6 / PAYLOAD_SHARE)  # the last is in no ring
    assert latency_s == 0.03
