"""Choose the transport of a process group: by name, or the one that sends least among those that reach all ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from narrowband.errors import UnsupportedError
from narrowband.transport.broadcast import Broadcast
from narrowband.transport.multicast import Multicast

if TYPE_CHECKING:
    from datetime import timedelta

    from narrowband.transport.contract import Transport

__all__ = ["TRANSPORTS", "connect"]

log = logging.getLogger(__name__)

#: Names that users may choose.
TRANSPORTS = ("auto", "broadcast", "multicast")


def connect(
    name: str,
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
    *,
    max_failures: int = 0,
    silence_timeout: float | None = None,
    readmits: bool = False,
) -> Transport:
    """Create a transport among the ranks of a process group that nothing else uses. A collective.

    ``auto`` chooses multicast, which sends least, or broadcast if multicast does not reach all ranks; a warning says so
    then. Two ranks get broadcast, since multicast would save them nothing.

    Args:
        name: one of ``TRANSPORTS``.
        group: the ranks.
        timeout: how long to wait for a rank; None: as long as the transport does by default.
        max_failures: how many ranks may be lost, 0 or 1. 1 requires multicast: a process group waits for all members.
        silence_timeout: seconds without a sign of life after which a rank is lost; None: only the time-out counts.
        readmits: whether a lost rank may return.

    Raises:
        ValueError: a name that does not exist.
        UnsupportedError: ``multicast`` does not reach all ranks, or ``max_failures`` requires a multicast that cannot
            be had.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"transport={name!r}; expected one of {', '.join(TRANSPORTS)}")
    if name == "broadcast" and max_failures:
        raise UnsupportedError(
            f"max_failures={max_failures} needs transport='multicast': a process group cannot go on without one of its "
            "members"
        )
    if name == "broadcast" or (name == "auto" and dist.get_world_size(group) <= 2 and not max_failures):
        return Broadcast(group, timeout)
    limits: dict[str, Any] = {} if timeout is None else {"timeout_s": timeout.total_seconds()}
    try:
        return Multicast(group, **limits, silence_timeout=silence_timeout, max_failures=max_failures, readmits=readmits)
    except UnsupportedError as error:
        if name == "multicast":
            raise
        if max_failures:
            raise UnsupportedError(f"max_failures={max_failures} needs multicast, but {error}") from error
        if dist.get_rank(group) == 0:
            log.warning("packets are sent by broadcast, once for each rank that needs them: %s", error)
        return Broadcast(group, timeout)
