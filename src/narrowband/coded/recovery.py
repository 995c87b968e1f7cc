"""Handle the loss and the return of a node: no node loses a step, and all nodes get the same bits.

If the transport can go on without a lost node, so can the average. Each step then ends with a *meeting*: one more
exchange, in which each node sends the number of steps whose sum it has. No node leaves a step before all have met. When
a node is lost, each of the others notices in some exchange, and all meet again, among themselves, in the first exchange
without it. Their numbers differ by one at most: a node that has left step s has met all others there, so all have the
sum of s. There are two cases:

* Some lack the sum of step s, and no node has left it: all exchange it again, from gradients that all still have.
* All have the sum of s: those that have yet to leave s do so, and those that have left it exchange s + 1 again.

Either way the exchange after the meeting is the first of one step, s or s + 1, on all nodes, and so later exchanges
match, too. They add up the same whole numbers in another way (:class:`~narrowband.coded.coding.Around`), to the same
bits, and check the same headers. A second loss is an error on all nodes.

A lost node that is alive may return. From the loss on, the first of the other nodes keeps the averages, up to a maximum
number. Steps still end with a meeting, in which that first node also says whether the lost node is asking to return. If
so, all nodes meet once more, the lost one included. The number that it sends is the first step whose average it lacks;
these averages are then sent to it. It uses them as its own in as many steps, without a gradient and without an
exchange, while the others wait for it in the first step that all take together.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from narrowband.transport.contract import RanksLostError
from narrowband.units import counted

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.coded.exchange import BlockExchange

__all__ = ["Given", "Recovery"]

log = logging.getLogger(__name__)

#: Bytes that a node sends in a meeting: one int64.
_MEETING_NBYTES = 8


@dataclass(frozen=True)
class _Meeting:
    """The result of a meeting: node → number of steps whose sum it has, and whether the lost node asks to return."""

    steps: dict[int, int]
    asks: bool


@dataclass(frozen=True)
class Given:
    """The average of a step, and the exponent of the next one's unit."""

    step: int
    average: Tensor
    exponent: int


