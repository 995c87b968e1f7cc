"""The interfaces of feedback: :class:`State`, :class:`Feedback` for gradients, :class:`SampleState` for activations."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from narrowband.codecs.base import numel_of
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from narrowband.codecs import Codec, Shape
    from narrowband.feedback.arrivals import Arrivals

__all__ = ["Feedback", "Layout", "Norms", "SampleState", "State", "check_saved"]


class Norms(NamedTuple):
    """Squared norms of a tensor and of its difference from the decoded payload. Their ratio is the relative error.

    They are numbers, or one float64 each on a device for which the host does not wait
    (:func:`~narrowband.codecs.base.squared_norm_late`).
    """

    encoded: float | Tensor
    lost: float | Tensor


class Layout(NamedTuple):
    """What :meth:`State.reserve` has to know of a layer."""

    key: str
    codec: Codec
    shape: Shape
    device: torch.device


class Encoded(NamedTuple):
    """What :meth:`Feedback.commit_unless` has to know of a tensor that was encoded: the arguments of
    :meth:`Feedback.commit`.
    """

    key: str
    x: Tensor
    codec: Codec
    payload: Tensor
    shape: Shape
    seed: int


class State(ABC):
    """State that is kept per key from one step to the next."""

    name: ClassVar[str]
    """The name in a spec string."""
    incremental: ClassVar[bool] = False
    """True: payloads are changes of a tensor that all receivers hold; receivers add up all changes. So a gradient of
    zero has to be sent, too, and a mean must not be encoded again. Means are float32 whatever the gradients' dtype, and
    :meth:`Feedback.deliver` turns a mean into the tensor that is delivered.
    """
    brings_codec: ClassVar[bool] = False
    """True: a method, which brings its own codec (``dgc:density=…``): no codec stands before it in a spec string."""
    per_sample: ClassVar[bool] = False
    """True: it keeps state per sample, and needs sample ids with every tensor (activations between stages)."""
    takes_activations: ClassVar[bool] = True
    """Whether it works between the stages of a pipeline."""
    mixes: ClassVar[bool] = True
    """Whether other layers of the same model may have other feedbacks."""
    keeps_owner_errors: ClassVar[bool] = False
    """Whether it can keep the error that the owner of a chunk makes when it encodes a mean, see :meth:`owner_error`."""
    commits_arrivals: ClassVar[bool] = False
    """Whether it can commit a part of a payload, see :meth:`Feedback.commit_arrived`."""
    observes_uncompressed: ClassVar[bool] = False
    """True: the caller has to pass every uncompressed average to :meth:`advance_uncompressed`."""
    puts_back: ClassVar[bool] = False
    """Whether :meth:`put_back` works: what it keeps concerns this rank alone."""

    @property
    def codec(self) -> Codec:
        """The method's codec, where :attr:`brings_codec`; others raise TypeError."""
        raise TypeError(f"{self.name} has no codec of its own; it is written after a codec, as in 'codec+{self.name}'")

    @property
    def collective(self) -> str | None:
        """The collective that has to average its payloads; None: any that the codec allows."""
        return None

    @property
    def goes_ahead(self) -> bool:
        """Whether the device can decide a step with float32 gradients, without the host: by
        :meth:`Feedback.roll_back_if`, by :meth:`Feedback.commit_unless` where nothing is committed before, or by the
        method's own :attr:`collective`.
        """
        return False

    @property
    def goes_ahead_in_16(self) -> bool:
        """Whether :attr:`goes_ahead` holds for gradients in 16 bits, too: by :meth:`Feedback.commit_unless`, since the
        memory of such a gradient cannot hold what would undo a commit.
        """
        return False

    @property
    def commits_arrivals_ahead(self) -> bool:
        """Whether :attr:`goes_ahead` holds for :meth:`Feedback.commit_arrived`, too."""
        return False

    @property
    def answers_late(self) -> bool:
        """Whether :meth:`Feedback.encode` may go on with tensors that are not finite, as long as
        :meth:`Feedback.roll_back` follows. The host then waits for the device once for several tensors.
        """
        return self.goes_ahead

    @property
    def needs_learning_rates(self) -> bool:
        """Whether :meth:`set_learning_rates` has to be called before every step."""
        return False

    @property
    def momentum(self) -> float:
        """The momentum that it applies to gradients. The optimizer must then have none."""
        return 0.0

    @property
    def nesterov(self) -> bool:
        """Whether :attr:`momentum` is Nesterov's."""
        return False

    @property
    def clip(self) -> float:
        """Where :attr:`observes_uncompressed`: the norm at which the averaged gradient is clipped."""
        return math.inf

    @property
    def compensates(self) -> bool:
        """Whether it compensates for the codec's error. False: the error is lost, as with a codec alone."""
        return True

    def check(self, codec: Codec) -> None:  # noqa: B027  most take any codec
        """Raise :class:`~narrowband.errors.UnsupportedError` where this feedback cannot stand behind a codec."""

    def behind(self, codec: Codec) -> State | None:
        """Return this feedback's configuration behind another codec, for a layer whose spec names no feedback.

        Returns:
            None if this feedback cannot stand behind that codec.
        """
        try:
            self.check(codec)
        except UnsupportedError:
            return None
        return self

    def includes(self, other: State) -> bool:
        """Return whether naming ``other`` behind this method changes nothing, as in ``powersgd:rank=4+ef``."""
        return False

    def shares_state_with(self, other: State) -> bool:
        """Return whether layers with these two configurations can keep their state in one object."""
        return type(self) is type(other) and self == other

    def codec_at(self, step: int, epoch: int | None = None) -> Codec | None:
        """Return the codec of a step (from 0) where it changes during warm-up; None: always the spec's codec."""
        return None

    def codec_of_layer(self, override: Codec, default: Codec) -> Codec:
        """Return the codec of a layer with a codec of its own, in a step in which other layers have ``default``."""
        return override

    def layer_nbytes(self, codec: Codec, shape: Shape) -> int:
        """Return the bytes of one rank's payload for a layer of this shape."""
        return codec.payload_nbytes(shape)

    def kept_rank(self, codec: Codec, shape: Shape) -> int | None:
        """As :meth:`~narrowband.codecs.Codec.kept_rank`, for a layer of this shape."""
        return codec.kept_rank(shape)

    def reserve(self, layers: Sequence[Layout]) -> None:  # noqa: B027  most make room when a key first comes
        """Allocate the state of these layers, where there is none. Pass them in about the order of backward.

        A method that computes on several layers at once places their states side by side in memory here. The state of
        other layers is allocated when they are first encoded.
        """

    def note(self, layers: Sequence[Layout], *, whole: bool) -> str | None:
        """Return a message for users about these layers with this feedback, or None. It is logged once, at set-up.

        Args:
            layers: all layers that have this feedback.
            whole: whether these are all compressed layers of the model.
        """
        return None

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:  # noqa: B027  most need none
        """Set the learning rates (key → rate) of the step that begins; see :attr:`needs_learning_rates`."""

    def advance_uncompressed(  # noqa: B027  most keep nothing
        self, averages: Sequence[tuple[str, Tensor]], bad: Tensor | None = None
    ) -> None:
        """Take uncompressed averages into the state, and change them in place to the values to deliver.

        Args:
            averages: (key, average) of one step.
            bad: one int32 on their device, which is not zero if the step does not count: the state then stays as it is.
                None: the step is good.
        """

    @abstractmethod
    def residual(self, key: str) -> Tensor | None:
        """Return the residual under ``key``, flat float32, or None if there is none.

        If it is stored in another dtype or on another device, this is a copy. To change the residual, change the copy
        and pass it to :meth:`add_residual`.
        """

    def holds(self, key: str) -> bool:
        """Return whether there is a :meth:`residual` under ``key``."""
        return self.residual(key) is not None

    def owner_error(self, key: str, cut: slice) -> Tensor | None:
        """Return the error of this rank's last encoded mean of a chunk that it owns, to add to the next mean.

        This is the server error of 1-bit Adam (Tang et al., arXiv 2102.02888, algorithm 1). Its unit is that of the
        mean, not of one rank's gradient. None: there is no error to add. It is to be multiplied by :attr:`owner_decay`.

        Args:
            key: the tensor's key.
            cut: where the chunk lies in the flat tensor.

        Returns:
            Flat float32, as long as the chunk.
        """
        return None

    @property
    def owner_decay(self) -> float:
        """The factor on an :meth:`owner_error` that is added to a mean."""
        return 1.0

    def set_owner_error(self, key: str, cut: slice, error: Tensor, *, numel: int, ranks: int) -> None:
        """Set the :meth:`owner_error`. An error of another chunk is added to the residual, so that it is not lost.

        Args:
            key, cut: as for :meth:`owner_error`.
            error: flat float32; the state owns it from now on.
            numel: elements of the tensor.
            ranks: number of ranks that average. One rank's residual counts 1/``ranks`` in a mean.
        """
        raise TypeError(f"{self.name} cannot keep the errors that owners make when they encode a mean")

    def reclaim_owner_error(self, key: str) -> None:  # noqa: B027  most keep none
        """Move the owner error into the residual. Call it before a collective without owners carries the tensor."""

    def take_residual(self, key: str) -> Tensor | None:
        """Remove the residual under ``key`` and return it, flat float32; None if there is none."""
        raise TypeError(f"the state of {self.name} cannot be moved to another feedback")

    def add_residual(self, key: str, residual: Tensor) -> None:
        """Set the residual under ``key``, flat float32, whether or not there was one."""
        raise TypeError(f"{self.name} cannot take over a residual")

    def entries(self, key: str) -> dict[str, Tensor]:
        """Return what :meth:`put_back` restores: the part of :meth:`state_dict` that averages of this key change."""
        return {}

    def put_back(self, key: str, entries: Mapping[str, Tensor]) -> None:
        """Replace what is kept under ``key`` by former :meth:`entries`, whose memory the state owns from now on.

        Where :attr:`puts_back`. Averages that were encoded in the meantime then have no effect on later ones.
        """
        raise TypeError(f"{self.name} cannot restore the state of one tensor: all ranks hold a part of it")

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply every residual by ``factor``, when the unit of gradients changes (a new loss scale)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return key → state: tensors (not copies), or dictionaries of tensors, numbers and strings."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...

    def check_state(self, state: Mapping[str, object]) -> None:
        """Raise ValueError unless :meth:`load_state_dict` can take this state: finite float32 tensors."""
        for key, value in state.items():
            check_saved(self.name, key, value)

    def fits(self, name: str, value: Tensor, layers: Mapping[str, Shape], others: Mapping[str, Shape]) -> bool:
        """Return whether an entry of a saved state belongs to a layer of the model and has a possible size.

        By default the entry's name is the layer's key. So entries of another feedback, such as "now/weight", never fit.

        Args:
            name: the entry's name in :meth:`state_dict`.
            value: the saved tensor.
            layers: key → shape, of all compressed layers.
            others: the same of all other parameters.
        """
        return name in layers and numel_of(layers[name]) == value.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the state takes."""
        return sum(value.nbytes for value in self.state_dict().values())

    @staticmethod
    def merged(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the state that every rank starts with after the number of ranks has changed.

        ``states`` are those of all former ranks. The default is their mean, which is what the average still lacks.
        """
        total: dict[str, Tensor] = {}
        for state in states:
            for name, value in state.items():
                total[name] = total[name] + value if name in total else value.clone()
        return {name: value / len(states) for name, value in total.items()}

    @staticmethod
    def moved(state: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
        """Return the state that a rank continues with among other ranks, from its own state alone.

        Args:
            state: this rank's state.
            size: the new number of ranks, this one included.
        """
        del size
        return dict(state)


class Feedback(State):
    """State per key that compensates gradients before encoding; only steps that are good on every rank change it."""

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
            x: flat and contiguous. The feedback owns its memory, and may overwrite it, until the step is decided.
            shape: the shape that the codec should see.
            commit: if everything is finite, also do what :meth:`commit` does, which is cheaper than calling it later.
                Allowed only where :meth:`can_roll_back`.

        Returns:
            (whether everything was finite, the payload).
        """

    @abstractmethod
    def commit(
        self, key: str, x: Tensor, codec: Codec, payload: Tensor, *, shape: Shape, seed: int, measure: bool = False
    ) -> Norms | None:
        """Make what the payload lacks the new residual.

        Call it when the step is known to be good; ``x`` is then free again. Where :meth:`can_roll_back`, it may also be
        called right after :meth:`encode`, if everything was finite.

        Returns:
            With ``measure``, the squared norms of the codec's input and of its error.
        """

    def commit_arrived(
        self,
        keys: Sequence[str],
        xs: Sequence[Tensor],
        arrivals: Arrivals,
        *,
        bad: Tensor | None = None,
        measure: bool = False,
    ) -> list[Norms]:
        """Commit where only some of the payloads' elements were delivered: everything else becomes the residual.

        See :attr:`State.commits_arrivals`.

        Args:
            keys, xs, measure: as for :meth:`commit`, of several tensors of one dtype.
            arrivals: what was delivered of each.
            bad: one int32 on their device, which is not zero if the step does not count: the residuals then become what
                they were before :meth:`encode`. Where :attr:`State.commits_arrivals_ahead`. None: the step is good.

        Returns:
            With ``measure``, the norms of each; otherwise none.
        """
        raise TypeError(f"{self.name} cannot commit a part of a payload")

    def can_roll_back(self, x: Tensor) -> bool:
        """Return whether :meth:`roll_back` can also undo :meth:`commit`, as long as nobody else writes to ``x``."""
        return False

    def _check_commit(self, x: Tensor) -> None:
        """Raise ValueError unless ``x`` may be encoded and committed in one call."""
        if not self.can_roll_back(x):
            raise ValueError(
                f"commit=True needs float32; a step of {x.dtype} can be committed only after it is decided"
            )

    @abstractmethod
    def roll_back(self, key: str, x: Tensor) -> None:
        """Restore the state from before :meth:`encode`, for a step that does not count. ``x`` is then free again."""

    def roll_back_if(self, bad: Tensor, keys: Sequence[str], xs: Sequence[Tensor]) -> None:
        """Do :meth:`roll_back` for several tensors, if ``bad``, one int32 on their device, is not zero."""
        raise TypeError(f"{self.name} cannot roll back on the device; the host must know whether a step is good")

    def commit_unless(self, bad: Tensor, sent: Sequence[Encoded], *, measure: bool = False) -> list[Norms]:
        """Do :meth:`commit` for several tensors, unless ``bad``, one int32 on their device, is not zero.

        Returns:
            With ``measure``, the norms of each; otherwise none.
        """
        raise TypeError(f"{self.name} cannot commit on the device; the host must know whether a step is good")

    def encodes_all(self, codec: Codec) -> bool:
        """Return whether :meth:`encode_all` works with this codec."""
        return False

    def encode_all(
        self, keys: Sequence[str], xs: Sequence[Tensor], codec: Codec, *, seeds: Sequence[int], outs: Sequence[Tensor]
    ) -> bool:
        """Encode several float32 tensors, each into its own ``out``, and commit them unless :attr:`incremental`;
        :meth:`roll_back_if` undoes it.

        Returns:
            Whether all are finite; True where kernels record it on the device (:class:`~narrowband.kernels.Findings`).
        """
        raise TypeError(f"{self.name} cannot encode several tensors at once")

    def encode_for_arrivals(
        self, keys: Sequence[str], xs: Sequence[Tensor], codec: Codec, *, seeds: Sequence[int], outs: Sequence[Tensor]
    ) -> bool:
        """As :meth:`encode_all`, without committing: :meth:`commit_arrived` follows."""
        raise TypeError(f"{self.name} cannot commit a part of a payload")

    def sent_reference(self, key: str) -> Tensor | None:
        """Return what the receivers hold of this sender under ``key``, flat float32, where :attr:`incremental`.

        None before anything was sent, and where payloads are not incremental.
        """
        return None

    def received_reference(self, key: str) -> Tensor | None:
        """Return what this receiver holds under ``key``, flat float32, where :attr:`incremental`.

        None before anything arrived, and where payloads are not incremental.
        """
        return None

    def deliver(self, key: str, x: Tensor) -> None:
        """Turn the decoded mean into the tensor that is delivered, in place.

        Every receiver calls it, once for each key and step that is good on all ranks.

        Args:
            x: flat; the mean over senders of the decoded payloads. Where :attr:`incremental`, float32.
        """

    def deliver_all(self, keys: Sequence[str], xs: Sequence[Tensor]) -> None:
        """Do :meth:`deliver` for several tensors."""
        for key, x in zip(keys, xs, strict=True):
            self.deliver(key, x)


class SampleState(State):
    """A reference of every sample, held by both ends of a boundary between stages, so that differences can be sent.

    The sender calls :meth:`pack`, the receiver :meth:`unpack` with the same codec, samples and seed.
    """

    per_sample: ClassVar[bool] = True

    def warning(self, codec: Codec) -> str | None:
        """Return a warning for users who train with this codec, or None. It is logged once, at set-up."""
        return None

    @abstractmethod
    def payload_nbytes(
        self, key: str, codec: Codec, shape: Sequence[int], dtype: torch.dtype, samples: Tensor | None
    ) -> int:
        """Return the bytes of the payload that :meth:`pack` would make of this batch now; equal on both ends.

        Args:
            key: names the boundary.
            codec: encodes differences.
            shape: shape of the batch, (B, …).
            dtype: dtype of the batch.
            samples: int64 (B,): ids of the batch's samples.

        Raises:
            UnsupportedError, TypeError, ValueError: as :meth:`pack`.
        """

    def most_nbytes(self, codec: Codec, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the most bytes that a payload of such a batch may have, where no sample's part is longer than the
        sample itself or the payload of its difference.
        """
        one = tuple(shape[1:])
        return math.prod(shape[:1]) * max(math.prod(one) * dtype.itemsize, codec.payload_nbytes(one))

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
        """Return the payload of a batch, flat uint8.

        Args:
            key: names the boundary.
            x: (B, …), float32, float16 or bfloat16.
            codec: encodes differences; its payloads must have a fixed size.
            samples: int64 (B,): an id for each sample, the same in every epoch; no id twice.
            seed: the batch's seed; the receiver needs the same.
            out: where to write: uint8, flat, contiguous, exactly :meth:`payload_nbytes` long.
            arrived: filled with what :meth:`unpack` will give the receiver, to the bit, for a process that is both
                ends. Of x's shape and dtype; may be x.

        Raises:
            TypeError: a dtype that does not fit.
            ValueError: no samples, not one for each row, or one of them twice; a size that does not fit.
            UnsupportedError: a codec whose payloads have no fixed size.
        """

    @abstractmethod
    def unpack(
        self, key: str, payload: Tensor, out: Tensor, codec: Codec, *, samples: Tensor | None, seed: int
    ) -> Tensor:
        """Decode a payload of :meth:`pack` into ``out``, and return ``out``.

        Args:
            key: names the boundary.
            payload: the sender's payload.
            out: (B, …), of the shape and dtype of the sender's batch.
            codec, samples, seed: the same as the sender's.

        Raises:
            PayloadError: another length than :meth:`payload_nbytes`, or a part that the codec cannot decode.
            UnsupportedError, TypeError, ValueError: as :meth:`pack`.
        """

    @abstractmethod
    def fill(self, key: str, x: Tensor, samples: Tensor | None) -> None:
        """Store samples that were sent uncompressed as their own references. Call it on both ends.

        Raises:
            TypeError, ValueError: as :meth:`pack`.
        """

    @abstractmethod
    def reference_ids(self, key: str) -> Tensor:
        """Return the ids of samples that have a reference: int64, ascending."""

    @abstractmethod
    def keep_only(self, key: str, ids: Tensor | Iterable[int]) -> None:
        """Drop the references of all samples but these.

        Where one end has lost references, both ends call it with the samples that both still hold.
        """


def check_saved(owner: str, key: str, value: object, *, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
    """Raise ValueError unless what was saved under ``key`` is a finite tensor of one of these dtypes."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        what = f"{value.layout}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{owner}: the state holds {what} for {key!r}, expected a dense tensor")
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{owner}: the state holds {str(value.dtype).removeprefix('torch.')} for {key!r}, expected {expected}; "
            "pass the state as state_dict() returned it"
        )
    if not bool(value.isfinite().all()):
        raise ValueError(
            f"{owner}: the state holds inf or NaN for {key!r}, which would make every later step non-finite; load an "
            "earlier state"
        )
