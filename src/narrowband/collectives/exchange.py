"""The base class of all collectives that average a set of tensors over ranks.

An :class:`Exchange` is one run of a collective for some tensors. It encodes them, then runs as a generator in
:class:`~narrowband.collectives.engine.Engine` while payloads travel. When the generator ends, everything has been
received, and the tensors are still unchanged. :meth:`Exchange.deliver` then writes the averages, once the caller knows
whether the step counts: whether all gradients were finite on all ranks.

Each collective is a class in a file of its own. Class members say what it costs, which codecs it can carry, and when it
is known whether a step counts. Every rank decodes payloads in rank order, so all ranks compute the same bits; so does a
resumed run, however the tensors are grouped.

A trailer of four bytes in every payload says whether its sender saw inf or NaN, so that all ranks agree on this without
a further collective.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from narrowband import kernels
from narrowband.codecs.base import dims, squared_norm_late
from narrowband.collectives.traffic import shares_of
from narrowband.feedback.base import Encoded, Norms
from narrowband.kernels import Findings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from narrowband.codecs import Codec, Shape
    from narrowband.collectives.engine import Job
    from narrowband.collectives.operand import Operand
    from narrowband.collectives.peers import Peers
    from narrowband.feedback import Feedback, State

__all__ = ["TRAILER", "Exchange", "Sent", "alike", "give_means", "runs_behind", "take_means"]

#: Types of devices that run asynchronously to the host, which waits for their answers.
ASYNCHRONOUS = {"cuda"}

#: Bytes of the trailer of a payload: one flag for "not finite", and three that keep the next payload aligned.
TRAILER = 4


class Sent(NamedTuple):
    """A layer in a message: its codec, its shape, and its index among the model's parameters."""

    codec: Codec
    shape: Shape
    place: int


def runs_behind(x: Tensor) -> bool:
    """Return whether a tensor's device runs asynchronously to the host."""
    return x.device.type in ASYNCHRONOUS


def alike(operands: Sequence[Operand], without: Collection[str] = ()) -> list[list[int]]:
    """Group the indices of operands that have the same codec, feedback and dtype; order is kept.

    Operands whose keys are in ``without`` have groups of their own.
    """
    kinds: dict[tuple[Codec, int, torch.dtype, bool], list[int]] = {}
    for at, operand in enumerate(operands):
        kind = operand.codec, id(operand.feedback), operand.x.dtype, operand.key in without
        kinds.setdefault(kind, []).append(at)
    return [*kinds.values()]


def take_means(operands: Sequence[Operand]) -> list[Tensor] | None:
    """Return float32 memory for the mean of each operand, or None if means of these have to be decoded one by one.

    It is the average's own memory, if that is float32. Otherwise :func:`give_means` copies the means there.
    """
    if not all(operand.x.numel() for operand in operands):
        return None
    averages = [operand.average for operand in operands]
    widens = operands[0].codec.widens or operands[0].incremental
    if not all(average.dtype == torch.float32 for average in averages) and not widens:
        return None
    wide = torch.float32
    return [x if x.dtype == wide else torch.empty(x.numel(), dtype=wide, device=x.device) for x in averages]


def give_means(operands: Sequence[Operand], means: Sequence[Tensor], good: bool, findings: Findings | None) -> None:
    """Deliver means of operands with one feedback, in the memory of :func:`take_means`.

    With incremental feedback a mean is a change of the tensor that all ranks hold, not a gradient. So in a step that
    does not count, NaN is delivered in its place.
    """
    incremental, feedback = operands[0].incremental, operands[0].feedback
    if incremental and findings is not None:
        kernels.clear_all_if(findings.place(Findings.ANY), means)  # what all ranks hold stays as it is
    if feedback is not None and good:
        feedback.deliver_all([each.key for each in operands], means)
    elif incremental:
        for mean in means:
            mean.fill_(torch.nan)
    narrow = [(each.average, mean) for each, mean in zip(operands, means, strict=True) if mean is not each.average]
    if narrow:
        torch._foreach_copy_([average for average, _ in narrow], [mean for _, mean in narrow])


