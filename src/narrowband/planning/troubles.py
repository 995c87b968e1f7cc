"""Describe the problems that a probe found, one sentence each: which ranks, what was observed, and what to do.

A trouble keeps ranks from training together, or makes them train differently. A note is merely worth knowing: a link
that is slower in one direction, ranks that share a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from narrowband.planning.network import FIRST_NBYTES
from narrowband.planning.probe import ANSWERED, NO_WAY, REFUSED, SILENT, Peers, Seat
from narrowband.units import format_bytes, format_rate

if TYPE_CHECKING:
    from narrowband.planning.probe import Knock, Way

__all__ = ["notes_of", "troubles_of"]

#: A link is noted if it is this many times as fast in one direction as in the other…
_ASYMMETRIC = 2.0
#: … unless the slower direction has this many bits per second: then processors, and their other work, set the rate.
_FAST = 1e9


def troubles_of(peers: Peers) -> list[str]:
    """Return the problems that have to be fixed."""
    return [*_versions(peers), *_addresses(peers), *_doors(peers), *_exchanges(peers)]


def notes_of(peers: Peers) -> list[str]:
    """Return what is worth knowing."""
    return [*_shared(peers), *_names(peers), *_packets(peers), *_asymmetric(peers), *_slowest(peers), *_left_out(peers)]


# ---- troubles --------------------------------------------------------------------------------------------------------


def _versions(peers: Peers) -> Iterator[str]:
    for name in peers.seats[0].versions:
        found: dict[str, list[int]] = {}
        for seat in peers.seats:
            found.setdefault(_compared(name, seat.versions.get(name, "none")), []).append(seat.rank)
        if len(found) > 1:
            each = ", ".join(f"{version} on {_ranks(ranks)}" for version, ranks in found.items())
            yield f"Versions of {name} differ: {each}. Install the same version on all machines"


def _compared(name: str, version: str) -> str:
    """Return the part of a version that must be equal: 3.11 of Python 3.11.7, 2.13.0 of PyTorch 2.13.0+cpu."""
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]


def _addresses(peers: Peers) -> Iterator[str]:
    for seat in peers.seats:
        others = [card for card in seat.cards if "(127." not in card]
        there = f"{_who(seat)} has {', '.join(others) or 'no other interface'}"
        if seat.error:
            asked = f"GLOO_SOCKET_IFNAME={seat.asked}" if seat.asked else "the name of its machine"
            yield f"{_who(seat)} found no address for gloo by {asked}: {seat.error}. {there}; {_export(others)}"
        elif seat.is_loopback and len(peers.machines) > 1:
            yield (
                f"{_who(seat)} tells the others {seat.address}, its loopback address, which no other machine can "
                f"reach. {there}; {_export(others)}"
            )


def _export(cards: Sequence[str]) -> str:
    name = cards[0].split()[0] if len(cards) == 1 else "eth0"
    which = "" if len(cards) == 1 else ", or the name of the interface that the other machines can reach"
    return f"on that machine, export GLOO_SOCKET_IFNAME={name}{which}"


def _doors(peers: Peers) -> Iterator[str]:
    """Describe ports that did not open, with one sentence per pair of machines, direction and outcome."""
    closed: dict[tuple[tuple[str, str], tuple[str, str], str], list[Knock]] = {}
    several = len(peers.machines) > 1
    for knock in peers.knocks:
        source, target = peers.seats[knock.source], peers.seats[knock.target]
        known = not target.port or (target.is_loopback and several and source.machine != target.machine)
        if knock.outcome != ANSWERED and not known:
            closed.setdefault((source.machine, target.machine, knock.outcome), []).append(knock)
    for (_, _, outcome), knocks in closed.items():
        source, target = peers.seats[knocks[0].source], peers.seats[knocks[0].target]
        to = f"{_who(target)} ({target.address}), TCP port {target.port}"
        if outcome == SILENT:
            card = f" on {target.card}" if target.card else ""
            yield (
                f"{_who(source)} got no answer from {to}, within {peers.limit_s:g} s: a firewall drops the packets. "
                f"gloo listens on ports that the system picks, so open all TCP ports of {target.host} to "
                f"{source.host}; on {target.host}: sudo ufw allow in{card} from {source.address}"
            )
        elif outcome == REFUSED:
            yield (
                f"{_who(source)} was refused by {to}: a firewall rejects the connection, or another machine has that "
                f"address. gloo listens on ports that the system picks, so open all TCP ports of {target.host} to "
                f"{source.host}"
            )
        elif outcome == NO_WAY:
            yield (
                f"{_who(source)} has no route to {to}: check that both are in one network. Interfaces of "
                f"{source.host}: {', '.join(source.cards)}; of {target.host}: {', '.join(target.cards)}"
            )
        else:
            yield (
                f"{_who(source)} reached something other than {to}: another machine has the same address, or a proxy "
                f"answers for it. Set GLOO_SOCKET_IFNAME on {target.host} to an interface whose address no other "
                "machine has"
            )


def _exchanges(peers: Peers) -> Iterator[str]:
    for way in peers.ways:
        if way.rate is not None:
            continue
        source, target = peers.seats[way.source], peers.seats[way.target]
        fromto = f"from {_who(source)} to {_who(target)}"
        if way.trip_s is None:
            yield (
                f"Ports are open {fromto}, but no message of gloo arrived within {peers.limit_s:g} s: a firewall or "
                f"proxy between them probably ends unknown connections. gloo's error: {way.error}"
            )
            continue
        mtus = f"MTU {source.mtu or '?'} and {target.mtu or '?'}"
        yield (
            f"Small messages pass {fromto}, but one of {format_bytes(FIRST_NBYTES)} did not arrive within "
            f"{peers.limit_s:g} s: large packets get lost, as with a VPN or a tunnel whose MTU is set too high "
            f"({mtus}), or the link is extremely slow. On {source.host}, try ping -M do -s 1372 "
            f"{target.address}; if there is no reply, run on both machines: sudo ip link set dev "
            f"{source.card or 'eth0'} mtu 1280"
        )


# ---- notes -----------------------------------------------------------------------------------------------------------


def _shared(peers: Peers) -> Iterator[str]:
    for (host, _), ranks in peers.machines.items():
        if len(ranks) > 1:
            more = ", and its link" if len(peers.machines) > 1 else ""
            yield f"{host} has {_ranks(ranks)}, which share its processors{more}"
    if 1 < len(peers.machines) < len(peers.seats):
        yield 'Some machines have several ranks: compress_gradients(…, nodes="auto") sends once per machine'


def _names(peers: Peers) -> Iterator[str]:
    names = [host for host, _ in peers.machines]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield (
                f"{names.count(name)} machines are called {name}, so messages cannot tell them apart: give each its "
                "own name"
            )


def _packets(peers: Peers) -> Iterator[str]:
    found: dict[int, list[int]] = {}
    for seat in peers.seats:
        if seat.mtu:
            found.setdefault(seat.mtu, []).append(seat.rank)
    if len(found) > 1:
        each = ", ".join(f"{mtu} on {_ranks(ranks)}" for mtu, ranks in sorted(found.items()))
        yield f"MTUs differ: {each}. That does no harm if long messages arrive, as was tested"


def _asymmetric(peers: Peers) -> Iterator[str]:
    rates = {(way.source, way.target): way.rate for way in peers.ways if way.rate is not None}
    for (source, target), slow in rates.items():
        fast = rates.get((target, source), slow)
        if peers.seats[source].machine == peers.seats[target].machine:
            continue
        if fast >= _ASYMMETRIC * slow and slow < _FAST:
            there, back = _who(peers.seats[source]), _who(peers.seats[target])
            yield (
                f"From {there} to {back} {format_rate(slow)}, and back {format_rate(fast)}: every rank sends as much "
                "as it receives, so the slower direction limits training"
            )


def _slowest(peers: Peers) -> Iterator[str]:
    measured = [(way.rate, way) for way in peers.ways if way.rate is not None]
    if len(measured) < 2 or len(peers.machines) < 2:
        return
    rate, way = min(measured, key=lambda each: each[0])
    yield (
        f"Slowest link: from {_who(peers.seats[way.source])} to {_who(peers.seats[way.target])}, {format_rate(rate)}. "
        "Next, with your model: narrowband plan … --measure says whether compression pays on these links"
    )


def _left_out(peers: Peers) -> Iterator[str]:
    size = len(peers.seats)
    measured: list[Way] = peers.ways
    if size > 1 and measured and len(measured) < size * (size - 1) - sum(k.outcome != ANSWERED for k in peers.knocks):
        yield (f"All {size} ranks knocked at all others; rates were measured between the first ranks of machines")


# ---- words -----------------------------------------------------------------------------------------------------------


def _who(seat: Seat) -> str:
    return f"rank {seat.rank} on {seat.host}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
