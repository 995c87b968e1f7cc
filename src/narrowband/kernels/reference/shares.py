"""Shares of a flat tensor in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.shares import SHARE_BLOCK, share_numel

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["from_share", "split_shares"]


def _shift(rows: Tensor, ranks: int, turn: int) -> Tensor:
    """Return by how many ranks the owners of a row's blocks are shifted: 0 to ranks − 1."""
    h = (rows * 0x9E3779B1 + turn * 0x85EBCA77) & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (h ^ (h >> 13)) % ranks


def split_shares(indices: Tensor, values: Tensor, local: Tensor, sorted_values: Tensor, *, n: int, turn: int) -> Tensor:
    ranks, room = local.shape
    at = indices.long()
    block = at // SHARE_BLOCK
    rows = block // ranks
    owner = (block % ranks + _shift(rows, ranks, turn)) % ranks
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=ranks)
    first = counts.cumsum(0) - counts
    row = owner[order]
    place = torch.arange(order.numel(), dtype=torch.int64, device=order.device) - first[row]
    fits = place < room
    row, place, order = row[fits], place[fits], order[fits]
    local.fill_(max(0, share_numel(n, ranks) - 1))
    sorted_values.zero_()
    local[row, place] = (rows * SHARE_BLOCK + at % SHARE_BLOCK).to(torch.int32)[order]
    sorted_values[row, place] = values[order]
    return counts.amax()


def from_share(local: Tensor, *, turn: int) -> Tensor:
    ranks = local.shape[0]
    at = local.long()
    rows = at // SHARE_BLOCK
    owner = torch.arange(ranks, dtype=torch.int64, device=local.device)[:, None]
    block = (owner - _shift(rows, ranks, turn)) % ranks
    return ((rows * ranks + block) * SHARE_BLOCK + at % SHARE_BLOCK).to(torch.int32)
