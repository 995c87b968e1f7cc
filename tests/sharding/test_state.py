"""Checkpoints of compression inside FSDP2: a run goes on to the bit, and states that do not fit change nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from narrowband.sharding import handle as handles
from tests.gradients.shards import mesh_of as replicas_of
from tests.gradients.shards import shard, whole
from tests.gradients.training import mlp, refusal
from tests.ranks import run_ranks
from tests.sharding.training import FINE, OPTIONS, adamw, compress, mesh_of, train


def odd():
    """Shards of a number of bytes that words of 8 and of 4 do not divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 33), nn.ReLU(), nn.Linear(33, 8), nn.Linear(8, 8))


def compared_and_resumed(rank, world_size, options):
    """Losses beyond the second comparison of references, which comes early here, and those after a state was loaded."""
    before, handles._COMPARE_EVERY = handles._COMPARE_EVERY, 6
    try:
        return _compared_and_resumed(rank, world_size, options)
    finally:
        handles._COMPARE_EVERY = before


def _compared_and_resumed(rank, world_size, options):

    def made():
        model = shard(odd(), mesh_of(world_size), **OPTIONS[options])
        return model, compress(model, **FINE), adamw(model)

    model, handle, optimizer = made()
    train(model, rank, range(5), optimizer)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    losses = train(model, rank, range(5, 9), optimizer)
    again, resumed, other = made()
    for each, state in zip((again, other, resumed), kept, strict=True):
        each.load_state_dict(state)
    nbytes = {each["reference"].nbytes for each in kept[2]["sent"].values()}
    return losses, train(again, rank, range(5, 9), other), nbytes


@pytest.mark.parametrize("options", ["plain", "bf16"])
def test_shards_of_any_size_are_compared_and_resumed(options):
    for losses, resumed, nbytes in run_ranks(compared_and_resumed, 2, options):
        assert any(each % 8 for each in nbytes)
        assert resumed == losses


def saves(rank, world_size, folder):
    model = shard(mlp(), mesh_of(world_size))
    handle, optimizer = compress(model, gradients="qsgd:bits=4", parameters="qsgd:bits=4"), adamw(model)
    train(model, rank, range(4), optimizer)
    own, other = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optimizer": other, "shards": handle.stateful}, checkpoint_id=folder)
    losses = train(model, rank, range(4, 8), optimizer)
    return whole(model), losses


def loads(rank, world_size, folder, with_handle):
    model = shard(mlp(), mesh_of(world_size))
    handle, optimizer = compress(model, gradients="qsgd:bits=4", parameters="qsgd:bits=4"), adamw(model)
    train(model, rank, range(20, 22), optimizer)
    own, other = get_state_dict(model, optimizer)
    state = {"model": own, "optimizer": other} | ({"shards": handle.stateful} if with_handle else {})
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=other)
    losses = train(model, rank, range(4, 8), optimizer)
    return whole(model), losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of three ranks, and how they went on."""
    folder = str(tmp_path_factory.mktemp("checkpoint") / "saved")
    return folder, run_ranks(saves, 3, folder)


def test_a_resumed_run_goes_on_to_the_bit(saved):
    folder, before = saved
    for (was, its), (now, losses) in zip(before, run_ranks(loads, 3, folder, True), strict=True):
        assert torch.equal(was, now)
        assert losses == its


def test_without_its_state_or_on_other_ranks_a_run_goes_on_close_by(saved):
    folder, before = saved
    for now, losses in run_ranks(loads, 2, folder, False):
        assert (before[0][0] - now).norm() / now.norm() < 0.05
        assert all(loss < 2 for loss in losses)


def bad_states(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    handle = compress(model, **FINE)
    train(model, rank, range(2), adamw(model))
    good = copy.deepcopy(handle.state_dict())
    before = whole(model), handle.reference_nbytes
    wrong = {
        "nothing": {},
        "rank": good | {"rank": 1 - rank},
        "codec": good | {"gradients": "qsgd:bits=4"},
        "one": good if rank else {},
        "size": good | {"sent": {"0": {**good["sent"]["0"], "reference": torch.zeros(3)}}},
        "no tensor": good | {"sent": {"0": {**good["sent"]["0"], "reference": 7}}},
        "whole numbers": good | {"sent": {"0": as_dtype(good["sent"]["0"], torch.int32)}},
        "no reference": good | {"sent": {"0": {"calls": 1, "mark": 3}}},
        "another dtype on one": good | {"sent": {"0": as_dtype(good["sent"]["0"], (torch.float32, torch.half)[rank])}},
        "another module": good | {"sent": {"9": good["sent"]["0"]}},
        "no calls": {key: value for key, value in good.items() if key != "calls"},
        "a word for calls": good | {"calls": dict.fromkeys(good["calls"], "x")},
        "a list": good | {"sent": [1]},
    }
    refused = {name: refusal(lambda state=state: handle.load_state_dict(state)) for name, state in wrong.items()}
    handle.load_state_dict(good)
    return refused, torch.equal(before[0], whole(model)), before[1] == handle.reference_nbytes


def as_dtype(kept, dtype):
    return kept | {"reference": kept["reference"].to(dtype)}


def test_states_that_do_not_fit_change_nothing_on_any_rank():
    for refused, *same in run_ranks(bad_states, 2):
        assert all(each is not None and each[0] in ("ValueError", "DisagreementError") for each in refused.values())
        assert all(same)


def one_bad_state_among_replicas(rank, world_size):
    """Two replicas in shards; of one replica, one rank has no state."""
    model = shard(mlp(), replicas_of(2, world_size // 2))
    handle = compress(model, **FINE)
    train(model, rank, range(2), adamw(model))
    good = copy.deepcopy(handle.state_dict())
    train(model, rank, range(2, 4), adamw(model))
    before = handle.state_dict()["calls"]
    refused = refusal(lambda: handle.load_state_dict(good if rank else {}))
    same = handle.state_dict()["calls"] == before
    handle.load_state_dict(good)
    return refused and refused[0], same, handle.state_dict()["calls"] == good["calls"]


def test_a_state_that_does_not_fit_on_one_rank_is_loaded_by_no_replica():
    found = run_ranks(one_bad_state_among_replicas, 4)
    assert found == [("ValueError", True, True), *[("DisagreementError", True, True)] * 3]
