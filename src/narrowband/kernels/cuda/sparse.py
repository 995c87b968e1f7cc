"""Sparse vectors in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from narrowband.errors import PayloadError
from narrowband.kernels.cuda.common import BLOCK, kernel, run
from narrowband.kernels.sparse import elias_fano_low_bits, elias_fano_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "check_indices",
    "elias_fano_decode",
    "elias_fano_encode",
    "sparse_accumulate",
    "sparse_sum",
    "sparse_sum_rows",
]

_BLOCK = 1024


@kernel
def _check(indices, bad, k, n, WIDTH: tl.constexpr):
    """Whether any of a program's indices is outside [0, n), or smaller than the one before it."""
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
    if bool(bad.any()):
        raise PayloadError(f"indices must be sorted and in [0, {n}): the payload is damaged, or not for this tensor")


@kernel
def _accumulate(out, indices, values, k, weight, WIDTH: tl.constexpr):
    """Equal neighbours belong to the first of them, which adds one value after the other: the sum has one order."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    at = tl.load(indices + i, mask=i < k, other=-1)
    before = tl.load(indices + i - 1, mask=(i > 0) & (i < k), other=-1)
    first = (i < k) & (at != before)
    total = tl.load(out + at, mask=first, other=0.0)
    going = first
    step = 0
    while tl.max(going.to(tl.int32), 0) > 0:
        total = tl.where(going, total + tl.load(values + i + step, mask=going, other=0.0) * weight, total)
        step += 1
        there = going & (i + step < k)
        going = there & (tl.load(indices + i + step, mask=there, other=-1) == at)
    tl.debug_barrier()  # what one thread has loaded another one may store
    tl.store(out + at, total, mask=first)


def sparse_accumulate(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    k = indices.numel()
    run(_accumulate, -(-k // _BLOCK), out, indices, values, k, float(weight), on=out, WIDTH=_BLOCK)


def sparse_sum(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], weight: float = 1.0) -> None:
    out.zero_()
    for indices, values in parts:
        sparse_accumulate(out, indices, values, weight)


def sparse_sum_rows(out: Tensor, payloads: Tensor, k: int, weight: float = 1.0) -> None:
    cut = 4 * k
    end = cut + elias_fano_nbytes(k, out.numel())
    parts = [(elias_fano_decode(row[cut:end], k, out.numel()), row[:cut].view(torch.float32)) for row in payloads]
    sparse_sum(out, parts, weight)


# ---- Elias–Fano ------------------------------------------------------------------------------------------------------


@kernel
def _set_upper(indices, words, k, low_bits, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    at = (tl.load(indices + i, mask=i < k, other=0).to(tl.int64) >> low_bits) + i
    bit = (tl.full((WIDTH,), 1, tl.int64) << (at & 31)).to(tl.int32)
    tl.atomic_or(words + (at >> 5), bit, mask=i < k)


@kernel
def _write_lower(indices, out, k, low_bits, nbytes, WIDTH: tl.constexpr):
    """Bytes of the lower part: each holds bits of some successive indices."""
    t = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    first = 8 * t // low_bits
    mask = (1 << low_bits) - 1
    byte = tl.zeros((WIDTH,), tl.int64)
    for number in range(8 // low_bits + 2):
        i = first + number
        begin = i * low_bits - 8 * t  # in this byte; negative where it begins in one before
        low = tl.load(indices + i, mask=(i < k) & (begin < 8), other=0).to(tl.int64) & mask
        byte |= tl.where(begin >= 0, low << tl.maximum(begin, 0), low >> tl.maximum(-begin, 0))
    tl.store(out + t, (byte & 255).to(tl.uint8), mask=t < nbytes)


@kernel
def _ones(byte):
    """How many bits of a byte are set."""
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 0x0F


@kernel
def _count(payload, counts, cut, WIDTH: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    byte = tl.load(payload + t, mask=t < cut, other=0).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(_ones(byte), 0))


@kernel
def _read(payload, before, indices, k, low_bits, cut, nbytes, WIDTH: tl.constexpr):
    """The indices whose bits are in this program's bytes of the upper part; ``before``: how many come earlier."""
    t = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    byte = tl.load(payload + t, mask=t < cut, other=0).to(tl.int32)
    ones = _ones(byte)
    i = tl.load(before + tl.program_id(0)) + (tl.cumsum(ones, 0) - ones).to(tl.int64)
    mask = (tl.full((WIDTH,), 1, tl.int64) << low_bits) - 1
    for bit in tl.static_range(8):
        there = ((byte >> bit) & 1 != 0) & (i < k)
        begin = i * low_bits
        low = tl.zeros((WIDTH,), tl.int64)
        for number in tl.static_range(5):
            at = cut + (begin >> 3) + number
            part = tl.load(payload + at, mask=there & (at < nbytes), other=0).to(tl.int64)
            low |= part << (8 * number)
        low = (low >> (begin & 7)) & mask
        tl.store(indices + i, ((8 * t + bit - i) << low_bits) | low, mask=there)
        i += ((byte >> bit) & 1).to(tl.int64)


def elias_fano_encode(indices: Tensor, n: int, out: Tensor) -> None:
    k = indices.numel()
    if not k:
        return
    low_bits, cut = elias_fano_low_bits(k, n), -(-2 * k // 8)
    words = torch.zeros(-(-cut // 4), dtype=torch.int32, device=indices.device)
    run(_set_upper, -(-k // _BLOCK), indices, words, k, low_bits, on=indices, WIDTH=_BLOCK)
    out[:cut] = words.view(torch.uint8)[:cut]
    if low_bits:
        lower = out[cut:]
        nbytes = -(-k * low_bits // 8)
        run(_write_lower, -(-nbytes // _BLOCK), indices, lower, k, low_bits, nbytes, on=indices, WIDTH=_BLOCK)


def elias_fano_decode(payload: Tensor, k: int, n: int) -> Tensor:
    if not k:
        return torch.empty(0, dtype=torch.int32, device=payload.device)
    low_bits, cut = elias_fano_low_bits(k, n), -(-2 * k // 8)
    programs = -(-cut // _BLOCK)
    counts = torch.empty(programs, dtype=torch.int32, device=payload.device)
    run(_count, programs, payload, counts, cut, on=payload, WIDTH=_BLOCK)
    total = counts.cumsum(0)
    indices = torch.zeros(k, dtype=torch.int64, device=payload.device)
    form = k, low_bits, cut, payload.numel()
    run(_read, programs, payload, total - counts, indices, *form, on=payload, WIDTH=_BLOCK)
    damaged = (total[-1] != k) | (indices[-1] >= n) | (indices[1:] < indices[:-1]).any()
    if bool(damaged):
        raise PayloadError(f"the Elias–Fano part does not hold {k} sorted indices below {n}: the payload is damaged")
    return indices.to(torch.int32)
