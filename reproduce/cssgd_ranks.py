"""One rank of :mod:`reproduce.cssgd`: trains, times steps and counts bytes behind an emulated link.

Rows with the same number of ranks and the same link run one after the other in the same processes.

Training copies the parameters every few steps. The copies are tested between stretches of steps, while clock and
counters are stopped, so tests add neither time nor bytes.

Bytes are those that the kernel counts as sent on each rank's network card, headers included, summed over ranks. A
multicast packet therefore counts once, for its sender. (The kernel counts several TCP packets with one set of headers,
so unicast is counted with four percent less than multicast.)

A node's processor can be emulated, too: before it computes, the node sleeps as long as that processor would take.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowband as nb
from narrowband.bench.ranks import RankProcess, received, transmitted
from narrowband.coded.assignment import Assignment
from narrowband.coded.header import header_nbytes
from narrowband.transport import Multicast, connect
from narrowband.transport.datagram import HEADER_BYTES
from narrowband.transport.sockets import IP_UDP_BYTES
from reproduce.baselines import SSGD, Flat, serve, work
from reproduce.cssgd_problem import Problem, Row

__all__ = ["equation_19", "stated_bytes"]

#: The most copies of the parameters in a stretch.
_MARKS = 10
#: Elements of the vector whose exchanges are counted: a multiple of every redundancy.
_COUNTED = 60_480
_MTU = 1500
_ETHERNET = 14
_TIMEOUT = timedelta(seconds=300)

# ---- methods ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A copy of the parameters, with the seconds since the stretch began and the bytes that this rank sent in it."""

    seconds: float
    nbytes: int
    weights: Tensor


class Method(ABC):
    """A way to train, on one rank.

    Attributes:
        tested: indices of the test images that this rank tests; ranks that have any make equal marks.
        choice: the result of ``nb.choose_redundancy``, where it was called.
    """

    def __init__(self, row: Row, problem: Problem, card: str) -> None:
        torch.manual_seed(row.seed)
        self.row, self.problem, self.card = row, problem, card
        self.model = problem.make()
        self.flat = Flat(self.model)
        self.tested = problem.tested[dist.get_rank() :: dist.get_world_size()]
        self.choice: nb.coded.Choice | None = None
        self._end: Callable[[], None] = lambda: None

    @abstractmethod
    def stretch(self, first: int, steps: int) -> list[Mark]:
        """Train ``steps`` steps, beginning with step ``first``, and return the marks. Collective."""

    @abstractmethod
    def timed(self, steps: int) -> list[tuple[float, int]]:
        """Return seconds and sent bytes of each of ``steps`` steps, after one that is not timed. Collective."""

    def close(self) -> None:
        """Release the method's resources."""
        self._end()


class Synchronous(Method):
    """Methods in which all ranks take the same steps: SSGD, coded or not, and an all-reduce."""

    def __init__(self, row: Row, problem: Problem, card: str) -> None:
        super().__init__(row, problem, card)
        self._compute: Callable[[Tensor], None]
        if row.method in ("unicast", "multicast"):
            self._exchange("broadcast" if row.method == "unicast" else "multicast")
        elif row.method == "all-reduce":
            wrapped = DDP(self.model)
            self._compute = lambda samples: problem.backward(wrapped, _share(samples))
        elif row.method == "alone":
            self._compute = lambda samples: problem.backward(self.model, samples)
        elif row.method == "chosen":
            self.choice = choose(row, problem, self.model, "multicast")
            self._code(self.choice.redundancy, self.choice.group)
        else:
            self._code(row.redundancy, row.group)

    def stretch(self, first: int, steps: int) -> list[Mark]:
        marks = []
        dist.barrier()
        began, sent = time.perf_counter(), transmitted(self.card)
        for step in range(first, first + steps):
            self.step(step)
            if (step + 1) % self.row.every == 0:
                seconds, nbytes = time.perf_counter() - began, transmitted(self.card) - sent
                marks.append(Mark(seconds, nbytes, self.flat.weights.clone()))
        dist.barrier()
        return marks

    def timed(self, steps: int) -> list[tuple[float, int]]:
        self.step(0)
        dist.barrier()
        seconds, sent = [], [transmitted(self.card)]
        for step in range(1, steps + 1):
            began = time.perf_counter()
            self.step(step)
            seconds.append(time.perf_counter() - began)
            dist.barrier()  # until then this rank may resend packets that another rank lacks
            sent.append(transmitted(self.card))
        return [(took, later - before) for took, (before, later) in zip(seconds, pairwise(sent), strict=True)]

    def step(self, step: int) -> None:
        """Train on one mini-batch."""
        self.flat.gradient.zero_()
        self._compute(self.problem.samples(step))
        self.flat.descend(self.row.lr)

    def _exchange(self, transport: str) -> None:
        way = connect(transport, dist.group.WORLD)  # type: ignore[arg-type]
        average = SSGD(self.flat, way, dist.get_rank(), dist.get_world_size()).average
        self._end = way.close

        def compute(samples: Tensor) -> None:
            self.problem.backward(self.model, _share(samples))
            average()

        self._compute = compute

    def _code(self, redundancy: int, group: int) -> None:
        row, rank = self.row, dist.get_rank()
        coded = nb.CodedDataParallel(
            self.model, redundancy, "multicast", group=group or None, shares=row.shares or None
        )
        self._end = coded.transport.close
        emulated_s = row.sample_s[rank] * coded.assignment.work(row.batch)[rank] if row.sample_s else 0.0

        def compute(samples: Tensor) -> None:
            time.sleep(emulated_s)
            self.problem.backward(coded, *coded.split(samples))

        self._compute = compute


