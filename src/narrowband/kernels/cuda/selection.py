"""Selection in Triton: first a threshold, then the places of selected elements, in their order.

The k-th largest magnitude is found digit by digit, like a radix sort. The number of elements for each value of the
highest 8 bits determines these bits of the k-th largest, and so on with the bits below. Then every program counts its
elements above the threshold and at it; the counts of the programs before it tell where it has to write. Rows that fit
into a program's registers take one program.

A long tensor is read only once: a pass stores its candidates (:mod:`narrowband.kernels.cuda.candidates`), and digits
are then those of candidates. A launch takes all tensors of a table (:mod:`narrowband.kernels.cuda.tables`). An exact
selection does not wait for the device.
"""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.candidates import LONG, all_margins, arrange, few_reaching, find, stratum
from narrowband.kernels.cuda.common import BLOCK, INFINITE, MAGNITUDE, NOT_A_NUMBER, SIGN, fold_seed
from narrowband.kernels.cuda.launching import kernel, run, segment
from narrowband.kernels.cuda.sources import AHEAD, NESTEROV, Source, forget_at, look
from narrowband.kernels.cuda.tables import (
    COLUMNS,
    CUT,
    DIGITS,
    FLAG,
    GONE,
    KNOWN_AT,
    LARGEST,
    LEAST,
    LOW_BITS,
    NUMBERS,
    OLDER,
    OTHERWISE,
    OUT,
    ROW_NOTES,
    SCRATCH,
    SHARED_BY,
    SHARES,
    SUM,
    TOPS,
    VALUES_OUT,
    WHOLE,
    WORDS,
    Chosen,
    K,
    Target,
    Work,
    Writing,
    amount,
    find_known,
    load_array,
    load_number,
    load_source,
    selection_loop,
)
from narrowband.kernels.selection import sample_rank, sample_size
from narrowband.kernels.sparse import elias_fano_low_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "Chosen",
    "choose",
    "choose_all",
    "choose_sampled",
    "encode_all",
    "places",
    "randomk_indices",
    "select_threshold",
    "select_topk",
    "select_topk_all",
    "select_topk_rows",
]

_AHEAD, _NESTEROV = tl.constexpr(AHEAD), tl.constexpr(NESTEROV)

#: The longest rows that one program holds in registers; and elements per warp, if 16 warps are enough.
_SHORT, _PER_WARP = 16384, 512


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


