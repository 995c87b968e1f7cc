"""Shares of a flat tensor on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from narrowband.kernels.cpu.loops import F32, I32, At, inlined, loop
from narrowband.kernels.shares import share_numel

if TYPE_CHECKING:
    from torch import Tensor

#: Elements of a block, as a power of two; see :data:`narrowband.kernels.shares.SHARE_BLOCK`.
_BITS = 4


@inlined
def _shift(row, ranks, turn):
    h = np.int64((row * 0x9E3779B1 + turn) & 0xFFFFFFFF)
    h = np.int64(((h ^ (h >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF)
    return np.int64((h ^ (h >> 13)) % ranks)


@loop
def _split(indices, values, turn, last_local, counts, local, sorted_values):
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
            local[owner, place] = I32((row << _BITS) + (at & ((1 << _BITS) - 1)))
            sorted_values[owner, place] = values[At(i)]
    for owner in range(ranks):
        for place in range(counts[owner], room):
            local[owner, place] = last_local
            sorted_values[owner, place] = F32(0)


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


def split_shares(indices: Tensor, values: Tensor, local: Tensor, sorted_values: Tensor, *, n: int, turn: int) -> Tensor:
    counts = np.zeros(local.shape[0], np.int64)
    last = I32(max(0, share_numel(n, local.shape[0]) - 1))
    tables = local.numpy(), sorted_values.numpy()
    _split(indices.numpy(), values.numpy(), _turned(turn), last, counts, *tables)
    return torch.from_numpy(counts).amax()


def from_share(local: Tensor, *, turn: int) -> Tensor:
    out = torch.empty(local.shape, dtype=torch.int32, device="cpu")
    _whole(local.numpy(), _turned(turn), out.numpy())
    return out
