"""The contract of a feedback, and of state in general."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from narrowband.codecs import Codec, Shape

__all__ = ["Feedback", "Norms", "State", "check_saved"]


class Norms(NamedTuple):
    """Squared norms of what was encoded and of what the payload did not say; their ratio is the relative error."""

    encoded: float
    lost: float


class State(ABC):
    """What stays between two steps, per key."""

    #: The name in a spec string.
    name: ClassVar[str]
    #: True: a payload says by how much something changes that all receivers hold, and they add it up for ever. So a
    #: gradient of zero is news like any other, a sum is never encoded again, means are float32 whatever the gradients
    #: are, and :meth:`Feedback.deliver` makes of them what is delivered.
    incremental: ClassVar[bool] = False

    def check(self, codec: Codec) -> None:  # noqa: B027  most take any codec
        """Raise :class:`~narrowband.errors.UnsupportedError` where this feedback cannot stand behind a codec."""

    @abstractmethod
    def residual(self, key: str) -> Tensor | None:
        """The residual under ``key`` (flat float32, to be changed in place with care), or None if there is none."""

    def take_residual(self, key: str) -> Tensor | None:
        """Remove and return the residual under ``key``, flat float32; None if there is none."""
        raise TypeError(f"what {self.name} keeps has no meaning elsewhere")

    def add_residual(self, key: str, residual: Tensor) -> None:
        """Let this be the residual under ``key``, where there is none."""
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

    def can_roll_back(self, x: Tensor) -> bool:
        """Whether :meth:`roll_back` also undoes :meth:`commit`, as long as ``x`` is not touched."""
        return False

    @abstractmethod
    def roll_back(self, key: str, x: Tensor) -> None:
        """The step did not happen: the state is again what it was before :meth:`encode`. ``x`` is free again."""

    def deliver(self, key: str, x: Tensor) -> None:
        """Make of the decoded mean what is delivered, in place.

        To be called by every receiver, once for each key and step that is good on all ranks.

        Args:
            x: flat; the mean over senders of what was decoded. Where :attr:`incremental`, float32.
        """


def check_saved(owner: str, key: str, value: object, *, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
    """Raise ValueError unless what was saved under ``key`` is a finite tensor of one of these dtypes."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{owner}: the state holds {type(value).__name__} for {key!r}, where a tensor belongs")
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