class Recovery:
    """A node's part in handling losses, its own included.

    Args:
        exchange: the exchange of contributions, which is told which nodes take part.
        rejoin_steps: number of steps whose averages are kept for a lost node, if the transport lets it back in.

    Attributes:
        given: averages that this node was given, for the steps that it missed while it was lost.
    """

    def __init__(self, exchange: BlockExchange, rejoin_steps: int) -> None:
        self.given: list[Given] = []
        self._exchange, self._transport = exchange, exchange.transport
        self._assignment, self._rank = exchange.assignment, exchange.rank
        self._rejoin_steps = rejoin_steps if self._transport.readmits else 0
        self._kept: list[Given] | None = None  # for a lost node, from the step of the loss on

    @property
    def meets(self) -> bool:
        """Whether steps end with a meeting: if a loss can be survived, or a lost node may return."""
        survives = len(self._transport.lost) < min(self._transport.max_failures, self._assignment.redundancy - 1)
        return survives or self._rejoin_steps > 0

    @property
    def nbytes(self) -> int:
        """Bytes that this node sends for meetings in a step."""
        return _MEETING_NBYTES * self.meets

    # ---- meetings ----------------------------------------------------------------------------------------------------

    def lost_node_asks(self, step: int) -> bool:
        """Hold the meeting at the end of a step, if there is one. Return whether the lost node asks to return."""
        return self.meets and self._meet(step + 1).asks

    def somebody_lacks_the_sum(self, step: int, *, has_sum: bool) -> bool:
        """Meet after a loss. Return whether the step must be exchanged again."""
        try:
            return min(self._meet(step + has_sum).steps.values()) <= step
        except RanksLostError:
            if has_sum:  # the sum is exact in any case; unless the others have just finished, the next step fails
                return False
            raise

    def _meet(self, steps: int) -> _Meeting:
        """Hold a meeting: wait for all nodes that are there. ``steps`` is the number of sums that this node has."""
        began = time.perf_counter()
        asks = self._kept is not None and self._transport.returning
        mine = torch.tensor([2 * steps + asks], dtype=torch.int64, device=self._transport.device)
        theirs = {node: torch.empty_like(mine) for node in range(self._assignment.nodes) if node != self._rank}
        nodes, whole = range(self._assignment.nodes), [(0, _MEETING_NBYTES)]
        there = [node for node in theirs if node not in self._transport.lost]
        incoming = [theirs[node].view(torch.uint8) if node in theirs else None for node in nodes]
        wanted = [whole if node in there else [] for node in nodes]
        self._transport.exchange(mine.clone().view(torch.uint8), incoming, wanted)
        self._exchange.stats.sent_bytes += _MEETING_NBYTES
        self._exchange.stats.exchange_s += time.perf_counter() - began
        numbers = {node: int(theirs[node]) for node in there} | {self._rank: int(mine)}
        return _Meeting({node: number // 2 for node, number in numbers.items()}, any(n % 2 for n in numbers.values()))

    # ---- another node is lost ----------------------------------------------------------------------------------------

    def go_on_without(self, error: RanksLostError, step: int) -> None:
        """Add up without the lost node, and without coding, from now on, if the transport goes on without it.

        Raises:
            RanksLostError: ``error``, if the others cannot go on.
        """
        exchange, transport = self._exchange, self._transport
        if transport.lost != error.ranks or self._assignment.redundancy < 2 or exchange.goes_around:
            raise error
        there = exchange.go_around(error.ranks[0])
        if self._rank == there[0]:
            if self._rejoin_steps:
                self._kept = self._kept or []
            elif transport.readmits:
                transport.drop()
            returns = f"it may return within {counted(self._rejoin_steps, 'step')}; or " if self._rejoin_steps else ""
            log.warning(
                "step %d: rank %d is lost (%s). The others compute all blocks of every mini-batch and go on, exactly. "
                "A rank now sends 1 gradient of the model in a step, instead of %.3g, and no other loss is tolerated; "
                "%srestart all ranks from a checkpoint when that suits",
                step, error.ranks[0], error, self._assignment.load(bits=exchange.bits), returns,
            )  # fmt: skip

    def keep(self, given: Given) -> None:
        """Keep a step's average for the lost node, if that is this node's task."""
        if self._kept is not None:
            self._kept.append(replace(given, average=given.average.to("cpu", copy=True)))

    @property
    def is_full(self) -> bool:
        """Whether the lost node has been away for more steps than may be kept."""
        return self._kept is not None and len(self._kept) > self._rejoin_steps

    def drop(self, step: int) -> None:
        """Give the lost node up: it cannot return any more."""
        self._kept = None
        self._transport.drop()
        (lost,) = self._transport.lost
        away = counted(self._rejoin_steps, "step")
        log.warning("step %d: rank %d was away for %s and cannot return", step, lost, away)

    def let_in(self, step: int) -> None:
        """Let the lost node back in, and give it the averages that it lacks. Called on all other nodes."""
        (lost,) = self._transport.lost
        self._transport.readmit()
        self._exchange.take_all()
        try:
            missed = range(self._meet(step + 1).steps[lost], step + 1)
            if self._kept is not None:
                log.warning(
                    "step %d: rank %d is back. It is given the averages of the %s that it missed, and the others "
                    "wait for it to apply them", step, lost, counted(len(missed), "step"),
                )  # fmt: skip
            kept = {kept.step: kept for kept in self._kept or ()}
            for each in missed:
                self._hand_over(lost, None if self._kept is None else kept[each])
            self._meet(step + 1)
            self._kept = None
        except RanksLostError as error:
            if error.ranks != (lost,):
                raise
            self.go_on_without(error, step)
            self.somebody_lacks_the_sum(step, has_sum=True)  # all have this step's sum; nodes in the next step redo it

    # ---- this node is lost -------------------------------------------------------------------------------------------

    def return_after(self, error: RanksLostError, step: int, *, has_sum: bool) -> None:
        """Wait until the others let this node back in. Then :attr:`given` has the averages that it missed."""
        log.warning("step %d: the other ranks go on without this one (%s)", step, error)
        returned = False
        while not returned:
            self._ask_to_return(step)
            self._exchange.take_all()
            self._kept = None
            try:
                steps = self._meet(step + has_sum + len(self.given)).steps
                for missed in range(steps[self._rank], max(steps.values())):
                    self.given.append(Given(missed, *self._hand_over(self._rank, None)))
                self._meet(max(steps.values()))
                returned = True
            except RanksLostError as again:
                if self._rank not in again.ranks:
                    raise

    def _ask_to_return(self, step: int) -> None:
        try:
            if not self._rejoin_steps:
                raise RanksLostError("rejoin_steps=0 lets no rank back in", (self._rank,))
            self._transport.rejoin()
        except RanksLostError as error:
            raise RanksLostError(
                f"in step {step} the other ranks go on without this one, which was silent for too long, "
                "and do not use what it computes. To bring it back, restart all ranks from a checkpoint "
                f"({error})",
                error.ranks,
            ) from error

    def _hand_over(self, taker: int, kept: Given | None) -> tuple[Tensor, int]:
        """Send an average and its exponent from the node that has kept it to the node that lacks it."""
        giver = next(node for node in range(self._assignment.nodes) if node != taker)
        numel = self._exchange.numel
        numbers = torch.empty(numel + 1, dtype=torch.int32, device="cpu")
        if kept is not None:
            numbers[:numel], numbers[numel] = kept.average.view(torch.int32), kept.exponent
        self._exchange.hand_over(numbers, giver, taker)
        return numbers[:numel].view(torch.float32).to(self._exchange.device), int(numbers[numel])
