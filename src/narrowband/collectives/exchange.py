"""Three ways to average a set of tensors over the ranks, each holding one payload per tensor.

===================  ===================================================  =====================================
collective           what happens                                         bytes a rank sends (payload P, N ranks)
===================  ===================================================  =====================================
``dense``            all-reduce of payloads that add up                   2·(N−1)/N · P
``gather``           all-gather; every rank decodes all N, accumulating   (N−1) · P
``scatter_reduce``   all-to-all of chunks; each rank decodes and sums     2·(N−1)/N · P, whatever N
                     its chunk, encodes the mean; all-gather
===================  ===================================================  =====================================

Each way is a generator for :class:`~narrowband.collectives.engine.Engine` and ends with everything received but the
tensors as they were: :meth:`Exchange.deliver` then writes the averages, when the caller knows whether the step is good,
or what feedback makes of them (:meth:`~narrowband.feedback.Feedback.deliver`). A trailer of four bytes in every payload
says whether its sender saw inf or NaN, so all ranks agree on that with no further collective.

Ranks decode in rank order, so all of them compute the same bits, and so does a resumed run however its buckets are laid
out.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
import torch.distributed as dist

from narrowband import kernels
from narrowband.codecs import Codec, Shape
from narrowband.codecs.base import dims, numel_of, squared_norm
from narrowband.collectives.engine import Lane, Wire, Worker
from narrowband.errors import UnsupportedError
from narrowband.feedback.base import Norms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.collectives.engine import Job, Pending
    from narrowband.feedback import Feedback, State

__all__ = ["COLLECTIVES", "Collective", "Exchange", "Item", "Peers", "allreduce_nbytes", "choose"]

Collective = Literal["dense", "gather", "scatter_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

#: The trailer of a payload: one byte that says "not finite", and three that keep what follows aligned.
TRAILER = 4
#: What a second phase costs, in bytes that could have been sent meanwhile (0.5 ms at 1 Gbit/s).
PHASE_NBYTES = 1 << 16


@dataclass(eq=False)
class Peers:
    """The ranks that average together.

    Args:
        group: None: the default group.
        pairs: the thread that sends from rank to rank, one after the other; None: the backend's all-to-all is used.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    pairs: Worker | None = None

    def open_pairs(self) -> None:
        """Have a thread for exchanges from rank to rank, where the backend has no better way."""
        if self.pairs is None and dist.get_backend(self.group) == "gloo":
            self.pairs = Worker("narrowband-pairs")
            weakref.finalize(self, self.pairs.close)

    def close(self) -> None:
        """End the thread."""
        if self.pairs is not None:
            self.pairs.close()


@dataclass(eq=False)
class Item:
    """One tensor to average.

    Args:
        key: names its feedback state.
        x: flat, contiguous: the gradient. Until the end of the step its content belongs to the exchange.
        shape: the shape the codec should see.
        codec: what to send it with.
        feedback: what to do about what the codec loses.
        seed: rank → seed of that rank's encoding in this step.
        index: among the tensors of the model, whatever exchange it is in.
        out: where the average goes, flat, contiguous, of the dtype of ``x``; None: into ``x``.
    """

    key: str
    x: Tensor
    shape: Shape
    codec: Codec
    feedback: Feedback | None
    seed: Callable[[int], int]
    index: int = 0
    out: Tensor | None = None
    #: Whether the feedback took part in this step. It does not where the gradient is exactly zero: there this rank
    #: sends nothing and keeps its residual, so that a layer no rank used (whose average DDP ignores) loses nothing.
    #: Where feedback is incremental it always does: the change to zero has to be sent.
    compensated: bool = field(default=False, init=False)
    #: Whether the feedback has taken in already what the payload does not say.
    committed: bool = field(default=False, init=False)

    @property
    def incremental(self) -> bool:
        """Whether payloads add to what all ranks hold, see :class:`~narrowband.feedback.State`."""
        return self.feedback is not None and self.feedback.incremental

    @property
    def dtype(self) -> torch.dtype:
        """Of what is encoded and decoded."""
        return torch.float32 if self.incremental else self.x.dtype

    @property
    def average(self) -> Tensor:
        """Where the average goes."""
        return self.x if self.out is None else self.out

    def seed_of(self, rank: int) -> int:
        return self.seed(0 if self.codec.shared_seed else rank)


