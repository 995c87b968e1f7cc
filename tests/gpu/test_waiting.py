"""The host runs ahead of the GPU: PyTorch is asked to raise where it waits for an answer."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from tests.activations.models import Gated
from tests.ranks import run_ranks

SPECS = (
    "none", "fp16", "qsgd:bits=4", "uniform:bits=4+ef", "sign+ef", "topk:density=0.01", "topk:density=0.01+ef",
    "powersgd:rank=4", "dgc:density=0.01", "dgc:density=0.01,nesterov=true,values=fp16", "dgc:density=0.01,clip=1",
    "dgc:density=0.01,store=int8", "uniform:bits=8+ef21", "topk:density=0.01+ef21", "topk:density=0.01+ef:store=int8",
    "uniform:bits=4+ef:store=bf16",
)  # fmt: skip
COMPILING_S = 300.0

#: What travels as it is, or nearly so, shows by itself what is not finite, on a CPU, too.
_UNCHECKED = ("none", "fp16")


class _NoWaiting:
    """An error in every thread that waits for the device."""

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it does not see all
            torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    return nn.Sequential(*layers).cuda()


def trained(rank: int, world_size: int, spec: str) -> tuple[int, bool]:
    """Steps of one rank over NCCL, the last of which has inf in a gradient: how many were skipped, and whether averages
    were NaN then.
    """
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1, device_id=0)
    layers = DistributedDataParallel(model(), device_ids=[0])
    handle = nb.compress_gradients(layers, spec, min_numel=64)
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    x = torch.randn(64, 256, device="cuda")

    def step() -> None:
        layers(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for _ in range(3):  # DDP makes its buckets anew; the first step measures the error
        step()
    with _NoWaiting():
        for _ in range(3):
            step()
    (layers(x).square().mean() * torch.inf).backward()
    torch.cuda.synchronize()
    return handle.stats().total.skipped, any(bool(p.grad.isnan().any()) for p in layers.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS)
def test_from_the_hook_to_the_average_nobody_waits(spec: str) -> None:
    ((skipped, broken),) = run_ranks(trained, 1, spec, timeout_s=COMPILING_S)
    assert broken
    assert skipped == (spec not in _UNCHECKED)


def language_model(dtype: torch.dtype, *, written: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Gated(written=written) for _ in range(3))).cuda().to(dtype)


MODELS = {
    "layer norm": (model, 256, 3.0),
    "rms norm": (lambda: language_model(torch.float32, written=False), 64, 5.0),
    "rms norm in bfloat16": (lambda: language_model(torch.bfloat16, written=False), 64, 2.5),
    "rms norm that the model writes": (lambda: language_model(torch.float32, written=True), 64, 5.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_saved_activations_are_packed_and_restored_while_nobody_waits(name: str) -> None:
    make, width, ratio = MODELS[name]
    layers = make()
    x = torch.randn(1024, width, device="cuda", dtype=next(layers.parameters()).dtype)
    saving = nb.compress_activations(layers, bits=8)

    def step(context: Any) -> torch.Tensor:
        layers.zero_grad()
        with context:
            y = layers(x)
        y.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in layers.parameters()])

    exact = step(nullcontext())
    step(saving)  # what has no range yet is looked at
    with _NoWaiting():
        for _ in range(3):
            found = step(saving)
    assert saving.stats().total.ratio > ratio
    assert 0 < (found - exact).float().norm() < 0.03 * exact.float().norm()
