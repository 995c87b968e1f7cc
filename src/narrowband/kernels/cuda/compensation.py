"""Sums and differences of whole tensors in Triton, each in one pass that also checks whether they are finite. A
selection first reads a sum in the same pass.

Every program notes the largest magnitude that it has seen, as an integer; the largest note tells whether all are
finite.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, INFINITE, MAGNITUDE, all_below, rooms, unspecific, whole_words
from narrowband.kernels.cuda.launching import Segments, kernel, run, segment
from narrowband.kernels.cuda.selection import Chosen, choose, choose_sampled, encode_all
from narrowband.kernels.cuda.sources import COMPENSATE, Source
from narrowband.kernels.cuda.sparse import write_lower, write_upper
from narrowband.kernels.findings import open_place
from narrowband.kernels.reference import compensation as reference
from narrowband.kernels.sparse import elias_fano_low_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "all_finite",
    "all_zero_each",
    "clear_all_if",
    "compensate",
    "compensate_select_topk",
    "compensate_select_topk_all",
    "difference",
    "encode_topk",
    "encode_topk_all",
    "poison_all_if",
    "restore_all_if",
    "take_difference",
]


#: Elements of a program that hardly ever has anything to do. It takes them tile by tile: all at once would exceed its
#: registers, and a GPU reserves memory for spilled registers, for all threads that it can run.
_RARE = 1 << 14


#: Bytes of each part of a payload that one program writes.
_PART = 512


@kernel
def _note(tops, v):
    tl.store(tops + tl.program_id(0), tl.max(v.to(tl.int32, bitcast=True) & MAGNITUDE, 0))


@kernel
def _look(x, tops, n, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    _note(tops, tl.load(x + i, mask=i < n, other=0.0))


@kernel
def _compensate(x, residual, tops, n, decay, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    old = tl.load(residual + i, mask=i < n, other=0.0)
    total = old * decay + tl.load(x + i, mask=i < n, other=0.0)
    tl.store(residual + i, total, mask=i < n)
    tl.store(x + i, old, mask=i < n)
    _note(tops, total)


@kernel
def _difference(x, base, out, tops, n, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    apart = tl.load(x + i, mask=i < n, other=0.0) - tl.load(base + i, mask=i < n, other=0.0)
    tl.store(out + i, apart, mask=i < n)
    _note(tops, apart)


@kernel
def _take_difference(x, base, tops, n, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    old = tl.load(base + i, mask=i < n, other=0.0)
    apart = tl.load(x + i, mask=i < n, other=0.0) - old
    tl.store(x + i, old, mask=i < n)
    tl.store(base + i, apart, mask=i < n)
    _note(tops, apart)


@kernel
def _fill_segments(
    table, count, bad, notes,
    BITS: tl.constexpr, TYPE: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, SEGMENTS: tl.constexpr,
    NOTES: tl.constexpr,
):  # fmt: skip
    """Write the bits of a number, as integers of the dtype's width, into all elements."""
    note = tl.arange(0, NOTES)
    if tl.max((tl.load(bad + note, mask=note < notes, other=0) != 0).to(tl.int32), 0) > 0:
        own, part = segment(table, count, 3, SEGMENTS)
        x = tl.load(own + 1).to(tl.pointer_type(TYPE))
        n = tl.load(own + 2)
        for first in range(0, SHARE, WIDTH):
            i = part * SHARE + first + tl.arange(0, WIDTH)
            tl.store(x + i, tl.full((WIDTH,), BITS, TYPE), mask=i < n)


@kernel
def _restore_segments(
    table, count, bad, TYPE: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, SEGMENTS: tl.constexpr
):  # fmt: skip
    if tl.load(bad) != 0:
        own, part = segment(table, count, 4, SEGMENTS)
        out = tl.load(own + 1).to(tl.pointer_type(TYPE))
        x = tl.load(own + 2).to(tl.pointer_type(TYPE))
        n = tl.load(own + 3)
        for first in range(0, SHARE, WIDTH):
            i = part * SHARE + first + tl.arange(0, WIDTH)
            tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


