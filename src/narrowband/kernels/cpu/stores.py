"""Residuals stored in fewer bits, on CPU. A group of 64 stays in registers while its power of two is found and it is
rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import overload

from narrowband.kernels.cpu.elements import INTS, mix_lanes, splat_int
from narrowband.kernels.cpu.loops import (
    F32,
    I32,
    LANES,
    U32,
    At,
    fold_seed,
    inlined,
    instruction,
    loop,
    max_magnitude,
    mix,
    neighbours,
    splat,
)
from narrowband.kernels.cpu.threads import spread
from narrowband.kernels.stores import LEAST_POWER, STORE_GROUP

if TYPE_CHECKING:
    from torch import Tensor

_GROUP = STORE_GROUP
_HALF = STORE_GROUP // 2
_NEAREST = U32(1 << 15)
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def operation(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """In IR: an operation that is an LLVM intrinsic and no instruction."""
    form = ir.FunctionType(result, [value.type for value in values])
    return builder.call(builder.module.declare_intrinsic(name, (), form), values)


def _noises(builder: Any, begin: Any, folded: Any) -> list[Any]:
    """Return 16 random bits for each element of the group from ``begin`` on."""
    first = builder.add(builder.lshr(builder.trunc(begin, _I32), _I32(1)), folded)
    hashes = [mix_lanes(builder, builder.add(first, _I32(at))) for at in range(0, _HALF, LANES)]
    lower = [builder.and_(h, splat_int(0xFFFF)) for h in hashes]
    return lower + [builder.lshr(h, splat_int(16)) for h in hashes]


def power_of_lanes(builder: Any, values: list[Any]) -> Any:
    """Return, as one number, the exponent with which the largest magnitude of these vectors fits into 127."""
    tops = [builder.and_(builder.bitcast(value, INTS), splat_int(0x7FFFFFFF)) for value in values]
    while len(tops) > 1:
        tops = [operation(builder, f"llvm.smax.v{LANES}i32", INTS, *tops[q : q + 2]) for q in range(0, len(tops), 2)]
    top = operation(builder, f"llvm.vector.reduce.smax.v{LANES}i32", _I32, tops[0])
    over = builder.icmp_signed(">", builder.and_(top, _I32(0x007FFFFF)), _I32(0x007E0000))
    exponent = builder.add(builder.sub(builder.lshr(top, _I32(23)), _I32(133)), builder.zext(over, _I32))
    return operation(builder, "llvm.smax.i32", _I32, exponent, _I32(LEAST_POWER))


def rounded_lanes(
    builder: Any, values: list[Any], exponent: Any, begin: Any, folded: Any, kept: Any, stochastic: Any = None
) -> list[Any]:
    """In IR: return the values of the group that begins at ``begin``, as they are stored.

    Vectors of int16 hold bfloat16; vectors of int8 hold codes for this power of two. Rounding is stochastic if the bit
    ``stochastic`` says so, or if there is no such bit.
    """
    noises = _noises(builder, begin, folded)
    if stochastic is not None:
        noises = [builder.select(stochastic, noise, splat_int(int(_NEAREST))) for noise in noises]
    if kept.element.width == 16:
        added = [builder.add(builder.bitcast(v, INTS), noise) for v, noise in zip(values, noises, strict=True)]
        return [builder.trunc(builder.lshr(bits, splat_int(16)), kept) for bits in added]
    factor = builder.bitcast(builder.shl(builder.sub(_I32(127 + 16), exponent), _I32(23)), ir.FloatType())
    factor, codes = splat(builder, factor), []
    for value, noise in zip(values, noises, strict=True):
        fixed = operation(builder, f"llvm.lrint.v{LANES}i32.v{LANES}f32", INTS, builder.fmul(value, factor))
        codes.append(builder.trunc(builder.ashr(builder.add(fixed, noise), splat_int(16)), kept))
    return codes


def lanes_of_group(context: Any, builder: Any, array: Any, value: Any, begin: Any) -> list[Any]:
    """In IR: return the addresses of a group's elements, as pointers to vectors."""
    indices = [builder.add(begin, ir.Constant(_I64, at)) for at in range(0, _GROUP, LANES)]
    return [neighbours(context, builder, array, value, index) for index in indices]


