"""Who averages with whom.

Ranks average on up to two levels: inside a node, where links are fast and nothing has to be compressed, and between
nodes, where payloads travel. Today every rank is a node of its own, so there is one level: see :meth:`Topology.flat`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch.distributed as dist

from narrowband.collectives.executor import SerialExecutor

__all__ = ["Peers", "Topology"]


@dataclass(eq=False)
class Peers:
    """The ranks of one level.

    Attributes:
        group: their process group; None: the default group.
        rank: this process's rank in the group.
        size: number of ranks.
        pairs: sends from rank to rank, one message after the other, where the backend's own all-to-all is slow; None:
            the backend's is used.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    pairs: SerialExecutor | None = None

    def open_pairs(self) -> None:
        """Make :attr:`pairs`, where the backend's all-to-all is slow: gloo's. Does nothing the second time."""
        if self.pairs is None and dist.get_backend(self.group) == "gloo":
            self.pairs = SerialExecutor("narrowband-pairs")
            weakref.finalize(self, self.pairs.close)

    def close(self) -> None:
        """End the thread of :attr:`pairs`."""
        if self.pairs is not None:
            self.pairs.close()


@dataclass(frozen=True, eq=False)
class Topology:
    """The ranks that average, level by level.

    Attributes:
        everyone: all of them. They agree on what they do, and follow the same plan.
        inside: the ranks of this node.
        between: one rank of every node: those among which payloads travel.
    """

    everyone: Peers
    inside: Peers
    between: Peers

    @classmethod
    def flat(cls, group: dist.ProcessGroup) -> Topology:
        """Every rank of a group is a node of its own."""
        everyone = Peers(group, dist.get_rank(group), dist.get_world_size(group))
        return cls(everyone, Peers(None, 0, 1), everyone)

    def close(self) -> None:
        """End the threads of all levels."""
        for level in (self.everyone, self.inside, self.between):
            level.close()
