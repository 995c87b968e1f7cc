"""One step: its exchanges, its small parameters, and the decision to commit it or not. Runs on the engine's thread.

A step is one transaction. Feedback commits only if every tensor of the step is finite on every rank, and with feedback
no average is written before that is known. With ``all_gather`` it is known early: the all-reduce of small parameters
carries one more element, a flag, which a rank sets to NaN if it has encoded anything that is not finite. So averages
are written while the last payload is still on the wire. Without feedback, each average is written when it arrives.

On a GPU the device can decide this without the host, which would have to synchronize for each answer
(:meth:`Step.go_ahead`). Feedback is then committed as tensors are encoded. The device notes what is not finite
(:class:`~narrowband.kernels.Findings`), and the notes travel in the same flags. Before averages are written, the device
rolls feedback back if a flag is set, and then fills all averages with NaN.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from narrowband import kernels
from narrowband.averaging.parameters import Parameter, Vector
from narrowband.averaging.stats import StepStats
from narrowband.codecs import Codec
from narrowband.codecs.base import squared_norms
from narrowband.collectives import Exchange, Operand, Transfer, all_gather_nbytes, all_reduce_nbytes, shares_of
from narrowband.errors import UnsupportedError
from narrowband.kernels import Findings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor

    from narrowband.averaging.agreement import Agreement, Facts
    from narrowband.averaging.controller import Controller
    from narrowband.averaging.layers import Layer, Layers
    from narrowband.averaging.loss_scale import LossScale, Scaled
    from narrowband.codecs import Shape
    from narrowband.collectives import Engine, Job, Peers
    from narrowband.feedback.base import Norms

__all__ = ["ADVICE", "Group", "Parts", "Step", "fill_with_nan"]

#: The advice in the error that ranks raise if they disagree about a step.
ADVICE = (
    "Call pause, resume, set_epoch, set_layers, load_state_dict and remove on all ranks, between the same two steps, "
    "with the same arguments. To recover, restart all ranks from a checkpoint"
)

#: Types of devices that run asynchronously to the host.
AHEAD = {"cuda"}

#: The relative error costs two passes over the gradients, so it is measured in one step of this many.
MEASURE_EVERY = 50


@dataclass(frozen=True, eq=False)
class Group:
    """Tensors that are ready at the same time, end to end in one flat buffer.

    Attributes:
        buffer: flat, or one sparse gradient. The step owns the buffer until the averages have been written.
        parameters: the parameters whose gradients are in the buffer, in order.
        out: a flat tensor of the same length for the averages; None: they are written into ``buffer``.
        absent: names of parameters of which this rank is known to have no gradient. The buffer has zeros for them.
    """

    buffer: Tensor
    parameters: Sequence[Parameter]
    out: Tensor | None = None
    absent: Collection[str] = ()

    def pieces(self) -> Iterator[tuple[Parameter, Tensor, Tensor | None]]:
        """Yield each parameter with its part of the buffer and its part of ``out`` (or None)."""
        at = 0
        for parameter in self.parameters:
            span = slice(at, at := at + parameter.shape.numel())
            yield parameter, self.buffer[span], None if self.out is None else self.out[span]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors for the norm: each parameter's part, or the whole buffer if it is sparse or complex."""
        x = self.buffer
        if x.is_sparse:
            yield x._values()
        elif self.parameters and x.dtype == self.parameters[0].vector.dtype:
            yield from (part for _, part, _ in self.pieces())
        else:
            yield x

    def averages(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield each parameter with its average. Call when the averages have been written."""
        for parameter, part, out in self.pieces():
            yield parameter, part if out is None else out

    def deliver(self) -> None:
        """Copy the averages from the buffer to ``out``, if there is one."""
        if self.out is not None:
            self.out.copy_(self.buffer)


@dataclass(frozen=True, eq=False)
class Parts:
    """What all steps of one handle share.

    Attributes:
        layers: the model's layers, and what they are compressed with.
        peers: the ranks that average.
        engine: runs the exchanges.
        agreement: compares what ranks are about to do.
        controller: lets a policy change the plan.
        loss_scale: the unit of the gradients.
        message_nbytes: payloads of several groups are collected into one message until a rank has this many bytes.
        rates: the optimizer, if the feedback needs its learning rates.
        owners: the optimizer's own tensor of each parameter, if shards of the parameters are averaged.
        inside: the ranks that hold the shards of one gradient, if feedback clips by the norm of the whole gradient.
        advice: what the error says if ranks disagree about a step.
    """

    layers: Layers
    peers: Peers
    engine: Engine
    agreement: Agreement
    controller: Controller
    loss_scale: LossScale
    message_nbytes: int
    rates: torch.optim.Optimizer | None
    owners: Mapping[str, Tensor]
    inside: dist.ProcessGroup | None
    advice: str


#: Operands of one kind may share an exchange: collective's name, :meth:`~narrowband.collectives.Exchange.kind_of`.
_Kind = tuple[str, str]


class Step:
    """One step.

    Args:
        parts: what all steps share.
        number: of the step, from 0.
        codec: the codec of layers that the plan does not list.
        compressing: whether anything is compressed in this step.
        measure: whether the relative error is measured.
        seed: of the run.
        thrown: names of parameters whose last average was thrown away.
        keeps: whether averages of this step may be thrown away, too, so that what feedback holds now is kept.
        facts: what this rank is about to do, to compare with other ranks.
        finished: called when all averages have been written, before any future is resolved. Its arguments: statistics
            of the step, bytes by layer, norms by layer (if measured), and the device's findings (or None).
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
        thrown: Sequence[str],
        keeps: bool,
        facts: Facts,
        finished: Callable[[StepStats, Mapping[str, int], Mapping[str, Norms], Findings | None], None],
    ) -> None:
        self._parts = parts
        self._layers, self._peers, self._engine = parts.layers, parts.peers, parts.engine
        self._number, self._seed, self._facts, self._finished = number, seed, facts, finished
        self._thrown, self._keeps = thrown, keeps
        self.codec = codec
        self.compressing = compressing
        self._unclipped: list[Group] = []  # held back until the norm of all groups is known
        self._dense: list[Group] = []  # groups that are neither sparse nor complex
        #: The future of each group, and the memory that its averages go to.
        self.results: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        #: Whether the caller will call :meth:`raise_error` later. Futures then get NaN instead of an error.
        self.raises_later = False
        self._error: BaseException | None = None
        self.opened_at = time.perf_counter()
        self.closed_at = 0.0
        self._closed = False
        self._begun = False
        self._fits = True  # whether the residuals of all ranks are in range in the unit of this step's gradients
        self._delivered = False
        self._open_jobs = 0
        self._undecided_jobs = 0  # open jobs that may still show that the step must not be committed
        self._encoded_finite = True
        self._flagged = False  # whether small parameters carry the flag that all encoded tensors are finite
        self._good: bool | None = None  # whether the step is committed, once that is known
        self._exchanges: list[Exchange] = []
        self._waiting: dict[_Kind, Exchange] = {}  # exchanges below message_nbytes, not sent yet
        self._arrived: list[Exchange] = []
        self._small: dict[Vector, Tensor] = {}  # vectors of small parameters, until they are sent
        self._missing: dict[Vector, int] = {}  # how many elements of each vector are still to come
        self._small_back: list[tuple[Parameter, Tensor, Tensor]] = []
        self._uncompressed_finite = True
        self._stats = StepStats(steps=1)
        self._sent: dict[str, int] = {}  # bytes by parameter
        self._wire_before = self._engine.wire_seconds
        self._measure = measure
        #: The device's notes on what is not finite or damaged; None: the host decides about the commit.
        self.findings: Findings | None = None
        self._goes_ahead = False
        #: Whether a gradient of zeros counts as a gradient. If not, it may stand for none.
        self.zeros_count = False
        #: Whether the engine broke in this step. Feedback has been rolled back, unless ``torn``.
        self.abandoned = False
        #: Whether the engine broke between the decision to commit the step and its end.
        self.torn = False

    def go_ahead(self) -> None:
        """Let the device decide whether the step is committed, if possible. Call before the first :meth:`add`.

        Not possible with feedback that needs the decision on the host (``goes_ahead`` of
        :class:`~narrowband.averaging.layers.Layers`), nor in a step that measures the relative error, if a collective
        needs the norms on the host.
        """
        device, layers = self._layers.parameters.device, self._layers
        measures = self._measure and not layers.exact and not all(kind.measures_late for kind in layers.collectives)
        self._goes_ahead = device.type in AHEAD and not measures and layers.goes_ahead

    def add(self, group: Group, *, last: bool) -> None:
        """Start averaging a complete group of tensors."""
        if not self._begun:
            self._begun = True
            self._begin()
        if not self._fits:  # as if the gradient had overflowed
            fill_with_nan(group.buffer)
        observer = self._layers.observer
        if observer is not None and math.isfinite(observer.clip):
            self._unclipped.append(group)
            if last:
                self._clip(observer.clip)
                groups, self._unclipped = self._unclipped, []
                for at, clipped in enumerate(groups):
                    self._exchange(clipped, last=at == len(groups) - 1)
        else:
            self._exchange(group, last=last)

    def _begin(self) -> None:
        """Do what precedes all messages: take back averages that were thrown away, rescale residuals, compare facts
        with other ranks, let the policy decide.
        """
        begin, parts = time.perf_counter(), self._parts
        if self._goes_ahead:
            self.findings = Findings(self._layers.parameters.device)  # allocated on the engine's stream
        self._layers.unused.take_back(self._thrown, self._layers.state_of_parameter)
        rises = parts.loss_scale.rises() and self._layers.stateful and self._number > 0  # before, nothing is held
        if parts.rates is not None:
            observer = self._layers.observer
            assert observer is not None
            observer.set_learning_rates(self._layers.parameters.learning_rates(parts.rates, parts.owners))
        facts = {**self._facts, "loss scale": str(parts.loss_scale.now)}
        due = self.compressing and parts.controller.is_due(self._number)
        if due or rises:
            parts.agreement.now(facts, parts.advice)
        else:  # no other message of the step is sent before this job has ended
            self._start(parts.agreement.job(facts, parts.advice))
        self._rescale(rises=rises)
        if due and parts.controller.decide(self._number):
            self._layers.open_pairs(self._peers)
        self._stats.sent_bytes += parts.agreement.nbytes
        self._stats.decide_s = time.perf_counter() - begin
        early = any(kind.decided_by_encoding for kind in self._layers.collectives)
        self._flagged = self._layers.stateful and self.compressing and early

    def _rescale(self, *, rises: bool) -> None:
        """Convert residuals to the unit of this step's gradients, on all ranks or on none: otherwise what all ranks
        hold alike would be rounded differently, and a state that is saved now would have two loss scales.

        Args:
            rises: whether the loss scale has risen, so that residuals may overflow.
        """
        parts = self._parts
        held: list[Scaled] = [*self._layers.states.values(), self._layers.unused]
        if rises:
            self._fits = parts.agreement.everywhere(holds=parts.loss_scale.fits(held))
            self._stats.sent_bytes += parts.agreement.nbytes
        if self._fits:
            parts.loss_scale.update(held)

    def _clip(self, threshold: float) -> None:
        """Clip gradients locally (DGC): each of N ranks clips its part of the average, gradient / N, at threshold / √N.

        If the ranks of a node hold shards of a gradient, a node counts as one of the paper's ranks: N is the number of
        nodes, and the norm is that of all shards.
        """
        tensors = [x for group in self._unclipped for x in group.tensors()]
        square = _squared_norm(tensors, self._unclipped[0].buffer.device)
        if self._parts.inside is not None:
            dist.all_reduce(square, group=self._parts.inside)
        threshold *= math.sqrt(self._peers.size)
        threshold *= self._parts.loss_scale.now
        ratio = threshold / square.sqrt()  # NaN or zero where the norm is not finite
        factor = torch.where((ratio < 1.0) & (ratio > 0.0), ratio, 1.0)
        if square.device.type in AHEAD or float(factor) < 1.0:
            for group in self._unclipped:
                (group.buffer._values() if group.buffer.is_sparse else group.buffer).mul_(factor)

    def _exchange(self, group: Group, *, last: bool) -> None:
        """Encode a group, or start its uncompressed average. Send what is due, and at the last group all the rest."""
        buffer, observer = group.buffer, self._layers.observer
        if self._keeps:
            for parameter in group.parameters:
                state = self._layers.state_of_parameter(parameter.name)
                self._layers.unused.keep(parameter.name, state, empty=self._number == 0)
        if not group.parameters:  # this rank has no part of the bucket
            pass
        elif buffer.is_sparse:
            if observer is not None and observer.momentum:
                raise UnsupportedError(
                    "dgc keeps momentum for every element, but the gradient of "
                    f"{', '.join(parameter.name for parameter in group.parameters)} is sparse; use a dense gradient "
                    "(sparse=False), or dgc with momentum=0"
                )
            self._layers.warn_once("sparse gradients are sent uncompressed")
            self._start(self._all_reduce(buffer, group.parameters, check=self.compressing))
        else:
            self._stats.raw_bytes += all_reduce_nbytes(buffer.nbytes, self._peers.size)
            real = buffer.dtype == group.parameters[0].vector.dtype  # complex gradients come as pairs of real numbers
            if real:
                self._dense.append(group)
            observed = self.compressing or self._layers.incremental  # feedback needs it, compressed or not
            if real and ((observed and not self._layers.exact) or observer is not None):
                self._encode(group)
            else:
                self._start(self._all_reduce(buffer, group.parameters, check=self.compressing), group.deliver)
        self._send_small(last=last)
        for kind in sorted(self._waiting):
            if last or self._waiting[kind].first_nbytes >= self._parts.message_nbytes:
                self._send(self._waiting.pop(kind))
        self._closed = last
        self._deliver_if_decided()

    def _encode(self, group: Group) -> None:
        """Encode layers, one exchange per kind. An exchange that earlier groups left waiting is extended."""
        layers = self._layers
        kinds: dict[_Kind, list[tuple[Layer, Operand]]] = {}
        small: list[tuple[Tensor, Tensor]] = []
        for parameter, part, out in group.pieces():
            if parameter.compressed:
                layer = layers.layer(parameter.name, self.codec) if self.compressing else layers.uncompressed()
                operand = self._operand(parameter.name, part, parameter.shape, layer, parameter.index, out)
                operand.absent = parameter.name in group.absent
                kind = layer.collective.name, layer.collective.kind_of(layer.codec, operand.dtype)
                kinds.setdefault(kind, []).append((layer, operand))
            else:
                small.append(self._place_of_small(part, parameter, part if out is None else out))
        _copy_all(small)
        for kind in sorted(kinds):
            layer, operands = kinds[kind][0][0], [operand for _, operand in kinds[kind]]
            if kind in self._waiting:
                self._waiting[kind].extend(operands)
            else:
                self._waiting[kind] = self._new_exchange(layer, operands)
            self._encoded_finite &= self._waiting[kind].encode()

    def _operand(
        self, name: str, x: Tensor, shape: Shape, layer: Layer, index: int, out: Tensor | None = None
    ) -> Operand:
        return Operand(name, x, shape, layer.codec, layer.feedback, self._seeds(index), index, out)

    def _new_exchange(self, layer: Layer, operands: Sequence[Operand]) -> Exchange:
        exchange = layer.collective(operands, self._peers, measure=self._measure, state=layer.state)
        exchange.findings = self.findings
        exchange.zeros_count = self.zeros_count
        self._exchanges.append(exchange)
        return exchange

    def _send(self, exchange: Exchange) -> None:
        decides = not (self._flagged and exchange.decided_by_encoding)
        self._start(exchange.job(), functools.partial(self._arrive, exchange), decides=decides)

    def _send_small(self, *, last: bool) -> None:
        """Send small parameters, as one vector per dtype, uncompressed or fused. Early vectors are sent when they are
        complete, all others at the last group. If exchanges depend on it, vectors of the last group carry the flag that
        all tensors which this rank encoded are finite.
        """
        due = sorted((v for v in self._small if last or (v.early and not self._missing[v])), key=str)
        vectors = {vector: self._small.pop(vector) for vector in due}
        fused = [vector for vector in due if vector.compressed]
        if fused:
            self._send_fused({vector: vectors[vector] for vector in fused})
        elif last and self._flagged:
            flagged = [flat for vector, flat in vectors.items() if not vector.early]
            if not flagged:
                alone = Vector(torch.float32, compressed=False, early=False)
                flagged = [torch.zeros(1, dtype=torch.float32, device=self.results[0][1].device)]
                vectors[alone] = flagged[0]
            for flat in flagged:
                flat[-1:].fill_(0.0 if self._encoded_finite else math.nan)
            if self.findings is not None:
                kernels.poison_all_if(self.findings.place(Findings.OWN), [flat[-1:] for flat in flagged])
        for vector, flat in vectors.items():
            if not vector.compressed:
                self._start(self._all_reduce(flat, check=True))

    def _send_fused(self, vectors: Mapping[Vector, Tensor]) -> None:
        """Compress and send vectors of small parameters."""
        layer = self._layers.vector(self.codec) if self.compressing else self._layers.uncompressed()
        first = len(self._layers.parameters.by_tensor)  # after the indices of layers
        kinds: dict[str, list[Operand]] = {}
        for at, (vector, flat) in enumerate(vectors.items()):
            operand = self._operand(vector.key, flat, flat.shape, layer, first + at)
            kinds.setdefault(layer.collective.kind_of(layer.codec, operand.dtype), []).append(operand)
        for _, operands in sorted(kinds.items()):
            exchange = self._new_exchange(layer, operands)
            exchange.encode()
            exchange.flag(self._encoded_finite)
            self._start(exchange.job(), functools.partial(self._arrive, exchange))

    def _arrive(self, exchange: Exchange) -> None:
        """Take an exchange that has arrived: with feedback, its averages wait for the decision to commit the step."""
        if self._layers.stateful:
            self._arrived.append(exchange)
        else:
            exchange.deliver(good=True)

    def _place_of_small(self, part: Tensor, parameter: Parameter, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return the place of a small parameter in its vector, and the gradient to copy there."""
        vector = parameter.vector
        flat = self._small.get(vector)
        if flat is None:
            # Zeros where no group arrives: the layout is the same on all ranks, whatever the groups.
            self._missing[vector] = numel = self._layers.parameters.vectors[vector]
            numel += self._flagged and not vector.compressed and not vector.early
            flat = self._small[vector] = torch.zeros(numel, dtype=part.dtype, device=part.device)
        place = flat[parameter.at : parameter.at + part.numel()]
        self._missing[vector] -= part.numel()
        self._small_back.append((parameter, out, place))
        return place, part

    def _seeds(self, index: int) -> Callable[[int], int]:
        seed, step = self._seed, self._number
        # 64 bits of (seed, step, parameter, rank); the kernels' hash does the mixing.
        return lambda rank: (seed * 0x9E3779B97F4A7C15 + (step << 32) + (index << 12) + rank) & 0xFFFFFFFFFFFFFFFF

    def _all_reduce(self, x: Tensor, of: Sequence[Parameter] = (), *, check: bool = False) -> Job:
        """Average in place, uncompressed. Backends all-gather the indices and values of sparse tensors.

        Args:
            x: the tensor.
            of: the parameters whose gradients it holds, for statistics.
            check: whether an average that is not finite prevents the commit.
        """
        peers, sent = self._peers, 0
        # Not in place if sparse: backward may still read the values' memory. Those of an embedding's gradient are the
        # gradient of its output.
        own = x / peers.size if x.is_sparse else x.div_(peers.size)
        if peers.size > 1:
            if x.is_sparse:
                own = own.coalesce()  # as the backend does
                sent = all_gather_nbytes(own.indices().nbytes + own.values().nbytes, peers.size)
                self._stats.raw_bytes += sent
            else:
                sent = all_reduce_nbytes(own.nbytes, peers.size)
        self._stats.sent_bytes += sent
        for parameter, share in zip(of, shares_of(sent, [each.shape.numel() for each in of]), strict=True):
            self._sent[parameter.name] = share
        if peers.size > 1:
            yield Transfer(lambda: dist.all_reduce(own, group=peers.group, async_op=True))
        if x.is_sparse:
            x.copy_(own)  # takes its memory
        if check and self._layers.stateful:
            finite = (x._values() if x.is_sparse else x).isfinite().all()
            if self.findings is None:
                self._uncompressed_finite &= bool(finite)
            else:
                self.findings.note(Findings.ANY, ~finite)

    def _start(self, job: Job, then: Callable[[], None] | None = None, *, decides: bool = True) -> None:
        self._open_jobs += 1
        self._undecided_jobs += decides

        def done() -> None:
            if then is not None:
                then()
            self._open_jobs -= 1
            self._undecided_jobs -= decides
            self._deliver_if_decided()

        self._engine.start(job, done)

    def _deliver_if_decided(self) -> None:
        """If no open job can change the decision any more, deliver all exchanges that have arrived. End the step when
        all jobs have ended.
        """
        if not self._closed or self._undecided_jobs or self._delivered:
            return
        decided, good = self._good is not None, self._good
        if good is None:
            good = self._good = self._uncompressed_finite and all(exchange.finite for exchange in self._exchanges)
        arrived, self._arrived = self._arrived, []
        for exchange in arrived:
            exchange.deliver(good)
        if not decided:  # small parameters have arrived, since the decision waits for them
            observer = self._layers.observer
            if observer is not None and good:
                averages = [(p.name, place) for p, _, place in self._small_back if not p.vector.compressed]
                bad = None if self.findings is None else self.findings.place(Findings.ANY)
                observer.advance_uncompressed(averages, bad)
            _copy_all([(part, place) for _, part, place in self._small_back])
        if self._open_jobs:
            return
        self._delivered = True
        delivered = [group.buffer if group.out is None else group.out for group in self._dense]
        if self.findings is not None:
            kernels.poison_all_if(self.findings.of_all, delivered)  # the host raises for damage in a later step
        elif not good and self._layers.stateful:  # also what is finite: feedback holds it still
            for average in delivered:
                fill_with_nan(average)
        self._look()
        self._account()
        for future, buffer in self.results:
            future.set_result(buffer)

    def _look(self) -> None:
        """Show the layers' averages to the policy."""
        begin = time.perf_counter()
        averages = (average for group in self._dense for average in group.averages() if average[0].compressed)
        self._parts.controller.look(averages, 1.0 / self._parts.loss_scale.now, self._number)
        self._stats.decide_s += time.perf_counter() - begin

    def _account(self) -> None:
        stats = self._stats
        for exchange in self._exchanges:
            stats.sent_bytes += exchange.sent_nbytes
            self._sent |= exchange.sent
            stats.encode_s += exchange.encode_seconds
            stats.decode_s += exchange.decode_seconds
        stats.skipped = int(self._good is False)
        stats.wire_s = self._engine.wire_seconds - self._wire_before
        now = time.perf_counter()
        stats.waiting_s, stats.exchange_s = now - self.closed_at, now - self.opened_at
        norms = {key: own for exchange in self._exchanges for key, own in exchange.norms.items()}
        self._finished(stats, self._sent, norms, self.findings)

    def abandon(self, error: BaseException) -> None:
        """Roll feedback back after the engine broke."""
        if not self.abandoned:
            for exchange in self._exchanges:
                exchange.abandon()
            self.abandoned = True
            self.torn = self._good is True
        self._error = error

    def resolve_abandoned(self) -> None:
        """Resolve all futures of a step that was abandoned, with NaN or with its error."""
        error = self._error
        for future, buffer in list(self.results):  # a copy: the caller's thread may append
            if future.done():
                continue
            if self.raises_later:
                fill_with_nan(buffer)
                future.set_result(buffer)
            else:
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))  # type: ignore[arg-type]

    def raise_error(self) -> None:
        """Raise the error that stopped the exchange in this step, if any. Runs in the caller's thread."""
        if self._error is not None:
            raise self._error


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, of the same dtype, with few kernel launches on a GPU."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [what for _, what in pairs])


def fill_with_nan(buffer: Tensor) -> None:
    """Fill with NaN what should hold averages and does not, so that training on it is noticed."""
    (buffer._values() if buffer.is_sparse else buffer).fill_(math.nan)


def _squared_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the squared norm of all tensors together, one float64 on their device.

    It is the same bit for bit in any order and grouping of the tensors, because a resumed run has other DDP buckets.
    """
    if device.type in AHEAD and tensors:  # in few launches, and nobody waits for it
        squares = torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square_()
    else:
        squares = torch.tensor(squared_norms(tensors), dtype=torch.float64, device=device)
    return squares.sort().values.sum()
