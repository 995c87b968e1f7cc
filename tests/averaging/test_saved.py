"""One checkpoint of torch.distributed.checkpoint for model, optimizer and handle, in a real folder."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowband as nb
from tests.gradients.training import mlp, refusal, train, wrap
from tests.ranks import run_ranks

SPEC = "topk:density=0.1+ef"


def adamw(model):
    """All parameters in one operator, since DTensor makes each of them slow."""
    return torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)


def replicated():
    model = wrap(mlp())
    return model, adamw(model), nb.compress_gradients(model, SPEC, min_numel=64)


def sharded(world_size):
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("nodes", "shards"))
    model = fully_shard(mlp(), mesh=mesh["shards"])
    handle = nb.compress_gradients(model, SPEC, min_numel=64, process_group=mesh["nodes"].get_group())
    return model, adamw(model), handle


def made(kind, world_size):
    return replicated() if kind == "ddp" else sharded(world_size)


def parameters(model):
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([x.detach().double().flatten() for x in found])


def saves(rank, world_size, kind, folder):
    model, optimizer, handle = made(kind, world_size)
    train(model, rank, range(4), optimizer)
    own, other = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optimizer": other, "handle": handle.stateful}, checkpoint_id=folder)
    residuals = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
    train(model, rank, range(4, 6), optimizer)
    return parameters(model), residuals, isinstance(handle.stateful, Stateful)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """By kind and number of ranks: the folder, and how they went on."""
    made = {}

    def of(kind, ranks):
        if (kind, ranks) not in made:
            folder = str(tmp_path_factory.mktemp("checkpoint") / "saved")
            made[kind, ranks] = folder, run_ranks(saves, ranks, kind, folder)
        return made[kind, ranks]

    return of


def with_more_shards(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("nodes", "shards"))
    model = fully_shard(mlp(), mesh=mesh["shards"])
    handle = nb.compress_gradients(model, SPEC, min_numel=64, process_group=mesh["nodes"].get_group())
    return refusal(lambda: handle.load_saved(folder))


def test_shards_of_another_number_are_named(checkpoint):
    folder, _ = checkpoint("fsdp", 4)
    for rank, (kind, text) in enumerate(run_ranks(with_more_shards, 4, folder)):
        assert kind == "ValueError"
        assert f"for shard0, shard1, but none for shard{rank}" in text or rank < 2  # of another size


def loads(rank, world_size, kind, folder, any_number):
    model, optimizer, handle = made(kind, world_size)
    train(model, rank, range(20, 22), optimizer)  # what was before does not matter
    own, other = get_state_dict(model, optimizer)
    state = {"model": own, "optimizer": other}
    dcp.load(state if any_number else state | {"handle": handle.stateful}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=other)
    if any_number:
        with warnings.catch_warnings():  # PyTorch's, that nothing is distributed, would be one
            warnings.simplefilter("error")
            handle.load_saved(folder)
    residuals = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
    train(model, rank, range(4, 6), optimizer)
    missing = refusal(lambda: handle.load_saved(folder, "another"))
    return parameters(model), residuals, handle.step, missing


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 3), ("fsdp", 4)])
@pytest.mark.parametrize("any_number", [False, True])
def test_as_many_ranks_go_on_to_the_bit(kind, ranks, any_number, checkpoint):
    folder, before = checkpoint(kind, ranks)
    after = run_ranks(loads, ranks, kind, folder, any_number)
    for (was, owed, stateful), (now, owes, steps, missing) in zip(before, after, strict=True):
        assert stateful
        assert torch.equal(was, now)
        assert owed.keys() == owes.keys()
        assert all(torch.equal(owed[name], owes[name]) for name in owed)
        assert steps == 6
        assert missing[0] == "ValueError"
        assert "has no state of 'another'" in missing[1]


@pytest.mark.parametrize(("kind", "before", "after"), [("ddp", 3, 2), ("fsdp", 4, 6)])
def test_another_number_of_ranks_keeps_the_sum_of_the_residuals(kind, before, after, checkpoint):
    folder, saved = checkpoint(kind, before)
    loaded = run_ranks(loads, after, kind, folder, True)
    shards = 1 if kind == "ddp" else 2
    assert all(torch.equal(loaded[0][0], now) for now, *_ in loaded)
    for shard in range(shards):
        for name in saved[shard][1]:
            was = sum(owed[name].double() for _, owed, _ in saved[shard::shards]) / (before // shards)
            now = sum(owes[name].double() for _, owes, *_ in loaded[shard::shards]) / (after // shards)
            torch.testing.assert_close(now, was, rtol=1e-5, atol=1e-7)


def few(rank, world_size, folder):
    _, _, handle = made("ddp", world_size)
    return refusal(lambda: dcp.load({"handle": handle.stateful}, checkpoint_id=folder))


def test_as_a_stateful_it_loads_on_as_many_ranks_alone(checkpoint):
    folder, _ = checkpoint("ddp", 3)
    for error in run_ranks(few, 2, folder):
        assert "rank" in error[1]


def of_rank_0_alone(rank, world_size, folder):
    """What a checkpoint that one rank writes makes of a handle: of ``stateful``, and of a state."""
    model, optimizer, handle = made("ddp", world_size)
    train(model, rank, range(2), optimizer)
    if rank == 0:
        torch.save({"stateful": handle.stateful.state_dict(), "state": handle.state_dict()}, folder / "one.pt")
    dist.barrier()
    saved = torch.load(folder / "one.pt")
    refused = [
        refusal(lambda: handle.stateful.load_state_dict(saved["stateful"])),
        refusal(lambda: handle.load_state_dict(saved["stateful"])),
        refusal(lambda: handle.load_state_dict(saved["state"])),
    ]
    train(model, rank, range(2, 3), optimizer)
    return refused, handle.step


def test_a_checkpoint_that_one_rank_has_written_is_refused_on_all_with_what_to_do(tmp_path):
    for refused, steps in run_ranks(of_rank_0_alone, 2, tmp_path):
        for _, text in refused[:2]:
            assert "a file that one rank writes needs the list of all ranks' handle.state_dict()" in text
        assert "If one rank alone had saved its state, do not load it" in refused[2][1]
        assert steps == 3
