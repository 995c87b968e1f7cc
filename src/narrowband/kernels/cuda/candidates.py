"""Candidates of a selection from a long tensor: the few elements that may be selected.

A sample gives a magnitude that somewhat more than k elements reach. One pass over the tensor stores these candidates,
with its tiles in any order. Then they are put in the order of their indices, and all that follows reads only them. If
the sample misled, there are fewer than k candidates or more than there is room for; then what follows reads all
elements. The launches are the same in both cases, and programs read from device memory which case it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, mix
from narrowband.kernels.cuda.launching import kernel, run, segment
from narrowband.kernels.cuda.sources import Source, look
from narrowband.kernels.cuda.tables import (
    COLUMNS,
    COUNTS,
    DIGITS,
    GROUPS,
    LARGEST,
    NUMBER_FOUND,
    NUMBER_OF_TILES,
    RANK,
    ROOM,
    ROW_NOTES,
    SCRATCH,
    THRESHOLD,
    TILE,
    TILES,
    Chosen,
    K,
    Target,
    Work,
    amount,
    areas,
    find_known,
    load_array,
    load_number,
    load_source,
    selection_loop,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["LONG", "all_margins", "arrange", "few_reaching", "find", "stratum"]

#: The fewest elements for which candidates are stored: smaller tensors are read from the cache each time.
LONG = 1 << 20
#: Elements of the sample, which one program takes.
_SAMPLE = 8192
#: Standard deviations of safety margin in the sample's threshold, and in the room for candidates.
_SAFE, _SPARE = 4.5, 6.0
#: There is room for at most one candidate per this many elements: 12 bytes of scratch memory each.
_SCARCE = 16


@kernel
def stratum(i, n, size, folded):
    """Return a position from the i-th of ``size`` equal strata."""
    low = i * n // size
    h = mix(i.to(tl.uint32) + folded.to(tl.uint32)).to(tl.int64)
    return low + (h * ((i + 1) * n // size - low) >> 32)


@kernel
def _begin(scratch, groups, sharers, level, SHARERS: tl.constexpr):
    """Set notes and groups to zeros, except for the threshold of candidates, which becomes ``level``."""
    note = tl.arange(0, 2 * COUNTS)
    tl.store(scratch + note, note * 0, mask=(note < ROW_NOTES) & (note != THRESHOLD))
    sharer = tl.arange(0, SHARERS)
    tl.store(scratch + groups + sharer, sharer * 0, mask=sharer < sharers)
    tl.store(scratch + THRESHOLD, level)


@selection_loop
def _bound(
    table, f, g, KIND: tl.constexpr, SHARERS: tl.constexpr, SAMPLE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Set the threshold of candidates to the magnitude of this rank in a sample, rounded down. More than k elements
    reach it.

    The threshold is not zero, so that a tensor of mostly zeros has few candidates.
    """
    own = table + tl.program_id(0).to(tl.int64) * COLUMNS
    a, b, c, n = load_source(own, KIND, ALIGNED)
    rank = load_number(own, RANK)
    level = rank * 0
    if rank > 0:
        i = tl.arange(0, SAMPLE).to(tl.int64)
        _value, magnitude = look(a, b, c, f, g, stratum(i, n, SAMPLE, i * 0), i < SAMPLE, KIND, False)
        for bit in range(18):
            higher = level | (1 << (30 - bit))
            level = tl.where(tl.sum((magnitude >= higher).to(tl.int32), 0) >= rank, higher, level)
    sets, groups, _tiles_at, _candidates = areas(own)
    _begin(load_array(own, SCRATCH, tl.int32), groups, sets, tl.maximum(level, 1), SHARERS)


@selection_loop
def _bound_given(counts, scratch, groups, k, sharers, GIVEN: tl.constexpr, SHARERS: tl.constexpr):
    """Set the threshold of candidates to k itself, or to the k-th largest of the tally."""
    level = k
    if not GIVEN:
        level, _wanted = find_known(counts, k, k * 0, 4)
    _begin(scratch, groups, sharers, level, SHARERS)


