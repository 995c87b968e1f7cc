"""UDP/IP multicast that arrives: a datagram leaves its sender once, for all ranks, and again where one did not get it.

There is no maintained NORM (RFC 5740) for Python, so this is a protocol of its own, of the same kind. Every datagram
carries a keyed code (:mod:`.datagram`). What is not of this session is dropped; what comes twice or late changes
nothing, because a chunk's place follows from its sender, exchange and number. Four parts share the work:

===================  ===============================================================================
:mod:`.event_loop`   one thread, which waits and lets the others act
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

    from torch import Tensor

    from narrowband.transport.contract import Wanted

__all__ = ["Multicast", "MulticastStatistics"]

#: A lost rank is heard asking for so long.
_ASKED_S = 1.0


class Multicast(Transport):
    """Buffers by UDP/IP multicast among the ranks of a process group. Making one is collective.

    Args:
        group: the ranks. It carries the session's key, and what the probe found.
        interface: name or IPv4 address of this rank's network card; None is the one that gloo or NCCL was told, or the
            one on the way to ``MASTER_ADDR``.
        mtu: largest IP packet to send, in bytes; None is what the cards of all ranks take. What a switch between them
            takes they do not know.
        ttl: 1 stays on the link; more lets routers that route multicast pass it on.
        rate: a limit for what this rank sends, in bytes per second; None leaves it to the window.
        timeout_s: a rank that is waited for and brings nothing for so long is lost.
        silence_timeout: one that gives no sign of life for so long, in seconds, is lost, too. A rank that computes does
            give some. None: only ``timeout_s`` counts.
        max_failures: how many ranks may be lost and exchanges go on without them, 0 or 1.
        readmits: whether one that was lost, and lives, may take part again.
        early_bytes: how much of an exchange that has not begun on this rank is kept.
        probe_s: how long ranks listen for each other when the transport is made.

    Raises:
        UnsupportedError: multicast does not reach all ranks, or ``max_failures`` with fewer than three, of
            whom none could know which one is cut off. The same on all of them.

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
            raise UnsupportedError(f"of {dist.get_world_size(group)} ranks none can be lost and be known to be: use 3")
        session, opened = open_session(group, interface=interface, mtu=mtu, ttl=ttl, wait_s=probe_s)
        self._rank, self._size = session.rank, session.world_size
        self.max_failures, self.readmits = max_failures, bool(max_failures and readmits)
        silence_timeout = float("inf") if silence_timeout is None else silence_timeout
        limits = Limits(timeout_s, silence_timeout, max_failures, self.readmits)
        self._link = Link(session, opened, rate)
        self._members = Membership(self._link, limits)
        self._loop = loop = EventLoop(self._link, self._members, Repair(self._link, self._members, early_bytes))
        # At the interpreter's exit, too: a thread that it catches inside native code takes the process down.
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
        """As :attr:`Transport.returning`."""
        return bool(self.lost) and time.monotonic() - self._members.asked_at < _ASKED_S

    def readmit(self) -> None:
        """As :meth:`Transport.readmit`."""
        self._loop.readmits_next = True

    def drop(self) -> None:
        """As :meth:`Transport.drop`."""
        self._members.dropped = True

    def rejoin(self) -> None:
        """As :meth:`Transport.rejoin`; it waits for ``timeout_s`` after the last sign of the others."""
        self._loop.rejoin()

    def exchange(self, outgoing: Tensor, incoming: Sequence[Tensor | None], wanted: Wanted) -> None:
        """As :meth:`Transport.exchange`.

        Raises:
            ValueError: buffers or ranges that cannot be meant.
            RanksLostError: a rank did not answer, or has closed. The transport is of no use after that, unless
                ``lost`` has it: then all others get this error once, too, each in the exchange that it is in or in its
                next, and the exchange after that is one without the lost rank. One that names this rank itself leaves
                :meth:`rejoin`, with ``readmits``.
            RuntimeError: buffers' sizes differ between ranks, or the network fails. The transport is of no use then.
        """
        check_exchange(outgoing, incoming, wanted, self._rank, self._size)
        if gone := tuple(rank for rank in self.lost if wanted[rank]):
            raise RanksLostError(f"{names_of(gone)} lost before, and nothing can be wanted of it", gone)
        self._loop.exchange(_bytes_of(outgoing), [_bytes_of(buffer) for buffer in incoming], wanted)

    def close(self) -> None:
        """Wait until all ranks have what this one sent them (those that are there), and end. Later calls do nothing."""
        self._end()


def _bytes_of(buffer: Tensor | None) -> memoryview:
    return memoryview(b"") if buffer is None else buffer.numpy().data
