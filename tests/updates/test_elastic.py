"""Peers that come, go, die, freeze and are late, as real processes with a real store."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from narrowband.averaging import replicas
from narrowband.updates import elastic, fragments
from narrowband.updates import rounds as rounds_of
from narrowband.updates.rendezvous import serve
from tests.gradients.training import adamw, flat, heard, loss_of, mlp, refusal, sgd, train
from tests.ranks import RankError, run_ranks
from tests.updates.training import nesterov

SPECS = ["none", "topk:density=0.1+ef", "qsgd:bits=2+ef", "powersgd:rank=2,min_ratio=1"]

#: Long enough never to be over where nobody is missing, so that a test that waited for it would time out.
LONG_S = 300.0


def join(
    address,
    rank,
    spec="topk:density=0.1+ef",
    model=None,
    optimizer=adamw,
    *,
    every=2,
    outer=1.0,
    weigh="steps",
    buffers="average",
    **rules,
):
    """A peer: its model, optimizer and handle. In views, peers are in the order of their ranks here."""
    model = model or mlp()
    optimizer = optimizer(model)
    rules = {"least": 1, "grace_s": LONG_S, "exchange_s": 20.0, "name": str(rank), **rules}
    peers = nb.Rendezvous(address, **rules)
    options = {"every": every, "outer": outer, "min_numel": 64, "weigh": weigh, "buffers": buffers}
    return model, optimizer, nb.compress_updates(model, optimizer, spec, peers=peers, **options)


def left_over(fn, ranks, *args, lost=1):
    """Results by rank of those that are left when some were killed."""
    with pytest.raises(RankError) as caught:
        run_ranks(fn, ranks, *args, group=False, grace_s=40.0)
    assert len(caught.value.reports) == lost, caught.value
    return caught.value.results


def wait_for(handle, name):
    """Wait until a peer has arrived at the next round."""
    meeting = handle._meeting
    while not any(entry.peer.startswith(f"{name}-") for entry in meeting._records(meeting._turn() + 1).values()):
        time.sleep(0.005)


@contextlib.contextmanager
def left_out(handle, *, there):
    """Hold a round without a peer that is late: the grace window of this peer is over as soon as ``there`` is there."""
    wait_for(handle, there)
    rules = handle._meeting._rules
    handle._meeting._rules = replace(rules, grace_s=0.01)
    yield
    handle._meeting._rules = rules


# ---- nobody is missing -----------------------------------------------------------------------------------------------


def as_peers(rank, world_size, address, specs):
    found = []
    for spec in specs:
        model, optimizer, handle = join(address, rank, spec, begin_with=world_size, run=spec)
        train(model, rank, range(7), optimizer)
        found.append((flat(model), handle.rounds, handle.steps, handle.stats().total.steps))
        handle.remove()
    return found, dist.is_initialized()


def as_replicas(rank, world_size, specs):
    found = []
    for spec in specs:
        model = mlp()
        optimizer = adamw(model)
        handle = nb.compress_updates(model, optimizer, spec, every=2, min_numel=64)
        train(model, rank, range(7), optimizer)
        found.append(flat(model))
        handle.remove()
    return found


def test_peers_meet_by_ipv6(store):
    try:
        held = serve(0, "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    for ((_, rounds, steps, exchanges),), left_behind in run_ranks(
        as_peers, 2, f"[::1]:{held.port}", ["none"], group=False
    ):
        assert (rounds, steps, exchanges, left_behind) == (4, 1, 3, False)


def test_peers_of_which_none_is_missing_are_replicas_to_the_bit(store):
    fixed = run_ranks(as_replicas, 3, SPECS)
    results = run_ranks(as_peers, 3, store, SPECS, group=False)
    for (found, left_behind), expected in zip(results, fixed, strict=True):
        assert not left_behind
        for (parameters, rounds, steps, exchanges), same in zip(found, expected, strict=True):
            assert torch.equal(parameters, same)
            assert (rounds, steps, exchanges) == (4, 1, 3)  # the first round is the beginning, in which nothing is sent


# ---- a peer is lost --------------------------------------------------------------------------------------------------


def die(handle):
    handle._meeting.leave()
    os.kill(os.getpid(), signal.SIGKILL)


def dying(rank, world_size, address, spec, when):
    """Peer 2 dies before it arrives at its third round, or in the middle of that round's exchange. Nobody waits for it
    after that.
    """
    model, optimizer, handle = join(address, rank, spec, begin_with=world_size)
    if rank == 2:
        feed = handle.feed

        def fed(*given, **options):
            if handle.rounds == 3 and when == "in the exchange":
                die(handle)
            return feed(*given, **options)

        handle.feed = fed
    seen = []
    with heard() as messages:
        for step in range(12):
            if rank == 2 and when == "before" and handle.rounds == 3 and handle.steps == 1:
                die(handle)
            train(model, rank, [step], optimizer)
            if not handle.steps:
                seen.append((handle.rounds, len(handle.peers), flat(model)))
    residual = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
    handle.remove()
    return seen, residual, any("the exchange broke off" in message for message in messages)


@pytest.mark.parametrize("spec", SPECS[:2])
def test_what_died_in_an_exchange_leaves_no_trace_of_it(store, spec):
    """The round is held again, with the updates and residuals that were there before: the same bits as if the peer had
    never come to it.
    """
    clean = left_over(dying, 3, store, spec, "before")
    address = serve(0, "127.0.0.1")
    torn = left_over(dying, 3, f"127.0.0.1:{address.port}", spec, "in the exchange")
    for rank in (0, 1):
        seen, residual, broke_off = torn[rank]
        assert broke_off
        assert not clean[rank][2]
        assert [(rounds, peers) for rounds, peers, _ in seen] == [(2, 3), (3, 3), (4, 2), (5, 2), (6, 2), (7, 2)]
        for (_, _, mine), (_, _, others), (_, _, expected) in zip(seen, torn[0][0], clean[rank][0], strict=True):
            assert torch.equal(mine, others)
            assert torch.equal(mine, expected)
        assert residual.keys() == clean[rank][1].keys()
        assert all(torch.equal(residual[name], clean[rank][1][name]) for name in residual)


def freezing(rank, world_size, address, where):
    """Peer 2 is stopped for longer than the others wait, wherever it is or in an exchange, and goes on."""
    in_exchange = where == "in an exchange"
    exchange_s = LONG_S if in_exchange else 10.0
    model, optimizer, handle = join(address, rank, begin_with=world_size, grace_s=5.0, exchange_s=exchange_s)
    side = nb.Rendezvous(address).connect()
    seen = []
    if in_exchange and rank == 2:
        feed = handle.feed

        def fed(*given, **options):
            if handle.rounds == 3 and not side.check(["stopped"]):
                side.set("stopped", "1")
                os.kill(os.getpid(), signal.SIGSTOP)
            return feed(*given, **options)

        handle.feed = fed
    if rank == 2:
        side.set("pid", str(os.getpid()))
    for step in itertools.count():
        if not in_exchange and handle.rounds == 3 and rank == 0 and not side.check(["stopped"]):
            os.kill(int(side.get("pid")), signal.SIGSTOP)
            side.set("stopped", "1")
        if handle.rounds == 6 and rank == 0 and not side.check(["woken"]):
            side.set("woken", "1")
            os.kill(int(side.get("pid")), signal.SIGCONT)
        if side.check(["enough"]) and handle.steps == 0:
            break
        train(model, rank, [step], optimizer)
        if not handle.steps:
            seen.append((handle.rounds, len(handle.peers), flat(model)))
            if handle.rounds > 6 and len(handle.peers) == 3:
                side.set("enough", "1")
        if handle.rounds >= 6:  # let it have a core
            time.sleep(0.05)
    handle.remove()
    return seen


@pytest.mark.parametrize("where", ["anywhere", "in an exchange"])
def test_a_peer_that_froze_returns_and_is_equal_again(store, where):
    """In an exchange the others wait ten times as long as the longest before it, and not until ``exchange_s`` is over:
    that would be five minutes here.
    """
    results = run_ranks(freezing, 3, store, where, group=False)
    by_round = [{rounds: parameters for rounds, _, parameters in seen} for seen in results]
    sizes = {rounds: peers for rounds, peers, _ in results[0]}
    assert min(sizes[rounds] for rounds in (5, 6)) == 2
    assert max(sizes[rounds] for rounds in sizes if rounds > 6) == 3
    for rounds in by_round[2]:
        for other in by_round[:2]:
            assert rounds not in other or torch.equal(other[rounds], by_round[2][rounds])
    assert max(by_round[2]) > 6


# ---- a peer comes ----------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """With buffers, an embedding that is frozen, and a matrix that lies otherwise."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(24, 40)
        self.norm = nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 8)
        self.kept = nn.Parameter(torch.randn(3), requires_grad=False)
        self.last.weight = nn.Parameter(self.last.weight.detach().t().contiguous().t())

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def coming(rank, world_size, address, outer):
    """Peer 2 comes when the others have held three rounds; its model is another."""
    side = nb.Rendezvous(address).connect()
    if rank == 2:
        side.wait(["three"])
    outer = nesterov if outer == "nesterov" else outer
    model, optimizer, handle = join(
        address, rank, "powersgd:rank=2,min_ratio=1", Normed(rank), outer=outer, begin_with=2, every=1
    )
    seen = [(handle.rounds, handle.step, len(handle.peers), everything(model))]
    for step in itertools.count():
        if side.check(["enough"]):
            break
        train(model, rank, [step], optimizer)
        seen.append((handle.rounds, handle.step, len(handle.peers), everything(model)))
        if handle.rounds == 4:
            side.set("three", "1")
        if rank == 2 and len(seen) == 6:
            side.set("enough", "1")
        time.sleep(0.02 if handle.rounds >= 4 else 0)  # let it have a core
    handle.remove()
    return seen


