"""Ctrl-C anywhere in a round: the peer goes on, and its residuals are those of the round's outcome."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import narrowband as nb
from narrowband.updates import fragments
from narrowband.updates.connections import Connections
from tests.gradients.training import flat, loss_of, refusal, sgd, train
from tests.ranks import run_ranks
from tests.thorough import thorough
from tests.updates.peers import LONG_S, Normed, everything, join

#: The files of rounds among peers, at the lines of which Ctrl-C comes.
_ROUNDS = tuple(f"updates/{name}.py" for name in ("elastic", "newcomers", "connections", "rendezvous"))


def interrupted(rank, world_size, address, where):
    """Peer 2 is interrupted in its fourth round, and its program goes on: what all have after each round; what it
    keeps of its residuals before and after; and in how many rounds somebody was missing.
    """
    model, optimizer, handle = join(address, rank, model=Normed(0), begin_with=world_size, exchange_s=10 * LONG_S)
    side = nb.Rendezvous(address).connect()
    opens = handle._open

    def breaks(view):
        handle._open = opens
        raise RuntimeError("the wire broke")

    def stops(method, *, after):
        """Ctrl-C comes before a method, or, where it waits in C++, when it returns."""

        def stopping(*given, **options):
            now = handle.rounds == 3 and not side.check(["stopped"])
            if now and where == "in an exchange":
                side.wait(["0 is in it", "1 is in it"])
            result = None if now and not after else method(*given, **options)
            if now and where == "when it has been put into the round, and the others are in it":
                side.wait(["0 is in it", "1 is in it"])
            elif now and where == "when it has been put into the round, and the others connect":
                side.wait(["0 connects", "1 connects"])
            if now:
                side.set("stopped", "1")
                raise KeyboardInterrupt
            return result

        return stopping

    if rank == 2:
        if where == "in an exchange":
            handle.feed = stops(handle.feed, after=False)
        elif where == "after an exchange":
            handle._exchange = stops(handle._exchange, after=True)
        elif where == "after the vote":
            handle._meeting.vote = stops(handle._meeting.vote, after=True)
        elif where == "while the mean is applied":
            handle._apply = stops(handle._apply, after=False)
        elif where == "when it has its update":
            handle._snapshot = stops(handle._snapshot, after=False)
        elif where.startswith("while it takes its update"):
            difference = fragments._take_difference
            fragments._take_difference = stops(difference, after=True)  # the first tensor has changed
        else:
            waits = handle._meeting._meet
            handle._meeting._meet = stops(waits, after=where.startswith("when it has been put into the round"))
    else:
        feed = handle.feed

        def fed(*given, **options):
            if handle.rounds == 3:
                side.set(f"{rank} is in it", "1")
            return feed(*given, **options)

        def opened(view):
            side.set(f"{rank} connects", "1")
            return opens(view)

        handle.feed, handle._open = fed, opened
    seen, kept, missing = {}, [], 0
    for step in range(100):
        if handle.rounds == 7:
            break
        before = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
        if rank == 0 and handle.rounds == 3 and where.endswith("the others connect"):
            handle._hang_up()  # so all connect anew
        try:
            train(model, rank, [step], optimizer)
        except KeyboardInterrupt:
            if where.endswith("the next exchange breaks off"):
                handle._open = breaks
            kept = [before, {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}]
            continue
        if not handle.steps:
            seen[handle.rounds] = everything(model)
            missing += len(handle.peers) < world_size
    handle.remove()
    if where.startswith("while it takes its update") and rank == 2:
        fragments._take_difference = difference
    return seen, kept, missing


@pytest.mark.parametrize(
    "where",
    [
        "while it takes its update",
        "while it takes its update, and the next exchange breaks off",
        "when it has its update",
        "while it waits",
        "when it has been put into the round",
        "when it has been put into the round, and the others are in it",
        "when it has been put into the round, and the others connect",
        "in an exchange",
        "after an exchange",
        "after the vote",
        "while the mean is applied",
    ],
)
def test_a_peer_that_was_interrupted_goes_on_and_is_equal_again(store, where):
    """And nobody waits for a time-out, which would be many minutes."""
    results = run_ranks(interrupted, 3, store, where, group=False)
    first = results[0][0]
    assert list(first) == [2, 3, 4, 5, 6, 7]
    for rank, (seen, kept, missing) in enumerate(results):
        voted = rank == 2 and where in ("after the vote", "while the mean is applied")
        assert list(seen) == [rounds for rounds in first if not voted or rounds != 4]
        assert all(torch.equal(seen[rounds], first[rounds]) for rounds in seen)
        assert missing == 0
        if rank == 2 and not voted:
            before, after = kept
            assert all(torch.equal(before[name], after[name]) for name in before)


def interrupted_while_connecting(rank, world_size):
    """A process that is alone connects; Ctrl-C comes while PyTorch makes the group; it connects again."""
    connections = Connections(nb.Rendezvous("localhost:1"))
    view = SimpleNamespace(rank=rank, size=world_size)
    with (
        mock.patch.object(distributed_c10d, "_new_process_group_helper", create_and_stop),
        pytest.raises(KeyboardInterrupt),
    ):
        connections.open(view, dist.HashStore())
    connections.close()
    x = torch.ones(3)
    dist.all_reduce(x, group=connections.open(view, dist.HashStore()))
    connections.close()
    return x.tolist(), dist.is_initialized()


def create_and_stop(*given, create=distributed_c10d._new_process_group_helper, **options):
    create(*given, **options)
    raise KeyboardInterrupt


def test_a_peer_that_was_interrupted_while_it_connected_can_connect_again():
    assert run_ranks(interrupted_while_connecting, 1, group=False) == [([1.0] * 3, False)]


def interrupt(stop_at, passed, until=None):
    """Let Ctrl-C come at one of the lines of rounds among peers that run from now on, for the first time each, until a
    function is called; note those before it.
    """

    def traced(frame, event, _):
        code = frame.f_code
        if not code.co_filename.endswith(_ROUNDS):
            return None
        if code.co_name == until:
            sys.settrace(None)
            return None
        if event == "line" and (line := (code.co_filename, frame.f_lineno)) not in passed:
            passed.append(line)
            if len(passed) == stop_at:
                raise KeyboardInterrupt  # which ends the tracing
        return traced

    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # those that run already
        frame.f_trace = traced
    sys.settrace(traced)


def interrupted_anywhere(rank, world_size, address, where, apart):
    """One run for each line of a round, or for lines so far apart, in which Ctrl-C comes there: whether the round was
    committed; the residuals before and after it; and what keeps the peer from its next round.
    """
    seen = []
    for line in range(1, 1000, apart):
        model, optimizer, handle = join(address, rank, optimizer=sgd, every=1, begin_with=1, run=f"{where} {line}")
        train(model, rank, [0], optimizer)
        before = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
        passed, turn = [], handle._meeting._turn()
        exchange, vote = handle._exchange, handle._meeting.vote

        def breaks_off(fragments, handle=handle, exchange=exchange, line=line, passed=passed, **options):
            handle._exchange = exchange
            exchange(fragments, **options)
            handle._engine.error = RuntimeError("the wire broke")
            interrupt(line, passed, until="arrive")
            raise handle._engine.error

        def is_interrupted(view, handle=handle, vote=vote, line=line, passed=passed, **options):
            handle._meeting.vote = vote
            if where == "again after the vote":
                vote(view, **options)
            interrupt(line, passed)
            raise KeyboardInterrupt

        if where == "where the exchange breaks off":
            handle._exchange = breaks_off
        elif where.startswith("again"):  # it comes once where the peer votes, and once more after that
            handle._meeting.vote = is_interrupted
        optimizer.zero_grad()
        loss_of(model, 1, rank).backward()
        with contextlib.suppress(KeyboardInterrupt):
            if where == "anywhere":
                interrupt(line, passed)
            optimizer.step()
        sys.settrace(None)
        after = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
        last = handle._meeting._turn()
        committed = last > turn and handle._meeting._outcome(last) == "commit"
        seen.append((committed, before, after, refusal(lambda handle=handle: handle._check_between_steps("average"))))
        handle.remove()
        if len(passed) < line:
            return seen
    raise AssertionError("a round has fewer lines")


WHERE = ["anywhere", "where the exchange breaks off", "again before the vote", "again after the vote"]


@pytest.mark.parametrize(
    ("where", "apart"), [*((where, 2) for where in WHERE), *thorough(*((where, 1) for where in WHERE))]
)
def test_wherever_a_peer_is_interrupted_its_residuals_are_those_of_the_rounds_outcome(store, where, apart):
    """Of a round that was committed they are what it did not send, and otherwise those before it."""
    (seen,) = run_ranks(interrupted_anywhere, 1, store, where, apart, group=False, timeout_s=300.0)
    outcomes = [committed for committed, *_ in seen]
    expected = {"again before the vote": {False}, "again after the vote": {True}}.get(where, {False, True})
    assert set(outcomes) == expected
    assert len(seen) > (80 if where == "anywhere" else 10) / apart
    sent = next((after for committed, _, after, _ in reversed(seen) if committed), None)
    for committed, before, after, refused in seen:
        assert refused is None
        assert not committed or not all(torch.equal(after[name], before[name]) for name in before)
        due = sent if committed else before
        assert all(torch.equal(after[name], due[name]) for name in before)


def interrupted_and_away(rank, world_size, address):
    """Peer 1 is interrupted in the exchange of its fourth round, and calls nothing of its handle until peer 0 has given
    that round up.
    """
    model, optimizer, handle = join(address, rank, begin_with=world_size, exchange_s=LONG_S)
    side, feed, undo = nb.Rendezvous(address).connect(), handle.feed, handle._undo

    def fed(*given, **options):
        if handle.rounds == 3 and rank == 0:
            side.set("0 is in it", "1")
        elif handle.rounds == 3 and not side.check(["stopped"]):
            side.wait(["0 is in it"])
            side.set("stopped", "1")
            raise KeyboardInterrupt
        return feed(*given, **options)

    def undone(*given):
        undo(*given)
        side.set(f"{rank} has given it up", "1")

    handle.feed, handle._undo = fed, undone
    seen = {}
    for step in range(100):
        if handle.rounds == 6:
            break
        try:
            train(model, rank, [step], optimizer)
        except KeyboardInterrupt:
            side.wait(["0 has given it up"])
            continue
        if not handle.steps:
            seen[handle.rounds] = len(handle.peers), flat(model)
    handle.remove()
    return seen


def test_nobody_waits_for_a_peer_that_was_interrupted_in_a_round_and_does_something_else(store):
    """It says so at once, and not when its handle is called next; otherwise this would take minutes."""
    results = run_ranks(interrupted_and_away, 2, store, group=False)
    for seen in results:
        assert {rounds: peers for rounds, (peers, _) in seen.items()} == dict.fromkeys(range(2, 7), 2)
        assert all(torch.equal(x, results[0][rounds][1]) for rounds, (_, x) in seen.items())


def interrupted_while_it_is_put_in(rank, world_size, address):
    """Peer 2 is interrupted while it waits for its fourth round, when the others have seen it there and are about to
    put it into the round. It does nothing then until the others have given that round up.
    """
    model, optimizer, handle = join(address, rank, begin_with=world_size, exchange_s=LONG_S)
    side, meeting = nb.Rendezvous(address).connect(), handle._meeting
    waits, records = meeting._meet, meeting._records

    def stops(turn, own, end):
        if handle.rounds < 3 or side.check(["stopped"]):
            return waits(turn, own, end)
        side.wait(["0 has seen it", "1 has seen it"])
        raise KeyboardInterrupt

    def sees(turn):
        found = records(turn)
        if handle.rounds == 3 and len(found) == world_size and not side.check(["stopped"]):
            side.set(f"{rank} has seen it", "1")
            side.wait(["stopped"])
        return found

    if rank == 2:
        meeting._meet = stops
    else:
        meeting._records = sees
    seen = {}
    for step in range(100):
        if handle.rounds == 6:
            break
        try:
            train(model, rank, [step], optimizer)
        except KeyboardInterrupt:
            turn = meeting._turn() + 1
            side.set("stopped", "1")
            for _ in meeting._looks(f"{turn}/outcome"):
                pass
            continue
        if not handle.steps:
            seen[handle.rounds] = len(handle.peers), flat(model)
    handle.remove()
    return seen


def test_nobody_waits_for_a_peer_that_was_put_into_a_round_after_it_was_interrupted(store):
    results = run_ranks(interrupted_while_it_is_put_in, 3, store, group=False)
    for seen in results:
        assert {rounds: peers for rounds, (peers, _) in seen.items()} == dict.fromkeys(range(2, 7), 3)
        assert all(torch.equal(x, results[0][rounds][1]) for rounds, (_, x) in seen.items())
