"""Selection in Triton: first a threshold, then the places of selected elements, in their order.

The k-th largest magnitude is found digit by digit, like a radix sort. The number of elements for each value of the
highest 8 bits determines these bits of the k-th largest, and so on with the bits below. Then every program counts its
elements above the threshold and at it; the counts of the programs before it tell where it has to write. Rows that fit
into a program's registers take one program.

A long tensor is read only once. A sample gives a magnitude that somewhat more than k elements reach, and one pass
stores these candidates; digits are then those of candidates. If the sample misled, there are fewer than k candidates or
more than there is room for; digits are then those of all elements. The launches are the same in both cases, and the
programs read from device memory which case it is: nothing here waits for the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, MAGNITUDE, fold_seed, mix
from narrowband.kernels.cuda.launching import kernel, run
from narrowband.kernels.cuda.sources import Source, look
from narrowband.kernels.selection import sample_rank, sample_size

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Chosen",
    "choose",
    "choose_sampled",
    "randomk_indices",
    "select_threshold",
    "select_topk",
    "select_topk_rows",
]

#: The longest rows that one program holds in registers; and elements per warp, if 16 warps are enough.
_SHORT, _PER_WARP = 16384, 512
#: About the most programs for a long tensor: if it has more tiles, each program takes several, one by one.
_PROGRAMS = 1024

#: The fewest elements for which candidates are stored: smaller tensors are read from the cache each time.
_LONG = 1 << 20
#: Elements of the sample, which one program takes; elements of a tile in the search for candidates.
_SAMPLE, _TILE = 8192, 4096
#: Standard deviations of safety margin in the sample's threshold, and in the room for candidates.
_SAFE, _SPARE = 4.5, 6.0
#: There is room for at most one candidate per this many elements: 12 bytes of scratch memory each.
_SCARCE = 16

#: Values of a digit. A row's notes begin with the counts of each value of its four digits.
_VALUES = tl.constexpr(256)
_COUNTS = tl.constexpr(4 * 256)
#: Behind the counts: the threshold of candidates, their number, the largest magnitude; and from the fourth place on
#: what is known after each digit.
_LOW, _FOUND, _TOP, _LEFT = tl.constexpr(1024), tl.constexpr(1025), tl.constexpr(1026), tl.constexpr(1026)
_NOTES = tl.constexpr(1024 + 16)

#: Arguments that are not specialized: neither k nor a threshold becomes a constant if it is 1, and numbers that say how
#: programs share the work cause no new compilation.
_UNSPECIFIC = ["k", "folded", "size", "rank", "sharers", "groups", "table", "candidates", "room", "number_of_tiles"]
_loop: Any = triton.jit(do_not_specialize=_UNSPECIFIC)


@kernel
def _known(notes, k, part, KNOWN: tl.constexpr):
    """Return the known first digits of the k-th largest, with zeros for the others; and its rank among elements with
    these digits.

    The launch before has left what was known before it behind the counts, in a place for each digit.
    """
    VALUES: tl.constexpr = _VALUES if KNOWN < 4 else _VALUES // 2
    DOWN: tl.constexpr = 31 - 8 * KNOWN if KNOWN < 4 else 0
    left = notes + _LEFT + 2 * KNOWN
    level = 0
    wanted = k
    if KNOWN > 1:
        level, wanted = tl.load(left - 2), tl.load(left - 1)
    number = tl.load(notes + (KNOWN - 1) * _VALUES + (VALUES - 1 - tl.arange(0, VALUES)))  # for the largest value first
    passed = tl.cumsum(number, 0)
    before = passed < wanted
    level += (VALUES - 1 - tl.sum(before.to(tl.int32), 0)) << DOWN
    wanted = wanted - tl.max(tl.where(before, passed, 0), 0)
    tl.store(left, level, mask=part == 0)
    tl.store(left + 1, wanted, mask=part == 0)
    return level, wanted


@kernel
def _amount(notes, k, width, room, FOUND: tl.constexpr):
    """Return how many elements are to be read, and how many candidates: one of the two is zero."""
    elements = width
    candidates = 0
    if FOUND:
        number = tl.load(notes + _FOUND)
        narrow = (number >= k) & (number <= room)
        candidates = tl.where(narrow, number, 0)
        elements = tl.where(narrow, 0, width)
    return elements, candidates


@kernel
def _element(
    a, b, c, f, g, found, room, begin, j, elements, candidates, KIND: tl.constexpr, WRITE: tl.constexpr,
    FOUND: tl.constexpr,
):  # fmt: skip
    """Return elements of a row, or candidates: their indices, values, and magnitudes as integers."""
    i = begin + j
    value, magnitude = look(a, b, c, f, g, i, j < elements, KIND, WRITE)
    if FOUND:
        there = j < candidates
        i = tl.where(there, tl.load(found + j, mask=there, other=0).to(tl.int64), i)
        bits = tl.load(found + room + j, mask=there, other=0)
        value = tl.where(there, bits.to(tl.float32, bitcast=True), value)
        magnitude = tl.where(there, bits & MAGNITUDE, magnitude)
    return i, value, magnitude


@_loop
def _tally(
    a, b, c, f, g, scratch, k, width, sharers, candidates, room,
    KIND: tl.constexpr, KNOWN: tl.constexpr, FOUND: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Count, among a row's elements that share the known digits of its k-th largest, each value of the next digit.

    With no digit known, also find the largest magnitude.
    """
    at = tl.program_id(0).to(tl.int64)
    row, part = at // sharers, at % sharers
    notes = scratch + row * _NOTES
    VALUES: tl.constexpr = _VALUES if KNOWN < 3 else _VALUES // 2
    DOWN: tl.constexpr = 23 - 8 * KNOWN if KNOWN < 3 else 0
    UP: tl.constexpr = 31 - 8 * KNOWN
    if KNOWN > 0:
        level, _wanted = _known(notes, k, part, KNOWN)
    elements, close = _amount(notes, k, width, room, FOUND)
    number = tl.zeros((VALUES,), tl.int32)
    top = tl.zeros((WIDTH,), tl.int32)
    tiles = tl.cdiv(elements + close, WIDTH)
    each = tl.cdiv(tiles, sharers)
    for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
        j = tile * WIDTH + tl.arange(0, WIDTH)
        there = j < elements + close
        _i, _value, magnitude = _element(
            a, b, c, f, g, scratch + candidates, room, row * width, j, elements, close, KIND, True, FOUND
        )
        if KNOWN > 0:
            there = there & (magnitude >> UP == level >> UP)
        else:
            top = tl.maximum(top, magnitude)
        number += tl.histogram((magnitude >> DOWN) & (VALUES - 1), VALUES, mask=there)
    tl.atomic_add(notes + KNOWN * _VALUES + tl.arange(0, VALUES), number, mask=number > 0, sem="relaxed")
    if KNOWN == 0:
        tl.atomic_max(notes + _TOP, tl.max(top, 0), sem="relaxed")


