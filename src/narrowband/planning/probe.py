"""Test whether every rank reaches every other, and how fast, to find network problems before the first run.

Each rank reports its host, versions, and the address that gloo listens on, which is read from the kernel's list of this
process's sockets. Then each rank knocks: it connects to a port of each other rank, as gloo will, with a time-out of its
own. Pairs that answer each other make a group of two, one pair after the other, in which round trips and rates are
measured as ``narrowband plan --measure`` does. If a pair fails there, the other pairs go on. A group of all ranks would
fail as a whole, without saying which pair failed and why.

Every duration is measured on one rank's clock, from a message to its answer, so clocks of machines need not agree.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # what dist.HashStore is, for type checkers

from narrowband.errors import UnsupportedError
from narrowband.planning.meeting import Meeting, seconds
from narrowband.planning.network import measure_rate, measure_trips, routes
from narrowband.transport.sockets import interfaces

__all__ = ["ANSWERED", "NO_WAY", "REFUSED", "SILENT", "STRANGER", "Knock", "Peers", "Seat", "Way", "probe"]

#: The outcomes of a knock.
ANSWERED, SILENT, REFUSED, NO_WAY, STRANGER = "answered", "silent", "refused", "no way", "stranger"

#: Up to this many ranks, all pairs are measured; with more, only pairs of the first ranks of machines.
_ALL_RANKS = 8
#: Number of knocks at the same time.
_THREADS = 32
#: Wait at most this many time-outs for the result of a pair. Only a process that has died makes others wait so long.
_PATIENCE = 30
_TOKEN_NBYTES = 16
_LISTENING = "0A"  # in /proc/net/tcp


@dataclass(frozen=True)
class Seat:
    """A rank and its machine.

    Attributes:
        rank: its number.
        host: the name of its machine.
        boot: the boot ID, which distinguishes machines of the same name; empty if the system has none.
        versions: of Python, torch and narrowband.
        asked: ``GLOO_SOCKET_IFNAME``, empty if it is not set.
        address: the address that gloo tells the other ranks; empty if gloo found none.
        card: the interface with that address; empty if it is not known.
        mtu: of that interface, in bytes; 0 if it is not known.
        cards: all interfaces, as ``"eth0 (10.0.0.1)"``.
        master: the addresses that ``MASTER_ADDR`` resolves to on this machine.
        port: the port for knocks, picked by the system as gloo's ports are; 0 if nothing listens.
        error: why gloo cannot start, if it cannot.
    """

    rank: int
    host: str
    boot: str
    versions: dict[str, str]
    asked: str
    address: str
    card: str
    mtu: int
    cards: list[str]
    master: list[str]
    port: int
    error: str = ""

    @property
    def machine(self) -> tuple[str, str]:
        """A key of the machine, equal for all its ranks."""
        return self.host, self.boot

    @property
    def is_loopback(self) -> bool:
        """Whether only its own machine can reach this address."""
        return self.address != "" and ip_address(self.address).is_loopback


@dataclass(frozen=True)
class Knock:
    """One rank's attempt to connect to another one's port.

    Attributes:
        source, target: ranks.
        outcome: ``answered``, ``silent`` (no answer in time), ``refused``, ``no way``, or ``stranger``: something else
            answered.
    """

    source: int
    target: int
    outcome: str


@dataclass(frozen=True)
class Way:
    """The connection from one rank to another, measured over gloo.

    Attributes:
        source, target: ranks.
        trip_s: mean seconds of a round trip of a few bytes, software included; None if no answer came.
        rate: bits per second of payload; None if long messages did not arrive.
        error: gloo's error, if something failed.
    """

    source: int
    target: int
    trip_s: float | None = None
    rate: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Peers:
    """The results of a probe.

    Attributes:
        seats: by rank.
        knocks: of every rank at every other.
        ways: of the pairs that were measured.
        limit_s: seconds after which a rank without an answer counted as unreachable.
    """

    seats: list[Seat]
    knocks: list[Knock]
    ways: list[Way]
    limit_s: float

    @property
    def machines(self) -> dict[tuple[str, str], list[int]]:
        """The ranks of each machine."""
        found: dict[tuple[str, str], list[int]] = {}
        for seat in self.seats:
            found.setdefault(seat.machine, []).append(seat.rank)
        return found


def probe(meeting: Meeting, limit_s: float = 10.0, on_event: Callable[[str], None] = lambda _: None) -> Peers:
    """Test the connections between all ranks. Call it on all ranks; all get the same result.

    Args:
        meeting: of the ranks.
        limit_s: seconds after which a rank without an answer counts as unreachable. A long message has 64 KiB, so with
            10 seconds, links of less than 53 kbit/s count as links on which long messages do not arrive.
        on_event: called with a description of each step before it begins.

    Raises:
        MeetingError: some rank has not come, or has left.
        UnsupportedError: this PyTorch has no gloo.

    Example:
        >>> from torch._C._distributed_c10d import HashStore
        >>> found = probe(Meeting(HashStore(), 0, 1, "here", wait_s=5.0))
        >>> found.ways  # one rank has nobody to reach
        []
    """
    if not dist.is_gloo_available():
        raise UnsupportedError(
            "testing the links between ranks needs the gloo backend, and this build of PyTorch does not have it"
        )
    on_event("waiting for the other ranks")
    with _door() as (seat, token):
        mine = _seat(meeting.rank, *seat)
        said = meeting.all("seat", {**asdict(mine), "token": token})
        tokens = [each.pop("token") for each in said]
        seats = [Seat(**each) for each in said]
        on_event("knocking")
        knocked = _knock_at_all(mine, seats, tokens, limit_s)
        rounds = -(-len(seats) // _THREADS)
        of_all = meeting.all("knocks", knocked, later_s=rounds * limit_s)
    knocks = [
        Knock(source, target, outcome)
        for source, outcomes in enumerate(of_all)
        for target, outcome in enumerate(outcomes)
        if source != target
    ]
    open_ways = {(each.source, each.target) for each in knocks if each.outcome == ANSWERED}
    ways = []
    for source, target in _to_measure(seats):
        if not {(source, target), (target, source)} <= open_ways:
            continue
        on_event(f"measuring from rank {source} to rank {target}")
        key = f"way/{source}-{target}"
        if meeting.rank == source:
            meeting.put(key, asdict(_measure(meeting, source, target, limit_s)))
        elif meeting.rank == target:
            _measure(meeting, source, target, limit_s)
        ways.append(Way(**meeting.get(key, _PATIENCE * limit_s)))
    return Peers(seats, knocks, ways, limit_s)


def _to_measure(seats: Sequence[Seat]) -> list[tuple[int, int]]:
    """Return the ordered pairs to measure: of all ranks if they are few, or else of the first rank of each machine."""
    if len(seats) <= _ALL_RANKS:
        return list(itertools.permutations(range(len(seats)), 2))
    firsts = list({seat.machine: seat.rank for seat in reversed(seats)}.values())[::-1]
    return [(firsts[source], firsts[target]) for source, target in routes(len(firsts))]


# ---- who sits where --------------------------------------------------------------------------------------------------


def _seat(rank: int, address: str, port: int, error: str) -> Seat:
    cards = interfaces()
    card = next((each for each in cards if each.address == address), None)
    if card is None and address.startswith("127."):
        card = next((each for each in cards if each.address.startswith("127.")), None)
    return Seat(
        rank,
        socket.gethostname(),
        _boot(),
        {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "narrowband": import_module("narrowband").__version__,
        },
        os.environ.get("GLOO_SOCKET_IFNAME", ""),
        address,
        card.name if card else "",
        card.mtu if card else 0,
        [f"{each.name} ({each.address})" for each in cards],
        _looked_up(os.environ.get("MASTER_ADDR", "")),
        port,
        error,
    )


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _looked_up(name: str) -> list[str]:
    if not name:
        return []
    with contextlib.suppress(OSError):
        return sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    return []


def _gloo_address() -> tuple[str, str]:
    """Return the address that gloo listens on and an empty string, or an empty string and why it cannot listen."""
    before = _listening()
    try:
        group = dist.ProcessGroupGloo(HashStore(), 0, 1, seconds(1.0))
    except RuntimeError as error:
        return "", str(error).splitlines()[0]
    found = [address for address in _listening() if address not in before]
    del group
    return (found[0][0], "") if found else ("", "it listens nowhere")


def _listening() -> list[tuple[str, int]]:
    """Return the addresses and ports at which this process listens."""
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing itself is closed by now
            own.add(os.readlink(f"/proc/self/fd/{number}"))
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(FileNotFoundError):  # without IPv6
            for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and f"socket:[{words[9]}]" in own:
                    address, port = words[1].split(":")
                    found.append((_readable(address, family), int(port, 16)))
    return found


def _readable(written: str, family: socket.AddressFamily) -> str:
    """Format an address from /proc/net, written as hexadecimal words of four bytes in this machine's byte order."""
    raw = bytes.fromhex(written)
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    return socket.inet_ntop(family, b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))