def everything(model):
    return torch.cat([x.detach().flatten().float() for x in model.state_dict().values() if x.is_floating_point()])


@pytest.mark.parametrize("outer", ["auto", "nesterov"])
def test_a_peer_that_comes_has_all_that_the_others_have(store, outer):
    results = run_ranks(coming, 3, store, outer, group=False)
    newcomer = {rounds: (step, x) for rounds, step, _, x in results[2]}
    assert len(newcomer) == 6
    for rank in (0, 1):
        others = {rounds: (step, x) for rounds, step, _, x in results[rank]}
        shared = newcomer.keys() & others.keys()
        assert len(shared) >= 4
        for rounds in shared:
            assert newcomer[rounds][0] == others[rounds][0]
            assert torch.equal(newcomer[rounds][1], others[rounds][1])


def train_until_the_newcomer_has_seen_enough(model, rank, optimizer, handle, side):
    """Parameters after each round, by its number; rank 2, which comes later, ends it after its third."""
    seen = {}
    for step in itertools.count():
        if side.check(["enough"]):
            break
        train(model, rank, [step], optimizer)
        if not handle.steps:
            seen[handle.rounds] = flat(model)
        side.set("going", "1")
        if rank == 2 and len(seen) > 2:
            side.set("enough", "1")
        time.sleep(0.01)  # let it have a core
    return seen


