"""What tests of compression inside FSDP2 share: models in shards, a training loop, and what layers compute with."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import narrowband as nb
from tests.gradients.training import loss_of

FINE = {"gradients": "qsgd:bits=8", "parameters": "uniform:bits=8"}


OPTIONS = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "columns": {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 4 == 0 else Shard(0)},
}


def mesh_of(world_size):
    return init_device_mesh("cpu", (world_size,))


def compress(model, **options):
    return nb.compress_shards(model, **{"min_numel": 64, **options})


def adamw(model):
    """All parameters in one operator, since DTensor makes each of them slow."""
    return torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1, fused=True)


def train(model, rank, steps, optimizer):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def computed_with(model):
    """The parameters that a forward pass sees, by the name of the module's layers."""
    seen = {}

    def look(name):
        def hook(module, _):
            for own, p in module.named_parameters(recurse=False):
                seen[f"{name}.{own}"] = p.detach().clone()

        return hook

    hooks = [m.register_forward_pre_hook(look(name)) for name, m in model.named_modules() if name]
    with torch.no_grad():
        loss_of(model, 0, 0)
    for hook in hooks:
        hook.remove()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # FSDP2 leaves the outermost as it is
    return seen
