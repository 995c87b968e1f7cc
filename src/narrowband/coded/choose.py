"""Choose the redundancy that is fastest on this link: two times are measured, all others predicted.

A step with redundancy r computes r times as much as plain data parallelism, and sends L(r) times as much::

    T(r) = r · T_compute + T_communicate · L(r)

T_compute is the time of forward and backward for 1/n of the mini-batch on the slowest node; with shares that fit the
nodes (:mod:`.shares`) a step computes for less time. T_communicate is the time of plain data parallelism's exchange on
the same transport: every node adds up its own gradients and sends the sum, once with multicast, else to each of the
n − 1 others. L(r) is the ratio of the two loads (:meth:`~narrowband.coded.Assignment.load`).

The paper has a different baseline: equation 19 compares with nodes that send the gradient of each block separately,
without multicast. Compared with nodes that add up first, coding over all n nodes saves something only at r = n − 1:
with multicast it sends C(n−1, r)/r gradients per node, and plain data parallelism one. Therefore groups, which have few
packets and sums, are among the candidates; with g = r no coding remains but repetition, and a node sends 1/r. Two more
are compared: the all-reduce of the process group, which is measured, too; and r = n, which sends nothing: every node
computes the whole mini-batch, T(n) = n · T_compute, as a single node could.

Transports are measured, too. Multicast sends least, but on a fast link, or among few nodes, the process group is
faster, though it sends each packet to each node that needs it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from narrowband.averaging.agreement import checked_on_all
from narrowband.coded.assignment import Assignment
from narrowband.coded.average import BlockAverage
from narrowband.collectives import borrow, group_or, waiting_in
from narrowband.errors import UnsupportedError
from narrowband.transport import Broadcast, Transport, connect

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Candidate", "Choice", "choose_redundancy", "predict"]

#: Redundancy that saves less than this share of a step's time is not worth its memory.
WORTH_IT = 0.05


@dataclass(frozen=True)
class Candidate:
    """One scheme of redundancy and group.

    Attributes:
        redundancy: number of nodes on which each block is computed.
        group: number of nodes that share blocks.
        load: what a node sends in a step, in gradients of the whole model in float32.
        seconds: predicted seconds of a step.
    """

    redundancy: int
    group: int
    load: float
    seconds: float


@dataclass(frozen=True)
class Choice:
    """The scheme to use, and the measurements and predictions that it follows from.

    Attributes:
        redundancy: the best redundancy.
        group: the best group.
        compute_s: measured seconds of forward and backward of a node's share, without redundancy.
        communicate_s: measured seconds of plain data parallelism's exchange by this transport.
        all_reduce_s: measured seconds of an all-reduce of the gradients over the process group.
        candidates: all schemes that were compared, the fastest first.
        verdict: the choice in words, and how it compares with a plain all-reduce and other transports.
        transport: the best transport of those that were measured.
    """

    redundancy: int
    group: int
    compute_s: float
    communicate_s: float
    all_reduce_s: float
    candidates: tuple[Candidate, ...]
    verdict: str
    transport: str

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step of the best scheme."""
        return next(c.seconds for c in self.candidates if (c.redundancy, c.group) == (self.redundancy, self.group))


def predict(
    nodes: int,
    batch_size: int,
    *,
    compute_s: float,
    communicate_s: float,
    all_reduce_s: float,
    multicast: bool,
    bits: int = 32,
) -> Choice:
    """Predict the fastest scheme from the times of plain data parallelism, by the formula in
    :mod:`narrowband.coded.choose`.

    Args:
        nodes: number of nodes, n.
        batch_size: samples of a mini-batch; schemes with more blocks are left out.
        compute_s: seconds to compute a node's share, without redundancy.
        communicate_s: seconds of plain data parallelism's exchange.
        all_reduce_s: seconds of an all-reduce of the gradients.
        multicast: whether a packet that several nodes need is sent once.
        bits: bits of a number inside groups.

    Example:
        On a slow link with multicast, four nodes should compute everything twice, in pairs.

        >>> choice = predict(4, 64, compute_s=0.5, communicate_s=2.0, all_reduce_s=3.0, multicast=True)
        >>> choice.redundancy, choice.group
        (2, 2)
    """
    plain = Assignment(nodes, 1, group=1)
    unit = communicate_s / plain.load(multicast=multicast)
    candidates = []
    for redundancy in range(1, nodes):
        for group in range(redundancy, nodes + 1):
            try:
                blocks = Assignment(nodes, redundancy, group)
            except ValueError:  # groups that do not divide the nodes, or too many blocks
                continue
            if blocks.blocks <= batch_size:
                load = blocks.load(multicast=multicast, bits=bits)
                candidates.append(Candidate(redundancy, group, load, redundancy * compute_s + unit * load))
    candidates.sort(key=lambda c: (c.seconds, c.redundancy, c.group))
    simple = next((c for c in candidates if c.redundancy == 1), None)
    if simple is None:
        raise ValueError(f"batch_size={batch_size} is smaller than the {nodes} nodes")
    best = candidates[0]
    if best.redundancy > 1 and best.seconds > (1 - WORTH_IT) * simple.seconds:
        best = simple
    verdict = _verdict(best, simple, candidates, compute_s + all_reduce_s, nodes * compute_s)
    return Choice(
        best.redundancy,
        best.group,
        compute_s,
        communicate_s,
        all_reduce_s,
        tuple(candidates),
        verdict,
        transport="multicast" if multicast else "broadcast",
    )


