"""Mixed error feedback in plain torch: one tensor after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference.compensation import compensate, write_indices, write_payload
from narrowband.kernels.reference.selection import select_topk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["encode_mixed_all"]


def encode_mixed_all(
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    ks: Sequence[int],
    outs: Sequence[Tensor],
    *,
    decay: float = 1.0,
    parts: bool = False,
    values: Sequence[Tensor] = (),
) -> tuple[bool, list[Tensor]]:
    finite, indices = True, []
    for number, (x, residual, k, out) in enumerate(zip(xs, residuals, ks, outs, strict=True)):
        at, found = _chosen(x, residual, k, decay, parts)
        finite &= compensate(x, residual, decay=decay)
        whole = torch.cat([at, at.new_full((k - at.numel(),), x.numel() - 1)])
        indices.append(whole)
        if values:
            values[number].zero_()[: at.numel()].copy_(found)
            write_indices(whole, x.numel(), out)
        else:
            write_payload(at, found, x.numel(), k, out)
            residual[at] = residual[at] - found if parts else 0.0
    return finite, indices


def _chosen(x: Tensor, residual: Tensor, k: int, decay: float, parts: bool) -> tuple[Tensor, Tensor]:
    """Return the chosen indices, and the values there."""
    if not bool(residual.any()):
        by_input, by_residual = select_topk(x, k), x.new_empty(0, dtype=torch.int32)
    else:
        by_input, by_residual = select_topk(x, -(-k // 2)), select_topk(residual, k // 2)
    at = torch.unique(torch.cat([by_input, by_residual]))  # sorted
    if not parts:
        return at, residual[at] * decay + x[at]
    values = torch.zeros(at.numel(), dtype=torch.float32, device=x.device)
    for chosen, of in ((by_input, x[by_input]), (by_residual, residual[by_residual] * decay)):
        values.index_add_(0, torch.searchsorted(at, chosen), of)
    return at, values
