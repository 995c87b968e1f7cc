"""Fixed point on CPU: quantization with a range check, and sums of slices modulo 2**bits, from which slices can be
subtracted again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from narrowband.kernels.cpu.loops import F32, I32, MAGNITUDE, U32, At, loop
from narrowband.kernels.cpu.threads import spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]

#: Elements that stay in the L1 cache while one slice after the other is added to them.
CHUNK = 2048


@loop
def _quantize_range(x, bits, out, inverse, top, first, last):
    """Write codes; return the largest magnitude, as bits, and the checksum."""
    largest, checksum = I32(0), U32(0)
    one = out.dtype.type
    for j in range(first, last):
        i = At(j)
        largest = max(largest, I32(bits[i] & MAGNITUDE))
        scaled = np.rint(F32(x[i] * inverse))
        scaled = scaled if scaled < top else top  # NaN becomes the largest code, too; no one uses it
        code = I32(scaled if scaled > -top else -top)
        out[i] = one(code)
        checksum = U32(checksum + U32(U32(code) * U32(2 * j + 1)))
    return largest, checksum


def fixed_quantize(x: Tensor, out: Tensor, unit: float, limit: int) -> tuple[float, int]:
    values, codes = x.numpy(), out.numpy()
    bits, inverse, top = values.view(np.int32), F32(1.0 / unit), largest_float(limit)
    n = x.numel()
    parts = spread(n, n, lambda first, last: _quantize_range(values, bits, codes, inverse, top, first, last))
    largest = np.int32(max(part[0] for part in parts)).view(np.float32)
    return float(largest), sum(int(part[1]) for part in parts) & 0xFFFFFFFF


def largest_float(limit: int) -> Any:
    """Return the largest float32 that is at most ``limit``."""
    nearest = np.float32(limit)
    return nearest if int(nearest) <= limit else np.nextafter(nearest, np.float32(0))


@loop
def _sum_range(source, starts, out, first, last):
    one = out.dtype.type
    for begin in range(first, last, CHUNK):
        end = min(begin + CHUNK, last)
        if starts.size == 1:
            a = starts[0]
            for i in range(begin, end):
                out[At(i)] = one(source[At(a + i)])
            continue
        a, b = starts[0], starts[1]
        for i in range(begin, end):
            out[At(i)] = one(one(source[At(a + i)]) + one(source[At(b + i)]))
        for k in range(2, starts.size):
            a = starts[k]
            for i in range(begin, end):
                out[At(i)] = one(out[At(i)] + one(source[At(a + i)]))


def fixed_sum(source: Tensor, starts: Sequence[int], out: Tensor) -> None:
    slices, result = source.numpy(), out.numpy()
    at, n = np.array(starts, np.int64), out.numel()
    spread(n, n * at.size, lambda first, last: _sum_range(slices, at, result, first, last))


@loop
def _decode_range(packet, source, starts, total, first, last):
    one = packet.dtype.type
    rest = np.empty(CHUNK, packet.dtype)
    for begin in range(first, last, CHUNK):
        end = min(begin + CHUNK, last)
        if starts.size == 0:
            for i in range(begin, end):
                total[At(i)] = I32(total[At(i)] + I32(packet[At(i)]))
            continue
        a = starts[0]
        if starts.size == 1:
            for i in range(begin, end):
                total[At(i)] = I32(total[At(i)] + I32(one(packet[At(i)] - source[At(a + i)])))
            continue
        for i in range(begin, end):
            rest[At(i - begin)] = one(packet[At(i)] - source[At(a + i)])
        for k in range(1, starts.size):
            a = starts[k]
            for i in range(begin, end):
                rest[At(i - begin)] = one(rest[At(i - begin)] - source[At(a + i)])
        for i in range(begin, end):
            total[At(i)] = I32(total[At(i)] + I32(rest[At(i - begin)]))


def fixed_decode(packet: Tensor, source: Tensor, starts: Sequence[int], total: Tensor) -> None:
    received, slices, result = packet.numpy(), source.numpy(), total.numpy()
    at, n = np.array(starts, np.int64), packet.numel()
    spread(n, n * (2 + at.size), lambda first, last: _decode_range(received, slices, at, result, first, last))


@loop
def _dequantize_range(total, out, factor, first, last):
    for j in range(first, last):
        i = At(j)
        out[i] = F32(np.float64(total[i]) * factor)


def fixed_dequantize(total: Tensor, out: Tensor, factor: float) -> None:
    codes, values, n = total.numpy(), out.numpy(), total.numel()
    spread(n, n, lambda first, last: _dequantize_range(codes, values, np.float64(factor), first, last))
