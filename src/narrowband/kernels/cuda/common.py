"""What the families share: notes of non-finite elements, dtypes, and random numbers."""

from __future__ import annotations

import math
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.launching import kernel, run
from narrowband.kernels.findings import open_place, refuse_if
from narrowband.kernels.reference.common import fold

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = [
    "ALL",
    "BLOCK",
    "INFINITE",
    "LEAST",
    "MAGNITUDE",
    "NEGATIVE_INFINITE",
    "NOT_A_NUMBER",
    "SIGN",
    "TINY",
    "all_below",
    "code_of",
    "ends",
    "fold_seed",
    "load",
    "mix",
    "nearest",
    "ordered",
    "raise_if",
    "raw",
    "rooms",
    "signed",
    "store",
    "uniform",
    "unspecific",
    "whole_words",
]

#: Whether loops run in Triton's interpreter. It has its own ways with bfloat16: it rounds toward zero, and takes the
#: smallest numbers for others. So loops do with integers there what a GPU has instructions for.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

#: Elements per program.
BLOCK = 2048

#: Integer arguments that loops over bytes are not specialized for. Loops gain nothing from knowing that one is 1 or
#: divisible by 16, but would be compiled again for layers with other sizes.
unspecific: Any = triton.jit(
    do_not_specialize=[
        "k", "n", "number", "low_bits", "cut", "nbytes", "size", "stride", "seen", "row", "apart", "count", "folded",
    ]
)  # fmt: skip

#: All bits of a float except the sign, and the sign; the bits of infinity, and those of a NaN.
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-(2**31))
INFINITE = tl.constexpr(0x7F800000)
NOT_A_NUMBER = tl.constexpr(0x7FC00000)
#: The bits of minus infinity as an unsigned number. Those of infinities and NaN are at or above one of the two.
NEGATIVE_INFINITE = tl.constexpr(0xFF800000)
#: The least signed number and the greatest unsigned one, with which searches for :func:`ends` begin.
LEAST, ALL = tl.constexpr(-(2**31)), tl.constexpr(2**32 - 1)
#: The smallest normal float: 1 / step is infinite or imprecise below it.
TINY = tl.constexpr(2.0**-126)


def all_below(tops: Tensor, below: float) -> bool:
    """Whether all magnitudes that programs noted, as integers, are below ``below``. While findings are noted: note it
    instead, and return True.
    """
    (limit,) = struct.unpack("<i", struct.pack("<f", min(below, math.inf)))
    place = open_place(tops.device)
    if place is None:
        return bool(tops.amax() < limit)
    run(_note_top, 1, tops, place, tops.numel(), limit, on=tops, WIDTH=1024)
    return True


def raise_if(damaged: Tensor, message: str) -> None:
    """Raise :class:`PayloadError` if any number that programs noted is not zero. While findings are noted: note it
    instead.

    Loops stay within their tensors even with damaged payloads, so this may be called after them.
    """
    refuse_if(damaged.any(), message)


