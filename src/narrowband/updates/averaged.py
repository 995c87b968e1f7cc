"""The tensors that replicas average, by name: trained parameters and, if the user wants it, buffers.

The averaging core (:mod:`narrowband.averaging.core`) averages tensors that require a gradient. Buffers do not require
one, and of a sharded parameter only the local part is averaged. So the core gets stand-ins that share memory with the
model's own tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from narrowband.averaging.flat import local
from narrowband.averaging.parameters import norms_of
from narrowband.averaging.who import units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

__all__ = ["Averaged", "floating_buffers", "some"]


class Averaged:
    """The tensors of a model that replicas average.

    Args:
        model: all its parameters that require a gradient are averaged; of a sharded parameter, this rank's shard.
        buffers: whether floating-point buffers are averaged, or kept as each replica has them.

    Attributes:
        model: the model that was passed.
        trained: names of the parameters that are averaged.
        stand_ins: (name, stand-in) of each tensor: parameters first, in the model's order, then buffers.
        small: stand-ins that count as small tensors: those of normalization layers and of buffers.
        buffers: names of the buffers that are averaged.
        left_out: names of the buffers that are not averaged because they hold inf or NaN.
    """

    def __init__(self, model: nn.Module, buffers: Literal["average", "keep"]) -> None:
        self.model = model
        self._units = units_of(model)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        finite, self.left_out = floating_buffers(model) if buffers == "average" else ([], [])
        self.trained = [name for name, _ in trained]
        self.buffers = frozenset(name for name, _ in finite)
        self.stand_ins = [(name, local(x).requires_grad_()) for name, x in (*trained, *finite)]
        norms = {id(p) for p in norms_of(model)}
        small = {name for name, p in trained if id(p) in norms} | self.buffers
        self.small = [x for name, x in self.stand_ins if name in small]
        self._was = {name: (x.shape, x.dtype) for name, x in self.stand_ins}
        self._meshes = list({p.device_mesh: None for _, p in trained if hasattr(p, "device_mesh")})

    def tensors(self) -> dict[str, Tensor]:
        """Return the averaged tensors by name, with their current values, detached.

        Raises:
            ValueError: a tensor is gone or has another shape or dtype than at set-up, so its anchor cannot hold it.
        """
        self._reshard()
        here = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        found = {name: local(here[name]) for name in self._was if name in here}
        for name, was in self._was.items():
            x = found.get(name)
            if x is None or (x.shape, x.dtype) != was:
                now = "does not exist any more" if x is None else f"has shape {tuple(x.shape)} and {x.dtype} now"
                keep = "pass buffers='keep', or " if name in self.buffers else ""
                raise ValueError(
                    f"{name} {now}, and had shape {tuple(was[0])} and {was[1]} when compress_updates was called; "
                    f"{keep}call remove() on all ranks, and compress_updates again"
                )
        return found

    def in_common(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return two lists: the tensors that are equal on all replicas right after a round (all parameters and the
        averaged buffers), and the other buffers, which each replica has for itself.
        """
        self._reshard()
        buffers = list(self.model.named_buffers())
        averaged = [x for name, x in buffers if name in self.buffers]
        return [*self.model.parameters(), *averaged], [x for name, x in buffers if name not in self.buffers]

    def _reshard(self) -> None:
        """Make the model's parameters those that are trained: after an evaluation FSDP2 still holds some of them whole.
        So a later forward pass also gathers what a round writes.
        """
        for unit in self._units:
            unit.reshard()

    def thawed(self) -> list[str]:
        """Return the names of parameters that require a gradient now but did not at set-up."""
        return [name for name, p in self.model.named_parameters() if p.requires_grad and name not in self._was]

    def on_all_parts(self, good: bool, device: torch.device) -> bool:
        """Return whether ``good`` is true on all ranks that hold a shard of this replica. A collective among them."""
        if not self._meshes:
            return good
        flag = torch.tensor(float(good), dtype=torch.float32, device=device)
        for mesh in self._meshes:
            for dim in range(mesh.ndim):
                dist.all_reduce(flag, dist.ReduceOp.MIN, group=mesh.get_group(dim))
        return bool(flag)


def floating_buffers(model: nn.Module) -> tuple[list[tuple[str, Tensor]], list[str]]:
    """Return the floating-point buffers that can be averaged, as (name, buffer), and the names of those that cannot
    because they hold inf or NaN, such as a mask of −inf, or a running minimum and maximum before the first batch.
    """
    floating = [(name, b) for name, b in model.named_buffers() if b.is_floating_point()]
    finite = [(name, b) for name, b in floating if bool(local(b).isfinite().all())]
    there = {name for name, _ in finite}
    return finite, [name for name, _ in floating if name not in there]


def some(names: Sequence[str]) -> str:
    """Join the first four names, and say how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
