"""From the gradients of a node's own blocks to the average over the whole mini-batch, the same bits on all nodes.

Each block contributes Σ ∂loss/∂w over its samples, divided by the samples of the mini-batch, and the average is the sum
of all contributions (equation 17). They are rounded to whole numbers of a *unit*, a power of two, in ``bits`` bits, and
everything after that is exact: sums of slices, what is left of them, the sum of all blocks. The unit is chosen so that
a stated *span* is covered: contributions of C blocks may reach span/C, and their sum, therefore, ±span (the paper: 10).
With 32 bits the sum of all blocks stays inside of int32; with 16 or 8 packets are narrower, and sums are int32 still.

In front of the first segment's packets travels a header of 20 + 4·k bytes, little-endian. Where packets inside groups
are followed by sums across groups, these have another, without checksums, for what a group has found::

    int32    step                 how many steps this node has averaged
    int32    samples              of the mini-batch
    int32    exponent             the unit is 2**exponent
    int32    trouble              0, −1: other steps, samples or units; block + 1: other bits for a block
    float32  magnitude            the largest contribution
    uint32   checksum, k times    of the codes of the sender's blocks, ascending

So all nodes learn in the same step, and decide alike:

* a contribution is inf or NaN: the average is NaN on all nodes, and a GradScaler skips the step on all of them;
* one is out of reach: the unit grows on all nodes by powers of two, and the step is exchanged again, with nothing lost;
* nodes that computed the same block have other bits, or another step or mini-batch: an error on all nodes.

Where a transport tolerates that a node is lost, the others go on without it, and lose no step. Each step then ends with
a *meeting*: one more exchange, of a number from each node, the steps whose sum it has. Nobody leaves a step before all
have met. When a node is lost, each of the others finds out in one exchange or another, and all meet again, among
themselves, in the first exchange without it. What they have differs by one at most: who had left step s had met there
with all, and so all have its sum. Then

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
import math
import struct
import time
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

import torch

from narrowband import kernels
from narrowband.coded.coding import Across, Around, Inside, cut, cut_whole
from narrowband.transport.contract import RanksLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.coded.assignment import Assignment
    from narrowband.coded.coding import Round, Segment
    from narrowband.transport.contract import Range, Transport

__all__ = ["BlockAverage", "CodedStats", "CodedStepStats", "Span", "header_nbytes"]

log = logging.getLogger(__name__)

Span = float | Literal["auto"]

DTYPES = {32: torch.int32, 16: torch.int16, 8: torch.int8}
#: The span of 32 bits where none is stated: the paper's.
PAPERS_SPAN = 10.0
#: How far beyond a step's largest contribution ``span="auto"`` reaches in the next: what exceeds it is sent twice.
HEADROOM = {32: 16.0, 16: 2.0, 8: 2.0}
#: Exponents of units, so that a unit and one over it are normal float32.
EXPONENTS = (-126, 126)

#: Values of a header's ``trouble``, beside block + 1.
NONE, OUT_OF_STEP = 0, -1


@dataclass
class CodedStepStats:
    """One step, or the sum of several.

    Attributes:
        steps: how many steps.
        exchanges: how often gradients were exchanged: more often than there were steps where a contribution was out of
            reach, or a rank was lost.
        sent_bytes: bytes handed to the transport: packets and headers, each once however many nodes need it.
        encode_s: seconds in rounding gradients and adding slices up.
        exchange_s: seconds in the transport, waiting for other nodes included.
        decode_s: seconds in taking packets apart.
    """

    steps: int = 0
    exchanges: int = 0
    sent_bytes: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    decode_s: float = 0.0

    def add(self, step: CodedStepStats) -> None:
        """Add a step to a sum."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(step, f.name))


@dataclass(frozen=True)
class CodedStats:
    """Totals since the start, and the last step."""

    total: CodedStepStats
    last: CodedStepStats