@contextmanager
def whole_words(payloads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield memory of whole words with the bytes of each payload, its own if possible; on exit, copy them back."""
    words = []
    for own in payloads:
        rest = -own.numel() % 4
        words.append(torch.nn.functional.pad(own, (0, rest)) if rest or own.data_ptr() % 4 else own)
    yield words
    for own, word in zip(payloads, words, strict=True):
        if word is not own:
            own.copy_(word[: own.numel()])


def rooms(numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return new tensors with these numbers of elements, of four bytes, in one memory; each begins at a multiple of 16
    bytes.
    """
    wholes = [-(-numel // 4) * 4 for numel in numels]
    memory = torch.empty(sum(wholes), dtype=dtype, device=device)
    return [own[:numel] for own, numel in zip(memory.split(wholes), numels, strict=True)]


def raw(x: Tensor) -> tuple[Tensor, bool]:
    """Return (a float32 tensor, or the bits of a bfloat16 tensor; whether it is bfloat16), for :func:`load` and
    :func:`store`.
    """
    return (x.view(torch.int16), True) if x.dtype == torch.bfloat16 else (x, False)


def fold_seed(seed: int, first: int = 0) -> int:
    """Fold a seed into the 32 bits that :func:`mix` takes, as a signed number, so that Triton uses one type for all
    seeds.

    Args:
        seed: the seed of the draw.
        first: the index of the first element, if a loop counts from there.
    """
    return signed((fold(seed) + first) & 0xFFFFFFFF)


def signed(word: int) -> int:
    """Return 32 bits as a signed number."""
    return word - (1 << 32) if word >> 31 else word


@kernel
def _note_top(tops, place, n, limit, WIDTH: tl.constexpr):
    """Note, from one program, whether any of these numbers reaches a limit."""
    top = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, n, WIDTH):
        i = first + tl.arange(0, WIDTH)
        top = tl.maximum(top, tl.load(tops + i, mask=i < n, other=0))
    tl.atomic_or(place, 1, mask=tl.max(top, 0) >= limit)


@kernel
def mix(h):
    """Hash 32 bits to 32 bits; see :mod:`narrowband.kernels`."""
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@kernel
def uniform(i, BITS: tl.constexpr):
    """Return random numbers in [0, 1) of BITS ≤ 24 bits, for the sums of elements' indices and the folded seed."""
    return (mix(i.to(tl.uint32)) >> (32 - BITS)).to(tl.int32).to(tl.float32) * (1.0 / (1 << BITS))


@kernel
def ordered(bits):
    """Map bits of floats to integers that order as the floats do, or back."""
    return bits ^ ((bits >> 31) & MAGNITUDE)


@kernel
def ends(most, least_raised, most_raised):
    """Return the bits of the smallest and of the largest of some floats, as integers; and whether all were finite.

    Bits of floats of one sign are ordered as integers are: those of positive floats rise; those of negative floats, as
    unsigned numbers, are above them and rise as the floats fall. To search for these three extremes takes half the
    instructions of mapping each float to an integer of the same order.

    Args:
        most: the largest bits as signed numbers.
        least_raised: the smallest bits as unsigned numbers.
        most_raised: the largest bits as unsigned numbers.
    """
    low = tl.where(most_raised > MAGNITUDE, most_raised, least_raised).to(tl.int32, bitcast=True)
    high = tl.where(most >= 0, most, least_raised.to(tl.int32, bitcast=True))
    return low, high, (most < INFINITE) & (most_raised < NEGATIVE_INFINITE)


@kernel
def code_of(v, low, inverse, shift, top):
    """Return the code of a value, from 0 to ``top``; 0 for NaN."""
    at = (v - low) * inverse + shift
    return tl.minimum(tl.maximum(at, 0.0), top).to(tl.int32)  # the maximum of NaN and a number is the number


@kernel
def nearest(v):
    """Round to the nearest whole number, ties to even; NaN and infinities stay."""
    below = tl.floor(v)
    rest = v - below
    odd = below * 0.5 != tl.floor(below * 0.5)
    return tl.where((rest > 0.5) | ((rest == 0.5) & odd), below + 1.0, below)


@kernel
def load(place, mask, HALF: tl.constexpr):
    """Load float32 from memory returned by :func:`raw`; zero where ``mask`` is False."""
    if HALF and not _INTERPRETED:
        place = place.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    value = tl.load(place, mask=mask, other=0)
    if HALF and _INTERPRETED:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@kernel
def store(place, v, mask, HALF: tl.constexpr):
    """Store float32 into memory returned by :func:`raw`, rounded to nearest, ties to even."""
    if HALF and not _INTERPRETED:
        tl.store(place.to(tl.pointer_type(tl.bfloat16), bitcast=True), v.to(tl.bfloat16), mask=mask)
    elif HALF:
        bits = v.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where(v == v, near, 0x7FC0)  # noqa: PLR0124 - NaN stays NaN
        tl.store(place, near.to(tl.int16), mask=mask)
    else:
        tl.store(place, v, mask=mask)
