"""Peers of which none is missing train as replicas do; what cannot be is refused."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.distributed as dist

import narrowband as nb
from narrowband.updates import elastic
from narrowband.updates.stores import serve
from tests.gradients.training import adamw, flat, loss_of, mlp, refusal, sgd, train
from tests.ranks import run_ranks
from tests.updates.peers import LONG_S, SPECS, join
from tests.updates.training import nesterov


def as_peers(rank, world_size, address, specs):
    found, hook = [], sys.excepthook
    for spec in specs:
        model, optimizer, handle = join(address, rank, spec, begin_with=world_size, run=spec)
        train(model, rank, range(7), optimizer)
        found.append((flat(model), handle.rounds, handle.steps, handle.stats().total.steps))
        handle.remove()
    return found, dist.is_initialized(), sys.excepthook is hook


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
    for ((_, rounds, steps, exchanges),), left_behind, _ in run_ranks(
        as_peers, 2, f"[::1]:{held.port}", ["none"], group=False
    ):
        assert (rounds, steps, exchanges, left_behind) == (4, 1, 3, False)


def test_peers_of_which_none_is_missing_are_replicas_to_the_bit(store):
    fixed = run_ranks(as_replicas, 3, SPECS)
    results = run_ranks(as_peers, 3, store, SPECS, group=False)
    for (found, left_behind, same_hook), expected in zip(results, fixed, strict=True):
        assert not left_behind
        assert same_hook  # otherwise each link would put one more "[rank0]: " before every line of a traceback
        for (parameters, rounds, steps, exchanges), same in zip(found, expected, strict=True):
            assert torch.equal(parameters, same)
            assert (rounds, steps, exchanges) == (4, 1, 3)  # the first round is the beginning, in which nothing is sent


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
    words += ["no store answers at 127.0.0.1:1", "no round was held for 0.3 s: 1 peer is here (least=2)"]
    assert [kind for kind, _ in errors] == kinds
    for (_, text), word in zip(errors, words, strict=True):
        assert word in text
