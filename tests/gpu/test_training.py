"""What pages train on CPUs trains on a GPU, and alike: ranks over NCCL, and ranks that share a card over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from tests.ranks import run_ranks

COMPILING_S = 300.0
STEPS = 12

#: How gradients or updates are compressed, by the place where they are.
SPECS = {
    "ddp": "qsgd:bits=4",
    "ddp, ef": "topk:density=0.05+ef",
    "ddp, low rank": "powersgd:rank=2",
    "averager": "topk:density=0.05+ef",
    "updates": "topk:density=0.05+ef",
    "updates, overlap": "sign+ef",
    "fsdp2": "qsgd:bits=4",
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def trained(rank: int, world_size: int, place: str, device: str, backend: str) -> Tensor:
    """How far parameters come in some steps of plain SGD, where errors of rounding stay as small as they are."""
    if backend == "nccl":
        dist.destroy_process_group()
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1, device_id=0)
    model, spec, after = net().to(device), SPECS[place], lambda: None
    before = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    if place.startswith("ddp"):
        model = DistributedDataParallel(model)
        nb.compress_gradients(model, spec)
    elif place == "fsdp2":
        mesh = init_device_mesh(device, (world_size, 1), mesh_dim_names=("nodes", "shards"))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh["shards"])
        fully_shard(model, mesh=mesh["shards"])
        nb.compress_gradients(model, spec, process_group=mesh["nodes"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle: Any = None
    if place == "averager":
        after = nb.Averager(model, spec).average
    elif place.startswith("updates"):
        handle = nb.compress_updates(model, optimizer, spec, every=2, overlap="overlap" in place)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x, y = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        after()
        optimizer.step()
    if handle is not None:
        handle.average()
        assert handle.step >= STEPS // 2
    parts = [p.detach() for p in model.parameters()]
    whole = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
    return torch.cat([part.flatten().cpu() for part in whole]) - before


@pytest.mark.gpu
@pytest.mark.parametrize("place", SPECS)
def test_one_rank_over_nccl_trains_as_on_the_cpu(place: str) -> None:
    (on_card,), (on_cpu,) = (
        run_ranks(trained, 1, place, device, backend, timeout_s=COMPILING_S)
        for device, backend in (("cuda", "nccl"), ("cpu", "gloo"))
    )
    assert_alike(on_card, on_cpu)


@pytest.mark.gpu
@pytest.mark.parametrize("place", [place for place in SPECS if place != "fsdp2"])  # gloo cannot scatter from a GPU
def test_ranks_that_share_a_card_train_as_on_the_cpu(place: str) -> None:
    both = [run_ranks(trained, 2, place, device, "gloo", timeout_s=COMPILING_S) for device in ("cuda:0", "cpu")]
    for on_card, on_cpu in zip(*both, strict=True):
        assert_alike(on_card, on_cpu)


def assert_alike(on_card: Tensor, on_cpu: Tensor) -> None:
    """Products of a GPU are added up in another order, which a code, or a choice of elements, now and then shows."""
    way = on_cpu.norm()
    assert way > 0.1
    assert (on_card - on_cpu).norm() < 0.05 * way
