"""Shares of a flat tensor on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from narrowband.kernels.cpu.loops import F32, I32, At, inlined, loop
from narrowband.kernels.cpu.selection import select_topk
from narrowband.kernels.shares import share_numel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.kernels.shares import Shared

#: Elements of a block, as a power of two; see :data:`narrowband.kernels.shares.SHARE_BLOCK`.
_BITS = 4


@inlined
def _shift(row, ranks, turn):
    h = np.int64((row * 0x9E3779B1 + turn) & 0xFFFFFFFF)
    h = np.int64(((h ^ (h >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF)
    return np.int64((h ^ (h >> 13)) % ranks)


@loop
def _split(indices, values, turn, first, last_local, counts, local, sorted_values):
    """Write each element to the next place of its owner's table row, while there is room. The hash is computed once per
    row of blocks.
    """
    ranks, room = local.shape
    row_before, shift = np.int64(-1), np.int64(0)
    for i in range(indices.size):
        at = np.int64(indices[At(i)])
        block = at >> _BITS
        row = block // ranks
        if row != row_before:
            row_before, shift = row, _shift(row, ranks, turn)
        owner = block - row * ranks + shift
        if owner >= ranks:
            owner -= ranks
        place = counts[owner]
        counts[owner] = place + 1
        if place < room:
            local[owner, place] = I32(first + (row << _BITS) + (at & ((1 << _BITS) - 1)))
            sorted_values[owner, place] = values[At(i)]
    for owner in range(ranks):
        for place in range(counts[owner], room):
            local[owner, place] = last_local
            sorted_values[owner, place] = F32(0)


@loop
def _add(out, local, values, turn, first, weight):
    """Add the values of a table to the elements that they belong to, except those behind the last element."""
    ranks = local.shape[0]
    for owner in range(ranks):
        row_before, block = np.int64(-1), np.int64(0)
        for i in range(local.shape[1]):
            value = values[owner, i]
            if value == F32(0):
                continue
            at = np.int64(local[owner, i]) - first
            row = at >> _BITS
            if row != row_before:
                row_before = row
                block = owner - _shift(row, ranks, turn)
                if block < 0:
                    block += ranks
            index = ((row * ranks + block) << _BITS) + (at & ((1 << _BITS) - 1))
            if 0 <= index < out.size:
                out[index] += F32(weight * value)


@loop
def _whole(local, turn, out):
    ranks = local.shape[0]
    for owner in range(ranks):
        row_before, block = np.int64(-1), np.int64(0)
        for i in range(local.shape[1]):
            at = np.int64(local[owner, i])
            row = at >> _BITS
            if row != row_before:
                row_before = row
                block = owner - _shift(row, ranks, turn)
                if block < 0:
                    block += ranks
            out[owner, i] = I32(((row * ranks + block) << _BITS) + (at & ((1 << _BITS) - 1)))


def _turned(turn: int) -> int:
    return turn * 0x85EBCA77 & 0xFFFFFFFF


def split_shares_all(
    tensors: Sequence[Shared],
    indices: Sequence[Tensor],
    values: Sequence[Tensor],
    local: Tensor,
    sorted_values: Tensor,
) -> None:
    ranks = local.shape[0]
    for tensor, at, own in zip(tensors, indices, values, strict=True):
        counts, tables = np.zeros(ranks, np.int64), (local[:, tensor.columns], sorted_values[:, tensor.columns])
        given = at.numpy(), own.numpy(), _turned(tensor.turn), np.int64(tensor.first)
        last = I32(tensor.first + max(0, share_numel(tensor.n, ranks) - 1))
        _split(*given, last, counts, *(table.numpy() for table in tables))
        most = int(counts.max())
        if most <= tensor.room:
            continue
        wide = tuple(torch.empty(ranks, most, dtype=table.dtype, device="cpu") for table in tables)
        _split(*given, last, np.zeros(ranks, np.int64), *(table.numpy() for table in wide))
        for rank in (counts > tensor.room).nonzero()[0].tolist():
            number = int(counts[rank])
            largest = select_topk(wide[1][rank, :number], tensor.room).long()
            for table, source in zip(tables, wide, strict=True):
                table[rank] = source[rank, largest]


def add_shares_all(
    outs: Sequence[Tensor], tensors: Sequence[Shared], local: Tensor, values: Tensor, weight: float = 1.0
) -> None:
    for out, tensor in zip(outs, tensors, strict=True):
        tables = (table[:, tensor.columns].numpy() for table in (local, values))
        _add(out.numpy(), *tables, _turned(tensor.turn), np.int64(tensor.first), F32(weight))


def from_share(local: Tensor, *, turn: int) -> Tensor:
    out = torch.empty(local.shape, dtype=torch.int32, device="cpu")
    _whole(local.numpy(), _turned(turn), out.numpy())
    return out
