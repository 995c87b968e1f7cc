"""Selection in Triton: first a threshold, then the places of selected elements, in their order.

The k-th largest magnitude is found digit by digit, like a radix sort. The number of elements for each value of the
highest 8 bits determines these bits of the k-th largest, and so on with the bits below. Then every program counts its
elements above the threshold and at it; the counts of the programs before it tell where it has to write. Rows that fit
into a program's registers take one program.

A long tensor is read only once. A sample gives a magnitude that somewhat more than k elements reach, and one pass
stores these candidates; digits are then those of candidates. If the sample misled, there are fewer than k candidates or
more than there is room for; digits are then those of all elements. The launches are the same in both cases, and the
programs read from device memory which case it is: nothing here waits for the device.

A model has many tensors, and a selection takes several launches. So a launch takes several tensors: a table says where
they are (:class:`~narrowband.kernels.cuda.launching.Segments`). One tensor is a table with one row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, INFINITE, MAGNITUDE, fold_seed, mix
from narrowband.kernels.cuda.launching import Segments, kernel, run, segment
from narrowband.kernels.cuda.sources import AHEAD, Source, look
from narrowband.kernels.selection import sample_rank, sample_size
from narrowband.kernels.sparse import elias_fano_low_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "Chosen",
    "choose",
    "choose_sampled",
    "encode_all",
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
_UNSPECIFIC = ["k", "folded", "size", "rank", "sharers", "groups", "tiles_at", "candidates", "number_of_tiles", "count"]
_loop: Any = triton.jit(do_not_specialize=_UNSPECIFIC)

#: Columns of the table. First programs of a tensor: where programs share its elements; where each has a tile; where
#: each has the candidates of a group of tiles; and where programs share a tensor without candidates.
_SHARES, _TILES, _GROUPS, _WHOLE = range(4)
#: Arrays of the source, and that which holds the elements once they are written; scratch memory, and counts of
#: programs; what is written: a largest magnitude, then indices and values, or a payload.
_A, _B, _C, _SUM, _SCRATCH, _NUMBERS, _TOPS, _OUT, _VALUES_OUT = (tl.constexpr(at) for at in range(4, 13))
#: Elements of a row and how many are selected; programs of a row; the rank in a sample that bounds candidates, and the
#: room for them (0: none are stored); groups and tiles; bits of an index in the lower part, bytes of the upper part and
#: words of the payload.
_N, _K, _SHARERS, _RANK, _ROOM, _SETS, _NUMBER_OF_TILES = (tl.constexpr(at) for at in range(13, 20))
_LOW_BITS, _CUT, _WORDS = (tl.constexpr(at) for at in range(20, 23))
_COLUMNS = tl.constexpr(23)

_AHEAD = tl.constexpr(AHEAD)


@kernel
def _array(own, AT: tl.constexpr, TYPE: tl.constexpr):
    """Return the address in a column of a tensor's row."""
    return tl.load(own + AT).to(tl.pointer_type(TYPE))


@kernel
def _number(own, AT: tl.constexpr):
    return tl.load(own + AT).to(tl.int32)


