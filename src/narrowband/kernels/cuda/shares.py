"""Shares of flat tensors, in Triton.

Elements of several tensors are sorted by owner, in three launches. First every program counts its elements of each
owner. From the counts of the programs before it, a program then knows where its elements go in a list; their order
stays. The list has room for all of them, however they are divided, so the host need not know how. Last, one program for
each owner of a tensor copies what is listed to the owner's row, or the largest, if there is no room for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, MAGNITUDE, signed, unspecific
from narrowband.kernels.cuda.launching import Segments, kernel, run, segment
from narrowband.kernels.cuda.selection import places
from narrowband.kernels.shares import SHARE_BLOCK, share_numel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.kernels.shares import Shared

__all__ = ["add_shares_all", "from_share", "split_shares_all"]

_SHARE = tl.constexpr(SHARE_BLOCK)
#: The most elements, and elements times owners, that a program sorts at once.
_SORTED, _TABLE = 1024, 8192
#: Columns of the tables of tensors: for their elements, for their rows, and for what is added.
_COLUMNS, _ROW_COLUMNS, _ADD_COLUMNS = (tl.constexpr(number) for number in (6, 9, 9))


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
def _belongs(own, part, ranks, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """Return numbers, owners and places of this program's elements, and a table of their owners, (elements, ranks)."""
    k, folded = tl.load(own + 3), tl.load(own + 4).to(tl.int32)
    i = part * WIDTH + tl.arange(0, WIDTH)
    at = tl.load(tl.load(own + 1).to(tl.pointer_type(tl.int32)) + i, mask=i < k, other=0)
    owner, local = _owner(at, ranks, folded)
    owns = (owner[:, None] == tl.arange(0, RANKS)[None, :]) & (i < k)[:, None]
    return i, owner, local, owns.to(tl.int32)


@kernel
def _columns(own, part, RANKS: tl.constexpr, ranks):
    """Return where the counts of this program's elements are, of each owner. A tensor has those of its programs one
    behind the other for the first owner, then for the second, and so on.
    """
    return ranks * tl.load(own) + tl.arange(0, RANKS) * tl.load(own + 5) + part


