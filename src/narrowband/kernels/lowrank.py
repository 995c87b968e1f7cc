"""Low rank: products of two thin factors, and orthonormal bases (PowerSGD)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "DEPENDENT",
    "compensate_project",
    "compensate_project_all",
    "low_rank_product",
    "low_rank_products",
    "orthonormalize",
    "orthonormalize_all",
]


#: A row is linearly dependent on the rows before it, as far as float32 can tell, if subtracting its share of them
#: leaves less than this share of its squared norm.
DEPENDENT = 1e-12


def low_rank_product(out: Tensor, p: Tensor, q: Tensor, *, weight: float = 1.0, accumulate: bool = False) -> None:
    """``out = weight · pᵀ·q`` or, accumulating, ``out += weight · pᵀ·q``.

    p is (r, n), q (r, m) with r ≥ 1, out flat of n·m elements, all float32 and contiguous. Every element's r terms are
    added in their order, without fused multiply-add, so that ranks on different machines get the same bits.
    """
    backend_of(out).low_rank_product(out, p, q, weight=weight, accumulate=accumulate)


def low_rank_products(outs: Sequence[Tensor], ps: Sequence[Tensor], qs: Sequence[Tensor]) -> None:
    """:func:`low_rank_product` for several matrices, with no more GPU kernel launches than for one."""
    if outs:
        backend_of(outs[0]).low_rank_products(outs, ps, qs)


def compensate_project(
    x: Tensor,
    residual: Tensor,
    q: Tensor,
    p: Tensor,
    *,
    sent: tuple[Tensor, Tensor] | None = None,
    below: float = math.inf,
) -> bool:
    """``(x, residual) ← (residual, (residual − sent) + x)`` and ``p ← q·residualᵀ`` of the new residual, in one pass.

    x and residual are flat, of n·m elements, q is (r, m), p (r, n). ``sent`` are the factors of the subtracted product,
    as for :func:`low_rank_product`, of any rank. Afterwards ``x`` holds the residual before the call: copying it back
    undoes the call, to the bit.

    Returns whether every element of the new residual is of a magnitude below ``below``.
    """
    return cast("bool", backend_of(x).compensate_project(x, residual, q, p, sent=sent, below=below))


def compensate_project_all(
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    qs: Sequence[Tensor],
    ps: Sequence[Tensor],
    *,
    sents: Sequence[tuple[Tensor, Tensor] | None],
    below: float = math.inf,
) -> bool:
    """:func:`compensate_project` for several matrices, with about as many GPU kernel launches as for one."""
    if not xs:
        return True
    return cast("bool", backend_of(xs[0]).compensate_project_all(xs, residuals, qs, ps, sents=sents, below=below))


def orthonormalize(p: Tensor) -> Tensor:
    """Return orthonormal rows that span the same space as those of p (Gram–Schmidt): each row minus its share of the
    rows before it, divided by its norm.

    p is (count, r, n), float32 and contiguous: count matrices. A row of zeros becomes a row of zeros, and so does a row
    that depends on those before it (it keeps less than :data:`DEPENDENT` of its squared norm). Sums are in float64 and
    in an order of the loop's own, so that ranks on different machines get the same bits. NaN stays NaN.
    """
    return cast("Tensor", backend_of(p).orthonormalize(p))


def orthonormalize_all(ps: Sequence[Tensor], spares: Sequence[Tensor] = (), *, again: bool = False) -> list[Tensor]:
    """:func:`orthonormalize` for several tensors, each (count, r, n) of its own, with about as many GPU kernel launches
    as for one.

    Args:
        ps: the tensors.
        spares: (r, n) for each matrix of each tensor, in order: its rows take the place of rows that would be zeros.
            They are not orthonormal to the rest.
        again: whether matrices that got such rows are then made orthonormal once more, so that all rows are.
    """
    return cast("list[Tensor]", backend_of(ps[0]).orthonormalize_all(ps, spares, again=again)) if ps else []
