"""Reliable UDP/IP multicast: a datagram is sent once for all ranks, and again if one of them did not get it.

There is no maintained NORM (RFC 5740) for Python, so this is a protocol of its own, of the same kind. Every datagram
carries a message authentication code (:mod:`.datagram`). Datagrams that are not of this session are dropped. Those that
arrive twice or late change nothing, because a chunk's place follows from its sender, exchange and number. Four parts
share the work:

===================  ===============================================================================
:mod:`.event_loop`   one thread, which waits and lets the other parts act
:mod:`.repair`       chunks, statuses that name missing ones, polls
:mod:`.membership`   ranks that are silent, lost, or let back in
:mod:`.link`         datagrams out and in, and their counts
===================  ===============================================================================
"""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from narrowband.errors import UnsupportedError
from narrowband.transport.contract import RanksLostError, Transport, check_exchange
from narrowband.transport.event_loop import EventLoop
from narrowband.transport.link import Link, MulticastStatistics
from narrowband.transport.membership import Limits, Membership, names_of
from narrowband.transport.probe import open_session
from narrowband.transport.repair import Repair

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch import Tensor

    from narrowband.transport.contract import Wanted

__all__ = ["Multicast", "MulticastStatistics"]

#: Seconds after its last request for which a lost rank counts as asking to return.
_ASKED_S = 1.0


class Multicast(Transport):
    """Exchanges buffers by UDP/IP multicast among the ranks of a process group. Creating one is a collective.

    Args:
        group: the ranks. The group carries the session's key, and the results of the probe.
        interface: name or IPv4 address of this rank's network card; None: the card that gloo or NCCL was told to use,
            or the one on the route to ``MASTER_ADDR``.
        mtu: largest IP packet to send, in bytes; None: what the cards of all ranks support. A switch between them may
            support less, which is not detected here.
        ttl: 1 stays on the link; more lets routers that route multicast forward it.
        rate: limit for what this rank sends, in bytes per second; None: only the window limits it.
        timeout_s: seconds after which a rank is lost that an exchange waits for, and that delivers nothing.
        silence_timeout: seconds without a sign of life after which such a rank is lost, too. A rank that computes does
            give signs of life. None: only ``timeout_s`` counts.
        max_failures: how many ranks may be lost such that exchanges go on without them, 0 or 1.
        readmits: whether a lost rank that is alive may take part again.
        early_bytes: how many bytes are kept of an exchange that this rank has not begun.
        probe_s: seconds for which ranks listen for each other when the transport is created; twice, if not all are
            heard at first.

    Raises:
        UnsupportedError: multicast does not reach all ranks; or ``max_failures`` with fewer than three ranks, of which
            none could know which one is cut off. The same on all ranks.

    Example:
        >>> transport = Multicast(dist.group.WORLD)  # doctest: +SKIP
        >>> transport.exchange(mine, theirs, wanted)  # doctest: +SKIP
        >>> transport.statistics.link_bytes  # doctest: +SKIP
    """

    name = "multicast"
    multicast = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        interface: str | None = None,
        mtu: int | None = None,
        ttl: int = 1,
        rate: float | None = None,
        timeout_s: float = 300.0,
        silence_timeout: float | None = None,
        max_failures: int = 0,
        readmits: bool = False,
        early_bytes: int = 64 * 1024 * 1024,
        probe_s: float = 2.0,
    ) -> None:
        if rate is not None and not 0 < rate < float("inf"):
            raise ValueError(f"rate is {rate}; expected bytes per second above 0, or None")
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {timeout_s}; expected seconds above 0")
        if silence_timeout is not None and not 0 < silence_timeout < float("inf"):
            raise ValueError(f"silence_timeout is {silence_timeout}; expected seconds above 0, or None")
        if max_failures not in (0, 1):
            raise ValueError(f"max_failures is {max_failures}; expected 0 or 1")
        if mtu is not None and not 576 <= mtu <= 65536:
            raise ValueError(f"mtu is {mtu}; expected 576 to 65536 bytes, or None")
        if not 1 <= ttl <= 255:
            raise ValueError(f"ttl is {ttl}; expected 1 to 255")
        if max_failures and dist.get_world_size(group) < 3:
            raise UnsupportedError(
                f"max_failures=1 needs 3 ranks or more, not {dist.get_world_size(group)}: of two, "
                "neither could know which one is cut off"
            )
        session, opened = open_session(group, interface=interface, mtu=mtu, ttl=ttl, wait_s=probe_s)
        self._rank, self._size = session.rank, session.world_size
        self.max_failures, self.readmits = max_failures, bool(max_failures and readmits)
        silence_timeout = float("inf") if silence_timeout is None else silence_timeout
        limits = Limits(timeout_s, silence_timeout, max_failures, self.readmits)
        self._link = Link(session, opened, rate)
        self._members = Membership(self._link, limits)
        self._loop = loop = EventLoop(self._link, self._members, Repair(self._link, self._members, early_bytes))
        # Runs at the interpreter's exit, too: a thread that is inside native code then would crash the process.
        self._end = weakref.finalize(self, loop.close)

    @property
    def statistics(self) -> MulticastStatistics:
        """Counts up to now."""
        return replace(self._link.statistics)

    @property
    def lost(self) -> tuple[int, ...]:
        """The rank that exchanges go on without."""
        return () if self._loop.readmits_next else self._members.lost

    @property
    def returning(self) -> bool:
        """See :attr:`Transport.returning`."""
        return bool(self.lost) and time.monotonic() - self._members.asked_at < _ASKED_S

    def readmit(self) -> None:
        """See :meth:`Transport.readmit`."""
        self._loop.readmits_next = True

    def drop(self) -> None:
        """See :meth:`Transport.drop`."""
        self._members.dropped = True

    def rejoin(self) -> None:
        """See :meth:`Transport.rejoin`. Waits until ``timeout_s`` after the last answer of the others."""
        self._loop.rejoin()

    def wait_at_most(self, timeout: timedelta) -> None:
        """See :meth:`Transport.wait_at_most`."""
        self._members.limits = replace(self._members.limits, timeout_s=timeout.total_seconds())

    def exchange(self, outgoing: Tensor, incoming: Sequence[Tensor | None], wanted: Wanted) -> None:
        """See :meth:`Transport.exchange`.

        Raises:
            ValueError: malformed buffers or ranges.
            RanksLostError: a rank did not answer, or has closed. The transport cannot be used after that, unless
                ``lost`` has the rank: then all other ranks get this error once, too, in their current exchange or the
                next, and the exchange after that is the first without the lost rank. If the error names this rank
                itself, only :meth:`rejoin` is possible, with ``readmits``.
            RuntimeError: buffers' sizes differ between ranks, or the network fails. The transport cannot be used then.
        """
        check_exchange(outgoing, incoming, wanted, self._rank, self._size)
        if gone := tuple(rank for rank in self.lost if wanted[rank]):
            raise RanksLostError(f"{names_of(gone)} was lost before; wanted must be empty for it", gone)
        self._loop.exchange(_bytes_of(outgoing), [_bytes_of(buffer) for buffer in incoming], wanted)

    def close(self) -> None:
        """Wait until all ranks that are there have received what this rank sent, then end. Later calls do nothing."""
        self._end()


def _bytes_of(buffer: Tensor | None) -> memoryview:
    return memoryview(b"") if buffer is None else buffer.numpy().data
