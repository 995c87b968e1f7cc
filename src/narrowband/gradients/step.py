"""One backward pass: its exchanges, what is small, and the decision whether the step counts. On the engine's thread."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from narrowband.codecs import Codec
from narrowband.codecs.base import squared_norm
from narrowband.collectives import Exchange, Item, LowRankReduce, Wire, allreduce_nbytes, exchange
from narrowband.errors import UnsupportedError
from narrowband.feedback import PowerSGD
from narrowband.gradients.layers import Vector
from narrowband.gradients.stats import StepStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from narrowband.codecs import Shape
    from narrowband.collectives import Job
    from narrowband.gradients.agreement import Facts
    from narrowband.gradients.ddp import GradientCompression
    from narrowband.gradients.layers import Layer, Parameter, Way

__all__ = ["Step"]

#: The relative error costs two passes over the gradients, so it is measured in one step of this many.
MEASURE_EVERY = 50

#: What several buckets have to send travels together until a rank sends so many bytes: 5 ms at 200 Mbit/s, about what
#: a collective among busy machines takes anyway, however little it carries.
ENOUGH_NBYTES = 1 << 17


class Step:
    """One backward pass.

    Args:
        handle: whose step it is.
        codec: what layers have in this step that have nothing of their own.
        compressing: whether it is compressed at all.
    """

    def __init__(self, handle: GradientCompression, codec: Codec, *, compressing: bool) -> None:
        self.handle = handle
        self.codec = codec
        self.compressing = compressing
        self._held: list[tuple[Tensor, Sequence[Tensor]]] = []  # buckets that wait for the norm of all
        self._held_norm = 0.0
        #: Of each bucket that DDP has handed over: its future, and the memory that the average goes to.
        self.results: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        #: What this rank is about to do, as far as it is known when backward begins.
        self.facts: Facts = {}
        #: Whether :meth:`raise_error` will be called when backward ends.
        self.raises = False
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
        self._wire_before = handle._engine.wire_seconds
        self._measure = compressing and (handle._total.relative_error is None or handle.step % MEASURE_EVERY == 0)
        #: Whether the engine broke in this step. The feedback is then again what it was before, unless ``torn``.
        self.abandoned = False
        #: Whether the engine broke between the decision that the step counts and its end.
        self.torn = False

    def add(self, buffer: Tensor, parameters: Sequence[Tensor], *, last: bool) -> None:
        """A bucket is complete: start what it needs."""
        handle = self.handle
        if not self._begun:
            self._begun = True
            begin = time.perf_counter()
            handle._begin_step(self)
            self._stats.decide_s = time.perf_counter() - begin
            self._flagged = handle.layers.stateful and self.compressing and handle.layers.decided_early
        method = handle.layers.method
        if method is not None and math.isfinite(method.clip):
            self._held.append((buffer, parameters))
            self._held_norm = math.hypot(self._held_norm, _norm(buffer._values() if buffer.is_sparse else buffer))
            if last:
                self._clip(method.clip)
                held, self._held = self._held, []
                for at, (held_buffer, held_parameters) in enumerate(held):
                    self._exchange(held_buffer, held_parameters, last=at == len(held) - 1)
        else:
            self._exchange(buffer, parameters, last=last)

    def agree(self, job: Job) -> None:
        """Let this job end before anything else of the step is sent."""
        self._start(job)

    def account_agreement(self, nbytes: int) -> None:
        self._stats.sent_bytes += nbytes

    def _clip(self, threshold: float) -> None:
        """Local gradient clipping: what each of N ranks adds to the average, its gradient / N, at threshold / √N."""
        threshold *= math.sqrt(self.handle._peers.size)
        threshold *= self.handle._loss_scale or 1.0
        if threshold < self._held_norm < math.inf:
            for buffer, _ in self._held:
                buffer.mul_(threshold / self._held_norm)

    def _exchange(self, buffer: Tensor, parameters: Sequence[Tensor], *, last: bool) -> None:
        """Start what a bucket needs."""
        handle = self.handle
        size, method = handle._peers.size, handle.layers.method
        if buffer.is_sparse:
            if method is not None and method.momentum:
                raise UnsupportedError(
                    "dgc keeps momentum for every element, and this gradient is sparse; use a dense gradient "
                    "(sparse=False), or dgc with momentum=0"
                )
            if not handle._said_sparse:
                handle._said_sparse = True
                handle.layers.warn("sparse gradients travel uncompressed")
            nbytes = buffer._nnz() * buffer.element_size()
            self._stats.raw_bytes += allreduce_nbytes(nbytes, size)
            self._start(self._all_reduce(buffer, allreduce_nbytes(nbytes, size), check=self.compressing))
        else:
            nbytes = buffer.numel() * buffer.element_size()
            self._stats.raw_bytes += allreduce_nbytes(nbytes, size)
            known = buffer.dtype == parameters[0].dtype  # complex gradients come as pairs of real numbers
            if known:
                handle._look(buffer, parameters)
            heard = self.compressing or handle.layers.incremental  # by feedback, compressed or not
            if known and ((heard and not handle.layers.plain) or method is not None):
                self._encode(buffer, parameters)
            else:
                self._start(self._all_reduce(buffer, allreduce_nbytes(nbytes, size), check=self.compressing))
        self._send_small(last=last)
        for lane in sorted(self._waiting):
            if last or self._waiting[lane].first_nbytes >= ENOUGH_NBYTES:
                self._send(self._waiting.pop(lane))
        self._closed = last
        self._settle()

    def _encode(self, buffer: Tensor, parameters: Sequence[Tensor]) -> None:
        """An exchange for every way in which layers of this bucket travel, or what the last bucket left waiting."""
        layers = self.handle.layers
        lanes: dict[tuple[Way, str], list[tuple[Layer, Item]]] = {}
        at = 0
        for p in parameters:
            known = layers.parameters[p]
            part = buffer[at : at + p.numel()]
            at += p.numel()
            if known.compressed:
                layer = layers.of(known.name, self.codec) if self.compressing else layers.uncompressed()
                item = self._item(known.name, part, known.shape, layer, known.index)
                lanes.setdefault(_lane(layer, item), []).append((layer, item))
            else:
                self._is_small(part, known)
        for lane in sorted(lanes):
            self._waiting[lane] = self._encoded(lane[0], lanes[lane], self._waiting.get(lane))

    def _item(self, name: str, x: Tensor, shape: Shape, layer: Layer, index: int) -> Item:
        return Item(name, x, shape, layer.codec, layer.feedback, self._seeds(index), index)

    def _encoded(self, way: Way, those: Sequence[tuple[Layer, Item]], waiting: Exchange | None = None) -> Exchange:
        peers, items = self.handle._peers, [item for _, item in those]
        if waiting is not None:
            work = waiting
            work.extend(items)
        elif way != "lowrank":
            work = exchange(way, items, peers, measure=self._measure)
        else:
            method = those[0][0].state
            assert isinstance(method, PowerSGD)
            work = LowRankReduce(items, peers, self._measure, method)
        if waiting is None:
            self._exchanges.append(work)
        self._encoded_finite &= work.encode()
        return work

    def _send(self, work: Exchange) -> None:
        if not self.handle.layers.stateful:  # nothing to commit: write the averages as soon as they are here
            self._start(work.job(), lambda: work.deliver(good=True))
        else:
            decides = not (self._flagged and work.decided_by_encoding)
            self._start(work.job(), lambda: self._arrived.append(work), decides=decides)

    def _send_small(self, *, last: bool) -> None:
        """What is small: one vector per dtype, averaged as it is or compressed, and another that goes before if it is
        long enough. With the last goes the news whether all that this rank has encoded is finite, if others wait for
        that.
        """
        handle = self.handle
        due = sorted((v for v in self._small if last or (v.early and not self._lacking[v])), key=str)
        vectors = {vector: self._small.pop(vector) for vector in due}
        together = [vector for vector in due if vector.compressed]
        if together:
            number = len(handle.layers.parameters)
            layer = handle.layers.vector(self.codec) if self.compressing else handle.layers.uncompressed()
            items = [
                (layer, self._item(vector.key, vectors[vector], vectors[vector].shape, layer, number + at))
                for at, vector in enumerate(together)
            ]
            work = self._encoded(layer.way, items)
            work.flag(self._encoded_finite)
            if not handle.layers.stateful:
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
                nbytes = allreduce_nbytes(flat.numel() * flat.element_size(), handle._peers.size)
                self._start(self._all_reduce(flat, nbytes, check=True))

    def _is_small(self, part: Tensor, known: Parameter) -> None:
        vector = known.vector
        flat = self._small.get(vector)
        if flat is None:
            # Zero where a bucket did not come: all ranks have the same layout whatever the buckets.
            self._lacking[vector] = numel = self.handle.layers.vectors[vector]
            numel += self._flagged and not vector.compressed and not vector.early
            flat = self._small[vector] = torch.zeros(numel, dtype=part.dtype, device=part.device)
        place = flat[known.at : known.at + part.numel()]
        place.copy_(part)
        self._lacking[vector] -= part.numel()
        self._small_back.append((known, part, place))

    def _seeds(self, index: int) -> Callable[[int], int]:
        seed, step = self.handle._seed, self.handle.step
        # 64 bits of (seed, step, parameter, rank); the kernels' hash does the mixing.
        return lambda rank: (seed * 0x9E3779B97F4A7C15 + (step << 32) + (index << 12) + rank) & 0xFFFFFFFFFFFFFFFF

    def _all_reduce(self, x: Tensor, nbytes: int, *, check: bool = False) -> Job:
        """Average in place, uncompressed."""
        peers = self.handle._peers
        x.div_(peers.size)
        if peers.size > 1:
            self._stats.sent_bytes += nbytes
            yield Wire(lambda: dist.all_reduce(x, group=peers.group, async_op=True))
        if check and self.handle.layers.stateful:
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

        self.handle._engine.start(job, done)

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
            method = self.handle.layers.method
            if method is not None and good:
                dense = [(known.name, place) for known, _, place in self._small_back if not known.vector.compressed]
                method.advance_uncompressed(dense)
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
        stats.wire_s = self.handle._engine.wire_seconds - self._wire_before
        now = time.perf_counter()
        stats.waiting_s, stats.exchange_s = now - self.closed_at, now - self.opened_at
        norms = [n for work in self._exchanges for n in work.norms]
        encoded = sum(n.encoded for n in norms)
        if norms and math.isfinite(encoded):
            stats.relative_error = sum(n.lost for n in norms) / encoded if encoded else 0.0
        self.handle._finished(stats)

    def abandon(self, error: BaseException) -> None:
        """The engine broke: put the feedback back, and let DDP hear why."""
        if not self.abandoned:
            for work in self._exchanges:
                work.abandon()
            self.abandoned = True
            self.torn = self._good is True
        self._error = error
        for future, buffer in list(self.results):  # DDP's thread may be adding to it
            if future.done():
                continue
            if self.raises:
                fill_with_nan(buffer)
                future.set_result(buffer)
            else:
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))  # type: ignore[arg-type]

    def raise_error(self) -> None:
        """Raise what ended the exchange in this step, if anything did. In DDP's thread, when backward ends."""
        if self._error is not None:
            raise self._error


def fill_with_nan(buffer: Tensor) -> None:
    """What DDP takes for averages where there are none: nobody can train on them unnoticed."""
    (buffer._values() if buffer.is_sparse else buffer).fill_(math.nan)


def _lane(layer: Layer, item: Item) -> tuple[Way, str]:
    """What may share an exchange: the way, and for sums the dtype on the wire."""
    return layer.way, str(layer.codec.sum_dtype(item.dtype)) if layer.way == "dense" else ""


def _norm(x: Tensor) -> float:
    """The norm, in float64 where float32 is too small for it."""
    norm = float(torch.linalg.vector_norm(x.float()))
    return norm if math.isfinite(norm) else math.sqrt(squared_norm(x))
