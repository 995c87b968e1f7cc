"""Ranks that are killed, stopped or cut off in real training: the others go on, and who returns has the same bits."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

import narrowband as nb
from narrowband.transport import Broadcast
from narrowband.transport.contract import RanksLostError
from narrowband.transport.sockets import MulticastSocket
from tests.coded.training import batch, flat, loss_of, mlp
from tests.gradients.training import refusal
from tests.ranks import run_ranks
from tests.thorough import thorough
from tests.transport.exchanges import LIMIT_S, SHORT_S, Cut, Deaf, Patient, capture, faults, wait_for

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


# ------------------------------------------------------------------------------------------------ real losses


class KilledWhileSending(MulticastSocket):
    """Its process is killed after so many datagrams."""

    left = 1 << 60

    def send(self, header, payload=b""):
        KilledWhileSending.left -= 1
        if KilledWhileSending.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().send(header, payload)


class CutWhileReceiving(Cut):
    """It is cut after so many datagrams that arrive, for so many seconds, and then again."""

    cuts: ClassVar[list[tuple[int, float]]] = []
    arrived = 0

    def receive(self):
        raw = super().receive()
        if raw is not None and CutWhileReceiving.cuts:
            CutWhileReceiving.arrived += 1
            after, seconds = CutWhileReceiving.cuts[0]
            if CutWhileReceiving.arrived >= after:
                CutWhileReceiving.cuts.pop(0)
                CutWhileReceiving.arrived, Cut.is_cut = 0, True
                if seconds < math.inf:
                    threading.Timer(seconds, mend).start()
        return raw


def mend():
    Cut.is_cut = False


class KilledOrCut(KilledWhileSending, CutWhileReceiving):
    """Either, or neither."""


@dataclass
class Script:
    """What happens to which rank, and before which of its steps.

    Attributes:
        fates: of a rank, the step before which it is killed, or after how many datagrams from there on.
        killed: the rank that the test kills at any time.
        cuts: (rank, step) from which on a card neither sends nor receives, until the test releases the rank.
        received: how many datagrams still arrive after the beginning of that step.
        drops: of a rank, how many datagrams arrive until its card is cut, for how many seconds, until it is cut again.
        stops: (rank, step) that stop themselves, until the test continues them.
        holds: (rank, step) that wait until the test releases them.
        waits: of a rank, the step from which on it waits, before each step, while a lost rank does not ask to return.
        rejoin_steps: see CodedDataParallel.
    """

    fates: dict[int, tuple[int, int]] = field(default_factory=dict)
    killed: int | None = None
    cuts: set[tuple[int, int]] = field(default_factory=set)
    received: int = 0
    drops: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    stops: set[tuple[int, int]] = field(default_factory=set)
    holds: set[tuple[int, int]] = field(default_factory=set)
    waits: dict[int, int] = field(default_factory=dict)
    rejoin_steps: int = 16

    def losable(self, rank, step):
        """The ranks that others may find lost in a step: all others if this rank is cut off itself."""
        if any(rank == other and step - at in (0, self.received > 0) for other, at in self.cuts):
            return frozenset(range(WORLD))
        if rank in self.drops:
            return frozenset(range(WORLD))
        found = {other for other, at in self.cuts | self.stops if at == step} | set(self.drops)
        found |= {other for other, at in self.cuts if self.received and step == at + 1}
        found |= {other for other, (at, _) in self.fates.items() if at <= step <= at + 2}
        return frozenset(found | ({self.killed} - {None}))


def live(pipe, rank, store, script):
    """One rank's training."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def tell(message):
        pipe.send_bytes(pickle.dumps(message))  # tensors' contents, not their places in shared memory

    def is_released():
        pipe.recv_bytes()
        mend()

    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=limit)
    with faults(KilledOrCut):
        model = nb.CodedDataParallel(
            mlp(dropout=0.2), 2, max_failures=1, silence_timeout=SHORT_S, rejoin_steps=script.rejoin_steps
        )
    dist.barrier()
    dist.destroy_process_group()  # nothing of it is needed from here on
    CutWhileReceiving.cuts = script.drops.get(rank, [])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with capture() as messages:
        try:
            for step in range(STEPS):
                tell(step)
                Patient.losable = script.losable(rank, step)
                if (rank, step) in script.stops:
                    os.kill(os.getpid(), signal.SIGSTOP)
                if (rank, step) in script.holds:
                    is_released()
                if step >= script.waits.get(rank, STEPS):
                    wait_for(lambda: not model.lost or model.transport.returning)
                if (rank, step) in script.cuts:
                    Cut.is_cut = not script.received
                    CutWhileReceiving.cuts = [(script.received, math.inf)] * (script.received > 0)
                    threading.Thread(target=is_released, daemon=True).start()
                at, datagrams = script.fates.get(rank, (None, 0))
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

    def release(self, rank):
        with contextlib.suppress(BrokenPipeError):  # the rank has failed: its answer says why
            self._pipes[rank].send_bytes(b"go on")


