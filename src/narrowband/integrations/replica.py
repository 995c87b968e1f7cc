"""A replica that averages updates, as a trainer's checkpoint needs it.

Trainers save the model and the optimizer of rank 0 for all ranks. Right after a round all replicas have the same
parameters, so that is right for the model. But each replica has moments, a gradient scale, and buffers of its own. So
these are saved together with the state of the handle, by every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    import torch.distributed as dist

    from narrowband.updates import UpdateCompression

__all__ = ["Replica", "Saves"]


class Saves(Protocol):
    """What is saved by every rank: a handle, or a whole replica."""

    @property
    def removed(self) -> bool:
        """Whether there is nothing to save any more."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that save."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from this rank's state, or from those of another number of ranks."""


class Replica:
    """What one rank has for itself: the state of its handle of updates, of its optimizers and gradient scaler, and its
    buffers. Save it right after ``handle.average()``.

    Args:
        handle: of :func:`narrowband.compress_updates`.
    """

    def __init__(self, handle: UpdateCompression) -> None:
        self._handle = handle

    @property
    def removed(self) -> bool:
        """See :class:`Saves`."""
        return self._handle.removed

    @property
    def size(self) -> int:
        """See :class:`Saves`."""
        return self._handle.size

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """See :class:`Saves`."""
        return self._handle.process_group

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that belong to the model's state, by name."""
        saved = self._handle.model.state_dict().keys()
        return {name: b for name, b in self._handle.model.named_buffers() if name in saved}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state.

        Raises:
            RuntimeError: replicas have taken steps since the last round, so their parameters differ, and the checkpoint
                has those of rank 0 alone.
        """
        scaler, state = self._handle.grad_scaler, self._handle.state_dict()
        if state["updates"]["anchor"]:
            raise RuntimeError(
                "replicas have taken steps since the last round, so a checkpoint of one model for all would lose those "
                "of all but rank 0: call average() of the handle on all ranks before you save"
            )
        return {
            "handle": state,
            "optimizers": [each.state_dict() for each in self._handle.optimizers],
            "grad_scaler": None if scaler is None else scaler.state_dict(),
            "buffers": self._buffers(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from this rank's state, after the trainer has loaded that of rank 0. From the states of another number
        of ranks only those of the handles are loaded: optimizers go on with the moments that the trainer has loaded.

        Raises:
            ValueError: a state that does not fit.
        """
        if not isinstance(state, Mapping):
            self._handle.load_state_dict([each["handle"] for each in state])
            return
        if "handle" not in state:
            raise ValueError(
                "this state is not of compress_updates: it has no optimizers of a replica. Resume with the call with "
                "which it was saved"
            )
        for name, b in self._buffers().items():
            if name in state["buffers"]:
                b.copy_(state["buffers"][name])
        for optimizer, saved in zip(self._handle.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self._handle.grad_scaler is not None and state["grad_scaler"] is not None:
            self._handle.grad_scaler.load_state_dict(state["grad_scaler"])
        self._handle.load_state_dict(state["handle"])
