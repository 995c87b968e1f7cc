"""A codec that sends a low-rank approximation of a matrix: two factors, found by power iteration (one round by
default).

A tensor of shape (n, …) is taken as a matrix of n rows and m columns. A tensor is sent as it is if its two factors
would take no fewer bytes than the matrix itself (all vectors are).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband import kernels
from narrowband.codecs.base import Codec, Shape, around, dims, numel_of
from narrowband.codecs.spec import check_keys

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LowRank", "factors", "next_start", "start"]


#: Addresses of tensors that torch allocates are multiples of this many bytes.
_NEW_TENSORS_AT = 64


def factors(shape: Shape, rank: int, min_ratio: float = 1.0) -> tuple[int, int, int]:
    """Return (n, m, r): rows, columns, and the rank used for a tensor of this shape; r = 0 if it is sent as it is.

    The rank is at most min(n, m). A matrix is sent as it is unless it is more than ``min_ratio`` times as large as its
    factors.
    """
    sizes = dims(shape)
    n = sizes[0] if sizes else 1
    m = math.prod(sizes[1:]) if n else 0
    r = min(rank, n, m)
    return n, m, r if len(sizes) > 1 and r * (n + m) * min_ratio < n * m else 0


def start(m: int, r: int, seed: int, device: torch.device) -> Tensor:
    """Return the r × m normally distributed numbers that power iteration starts with; the same on every device."""
    generator = torch.Generator().manual_seed(seed & (2**64 - 1))
    return torch.randn(r, m, generator=generator, dtype=torch.float32, device="cpu").to(device)


def next_start(q: Tensor) -> Tensor:
    """Return the factor that the next round of power iteration starts with: q, but for a power of two.

    Each round multiplies by the matrix and by its transpose, so without this the second round of a matrix of 1e20 or
    1e-25 leaves the range of float32. The scale changes no bit of the basis that :func:`kernels.orthonormalize` makes.
    """
    largest = q.abs().amax().clamp(min=2.0**-100)  # the inverse of a smaller power of two might be inf
    return q * (largest.frexp().mantissa / largest)


@dataclass(frozen=True)
class LowRank(Codec):
    """Two factors of low rank per matrix, by power iteration (Vogels et al., arXiv 1905.13727). Use with ``+ef``.

    P = orthogonalized M·Q for a random Q, then Q = Mᵀ·P; the decoded matrix is P·Qᵀ, the projection of M on the
    columns of P. The payload holds both factors column by column, because products of matrices are faster in this
    layout.

    Args:
        rank: columns of the two factors.
        iterations: rounds of power iteration; each after the first comes closer to the best approximation.

    Example:
        >>> nb.codec("lowrank:rank=4").payload_nbytes((1000, 1000))  # 4 columns of 1000 for each factor
        32000
    """

    name: ClassVar[str] = "lowrank"

    rank: int = field(default=4, metadata={"always": True})
    iterations: int = 1

    def __post_init__(self) -> None:
        check_keys(self)
        for key in ("rank", "iterations"):
            if getattr(self, key) < 1:
                raise ValueError(f"lowrank: {key}={getattr(self, key)} must be at least 1")

    def kept_rank(self, shape: Shape) -> int:
        return factors(shape, self.rank)[2]

    def variations(self) -> tuple[str, list[float]]:
        return "rank", around(self.rank)

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        n, m, r = factors(shape, self.rank)
        return 4 * (r * (n + m) or numel_of(shape))

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        n, m, r = factors(shape, self.rank)
        values = out.view(torch.float32)
        if not r:
            values.copy_(x)
            return
        # The last bits of a matrix product depend on the alignment of its operands, so align them like new tensors.
        matrix = (x if x.data_ptr() % _NEW_TENSORS_AT == 0 else x.clone()).view(n, m)
        q = start(m, r, seed, x.device)
        for at in range(self.iterations):
            p = kernels.orthonormalize(((next_start(q) if at else q) @ matrix.T)[None])[0]
            q = p @ matrix
        torch.cat([p.reshape(-1), q.reshape(-1)], out=values)

    def _decode(
        self, payload: Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seed: int, weight: float, accumulate: bool
    ) -> None:
        n, m, r = factors(shape, self.rank)
        values = payload.view(torch.float32)
        if r:
            p, q = values[: n * r].view(r, n), values[n * r :].view(r, m)
            kernels.low_rank_product(out, p, q, weight=weight, accumulate=accumulate)
        elif accumulate:
            out.add_(values, alpha=weight)
        else:
            torch.mul(values, weight, out=out)

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        return kernels.all_finite(payload.view(torch.float32))
