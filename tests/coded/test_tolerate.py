"""Training that goes on, exactly, when a rank is lost: which rank answers for what, where all meet, and real losses."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import connection, get_context
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowband as nb
from narrowband.coded.assignment import Assignment
from narrowband.coded.average import BlockAverage
from narrowband.coded.coding import Around, Segment
from narrowband.transport import probe
from narrowband.transport.contract import RanksLostError, Transport, check_exchange
from narrowband.transport.multicast import Multicast
from narrowband.transport.sockets import MulticastSocket
from tests.coded.simulation import averages_of, gradients_of, on_all
from tests.coded.test_multicast import Deaf, capture, content, everything, places
from tests.coded.training import batch, flat, loss_of, mlp
from tests.gradients.training import refusal
from tests.ranks import run_ranks

LIMIT_S = 240.0  # only what hangs takes this long
PATIENCE_S = 4.0  # a busy machine may forget a living rank for some time

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
    tolerate = 1

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
            assert self._shared["news"].wait_for(lambda: awaited <= closed | set(here), 10), "they do not meet"
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
        found.append((node.average(48), node.exponent))
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


@given(
    numbers=st.sampled_from([(3, 2, 3), (4, 2, 4), (4, 3, 4), (4, 2, 2), (6, 2, 3)]),
    bits=st.sampled_from([32, 16]),
    span=st.sampled_from([1.0, 1e-3, "auto"]),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
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
    tolerate = 1
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
            assert shared["news"].wait_for(lambda: awaited <= shared["closed"] | set(here), 10), f"no meeting in {view}"
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
            assert shared["news"].wait_for(lambda: is_in() or shared["dropped"] or shared["closed"], 10), "never let in"
            if not is_in():
                raise RanksLostError("dropped" if shared["dropped"] else "closed", (self._rank,))
        self._enter()

    def close(self):
        with self._shared["news"]:
            self._shared["closed"].add(self._rank)
            self._shared["news"].notify_all()


@given(
    numbers=st.sampled_from([(3, 2, 3), (4, 2, 4), (4, 3, 4), (4, 2, 2), (6, 2, 3)]),
    bits=st.sampled_from([32, 16]),
    span=st.sampled_from([1.0, 1e-3, "auto"]),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_a_node_that_returns_has_the_same_bits_wherever_it_was_lost(numbers, bits, span, data):
    a, numels, options = Assignment(*numbers), [7, 12], {"bits": bits, "span": span, "segment_nbytes": 40}
    gradients, expected = undisturbed_steps(a, numels, 6, options)

    absent = data.draw(st.integers(0, a.nodes - 1), "absent")
    others = st.sets(st.sampled_from([rank for rank in range(a.nodes) if rank != absent]))
    loss = st.tuples(st.integers(1, 30), others, st.booleans(), st.integers(0, 15))
    losses = data.draw(st.lists(loss, min_size=1, max_size=3), "losses")
    remember = data.draw(st.sampled_from([0, 1, 2, 16]), "remember")
    shared = {"sent": {}, "closed": set(), "views": set(), "dropped": False, "news": threading.Condition()}
    ends = [Absent(shared, rank, a.nodes, absent, losses) for rank in range(a.nodes)]
    nodes = [BlockAverage(a, rank, numels, ends[rank], remember=remember, **options) for rank in range(a.nodes)]
    results = on_all(a.nodes, lambda rank: averages_in_steps(nodes[rank], gradients))
    for rank, result in enumerate(results):
        if rank == absent and isinstance(result, RanksLostError):
            assert shared["dropped"] or shared["closed"]
            assert "restart all ranks from a checkpoint" in str(result)
            continue
        if isinstance(result, Exception):
            raise result
        assert_same_steps(result, expected)
    assert all(node._kept is None for node in nodes) or any(end.lost for end in ends)


def test_checks_hold_when_a_rank_is_lost():
    a, numels = Assignment(4, 2), [16]
    for wrong, match in (
        ("block", "block 3 of the mini-batch has other gradients"),
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


# ------------------------------------------------------------------------------------------------ exchanges


class Cut(MulticastSocket):
    """A card that neither sends nor receives for a time."""

    until = 0.0

    def send(self, header, payload=b""):
        return True if time.monotonic() < Cut.until else super().send(header, payload)

    def receive(self):
        while (raw := super().receive()) is not None:
            if time.monotonic() >= Cut.until:
                return raw
        return None


def cut_off(rank, world):
    sizes = [30_000] * world

    def exchange(turn, gone=()):
        incoming = places(rank, sizes)
        wanted = [[] if k in gone else ranges for k, ranges in enumerate(everything(rank, sizes))]
        multicast.exchange(content(rank, sizes[0], turn), incoming, wanted)
        there = [k for k in range(world) if k != rank and k not in gone]
        return all(torch.equal(incoming[k], content(k, sizes[k], turn)) for k in there)

    with patch.object(probe, "MulticastSocket", Cut):
        multicast = Multicast(dist.group.WORLD, timeout_s=LIMIT_S, silence_s=PATIENCE_S / 2, tolerate=1, mtu=1500)
    assert exchange(0)
    dist.barrier()
    if rank == 1:
        Cut.until = time.monotonic() + PATIENCE_S
        time.sleep(PATIENCE_S)  # computing: nobody knows better than the others that they are waiting
    told = None
    for turn in (1, 2):  # who has all that it wants of an exchange hears of a loss in the next
        try:
            assert exchange(turn)
        except RanksLostError as error:
            told = error
            break
    if rank != 1:
        assert multicast.lost == (1,)
        assert all(exchange(turn, gone=(1,)) for turn in range(10, 13))
        with pytest.raises(RanksLostError, match="rank 1 lost before"):
            exchange(13)
    dist.barrier()  # those that go on are there to say so
    multicast.close()
    return told.ranks, str(told)


def test_a_rank_that_was_cut_off_is_told_that_the_others_go_on_without_it():
    told = run_ranks(cut_off, 4, timeout_s=LIMIT_S)
    assert [ranks for ranks, _ in told] == [(1,)] * 4
    assert "have gone on without this rank" in told[1][1]


# ------------------------------------------------------------------------------------------------ real losses

WORLD, STEPS, SAMPLES = 4, 8, 30


def step_of(model, optimizer, step):
    optimizer.zero_grad()
    x, y = model.split(*batch(step, SAMPLES))
    loss_of(model(x), y).backward()
    optimizer.step()


def undisturbed(rank, world):
    model = nb.CodedDataParallel(mlp(dropout=0.2), 2, "broadcast")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        step_of(model, optimizer, step)
    return flat(model), list(model.state_dict())


@pytest.fixture(scope="module")
def expected():
    return run_ranks(undisturbed, WORLD, timeout_s=LIMIT_S)[0]


class KilledWhileSending(MulticastSocket):
    """Its process is killed after so many datagrams."""

    left = 1 << 60

    def send(self, header, payload=b""):
        KilledWhileSending.left -= 1
        if KilledWhileSending.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().send(header, payload)


class KilledOrCut(KilledWhileSending, Cut):
    """Either, or neither."""


def live(pipe, rank, store, fates, naps, cuts, remember):
    """One rank's training. A fate is the step before which a rank is killed, or begins to be, after some datagrams; a
    cut is one from which on it is cut off for some seconds.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def tell(message):
        pipe.send_bytes(pickle.dumps(message))  # tensors' contents, not their places in shared memory

    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=limit)
    with patch.object(probe, "MulticastSocket", KilledOrCut):
        model = nb.CodedDataParallel(mlp(dropout=0.2), 2, tolerate=1, patience=PATIENCE_S, remember=remember)
    dist.destroy_process_group()  # nothing of it is needed from here on
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with capture() as messages:
        try:
            for step in range(STEPS):
                tell(step)
                time.sleep(naps.get((rank, step), 0.0))
                if (rank, step) in cuts:
                    Cut.until = time.monotonic() + cuts[rank, step]
                at, datagrams = fates.get(rank, (None, 0))
                if at == step:
                    KilledWhileSending.left = datagrams
                    if not datagrams:
                        os.kill(os.getpid(), signal.SIGKILL)
                step_of(model, optimizer, step)
        except Exception as error:
            tell((type(error), str(error), getattr(error, "ranks", None)))
        else:
            tell((flat(model), model.lost, model.stats().total.steps, list(model.state_dict()), messages))
    model.transport.close()