class Asynchronous(Method):
    """ASGD. Rank 0 is the server; a step is as many updates as there are workers."""

    def __init__(self, row: Row, problem: Problem, card: str) -> None:
        super().__init__(row, problem, card)
        serves = dist.get_rank() == 0
        self.tested = problem.tested if serves else problem.tested[:0]
        self._computed = 0

    def stretch(self, first: int, steps: int) -> list[Mark]:
        marks: list[Mark] = []
        dist.barrier()
        if dist.get_rank():
            self._computed += work(self.flat, 0, self._compute)
            return marks
        # Everything that workers send or receive passes the server's network card.
        began, passed = time.perf_counter(), transmitted(self.card) + received(self.card)
        every = self.row.every * self.row.nodes

        def note(updates: int) -> None:
            if updates % every == 0:
                nbytes = transmitted(self.card) + received(self.card) - passed
                seconds = time.perf_counter() - began
                marks.append(Mark(seconds, nbytes, self.flat.weights.clone()))

        workers = list(range(1, dist.get_world_size()))
        serve(self.flat.weights, workers, steps * self.row.nodes, self.row.lr, note)
        return marks

    def timed(self, steps: int) -> list[tuple[float, int]]:
        # Leave out the first round, which waits for the initial parameters, and the last, after which none are sent.
        marks = self.stretch(0, 1 + steps + 1)[: 1 + steps]
        rounds = [(later.seconds - one.seconds, later.nbytes - one.nbytes) for one, later in pairwise(marks)]
        return rounds or [(0.0, 0)] * steps

    def _compute(self) -> None:
        share = self.problem.samples(self._computed).view(self.row.nodes, -1)[dist.get_rank() - 1]
        self._computed += 1
        self.flat.gradient.zero_()
        self.problem.backward(self.model, share)


def _method(row: Row, problem: Problem, card: str) -> Method:
    return (Asynchronous if row.method == "asgd" else Synchronous)(row, problem, card)


def _share(samples: Tensor) -> Tensor:
    return samples.view(dist.get_world_size(), -1)[dist.get_rank()]


# ---- what is measured ------------------------------------------------------------------------------------------------


