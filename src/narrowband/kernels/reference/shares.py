"""Shares of a flat tensor in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference.selection import select_topk
from narrowband.kernels.shares import SHARE_BLOCK, share_numel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.kernels.shares import Shared

__all__ = ["add_shares_all", "from_share", "split_shares_all"]


def _shift(rows: Tensor, ranks: int, turn: int) -> Tensor:
    """Return by how many ranks the owners of a row's blocks are shifted: 0 to ranks − 1."""
    h = (rows * 0x9E3779B1 + turn * 0x85EBCA77) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (h ^ (h >> 13)) % ranks


def split_shares_all(
    tensors: Sequence[Shared],
    indices: Sequence[Tensor],
    values: Sequence[Tensor],
    local: Tensor,
    sorted_values: Tensor,
) -> None:
    ranks = local.shape[0]
    for tensor, at, own in zip(tensors, indices, values, strict=True):
        owners, places = _owners(at, ranks, tensor.turn)
        local[:, tensor.columns] = tensor.first + max(0, share_numel(tensor.n, ranks) - 1)
        sorted_values[:, tensor.columns] = 0.0
        for rank in range(ranks):
            theirs = (owners == rank).nonzero().view(-1)
            if theirs.numel() > tensor.room:
                theirs = theirs[select_topk(own[theirs], tensor.room).long()]
            columns = slice(tensor.columns.start, tensor.columns.start + theirs.numel())
            local[rank, columns] = tensor.first + places[theirs]
            sorted_values[rank, columns] = own[theirs]


def _owners(indices: Tensor, ranks: int, turn: int) -> tuple[Tensor, Tensor]:
    """Return the owner of each element, and its index in the owner's share."""
    at = indices.long()
    block = at // SHARE_BLOCK
    rows = block // ranks
    owner = (block % ranks + _shift(rows, ranks, turn)) % ranks
    return owner, (rows * SHARE_BLOCK + at % SHARE_BLOCK).to(torch.int32)


def add_shares_all(
    outs: Sequence[Tensor], tensors: Sequence[Shared], local: Tensor, values: Tensor, weight: float = 1.0
) -> None:
    for out, tensor in zip(outs, tensors, strict=True):
        at, own = from_share(local[:, tensor.columns] - tensor.first, turn=tensor.turn), values[:, tensor.columns]
        there = (own != 0.0) & (at >= 0) & (at < tensor.n)
        out.index_add_(0, at[there], own[there] * weight)


def from_share(local: Tensor, *, turn: int) -> Tensor:
    ranks = local.shape[0]
    at = local.long()
    rows = at // SHARE_BLOCK
    owner = torch.arange(ranks, dtype=torch.int64, device=local.device)[:, None]
    block = (owner - _shift(rows, ranks, turn)) % ranks
    return ((rows * ranks + block) * SHARE_BLOCK + at % SHARE_BLOCK).to(torch.int32)
