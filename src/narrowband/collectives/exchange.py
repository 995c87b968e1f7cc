"""What every way to average a set of tensors over ranks has in common.

An :class:`Exchange` is one run of a collective for some tensors: it encodes them, is a generator for
:class:`~narrowband.collectives.engine.Engine` while payloads travel, and ends with everything received but the tensors
as they were. :meth:`Exchange.deliver` then writes the averages, when the caller knows whether the step counts.

Each collective is a class in a file of its own, and says by class members what it costs, which codecs it can carry, and
when it is known whether a step counts. Ranks decode in rank order, so all of them compute the same bits, and so does a
resumed run, however the tensors are grouped.

A trailer of four bytes in every payload says whether its sender saw inf or NaN, so all ranks agree on that with no
further collective.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from narrowband import kernels
from narrowband.codecs.base import dims, squared_norm
from narrowband.collectives.traffic import shares_of
from narrowband.feedback.base import Norms
from narrowband.kernels import Findings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from narrowband.codecs import Codec, Shape
    from narrowband.collectives.engine import Job
    from narrowband.collectives.operand import Operand
    from narrowband.collectives.peers import Peers
    from narrowband.feedback import State

__all__ = ["TRAILER", "Exchange", "Sent"]

#: The trailer of a payload: one byte that says "not finite", and three that keep what follows aligned.
TRAILER = 4


class Sent(NamedTuple):
    """A layer in a message: what encodes it, its shape, and its place among the model's parameters."""

    codec: Codec
    shape: Shape
    place: int