def allreduce_nbytes(nbytes: int, size: int) -> int:
    """What each rank sends in a ring all-reduce of ``nbytes``."""
    return 2 * (size - 1) * nbytes // size


def choose(codec: Codec, nbytes: int, size: int, feedback: State | None = None) -> Collective:
    """The cheapest way for a codec whose payloads take ``nbytes`` together, among ``size`` ranks, by bytes sent.

    Where feedback is incremental, of those ways that add no error of their own.
    """
    if _adds_up(codec, feedback):
        return "dense"
    incremental = feedback is not None and feedback.incremental
    if not incremental and codec.requantizes and (size - 1) * nbytes > allreduce_nbytes(nbytes, size) + PHASE_NBYTES:
        return "scatter_reduce"
    return "gather"


def check(codec: Codec, collective: Collective, feedback: State | None = None) -> None:
    """Raise :class:`UnsupportedError` where a forced collective cannot carry a codec, or not with this feedback."""
    if feedback is not None and feedback.incremental:
        if collective == "scatter_reduce":
            raise UnsupportedError(
                f"collective='scatter_reduce' encodes sums again, and with {feedback.name} that error would stay and "
                "grow; use 'gather' or 'auto'"
            )
        if collective == "dense" and codec.sum_dtype(torch.float32) is not None and not _adds_up(codec, feedback):
            raise UnsupportedError(
                f"collective='dense' rounds sums of {codec} to 16 bits, and with {feedback.name} that error would stay "
                "and grow; use 'gather' or 'auto'"
            )
    if collective == "dense" and codec.sum_dtype(torch.float32) is None:
        raise UnsupportedError(
            f"payloads of {codec} cannot be added, so collective='dense' cannot carry them; use 'auto'"
        )
    if collective == "scatter_reduce" and not codec.requantizes:
        raise UnsupportedError(
            f"collective='scatter_reduce' encodes sums again, and {codec} would drop most of a sum; "
            "use 'gather' or 'auto'"
        )


def _adds_up(codec: Codec, feedback: State | None) -> bool:
    """Whether payloads may be summed on their way: incremental feedback needs sums in float32."""
    dtype = codec.sum_dtype(torch.float32)
    return dtype == torch.float32 if feedback is not None and feedback.incremental else dtype is not None


