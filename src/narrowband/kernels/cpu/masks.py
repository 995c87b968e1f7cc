"""Masks of one bit per element, and places of maxima in their windows, on CPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types

from narrowband.kernels.cpu.elements import (
    FLOATS,
    INTS,
    array_of,
    load_lanes,
    put,
    splat_int,
    store_lanes,
    value_of,
)
from narrowband.kernels.cpu.loops import (
    F32,
    I32,
    LANES,
    U8,
    At,
    instruction,
    loop,
    neighbours,
    splat,
)
from narrowband.kernels.cpu.threads import spread

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from narrowband.kernels.masks import Windows

    Array = npt.NDArray[Any]


# ---- masks -----------------------------------------------------------------------------------------------------------


@instruction
def _masked_lanes(typing, mask, at, p, x, out, begin, factor):  # noqa: ARG001
    """Write LANES elements times ``factor`` where bit p of the bytes ``mask[at:]`` is set, and zero elsewhere."""

    def generate(context, builder, signature, arguments):
        packed = builder.load(neighbours(context, builder, signature.args[0], arguments[0], arguments[1]))
        packed.align = 1
        bit = builder.and_(builder.lshr(builder.zext(packed, INTS), splat(builder, arguments[2])), splat_int(1))
        place = neighbours(context, builder, signature.args[3], arguments[3], arguments[5])
        scaled = builder.fmul(load_lanes(builder, place, signature.args[3].dtype), splat(builder, arguments[6]))
        kept = builder.icmp_signed("!=", bit, splat_int(0))
        value = builder.select(kept, scaled, ir.Constant(FLOATS, [0.0] * LANES))
        place = neighbours(context, builder, signature.args[4], arguments[4], arguments[5])
        store_lanes(builder, place, signature.args[4].dtype, value)
        return context.get_dummy_value()

    return types.void(mask, types.uintp, types.int32, x, out, types.uintp, types.float32), generate


@loop
def _mask_range(x, out, low, high, first, last):
    """Write bytes [first, last): bit p of byte j says whether element j + p · bytes is beyond neither bound."""
    stride = out.size
    for j in range(first, last):
        out[At(j)] = 0
    for p in range(8):
        begin = p * stride
        for j in range(first, min(last, x.size - begin)):
            value = value_of(x, begin + j)
            beyond = U8(value <= low) | U8(value >= high)  # NaN is beyond neither
            out[At(j)] |= U8((beyond ^ U8(1)) << U8(p))


@loop
def _apply_mask_range(mask, x, out, factor, first, last):
    """Mask the elements whose bits are in bytes [first, last)."""
    stride = mask.size
    for p in range(8):
        begin = p * stride
        end = max(first, min(last, x.size - begin))
        whole = first + (end - first) // LANES * LANES
        for j in range(first, whole, LANES):
            _masked_lanes(mask, At(j), I32(p), x, out, At(begin + j), factor)
        for j in range(whole, end):
            kept = (mask[At(j)] >> U8(p)) & U8(1)
            put(out, begin + j, F32(value_of(x, begin + j) * factor) if kept else F32(0))


def mask_between(x: Tensor, out: Tensor, low: float = 0.0, high: float = math.nan) -> None:
    array, bits, ends = array_of(x), out.numpy(), (F32(low), F32(high))
    spread(bits.size, x.numel(), lambda a, b: _mask_range(array, bits, *ends, a, b))


def apply_mask(mask: Tensor, x: Tensor, out: Tensor, factor: float = 1.0) -> None:
    arrays = mask.numpy(), array_of(x), array_of(out), F32(factor)
    spread(mask.numel(), x.numel(), lambda a, b: _apply_mask_range(*arrays, a, b))


# ---- places of maxima ------------------------------------------------------------------------------------------------


@loop
def _places_range(position, rows, stride, padding, width, kernel, starts, out, first, last):
    """Write the places of lines [first, last), a row of results each; ``starts`` says where its windows begin."""
    inverse = 1.0 / width
    turn = I32(kernel - width)
    for line in range(first, last):
        begin, top = line * starts.size, (line % rows * stride - padding) * width
        for j in range(starts.size):
            p = I32(position[At(begin + j)] - top)
            down = I32((np.float64(p) + 0.5) * inverse)  # p // width: exact, since p is below 2**31
            out[At(begin + j)] = U8(I32(I32(down * turn) + p) - starts[At(j)])


@loop
def _positions_range(places, rows, stride, padding, width, kernel, starts, out, first, last):
    """Invert ``_places_range``."""
    inverse = I32((1 << 16) // kernel + 1)
    turn = I32(width - kernel)
    for line in range(first, last):
        begin, top = line * starts.size, (line % rows * stride - padding) * width
        for j in range(starts.size):
            place = I32(places[At(begin + j)])
            down = I32(I32(place * inverse) >> I32(16))  # place // kernel: exact, since both are at most 256
            out[At(begin + j)] = top + np.int64(I32(I32(down * turn) + place) + starts[At(j)])


def pool_places(position: Tensor, out: Tensor, windows: Windows) -> None:
    arrays = position.view(-1).numpy(), *_layout(windows), out.view(-1).numpy()
    spread(windows.outer * windows.rows, out.numel(), lambda a, b: _places_range(*arrays, a, b))


def pool_positions(places: Tensor, out: Tensor, windows: Windows) -> None:
    arrays = places.view(-1).numpy(), *_layout(windows), out.view(-1).numpy()
    spread(windows.outer * windows.rows, out.numel(), lambda a, b: _positions_range(*arrays, a, b))


def _layout(windows: Windows) -> tuple[Any, ...]:
    (down, across), (above, before) = windows.stride, windows.padding
    starts = np.arange(windows.columns, dtype=np.int32) * np.int32(across) - np.int32(before)
    return windows.rows, down, above, windows.width, windows.kernel, np.repeat(starts, windows.inner)