def restore_all_if(bad: Tensor, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    words, bytes_ = Segments(outs[0]), Segments(outs[0])
    for out, x in zip(outs, xs, strict=True):
        numbers = out.data_ptr(), x.data_ptr(), out.nbytes
        whole = not any(number % 4 for number in numbers)
        n = out.nbytes // 4 if whole else out.nbytes
        (words if whole else bytes_).add(-(-n // _RARE), *numbers[:2], n)
    for segments, kind in ((words, tl.int32), (bytes_, tl.int8)):
        segments.run(_restore_segments, bad, TYPE=kind, WIDTH=BLOCK, SHARE=_RARE)


#: For each dtype, the bits of NaN, and the integer dtype of the same width.
_NAN = {
    torch.float32: (0x7FC00000, tl.int32),
    torch.float16: (0x7E00, tl.int16),
    torch.bfloat16: (0x7FC0, tl.int16),
    torch.float64: (0x7FF8000000000000, tl.int64),
}


def poison_all_if(bad: Tensor, xs: Sequence[Tensor]) -> None:
    _fill_all_if(bad, xs, nan=True)


def clear_all_if(bad: Tensor, xs: Sequence[Tensor]) -> None:
    _fill_all_if(bad, xs, nan=False)


def _fill_all_if(bad: Tensor, xs: Sequence[Tensor], *, nan: bool) -> None:
    for dtype in dict.fromkeys(x.dtype for x in xs):
        own = [x for x in xs if x.dtype == dtype]
        if dtype not in _NAN or not all(x.is_contiguous() for x in own):
            (reference.poison_all_if if nan else reference.clear_all_if)(bad, own)
            continue
        segments, (bits, kind) = Segments(own[0]), _NAN[dtype]
        for x in own:
            segments.add(-(-x.numel() // _RARE), x.data_ptr(), x.numel())
        form = {"BITS": bits if nan else 0, "TYPE": kind, "NOTES": triton.next_power_of_2(bad.numel())}
        segments.run(_fill_segments, bad, bad.numel(), WIDTH=BLOCK, SHARE=_RARE, **form)


def _below(loop: Any, below: float, n: int, *arrays: Tensor, **scalars: float) -> bool:
    """Run a loop over n elements; return whether all magnitudes that it noted are below ``below``."""
    if not n:
        return True
    programs = -(-n // BLOCK)
    tops = torch.empty(programs, dtype=torch.int32, device=arrays[0].device)
    run(loop, programs, *arrays, tops, n, *scalars.values(), on=arrays[0], WIDTH=BLOCK)
    return all_below(tops, below)


def all_finite(x: Tensor, *, below: float = math.inf) -> bool:
    return _below(_look, below, x.numel(), x)


def all_zero_each(xs: Sequence[Tensor]) -> list[bool]:
    tops = [top.double() for top in torch._foreach_norm([x for x in xs if x.numel()], math.inf)]  # exact in all dtypes
    found = iter((torch.stack(tops) == 0.0).tolist() if tops else ())
    return [not x.numel() or next(found) for x in xs]


def compensate(x: Tensor, residual: Tensor, *, decay: float = 1.0, below: float = math.inf) -> bool:
    return _below(_compensate, below, x.numel(), x, residual, decay=float(decay))


def difference(x: Tensor, base: Tensor, out: Tensor, *, below: float = math.inf) -> bool:
    return _below(_difference, below, x.numel(), x, base, out)


def take_difference(x: Tensor, base: Tensor) -> bool:
    return _below(_take_difference, math.inf, x.numel(), x, base)


def _largest(x: Tensor, residual: Tensor, k: int, decay: float, sampled: bool, seed: int) -> Chosen:
    source = Source(COMPENSATE, x, residual, residual, float(decay))
    return choose_sampled(source, k, seed) if sampled and k < x.numel() else choose(source, k)


def compensate_select_topk(
    x: Tensor, residual: Tensor, k: int, *, decay: float = 1.0, sampled: bool = False, seed: int = 0
) -> tuple[bool, Tensor, Tensor]:
    if not k:
        empty = torch.empty(0, dtype=torch.int32, device=x.device)
        return compensate(x, residual, decay=decay), empty, x.new_empty(0)
    chosen = _largest(x, residual, k, decay, sampled, seed)
    return all_below(chosen.tops, math.inf), chosen.indices, chosen.values


@unspecific
def _payload(
    indices, values, residual, tops, out, place, number, k, n, low_bits, cut, nbytes, size, seen, stride,
    SUBTRACT: tl.constexpr, NOTES: tl.constexpr, TOPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write values, Elias–Fano's upper and lower part, and zeros behind; a program writes a share of each part.

    Nothing is written if something was not finite; that is noted if requested.
    """
    begin = tl.program_id(0).to(tl.int64) * WIDTH
    t = begin + tl.arange(0, WIDTH)
    note = tl.arange(0, TOPS)
    if tl.max(tl.load(tops + note * stride, mask=note < seen, other=0), 0) < INFINITE:
        if begin < k:
            value = tl.load(values + t, mask=t < number, other=0.0)
            tl.store(out.to(tl.pointer_type(tl.float32), bitcast=True) + t, value, mask=t < k)
            if SUBTRACT:
                at = tl.load(indices + t, mask=t < number, other=0)
                tl.store(residual + at, tl.zeros_like(value), mask=t < number)
        if begin < cut:
            write_upper(indices, out + 4 * k, t, number, k, n, low_bits, cut)
        if begin < nbytes:
            write_lower(indices, out + 4 * k + cut, t, number, k, n, low_bits, nbytes)
        left = 4 * k + cut + nbytes
        tl.store(out + left + t, (t * 0).to(tl.uint8), mask=left + t < size)
    elif NOTES:
        tl.atomic_or(place, 1, mask=begin == 0)


def encode_topk(
    x: Tensor,
    residual: Tensor,
    k: int,
    out: Tensor,
    *,
    decay: float = 1.0,
    sampled: bool = False,
    seed: int = 0,
    subtract: bool = False,
) -> bool:
    if not k:
        finite = compensate(x, residual, decay=decay)
        if finite:
            out.zero_()
        return finite
    if not sampled or k >= x.numel():
        return _encode_all([x], [k], [out], [residual], decay=decay, subtract=int(subtract))
    n, (indices, values, tops) = x.numel(), _largest(x, residual, k, decay, sampled, seed)
    low_bits, cut = elias_fano_low_bits(k, n), -(-2 * k // 8)
    nbytes, seen = -(-k * low_bits // 8), tops.numel()
    parts = k, cut, nbytes, out.numel() - 4 * k - cut - nbytes
    form = indices.numel(), k, n, low_bits, cut, nbytes, out.numel(), seen, tops.stride(0)
    place = open_place(x.device)
    shape = {"SUBTRACT": subtract, "NOTES": place is not None, "TOPS": triton.next_power_of_2(seen), "WIDTH": _PART}
    arrays = indices, values, residual, tops, out, tops if place is None else place
    run(_payload, -(-max(parts) // _PART), *arrays, *form, on=x, **shape)
    return place is not None or all_below(tops, math.inf)


def encode_topk_all(
    xs: Sequence[Tensor], ks: Sequence[int], outs: Sequence[Tensor], *, residuals: Sequence[Tensor] = (),
    decay: float = 1.0, subtract: bool = True, least: Tensor | None = None,
) -> bool:  # fmt: skip
    way = 0 if not subtract else 1 if least is None else 2
    return _encode_all(xs, ks, outs, residuals, decay=decay, subtract=way, least=least)


def compensate_select_topk_all(
    xs: Sequence[Tensor], ks: Sequence[int], outs: Sequence[Tensor], *, residuals: Sequence[Tensor] = (),
    decay: float = 1.0,
) -> tuple[bool, list[Tensor], list[Tensor]]:  # fmt: skip
    indices, values = rooms(ks, torch.int32, xs[0].device), rooms(ks, torch.float32, xs[0].device)
    taken = {"values": values, "gone": indices, "always": True}
    return _encode_all(xs, ks, outs, residuals, decay=decay, subtract=3, **taken), indices, values


def _encode_all(
    xs: Sequence[Tensor], ks: Sequence[int], outs: Sequence[Tensor], residuals: Sequence[Tensor], *, decay: float,
    subtract: int, **options: Any,
) -> bool:  # fmt: skip
    place = open_place(xs[0].device)
    with whole_words(outs) as words:
        if residuals:
            sources = [
                Source(COMPENSATE, x, residual, residual, float(decay))
                for x, residual in zip(xs, residuals, strict=True)
            ]
            tops = encode_all(sources, ks, words, subtract=subtract, place=place, **options)
        else:
            tops = encode_all([Source.plain(x) for x in xs], ks, words, place=place, **(options | {"always": True}))
    return place is not None or all_below(tops, math.inf)