@selection_loop
def _gather(
    table, count, f, g,
    KIND: tl.constexpr, GROUP: tl.constexpr, GRID: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Store the indices of a tile's candidates where the next room is; a list says where, and how many.

    A thread has four neighbours at a time, so it scans and stores a quarter of what it reads, and few of these quarters
    have a candidate. What follows is for few elements, and reads them again.
    """
    own, part = segment(table, count, COLUMNS, SEGMENTS, GRID)
    a, b, c, n = load_source(own, KIND, ALIGNED)
    scratch, room, tile = load_array(own, SCRATCH, tl.int32), load_number(own, ROOM), part.to(tl.int32)
    _sets, groups, tiles_at, candidates = areas(own)
    i = part * WIDTH + tl.arange(0, WIDTH)
    _value, magnitude = look(a, b, c, f, g, i, i < n, KIND, True)
    large = tl.reshape((magnitude >= tl.load(scratch + THRESHOLD)).to(tl.int32), (WIDTH // 4, 4))
    each = tl.sum(large, 1)
    number = tl.sum(each, 0)
    begin = number * 0
    if number > 0:
        begin = tl.atomic_add(scratch + NUMBER_FOUND, number, sem="relaxed")
        tl.atomic_add(scratch + groups + tile // GROUP, number, sem="relaxed")
        place = begin + tl.cumsum(each, 0) - each
        held = tl.sum(large << tl.arange(0, 4)[None, :], 1)
        first = tile * WIDTH + tl.arange(0, WIDTH // 4) * 4
        for _turn in range(tl.max(each, 0)):
            lowest = held & -held
            at = first + (lowest >> 1) - (lowest >> 3)  # which of the four, by its bit
            tl.store(scratch + candidates + place, at, mask=(held > 0) & (place < room))
            held -= lowest
            place += 1
    tl.store(scratch + tiles_at + 2 * tile, begin)
    tl.store(scratch + tiles_at + 2 * tile + 1, number)


@kernel
def _pieces(
    scratch, groups, tiles_at, number_of_tiles, part, GROUP: tl.constexpr, SHARERS: tl.constexpr
):  # fmt: skip
    """Return where the candidates of a group's tiles are, how many they are, and where they belong."""
    sharer = tl.arange(0, SHARERS)
    before = tl.sum(tl.load(scratch + groups + sharer, mask=sharer < part, other=0), 0)
    tile = part * GROUP + tl.arange(0, GROUP)
    entry = scratch + tiles_at + 2 * tile
    begin = tl.load(entry, mask=tile < number_of_tiles, other=0)
    number = tl.load(entry + 1, mask=tile < number_of_tiles, other=0)
    return begin, number, before + tl.cumsum(number, 0) - number


@selection_loop
def _arrange(
    table, count, f, g,
    KIND: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, SHARERS: tl.constexpr, GRID: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Copy candidates end to end, in the order of their indices, behind where they were, and then their values. Tally
    their first digit, and find the largest magnitude; or do so with all elements, if the sample misled.
    """
    own, part = segment(table, count, COLUMNS, SEGMENTS, GRID)
    a, b, c, n = load_source(own, KIND, ALIGNED)
    scratch, k = load_array(own, SCRATCH, tl.int32), load_number(own, K)
    sharers, groups, tiles_at, candidates = areas(own)
    elements, close, _found, room = amount(own, scratch, k, n, True)
    seen = tl.zeros((DIGITS,), tl.int32)
    top = k * 0
    if close > 0:
        number_of_tiles = load_number(own, NUMBER_OF_TILES)
        begin, number, first = _pieces(scratch, groups, tiles_at, number_of_tiles, part, GROUP, SHARERS)
        lane = tl.arange(0, LANES)
        for step in range(0, tl.max(number, 0), LANES):
            there = (step + lane)[None, :] < number[:, None]
            place = begin[:, None] + (step + lane)[None, :]
            target = first[:, None] + (step + lane)[None, :] + room
            index = tl.load(scratch + candidates + place, mask=there, other=0)
            value, magnitude = look(a, b, c, f, g, index.to(tl.int64), there, KIND, False)
            tl.store(scratch + candidates + target, index, mask=there)
            tl.store(scratch + candidates + room + target, value.to(tl.int32, bitcast=True), mask=there)
            magnitude = tl.reshape(magnitude, (GROUP * LANES,))
            top = tl.maximum(top, tl.max(magnitude, 0))
            seen += tl.histogram((magnitude >> 23) & (DIGITS - 1), DIGITS, mask=magnitude >= 0)
    else:
        tiles = tl.cdiv(elements, WIDTH)
        each = tl.cdiv(tiles, sharers)
        for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
            i = tile * WIDTH + tl.arange(0, WIDTH)
            _value, magnitude = look(a, b, c, f, g, i, i < n, KIND, False)
            top = tl.maximum(top, tl.max(magnitude, 0))
            seen += tl.histogram((magnitude >> 23) & (DIGITS - 1), DIGITS, mask=i < n)
    tl.atomic_add(scratch + tl.arange(0, DIGITS), seen, mask=seen > 0, sem="relaxed")
    tl.atomic_max(scratch + LARGEST, top, mask=top > 0, sem="relaxed")


@selection_loop
def _take(
    a, b, c, f, g, scratch, groups, tiles_at, candidates, indices, values, number_of_tiles,
    KIND: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, SHARERS: tl.constexpr,
):  # fmt: skip
    """Write all candidates, in the order of their indices; find the largest magnitude."""
    part = tl.program_id(0).to(tl.int64)
    begin, number, first = _pieces(scratch, groups, tiles_at, number_of_tiles, part, GROUP, SHARERS)
    lane = tl.arange(0, LANES)
    top = tl.max(number, 0) * 0
    for step in range(0, tl.max(number, 0), LANES):
        there = (step + lane)[None, :] < number[:, None]
        index = tl.load(scratch + candidates + begin[:, None] + (step + lane)[None, :], mask=there, other=0)
        value, magnitude = look(a, b, c, f, g, index.to(tl.int64), there, KIND, False)
        target = first[:, None] + (step + lane)[None, :]
        tl.store(indices + target, index, mask=there)
        tl.store(values + target, value, mask=there)
        top = tl.maximum(top, tl.max(tl.max(magnitude, 1), 0))
    tl.atomic_max(scratch + LARGEST, top, mask=top > 0, sem="relaxed")


def _margins(n: int, k: int) -> tuple[int, int]:
    """Return (a rank in a sample whose element is safely below the k-th largest of n, the room for the elements that
    reach it).

    Of the k largest, a sample of s has about e = s·k / n, with a standard deviation of √e; and of n elements, about
    n·r / s reach the r-th largest of a sample, with a standard deviation of n·√r / s. The terms added are for small
    numbers, which are not normally distributed.
    """
    expected = _SAMPLE * k / n
    rank = math.ceil(expected + _SAFE * math.sqrt(expected) + 6)
    return rank, math.ceil(n * (rank + _SPARE * math.sqrt(rank) + 8) / _SAMPLE)


def all_margins(ns: Sequence[int], ks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the margins of all tensors, with zeros where no candidates are stored: of tensors of which they would be
    too many, and of all if none is long. Launches for long tensors take the others along.
    """
    if max(ns) < LONG:
        return []
    margins = [_margins(n, k) for n, k in zip(ns, ks, strict=True)]
    return [own if _SCARCE * own[1] <= n else (0, 0) for own, n in zip(margins, ns, strict=True)]


def find(work: Work) -> None:
    """Store candidates of tensors that have room for them, which are written."""
    work.run_each(_bound, SHARERS=work.group_form["SHARERS"], SAMPLE=_SAMPLE, num_warps=8)
    _gather_all(work)


def _gather_all(work: Work) -> None:
    group = work.groups[0].group
    work.run(_gather, grid=TILES, GROUP=group, GRID=TILES, WIDTH=TILE, num_warps=8)


def arrange(work: Work) -> None:
    """Put candidates in the order of their indices, and tally their first digit."""
    work.run(_arrange, grid=GROUPS, GRID=GROUPS, WIDTH=BLOCK, **work.group_form)


def few_reaching(source: Source, counts: Tensor, level: int, most: int, *, given: bool) -> Chosen | None:
    """Select the elements of a long tensor that reach a threshold; None if there are many. The source is written."""
    on, n = source.a, source.a.numel()
    room = min(n // _SCARCE, 2 * most + BLOCK)
    work = Work([source], [most], margins=[(0, room)], copies=1)
    work.aim()
    (own,), scratch = work.groups, work.scratch
    form = {"GIVEN": given, "SHARERS": own.form["SHARERS"]}
    run(_bound_given, 1, counts, scratch, own.places[0], level, own.sets, on=on, **form)
    _gather_all(work)
    number = int(scratch[NUMBER_FOUND.value])
    if number > room:
        return None
    target, source = Target.room_for(number, on), source.after()
    arrays = *source.arguments, scratch, *own.places, target.out, target.values
    run(_take, own.sets, *arrays, own.tiles, on=on, KIND=source.kind, **own.form)
    return Chosen(target.out, target.values, scratch[LARGEST.value : LARGEST.value + 1].clone())
