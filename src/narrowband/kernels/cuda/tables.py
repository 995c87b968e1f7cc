"""What loops of selection share: a table of the tensors that a launch takes, and their scratch memory.

A model has many tensors, and a selection takes several launches. So a launch takes several tensors: a table says where
they are (:class:`~narrowband.kernels.cuda.launching.Segments`). One tensor is a table with one row. A loop reads its
arguments from the columns of the table.

A row of a tensor has *notes* in scratch memory: how many elements have each value of a digit, and what follows of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK
from narrowband.kernels.cuda.launching import Segments, kernel
from narrowband.kernels.cuda.sources import AHEAD, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "COLUMNS", "COUNTS", "CUT", "DIGITS", "FLAG", "GONE", "GROUPS", "KNOWN_AT", "LARGEST", "LEAST", "LOW_BITS",
    "NUMBERS", "NUMBER_FOUND", "NUMBER_OF_TILES", "OLDER", "OTHERWISE", "OUT", "RANK", "ROOM", "ROW_NOTES",
    "SCRATCH", "SHARED_BY", "SHARES", "SUM", "THRESHOLD", "TILE", "TILES", "TOPS", "VALUES_OUT", "WHOLE", "WORDS",
    "Chosen", "K", "Target", "Work", "Writing", "amount", "areas", "find_known", "load_array", "load_number",
    "load_source", "selection_loop",
]  # fmt: skip

#: About the most programs for a long tensor: if it has more tiles, each program takes several, one by one.
_PROGRAMS = 1024
#: Elements of a tile in the search for candidates.
TILE = 4096

#: How many values a digit has. A row's notes begin with the counts of each value of its four digits.
DIGITS = tl.constexpr(256)
COUNTS = tl.constexpr(4 * 256)
#: Behind the counts: the threshold of candidates, their number, the largest magnitude; and from the fourth place on
#: what is known after each digit.
THRESHOLD, NUMBER_FOUND, LARGEST = (tl.constexpr(at) for at in (1024, 1025, 1026))
KNOWN_AT = tl.constexpr(1026)
ROW_NOTES = tl.constexpr(1024 + 16)

#: Arguments that are not specialized: neither k nor a threshold becomes a constant if it is 1, and numbers that say how
#: programs share the work cause no new compilation.
_UNSPECIFIC = ["k", "folded", "size", "rank", "sharers", "groups", "tiles_at", "candidates", "number_of_tiles", "count"]
selection_loop: Any = triton.jit(do_not_specialize=_UNSPECIFIC)

#: Columns of the table. First programs of a tensor: where programs share its elements; where each has a tile; where
#: each has the candidates of a group of tiles; and where programs share a tensor without candidates.
SHARES, TILES, GROUPS, WHOLE = range(4)
#: Arrays of the source, and that which holds the elements once they are written; scratch memory, and counts of
#: programs; what is written: a largest magnitude, then indices, as they are or in a payload's form, and values.
_A, OLDER, _C, SUM, SCRATCH, NUMBERS, TOPS, OUT, VALUES_OUT = (tl.constexpr(at) for at in range(4, 13))
#: Elements of a row and how many are selected; programs of a row; the rank in a sample that bounds candidates, and the
#: room for them (0: none are stored); groups and tiles; bits of an index in the lower part, bytes of the upper part and
#: words of both.
_N, K, SHARED_BY, RANK, ROOM, _SETS, NUMBER_OF_TILES = (tl.constexpr(at) for at in range(13, 20))
LOW_BITS, CUT, WORDS = (tl.constexpr(at) for at in range(20, 23))
#: Where the indices of the selected elements are listed, with the older sum's values there behind them.
GONE = tl.constexpr(23)
#: Where the least selected magnitude is written.
LEAST = tl.constexpr(24)
#: A flag, or none; and how many elements are selected instead if that is zero.
FLAG, OTHERWISE = (tl.constexpr(at) for at in (25, 26))
COLUMNS = tl.constexpr(27)

_AHEAD = tl.constexpr(AHEAD)


@kernel
def load_array(own, AT: tl.constexpr, TYPE: tl.constexpr):
    """Return the address in a column of a tensor's row."""
    return tl.load(own + AT).to(tl.pointer_type(TYPE))


@kernel
def load_number(own, AT: tl.constexpr):
    return tl.load(own + AT).to(tl.int32)