class Exchange(ABC):
    """Averages some tensors by one collective.

    Args:
        operands: the tensors.
        peers: the ranks.
        measure: whether the relative error is measured.
        state: of the feedback that brings the collective, if one does.

    Example:
        >>> from narrowband.collectives import choose
        >>> chosen = choose(nb.codec("topk:density=0.01"), 40_000, 4)  # bytes of the payload; ranks
        >>> chosen.name, chosen.traffic_nbytes(40_000, 4)
        ('all_gather', 120000)
    """

    #: As users name it: ``collective=…``.
    name: ClassVar[str]
    #: Bytes that could have been sent while ranks wait between the phases of this collective.
    overhead_nbytes: ClassVar[int] = 0
    #: How many times more another collective may send, and is still taken: it delivers more of what is sent.
    handicap: ClassVar[float] = 1.0
    #: Whether, once every rank's tensors are known to be finite, nothing can turn out otherwise.
    decided_by_encoding: ClassVar[bool] = False
    #: Whether a rank encodes means, whose error its feedback then keeps, see :meth:`State.owner_error`.
    has_owners: ClassVar[bool] = False
    #: Where loops note what is not finite, if the host is not to wait for them; given before the first :meth:`encode`.
    #: Then all counts as finite here, feedback is rolled back on the device, and NaN is the caller's to write.
    findings: Findings | None = None

    @staticmethod
    @abstractmethod
    def traffic_nbytes(nbytes: int, size: int) -> int:
        """Bytes that a rank sends where every rank's payload takes ``nbytes``, among ``size`` ranks."""

    @classmethod
    def layer_traffic_nbytes(cls, codec: Codec, shape: Shape, nbytes: int, size: int) -> int:  # noqa: ARG003
        """The same of one layer, where more is known of it than the bytes of its payload."""
        return cls.traffic_nbytes(nbytes, size)

    @classmethod
    @abstractmethod
    def message_nbytes(cls, layers: Sequence[Sent], size: int, state: State | None) -> tuple[float, ...]:
        """Bytes that a rank sends in each collective of a message, to the last one, where no size depends on the data.

        Args:
            layers: whose payloads travel in it; their gradients are in float32.
            size: number of ranks.
            state: the feedback behind them.

        Returns:
            The mean over ranks, and over the steps in which factors take turns.
        """

    @classmethod
    def first_of(cls, layers: Sequence[Sent], size: int, state: State | None) -> float:
        """What :attr:`first_nbytes` is of these layers."""
        return cls.message_nbytes(layers, size, state)[0]

    @staticmethod
    @abstractmethod
    def obstacle(codec: Codec, feedback: State | None) -> str | None:
        """Why this collective cannot carry a codec's payloads with this feedback, as an error's text; None: it can."""

    @staticmethod
    def uses_pairs(size: int) -> bool:  # noqa: ARG004
        """Whether it sends from rank to rank among ``size`` ranks, see :attr:`Peers.pairs`."""
        return False

    @staticmethod
    def goes_ahead(codec: Codec) -> bool:  # noqa: ARG004
        """Whether it can carry a codec's payloads while nobody waits to hear what is finite."""
        return False

    @staticmethod
    def kind_of(codec: Codec, dtype: torch.dtype) -> str:  # noqa: ARG004
        """Tensors can share an exchange where this is equal."""
        return ""

    def __init__(self, operands: Sequence[Operand], peers: Peers, *, measure: bool, state: State | None = None) -> None:
        self.operands: list[Operand] = []
        self.peers = peers
        self.measure = measure
        self.state = state
        #: Bytes that this rank has sent, by the keys of operands. Each has its share of all that is in a message.
        self.sent: dict[str, int] = {}
        self.encode_seconds = 0.0
        self.decode_seconds = 0.0
        #: After the job: whether every rank's tensors were finite.
        self.finite = True
        #: After :meth:`deliver`, with ``measure``: by the keys of operands. None of one that did not take part.
        self.norms: dict[str, Norms] = {}
        self._payloads: list[Tensor] = []  # this rank's, one per operand
        self._locally_finite = True
        self._decided = False
        self._not_encoded = list(operands)

    def extend(self, operands: Sequence[Operand]) -> None:
        """Take more tensors along; :meth:`encode` them before the job starts."""
        self._not_encoded += operands

    def encode(self) -> bool:
        """Compensate and encode what is new. To be called before the job starts.

        Returns:
            Whether this rank's tensors are finite.
        """
        begin = time.perf_counter()
        operands, self._not_encoded = self._not_encoded, []
        self.operands += operands
        with self._noting(Findings.OWN):
            self._encode_all(operands)
        if self.findings is not None and not self._locally_finite:  # of a loop that knows at once
            self.findings.note(Findings.OWN, bad=True)
        self.encode_seconds += time.perf_counter() - begin
        return self._locally_finite

    @property
    @abstractmethod
    def first_nbytes(self) -> int:
        """Bytes that a rank will send in the first collective, for the operands encoded so far: equal on all ranks.
        Where sizes depend on the data, the most that it can be.
        """

    def _noting(self, what: int) -> AbstractContextManager[None]:
        """Loops note what they find, if the host is not to wait for it."""
        return nullcontext() if self.findings is None else self.findings.noting(what)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent."""
        return sum(self.sent.values())

    def _count(self, nbytes: int, parts: Iterable[tuple[Operand, int]]) -> None:
        """Note that this rank sends so many bytes, for operands whose parts of them are so large."""
        operands, sizes = zip(*parts, strict=True)
        for operand, share in zip(operands, shares_of(nbytes, sizes), strict=True):
            self.sent[operand.key] = self.sent.get(operand.key, 0) + share

    def flag(self, finite: bool) -> None:
        """Let this exchange's trailer also say whether other tensors of its sender are finite."""
        self._locally_finite &= finite

    @abstractmethod
    def _encode_all(self, operands: Sequence[Operand]) -> None:
        """Encode these, and note in ``_locally_finite`` whether all are finite."""

    @abstractmethod
    def job(self) -> Job:
        """The generator to run after :meth:`encode`."""

    @abstractmethod
    def _write(self, good: bool) -> None:
        """Write the averages."""

    @contextmanager
    def _mean_of(self, operand: Operand, good: bool) -> Iterator[Tensor]:
        """Memory of the operand's shape to decode the mean into; it then becomes what is delivered.

        With incremental feedback the mean is a change of what all ranks hold, and no gradient. So in a step that does
        not count, NaN is delivered in its place.
        """
        out = operand.average
        mean = out if operand.dtype == out.dtype else torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        yield mean.view(dims(operand.shape))
        if operand.feedback is not None and good:
            operand.feedback.deliver(operand.key, mean)
        elif operand.incremental:
            mean.fill_(torch.nan)
        if mean is not out:
            out.copy_(mean)

    def deliver(self, good: bool) -> None:
        """Write the averages; commit the feedback if the whole step is good on all ranks, and roll it back if not."""
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
        """The step broke off: roll the feedback back, leave the tensors."""
        if not self._decided:
            self._decided = True
            self._finish_feedback(good=False)

    def _finish_feedback(self, good: bool) -> None:
        """Commit or roll back every operand's feedback."""
        if good and self.findings is not None:
            self._roll_back_if_bad(self.findings.place(Findings.ANY))
            return
        for operand, payload in zip(self.operands, self._payloads, strict=False):
            seed = operand.seed_of(self.peers.rank)
            if operand.compensated:
                assert operand.feedback is not None
                if not good:
                    operand.feedback.roll_back(operand.key, operand.x)
                    self.norms.clear()
                elif not operand.committed:
                    self._commit(operand, payload)
            elif self.measure and good:
                lost = operand.x.float().clone()
                before = squared_norm(lost)
                sent = torch.empty(dims(operand.shape), dtype=operand.dtype, device=lost.device)
                lost.sub_(self._codec(operand).decode(payload, sent, seed=seed).view(-1))
                self.norms[operand.key] = Norms(before, squared_norm(lost))

    def _roll_back_if_bad(self, bad: Tensor) -> None:
        """Roll feedback back, which is committed already, where the device has found that the step does not count."""
        by_state: dict[int, list[Operand]] = {}
        for operand in self.operands:
            if operand.compensated:
                by_state.setdefault(id(operand.feedback), []).append(operand)
        for operands in by_state.values():
            assert operands[0].feedback is not None
            keys, xs = [operand.key for operand in operands], [operand.x for operand in operands]
            operands[0].feedback.roll_back_if(bad, keys, xs)

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
        """Whether its feedback commits before the step is decided, and rolls back if it has to."""
        return operand.feedback is not None and operand.feedback.can_roll_back(operand.x)

    def _codec(self, operand: Operand) -> Codec:
        """What this rank's payload of an operand is encoded with."""
        return operand.codec

    def _encode(self, operand: Operand, out: Tensor | None = None) -> tuple[bool, Tensor]:
        """(whether it is finite, its payload), compensated by the residual; the payload is kept."""
        finite, payload = self._encoded(operand, out)
        self._payloads.append(payload)
        return finite, payload

    def _encoded(self, operand: Operand, out: Tensor | None = None) -> tuple[bool, Tensor]:
        """The same, and nothing is kept."""
        seed = operand.seed_of(self.peers.rank)
        codec, feedback, x = self._codec(operand), operand.feedback, operand.x
        # Where there is no residual yet, zeros make one, so that a state has one for every layer.
        ahead = self.findings is not None
        if feedback is not None and (
            ahead or operand.incremental or not feedback.holds(operand.key) or _any_nonzero(x)
        ):
            if not self.has_owners:
                feedback.reclaim_owner_error(operand.key)
            early = self._commits_early(operand)  # while it is in the caches and other ranks still compute
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


def _any_nonzero(x: Tensor) -> bool:
    return not kernels.all_zero(x) if x.dtype == torch.float32 else bool(x.any())
