"""When a node is lost, and when it returns, among threads: wherever that happens, all get the same bits."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband.coded.assignment import Assignment
from narrowband.coded.average import BlockAverage
from narrowband.coded.coding import Around, Segment
from narrowband.transport.contract import RanksLostError, Transport, check_exchange
from tests.coded.simulation import averages_of, gradients_of, on_all
from tests.thorough import examples
from tests.transport.exchanges import LIMIT_S, capture

SCHEMES = [(n, r, g) for n in range(3, 7) for r in range(2, n) for g in range(r, n + 1) if n % g == 0]


# ------------------------------------------------------------------------------------------------ who answers for what


@pytest.mark.parametrize(("n", "r", "g"), SCHEMES)
def test_every_block_is_answered_for_once_by_a_rank_that_is_there_and_holds_it(n, r, g):
    a, segment = Assignment(n, r, g), Segment(0, 5, 5)
    for lost in range(n):
        there = [rank for rank in range(n) if rank != lost]
        rounds = {rank: Around(a, rank, lost) for rank in there}
        answered = [a.held(rank)[row] for rank in there for row in rounds[rank].own]
        assert sorted(answered) == list(range(a.blocks))
        for rank, this in rounds.items():
            assert this.heard == tuple(there)
            for sender in range(n):
                nbytes = this.nbytes(segment, sender)
                assert nbytes == (20 if sender != lost and rounds[sender].own else 0)
                assert this.wanted(segment, sender) == ([(0, nbytes)] if nbytes and sender != rank else [])


# ------------------------------------------------------------------------------------------------ where all meet


class DiedError(Exception):
    """What ends a node of the simulation."""


class Mortal(Transport):
    """A node's end of exchanges among threads. One node sends a last time in exchange ``last``, which reaches those in
    ``reached``; they miss it in the next exchange, and the others in this one.
    """

    name = "mortal"
    max_failures = 1

    def __init__(self, shared, rank, nodes, mortal, last, reached):
        self._shared, self._rank, self._nodes = shared, rank, nodes
        self._mortal, self._last, self._reached = mortal, last, reached
        self._gone, self._turn = (), 0

    @property
    def lost(self):
        return self._gone

    def exchange(self, outgoing, incoming, wanted):
        check_exchange(outgoing, incoming, wanted, self._rank, self._nodes)
        self._turn += 1
        with self._shared["news"]:
            here = self._shared["sent"].setdefault((self._gone, self._turn), {})
            here[self._rank] = outgoing.clone()
            self._shared["news"].notify_all()
        if not self._gone and self._turn >= self._last:
            if self._rank == self._mortal:
                raise DiedError
            if self._turn > self._last or self._rank not in self._reached:
                self._gone, self._turn = (self._mortal,), 0
                raise RanksLostError("lost", self._gone)
        awaited = {k for k in range(self._nodes) if k != self._rank and k not in self._gone}
        closed = self._shared["closed"]
        with self._shared["news"]:
            assert self._shared["news"].wait_for(lambda: awaited <= closed | set(here), LIMIT_S), "they do not meet"
            if missed := tuple(awaited - set(here)):
                raise RanksLostError("closed", missed)
        for k in awaited:
            for start, stop in wanted[k]:
                incoming[k][start:stop] = here[k][start:stop]
        assert not any(wanted[k] for k in self._gone)

    def close(self):
        with self._shared["news"]:
            self._shared["closed"].add(self._rank)
            self._shared["news"].notify_all()


def mortals(nodes, mortal, last, reached):
    shared = {"sent": {}, "closed": set(), "news": threading.Condition()}
    return [Mortal(shared, rank, nodes, mortal, last, reached) for rank in range(nodes)]


def averages_in_steps(node, gradients, *, close=True):
    """A node's averages, step after step; gradients are by step and block."""
    found = []
    for blocks in gradients:
        for row, block in enumerate(node.assignment.held(node.rank)):
            node.add(row, blocks[block], 1.0)
        found.append((node.average(48), node.unit.exponent))
    if close:
        node.transport.close()
    return found


def undisturbed_steps(a, numels, steps, options):
    """Gradients of some steps, and what a node has of them when none is lost."""
    gradients = [gradients_of(a, numels, seed, scale=0.1 / a.blocks) for seed in range(steps)]
    _, nodes = averages_of(a, numels, **options)
    return gradients, on_all(a.nodes, lambda rank: averages_in_steps(nodes[rank], gradients))[0]


