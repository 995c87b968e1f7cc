"""Products of thin factors and orthonormal bases in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from narrowband.kernels import lowrank
from narrowband.kernels.lowrank import DEPENDENT
from narrowband.kernels.reference import common
from narrowband.kernels.reference.compensation import all_finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


__all__ = [
    "compensate_project",
    "compensate_project_all",
    "low_rank_product",
    "low_rank_products",
    "orthonormalize",
    "orthonormalize_all",
]


def low_rank_product(out: Tensor, p: Tensor, q: Tensor, *, weight: float = 1.0, accumulate: bool = False) -> None:
    rows, some = out.view(p.shape[1], q.shape[1]), max(1, common.CHUNK // q.shape[1])
    for begin in range(0, p.shape[1], some):
        part = rows[begin : begin + some]
        total = _sum_up(p[:, begin : begin + some], q) * weight
        if accumulate:
            part.add_(total)
        else:
            part.copy_(total)


def compensate_project(
    x: Tensor,
    residual: Tensor,
    q: Tensor,
    p: Tensor,
    *,
    sent: tuple[Tensor, Tensor] | None = None,
    below: float = math.inf,
) -> bool:
    old = residual.clone()
    if sent is not None:
        low_rank_product(residual, *sent, weight=-1.0, accumulate=True)
    residual.add_(x)
    x.copy_(old)
    torch.mm(q, residual.view(p.shape[1], -1).T, out=p)
    return all_finite(residual, below=below)


def _sum_up(p: Tensor, q: Tensor) -> Tensor:
    """Compute pᵀ·q, adding term by term."""
    total = p[0, :, None] * q[0]
    for k in range(1, p.shape[0]):
        total += p[k, :, None] * q[k]
    return total


def orthonormalize(p: Tensor) -> Tensor:
    rows, out = p.double(), torch.zeros(p.shape, dtype=torch.float64, device=p.device)
    for j in range(p.shape[1]):
        row = rows[:, j : j + 1]
        before = row.square().sum(-1, keepdim=True)
        for _ in range(2):  # Gram–Schmidt, repeated to remove what rounding left
            row = row - (row @ out[:, :j].mT) @ out[:, :j]
        rest = row.square().sum(-1, keepdim=True)
        dependent = rest <= DEPENDENT * before
        out[:, j : j + 1] = torch.where(dependent, 0.0, row / torch.where(dependent, 1.0, rest).sqrt())
    return out.float()


# ---- several matrices: one after the other, by the loop of the tensors' own backend ----------------------------------


def low_rank_products(outs: Sequence[Tensor], ps: Sequence[Tensor], qs: Sequence[Tensor]) -> None:
    for out, p, q in zip(outs, ps, qs, strict=True):
        lowrank.low_rank_product(out, p, q)


def compensate_project_all(
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    qs: Sequence[Tensor],
    ps: Sequence[Tensor],
    *,
    sents: Sequence[tuple[Tensor, Tensor] | None],
    below: float = math.inf,
) -> bool:
    every = True
    for x, residual, q, p, sent in zip(xs, residuals, qs, ps, sents, strict=True):
        every &= lowrank.compensate_project(x, residual, q, p, sent=sent, below=below)
    return every


def orthonormalize_all(ps: Sequence[Tensor], spares: Sequence[Tensor] = (), *, again: bool = False) -> list[Tensor]:
    outs = [lowrank.orthonormalize(p) for p in ps]
    rows = (row for out in outs for row in out)
    for row, spare in zip(rows, spares, strict=bool(spares)):
        there = (row != 0).any(-1, keepdim=True)
        row.copy_(torch.where(there, row, spare))
        if again:
            row.copy_(torch.where(there.all(), row, lowrank.orthonormalize(row[None])[0]))
    return outs