# ---- knocking --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _door() -> Iterator[tuple[tuple[str, int, str], str]]:
    """Listen at gloo's address, at a port that the system picks, and answer each visitor with a token.

    Yields:
        ``(address, port, error)`` and the token.
    """
    address, error = _gloo_address()
    token = secrets.token_hex(_TOKEN_NBYTES)
    if error:
        yield (address, 0, error), token
        return
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=128) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    visitor, _ = server.accept()
                    with visitor, contextlib.suppress(OSError):
                        visitor.sendall(token.encode())

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield (address, int(server.getsockname()[1]), ""), token
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends accept
            thread.join()


def _knock_at_all(mine: Seat, seats: Sequence[Seat], tokens: Sequence[str], limit_s: float) -> list[str]:
    """Knock at every other rank, and return the outcomes in the order of ranks; for this rank, ``answered``."""

    def knock(rank: int) -> str:
        if rank == mine.rank:
            return ANSWERED
        return _knock(seats[rank].address, seats[rank].port, tokens[rank], limit_s)

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(knock, range(len(seats))))


def _knock(address: str, port: int, token: str, limit_s: float) -> str:
    if not port:
        return NO_WAY
    try:
        with socket.create_connection((address, port), limit_s) as door:
            said = b""
            while len(said) < len(token) and (part := door.recv(len(token))):
                said += part
    except TimeoutError:
        return SILENT
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return NO_WAY
    return ANSWERED if said.decode(errors="replace") == token else STRANGER


# ---- measuring -------------------------------------------------------------------------------------------------------


def _measure(meeting: Meeting, source: int, target: int, limit_s: float) -> Way:
    """Measure a way in a group of its two ranks. The result is valid on the source only."""
    sends = meeting.rank == source
    trip_s = rate = None
    error = ""
    try:
        store: Any = meeting.store_of(f"group/{source}-{target}")
        group: Any = dist.ProcessGroupGloo(store, 0 if sends else 1, 2, seconds(limit_s))
        peer = 1 if sends else 0
        trip_s, least_s = measure_trips(group, peer, sends=sends)
        rate = measure_rate(group, peer, least_s, sends=sends)
    except RuntimeError as failure:
        error = str(failure).splitlines()[0]
    return Way(source, target, trip_s, rate, error)
