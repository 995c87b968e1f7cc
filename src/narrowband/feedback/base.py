"""The contract of a feedback, and of state in general."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from narrowband.codecs import Codec, Shape

__all__ = ["Feedback", "Layout", "Norms", "SampleState", "State", "check_saved"]


class Norms(NamedTuple):
    """Squared norms of a tensor, and of its difference to the decoded payload; their ratio is the relative error."""

    encoded: float
    lost: float


class Layout(NamedTuple):
    """A layer whose state will be needed."""

    key: str
    codec: Codec
    shape: Shape
    device: torch.device


class State(ABC):
    """What stays between two steps, per key."""

    #: The name in a spec string.
    name: ClassVar[str]
    #: True: a payload says by how much something changes that all receivers hold, and they add it up for ever. So a
    #: gradient of zero is news like any other, a sum is never encoded again, means are float32 whatever the gradients
    #: are, and :meth:`Feedback.deliver` makes of them what is delivered.
    incremental: ClassVar[bool] = False
    #: True: it names its codec itself (``dgc:density=…``), so that no codec stands before it in a spec string.
    brings_codec: ClassVar[bool] = False
    #: True: its state is of samples, whose ids it has to be given with every tensor (activations between stages).
    per_sample: ClassVar[bool] = False
    #: Whether it works between the stages of a pipeline.
    takes_activations: ClassVar[bool] = True
    #: Whether layers of one model may have it beside layers with other feedbacks.
    mixes: ClassVar[bool] = True
    #: Whether it can keep what the owner of a chunk loses as it encodes a mean, see :meth:`owner_error`.
    keeps_owner_errors: ClassVar[bool] = False
    #: Whether it can commit a part of what it has encoded, see :meth:`Feedback.commit_arrived`.
    commits_arrivals: ClassVar[bool] = False
    #: True: :meth:`advance_uncompressed` has to be given every average that was not compressed.
    observes_uncompressed: ClassVar[bool] = False

    @property
    def codec(self) -> Codec:
        """The codec that it brings, where :attr:`brings_codec`."""
        raise TypeError(f"{self.name} stands behind a codec and brings none")

    @property
    def collective(self) -> str | None:
        """The collective that averages its payloads, where it brings one; None: any that the codec allows."""
        return None

    @property
    def needs_learning_rates(self) -> bool:
        """Whether :meth:`set_learning_rates` has to be called before every step."""
        return False

    @property
    def momentum(self) -> float:
        """The momentum that it applies to gradients, so that the optimizer must not."""
        return 0.0

    @property
    def nesterov(self) -> bool:
        """Whether :attr:`momentum` is Nesterov's."""
        return False

    @property
    def clip(self) -> float:
        """Where :attr:`observes_uncompressed`: the norm at which the gradients of all ranks together are clipped."""
        return math.inf

    @property
    def compensates(self) -> bool:
        """Whether it makes up for what the codec loses. False: what is lost is lost, as with a codec alone."""
        return True

    def check(self, codec: Codec) -> None:  # noqa: B027  most take any codec
        """Raise :class:`~narrowband.errors.UnsupportedError` where this feedback cannot stand behind a codec."""

    def behind(self, codec: Codec) -> State | None:
        """This feedback's configuration behind another codec: for a layer that names no feedback of its own.

        Returns:
            None if it cannot stand there.
        """
        try:
            self.check(codec)
        except UnsupportedError:
            return None
        return self

    def includes(self, other: State) -> bool:
        """Whether a spec may name ``other`` behind this method without changing anything: ``powersgd:rank=4+ef``."""
        return False

    def shares_state_with(self, other: State) -> bool:
        """Whether layers with these two configurations can keep their state in one object."""
        return type(self) is type(other) and self == other

    def codec_at(self, step: int, epoch: int | None = None) -> Codec | None:
        """The codec of a step (from 0), where that changes as the method warms up; None: always the spec's."""
        return None

    def codec_of_layer(self, override: Codec, default: Codec) -> Codec:
        """What a layer with a codec of its own is sent with in a step in which the others have ``default``."""
        return override

    def layer_nbytes(self, codec: Codec, shape: Shape) -> int:
        """Bytes of one rank's payload for a layer of this shape."""
        return codec.payload_nbytes(shape)

    def kept_rank(self, codec: Codec, shape: Shape) -> int | None:
        """As :meth:`~narrowband.codecs.Codec.kept_rank`, for a layer of this shape."""
        return codec.kept_rank(shape)

    def reserve(self, layers: Sequence[Layout]) -> None:  # noqa: B027  most make room when a key first comes
        """Make room for the state of these layers, where there is none. Call it in about the order of backward.

        A method that computes on several layers at once puts their states side by side in memory here. A layer that
        was not announced gets its room when it first comes.
        """

    def note(self, layers: Sequence[Layout], *, whole: bool) -> str | None:
        """What users should know of these layers with this feedback, if anything: it is logged once, at set-up.

        Args:
            layers: all that have it.
            whole: whether no layer of the model has anything else.
        """
        return None

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:  # noqa: B027  most need none
        """Tell key → the learning rate of the step that begins; see :attr:`needs_learning_rates`."""

    def advance_uncompressed(self, averages: Sequence[tuple[str, Tensor]]) -> None:  # noqa: B027  most keep nothing
        """Take account of averages that were not compressed, and change them in place to what is to be delivered.

        Args:
            averages: (key, average), of good steps only.
        """

    @abstractmethod
    def residual(self, key: str) -> Tensor | None:
        """The residual under ``key``, flat float32, or None if there is none. Where it is kept in another dtype or on
        another device, this is a copy: :meth:`add_residual` takes it back when it has changed.
        """

    def holds(self, key: str) -> bool:
        """Whether there is a :meth:`residual` under ``key``."""
        return self.residual(key) is not None

    def owner_error(self, key: str, cut: slice) -> Tensor | None:
        """What this rank adds to the next mean of a chunk that it owns: what it lost of the last one. None: nothing.

        This is the server error of 1-bit Adam (Tang et al., arXiv 2102.02888,
        algorithm 1). Its unit is that of the mean, not of one rank's gradient.

        Args:
            key: names the tensor.
            cut: where the chunk lies in the flat tensor.

        Returns:
            Flat float32, as long as the chunk.
        """
        return None

    def set_owner_error(self, key: str, cut: slice, error: Tensor, *, numel: int, ranks: int) -> None:
        """Let this be the :meth:`owner_error`; that of another chunk goes into the residual, so that it is not lost.

        Args:
            key, cut: as there.
            error: flat float32; belongs to the state from now on.
            numel: elements of the tensor.
            ranks: that average. One rank's residual counts 1/``ranks`` in a mean.
        """
        raise TypeError(f"{self.name} keeps no errors of owners")

    def reclaim_owner_error(self, key: str) -> None:  # noqa: B027  most keep none
        """Move what owners have lost into the residual. To be called before a tensor travels by a collective without
        owners.
        """

    def take_residual(self, key: str) -> Tensor | None:
        """Remove and return the residual under ``key``, flat float32; None if there is none."""
        raise TypeError(f"what {self.name} keeps has no meaning elsewhere")

    def add_residual(self, key: str, residual: Tensor) -> None:
        """Let this be the residual under ``key``, flat float32, whether or not there was one."""
        raise TypeError(f"{self.name} cannot take over a residual")

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply every residual, when the unit of the gradients changes (a new loss scale)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Key → state, plain tensors (not copies), or dictionaries of tensors, numbers and words."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...

    def check_state(self, state: Mapping[str, object]) -> None:
        """Raise ValueError unless :meth:`load_state_dict` can take this state: finite float32 tensors."""
        for key, value in state.items():
            check_saved(self.name, key, value)

    def fits(self, name: str, value: Tensor, layers: Mapping[str, int], others: Mapping[str, int]) -> bool:
        """Whether what was saved under ``name`` is of a layer of the model, and of a size that its state can have.

        By default the name is the layer's key. So what another feedback kept, as "now/weight", never fits by its size.

        Args:
            name: in :meth:`state_dict`.
            value: what was saved.
            layers: key → elements, of all that is compressed.
            others: the same of all others.
        """
        return layers.get(name, 0) == value.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the state takes."""
        return sum(value.nbytes for value in self.state_dict().values())

    @staticmethod
    def merged(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What every rank starts with after a change of the number of ranks, from the states of all ranks there were.

        By default their mean: it is what the average still lacks.
        """
        total: dict[str, Tensor] = {}
        for state in states:
            for name, value in state.items():
                total[name] = total[name] + value if name in total else value.clone()
        return {name: value / len(states) for name, value in total.items()}

    @staticmethod
    def moved(state: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
        """What a rank goes on with among other ranks, from what it kept by itself.

        Args:
            state: of this rank.
            size: how many ranks there are now, this one included.
        """
        del size
        return dict(state)


class Feedback(State):
    """State per key between the gradient and the codec, changed only by steps that are good on every rank."""

    @abstractmethod
    def encode(
        self,
        key: str,
        x: Tensor,
        codec: Codec,
        *,
        shape: Shape,
        seed: int,
        out: Tensor | None = None,
        commit: bool = False,
    ) -> tuple[bool, Tensor]:
        """Compensate ``x`` with the residual under ``key``, and encode the sum.

        Args:
            x: flat and contiguous; until the step is decided, its content belongs to the feedback.
            shape: the shape that the codec should see.
            commit: if everything is finite, do at once what :meth:`commit` does, cheaper; only where
                :meth:`can_roll_back` says so.

        Returns:
            (whether everything was finite, the payload).
        """

    @abstractmethod
    def commit(
        self, key: str, x: Tensor, codec: Codec, payload: Tensor, *, shape: Shape, seed: int, measure: bool = False
    ) -> Norms | None:
        """What the payload does not say becomes the residual.

        To be called when the step is known to be good, after which ``x`` is free again; or, where
        :meth:`can_roll_back` says so, right after :meth:`encode` of something finite.

        With ``measure``, returns what the codec was given and what it lost.
        """

    def commit_arrived(self, key: str, x: Tensor, at: Tensor, values: Tensor, *, measure: bool = False) -> Norms | None:
        """Commit where only some of the payload's elements have arrived: all else becomes the residual.

        To be called when the step is known to be good; see :attr:`State.commits_arrivals`.

        Args:
            key, x, measure: as for :meth:`commit`.
            at: int32, ascending: what has arrived.
            values: what has arrived there.
        """
        raise TypeError(f"{self.name} commits all of a payload, or nothing")

    def can_roll_back(self, x: Tensor) -> bool:
        """Whether :meth:`roll_back` also undoes :meth:`commit`, as long as ``x`` is not touched."""
        return False

    @abstractmethod
    def roll_back(self, key: str, x: Tensor) -> None:
        """The step did not happen: the state is again what it was before :meth:`encode`. ``x`` is free again."""

    @property
    def goes_ahead(self) -> bool:
        """Whether :meth:`roll_back_if` can undo what :meth:`encode` and :meth:`commit` did with float32 gradients."""
        return False

    def roll_back_if(self, bad: Tensor, keys: Sequence[str], xs: Sequence[Tensor]) -> None:
        """:meth:`roll_back` of several tensors, if ``bad``, one int32 where they are, is not zero."""
        raise TypeError(f"{self.name} has to know on the host whether a step counts")

    def encodes_all(self, codec: Codec) -> bool:
        """Whether :meth:`encode_all` can take this codec's tensors together."""
        return False

    def encode_all(
        self, keys: Sequence[str], xs: Sequence[Tensor], codec: Codec, *, seeds: Sequence[int], outs: Sequence[Tensor]
    ) -> bool:
        """:meth:`encode` of several float32 tensors, each into its place, and :meth:`commit`: undone by
        :meth:`roll_back_if`.

        Returns:
            Whether all is finite, or True where that is noted (:class:`~narrowband.kernels.Findings`).
        """
        raise TypeError(f"{self.name} encodes one tensor after the other")

    def sent_reference(self, key: str) -> Tensor | None:
        """Where :attr:`incremental`: what the receivers hold of this sender under ``key``, flat float32.

        None before anything was sent, and where payloads are not incremental.
        """
        return None

    def received_reference(self, key: str) -> Tensor | None:
        """Where :attr:`incremental`: what this receiver holds under ``key``, flat float32.

        None before anything arrived, and where payloads are not incremental.
        """
        return None

    def deliver(self, key: str, x: Tensor) -> None:
        """Make of the decoded mean what is delivered, in place.

        To be called by every receiver, once for each key and step that is good on all ranks.

        Args:
            x: flat; the mean over senders of the decoded payloads. Where :attr:`incremental`, float32.
        """


class SampleState(State):
    """A reference of every sample, which both ends of a boundary hold, so that differences may travel.

    The sender calls :meth:`pack`, the receiver :meth:`unpack` with the same codec, samples and seed.
    """

    per_sample: ClassVar[bool] = True

    def warning(self, codec: Codec) -> str | None:
        """What users should know before they train with this codec, if anything: it is logged once, at set-up."""
        return None

    @abstractmethod
    def payload_nbytes(
        self, key: str, codec: Codec, shape: Sequence[int], dtype: torch.dtype, samples: Tensor | None
    ) -> int:
        """Bytes of the payload of this batch, as :meth:`pack` would make it now. Both ends come to the same.

        Args:
            key: names the boundary.
            codec: what differences are encoded with.
            shape: that of the batch, (B, …).
            dtype: that of the batch.
            samples: int64 (B,): which samples these are.

        Raises:
            UnsupportedError, TypeError, ValueError: as :meth:`pack`.
        """

    @abstractmethod
    def pack(
        self,
        key: str,
        x: Tensor,
        codec: Codec,
        *,
        samples: Tensor | None,
        seed: int,
        out: Tensor | None = None,
        arrived: Tensor | None = None,
    ) -> Tensor:
        """The payload of a batch, flat uint8.

        Args:
            key: names the boundary.
            x: (B, …), float32, float16 or bfloat16.
            codec: what differences are encoded with; fixed-size.
            samples: int64 (B,): an id for each sample, the same in every epoch; no id twice.
            seed: of the batch; the receiver needs the same.
            out: where to write: uint8, flat, contiguous, exactly :meth:`payload_nbytes` long.
            arrived: gets what :meth:`unpack` will give the receiver, to the bit: for one process that plays both ends.
                Of x's shape and dtype; may be x.

        Raises:
            TypeError: a dtype that does not fit.
            ValueError: no samples, not one for each row, or one of them twice; a size that does not fit.
            UnsupportedError: a codec whose payloads have no fixed size.
        """

    @abstractmethod
    def unpack(
        self, key: str, payload: Tensor, out: Tensor, codec: Codec, *, samples: Tensor | None, seed: int
    ) -> Tensor:
        """``out ←`` what the payload of :meth:`pack` brings; returns ``out``.

        Args:
            key: names the boundary.
            payload: what the sender packed.
            out: (B, …), of the shape and dtype of the sender's batch.
            codec, samples, seed: the sender's.

        Raises:
            PayloadError: another length than :meth:`payload_nbytes`, or a part that the codec cannot decode.
            UnsupportedError, TypeError, ValueError: as :meth:`pack`.
        """

    @abstractmethod
    def fill(self, key: str, x: Tensor, samples: Tensor | None) -> None:
        """Take samples that travelled uncompressed as their references, on both ends.

        Raises:
            TypeError, ValueError: as :meth:`pack`.
        """

    @abstractmethod
    def reference_ids(self, key: str) -> Tensor:
        """The samples that have a reference: int64, ascending."""

    @abstractmethod
    def keep_only(self, key: str, ids: Tensor | Iterable[int]) -> None:
        """Drop the references of all samples but these: where one end has lost some, both keep what both have."""


def check_saved(owner: str, key: str, value: object, *, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
    """Raise ValueError unless what was saved under ``key`` is a finite tensor of one of these dtypes."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        what = f"{value.layout}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{owner}: the state holds {what} for {key!r}, where a dense tensor belongs")
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{owner}: the state holds {str(value.dtype).removeprefix('torch.')} for {key!r}, and {expected} is "
            "expected; pass it as state_dict() returned it"
        )
    if not bool(value.isfinite().all()):
        raise ValueError(
            f"{owner}: the state holds inf or NaN for {key!r}, which would make every later step non-finite; load an "
            "earlier state"
        )
