"""From the gradients of a node's own blocks to the average over the whole mini-batch, the same bits on all nodes.

A step rounds contributions to whole numbers (:mod:`.fixed_point`) and adds them up (:mod:`.exchange`), once more in
another unit where that does not fit them. What is to be done when a node is lost, or returns, :mod:`.recovery` knows.
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
    """The contributions of one node's blocks, and how they become the average.

    Args:
        assignment: blocks and nodes.
        rank: this node.
        numels: of the parameters, in their order.
        transport: to the other nodes. Where it goes on without a lost one, and blocks are on two, so does the average.
        bits: of a number on the wire: 32, 16 or 8.
        span: what the average may reach; see :class:`~narrowband.coded.fixed_point.FixedPoint`.
        device: where gradients are.
        segment_nbytes: what a node sends at a time, at most.
        rejoin_steps: how many steps' averages are kept for a node that is lost, where the transport lets it back in.

    Attributes:
        assignment, rank, transport: as given.
        unit: of contributions.
        step: how many steps this node has averaged.
        total: statistics since the start.
        last: and of the last step.

    Raises:
        ValueError: bits or a span that do not exist.
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
        self._magnitude: float | None = None  # the largest contribution to the step's sum; None before that is here
        self.step = 0
        self.total, self.last = CodedStepStats(), CodedStepStats()

    @property
    def nbytes(self) -> int:
        """Bytes that this node hands to the transport in a step: packets, headers and a meeting."""
        return self._exchange.nbytes + self._recovery.nbytes

    @property
    def is_given(self) -> bool:
        """Whether the others have given this node, which had been lost, the average of the step that it is in."""
        return bool(self._recovery.given)

    def add(self, row: int, gradients: Sequence[Tensor | None], weight: float) -> None:
        """Add ``weight`` times the gradients of all parameters to the contribution of this node's ``row``-th block."""
        self._exchange.add(row, gradients, weight)

    def clear(self) -> None:
        """Contributions begin anew."""
        self._exchange.clear()

    def average(self, samples: int) -> Tensor:
        """The sum of all blocks' contributions, float32, flat and new; NaN where one of them is not finite. All nodes
        call it in the same step, and get the same bits. Contributions begin anew afterwards.

        Args:
            samples: of the mini-batch; all nodes have to have the same.

        Raises:
            RuntimeError: on all nodes, when they are not in the same step, or computed other bits for the same block.
            RanksLostError: more nodes are lost than the transport goes on without; or this one is, to the others.
        """
        self.last = self._exchange.stats = CodedStepStats(steps=1, raw_bytes=4 * self._exchange.numel)
        if self.is_given:
            out = self._next_given()
        else:
            try:
                out = self._take_part(samples)
            except RanksLostError as error:
                if self.rank not in error.ranks:
                    raise
                self._recovery.return_after(error, self.step, has_sum=self._magnitude is not None)
                out = self._next_given() if self._magnitude is None else self._finished()
        self.clear()
        self.step += 1
        self.total.add(self.last)
        return out

    def state_dict(self) -> dict[str, Any]:
        """The step and the unit, the same on all nodes."""
        return {"step": self.step, "exponent": self.unit.exponent, "limit": self.unit.limit}

    def load_state_dict(self, state: Mapping[str, Any], *, same_assignment: bool) -> None:
        """Go on from a state. Where the number of nodes or bits has changed, the unit begins anew."""
        self.step = state["step"]
        if same_assignment and state["limit"] == self.unit.limit:
            self.unit.exponent = state["exponent"]

    def _take_part(self, samples: int) -> Tensor:
        """The average, with all nodes that are there; and the lost one is let back in, if it asks."""
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
        """The largest contribution; and the sum of all is there, in another unit if need be."""
        magnitude = self._exchange.run(self.step, samples)
        if math.isfinite(magnitude) and not self.unit.fits(magnitude):
            before = self.unit.reach
            self.unit.refit(magnitude)
            if self.unit.reach > before and not self.unit.follows:
                log.warning(
                    "step %d: a block contributes %.3g to the average gradient, out of reach of %.3g; the span is %d "
                    "times as wide until gradients are small again, and this step is exchanged again",
                    self.step, magnitude, before, round(self.unit.reach / before),
                )  # fmt: skip
            magnitude = self._exchange.run(self.step, samples)
        return magnitude

    def _finished(self) -> Tensor:
        """The average, of the sum that is there; and the unit of the next step."""
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
