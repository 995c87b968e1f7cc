"""Elements of float32 and bfloat16 tensors, read and written in their own dtype: bfloat16 is the upper half of a
float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import overload
from numba.np.numpy_support import carray

from narrowband.kernels.cpu.loops import (
    F32,
    I32,
    LANES,
    PAGE,
    At,
    inlined,
    instruction,
    prefetch,
    splat,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]

#: The NaN written to bfloat16 outputs: rounding the bits of another NaN could carry into its sign.
BF16_NAN = np.int16(0x7FC0)


def bits_of(x, i):
    """Return the float32 bits of element i, as int32; a float32 array is passed as its int32 bits."""


@overload(bits_of, inline="always")
def _(x, i):  # noqa: ARG001
    if x.dtype == types.int16:
        return lambda x, i: I32(I32(x[At(i)]) << I32(16))
    return lambda x, i: x[At(i)]


def value_of(x, i):
    """Return element i as float32."""


@overload(value_of, inline="always")
def _(x, i):  # noqa: ARG001
    if x.dtype == types.int16:
        return lambda x, i: I32(I32(x[At(i)]) << I32(16)).view(np.float32)
    if x.dtype == types.int32:
        return lambda x, i: I32(x[At(i)]).view(np.float32)
    return lambda x, i: x[At(i)]


def put(out, i, value):
    """Write ``value`` to element i of out; if out is bfloat16, round to nearest, ties to even."""


@overload(put, inline="always")
def _(out, i, value):  # noqa: ARG001
    def rounded(out, i, value):
        bits = I32(F32(value).view(np.int32))
        odd = I32(I32(bits >> I32(16)) & I32(1))
        upper = np.int16(I32(I32(bits + I32(0x7FFF)) + odd) >> I32(16))
        out[At(i)] = BF16_NAN if np.isnan(value) else upper

    def exact(out, i, value):
        out[At(i)] = value

    return rounded if out.dtype == types.int16 else exact


_SHORTS = ir.VectorType(ir.IntType(16), LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
FLOATS = ir.VectorType(ir.FloatType(), LANES)


def load_lanes(builder: Any, place: Any, dtype: Any) -> Any:
    """Load LANES elements of either dtype as float32."""
    found = builder.load(place)
    if dtype == types.float32:
        found.align = 4
        return found
    found.align = 2
    return builder.bitcast(builder.shl(builder.zext(found, INTS), splat_int(16)), FLOATS)


def store_lanes(builder: Any, place: Any, dtype: Any, value: Any) -> None:
    """Do what ``put`` does, for LANES elements."""
    prefetch(builder, place, PAGE)
    if dtype == types.float32:
        builder.store(value, place).align = 4
        return
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, splat_int(16)), splat_int(1))
    rounded = builder.lshr(builder.add(builder.add(bits, splat_int(0x7FFF)), odd), splat_int(16))
    broken = builder.fcmp_unordered("uno", value, value)
    nan = ir.Constant(_SHORTS, [int(BF16_NAN)] * LANES)
    builder.store(builder.select(broken, nan, builder.trunc(rounded, _SHORTS)), place).align = 2


def splat_int(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def mix_lanes(builder: Any, first: Any) -> Any:
    """Compute ``mix`` of LANES successive numbers that begin with ``first``."""
    h = builder.add(splat(builder, first), ir.Constant(INTS, list(range(LANES))))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = builder.mul(builder.xor(h, builder.lshr(h, splat_int(shift))), splat_int(factor))
    return builder.xor(h, builder.lshr(h, splat_int(16)))


@instruction
def _pointer(typing, address, dtype):  # noqa: ARG001
    """Turn an address into Numba's pointer to elements of a dtype."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(address, dtype), generate


@inlined
def array_at(address, dtype):
    """Return a flat array that begins at an address. Its length is arbitrary: loops do not check it."""
    return carray(_pointer(address, dtype), (1,))


@inlined
def floats_at(address, rows, columns):
    """Return the float32 matrix that begins at an address."""
    return carray(_pointer(address, np.float32), (rows, columns))


def array_of(x: Tensor) -> Array:
    """Return a tensor as the loops read it, flat: float32, or int16 for bfloat16."""
    return x.view(-1).view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.view(-1).numpy()