def keeping(rank, world_size, address, buffers):
    """Peer 2 comes when the others have changed their own buffers: what it has then, and what all have at the end."""
    side = nb.Rendezvous(address).connect()
    if rank == 2:
        side.wait(["going"])
    model = mlp()
    model.register_buffer("own", torch.full((2,), math.inf if buffers == "average" else 0.0))
    model.register_buffer("number", torch.tensor(0))
    model, optimizer, handle = join(address, rank, model=model, begin_with=2, buffers=buffers)
    begun = model.own.tolist(), model.number.item()
    if rank < 2:
        model.own += 10.0 * rank + 1.0
        model.own.clamp_(max=10.0 * rank + 1.0)
        model.number += rank + 1
    seen = train_until_the_newcomer_has_seen_enough(model, rank, optimizer, handle, side)
    handle.remove()
    return begun, (model.own.tolist(), model.number.item()), seen


@pytest.mark.parametrize("buffers", ["keep", "average"])
def test_who_comes_gets_all_buffers_and_nobody_else_loses_its_own(store, buffers):
    """Of those that are averaged, the ones that are not finite at set-up are each peer's own, and whole numbers are."""
    (_, first, seen), (_, second, _), (begun, third, others) = run_ranks(keeping, 3, store, buffers, group=False)
    assert first == ([1.0, 1.0], 1)
    assert second == ([11.0, 11.0], 2)
    assert begun == third == first
    assert len(seen.keys() & others.keys()) >= 2
    assert all(torch.equal(seen[rounds], others[rounds]) for rounds in seen.keys() & others.keys())


def corrupted(rank, world_size, address):
    """On peer 2, which comes later, the first transfer of parameters has one bit wrong."""
    side = nb.Rendezvous(address).connect()
    if rank == 2:
        side.wait(["going"])
        begin, transfers = rounds_of.begin_with_the_first, []

        def begun(model, group):
            begin(model, group)
            transfers.append(1)
            if len(transfers) == 1:
                with torch.no_grad():
                    next(model.buffers()).view(torch.int32)[3, 3] ^= 1  # the first of what was sent

        rounds_of.begin_with_the_first = elastic.begin_with_the_first = begun
    with heard() as messages:
        model, optimizer, handle = join(address, rank, begin_with=2, exchange_s=LONG_S)
        seen = train_until_the_newcomer_has_seen_enough(model, rank, optimizer, handle, side)
    handle.remove()
    if rank == 2:
        rounds_of.begin_with_the_first = elastic.begin_with_the_first = begin
        return seen, len(transfers), any("differ from those that were sent" in message for message in messages)
    return seen, 0, any("broke off" in message for message in messages)


def test_parameters_that_arrive_wrong_are_asked_for_again(store):
    (first, _, broke_off), _, (third, transfers, said) = run_ranks(corrupted, 3, store, group=False)
    assert transfers == 2
    assert said
    assert broke_off
    shared = first.keys() & third.keys()
    assert len(shared) >= 2
    assert all(torch.equal(first[rounds], third[rounds]) for rounds in shared)


def truncated(rank, world_size, address):
    """Peer 2 comes later, and gets parameters from peer 0, which dies when it has sent five pieces of them.
    Nobody waits for it after that.
    """
    replicas._PIECE_NBYTES = 1024
    side = nb.Rendezvous(address).connect()
    model, got, sent = mlp(), [], []
    if rank == 2:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        side.wait(["going"])
        begin = elastic.begin_with_the_first

        def begun(model, group):
            try:
                got.append(begin(model, group))
            except RuntimeError:
                got.append("broke off")
                raise

        rounds_of.begin_with_the_first = elastic.begin_with_the_first = begun
    if rank == 0:
        isend = dist.isend

        def sending(*given, **options):
            sent.append(isend(*given, **options))
            if len(sent) == 5:
                for work in sent:
                    work.wait()
                die(handle)
            return sent[-1]

        dist.isend = sending
    model, optimizer, handle = join(address, rank, model=model, begin_with=2, exchange_s=LONG_S)
    seen = train_until_the_newcomer_has_seen_enough(model, rank, optimizer, handle, side)
    handle.remove()
    return seen, got


