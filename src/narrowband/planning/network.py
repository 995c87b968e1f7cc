"""Links as they are: rate and latency from machine to machine, measured among ranks that ``torchrun`` has started.

One pair of machines at a time, in one direction at a time, by messages of ``torch.distributed``. Machines in a ring
send to their neighbours, so these are the pairs that matter; where machines are few, all pairs are measured.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from narrowband.planning.host import PAUSE_S
from narrowband.planning.links import PAYLOAD_SHARE, Link

__all__ = ["Pair", "link_of", "measure_pairs"]

#: From so many machines on, only neighbours in the ring are measured.
_ALL_PAIRS = 6

_ROUND_TRIPS = 21
_FIRST_NBYTES, _MOST_NBYTES = 1 << 16, 1 << 26
#: A message that takes so long says enough of a rate.
_LONG_S = 0.25


@dataclass(frozen=True)
class Pair:
    """A link, in one direction.

    Attributes:
        source, target: machines, from 0.
        rate: bits per second, of payload.
        latency_s: of a message of a few bytes, one way: half of a round trip, software included.
    """

    source: int
    target: int
    rate: float
    latency_s: float


def measure_pairs(nodes: int, per_node: int) -> list[Pair]:
    """Measure links between machines. A collective of the default group; all ranks get all that was found.

    Args:
        nodes: machines; successive ranks are on one.
        per_node: ranks on each. The first of each measures.
    """
    if nodes <= _ALL_PAIRS:
        pairs = list(itertools.permutations(range(nodes), 2))
    else:
        pairs = [(at, (at + 1) % nodes) for at in range(nodes)]
    rank = dist.get_rank()
    found: list[Pair] = []
    for source, target in pairs:
        dist.barrier()
        ranks = source * per_node, target * per_node
        if rank == ranks[0]:
            found.append(Pair(source, target, *_send(ranks[1])))
        elif rank == ranks[1]:
            _receive(ranks[0])
    of_all: list[list[Pair]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, found)
    return sorted(itertools.chain.from_iterable(of_all), key=lambda pair: (pair.source, pair.target))


def link_of(pairs: Sequence[Pair], nodes: int) -> tuple[Link, float]:
    """The slowest link between neighbours in the ring, which all others wait for, and the longest latency there."""
    ring = {(at, (at + 1) % nodes) for at in range(nodes)}
    own = [pair for pair in pairs if (pair.source, pair.target) in ring]
    slowest = min(pair.rate for pair in own) / PAYLOAD_SHARE
    return Link(slowest, slowest), max(pair.latency_s for pair in own)


def _send(to: int) -> tuple[float, float]:
    """Rate and latency to a rank that receives at the same time."""
    short = torch.zeros(1)
    trips = []
    for _ in range(_ROUND_TRIPS):
        time.sleep(PAUSE_S)
        begin = time.perf_counter()
        dist.send(short, to)
        dist.recv(short, to)
        trips.append(time.perf_counter() - begin)
    round_trip = statistics.fmean(trips)
    nbytes = _FIRST_NBYTES
    while True:
        long = torch.zeros(nbytes, dtype=torch.uint8)
        begin = time.perf_counter()
        dist.send(long, to)
        dist.recv(short, to)
        took = time.perf_counter() - begin
        done = took >= _LONG_S or nbytes >= _MOST_NBYTES
        dist.send(torch.tensor([float(done)]), to)
        if done:
            return 8 * nbytes / max(took - min(trips), 1e-9), round_trip / 2
        nbytes *= 2


def _receive(source: int) -> None:
    short, over = torch.zeros(1), torch.zeros(1)
    for _ in range(_ROUND_TRIPS):
        dist.recv(short, source)
        dist.send(short, source)
    nbytes = _FIRST_NBYTES
    while not bool(over):
        dist.recv(torch.empty(nbytes, dtype=torch.uint8), source)
        dist.send(short, source)
        dist.recv(over, source)
        nbytes *= 2
