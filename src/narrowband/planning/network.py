"""Measure rate and latency of the links between machines, among ranks that ``torchrun`` has started.

One pair of machines at a time is measured, in one direction at a time, with messages of ``torch.distributed``. In a
ring, machines send to their neighbours, so these pairs matter most; if there are few machines, all pairs are measured.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from narrowband.planning.host import PAUSE_S
from narrowband.planning.links import PAYLOAD_SHARE, Link

__all__ = ["FIRST_NBYTES", "Pair", "Wire", "link_of", "measure_pairs", "measure_rate", "measure_trips", "routes"]

#: Up to this many machines, all pairs are measured; with more, only neighbours in the ring.
_ALL_PAIRS = 6

_ROUND_TRIPS = 21
#: Size of the first long message.
FIRST_NBYTES = 1 << 16
_MOST_NBYTES = 1 << 26
#: A message size whose transfer takes this many seconds twice is long enough to give the rate. A single slow transfer
#: may come from other work on a machine.
_LONG_S = 0.25

#: What the sender announces: the next long message is twice as long, it is as long again, or there is none.
_LONGER, _AGAIN, _OVER = 0.0, 1.0, 2.0


@dataclass(frozen=True)
class Pair:
    """A measured link, in one direction.

    Attributes:
        source, target: machines, from 0.
        rate: bits per second of payload.
        latency_s: seconds of a message of a few bytes, one way: half of a round trip, software included.
    """

    source: int
    target: int
    rate: float
    latency_s: float


def measure_pairs(nodes: int, per_node: int) -> list[Pair]:
    """Measure the links between machines. All ranks of the default group call it, and all get all results.

    Args:
        nodes: number of machines. Successive ranks are on the same machine.
        per_node: ranks on each machine. The first of them measures.
    """
    wire = _of_all_ranks()
    rank = dist.get_rank()
    found: list[Pair] = []
    for source, target in routes(nodes):
        dist.barrier()
        ranks = source * per_node, target * per_node
        if rank == ranks[0]:
            mean_s, least_s = measure_trips(wire, ranks[1], sends=True)
            rate = measure_rate(wire, ranks[1], least_s, sends=True)
            found.append(Pair(source, target, rate, mean_s / 2))
        elif rank == ranks[1]:
            measure_trips(wire, ranks[0], sends=False)
            measure_rate(wire, ranks[0], sends=False)
    of_all: list[list[Pair]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, found)
    return sorted(itertools.chain.from_iterable(of_all), key=lambda pair: (pair.source, pair.target))


def link_of(pairs: Sequence[Pair], nodes: int) -> tuple[Link, float]:
    """Return the slowest link between neighbours in the ring, which all others wait for, and the longest latency."""
    ring = {(at, (at + 1) % nodes) for at in range(nodes)}
    own = [pair for pair in pairs if (pair.source, pair.target) in ring]
    slowest = min(pair.rate for pair in own) / PAYLOAD_SHARE
    return Link(slowest, slowest), max(pair.latency_s for pair in own)


class Wire(Protocol):
    """Point-to-point messages: a process group, or gloo's own group below one."""

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        """Begin to send, and return a handle with ``wait()``."""

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        """Begin to receive, and return a handle with ``wait()``."""


def routes(places: int) -> list[tuple[int, int]]:
    """Return the ordered pairs to measure: all pairs of up to 6 places, or else the neighbours in a ring.

    Example:
        >>> routes(2)
        [(0, 1), (1, 0)]
    """
    if places <= _ALL_PAIRS:
        return list(itertools.permutations(range(places), 2))
    return [(at, (at + 1) % places) for at in range(places)]


def measure_trips(wire: Wire, peer: int, *, sends: bool) -> tuple[float, float]:
    """Measure round trips of a message of a few bytes. Both ranks call it, and one of them ``sends``.

    Returns:
        The mean and the minimum, in seconds, on the rank that sends; zeros on the other.
    """
    short = torch.zeros(1, dtype=torch.float32, device="cpu")
    trips = []
    for _ in range(_ROUND_TRIPS):
        if sends:
            time.sleep(PAUSE_S)
            begin = time.perf_counter()
            _send(wire, short, peer)
            _receive(wire, short, peer)
            trips.append(time.perf_counter() - begin)
        else:
            _receive(wire, short, peer)
            _send(wire, short, peer)
    return (statistics.fmean(trips), min(trips)) if sends else (0.0, 0.0)


def measure_rate(wire: Wire, peer: int, trip_s: float = 0.0, *, sends: bool) -> float:
    """Measure the rate of long messages in one direction. Both ranks call it, and one of them ``sends``.

    Args:
        trip_s: seconds of a round trip, which are subtracted from the time of a message.

    Returns:
        Bits per second of payload on the rank that sends; zero on the other.
    """
    short = torch.zeros(1, dtype=torch.float32, device="cpu")
    word = torch.full((1,), _LONGER, dtype=torch.float32, device="cpu")
    nbytes = FIRST_NBYTES
    took = 0.0
    while word.item() != _OVER:
        long = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        if sends:
            begin = time.perf_counter()
            _send(wire, long, peer)
            _receive(wire, short, peer)
            last, took = took, time.perf_counter() - begin
            if word.item() == _AGAIN and took >= _LONG_S:
                took = min(took, last)
                word.fill_(_OVER)
            elif took >= _LONG_S:
                word.fill_(_AGAIN)
            else:
                word.fill_(_LONGER if nbytes < _MOST_NBYTES else _OVER)
            _send(wire, word, peer)
        else:
            _receive(wire, long, peer)
            _send(wire, short, peer)
            _receive(wire, word, peer)
        nbytes *= 1 if word.item() == _AGAIN else 2
    return 8 * (nbytes // 2) / max(took - trip_s, 1e-9) if sends else 0.0


def _of_all_ranks() -> Wire:
    world: Any = dist.group.WORLD
    return world  # type: ignore[no-any-return]


def _send(wire: Wire, x: Tensor, to: int) -> None:
    wire.send([x], to, 0).wait()


def _receive(wire: Wire, x: Tensor, source: int) -> None:
    wire.recv([x], source, 0).wait()