@kernel
def _arrays(own, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the arrays of a tensor's source, and its length. Where no pass writes any more, the first is the sum."""
    a = _array(own, _SUM, tl.float32)
    if KIND > _AHEAD:
        a = _array(own, _A, tl.float32)
    b = _array(own, _B, tl.float32)
    c = _array(own, _C, tl.float32)
    n = tl.load(own + _N)
    if ALIGNED:
        a = tl.multiple_of(a, 16)
        b = tl.multiple_of(b, 16)
        c = tl.multiple_of(c, 16)
        n = tl.multiple_of(n, 4)
    return a, b, c, n


@kernel
def _areas(own):
    """Return how many groups of tiles there are, and where in scratch memory are: the number of each group's
    candidates, the place of each tile's candidates, and the candidates' indices.
    """
    sets = _number(own, _SETS)
    tiles_at = _NOTES + sets
    return sets, _NOTES, tiles_at, tiles_at + 2 * _number(own, _NUMBER_OF_TILES)


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
def _amount(own, notes, k, width, FOUND: tl.constexpr):
    """Return how many elements are to be read, and how many candidates: one of the two is zero. Also where the
    candidates are, and the room there was for them.
    """
    elements = width
    candidates = 0
    found = notes
    room = 0
    if FOUND:
        room = _number(own, _ROOM)
        _sets, _groups, _tiles_at, begin = _areas(own)
        found = notes + begin + room
        number = tl.load(notes + _FOUND)
        narrow = (number >= k) & (number <= room)
        candidates = tl.where(narrow, number, 0)
        elements = tl.where(narrow, 0, width)
    return elements, candidates, found, room


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
    table, count, f, g,
    KIND: tl.constexpr, KNOWN: tl.constexpr, FOUND: tl.constexpr, GRID: tl.constexpr, WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Count, among a row's elements that share the known digits of its k-th largest, each value of the next digit.

    With no digit known, also find the largest magnitude.
    """
    own, at = segment(table, count, _COLUMNS, SEGMENTS, GRID)
    a, b, c, width = _arrays(own, KIND, ALIGNED)
    scratch, sharers, k = _array(own, _SCRATCH, tl.int32), _number(own, _SHARERS), _number(own, _K)
    row, part = at // sharers, at % sharers
    notes = scratch + row * _NOTES
    VALUES: tl.constexpr = _VALUES if KNOWN < 3 else _VALUES // 2
    DOWN: tl.constexpr = 23 - 8 * KNOWN if KNOWN < 3 else 0
    UP: tl.constexpr = 31 - 8 * KNOWN
    if KNOWN > 0:
        level, _wanted = _known(notes, k, part, KNOWN)
    elements, close, found, room = _amount(own, notes, k, width, FOUND)
    number = tl.zeros((VALUES,), tl.int32)
    top = tl.zeros((WIDTH,), tl.int32)
    tiles = tl.cdiv(elements + close, WIDTH)
    each = tl.cdiv(tiles, sharers)
    for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
        j = tile * WIDTH + tl.arange(0, WIDTH)
        there = j < elements + close
        _i, _value, magnitude = _element(a, b, c, f, g, found, room, row * width, j, elements, close, KIND, True, FOUND)
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
    table, count, f, g, k,
    KIND: tl.constexpr, WRITE: tl.constexpr, GIVEN: tl.constexpr, FOUND: tl.constexpr, PAYLOAD: tl.constexpr,
    LIMIT: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Count each program's elements above the threshold and at it; find the largest magnitude.

    The threshold is k itself if it is given, and otherwise the k-th largest of the tally. The tally's largest magnitude
    in the first row is written where nobody need keep the scratch memory for it. With PAYLOAD, write zeros where
    :func:`_put` sets bits.
    """
    own, at = segment(table, count, _COLUMNS, SEGMENTS)
    a, b, c, width = _arrays(own, KIND, ALIGNED)
    numbers, sharers = _array(own, _NUMBERS, tl.int32), _number(own, _SHARERS)
    row, part = at // sharers, at % sharers
    notes = _array(own, _SCRATCH, tl.int32) + row * _NOTES
    level = k
    if not GIVEN:
        k = _number(own, _K)
        level, _wanted = _known(notes, k, part, 4)
        largest = tl.load(notes + _TOP)
        tl.store(_array(own, _TOPS, tl.int32), largest, mask=at == 0)
        if PAYLOAD:
            _clear(own, k, part, tl.where(largest <= LIMIT, sharers, 0), WIDTH)
    elements, close, found, room = _amount(own, notes, k, width, FOUND)
    above = tl.zeros((WIDTH,), tl.int32)
    ties = tl.zeros((WIDTH,), tl.int32)
    top = tl.zeros((WIDTH,), tl.int32)
    tiles = tl.cdiv(elements + close, WIDTH)
    each = tl.cdiv(tiles, sharers)
    for tile in range(part * each, tl.minimum((part + 1) * each, tiles)):
        j = tile * WIDTH + tl.arange(0, WIDTH)
        _i, _value, magnitude = _element(
            a, b, c, f, g, found, room, row * width, j, elements, close, KIND, WRITE, FOUND
        )
        above += (magnitude > level).to(tl.int32)
        ties += (magnitude == level).to(tl.int32)
        top = tl.maximum(top, magnitude)
    tl.store(numbers + 3 * at, tl.sum(above, 0))
    tl.store(numbers + 3 * at + 1, tl.sum(ties, 0))
    tl.store(numbers + 3 * at + 2, tl.max(top, 0))


@kernel
def _clear(own, k, part, sharers, WIDTH: tl.constexpr):
    """Write zeros into a program's share of a payload's words behind the k values; nothing for no sharers."""
    out, words = _array(own, _OUT, tl.int32), tl.load(own + _WORDS) - k
    for first in range(part * WIDTH, tl.where(sharers > 0, words, 0), tl.maximum(sharers, 1) * WIDTH):
        word = first + tl.arange(0, WIDTH)
        tl.store(out + k + word, tl.zeros((WIDTH,), tl.int32), mask=word < words)


@kernel
def _put(own, i, value, place, taken, k):
    """Write selected elements into a payload: values, and indices as :mod:`~narrowband.kernels.sparse` says.

    Several indices have bits in one word, and different programs may write them, so each sets its bits alone.
    """
    out, cut = _array(own, _OUT, tl.int32), _number(own, _CUT)
    low_bits = _number(own, _LOW_BITS).to(tl.uint32)
    index = i.to(tl.uint32)
    tl.store(out + place, value.to(tl.int32, bitcast=True), mask=taken)
    bit = (index >> low_bits) + place.to(tl.uint32)
    one = (index * 0 + 1 << (bit & 31)).to(tl.int32, bitcast=True)
    tl.atomic_or(out + k + (bit >> 5).to(tl.int32), one, mask=taken, sem="relaxed")
    bit = place.to(tl.uint32) * low_bits + (8 * (cut & 3)).to(tl.uint32)  # the lower part need not begin with a word
    low = index - (index >> low_bits << low_bits)
    here = (low << (bit & 31)).to(tl.int32, bitcast=True)
    over = (low >> 1 >> (31 - (bit & 31))).to(tl.int32, bitcast=True)
    word = out + k + (cut >> 2) + (bit >> 5).to(tl.int32)
    tl.atomic_or(word, here, mask=taken & (here != 0), sem="relaxed")
    tl.atomic_or(word + 1, over, mask=taken & (over != 0), sem="relaxed")


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
    table, count, f, g, k, note,
    KIND: tl.constexpr, GIVEN: tl.constexpr, ALL: tl.constexpr, FOUND: tl.constexpr, PAYLOAD: tl.constexpr,
    LIMIT: tl.constexpr, SUBTRACT: tl.constexpr, NOTES: tl.constexpr, SHARERS: tl.constexpr, WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Write the elements above the threshold, and the first ones at it (or all), to their places.

    With PAYLOAD, write a payload if no magnitude exceeds LIMIT; with SUBTRACT, also zeros where its elements were. With
    NOTES, note if something is not finite.
    """
    own, at = segment(table, count, _COLUMNS, SEGMENTS)
    a, b, c, width = _arrays(own, KIND, ALIGNED)
    numbers, sharers = _array(own, _NUMBERS, tl.int32), _number(own, _SHARERS)
    row, part = at // sharers, at % sharers
    notes = _array(own, _SCRATCH, tl.int32) + row * _NOTES
    level = k
    allowed = 0x7FFFFFFF
    first = row * 0
    if not GIVEN:
        k = _number(own, _K)
        level = tl.load(notes + _LEFT + 8)
    if not ALL:
        allowed = tl.load(notes + _LEFT + 9)
        first = row * k
    elements, close, found, room = _amount(own, notes, k, width, FOUND)
    sharer = tl.arange(0, SHARERS)
    before = numbers + 3 * (row * sharers + sharer)
    above = tl.sum(tl.load(before, mask=sharer < part, other=0), 0)
    ties = tl.sum(tl.load(before + 1, mask=sharer < part, other=0), 0)
    tiles = tl.cdiv(elements + close, WIDTH)
    each = tl.cdiv(tiles, sharers)
    end = tl.minimum((part + 1) * each, tiles)
    if PAYLOAD:
        largest = tl.load(notes + _TOP)
        end = tl.where(largest <= LIMIT, end, 0)
        if NOTES:
            tl.atomic_or(note, 1, mask=(part == 0) & (largest >= INFINITE))
    for tile in range(part * each, end):
        j = tile * WIDTH + tl.arange(0, WIDTH)
        i, value, magnitude = _element(a, b, c, f, g, found, room, row * width, j, elements, close, KIND, False, FOUND)
        taken, place, more, more_ties = _places(magnitude, level, above, ties, allowed)
        if PAYLOAD:
            _put(own, i, value, place, taken, k)
            if SUBTRACT:
                tl.debug_barrier()  # a thread may store what another has loaded
                tl.store(_array(own, _SUM, tl.float32) + i, tl.zeros_like(value), mask=taken)
        else:
            tl.store(_array(own, _OUT, tl.int32) + first + place, i.to(tl.int32), mask=taken)
            tl.store(_array(own, _VALUES_OUT, tl.float32) + first + place, value, mask=taken)
        above += more
        ties += more_ties


@_loop
def _short(
    table, count, f, g, note,
    KIND: tl.constexpr, PAYLOAD: tl.constexpr, LIMIT: tl.constexpr, SUBTRACT: tl.constexpr, NOTES: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Do the whole selection of a row that one program holds at once: find its k-th largest bit by bit, and write."""
    own, row = segment(table, count, _COLUMNS, SEGMENTS)
    a, b, c, width = _arrays(own, KIND, ALIGNED)
    k = _number(own, _K)
    j = tl.arange(0, WIDTH)
    i = row * width + j
    value, magnitude = look(a, b, c, f, g, i, j < width, KIND, True)
    top = tl.max(magnitude, 0)
    tl.store(_array(own, _TOPS, tl.int32), top, mask=row == 0)
    level = top * 0
    for bit in range(31):
        higher = level | (1 << (30 - bit))
        level = tl.where(tl.sum((magnitude >= higher).to(tl.int32), 0) >= k, higher, level)
    allowed = k - tl.sum((magnitude > level).to(tl.int32), 0)
    taken, place, _, _ = _places(magnitude, level, 0, 0, allowed)
    if PAYLOAD:
        if NOTES:
            tl.atomic_or(note, 1, mask=top >= INFINITE)
        if top <= LIMIT:
            _clear(own, k, row * 0, 1, WIDTH)
            tl.debug_barrier()  # other threads set bits in these words
            _put(own, i, value, place, taken, k)
            if SUBTRACT:
                tl.store(_array(own, _SUM, tl.float32) + i, tl.zeros_like(value), mask=taken)
    else:
        tl.store(_array(own, _OUT, tl.int32) + row * k + place, i.to(tl.int32), mask=taken)
        tl.store(_array(own, _VALUES_OUT, tl.float32) + row * k + place, value, mask=taken)


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
    table, f, g, KIND: tl.constexpr, SHARERS: tl.constexpr, SAMPLE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Set the threshold of candidates to the magnitude of this rank in a sample, rounded down. More than k elements
    reach it.

    The threshold is not zero, so that a tensor of mostly zeros has few candidates.
    """
    own = table + tl.program_id(0).to(tl.int64) * _COLUMNS
    a, b, c, n = _arrays(own, KIND, ALIGNED)
    rank = _number(own, _RANK)
    level = rank * 0
    if rank > 0:
        i = tl.arange(0, SAMPLE).to(tl.int64)
        _value, magnitude = look(a, b, c, f, g, _stratum(i, n, SAMPLE, i * 0), i < SAMPLE, KIND, False)
        for bit in range(18):
            higher = level | (1 << (30 - bit))
            level = tl.where(tl.sum((magnitude >= higher).to(tl.int32), 0) >= rank, higher, level)
    sets, groups, _tiles_at, _candidates = _areas(own)
    _begin(_array(own, _SCRATCH, tl.int32), groups, sets, tl.maximum(level, 1), SHARERS)


@_loop
def _bound_given(counts, scratch, groups, k, sharers, GIVEN: tl.constexpr, SHARERS: tl.constexpr):
    """Set the threshold of candidates to k itself, or to the k-th largest of the tally."""
    level = k
    if not GIVEN:
        level, _wanted = _known(counts, k, k * 0, 4)
    _begin(scratch, groups, sharers, level, SHARERS)


@_loop
def _gather(
    table, count, f, g,
    KIND: tl.constexpr, GROUP: tl.constexpr, GRID: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Store the indices of a tile's candidates where the next room is; a list says where, and how many.

    A thread has four neighbours at a time, so it scans and stores a quarter of what it reads, and few of these quarters
    have a candidate. What follows is for few elements, and reads them again.
    """
    own, part = segment(table, count, _COLUMNS, SEGMENTS, GRID)
    a, b, c, n = _arrays(own, KIND, ALIGNED)
    scratch, room, tile = _array(own, _SCRATCH, tl.int32), _number(own, _ROOM), part.to(tl.int32)
    _sets, groups, tiles_at, candidates = _areas(own)
    i = part * WIDTH + tl.arange(0, WIDTH)
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


@_loop
def _arrange(
    table, count, f, g,
    KIND: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, SHARERS: tl.constexpr, GRID: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Copy candidates end to end, in the order of their indices, behind where they were, and then their values. Tally
    their first digit, and find the largest magnitude; or do so with all elements, if the sample misled.
    """
    own, part = segment(table, count, _COLUMNS, SEGMENTS, GRID)
    a, b, c, n = _arrays(own, KIND, ALIGNED)
    scratch, k = _array(own, _SCRATCH, tl.int32), _number(own, _K)
    sharers, groups, tiles_at, candidates = _areas(own)
    elements, close, _found, room = _amount(own, scratch, k, n, True)
    seen = tl.zeros((_VALUES,), tl.int32)
    top = k * 0
    if close > 0:
        number_of_tiles = _number(own, _NUMBER_OF_TILES)
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
    tl.atomic_max(scratch + _TOP, top, mask=top > 0, sem="relaxed")


class Chosen(NamedTuple):
    """The result of a selection: sorted int32 indices, the values there, and the largest magnitudes that programs saw
    of all elements.
    """

    indices: Tensor
    values: Tensor
    tops: Tensor


class _Shared(NamedTuple):
    """How programs share rows: elements of a row, programs of a row, all programs."""

    width: int
    sharers: int
    programs: int

    @classmethod
    def of(cls, width: int, rows: int = 1) -> _Shared:
        whole = -(-width // BLOCK)
        tiles = -(-whole // max(1, min(whole, _PROGRAMS // rows)))
        sharers = -(-whole // tiles)
        return cls(width, sharers, rows * sharers)


class _Groups(NamedTuple):
    """How the tiles of a long tensor are grouped: how many tiles there are, how many in a group, how many groups."""

    tiles: int
    group: int
    sets: int

    @classmethod
    def of(cls, n: int, group: int = 8) -> _Groups:
        """Group the tiles of n elements, at least ``group`` at a time."""
        tiles = -(-n // _TILE)
        group = max(group, triton.next_power_of_2(-(-tiles // _PROGRAMS)))
        return cls(tiles, group, -(-tiles // group))

    @property
    def size(self) -> int:
        """How many numbers scratch memory has for them."""
        return self.sets + 2 * self.tiles

    @property
    def places(self) -> tuple[int, int, int]:
        """Where in scratch memory are: the number of each group's candidates, the place of each tile's candidates, and
        the candidates' indices.
        """
        begin = _NOTES.value
        return begin, begin + self.sets, begin + self.size

    @property
    def form(self) -> dict[str, int]:
        lanes = max(1, BLOCK // self.group)
        return {"GROUP": self.group, "LANES": lanes, "SHARERS": triton.next_power_of_2(self.sets)}


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


def _all_margins(ns: Sequence[int], ks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the margins of all tensors, with zeros where no candidates are stored: of tensors of which they would be
    too many, and of all if none is long. Launches for long tensors take the others along.
    """
    if max(ns) < _LONG:
        return []
    margins = [_margins(n, k) for n, k in zip(ns, ks, strict=True)]
    return [own if _SCARCE * own[1] <= n else (0, 0) for own, n in zip(margins, ns, strict=True)]


class _Target(NamedTuple):
    """Where a selection is written: indices and values; or a payload, and the form of its indices."""

    out: Tensor
    values: Tensor
    low_bits: int = 0
    cut: int = 0

    @classmethod
    def room_for(cls, number: int, on: Tensor) -> _Target:
        """Return memory for this many indices and values."""
        indices = torch.empty(number, dtype=torch.int32, device=on.device)
        return cls(indices, torch.empty(number, dtype=torch.float32, device=on.device))


class _Writing(NamedTuple):
    """What is written of selections; see :func:`_write`.

    Attributes:
        payload: whether payloads are written.
        limit: the largest magnitude with which one is written.
        subtract: whether zeros are written where its elements were.
        place: where it is noted that something is not finite.
    """

    payload: bool = False
    limit: int = 0x7FFFFFFF
    subtract: bool = False
    place: Tensor | None = None

    @property
    def form(self) -> dict[str, Any]:
        form = {"PAYLOAD": self.payload, "LIMIT": self.limit}
        return {**form, "SUBTRACT": self.subtract, "NOTES": self.place is not None}


class _Work:
    """Launches over several tensors with the same formula, or over the rows of one: their table, and scratch memory.

    Args:
        sources: where elements come from.
        ks: how many are selected of each tensor, or of each row.
        rows: rows of the one tensor.
        margins: for each tensor, a rank in its sample and the room for candidates. Without room, none are stored.
        copies: how often candidates are stored.
        alone: whether a program has a whole row, and needs no scratch memory.
        scratch: the notes of an earlier tally.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        ks: Sequence[int],
        rows: int = 1,
        *,
        margins: Sequence[tuple[int, int]] = (),
        copies: int = 3,
        alone: bool = False,
        scratch: Tensor | None = None,
    ) -> None:
        self.sources, self._ks, device = sources, ks, sources[0].a.device
        self._kind, self.margins = sources[0].kind, margins or [(0, 0)] * len(sources)
        widths = [source.a.numel() // rows for source in sources]
        self._shared = [_Shared(width, 1, rows) if alone else _Shared.of(width, rows) for width in widths]
        group = max(_Groups.of(width).group for width in widths)
        self.groups = [
            _Groups.of(width, group) if room else _Groups(0, group, 0)
            for width, (_, room) in zip(widths, self.margins, strict=True)
        ]
        self.narrows = any(room for _, room in self.margins)
        self._sizes = [
            0 if alone else rows * _NOTES.value + own.size + copies * room
            for own, (_, room) in zip(self.groups, self.margins, strict=True)
        ]
        if scratch is None:  # if there are samples, the loop that looks at them writes the zeros
            make = torch.empty if self.narrows or alone else torch.zeros
            scratch = make(sum(self._sizes), dtype=torch.int32, device=device)
        self.scratch = scratch
        self.numbers = torch.empty(3 * sum(own.programs for own in self._shared), dtype=torch.int32, device=device)
        arrays = (own for source in sources for own in (source.a, source.b, source.c))
        self._aligned = all(own.data_ptr() % 16 == 0 for own in arrays) and not any(width % 4 for width in widths)
        self._segments = Segments(sources[0].a)

    def aim(self, targets: Sequence[_Target] = (), tops: Tensor | None = None) -> None:
        """Set where selections are written, and the largest magnitudes."""
        self._segments = Segments(self.sources[0].a, grids=4)
        scratch, numbers, top = self.scratch.data_ptr(), self.numbers.data_ptr(), 0 if tops is None else tops.data_ptr()
        for at, (source, shared, groups) in enumerate(zip(self.sources, self._shared, self.groups, strict=True)):
            rank, room = self.margins[at]
            arrays = (own.data_ptr() for own in (source.a, source.b, source.c, source.total))
            out, form = (0, 0), (0, 0, 0)
            if targets:
                into = targets[at]
                out = into.out.data_ptr(), into.values.data_ptr()
                form = into.low_bits, into.cut, into.out.numel() // 4
            self._segments.add(
                (shared.programs, groups.tiles, groups.sets, 0 if room else shared.programs),
                *arrays, scratch, numbers, top, *out, shared.width, self._ks[at], shared.sharers, rank, room,
                groups.sets, groups.tiles, *form,
            )  # fmt: skip
            scratch += 4 * self._sizes[at]
            numbers += 12 * shared.programs
            top += 4

    def run(self, loop: Any, *arguments: Any, grid: int = _SHARES, **form: Any) -> None:
        """Launch a loop."""
        f, g = self.sources[0].f, self.sources[0].g
        self._segments.run(loop, f, g, *arguments, grid=grid, KIND=self._kind, ALIGNED=self._aligned, **form)

    def select_short(self, writing: _Writing, note: Tensor) -> None:
        """Do all for rows that fit into a program's registers."""
        tile = max(16, triton.next_power_of_2(max(own.width for own in self._shared)))
        form = {"WIDTH": tile, "num_warps": min(16, max(4, tile // _PER_WARP))}
        self.run(_short, note, **writing.form, **form)

    def bound(self) -> None:
        """Set the thresholds of candidates."""
        source = self.sources[0]
        form = {"KIND": self._kind, "ALIGNED": self._aligned, "SHARERS": self._group_form["SHARERS"]}
        self._segments.run_each(_bound, source.f, source.g, **form, SAMPLE=_SAMPLE, num_warps=8)

    def gather(self) -> None:
        """Store candidates of tensors that have room for them, which are written."""
        group = self.groups[0].group
        self.run(_gather, grid=_TILES, GROUP=group, GRID=_TILES, WIDTH=_TILE, num_warps=8)

    @property
    def _group_form(self) -> dict[str, int]:
        return max(self.groups, key=lambda own: own.sets).form

    def tally(self) -> None:
        """Count the digits of each row's k-th largest, and find the largest magnitudes. All tensors are written."""
        if self.narrows:
            self.bound()
            self.gather()
        self._digit(0, _WHOLE)
        self._kind = self.sources[0].kind_after
        if self.narrows:
            self.run(_arrange, grid=_GROUPS, GRID=_GROUPS, WIDTH=BLOCK, **self._group_form)
        for known in range(1, 4):
            self._digit(known, _SHARES)

    def _digit(self, known: int, grid: int) -> None:
        """Count the values of a digit, where so many are known."""
        found = self.narrows and known > 0
        self.run(_tally, grid=grid, KNOWN=known, FOUND=found, GRID=grid, WIDTH=BLOCK)

    def count(self, level: int, writing: _Writing, *, write: bool = False, given: bool = False) -> None:
        """Count what each program has to write."""
        form = {"PAYLOAD": writing.payload, "LIMIT": writing.limit, "FOUND": self.narrows, "WIDTH": BLOCK}
        self.run(_count, level, WRITE=write, GIVEN=given, **form)
        self._kind = self.sources[0].kind_after

    def write(self, level: int, writing: _Writing, note: Tensor, *, given: bool = False, every: bool = False) -> None:
        """Write what was counted."""
        sharers = triton.next_power_of_2(max(own.sharers for own in self._shared))
        form = {"GIVEN": given, "ALL": every, "FOUND": self.narrows, "SHARERS": sharers, "WIDTH": BLOCK}
        self.run(_write, level, note, **form, **writing.form)


def _select(
    sources: Sequence[Source], ks: Sequence[int], targets: Sequence[_Target], writing: _Writing, rows: int = 1
) -> Tensor:
    """Select the k largest of each tensor, or of each row, ties to the lower index. The sources are written; the host
    does not wait.

    Returns:
        The largest magnitude of each tensor, or of the first row: int32.
    """
    tops = torch.empty(len(sources), dtype=torch.int32, device=sources[0].a.device)
    note = tops if writing.place is None else writing.place
    widths = [source.a.numel() // rows for source in sources]
    begin = 0
    for alone in (True, False):
        some = [at for at, width in enumerate(widths) if (width <= _SHORT) is alone]
        if not some:
            continue
        own, their, into = [sources[at] for at in some], [ks[at] for at in some], [targets[at] for at in some]
        margins = [] if alone or rows > 1 else _all_margins([widths[at] for at in some], their)
        work = _Work(own, their, rows, margins=margins, alone=alone)
        work.aim(into, tops[begin:])
        begin += len(some)
        if alone:
            work.select_short(writing, note)
        else:
            work.tally()
            work.count(0, writing)
            work.write(0, writing, note)
    return tops


def choose(source: Source, k: int, rows: int = 1) -> Chosen:
    """Select the k largest of each row, ties to the lower index. The source is written; the host does not wait."""
    target = _Target.room_for(rows * k, source.a)
    tops = _select([source], [k], [target], _Writing(), rows)
    return Chosen(target.out, target.values, tops)


def encode_all(
    sources: Sequence[Source],
    ks: Sequence[int],
    outs: Sequence[Tensor],
    *,
    subtract: bool = False,
    always: bool = False,
    place: Tensor | None = None,
) -> Tensor:
    """Select as :func:`choose`, from several tensors with the same formula, and write payloads.

    Args:
        sources: where elements come from; they are written.
        ks: how many are selected of each.
        outs: where payloads are written: values, Elias–Fano's parts, zeros. Of whole words.
        subtract: whether zeros are written into the sources where elements were.
        always: whether a payload is written although its tensor is not finite.
        place: where it is noted if a tensor is not finite.

    Returns:
        The largest magnitudes of all elements.
    """
    targets = [
        _Target(out, out, elias_fano_low_bits(k, source.a.numel()), -(-2 * k // 8))
        for source, k, out in zip(sources, ks, outs, strict=True)
    ]
    limit = _Writing().limit if always else INFINITE.value - 1
    return _select(sources, ks, targets, _Writing(payload=True, limit=limit, subtract=subtract, place=place))


def choose_sampled(source: Source, k: int, seed: int) -> Chosen:
    """Select the k largest of those that reach the threshold of a sample, or fewer. The source is written.

    How many elements reach it depends on the data; the host waits for this number once.
    """
    on, n = source.a, source.a.numel()
    size, rank = sample_size(n, k), sample_rank(n, k)
    sample = torch.empty(size, dtype=torch.float32, device=on.device)
    form = {"KIND": source.kind, "WIDTH": BLOCK}
    run(_draw, -(-size // BLOCK), *source.arguments, sample, n, size, fold_seed(seed), on=on, **form)
    work = _Work([Source.plain(sample)], [rank])
    work.aim()
    work.tally()
    return _reaching(source, work.scratch, rank, k, given=False)


def _reaching(source: Source, counts: Tensor, level: int, most: int, *, given: bool) -> Chosen:
    """Select the elements that reach a threshold, at most ``most`` of them. The source is written."""
    long = source.a.numel() >= _LONG
    few = _few_reaching(source, counts, level, most, given=given) if long else None
    chosen = few or _all_reaching(source.after() if long else source, counts, level, given=given)
    if chosen.indices.numel() > most:
        inside = choose(Source.plain(chosen.values), most)
        return Chosen(chosen.indices[inside.indices], inside.values, chosen.tops)
    return chosen


def _few_reaching(source: Source, counts: Tensor, level: int, most: int, *, given: bool) -> Chosen | None:
    """Select the elements of a long tensor that reach a threshold; None if there are many. The source is written."""
    on, n = source.a, source.a.numel()
    room = min(n // _SCARCE, 2 * most + BLOCK)
    work = _Work([source], [most], margins=[(0, room)], copies=1)
    work.aim()
    (own,), scratch = work.groups, work.scratch
    form = {"GIVEN": given, "SHARERS": own.form["SHARERS"]}
    run(_bound_given, 1, counts, scratch, own.places[0], level, own.sets, on=on, **form)
    work.gather()
    number = int(scratch[_FOUND.value])
    if number > room:
        return None
    target, source = _Target.room_for(number, on), source.after()
    arrays = *source.arguments, scratch, *own.places, target.out, target.values
    run(_take, own.sets, *arrays, own.tiles, on=on, KIND=source.kind, **own.form)
    return Chosen(target.out, target.values, scratch[_TOP.value : _TOP.value + 1].clone())


def _all_reaching(source: Source, counts: Tensor, level: int, *, given: bool) -> Chosen:
    """Select all elements that reach a threshold. The source is written."""
    work, top = _Work([source], [level], scratch=counts), torch.empty(1, dtype=torch.int32, device=counts.device)
    work.aim(tops=top)
    work.count(level, _Writing(), write=True, given=given)
    seen = work.numbers.view(-1, 3)
    target = _Target.room_for(int(seen[:, :2].sum()), source.a)
    work.aim([target], top)
    work.write(level, _Writing(), top, given=given, every=True)
    return Chosen(target.out, target.values, seen[:, 2])


def select_topk(x: Tensor, k: int, *, sampled: bool = False, seed: int = 0) -> Tensor:
    if not k:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    if sampled and k < x.numel():
        return choose_sampled(Source.plain(x), k, seed).indices
    return choose(Source.plain(x), k).indices


def select_topk_rows(x: Tensor, k: int) -> Tensor:
    rows = x.shape[0]
    if not rows or not k:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    return choose(Source.plain(x), k, rows).indices


def select_threshold(x: Tensor, value: float) -> Tensor:
    n, level = x.numel(), int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32))
    if not n:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    return _reaching(Source.plain(x), x, level, n, given=True).indices


def randomk_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    out = torch.empty(k, dtype=torch.int32, device=device)
    run(_random, -(-k // BLOCK), out, n, k, fold_seed(seed), on=out, WIDTH=BLOCK)
    return out