@instruction
def _keep_whole(typing, x, codes, begin, stochastic, folded):  # noqa: ARG001 - they are types here
    """Store the group from ``begin`` on. Returns its power of two, if it has one."""

    def generate(context, builder, signature, arguments):
        x, codes, begin, stochastic, folded = arguments
        values = []
        for place in lanes_of_group(context, builder, signature.args[0], x, begin):
            values.append(builder.load(place))
            values[-1].align = 4
        places = lanes_of_group(context, builder, signature.args[1], codes, begin)
        exponent = power_of_lanes(builder, values)
        new = rounded_lanes(builder, values, exponent, begin, folded, places[0].type.pointee, stochastic)
        for code, place in zip(new, places, strict=True):
            builder.store(code, place).align = 1
        return exponent

    return types.int32(x, codes, types.uintp, types.boolean, types.uint32), generate


@inlined
def power_of(top):
    """Return the exponent with which a magnitude, given as bits, fits into 127."""
    over = I32(1) if I32(top & I32(0x007FFFFF)) > I32(0x007E0000) else I32(0)
    return max(I32(I32(top >> I32(23)) - I32(133) + over), I32(LEAST_POWER))


@inlined
def _noise(i, stochastic, folded):
    h = mix(U32(U32(U32(i // _GROUP * _HALF) + U32(i % _HALF)) + folded))
    noise = U32(h & U32(0xFFFF)) if i % _GROUP < _HALF else U32(h >> U32(16))
    return noise if stochastic else _NEAREST


def keep_one(codes, exponent, i, value, stochastic, folded):
    """Store a value as element i: with this power of two, or as bfloat16 (always rounded stochastically)."""


@overload(keep_one, inline="always")
def _(codes, exponent, i, value, stochastic, folded):  # noqa: ARG001
    if codes.dtype == types.int16:

        def in_16(codes, exponent, i, value, stochastic, folded):  # noqa: ARG001
            codes[At(i)] = np.int16(U32(U32(F32(value).view(np.uint32)) + _noise(i, True, folded)) >> U32(16))

        return in_16

    def in_8(codes, exponent, i, value, stochastic, folded):
        factor = I32(I32(I32(127 + 16) - exponent) << I32(23)).view(np.float32)
        fixed = I32(np.rint(F32(value * factor)))
        codes[At(i)] = np.int8(I32(fixed + I32(_noise(i, stochastic, folded))) >> I32(16))

    return in_8


@loop
def _keep_range(x, bits, codes, exponents, stochastic, folded, first, last):
    """Store groups [first, last)."""
    whole = min(last, x.size // _GROUP)
    for g in range(first, whole):
        exponent = _keep_whole(x, codes, At(g * _GROUP), stochastic, folded)
        if exponents.size:
            exponents[At(g)] = np.int8(exponent)
    for g in range(whole, last):
        begin, end = g * _GROUP, min((g + 1) * _GROUP, x.size)
        exponent = power_of(max_magnitude(bits, begin, end - begin))
        if exponents.size:
            exponents[At(g)] = np.int8(exponent)
        for i in range(begin, end):
            keep_one(codes, exponent, i, x[At(i)], stochastic, folded)


def unit_of(exponents, group):
    """Return the power of two that a group's codes are multiples of."""


@overload(unit_of, inline="always")
def _(exponents, group):  # noqa: ARG001
    return lambda exponents, group: I32(I32(I32(exponents[At(group)]) + I32(127)) << I32(23)).view(np.float32)


@loop
def _from_8(codes, exponents, out, first, last):
    for g in range(first, last):
        unit = unit_of(exponents, g)
        for i in range(g * _GROUP, min((g + 1) * _GROUP, out.size)):
            out[At(i)] = F32(F32(codes[At(i)]) * unit)


_NONE = np.empty(0, np.int8)


def keep_in_16(x: Tensor, out: Tensor, *, seed: int | None) -> None:
    if seed is None:
        out.copy_(x)
        return
    values = x.numpy()
    arrays = values, values.view(np.int32), out.view(torch.int16).numpy(), _NONE, True, fold_seed(seed)
    spread(-(-x.numel() // _GROUP), x.numel(), lambda a, b: _keep_range(*arrays, a, b))


def keep_in_8(x: Tensor, codes: Tensor, exponents: Tensor, *, seed: int | None) -> None:
    values = x.numpy()
    arrays = values, values.view(np.int32), codes.numpy(), exponents.numpy(), seed is not None, fold_seed(seed or 0)
    spread(exponents.numel(), x.numel(), lambda a, b: _keep_range(*arrays, a, b))


def read_from_8(codes: Tensor, exponents: Tensor, out: Tensor) -> None:
    arrays = codes.numpy(), exponents.numpy(), out.numpy()
    spread(exponents.numel(), out.numel(), lambda a, b: _from_8(*arrays, a, b))
