"""Average the gradients of all nodes' blocks over the whole mini-batch, with the same bits on all nodes.

A step rounds contributions to whole numbers (:mod:`.fixed_point`) and adds them up (:mod:`.exchange`). If the unit does
not fit the contributions, it does so again in another unit. :mod:`.recovery` handles nodes that are lost or return.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from narrowband.coded.exchange import BlockExchange
from narrowband.coded.fixed_point import FixedPoint
from narrowband.coded.recovery import Given, Recovery
from narrowband.coded.stats import CodedStepStats
from narrowband.transport.contract import RanksLostError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from narrowband.coded.assignment import Assignment
    from narrowband.coded.fixed_point import Span
    from narrowband.transport.contract import Transport

__all__ = ["BlockAverage"]

log = logging.getLogger(__name__)


class BlockAverage:
    """Collects the contributions of one node's blocks, and averages them with those of the other nodes.

    Args:
        assignment: blocks and nodes.
        rank: this node.
        numels: numbers of elements of the parameters, in their order.
        transport: transport to the other nodes. If it goes on without a lost node, and each block is on two nodes or
            more, averaging goes on, too.
        bits: bits of a number on the wire: 32, 16 or 8.
        span: the largest magnitude of the average; see :class:`~narrowband.coded.fixed_point.FixedPoint`.
        device: device of the gradients.
        segment_nbytes: the most bytes that a node sends at a time.
        rejoin_steps: number of steps whose averages are kept for a lost node, if the transport lets it back in.

    Attributes:
        assignment, rank, transport: the arguments.
        unit: the unit of contributions.
        step: number of steps that this node has averaged.
        total: statistics since the start.
        last: statistics of the last step.

    Raises:
        ValueError: unsupported ``bits``, or an invalid ``span``.
    """

    def __init__(
        self,
        assignment: Assignment,
        rank: int,
        numels: Sequence[int],
        transport: Transport,
        *,
        bits: int = 32,
        span: Span | None = None,
        device: torch.device | None = None,
        segment_nbytes: int | None = None,
        rejoin_steps: int = 0,
    ) -> None:
        self.assignment, self.rank, self.transport = assignment, rank, transport
        self.unit = FixedPoint(bits, span, assignment.blocks)
        device = device or torch.device("cpu")
        self._exchange = BlockExchange(assignment, rank, numels, transport, self.unit, device, segment_nbytes)
        self._recovery = Recovery(self._exchange, rejoin_steps)
        self._magnitude: float | None = None  # the largest contribution to the step's sum; None until there is a sum
        self.step = 0
        self.total, self.last = CodedStepStats(), CodedStepStats()

    @property
    def nbytes(self) -> int:
        """Bytes that this node hands to the transport in a step: packets, headers and a meeting."""
        return self._exchange.nbytes + self._recovery.nbytes

    @property
    def is_given(self) -> bool:
        """Whether this node was lost, and the others have given it the average of its current step."""
        return bool(self._recovery.given)

    def add(self, row: int, gradients: Sequence[Tensor | None], weight: float) -> None:
        """Add ``weight`` times the gradients of all parameters to the contribution of this node's ``row``-th block."""
        self._exchange.add(row, gradients, weight)

    def clear(self) -> None:
        """Reset the contributions to zero."""
        self._exchange.clear()

    def average(self, samples: int) -> Tensor:
        """Return the sum of all blocks' contributions as a new flat float32 tensor; all NaN if any contribution is not
        finite. All nodes call this in the same step, and get the same bits. Contributions are reset afterwards.

        Args:
            samples: number of samples of the mini-batch, the same on all nodes.

        Raises:
            RuntimeError: on all nodes, if they are not in the same step, or computed different bits for the same block.
            RanksLostError: more nodes are lost than the transport can go on without; or the others go on without this
                node, and it cannot return.
        """
        self.last = self._exchange.stats = CodedStepStats(steps=1, raw_bytes=4 * self._exchange.numel)
        self._exchange.under_way = False
        try:
            out = self._next_given() if self.is_given else self._taken(samples)
        except BaseException as error:
            # Errors of exchanges are raised on all nodes. After others, such as Ctrl-C, nodes wait in later exchanges.
            here_alone = not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError)
            if here_alone and self._exchange.under_way:
                self.transport.break_off()
            raise
        self.clear()
        self.step += 1
        self.total.add(self.last)
        return out

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the unit, which are the same on all nodes."""
        return {"step": self.step, "exponent": self.unit.exponent, "limit": self.unit.limit}

    def load_state_dict(self, state: Mapping[str, Any], *, same_assignment: bool) -> None:
        """Resume from a state. If the assignment or the number of bits has changed, the unit is not restored."""
        self.step = state["step"]
        if same_assignment and state["limit"] == self.unit.limit:
            self.unit.exponent = state["exponent"]

    def _taken(self, samples: int) -> Tensor:
        """Compute the average with the other nodes; or return with what they give, if they have gone on without this
        node.
        """
        try:
            return self._take_part(samples)
        except RanksLostError as error:
            if self.rank not in error.ranks:
                raise
            self._recovery.return_after(error, self.step, has_sum=self._magnitude is not None)
            return self._next_given() if self._magnitude is None else self._finished()

    def _take_part(self, samples: int) -> Tensor:
        """Compute the average with all nodes that are there, and let a lost node back in if it asks."""
        recovery, self._magnitude = self._recovery, None
        exponent, asks = self.unit.exponent, False
        try:
            self._magnitude = self._add_up(samples)
            asks = recovery.lost_node_asks(self.step)
        except RanksLostError as error:
            recovery.go_on_without(error, self.step)
            if recovery.somebody_lacks_the_sum(self.step, has_sum=self._magnitude is not None):
                self.unit.exponent, self._magnitude = exponent, None
                self._magnitude = self._add_up(samples)
                asks = recovery.lost_node_asks(self.step)
        out = self._finished()
        recovery.keep(Given(self.step, out, self.unit.exponent))
        if asks:
            recovery.let_in(self.step)
        elif recovery.is_full:
            recovery.drop(self.step)
        return out

    def _add_up(self, samples: int) -> float:
        """Add up all contributions, in another unit if this one does not fit. Return the largest contribution."""
        magnitude = self._exchange.run(self.step, samples)
        if math.isfinite(magnitude) and not self.unit.fits(magnitude):
            before = self.unit.reach
            self.unit.refit(magnitude)
            if self.unit.reach > before and not self.unit.follows:
                log.warning(
                    "step %d: a block contributes %.3g to the average gradient, more than the %.3g that the span "
                    "allows. The span is now %d times as wide until gradients are small again, and this step is "
                    "exchanged again",
                    self.step, magnitude, before, round(self.unit.reach / before),
                )  # fmt: skip
            magnitude = self._exchange.run(self.step, samples)
        return magnitude

    def _finished(self) -> Tensor:
        """Return the average, from the sum in the exchange, and set the unit of the next step."""
        assert self._magnitude is not None
        began = time.perf_counter()
        out = torch.empty(self._exchange.numel, dtype=torch.float32, device=self._exchange.device)
        if math.isfinite(self._magnitude):
            self._exchange.average_into(out)
            self.unit.follow(self._magnitude)
        else:
            out.fill_(math.nan)
        self.last.decode_s += time.perf_counter() - began
        return out

    def _next_given(self) -> Tensor:
        given = self._recovery.given.pop(0)
        self.unit.exponent = given.exponent
        return given.average
