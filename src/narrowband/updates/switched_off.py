"""A ``DistributedDataParallel`` around each replica, among all ranks: it would average gradients in every step.

Trainers put the model into one, and so do scripts that were written for gradients. Where updates are averaged, each
replica trains on its own gradients. So the averaging is switched off, as DDP itself does in its ``no_sync``: DDP then
sends neither gradients nor buffers, and its hooks return at once. It still holds the memory of its buckets.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from narrowband.averaging.who import ddp_of
from narrowband.collectives import waiting_in
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

__all__ = ["SwitchedOff", "check_can_be_off", "ddp_among"]


def ddp_among(model: object, process_group: dist.ProcessGroup | None) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that a model is, if it averages among all ranks, and all ranks are replicas.
    One among fewer ranks is for those that train a replica together.

    Args:
        model: the model; it may be inside the wrapper of ``torch.compile``. What is no module is in none.
        process_group: the replicas; None: all ranks.
    """
    around = ddp_of(model) if isinstance(model, nn.Module) else None
    group = waiting_in(process_group)  # what is no group raises where all ranks learn of it
    if around is None or group is None:
        return None
    sizes = {dist.get_world_size(each) for each in (None, group, around.process_group)}
    return around if len(sizes) == 1 else None


def check_can_be_off(ddp: DistributedDataParallel) -> None:
    """Check that the averaging of a DistributedDataParallel can be switched off.

    Raises:
        UnsupportedError: it has a static graph. Its first backward then cannot be in ``no_sync``.
    """
    if ddp.static_graph:
        raise UnsupportedError(
            "DistributedDataParallel(static_graph=True) has to average gradients in its first backward, and here none "
            "are averaged: leave static_graph out; or pass the module inside it, and train that"
        )


class SwitchedOff:
    """Switches off what a DistributedDataParallel averages, until :meth:`end`."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._set(averages=False)

    def _set(self, *, averages: bool) -> None:
        ddp = self._ddp()
        if ddp is not None:
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = averages

    def check(self) -> None:
        """Check that nobody has switched it on again.

        Raises:
            RuntimeError: somebody has. Gradients may have been averaged, uncompressed.
        """
        ddp = self._ddp()
        if ddp is not None and ddp.require_backward_grad_sync:
            raise RuntimeError(
                "DistributedDataParallel averages gradients again, uncompressed, beside compress_updates, which had "
                "switched that off. Do not call compress_updates inside no_sync(), nor set require_backward_grad_sync "
                "of the model afterwards; to go back to averaged gradients, call average() and then remove() of the "
                "handle"
            )

    def end(self) -> None:
        """Let it average again, from the next backward on."""
        self._set(averages=True)
