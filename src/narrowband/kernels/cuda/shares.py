"""Shares of a flat tensor, in Triton.

Elements are sorted by owner, in two launches. First every program counts its elements of each owner. From the counts of
the programs before it, a program then knows where its elements go; their order stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, signed
from narrowband.kernels.cuda.launching import kernel, run
from narrowband.kernels.shares import SHARE_BLOCK, share_numel

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["from_share", "split_shares"]

_SHARE = tl.constexpr(SHARE_BLOCK)
#: The most elements, and elements times owners, that a program sorts at once.
_SORTED, _TABLE = 1024, 8192


@kernel
def _shift(row, ranks, folded):
    """Return by how many ranks the owners of a row's blocks are shifted."""
    h = row.to(tl.uint32) * 0x9E3779B1 + folded.to(tl.uint32)
    h = (h ^ (h >> 15)) * 0x2C1B3C6D
    return ((h ^ (h >> 13)) % (row * 0 + ranks).to(tl.uint32)).to(tl.int32)


@kernel
def _owner(at, ranks, folded):
    """Return the owner of each element, and its index in the owner's share. Indices have 32 bits: 64-bit division takes
    four times as long.
    """
    block = at // _SHARE
    row = block // ranks
    owner = block - row * ranks + _shift(row, ranks, folded)
    return tl.where(owner < ranks, owner, owner - ranks), row * _SHARE + at % _SHARE


@kernel
def _belongs(indices, k, ranks, folded, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """Return numbers, owners and places of this program's elements, and a table of their owners, (elements, ranks)."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    owner, local = _owner(tl.load(indices + i, mask=i < k, other=0), ranks, folded)
    owns = (owner[:, None] == tl.arange(0, RANKS)[None, :]) & (i < k)[:, None]
    return i, owner, local, owns.to(tl.int32)


@kernel
def _count(indices, counts, k, ranks, folded, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    _, _, _, owns = _belongs(indices, k, ranks, folded, RANKS, WIDTH)
    rank = tl.arange(0, RANKS)
    tl.store(counts + rank * tl.num_programs(0) + tl.program_id(0), tl.sum(owns, 0), mask=rank < ranks)


@kernel
def _deal(
    indices, values, ends, counts, local, sorted_values, k, ranks, room, apart, values_apart, folded,
    RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write this program's elements to the tables.

    ``ends``: the number of elements of an owner in the programs up to this one, of which ``counts`` are this program's.
    """
    i, owner, own, owns = _belongs(indices, k, ranks, folded, RANKS, WIDTH)
    rank = tl.arange(0, RANKS)
    column = rank * tl.num_programs(0) + tl.program_id(0)
    end = tl.load(ends + column, mask=rank < ranks, other=0)
    first = end - tl.load(counts + column, mask=rank < ranks, other=0)
    place = tl.sum(owns * (first[None, :] + tl.cumsum(owns, 0) - 1), 1)
    fits = (i < k) & (place < room)
    owner = owner.to(tl.int64)
    tl.store(local + owner * apart + place, own, mask=fits)
    tl.store(sorted_values + owner * values_apart + place, tl.load(values + i, mask=i < k, other=0.0), mask=fits)


@kernel
def _whole(local, out, n, ranks, room, apart, folded, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    owner = i // room
    at = tl.load(local + owner * apart + (i - owner * room), mask=i < n, other=0)
    row = at // _SHARE
    block = owner.to(tl.int32) - _shift(row, ranks, folded)
    block = tl.where(block < 0, block + ranks, block)
    tl.store(out + i, (row * ranks + block) * _SHARE + at % _SHARE, mask=i < n)


def _folded(turn: int) -> int:
    return signed(turn * 0x85EBCA77 & 0xFFFFFFFF)


def split_shares(indices: Tensor, values: Tensor, local: Tensor, sorted_values: Tensor, *, n: int, turn: int) -> Tensor:
    (ranks, room), k = local.shape, indices.numel()
    local.fill_(max(0, share_numel(n, ranks) - 1))
    sorted_values.zero_()
    if not k:
        return torch.zeros((), dtype=torch.int64, device=indices.device)
    columns = triton.next_power_of_2(ranks)
    width = max(16, min(_SORTED, _TABLE // columns))
    programs, tile = -(-k // width), {"RANKS": columns, "WIDTH": width}
    counts = torch.empty(ranks, programs, dtype=torch.int32, device=indices.device)
    run(_count, programs, indices, counts, k, ranks, _folded(turn), on=indices, **tile)
    ends = counts.cumsum(1, dtype=torch.int32)
    tables = local, sorted_values, k, ranks, room, local.stride(0), sorted_values.stride(0)
    run(_deal, programs, indices, values, ends, counts, *tables, _folded(turn), on=indices, **tile)
    return ends[:, -1].amax().long()


def from_share(local: Tensor, *, turn: int) -> Tensor:
    ranks, room = local.shape
    out = torch.empty((ranks, room), dtype=torch.int32, device=local.device)
    form = out.numel(), ranks, room, local.stride(0), _folded(turn)
    run(_whole, -(-out.numel() // BLOCK), local, out, *form, on=local, WIDTH=BLOCK)
    return out
