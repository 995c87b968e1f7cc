"""Plans for whole parameters, where a rank averages a part of each."""

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

__all__ = ["plan_of_sharded", "plan_of_shards"]


def plan_of_shards(
    plan: Plan,
    whole: Sequence[tuple[str, Tensor]],
    shards: Sequence[tuple[str, Tensor]],
    norms: Sequence[Tensor],
    settings: Settings,
) -> Plan | None:
    """The part of a plan for whole parameters that is about this rank's shards.

    Args:
        plan: of the model.
        whole: name and tensor of each of its parameters.
        shards: name and tensor of each that this rank has.
        norms: those of both that belong to normalization layers.
        settings: which of them are compressed.

    Returns:
        None where all shards are small, and have no plan.

    Raises:
        ValueError: the plan of another model.
    """
    plan.check(_compressed(whole, norms, settings))
    shapes = _compressed(shards, norms, settings)
    layers = tuple(replace(layer, shape=shapes[layer.name]) for layer in plan.layers if layer.name in shapes)
    return replace(plan, layers=layers) if layers else None


def plan_of_sharded(plan: Plan, model: nn.Module, settings: Settings) -> Plan | None:
    """The same for a model that FSDP2 shards, or other DTensors are; a plan of this rank's shards stays as it is.

    Args:
        plan: of the model.
        model: it.
        settings: which of its parameters are compressed.

    Returns:
        None where all shards are small, and have no plan.

    Raises:
        ValueError: the plan of another model.
    """
    named, norms = list(model.named_parameters()), norms_of(model)
    shapes = _compressed(named, norms, settings)
    if shapes == {layer.name: tuple(layer.shape) for layer in plan.layers}:
        return plan
    whole: dict[Tensor, Tensor] = {
        p: torch.empty(p.shape, dtype=p.dtype, device="meta", requires_grad=p.requires_grad) for _, p in named
    }
    unsharded = [(name, whole[p]) for name, p in named]
    return plan_of_shards(plan, unsharded, named, [*norms, *(whole[p] for p in norms)], settings)


def _compressed(
    named: Sequence[tuple[str, Tensor]], norms: Sequence[Tensor], settings: Settings
) -> dict[str, tuple[int, ...]]:
    """Name → shape of what is a layer."""
    numbers = {"min_numel": settings.min_numel, "early_nbytes": settings.early_nbytes}
    return Parameters(named, norms, fuse_small=settings.small != "uncompressed", **numbers).shapes
