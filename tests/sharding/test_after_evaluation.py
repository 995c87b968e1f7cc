"""Models that were evaluated: FSDP2 then holds the parameters of the outermost unit whole, and not their shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowband as nb
from tests.ranks import run_ranks

SPEC = "topk:density=0.2+ef"


def trained(rank, world_size, kind, evaluates):
    """All parameters after some steps, in and before which the model is evaluated, or not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    group = mesh["replica"].get_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 24))
    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.Generator().manual_seed(rank)

    def evaluate():
        if evaluates:
            with torch.no_grad():
                model(torch.ones(2, 12))
            assert not hasattr(model[2].weight, "device_mesh")

    evaluate()
    if kind == "gradients":
        handle = nb.compress_gradients(model, SPEC, min_numel=64, process_group=group)
    elif kind == "averager":
        handle = nb.Averager(model, SPEC, min_numel=64, process_group=group)
    elif kind == "updates":
        handle = nb.compress_updates(model, optimizer, SPEC, every=2, min_numel=64, process_group=group)
    else:
        handle = nb.compress_shards(model, gradients="uniform:bits=8", parameters="uniform:bits=8", min_numel=64)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 12, generator=inputs)).square().mean().backward()
        if kind == "averager":
            handle.average()
        optimizer.step()
        evaluate()
        state = handle.state_dict()
        if step == 2:
            handle.load_state_dict(state)
    if kind == "updates":
        evaluate()
        handle.average()
        evaluate()
    with torch.no_grad():
        outputs = model(torch.ones(2, 12))
    handle.remove()
    whole = model.state_dict()
    return torch.cat([p.full_tensor().flatten() for p in whole.values()]), outputs


@pytest.mark.parametrize("kind", ["gradients", "averager", "updates", "shards"])
def test_an_evaluation_changes_nothing(kind):
    own, theirs = (run_ranks(trained, 4, kind, evaluates) for evaluates in (True, False))
    for (parameters, outputs), (expected, others) in zip(own, theirs, strict=True):
        assert torch.equal(parameters, expected)
        assert torch.equal(outputs, others)
