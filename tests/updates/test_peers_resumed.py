"""Peers that go on from checkpoints."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

import narrowband as nb
from tests.gradients.training import flat, refusal, train
from tests.ranks import run_ranks
from tests.updates.peers import join, train_until_the_newcomer_has_seen_enough


def resumed(rank, world_size, address, spec, at):
    options = {"spec": spec, "begin_with": world_size, "outer": "auto"}
    whole, optimizer, handle = join(address, rank, run="whole", **options)
    train(whole, rank, range(8), optimizer)
    handle.remove()
    model, optimizer, handle = join(address, rank, run="begun", **options)
    train(model, rank, range(at), optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    handle.remove()
    model, optimizer, handle = join(address, rank, run="resumed", **options)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    begun = handle.rounds
    train(model, rank, range(at, 8), optimizer)
    handle.remove()
    return torch.equal(flat(whole), flat(model)), begun, handle.rounds


@pytest.mark.parametrize(
    ("spec", "at"), [("topk:density=0.1+ef", 4), ("topk:density=0.1+ef", 5), ("uniform:bits=4+ef:store=int8", 5)]
)
def test_a_run_that_was_stopped_goes_on_to_the_bit(store, spec, at):
    """And counts its rounds on: the beginning, and one after every second step."""
    assert run_ranks(resumed, 2, store, spec, at, group=False) == [(True, 3, 5)] * 2


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
        came = handle.rounds
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        refused = refusal(lambda: handle.load_state_dict(wrong))
        assert refused == ("ValueError", "the state has -1 for 'rounds'; expected a whole number of at least 0")
        handle.load_state_dict(saved[2])
    else:
        side.wait(["going"])
        model, optimizer, handle = join(address, rank, **options, run="resumed")
        came = handle.rounds
    seen = train_until_the_newcomer_has_seen_enough(model, 2 * rank, optimizer, handle, side)
    handle.remove()
    return seen, came


def test_who_comes_to_a_run_that_goes_on_counts_its_rounds_as_the_others(store):
    """And so knows that the run did not begin with it, where the count is 1, so that there is nothing to load."""
    (first, begins), (second, comes) = run_ranks(resumed_and_joined, 2, store, group=False)
    assert (begins, comes > 11) == (1, True)
    assert min(first) == 12  # the beginning, ten rounds, and the first of those that follow
    assert len(first.keys() & second.keys()) >= 3
    assert all(torch.equal(first[rounds], second[rounds]) for rounds in first.keys() & second.keys())


def loading_an_older_one(rank, world_size, address, spec):
    """Peer 2 comes to a run that goes on, and loads a checkpoint from an earlier round, as only all together may."""
    side = nb.Rendezvous(address).connect()
    if rank == 2:
        side.wait(["going"])
    model, optimizer, handle = join(address, rank, spec, every=2, begin_with=2)
    seen = {}
    if rank < 2:
        train(model, rank, range(2), optimizer)
        older = copy.deepcopy(model.state_dict())
        model.load_state_dict(older)  # the same on all who do so, and no harm
        if rank == 0:
            side.set("going", pickle.dumps(older))
        for step in itertools.count(2):
            train(model, rank, [step], optimizer)
            if not handle.steps:
                seen[handle.rounds] = len(handle.peers), flat(model)
                if side.check(["refused"]):
                    break
        handle.remove()
        return seen
    model.load_state_dict(pickle.loads(side.get("going")))
    error = refusal(lambda: train(model, rank, range(2), optimizer))
    side.set("refused", "1")
    return error


@pytest.mark.parametrize("spec", ["none", "topk:density=0.1+ef"])
def test_a_peer_that_alone_loads_an_older_checkpoint_is_told_and_the_others_go_on(store, spec):
    first, second, error = run_ranks(loading_an_older_one, 3, store, spec, group=False)
    assert error[0] == "DisagreementError"
    assert "parameters of this peer were changed" in error[1]
    assert "by something else than optimizer steps" in error[1]
    assert [peers for peers, _ in first.values()][-1] < 3
    shared = first.keys() & second.keys()
    assert any(first[rounds][0] == 2 for rounds in shared)
    assert all(torch.equal(first[rounds][1], second[rounds][1]) for rounds in shared)


def changed_alike(rank, world_size, address, differs):
    """All peers load other parameters between two rounds; peer 1 may load some of its own."""
    model, optimizer, _ = join(address, rank, "none", every=20, begin_with=world_size)
    train(model, rank, range(20), optimizer)
    with torch.no_grad():
        model[0].weight.fill_(0.5 + rank * differs)
    error = refusal(lambda: train(model, rank, range(20, 40), optimizer))
    return error, flat(model)


@pytest.mark.parametrize("differs", [False, True])
def test_all_peers_may_change_parameters_alike(store, differs):
    results = run_ranks(changed_alike, 2, store, differs, group=False)
    assert [error and error[0] for error, _ in results] == ["DisagreementError" if differs else None] * 2
    assert differs or torch.equal(results[0][1], results[1][1])


def changed_by_most(rank, world_size, address):
    """Peer 2 does not do what the others do between two rounds."""
    model, optimizer, handle = join(address, rank, "none", every=20, begin_with=world_size)
    train(model, rank, range(20), optimizer)
    if rank < 2:
        with torch.no_grad():
            model[0].weight.clamp_(-0.01, 0.01)
    error = refusal(lambda: train(model, rank, range(20, 40), optimizer))
    return error, flat(model), len(handle.peers)


def test_a_peer_that_alone_does_not_clip_weights_is_told_and_the_others_go_on(store):
    *others, (error, _, _) = run_ranks(changed_by_most, 3, store, group=False)
    assert error[0] == "DisagreementError"
    assert "other peers have changed their parameters" in error[1]
    assert [(error, peers) for error, _, peers in others] == [(None, 2)] * 2
    assert torch.equal(others[0][1], others[1][1])


def loading_alone(rank, world_size, address):
    """Peer 1 comes to a run that goes on, and loads the state of its handle."""
    side = nb.Rendezvous(address).connect()
    if rank == 1:
        side.wait(["going"])
    model, optimizer, handle = join(address, rank, begin_with=1, grace_s=0.5)
    if rank == 1:
        before = flat(model)
        error = refusal(lambda: handle.load_state_dict(copy.deepcopy(handle.state_dict())))
        side.set("refused", "1")
        return error, torch.equal(flat(model), before)
    step = 0
    while handle.steps or not side.check(["refused"]):
        train(model, rank, [step], optimizer)
        side.set("going", "1")
        step += 1
    return handle.rounds


def test_a_state_that_one_peer_loads_alone_is_refused_and_the_others_go_on(store):
    rounds, (error, unchanged) = run_ranks(loading_alone, 2, store, group=False)
    assert error[0] == "RendezvousError"
    assert "load_state_dict: not all peers of the last round loaded a state" in error[1]
    assert unchanged
    assert rounds > 1
