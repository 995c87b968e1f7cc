"""Models that FSDP2 shards, and those that nobody averages but narrowband."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowband as nb


def mesh_of(nodes, shards):
    return init_device_mesh("cpu", (nodes, shards), mesh_dim_names=("nodes", "shards"))


def shard(model, mesh, **options):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(model):
    """All parameters, gathered: those of the optimizer."""
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([x.detach().double().reshape(-1) for x in found])


def compress(model, spec, **options):
    return nb.compress_gradients(model, spec, **{"min_numel": 64, **options})