def choose_redundancy(
    model: nn.Module,
    compute: Callable[[], object],
    *,
    batch_size: int,
    transport: str | Transport = "auto",
    bits: int = 32,
    process_group: dist.ProcessGroup | None = None,
    steps: int = 5,
) -> Choice:
    """Measure computing and sending over a few steps, and predict which redundancy is fastest. Call it on all ranks.

    Args:
        model: the model, not wrapped; only its number of trained parameters, and their device, matter.
        compute: does forward and backward of one rank's share of a mini-batch, which has ``batch_size`` samples divided
            by the number of ranks.
        batch_size: samples of a mini-batch, over all ranks.
        transport: as for :class:`~narrowband.CodedDataParallel`; ``auto`` measures broadcast, and multicast if it
            reaches all ranks, and chooses the faster one.
        bits: as for :class:`~narrowband.CodedDataParallel`.
        process_group: as for :class:`~narrowband.CodedDataParallel`.
        steps: number of timed steps, after one that is not timed; the median of the slowest rank counts.

    Returns:
        The choice, the same on all ranks.

    Raises:
        ValueError: a batch smaller than the number of ranks, or no steps.
        UnsupportedError: no process group.

    Example:
        >>> share = 256 // dist.get_world_size()
        >>> choice = nb.choose_redundancy(net, lambda: loss(net(x[:share]), y[:share]).backward(), batch_size=256)
        >>> print(choice.verdict)
        >>> model = nb.CodedDataParallel(net, choice.redundancy, choice.transport, group=choice.group)
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedError("no process group: call torch.distributed.init_process_group(...) first")

    def prepared() -> dist.ProcessGroup:
        if steps < 1:
            raise ValueError(f"steps={steps} must be at least 1")
        return group_or(process_group)

    users = checked_on_all("choose_redundancy", [waiting_in(process_group)], prepared)
    ranks = dist.get_process_group_ranks(users)
    trained = [p for p in model.parameters() if p.requires_grad]
    device = trained[0].device if trained else torch.device("cpu")
    numels = [p.numel() for p in trained]
    one_each, rank = Assignment(len(ranks), 1, group=1), dist.get_rank(users)
    whole = torch.zeros(sum(numels), dtype=torch.float32, device=device)
    loan = borrow(users, device)
    own, transports = loan.hand_over(), []
    try:
        transports.append(connect(transport, own, loan.timeout) if isinstance(transport, str) else transport)
        if transport == "auto" and transports[0].multicast:
            transports.append(Broadcast(own, loan.timeout))
        plains = [BlockAverage(one_each, rank, numels, each, device=device) for each in transports]
        seconds = torch.tensor(
            [
                _median(compute, steps, device),
                _median(lambda: dist.all_reduce(whole, group=own), steps, device),
                *(_median(partial(plain.average, batch_size), steps, device) for plain in plains),
            ],
            dtype=torch.float64,
            device=device,
        )
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=own)
    except BaseException as error:
        loan.broken = bool(transports) or not isinstance(error, (ValueError, UnsupportedError))
        raise
    finally:
        for each in transports:
            if each is not transport:
                each.close()
        loan.give_back()
    compute_s, all_reduce_s, *communication_s = seconds.tolist()
    choices = [
        replace(
            predict(
                len(ranks),
                batch_size,
                compute_s=compute_s,
                communicate_s=communicate_s,
                all_reduce_s=all_reduce_s,
                multicast=each.multicast,
                bits=bits,
            ),
            transport=each.name,
        )
        for each, communicate_s in zip(transports, communication_s, strict=True)
    ]
    return _best(choices)


def _best(choices: list[Choice]) -> Choice:
    """Return the fastest choice. If there were several transports, its verdict names them."""
    best, *others = sorted(choices, key=lambda c: c.seconds)
    sentence = f" This is by {best.transport}." if others else ""
    for other in others:
        sentence += (
            f" By {other.transport} the best, redundancy={other.redundancy}, group={other.group}, would take "
            f"{1e3 * other.seconds:.1f} ms."
        )
    return replace(best, verdict=best.verdict + sentence)


def _median(work: Callable[[], object], steps: int, device: torch.device) -> float:
    taken = []
    for _ in range(1 + steps):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _verdict(
    best: Candidate, simple: Candidate, candidates: list[Candidate], all_reduce_s: float, alone_s: float
) -> str:
    """Say in words which candidate wins, by how much, and whether something else is faster than all candidates."""
    others = [c for c in candidates if c.redundancy > 1]
    if best.redundancy == 1:
        sentence = f"redundancy=1 wins: {_named(best)} takes {_ms(best)} a step"
        sentence += f", {_named(others[0])} would take {_ms(others[0])}." if others else "."
    else:
        sentence = (
            f"{_named(best)} is predicted to take {_ms(best)} a step, against {_ms(simple)} with {_named(simple)}: "
            f"{simple.seconds / best.seconds:.2f} times as fast."
        )
        coded = next((c for c in others if c.group > c.redundancy), None)
        if best.group == best.redundancy and coded is not None:
            sentence += (
                f" Groups compute the same and need no coding; the best that codes is {_named(coded)}, {_ms(coded)}."
            )
    if all_reduce_s < best.seconds:
        sentence += (
            f" A plain all-reduce is faster: DistributedDataParallel would take {1e3 * all_reduce_s:.1f} ms, or less, "
            "as it computes meanwhile."
        )
    if alone_s < min(best.seconds, all_reduce_s):
        sentence += f" One rank that computes the whole mini-batch by itself is faster: {1e3 * alone_s:.1f} ms,"
        sentence += " and nothing is sent."
    return sentence


def _named(candidate: Candidate) -> str:
    return f"redundancy={candidate.redundancy}, group={candidate.group}"


def _ms(candidate: Candidate) -> str:
    return f"{1e3 * candidate.seconds:.1f} ms"
