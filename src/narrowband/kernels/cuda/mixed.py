"""Mixed error feedback in Triton: two selections, whose sorted lists of indices are merged into one.

How many elements each of the two selects depends on whether a residual is all zeros. The device decides that, and so
the host waits for nothing. An element that both have selected appears once in the merged list. Its place there is its
place in its own list, plus the number of smaller indices in the other list, minus the number of smaller indices that
are in both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, MAGNITUDE, all_below, rooms, whole_words
from narrowband.kernels.cuda.launching import Segments, kernel, segment
from narrowband.kernels.cuda.selection import choose_all
from narrowband.kernels.cuda.sources import Source
from narrowband.kernels.cuda.sparse import write_lower, write_upper
from narrowband.kernels.cuda.tables import Target
from narrowband.kernels.sparse import elias_fano_low_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["encode_mixed_all"]

#: Elements that a program looks at to find one that is not zero; indices of a list that a program merges; bytes of each
#: part of a payload that one program writes.
_SHARE, _PIECE, _PART = 1 << 14, 1024, 512

#: Columns of the table, behind the first programs of a tensor in three grids: x and its residual, flag whether the
#: latter has an element that is not zero; the two lists of indices and their values; how many indices each program has
#: in common with the other list; the merged list, and its values; what the payload's indices are written to.
_X, _RESIDUAL, _FLAG, _A, _A_VALUES, _B, _B_VALUES, _COUNTS, _MERGED, _VALUES, _OUT = (
    tl.constexpr(at) for at in range(3, 14)
)
#: Elements, elements to select; and of the payload's indices: bits of one in the lower part, bytes of the upper part,
#: of the lower one, and of all.
_N, _K, _LOW_BITS, _CUT, _NBYTES, _SIZE = (tl.constexpr(at) for at in range(14, 20))
_COLUMNS = tl.constexpr(20)

#: Grids of the table: whole tensors, pieces of both lists, parts of payloads.
_ELEMENTS, _PIECES, _PARTS = range(3)


@kernel
def _find_nonzero(
    table, count, GRID: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr
):  # fmt: skip
    """Set the flag of a residual with an element that is not zero. Programs that find it set look at nothing."""
    own, part = segment(table, count, _COLUMNS, SEGMENTS, GRID)
    flag = tl.load(own + _FLAG).to(tl.pointer_type(tl.int32))
    if tl.load(flag) == 0:
        residual, n = tl.load(own + _RESIDUAL).to(tl.pointer_type(tl.float32)), tl.load(own + _N)
        seen = tl.zeros((WIDTH,), tl.int32)
        for first in range(0, SHARE, WIDTH):
            i = part * SHARE + first + tl.arange(0, WIDTH)
            seen |= tl.load(residual + i, mask=i < n, other=0.0).to(tl.int32, bitcast=True) & MAGNITUDE
        tl.store(flag, 1, mask=tl.max(seen, 0) != 0)


@kernel
def _compensate_segments(
    table, count, tops, decay,
    GRID: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Add a share of a tensor to its decayed residual, swap their memory, and note the largest magnitude."""
    own, part = segment(table, count, _COLUMNS, SEGMENTS, GRID)
    x = tl.load(own + _X).to(tl.pointer_type(tl.float32))
    residual, n = tl.load(own + _RESIDUAL).to(tl.pointer_type(tl.float32)), tl.load(own + _N)
    top = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, SHARE, WIDTH):
        i = part * SHARE + first + tl.arange(0, WIDTH)
        old = tl.load(residual + i, mask=i < n, other=0.0)
        total = old * decay + tl.load(x + i, mask=i < n, other=0.0)
        tl.store(residual + i, total, mask=i < n)
        tl.store(x + i, old, mask=i < n)
        top = tl.maximum(top, total.to(tl.int32, bitcast=True) & MAGNITUDE)
    tl.store(tops + tl.program_id(0), tl.max(top, 0))


