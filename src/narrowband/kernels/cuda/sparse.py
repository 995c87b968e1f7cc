"""Sparse vectors in Triton. R payloads, K indices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, raise_if, unspecific
from narrowband.kernels.cuda.launching import Segments, kernel, run, segment
from narrowband.kernels.sparse import elias_fano_low_bits, elias_fano_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "check_indices",
    "elias_fano_decode",
    "elias_fano_decode_all",
    "elias_fano_encode",
    "elias_fano_encode_all",
    "sparse_accumulate",
    "sparse_accumulate_all",
    "sparse_sum",
    "sparse_sum_all",
    "sparse_sum_rows",
    "write_lower",
    "write_upper",
]

_BLOCK = 1024
#: Bytes of each Elias–Fano part that a program writes; bytes of the upper part that a program reads (few, since each
#: holds four indices); and the most programs that read, because each adds up the counts of the others.
_WRITTEN, _BYTES, _READERS = 512, 256, 1024


@kernel
def _check(indices, bad, k, n, WIDTH: tl.constexpr):
    """Note whether any of a program's indices is outside [0, n), or smaller than the one before it."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    at = tl.load(indices + i, mask=i < k, other=0)
    before = tl.load(indices + i - 1, mask=(i > 0) & (i < k), other=0)
    wrong = (i < k) & ((at < before) | (at >= n))  # the first is compared with zero
    tl.store(bad + tl.program_id(0), tl.max(wrong.to(tl.int32), 0))


