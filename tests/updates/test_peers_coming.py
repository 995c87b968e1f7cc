"""Peers that come to a run that goes on: what they get, and what they are refused for."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
import torch.distributed as dist

import narrowband as nb
from narrowband.averaging import replicas
from narrowband.updates import newcomers
from narrowband.updates import rounds as rounds_of
from tests.gradients.training import flat, heard, mlp, refusal, sgd, train
from tests.ranks import run_ranks
from tests.updates.peers import (
    LONG_S,
    Normed,
    die,
    everything,
    join,
    left_over,
    train_until_the_newcomer_has_seen_enough,
)
from tests.updates.training import nesterov


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

        rounds_of.begin_with_the_first = newcomers.begin_with_the_first = begun
    with heard() as messages:
        model, optimizer, handle = join(address, rank, begin_with=2, exchange_s=LONG_S)
        seen = train_until_the_newcomer_has_seen_enough(model, rank, optimizer, handle, side)
    handle.remove()
    if rank == 2:
        rounds_of.begin_with_the_first = newcomers.begin_with_the_first = begin
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
        begin = newcomers.begin_with_the_first

        def begun(model, group):
            try:
                got.append(begin(model, group))
            except RuntimeError:
                got.append("broke off")
                raise

        rounds_of.begin_with_the_first = newcomers.begin_with_the_first = begun
    if rank == 0:
        isend, begin = dist.isend, newcomers.begin_with_the_first

        def sending(*given, **options):
            sent.append(isend(*given, **options))
            if len(sent) == 5:
                for work in sent:
                    work.wait()
                die(handle)
            return sent[-1]

        def begun(model, group):
            dist.isend = sending  # not earlier: a second wait() for a message of an earlier round would never return
            try:
                return begin(model, group)
            finally:
                dist.isend = isend

        newcomers.begin_with_the_first = rounds_of.begin_with_the_first = begun
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
    from narrowband.updates.newcomers import facts_of_peer
    from narrowband.updates.settings import Rounds

    def facts(model, outer=nesterov, message_nbytes=MESSAGE_NBYTES, momentum=0.0):
        settings = Settings.of(
            "none", min_numel=64, warmup_steps=0, seed=0, collective="auto", small="uncompressed",
            message_nbytes=message_nbytes, early_nbytes=EARLY_NBYTES, grad_scaler=None, connected=False,
        )  # fmt: skip
        return facts_of_peer(model, [sgd(model, momentum=momentum)], settings, Rounds(2, outer))

    other = mlp()
    if name == "buffer extra":
        other.register_buffer("extra", torch.zeros(3))
    elif name == "memory format of 0.weight":
        other[0].weight.data = other[0].weight.data.t().contiguous().t()
    mine, its = facts(mlp()), facts(other, **options)
    assert {key for key in {**mine, **its} if mine.get(key) != its.get(key)} == {name}