def train(row: Row, problem: Problem, card: str, tell: Callable[..., None]) -> dict[str, Any]:
    """Train until the target or a limit is reached; the result is the same on all ranks.

    The result has ``curve``: [steps, seconds, bytes, accuracy in percent] of every test; ``reached``: the first of
    these at the target, or None; ``step_s``: mean seconds of a step; ``choice``, if the tool chose r.
    """
    method = _method(row, problem, card)
    tester = problem.make()
    tested = Flat(tester)
    curve: list[list[float]] = []
    steps, seconds, nbytes = 0, 0.0, 0
    while steps < row.steps and seconds < row.limit_s and not (curve and curve[-1][3] >= row.target):
        count = min(_MARKS, -(-(row.steps - steps) // row.every))
        marks = method.stretch(steps, row.every * count)
        told = torch.zeros(count, 3, dtype=torch.float64)
        for at, mark in enumerate(marks):
            tested.weights.copy_(mark.weights)
            right = problem.right(tester, method.tested)
            seconds_here = mark.seconds if dist.get_rank() == 0 else 0.0
            told[at] = torch.tensor([seconds_here, mark.nbytes, right], dtype=torch.float64)
        dist.all_reduce(told)
        for at, (took, sent, right) in enumerate(told.tolist()):
            accuracy = 100.0 * right / problem.tested.numel()
            curve.append([steps + (at + 1) * row.every, seconds + took, nbytes + int(sent), accuracy])
            if accuracy >= row.target:
                break
        steps, seconds, nbytes = steps + row.every * count, seconds + told[-1, 0].item(), nbytes + int(told[-1, 1])
        tell(event="test", accuracy=curve[-1][3], seconds=curve[-1][1])
    method.close()
    return {
        "parameters": method.flat.weights.numel(),
        "curve": curve,
        "reached": next((mark for mark in curve if mark[3] >= row.target), None),
        "step_s": curve[-1][1] / curve[-1][0],
        "choice": None if method.choice is None else asdict(method.choice),
    }


def choose(row: Row, problem: Problem, model: nn.Module, transport: str) -> nb.coded.Choice:
    """Choose the redundancy for a model on this link by ``nb.choose_redundancy``."""
    samples = _share(problem.samples(0))
    return nb.choose_redundancy(
        model,
        lambda: problem.backward(model, samples),
        batch_size=row.batch,
        transport=transport,
        process_group=dist.group.WORLD,
    )


def choices(row: Row, problem: Problem) -> dict[str, Any]:
    """Return what the tool measures and chooses: ``choices``, by transport."""
    torch.manual_seed(row.seed)
    model = problem.make()
    return {"choices": {way: asdict(choose(row, problem, model, way)) for way in ("multicast", "broadcast")}}


def batch(row: Row, problem: Problem, card: str) -> dict[str, Any]:
    """Time steps: ``round_step_s``, each step's seconds on the slowest rank; ``step_s``, their median; ``sent_bytes``,
    of all ranks in a step; and ``choice``, if the tool chose r.
    """
    method = _method(row, problem, card)
    rounds = method.timed(row.steps)
    slowest, total = (torch.tensor(column, dtype=torch.float64) for column in zip(*rounds, strict=True))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    method.close()
    times = slowest.tolist()
    return {
        "round_step_s": times,
        "step_s": statistics.median(times),
        "sent_bytes": int(total.mean()),
        "choice": None if method.choice is None else asdict(method.choice),
    }


def counted(row: Row, card: str) -> dict[str, Any]:
    """Count the bytes of exchanging one vector, per step and over all ranks.

    The result has ``link_bytes``, by the network cards' counters; ``stated_bytes`` (:func:`stated_bytes`);
    ``normal_bytes``, for ranks that send each block's gradient to everybody (equation 30); and ``repair_datagrams``.
    """
    torch.manual_seed(row.seed)
    coded = nb.CodedDataParallel(
        nn.Linear(_COUNTED, 1, bias=False), row.redundancy, "multicast", group=row.group or None
    )
    (x,) = coded.split(torch.randn(coded.assignment.blocks, 1).expand(-1, _COUNTED))
    assert isinstance(coded.transport, Multicast)

    def step() -> None:
        coded.zero_grad()
        torch.autograd.backward(coded(x).mean())

    step()
    dist.barrier()
    sent, before = transmitted(card), coded.transport.statistics
    for _ in range(row.steps):
        step()
    dist.barrier()
    repairs = coded.transport.statistics.repair_datagrams - before.repair_datagrams
    told = torch.tensor([transmitted(card) - sent, repairs], dtype=torch.float64) / row.steps
    dist.all_reduce(told)
    coded.transport.close()
    return {
        "link_bytes": told[0].item(),
        "stated_bytes": stated_bytes(row.nodes, row.redundancy),
        "normal_bytes": 4 * _COUNTED * (row.nodes - 1) * math.comb(row.nodes, row.redundancy),
        "repair_datagrams": told[1].item(),
    }


def equation_19(nodes: int, redundancy: int) -> float:
    """Return coded traffic over the traffic of nodes that send each block's gradient to everybody: (n−r)/((n−1)·r)."""
    return (nodes - redundancy) / ((nodes - 1) * redundancy)


def stated_bytes(nodes: int, redundancy: int, numel: int = _COUNTED) -> int:
    """Return the bytes that all nodes send in a step, by equation 19 and the headers that the library documents.

    Each node puts a header in front of its packets (:mod:`narrowband.coded.average`), and every datagram has the
    headers of multicast, UDP, IP and Ethernet.
    """
    normal = 4 * numel * (nodes - 1) * math.comb(nodes, redundancy)
    packets = round(equation_19(nodes, redundancy) * normal / nodes)
    nbytes = packets + header_nbytes(Assignment(nodes, redundancy).blocks_per_node)
    datagrams = -(-nbytes // (_MTU - IP_UDP_BYTES - HEADER_BYTES))
    return nodes * (nbytes + datagrams * (HEADER_BYTES + IP_UDP_BYTES + _ETHERNET))


# ---- one rank --------------------------------------------------------------------------------------------------------


def _work(worker: RankProcess) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    card = os.environ["GLOO_SOCKET_IFNAME"]
    directory = worker.config["data_dir"]
    for number, told in worker.config["rows"]:
        row = Row(**told)
        worker.tell(event="begin", row=number)
        if row.kind == "bytes":
            result = counted(row, card)
        else:
            problem = Problem(row, None if directory is None else Path(directory))
            if row.kind == "train":
                result = train(row, problem, card, functools.partial(worker.tell, row=number))
            else:
                result = batch(row, problem, card) if row.kind == "batch" else choices(row, problem)
        worker.tell(event="row", row=number, result=told | result | {"commit": worker.config["commit"]})
    worker.finish(None)


if __name__ == "__main__":
    _work(RankProcess(sys.argv[1]))
