"""Models that ranks hold copies of: the part of a copy that a rank has, and how all copies become equal.

The ranks of a *replica* may hold a copy together, each a part of every parameter (FSDP2's shards are DTensors). What is
averaged is then averaged part by part, among the ranks that hold the same part of each replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from narrowband.averaging.flat import empty_like, groups_of, local, parts_of, real
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["begin_with_the_first", "check_replica"]


def check_replica(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """A process group has no two ranks of one replica.

    Raises:
        UnsupportedError: it has.
    """
    if group is None:
        return  # another check speaks of it
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    together: set[int] = set()
    if isinstance(model, DistributedDataParallel):
        together |= set(dist.get_process_group_ranks(model.process_group))
    for p in model.parameters():
        if hasattr(p, "device_mesh"):
            together |= set(p.device_mesh.mesh.flatten().tolist())
    if both := sorted(others & together):
        raise UnsupportedError(
            f"ranks {both} of process_group train the same replica as this rank, and average with it already; pass the "
            'group of the ranks that hold the same part of each replica, such as mesh["replicas"].get_group(), and let '
            "the model's own mesh have the ranks of one replica alone"
        )


@torch.no_grad()
def begin_with_the_first(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """All ranks of a group get the parameters and buffers of its first, those that are not trained, too."""
    if dist.get_world_size(group) == 1:
        return
    first = 0 if group is None else dist.get_global_rank(group, 0)
    everything: dict[int, Tensor] = {}
    for x in (*model.parameters(), *model.buffers()):
        everything.setdefault(id(x), local(x))
    for together in groups_of(everything.values()):
        flat = empty_like(together)
        for x, part in zip(together, parts_of(flat, together), strict=True):
            part.copy_(real(x))
        dist.broadcast(flat, first, group=group)
        for x, part in zip(together, parts_of(flat, together), strict=True):
            real(x).copy_(part)