def test_a_transfer_whose_sender_dies_goes_on_from_another_peer_where_it_was(store):
    results = left_over(truncated, 3, store)
    (first, _), (third, got) = results[1], results[2]
    whole = 4 * flat(mlp()).numel()
    assert got[0] == "broke off"
    assert got[1] in [whole - 1024 * pieces for pieces in range(1, 6)], "only what had not arrived travels again"
    shared = first.keys() & third.keys()
    assert len(shared) >= 2
    assert all(torch.equal(first[rounds], third[rounds]) for rounds in shared)


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupted(rank, world_size, address, where):
    """Peer 2 is interrupted in its fourth round, and its program goes on: what all have after each round; what it
    keeps of its residuals before and after; and in how many rounds somebody was missing.
    """
    model, optimizer, handle = join(address, rank, begin_with=world_size, exchange_s=LONG_S)
    side = nb.Rendezvous(address).connect()

    def stops(method, *, after):
        """Ctrl-C comes before a method, or, where it waits in C++, when it returns."""

        def stopping(*given, **options):
            now = handle.rounds == 3 and not side.check(["stopped"])
            if now and where == "in an exchange":
                side.wait(["0 is in it", "1 is in it"])
            result = None if now and not after else method(*given, **options)
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
        elif where == "while it takes its update":
            difference = fragments._take_difference
            fragments._take_difference = stops(difference, after=True)  # the first tensor has changed
        else:
            handle._meeting._meet = stops(handle._meeting._meet, after=False)
    else:
        feed = handle.feed

        def fed(*given, **options):
            if handle.rounds == 3:
                side.set(f"{rank} is in it", "1")
            return feed(*given, **options)

        handle.feed = fed
    seen, kept, missing = {}, [], 0
    for step in range(100):
        if handle.rounds == 7:
            break
        before = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
        try:
            train(model, rank, [step], optimizer)
        except KeyboardInterrupt:
            kept = [before, {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}]
            continue
        if not handle.steps:
            seen[handle.rounds] = flat(model)
            missing += len(handle.peers) < world_size
    handle.remove()
    if where == "while it takes its update" and rank == 2:
        fragments._take_difference = difference
    return seen, kept, missing


@pytest.mark.parametrize(
    "where",
    [
        "while it takes its update",
        "while it waits",
        "in an exchange",
        "after an exchange",
        "after the vote",
        "while the mean is applied",
    ],
)
def test_a_peer_that_was_interrupted_goes_on_and_is_equal_again(store, where):
    """And nobody waits for a time-out, which would be five minutes."""
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


def interrupt(stop_at, passed, until=None):
    """Let Ctrl-C come at one of the lines of rounds among peers that run from now on, for the first time each, until a
    function is called; note those before it.
    """

    def traced(frame, event, _):
        code = frame.f_code
        if not code.co_filename.endswith(("updates/elastic.py", "updates/rendezvous.py")):
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


def interrupted_anywhere(rank, world_size, address, where):
    """One run for each line of a round, in which Ctrl-C comes there: whether the round was committed; the residuals
    before and after it; and what keeps the peer from its next round.
    """
    seen = []
    for line in range(1, 1000):
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


@pytest.mark.parametrize(
    "where", ["anywhere", "where the exchange breaks off", "again before the vote", "again after the vote"]
)
def test_wherever_a_peer_is_interrupted_its_residuals_are_those_of_the_rounds_outcome(store, where):
    """Of a round that was committed they are what it did not send, and otherwise those before it."""
    (seen,) = run_ranks(interrupted_anywhere, 1, store, where, group=False, timeout_s=300.0)
    outcomes = [committed for committed, *_ in seen]
    expected = {"again before the vote": {False}, "again after the vote": {True}}.get(where, {False, True})
    assert set(outcomes) == expected
    assert len(seen) > (80 if where == "anywhere" else 10)
    sent = next((after for committed, _, after, _ in reversed(seen) if committed), None)
    for committed, before, after, refused in seen:
        assert refused is None
        assert not committed or not all(torch.equal(after[name], before[name]) for name in before)
        due = sent if committed else before
        assert all(torch.equal(after[name], due[name]) for name in before)


# ---- steps, lateness, ends -------------------------------------------------------------------------------------------


def unequal(rank, world_size, address):
    """Peers that take 1, 2 and 5 steps before a round, and what each would have come to alone."""
    model, optimizer, handle = join(address, rank, "none", optimizer=sgd, every=100, begin_with=world_size)
    before = flat(model)
    train(model, rank, range((1, 2, 5)[rank]), optimizer)
    alone = flat(model)
    handle.average()
    after = flat(model)
    handle.average()  # nobody has done anything
    return before, alone, after, flat(model)


def test_updates_count_by_their_steps(store):
    results = run_ranks(unequal, 3, store, group=False)
    before = results[0][0]
    mean = sum(steps * (alone - before) for steps, (_, alone, *_) in zip((1, 2, 5), results, strict=True)) / 8
    for own, _, after, again in results:
        assert torch.equal(own, before)
        torch.testing.assert_close(after, before + mean, rtol=1e-5, atol=1e-7)
        assert torch.equal(again, after)


#: Samples of each step of each peer.
BATCHES = ((6, 6), (1, 2, 3), (30,))