@contextlib.contextmanager
def training(tmp_path, **script) -> Iterator[Ranks]:
    ranks = Ranks(str(tmp_path / "store"), Script(**script))
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
        (0, 3, 1),  # the host of what ranks meet at, between its gradients and the rest of the step
        *thorough(
            (2, 0, 0),  # before anything was exchanged
            (3, 4, 9),  # somewhere in the exchanges of a step, or of the next
        ),
    ],
)
def test_no_step_is_lost_with_a_rank_that_is_killed(tmp_path, expected, lost, step, datagrams):
    others = [rank for rank in range(WORLD) if rank != lost]
    with training(tmp_path, fates={lost: (step, datagrams)}) as ranks:
        assert_undisturbed(ranks.answers(others), expected, lost)
        assert ranks.answers([lost]) == ["died"]


def test_no_step_is_lost_with_a_rank_that_is_killed_at_any_time(tmp_path, expected):
    with training(tmp_path, killed=1, holds={(0, STEPS - 1)}) as ranks:
        ranks.answers([1], until=lambda message: message == 2)
        time.sleep(random.random() * 0.05)  # in any step until the last
        ranks.signal(1, signal.SIGKILL)
        ranks.release(0)
        assert_undisturbed(ranks.answers([0, 2, 3]), expected, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("rejoin_steps", [1, *thorough(0)])
def test_a_rank_that_was_stopped_for_too_long_is_told_so(tmp_path, expected, rejoin_steps):
    with training(tmp_path, stops={(2, 3)}, holds={(0, STEPS - 1)}, rejoin_steps=rejoin_steps) as ranks:
        ranks.answers([0], until=lambda message: message == STEPS - 1)
        ranks.signal(2, signal.SIGCONT)
        ((kind, said, at_fault),) = ranks.answers([2])
        assert (kind, at_fault) == (RanksLostError, (2,))
        assert "the other ranks go on without this one" in said
        assert "restart all ranks from a checkpoint" in said
        assert ("it was away for too long" in said) == (rejoin_steps > 0)
        ranks.release(0)
        answers = ranks.answers([0, 1, 3])
        messages = [message for answer in answers for message in answer[-1]]
        assert ["cannot return" in message for message in messages] == [False, True][: 1 + rejoin_steps]
        assert_undisturbed([(*answer[:-1], messages[:1] * (answer is answers[0])) for answer in answers], expected, 2)


def assert_all_are_back(answers, expected, said):
    assert all(isinstance(answer[0], torch.Tensor) for answer in answers), answers
    messages = [message for answer in answers for message in answer[-1]]
    for part, times in said.items():
        assert sum(part in message for message in messages) == times, messages
    parameters, keys = expected
    for found, gone, steps, state, _ in answers:
        assert torch.equal(found, parameters)
        assert (gone, steps, state) == ((), STEPS, keys)


def test_ranks_that_were_stopped_return_and_end_with_the_same_bits(tmp_path, expected):
    with training(tmp_path, stops={(2, 2), (0, 5)}, waits={1: 0}) as ranks:
        for lost, goes_on in ((2, 3), (0, 6)):  # rank 0 keeps what rank 2 missed, and then is lost itself
            ranks.answers([1], until=lambda message, step=goes_on: message == step)
            ranks.signal(lost, signal.SIGCONT)
        said = {"rank 2 is lost": 1, "rank 2 is back": 1, "rank 0 is lost": 1, "rank 0 is back": 1, "this one": 2}
        assert_all_are_back(ranks.answers(range(WORLD)), expected, said)


@pytest.mark.parametrize("received", [0, 1, *thorough(2, 3, 4, 5, 6, 8, 10, 15, 20)])
def test_a_rank_that_was_cut_off_returns_and_ends_with_the_same_bits(tmp_path, expected, received):
    with training(tmp_path, cuts={(1, 2)}, received=received, waits={0: 5}) as ranks:
        ranks.answers([0], until=lambda message: message == 5)
        ranks.release(1)
        said = {"rank 1 is lost": 1, "rank 1 is back": 1, "this one": 1, "cannot return": 0}
        assert_all_are_back(ranks.answers(range(WORLD)), expected, said)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(12))
