"""Rotated quantization on CPU: a group is read once, and rotated in vectors while it stays in L1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types

from narrowband.kernels.cpu.elements import FLOATS, INTS
from narrowband.kernels.cpu.loops import (
    F32,
    I32,
    LANES,
    NON_FINITE,
    PAGE,
    U8,
    U32,
    At,
    fold_seed,
    inlined,
    instruction,
    loop,
    max_magnitude,
    mix,
    neighbours,
    prefetch,
    splat,
)
from narrowband.kernels.cpu.quantized import TINY, pack_plane, unpack_plane
from narrowband.kernels.cpu.threads import spread
from narrowband.kernels.quantized import packed_nbytes, plane_widths
from narrowband.kernels.rotated import SPACINGS

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]

__all__ = ["dequantize_rotated", "quantize_rotated"]

#: Work on fewer elements stays on the calling thread: rotating takes several times as long as rounding alone.
_LEAST = 1 << 14


def _pairs(apart: int) -> ir.Constant:
    """Return the lanes that stand ``apart`` lanes from each lane, as a mask for a shuffle."""
    return ir.Constant(ir.VectorType(ir.IntType(32), LANES), [lane ^ apart for lane in range(LANES)])


def _within(builder: Any, v: Any) -> Any:
    """Do the stages of a rotation whose pairs are in one vector.

    The first of a pair becomes ``first + second``, the second ``first + (−second)``, which has the bits of ``first −
    second``.
    """
    apart = 1
    while apart < LANES:
        other = builder.shuffle_vector(v, ir.Constant(FLOATS, ir.Undefined), _pairs(apart))
        minus = [-(2**31) if lane & apart else 0 for lane in range(LANES)]
        own = builder.bitcast(builder.xor(builder.bitcast(v, INTS), ir.Constant(INTS, minus)), FLOATS)
        v = builder.fadd(other, own)
        apart *= 2
    return v


def _load(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    value = builder.load(neighbours(context, builder, kind, array, at))
    value.align = 4
    return value


def _store(context: Any, builder: Any, kind: Any, array: Any, at: Any, value: Any) -> None:
    builder.store(value, neighbours(context, builder, kind, array, at)).align = 4


@instruction
def _load_rotated(typing, x, begin, signs, scale, y, squares, at):  # noqa: ARG001
    """Scale LANES elements and give them their signs; write their squares, and their rotation within the vector."""

    def generate(context, builder, signature, arguments):
        x, begin, signs, scale, y, squares, at = arguments
        kinds = signature.args
        v = builder.fmul(_load(context, builder, kinds[0], x, begin), splat(builder, scale))
        _store(context, builder, kinds[5], squares, at, builder.fmul(v, v))
        bits = builder.xor(builder.bitcast(v, INTS), _load(context, builder, kinds[2], signs, at))
        _store(context, builder, kinds[4], y, at, _within(builder, builder.bitcast(bits, FLOATS)))
        return context.get_dummy_value()

    return types.void(x, types.uintp, signs, types.float32, y, squares, types.uintp), generate


@instruction
def _between(typing, y, first, second):  # noqa: ARG001
    """Do a stage of a rotation for LANES pairs."""

    def generate(context, builder, signature, arguments):
        y, first, second = arguments
        kind = signature.args[0]
        a, b = (_load(context, builder, kind, y, at) for at in (first, second))
        _store(context, builder, kind, y, first, builder.fadd(a, b))
        _store(context, builder, kind, y, second, builder.fsub(a, b))
        return context.get_dummy_value()

    return types.void(y, types.uintp, types.uintp), generate


@instruction
def _between_four(typing, y, first, apart):  # noqa: ARG001
    """Do two stages of a rotation for LANES times four elements."""

    def generate(context, builder, signature, arguments):
        y, first, apart = arguments
        kind = signature.args[0]
        places = [first]
        for _ in range(3):
            places.append(builder.add(places[-1], apart))
        a, b, c, d = (_load(context, builder, kind, y, at) for at in places)
        a, b = builder.fadd(a, b), builder.fsub(a, b)
        c, d = builder.fadd(c, d), builder.fsub(c, d)
        results = builder.fadd(a, c), builder.fadd(b, d), builder.fsub(a, c), builder.fsub(b, d)
        for at, value in zip(places, results, strict=True):
            _store(context, builder, kind, y, at, value)
        return context.get_dummy_value()

    return types.void(y, types.uintp, types.uintp), generate


@inlined
def _rotate(y, n):
    """Do the stages of a rotation whose pairs are in different vectors."""
    apart = LANES
    while 2 * apart < n:
        for i in range(0, n, 4 * apart):
            for j in range(0, apart, LANES):
                _between_four(y, At(i + j), At(apart))
        apart *= 4
    if apart < n:
        for j in range(0, apart, LANES):
            _between(y, At(j), At(apart + j))


@instruction
def _add_halves(typing, squares, first, second):  # noqa: ARG001
    def generate(context, builder, signature, arguments):
        array, first, second = arguments
        kind = signature.args[0]
        total = builder.fadd(*(_load(context, builder, kind, array, at) for at in (first, second)))
        _store(context, builder, kind, array, first, total)
        return context.get_dummy_value()

    return types.void(squares, types.uintp, types.uintp), generate


@instruction
def _total_of_lanes(typing, squares):  # noqa: ARG001
    """Add the first LANES elements in pairs."""

    def generate(context, builder, signature, arguments):
        v = _load(context, builder, signature.args[0], arguments[0], ir.Constant(ir.IntType(64), 0))
        apart = LANES // 2
        while apart:
            v = builder.fadd(v, builder.shuffle_vector(v, ir.Constant(FLOATS, ir.Undefined), _pairs(apart)))
            apart //= 2
        return builder.extract_element(v, ir.Constant(ir.IntType(32), 0))

    return types.float32(squares), generate


@inlined
def _total(squares, n):
    """Return the sum of n numbers, taken in pairs; overwrites them."""
    half = n // 2
    while half >= LANES:
        for j in range(0, half, LANES):
            _add_halves(squares, At(j), At(half + j))
        half //= 2
    return _total_of_lanes(squares)


@instruction
def _round(typing, y, inverse, shift, top, middle, q, products, at):  # noqa: ARG001
    """Write the codes of LANES elements, a byte each, and the product of each element and its level."""

    def generate(context, builder, signature, arguments):
        y, inverse, shift, top, middle, q, products, at = arguments
        kinds = signature.args
        v = _load(context, builder, kinds[0], y, at)
        inverse, shift, top, middle = (splat(builder, scalar) for scalar in (inverse, shift, top, middle))
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        level = builder.fadd(builder.fmul(v, inverse), shift)
        level = builder.select(builder.fcmp_ordered(">", level, zero), level, zero)  # NaN becomes 0
        code = builder.fptosi(builder.select(builder.fcmp_ordered("<", level, top), level, top), INTS)
        product = builder.fmul(v, builder.fsub(builder.sitofp(code, FLOATS), middle))
        _store(context, builder, kinds[6], products, at, product)
        place = neighbours(context, builder, kinds[5], q, at)
        builder.store(builder.trunc(code, ir.VectorType(ir.IntType(8), LANES)), place).align = 1
        return context.get_dummy_value()

    f32 = types.float32
    return types.void(y, f32, f32, f32, f32, q, products, types.uintp), generate


@instruction
def _load_level(typing, q, middle, step, y, at):  # noqa: ARG001
    """Decode LANES codes of a byte each; write their rotation within the vector."""

    def generate(context, builder, signature, arguments):
        q, middle, step, y, at = arguments
        packed = builder.load(neighbours(context, builder, signature.args[0], q, at))
        packed.align = 1
        code = builder.sitofp(builder.zext(packed, INTS), FLOATS)
        value = builder.fmul(builder.fsub(code, splat(builder, middle)), splat(builder, step))
        _store(context, builder, signature.args[3], y, at, _within(builder, value))
        return context.get_dummy_value()

    return types.void(q, types.float32, types.float32, y, types.uintp), generate


@instruction
def _put(typing, y, signs, weight, accumulate, at, out, begin):  # noqa: ARG001
    """Give LANES elements their signs back, and write or add them."""

    def generate(context, builder, signature, arguments):
        y, signs, weight, accumulate, at, out, begin = arguments
        kinds = signature.args
        bits = builder.bitcast(_load(context, builder, kinds[0], y, at), INTS)
        signed = builder.bitcast(builder.xor(bits, _load(context, builder, kinds[1], signs, at)), FLOATS)
        value = builder.fmul(signed, splat(builder, weight))
        place = neighbours(context, builder, kinds[5], out, begin)
        prefetch(builder, place, PAGE)
        old = builder.load(place)
        old.align = 4
        builder.store(builder.select(accumulate, builder.fadd(old, value), value), place).align = 4
        return context.get_dummy_value()

    return types.void(y, signs, types.float32, types.boolean, types.uintp, out, types.uintp), generate


@inlined
def _draw(signs, folded, group):
    """Write the sign bits of the diagonal of D."""
    for j in range(group):
        signs[At(j)] = I32(mix(U32(folded + U32(j))) & U32(0x80000000))


@loop
def _quantize_rotated_range(
    x,
    bits_of_x,
    steps,
    codes,
    folded,
    group,
    each,
    widths,
    spacing,
    shift,
    top,
    middle,
    y,
    sums,
    rest,
    signs,
    q,
    first,
    last,
):
    """Quantize groups [first, last). ``rest`` holds the last group, filled up with zeros, if that is not whole."""
    _draw(signs, folded, group)
    for g in range(first, last):
        begin = g * group
        m = min(group, x.size - begin)
        most = I32(max_magnitude(bits_of_x, begin, m))
        exponent = I32(min(max(I32(most & NON_FINITE), I32(1 << 23)), I32(253 << 23)))
        scale = I32(I32(254 << 23) - exponent).view(np.float32)
        if m < group:
            for j in range(m):
                rest[At(j)] = x[At(begin + j)]
            for j in range(m, group):
                rest[At(j)] = F32(0)
            for j in range(0, group, LANES):
                _load_rotated(rest, At(j), signs, scale, y, sums, At(j))
        else:
            for j in range(0, group, LANES):
                _load_rotated(x, At(begin + j), signs, scale, y, sums, At(j))
        square = _total(sums, group)
        _rotate(y, group)
        there = most.view(np.float32) >= TINY
        finite = most < NON_FINITE
        inverse = F32(F32(1) / F32(spacing * np.sqrt(square))) if there else F32(0)
        for j in range(0, group, LANES):
            _round(y, inverse, shift, top, middle, q, sums, At(j))
        step = F32(F32(square / _total(sums, group)) * exponent.view(np.float32))
        if not there or step < TINY:
            step = F32(0)
        if not finite:
            for j in range(group):
                q[At(j)] = U8(0)
        if not (finite and F32(step * F32(group * middle)) < F32(np.inf)):
            step = F32(np.nan)
        steps[At(g)] = step
        at, down = g * each, 0
        for w in widths:
            if w == 8:
                for j in range(group):
                    codes[At(at + j)] = q[At(j)]
            else:
                pack_plane(q, group, down, w, codes, at)
            at += (group * w) >> 3
            down += w


@loop
def _dequantize_rotated_range(
    steps, codes, out, folded, group, each, widths, middle, weight, accumulate, y, rest, signs, q, first, last
):
    """Decode groups [first, last)."""
    _draw(signs, folded, group)
    for g in range(first, last):
        begin = g * group
        m = min(group, out.size - begin)
        at, up = g * each, 0
        for w in widths:
            if w == 8:
                for j in range(group):
                    q[At(j)] = codes[At(at + j)]
            else:
                unpack_plane(codes, at, group, up, w, q)
            at += (group * w) >> 3
            up += w
        for j in range(0, group, LANES):
            _load_level(q, middle, steps[At(g)], y, At(j))
        _rotate(y, group)
        if m < group:
            for j in range(0, group, LANES):
                _put(y, signs, weight, False, At(j), rest, At(j))
            for j in range(m):
                value = rest[At(j)]
                out[At(begin + j)] = F32(out[At(begin + j)] + value) if accumulate else value
        else:
            for j in range(0, group, LANES):
                _put(y, signs, weight, accumulate, At(j), out, At(begin + j))


def _parts(payload: Tensor, groups: int) -> tuple[Array, Array, Array]:
    """Return (folded seed, steps, codes) as views of the payload."""
    bytes_ = payload.numpy()
    end = 4 + 4 * groups
    return bytes_[:4].view(np.uint32), bytes_[4:end].view(np.float32), bytes_[end:]


def _scratch(floats: int, group: int) -> tuple[Array, ...]:
    """Return so many arrays of floats for a group, one for its signs, and one for its codes."""
    return *np.empty((floats, group), np.float32), np.empty(group, np.int32), np.empty(group, np.uint8)


def _form(bits: int, group: int) -> tuple[int, Array]:
    return packed_nbytes(group, bits, group), np.array(plane_widths(bits))


def quantize_rotated(x: Tensor, out: Tensor, *, bits: int, group: int, seed: int = 0) -> None:
    n = x.numel()
    groups = -(-n // group)
    seeds, steps, codes = _parts(out, groups)
    seeds[0] = folded = fold_seed(seed)
    each, widths = _form(bits, group)
    values, top = x.numpy(), (1 << bits) - 1
    levels = F32(SPACINGS[bits]), F32(1 << (bits - 1)), F32(top), F32(top / 2)
    arguments = values, values.view(np.int32), steps, codes, folded, group, each, widths, *levels

    def work(first: int, last: int) -> None:
        _quantize_rotated_range(*arguments, *_scratch(3, group), first, last)

    spread(groups, n, work, least=_LEAST)


def dequantize_rotated(
    payload: Tensor,
    out: Tensor,
    *,
    bits: int,
    group: int,
    weight: float = 1.0,
    accumulate: bool = False,
) -> None:
    n = out.numel()
    groups = -(-n // group)
    form = *_form(bits, group), F32(((1 << bits) - 1) / 2), F32(weight), accumulate
    seeds, steps, codes = _parts(payload, groups)
    arguments = steps, codes, out.numpy(), seeds[0], group, *form

    def work(first: int, last: int) -> None:
        _dequantize_rotated_range(*arguments, *_scratch(2, group), first, last)

    spread(groups, n, work, least=_LEAST)
