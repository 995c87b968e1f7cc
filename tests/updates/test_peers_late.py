"""Peers that are late or slow: what their updates weigh, and when rounds are held."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.updates import elastic
from tests.gradients.training import flat, refusal, sgd, train
from tests.ranks import run_ranks
from tests.updates.peers import LONG_S, join, left_out, wait_for


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