def test_a_rank_whose_card_is_cut_again_and_again_ends_with_the_same_bits(tmp_path, expected, seed):
    rng = random.Random(seed)
    drops = [(rng.randrange(1, 60), rng.choice([0.05, 2 * SHORT_S, 3 * SHORT_S])) for _ in range(rng.randrange(2, 5))]
    with training(tmp_path, drops={seed % WORLD: drops}, waits=dict.fromkeys(range(WORLD), 0)) as ranks:
        assert_all_are_back(ranks.answers(range(WORLD)), expected, {"cannot return": 0})


def test_two_ranks_that_are_killed_are_an_error_on_the_others(tmp_path):
    with training(tmp_path, fates={1: (2, 0), 3: (2, 0)}) as ranks:
        for kind, _, at_fault in ranks.answers([0, 2]):
            assert kind is RanksLostError
            assert at_fault
        assert ranks.answers([1, 3]) == ["died"] * 2


# ------------------------------------------------------------------------------------------------ arguments


def misuse(rank, world):
    def refused(**options):
        return refusal(lambda: nb.CodedDataParallel(mlp(), **{"max_failures": 1, **options}))

    told = [
        refused(redundancy=1),
        refused(max_failures=2),
        refused(silence_timeout=0.0),
        refused(rejoin_steps=-1),
        refused(transport="broadcast"),
        refused(transport=Broadcast(dist.group.WORLD)),
        refused(redundancy=3),
    ]
    with faults(Deaf):
        told.append(refused(transport="auto"))
    return told


def test_what_cannot_tolerate_a_loss_is_refused_alike_on_all_ranks():
    results = run_ranks(misuse, 3, timeout_s=LIMIT_S)
    assert results == [results[0]] * 3
    expected = [
        ("ValueError", "max_failures=1 needs redundancy=2 or more, not 1"),
        ("ValueError", "max_failures=2; expected 0 or 1"),
        ("ValueError", "silence_timeout=0.0"),
        ("ValueError", "rejoin_steps=-1"),
        ("UnsupportedError", "max_failures=1 needs transport='multicast'"),
        ("UnsupportedError", "the transport, broadcast, has max_failures=0"),
        ("ValueError", "redundancy=3 must be at least 1 and less than"),
        ("UnsupportedError", "max_failures=1 needs multicast, but multicast does not reach all ranks"),
    ]
    for (kind, message), (expected_kind, part) in zip(results[0], expected, strict=True):
        assert (kind, part in message) == (expected_kind, True), message