@kernel
def _lists(own, part, WIDTH: tl.constexpr):
    """Return a program's piece of a list: whether it is the second one, the program's number among those of its list,
    places in the list, indices there (−1 behind the end), the number of smaller ones in the other list, and whether the
    index is there, too.
    """
    k = tl.load(own + _K)
    flag = tl.load(tl.load(own + _FLAG).to(tl.pointer_type(tl.int32)))
    by_x, by_residual = tl.where(flag != 0, (k + 1) // 2, k), tl.where(flag != 0, k // 2, 0)
    pieces = (k + WIDTH - 1) // WIDTH
    second = part >= pieces
    mine = tl.load(own + tl.where(second, _B, _A)).to(tl.pointer_type(tl.int32))
    other = tl.load(own + tl.where(second, _A, _B)).to(tl.pointer_type(tl.int32))
    number, others = tl.where(second, by_residual, by_x), tl.where(second, by_x, by_residual)
    piece = part - tl.where(second, pieces, 0)
    j = piece * WIDTH + tl.arange(0, WIDTH)
    index = tl.load(mine + j, mask=j < number, other=-1)
    begin, end, width = j * 0, j * 0 + others, others
    while width > 0:
        middle = (begin + end) >> 1
        there = middle < end
        less = there & (tl.load(other + middle, mask=there, other=0) < index)
        begin = tl.where(less, middle + 1, begin)
        end = tl.where(less, end, middle)
        width = width >> 1
    both = (index >= 0) & (tl.load(other + begin, mask=begin < others, other=-2) == index)
    return second, piece, j, index, begin, both


@kernel
def _count_common(table, count, GRID: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    """Count the indices of a piece that the other list has, too."""
    own, part = segment(table, count, _COLUMNS, SEGMENTS, GRID)
    _second, _piece, _j, _index, _begin, both = _lists(own, part, WIDTH)
    tl.store(tl.load(own + _COUNTS).to(tl.pointer_type(tl.int32)) + part, tl.sum(both.to(tl.int32), 0))


@kernel
def _merge(
    table, count, decay,
    PARTS: tl.constexpr, SUBTRACT: tl.constexpr, GRID: tl.constexpr, SHARERS: tl.constexpr, WIDTH: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Write the indices and values of a piece to their places in the merged list. With SUBTRACT, subtract the values
    from the residual, which holds the sum. The programs of the first list also fill up behind the merged list's end.
    """
    own, part = segment(table, count, _COLUMNS, SEGMENTS, GRID)
    second, piece, j, index, begin, both = _lists(own, part, WIDTH)
    k, n = tl.load(own + _K), tl.load(own + _N)
    merged = tl.load(own + _MERGED).to(tl.pointer_type(tl.int32))
    values = tl.load(own + _VALUES).to(tl.pointer_type(tl.float32))
    residual = tl.load(own + _RESIDUAL).to(tl.pointer_type(tl.float32))
    flag = tl.load(tl.load(own + _FLAG).to(tl.pointer_type(tl.int32)))
    pieces = (k + WIDTH - 1) // WIDTH
    counts, sharer = tl.load(own + _COUNTS).to(tl.pointer_type(tl.int32)), tl.arange(0, SHARERS)
    earlier = tl.load(counts + tl.where(second, pieces, 0) + sharer, mask=sharer < piece, other=0)
    common = tl.sum(tl.load(counts + sharer, mask=sharer < pieces, other=0), 0)
    shared = both.to(tl.int32)
    place = j + begin - (tl.sum(earlier, 0) + tl.cumsum(shared, 0) - shared)
    firsts = tl.where(second, 0, k)  # places of the first list
    taken = (index >= 0) & ((j < firsts) | (shared == 0))
    total = tl.load(residual + index, mask=taken, other=0.0)
    value = total
    if PARTS:
        a = tl.load(own + _A_VALUES).to(tl.pointer_type(tl.float32))
        b = tl.load(own + _B_VALUES).to(tl.pointer_type(tl.float32))
        by_x, by_residual = taken & (j < firsts), taken & ((j >= firsts) | both)
        value = tl.zeros((WIDTH,), tl.float32) + tl.load(a + j, mask=by_x, other=0.0)
        value += tl.load(b + tl.where(second, j, begin), mask=by_residual, other=0.0) * decay
    tl.store(merged + place, index, mask=taken)
    tl.store(values + place, value, mask=taken)
    if SUBTRACT:
        tl.debug_barrier()  # a thread may store what another has loaded
        tl.store(residual + index, total - value if PARTS else tl.zeros_like(total), mask=taken)
    end = tl.where(flag != 0, (k + 1) // 2 + k // 2, k) - common
    behind = (j >= end) & (j < firsts)
    tl.store(merged + j, (j * 0 + n - 1).to(tl.int32), mask=behind)
    tl.store(values + j, tl.zeros((WIDTH,), tl.float32), mask=behind)


@kernel
def _write_indices(table, count, GRID: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    """Write both parts of a payload's indices, and zeros behind; a program writes a share of each part."""
    own, part = segment(table, count, _COLUMNS, SEGMENTS, GRID)
    merged = tl.load(own + _MERGED).to(tl.pointer_type(tl.int32))
    out = tl.load(own + _OUT).to(tl.pointer_type(tl.uint8))
    k, n, low_bits = tl.load(own + _K), tl.load(own + _N), tl.load(own + _LOW_BITS)
    cut, nbytes, size = tl.load(own + _CUT), tl.load(own + _NBYTES), tl.load(own + _SIZE)
    begin = part * WIDTH
    t = begin + tl.arange(0, WIDTH)
    if begin < cut:
        write_upper(merged, out, t, k, k, n, low_bits, cut)
    if begin < nbytes:
        write_lower(merged, out + cut, t, k, k, n, low_bits, nbytes)
    left = cut + nbytes
    tl.store(out + left + t, (t * 0).to(tl.uint8), mask=left + t < size)


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
    device = xs[0].device
    halves = [-(-k // 2) for k in ks], [k // 2 for k in ks]
    pieces = [-(-k // _PIECE) + -(-half // _PIECE) for k, half in zip(ks, halves[1], strict=True)]
    notes = torch.zeros(len(xs) + sum(pieces), dtype=torch.int32, device=device)
    flags, counts = notes[: len(xs)], notes[len(xs) :]
    lists = [rooms(sizes, torch.int32, device) for sizes in (ks, halves[1], ks)]
    found = [rooms(sizes, torch.float32, device) for sizes in (ks, halves[1])]
    with whole_words(outs) as words:
        segments, at = Segments(xs[0], grids=3), counts.data_ptr()
        for number, (x, residual, k, out) in enumerate(zip(xs, residuals, ks, words, strict=True)):
            n, head = x.numel(), 0 if values else 4 * k
            low_bits, cut = elias_fano_low_bits(k, n), -(-2 * k // 8)
            nbytes, size = -(-k * low_bits // 8), out.numel() - head
            into = values[number].data_ptr() if values else out.data_ptr()
            (by_x, by_residual, merged), (x_values, residual_values) = (
                [own[number].data_ptr() for own in of] for of in (lists, found)
            )
            segments.add(
                (-(-n // _SHARE), pieces[number], -(-max(cut, nbytes, size - cut - nbytes) // _PART)),
                x.data_ptr(), residual.data_ptr(), flags.data_ptr() + 4 * number, by_x, x_values, by_residual,
                residual_values, at, merged, into, out.data_ptr() + head, n, k, low_bits, cut, nbytes, size,
            )  # fmt: skip
            at += 4 * pieces[number]
        share = {"grid": _ELEMENTS, "GRID": _ELEMENTS, "SHARE": _SHARE, "WIDTH": BLOCK}
        segments.run(_find_nonzero, **share)
        otherwise = [*ks, *([0] * len(ks))]  # where the residual is all zeros
        targets = [
            Target(own, value, flag=flags.data_ptr() + 4 * (number % len(xs)), otherwise=otherwise[number])
            for number, (own, value) in enumerate(zip(lists[0] + lists[1], found[0] + found[1], strict=True))
        ]
        choose_all([Source.plain(own) for own in (*xs, *residuals)], [*halves[0], *halves[1]], targets)
        tops = torch.empty(segments.programs, dtype=torch.int32, device=device)
        segments.run(_compensate_segments, tops, float(decay), **share)
        piece = {"grid": _PIECES, "GRID": _PIECES, "WIDTH": _PIECE}
        segments.run(_count_common, **piece)
        form = {"PARTS": parts, "SUBTRACT": not values, "SHARERS": triton.next_power_of_2(max(pieces))}
        segments.run(_merge, float(decay), **piece, **form)
        segments.run(_write_indices, grid=_PARTS, GRID=_PARTS, WIDTH=_PART)
    return all_below(tops, math.inf), lists[2]