@dataclass(frozen=True)
class Header:
    """What a node says in a step, beside its packets (the format is at the top of this file)."""

    step: int
    samples: int
    exponent: int
    trouble: int
    magnitude: float
    checksums: tuple[int, ...]

    def to_bytes(self) -> bytes:
        place = (self.step & 0x7FFFFFFF, self.samples & 0x7FFFFFFF, self.exponent, self.trouble, self.magnitude)
        return struct.pack(f"<4if{len(self.checksums)}I", *place, *self.checksums)

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        step, samples, exponent, trouble, magnitude = struct.unpack_from("<4if", data)
        checksums = struct.unpack_from(f"<{(len(data) - _FIXED) // 4}I", data, _FIXED)
        return cls(step, samples, exponent, trouble, magnitude, checksums)


_FIXED = struct.calcsize("<4if")
#: What a node sends to a meeting: one int64.
MEETING_NBYTES = 8


def header_nbytes(checksums: int) -> int:
    """Bytes of a header."""
    return _FIXED + 4 * checksums


@dataclass(frozen=True)
class _Meeting:
    """What all nodes said: of how many steps they have the sum; and whether the one that is lost asks to be let in."""

    steps: dict[int, int]
    asks: bool


@dataclass(frozen=True)
class _Kept:
    """The average of a step, and the exponent of the next one's unit."""

    step: int
    average: Tensor
    exponent: int


