"""Find the DistributedDataParallel model in a trainer, and check the trainer's gradient clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowband.averaging.who import ddps_in
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from narrowband.gradients import GradientCompression

__all__ = ["check_clipping", "ddp_in", "is_wrapped"]


def ddp_in(model: nn.Module, advice: str) -> DistributedDataParallel:
    """Return the DistributedDataParallel model in the module that a trainer calls, whatever wraps it.

    Args:
        model: the module that the trainer calls in a step.
        advice: what to do if there is none, for the error.

    Raises:
        TypeError: it is no module.
        UnsupportedError: there is none, or more than one.
    """
    if not hasattr(model, "named_modules"):
        raise TypeError(
            f"compression needs the model that the trainer has wrapped, not {type(model).__name__}; {advice}"
        )
    found = list(ddps_in(model).values())
    if len(found) == 1:
        return found[0]
    given = f"{type(model).__name__} {f'with {len(found)} of them' if found else 'without one'}"
    raise UnsupportedError(
        f"compression needs a model in DistributedDataParallel, and the trainer has a {given}; {advice}"
    )


def is_wrapped(model: nn.Module) -> bool:
    """Whether there is a DistributedDataParallel model in the module that a trainer calls."""
    return bool(ddps_in(model))


def check_clipping(handle: GradientCompression, max_norm: float | None, setting: str) -> None:
    """Refuse a trainer that clips averages which are sums of many gradients, as with ``dgc``.

    Args:
        handle: of the model.
        max_norm: the norm at which the trainer clips; None or 0: it does not clip.
        setting: the name of this setting in the trainer.

    Raises:
        UnsupportedError: the trainer clips such averages.
    """
    feedback = handle.compression.feedback
    if max_norm and feedback is not None and feedback.observes_uncompressed:
        raise UnsupportedError(
            f"{setting}={max_norm} would clip the averages, which with {feedback.name} are sums of many gradients: "
            f"set it to 0, and clip before compression with {feedback.name}:clip={max_norm}"
        )
