"""Move buffers of bytes from every rank to the ranks that need them. Nothing here interprets the bytes.

===================  ===============================================================================
:mod:`.contract`     an exchange: what each rank contributes and which ranges it needs
:mod:`.broadcast`    exchanges through a process group
:mod:`.multicast`    exchanges by datagrams that leave their sender once
:mod:`.factory`      chooses between the two
:mod:`.event_loop`   the thread of multicast
:mod:`.membership`   ranks that are silent, lost, or let back in
:mod:`.repair`       which chunks are sent, and sent again
:mod:`.link`         datagrams out and in, and their counts
:mod:`.delivery`     which chunks of a buffer were sent, arrived, or are missing
:mod:`.pacing`       how fast datagrams are sent
:mod:`.datagram`     the format of a datagram
:mod:`.sockets`      multicast sockets and network interfaces
:mod:`.probe`        opens a session and tests whether multicast reaches all ranks
===================  ===============================================================================
"""

from __future__ import annotations

from narrowband.transport.broadcast import Broadcast
from narrowband.transport.contract import RanksLostError, Transport
from narrowband.transport.factory import TRANSPORTS, connect
from narrowband.transport.multicast import Multicast, MulticastStatistics

__all__ = [
    "TRANSPORTS",
    "Broadcast",
    "Multicast",
    "MulticastStatistics",
    "RanksLostError",
    "Transport",
    "connect",
]
