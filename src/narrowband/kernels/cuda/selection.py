"""Selection in Triton: a threshold first, then places in their order.

The k-th largest magnitude is found digit by digit, as a radix sort would: how many elements have each value of the
highest 11 bits says which of these the k-th largest has, and so on with 10 and 10 more. Then every program counts what
it has above the threshold and at it, and from the counts of the programs before knows where to write. All of this is as
many launches for any data, and nothing of it waits for the device. Rows that fit into a program's registers take one.

Sums of a step (:mod:`~narrowband.kernels.cuda.compensation`, :mod:`~narrowband.kernels.cuda.momentum`) are made where
the first look at them is taken: a :class:`Source` is up to three arrays, and how an element comes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, MAGNITUDE, fold_seed, kernel, mix, run
from narrowband.kernels.selection import sample_rank, sample_size

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AHEAD",
    "COMPENSATE",
    "MOMENTUM",
    "NESTEROV",
    "PLAIN",
    "Chosen",
    "Source",
    "choose",
    "choose_sampled",
    "randomk_indices",
    "select_threshold",
    "select_topk",
    "select_topk_rows",
]

#: Longest rows that one program has in its registers, and that four warps have.
_SHORT, _FOUR_WARPS = 8192, 2048
#: About as many programs take a long tensor: where it has more tiles than these, each takes several, one by one.
_PROGRAMS = 1024
#: Counts of a row, of the values of its three digits; and with them what programs leave for later launches.
_COUNTS, _NOTES = tl.constexpr(2048 + 1024 + 1024), tl.constexpr(4096 + 8)

#: A k of 1 is no constant of a program, and neither is a threshold.
_loop: Any = triton.jit(do_not_specialize=["k", "folded"])

#: How an element comes of arrays a, b and c and of numbers f and g. The latter three also write: what is new into the
#: last array, and what was there into the first.
PLAIN, AHEAD, COMPENSATE, MOMENTUM, NESTEROV = range(5)
_AHEAD, _COMPENSATE, _NESTEROV = tl.constexpr(AHEAD), tl.constexpr(COMPENSATE), tl.constexpr(NESTEROV)


@dataclass(frozen=True)
class Source:
    """Where elements come from.

    Attributes:
        kind: PLAIN: a. AHEAD: a + f·(a − b). COMPENSATE: f·b + a, which becomes b. MOMENTUM: b + (f·(b − c) + g·a),
            which becomes c; NESTEROV: that, and as much ahead of b as AHEAD of it.
    """

    kind: int
    a: Tensor
    b: Tensor
    c: Tensor
    f: float = 0.0
    g: float = 0.0

    @classmethod
    def plain(cls, x: Tensor) -> Source:
        """A tensor as it is."""
        return cls(PLAIN, x, x, x)

    def after(self) -> Source:
        """The same elements, once they are written."""
        if self.kind == COMPENSATE:
            return Source.plain(self.b)
        if self.kind == MOMENTUM:
            return Source.plain(self.c)
        return Source(AHEAD, self.c, self.b, self.b, self.f) if self.kind == NESTEROV else self

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.a, self.b, self.c, self.f, self.g


@kernel
def _look(a, b, c, f, g, i, there, KIND: tl.constexpr, WRITE: tl.constexpr):
    """Elements of a source, and their magnitudes as integers: −1 where there is none.

    In a small tile several threads have the same element: all have to have read before one writes.
    """
    value = tl.load(a + i, mask=there, other=0.0)
    if KIND > 0:
        gradient, old = value, tl.load(b + i, mask=there, other=0.0)
        if KIND == _AHEAD:
            value = gradient + (gradient - old) * f
        elif KIND == _COMPENSATE:
            value = old * f + gradient
            if WRITE:
                tl.debug_barrier()
                tl.store(a + i, old, mask=there)
                tl.store(b + i, value, mask=there)
        else:
            oldest = tl.load(c + i, mask=there, other=0.0)
            value = old + ((old - oldest) * f + gradient * g)
            if WRITE:
                tl.debug_barrier()
                tl.store(a + i, oldest, mask=there)
                tl.store(c + i, value, mask=there)
            if KIND == _NESTEROV:
                value = value + (value - old) * f
    return value, tl.where(there, value.to(tl.int32, bitcast=True) & MAGNITUDE, -1)


@kernel
def _known(counts, k, part, KNOWN: tl.constexpr):
    """The first digits of the k-th largest, with zeros for the others; and which of those with these digits it is.

    What was known before, the launch before has left behind the counts, in a place for each digit.
    """
    VALUES: tl.constexpr = 2048 if KNOWN == 1 else 1024
    PLACE: tl.constexpr = 0 if KNOWN == 1 else 1024 * KNOWN
    left = counts + _COUNTS + 2 * KNOWN
    level = 0
    wanted = k
    if KNOWN > 1:
        level, wanted = tl.load(left - 2), tl.load(left - 1)
    number = tl.load(counts + PLACE + (VALUES - 1 - tl.arange(0, VALUES)))  # of the largest value first
    passed = tl.cumsum(number, 0)
    before = passed < wanted
    level += (VALUES - 1 - tl.sum(before.to(tl.int32), 0)) << (30 - 10 * KNOWN)
    wanted = wanted - tl.max(tl.where(before, passed, 0), 0)
    tl.store(left, level, mask=part == 0)
    tl.store(left + 1, wanted, mask=part == 0)
    return level, wanted


@_loop
def _tally(
    a, b, c, f, g, counts, tops, k, width, sharers, tiles,
    KIND: tl.constexpr, KNOWN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """How many elements of a row, of those that share the known digits of its k-th largest, have which next digit.

    With no digit known, also the largest magnitude that a program has seen.
    """
    at = tl.program_id(0).to(tl.int64)
    row, part = at // sharers, at % sharers
    own = counts + row * _NOTES
    VALUES: tl.constexpr = 2048 if KNOWN == 0 else 1024
    DOWN: tl.constexpr = 20 - 10 * KNOWN
    PLACE: tl.constexpr = 0 if KNOWN == 0 else 1024 + 1024 * KNOWN
    if KNOWN > 0:
        level, _wanted = _known(own, k, part, KNOWN)
    number = tl.zeros((VALUES,), tl.int32)
    top = tl.zeros((WIDTH,), tl.int32)
    for tile in range(tiles):
        j = (part * tiles + tile) * WIDTH + tl.arange(0, WIDTH)
        _value, magnitude = _look(a, b, c, f, g, row * width + j, j < width, KIND, True)
        there = j < width
        if KNOWN > 0:
            there = there & (magnitude >> (DOWN + 10) == level >> (DOWN + 10))
        else:
            top = tl.maximum(top, magnitude)
        number += tl.histogram((magnitude >> DOWN) & (VALUES - 1), VALUES, mask=there)
    tl.atomic_add(own + PLACE + tl.arange(0, VALUES), number, mask=number > 0, sem="relaxed")
    if KNOWN == 0:
        tl.store(tops + at, tl.max(top, 0))


@_loop
def _count(
    a, b, c, f, g, counts, numbers, tops, k, width, sharers, tiles,
    KIND: tl.constexpr, WRITE: tl.constexpr, GIVEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """How many elements of each program are above the threshold and how many at it; and the largest magnitude.

    The threshold is k itself if it is given, and otherwise the k-th largest of what was tallied.
    """
    at = tl.program_id(0).to(tl.int64)
    row, part = at // sharers, at % sharers
    level = k
    if not GIVEN:
        level, _wanted = _known(counts + row * _NOTES, k, part, 3)
    above = tl.zeros((WIDTH,), tl.int32)
    ties = tl.zeros((WIDTH,), tl.int32)
    top = tl.zeros((WIDTH,), tl.int32)
    for tile in range(tiles):
        j = (part * tiles + tile) * WIDTH + tl.arange(0, WIDTH)
        _value, magnitude = _look(a, b, c, f, g, row * width + j, j < width, KIND, WRITE)
        above += (magnitude > level).to(tl.int32)
        ties += (magnitude == level).to(tl.int32)
        top = tl.maximum(top, magnitude)
    tl.store(numbers + 2 * at, tl.sum(above, 0))
    tl.store(numbers + 2 * at + 1, tl.sum(ties, 0))
    tl.store(tops + at, tl.max(top, 0))


@kernel
def _places(magnitude, level, above, ties, allowed):
    """Which elements are taken, and after how many others; and how many are above the threshold, and at it.

    ``above`` and ``ties`` have come before these, and of all ties so many are ``allowed``. One scan counts both.
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
    a, b, c, f, g, counts, numbers, indices, values, k, width, sharers, tiles,
    KIND: tl.constexpr, GIVEN: tl.constexpr, ALL: tl.constexpr, SHARERS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What is above the threshold, and of what is at it the first ones, or all, into the places where they belong."""
    at = tl.program_id(0).to(tl.int64)
    row, part = at // sharers, at % sharers
    level = k
    allowed = 0x7FFFFFFF
    begin = row * 0
    left = counts + row * _NOTES + _COUNTS + 6
    if not GIVEN:
        level = tl.load(left)
    if not ALL:
        allowed = tl.load(left + 1)
        begin = row * k
    sharer = tl.arange(0, SHARERS)
    before = numbers + 2 * (row * sharers + sharer)
    above = tl.sum(tl.load(before, mask=sharer < part, other=0), 0)
    ties = tl.sum(tl.load(before + 1, mask=sharer < part, other=0), 0)
    for tile in range(tiles):
        j = (part * tiles + tile) * WIDTH + tl.arange(0, WIDTH)
        i = row * width + j
        value, magnitude = _look(a, b, c, f, g, i, j < width, KIND, False)
        taken, place, more, more_ties = _places(magnitude, level, above, ties, allowed)
        tl.store(indices + begin + place, i.to(tl.int32), mask=taken)
        tl.store(values + begin + place, value, mask=taken)
        above += more
        ties += more_ties


@_loop
def _short(
    a, b, c, f, g, indices, values, tops, k, width, KIND: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """All of it for a row that one program has at once: its k-th largest, bit by bit, and what is taken."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, WIDTH)
    i = row * width + j
    value, magnitude = _look(a, b, c, f, g, i, j < width, KIND, True)
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
    """A position from the i-th of so many equal strata."""
    low = i * n // size
    h = mix(i.to(tl.uint32) + folded.to(tl.uint32)).to(tl.int64)
    return low + (h * ((i + 1) * n // size - low) >> 32)


@_loop
def _random(out, n, k, folded, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + i, _stratum(i, n, k, folded).to(tl.int32), mask=i < k)


@_loop
def _draw(a, b, c, f, g, out, n, size, folded, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """A sample of what elements are going to be."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    there = i < size
    value, _ = _look(a, b, c, f, g, _stratum(i, n, size, folded), there, KIND, False)
    tl.store(out + i, value, mask=there)


class Chosen(NamedTuple):
    """What was chosen: sorted int32 indices, values there, and the largest magnitudes that programs saw of all."""

    indices: Tensor
    values: Tensor
    tops: Tensor


class _Shared(NamedTuple):
    """How programs share rows: elements of a row, programs of one, tiles of a program; and all of the programs."""

    width: int
    sharers: int
    tiles: int
    programs: int

    @classmethod
    def of(cls, width: int, rows: int = 1) -> _Shared:
        whole = -(-width // BLOCK)
        tiles = -(-whole // max(1, min(whole, _PROGRAMS // rows)))
        sharers = -(-whole // tiles)
        return cls(width, sharers, tiles, rows * sharers)

    @property
    def form(self) -> tuple[int, int, int]:
        return self.width, self.sharers, self.tiles

    def notes(self, on: Tensor, each: int = 1) -> Tensor:
        """Room for so many numbers of each program."""
        return torch.empty(self.programs * each, dtype=torch.int32, device=on.device)


def _tally_all(source: Source, k: int, shared: _Shared, rows: int) -> tuple[Tensor, Tensor]:
    """The counts of the digits of rows' k-th largest, and the largest magnitudes. The source is written."""
    on = source.a
    counts, tops = torch.zeros(rows, _NOTES.value, dtype=torch.int32, device=on.device), shared.notes(on)
    for known in range(3):
        form = {"KIND": source.kind, "KNOWN": known, "WIDTH": BLOCK}
        run(_tally, shared.programs, *source.arguments, counts, tops, k, *shared.form, on=on, **form)
        source = source.after()
    return counts, tops


def _write_all(
    source: Source, counts: Tensor, numbers: Tensor, k: int, shared: _Shared, number: int, *, given: bool, every: bool
) -> tuple[Tensor, Tensor]:
    on = source.a
    indices, values = torch.empty(number, dtype=torch.int32, device=on.device), torch.empty(number, device=on.device)
    form = {"KIND": source.kind, "GIVEN": given, "ALL": every, "WIDTH": BLOCK}
    arrays = *source.arguments, counts, numbers, indices, values
    form["SHARERS"] = triton.next_power_of_2(shared.sharers)
    run(_write, shared.programs, *arrays, k, *shared.form, on=on, **form)
    return indices, values


def choose(source: Source, k: int, width: int, rows: int = 1) -> Chosen:
    """The k largest of each row, ties to the lower index. The source is written; the device is not waited for."""
    on = source.a
    if width <= _SHORT:
        indices, tops = (torch.empty(size, dtype=torch.int32, device=on.device) for size in (rows * k, rows))
        values, tile = torch.empty(rows * k, device=on.device), max(16, triton.next_power_of_2(width))
        form = {"KIND": source.kind, "WIDTH": tile, "num_warps": 4 if tile <= _FOUR_WARPS else 8}
        run(_short, rows, *source.arguments, indices, values, tops, k, width, on=on, **form)
        return Chosen(indices, values, tops)
    shared = _Shared.of(width, rows)
    counts, tops = _tally_all(source, k, shared, rows)
    source, numbers = source.after(), shared.notes(on, 2)
    form = {"KIND": source.kind, "WRITE": False, "GIVEN": False, "WIDTH": BLOCK}
    arrays = *source.arguments, counts, numbers, shared.notes(on)
    run(_count, shared.programs, *arrays, k, *shared.form, on=on, **form)
    return Chosen(*_write_all(source, counts, numbers, k, shared, rows * k, given=False, every=False), tops)


def choose_sampled(source: Source, k: int, seed: int) -> Chosen:
    """The k largest of those that reach the threshold of a sample, or fewer. The source is written.

    How many reach it depends on the data, and is asked for once.
    """
    on, n = source.a, source.a.numel()
    size, rank = sample_size(n, k), sample_rank(n, k)
    sample = torch.empty(size, device=on.device)
    form = {"KIND": source.kind, "WIDTH": BLOCK}
    run(_draw, -(-size // BLOCK), *source.arguments, sample, n, size, fold_seed(seed), on=on, **form)
    counts, _ = _tally_all(Source.plain(sample), rank, _Shared.of(size), 1)
    return _reaching(source, counts, rank, k, given=False)


def _reaching(source: Source, counts: Tensor, level: int, most: int, *, given: bool) -> Chosen:
    """What reaches a threshold, and of that at most so many. The source is written."""
    on, n = source.a, source.a.numel()
    shared = _Shared.of(n)
    numbers, tops = shared.notes(on, 2), shared.notes(on)
    form = {"KIND": source.kind, "WRITE": True, "GIVEN": given, "WIDTH": BLOCK}
    arrays = *source.arguments, counts, numbers, tops
    run(_count, shared.programs, *arrays, level, *shared.form, on=on, **form)
    number = int(numbers.sum())
    indices, values = _write_all(source.after(), counts, numbers, level, shared, number, given=given, every=True)
    if number > most:
        inside = choose(Source.plain(values), most, number)
        indices, values = indices[inside.indices], inside.values
    return Chosen(indices, values, tops)


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
    n, level = x.numel(), int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
    if not n:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    return _reaching(Source.plain(x), x, level, n, given=True).indices


def randomk_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    out = torch.empty(k, dtype=torch.int32, device=device)
    run(_random, -(-k // BLOCK), out, n, k, fold_seed(seed), on=out, WIDTH=BLOCK)
    return out
