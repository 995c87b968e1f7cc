"""Who averages with whom: the ranks among which payloads travel.

Where a node has several ranks, these are the ranks that hold the same shard on every node. What happens inside a node
is a place's business (:mod:`narrowband.gradients.levels`).
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
    """The ranks that average.

    Attributes:
        group: their process group; None: the default group.
        rank: this process's rank in the group.
        size: number of ranks.
        pairs: sends from rank to rank, one message after the other, where the backend's own collectives are slow; None:
            the backend's are used.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    pairs: SerialExecutor | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Peers:
        """The ranks of a group."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def open_pairs(self, device: torch.device) -> None:
        """Make :attr:`pairs`, where the backend's collectives are slow: gloo's. Does nothing the second time.

        Args:
            device: where tensors live. Gloo has messages from rank to rank for CPUs alone.
        """
        if self.pairs is None and device.type == "cpu" and dist.get_backend(self.group) == "gloo":
            self.pairs = SerialExecutor("narrowband-pairs")
            weakref.finalize(self, self.pairs.close)

    def close(self) -> None:
        """End the thread of :attr:`pairs`."""
        if self.pairs is not None:
            self.pairs.close()