class Ranks:
    """Processes, one for each rank, that the test may kill, stop and continue."""

    def __init__(self, *arguments):
        context = get_context("forkserver")
        self.processes, self._pipes = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=live, args=(theirs, rank, *arguments))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def answers(self, ranks, until=lambda message: not isinstance(message, int)):
        """The first message of each rank that is awaited; "died" for a rank that is dead."""
        found, deadline = {}, time.monotonic() + LIMIT_S
        while len(found) < len(ranks):
            pending = {self._pipes[rank]: rank for rank in ranks if rank not in found}
            ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(pending.values())} hang"
            for pipe in ready:
                try:
                    message = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    message = "died"
                if message == "died" or until(message):
                    found[pending[pipe]] = message
        return [found[rank] for rank in ranks]

    def signal(self, rank, number):
        os.kill(self.processes[rank].pid, number)


@contextlib.contextmanager
def training(tmp_path, fates=(), naps=(), cuts=(), remember=16) -> Iterator[Ranks]:
    ranks = Ranks(str(tmp_path / "store"), dict(fates), dict(naps), dict(cuts), remember)
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def assert_undisturbed(answers, expected, lost):
    parameters, keys = expected
    warned = []
    for answer in answers:
        assert isinstance(answer[0], torch.Tensor), answer
        found, gone, steps, state, messages = answer
        assert torch.equal(found, parameters)
        assert gone == (lost,)
        assert steps == STEPS
        assert state == keys
        warned += messages
    (message,) = warned
    assert f"rank {lost} is lost" in message


