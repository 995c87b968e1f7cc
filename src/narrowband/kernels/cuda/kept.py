"""Error feedback on a residual that is stored in fewer bits, as a sequence of Triton loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowband.kernels.cuda import compensation, stores
from narrowband.kernels.reference.kept import Options, kept_by_parts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["compensate_kept"]


def compensate_kept(
    x: Tensor,
    codes: Tensor,
    exponents: Tensor | None,
    k: int,
    *,
    decay: float = 1.0,
    sampled: bool = False,
    seed: int = 0,
    rounding: int = 0,
) -> tuple[bool, Tensor, Tensor]:
    options = Options(decay, sampled, seed, rounding)
    return kept_by_parts(stores, compensation, x, codes, exponents, k, options)
