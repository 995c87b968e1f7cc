"""Codecs that send every element: the tensor as it is, or cast to 16 bits.

Their payloads can be added element by element, so an all-reduce can average them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband import kernels
from narrowband.codecs.base import Codec, Shape, aligned, numel_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BF16", "FP16", "Identity"]


class _Cast(Codec):
    """Base of codecs that cast every element to one dtype."""

    #: None: the dtype of the tensor itself.
    wire_dtype: ClassVar[torch.dtype | None]

    requantizes = True

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.wire_dtype or dtype

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return aligned(numel_of(shape) * self.sum_dtype(dtype).itemsize)

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        wire = out.view(self.sum_dtype(dtype))
        wire[: x.numel()].copy_(x)
        wire[x.numel() :] = 0

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        return kernels.holds(payload.view(self.sum_dtype(torch.float32)).isfinite().all())

    def _decode(
        self, payload: Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seed: int, weight: float, accumulate: bool
    ) -> None:
        values = payload.view(self.sum_dtype(dtype))[: out.numel()]
        if accumulate:
            out.add_(values, alpha=weight)
        else:
            out.copy_(values)
            if weight != 1.0:
                out.mul_(weight)


@dataclass(frozen=True)
class Identity(_Cast):
    """The tensor as it is.

    Example:
        >>> nb.codec("none").payload_nbytes((1000, 1000))
        4000000
    """

    name: ClassVar[str] = "none"
    exact: ClassVar[bool] = True
    wire_dtype = None


@dataclass(frozen=True)
class FP16(_Cast):
    """Every element as float16; magnitudes above 65,504 become inf.

    Example:
        >>> nb.codec("fp16").roundtrip(torch.tensor([0.1, 70000.0]))
        tensor([0.1000,    inf])
    """

    name: ClassVar[str] = "fp16"
    wire_dtype = torch.float16


@dataclass(frozen=True)
class BF16(_Cast):
    """Every element as bfloat16: the range of float32 with 8 significant bits.

    Example:
        >>> nb.codec("bf16").roundtrip(torch.tensor([1.01, 70000.0]))
        tensor([1.0078e+00, 7.0144e+04])
    """

    name: ClassVar[str] = "bf16"
    wire_dtype = torch.bfloat16