@pytest.mark.parametrize(
    ("lost", "step", "datagrams"),
    [
        (2, 0, 0),  # before anything was exchanged
        (0, 3, 1),  # the host of what ranks meet at, between its gradients and the rest of the step
        (3, 4, 9),  # somewhere in the exchanges of a step, or of the next
    ],
)
def test_no_step_is_lost_with_a_rank_that_is_killed(tmp_path, expected, lost, step, datagrams):
    others = [rank for rank in range(WORLD) if rank != lost]
    slow = {(others[-1], step): 1.5 * PATIENCE_S} if not datagrams else {}  # computes while others wait: not lost
    with training(tmp_path, {lost: (step, datagrams)}, slow) as ranks:
        assert_undisturbed(ranks.answers(others), expected, lost)
        assert ranks.answers([lost]) == ["died"]


def test_no_step_is_lost_with_a_rank_that_is_killed_at_any_time(tmp_path, expected):
    with training(tmp_path) as ranks:
        ranks.answers([1], until=lambda message: message == 2)
        time.sleep(random.random() * 0.05)
        ranks.signal(1, signal.SIGKILL)
        assert_undisturbed(ranks.answers([0, 2, 3]), expected, 1)


@pytest.mark.parametrize("remember", [0, 1])
def test_a_rank_that_was_stopped_for_too_long_is_told_so(tmp_path, expected, remember):
    with training(tmp_path, naps={(0, STEPS - 1): 5.0}, remember=remember) as ranks:
        ranks.answers([2], until=lambda message: message == 3)
        ranks.signal(2, signal.SIGSTOP)
        ranks.answers([0], until=lambda message: message == STEPS - 1)
        ranks.signal(2, signal.SIGCONT)
        ((kind, said, at_fault),) = ranks.answers([2])
        assert (kind, at_fault) == (RanksLostError, (2,))
        assert "the other ranks go on without this one" in said
        assert "restart all ranks from a checkpoint" in said
        assert ("it was away for too long" in said) == (remember > 0)
        answers = ranks.answers([0, 1, 3])
        messages = [message for answer in answers for message in answer[-1]]
        assert ["cannot return" in message for message in messages] == [False, True][: 1 + remember]
        assert_undisturbed([(*answer[:-1], messages[:1] * (answer is answers[0])) for answer in answers], expected, 2)


def assert_all_are_back(answers, expected, said):
    parameters, keys = expected
    for answer in answers:
        assert isinstance(answer[0], torch.Tensor), answer
        found, gone, steps, state, _ = answer
        assert torch.equal(found, parameters)
        assert (gone, steps, state) == ((), STEPS, keys)
    messages = [message for answer in answers for message in answer[-1]]
    for part, times in said.items():
        assert sum(part in message for message in messages) == times, messages


def test_ranks_that_were_stopped_return_and_end_with_the_same_bits(tmp_path, expected):
    naps = {(1, 3): 1.0, (1, 6): 1.0}  # the others are still at it
    with training(tmp_path, naps=naps) as ranks:
        for lost, stopped, goes_on in (
            (2, 1, 3),
            (0, 5, 6),
        ):  # rank 0 keeps what rank 2 missed, and then is lost itself
            ranks.answers([lost], until=lambda message, step=stopped: message == step)
            ranks.signal(lost, signal.SIGSTOP)
            ranks.answers([1], until=lambda message, step=goes_on: message == step)
            ranks.signal(lost, signal.SIGCONT)
        said = {"rank 2 is lost": 1, "rank 2 is back": 1, "rank 0 is lost": 1, "rank 0 is back": 1, "this one": 2}
        assert_all_are_back(ranks.answers(range(WORLD)), expected, said)