@kernel
def load_source(own, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the arrays of a tensor's source, and its length. Where no pass writes any more, the first is the sum."""
    a = load_array(own, SUM, tl.float32)
    if KIND > _AHEAD:
        a = load_array(own, _A, tl.float32)
    b = load_array(own, OLDER, tl.float32)
    c = load_array(own, _C, tl.float32)
    n = tl.load(own + _N)
    if ALIGNED:
        a = tl.multiple_of(a, 16)
        b = tl.multiple_of(b, 16)
        c = tl.multiple_of(c, 16)
        n = tl.multiple_of(n, 4)
    return a, b, c, n


@kernel
def areas(own):
    """Return how many groups of tiles there are, and where in scratch memory are: the number of each group's
    candidates, the place of each tile's candidates, and the candidates' indices.
    """
    sets = load_number(own, _SETS)
    tiles_at = ROW_NOTES + sets
    return sets, ROW_NOTES, tiles_at, tiles_at + 2 * load_number(own, NUMBER_OF_TILES)


@kernel
def find_known(notes, k, part, KNOWN: tl.constexpr):
    """Return the known first digits of the k-th largest, with zeros for the others; and its rank among elements with
    these digits.

    The launch before has left what was known before it behind the counts, in a place for each digit.
    """
    VALUES: tl.constexpr = DIGITS if KNOWN < 4 else DIGITS // 2
    DOWN: tl.constexpr = 31 - 8 * KNOWN if KNOWN < 4 else 0
    left = notes + KNOWN_AT + 2 * KNOWN
    level = 0
    wanted = k
    if KNOWN > 1:
        level, wanted = tl.load(left - 2), tl.load(left - 1)
    number = tl.load(notes + (KNOWN - 1) * DIGITS + (VALUES - 1 - tl.arange(0, VALUES)))  # for the largest value first
    passed = tl.cumsum(number, 0)
    before = passed < wanted
    level += (VALUES - 1 - tl.sum(before.to(tl.int32), 0)) << DOWN
    wanted = wanted - tl.max(tl.where(before, passed, 0), 0)
    tl.store(left, level, mask=part == 0)
    tl.store(left + 1, wanted, mask=part == 0)
    return level, wanted


@kernel
def amount(own, notes, k, width, FOUND: tl.constexpr):
    """Return how many elements are to be read, and how many candidates: one of the two is zero. Also where the
    candidates are, and the room there was for them.
    """
    elements = width
    candidates = 0
    found = notes
    room = 0
    if FOUND:
        room = load_number(own, ROOM)
        _sets, _groups, _tiles_at, begin = areas(own)
        found = notes + begin + room
        number = tl.load(notes + NUMBER_FOUND)
        narrow = (number >= k) & (number <= room)
        candidates = tl.where(narrow, number, 0)
        elements = tl.where(narrow, 0, width)
    return elements, candidates, found, room


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


class Groups(NamedTuple):
    """How the tiles of a long tensor are grouped: how many tiles there are, how many in a group, how many groups."""

    tiles: int
    group: int
    sets: int

    @classmethod
    def of(cls, n: int, group: int = 8) -> Groups:
        """Group the tiles of n elements, at least ``group`` at a time."""
        tiles = -(-n // TILE)
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
        begin = ROW_NOTES.value
        return begin, begin + self.sets, begin + self.size

    @property
    def form(self) -> dict[str, int]:
        lanes = max(1, BLOCK // self.group)
        return {"GROUP": self.group, "LANES": lanes, "SHARERS": triton.next_power_of_2(self.sets)}


class Target(NamedTuple):
    """Where a selection is written: indices and values.

    Attributes:
        out: indices, as they are, or in a payload's form.
        values: the values.
        low_bits, cut: of that form: see :func:`_put`.
        skipped: words at the beginning of ``out`` that are not indices.
        gone: a list of indices, and of what is forgotten.
        least: the address for the least magnitude.
        flag: the address of an int32. If that is zero, ``otherwise`` elements are selected, for which there is room.
        otherwise: see ``flag``.
    """

    out: Tensor
    values: Tensor
    low_bits: int = 0
    cut: int = 0
    skipped: int = 0
    gone: Tensor | None = None
    least: int = 0
    flag: int = 0
    otherwise: int = 0

    @classmethod
    def room_for(cls, number: int, on: Tensor) -> Target:
        """Return memory for this many indices and values."""
        indices = torch.empty(number, dtype=torch.int32, device=on.device)
        return cls(indices, torch.empty(number, dtype=torch.float32, device=on.device))


class Writing(NamedTuple):
    """What is written of selections; see :func:`_write`.

    Attributes:
        payload: whether indices are written in a payload's form.
        limit: the largest magnitude with which one is written.
        subtract: what is written where its elements were: 0: nothing; 1: zeros; 2: NaN; 3: −0.
        lists: whether indices are listed, too.
        forget: how both sums of a momentum step are changed there: 0: not; 1: to zero; 2: the velocity goes on.
        place: where it is noted that something is not finite.
    """

    payload: bool = False
    limit: int = 0x7FFFFFFF
    subtract: int = 0
    lists: bool = False
    forget: int = 0
    place: Tensor | None = None

    @property
    def form(self) -> dict[str, Any]:
        form = {"PAYLOAD": self.payload, "LIMIT": self.limit, "FORGET": self.forget}
        return {**form, "SUBTRACT": self.subtract, "LISTS": self.lists, "NOTES": self.place is not None}


class Work:
    """Launches over several tensors with the same formula, or over the rows of one: their table, and scratch memory.

    Args:
        sources: where elements come from.
        ks: how many are selected of each tensor, or of each row.
        rows: rows of the one tensor.
        margins: for each tensor, a rank in its sample and the room for candidates. Without room, none are stored.
        copies: how often candidates are stored.
        alone: whether a program has a whole row, and needs no scratch memory.
        scratch: the notes of an earlier tally.

    Attributes:
        kind: the formula of the sources' elements.
        narrows: whether candidates are stored of any tensor.
        numbers: what programs count, three numbers each.
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
        self.kind, self.margins = sources[0].kind, margins or [(0, 0)] * len(sources)
        widths = [source.a.numel() // rows for source in sources]
        self._shared = [_Shared(width, 1, rows) if alone else _Shared.of(width, rows) for width in widths]
        group = max(Groups.of(width).group for width in widths)
        self.groups = [
            Groups.of(width, group) if room else Groups(0, group, 0)
            for width, (_, room) in zip(widths, self.margins, strict=True)
        ]
        self.narrows = any(room for _, room in self.margins)
        self._sizes = [
            0 if alone else rows * ROW_NOTES.value + own.size + copies * room
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

    def aim(self, targets: Sequence[Target] = (), tops: Tensor | None = None) -> None:
        """Set where selections are written, and the largest magnitudes."""
        self._segments = Segments(self.sources[0].a, grids=4)
        scratch, numbers, top = self.scratch.data_ptr(), self.numbers.data_ptr(), 0 if tops is None else tops.data_ptr()
        for at, (source, shared, groups) in enumerate(zip(self.sources, self._shared, self.groups, strict=True)):
            rank, room = self.margins[at]
            arrays = (own.data_ptr() for own in (source.a, source.b, source.c, source.total))
            out, form = (0, 0), (0,) * 7
            if targets:
                into = targets[at]
                out = into.out.data_ptr() + 4 * into.skipped, into.values.data_ptr()
                gone = 0 if into.gone is None else into.gone.data_ptr()
                words = into.out.numel() // 4 - into.skipped
                form = into.low_bits, into.cut, words, gone, into.least, into.flag, into.otherwise
            self._segments.add(
                (shared.programs, groups.tiles, groups.sets, 0 if room else shared.programs),
                *arrays, scratch, numbers, top, *out, shared.width, self._ks[at], shared.sharers, rank, room,
                groups.sets, groups.tiles, *form,
            )  # fmt: skip
            scratch += 4 * self._sizes[at]
            numbers += 12 * shared.programs
            top += 4

    def written(self) -> None:
        """Note that a loop has written the sources' elements."""
        self.kind = self.sources[0].kind_after

    @property
    def sharers(self) -> int:
        """The most programs of a row."""
        return max(own.sharers for own in self._shared)

    @property
    def width(self) -> int:
        """The most elements of a row."""
        return max(own.width for own in self._shared)

    @property
    def group_form(self) -> dict[str, int]:
        """The constants of loops over groups of tiles."""
        return max(self.groups, key=lambda own: own.sets).form

    def run_each(self, loop: Any, **form: Any) -> None:
        """Launch a loop with a program for each tensor."""
        f, g = self.sources[0].f, self.sources[0].g
        self._segments.run_each(loop, f, g, KIND=self.kind, ALIGNED=self._aligned, **form)

    def run_rows(self, loop: Any) -> None:
        """Launch a loop with a program for each tensor, which takes nothing but the tensor's row of the table."""
        self._segments.run_each(loop)

    def run(self, loop: Any, *arguments: Any, grid: int = SHARES, **form: Any) -> None:
        """Launch a loop in one of the grids."""
        f, g = self.sources[0].f, self.sources[0].g
        self._segments.run(loop, f, g, *arguments, grid=grid, KIND=self.kind, ALIGNED=self._aligned, **form)
