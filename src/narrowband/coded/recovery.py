"""When a node is lost, and when it returns: nobody loses a step, and all nodes get the same bits.

Where a transport goes on without a lost node, so does the average. Each step then ends with a *meeting*: one more
exchange, of a number from each node, the steps whose sum it has. Nobody leaves a step before all have met. When a node
is lost, each of the others finds out in one exchange or another, and all meet again, among themselves, in the first
exchange without it. What they have differs by one at most: who had left step s had met there with all, and so all have
its sum. Then

* some lack the sum of step s, and nobody has left it: all exchange it again, from the gradients that all still have;
* all have the sum of s: those that have yet to leave it do, those that have left it exchange s + 1 again.

Either way the exchange after the meeting is the first of one step, s or s + 1, on all nodes, and so are all others.
They add up the same whole numbers in another way (:class:`~narrowband.coded.coding.Around`), to the same bits, and
check the same headers. A second loss is an error on all nodes.

A node that was lost, but lives, may return. From the loss on the first of the others keeps the averages, up to a number
of them; a step goes on ending with a meeting, in which that node says, too, whether the lost one is heard asking. If
so, all meet once more, with it; the number that it brings is the first step whose average it lacks, and these averages
follow. It takes them for its own in that many steps, without a gradient and without an exchange, while the others wait
for it in the first step of all.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from narrowband.transport.contract import RanksLostError

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.coded.exchange import BlockExchange

__all__ = ["Given", "Recovery"]

log = logging.getLogger(__name__)

#: What a node sends to a meeting: one int64.
_MEETING_NBYTES = 8


@dataclass(frozen=True)
class _Meeting:
    """What all nodes said: of how many steps they have the sum; and whether the one that is lost asks to be let in."""

    steps: dict[int, int]
    asks: bool


@dataclass(frozen=True)
class Given:
    """The average of a step, and the exponent of the next one's unit."""

    step: int
    average: Tensor
    exponent: int


class Recovery:
    """What a node does about losses, its own included.

    Args:
        exchange: the contributions, and with whom they are added up.
        rejoin_steps: how many steps' averages are kept for a node that is lost, where the transport lets it back in.

    Attributes:
        given: to this node, for the steps that it missed.
    """

    def __init__(self, exchange: BlockExchange, rejoin_steps: int) -> None:
        self.given: list[Given] = []
        self._exchange, self._transport = exchange, exchange.transport
        self._assignment, self._rank = exchange.assignment, exchange.rank
        self._rejoin_steps = rejoin_steps if self._transport.readmits else 0
        self._kept: list[Given] | None = None  # for a lost node, from the step of the loss on

    @property
    def meets(self) -> bool:
        """Whether steps end with a meeting: a loss would be survived, or what was lost may return."""
        survives = len(self._transport.lost) < min(self._transport.max_failures, self._assignment.redundancy - 1)
        return survives or self._rejoin_steps > 0

    @property
    def nbytes(self) -> int:
        """Bytes that this node sends for it in a step."""
        return _MEETING_NBYTES * self.meets

    # ---- meetings ----------------------------------------------------------------------------------------------------

    def lost_node_asks(self, step: int) -> bool:
        """Meet at the end of a step, where steps end with a meeting; whether the lost node asks to be let back in."""
        return self.meets and self._meet(step + 1).asks

    def somebody_lacks_the_sum(self, step: int, *, has_sum: bool) -> bool:
        """Whether a step has to be exchanged again, after a loss."""
        try:
            return min(self._meet(step + has_sum).steps.values()) <= step
        except RanksLostError:
            if has_sum:  # exact, whatever has become of the others; if they have not just finished, the next step fails
                return False
            raise

    def _meet(self, steps: int) -> _Meeting:
        """Wait for all nodes that are there, and say of how many steps this one has the sum."""
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
        """Add up without coding from now on, where the transport goes on without the node that is lost.

        Raises:
            RanksLostError: the one given, where the others cannot go on.
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
            returns = f"it may return within {self._rejoin_steps} steps; or " if self._rejoin_steps else ""
            log.warning(
                "step %d: rank %d is lost (%s). The others compute all blocks of every mini-batch and go on, exactly. "
                "A rank now sends 1 gradient of the model in a step, instead of %.3g, and no other loss is tolerated; "
                "%srestart all ranks from a checkpoint when that suits",
                step, error.ranks[0], error, self._assignment.load(bits=exchange.bits), returns,
            )  # fmt: skip

    def keep(self, given: Given) -> None:
        """A step is over: keep its average, if that is this node's task, for the one that is lost."""
        if self._kept is not None:
            self._kept.append(replace(given, average=given.average.to("cpu", copy=True)))

    @property
    def is_full(self) -> bool:
        """Whether the lost node has been away for too long."""
        return self._kept is not None and len(self._kept) > self._rejoin_steps

    def drop(self, step: int) -> None:
        """The lost node cannot return any more."""
        self._kept = None
        self._transport.drop()
        (lost,) = self._transport.lost
        log.warning("step %d: rank %d was away for %d steps and cannot return", step, lost, self._rejoin_steps)

    def let_in(self, step: int) -> None:
        """All but the lost node: take it back, and give it the averages that it lacks."""
        (lost,) = self._transport.lost
        self._transport.readmit()
        self._exchange.take_all()
        try:
            missed = range(self._meet(step + 1).steps[lost], step + 1)
            if self._kept is not None:
                log.warning(
                    "step %d: rank %d is back. It is given the averages of the %d steps that it missed, and the others "
                    "wait for it to apply them", step, lost, len(missed),
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
            self.somebody_lacks_the_sum(step, has_sum=True)  # of this step nobody; those in the next exchange it again

    # ---- this node is lost -------------------------------------------------------------------------------------------

    def return_after(self, error: RanksLostError, step: int, *, has_sum: bool) -> None:
        """Wait until the others let this node back in. It has :attr:`given` then."""
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
                raise RanksLostError("no rank is let back in", (self._rank,))
            self._transport.rejoin()
        except RanksLostError as error:
            raise RanksLostError(
                f"in step {step} the other ranks go on without this one, which was silent for too long: "
                "what it computes has no part in their training any more. To have it back, restart all ranks "
                f"from a checkpoint ({error})",
                error.ranks,
            ) from error

    def _hand_over(self, taker: int, kept: Given | None) -> tuple[Tensor, int]:
        """An average and its exponent, from the node that has kept it to the one that lacks it."""
        giver = next(node for node in range(self._assignment.nodes) if node != taker)
        numel = self._exchange.numel
        numbers = torch.empty(numel + 1, dtype=torch.int32, device="cpu")
        if kept is not None:
            numbers[:numel], numbers[numel] = kept.average.view(torch.int32), kept.exponent
        self._exchange.hand_over(numbers, giver, taker)
        return numbers[:numel].view(torch.float32).to(self._exchange.device), int(numbers[numel])
