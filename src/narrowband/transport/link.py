"""One rank's end of a multicast session: it sends datagrams, receives genuine ones, and counts both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowband.transport.datagram import HEADER_BYTES, Datagram, Framing, Kind
from narrowband.transport.pacing import TokenBucket
from narrowband.transport.sockets import IP_UDP_BYTES, LINK_BYTES, MulticastSocket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from narrowband.transport.probe import Session

__all__ = ["Link", "MulticastStatistics"]

_RECEIVED_PER_TURN = 64


@dataclass
class MulticastStatistics:
    """What this rank has sent and received since the transport was created. A datagram sent to all counts once.

    Attributes:
        exchanges: exchanges that completed.
        data_datagrams, data_bytes: chunks sent for the first time, and their bytes.
        repair_datagrams, repair_bytes: chunks sent again, and their bytes.
        control_datagrams, control_bytes: all other datagrams, such as statuses, polls and goodbyes, and the bytes of
            their payloads.
        received_datagrams: genuine datagrams that arrived.
        rejected_datagrams: datagrams that were not genuine: forged, changed, cut, or of another session.
        repeated_datagrams: chunks that were of no use, since they had arrived before or could not be kept.
    """

    exchanges: int = 0
    data_datagrams: int = 0
    data_bytes: int = 0
    repair_datagrams: int = 0
    repair_bytes: int = 0
    control_datagrams: int = 0
    control_bytes: int = 0
    received_datagrams: int = 0
    rejected_datagrams: int = 0
    repeated_datagrams: int = 0

    @property
    def sent_datagrams(self) -> int:
        """Number of all datagrams that were sent."""
        return self.data_datagrams + self.repair_datagrams + self.control_datagrams

    @property
    def sent_bytes(self) -> int:
        """Bytes of all datagrams that were sent: payloads and this transport's headers."""
        payloads = self.data_bytes + self.repair_bytes + self.control_bytes
        return payloads + self.sent_datagrams * HEADER_BYTES

    @property
    def link_bytes(self) -> int:
        """Bytes that were sent as the counters of an Ethernet link count them: with UDP, IP and Ethernet headers."""
        return self.sent_bytes + self.sent_datagrams * (IP_UDP_BYTES + LINK_BYTES)


class Link:
    """A rank's connection to a session: sends and receives its datagrams.

    Args:
        session: the session, as all ranks know it.
        opened: the session's socket.
        rate: limit for what is sent, in bytes per second; None: no limit.

    Attributes:
        session: the session that was passed.
        statistics: counts up to now.
        bucket: keeps chunks within the rate.
        blocked: whether the socket refused a datagram, for want of room, in this turn of the event loop.
        more: whether there may be more to receive, or to send, without waiting.
    """

    def __init__(self, session: Session, opened: MulticastSocket, rate: float | None) -> None:
        self.session = session
        self.statistics = MulticastStatistics()
        self.bucket = TokenBucket(rate, 2 * session.chunk_bytes)
        self.blocked = False
        self.more = False
        self._socket = opened
        self._framing = Framing(session.key, session.rank, session.world_size)

    def fileno(self) -> int:
        """Return the descriptor that is readable when a datagram has arrived."""
        return self._socket.fileno()

    def send_fileno(self) -> int:
        """Return the descriptor that is writable when a datagram can be sent."""
        return self._socket.send_fileno()

    def receive(self) -> Iterator[Datagram]:
        """Yield datagrams that have arrived from other ranks of this session, at most 64 per call."""
        for _ in range(_RECEIVED_PER_TURN):
            raw = self._socket.receive()
            if raw is None:
                return
            datagram = self._framing.parse(raw)
            if datagram is None:
                self.statistics.rejected_datagrams += not self._framing.is_own(raw)
                continue
            self.statistics.received_datagrams += 1
            yield datagram
        self.more = True

    def send_control(self, kind: Kind, index: int, exchange: int, payload: bytes = b"") -> bool:
        """Send a datagram that is no chunk. Return False if the socket has no room for it."""
        if not self._send(kind, index, exchange, payload):
            return False
        self.statistics.control_datagrams += 1
        self.statistics.control_bytes += len(payload)
        return True

    def send_chunk(self, index: int, exchange: int, chunk: memoryview, *, repairs: bool) -> bool:
        """Send a chunk of this rank's buffer. Return False if the socket has no room for it."""
        if not self._send(Kind.DATA, index, exchange, chunk):
            return False
        self.bucket.take(len(chunk) + HEADER_BYTES + IP_UDP_BYTES)
        if repairs:
            self.statistics.repair_datagrams += 1
            self.statistics.repair_bytes += len(chunk)
        else:
            self.statistics.data_datagrams += 1
            self.statistics.data_bytes += len(chunk)
        return True

    def _send(self, kind: Kind, index: int, exchange: int, payload: bytes | memoryview) -> bool:
        sent = self._socket.send(self._framing.header(kind, index, exchange, payload), payload)
        self.blocked |= not sent
        return sent

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
