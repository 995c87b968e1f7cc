"""Whether every rank reaches every other, and how fast: what stops a first run between machines, found before it.

Each rank says who it is: host, versions, and the address that gloo listens on, which is read off the kernel's list of
this process's sockets. Then each knocks at a port of each other, as gloo will, with a time-out of its own. Pairs that
answer each other make a group of two, one pair after the other, in which round trips and rates are measured as
``narrowband plan --measure`` measures them. A pair that fails there is left out, and the others go on: a group of all
ranks would fail as a whole, and say of nobody why.

Every duration is taken on one rank's clock, from a message to its answer, so clocks of machines need not agree.
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

#: What became of a knock.
ANSWERED, SILENT, REFUSED, NO_WAY, STRANGER = "answered", "silent", "refused", "no way", "stranger"

#: Up to so many ranks all pairs are measured, beyond it those of hosts.
_ALL_RANKS = 8
#: Knocks at a time.
_THREADS = 32
#: A pair that is measured has an end after so many time-outs: only a process that is gone lets others wait so long.
_PATIENCE = 30
_TOKEN_NBYTES = 16
_LISTENING = "0A"  # in /proc/net/tcp


@dataclass(frozen=True)
class Seat:
    """A rank, and where it sits.

    Attributes:
        rank: its number.
        host: the name of its machine.
        boot: what tells machines of one name apart; empty where the system has no such thing.
        versions: of Python, torch and narrowband.
        asked: ``GLOO_SOCKET_IFNAME``, empty where it is not set.
        address: that gloo tells the others; empty where gloo found none.
        card: the interface with that address, and its MTU in bytes; empty and 0 where that is not known.
        mtu: of the card.
        cards: all interfaces, as ``"eth0 (10.0.0.1)"``.
        master: what ``MASTER_ADDR`` is on this machine, as addresses.
        port: where it is knocked at, picked by the system as gloo's ports are; 0 where nothing listens.
        error: why gloo cannot begin, if it cannot.
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
        """The same for all ranks of a machine."""
        return self.host, self.boot

    @property
    def is_loopback(self) -> bool:
        """Whether only its own machine can reach it."""
        return self.address != "" and ip_address(self.address).is_loopback


@dataclass(frozen=True)
class Knock:
    """A rank knocked at another one's port.

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
    """From one rank to another, measured over gloo.

    Attributes:
        source, target: ranks.
        trip_s: seconds of a round trip of a few bytes, on average, software included; None where none came back.
        rate: bits per second of payload; None where long messages did not arrive.
        error: what gloo said, where something failed.
    """

    source: int
    target: int
    trip_s: float | None = None
    rate: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Peers:
    """All that was found out.

    Attributes:
        seats: by rank.
        knocks: of every rank at every other.
        ways: of the pairs that were measured.
        limit_s: seconds after which what had not answered counted as unreachable.
    """

    seats: list[Seat]
    knocks: list[Knock]
    ways: list[Way]
    limit_s: float

    @property
    def machines(self) -> dict[tuple[str, str], list[int]]:
        """Which ranks each of them has."""
        found: dict[tuple[str, str], list[int]] = {}
        for seat in self.seats:
            found.setdefault(seat.machine, []).append(seat.rank)
        return found


def probe(meeting: Meeting, limit_s: float = 10.0, on_event: Callable[[str], None] = lambda _: None) -> Peers:
    """Find it out. Call it on all ranks; all get the same.

    Args:
        meeting: where the ranks meet.
        limit_s: seconds after which what has not answered counts as unreachable. A long message has 64 KiB, so at 10
            seconds links of less than 53 kbit/s count as ones where long messages do not arrive.
        on_event: called with what is done next.

    Raises:
        MeetingError: some rank has not come, or has gone.
        UnsupportedError: this PyTorch has no gloo.

    Example:
        >>> from torch._C._distributed_c10d import HashStore
        >>> found = probe(Meeting(HashStore(), 0, 1, "here", wait_s=5.0))
        >>> found.ways  # one rank has nobody to reach
        []
    """
    if not dist.is_gloo_available():
        raise UnsupportedError("ranks reach each other over gloo, and this build of PyTorch has none")
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
    """Ordered pairs of ranks: all where they are few, or else of the first rank of each machine."""
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
    """Where gloo listens, or why it cannot."""
    before = _listening()
    try:
        group = dist.ProcessGroupGloo(HashStore(), 0, 1, seconds(1.0))
    except RuntimeError as error:
        return "", str(error).splitlines()[0]
    found = [address for address in _listening() if address not in before]
    del group
    return (found[0][0], "") if found else ("", "it listens nowhere")


def _listening() -> list[tuple[str, int]]:
    """Addresses and ports at which this process listens."""
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own is closed by now
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
    """The kernel writes addresses in words of four bytes, each in this machine's order."""
    raw = bytes.fromhex(written)
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    return socket.inet_ntop(family, b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))


# ---- knocking --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _door() -> Iterator[tuple[tuple[str, int, str], str]]:
    """Listen where gloo does, at a port that the system picks, and answer with a token: ``(address, port, error)``."""
    address, error = _gloo_address()
    token = secrets.token_hex(_TOKEN_NBYTES)
    if error:
        yield (address, 0, error), token
        return
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=128) as server:

        def answer() -> None:
            with contextlib.suppress(OSError):  # closed
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
    """What became of a knock at every rank, in the order of ranks; as said of itself, answered."""

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
    """A way, in a group of its two ranks; what is returned means something where this rank is the source."""
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
