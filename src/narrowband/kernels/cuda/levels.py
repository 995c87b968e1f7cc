"""Values on the levels of their group, in Triton. A program has some whole groups, a row each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, INFINITE, MAGNITUDE, NOT_A_NUMBER
from narrowband.kernels.cuda.launching import kernel, run
from narrowband.kernels.reference import levels as reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["levels_decode", "levels_encode"]

#: Longer groups do not fit into a program's registers.
_LONGEST = 8192

#: The largest bfloat16, as bits of a float32.
_LARGEST = tl.constexpr(0x7F7F0000)
_MOST = tl.constexpr(2**31 - 1)


@kernel
def _rounded(bits):
    """Round magnitudes, given as bits, to the nearest bfloat16, at most to the largest finite one."""
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(bits > _LARGEST, _LARGEST, near)


@kernel
def _means(v, inside, m):
    """Return, as bits, the mean of the magnitudes below the mean of each row, and the mean of the others."""
    wide = tl.where(inside, tl.abs(v), 0.0).to(tl.float64)
    mean = tl.sum(wide, 1) / m.to(tl.float64)
    above = inside & (wide >= mean[:, None])
    number = tl.sum(above.to(tl.int32), 1)
    rest = m.to(tl.int32) - number
    high = tl.sum(tl.where(above, wide, 0.0), 1) / number.to(tl.float64)
    low = tl.sum(tl.where(above, 0.0, wide), 1) / tl.maximum(rest, 1).to(tl.float64)
    low = tl.where(rest > 0, low, high)
    return low.to(tl.float32).to(tl.int32, bitcast=True), high.to(tl.float32).to(tl.int32, bitcast=True)


@kernel
def _put(ends, place, bits, there):
    """Store the upper half of a float32 in two bytes."""
    tl.store(ends + place, (bits >> 16).to(tl.uint8), mask=there)
    tl.store(ends + place + 1, (bits >> 24).to(tl.uint8), mask=there)


@kernel
def _get(ends, place, there):
    low = tl.load(ends + place, mask=there, other=0).to(tl.int32) << 16
    return (low | tl.load(ends + place + 1, mask=there, other=0).to(tl.int32) << 24).to(tl.float32, bitcast=True)


@kernel
def _encode(
    x, ends, codes, n, groups, group, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    g = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = g * group
    m = tl.maximum(tl.minimum(n - begin, group), 0)
    j = tl.arange(0, WIDTH)
    inside = j[None, :] < m[:, None]
    v = tl.load(x + begin[:, None] + j[None, :], mask=inside, other=0.0)
    magnitude = v.to(tl.int32, bitcast=True) & MAGNITUDE
    high = tl.max(tl.where(inside, magnitude, 0), 1)
    finite = high < INFINITE
    if BITS == 4:
        low = tl.min(tl.where(inside, magnitude, _MOST), 1)
    else:
        low, high = _means(v, inside, tl.maximum(m, 1))
    low, high = tl.where(finite, _rounded(low), NOT_A_NUMBER), tl.where(finite, _rounded(high), NOT_A_NUMBER)
    _put(ends, 4 * g, low, g < groups)
    _put(ends, 4 * g + 2, high, g < groups)
    low, high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    top: tl.constexpr = (1 << (BITS - 1)) - 1
    step = tl.div_rn(high - low, tl.zeros_like(low) + top)
    leveled = step > 0.0  # False for NaN
    step = tl.where(leveled, step, 1.0)
    per_byte: tl.constexpr = 8 // BITS
    t = tl.arange(0, WIDTH // per_byte)
    byte = tl.zeros((ROWS, WIDTH // per_byte), tl.int32)
    for part in tl.static_range(per_byte):
        index = t[None, :] * per_byte + part
        ok = index < m[:, None]
        bits = tl.load(x + begin[:, None] + index, mask=ok, other=0.0).to(tl.int32, bitcast=True)
        size = (bits & MAGNITUDE).to(tl.float32, bitcast=True)
        at = tl.floor(tl.div_rn(size - low[:, None], tl.zeros_like(size) + step[:, None]) + 0.5)
        at = tl.where(at > 0.0, at, 0.0)
        code = tl.where(leveled[:, None], tl.where(at < top, at, top), 0.0).to(tl.int32)
        byte |= tl.where(ok, (code | ((bits < 0).to(tl.int32) << (BITS - 1))) << (part * BITS), 0)
    place = (begin // per_byte)[:, None] + t[None, :]
    tl.store(codes + place, byte.to(tl.uint8), mask=(t * per_byte)[None, :] < m[:, None])


@kernel
def _decode(
    ends, codes, out, n, group, BITS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    g = i // group
    low, high = _get(ends, 4 * g, i < n), _get(ends, 4 * g + 2, i < n)
    top: tl.constexpr = (1 << (BITS - 1)) - 1
    per_byte: tl.constexpr = 8 // BITS
    step = tl.div_rn(high - low, tl.zeros_like(low) + top)
    code = tl.load(codes + i // per_byte, mask=i < n, other=0).to(tl.int32) >> ((i % per_byte) * BITS).to(tl.int32)
    value = low + (code & top).to(tl.float32) * step
    sign = ((code >> (BITS - 1)) & 1) << 31
    value = (value.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    tl.store(out + i, value, mask=i < n)


def levels_encode(values: Tensor, out: Tensor, *, bits: int, group: int) -> None:
    if group > _LONGEST:
        reference.levels_encode(values, out, bits=bits, group=group)
        return
    k, groups = values.numel(), -(-values.numel() // group)
    codes = out[4 * groups :]
    codes[-(-k * bits // 8) :] = 0
    width = max(8, triton.next_power_of_2(group))
    tile = {"ROWS": max(1, BLOCK // width), "WIDTH": width}
    run(_encode, -(-groups // tile["ROWS"]), values, out, codes, k, groups, group, on=values, BITS=bits, **tile)


def levels_decode(payload: Tensor, k: int, *, bits: int, group: int) -> Tensor:
    out = torch.empty(k, dtype=torch.float32, device=payload.device)
    codes = payload[4 * -(-k // group) :]
    run(_decode, -(-k // BLOCK), payload, codes, out, k, group, on=payload, BITS=bits, WIDTH=BLOCK)
    return out