class Exchange(ABC):
    """What the three ways have in common: encoding, and the end of a step."""

    def __init__(self, items: Sequence[Item], peers: Peers, measure: bool, state: State | None = None) -> None:
        self.items: list[Item] = []
        self.peers = peers
        self.measure = measure
        self.sent_nbytes = 0
        self.encode_seconds = 0.0
        self.decode_seconds = 0.0
        #: After the job: whether every rank's tensors were finite.
        self.finite = True
        #: After :meth:`deliver`, with ``measure``: one entry per item.
        self.norms: list[Norms] = []
        self._own: list[Tensor] = []
        self._mine_finite = True
        self._settled = False
        self._new = list(items)

    #: Whether, once every rank's tensors are known to be finite, nothing can turn out otherwise.
    decided_by_encoding: ClassVar[bool] = False

    def extend(self, items: Sequence[Item]) -> None:
        """Take these along; :meth:`encode` them before the job."""
        self._new += items

    def encode(self) -> bool:
        """What comes before the first collective: compensate, encode what is new. Whether this rank's tensors are
        finite.
        """
        begin = time.perf_counter()
        items, self._new = self._new, []
        self.items += items
        self._encode_all(items)
        self.encode_seconds += time.perf_counter() - begin
        return self._mine_finite

    @property
    @abstractmethod
    def first_nbytes(self) -> int:
        """Bytes that a rank will send in the first collective, as things stand: equal on all ranks. Where sizes depend
        on the data, the most that it can be.
        """

    def flag(self, finite: bool) -> None:
        """Let this exchange's trailer also say whether something else is finite, that its sender answers for."""
        self._mine_finite &= finite

    @abstractmethod
    def _encode_all(self, items: Sequence[Item]) -> None:
        """Encode these, and note in ``_mine_finite`` whether all are finite."""

    @abstractmethod
    def job(self) -> Job:
        """The generator to run after :meth:`encode`."""

    @abstractmethod
    def _write(self, good: bool) -> None:
        """Write the averages into the items."""

    @contextmanager
    def _mean_of(self, item: Item, good: bool) -> Iterator[Tensor]:
        """Memory of the item's shape to decode the mean into; it then becomes what is delivered.

        A change of what all ranks hold is no gradient, so in a step that does not count NaN is delivered in its place.
        """
        out = item.average
        mean = out if item.dtype == out.dtype else torch.empty(out.numel(), device=out.device)
        yield mean.view(dims(item.shape))
        if item.feedback is not None and good:
            item.feedback.deliver(item.key, mean)
        elif item.incremental:
            mean.fill_(torch.nan)
        if mean is not out:
            out.copy_(mean)

    def deliver(self, good: bool) -> None:
        """Write the averages; commit the feedback if the whole step is good on all ranks, and restore it if not."""
        begin = time.perf_counter()
        self._settle(good)
        if self.finite:
            self._write(good)
        else:
            for item in self.items:
                item.average.fill_(torch.nan)
        self._own.clear()
        self.decode_seconds += time.perf_counter() - begin

    def abandon(self) -> None:
        """The step broke off: restore the feedback, leave the tensors."""
        if not self._settled:
            self._settle(good=False)

    def _settle(self, good: bool) -> None:
        self._settled = True
        for item, payload in zip(self.items, self._own, strict=False):
            seed = item.seed_of(self.peers.rank)
            if item.compensated:
                assert item.feedback is not None
                if not good:
                    item.feedback.roll_back(item.key, item.x)
                    self.norms.clear()
                elif not item.committed:
                    self._commit(item, payload)
            elif self.measure and good:
                lost = item.x.float().clone()
                before = squared_norm(lost)
                sent = torch.empty(dims(item.shape), dtype=item.dtype, device=lost.device)
                lost.sub_(self._codec(item).decode(payload, sent, seed=seed).view(-1))
                self.norms.append(Norms(before, squared_norm(lost)))

    def _commit(self, item: Item, payload: Tensor) -> None:
        assert item.feedback is not None
        norms = item.feedback.commit(
            item.key,
            item.x,
            self._codec(item),
            payload,
            shape=item.shape,
            seed=item.seed_of(self.peers.rank),
            measure=self.measure,
        )
        item.committed = True
        if norms:
            self.norms.append(norms)

    def _codec(self, item: Item) -> Codec:
        return item.codec

    def _encode(self, item: Item, out: Tensor | None = None) -> tuple[bool, Tensor]:
        """(whether it is finite, its payload), compensated by the residual."""
        seed = item.seed_of(self.peers.rank)
        codec = self._codec(item)
        # At first also where it is zero: a chunk's error in scatter_reduce needs a residual to go into.
        if item.feedback is not None and (
            item.incremental or item.feedback.residual(item.key) is None or _any_nonzero(item.x)
        ):
            early = item.feedback.can_roll_back(item.x)  # commit while it is in the caches and others still compute
            fused = early and not self.measure
            finite, payload = item.feedback.encode(
                item.key, item.x, codec, shape=item.shape, seed=seed, out=out, commit=fused
            )
            item.compensated = True
            item.committed = fused and finite
            if early and finite and not fused:
                self._commit(item, payload)
        else:
            finite = kernels.all_finite(item.x.float())
            payload = codec.encode(item.x.view(dims(item.shape)), seed=seed, out=out)
        self._own.append(payload)
        return finite, payload


def _any_nonzero(x: Tensor) -> bool:
    return not kernels.all_zero(x) if x.dtype == torch.float32 else bool(x.any())


