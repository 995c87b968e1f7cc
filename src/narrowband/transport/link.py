"""One rank's end of a multicast session: datagrams out, genuine datagrams in, and how many there were."""

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
    """What this rank has sent and received since the transport was made. A datagram sent to all counts once.

    Attributes:
        exchanges: that returned.
        data_datagrams, data_bytes: buffers' chunks sent for the first time, and their bytes.
        repair_datagrams, repair_bytes: the same for those sent again.
        control_datagrams, control_bytes: statuses, polls and goodbyes, and their payloads' bytes.
        received_datagrams: genuine ones.
        rejected_datagrams: those that were not: forged, changed, cut, or of another session.
        repeated_datagrams: chunks that brought nothing.
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
        """All that was sent."""
        return self.data_datagrams + self.repair_datagrams + self.control_datagrams

    @property
    def sent_bytes(self) -> int:
        """All that was sent, in payloads and this transport's headers."""
        payloads = self.data_bytes + self.repair_bytes + self.control_bytes
        return payloads + self.sent_datagrams * HEADER_BYTES

    @property
    def link_bytes(self) -> int:
        """All that was sent as the counters of an Ethernet link count it: with the headers of UDP, IP and Ethernet."""
        return self.sent_bytes + self.sent_datagrams * (IP_UDP_BYTES + LINK_BYTES)


class Link:
    """What a rank sends and receives in a session.

    Args:
        session: what all ranks know of it.
        opened: its socket.
        rate: a limit for what is sent, in bytes per second, or None.

    Attributes:
        session: as given.
        statistics: counts up to now.
        bucket: keeps buffers' chunks within the rate.
        blocked: whether the socket took no more, the last time that something was sent.
        more: whether there may be more to receive, or to send, in the next turn.
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
        """Readable when something has come."""
        return self._socket.fileno()

    def send_fileno(self) -> int:
        """Writable when something can be sent."""
        return self._socket.send_fileno()

    def receive(self) -> Iterator[Datagram]:
        """What has come from other ranks of this session, some datagrams at a time."""
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
        """Send anything but a chunk. False: the socket took it not."""
        if not self._send(kind, index, exchange, payload):
            return False
        self.statistics.control_datagrams += 1
        self.statistics.control_bytes += len(payload)
        return True

    def send_chunk(self, index: int, exchange: int, chunk: memoryview, *, repairs: bool) -> bool:
        """Send a chunk of this rank's buffer. False: the socket took it not."""
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