def check_indices(indices: Tensor, n: int) -> None:
    k = indices.numel()
    if not k:
        return
    bad = torch.empty(-(-k // BLOCK), dtype=torch.int32, device=indices.device)
    run(_check, bad.numel(), indices, bad, k, n, on=indices, WIDTH=BLOCK)
    raise_if(bad, f"indices must be sorted and in [0, {n}): the payload is damaged, or not for this tensor")


@kernel
def _add(out, indices, values, i, k, n, weight):
    """Add values to ``out``. The program of the first of equal indices adds all their values, one after the other, so
    that the order of the sum is fixed.

    Indices outside the tensor, which a damaged payload may hold, are left out.
    """
    at = tl.load(indices + i, mask=i < k, other=-1)
    before = tl.load(indices + i - 1, mask=(i > 0) & (i < k), other=-1)
    first = (i < k) & (at != before) & (at >= 0) & (at < n)
    total = tl.load(out + at, mask=first, other=0.0)
    going = first
    step = 0
    while tl.max(going.to(tl.int32), 0) > 0:
        total = tl.where(going, total + tl.load(values + i + step, mask=going, other=0.0) * weight, total)
        step += 1
        there = going & (i + step < k)
        going = there & (tl.load(indices + i + step, mask=there, other=-1) == at)
    tl.debug_barrier()  # a thread may store what another has loaded
    tl.store(out + at, total, mask=first)


@kernel
def _accumulate(out, indices, values, k, n, weight, WIDTH: tl.constexpr):
    _add(out, indices, values, tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH), k, n, weight)


@unspecific
def _accumulate_row(table, count, row, apart, weight, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    """Add one row of each tensor; the values of successive rows are ``apart`` bytes apart."""
    own, part = segment(table, count, 6, SEGMENTS)
    out = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    k, n = tl.load(own + 4), tl.load(own + 5)
    indices = tl.load(own + 2).to(tl.pointer_type(tl.int32)) + row * k
    values = (tl.load(own + 3) + row * apart).to(tl.pointer_type(tl.float32))
    _add(out, indices, values, part * WIDTH + tl.arange(0, WIDTH), k, n, weight)


def sparse_accumulate(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    k = indices.numel()
    run(_accumulate, -(-k // _BLOCK), out, indices, values, k, out.numel(), float(weight), on=out, WIDTH=_BLOCK)


def sparse_accumulate_all(
    outs: Sequence[Tensor], indices: Sequence[Tensor], values: Sequence[Tensor], weight: float = 1.0
) -> None:
    segments = Segments(outs[0])
    for out, at, value in zip(outs, indices, values, strict=True):
        k, places = at.numel(), (out.data_ptr(), at.data_ptr(), value.data_ptr())
        segments.add(-(-k // _BLOCK), *places, k, out.numel())
    segments.run(_accumulate_row, 0, 0, float(weight), WIDTH=_BLOCK)


def sparse_sum(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], weight: float = 1.0) -> None:
    out.zero_()
    for indices, values in parts:
        sparse_accumulate(out, indices, values, weight)


def sparse_sum_rows(out: Tensor, payloads: Tensor, k: int, weight: float = 1.0) -> None:
    sparse_sum_all([out], payloads, [0], [k], weight)


def sparse_sum_all(
    outs: Sequence[Tensor], payloads: Tensor, begins: Sequence[int], ks: Sequence[int], weight: float = 1.0, *,
    values: Sequence[Tensor] = (), accumulate: bool = False,
) -> None:  # fmt: skip
    ns = [out.numel() for out in outs]
    heads = [0 if values else 4 * k for k in ks]
    found = elias_fano_decode_all(payloads, [begin + head for begin, head in zip(begins, heads, strict=True)], ks, ns)
    if not accumulate:
        torch._foreach_zero_(list(outs))
    segments = Segments(payloads)
    places = [value.data_ptr() for value in values] or [payloads.data_ptr() + begin for begin in begins]
    for out, place, k, n, indices in zip(outs, places, ks, ns, found, strict=True):
        segments.add(-(-k // _BLOCK), out.data_ptr(), indices.data_ptr(), place, k, n)
    apart = 4 * values[0].stride(0) if values else payloads.stride(0)
    for row in range(payloads.shape[0]):
        segments.run(_accumulate_row, row, apart, float(weight), WIDTH=_BLOCK)


# ---- Elias–Fano ------------------------------------------------------------------------------------------------------


@kernel
def _index(indices, i, number, n):
    """Return the i-th of ``number`` indices; behind them, n − 1."""
    at = tl.load(indices + i, mask=i < number, other=0).to(tl.int64)
    return tl.where(i < number, at, n - 1)


@kernel
def write_upper(indices, out, t, number, k, n, low_bits, cut):
    """Write bytes t of the upper part. Bisection finds the first index that has its bit there."""
    begin = 8 * t
    i = t * 0
    end = i + k
    width = k
    while width > 0:
        middle = (i + end) >> 1
        before = ((_index(indices, middle, number, n) >> low_bits) + middle < begin) & (middle < end)
        i = tl.where(before, middle + 1, i)
        end = tl.where(before, end, middle)
        width = width >> 1
    byte = t * 0
    for _ in tl.static_range(8):
        bit = (_index(indices, i, number, n) >> low_bits) + i - begin
        inside = ((i < k) & (bit < 8)).to(tl.int64)
        byte |= inside << (bit & 7)
        i += inside
    tl.store(out + t, byte.to(tl.uint8), mask=t < cut)


@kernel
def write_lower(indices, out, t, number, k, n, low_bits, nbytes):
    """Write bytes t of the lower part: each holds bits of some successive indices."""
    first = 8 * t // low_bits
    mask = (1 << low_bits) - 1
    byte = t * 0
    for step in range(8 // low_bits + 2):
        i = first + step
        begin = i * low_bits - 8 * t  # its first bit in this byte; negative if in a byte before
        low = tl.where((i < k) & (begin < 8), _index(indices, i, number, n) & mask, 0)
        byte |= tl.where(begin >= 0, low << tl.minimum(tl.maximum(begin, 0), 8), low >> tl.maximum(-begin, 0))
    tl.store(out + t, (byte & 255).to(tl.uint8), mask=t < nbytes)


@kernel
def _write(indices, out, part, k, n, low_bits, cut, nbytes, WIDTH: tl.constexpr):
    """Write a program's share of both parts."""
    begin = part * WIDTH
    t = begin + tl.arange(0, WIDTH)
    if begin < cut:
        write_upper(indices, out, t, k, k, n, low_bits, cut)
    if begin < nbytes:
        write_lower(indices, out + cut, t, k, k, n, low_bits, nbytes)


@unspecific
def _encode(indices, out, k, n, low_bits, cut, nbytes, WIDTH: tl.constexpr):
    _write(indices, out, tl.program_id(0).to(tl.int64), k, n, low_bits, cut, nbytes, WIDTH)


@unspecific
def _encode_segments(table, count, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    own, part = segment(table, count, 8, SEGMENTS)
    indices = tl.load(own + 1).to(tl.pointer_type(tl.int32))
    out = tl.load(own + 2).to(tl.pointer_type(tl.uint8))
    k, n, low_bits = tl.load(own + 3), tl.load(own + 4), tl.load(own + 5)
    _write(indices, out, part, k, n, low_bits, tl.load(own + 6), tl.load(own + 7), WIDTH)


@kernel
def _ones(byte):
    """Return how many bits of a byte are set."""
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 0x0F


@unspecific
def _count(table, count, stride, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    """Count the bits that are set in each program's bytes of the upper part of its row."""
    own, at = segment(table, count, 11, SEGMENTS)
    readers, tiles, cut = tl.load(own + 10), tl.load(own + 9), tl.load(own + 7)
    payload = (tl.load(own + 1) + at // readers * stride).to(tl.pointer_type(tl.uint8))
    counts = tl.load(own + 2).to(tl.pointer_type(tl.int32))
    number = tl.zeros((WIDTH,), tl.int32)
    for tile in range(tiles):
        t = (at % readers * tiles + tile) * WIDTH + tl.arange(0, WIDTH)
        number += _ones(tl.load(payload + t, mask=t < cut, other=0).to(tl.int32))
    tl.store(counts + at, tl.sum(number, 0))


@kernel
def _low(payload, i, there, low_bits, cut, nbytes):
    """Return the low bits of the i-th index."""
    begin = i * low_bits
    low = i * 0
    for number in tl.static_range(5):
        at = cut + (begin >> 3) + number
        part = tl.load(payload + at, mask=there & (at < nbytes), other=0).to(tl.int64)
        low |= part << (8 * number)
    return (low >> (begin & 7)) & ((low * 0 + 1 << low_bits) - 1)


@unspecific
def _read(table, count, wrongs, stride, READERS: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    """Read the indices whose bits are in this program's bytes of the upper part; note whether anything is wrong.

    Damaged indices are replaced by indices that the tensor has.
    """
    own, at = segment(table, count, 11, SEGMENTS)
    counts = tl.load(own + 2).to(tl.pointer_type(tl.int32))
    k, n, low_bits = tl.load(own + 4), tl.load(own + 5), tl.load(own + 6)
    cut, nbytes, tiles, readers = tl.load(own + 7), tl.load(own + 8), tl.load(own + 9), tl.load(own + 10)
    row, program = at // readers, at % readers
    payload = (tl.load(own + 1) + row * stride).to(tl.pointer_type(tl.uint8))
    indices = tl.load(own + 3).to(tl.pointer_type(tl.int32)) + row * k
    reader = tl.arange(0, READERS)
    number = tl.load(counts + row * readers + reader, mask=reader < readers, other=0)
    total = tl.sum(number, 0)
    before = tl.sum(tl.where(reader < program, number, 0), 0).to(tl.int64)
    wrong = tl.zeros((WIDTH,), tl.int32)
    for tile in range(tiles):
        t = (program * tiles + tile) * WIDTH + tl.arange(0, WIDTH)
        byte = tl.load(payload + t, mask=t < cut, other=0).to(tl.int32)
        ones = _ones(byte)
        i = before + (tl.cumsum(ones, 0) - ones).to(tl.int64)
        # Adjacent bits belong to indices with the same upper part: only these can descend.
        beside = tl.load(payload + t - 1, mask=(t > 0) & (t < cut), other=0).to(tl.int32) >> 7
        last = _low(payload, i - 1, (beside > 0) & (i <= k), low_bits, cut, nbytes)
        for bit in tl.static_range(8):
            one = (byte >> bit) & 1
            there = (one > 0) & (i < k)
            low = _low(payload, i, there, low_bits, cut, nbytes)
            index = ((8 * t + bit - i) << low_bits) | low
            wrong |= (there & ((index >= n) | ((beside > 0) & (low < last)))).to(tl.int32)
            tl.store(indices + i, tl.minimum(index, n - 1).to(tl.int32), mask=there)
            i += one.to(tl.int64)
            beside = one
            last = low
        before += tl.sum(ones, 0)
    if total < k:  # each byte may have had four
        for part in range(4 * tiles):
            i = (program * 4 * tiles + part) * WIDTH + tl.arange(0, WIDTH)
            tl.store(indices + i, tl.minimum(i, n - 1).to(tl.int32), mask=(i >= total) & (i < k))
    tl.store(wrongs + tl.program_id(0), tl.maximum(tl.max(wrong, 0), (total != k).to(tl.int32)))


def elias_fano_encode(indices: Tensor, n: int, out: Tensor) -> None:
    programs, form = _writers(indices.numel(), n)
    run(_encode, programs, indices, out, *form, on=indices, WIDTH=_WRITTEN)


def elias_fano_encode_all(indices: Sequence[Tensor], ns: Sequence[int], outs: Sequence[Tensor]) -> None:
    segments = Segments(indices[0])
    for at, n, out in zip(indices, ns, outs, strict=True):
        programs, form = _writers(at.numel(), n)
        segments.add(programs, at.data_ptr(), out.data_ptr(), *form)
    segments.run(_encode_segments, WIDTH=_WRITTEN)


def _writers(k: int, n: int) -> tuple[int, tuple[int, int, int, int, int]]:
    """Return how many programs write k indices below n; and k, n, the low bits of an index, and the bytes of its upper
    and of its lower part.
    """
    low_bits, cut = elias_fano_low_bits(k, n), -(-2 * k // 8)
    nbytes = -(-k * low_bits // 8)
    return -(-max(cut, nbytes) // _WRITTEN), (k, n, low_bits, cut, nbytes)


def elias_fano_decode(payload: Tensor, k: int, n: int) -> Tensor:
    return elias_fano_decode_all(payload.view(1, -1), [0], [k], [n])[0].view(-1)


def elias_fano_decode_all(
    payloads: Tensor, begins: Sequence[int], ks: Sequence[int], ns: Sequence[int]
) -> list[Tensor]:
    rows, device = payloads.shape[0], payloads.device
    ends = [0]
    for k in ks:
        ends.append(ends[-1] + rows * k)
    indices = torch.empty(ends[-1], dtype=torch.int32, device=device)
    found = [indices[a:b].view(rows, k) for a, b, k in zip(ends, ends[1:], ks, strict=False)]
    shapes = [_readers(k, n) for k, n in zip(ks, ns, strict=True)]
    most = max((readers for *_, readers in shapes), default=0)
    if not rows or not most:
        return found
    counts, wrong = torch.empty(2, rows * sum(readers for *_, readers in shapes), dtype=torch.int32, device=device)
    segments = Segments(payloads)
    for begin, k, n, own, (low_bits, cut, nbytes, tiles, readers) in zip(begins, ks, ns, found, shapes, strict=True):
        places = payloads.data_ptr() + begin, counts.data_ptr() + 4 * segments.programs, own.data_ptr()
        segments.add(rows * readers, *places, k, n, low_bits, cut, nbytes, tiles, readers)
    stride = payloads.stride(0)
    segments.run(_count, stride, WIDTH=_BYTES)
    segments.run(_read, wrong, stride, READERS=triton.next_power_of_2(most), WIDTH=_BYTES)
    of = f"{ks[0]} sorted indices below {ns[0]}" if len(ks) == 1 else "the sorted indices that it should"
    raise_if(wrong, f"the Elias–Fano part does not hold {of}: the payload is damaged")
    return found


def _readers(k: int, n: int) -> tuple[int, int, int, int, int]:
    """Return, for an Elias–Fano part: low bits of an index, bytes of its upper part, bytes of both parts, tiles that a
    program reads, and programs.
    """
    if not k:
        return 0, 0, 0, 0, 0
    cut = -(-2 * k // 8)
    tiles = -(-cut // (_BYTES * _READERS))
    return elias_fano_low_bits(k, n), cut, elias_fano_nbytes(k, n), tiles, -(-cut // (_BYTES * tiles))
