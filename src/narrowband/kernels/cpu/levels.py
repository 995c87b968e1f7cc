"""Values on the levels of their group, on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from narrowband.kernels.cpu.loops import F32, I32, MAGNITUDE, NON_FINITE, U8, U32, At, inlined, loop
from narrowband.kernels.cpu.threads import spread

if TYPE_CHECKING:
    from torch import Tensor

#: The largest bfloat16, and NaN, as bits of a float32.
_LARGEST, _NAN = U32(0x7F7F0000), U32(0x7FC00000)


@inlined
def _rounded(bits):
    """Round a positive float32, given as bits, to the nearest bfloat16, at most to the largest finite one."""
    odd = U32((bits >> U32(16)) & U32(1))
    return min(U32(U32(bits + U32(0x7FFF) + odd) & U32(0xFFFF0000)), _LARGEST)


@loop
def _encode_groups(x, bits, width, group, ends, codes, first, last):
    """Encode groups [first, last). ``ends`` has, per group, two float32 as bits: the lowest and the highest level."""
    top = F32((1 << (width - 1)) - 1)
    half = F32(0.5)
    both = np.empty(2, np.float32)
    both_bits = both.view(np.uint32)
    for g in range(first, last):
        begin = g * group
        end = min(begin + group, x.size)
        least, largest = I32(0x7FFFFFFF), I32(0)
        for i in range(begin, end):
            magnitude = I32(bits[At(i)] & MAGNITUDE)
            least, largest = min(least, magnitude), max(largest, magnitude)
        finite = largest < NON_FINITE
        if not finite:
            both_bits[0] = both_bits[1] = _NAN
        elif width == 4:
            both_bits[0], both_bits[1] = _rounded(U32(least)), _rounded(U32(largest))
        else:
            total = 0.0
            for i in range(begin, end):
                total += np.abs(np.float64(x[At(i)]))
            mean = total / (end - begin)
            above, below, number = 0.0, 0.0, 0
            for i in range(begin, end):
                size = np.abs(np.float64(x[At(i)]))
                if size >= mean:
                    above += size
                    number += 1
                else:
                    below += size
            both[1] = F32(above / number)
            both[0] = F32(below / (end - begin - number)) if number < end - begin else both[1]
            both_bits[0], both_bits[1] = _rounded(both_bits[0]), _rounded(both_bits[1])
        ends[2 * g], ends[2 * g + 1] = both_bits[0] >> U32(16), both_bits[1] >> U32(16)
        low = both[0]
        step = F32(F32(both[1] - low) / top)
        per_byte = 8 // width
        for i in range(begin, end, per_byte):
            byte = 0
            for j in range(min(per_byte, end - i)):
                value = x[At(i + j)]
                code = np.int64(0)
                if finite and step > 0:
                    level = np.floor(F32(F32(F32(abs(value) - low) / step) + half))
                    code = np.int64(min(max(level, F32(0)), top))
                code |= np.int64(bits[At(i + j)] < 0) << (width - 1)
                byte |= code << (j * width)
            codes[At(i // per_byte)] = U8(byte)


def levels_encode(values: Tensor, out: Tensor, *, bits: int, group: int) -> None:
    x, payload = values.numpy(), out.numpy()
    groups = -(-x.size // group)
    ends, codes = np.empty(2 * groups, np.uint16), payload[4 * groups :]
    codes[-(-x.size * bits // 8) :] = 0
    arguments: tuple[Any, ...] = (x, x.view(np.int32), bits, group, ends, codes)
    spread(groups, 4 * x.size, lambda first, last: _encode_groups(*arguments, first, last))
    payload[: 4 * groups] = ends.view(np.uint8)


@loop
def _decode_groups(ends, codes, width, group, out, first, last):
    top = (1 << (width - 1)) - 1
    per_byte = 8 // width
    mask = (1 << width) - 1
    for g in range(first, last):
        low = ends[2 * g]
        step = F32(F32(ends[2 * g + 1] - low) / F32(top))
        for i in range(g * group, min(g * group + group, out.size)):
            code = (np.int64(codes[At(i // per_byte)]) >> (i % per_byte * width)) & mask
            magnitude = F32(low + F32(F32(code & top) * step))
            out[At(i)] = -magnitude if code > top else magnitude


def levels_decode(payload: Tensor, k: int, *, bits: int, group: int) -> Tensor:
    raw, groups = payload.numpy(), -(-k // group)
    ends = np.left_shift(raw[: 4 * groups].copy().view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    out = np.empty(k, np.float32)
    arguments: tuple[Any, ...] = (ends, raw[4 * groups :], bits, group, out)
    spread(groups, 4 * k, lambda first, last: _decode_groups(*arguments, first, last))
    return torch.from_numpy(out)
