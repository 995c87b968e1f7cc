"""One tensor to average, with its codec and feedback."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from narrowband.codecs import Codec, Shape
    from narrowband.feedback import Feedback

__all__ = ["Operand"]


@dataclass(eq=False)
class Operand:
    """One tensor to average.

    Attributes:
        key: the key of its feedback state.
        x: the gradient, flat and contiguous. The exchange may overwrite it until the end of the step.
        shape: the shape that the codec sees.
        codec: encodes the tensor.
        feedback: compensates for the codec's error; None: nothing does.
        seed: rank → seed of that rank's encoding in this step.
        index: its index among all tensors of the model, whatever exchange it is in.
        out: where the average is written: flat, contiguous, of the dtype of ``x``; None: into ``x``.
    """

    key: str
    x: Tensor
    shape: Shape
    codec: Codec
    feedback: Feedback | None
    seed: Callable[[int], int]
    index: int = 0
    out: Tensor | None = None
    #: Whether the rank is known to have no gradient; ``x`` is then zero.
    absent: bool = field(default=False, init=False)
    #: Whether the feedback took part in this step. It does not where the rank has no gradient, or one of zeros that may
    #: stand for none: this rank then encodes the zeros and keeps its residual, so that a layer that no rank used, whose
    #: average DDP ignores, loses nothing. Incremental feedback always takes part, because the change to zero has to be
    #: sent.
    compensated: bool = field(default=False, init=False)
    #: Whether the feedback has been committed.
    committed: bool = field(default=False, init=False)

    @property
    def incremental(self) -> bool:
        """Whether payloads are changes of a tensor that all ranks hold, see :class:`~narrowband.feedback.State`."""
        return self.feedback is not None and self.feedback.incremental

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the codec encodes and decodes."""
        return torch.float32 if self.incremental else self.x.dtype

    @property
    def average(self) -> Tensor:
        """The tensor that the average is written to."""
        return self.x if self.out is None else self.out

    def seed_of(self, rank: int) -> int:
        """Return the seed of a rank's encoding: one for all ranks where the codec shares its seed."""
        return self.seed(0 if self.codec.shared_seed else rank)
