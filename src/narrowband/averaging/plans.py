"""Convert plans for whole parameters into plans for the shards that a rank averages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowband.averaging.parameters import Parameters, norms_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from narrowband.adapt import Plan
    from narrowband.averaging.settings import Settings

__all__ = ["layers_of", "plan_of_sharded", "plan_of_shards"]


def plan_of_shards(
    plan: Plan,
    whole: Sequence[tuple[str, Tensor]],
    shards: Sequence[tuple[str, Tensor]],
    norms: Sequence[Tensor],
    settings: Settings,
) -> Plan | None:
    """Convert a plan for whole parameters into a plan for this rank's shards.

    Args:
        plan: of the model.
        whole: name and tensor of each of the model's parameters.
        shards: name and tensor of each shard that this rank has.
        norms: the tensors among both that belong to normalization layers.
        settings: decide which parameters and shards are large enough to be compressed.

    Returns:
        The plan; None if all shards are small, so that there is nothing to plan.

    Raises:
        ValueError: a plan of another model.
    """
    plan.check(layers_of(whole, norms, settings))
    shapes = layers_of(shards, norms, settings)
    layers = tuple(replace(layer, shape=shapes[layer.name]) for layer in plan.layers if layer.name in shapes)
    return replace(plan, layers=layers) if layers else None


def plan_of_sharded(plan: Plan, model: nn.Module, settings: Settings) -> Plan | None:
    """The same for a model whose parameters are DTensors, as with FSDP2. A plan for this rank's shards is returned
    unchanged.

    Args:
        plan: of the model.
        model: the sharded model.
        settings: decide which parameters and shards are large enough to be compressed.

    Returns:
        The plan; None if all shards are small, so that there is nothing to plan.

    Raises:
        ValueError: a plan of another model.
    """
    named, norms = list(model.named_parameters()), norms_of(model)
    shapes = layers_of(named, norms, settings)
    if shapes == {layer.name: tuple(layer.shape) for layer in plan.layers}:
        return plan
    whole: dict[Tensor, Tensor] = {
        p: torch.empty(p.shape, dtype=p.dtype, device="meta", requires_grad=p.requires_grad) for _, p in named
    }
    unsharded = [(name, whole[p]) for name, p in named]
    return plan_of_shards(plan, unsharded, named, [*norms, *(whole[p] for p in norms)], settings)


def layers_of(
    named: Sequence[tuple[str, Tensor]], norms: Sequence[Tensor], settings: Settings
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices that are large enough to be layers, by name."""
    numbers = {"min_numel": settings.min_numel, "early_nbytes": settings.early_nbytes}
    return Parameters(named, norms, fuse_small=settings.small != "uncompressed", **numbers).shapes