def test_a_rank_that_was_cut_off_returns_and_ends_with_the_same_bits(tmp_path, expected):
    cut_s = 2.5 * PATIENCE_S
    with training(tmp_path, naps={(3, 5): cut_s}, cuts={(1, 2): cut_s}) as ranks:
        said = {"rank 1 is lost": 1, "rank 1 is back": 1, "this one": 1, "cannot return": 0}
        assert_all_are_back(ranks.answers(range(WORLD)), expected, said)


def cut_off_for_good(rank, world):
    with patch.object(probe, "MulticastSocket", Cut):
        multicast = Multicast(
            dist.group.WORLD, timeout_s=2 * PATIENCE_S, silence_s=PATIENCE_S, tolerate=1, readmits=True, mtu=1500
        )
    incoming = places(rank, [8] * world)
    wanted = everything(rank, [8] * world)
    multicast.exchange(content(rank, 8, 0), incoming, wanted)
    dist.barrier()
    if rank == 1:
        Cut.until = time.monotonic() + LIMIT_S
    told = []
    for attempt in (lambda: multicast.exchange(content(rank, 8, 1), incoming, wanted), multicast.rejoin):
        if rank == 1:
            with pytest.raises(RanksLostError) as caught:
                attempt()
            told.append((caught.value.ranks, str(caught.value)))
    dist.barrier()
    multicast.close()
    return told


def test_a_rank_that_nobody_answers_does_not_wait_for_ever():
    told = run_ranks(cut_off_for_good, 3, timeout_s=LIMIT_S)
    (ranks, said), (at_end, why) = told[1]
    assert ranks == at_end == (1,)
    assert "this rank is cut off" in said
    assert "no other rank answered within 8 s" in why


def test_two_ranks_that_are_killed_are_an_error_on_the_others(tmp_path):
    with training(tmp_path, {1: (2, 0), 3: (2, 0)}) as ranks:
        for kind, _, at_fault in ranks.answers([0, 2]):
            assert kind is RanksLostError
            assert at_fault
        assert ranks.answers([1, 3]) == ["died"] * 2


# ------------------------------------------------------------------------------------------------ arguments


def misuse(rank, world):
    def refused(**options):
        return refusal(lambda: nb.CodedDataParallel(mlp(), **{"tolerate": 1, **options}))

    told = [
        refused(redundancy=1),
        refused(tolerate=2),
        refused(patience=0.0),
        refused(remember=-1),
        refused(transport="broadcast"),
        refused(transport=nb.coded.Broadcast(dist.group.WORLD)),
        refused(redundancy=3),
    ]
    with patch.object(probe, "MulticastSocket", Deaf):
        told.append(refused(transport="auto"))
    return told


def test_what_cannot_tolerate_a_loss_is_refused_alike_on_all_ranks():
    results = run_ranks(misuse, 3, timeout_s=LIMIT_S)
    assert results == [results[0]] * 3
    expected = [
        ("ValueError", "tolerate=1 takes redundancy=2 or more, not 1"),
        ("ValueError", "tolerate=2 is neither 0 nor 1"),
        ("ValueError", "patience=0.0"),
        ("ValueError", "remember=-1"),
        ("UnsupportedError", "tolerate=1 takes transport='multicast'"),
        ("UnsupportedError", "the transport, broadcast, has tolerate=0"),
        ("ValueError", "redundancy=3 must be at least 1 and less than"),
        ("UnsupportedError", "tolerate=1 takes multicast, and multicast does not reach all ranks"),
    ]
    for (kind, message), (expected_kind, part) in zip(results[0], expected, strict=True):
        assert (kind, part in message) == (expected_kind, True), message


def two_of_them(rank, world):
    return [
        refusal(lambda: Multicast(dist.group.WORLD, tolerate=1)),
        refusal(lambda: Multicast(dist.group.WORLD, tolerate=2)),
        refusal(lambda: Multicast(dist.group.WORLD, silence_s=0.0)),
    ]


def test_of_two_ranks_none_can_be_lost():
    for (few, of_two), (wrong, _), (silence, said) in run_ranks(two_of_them, 2, timeout_s=LIMIT_S):
        assert (few, wrong, silence) == ("UnsupportedError", "ValueError", "ValueError")
        assert "of 2 ranks none can be lost" in of_two
        assert "silence_s is 0.0" in said
