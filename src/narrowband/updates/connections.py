"""The connections among the peers of a round, and how long an exchange over them may take.

The connections are the process's default group of torch.distributed. The group is created anew whenever the peers of a
round are not those of the round before.

A peer that freezes in an exchange sends no sign of it, so the others can only wait. The first exchange among the same
peers may take ``exchange_s``, and shows how long an exchange takes. A later one is broken off when it takes ten times
as long as any before it, longer than the grace window, and longer than a busy machine pauses. It is held again with new
connections, and may take ``exchange_s`` then; so an exchange that is slow for a reason, such as ``pause()``, is
repeated once.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from narrowband.collectives import to_connect

if TYPE_CHECKING:
    from narrowband.updates.rendezvous import Rendezvous, View

__all__ = ["Connections"]

log = logging.getLogger(__name__)

#: An exchange is broken off when it takes this many times as long as the longest before it among the same peers.
_SLOWER = 10

#: No exchange is broken off before this many seconds: a machine that is short of memory or cores pauses, and goes on.
_PAUSES_S = 5.0


class Connections:
    """The default process group among the peers of a view.

    Args:
        rules: has the time-outs.
    """

    def __init__(self, rules: Rendezvous) -> None:
        self._rules = rules
        self._store: Any = None  # PyTorch keeps what is C++ of it, which calls what is Python
        self._longest_s: float | None = None  # the longest exchange over the current connections
        self._warned = False

    def open(self, view: View, store: Any) -> dist.ProcessGroup:
        """Connect the peers of a view.

        Args:
            view: the peers.
            store: the view's store, where the peers find each other.
        """
        self._longest_s, self._store = None, store
        # Peers look for each other under a name that PyTorch makes of how many groups the process has begun to create.
        # A peer that could not connect, as when another one died meanwhile, has counted one that others have not.
        dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - there is no other way
        hook = sys.excepthook
        timeout = timedelta(seconds=self._rules.exchange_s)
        dist.init_process_group("gloo", store=store, rank=view.rank, world_size=view.size, timeout=to_connect(timeout))
        # PyTorch wraps the hook each time, to write a rank before every line. Here the rank differs from view to view.
        sys.excepthook = hook
        group = dist.group.WORLD
        assert group is not None
        group.set_timeout(timeout)
        return group

    def close(self) -> None:
        """Close the connections, if there are any, or what is left of them where Ctrl-C came while they were made."""
        world = dist.distributed_c10d._world  # noqa: SLF001 - PyTorch would refuse to use the same name again
        left = {**world.pg_map, **world.pg_names}
        if left and not dist.is_initialized():
            group = next(iter(left))
            world.pg_map.setdefault(group, ("gloo", dist.HashStore()))  # type: ignore[attr-defined]
            dist.distributed_c10d._update_default_pg(group)  # noqa: SLF001
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # raised if peers are gone
                dist.destroy_process_group()

    @property
    def breaks_off_after_s(self) -> float:
        """The seconds after which an exchange is broken off now."""
        if self._longest_s is None:
            return self._rules.exchange_s
        return min(self._rules.exchange_s, max(self._rules.grace_s, _PAUSES_S, _SLOWER * self._longest_s))

    def expect(self, took: float, group: dist.ProcessGroup) -> None:
        """Set the time-out of the group's next exchange by how many seconds this one took."""
        self._longest_s = max(took, self._longest_s or 0.0)
        group.set_timeout(timedelta(seconds=self.breaks_off_after_s))

    def warn_if_slow(self, took: float) -> None:
        """Warn, once, if an exchange took more than half of ``exchange_s``."""
        if took > 0.5 * self._rules.exchange_s and not self._warned:
            self._warned = True
            log.warning(
                "an exchange took %.0f s, and is broken off after exchange_s=%g; increase exchange_s, or compress more",
                took,
                self._rules.exchange_s,
            )
