"""Probe whether multicast reaches all ranks, and agree on a session: a multicast group, a port and a key.

The key comes from rank 0 and is sent through the process group. Whoever can read the process group's connections could
read gradients anyway.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from narrowband.errors import UnsupportedError
from narrowband.transport.datagram import KEY_BYTES, MAX_RANKS, Framing, Kind
from narrowband.transport.sockets import Interface, MulticastSocket, find_interface

__all__ = ["Session", "open_session"]

#: Groups of local scope (RFC 2365), which routers do not forward out of a site.
_GROUPS = "239.255.{}.{}"
_PORTS = range(49152, 65536)  # for private use (RFC 6335)
_HELLO_S = 0.02
_GOODBYES = 3
#: How often ranks listen. A rank whose process stood still may have missed the others, and they it.
_ATTEMPTS = 2


@dataclass(frozen=True)
class Session:
    """A multicast session, as all ranks know it.

    Attributes:
        key: key of the datagrams' authentication codes, 32 bytes.
        group, port: address and UDP port to which datagrams are sent.
        chunk_bytes: bytes of a buffer that one datagram carries, by the smallest MTU of all cards.
        receive_buffer: the smallest of all ranks' receive buffers, in bytes as the kernel counts them.
        rank, world_size: this rank, and the number of ranks.
    """

    key: bytes
    group: str
    port: int
    chunk_bytes: int
    receive_buffer: int
    rank: int
    world_size: int


def open_session(
    group: dist.ProcessGroup,
    *,
    interface: str | None = None,
    mtu: int | None = None,
    ttl: int = 1,
    wait_s: float = 2.0,
) -> tuple[Session, MulticastSocket]:
    """Open a socket on every rank, agree on a key, and check that full-size datagrams reach all ranks from all ranks.

    A collective, with the same outcome on all ranks.

    Args:
        group: the ranks.
        interface: name or IPv4 address of this rank's network card; None: see :func:`find_interface`.
        mtu: largest IP packet to send, in bytes; None: the card's MTU.
        ttl: 1 stays on the link; with t, up to t − 1 routers forward it.
        wait_s: seconds for which ranks listen for each other; twice, if not all are heard at first.

    Raises:
        UnsupportedError: multicast does not reach all ranks; the message says from whom to whom.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    card, failure = _card(interface, mtu)
    proposal: dict[str, Any] = {
        "key": secrets.token_bytes(KEY_BYTES),
        "group": _GROUPS.format(secrets.randbelow(256), 1 + secrets.randbelow(254)),
        "port": secrets.choice(_PORTS),
        "chunk_bytes": card.chunk_bytes if card else 0,
        "place": (socket.gethostname(), card.address if card else ""),
        "failure": failure if size <= MAX_RANKS else f"{size} ranks; expected at most {MAX_RANKS}",
    }
    proposals = _gather(group, proposal)
    _refuse([each["failure"] for each in proposals])
    chosen = proposals[0]
    chunk_bytes = min(each["chunk_bytes"] for each in proposals)
    places = [set(each["place"]) for each in proposals]
    shares_host = any(places[other] & places[rank] for other in range(size) if other != rank)
    receive_buffer = 0
    opened: MulticastSocket | None = None
    try:
        assert card is not None
        opened = MulticastSocket(
            card, chosen["group"], chosen["port"], chunk_bytes=chunk_bytes, ttl=ttl, loop=shares_host
        )
        receive_buffer = opened.receive_buffer
    except OSError as error:
        failure = f"{card.name} ({card.address}) does not support multicast: {error}" if card else str(error)
    try:
        _refuse(_gather(group, failure))  # all sockets are open, or all ranks raise, before any rank sends
        assert opened is not None
        for _ in range(_ATTEMPTS):
            heard, failure = [False] * size, ""
            try:
                heard = _listen(opened, Framing(chosen["key"], rank, size), chunk_bytes, wait_s)
            except OSError as error:
                failure = f"cannot send to {chosen['group']}: {error}"
            reports = _gather(group, {"heard": heard, "failure": failure, "receive_buffer": receive_buffer})
            complaints = [_complaint(report, proposals) for report in reports]
            if not any(complaints):
                break
        _refuse(complaints)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    buffers = min(report["receive_buffer"] for report in reports)
    session = Session(chosen["key"], chosen["group"], chosen["port"], chunk_bytes, buffers, rank, size)
    return session, opened


def _card(wanted: str | None, mtu: int | None) -> tuple[Interface | None, str]:
    """Return this rank's card and "", or None and what is wrong."""
    try:
        card = find_interface(wanted)
    except UnsupportedError as error:
        return None, str(error)
    return (card if mtu is None else replace(card, mtu=min(card.mtu, mtu))), ""


def _gather(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, mine, group=group)
    return everybody


def _refuse(failures: list[str]) -> None:
    """Raise the same error on all ranks if there is a failure on any."""
    told = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure]
    if told:
        raise UnsupportedError("multicast does not reach all ranks. " + "; ".join(told))


def _complaint(report: dict[str, Any], proposals: list[dict[str, Any]]) -> str:
    if report["failure"]:
        return str(report["failure"])
    silent = [other for other, heard in enumerate(report["heard"]) if not heard]
    if not silent:
        return ""
    names = ", ".join(f"{other} ({proposals[other]['place'][1]})" for other in silent)
    return f"received nothing from rank {names}"


def _listen(opened: MulticastSocket, framing: Framing, chunk_bytes: int, wait_s: float) -> list[bool]:
    """Exchange hellos until all have arrived here and, by the others' own hellos, everywhere; or until time is up.
    Return for each rank whether its hello arrived.
    """
    everybody = bytes([1]) * framing.world_size
    heard = bytearray(framing.world_size)
    heard[framing.rank] = 1
    content = {framing.rank}
    poller = select.poll()
    poller.register(opened.fileno(), select.POLLIN)
    deadline, hello_at, spoken = time.monotonic() + wait_s, 0.0, 0
    while (heard != everybody or len(content) < framing.world_size) and (now := time.monotonic()) < deadline:
        if now >= hello_at:
            _say_hello(opened, framing, heard, chunk_bytes, spoken)
            hello_at, spoken = now + _HELLO_S, spoken + 1
        poller.poll(max(0.0, hello_at - now) * 1000)
        while (raw := opened.receive()) is not None:
            datagram = framing.parse(raw)
            if datagram is None or datagram.kind is not Kind.HELLO or len(datagram.payload) != chunk_bytes:
                continue
            heard[datagram.sender] = 1
            if datagram.payload[: framing.world_size] == everybody:
                content.add(datagram.sender)
    for _ in range(_GOODBYES):  # so that no rank waits for its deadline because the last hello got lost
        _say_hello(opened, framing, heard, chunk_bytes, spoken)
        spoken += 1
    return [bool(each) for each in heard]


def _say_hello(opened: MulticastSocket, framing: Framing, heard: bytearray, chunk_bytes: int, spoken: int) -> None:
    payload = bytes(heard) + bytes(chunk_bytes - len(heard))
    opened.send(framing.header(Kind.HELLO, spoken, 0, payload), payload)
