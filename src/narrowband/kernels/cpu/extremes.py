"""Extremes of rows that share a range, and how estimates learn from them, on CPU.

Inside the loops, extremes are *ordered* integers, which order as the floats do.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from narrowband.kernels.cpu.elements import bits_of
from narrowband.kernels.cpu.loops import F32, I32, MAGNITUDE, NON_FINITE, At, inlined, loop
from narrowband.kernels.cpu.threads import spread

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from narrowband.kernels.rows import Rows

    Array = npt.NDArray[Any]

_NAN = np.int32(0x7FC00000)
#: The fewest elements that are worth a thread: loops over rows take a third of a nanosecond per element.
PER_THREAD = 1 << 18
#: Below and above all floats, as ordered integers (see ``widen``).
LOWEST, HIGHEST = np.int32(-0x80000000), np.int32(0x7FFFFFFF)


def lines_of(x: Tensor, rows: Rows) -> tuple[Array, int]:
    """Return the bits of x, flat, int32 or int16, and the distance of its lines in elements.

    A line is a row of every group; elements between two lines do not belong to x.
    """
    width = max(rows.groups * rows.inner, 1)
    if x.is_contiguous():
        flat, pitch = x.view(-1), width
    else:
        pitch = x.stride(0)
        flat = x.as_strided(((x.shape[0] - 1) * pitch + width,), (1,))
    return flat.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32).numpy(), pitch


def form_of(rows: Rows) -> tuple[int, int, int]:
    """Return (elements of a row, groups, rows of a part). The last two are at least 1, because loops divide by them."""
    return rows.inner, max(rows.groups, 1), max(rows.outer * rows.groups, 1)


#: Rows shorter than this are handled element by element, many to a vector, if the layout of their codes permits it.
_NARROW = 16


@functools.lru_cache(maxsize=1 << 12)
def cut_of(rows: Rows, bits: int = 8) -> tuple[Rows, int]:
    """Return (rows as the loops take them, how many of their neighbouring ranges are one range of ``rows``)."""
    width = rows.groups * rows.inner
    if bits != 8 or not 1 < rows.inner < _NARROW <= width:
        return rows, 1
    return rows._replace(groups=width, inner=1), rows.inner


# ---- extremes --------------------------------------------------------------------------------------------------------


@inlined
def widen(x, begin, inner, low, high, at):
    """Widen ordered extremes by the elements of a row.

    Ordered integers order as the floats do; the bits of negative floats themselves order backwards.
    """
    least, most, far = HIGHEST, LOWEST, LOWEST  # far: the bits of the negative float farthest from zero
    for j in range(inner):
        b = bits_of(x, begin + j)
        least = min(least, b)
        most = max(most, b)
        far = max(far, I32(b ^ LOWEST))
    far ^= LOWEST
    lower = I32(far ^ MAGNITUDE) if far < I32(0) else least
    upper = I32(least ^ MAGNITUDE) if most < I32(0) else most
    low[at] = min(low[at], lower)
    high[at] = max(high[at], upper)


@inlined
def widen_each(x, begin, count, low, high, at):
    """Widen the ordered extremes of neighbouring ranges, each by one of ``count`` neighbouring elements."""
    for j in range(count):
        b = bits_of(x, begin + j)
        ordered = I32(b ^ I32(I32(b >> I32(31)) & MAGNITUDE))
        low[At(at + j)] = min(low[At(at + j)], ordered)
        high[At(at + j)] = max(high[At(at + j)], ordered)


@loop
def _extremes_singles(x, pitch, groups, per_part, low, high, first, last):
    """``_extremes_range`` for rows of one element: neighbours in a line belong to neighbouring ranges."""
    r = first
    while r < last:
        group = r % groups
        count = min(groups - group, last - r)  # at most what is left of the line
        widen_each(x, r // groups * pitch + group, count, low, high, r // per_part * groups + group)
        r += count


@loop
def _extremes_range(x, pitch, inner, groups, per_part, low, high, first, last):
    """Widen the ordered extremes of each part and group by rows [first, last)."""
    part, inside = first // per_part, first % per_part
    group, line = first % groups, first // groups
    for _ in range(first, last):
        widen(x, line * pitch + group * inner, inner, low, high, At(part * groups + group))
        group += 1
        if group == groups:
            group = 0
            line += 1
        inside += 1
        if inside == per_part:
            inside = 0
            part += 1


def row_extremes(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    cut, times = cut_of(rows)
    (lines, pitch), (inner, *form) = lines_of(x, cut), form_of(cut)

    def work(first: int, last: int) -> tuple[Array, Array]:
        found = no_extremes(cut)
        if inner == 1:
            _extremes_singles(lines, pitch, *form, *found, first, last)
        else:
            _extremes_range(lines, pitch, inner, *form, *found, first, last)
        return found

    return extremes_of(spread(looked_at(cut), x.numel(), work, least=PER_THREAD), times)


def looked_at(rows: Rows) -> int:
    """Return the number of rows to look at: none if rows have no elements."""
    return rows.total if rows.inner else 0


def no_extremes(rows: Rows) -> tuple[Array, Array]:
    size = rows.parts * rows.groups
    return np.full(size, HIGHEST, np.int32), np.full(size, LOWEST, np.int32)


def together(found: list[tuple[Array, Array]], times: int) -> tuple[Array, Array]:
    """Merge the extremes that all threads found, of ``times`` neighbouring ranges at a time."""
    (low, high), *others = found
    for lower, higher in others:
        np.minimum(low, lower, out=low)
        np.maximum(high, higher, out=high)
    if times > 1:
        low, high = low.reshape(-1, times).min(1), high.reshape(-1, times).max(1)
    return low, high


def extremes_of(found: list[tuple[Array, Array]], times: int) -> tuple[Tensor, Tensor]:
    """Merge the extremes that all threads found, and return them as floats."""
    low, high = together(found, times)
    _floats(low, high)
    return torch.from_numpy(low.view(np.float32)), torch.from_numpy(high.view(np.float32))


@inlined
def to_floats(low, high):
    """Turn ordered extremes into bits of floats, in place: NaN where one is not finite."""
    for j in range(low.size):
        i = At(j)
        if high[i] >= NON_FINITE or low[i] < -NON_FINITE:
            low[i] = high[i] = _NAN
        else:
            low[i] ^= I32(low[i] >> I32(31)) & MAGNITUDE
            high[i] ^= I32(high[i] >> I32(31)) & MAGNITUDE


@loop
def _floats(low, high):
    to_floats(low, high)


@inlined
def take_in(estimates, low, high, decay, rest, learned):
    """Let estimates learn; return whether all extremes are finite, and the largest share of its width by which an end
    has moved.
    """
    finite, largest = True, F32(0)
    for g in range(low.size):
        i = At(g)
        finite &= np.isfinite(F32(F32(2) * max(high[i], F32(-low[i]))))
        alpha = F32(F32(estimates[0, i] * decay) + F32(F32(high[i] - low[i]) * rest))
        beta = F32(F32(estimates[1, i] * decay) + F32(low[i] * rest))
        learned[0, i], learned[1, i] = alpha, beta
        by = F32(beta - estimates[1, i])
        moved = max(abs(by), abs(F32(by + F32(alpha - estimates[0, i]))))
        if moved > F32(0):
            largest = max(largest, F32(moved / alpha))
    return finite, largest


@loop
def _learn(estimates, low, high, decay, rest, learned):
    return take_in(estimates, low, high, decay, rest, learned)


def learn_ranges(estimates: Tensor, low: Tensor, high: Tensor, decay: float) -> tuple[Tensor, bool, float]:
    learned = np.empty((2, low.numel()), np.float32)
    finite, moved = _learn(estimates.numpy(), low.numpy(), high.numpy(), F32(decay), F32(1 - decay), learned)
    return torch.from_numpy(learned), bool(finite), float(moved)
