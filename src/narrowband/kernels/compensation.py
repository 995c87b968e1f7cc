"""Error feedback in one pass: add a gradient to its residual, and select from the sum or check that it is finite."""

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
    "all_zero_each",
    "clear_all_if",
    "compensate",
    "compensate_select_topk",
    "compensate_select_topk_all",
    "difference",
    "encode_topk",
    "encode_topk_all",
    "poison_all_if",
    "restore_all_if",
    "take_difference",
]


def compensate(x: Tensor, residual: Tensor, *, decay: float = 1.0, below: float = math.inf) -> bool:
    """``(x, residual) ← (residual, decay · residual + x)`` in one pass; True if every sum is of a magnitude below
    ``below``.

    Afterwards ``x`` holds the old residual: copying it back undoes the call, to the bit.
    """
    return cast("bool", backend_of(x).compensate(x, residual, decay=decay, below=below))


def compensate_select_topk(
    x: Tensor, residual: Tensor, k: int, *, decay: float = 1.0, sampled: bool = False, seed: int = 0
) -> tuple[bool, Tensor, Tensor]:
    """Fuse :func:`compensate` and :func:`select_topk` of the sum.

    Returns:
        (whether the sum is finite, the indices, the sum at these indices). If the sum is not finite, indices and values
        are meaningless.
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
    """Run :func:`compensate_select_topk`, then write indices and values into ``out`` if all is finite.

    The format is that of :func:`sparse_sum_rows`, followed by zeros. If fewer than k elements are found, values of zero
    at the last index fill up. With ``subtract``, the written values are subtracted from ``residual``, which leaves
    zeros there.

    Returns:
        Whether all is finite; if not, ``out`` is left alone.
    """
    options = {"decay": decay, "sampled": sampled, "seed": seed, "subtract": subtract}
    return cast("bool", backend_of(x).encode_topk(x, residual, k, out, **options))


def encode_topk_all(
    xs: Sequence[Tensor],
    ks: Sequence[int],
    outs: Sequence[Tensor],
    *,
    residuals: Sequence[Tensor] = (),
    decay: float = 1.0,
    subtract: bool = True,
    least: Tensor | None = None,
) -> bool:
    """Apply :func:`encode_topk`, exact, to several tensors, with no more GPU kernel launches than for one.

    Without residuals, select from the tensors themselves, and write payloads even if something is not finite.

    Args:
        xs: flat float32, not empty.
        ks: how many elements of each are selected, at least one.
        outs: where each payload is written.
        residuals: one per tensor, or none.
        decay, subtract: as for :func:`encode_topk`.
        least: if given, float32, one per tensor: is filled with the least magnitude that was selected of each. The
            residuals then have NaN where elements were selected, for :func:`keep_all`.

    Returns:
        Whether all is finite; or True, while :class:`Findings` note that on the device.
    """
    options = {"residuals": residuals, "decay": decay, "subtract": subtract, "least": least}
    return not xs or cast("bool", backend_of(xs[0]).encode_topk_all(xs, ks, outs, **options))


def compensate_select_topk_all(
    xs: Sequence[Tensor],
    ks: Sequence[int],
    outs: Sequence[Tensor],
    *,
    residuals: Sequence[Tensor] = (),
    decay: float = 1.0,
) -> tuple[bool, list[Tensor], list[Tensor]]:
    """Apply :func:`compensate_select_topk`, exact, to several tensors, and :func:`elias_fano_encode` to their indices,
    with no more GPU kernel launches than for one. Residuals then have −0 where elements were selected: what is left of
    these can be added to it.

    Without residuals, select from the tensors themselves.

    Args:
        xs, ks, residuals, decay: as for :func:`encode_topk_all`.
        outs: where indices are written, and zeros behind them.

    Returns:
        (whether all is finite, or True while :class:`Findings` note that on the device; the indices of each tensor; its
        values there).
    """
    result = backend_of(xs[0]).compensate_select_topk_all(xs, ks, outs, residuals=residuals, decay=decay)
    return cast("tuple[bool, list[Tensor], list[Tensor]]", result)


def all_finite(x: Tensor, *, below: float = math.inf) -> bool:
    """True if no element is inf or NaN, and every magnitude is below ``below``."""
    return cast("bool", backend_of(x).all_finite(x, below=below))


def difference(x: Tensor, base: Tensor, out: Tensor, *, below: float = math.inf) -> bool:
    """``out = x − base`` in one pass; True if every difference is of a magnitude below ``below``. ``out`` may be ``x``
    or ``base``.
    """
    return cast("bool", backend_of(x).difference(x, base, out, below=below))


def take_difference(x: Tensor, base: Tensor) -> bool:
    """``(x, base) ← (base, x − base)`` in one pass; True if every difference is finite."""
    return cast("bool", backend_of(x).take_difference(x, base))


def all_zero(x: Tensor) -> bool:
    """True if no element differs from zero (NaN does)."""
    return cast("bool", backend_of(x).all_zero(x))


def all_zero_each(xs: Sequence[Tensor]) -> list[bool]:
    """Return, for each of several tensors of any real floating dtypes, whether no element differs from zero (NaN does).
    The host waits once for all of them.
    """
    return cast("list[bool]", backend_of(xs[0]).all_zero_each(xs)) if xs else []


def restore_all_if(bad: Tensor, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """``out = x`` for several pairs of contiguous tensors of equal dtype, if ``bad``, one int32 on their device, is not
    zero. The host does not wait for ``bad``.
    """
    if outs:
        backend_of(outs[0]).restore_all_if(bad, outs, xs)


def poison_all_if(bad: Tensor, xs: Sequence[Tensor]) -> None:
    """Fill several tensors, of any real floating dtypes, with NaN if any element of ``bad`` is not zero. ``bad`` is
    int32 on the tensors' device; the host does not wait for it.
    """
    if xs:
        backend_of(xs[0]).poison_all_if(bad, xs)


def clear_all_if(bad: Tensor, xs: Sequence[Tensor]) -> None:
    """As :func:`poison_all_if`, with zeros instead of NaN."""
    if xs:
        backend_of(xs[0]).clear_all_if(bad, xs)