@selection_loop
def _tally(
    table, count, f, g,
    KIND: tl.constexpr, KNOWN: tl.constexpr, FOUND: tl.constexpr, GRID: tl.constexpr, WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Count, among a row's elements that share the known digits of its k-th largest, each value of the next digit.

    With no digit known, also find the largest magnitude.
    """
    own, at = segment(table, count, COLUMNS, SEGMENTS, GRID)
    a, b, c, width = load_source(own, KIND, ALIGNED)
    scratch, sharers, k = load_array(own, SCRATCH, tl.int32), load_number(own, SHARED_BY), load_number(own, K)
    row, part = at // sharers, at % sharers
    notes = scratch + row * ROW_NOTES
    VALUES: tl.constexpr = DIGITS if KNOWN < 3 else DIGITS // 2
    DOWN: tl.constexpr = 23 - 8 * KNOWN if KNOWN < 3 else 0
    UP: tl.constexpr = 31 - 8 * KNOWN
    if KNOWN > 0:
        level, _wanted = find_known(notes, k, part, KNOWN)
    elements, close, found, room = amount(own, notes, k, width, FOUND)
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
    tl.atomic_add(notes + KNOWN * DIGITS + tl.arange(0, VALUES), number, mask=number > 0, sem="relaxed")
    if KNOWN == 0:
        tl.atomic_max(notes + LARGEST, tl.max(top, 0), sem="relaxed")


@selection_loop
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
    own, at = segment(table, count, COLUMNS, SEGMENTS)
    a, b, c, width = load_source(own, KIND, ALIGNED)
    numbers, sharers = load_array(own, NUMBERS, tl.int32), load_number(own, SHARED_BY)
    row, part = at // sharers, at % sharers
    notes = load_array(own, SCRATCH, tl.int32) + row * ROW_NOTES
    level = k
    if not GIVEN:
        k = load_number(own, K)
        level, _wanted = find_known(notes, k, part, 4)
        largest = tl.load(notes + LARGEST)
        tl.store(load_array(own, TOPS, tl.int32), largest, mask=at == 0)
        if PAYLOAD:
            _clear(own, part, tl.where(largest <= LIMIT, sharers, 0), WIDTH)
    elements, close, found, room = amount(own, notes, k, width, FOUND)
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
def _clear(own, part, sharers, WIDTH: tl.constexpr):
    """Write zeros into a program's share of the words of a payload's indices; nothing for no sharers."""
    out, words = load_array(own, OUT, tl.int32), tl.load(own + WORDS)
    for first in range(part * WIDTH, tl.where(sharers > 0, words, 0), tl.maximum(sharers, 1) * WIDTH):
        word = first + tl.arange(0, WIDTH)
        tl.store(out + word, tl.zeros((WIDTH,), tl.int32), mask=word < words)


@kernel
def _put(own, i, value, place, taken, LISTS: tl.constexpr):
    """Write selected elements into a payload: values, and indices as :mod:`~narrowband.kernels.sparse` says.

    With LISTS, also list the indices as they are. Several indices have bits in one word, and different programs may
    write them, so each sets its bits alone.
    """
    out, cut = load_array(own, OUT, tl.int32), load_number(own, CUT)
    low_bits = load_number(own, LOW_BITS).to(tl.uint32)
    index = i.to(tl.uint32)
    tl.store(load_array(own, VALUES_OUT, tl.float32) + place, value, mask=taken)
    if LISTS:
        tl.store(load_array(own, GONE, tl.int32) + place, i.to(tl.int32), mask=taken)
    bit = (index >> low_bits) + place.to(tl.uint32)
    one = (index * 0 + 1 << (bit & 31)).to(tl.int32, bitcast=True)
    tl.atomic_or(out + (bit >> 5).to(tl.int32), one, mask=taken, sem="relaxed")
    bit = place.to(tl.uint32) * low_bits + (8 * (cut & 3)).to(tl.uint32)  # the lower part need not begin with a word
    low = index - (index >> low_bits << low_bits)
    here = (low << (bit & 31)).to(tl.int32, bitcast=True)
    over = (low >> 1 >> (31 - (bit & 31))).to(tl.int32, bitcast=True)
    word = out + (cut >> 2) + (bit >> 5).to(tl.int32)
    tl.atomic_or(word, here, mask=taken & (here != 0), sem="relaxed")
    tl.atomic_or(word + 1, over, mask=taken & (over != 0), sem="relaxed")


@kernel
def _take_out(own, i, value, taken, SUBTRACT: tl.constexpr):
    """Write zeros, NaN or −0 into the sum where selected elements were."""
    BITS: tl.constexpr = NOT_A_NUMBER if SUBTRACT == 2 else SIGN if SUBTRACT == 3 else 0
    left = (tl.zeros_like(value).to(tl.int32, bitcast=True) | BITS).to(tl.float32, bitcast=True)
    tl.store(load_array(own, SUM, tl.float32) + i, left, mask=taken)


@kernel
def _forget(own, i, place, taken, k, momentum, NESTEROV: tl.constexpr, MASKING: tl.constexpr):
    """Change both sums of a momentum step at selected elements, as ``forget``; keep what the older one was there."""
    now, before = load_array(own, OLDER, tl.float32), load_array(own, SUM, tl.float32)
    gone = load_array(own, GONE, tl.int32)
    was = forget_at(now, before, i, taken, momentum, NESTEROV, MASKING)
    tl.store(gone + k + place, was.to(tl.int32, bitcast=True), mask=taken)


@kernel
def places(magnitude, level, above, ties, allowed):
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


@selection_loop
def _write(
    table, count, f, g, k, note,
    KIND: tl.constexpr, GIVEN: tl.constexpr, ALL: tl.constexpr, FOUND: tl.constexpr, PAYLOAD: tl.constexpr,
    LIMIT: tl.constexpr, SUBTRACT: tl.constexpr, LISTS: tl.constexpr, FORGET: tl.constexpr, NOTES: tl.constexpr,
    SHARERS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Write the elements above the threshold, and the first ones at it (or all), to their places.

    With PAYLOAD, write a payload if no magnitude exceeds LIMIT; for SUBTRACT and FORGET see
    :class:`~narrowband.kernels.cuda.tables.Writing`. With NOTES, note if something is not finite.
    """
    own, at = segment(table, count, COLUMNS, SEGMENTS)
    a, b, c, width = load_source(own, KIND, ALIGNED)
    numbers, sharers = load_array(own, NUMBERS, tl.int32), load_number(own, SHARED_BY)
    row, part = at // sharers, at % sharers
    notes = load_array(own, SCRATCH, tl.int32) + row * ROW_NOTES
    level = k
    allowed = 0x7FFFFFFF
    first = row * 0
    if not GIVEN:
        k = load_number(own, K)
        level = tl.load(notes + KNOWN_AT + 8)
    if not ALL:
        allowed = tl.load(notes + KNOWN_AT + 9)
        first = row * k
    elements, close, found, room = amount(own, notes, k, width, FOUND)
    sharer = tl.arange(0, SHARERS)
    before = numbers + 3 * (row * sharers + sharer)
    above = tl.sum(tl.load(before, mask=sharer < part, other=0), 0)
    ties = tl.sum(tl.load(before + 1, mask=sharer < part, other=0), 0)
    tiles = tl.cdiv(elements + close, WIDTH)
    each = tl.cdiv(tiles, sharers)
    end = tl.minimum((part + 1) * each, tiles)
    if PAYLOAD:
        largest = tl.load(notes + LARGEST)
        end = tl.where(largest <= LIMIT, end, 0)
        if NOTES:
            tl.atomic_or(note, 1, mask=(part == 0) & (largest >= INFINITE))
        if SUBTRACT == 2:
            tl.store(load_array(own, LEAST, tl.int32), level, mask=part == 0)
    for tile in range(part * each, end):
        j = tile * WIDTH + tl.arange(0, WIDTH)
        i, value, magnitude = _element(a, b, c, f, g, found, room, row * width, j, elements, close, KIND, False, FOUND)
        taken, place, more, more_ties = places(magnitude, level, above, ties, allowed)
        if PAYLOAD:
            _put(own, i, value, place, taken, LISTS)
            if SUBTRACT > 0:
                tl.debug_barrier()  # a thread may store what another has loaded
                _take_out(own, i, value, taken, SUBTRACT)
            if FORGET > 0:
                _forget(own, i, place, taken, k, f, KIND == _AHEAD, FORGET == 1)
        else:
            tl.store(load_array(own, OUT, tl.int32) + first + place, i.to(tl.int32), mask=taken)
            tl.store(load_array(own, VALUES_OUT, tl.float32) + first + place, value, mask=taken)
        above += more
        ties += more_ties


@selection_loop
def _short(
    table, count, f, g, note,
    KIND: tl.constexpr, PAYLOAD: tl.constexpr, LIMIT: tl.constexpr, SUBTRACT: tl.constexpr, LISTS: tl.constexpr,
    FORGET: tl.constexpr, NOTES: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Do the whole selection of a row that one program holds at once: find its k-th largest bit by bit, and write."""
    own, row = segment(table, count, COLUMNS, SEGMENTS)
    a, b, c, width = load_source(own, KIND, ALIGNED)
    k = load_number(own, K)
    j = tl.arange(0, WIDTH)
    i = row * width + j
    value, magnitude = look(a, b, c, f, g, i, j < width, KIND, True)
    top = tl.max(magnitude, 0)
    tl.store(load_array(own, TOPS, tl.int32), top, mask=row == 0)
    level = top * 0
    for bit in range(31):
        higher = level | (1 << (30 - bit))
        level = tl.where(tl.sum((magnitude >= higher).to(tl.int32), 0) >= k, higher, level)
    allowed = k - tl.sum((magnitude > level).to(tl.int32), 0)
    taken, place, _, _ = places(magnitude, level, 0, 0, allowed)
    if PAYLOAD:
        if NOTES:
            tl.atomic_or(note, 1, mask=top >= INFINITE)
        if SUBTRACT == 2:
            tl.store(load_array(own, LEAST, tl.int32), level)
        if top <= LIMIT:
            _clear(own, row * 0, 1, WIDTH)
            tl.debug_barrier()  # other threads set bits in these words
            _put(own, i, value, place, taken, LISTS)
            if SUBTRACT > 0:
                _take_out(own, i, value, taken, SUBTRACT)
            if FORGET > 0:
                _forget(own, i, place, taken, k, f, KIND == _NESTEROV, FORGET == 1)
    else:
        tl.store(load_array(own, OUT, tl.int32) + row * k + place, i.to(tl.int32), mask=taken)
        tl.store(load_array(own, VALUES_OUT, tl.float32) + row * k + place, value, mask=taken)


@selection_loop
def _settle(table):
    """Write into a tensor's row of the table how many elements are selected, where that depends on a flag."""
    own = table + tl.program_id(0).to(tl.int64) * COLUMNS
    flag = tl.load(own + FLAG)
    if flag != 0:
        zero = tl.load(flag.to(tl.pointer_type(tl.int32))) == 0
        tl.store(own + K, tl.load(own + OTHERWISE), mask=zero)


@selection_loop
def _random(out, n, k, folded, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + i, stratum(i, n, k, folded).to(tl.int32), mask=i < k)


@selection_loop
def _draw(a, b, c, f, g, out, n, size, folded, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """Compute a sample of the elements that the source is going to have."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    there = i < size
    value, _ = look(a, b, c, f, g, stratum(i, n, size, folded), there, KIND, False)
    tl.store(out + i, value, mask=there)


def _select_short(work: Work, writing: Writing, note: Tensor) -> None:
    """Do all for rows that fit into a program's registers."""
    tile = max(16, triton.next_power_of_2(work.width))
    form = {"WIDTH": tile, "num_warps": min(16, max(4, tile // _PER_WARP))}
    work.run(_short, note, **writing.form, **form)


def _find_digits(work: Work) -> None:
    """Count the digits of each row's k-th largest, and find the largest magnitudes. All tensors are written."""
    if work.narrows:
        find(work)
    _find_digit(work, 0, WHOLE)
    work.written()
    if work.narrows:
        arrange(work)
    for known in range(1, 4):
        _find_digit(work, known, SHARES)


def _find_digit(work: Work, known: int, grid: int) -> None:
    """Count the values of a digit, where so many are known."""
    found = work.narrows and known > 0
    work.run(_tally, grid=grid, KNOWN=known, FOUND=found, GRID=grid, WIDTH=BLOCK)


def _count_all(work: Work, level: int, writing: Writing, *, write: bool = False, given: bool = False) -> None:
    """Count what each program has to write."""
    form = {"PAYLOAD": writing.payload, "LIMIT": writing.limit, "FOUND": work.narrows, "WIDTH": BLOCK}
    work.run(_count, level, WRITE=write, GIVEN=given, **form)
    work.written()


def _write_all(
    work: Work, level: int, writing: Writing, note: Tensor, *, given: bool = False, every: bool = False
) -> None:
    """Write what was counted."""
    form = {"SHARERS": triton.next_power_of_2(work.sharers), "FOUND": work.narrows, "WIDTH": BLOCK}
    work.run(_write, level, note, GIVEN=given, ALL=every, **form, **writing.form)


def _select(
    sources: Sequence[Source], ks: Sequence[int], targets: Sequence[Target], writing: Writing, rows: int = 1
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
        margins = [] if alone or rows > 1 else all_margins([widths[at] for at in some], their)
        work = Work(own, their, rows, margins=margins, alone=alone)
        work.aim(into, tops[begin:])
        begin += len(some)
        if any(target.flag for target in into):
            work.run_rows(_settle)
        if alone:
            _select_short(work, writing, note)
        else:
            _find_digits(work)
            _count_all(work, 0, writing)
            _write_all(work, 0, writing, note)
    return tops


def choose(source: Source, k: int, rows: int = 1) -> Chosen:
    """Select the k largest of each row, ties to the lower index. The source is written; the host does not wait."""
    target = Target.room_for(rows * k, source.a)
    tops = _select([source], [k], [target], Writing(), rows)
    return Chosen(target.out, target.values, tops)


def choose_all(sources: Sequence[Source], ks: Sequence[int], targets: Sequence[Target]) -> None:
    """Do as :func:`choose` for several tensors with the same formula, and write each selection to its target."""
    _select(sources, ks, targets, Writing())


def encode_all(
    sources: Sequence[Source],
    ks: Sequence[int],
    outs: Sequence[Tensor],
    *,
    values: Sequence[Tensor] = (),
    subtract: int = 0,
    least: Tensor | None = None,
    forget: int = 0,
    gone: Sequence[Tensor] = (),
    always: bool = False,
    place: Tensor | None = None,
) -> Tensor:
    """Select as :func:`choose`, from several tensors with the same formula, and write payloads.

    Args:
        sources: where elements come from; they are written.
        ks: how many are selected of each.
        outs: where payloads are written: values, Elias–Fano's parts, zeros. Of whole words.
        values: if they are: where the values are written instead: float32.
        subtract: what is written into the sources where elements were, see
            :class:`~narrowband.kernels.cuda.tables.Writing`.
        least: float32, one per tensor: the least selected magnitudes, if NaN is written there.
        forget: how sums of momentum steps are changed there, see :class:`~narrowband.kernels.cuda.tables.Writing`.
        gone: if they are: int32, where the selected indices of each tensor are listed, and what is forgotten.
        always: whether a payload is written although its tensor is not finite.
        place: where it is noted if a tensor is not finite.

    Returns:
        The largest magnitudes of all elements.
    """
    lesser = itertools.repeat(0) if least is None else itertools.count(least.data_ptr(), 4)
    none = itertools.repeat(None, len(outs))
    targets = [
        Target(
            out, value, elias_fano_low_bits(k, source.a.numel()), -(-2 * k // 8), 0 if values else k, own, next(lesser)
        )
        for source, k, out, value, own in zip(sources, ks, outs, values or outs, gone or none, strict=True)
    ]
    limit = Writing().limit if always else INFINITE.value - 1
    writing = Writing(
        payload=True, limit=limit, subtract=subtract, lists=bool(gone), forget=forget, place=place
    )  # fmt: skip
    return _select(sources, ks, targets, writing)


def choose_sampled(source: Source, k: int, seed: int) -> Chosen:
    """Select the k largest of those that reach the threshold of a sample, or fewer. The source is written.

    How many elements reach it depends on the data; the host waits for this number once.
    """
    on, n = source.a, source.a.numel()
    size, rank = sample_size(n, k), sample_rank(n, k)
    sample = torch.empty(size, dtype=torch.float32, device=on.device)
    form = {"KIND": source.kind, "WIDTH": BLOCK}
    run(_draw, -(-size // BLOCK), *source.arguments, sample, n, size, fold_seed(seed), on=on, **form)
    work = Work([Source.plain(sample)], [rank])
    work.aim()
    _find_digits(work)
    return _reaching(source, work.scratch, rank, k, given=False)


def _reaching(source: Source, counts: Tensor, level: int, most: int, *, given: bool) -> Chosen:
    """Select the elements that reach a threshold, at most ``most`` of them. The source is written."""
    long = source.a.numel() >= LONG
    few = few_reaching(source, counts, level, most, given=given) if long else None
    chosen = few or _all_reaching(source.after() if long else source, counts, level, given=given)
    if chosen.indices.numel() > most:
        inside = choose(Source.plain(chosen.values), most)
        return Chosen(chosen.indices[inside.indices], inside.values, chosen.tops)
    return chosen


def _all_reaching(source: Source, counts: Tensor, level: int, *, given: bool) -> Chosen:
    """Select all elements that reach a threshold. The source is written."""
    work, top = Work([source], [level], scratch=counts), torch.empty(1, dtype=torch.int32, device=counts.device)
    work.aim(tops=top)
    _count_all(work, level, Writing(), write=True, given=given)
    seen = work.numbers.view(-1, 3)
    target = Target.room_for(int(seen[:, :2].sum()), source.a)
    work.aim([target], top)
    _write_all(work, level, Writing(), top, given=given, every=True)
    return Chosen(target.out, target.values, seen[:, 2])


def select_topk(x: Tensor, k: int, *, sampled: bool = False, seed: int = 0) -> Tensor:
    if not k:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    if sampled and k < x.numel():
        return choose_sampled(Source.plain(x), k, seed).indices
    return choose(Source.plain(x), k).indices


def select_topk_all(xs: Sequence[Tensor], ks: Sequence[int]) -> list[Tensor]:
    targets = [Target.room_for(k, x) for x, k in zip(xs, ks, strict=True)]
    some = [at for at, k in enumerate(ks) if k]
    if some:
        sources, into = [Source.plain(xs[at]) for at in some], [targets[at] for at in some]
        _select(sources, [ks[at] for at in some], into, Writing())
    return [target.out for target in targets]


def select_topk_rows(x: Tensor, k: int) -> Tensor:
    rows = x.shape[0]
    if not rows or not k:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    return choose(Source.plain(x), k, rows).indices


def select_threshold(x: Tensor, value: float) -> Tensor:
    n, (level,) = x.numel(), struct.unpack("<i", struct.pack("<f", value))
    if not n:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    return _reaching(Source.plain(x), x, level, n, given=True).indices


def randomk_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    out = torch.empty(k, dtype=torch.int32, device=device)
    run(_random, -(-k // BLOCK), out, n, k, fold_seed(seed), on=out, WIDTH=BLOCK)
    return out
