"""Nodes as threads of one process, and the same average computed in one place with Python's whole numbers."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from narrowband.coded.average import BlockAverage
from narrowband.transport.contract import Transport, check_exchange
from tests.transport.exchanges import LIMIT_S


class Simulation:
    """What connects the nodes of a simulation, and what was sent."""

    def __init__(self, nodes):
        self.nodes = nodes
        self.buffers = [None] * nodes
        self.barrier = threading.Barrier(nodes, timeout=LIMIT_S)
        self.sent = [0] * nodes  # once per sender
        self.received = [0] * nodes

    def end(self, rank):
        return SimulatedTransport(self, rank)


class SimulatedTransport(Transport):
    """One node's end: what it did not want is noise."""

    name = "simulated"

    def __init__(self, simulation, rank):
        self._simulation, self._rank = simulation, rank

    def exchange(self, outgoing, incoming, wanted):
        simulation, rank = self._simulation, self._rank
        check_exchange(outgoing, incoming, wanted, rank, simulation.nodes)
        simulation.buffers[rank] = outgoing
        simulation.sent[rank] += outgoing.numel()
        simulation.barrier.wait()
        for k in range(simulation.nodes):
            if k != rank:
                assert incoming[k].numel() == simulation.buffers[k].numel()
                incoming[k].random_(0, 256)
                for start, stop in wanted[k]:
                    incoming[k][start:stop] = simulation.buffers[k][start:stop]
                    simulation.received[rank] += stop - start
        simulation.barrier.wait()

    def close(self):
        pass


def on_all(nodes, work):
    """``work(rank)`` on all nodes at once; results, or the exceptions they ended with."""

    def attempt(rank):
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(nodes) as pool:
        return list(pool.map(attempt, range(nodes)))


def averages_of(assignment, numels, **options):
    """The nodes' averages, and what connects them."""
    simulation = Simulation(assignment.nodes)
    return simulation, [
        BlockAverage(assignment, rank, numels, simulation.end(rank), **options) for rank in range(assignment.nodes)
    ]


def gradients_of(assignment, numels, seed=0, scale=0.01):
    """For each block the gradients of all parameters."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(numel, generator=generator) * scale for numel in numels] for _ in range(assignment.blocks)]


def put(averages, gradients, weight=1.0):
    """Give every node the gradients of its blocks."""
    for node in averages:
        for row, block in enumerate(node.assignment.held(node.rank)):
            node.add(row, gradients[block], weight)


def exactly(gradients, unit, limit=math.inf):
    """The average in Python's whole numbers and fractions: round, add up, multiply."""
    rows = [torch.cat([part.flatten() for part in block]).double().tolist() for block in gradients]
    codes = [[round(value / unit) for value in row] for row in rows]
    assert all(abs(code) <= limit for row in codes for code in row)
    return torch.tensor([sum(column) * unit for column in zip(*codes, strict=True)], dtype=torch.float64).float()