@_loop
def _count(
    a, b, c, f, g, scratch, numbers, k, width, sharers, candidates, room,
    KIND: tl.constexpr, WRITE: tl.constexpr, GIVEN: tl.constexpr, FOUND: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Count each program's elements above the threshold and at it; find the largest magnitude.

    The threshold is k itself if it is given, and otherwise the k-th largest of the tally. The largest magnitude of the
    first row is written behind all of these, so that nobody need keep the scratch memory for it.
    """
    at = tl.program_id(0).to(tl.int64)
    row, part = at // sharers, at % sharers
    notes = scratch + row * _NOTES
    level = k
    if not GIVEN:
        level, _wanted = _known(notes, k, part, 4)
        tl.store(numbers + 3 * tl.num_programs(0), tl.load(notes + _TOP), mask=at == 0)
    elements, close = _amount(notes, k, width, room, FOUND)
    above = tl.zeros((WIDTH,), tl.int32)
    ties = tl.zeros((WIDTH,), tl.int32)
    top = tl.zeros((WIDTH,), tl.int32)
    tiles = tl.cdiv(elements + close, WIDTH)
    each = tl.cdiv(tiles, sharers)
    for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
        j = tile * WIDTH + tl.arange(0, WIDTH)
        _i, _value, magnitude = _element(
            a, b, c, f, g, scratch + candidates, room, row * width, j, elements, close, KIND, WRITE, FOUND
        )
        above += (magnitude > level).to(tl.int32)
        ties += (magnitude == level).to(tl.int32)
        top = tl.maximum(top, magnitude)
    tl.store(numbers + 3 * at, tl.sum(above, 0))
    tl.store(numbers + 3 * at + 1, tl.sum(ties, 0))
    tl.store(numbers + 3 * at + 2, tl.max(top, 0))


@kernel
def _places(magnitude, level, above, ties, allowed):
    """Return which elements are taken, and behind how many others; and how many are above the threshold, and at it.

    ``above`` and ``ties`` are the counts before these elements; ``allowed`` is how many of all ties may be taken. One
    scan counts both.
    """
    is_above = (magnitude > level).to(tl.int32)
    tie = (magnitude == level).to(tl.int32)
    both = tl.cumsum(is_above * 65536 + tie, 0)
    ties_before = ties + (both & 65535) - tie
    place = above + (both >> 16) - is_above + tl.minimum(ties_before, allowed)
    taken = (is_above > 0) | ((tie > 0) & (ties_before < allowed))
    return taken, place, tl.sum(is_above, 0), tl.sum(tie, 0)


@_loop
def _write(
    a, b, c, f, g, scratch, numbers, indices, values, k, width, sharers, candidates, room,
    KIND: tl.constexpr, GIVEN: tl.constexpr, ALL: tl.constexpr, FOUND: tl.constexpr, SHARERS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the elements above the threshold, and the first ones at it (or all), to their places."""
    at = tl.program_id(0).to(tl.int64)
    row, part = at // sharers, at % sharers
    notes = scratch + row * _NOTES
    level = k
    allowed = 0x7FFFFFFF
    first = row * 0
    if not GIVEN:
        level = tl.load(notes + _LEFT + 8)
    if not ALL:
        allowed = tl.load(notes + _LEFT + 9)
        first = row * k
    elements, close = _amount(notes, k, width, room, FOUND)
    sharer = tl.arange(0, SHARERS)
    before = numbers + 3 * (row * sharers + sharer)
    above = tl.sum(tl.load(before, mask=sharer < part, other=0), 0)
    ties = tl.sum(tl.load(before + 1, mask=sharer < part, other=0), 0)
    tiles = tl.cdiv(elements + close, WIDTH)
    each = tl.cdiv(tiles, sharers)
    for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
        j = tile * WIDTH + tl.arange(0, WIDTH)
        i, value, magnitude = _element(
            a, b, c, f, g, scratch + candidates, room, row * width, j, elements, close, KIND, False, FOUND
        )
        taken, place, more, more_ties = _places(magnitude, level, above, ties, allowed)
        tl.store(indices + first + place, i.to(tl.int32), mask=taken)
        tl.store(values + first + place, value, mask=taken)
        above += more
        ties += more_ties


@_loop
def _short(
    a, b, c, f, g, indices, values, tops, k, width, KIND: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Do the whole selection of a row that one program holds at once: find its k-th largest bit by bit, and write."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, WIDTH)
    i = row * width + j
    value, magnitude = look(a, b, c, f, g, i, j < width, KIND, True)
    top = tl.max(magnitude, 0)
    tl.store(tops + row, top)
    level = top * 0
    for bit in range(31):
        higher = level | (1 << (30 - bit))
        level = tl.where(tl.sum((magnitude >= higher).to(tl.int32), 0) >= k, higher, level)
    allowed = k - tl.sum((magnitude > level).to(tl.int32), 0)
    taken, place, _, _ = _places(magnitude, level, 0, 0, allowed)
    tl.store(indices + row * k + place, i.to(tl.int32), mask=taken)
    tl.store(values + row * k + place, value, mask=taken)


@kernel
def _stratum(i, n, size, folded):
    """Return a position from the i-th of ``size`` equal strata."""
    low = i * n // size
    h = mix(i.to(tl.uint32) + folded.to(tl.uint32)).to(tl.int64)
    return low + (h * ((i + 1) * n // size - low) >> 32)


@_loop
def _random(out, n, k, folded, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + i, _stratum(i, n, k, folded).to(tl.int32), mask=i < k)


@_loop
def _draw(a, b, c, f, g, out, n, size, folded, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """Compute a sample of the elements that the source is going to have."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    there = i < size
    value, _ = look(a, b, c, f, g, _stratum(i, n, size, folded), there, KIND, False)
    tl.store(out + i, value, mask=there)


@kernel
def _begin(scratch, groups, sharers, level, SHARERS: tl.constexpr):
    """Set notes and groups to zeros, except for the threshold of candidates, which becomes ``level``."""
    note = tl.arange(0, 2 * _COUNTS)
    tl.store(scratch + note, note * 0, mask=(note < _NOTES) & (note != _LOW))
    sharer = tl.arange(0, SHARERS)
    tl.store(scratch + groups + sharer, sharer * 0, mask=sharer < sharers)
    tl.store(scratch + _LOW, level)


@_loop
def _bound(
    a, b, c, f, g, scratch, groups, n, rank, sharers, KIND: tl.constexpr, SHARERS: tl.constexpr, SAMPLE: tl.constexpr
):  # fmt: skip
    """Set the threshold of candidates to the magnitude of this rank in a sample, rounded down. More than k elements
    reach it.

    The threshold is not zero, so that a tensor of mostly zeros has few candidates.
    """
    i = tl.arange(0, SAMPLE).to(tl.int64)
    _value, magnitude = look(a, b, c, f, g, _stratum(i, n, SAMPLE, i * 0), i < SAMPLE, KIND, False)
    level = tl.max(magnitude, 0) * 0
    for bit in range(18):
        higher = level | (1 << (30 - bit))
        level = tl.where(tl.sum((magnitude >= higher).to(tl.int32), 0) >= rank, higher, level)
    _begin(scratch, groups, sharers, tl.maximum(level, 1), SHARERS)


@_loop
def _bound_given(counts, scratch, groups, k, sharers, GIVEN: tl.constexpr, SHARERS: tl.constexpr):
    """Set the threshold of candidates to k itself, or to the k-th largest of the tally."""
    level = k
    if not GIVEN:
        level, _wanted = _known(counts, k, k * 0, 4)
    _begin(scratch, groups, sharers, level, SHARERS)


@_loop
def _gather(
    a, b, c, f, g, scratch, groups, table, candidates, n, room,
    KIND: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the indices of a tile's candidates where the next room is; the table says where, and how many.

    A thread has four neighbours at a time, so it scans and stores a quarter of what it reads, and few of these quarters
    have a candidate. What follows is for few elements, and reads them again.
    """
    tile = tl.program_id(0)
    i = tile.to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    _value, magnitude = look(a, b, c, f, g, i, i < n, KIND, True)
    large = tl.reshape((magnitude >= tl.load(scratch + _LOW)).to(tl.int32), (WIDTH // 4, 4))
    each = tl.sum(large, 1)
    number = tl.sum(each, 0)
    begin = number * 0
    if number > 0:
        begin = tl.atomic_add(scratch + _FOUND, number, sem="relaxed")
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
    tl.store(scratch + table + 2 * tile, begin)
    tl.store(scratch + table + 2 * tile + 1, number)


@kernel
def _pieces(
    scratch, groups, table, number_of_tiles, part, GROUP: tl.constexpr, SHARERS: tl.constexpr
):  # fmt: skip
    """Return where the candidates of a group's tiles are, how many they are, and where they belong."""
    sharer = tl.arange(0, SHARERS)
    before = tl.sum(tl.load(scratch + groups + sharer, mask=sharer < part, other=0), 0)
    tile = part * GROUP + tl.arange(0, GROUP)
    entry = scratch + table + 2 * tile
    begin = tl.load(entry, mask=tile < number_of_tiles, other=0)
    number = tl.load(entry + 1, mask=tile < number_of_tiles, other=0)
    return begin, number, before + tl.cumsum(number, 0) - number


@_loop
def _arrange(
    a, b, c, f, g, scratch, groups, table, candidates, k, n, room, number_of_tiles, sharers,
    KIND: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, SHARERS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy candidates end to end, in the order of their indices, behind where they were, and then their values. Tally
    their first digit, and find the largest magnitude; or do so with all elements, if the sample misled.
    """
    part = tl.program_id(0).to(tl.int64)
    elements, close = _amount(scratch, k, n, room, True)
    seen = tl.zeros((_VALUES,), tl.int32)
    top = k * 0
    if close > 0:
        begin, number, first = _pieces(scratch, groups, table, number_of_tiles, part, GROUP, SHARERS)
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
            seen += tl.histogram((magnitude >> 23) & (_VALUES - 1), _VALUES, mask=magnitude >= 0)
    else:
        tiles = tl.cdiv(elements, WIDTH)
        each = tl.cdiv(tiles, sharers)
        for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
            i = tile * WIDTH + tl.arange(0, WIDTH)
            _value, magnitude = look(a, b, c, f, g, i, i < n, KIND, False)
            top = tl.maximum(top, tl.max(magnitude, 0))
            seen += tl.histogram((magnitude >> 23) & (_VALUES - 1), _VALUES, mask=i < n)
    tl.atomic_add(scratch + tl.arange(0, _VALUES), seen, mask=seen > 0, sem="relaxed")
    tl.atomic_max(scratch + _TOP, top, mask=top > 0, sem="relaxed")


@_loop
def _take(
    a, b, c, f, g, scratch, groups, table, candidates, indices, values, number_of_tiles,
    KIND: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, SHARERS: tl.constexpr,
):  # fmt: skip
    """Write all candidates, in the order of their indices; find the largest magnitude."""
    part = tl.program_id(0).to(tl.int64)
    begin, number, first = _pieces(scratch, groups, table, number_of_tiles, part, GROUP, SHARERS)
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
    tl.atomic_max(scratch + _TOP, top, mask=top > 0, sem="relaxed")


class Chosen(NamedTuple):
    """The result of a selection: sorted int32 indices, the values there, and the largest magnitudes that programs saw
    of all elements.
    """

    indices: Tensor
    values: Tensor
    tops: Tensor


class _Shared(NamedTuple):
    """How programs share rows: elements of a row, programs of a row, all programs.

    Also where candidates are in scratch memory, and how many have room; none without candidates.
    """

    width: int
    sharers: int
    programs: int
    candidates: int = 0
    room: int = 0

    @classmethod
    def of(cls, width: int, rows: int = 1) -> _Shared:
        whole = -(-width // BLOCK)
        tiles = -(-whole // max(1, min(whole, _PROGRAMS // rows)))
        sharers = -(-whole // tiles)
        return cls(width, sharers, rows * sharers)

    @property
    def form(self) -> tuple[int, int, int, int]:
        return self.width, self.sharers, self.candidates, self.room

    def numbers(self, on: Tensor) -> Tensor:
        """Return memory for what :func:`_count` finds."""
        return torch.empty(3 * self.programs + 1, dtype=torch.int32, device=on.device)


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


def _tally_all(source: Source, k: int, shared: _Shared, rows: int) -> Tensor:
    """Return the counts of the digits of rows' k-th largest, and the largest magnitudes. The source is written."""
    scratch = torch.zeros(rows * _NOTES.value, dtype=torch.int32, device=source.a.device)
    _tally_from(0, source, scratch, k, shared)
    return scratch


def _tally_from(digit: int, source: Source, scratch: Tensor, k: int, shared: _Shared) -> None:
    for known in range(digit, 4):
        form = {"KIND": source.kind, "KNOWN": known, "FOUND": shared.room > 0, "WIDTH": BLOCK}
        run(_tally, shared.programs, *source.arguments, scratch, k, *shared.form, on=source.a, **form)
        source = source.after()


class _Groups(NamedTuple):
    """How a long tensor's tiles are grouped, and where in scratch memory are: the number of each group's candidates,
    the place of each tile's candidates, and the candidates' indices.
    """

    tiles: int
    group: int
    sharers: int
    places: tuple[int, int, int]

    @classmethod
    def of(cls, n: int) -> _Groups:
        tiles = -(-n // _TILE)
        group = max(8, triton.next_power_of_2(-(-tiles // _PROGRAMS)))
        sharers, begin = -(-tiles // group), _NOTES.value
        return cls(tiles, group, sharers, (begin, begin + sharers, begin + sharers + 2 * tiles))

    @property
    def form(self) -> dict[str, int]:
        lanes = max(1, BLOCK // self.group)
        return {"GROUP": self.group, "LANES": lanes, "SHARERS": triton.next_power_of_2(self.sharers)}

    def scratch(self, on: Tensor, places: int) -> Tensor:
        return torch.empty(self.places[2] + places, dtype=torch.int32, device=on.device)

    def gather(self, source: Source, scratch: Tensor, room: int) -> None:
        form = {"KIND": source.kind, "GROUP": self.group, "WIDTH": _TILE, "num_warps": 8}
        on = source.a
        run(_gather, self.tiles, *source.arguments, scratch, *self.places, on.numel(), room, on=on, **form)


def _gather_all(source: Source, k: int, rank: int, room: int) -> tuple[Tensor, _Shared]:
    """Store candidates, and return the counts of their digits; or the counts of all elements. The source is written."""
    on, n = source.a, source.a.numel()
    own = _Groups.of(n)
    scratch = own.scratch(on, 3 * room)
    form = {"KIND": source.kind, "SHARERS": own.form["SHARERS"], "SAMPLE": _SAMPLE, "num_warps": 8}
    run(_bound, 1, *source.arguments, scratch, own.places[0], n, rank, own.sharers, on=on, **form)
    own.gather(source, scratch, room)
    source = source.after()
    arrays = *source.arguments, scratch, *own.places
    form = {"KIND": source.kind, **own.form, "WIDTH": BLOCK}
    run(_arrange, own.sharers, *arrays, k, n, room, own.tiles, own.sharers, on=on, **form)
    shared = _Shared.of(n)._replace(candidates=own.places[2] + room, room=room)
    _tally_from(1, source, scratch, k, shared)
    return scratch, shared


def _write_all(
    source: Source, scratch: Tensor, numbers: Tensor, k: int, shared: _Shared, number: int, *, given: bool, every: bool
) -> tuple[Tensor, Tensor]:
    on = source.a
    indices = torch.empty(number, dtype=torch.int32, device=on.device)
    values = torch.empty(number, dtype=torch.float32, device=on.device)
    form = {"KIND": source.kind, "GIVEN": given, "ALL": every, "FOUND": shared.room > 0, "WIDTH": BLOCK}
    arrays = *source.arguments, scratch, numbers, indices, values
    form["SHARERS"] = triton.next_power_of_2(shared.sharers)
    run(_write, shared.programs, *arrays, k, *shared.form, on=on, **form)
    return indices, values


def choose(source: Source, k: int, width: int, rows: int = 1) -> Chosen:
    """Select the k largest of each row, ties to the lower index. The source is written; the host does not wait."""
    on = source.a
    if width <= _SHORT:
        indices, tops = (torch.empty(size, dtype=torch.int32, device=on.device) for size in (rows * k, rows))
        values = torch.empty(rows * k, dtype=torch.float32, device=on.device)
        tile = max(16, triton.next_power_of_2(width))
        form = {"KIND": source.kind, "WIDTH": tile, "num_warps": min(16, max(4, tile // _PER_WARP))}
        run(_short, rows, *source.arguments, indices, values, tops, k, width, on=on, **form)
        return Chosen(indices, values, tops)
    rank, room = _margins(width, k)
    if rows == 1 and width >= _LONG and _SCARCE * room <= width:
        scratch, shared = _gather_all(source, k, rank, room)
    else:
        shared = _Shared.of(width, rows)
        scratch = _tally_all(source, k, shared, rows)
    source, numbers = source.after(), shared.numbers(on)
    form = {"KIND": source.kind, "WRITE": False, "GIVEN": False, "FOUND": shared.room > 0, "WIDTH": BLOCK}
    run(_count, shared.programs, *source.arguments, scratch, numbers, k, *shared.form, on=on, **form)
    indices, values = _write_all(source, scratch, numbers, k, shared, rows * k, given=False, every=False)
    return Chosen(indices, values, numbers[-1:])


def choose_sampled(source: Source, k: int, seed: int) -> Chosen:
    """Select the k largest of those that reach the threshold of a sample, or fewer. The source is written.

    How many elements reach it depends on the data; the host waits for this number once.
    """
    on, n = source.a, source.a.numel()
    size, rank = sample_size(n, k), sample_rank(n, k)
    sample = torch.empty(size, dtype=torch.float32, device=on.device)
    form = {"KIND": source.kind, "WIDTH": BLOCK}
    run(_draw, -(-size // BLOCK), *source.arguments, sample, n, size, fold_seed(seed), on=on, **form)
    scratch = _tally_all(Source.plain(sample), rank, _Shared.of(size), 1)
    return _reaching(source, scratch, rank, k, given=False)


def _reaching(source: Source, counts: Tensor, level: int, most: int, *, given: bool) -> Chosen:
    """Select the elements that reach a threshold, at most ``most`` of them. The source is written."""
    long = source.a.numel() >= _LONG
    few = _few_reaching(source, counts, level, most, given=given) if long else None
    chosen = few or _all_reaching(source.after() if long else source, counts, level, given=given)
    if chosen.indices.numel() > most:
        inside = choose(Source.plain(chosen.values), most, chosen.indices.numel())
        return Chosen(chosen.indices[inside.indices], inside.values, chosen.tops)
    return chosen


def _few_reaching(source: Source, counts: Tensor, level: int, most: int, *, given: bool) -> Chosen | None:
    """Select the elements of a long tensor that reach a threshold; None if there are many. The source is written."""
    on, n = source.a, source.a.numel()
    own, room = _Groups.of(n), min(n // _SCARCE, 2 * most + BLOCK)
    scratch, groups = own.scratch(on, room), own.places[0]
    form = {"GIVEN": given, "SHARERS": own.form["SHARERS"]}
    run(_bound_given, 1, counts, scratch, groups, level, own.sharers, on=on, **form)
    own.gather(source, scratch, room)
    number = int(scratch[_FOUND.value])
    if number > room:
        return None
    indices = torch.empty(number, dtype=torch.int32, device=on.device)
    values = torch.empty(number, dtype=torch.float32, device=on.device)
    source = source.after()
    arrays = *source.arguments, scratch, *own.places, indices, values
    run(_take, own.sharers, *arrays, own.tiles, on=on, KIND=source.kind, **own.form)
    return Chosen(indices, values, scratch[_TOP.value : _TOP.value + 1].clone())


def _all_reaching(source: Source, counts: Tensor, level: int, *, given: bool) -> Chosen:
    """Select all elements that reach a threshold. The source is written."""
    on, shared = source.a, _Shared.of(source.a.numel())
    numbers = shared.numbers(on)
    form = {"KIND": source.kind, "WRITE": True, "GIVEN": given, "FOUND": False, "WIDTH": BLOCK}
    run(_count, shared.programs, *source.arguments, counts, numbers, level, *shared.form, on=on, **form)
    seen = numbers[:-1].view(-1, 3)
    number = int(seen[:, :2].sum())
    written = _write_all(source.after(), counts, numbers, level, shared, number, given=given, every=True)
    return Chosen(*written, seen[:, 2])


def select_topk(x: Tensor, k: int, *, sampled: bool = False, seed: int = 0) -> Tensor:
    if not k:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    if sampled and k < x.numel():
        return choose_sampled(Source.plain(x), k, seed).indices
    return choose(Source.plain(x), k, x.numel()).indices


def select_topk_rows(x: Tensor, k: int) -> Tensor:
    rows, width = x.shape
    if not rows or not k:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    return choose(Source.plain(x), k, width, rows).indices


def select_threshold(x: Tensor, value: float) -> Tensor:
    n, level = x.numel(), int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32))
    if not n:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    return _reaching(Source.plain(x), x, level, n, given=True).indices


def randomk_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    out = torch.empty(k, dtype=torch.int32, device=device)
    run(_random, -(-k // BLOCK), out, n, k, fold_seed(seed), on=out, WIDTH=BLOCK)
    return out
