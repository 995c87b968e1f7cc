"""A peer comes: what it must have in common with the others, and the parameters and buffers that it gets from one."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from narrowband.averaging.flat import form_of, real
from narrowband.averaging.replicas import begin_with_the_first
from narrowband.collectives import new_group
from narrowband.updates.averaged import floating_buffers
from narrowband.updates.stepping import facts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from narrowband.averaging.settings import Settings
    from narrowband.updates.averaged import Averaged
    from narrowband.updates.rendezvous import View
    from narrowband.updates.settings import Rounds

__all__ = ["copy_from_the_first", "digest", "facts_of_peer"]


def facts_of_peer(
    model: nn.Module, optimizers: Sequence[Optimizer], settings: Settings, rounds: Rounds
) -> dict[str, str]:
    """Return name → value of everything that must be the same on all peers."""
    buffers, left_out = floating_buffers(model) if rounds.buffers == "average" else ([], [])
    averaged = [*((name, p) for name, p in model.named_parameters() if p.requires_grad), *buffers]
    outer = None
    if callable(rounds.outer):
        outer = rounds.outer([nn.Parameter(p.detach()) for p in model.parameters() if p.requires_grad])
    parameters = {
        f"parameter {name}": f"{tuple(p.shape)}, {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in model.named_parameters()
    } | {f"buffer {name}": f"{tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()}
    formats = {f"memory format of {name}": form_of(x).memory_format for name, x in averaged if x.dim() > 1}
    return {
        "spec": str(settings.compression),
        "small": str(settings.small),
        "plan": repr(settings.plan),
        **settings.facts(),
        **rounds.facts(outer, left_out),
        **facts_of(model, optimizers),
        **parameters,
        **formats,
    }


def copy_from_the_first(averaged: Averaged, view: View, group: dist.ProcessGroup | None, timeout_s: float) -> None:
    """Copy the first peer's parameters and averaged buffers to all peers, and its other buffers to new peers. A
    collective.

    Args:
        averaged: this peer's tensors.
        view: the peers.
        group: their process group.
        timeout_s: the time-out of the group that is made of the first peer and the new ones.
    """
    common, own = averaged.in_common()
    begin_with_the_first(_as_module(common), group)
    if not (own and view.newcomers):
        return
    ranks = sorted({0, *view.newcomers})
    if len(ranks) < view.size:
        assert group is not None
        mine = ranks if view.rank in ranks else [view.rank]
        group = new_group(mine, group, timedelta(seconds=timeout_s))
    if view.rank in ranks:
        begin_with_the_first(_as_module(own), group)


def _as_module(tensors: Sequence[Tensor]) -> nn.Module:
    """Wrap tensors of a model, without copying, as a module that has only these."""
    module = nn.Module()
    for at, x in enumerate(tensors):
        module.register_buffer(str(at), x)
    return module


def digest(tensors: Sequence[Tensor]) -> str:
    """Return a checksum of tensors, by which a peer knows that what arrived is what was sent."""
    found = hashlib.sha256()
    for x in tensors:
        array: Any = real(x.detach()).contiguous().view(-1).view(torch.uint8).cpu().numpy()
        found.update(array)
    return found.hexdigest()