class Exchange(ABC):
    """Average some tensors by one collective.

    Args:
        operands: the tensors.
        peers: the ranks.
        measure: whether to measure the relative error of compression.
        state: the feedback state that requires this collective, if one does.

    Example:
        >>> from narrowband.collectives import choose
        >>> chosen = choose(nb.codec("topk:density=0.01"), 40_000, 4)  # bytes of the payload; ranks
        >>> chosen.name, chosen.traffic_nbytes(40_000, 4)
        ('all_gather', 120000)
    """

    #: The name by which users ask for it: ``collective=…``.
    name: ClassVar[str]
    #: The time that ranks wait between the phases of this collective, as the bytes that could be sent in that time.
    overhead_nbytes: ClassVar[int] = 0
    #: Factor on this collective's traffic when the cheapest is chosen: above 1 where it delivers less of what is sent.
    handicap: ClassVar[float] = 1.0
    #: Whether a step is known to be good as soon as every rank's tensors are known to be finite.
    decided_by_encoding: ClassVar[bool] = False
    #: Whether each rank encodes means again, and its feedback keeps their error, see :meth:`State.owner_error`.
    has_owners: ClassVar[bool] = False
    #: Whether feedback takes all that is encoded as sent. Otherwise it learns at the end what was delivered, see
    #: :meth:`Feedback.commit_arrived`.
    delivers_all: ClassVar[bool] = True
    #: Where kernels record what is not finite, on the device, if the host is not to wait for them. Set it before the
    #: first :meth:`encode`. Then the exchange takes everything as finite and commits; feedback is rolled back on the
    #: device, and the caller writes NaN into the averages of a bad step.
    findings: Findings | None = None
    #: Whether a gradient of zeros counts as a gradient. If not, it may stand for none: the rank then sends zeros, and
    #: keeps its residual.
    zeros_count: bool = False

    #: Whether it can encode all tensors of a call before it learns whether they are finite.
    asks_late: ClassVar[bool] = False
    #: Whether it can measure the error of compression where the device decides; see :attr:`findings`.
    measures_late: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def traffic_nbytes(nbytes: int, size: int) -> int:
        """Return the bytes that each of ``size`` ranks sends, where every rank's payload takes ``nbytes``."""

    @classmethod
    def layer_traffic_nbytes(cls, codec: Codec, shape: Shape, nbytes: int, size: int) -> int:  # noqa: ARG003
        """As :meth:`traffic_nbytes` for one layer; more precise where codec and shape say more than ``nbytes``."""
        return cls.traffic_nbytes(nbytes, size)

    @classmethod
    @abstractmethod
    def message_nbytes(cls, layers: Sequence[Sent], size: int, state: State | None) -> tuple[float, ...]:
        """Return the exact bytes that a rank sends in each collective of a message, where no size depends on the data.

        Args:
            layers: the layers whose payloads are in the message; their gradients are float32.
            size: number of ranks.
            state: the layers' feedback.

        Returns:
            One number per collective: the mean over ranks and, where PowerSGD alternates between factors, over steps.
        """

    @classmethod
    def first_of(cls, layers: Sequence[Sent], size: int, state: State | None) -> float:
        """Return what :attr:`first_nbytes` will be for these layers."""
        return cls.message_nbytes(layers, size, state)[0]

    @staticmethod
    @abstractmethod
    def obstacle(codec: Codec, feedback: State | None) -> str | None:
        """Return why this collective cannot carry a codec's payloads with this feedback (an error text), or None."""

    @staticmethod
    def uses_pairs(size: int) -> bool:  # noqa: ARG004
        """Return whether it uses point-to-point messages among ``size`` ranks, see :attr:`Peers.pairs`."""
        return False

    @staticmethod
    def goes_ahead(codec: Codec) -> bool:  # noqa: ARG004
        """Return whether it can carry a codec's payloads before the host knows what is finite; see :attr:`findings`."""
        return False

    @staticmethod
    def kind_of(codec: Codec, dtype: torch.dtype) -> str:  # noqa: ARG004
        """Return a key: tensors with equal keys can share an exchange."""
        return ""

    def __init__(self, operands: Sequence[Operand], peers: Peers, *, measure: bool, state: State | None = None) -> None:
        self.operands: list[Operand] = []
        self.peers = peers
        self.measure = measure
        self.state = state
        #: Operand key → bytes that this rank has sent for it, including its share of trailers and the like.
        self.sent: dict[str, int] = {}
        self.encode_seconds = 0.0
        self.decode_seconds = 0.0
        #: Valid after the job: whether every rank's tensors were finite.
        self.finite = True
        #: Operand key → norms, valid after :meth:`deliver` if ``measure``. Operands that took no part have none. Where
        #: the device decides, they are on the device, and count only if the step does.
        self.norms: dict[str, Norms] = {}
        self._payloads: list[Tensor] = []  # this rank's payloads, one per operand
        self._locally_finite = True
        self._zeros: set[str] = set()  # keys of operands whose state stays as it is, because they are zero
        self._decided = False
        self._not_encoded = list(operands)

    def extend(self, operands: Sequence[Operand]) -> None:
        """Add tensors to the exchange. Call :meth:`encode` again before the job starts."""
        self._not_encoded += operands

    def encode(self) -> bool:
        """Compensate and encode the tensors added since the last call. Call it before the job starts.

        Returns:
            Whether all of this rank's tensors so far are finite.
        """
        begin = time.perf_counter()
        operands, self._not_encoded = self._not_encoded, []
        self.operands += operands
        some = [each for each in operands if each.feedback is not None and each.feedback.holds(each.key)]
        some = [each for each in some if not each.incremental]
        self._zeros.update(each.key for each in some if each.absent)
        if not self.zeros_count:
            some = [each for each in some if not each.absent]
            zeros = kernels.all_zero_each([each.x for each in some])
            self._zeros.update(each.key for each, zero in zip(some, zeros, strict=True) if zero)
        asked = Findings(operands[0].x.device) if self._asks_once(operands) else None
        with self._noting(Findings.OWN) if asked is None else asked.noting(Findings.OWN):
            self._encode_all(operands)
        if asked is not None:
            self._locally_finite &= not any(asked.places.tolist())
        if self.findings is not None and not self._locally_finite:  # found on the host
            self.findings.note(Findings.OWN, bad=True)
        self.encode_seconds += time.perf_counter() - begin
        return self._locally_finite

    def _asks_once(self, operands: Sequence[Operand]) -> bool:
        """Return whether the host learns once, after all of these operands, whether they are finite. Otherwise it waits
        for the device at each.
        """
        if self.findings is not None or self.measure or not self.asks_late or not operands:
            return False
        if not runs_behind(operands[0].x):
            return False
        return all(operand.feedback.answers_late for operand in operands if operand.feedback is not None)

    @property
    @abstractmethod
    def first_nbytes(self) -> int:
        """Bytes that a rank will send in the first collective for the operands encoded so far; equal on all ranks.

        Where sizes depend on the data, this is an upper bound.
        """

    def _noting(self, what: int) -> AbstractContextManager[None]:
        """Let kernels record non-finite values in :attr:`findings`, if the host is not to wait for them."""
        return nullcontext() if self.findings is None else self.findings.noting(what)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent."""
        return sum(self.sent.values())

    def _count(self, nbytes: int, parts: Iterable[tuple[Operand, int]]) -> None:
        """Record that this rank sends ``nbytes``, divided among operands in proportion to these sizes."""
        operands, sizes = zip(*parts, strict=True)
        for operand, share in zip(operands, shares_of(nbytes, sizes), strict=True):
            self.sent[operand.key] = self.sent.get(operand.key, 0) + share

    def flag(self, finite: bool) -> None:
        """Let this exchange also report whether other tensors of this rank are finite: in its trailer, if it has one.
        Call after :meth:`encode`, and before :meth:`job`.
        """
        self._locally_finite &= finite

    def _encode_all(self, operands: Sequence[Operand]) -> None:
        """Encode these operands, and clear ``_locally_finite`` if one is not finite."""
        if self.findings is None:
            for operand in operands:
                self._locally_finite &= self._encode(operand)[0]
            return
        sizes = [self._codec(operand).payload_nbytes(operand.shape) for operand in operands]
        together = torch.empty(sum(sizes), dtype=torch.uint8, device=operands[0].x.device)
        self._encode_ahead(operands, list(torch.split(together, sizes)))

    def _encode_ahead(self, operands: Sequence[Operand], places: Sequence[Tensor]) -> None:
        """Encode without waiting for the device to say what is finite.

        Launching kernels takes most of the time here, so one call encodes several operands where the codec can.
        """
        for own in alike(operands, self._zeros):
            some, outs = [operands[at] for at in own], [places[at] for at in own]
            codec, feedback = self._codec(some[0]), None if some[0].key in self._zeros else some[0].feedback
            several: dict[str, Any] = {"seeds": [each.seed_of(self.peers.rank) for each in some], "outs": outs}
            xs, wide = [each.x for each in some], some[0].x.dtype == torch.float32
            together = feedback is not None and wide and feedback.encodes_all(codec)
            if feedback is not None and together and not (self.measure and self.delivers_all):
                for each in some:
                    self._claim(each)
                encode = feedback.encode_all if self.delivers_all else feedback.encode_for_arrivals
                finite = [encode([each.key for each in some], xs, codec, **several)] * len(some)
                for each in some:
                    each.compensated, each.committed = True, self.delivers_all and not each.incremental
            elif feedback is None and codec.encodes_several and (wide or codec.widens):
                finite = [codec.encode_all([x.float() for x in xs], **several)] * len(some)
            else:
                finite = [self._encoded(each, place)[0] for each, place in zip(some, outs, strict=True)]
            self._locally_finite &= all(finite)
            for each, place, well in zip(some, outs, finite, strict=True):
                if not well:  # this loop knew at once, and left no payload: send zeros
                    zeros = torch.zeros(dims(each.shape), dtype=each.dtype, device=each.x.device)
                    codec.encode(zeros, out=place)
        self._payloads += places

    def _trailer(self, device: torch.device) -> Tensor:
        """Return the trailer of this rank's payloads: zeros if everything that it has encoded is finite."""
        if self.findings is None:
            return torch.full((TRAILER,), 0 if self._locally_finite else 1, dtype=torch.uint8, device=device)
        return self.findings.place(Findings.OWN).view(torch.uint8)

    def _claim(self, operand: Operand) -> None:
        """Move an owner error that this collective does not use into the residual."""
        if not self.has_owners:
            assert operand.feedback is not None
            operand.feedback.reclaim_owner_error(operand.key)

    @abstractmethod
    def job(self) -> Job:
        """Return the generator that the engine runs after :meth:`encode`."""

    @abstractmethod
    def _write(self, good: bool) -> None:
        """Write the averages."""

    @contextmanager
    def _mean_of(self, operand: Operand, good: bool) -> Iterator[Tensor]:
        """Yield memory of the operand's shape to decode the mean into; on exit, deliver that mean."""
        out = operand.average
        mean = out if operand.dtype == out.dtype else torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        yield mean.view(dims(operand.shape))
        give_means([operand], [mean], good, self.findings)

    def deliver(self, good: bool) -> None:
        """Write the averages; commit the feedback if the whole step is good on all ranks, else roll it back."""
        begin = time.perf_counter()
        self._decided = True
        self._finish_feedback(good)
        if self.finite:
            with self._noting(Findings.ANY):
                self._write(good)
        else:
            for operand in self.operands:
                operand.average.fill_(torch.nan)
        self._payloads.clear()
        self.decode_seconds += time.perf_counter() - begin

    def abandon(self) -> None:
        """Roll the feedback back after a step that was broken off; the tensors stay as they are."""
        if not self._decided:
            self._decided = True
            self._finish_feedback(good=False)

    def _finish_feedback(self, good: bool) -> None:
        """Commit or roll back every operand's feedback."""
        if good and self.findings is not None:
            self._decide_ahead(self.findings.place(Findings.ANY))
            return
        for operand, payload in zip(self.operands, self._payloads, strict=False):
            if operand.compensated:
                assert operand.feedback is not None
                if not good:
                    operand.feedback.roll_back(operand.key, operand.x)
                    self.norms.clear()
                elif not operand.committed:
                    self._commit(operand, payload)
            elif self.measure and good:
                self.norms[operand.key] = self._measured(operand, payload)

    def _measured(self, operand: Operand, payload: Tensor) -> Norms:
        """Return the norms of an operand that was encoded without feedback, and of what its payload lacks."""
        lost, seed = operand.x.float().clone(), operand.seed_of(self.peers.rank)
        before = squared_norm_late(lost)
        sent = torch.empty(dims(operand.shape), dtype=operand.dtype, device=lost.device)
        lost.sub_(self._codec(operand).decode(payload, sent, seed=seed).view(-1))
        return Norms(before, squared_norm_late(lost))

    def _decide_ahead(self, bad: Tensor) -> None:
        """Roll feedback back that is already committed, and commit the rest, as ``bad``, on the device, says of the
        step.
        """
        by_state: dict[tuple[int, bool], list[Encoded]] = {}
        states: dict[int, Feedback] = {}
        for operand, payload in zip(self.operands, self._payloads, strict=False):
            if operand.compensated:
                assert operand.feedback is not None
                state, seed = operand.feedback, operand.seed_of(self.peers.rank)
                sent = Encoded(operand.key, operand.x, self._codec(operand), payload, operand.shape, seed)
                states[id(state)] = state
                by_state.setdefault((id(state), state.can_roll_back(operand.x)), []).append(sent)
            elif self.measure:
                with self._noting(Findings.ANY):
                    self.norms[operand.key] = self._measured(operand, payload)
        for (at, returns), some in by_state.items():
            with self._noting(Findings.ANY):
                if returns:
                    states[at].roll_back_if(bad, [each.key for each in some], [each.x for each in some])
                else:
                    norms = states[at].commit_unless(bad, some, measure=self.measure)
                    self.norms.update(zip((each.key for each in some), norms, strict=False))

    def _commit(self, operand: Operand, payload: Tensor) -> None:
        assert operand.feedback is not None
        norms = operand.feedback.commit(
            operand.key,
            operand.x,
            self._codec(operand),
            payload,
            shape=operand.shape,
            seed=operand.seed_of(self.peers.rank),
            measure=self.measure,
        )
        operand.committed = True
        if norms:
            self.norms[operand.key] = norms

    def _commits_early(self, operand: Operand) -> bool:
        """Return whether the operand's feedback commits before the step is decided, and rolls back if it has to."""
        return self.delivers_all and operand.feedback is not None and operand.feedback.can_roll_back(operand.x)

    def _codec(self, operand: Operand) -> Codec:
        """Return the codec of this rank's payload of an operand."""
        return operand.codec

    def _encode(self, operand: Operand, out: Tensor | None = None) -> tuple[bool, Tensor]:
        """Compensate and encode an operand, and keep its payload; return (whether it is finite, its payload)."""
        finite, payload = self._encoded(operand, out)
        self._payloads.append(payload)
        return finite, payload

    def _encoded(self, operand: Operand, out: Tensor | None = None) -> tuple[bool, Tensor]:
        """As :meth:`_encode`, without keeping the payload."""
        seed = operand.seed_of(self.peers.rank)
        codec, feedback, x = self._codec(operand), operand.feedback, operand.x
        # Zeros are encoded with feedback where it holds nothing yet, so that the state has a residual for every layer.
        if feedback is not None and operand.key not in self._zeros:
            self._claim(operand)
            early = self._commits_early(operand)  # commit while x is in the caches and other ranks still compute
            fused = early and not self.measure
            finite, payload = feedback.encode(
                operand.key, x, codec, shape=operand.shape, seed=seed, out=out, commit=fused
            )
            operand.compensated = True
            operand.committed = fused and finite
            if early and finite and not fused:
                self._commit(operand, payload)
        else:
            finite = kernels.all_finite(x.float())
            payload = codec.encode(x.view(dims(operand.shape)), seed=seed, out=out)
        return finite, payload
