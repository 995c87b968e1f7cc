"""The ranks that average with each other, by exchanging payloads.

Where a node has several ranks, peers are the ranks that hold the same shard, one per node. Communication inside a node
is not done here but in :mod:`narrowband.gradients.levels`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from narrowband.collectives.executor import SerialExecutor

__all__ = ["Peers"]


@dataclass(eq=False)
class Peers:
    """The ranks that average with each other.

    Attributes:
        group: their process group; None: the default group.
        rank: this process's rank in the group.
        size: number of ranks.
        pairs: the thread for point-to-point exchanges, which replace the backend's collectives where these are slow;
            None: the backend's collectives are used.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    pairs: SerialExecutor | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Peers:
        """Return the peers that are the ranks of a group."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def open_pairs(self, device: torch.device) -> None:
        """Create :attr:`pairs` where the backend's collectives are slow (gloo). A second call does nothing.

        Args:
            device: the device of the tensors. Gloo has point-to-point messages for CPU tensors only.
        """
        if self.pairs is None and device.type == "cpu" and dist.get_backend(self.group) == "gloo":
            self.pairs = SerialExecutor("narrowband-pairs")
            weakref.finalize(self, self.pairs.close)

    def close(self) -> None:
        """End the thread of :attr:`pairs`."""
        if self.pairs is not None:
            self.pairs.close()
