"""A socket that sends to a multicast group and receives from it, and the choice of its network card.

IPv4 only: one group on one link is needed, and IPv4 is available wherever gloo works.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from dataclasses import dataclass

from narrowband.errors import UnsupportedError
from narrowband.transport.datagram import HEADER_BYTES

__all__ = ["Interface", "MulticastSocket", "find_interface", "interfaces"]

IP_UDP_BYTES = 28  # headers of IPv4 and UDP
LINK_BYTES = 14  # header of an Ethernet frame, without preamble and checksum, as Linux's counters count
_MAX_UDP_BYTES = 65507  # largest UDP payload that IPv4's 16-bit length allows

# Constants of Linux for which Python's socket module has no names.
_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921
_IP_MTU_DISCOVER, _IP_PMTUDISC_DO = 10, 2
_IP_MULTICAST_ALL = 49
_SO_RCVBUFFORCE = 33

_RECEIVE_BUFFER = 4 * 1024 * 1024
#: Queue on this host's own card: long enough to keep the card busy, short enough not to delay a status.
_SEND_BUFFER = 128 * 1024

#: Errors by which a card says that it has no room for a datagram; all are temporary.
_BUSY = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class Interface:
    """A network card: its name, index, IPv4 address and MTU in bytes."""

    name: str
    index: int
    address: str
    mtu: int

    @property
    def chunk_bytes(self) -> int:
        """The largest payload that one datagram carries in one IP packet; a multiple of 8."""
        return (min(self.mtu - IP_UDP_BYTES, _MAX_UDP_BYTES) - HEADER_BYTES) // 8 * 8


def find_interface(wanted: str | None = None) -> Interface:
    """Return the network card to use.

    Args:
        wanted: its name or IPv4 address. None: the card that gloo (``GLOO_SOCKET_IFNAME``) or NCCL
            (``NCCL_SOCKET_IFNAME``) was told to use; else the one on the route to ``MASTER_ADDR``; else the only card
            beside the loopback.

    Raises:
        UnsupportedError: there is no such card, or the choice is not clear.
    """
    cards = interfaces()
    shown = ", ".join(f"{card.name} ({card.address})" for card in cards) or "none"
    if wanted is not None:
        for card in cards:
            if wanted in (card.name, card.address):
                return card
        raise UnsupportedError(f"there is no network card {wanted!r} with an IPv4 address; this host has {shown}")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL takes prefixes, exclusions (^) and exact names (=); only full names of cards are used here
        names = [name.strip().lstrip("=") for name in os.environ.get(variable, "").split(",")]
        for card in cards:
            if card.name in names:
                return card
    if master := os.environ.get("MASTER_ADDR"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
            trial.connect((master, 9))  # sends nothing; the kernel looks up the route
            address = trial.getsockname()[0]
            for card in cards:
                if card.address == address or (card.name == "lo" and address.startswith("127.")):
                    return card
    others = [card for card in cards if card.name != "lo"]
    if len(others) == 1:
        return others[0]
    raise UnsupportedError(
        f"cannot tell which network card reaches the other ranks (this host has {shown}): pass its name as interface=, "
        "or set GLOO_SOCKET_IFNAME"
    )


def interfaces() -> list[Interface]:
    """Return all cards of this host that have an IPv4 address."""
    try:
        import fcntl
    except ImportError as error:
        raise UnsupportedError("network cards can be looked up on Linux only; use transport='broadcast'") from error
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        for index, name in socket.if_nameindex():
            request = struct.pack("16s240x", name.encode()[:15])
            try:
                address = socket.inet_ntoa(fcntl.ioctl(trial, _SIOCGIFADDR, request)[20:24])
                (mtu,) = struct.unpack_from("=i", fcntl.ioctl(trial, _SIOCGIFMTU, request), 16)
            except OSError:  # no IPv4 address
                continue
            found.append(Interface(name, index, address, mtu))
    return found


class MulticastSocket:
    """Sends datagrams to a multicast group and receives from it. Nothing here blocks.

    Args:
        interface: the network card.
        group, port: the group's IPv4 address and UDP port.
        chunk_bytes: the largest payload after the header.
        ttl: number of routers that a datagram may pass, plus one.
        loop: whether sockets on this host, such as those of other ranks, receive what is sent, too.

    Raises:
        OSError: the card does not support multicast, or the port is in use.

    Attributes:
        receive_buffer: bytes of kernel memory for datagrams that wait to be received, the kernel's records included.
    """

    def __init__(
        self, interface: Interface, group: str, port: int, *, chunk_bytes: int, ttl: int = 1, loop: bool = True
    ) -> None:
        on_card = struct.pack("=4s4si", bytes(4), bytes(4), interface.index)
        member = struct.pack("=4s4si", socket.inet_aton(group), bytes(4), interface.index)
        self._in = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._in.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # other ranks of this host listen, too
            try:
                self._in.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER)
            except PermissionError:
                self._in.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            self._in.bind((group, port))  # to the group: datagrams to the host's own addresses do not come in
            self._in.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)
            self._in.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
            self.receive_buffer = self._in.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            self._out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(_SEND_BUFFER, 4 * chunk_bytes))
            self._out.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, on_card)
            self._out.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, ttl)
            self._out.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, int(loop))
            self._out.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)  # never in fragments
            self._out.bind((interface.address, 0))
            self._out.connect((group, port))
        except BaseException:
            self.close()
            raise
        # One byte more than a valid datagram has: a longer one is cut to this size, and then fails authentication.
        self._buffer = memoryview(bytearray(HEADER_BYTES + chunk_bytes + 1))

    def fileno(self) -> int:
        """Return the descriptor that is readable when a datagram has arrived."""
        return self._in.fileno()

    def send_fileno(self) -> int:
        """Return the descriptor that is writable when there is room for a datagram."""
        return self._out.fileno()

    def send(self, header: bytes, payload: bytes | memoryview = b"") -> bool:
        """Send one datagram. Return False if there is no room for it now.

        Raises:
            OSError: the card is gone, or a firewall forbids it.
        """
        try:
            self._out.sendmsg((header, payload))
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise
        return True

    def receive(self) -> memoryview | None:
        """Return the next datagram, valid until the next call; None if there is none now."""
        try:
            nbytes = self._in.recv_into(self._buffer)
        except BlockingIOError:
            return None
        return self._buffer[:nbytes]

    def close(self) -> None:
        """Close the sockets, which leaves the group."""
        self._in.close()
        self._out.close()