class BlockAverage:
    """The contributions of one node's blocks, and how they become the average.

    Args:
        assignment: blocks and nodes.
        rank: this node.
        numels: of the parameters, in their order.
        transport: to the other nodes. Where it tolerates the loss of one, and blocks are on two, so does the average.
        bits: of a number on the wire: 32, 16 or 8.
        span: what the average may reach, or ``auto``: as far as the last step says is needed. None: the paper's, 10,
            with 32 bits, and ``auto`` with fewer.
        device: where gradients are.
        segment_nbytes: what a node sends at a time, at most.
        remember: how many steps' averages are kept for a node that is lost, where the transport lets it back in.

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
        remember: int = 0,
    ) -> None:
        if bits not in DTYPES:
            raise ValueError(f"bits={bits} is none of {', '.join(map(str, DTYPES))}")
        span = (PAPERS_SPAN if bits == 32 else "auto") if span is None else span
        if span != "auto" and not 0 < span < math.inf:
            raise ValueError(f"span={span!r} is neither 'auto' nor a positive number")
        self.assignment, self.rank, self.transport = assignment, rank, transport
        self._numels, self._device = list(numels), device or torch.device("cpu")
        self._follows, self._headroom = span == "auto", HEADROOM[bits]
        largest = (2**31 - 1) // assignment.blocks if bits == 32 else 2 ** (bits - 1) - 1
        lost = max(0, largest.bit_length() - 24)  # what a float32 does not have of it
        self.limit = largest >> lost << lost
        #: The unit is two to the power of this.
        self.exponent = EXPONENTS[0] if span == "auto" else self._fit(span / assignment.blocks)
        self.step = 0
        self.total, self.last = CodedStepStats(), CodedStepStats()

        dtype = DTYPES[bits]
        self._sizes = {} if segment_nbytes is None else {"nbytes": segment_nbytes}
        self._segments = cut(sum(numels), assignment, dtype.itemsize, **self._sizes)
        stride = self._segments[-1].begin + self._segments[-1].numel
        held = assignment.blocks_per_node
        self._contributions = torch.zeros(held, stride, device=self._device)
        self._empty = [True] * held
        self._codes = torch.zeros(held * stride, dtype=dtype, device=self._device)
        self._rounds: list[Round] = []
        if assignment.group > assignment.redundancy:
            self._rounds.append(Inside(assignment, rank, dtype, stride))
        if assignment.groups > 1:
            self._rounds.append(Across(assignment, rank))
        self._coded = self._rounds, self._segments
        self._remember = remember if transport.readmits else 0
        self._magnitude: float | None = None  # the largest contribution to the step's sum; None before that is here
        self._kept: list[_Kept] | None = None  # for a lost node, from the step of the loss on
        self._given: list[_Kept] = []  # to this node, for the steps that it missed
        self._sum = torch.empty(stride, dtype=torch.int32, device=self._device)
        self._pool: dict[int, Tensor] = {}

    @property
    def reach(self) -> float:
        """The largest contribution that the unit covers."""
        return math.ldexp(self.limit, self.exponent)

    @property
    def nbytes(self) -> int:
        """Bytes that this node hands to the transport in a step: packets and headers."""
        packets = sum(this.nbytes(segment, self.rank) for this in self._rounds for segment in self._segments)
        headers = header_nbytes(self.assignment.blocks_per_node) + header_nbytes(0) * (len(self._rounds) - 1)
        return packets + headers + MEETING_NBYTES * self._meets

    @property
    def is_given(self) -> bool:
        """Whether the others have given this node, which had been lost, the average of the step that it is in."""
        return bool(self._given)

    @property
    def _meets(self) -> bool:
        """Whether steps end with a meeting: a loss would be tolerated, or what was lost may return."""
        tolerates = len(self.transport.lost) < min(self.transport.tolerate, self.assignment.redundancy - 1)
        return tolerates or self._remember > 0

    def add(self, row: int, gradients: Sequence[Tensor | None], weight: float) -> None:
        """Add ``weight`` times the gradients of all parameters to the contribution of this node's ``row``-th block."""
        begin = 0
        for numel, gradient in zip(self._numels, gradients, strict=True):
            part = self._contributions[row, begin : begin + numel]
            begin += numel
            if gradient is None:
                if self._empty[row]:
                    part.zero_()
            elif not self._empty[row]:
                part.view(gradient.shape).add_(gradient, alpha=weight)
            elif gradient.dtype == torch.float32:
                torch.mul(gradient, weight, out=part.view(gradient.shape))
            else:
                part.view(gradient.shape).copy_(gradient).mul_(weight)
        self._empty[row] = False

    def average(self, samples: int) -> Tensor:
        """The sum of all blocks' contributions, float32, flat and new; NaN where one of them is not finite. All nodes
        call it in the same step, and get the same bits. Contributions begin anew afterwards.

        Args:
            samples: of the mini-batch; all nodes have to have the same.

        Raises:
            RuntimeError: on all nodes, when they are not in the same step, or computed other bits for the same block.
            RanksLostError: more nodes are lost than the transport tolerates; or this one is, to the others.
        """
        self.last = CodedStepStats(steps=1)
        if not self._given:
            try:
                out = self._take_part(samples)
            except RanksLostError as error:
                if self.rank not in error.ranks:
                    raise
                out = self._return_after(error)
        else:
            out = self._next_given()
        self._empty = [True] * len(self._empty)
        self.step += 1
        self.total.add(self.last)
        return out

    def _take_part(self, samples: int) -> Tensor:
        """The average, with all nodes that are there; and the lost one is let back in, if it asks."""
        self._magnitude = None
        exponent, asks = self.exponent, False
        try:
            self._magnitude = self._add_up(samples)
            asks = self._meets and self._meet(self.step + 1).asks
        except RanksLostError as error:
            self._go_on_without(error)
            if self._somebody_lacks_the_sum():
                self.exponent, self._magnitude = exponent, None
                self._magnitude = self._add_up(samples)
                asks = self._meets and self._meet(self.step + 1).asks
        out = self._finished()
        if self._kept is not None:
            self._kept.append(_Kept(self.step, out.to("cpu", copy=True), self.exponent))
        if asks:
            self._let_in()
        elif self._kept is not None and len(self._kept) > self._remember:
            self._drop()
        return out

    def _finished(self) -> Tensor:
        """The average, of the sum that is there; and the unit of the next step."""
        assert self._magnitude is not None
        began = time.perf_counter()
        out = torch.empty(sum(self._numels), device=self._device)
        if math.isfinite(self._magnitude):
            kernels.fixed_dequantize(self._sum[: out.numel()], out, math.ldexp(1.0, self.exponent))
            if self._follows and self._magnitude:
                self.exponent = self._fit(self._magnitude * self._headroom)
        else:
            out.fill_(math.nan)
        self.last.decode_s += time.perf_counter() - began
        return out

    def _add_up(self, samples: int) -> float:
        """The largest contribution; and the sum of all is there, in a wider unit if need be."""
        magnitude = self._exchange(samples)
        if math.isfinite(magnitude) and magnitude > self.reach:
            before = self.reach
            self.exponent = self._fit(magnitude)
            if not self._follows:
                log.warning(
                    "step %d: a block contributes %.3g to the average gradient, out of reach of %.3g; the span is %d "
                    "times as wide from here on, and this step is exchanged again",
                    self.step, magnitude, before, round(self.reach / before),
                )  # fmt: skip
            magnitude = self._exchange(samples)
        return magnitude

    # ---- when a node is lost -----------------------------------------------------------------------------------------

    def _somebody_lacks_the_sum(self) -> bool:
        has_sum = self._magnitude is not None
        try:
            return min(self._meet(self.step + has_sum).steps.values()) <= self.step
        except RanksLostError:
            if has_sum:  # exact, whatever has become of the others; if they have not just finished, the next step fails
                return False
            raise

    def _meet(self, steps: int) -> _Meeting:
        """Wait for all nodes that are there, and say of how many steps this one has the sum."""
        began = time.perf_counter()
        asks = self._kept is not None and self.transport.returning
        mine = torch.tensor([2 * steps + asks], device=self.transport.device)
        said = {node: torch.empty_like(mine) for node in range(self.assignment.nodes) if node != self.rank}
        nodes, all_of_it = range(self.assignment.nodes), [(0, MEETING_NBYTES)]
        there = [node for node in said if node not in self.transport.lost]
        incoming = [said[node].view(torch.uint8) if node in said else None for node in nodes]
        wanted = [all_of_it if node in there else [] for node in nodes]
        self.transport.exchange(mine.clone().view(torch.uint8), incoming, wanted)
        self.last.sent_bytes += MEETING_NBYTES
        self.last.exchange_s += time.perf_counter() - began
        numbers = {node: int(said[node]) for node in there} | {self.rank: int(mine)}
        return _Meeting({node: number // 2 for node, number in numbers.items()}, any(n % 2 for n in numbers.values()))

    def _go_on_without(self, error: RanksLostError) -> None:
        """Add up without coding from now on, where the transport goes on without the node that is lost."""
        if self.transport.lost != error.ranks or self.assignment.redundancy < 2 or isinstance(self._rounds[0], Around):
            raise error
        before = self.assignment.load(bits=8 * self._codes.element_size())
        around = Around(self.assignment, self.rank, error.ranks[0])
        self._rounds, self._segments = [around], cut_whole(self._sum.numel(), **self._sizes)
        self._pool.clear()
        if self.rank == around.heard[0]:
            if self._remember:
                self._kept = self._kept or []
            elif self.transport.readmits:
                self.transport.drop()
            returns = f"it may return within {self._remember} steps; or " if self._remember else ""
            log.warning(
                "step %d: rank %d is lost (%s). The others compute all blocks of every mini-batch and go on, exactly. "
                "A rank now sends 1 gradient of the model in a step, instead of %.3g, and no other loss is tolerated; "
                "%srestart all ranks from a checkpoint when that suits",
                self.step, error.ranks[0], error, before, returns,
            )  # fmt: skip

    # ---- when it returns ---------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        self._kept = None
        self.transport.drop()
        (lost,) = self.transport.lost
        log.warning("step %d: rank %d was away for %d steps and cannot return", self.step, lost, self._remember)

    def _let_in(self) -> None:
        """All but the lost node: take it back, and give it the averages that it lacks."""
        (lost,) = self.transport.lost
        self.transport.readmit()
        self._take_all()
        try:
            missed = range(self._meet(self.step + 1).steps[lost], self.step + 1)
            if self._kept is not None:
                log.warning(
                    "step %d: rank %d is back. It is given the averages of the %d steps that it missed, and the others "
                    "wait for it to apply them", self.step, lost, len(missed),
                )  # fmt: skip
            kept = {kept.step: kept for kept in self._kept or ()}
            for step in missed:
                self._hand_over(lost, None if self._kept is None else kept[step])
            self._meet(self.step + 1)
            self._kept = None
        except RanksLostError as error:
            if error.ranks != (lost,):
                raise
            self._go_on_without(error)
            self._somebody_lacks_the_sum()  # not of this step; those in the next exchange it again

    def _return_after(self, error: RanksLostError) -> Tensor:
        """The lost node: wait until the others let it back in; the average of the step that it is in."""
        log.warning("step %d: the other ranks go on without this one (%s)", self.step, error)
        returned = False
        while not returned:
            self._ask_to_return()
            self._take_all()
            self._kept = None
            try:
                steps = self._meet(self.step + (self._magnitude is not None) + len(self._given)).steps
                for step in range(steps[self.rank], max(steps.values())):
                    self._given.append(_Kept(step, *self._hand_over(self.rank, None)))
                self._meet(max(steps.values()))
                returned = True
            except RanksLostError as again:
                if self.rank not in again.ranks:
                    raise
        return self._next_given() if self._magnitude is None else self._finished()

    def _ask_to_return(self) -> None:
        try:
            if not self._remember:
                raise RanksLostError("no rank is let back in", (self.rank,))
            self.transport.rejoin()
        except RanksLostError as error:
            raise RanksLostError(
                f"in step {self.step} the other ranks go on without this one, of which they heard nothing for too "
                "long: what it computes has no part in their training any more. To have it back, restart all ranks "
                f"from a checkpoint ({error})",
                error.ranks,
            ) from error

    def _take_all(self) -> None:
        self._rounds, self._segments = self._coded
        self._pool.clear()

    def _hand_over(self, taker: int, kept: _Kept | None) -> tuple[Tensor, int]:
        """An average and its exponent, from the node that has kept it to the one that lacks it."""
        giver = next(node for node in range(self.assignment.nodes) if node != taker)
        numel = sum(self._numels)
        numbers = torch.empty(numel + 1, dtype=torch.int32)
        if kept is not None:
            numbers[:numel], numbers[numel] = kept.average.view(torch.int32), kept.exponent
        others = [node for node in range(self.assignment.nodes) if node != self.rank]
        nothing = torch.empty(0, dtype=torch.uint8)
        for part in cut_whole(numel + 1, **self._sizes):
            piece = numbers[part.begin : part.begin + part.numel].view(torch.uint8)
            places: list[Tensor | None] = [nothing if node in others else None for node in range(self.assignment.nodes)]
            wanted: list[list[Range]] = [[] for _ in places]
            if self.rank != giver:
                places[giver] = piece
            if self.rank == taker:
                wanted[giver] = [(0, piece.numel())]
            self.transport.exchange(piece if self.rank == giver else nothing, places, wanted)
            self.last.sent_bytes += piece.numel() * (self.rank == giver)
        return numbers[:numel].view(torch.float32).to(self._device), int(numbers[numel])

    def _next_given(self) -> Tensor:
        given = self._given.pop(0)
        self.exponent = given.exponent
        return given.average

    # ---- one exchange ------------------------------------------------------------------------------------------------

    def _exchange(self, samples: int) -> float:
        """Round, send, receive and add up; the largest contribution of all, and no sum if that is out of reach."""
        self.last.exchanges += 1
        began = time.perf_counter()
        news = self._quantized(samples)
        own = self._rounds[0].own
        rows = range(self.assignment.blocks_per_node) if own is None else own
        if rows:
            kernels.fixed_sum(self._codes, [row * self._sum.numel() for row in rows], self._sum)
        else:
            self._sum.zero_()
        self.last.encode_s += time.perf_counter() - began
        heard = {self.rank: news}
        for this in self._rounds:
            heard = self._pass(this, self._segments[0], news)
            news = self._found(heard)
        if news.trouble:
            raise RuntimeError(self._what_differs(news.trouble, heard))
        if news.magnitude <= self.reach:
            for segment in self._segments[1:]:
                for this in self._rounds:
                    self._pass(this, segment, None)
        return news.magnitude

    def _quantized(self, samples: int) -> Header:
        """Codes of this node's blocks, and what it has to say about them."""
        stride, unit = self._contributions.shape[1], math.ldexp(1.0, self.exponent)
        told = [
            kernels.fixed_quantize(contribution, codes, unit, self.limit)
            for contribution, codes in zip(self._contributions, self._codes.view(-1, stride), strict=True)
        ]
        largest = _largest([magnitude for magnitude, _ in told])
        return Header(self.step, samples, self.exponent, NONE, largest, tuple(checksum for _, checksum in told))

    def _pass(self, this: Round, segment: Segment, news: Header | None) -> dict[int, Header]:
        """One round of a segment; the headers, if it has any, of the nodes that this one hears, itself included."""
        began = time.perf_counter()
        head = b"" if news is None else news.to_bytes()
        nodes = range(self.assignment.nodes)
        buffers = [self._buffer(node, len(head) + this.nbytes(segment, node)) for node in nodes]
        outgoing = buffers[self.rank]
        if head:
            outgoing[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        packets = outgoing[len(head) :]
        if packets.device == self._device:
            this.fill(segment, self._codes, self._sum, packets)
        else:
            here = torch.empty_like(packets, device=self._device)
            this.fill(segment, self._codes, self._sum, here)
            packets.copy_(here)
        others = [node for node in nodes if node != self.rank]
        wanted = [_behind(head, this.wanted(segment, k), hears=k in this.heard) if k in others else [] for k in nodes]
        incoming = [buffers[k] if k in others else None for k in nodes]
        encoded = time.perf_counter()
        self.transport.exchange(outgoing, incoming, wanted)
        arrived = time.perf_counter()
        for node in others:
            if this.wanted(segment, node):
                this.take(segment, node, buffers[node][len(head) :].to(self._device), self._codes, self._sum)
        self.last.sent_bytes += outgoing.numel()
        self.last.encode_s += encoded - began
        self.last.exchange_s += arrived - encoded
        self.last.decode_s += time.perf_counter() - arrived
        if not head:
            return {}
        return {node: Header.from_bytes(buffers[node][: len(head)].cpu().numpy().tobytes()) for node in this.heard}

    def _buffer(self, node: int, nbytes: int) -> Tensor:
        if node not in self._pool or self._pool[node].numel() < nbytes:
            self._pool[node] = torch.empty(nbytes, dtype=torch.uint8, device=self.transport.device)
        return self._pool[node][:nbytes]

    # ---- what nodes say ----------------------------------------------------------------------------------------------

    def _found(self, heard: dict[int, Header]) -> Header:
        """What follows from these headers: the same on all nodes that have them."""
        own = heard[self.rank]
        trouble = next((header.trouble for header in heard.values() if header.trouble), NONE)
        if not trouble and len({(header.step, header.samples, header.exponent) for header in heard.values()}) > 1:
            trouble = OUT_OF_STEP
        if not trouble:
            of_block: dict[int, int] = {}
            for node, header in heard.items():
                for block, checksum in zip(self.assignment.held(node), header.checksums, strict=False):
                    if of_block.setdefault(block, checksum) != checksum:
                        trouble = trouble or block + 1
        largest = _largest([header.magnitude for header in heard.values()])
        return replace(own, trouble=trouble, magnitude=largest, checksums=())

    def _what_differs(self, trouble: int, heard: dict[int, Header]) -> str:
        if trouble == OUT_OF_STEP:
            places = {node: (header.step, header.samples, header.exponent) for node, header in heard.items()}
            return (
                "ranks are not in the same step; of each rank its step, the samples of its mini-batch and the exponent "
                f"of its unit: {places}"
            )
        return (
            f"block {trouble - 1} of the mini-batch has other gradients on some of the ranks that computed it, "
            f"{self.assignment.holders[trouble - 1]}, and packets of them cannot be taken apart. They have to be equal "
            "to the bit: that takes the same samples, weights, versions and kind of processor on all ranks, a loss "
            "that is a mean over rows, and no randomness but that of torch's own generators"
        )

    def _fit(self, magnitude: float) -> int:
        """The exponent of the smallest unit that reaches as far."""
        exponent = math.ceil(math.log2(magnitude / self.limit)) - 1
        while math.ldexp(self.limit, exponent) < magnitude:
            exponent += 1
        return min(max(exponent, EXPONENTS[0]), EXPONENTS[1])


def _largest(magnitudes: Sequence[float]) -> float:
    return max(magnitudes) if all(map(math.isfinite, magnitudes)) else math.nan


def _behind(head: bytes, ranges: Sequence[Range], *, hears: bool) -> list[Range]:
    """Ranges of a buffer that begins with a header, and the header's where it is heard; neighbours made one."""
    joined = [(0, len(head))] if head and hears else []
    for start, stop in ((start + len(head), stop + len(head)) for start, stop in ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