def _end_to_end(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _spans(sizes: Sequence[int]) -> list[slice]:
    """Consecutive slices of these sizes."""
    spans, at = [], 0
    for size in sizes:
        spans.append(slice(at, at + size))
        at += size
    return spans


class Dense(Exchange):
    """All-reduce of payloads that add up (``none``, ``fp16``, ``bf16``, ``randomk``)."""

    def __init__(self, items: Sequence[Item], peers: Peers, measure: bool, state: State | None = None) -> None:
        super().__init__(items, peers, measure, state)
        self._payloads: list[Tensor] = []  # of all items that were encoded at once

    def _encode_all(self, items: Sequence[Item]) -> None:
        sizes = [item.codec.payload_nbytes(item.shape, item.dtype) for item in items]
        payload = torch.empty(sum(sizes), dtype=torch.uint8, device=items[0].x.device)
        for item, span in zip(items, _spans(sizes), strict=True):
            finite, own = self._encode(item, payload[span])
            self._mine_finite &= finite
            if not finite:
                own.fill_(0xFF)  # NaN in every dtype; the codec need not have picked what was not finite
        self._payloads.append(payload)

    @property
    def first_nbytes(self) -> int:
        return allreduce_nbytes(sum(payload.numel() for payload in self._payloads), self.peers.size)

    def job(self) -> Job:
        self._payload = _end_to_end(self._payloads)
        # Not whether feedback took part in this step, which differs between ranks: all must come to the same answer.
        self._stateful = any(item.feedback is not None for item in self.items)
        if (self.measure or self._stateful) and len(self._payloads) == 1:
            self._own = [payload.clone() for payload in self._own]  # the all-reduce works in place
        wire_dtype = self.items[0].codec.sum_dtype(self.items[0].dtype)
        assert wire_dtype is not None
        self._values = self._payload.view(wire_dtype)
        self._values.div_(self.peers.size)  # before the sum, which might leave the range of 16 bits
        if self.peers.size > 1:
            self.sent_nbytes += allreduce_nbytes(self._payload.numel(), self.peers.size)
            yield Wire(lambda: dist.all_reduce(self._values, group=self.peers.group, async_op=True))
        if self._stateful:  # inf and NaN survive the sum, and every rank holds the same sum
            self.finite = kernels.all_finite(self._values.float())

    def _write(self, good: bool) -> None:
        spans = _spans([payload.numel() for payload in self._own])
        for item, span in zip(self.items, spans, strict=True):
            with self._mean_of(item, good) as mean:
                item.codec.decode(self._payload[span], mean, seed=item.seed_of(self.peers.rank))


class Gather(Exchange):
    """All-gather of payloads; every rank decodes all of them, one after the other, into the same memory."""

    decided_by_encoding = True

    def __init__(self, items: Sequence[Item], peers: Peers, measure: bool, state: State | None = None) -> None:
        super().__init__(items, peers, measure, state)
        self._fixed = True  # whether all sizes are known before
        self._payloads: list[Tensor] = []  # of all items that were encoded at once; each with room for a trailer
        self._first_nbytes = TRAILER

    def _encode_all(self, items: Sequence[Item]) -> None:
        sizes = [item.codec.payload_nbytes(item.shape, item.dtype) for item in items]
        self._first_nbytes += sum(sizes)
        self._fixed &= all(item.codec.fixed_size for item in items)
        places: Sequence[Tensor | None] = [None] * len(items)
        if self._fixed:
            payload = torch.empty(sum(sizes) + TRAILER, dtype=torch.uint8, device=items[0].x.device)
            self._payloads.append(payload)
            places = [payload[span] for span in _spans(sizes)]
        for item, place in zip(items, places, strict=True):
            self._mine_finite &= self._encode(item, place)[0]

    @property
    def first_nbytes(self) -> int:
        return (self.peers.size - 1) * self._first_nbytes

    def job(self) -> Job:
        size, device = self.peers.size, self.items[0].x.device
        if self._fixed:
            *others, last = self._payloads
            payload = _end_to_end([*(other[:-TRAILER] for other in others), last])
            capacity = payload.numel() - TRAILER
            self._spans = [_spans([own.numel() for own in self._own])] * size
        else:
            # Sizes depend on the data: they go first, and the longest payload sets the size of all.
            mine = torch.tensor([p.numel() for p in self._own], dtype=torch.int64, device=device)
            table = torch.empty(size, len(self.items), dtype=torch.int64, device=device)
            yield Wire(lambda: _all_gather(table, mine, self.peers), later=["group"])
            self._spans = [_spans(row) for row in table.tolist()]
            capacity = max(spans[-1].stop for spans in self._spans)
            self.sent_nbytes += (size - 1) * 8 * len(self.items)
            payload = torch.zeros(capacity + TRAILER, dtype=torch.uint8, device=device)
            torch.cat(self._own, out=payload[: self._spans[self.peers.rank][-1].stop])
        payload[capacity:] = 0 if self._mine_finite else 1
        received = torch.empty(size, capacity + TRAILER, dtype=torch.uint8, device=device)
        self.sent_nbytes += (size - 1) * payload.numel()
        yield Wire(lambda: _all_gather(received, payload, self.peers))
        self.finite = not bool(received[:, capacity].any())
        self._received = received

    def _write(self, good: bool) -> None:
        size = self.peers.size
        for i, item in enumerate(self.items):
            if self._fixed:
                payloads: Sequence[Tensor] | Tensor = self._received[:, self._spans[0][i]]
            else:
                payloads = [self._received[rank, self._spans[rank][i]] for rank in range(size)]
            seeds = [item.seed_of(rank) for rank in range(size)]
            with self._mean_of(item, good) as mean:
                item.codec.decode_mean(payloads, mean, seeds=seeds)
        del self._received


@dataclass(frozen=True)
class _Chunked(Codec):
    """A codec applied to each of N chunks of a tensor; its payload is the chunks' payloads end to end."""

    codec: Codec
    chunks: int
    turn: int = 0  # by how many ranks the chunks' owners are shifted

    name = "chunked"

    def cut(self, numel: int) -> list[slice]:
        """Where the chunk of each rank lies, on the codec's granularity; some may be empty.

        Chunks differ by one grain at most, and which ranks have the longer ones turns from tensor to tensor: what
        travels in the second phase is as long as the longest sum of a rank's chunks.
        """
        grain = self.codec.granularity
        grains = -(-numel // grain)
        at = [min(j * grains // self.chunks * grain, numel) for j in range(self.chunks + 1)]
        return [slice(at[j], at[j + 1]) for j in ((r + self.turn) % self.chunks for r in range(self.chunks))]

    def sizes(self, numel: int) -> list[int]:
        """Payload bytes of each chunk. Chunks travel as float32 says, whatever the gradient: their mean is float32."""
        return [self.codec.payload_nbytes(cut.stop - cut.start) for cut in self.cut(numel)]

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return sum(self.sizes(numel_of(shape)))

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        numel = numel_of(shape)
        pieces = zip(self.cut(numel), _spans(self.sizes(numel)), strict=True)
        return all(self.codec.is_finite(payload[span], cut.stop - cut.start) for cut, span in pieces)

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        for j, (cut, span) in enumerate(zip(self.cut(x.numel()), _spans(self.sizes(x.numel())), strict=True)):
            self.codec.encode(x[cut], seed=seed + j, out=out[span])

    def _decode(
        self, payload: Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seed: int, weight: float, accumulate: bool
    ) -> None:
        for j, (cut, span) in enumerate(zip(self.cut(out.numel()), _spans(self.sizes(out.numel())), strict=True)):
            self.codec.decode(payload[span], out[cut], seed=seed + j, weight=weight, accumulate=accumulate)


class ScatterReduce(Exchange):
    """Each rank averages one chunk of every tensor, and sends that average to all.

    What encoding the average loses is residual of the rank that did it: with feedback, N times that error goes into its
    residual, as one rank's residual counts 1/N in a later average.
    """

    def _codec(self, item: Item) -> _Chunked:
        return _Chunked(item.codec, self.peers.size, item.index)

    def _encode_all(self, items: Sequence[Item]) -> None:
        for item in items:
            self._mine_finite &= self._encode(item)[0]

    @property
    def first_nbytes(self) -> int:
        size = self.peers.size
        return (size - 1) * sum(payload.numel() + TRAILER for payload in self._own) // size

    def job(self) -> Job:
        begin = time.perf_counter()
        size, rank, device = self.peers.size, self.peers.rank, self.items[0].x.device
        sizes = [self._codec(item).sizes(item.x.numel()) for item in self.items]
        columns = [[row[j] for row in sizes] for j in range(size)]
        send_splits = [sum(column) + TRAILER for column in columns]
        send = torch.empty(sum(send_splits), dtype=torch.uint8, device=device)
        pieces = [_spans(row) for row in sizes]
        at = 0
        for j in range(size):
            for own, spans in zip(self._own, pieces, strict=True):
                part = own[spans[j]]
                send[at : at + part.numel()] = part
                at += part.numel()
            send[at : at + TRAILER] = 0 if self._mine_finite else 1
            at += TRAILER
        received = torch.empty(size, send_splits[rank], dtype=torch.uint8, device=device)
        self.encode_seconds += time.perf_counter() - begin
        self.sent_nbytes += send.numel() - send_splits[rank]
        lane: Lane = "group" if self.peers.pairs is None else "pairs"
        splits = [send_splits[rank]] * size, send_splits
        yield Wire(lambda: _all_to_all(received, send, *splits, self.peers), lane, later=["group"])
        begin = time.perf_counter()
        finite = not bool(received[:, -1].any())
        widest = max(send_splits)
        second = torch.zeros(widest, dtype=torch.uint8, device=device)
        self._errors: list[Tensor] = []
        for item, span in zip(self.items, _spans(columns[rank]), strict=True):
            cut = self._codec(item).cut(item.x.numel())[rank]
            mean = torch.empty(cut.stop - cut.start, device=device)
            item.codec.decode_mean(received[:, span], mean, seeds=[0] * size)
            finite &= kernels.all_finite(mean)
            seed = item.seed_of(rank) ^ 0x5BD1E995  # another draw than the first encoding's
            item.codec.encode(mean, seed=seed, out=second[span])
            if item.feedback is not None:
                self._errors.append(item.codec.decode(second[span], mean, seed=seed, weight=-1.0, accumulate=True))
        second[-TRAILER:] = 0 if finite else 1
        self._received = torch.empty(size, widest, dtype=torch.uint8, device=device)
        self.decode_seconds += time.perf_counter() - begin
        self.sent_nbytes += (size - 1) * widest
        self._columns = columns
        yield Wire(lambda: _all_gather(self._received, second, self.peers))
        self.finite = not bool(self._received[:, -1].any())

    def _settle(self, good: bool) -> None:
        super()._settle(good)
        if good:
            for item, error in zip((i for i in self.items if i.feedback is not None), self._errors, strict=True):
                assert item.feedback is not None
                residual = item.feedback.residual(item.key)
                if residual is not None:
                    residual[self._codec(item).cut(item.x.numel())[self.peers.rank]].add_(error, alpha=self.peers.size)

    def _write(self, good: bool) -> None:
        spans = [_spans(column) for column in self._columns]
        for i, item in enumerate(self.items):
            with self._mean_of(item, good) as mean:
                for j, cut in enumerate(self._codec(item).cut(item.x.numel())):
                    item.codec.decode(self._received[j, spans[j][i]], mean.view(-1)[cut])
        del self._received


# ---- torch.distributed -----------------------------------------------------------------------------------------------

#: Named all_gather_into_tensor before PyTorch 2.13.
all_gather_single: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
all_to_all_single: Callable[..., dist.Work | None] = dist.all_to_all_single


def _all_gather(out: Tensor, x: Tensor, peers: Peers) -> dist.Work | None:
    if peers.size == 1:
        out.view(-1).copy_(x)
        return None
    return all_gather_single(out.view(-1), x, group=peers.group, async_op=True)


def _all_to_all(out: Tensor, x: Tensor, out_splits: list[int], splits: list[int], peers: Peers) -> Pending | None:
    if peers.size == 1:
        out.view(-1).copy_(x)
        return None
    if peers.pairs is not None:
        into = [out.view(-1)[span] for span in _spans(out_splits)]
        return _Rotation(into, [x[span] for span in _spans(splits)], peers, peers.pairs)
    return all_to_all_single(out.view(-1), x, out_splits, splits, group=peers.group, async_op=True)


class _Rotation:
    """All-to-all in N − 1 steps, in each of which everyone sends to one rank and receives from one.

    For gloo, whose own sends to all at once: N − 1 senders meet at each receiver and get two thirds of a link through
    where this gets nine tenths. A single message of gloo's has no future, so a thread waits for it; one per handle, so
    that a rotation ends before the next begins, and meets its peers in their order.
    """

    def __init__(self, into: Sequence[Tensor], parts: Sequence[Tensor], peers: Peers, worker: Worker) -> None:
        self._future: torch.futures.Future[None] = torch.futures.Future()
        into[peers.rank].copy_(parts[peers.rank])
        worker.post(lambda: self._run(into, parts, peers))

    def _run(self, into: Sequence[Tensor], parts: Sequence[Tensor], peers: Peers) -> None:
        try:
            for step in range(1, peers.size):
                to, source = (peers.rank + step) % peers.size, (peers.rank - step) % peers.size
                receiving = dist.irecv(into[source], group=peers.group, group_src=source)
                sending = dist.isend(parts[to], group=peers.group, group_dst=to)
                for work in (receiving, sending):
                    if work is not None:
                        work.wait()
        except Exception as error:
            self._future.set_exception(error)  # type: ignore[arg-type]
        else:
            self._future.set_result(None)

    def get_future(self) -> torch.futures.Future[None]:
        return self._future

    def wait(self) -> None:
        self._future.wait()