def assert_same_steps(found, expected):
    for (average, exponent), (expected_average, expected_exponent) in zip(found, expected, strict=True):
        assert torch.equal(average, expected_average)
        assert exponent == expected_exponent


#: Nodes, redundancy and group; bits and span; and what a test draws as it goes.
FORMS = {
    "numbers": st.sampled_from([(3, 2, 3), (4, 2, 4), (4, 3, 4), (4, 2, 2), (5, 2, 5), (5, 3, 5), (6, 2, 3)]),
    "bits": st.sampled_from([32, 16]),
    "span": st.sampled_from([1.0, 1e-3, "auto"]),
    "data": st.data(),
}


@given(**FORMS)
@settings(max_examples=examples(150), deadline=None)
def test_all_meet_in_the_same_step_wherever_a_rank_is_lost_and_the_bits_are_the_same(numbers, bits, span, data):
    a, numels, options = Assignment(*numbers), [7, 12], {"bits": bits, "span": span, "segment_nbytes": 40}
    gradients, expected = undisturbed_steps(a, numels, 3, options)

    mortal = data.draw(st.integers(0, a.nodes - 1), "mortal")
    last = data.draw(st.integers(1, 40), "last")
    others = [rank for rank in range(a.nodes) if rank != mortal]
    reached = data.draw(st.sets(st.sampled_from(others)), "reached")
    ends = mortals(a.nodes, mortal, last, reached)
    nodes = [BlockAverage(a, rank, numels, ends[rank], **options) for rank in range(a.nodes)]
    results = on_all(a.nodes, lambda rank: averages_in_steps(nodes[rank], gradients))
    for rank, result in enumerate(results):
        if rank == mortal and isinstance(result, DiedError):
            continue
        if isinstance(result, Exception):
            raise result
        assert_same_steps(result, expected)


class Absent(Transport):
    """A node's end of exchanges among threads, of which one is lost, and returns, as often as there are ``losses``.

    A loss is the last exchange, since all were there, in which the node sends; whom that reaches, who miss it in the
    next; whether the node has all of that exchange itself; and after how many more the others hear it asking.
    """

    name = "absent"
    max_failures = 1
    readmits = True

    def __init__(self, shared, rank, nodes, absent, losses):
        self._shared, self._rank, self._nodes, self._absent, self._losses = shared, rank, nodes, absent, losses
        self._returns, self._gone, self._turn = 0, (), 0

    @property
    def lost(self):
        return self._gone

    @property
    def returning(self):
        return bool(self._gone) and self._turn > self._losses[self._returns][3]

    def _lose(self, *, turn):
        self._gone, self._turn = (() if self._rank == self._absent else (self._absent,)), turn
        raise RanksLostError("lost", (self._absent,))

    def exchange(self, outgoing, incoming, wanted):
        check_exchange(outgoing, incoming, wanted, self._rank, self._nodes)
        self._turn += 1
        shared, view = self._shared, (self._returns, self._gone, self._turn)
        last, reached, has_all, _ = self._losses[self._returns] if self._returns < len(self._losses) else (99,) * 4
        at_end = not self._gone and self._turn > last
        if at_end and self._rank == self._absent:
            self._lose(turn=last + 1)
        with shared["news"]:
            here = shared["sent"].setdefault(view, {})
            here[self._rank] = outgoing.clone()
            shared["news"].notify_all()
        misses = self._turn == last and self._rank not in reached and (self._rank != self._absent or not has_all)
        if not self._gone and (at_end or misses):
            self._lose(turn=0)
        awaited = {k for k in range(self._nodes) if k != self._rank and k not in self._gone}
        with shared["news"]:
            assert shared["news"].wait_for(lambda: awaited <= shared["closed"] | set(here), LIMIT_S), (
                f"no meeting in {view}"
            )
            if missed := tuple(awaited - set(here)):
                raise RanksLostError("closed", missed)
        for k in awaited:
            assert incoming[k].numel() == here[k].numel()
            for start, stop in wanted[k]:
                incoming[k][start:stop] = here[k][start:stop]
        assert not any(wanted[k] for k in self._gone)

    def _enter(self):
        self._returns, self._gone, self._turn = self._returns + 1, (), 0

    def readmit(self):
        self._enter()
        with self._shared["news"]:
            self._shared["views"].add(self._returns)
            self._shared["news"].notify_all()

    def drop(self):
        with self._shared["news"]:
            self._shared["dropped"] = True
            self._shared["news"].notify_all()

    def rejoin(self):
        shared = self._shared
        with shared["news"]:
            is_in = lambda: self._returns + 1 in shared["views"]  # noqa: E731
            assert shared["news"].wait_for(lambda: is_in() or shared["dropped"] or shared["closed"], LIMIT_S), (
                "never let in"
            )
            if not is_in():
                raise RanksLostError("dropped" if shared["dropped"] else "closed", (self._rank,))
        self._enter()

    def close(self):
        with self._shared["news"]:
            self._shared["closed"].add(self._rank)
            self._shared["news"].notify_all()


