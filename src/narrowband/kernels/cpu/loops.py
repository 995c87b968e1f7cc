"""Building blocks of the loops on CPU: how they are compiled, small instructions, and random numbers.

Every loop is compiled without threads of its own and releases the GIL; :mod:`.threads` spreads it over threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import config, njit, types
from numba.extending import intrinsic, overload

from narrowband.errors import UnsupportedError
from narrowband.kernels.cpu.cache import keep
from narrowband.kernels.reference.common import fold

if TYPE_CHECKING:
    from collections.abc import Callable

if config.DISABLE_JIT:  # type: ignore[attr-defined] # set as the module is loaded
    raise UnsupportedError(
        "NUMBA_DISABLE_JIT is set, so Numba compiles nothing, but the CPU loops must be compiled: unset "
        "NUMBA_DISABLE_JIT, or set NARROWBAND_KERNELS=reference to use plain PyTorch"
    )

F32, I32, U8, U32 = np.float32, np.int32, np.uint8, np.uint32
#: Type of an index that is not negative: Numba then omits the wrap-around of indices, and the loop vectorizes.
At = np.uintp

MAGNITUDE = np.int32(0x7FFFFFFF)
#: Magnitude bits of infinity; anything at or above it is inf or NaN.
NON_FINITE = np.int32(0x7F800000)

#: Elements of a vector, in loops written in vectors; on machines with shorter vectors LLVM splits it.
LANES = 16
#: How many bytes ahead of a write to prefetch: hardware prefetching stops at the end of a page.
PAGE = 4096

#: Options of every loop. No C wrapper: nobody calls a loop through a C function pointer, and it takes time to compile.
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False, "no_cfunc_wrapper": True}
_FAST_SUMS = {"reassoc", "contract", "nsz"}
_compiled: Any = njit  # its type stubs know only some of its options


def loop(function: Callable[..., Any]) -> Any:
    """Compile a loop that Python and other loops may call. Calling loops compile it again, as a part of themselves."""
    return keep(_compiled(function, **_OPTIONS))


def variant(function: Callable[..., Any], *constants: object) -> Any:
    """Compile a loop for constants that its function closes over: branches that they rule out are not compiled.

    Compiled code is identified by the function's name, so the constants become a part of the name.
    """
    function.__qualname__ = function.__name__ = "_".join(map(str, (function.__name__, *constants)))
    return loop(function)


def part(function: Callable[..., Any]) -> Any:
    """Compile a part of several loops by itself, once per process; it is then linked into them."""
    return _compiled(function, no_cpython_wrapper=True, **_OPTIONS)


def inlined(function: Callable[..., Any]) -> Any:
    """Mark a part of a loop that is inlined before types are inferred.

    A call costs about 30 ns, for counting references to the arrays it is given: as much as a whole block of 64
    elements. Inlining also compiles fastest if only one place in a loop uses the part.
    """
    return _compiled(function, inline="always", **_OPTIONS)


def instruction(function: Callable[..., Any]) -> Any:
    """Mark a part of a loop that is written in LLVM IR."""
    return intrinsic(function)


def float_sum(function: Callable[..., Any]) -> Any:
    """Compile a part whose sums may be reordered, so that they vectorize."""
    return _compiled(function, no_cpython_wrapper=True, fastmath=_FAST_SUMS, **_OPTIONS)


@instruction
def rolled(typing, count):  # noqa: ARG001
    """Return the same number in a way that LLVM cannot see through.

    LLVM would unroll loops of few rounds. With this count they stay loops, and compile in a fraction of the time.
    """

    def generate(context, builder, signature, arguments):
        del context, signature
        word = ir.IntType(64)
        return builder.asm(ir.FunctionType(word, [word]), "", "=r,0", arguments, side_effect=False)

    return types.int64(types.int64), generate


@inlined
def mix(h):
    h = U32(h ^ (h >> U32(16)))
    h = U32(h * U32(0x7FEB352D))
    h = U32(h ^ (h >> U32(15)))
    h = U32(h * U32(0x846CA68B))
    return U32(h ^ (h >> U32(16)))


def fold_seed(seed: int) -> Any:
    return U32(fold(seed))


def folded(low, high):
    """Compute ``fold_seed`` inside a loop, from both halves of a seed; None if there is no seed."""


@overload(folded, inline="always")
def _(low, high):  # noqa: ARG001
    if low == types.none:
        return lambda low, high: None  # noqa: ARG005
    return lambda low, high: U32(U32(mix(U32(low)) + U32(U32(0x9E3779B9) * mix(U32(high)))) + U32(0x85EBCA6B))


@inlined
def max_magnitude(bits, begin, m):
    top = I32(0)
    for j in range(m):
        top = max(top, I32(bits[At(begin + j)] & MAGNITUDE))
    return top


def splat(builder: Any, scalar: Any) -> Any:
    """Return a vector of LANES equal elements."""
    vector = ir.VectorType(scalar.type, LANES)
    unset = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(unset, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, unset, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def neighbours(context: Any, builder: Any, array: Any, value: Any, index: Any) -> Any:
    """Return the address of LANES neighbouring elements of an array, as a pointer to a vector."""
    data = context.make_array(array)(context, builder, value).data
    vector = ir.VectorType(data.type.pointee, LANES)
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def prefetch(builder: Any, place: Any, ahead: int) -> None:
    """Prefetch the cache line ``ahead`` bytes further on, for writing."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    form = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    instruction = builder.module.declare_intrinsic("llvm.prefetch", (byte,), form)
    line = builder.gep(builder.bitcast(place, byte), [word(ahead)])
    builder.call(instruction, [line, word(1), word(3), word(1)])
