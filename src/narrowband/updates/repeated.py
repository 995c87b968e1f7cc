"""Notice that all replicas bring the same update, so that to exchange it is for nothing.

That has two causes. Something may average the gradients already, such as DistributedDataParallel around the model: it
sends them uncompressed in every step, and rounds come on top. Or replicas may train on the same batches. Neither makes
an error, and losses look right.

The first round that changes anything shows it: parameters are equal before it, so equal gradients make equal updates,
and other gradients never do, to the bit.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from narrowband import kernels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["Repeated"]

log = logging.getLogger(__name__)


class Repeated:
    """Compares replicas' updates until a round in which any replica has changed something.

    Args:
        device: where the ranks' messages lie.
        looks: whether it compares at all.
    """

    def __init__(self, device: torch.device, *, looks: bool) -> None:
        self._device = device
        self._looks = looks
        self._digest: int | None = None

    def note(self, updates: Iterable[Tensor]) -> None:
        """Note this replica's update, before it is sent.

        Args:
            updates: the changes of parameters, of any shapes.
        """
        if not self._looks:
            return
        parts = list(updates)
        sums = torch.stack([kernels.checksum(x) for x in parts]).tolist() if parts else []
        changed = any(bool(x.any()) for x in parts)
        drawn = hashlib.sha256(repr(sums).encode()).digest()[:7]  # its negative has to be an int64, too
        self._digest = 1 + int.from_bytes(drawn, "little") if changed else 0

    def compare(self, group: dist.ProcessGroup | None, *, size: int, say: bool) -> None:
        """Compare what was noted, and log a warning if it is the same on all replicas. A collective, if something was
        noted; no other message may be in flight.

        Args:
            group: the replicas.
            size: number of replicas.
            say: whether it is this rank that logs.
        """
        digest, self._digest = self._digest, None
        if digest is None or size == 1:
            return
        ends = torch.tensor([digest, -digest], dtype=torch.int64, device=self._device)
        dist.all_reduce(ends, dist.ReduceOp.MIN, group=group)
        least, most = int(ends[0]), -int(ends[1])
        self._looks = not most  # where nobody has changed anything, the next round tells
        if say and least == most and most:
            log.warning(
                "all %d replicas brought the same update, bit for bit, so this round sent it for nothing. Either "
                "gradients are averaged already, as by DistributedDataParallel around the model, which sends them "
                "uncompressed in every step: call the model itself, or compress them by compress_gradients instead. Or "
                "all replicas train on the same batches: give each its own part of the data",
                size,
            )
