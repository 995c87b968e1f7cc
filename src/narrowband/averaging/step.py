"""One step: its exchanges, its small parameters, and the decision whether it counts. On the engine's thread.

A step is one transaction. Feedback changes its state only when every tensor of the step turned out finite on every
rank, and with feedback no average is written before that is known. With ``gather`` it is known early: the all-reduce of
small parameters carries one element more, NaN where a rank encoded something that is not finite, so that averages are
written while the last payload is on the wire. Without feedback each average is written when it arrives.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from narrowband.averaging.layers import Vector
from narrowband.averaging.stats import StepStats
from narrowband.codecs import Codec
from narrowband.codecs.base import squared_norm
from narrowband.collectives import Exchange, Item, Wire, allreduce_nbytes, exchange
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from narrowband.averaging.agreement import Agreement, Facts
    from narrowband.averaging.controller import Controller
    from narrowband.averaging.layers import Layer, Layers, Parameter, Way
    from narrowband.averaging.loss_scale import LossScale
    from narrowband.codecs import Shape
    from narrowband.collectives import Engine, Job, Peers

__all__ = ["ADVICE", "Group", "Parts", "Step", "fill_with_nan"]

#: What the error says that ranks raise which do not agree on a step.
ADVICE = (
    "Call pause, resume, set_epoch, set_layers, load_state_dict and remove on all ranks, between the same two steps, "
    "with the same arguments; then go on from a checkpoint of all ranks"
)

#: The relative error costs two passes over the gradients, so it is measured in one step of this many.
MEASURE_EVERY = 50

#: What several buckets have to send travels together until a rank sends so many bytes: 5 ms at 200 Mbit/s, about what
#: a collective among busy machines takes anyway, however little it carries.
ENOUGH_NBYTES = 1 << 17


@dataclass(frozen=True, eq=False)
class Group:
    """Tensors that are ready at the same time, end to end.

    Attributes:
        buffer: flat, or one sparse gradient. Its content belongs to the step until the averages are there.
        parameters: whose gradients these are, in their order.
        out: where the averages go, flat and as long; None: into ``buffer``.
    """

    buffer: Tensor
    parameters: Sequence[Parameter]
    out: Tensor | None = None

    def pieces(self) -> Iterator[tuple[Parameter, Tensor, Tensor | None]]:
        """Each parameter with its part of the buffer, and where its average goes if that is elsewhere."""
        at = 0
        for parameter in self.parameters:
            span = slice(at, at := at + parameter.shape.numel())
            yield parameter, self.buffer[span], None if self.out is None else self.out[span]

    def deliver(self) -> None:
        """The buffer holds the averages."""
        if self.out is not None:
            self.out.copy_(self.buffer)


@dataclass(frozen=True, eq=False)
class Parts:
    """What all steps of one average use.

    Attributes:
        layers: of the model, and what they are compressed with.
        ranks: that average.
        engine: runs the exchanges.
        agreement: compares what ranks are about to do.
        controller: of the plan.
        loss_scale: the unit of the gradients.
        rates: the optimizer whose learning rates feedback has to know, if it has to know any.
    """

    layers: Layers
    ranks: Peers
    engine: Engine
    agreement: Agreement
    controller: Controller
    loss_scale: LossScale
    rates: torch.optim.Optimizer | None


class Step:
    """One step.

    Args:
        parts: what all steps use.
        number: of the step, from 0.
        codec: of layers that a plan gives nothing else.
        compressing: whether anything is compressed in this step.
        measure: whether the relative error is measured.
        seed: of the run.
        facts: what this rank is about to do.
        finished: called with the step's statistics when all averages are written, before any future is resolved.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        number: int,
        codec: Codec,
        compressing: bool,
        measure: bool,
        seed: int,
        facts: Facts,
        finished: Callable[[StepStats], None],
    ) -> None:
        self._parts = parts
        self._layers, self._ranks, self._engine = parts.layers, parts.ranks, parts.engine
        self._number, self._seed, self._facts, self._finished = number, seed, facts, finished
        self.codec = codec
        self.compressing = compressing
        self._unclipped: list[Group] = []  # wait for the norm of all
        self._norm = 0.0
        #: Of each group of tensors: its future, and the memory that the averages go to.
        self.results: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        #: Whether :meth:`raise_error` will be called later: futures then get NaN in place of an error.
        self.raises_later = False
        self._error: BaseException | None = None
        self.opened_at = time.perf_counter()
        self.closed_at = 0.0
        self._closed = False
        self._begun = False
        self._delivered = False
        self._open_jobs = 0
        self._undecided_jobs = 0  # those that may still show that the step does not count
        self._encoded_finite = True
        self._flagged = False  # whether what is small also says whether all that was encoded is finite
        self._good: bool | None = None  # whether the step counts, once that is known
        self._exchanges: list[Exchange] = []
        self._waiting: dict[tuple[Way, str], Exchange] = {}  # what has not enough to send yet
        self._arrived: list[Exchange] = []
        self._small: dict[Vector, Tensor] = {}  # until they are sent
        self._lacking: dict[Vector, int] = {}  # how many elements of these are still to come
        self._small_back: list[tuple[Parameter, Tensor, Tensor]] = []
        self._dense_finite = True
        self._stats = StepStats(steps=1)
        self._wire_before = self._engine.wire_seconds
        self._measure = measure
        #: Whether the engine broke in this step. The feedback is then again what it was before, unless ``torn``.
        self.abandoned = False
        #: Whether the engine broke between the decision that the step counts and its end.
        self.torn = False

    def add(self, group: Group, *, last: bool) -> None:
        """A group of tensors is complete: start what it needs."""
        if not self._begun:
            self._begun = True
            self._begin()
        observer = self._layers.observer
        if observer is not None and math.isfinite(observer.clip):
            x = group.buffer
            self._unclipped.append(group)
            self._norm = math.hypot(self._norm, _norm(x._values() if x.is_sparse else x))
            if last:
                self._clip(observer.clip)
                groups, self._unclipped = self._unclipped, []
                for at, clipped in enumerate(groups):
                    self._exchange(clipped, last=at == len(groups) - 1)
        else:
            self._exchange(group, last=last)

    def _begin(self) -> None:
        """Before anything is sent: the unit of the gradients, whether ranks agree, and what layers are sent with."""
        begin, parts = time.perf_counter(), self._parts
        parts.loss_scale.update(self._layers.states.values())
        if parts.rates is not None:
            self._layers.follow(parts.rates)
        facts = {**self._facts, "loss scale": str(parts.loss_scale.value)}
        if self.compressing and parts.controller.is_due(self._number):
            parts.agreement.now(facts, ADVICE)
            if parts.controller.decide(self._number) and self._layers.exchanges_pairs:
                self._ranks.open_pairs()
        else:  # nothing else of the step is sent before this has ended
            self._start(parts.agreement.job(facts, ADVICE))
        self._stats.sent_bytes += parts.agreement.nbytes
        self._stats.decide_s = time.perf_counter() - begin
        self._flagged = self._layers.stateful and self.compressing and self._layers.decided_early

    def _clip(self, threshold: float) -> None:
        """Local gradient clipping: what each of N ranks adds to the average, its gradient / N, at threshold / √N."""
        threshold *= math.sqrt(self._ranks.size)
        threshold *= self._parts.loss_scale.value or 1.0
        if threshold < self._norm < math.inf:
            for group in self._unclipped:
                group.buffer.mul_(threshold / self._norm)

    def _exchange(self, group: Group, *, last: bool) -> None:
        """Start what a group needs."""
        buffer, size, observer = group.buffer, self._ranks.size, self._layers.observer
        if buffer.is_sparse:
            if observer is not None and observer.momentum:
                raise UnsupportedError(
                    "dgc keeps momentum for every element, and this gradient is sparse; use a dense gradient "
                    "(sparse=False), or dgc with momentum=0"
                )
            self._layers.warn_once("sparse gradients travel uncompressed")
            nbytes = buffer._nnz() * buffer.element_size()
            self._stats.raw_bytes += allreduce_nbytes(nbytes, size)
            self._start(self._all_reduce(buffer, allreduce_nbytes(nbytes, size), check=self.compressing))
        else:
            nbytes = buffer.numel() * buffer.element_size()
            self._stats.raw_bytes += allreduce_nbytes(nbytes, size)
            real = buffer.dtype == group.parameters[0].vector.dtype  # complex gradients come as pairs of real numbers
            if real:
                self._parts.controller.look(
                    self._number, buffer, group.parameters, 1.0 / (self._parts.loss_scale.value or 1.0)
                )
            observed = self.compressing or self._layers.incremental  # by feedback, compressed or not
            if real and ((observed and not self._layers.plain) or observer is not None):
                self._encode(group)
            else:
                job = self._all_reduce(buffer, allreduce_nbytes(nbytes, size), check=self.compressing)
                self._start(job, group.deliver)
        self._send_small(last=last)
        for lane in sorted(self._waiting):
            if last or self._waiting[lane].first_nbytes >= ENOUGH_NBYTES:
                self._send(self._waiting.pop(lane))
        self._closed = last
        self._settle()

    def _encode(self, group: Group) -> None:
        """An exchange for every way in which layers of this group travel, or what the last group left waiting."""
        layers = self._layers
        lanes: dict[tuple[Way, str], list[tuple[Layer, Item]]] = {}
        for parameter, part, out in group.pieces():
            if parameter.compressed:
                layer = layers.of(parameter.name, self.codec) if self.compressing else layers.uncompressed()
                item = self._item(parameter.name, part, parameter.shape, layer, parameter.index, out)
                lanes.setdefault(_lane(layer, item), []).append((layer, item))
            else:
                self._is_small(part, parameter, part if out is None else out)
        for lane in sorted(lanes):
            self._waiting[lane] = self._encoded(lane[0], lanes[lane], self._waiting.get(lane))

    def _item(self, name: str, x: Tensor, shape: Shape, layer: Layer, index: int, out: Tensor | None = None) -> Item:
        return Item(name, x, shape, layer.codec, layer.feedback, self._seeds(index), index, out)

    def _encoded(self, way: Way, those: Sequence[tuple[Layer, Item]], waiting: Exchange | None = None) -> Exchange:
        peers, items = self._ranks, [item for _, item in those]
        if waiting is not None:
            work = waiting
            work.extend(items)
        else:
            work = exchange(way, items, peers, measure=self._measure, state=those[0][0].state)
        if waiting is None:
            self._exchanges.append(work)
        self._encoded_finite &= work.encode()
        return work

    def _send(self, work: Exchange) -> None:
        if not self._layers.stateful:  # nothing to commit: write the averages as soon as they are here
            self._start(work.job(), lambda: work.deliver(good=True))
        else:
            decides = not (self._flagged and work.decided_by_encoding)
            self._start(work.job(), lambda: self._arrived.append(work), decides=decides)

    def _send_small(self, *, last: bool) -> None:
        """What is small: one vector per dtype, averaged as it is or compressed, and another that goes before if it is
        long enough. With the last goes the news whether all that this rank has encoded is finite, if others wait for
        that.
        """
        due = sorted((v for v in self._small if last or (v.early and not self._lacking[v])), key=str)
        vectors = {vector: self._small.pop(vector) for vector in due}
        together = [vector for vector in due if vector.compressed]
        if together:
            number = len(self._layers.parameters)
            layer = self._layers.vector(self.codec) if self.compressing else self._layers.uncompressed()
            items = [
                (layer, self._item(vector.key, vectors[vector], vectors[vector].shape, layer, number + at))
                for at, vector in enumerate(together)
            ]
            work = self._encoded(layer.way, items)
            work.flag(self._encoded_finite)
            if not self._layers.stateful:
                self._start(work.job(), lambda: work.deliver(good=True))
            else:
                self._start(work.job(), lambda: self._arrived.append(work))
        elif last and self._flagged:
            flagged = [flat for vector, flat in vectors.items() if not vector.early]
            if not flagged:
                alone = Vector(torch.float32, compressed=False, early=False)
                flagged = [torch.zeros(1, device=self.results[0][1].device)]
                vectors[alone] = flagged[0]
            for flat in flagged:
                flat[-1] = 0.0 if self._encoded_finite else math.nan
        for vector, flat in vectors.items():
            if not vector.compressed:
                nbytes = allreduce_nbytes(flat.numel() * flat.element_size(), self._ranks.size)
                self._start(self._all_reduce(flat, nbytes, check=True))

    def _is_small(self, part: Tensor, parameter: Parameter, out: Tensor) -> None:
        vector = parameter.vector
        flat = self._small.get(vector)
        if flat is None:
            # Zero where a bucket did not come: all ranks have the same layout whatever the buckets.
            self._lacking[vector] = numel = self._layers.vectors[vector]
            numel += self._flagged and not vector.compressed and not vector.early
            flat = self._small[vector] = torch.zeros(numel, dtype=part.dtype, device=part.device)
        place = flat[parameter.at : parameter.at + part.numel()]
        place.copy_(part)
        self._lacking[vector] -= part.numel()
        self._small_back.append((parameter, out, place))

    def _seeds(self, index: int) -> Callable[[int], int]:
        seed, step = self._seed, self._number
        # 64 bits of (seed, step, parameter, rank); the kernels' hash does the mixing.
        return lambda rank: (seed * 0x9E3779B97F4A7C15 + (step << 32) + (index << 12) + rank) & 0xFFFFFFFFFFFFFFFF

    def _all_reduce(self, x: Tensor, nbytes: int, *, check: bool = False) -> Job:
        """Average in place, uncompressed."""
        peers = self._ranks
        x.div_(peers.size)
        if peers.size > 1:
            self._stats.sent_bytes += nbytes
            yield Wire(lambda: dist.all_reduce(x, group=peers.group, async_op=True))
        if check and self._layers.stateful:
            self._dense_finite &= bool((x._values() if x.is_sparse else x).isfinite().all())

    def _start(self, job: Job, then: Callable[[], None] | None = None, *, decides: bool = True) -> None:
        self._open_jobs += 1
        self._undecided_jobs += decides

        def done() -> None:
            if then is not None:
                then()
            self._open_jobs -= 1
            self._undecided_jobs -= decides
            self._settle()

        self._engine.start(job, done)

    def _settle(self) -> None:
        """Deliver what can be delivered, and end the step when that was all."""
        if not self._closed or self._undecided_jobs or self._delivered:
            return
        decided, good = self._good is not None, self._good
        if good is None:
            good = self._good = self._dense_finite and all(work.finite for work in self._exchanges)
        arrived, self._arrived = self._arrived, []
        for work in arrived:
            work.deliver(good)
        if not decided:  # what is small is here: it decides, too
            observer = self._layers.observer
            if observer is not None and good:
                dense = [(known.name, place) for known, _, place in self._small_back if not known.vector.compressed]
                observer.advance_uncompressed(dense)
            for _, part, place in self._small_back:
                part.copy_(place)
        if self._open_jobs:
            return
        self._delivered = True
        self._account()
        for future, buffer in self.results:
            future.set_result(buffer)

    def _account(self) -> None:
        stats = self._stats
        for work in self._exchanges:
            stats.sent_bytes += work.sent_nbytes
            stats.encode_s += work.encode_seconds
            stats.decode_s += work.decode_seconds
        stats.skipped = int(self._good is False)
        stats.wire_s = self._engine.wire_seconds - self._wire_before
        now = time.perf_counter()
        stats.waiting_s, stats.exchange_s = now - self.closed_at, now - self.opened_at
        norms = [n for work in self._exchanges for n in work.norms]
        encoded = sum(n.encoded for n in norms)
        if norms and math.isfinite(encoded):
            stats.relative_error = sum(n.lost for n in norms) / encoded if encoded else 0.0
        self._finished(stats)

    def abandon(self, error: BaseException) -> None:
        """The engine broke: put the feedback back, and tell those who wait for it."""
        if not self.abandoned:
            for work in self._exchanges:
                work.abandon()
            self.abandoned = True
            self.torn = self._good is True
        self._error = error
        for future, buffer in list(self.results):  # the caller's thread may be adding to it
            if future.done():
                continue
            if self.raises_later:
                fill_with_nan(buffer)
                future.set_result(buffer)
            else:
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))  # type: ignore[arg-type]

    def raise_error(self) -> None:
        """Raise what ended the exchange in this step, if anything did. In the caller's thread."""
        if self._error is not None:
            raise self._error


def fill_with_nan(buffer: Tensor) -> None:
    """What stands for averages where there are none: nobody can train on NaN unnoticed."""
    (buffer._values() if buffer.is_sparse else buffer).fill_(math.nan)


def _lane(layer: Layer, item: Item) -> tuple[Way, str]:
    """What may share an exchange: the way, and for sums the dtype on the wire."""
    return layer.way, str(layer.codec.sum_dtype(item.dtype)) if layer.way == "dense" else ""


def _norm(x: Tensor) -> float:
    """The norm, in float64 where float32 is too small for it."""
    norm = float(torch.linalg.vector_norm(x.float()))
    return norm if math.isfinite(norm) else math.sqrt(squared_norm(x))