def counting(rank, world_size, address):
    """Peers with batches of different sizes, and what each would have come to alone."""
    options = {"optimizer": sgd, "every": 100, "begin_with": world_size, "weigh": "samples"}
    model, optimizer, handle = join(address, rank, "none", **options)
    errors = [refusal(lambda: train(model, rank, [0], optimizer))]
    untouched = flat(model)
    errors += [refusal(lambda n=n: handle.count(n)) for n in (-1, math.inf, math.nan)]
    for step, samples in enumerate(BATCHES[rank]):
        handle.count(samples // 3)  # in two parts, as with accumulation
        handle.count(samples - samples // 3)
        train(model, rank, [step], optimizer)
    alone = flat(model)
    state = copy.deepcopy(handle.state_dict())
    handle.count(1000 * (rank + 1))
    handle.load_state_dict(state)
    handle.average()
    after = flat(model)
    handle.average()  # nobody has learned anything
    again = flat(model)
    handle.remove()
    return untouched, alone, after, again, errors


def test_updates_count_by_what_was_counted(store):
    results = run_ranks(counting, 3, store, group=False)
    before = results[0][0].double()
    samples = [sum(own) for own in BATCHES]
    moves = [n * (alone.double() - before) for n, (_, alone, *_) in zip(samples, results, strict=True)]
    for own, _, after, again, errors in results:
        assert torch.equal(own.double(), before), "a step that has counted nothing is not taken"
        torch.testing.assert_close(after.double(), before + sum(moves) / sum(samples), rtol=1e-5, atol=1e-7)
        assert torch.equal(again, after)
        assert [kind for kind, _ in errors] == ["RuntimeError"] + ["ValueError"] * 3
        assert (
            "handle.count(number) was not called since the last step; call it before every optimizer.step()"
            in errors[0][1]
        )
        assert all("must be a number of samples of at least 0" in text for _, text in errors[1:])


def counting_otherwise(rank, world_size, address):
    """Peer 1 comes to a run that counts tokens with other words, and the first goes on."""
    side = nb.Rendezvous(address).connect()
    options = {"optimizer": sgd, "every": 1, "begin_with": 1}
    if rank == 1:
        side.wait(["going"])
        others = [refusal(lambda word=word: join(address, rank, "none", weigh=word, **options))
                  for word in ("steps", "samples")]  # fmt: skip
        side.set("tried", "1")
        return others
    model, optimizer, handle = join(address, rank, "none", weigh="tokens", **options)
    side.set("going", "1")
    side.wait(["tried"])
    handle.count(5)
    train(model, rank, [0], optimizer)
    state = handle.state_dict()
    handle.remove()
    model, optimizer, handle = join(address, rank, "none", run="another", **options)
    refused = refusal(lambda: handle.count(5)), refusal(lambda: handle.load_state_dict(state))
    handle.remove()
    return handle.rounds, len(handle.peers), refused


def test_all_peers_count_in_one_unit(store):
    (rounds, peers, refused), others = run_ranks(counting_otherwise, 2, store, group=False)
    assert (rounds, peers) == (1, 1)
    assert [kind for kind, _ in refused] == ["ValueError"] * 2
    assert "peers are weighted by their steps; to weight them by what you count, pass weigh='tokens'" in refused[0][1]
    assert "the state was saved with weigh='tokens', here it is 'steps'" in refused[1][1]
    for word, (kind, text) in zip(("steps", "samples"), others, strict=True):
        assert kind == "DisagreementError"
        assert f"weigh: tokens in the run, {word} here" in text


def clocks_jump(rank, world_size, address):
    """Peer 1 waits for peer 0 in every round, and its wall clock jumps by years, ahead and back, when anybody asks."""
    asked, (now, now_ns) = [], (time.time, time.time_ns)
    if rank == 1:

        def jumping():
            asked.append(1)
            return now() + (1e8 if len(asked) % 2 else -1e8)

        time.time, time.time_ns = jumping, lambda: int(1e9 * jumping())
    try:
        model, optimizer, handle = join(address, rank, begin_with=world_size, exchange_s=LONG_S)
        seen = []
        for step in range(6):
            time.sleep(0.0 if rank else 0.05)
            train(model, rank, [step], optimizer)
            seen.append((handle.rounds, len(handle.peers)))
        handle.remove()
        jumped = abs(time.time() - now())
    finally:
        time.time, time.time_ns = now, now_ns
    return flat(model), seen, jumped


def test_clocks_that_jump_do_not_matter(store):
    """Who went by them would find every wait over at once, and hold rounds alone. Of torch's store and gloo this shows
    nothing: their clocks are in C++, and steady.
    """
    (mine, seen, still), (its, same, jumped) = run_ranks(clocks_jump, 2, store, group=False)
    assert still < 1e6 < jumped
    assert seen == same == [(1, 2), (2, 2), (2, 2), (3, 2), (3, 2), (4, 2)]
    assert torch.equal(mine, its)


def by_time(rank, world_size, address):
    """Rounds of half a second; a step takes peer 0 a quarter of one, and peer 1 a sixteenth."""
    steps, seen, clock = 0, [], elastic.time
    elastic.time = SimpleNamespace(monotonic=lambda: steps / (16 if rank else 4))
    try:
        model, optimizer, handle = join(address, rank, "none", optimizer=sgd, every="0.5s", begin_with=world_size)
        while handle.rounds < 4:
            rounds = handle.rounds
            steps += 1
            train(model, rank, [steps], optimizer)
            if handle.rounds != rounds:
                seen.append((handle.rounds, steps, flat(model)))
        handle.remove()
    finally:
        elastic.time = clock
    return seen


def test_rounds_by_time_take_what_each_peer_has_done(store):
    slow, fast = run_ranks(by_time, 2, store, group=False)
    assert [(rounds, steps) for rounds, steps, _ in slow] == [(2, 2), (3, 4), (4, 6)]
    assert [(rounds, steps) for rounds, steps, _ in fast] == [(2, 8), (3, 16), (4, 24)]
    assert all(torch.equal(mine, its) for (*_, mine), (*_, its) in zip(slow, fast, strict=True))


def late(rank, world_size, address):
    """Peer 2 comes so late to its second round that the others have gone on, and then is in time."""
    model, optimizer, handle = join(address, rank, "none", optimizer=sgd, begin_with=world_size)
    side = nb.Rendezvous(address).connect()
    seen, alone = [], None
    for step in range(8 if rank < 2 else 4):
        if rank == 2 and step == 3:
            side.wait(["three"])
        if rank < 2 and step == 7:
            wait_for(handle, "2")
        optimizer.zero_grad()
        before = flat(model)
        x = torch.full((1, 24), 0.1 * (rank + step + 1))
        model(x).sum().backward()
        with torch.no_grad():  # what the step of plain SGD will change
            own = -0.05 * torch.cat([p.grad.double().reshape(-1) for p in model.parameters()])
        alone = own if step % 2 == 0 else alone + own
        with left_out(handle, there="1") if rank == 0 and step == 3 else contextlib.nullcontext():
            optimizer.step()
        if not handle.steps:
            seen.append((handle.rounds, len(handle.peers), before, alone, flat(model)))
        elif rank < 2 and handle.rounds == 4:
            side.set("three", "1")
    handle.remove()
    return seen


def test_who_is_late_is_left_out_and_brings_its_update_when_it_returns(store):
    first, second, third = run_ranks(late, 3, store, group=False)
    assert [(rounds, peers) for rounds, peers, *_ in first] == [(2, 3), (3, 2), (4, 2), (5, 3)]
    assert [(rounds, peers) for rounds, peers, *_ in third] == [(2, 3), (5, 3)]
    assert torch.equal(first[-1][-1], third[-1][-1])
    # What the late peer did from round 2 on counts in round 5, from the parameters that the others had then.
    mean = sum(seen[-1][3] for seen in (first, second, third)) / 3
    torch.testing.assert_close(first[-1][-1], first[-2][-1] + mean, rtol=1e-5, atol=1e-6)


def another(rank, world_size, address):
    """Peer 2 has another spec."""
    if rank == 2:
        side = nb.Rendezvous(address).connect()
        side.wait(["going"])
        return refusal(lambda: join(address, rank, "sign+ef"))
    model, optimizer, handle = join(address, rank, begin_with=2)
    nb.Rendezvous(address).connect().set("going", "1")
    train(model, rank, range(6), optimizer)
    handle.remove()
    return handle.rounds


def test_who_would_train_something_else_is_told_and_disturbs_nobody(store):
    *rounds, error = run_ranks(another, 3, store, group=False)
    assert rounds == [4, 4]
    assert error[0] == "DisagreementError"
    assert "spec: topk:density=0.01+ef in the run" in error[1] or "spec: topk:density=0.1+ef in the run" in error[1]
    assert "sign+ef here" in error[1]


def without_a_store(rank, world_size, port):
    """The last rank serves the store, until peers have taken their fifth step."""
    peers, address = world_size - 1, f"127.0.0.1:{port}"
    if rank == peers:
        held = serve(port, "127.0.0.1")
        side = nb.Rendezvous(address).connect()
        side.wait([f"{peer} is in no round" for peer in range(peers)])
        os.kill(os.getpid(), signal.SIGKILL)
        return held
    model, optimizer, handle = join(address, rank, begin_with=peers)
    train(model, rank, range(5), optimizer)
    nb.Rendezvous(address).connect().set(f"{rank} is in no round", "1")
    with contextlib.suppress(OSError):
        while True:  # until nothing listens there
            socket.create_connection(("127.0.0.1", port)).close()
    error = refusal(lambda: train(model, rank, [5], optimizer))
    return error, handle.rounds, flat(model)


def test_a_store_that_dies_is_an_error_and_parameters_are_those_of_the_last_round():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results = left_over(without_a_store, 3, port)
    for error, rounds, after in results.values():
        assert error[0] == "RendezvousError"
        assert f"the store at 127.0.0.1:{port} does not answer any more" in error[1]
        assert rounds == 3
        assert torch.equal(after, results[0][2])  # the round's parameters, not this peer's own


def resumed(rank, world_size, address, at):
    whole, optimizer, handle = join(address, rank, begin_with=world_size, run="whole", outer="auto")
    train(whole, rank, range(8), optimizer)
    handle.remove()
    model, optimizer, handle = join(address, rank, begin_with=world_size, run="begun", outer="auto")
    train(model, rank, range(at), optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    handle.remove()
    model, optimizer, handle = join(address, rank, begin_with=world_size, run="resumed", outer="auto")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    begun = handle.rounds
    train(model, rank, range(at, 8), optimizer)
    handle.remove()
    return torch.equal(flat(whole), flat(model)), begun, handle.rounds


@pytest.mark.parametrize("at", [4, 5])
def test_a_run_that_was_stopped_goes_on_to_the_bit(store, at):
    """And counts its rounds on: the beginning, and one after every second step."""
    assert run_ranks(resumed, 2, store, at, group=False) == [(True, 3, 5)] * 2


def resumed_at_steps_of_its_own(rank, world_size, address):
    """By time a fast peer comes to more steps than a slow one; both go on from there."""
    model, optimizer, handle = join(address, rank, every="1h", begin_with=world_size)
    train(model, rank, range(1 + 2 * rank), optimizer)
    handle.load_state_dict(copy.deepcopy(handle.state_dict()))
    steps = handle.steps
    handle.average()
    handle.remove()
    return steps, flat(model)


def test_peers_go_on_from_states_of_as_many_steps_as_each_has_taken(store):
    (slow, one), (fast, other) = run_ranks(resumed_at_steps_of_its_own, 2, store, group=False)
    assert (slow, fast) == (1, 3)
    assert torch.equal(one, other)


def resumed_and_joined(rank, world_size, address):
    """Peer 0 goes on from a checkpoint; peer 1 comes later, without one."""
    side = nb.Rendezvous(address).connect()
    options = {"spec": "none", "every": 1, "begin_with": 1}
    if rank == 0:
        model, optimizer, handle = join(address, rank, **options, run="begun")
        train(model, rank, range(10), optimizer)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
        wrong = copy.deepcopy(saved[2])
        wrong["updates"]["rounds"] = -1
        handle.remove()
        model, optimizer, handle = join(address, rank, **options, run="resumed")
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        refused = refusal(lambda: handle.load_state_dict(wrong))
        assert refused == ("ValueError", "the state has -1 for 'rounds'; expected a whole number of at least 0")
        handle.load_state_dict(saved[2])
    else:
        side.wait(["going"])
        model, optimizer, handle = join(address, rank, **options, run="resumed")
    seen = train_until_the_newcomer_has_seen_enough(model, 2 * rank, optimizer, handle, side)
    handle.remove()
    return seen


def test_who_comes_to_a_run_that_goes_on_counts_its_rounds_as_the_others(store):
    first, second = run_ranks(resumed_and_joined, 2, store, group=False)
    assert min(first) == 12  # the beginning, ten rounds, and the first of those that follow
    assert len(first.keys() & second.keys()) >= 3
    assert all(torch.equal(first[rounds], second[rounds]) for rounds in first.keys() & second.keys())


def nothing_left(rank, world_size, address):
    """Parameters after the last round with an outer momentum, and after one in which nobody has done anything."""
    model, optimizer, handle = join(address, rank, "none", outer=nesterov, begin_with=world_size)
    train(model, rank, range(4), optimizer)
    after = flat(model)
    handle.average()
    unmoved = torch.equal(flat(model), after)
    train(model, rank, range(4, 6), optimizer)
    handle.remove()
    return unmoved, torch.equal(flat(model), after), handle.rounds


def test_where_no_peer_has_taken_a_step_parameters_stay(store):
    assert run_ranks(nothing_left, 2, store, group=False) == [(True, False, 5)] * 2


def scaled(rank, world_size, address):
    """The first try to begin breaks off."""
    share, tries = elastic.ElasticUpdateCompression._share, []

    def shared(self, view):
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("the wire broke")
        share(self, view)

    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = sgd(model)
    peers = nb.Rendezvous(address, least=1, begin_with=1, grace_s=LONG_S, exchange_s=LONG_S)
    elastic.ElasticUpdateCompression._share = shared
    try:
        handle = nb.compress_updates(model, optimizer, "none", every=4, peers=peers, grad_scaler=scaler)
    finally:
        elastic.ElasticUpdateCompression._share = share
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, rank)).backward()
        if step == 1:
            model[0].weight.grad.fill_(math.inf)  # a step that is skipped
        scaler.step(optimizer)
        scaler.update()
        seen.append((handle.rounds, handle.steps))
    handle.remove()
    return len(tries), seen, "update" in vars(scaler)


def test_a_step_that_a_scaler_skips_counts_once_however_often_the_beginning_broke_off(store):
    ((tries, seen, watched),) = run_ranks(scaled, 1, store, group=False)
    assert tries == 2
    assert seen == [(1, 1), (1, 2), (1, 3), (2, 0)]
    assert not watched


def refused(rank, world_size, address):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    errors = [refusal(lambda: join(address, rank))]
    model = mlp()
    peers = nb.Rendezvous(address)
    errors.append(
        refusal(lambda: nb.compress_updates(model, sgd(model), "none", peers=peers, process_group=dist.group.WORLD))
    )
    dist.destroy_process_group()
    errors.append(refusal(lambda: join(address, rank, "topk:density=0.1+ef21")))
    errors.append(refusal(lambda: join(address, rank, nb.LGreCo("topk:density=0.1+ef"))))
    errors.append(refusal(lambda: join(address, rank, every="soon")))
    errors.append(refusal(lambda: join("127.0.0.1:1", rank, patience_s=0.3)))
    errors.append(refusal(lambda: join(address, rank, least=2, patience_s=0.3, grace_s=0.1)))
    return errors


def test_what_cannot_be_is_said_at_set_up(store):
    (errors,) = run_ranks(refused, 1, store, group=False)
    kinds = ["UnsupportedError", "ValueError", "UnsupportedError", "UnsupportedError", "ValueError"]
    kinds += ["RendezvousError"] * 2
    words = [
        "do not call init_process_group",
        "leave one of the two out",
        "use '+ef'",
        "use a plan",
        "every='soon' is not a time",
    ]
    words += ["no store answers at 127.0.0.1:1", "no round was held for 0.3 s: 1 peers are here (least=2)"]
    assert [kind for kind, _ in errors] == kinds
    for (_, text), word in zip(errors, words, strict=True):
        assert word in text


def alone(rank, world_size, address):
    model, optimizer, handle = join(address, rank, "sign+ef", begin_with=1, outer="auto")
    plain = mlp()
    plain_optimizer = adamw(plain)
    train(model, 0, range(4), optimizer)
    train(plain, 0, range(4), plain_optimizer)
    apart = float((flat(model) - flat(plain)).abs().max())
    handle.remove()
    return handle.rounds, len(handle.peers), apart, handle.stats().total.sent_bytes


def test_who_is_left_alone_trains_on(store):
    ((rounds, peers, apart, sent),) = run_ranks(alone, 1, store, group=False)
    assert (rounds, peers, sent) == (3, 1, 0)
    assert apart < 0.03  # signs, on their way to the update


def breaking_twice(rank, world_size, address):
    """On peer 1 the first exchange breaks off before anything is sent, and then a connection when it is half made."""
    model, optimizer, handle = join(address, rank, begin_with=world_size, exchange_s=LONG_S)
    handle.set_layers({"5.weight": "topk:density=0.5+ef"})
    exchange, connect, broken = handle._exchange, handle._connect, []

    def exchanged(fragments, **options):
        if not broken:
            broken.append("exchange")
            raise RuntimeError("the wire broke")
        exchange(fragments, **options)

    def connected(group):
        connect(group)
        if len(broken) == 1:
            broken.append("connection")
            raise RuntimeError("the wire broke again")

    if rank == 1:
        handle._exchange, handle._connect = exchanged, connected
    train(model, rank, range(4), optimizer)
    specs = handle.layers.override_texts()
    handle.remove()
    return flat(model), handle.rounds, specs, broken


def test_what_breaks_half_way_is_held_again_with_all_that_was_set(store):
    (mine, rounds, specs, _), (its, others, theirs, broken) = run_ranks(breaking_twice, 2, store, group=False)
    assert broken == ["exchange", "connection"]
    assert rounds == others == 3
    assert torch.equal(mine, its)
    assert specs == theirs == {"5.weight": "topk:density=0.5+ef"}


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("number", torch.tensor(0))


def late_with_buffers(rank, world_size, address):
    """Peer 2 counts down in a buffer, and misses a round in between; the others count up."""
    model = Counting()
    model, optimizer, handle = join(address, rank, "none", model, sgd, every=1, begin_with=world_size, run="buffers")
    side = nb.Rendezvous(address).connect()
    seen = []
    model.number += rank
    for step in range(3 if rank < 2 else 2):
        if rank == 2 and step == 1:
            side.wait(["two"])
        if rank < 2 and step == 2:
            wait_for(handle, "2")
        model.seen += 1.0 if rank < 2 else -90.0
        model.weight.grad = torch.ones(4)
        with left_out(handle, there="1") if rank == 0 and step == 1 else contextlib.nullcontext():
            optimizer.step()
        seen.append((handle.rounds, len(handle.peers), float(model.seen)))
        if rank < 2 and step == 1:
            side.set("two", "1")
    handle.remove()
    return seen, model.number.item()


def test_buffers_of_who_is_late_say_nothing_of_where_they_are_now(store):
    results = run_ranks(late_with_buffers, 3, store, group=False)
    first, second, third = (seen for seen, _ in results)
    assert [number for _, number in results] == [0, 1, 2]  # these are not averaged
    one = (1.0 + 1.0 - 90.0) / 3
    two, three = one + 1.0, one + 1.0 + 2.0 / 3
    assert [(rounds, peers) for rounds, peers, _ in first] == [(2, 3), (3, 2), (4, 3)]
    assert [count for *_, count in first] == pytest.approx([one, two, three])
    assert first == second
    assert third[-1] == first[-1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("message_nbytes", {"message_nbytes": 0}),
        ("outer", {"outer": lambda parameters: torch.optim.SGD(parameters, lr=0.5)}),
        ("optimizer's momentum", {"momentum": 0.9}),
        ("buffer extra", {}),
        ("memory format of 0.weight", {}),
    ],
)
def test_all_that_has_to_be_equal_is_compared_before_a_peer_is_let_in(name, options):
    from narrowband.averaging.settings import EARLY_NBYTES, MESSAGE_NBYTES, Settings
    from narrowband.updates.elastic import _facts
    from narrowband.updates.rounds import Rounds

    def facts(model, outer=nesterov, message_nbytes=MESSAGE_NBYTES, momentum=0.0):
        settings = Settings.of(
            "none", min_numel=64, warmup_steps=0, seed=0, collective="auto", small="uncompressed",
            message_nbytes=message_nbytes, early_nbytes=EARLY_NBYTES, grad_scaler=None, connected=False,
        )  # fmt: skip
        return _facts(model, [sgd(model, momentum=momentum)], settings, Rounds(2, outer))

    other = mlp()
    if name == "buffer extra":
        other.register_buffer("extra", torch.zeros(3))
    elif name == "memory format of 0.weight":
        other[0].weight.data = other[0].weight.data.t().contiguous().t()
    mine, its = facts(mlp()), facts(other, **options)
    assert {key for key in {**mine, **its} if mine.get(key) != its.get(key)} == {name}
