"""Error feedback in one pass: add a gradient to its residual, and select or check what results."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "all_finite",
    "all_zero",
    "compensate",
    "compensate_select_topk",
    "difference",
    "encode_topk",
    "poison_all_if",
    "restore_all_if",
    "restore_if",
    "take_difference",
]


def compensate(x: Tensor, residual: Tensor, *, decay: float = 1.0, below: float = math.inf) -> bool:
    """``(x, residual) ← (residual, decay · residual + x)`` in one pass; True if every sum is of a magnitude below
    ``below``.

    ``x`` is left holding the old residual: copying it back undoes the call, to the bit.
    """
    return cast("bool", backend_of(x).compensate(x, residual, decay=decay, below=below))


def compensate_select_topk(
    x: Tensor, residual: Tensor, k: int, *, decay: float = 1.0, sampled: bool = False, seed: int = 0
) -> tuple[bool, Tensor, Tensor]:
    """:func:`compensate` and :func:`select_topk` of the sum, fused: (whether it is finite, the indices, the sum there).

    When not finite, indices and values are meaningless.
    """
    result = backend_of(x).compensate_select_topk(x, residual, k, decay=decay, sampled=sampled, seed=seed)
    return cast("tuple[bool, Tensor, Tensor]", result)


def encode_topk(
    x: Tensor,
    residual: Tensor,
    k: int,
    out: Tensor,
    *,
    decay: float = 1.0,
    sampled: bool = False,
    seed: int = 0,
    subtract: bool = False,
) -> bool:
    """:func:`compensate_select_topk`, and where all is finite, what it found written into ``out`` as
    :func:`sparse_sum_rows` reads it, with zeros behind.

    Where less than k are found, values of zero at the last index fill up. With ``subtract``, what is written leaves
    ``residual``: zeros remain. Returns whether all is finite; if not, ``out`` is left alone.
    """
    options = {"decay": decay, "sampled": sampled, "seed": seed, "subtract": subtract}
    return cast("bool", backend_of(x).encode_topk(x, residual, k, out, **options))


def all_finite(x: Tensor, *, below: float = math.inf) -> bool:
    """True if no element is inf or NaN, or of a magnitude of at least ``below``."""
    return cast("bool", backend_of(x).all_finite(x, below=below))


def difference(x: Tensor, base: Tensor, out: Tensor, *, below: float = math.inf) -> bool:
    """``out = x − base`` in one pass, where ``out`` may be either of them; True if every difference is of a magnitude
    below ``below``.
    """
    return cast("bool", backend_of(x).difference(x, base, out, below=below))


def take_difference(x: Tensor, base: Tensor) -> bool:
    """``(x, base) ← (base, x − base)`` in one pass; True if every difference is finite."""
    return cast("bool", backend_of(x).take_difference(x, base))


def all_zero(x: Tensor) -> bool:
    """True if no element differs from zero (NaN does)."""
    return cast("bool", backend_of(x).all_zero(x))


def restore_if(bad: Tensor, out: Tensor, x: Tensor) -> None:
    """``out = x`` if ``bad``, one int32 where the others are, is not zero; the host is not asked."""
    backend_of(out).restore_if(bad, out, x)


def restore_all_if(bad: Tensor, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """:func:`restore_if` of several tensors, all float32."""
    if outs:
        backend_of(outs[0]).restore_all_if(bad, outs, xs)


def poison_all_if(bad: Tensor, xs: Sequence[Tensor]) -> None:
    """``x = NaN`` for several tensors, of any real floating dtypes, if any of ``bad``, int32 where these are, is not
    zero; the host is not asked.
    """
    if xs:
        backend_of(xs[0]).poison_all_if(bad, xs)