@pytest.mark.thorough
@given(**FORMS)
@settings(max_examples=80, deadline=None)
def test_a_node_that_returns_has_the_same_bits_wherever_it_was_lost(numbers, bits, span, data):
    a, numels, options = Assignment(*numbers), [7, 12], {"bits": bits, "span": span, "segment_nbytes": 40}
    gradients, expected = undisturbed_steps(a, numels, 6, options)

    absent = data.draw(st.integers(0, a.nodes - 1), "absent")
    others = st.sets(st.sampled_from([rank for rank in range(a.nodes) if rank != absent]))
    loss = st.tuples(st.integers(1, 30), others, st.booleans(), st.integers(0, 15))
    losses = data.draw(st.lists(loss, min_size=1, max_size=3), "losses")
    rejoin_steps = data.draw(st.sampled_from([0, 1, 2, 16]), "rejoin_steps")
    shared = {"sent": {}, "closed": set(), "views": set(), "dropped": False, "news": threading.Condition()}
    ends = [Absent(shared, rank, a.nodes, absent, losses) for rank in range(a.nodes)]
    nodes = [BlockAverage(a, rank, numels, ends[rank], rejoin_steps=rejoin_steps, **options) for rank in range(a.nodes)]
    results = on_all(a.nodes, lambda rank: averages_in_steps(nodes[rank], gradients))
    for rank, result in enumerate(results):
        if rank == absent and isinstance(result, RanksLostError):
            assert shared["dropped"] or shared["closed"]
            assert "restart all ranks from a checkpoint" in str(result)
            continue
        if isinstance(result, Exception):
            raise result
        assert_same_steps(result, expected)
    assert all(node._recovery._kept is None for node in nodes) or any(end.lost for end in ends)


def test_checks_hold_when_a_rank_is_lost():
    a, numels = Assignment(4, 2), [16]
    for wrong, match in (
        ("block", "the gradients of block 3 of the mini-batch differ"),
        ("samples", "not in the same step"),
    ):
        ends = mortals(4, 0, 1, set())
        nodes = [BlockAverage(a, rank, numels, ends[rank], span=1.0) for rank in range(4)]
        gradients = gradients_of(a, numels)

        def step(rank, nodes=nodes, gradients=gradients, wrong=wrong):
            for row, block in enumerate(a.held(rank)):
                nodes[rank].add(row, gradients[block], 1.5 if (wrong, rank, block) == ("block", 2, 3) else 1.0)
            return nodes[rank].average(49 if (wrong, rank) == ("samples", 3) else 48)

        died, *others = on_all(4, step)
        assert isinstance(died, DiedError)
        for error in others:
            assert type(error) is RuntimeError
            assert match in str(error)


def test_a_step_costs_a_meeting_and_after_a_loss_one_gradient_from_each_that_answers():
    a, numels = Assignment(4, 2), [1000]
    plain = averages_of(a, numels)[1][1]
    nodes = [BlockAverage(a, rank, numels, end) for rank, end in enumerate(mortals(4, 3, 3, set()))]
    assert nodes[1].nbytes == plain.nbytes + 8

    def two_steps(rank):
        averages_in_steps(nodes[rank], [gradients_of(a, numels)], close=False)
        first = nodes[rank].last
        averages_in_steps(nodes[rank], [gradients_of(a, numels)])
        return first, nodes[rank].last

    with capture() as messages:
        for first, second in on_all(4, two_steps)[:3]:
            assert (first.exchanges, first.sent_bytes) == (1, plain.nbytes + 8)
            assert (second.exchanges, second.sent_bytes) == (2, 8 + 4000 + 32)
    assert all(node.nbytes == 4000 + 32 for node in nodes[:3])
    (message,) = messages
    assert "step 1: rank 3 is lost (lost)" in message
    assert "sends 1 gradient of the model in a step, instead of 1.5" in message
