"""Grouped quantization on CPU: two passes over a group that stays in L1; codes are packed so that every loop
vectorizes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from narrowband.kernels.cpu.elements import FLOATS, INTS, mix_lanes, splat_int
from narrowband.kernels.cpu.loops import (
    F32,
    I32,
    LANES,
    MAGNITUDE,
    NON_FINITE,
    PAGE,
    U8,
    U32,
    At,
    float_sum,
    fold_seed,
    inlined,
    instruction,
    loop,
    max_magnitude,
    mix,
    neighbours,
    prefetch,
    splat,
    variant,
)
from narrowband.kernels.cpu.threads import spread
from narrowband.kernels.quantized import packed_nbytes, plane_widths

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from narrowband.kernels.quantized import Scale

    Array = npt.NDArray[Any]

NAN_BITS = np.int32(0x7FC00000)
TINY = np.float32(2.0**-126)


@inlined
def _ordered_extremes(bits, begin, m):
    """Return (min, max) of floats given as bits, mapped to integers that order as the floats do, so that the loop
    vectorizes.

    inf and NaN are mapped outside (−NON_FINITE, NON_FINITE), so one pass also tells whether everything is finite.
    """
    low, high = I32(0x7FFFFFFF), I32(-0x7FFFFFFF - 1)
    for j in range(m):
        b = I32(bits[At(begin + j)])
        ordered = I32(b ^ I32(I32(b >> I32(31)) & MAGNITUDE))
        low = min(low, ordered)
        high = max(high, ordered)
    return low, high


@inlined
def _bits_of(ordered):
    return I32(ordered ^ I32(I32(ordered >> I32(31)) & MAGNITUDE))


@float_sum
def _sum_of_squares(x, begin, m):
    total = 0.0
    for j in range(m):
        v = np.float64(x[At(begin + j)])
        total += v * v
    return total


@float_sum
def _sum_of_magnitudes(x, begin, m):
    total = 0.0
    for j in range(m):
        total += np.float64(abs(x[At(begin + j)]))
    return total


@loop
def _minmax_range(bits, group, low_bits, high_bits, first, last):
    for g in range(first, last):
        begin = g * group
        low, high = _ordered_extremes(bits, begin, min(group, bits.size - begin))
        if high >= NON_FINITE or low < -NON_FINITE:
            low_bits[g] = high_bits[g] = NAN_BITS
        else:
            low_bits[g] = _bits_of(low)
            high_bits[g] = _bits_of(high)


@inlined
def _code(x, low, inverse, offset, top):
    v = F32(F32(F32(x - low) * inverse) + offset)
    v = v if v > F32(0) else F32(0)  # NaN becomes 0
    return I32(v if v < top else top)


@inlined
def _uniform(i, offset):
    """Return a uniform number of 24 − log₂(offset + 1) bits, so that its sum with ``offset`` is exact. offset + 1 is a
    power of two.
    """
    power = F32(offset + F32(1)).view(np.int32)
    unit = I32(power - I32(24 << 23)).view(np.float32)
    return F32(F32(I32(mix(i) >> U32(I32(power >> I32(23)) - I32(127 - 8)))) * unit)


@inlined
def _shift(offset, stochastic, start, j):
    """Return what is added to element j of a group before it is rounded down. Nearest: ``offset`` includes the ½."""
    if stochastic:
        return F32(offset + _uniform(U32(start + U32(j)), offset))
    else:
        return offset


def _vector_of_codes(context: Any, builder: Any, array: Any, value: Any, place: Any, index: Any, form: Any) -> Any:
    """Do what ``_code`` does for LANES elements, and return int32 codes.

    In IR, the compiler need not check whether arrays overlap, nor guess which vector width pays.

    Args:
        array, value, place: where the elements are.
        index: the index of the first element, for its random number; None: round to nearest.
        form: low, inverse, offset, top.
    """
    low, inverse, shift, top = (splat(builder, scalar) for scalar in form)
    x = builder.load(neighbours(context, builder, array, value, place))
    x.align = 4
    if index is not None:
        # The same as ``_uniform``.
        power = builder.bitcast(builder.fadd(shift, ir.Constant(FLOATS, [1.0] * LANES)), INTS)
        unit = builder.bitcast(builder.sub(power, splat_int(24 << 23)), FLOATS)
        down = builder.sub(builder.lshr(power, splat_int(23)), splat_int(127 - 8))
        h = builder.lshr(mix_lanes(builder, index), down)
        uniform = builder.fmul(builder.sitofp(h, FLOATS), unit)
        shift = builder.fadd(shift, uniform)
    v = builder.fadd(builder.fmul(builder.fsub(x, low), inverse), shift)
    zero = ir.Constant(FLOATS, [0.0] * LANES)
    v = builder.select(builder.fcmp_ordered(">", v, zero), v, zero)  # NaN becomes 0
    return builder.fptosi(builder.select(builder.fcmp_ordered("<", v, top), v, top), INTS)


def _lanes(stochastic: bool, nibbles: bool) -> Any:
    """Return an instruction that writes the bytes of LANES codes; or of twice as many, packed, the first in the lower
    nibbles.
    """

    def generate(context, builder, signature, arguments):
        x, begin, apart, index, *form, codes, at = arguments
        kinds = signature.args

        def codes_from(place: Any, first: Any) -> Any:
            number = first if stochastic else None
            return _vector_of_codes(context, builder, kinds[0], x, place, number, form)

        byte = codes_from(begin, index)
        if nibbles:
            second = codes_from(builder.add(begin, apart), builder.add(index, builder.trunc(apart, index.type)))
            byte = builder.or_(byte, builder.shl(second, ir.Constant(byte.type, [4] * LANES)))
        place = neighbours(context, builder, kinds[8], codes, at)
        builder.store(builder.trunc(byte, ir.VectorType(ir.IntType(8), LANES)), place).align = 1
        return context.get_dummy_value()

    @instruction
    def lanes(typing, x, begin, apart, index, low, inverse, shift, top, codes, at):  # noqa: ARG001
        f32 = types.float32
        return types.void(x, types.uintp, types.uintp, types.uint32, f32, f32, f32, f32, codes, types.uintp), generate

    return lanes


_nearest_bytes, _stochastic_bytes = _lanes(stochastic=False, nibbles=False), _lanes(stochastic=True, nibbles=False)
_nearest_nibbles, _stochastic_nibbles = _lanes(stochastic=False, nibbles=True), _lanes(stochastic=True, nibbles=True)


@inlined
def _codes(x, begin, m, low, inverse, offset, top, stochastic, start, q, to):
    whole = m // LANES * LANES
    for j in range(0, whole, LANES):
        own, index = At(begin + j), U32(start + U32(j))
        if stochastic:
            _stochastic_bytes(x, own, At(0), index, low, inverse, offset, top, q, At(to + j))
        else:
            _nearest_bytes(x, own, At(0), index, low, inverse, offset, top, q, At(to + j))
    for j in range(whole, m):
        shift = _shift(offset, stochastic, start, j)
        q[At(to + j)] = U8(_code(x[At(begin + j)], low, inverse, shift, top))


@inlined
def _nibbles(x, begin, m, low, inverse, offset, top, stochastic, start, q, to):
    """Make and pack 4-bit codes at once: element j and element j + stride of the group share a byte."""
    stride = (m + 1) >> 1
    whole = (m - stride) // LANES * LANES
    for j in range(0, whole, LANES):
        own, index = At(begin + j), U32(start + U32(j))
        if stochastic:
            _stochastic_nibbles(x, own, At(stride), index, low, inverse, offset, top, q, At(to + j))
        else:
            _nearest_nibbles(x, own, At(stride), index, low, inverse, offset, top, q, At(to + j))
    for j in range(whole, m - stride):
        first = _code(x[At(begin + j)], low, inverse, _shift(offset, stochastic, start, j), top)
        shift = _shift(offset, stochastic, start, stride + j)
        second = _code(x[At(begin + stride + j)], low, inverse, shift, top)
        q[At(to + j)] = U8(first | I32(second << I32(4)))
    if m & 1:
        j = stride - 1
        shift = _shift(offset, stochastic, start, j)
        q[At(to + j)] = U8(_code(x[At(begin + j)], low, inverse, shift, top))


@inlined
def _codes_sign(x, begin, m, finite, q):
    for j in range(m):
        q[j] = U8(finite) & U8(x[At(begin + j)] >= F32(0))


@inlined
def pack_plane(q, m, shift, width, codes, at):
    """Write ``stride`` bytes at ``codes[at:]``; the scratch ``q`` has zeros behind element m up to a multiple of 8."""
    stride = (m * width + 7) >> 3
    mask = U8((1 << width) - 1)
    down = U8(shift)
    if width == 4:
        for t in range(stride):
            codes[At(at + t)] = U8(((q[t] >> down) & mask) | U8(U8(q[At(stride + t)] >> down) << U8(4)))
    elif width == 2:
        for t in range(stride):
            a = U8((q[t] >> down) & mask) | U8(U8((q[At(stride + t)] >> down) & mask) << U8(2))
            b = U8((q[At(2 * stride + t)] >> down) & mask) | U8(U8((q[At(3 * stride + t)] >> down) & mask) << U8(2))
            codes[At(at + t)] = U8(a | U8(b << U8(4)))
    else:
        for t in range(stride):
            codes[At(at + t)] = U8((q[t] >> down) & mask)
        for p in range(1, 8):
            up = U8(p)
            for t in range(stride):
                codes[At(at + t)] |= U8(U8((q[At(p * stride + t)] >> down) & mask) << up)


@inlined
def unpack_plane(codes, at, m, shift, width, q):
    """Invert ``pack_plane``; writes up to 7 elements behind element m."""
    stride = (m * width + 7) >> 3
    mask = U8((1 << width) - 1)
    up = U8(shift)
    for p in range(8 // width):
        down = U8(p * width)
        if shift == 0:
            for t in range(stride):
                q[At(p * stride + t)] = U8((codes[At(at + t)] >> down) & mask)
        else:
            for t in range(stride):
                q[At(p * stride + t)] |= U8(U8((codes[At(at + t)] >> down) & mask) << up)


@instruction
def _lanes_of_values(typing, codes, at, down, mask, low, offset, step, weight, accumulate, out, begin):  # noqa: ARG001
    """Do what the last loop of ``_values`` does, for LANES elements. In IR, the compiler need not check whether arrays
    overlap.
    """

    def generate(context, builder, signature, arguments):
        code_at = neighbours(context, builder, signature.args[0], arguments[0], arguments[1])
        out_at = neighbours(context, builder, signature.args[9], arguments[9], arguments[10])
        down, mask, low, offset, step, weight = (splat(builder, scalar) for scalar in arguments[2:8])
        packed = builder.load(code_at)
        packed.align = 1
        code = builder.and_(builder.lshr(builder.zext(packed, INTS), down), mask)
        level = builder.fsub(builder.sitofp(code, FLOATS), offset)
        value = builder.fmul(weight, builder.fadd(low, builder.fmul(level, step)))
        prefetch(builder, out_at, PAGE)
        old = builder.load(out_at)
        old.align = 4
        builder.store(builder.select(arguments[8], builder.fadd(old, value), value), out_at).align = 4
        return context.get_dummy_value()

    i32, f32 = types.int32, types.float32
    return types.void(codes, types.uintp, i32, i32, f32, f32, f32, f32, types.boolean, out, types.uintp), generate


@inlined
def _values(codes, at, m, down, mask, low, offset, step, weight, accumulate, out, begin):
    """Decode m values from the codes at bits ``down`` of the bytes ``codes[at:]``."""
    whole = m // LANES * LANES
    for j in range(0, whole, LANES):
        _lanes_of_values(codes, At(at + j), down, mask, low, offset, step, weight, accumulate, out, At(begin + j))
    for j in range(whole, m):
        code = (I32(codes[At(at + j)]) >> down) & mask
        value = F32(weight * F32(low + F32(F32(F32(code) - offset) * step)))
        out[At(begin + j)] = F32(out[At(begin + j)] + value) if accumulate else value


@functools.cache
def _quantizer(packing: str, scale: Scale, stochastic: bool) -> Any:
    """Return the loop of one kind of quantization. Each is compiled by itself, as most programs need only one."""
    minmax, absmax, l2, mean = (scale == name for name in ("minmax", "absmax", "l2", "mean"))
    nibbles, whole = packing == "nibbles", packing == "bytes"

    def _quantize_range(
        x,
        x_bits,
        lows,
        steps,
        codes,
        group,
        group_bytes,
        widths,
        centre,
        shift,
        top,
        fold,
        q,
        pair,
        pair_bits,
        first,
        last,
    ):
        """Quantize groups [first, last): write the header, then codes into ``q`` (one byte each), then the packed
        planes of ``q``.
        """
        for g in range(first, last):
            begin = g * group
            m = min(group, x.size - begin)
            low = F32(0)
            if minmax:
                ordered_low, ordered_high = _ordered_extremes(x_bits, begin, m)
                finite = ordered_high < NON_FINITE and ordered_low >= -NON_FINITE
                pair_bits[0] = _bits_of(ordered_low)
                pair_bits[1] = _bits_of(ordered_high)
                low = pair[0]
                step = F32(F32(pair[1] - low) / top)
            else:
                pair_bits[0] = max_magnitude(x_bits, begin, m)
                finite = pair_bits[0] < NON_FINITE
                if absmax:
                    step = F32(pair[0] / centre)
                if l2:
                    step = F32(np.sqrt(_sum_of_squares(x, begin, m)) / np.float64(centre))
                if mean:
                    step = F32(2.0 * _sum_of_magnitudes(x, begin, m) / m)
            if not finite:
                low = step = F32(np.nan)
            if minmax:
                lows[g] = low
            steps[g] = step
            inverse = F32(0) if step < TINY else F32(F32(1) / step)
            at = g * group_bytes
            start = U32(U32(begin) + fold)
            if nibbles:
                _nibbles(x, begin, m, low, inverse, shift, top, stochastic, start, codes, at)
            elif whole:  # codes of a byte need no packing
                _codes(x, begin, m, low, inverse, shift, top, stochastic, start, codes, at)
            else:
                for j in range(m, q.size if m < group else 0):
                    q[At(j)] = 0
                if mean:
                    _codes_sign(x, begin, m, finite, q)
                    pack_plane(q, m, 0, 1, codes, at)
                else:
                    _codes(x, begin, m, low, inverse, shift, top, stochastic, start, q, 0)
                    down = 0
                    for w in widths:
                        pack_plane(q, m, down, w, codes, at)
                        at += (m * w + 7) >> 3
                        down += w

    return variant(_quantize_range, packing, scale, int(stochastic))


@loop
def _dequantize_whole_range(lows, steps, codes, out, width, group, offset, weight, accumulate, first, last):
    """Decode groups [first, last) of codes of 1, 2, 4 or 8 bits, reading them in place."""
    group_bytes = (group * width + 7) >> 3
    mask = I32((1 << width) - 1)
    for g in range(first, last):
        begin = g * group
        m = min(group, out.size - begin)
        stride = (m * width + 7) >> 3
        low = lows[At(g)] if lows.size else F32(0)
        step = steps[At(g)]
        shift = 0
        while shift < 8:
            count = min(stride, m)
            _values(codes, g * group_bytes, count, I32(shift), mask, low, offset, step, weight, accumulate, out, begin)
            begin += count
            m -= count
            shift += width


@loop
def _dequantize_planes_range(lows, steps, codes, out, widths, group, offset, weight, accumulate, first, last):
    """Decode groups [first, last) of codes in several planes, which are joined in ``q``."""
    group_bytes = 0
    for w in widths:
        group_bytes += (group * w + 7) >> 3
    q = np.empty(group + 8, np.uint8)
    for g in range(first, last):
        begin = g * group
        m = min(group, out.size - begin)
        at = g * group_bytes
        low = lows[g] if lows.size else F32(0)
        shift = 0
        for w in widths:
            unpack_plane(codes, at, m, shift, w, q)
            at += (m * w + 7) >> 3
            shift += w
        _values(q, 0, m, I32(0), I32(255), low, offset, steps[g], weight, accumulate, out, begin)


def _sections(payload: Tensor, numel: int, group: int, scale: Scale) -> tuple[Array, Array, Array]:
    """Return (lows, steps, codes) as views of the payload."""
    groups = -(-numel // group)
    header = groups * (2 if scale == "minmax" else 1)
    floats = payload[: 4 * header].numpy().view(np.float32)
    lows = floats[:groups] if scale == "minmax" else floats[:0]
    return lows, floats[header - groups :], payload[4 * header :].numpy()


def group_minmax(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    groups = -(-x.numel() // group)
    low, high = (torch.empty(groups, dtype=torch.float32, device="cpu") for _ in range(2))
    arrays = x.numpy().view(np.int32), group, low.numpy().view(np.int32), high.numpy().view(np.int32)
    spread(groups, x.numel(), lambda a, b: _minmax_range(*arrays, a, b))
    return low, high


def quantize_groups(
    x: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, stochastic: bool, seed: int = 0
) -> None:
    n = x.numel()
    lows, steps, codes = _sections(out, n, group, scale)
    codes[packed_nbytes(n, bits, group) :] = 0
    values = x.numpy()
    centre = (1 << (bits - 1)) - 1
    offset = 0.0 if scale == "minmax" else float(centre)
    shift = offset if stochastic else offset + 0.5
    top = (1 << bits) - 1 if scale == "minmax" else 2 * centre
    form = packed_nbytes(group, bits, group), np.array(plane_widths(bits)), F32(centre), F32(shift), F32(top)
    arguments = values, values.view(np.int32), lows, steps, codes, group, *form, fold_seed(seed)
    quantize = _quantizer({4: "nibbles", 8: "bytes"}.get(bits, "planes"), scale, stochastic)

    def work(first: int, last: int) -> None:
        q, pair = np.zeros(group + 8 if bits not in (4, 8) else 0, np.uint8), np.empty(2, np.float32)
        quantize(*arguments, q, pair, pair.view(np.int32), first, last)

    spread(-(-n // group), n, work)


def dequantize_groups(
    payload: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, weight: float = 1.0, accumulate: bool = False
) -> None:
    n = out.numel()
    lows, steps, codes = _sections(payload, n, group, scale)
    offset = {"minmax": 0.0, "mean": 0.5}.get(scale, (1 << (bits - 1)) - 1)
    widths = plane_widths(bits)
    whole = len(widths) == 1
    loop = _dequantize_whole_range if whole else _dequantize_planes_range
    form = widths[0] if whole else np.array(widths), group, F32(offset), F32(weight), accumulate
    arguments = lows, steps, codes, out.numpy(), *form
    spread(-(-n // group), n, lambda a, b: loop(*arguments, a, b))
