"""One tensor to average, and what it is sent with."""

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
        key: names its feedback state.
        x: the gradient, flat and contiguous. Until the end of the step its content belongs to the exchange.
        shape: the shape that the codec sees.
        codec: what it is encoded with.
        feedback: what makes up for what the codec loses, if anything does.
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
    #: Whether the feedback took part in this step. It does not where the gradient is exactly zero: this rank then sends
    #: nothing and keeps its residual, so that a layer no rank used (whose average DDP ignores) loses nothing.
    #: Incremental feedback always takes part: the change to zero has to be sent.
    compensated: bool = field(default=False, init=False)
    #: Whether the feedback has been committed.
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
        """The seed of a rank's encoding."""
        return self.seed(0 if self.codec.shared_seed else rank)