@unspecific
def _count(table, count, counts, ranks, RANKS: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    own, part = segment(table, count, _COLUMNS, SEGMENTS)
    _, _, _, owns = _belongs(own, part, ranks, RANKS, WIDTH)
    column = _columns(own, part, RANKS, ranks)
    tl.store(counts + column, tl.sum(owns, 0), mask=tl.arange(0, RANKS) < ranks)


@unspecific
def _deal(
    table, count, counts, ends, listed, size, ranks,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """List this program's elements, those of each owner together: their indices in the share and, ``size`` numbers
    behind, their values.

    ``ends``: the number of elements up to those of a tensor, owner and program, of which ``counts`` are the program's.
    """
    own, part = segment(table, count, _COLUMNS, SEGMENTS)
    i, _, local, owns = _belongs(own, part, ranks, RANKS, WIDTH)
    column, there = _columns(own, part, RANKS, ranks), tl.arange(0, RANKS) < ranks
    first = tl.load(ends + column, mask=there, other=0) - tl.load(counts + column, mask=there, other=0)
    place = tl.sum(owns * (first[None, :] + tl.cumsum(owns, 0) - 1), 1)
    k = tl.load(own + 3)
    value = tl.load(tl.load(own + 2).to(tl.pointer_type(tl.int32)) + i, mask=i < k, other=0)
    tl.store(listed + place, local, mask=i < k)
    tl.store(listed + size + place, value, mask=i < k)


@kernel
def _find_digit(values, number, level, wanted, KNOWN: tl.constexpr, WIDTH: tl.constexpr):
    """Return the wanted-largest magnitude of these values with one more digit, where ``level`` has so many known ones;
    and its rank among magnitudes that share them.
    """
    VALUES: tl.constexpr = 256 if KNOWN < 3 else 128
    DOWN: tl.constexpr = 23 - 8 * KNOWN if KNOWN < 3 else 0
    UP: tl.constexpr = 31 - 8 * KNOWN
    counts = tl.zeros((VALUES,), tl.int32)
    for first in range(0, number, WIDTH):
        j = first + tl.arange(0, WIDTH)
        magnitude = tl.load(values + j, mask=j < number, other=0) & MAGNITUDE
        there = (j < number) & (magnitude >> UP == level >> UP)
        counts += tl.histogram((magnitude >> DOWN) & (VALUES - 1), VALUES, mask=there)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # how many have a larger digit
    digit = tl.sum((above >= wanted).to(tl.int32), 0)
    taken = tl.sum(tl.where(tl.arange(0, VALUES) > digit, counts, 0), 0)
    return level + (digit << DOWN), wanted - taken


@kernel
def _threshold(values, number, room, WIDTH: tl.constexpr):
    """Return the magnitude, as an integer, of the room-th largest of these values; and how many with it are taken."""
    level, wanted = room * 0, room
    for known in tl.static_range(4):
        level, wanted = _find_digit(values, number, level, wanted, known, WIDTH)
    return level, wanted


@unspecific
def _fit(
    table, count, ends, listed, size, local, sorted_values, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr
):  # fmt: skip
    """Write the elements that one owner has of a tensor into its row: the largest, if there is no room for all."""
    own, owner = segment(table, count, _ROW_COLUMNS, SEGMENTS)
    programs, room, start = tl.load(own + 2), tl.load(own + 3).to(tl.int32), tl.load(own + 4)
    before = tl.load(own + 1) + owner * programs - 1
    begin = tl.load(ends + before, mask=before >= 0, other=0)
    number = tl.load(ends + before + programs, mask=before + programs >= 0, other=0) - begin
    first, last = tl.load(own + 5).to(tl.int32), tl.load(own + 6).to(tl.int32)
    indices, values = listed + begin, listed + size + begin
    local += start + owner * tl.load(own + 7)
    sorted_values += start + owner * tl.load(own + 8)
    level = -1
    allowed = 0
    if number > room:
        level, allowed = _threshold(values, number, room, WIDTH)
    above = 0
    ties = 0
    for tile in range(0, number, WIDTH):
        j = tile + tl.arange(0, WIDTH)
        there = j < number
        bits = tl.load(values + j, mask=there, other=0)
        magnitude = tl.where(there, bits & MAGNITUDE, -2)
        taken, place, more, more_ties = places(magnitude, level, above, ties, allowed)
        tl.store(local + place, tl.load(indices + j, mask=there, other=0) + first, mask=taken)
        tl.store(sorted_values + place, bits.to(tl.float32, bitcast=True), mask=taken)
        above += more
        ties += more_ties
    for tile in range(number // WIDTH * WIDTH, room, WIDTH):
        j = tile + tl.arange(0, WIDTH)
        tl.store(local + j, tl.zeros((WIDTH,), tl.int32) + last, mask=(j >= number) & (j < room))
        tl.store(sorted_values + j, tl.zeros((WIDTH,), tl.float32), mask=(j >= number) & (j < room))


@kernel
def _tensor_index(at, owner, ranks, folded):
    """Return the index in the tensor of elements with these indices in their owners' shares."""
    row = at // _SHARE
    block = owner.to(tl.int32) - _shift(row, ranks, folded)
    block = tl.where(block < 0, block + ranks, block)
    return (row * ranks + block) * _SHARE + at % _SHARE


@unspecific
def _add(table, count, local, values, ranks, weight, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    own, part = segment(table, count, _ADD_COLUMNS, SEGMENTS)
    out = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    n, room, start = tl.load(own + 2), tl.load(own + 3).to(tl.int32), tl.load(own + 4)
    i = part.to(tl.int32) * WIDTH + tl.arange(0, WIDTH)
    owner, there = (i // room).to(tl.int64), i < ranks * room
    column = start + (i % room)
    at = tl.load(local + owner * tl.load(own + 7) + column, mask=there, other=0) - tl.load(own + 5).to(tl.int32)
    value = tl.load(values + owner * tl.load(own + 8) + column, mask=there, other=0.0)
    index = _tensor_index(at, owner, ranks, tl.load(own + 6).to(tl.int32))
    there &= (value != 0.0) & (index >= 0) & (index < n)
    tl.store(out + index, tl.load(out + index, mask=there, other=0.0) + value * weight, mask=there)


@kernel
def _whole(local, out, n, ranks, room, apart, folded, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    owner = i // room
    at = tl.load(local + owner * apart + (i - owner * room), mask=i < n, other=0)
    tl.store(out + i, _tensor_index(at, owner, ranks, folded), mask=i < n)


def _folded(turn: int) -> int:
    return signed(turn * 0x85EBCA77 & 0xFFFFFFFF)


def split_shares_all(
    tensors: Sequence[Shared],
    indices: Sequence[Tensor],
    values: Sequence[Tensor],
    local: Tensor,
    sorted_values: Tensor,
) -> None:
    ranks, device = local.shape[0], local.device
    lanes = triton.next_power_of_2(ranks)
    width = max(16, min(_SORTED, _TABLE // lanes))
    elements, rows, size = Segments(local), Segments(local), sum(at.numel() for at in indices)
    for tensor, at, own in zip(tensors, indices, values, strict=True):
        k, last = at.numel(), tensor.first + max(0, share_numel(tensor.n, ranks) - 1)
        programs, before = -(-k // width), ranks * elements.programs
        elements.add(programs, at.data_ptr(), own.data_ptr(), k, _folded(tensor.turn), programs)
        row = before, programs, tensor.room, tensor.columns.start, tensor.first, last
        rows.add(ranks if tensor.room else 0, *row, local.stride(0), sorted_values.stride(0))
    counts = torch.empty(ranks * elements.programs, dtype=torch.int32, device=device)
    elements.run(_count, counts, ranks, RANKS=lanes, WIDTH=width)
    ends = counts.cumsum(0, dtype=torch.int32)
    listed = torch.empty(2 * size, dtype=torch.int32, device=device)
    elements.run(_deal, counts, ends, listed, size, ranks, RANKS=lanes, WIDTH=width)
    rows.run(_fit, ends, listed, size, local, sorted_values, WIDTH=BLOCK)


def add_shares_all(
    outs: Sequence[Tensor], tensors: Sequence[Shared], local: Tensor, values: Tensor, weight: float = 1.0
) -> None:
    ranks, segments = local.shape[0], Segments(local)
    for out, tensor in zip(outs, tensors, strict=True):
        place = out.data_ptr(), tensor.n, tensor.room, tensor.columns.start, tensor.first, _folded(tensor.turn)
        segments.add(-(-ranks * tensor.room // BLOCK), *place, local.stride(0), values.stride(0))
    segments.run(_add, local, values, ranks, float(weight), WIDTH=BLOCK)


def from_share(local: Tensor, *, turn: int) -> Tensor:
    ranks, room = local.shape
    out = torch.empty((ranks, room), dtype=torch.int32, device=local.device)
    form = out.numel(), ranks, room, local.stride(0), _folded(turn)
    run(_whole, -(-out.numel() // BLOCK), local, out, *form, on=local, WIDTH=BLOCK)
    return out
