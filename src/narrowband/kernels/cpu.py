"""The loops of :mod:`narrowband.kernels` on CPU, in Numba.

Every loop is compiled without threads of its own and releases the GIL; :func:`_spread` cuts the work into one
contiguous range per thread and runs the ranges on a small thread pool. That is what makes the kernels safe where
Numba's own threading layers are not: several Python threads may call at once, and a forked child simply builds a new
pool. The thread count is ``torch.get_num_threads()``, and results do not depend on it.

What makes them fast: blocks that stay in L1 between two passes, integer loops that LLVM vectorizes (the magnitude of a
float is its bits without the sign), no temporaries as large as the tensor, a word that says which elements of a block
are large before a look at any of them, and no calls inside of loops.
"""

from __future__ import annotations

import functools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from narrowband.errors import PayloadError
from narrowband.kernels import OVERSAMPLE, elias_fano_low_bits, plane_widths, sample_rank, sample_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from narrowband.kernels import Scale

    Array = npt.NDArray[Any]

R = TypeVar("R")

F32, I32, U8, U32 = np.float32, np.int32, np.uint8, np.uint32
#: An index known not to be negative: Numba then leaves out the wrap-around, and the loop vectorizes.
At = np.uintp

MAGNITUDE = np.int32(0x7FFFFFFF)
#: Magnitude bits of infinity; anything at or above it is inf or NaN.
NON_FINITE = np.int32(0x7F800000)
NAN_BITS = np.int32(0x7FC00000)
TINY = np.float32(2.0**-126)

#: Elements that are compared with a threshold at once: one bit each in a word.
BLOCK = 64
#: Elements in one vector, where a loop is written in vectors; on lesser machines LLVM makes several of it.
LANES = 16
#: Columns of a low-rank product that are summed up together.
COLUMNS = 1024
#: Bytes ahead of a write that its cache line is asked for: where a page ends, the hardware no longer guesses the next.
PAGE = 4096
#: Neighbours that a sample takes together where it may: finding a place in memory costs more than reading 32 there.
RUN = 32
#: How many survivors per element wanted such a sample aims at: neighbours are alike, so its threshold is less sure, and
#: where it lets too few survive all is to be looked at again.
OVERSAMPLE_OF_RUNS = 1.5
#: How many the second look aims at.
SECOND_OVERSAMPLE = 2.0
#: Work below this many elements stays on the calling thread: handing it over costs about 30 µs.
MIN_ELEMENTS_PER_THREAD = 1 << 16

#: Elements of an output that take part in several passes while they stay in L2.
CACHED = 1 << 16

_SCALES = {"minmax": 0, "absmax": 1, "l2": 2, "mean": 3}


# ---- threads ---------------------------------------------------------------------------------------------------------

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_pool() -> None:
    global _pool, _pool_size
    _pool, _pool_size = None, 0


os.register_at_fork(after_in_child=_forget_pool)


def _threads(elements: int) -> int:
    return max(1, min(torch.get_num_threads(), elements // MIN_ELEMENTS_PER_THREAD))


def _spread(units: int, elements: int, work: Callable[[int, int], R]) -> list[R]:
    """``work(start, stop)`` over [0, units), one contiguous range per thread; the results in order.

    ``elements`` is how much the units amount to, and decides how many threads are worth waking.
    """
    global _pool, _pool_size  # noqa: PLW0603
    threads = min(_threads(elements), units)
    if threads <= 1:
        return [work(0, units)]
    pool = _pool
    if pool is None or _pool_size < threads:
        # A pool that another thread still uses finishes its work and is then collected.
        pool = _pool = ThreadPoolExecutor(threads, thread_name_prefix="narrowband-kernel")
        _pool_size = threads
    cuts = [units * t // threads for t in range(threads + 1)]
    rest = [pool.submit(work, cuts[t], cuts[t + 1]) for t in range(1, threads)]
    return [work(cuts[0], cuts[1])] + [future.result() for future in rest]


def _loop(function: Callable[..., Any]) -> Any:
    return njit(function, nogil=True, cache=True, error_model="numpy", boundscheck=False)


def _inlined(function: Callable[..., Any]) -> Any:
    """A part of a loop, put into it before types are known.

    A call costs about 30 ns, the counting of references to the arrays it is given; that is what a block of 64 elements
    takes altogether.
    """
    return njit(function, inline="always", nogil=True, error_model="numpy", boundscheck=False)


def _instruction(function: Callable[..., Any]) -> Any:
    """A part of a loop that is written in LLVM's own terms."""
    return intrinsic(function)


def _float_sum(function: Callable[..., Any]) -> Any:
    """A loop whose sums may be reordered, so that they vectorize."""
    return njit(function, nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


# ---- random numbers --------------------------------------------------------------------------------------------------


@_loop
def _mix(h):
    h = U32(h ^ (h >> U32(16)))
    h = U32(h * U32(0x7FEB352D))
    h = U32(h ^ (h >> U32(15)))
    h = U32(h * U32(0x846CA68B))
    return U32(h ^ (h >> U32(16)))


def _mix_int(h: int) -> int:
    h ^= h >> 16
    h = h * 0x7FEB352D & 0xFFFFFFFF
    h ^= h >> 15
    h = h * 0x846CA68B & 0xFFFFFFFF
    return h ^ h >> 16


def _fold(seed: int) -> Any:
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    return U32((_mix_int(low) + 0x9E3779B9 * _mix_int(high) + 0x85EBCA6B) & 0xFFFFFFFF)


# ---- grouped quantization --------------------------------------------------------------------------------------------


@_inlined
def _max_magnitude(bits, begin, m):
    top = I32(0)
    for j in range(m):
        top = max(top, I32(bits[At(begin + j)] & MAGNITUDE))
    return top


@_loop
def _ordered_extremes(bits, begin, m):
    """(min, max) of floats given as bits, mapped to integers that order as the floats do: this loop vectorizes.

    inf and NaN land outside (−NON_FINITE, NON_FINITE), so one pass also tells whether everything is finite.
    """
    low, high = I32(0x7FFFFFFF), I32(-0x7FFFFFFF - 1)
    for j in range(m):
        b = I32(bits[At(begin + j)])
        ordered = I32(b ^ I32(I32(b >> I32(31)) & MAGNITUDE))
        low = min(low, ordered)
        high = max(high, ordered)
    return low, high


@_loop
def _bits_of(ordered):
    return I32(ordered ^ I32(I32(ordered >> I32(31)) & MAGNITUDE))


@_float_sum
def _sum_of_squares(x, begin, m):
    total = 0.0
    for j in range(m):
        v = np.float64(x[At(begin + j)])
        total += v * v
    return total


@_float_sum
def _sum_of_magnitudes(x, begin, m):
    total = 0.0
    for j in range(m):
        total += np.float64(abs(x[At(begin + j)]))
    return total


@_loop
def _minmax_range(bits, group, low_bits, high_bits, first, last):
    for g in range(first, last):
        begin = g * group
        low, high = _ordered_extremes(bits, begin, min(group, bits.size - begin))
        if high >= NON_FINITE or low < -NON_FINITE:
            low_bits[g] = high_bits[g] = NAN_BITS
        else:
            low_bits[g] = _bits_of(low)
            high_bits[g] = _bits_of(high)


@_loop
def _code(x, low, inverse, offset, top):
    v = F32(F32(F32(x - low) * inverse) + offset)
    v = v if v > F32(0) else F32(0)  # NaN becomes 0
    return I32(v if v < top else top)


@_loop
def _uniform(i):
    return F32(F32(I32(_mix(i) >> U32(8))) * F32(2.0**-24))


@_loop
def _codes(x, begin, m, low, inverse, offset, top, q, to):
    """Nearest: ``offset`` holds the ½."""
    for j in range(m):
        q[At(to + j)] = U8(_code(x[At(begin + j)], low, inverse, offset, top))


@_loop
def _codes_stochastic(x, begin, m, low, inverse, offset, top, start, q, to):
    for j in range(m):
        shift = F32(offset + _uniform(U32(start + U32(j))))
        q[At(to + j)] = U8(_code(x[At(begin + j)], low, inverse, shift, top))


@_loop
def _nibbles(x, begin, half, low, inverse, offset, top, q, to):
    """Four bits, packed at once: element j and element j + half of the group in one byte."""
    for j in range(half):
        first = _code(x[At(begin + j)], low, inverse, offset, top)
        second = _code(x[At(begin + half + j)], low, inverse, offset, top)
        q[At(to + j)] = U8(first | I32(second << I32(4)))


@_loop
def _nibbles_stochastic(x, begin, half, low, inverse, offset, top, start, q, to):
    for j in range(half):
        shift = F32(offset + _uniform(U32(start + U32(j))))
        first = _code(x[At(begin + j)], low, inverse, shift, top)
        shift = F32(offset + _uniform(U32(start + U32(half + j))))
        second = _code(x[At(begin + half + j)], low, inverse, shift, top)
        q[At(to + j)] = U8(first | I32(second << I32(4)))


@_inlined
def _codes_sign(x, begin, m, finite, q):
    for j in range(m):
        q[j] = U8(finite) & U8(x[At(begin + j)] >= F32(0))


@_inlined
def _pack_plane(q, m, shift, width, codes, at):
    """``stride`` bytes at ``codes[at:]``; the scratch ``q`` has zeros behind element m up to a multiple of 8."""
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


@_inlined
def _unpack_plane(codes, at, m, shift, width, q):
    """The inverse; writes up to 7 elements behind element m."""
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


def _splat(builder: Any, scalar: Any) -> Any:
    """A vector of LANES equal elements."""
    vector = ir.VectorType(scalar.type, LANES)
    unset = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(unset, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, unset, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _neighbours(context: Any, builder: Any, array: Any, value: Any, index: Any) -> Any:
    """The place of LANES neighbours of an array, as that of one vector."""
    data = context.make_array(array)(context, builder, value).data
    vector = ir.VectorType(data.type.pointee, LANES)
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _prefetch(builder: Any, place: Any, ahead: int) -> None:
    """Ask for the cache line ``ahead`` bytes on, to be written."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    form = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    instruction = builder.module.declare_intrinsic("llvm.prefetch", (byte,), form)
    line = builder.gep(builder.bitcast(place, byte), [word(ahead)])
    builder.call(instruction, [line, word(1), word(3), word(1)])


@_instruction
def _lanes_of_values(typing, codes, at, down, mask, low, offset, step, weight, accumulate, out, begin):  # noqa: ARG001
    """What the last loop of ``_values`` does, for LANES elements: the compiler need not ask whether arrays overlap."""

    def generate(context, builder, signature, arguments):
        code_at = _neighbours(context, builder, signature.args[0], arguments[0], arguments[1])
        out_at = _neighbours(context, builder, signature.args[9], arguments[9], arguments[10])
        down, mask, low, offset, step, weight = (_splat(builder, scalar) for scalar in arguments[2:8])
        packed = builder.load(code_at)
        packed.align = 1
        code = builder.and_(builder.lshr(builder.zext(packed, ir.VectorType(ir.IntType(32), LANES)), down), mask)
        level = builder.fsub(builder.sitofp(code, ir.VectorType(ir.FloatType(), LANES)), offset)
        value = builder.fmul(weight, builder.fadd(low, builder.fmul(level, step)))
        _prefetch(builder, out_at, PAGE)
        old = builder.load(out_at)
        old.align = 4
        builder.store(builder.select(arguments[8], builder.fadd(old, value), value), out_at).align = 4
        return context.get_dummy_value()

    i32, f32 = types.int32, types.float32
    return types.void(codes, types.uintp, i32, i32, f32, f32, f32, f32, types.boolean, out, types.uintp), generate


@_inlined
def _values(codes, at, m, down, mask, low, offset, step, weight, accumulate, out, begin):
    """m values from the codes at bits ``down`` of the bytes ``codes[at:]``."""
    whole = m // LANES * LANES
    for j in range(0, whole, LANES):
        _lanes_of_values(codes, At(at + j), down, mask, low, offset, step, weight, accumulate, out, At(begin + j))
    for j in range(whole, m):
        code = (I32(codes[At(at + j)]) >> down) & mask
        value = F32(weight * F32(low + F32(F32(F32(code) - offset) * step)))
        out[At(begin + j)] = F32(out[At(begin + j)] + value) if accumulate else value


@_loop
def _quantize_range(x, x_bits, lows, steps, codes, bits, widths, group, scale, stochastic, fold, first, last):
    """Groups [first, last): header, then codes in ``q`` (one byte each), then the planes of ``q`` packed."""
    group_bytes = 0
    for w in widths:
        group_bytes += (group * w + 7) >> 3
    q = np.zeros(group + 8, np.uint8)
    pair = np.empty(2, np.float32)
    pair_bits = pair.view(np.int32)
    centre = (1 << (bits - 1)) - 1
    offset = F32(0) if scale == 0 else F32(centre)
    top = F32((1 << bits) - 1) if scale == 0 else F32(2 * centre)
    for g in range(first, last):
        begin = g * group
        m = min(group, x.size - begin)
        if m < group:
            q[m:] = 0
        low = F32(0)
        if scale == 0:
            ordered_low, ordered_high = _ordered_extremes(x_bits, begin, m)
            finite = ordered_high < NON_FINITE and ordered_low >= -NON_FINITE
            pair_bits[0] = _bits_of(ordered_low)
            pair_bits[1] = _bits_of(ordered_high)
            low = pair[0]
            step = F32(F32(pair[1] - low) / top)
        else:
            pair_bits[0] = _max_magnitude(x_bits, begin, m)
            finite = pair_bits[0] < NON_FINITE
            if scale == 1:
                step = F32(pair[0] / F32(centre))
            elif scale == 2:
                step = F32(np.sqrt(_sum_of_squares(x, begin, m)) / centre)
            else:
                step = F32(2.0 * _sum_of_magnitudes(x, begin, m) / m)
        if not finite:
            low = step = F32(np.nan)
        if scale == 0:
            lows[g] = low
        steps[g] = step
        inverse = F32(0) if step < TINY else F32(F32(1) / step)
        at = g * group_bytes
        start = U32(U32(begin) + fold)
        if bits == 4 and m & 1 == 0:
            if stochastic:
                _nibbles_stochastic(x, begin, m >> 1, low, inverse, offset, top, start, codes, at)
            else:
                _nibbles(x, begin, m >> 1, low, inverse, F32(offset + F32(0.5)), top, codes, at)
            continue
        if bits == 8:  # a code is a byte: no packing
            if stochastic:
                _codes_stochastic(x, begin, m, low, inverse, offset, top, start, codes, at)
            else:
                _codes(x, begin, m, low, inverse, F32(offset + F32(0.5)), top, codes, at)
            continue
        if scale == 3:
            _codes_sign(x, begin, m, finite, q)
        elif stochastic:
            _codes_stochastic(x, begin, m, low, inverse, offset, top, start, q, 0)
        else:
            _codes(x, begin, m, low, inverse, F32(offset + F32(0.5)), top, q, 0)
        shift = 0
        for w in widths:
            _pack_plane(q, m, shift, w, codes, at)
            at += (m * w + 7) >> 3
            shift += w


@_loop
def _dequantize_whole_range(lows, steps, codes, out, width, group, offset, weight, accumulate, first, last):
    """Groups [first, last) of codes of 1, 2, 4 or 8 bits: they are read where they are."""
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


@_loop
def _dequantize_planes_range(lows, steps, codes, out, widths, group, offset, weight, accumulate, first, last):
    """Groups [first, last) of codes in several planes, put together in ``q``."""
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
            _unpack_plane(codes, at, m, shift, w, q)
            at += (m * w + 7) >> 3
            shift += w
        _values(q, 0, m, I32(0), I32(255), low, offset, steps[g], weight, accumulate, out, begin)


def _sections(payload: Tensor, numel: int, group: int, scale: Scale) -> tuple[Array, Array, Array]:
    """(lows, steps, codes) as views of the payload."""
    groups = -(-numel // group)
    header = groups * (2 if scale == "minmax" else 1)
    floats = payload[: 4 * header].numpy().view(np.float32)
    lows = floats[:groups] if scale == "minmax" else floats[:0]
    return lows, floats[header - groups :], payload[4 * header :].numpy()


def group_minmax(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    groups = -(-x.numel() // group)
    low, high = torch.empty(groups), torch.empty(groups)
    arrays = x.numpy().view(np.int32), group, low.numpy().view(np.int32), high.numpy().view(np.int32)
    _spread(groups, x.numel(), lambda a, b: _minmax_range(*arrays, a, b))
    return low, high


def quantize_groups(
    x: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, stochastic: bool, seed: int = 0
) -> None:
    n = x.numel()
    lows, steps, codes = _sections(out, n, group, scale)
    widths = tuple(plane_widths(bits))
    used = sum(-(-group * w // 8) for w in widths) * (n // group) + sum(-(-(n % group) * w // 8) for w in widths)
    codes[used:] = 0
    values = x.numpy()
    bits_of_x = values.view(np.int32)
    form = bits, np.array(widths), group, _SCALES[scale], stochastic, _fold(seed)
    arguments = values, bits_of_x, lows, steps, codes, *form
    _spread(-(-n // group), n, lambda a, b: _quantize_range(*arguments, a, b))


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
    _spread(-(-n // group), n, lambda a, b: loop(*arguments, a, b))


# ---- selection -------------------------------------------------------------------------------------------------------


@_loop
def _kth_largest(bits, k):
    """(the k-th largest magnitude, how many of those equal to it belong to the k largest).

    By a radix histogram (11 + 10 + 10 bits), without moving anything.
    """
    prefix = I32(0)
    wanted = k
    shift = 20
    width = 11
    histogram = np.empty(2048, np.int64)
    while True:
        histogram[:] = 0
        digit_mask = I32((1 << width) - 1)
        above = shift + width
        for i in range(bits.size):
            b = I32(bits[i] & MAGNITUDE)
            if above >= 31 or (b >> above) == (prefix >> above):
                histogram[(b >> shift) & digit_mask] += 1
        digit = (1 << width) - 1
        while histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        prefix |= I32(digit << shift)
        if shift == 0:
            return prefix, wanted
        width = 10
        shift -= 10


@_instruction
def _reaching(typing, bits, begin, threshold):  # noqa: ARG001 - they are types here
    """A word with a one for each of the BLOCK elements from ``begin`` on whose magnitude reaches the threshold."""

    def generate(context, builder, signature, arguments):
        i64, vector = ir.IntType(64), ir.VectorType(ir.IntType(32), LANES)
        thresholds = _splat(builder, arguments[2])
        word = ir.Constant(i64, 0)
        for at in range(0, BLOCK, LANES):  # wider vectors make LLVM put the word together bit by bit
            place = _neighbours(
                context, builder, signature.args[0], arguments[0], builder.add(arguments[1], ir.Constant(i64, at))
            )
            values = builder.load(place)
            values.align = 4
            magnitudes = builder.and_(values, ir.Constant(vector, [0x7FFFFFFF] * LANES))
            reached = builder.bitcast(builder.icmp_signed(">=", magnitudes, thresholds), ir.IntType(LANES))
            word = builder.or_(word, builder.shl(builder.zext(reached, i64), ir.Constant(i64, at)))
        return word

    return types.uint64(bits, types.uintp, types.int32), generate


@_instruction
def _lowest(typing, word):  # noqa: ARG001
    """The place of the lowest one in a word that is not zero."""

    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


# The two loops below treat the elements behind the last whole block by themselves: with a length that varies, the
# compiler makes the whole loop twice as slow.


@_inlined
def _survivors_of_block(bits, begin, threshold, found, kept, count):
    """Write the survivors' indices behind ``found[:count]`` and their bits behind ``kept[:count]``, while they are at
    hand; count on where there is no room.
    """
    word = _reaching(bits, At(begin), threshold)
    while word:
        if count < found.size:
            j = I32(begin + _lowest(word))
            found[At(count)] = j
            kept[At(count)] = bits[At(j)]
        word &= word - np.uint64(1)
        count += 1
    return count


@_inlined
def _survivors_of_rest(bits, begin, end, threshold, found, kept, count):
    for j in range(begin, end):
        if (bits[At(j)] & MAGNITUDE) >= threshold:
            if count < found.size:
                found[At(count)] = I32(j)
                kept[At(count)] = bits[At(j)]
            count += 1
    return count


@_inlined
def _swap_add(x, residual, begin, m):
    for j in range(m):
        old = residual[At(begin + j)]
        residual[At(begin + j)] = F32(old + x[At(begin + j)])
        x[At(begin + j)] = old


@_loop
def _survivors_range(bits, threshold, found, kept, first, last):
    """What in blocks [first, last) has a magnitude ≥ threshold; the count goes on where ``found`` is full."""
    count = np.int64(0)
    whole = min(last, bits.size // BLOCK)
    for block in range(first, whole):
        count = _survivors_of_block(bits, block * BLOCK, threshold, found, kept, count)
    if whole < last:
        count = _survivors_of_rest(bits, whole * BLOCK, bits.size, threshold, found, kept, count)
    return count


@_loop
def _compensate_range(x, residual, residual_bits, threshold, found, kept, first, last):
    """Swap-add, the survivors of the sum, and its largest magnitude, block by block."""
    count = np.int64(0)
    top = I32(0)
    whole = min(last, x.size // BLOCK)
    for block in range(first, whole):
        begin = block * BLOCK
        _swap_add(x, residual, begin, BLOCK)
        top = max(top, _max_magnitude(residual_bits, begin, BLOCK))
        count = _survivors_of_block(residual_bits, begin, threshold, found, kept, count)
    if whole < last:
        begin, m = whole * BLOCK, x.size - whole * BLOCK
        _swap_add(x, residual, begin, m)
        top = max(top, _max_magnitude(residual_bits, begin, m))
        count = _survivors_of_rest(residual_bits, begin, x.size, threshold, found, kept, count)
    return count, top


@_loop
def _take_largest(found, kept, k, out, out_kept):
    """The k of ``found`` (sorted) with the largest magnitudes, ties to the lower index, sorted; their bits beside them.

    The outputs have room for k + 1.
    """
    threshold, ties = _kth_largest(kept, k)
    at = np.int64(0)
    for i in range(found.size):  # every one is written, and overwritten unless it is taken: no branch
        out[At(at)] = found[i]
        out_kept[At(at)] = kept[i]
        magnitude = kept[i] & MAGNITUDE
        tie = np.int64(magnitude == threshold) & np.int64(ties > 0)
        ties -= tie
        at += np.int64(magnitude > threshold) | tie


@_loop
def _strata(n, size, fold, first, last, out):
    """One position from each of the strata [first, last) of ``size`` equal ones over n elements."""
    whole, part = n // size, n % size
    low = first * n // size
    left = first * n % size
    for i in range(first, last):
        width = np.int64(whole)
        left += part
        if left >= size:
            left -= size
            width += 1
        draw = np.int64(_mix(U32(U32(i) + fold)))
        out[i - first] = I32(low + ((draw * width) >> 32))
        low += width


@_loop
def _sample_range(x, residual, size, fold, first, last, out):
    """Values [first, last) of the sample of x, or of residual + x where there is a residual."""
    at = np.empty(last - first, np.int32)
    _strata(x.size, size, fold, first, last, at)
    if residual.size:
        for i in range(at.size):
            out[first + i] = F32(residual[at[i]] + x[at[i]])
    else:
        for i in range(at.size):
            out[first + i] = x[at[i]]


@_loop
def _threshold_of_runs(x, residual, size, rank, fold):
    """The magnitude at that rank of a sample of runs of RUN neighbours, one from each of equal strata."""
    out = np.empty(size, np.float32)
    runs = -(-size // RUN)
    at = np.empty(runs, np.int32)
    _strata(x.size - RUN, runs, fold, 0, runs, at)
    for r in range(runs):
        for j in range(min(RUN, out.size - r * RUN)):
            value = x[At(at[r] + j)]
            out[At(r * RUN + j)] = F32(residual[At(at[r] + j)] + value) if residual.size else value
    return _kth_largest(out.view(np.int32), rank)[0]


@_loop
def _histogram_range(bits, prefix, shift, width, first, last):
    histogram = np.zeros(1 << width, np.int64)
    above = shift + width
    digit_mask = I32((1 << width) - 1)
    for i in range(first, last):
        b = I32(bits[i] & MAGNITUDE)
        if above >= 31 or (b >> above) == prefix:
            histogram[(b >> shift) & digit_mask] += 1
    return histogram


@_loop
def _take_exact(bits, threshold, ties, out):
    """All indices above the threshold and the first ``ties`` equal to it, sorted, into ``out`` (just large enough)."""
    at = 0
    for begin in range(0, bits.size, BLOCK):
        m = min(BLOCK, bits.size - begin)
        if _max_magnitude(bits, begin, m) < threshold:
            continue
        for j in range(m):
            b = I32(bits[At(begin + j)] & MAGNITUDE)
            if b > threshold or (b == threshold and ties > 0):
                ties -= b == threshold
                out[at] = I32(begin + j)
                at += 1


def _exact_topk(bits: Array, k: int) -> Array:
    """Top-k of anything: three histograms over the bits of the magnitude, then one pass that takes."""
    prefix, wanted = 0, k
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        above = I32(prefix >> (shift + width))
        digit = functools.partial(_histogram_range, bits, above, shift, width)
        parts = _spread(bits.size, bits.size, digit)
        reached = np.cumsum(np.sum(parts, axis=0)[::-1])
        down = int(np.searchsorted(reached, wanted))
        wanted -= int(reached[down - 1]) if down else 0
        prefix |= ((1 << width) - 1 - down) << shift
    out = np.empty(k, np.int32)
    _take_exact(bits, I32(prefix), wanted, out)
    return out


def _sampled_threshold(x: Array, residual: Array, k: int, seed: int, oversample: float) -> Any:
    """The magnitude (as bits) that about oversample·k elements of x (+ residual) should reach."""
    size, fold = sample_size(x.size, k), _fold(seed)
    sample = np.empty(size, np.float32)
    _spread(size, 8 * size, lambda a, b: _sample_range(x, residual, size, fold, a, b, sample))
    return _kth_largest(sample.view(np.int32), sample_rank(x.size, k, oversample))[0]


def _first_threshold(x: Array, residual: Array, k: int, seed: int, sampled: bool) -> Any:
    """The threshold to select k with."""
    size = sample_size(x.size, k)
    if sampled or x.size < 4 * size:
        return _sampled_threshold(x, residual, k, seed, OVERSAMPLE)
    # Which sample it is makes no difference to the result, so take the one that costs the fewest cache misses.
    return _threshold_of_runs(x, residual, size, sample_rank(x.size, k, OVERSAMPLE_OF_RUNS), _fold(seed))


def _room(k: int, n: int) -> int:
    """Survivors kept per thread: ample for any threshold that aims at 1.5·k or 2·k, and small beside the tensor."""
    return min(n, 3 * k + 1024)


class _Survivors(NamedTuple):
    """What one thread's range gave: how many there are, and as many of them as there was room for."""

    number: int
    found: Array
    kept: Array


def _survivors(room: int) -> tuple[Array, Array]:
    return np.empty(room, np.int32), np.empty(room, np.int32)


def _joined(parts: Sequence[_Survivors]) -> tuple[Array, Array] | None:
    """The survivors of all threads and their bits, sorted as the ranges are; None if a thread ran out of room."""
    if any(part.number > part.found.size for part in parts):
        return None
    cut = [(part.found[: part.number], part.kept[: part.number]) for part in parts]
    if len(cut) == 1:
        return cut[0]
    return np.concatenate([found for found, _ in cut]), np.concatenate([kept for _, kept in cut])


def _select_above(bits: Array, threshold: Any, k: int) -> tuple[Array, Array] | None:
    room = _room(k, bits.size)

    def work(first: int, last: int) -> _Survivors:
        arrays = _survivors(min(room, (last - first) * BLOCK))
        return _Survivors(_survivors_range(bits, threshold, *arrays, first, last), *arrays)

    return _joined(_spread(-(-bits.size // BLOCK), bits.size, work))


def _finish_topk(
    bits: Array, survivors: tuple[Array, Array] | None, k: int, seed: int, sampled: bool
) -> tuple[Array, Array]:
    """The largest k of the survivors, and their bits."""
    if survivors is not None and survivors[0].size < k and not sampled:
        values = bits.view(np.float32)  # a little too few: a lower threshold, from a sample that is more even
        survivors = _select_above(bits, _sampled_threshold(values, values[:0], k, seed, SECOND_OVERSAMPLE), k)
    if survivors is None or (survivors[0].size < k and not sampled):
        found = _exact_topk(bits, k)  # a sample says nothing here
        return found, bits[found]
    if survivors[0].size > k:
        out = _survivors(k + 1)
        _take_largest(*survivors, k, *out)
        return out[0][:k], out[1][:k]
    return survivors


def select_topk(x: Tensor, k: int, *, sampled: bool = False, seed: int = 0) -> Tensor:
    n = x.numel()
    if k == n:
        return torch.arange(n, dtype=torch.int32)
    values = x.numpy()
    bits = values.view(np.int32)
    survivors = _select_above(bits, _first_threshold(values, values[:0], k, seed, sampled), k)
    return torch.from_numpy(_finish_topk(bits, survivors, k, seed, sampled)[0])


def select_threshold(x: Tensor, value: float) -> Tensor:
    bits = x.numpy().view(np.int32)
    threshold = np.array([value], np.float32).view(np.int32)[0]

    def work(first: int, last: int) -> _Survivors:
        arrays = _survivors((last - first) * BLOCK // 16 + 1024)
        count = _survivors_range(bits, threshold, *arrays, first, last)
        if count > arrays[0].size:  # now the exact size is known
            arrays = _survivors(count)
            _survivors_range(bits, threshold, *arrays, first, last)
        return _Survivors(count, *arrays)

    survivors = _joined(_spread(-(-bits.size // BLOCK), bits.size, work))
    assert survivors is not None
    return torch.from_numpy(survivors[0])


def randomk_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    out = np.empty(k, np.int32)
    _strata(n, k, _fold(seed), 0, k, out)
    return torch.from_numpy(out).to(device)


#: A threshold that no finite magnitude reaches: compensation without selection.
_NEVER = np.int32(0x7FFFFFFF)


def _compensate(x: Array, residual: Array, threshold: Any, room: int) -> tuple[bool, list[_Survivors]]:
    bits = residual.view(np.int32)

    def work(first: int, last: int) -> tuple[int, _Survivors]:
        arrays = _survivors(min(room, (last - first) * BLOCK))
        count, top = _compensate_range(x, residual, bits, threshold, *arrays, first, last)
        return top, _Survivors(count, *arrays)

    parts = _spread(-(-x.size // BLOCK), x.size, work)
    return all(top < NON_FINITE for top, _ in parts), [survivors for _, survivors in parts]


def compensate(x: Tensor, residual: Tensor) -> bool:
    return _compensate(x.numpy(), residual.numpy(), _NEVER, 0)[0]


def compensate_select_topk(
    x: Tensor, residual: Tensor, k: int, *, sampled: bool = False, seed: int = 0
) -> tuple[bool, Tensor, Tensor]:
    finite, found, kept = _compensate_select(x.numpy(), residual.numpy(), k, sampled, seed)
    return finite, torch.from_numpy(found), torch.from_numpy(kept.view(np.float32))


def _compensate_select(x: Array, residual: Array, k: int, sampled: bool, seed: int) -> tuple[bool, Array, Array]:
    every = k == x.size
    threshold = _NEVER if every else _first_threshold(x, residual, k, seed, sampled)
    finite, parts = _compensate(x, residual, threshold, 0 if every else _room(k, x.size))
    bits = residual.view(np.int32)
    if every or not finite:
        return finite, np.arange(k, dtype=np.int32), bits[:k].copy()
    return True, *_finish_topk(bits, _joined(parts), k, seed, sampled)


@_loop
def _write_topk(found, kept, n, low_bits, values, indices, residual_bits):
    """A payload: the values, padded with zeros at the last index, and the indices. Those values leave the residual."""
    number = found.size
    at = found
    if number < values.size:
        at = np.full(values.size, I32(n - 1))
        at[:number] = found
    for i in range(number):
        values[At(i)] = kept[i]
    values[number:] = 0
    cut = (2 * values.size + 7) >> 3
    end = cut + ((values.size * low_bits + 7) >> 3)
    _elias_fano_encode(at, low_bits, indices[:cut], indices[cut:end])
    indices[end:] = 0
    if residual_bits.size:
        for i in range(number):
            residual_bits[At(found[i])] = 0


@_loop
def _encode_topk_whole(x, residual, k, low_bits, size, rank, fold, room, payload, subtract):
    """All of ``encode_topk`` on one thread, in one call. Returns 1 when the payload is written, 0 when something is not
    finite, −1 or −2 when the sample let too few or too many survive: the sums are then made, and what is large among
    them is still to be found.
    """
    bits = residual.view(np.int32)
    threshold = _threshold_of_runs(x, residual, size, rank, fold)
    found, kept = np.empty(room, np.int32), np.empty(room, np.int32)
    count, top = _compensate_range(x, residual, bits, threshold, found, kept, 0, -(-x.size // BLOCK))
    if top >= NON_FINITE:
        return 0
    if count < k or count > room:
        return -1 if count < k else -2
    found, kept = found[:count], kept[:count]
    if count > k:
        largest, theirs = np.empty(k + 1, np.int32), np.empty(k + 1, np.int32)
        _take_largest(found, kept, k, largest, theirs)
        found, kept = largest[:k], theirs[:k]
    values = payload[: 4 * k].view(np.int32)
    _write_topk(found, kept, x.size, low_bits, values, payload[4 * k :], bits if subtract else bits[:0])
    return 1


def encode_topk(
    x: Tensor,
    residual: Tensor,
    k: int,
    out: Tensor,
    *,
    sampled: bool = False,
    seed: int = 0,
    subtract: bool = False,
) -> bool:
    gradient, owed, payload = x.numpy(), residual.numpy(), out.numpy()
    n, bits = gradient.size, owed.view(np.int32)
    low_bits, size = elias_fano_low_bits(k, n), sample_size(n, k)
    if not sampled and n >= 4 * size and _threads(n) == 1:
        form = low_bits, size, sample_rank(n, k, OVERSAMPLE_OF_RUNS), _fold(seed), _room(k, n)
        done = _encode_topk_whole(gradient, owed, k, *form, payload, subtract)
        if done >= 0:
            return bool(done)
        found, kept = _finish_topk(bits, _survivors(0) if done == -1 else None, k, seed, sampled)
    else:
        finite, found, kept = _compensate_select(gradient, owed, k, sampled, seed)
        if not finite:
            return False
    values = payload[: 4 * k].view(np.int32)
    _write_topk(found, kept, n, low_bits, values, payload[4 * k :], bits if subtract else bits[:0])
    return True


@_loop
def _finite_range(bits, first, last):
    for begin in range(first, last, 4096):  # noqa: SIM110 - Numba compiles no generator
        if _max_magnitude(bits, begin, min(4096, last - begin)) >= NON_FINITE:
            return False
    return True


def all_finite(x: Tensor) -> bool:
    bits = x.numpy().view(np.int32)
    return all(_spread(bits.size, bits.size, lambda a, b: _finite_range(bits, a, b)))


@_loop
def _zero_range(bits, first, last):
    for begin in range(first, last, 4096):  # noqa: SIM110
        if _max_magnitude(bits, begin, min(4096, last - begin)) > 0:
            return False
    return True


def all_zero(x: Tensor) -> bool:
    bits = x.numpy().view(np.int32)
    return bool(_zero_range(bits, 0, bits.size))  # on one thread, as it usually ends soon


# ---- sparse vectors --------------------------------------------------------------------------------------------------


@_loop
def _accumulate_range(out, indices, values, weight, first, last):
    for i in range(first, last):
        out[indices[i]] += F32(weight * values[i])


@_loop
def _descends_or_leaves(indices, n):
    previous = I32(0)
    bad = False
    for i in range(indices.size):
        bad |= indices[i] < previous
        previous = indices[i]
    return bad or np.int64(previous) >= n


def check_indices(indices: Tensor, n: int) -> None:
    if indices.numel() and _descends_or_leaves(indices.numpy(), n):
        raise PayloadError(
            f"indices must be sorted and lie in [0, {n}); this payload is damaged or not for this tensor"
        )


def sparse_accumulate(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    at = indices.numpy()
    arrays = out.numpy(), at, values.numpy(), F32(weight)

    def behind_equals(cut: int) -> int:
        """Equal neighbours belong to one thread: a cut inside a run of them moves behind it."""
        return int(np.searchsorted(at, at[cut - 1], side="right")) if 0 < cut < at.size else cut

    def work(first: int, last: int) -> None:
        first, last = behind_equals(first), behind_equals(last)
        _accumulate_range(*arrays, first, last)

    _spread(at.size, 8 * at.size, work)


@_loop
def _sum_range(out, indices, values, bounds, shifts, weight, begin, end):
    """The parts indices[bounds[p] : bounds[p + 1]], one after the other, into out[begin:end], piece by piece.

    The values of part p are as many places further on in ``values`` as ``shifts[p]`` says.
    """
    at = np.empty(bounds.size - 1, np.int64)
    for p in range(at.size):
        at[p] = bounds[p]
        if begin:
            at[p] += np.searchsorted(indices[bounds[p] : bounds[p + 1]], begin)
    for first in range(begin, end, CACHED):
        last = min(first + CACHED, end)
        out[first:last] = F32(0)
        for p in range(at.size):
            i, stop, shift = at[p], bounds[p + 1], shifts[p]
            while i < stop and indices[At(i)] < last:
                out[At(indices[At(i)])] += F32(weight * values[At(i + shift)])
                i += 1
            at[p] = i


def sparse_sum(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], weight: float = 1.0) -> None:
    indices = np.concatenate([at.numpy() for at, _ in parts])
    values = np.concatenate([values.numpy() for _, values in parts])
    bounds = np.cumsum([0] + [at.numel() for at, _ in parts])
    _sum(out, indices, values, bounds, np.zeros(len(parts), np.int64), weight)


def _sum(out: Tensor, indices: Array, values: Array, bounds: Array, shifts: Array, weight: float) -> None:
    form = out.numpy(), indices, values, bounds, shifts, F32(weight)
    _spread(out.numel(), out.numel() + 8 * indices.size, lambda a, b: _sum_range(*form, a, b))


@_loop
def _elias_fano_encode(indices, low_bits, upper, lower):
    upper[:] = 0
    mask = np.int64((1 << low_bits) - 1)
    pending = np.int64(0)
    held = 0
    at = 0
    for i in range(indices.size):
        index = np.int64(indices[i])
        position = (index >> low_bits) + i
        upper[position >> 3] |= U8(1 << (position & 7))
        pending |= (index & mask) << held
        held += low_bits
        while held >= 8:
            lower[at] = U8(pending & 255)
            pending >>= 8
            held -= 8
            at += 1
    if held:
        lower[at] = U8(pending & 255)


@_instruction
def _word_at(typing, data, at):  # noqa: ARG001
    """Eight bytes from ``data[at:]``, the first in the lowest place, aligned or not."""

    def generate(context, builder, signature, arguments):
        place = builder.gep(context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]])
        word = builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()))
        word.align = 1
        if sys.byteorder == "big":
            return builder.bswap(word)
        return word

    return types.uint64(data, types.uintp), generate


@_inlined
def _word_or_rest(data, at):
    """The same, with zeros for what lies behind the end."""
    if at + 8 <= data.size:
        return _word_at(data, At(at))
    word = np.uint64(0)
    for byte in range(data.size - at):
        word |= np.uint64(data[At(at + byte)]) << np.uint64(8 * byte)
    return word


@_loop
def _elias_fano_decode(upper, lower, low_bits, n, out):
    """False unless the payload holds exactly ``out.size`` sorted indices below n, and no more."""
    mask = np.uint64((1 << low_bits) - 1)
    i = 0
    previous = np.int64(0)
    good = True
    for begin in range(0, upper.size, 8):
        word = _word_or_rest(upper, begin)
        while word:
            if i == out.size:
                return False
            bit = i * low_bits
            low = (_word_or_rest(lower, bit >> 3) >> np.uint64(bit & 7)) & mask
            index = ((np.int64(8 * begin - i) + np.int64(_lowest(word))) << low_bits) | np.int64(low)
            word &= word - np.uint64(1)
            good &= previous <= index < n
            out[At(i)] = I32(index)
            previous = index
            i += 1
    return good and i == out.size


def elias_fano_encode(indices: Tensor, n: int, out: Tensor) -> None:
    k = indices.numel()
    parts = out.numpy()
    cut = -(-2 * k // 8)
    _elias_fano_encode(indices.numpy(), elias_fano_low_bits(k, n), parts[:cut], parts[cut:])


def elias_fano_decode(payload: Tensor, k: int, n: int) -> Tensor:
    out = np.empty(k, np.int32)
    parts = payload.numpy()
    cut = -(-2 * k // 8)
    if k and not _elias_fano_decode(parts[:cut], parts[cut:], elias_fano_low_bits(k, n), n, out):
        raise _damaged(k, n)
    return torch.from_numpy(out)


def _damaged(k: int, n: int) -> PayloadError:
    return PayloadError(f"the Elias–Fano part does not hold {k} sorted indices below {n}: the payload is damaged")


@_loop
def _elias_fano_rows(rows, stride, low_bits, n, out, first, last):
    """Decode the indices that rows [first, last) hold behind their values; False if one is damaged."""
    k = out.shape[1]
    good = True
    for r in range(first, last):
        begin = r * stride + 4 * k
        cut = begin + ((2 * k + 7) >> 3)
        end = cut + ((k * low_bits + 7) >> 3)
        good &= _elias_fano_decode(rows[begin:cut], rows[cut:end], low_bits, n, out[r])
    return good


@_loop
def _sum_rows_whole(out, rows, count, stride, k, low_bits, weight):
    """All of ``sparse_sum_rows`` on one thread; False if a row is damaged."""
    indices = np.empty((count, k), np.int32)
    if not _elias_fano_rows(rows, stride, low_bits, out.size, indices, 0, count):
        return False
    row = np.arange(count + 1)
    shifts = row[:-1] * (stride // 4 - k)
    _sum_range(out, indices.reshape(-1), rows.view(np.float32), row * k, shifts, weight, 0, out.size)
    return True


def sparse_sum_rows(out: Tensor, payloads: Tensor, k: int, weight: float = 1.0) -> None:
    n, (count, width), stride = out.numel(), payloads.shape, payloads.stride(0)
    rows = payloads.as_strided(((count - 1) * stride + width,), (1,)).numpy()
    if _threads(n) == 1:
        if not _sum_rows_whole(out.numpy(), rows, count, stride, k, elias_fano_low_bits(k, n), F32(weight)):
            raise _damaged(k, n)
        return
    indices = np.empty((count, k), np.int32)
    form = rows, stride, elias_fano_low_bits(k, n), n, indices
    if not all(_spread(count, 8 * indices.size, lambda a, b: _elias_fano_rows(*form, a, b))):
        raise _damaged(k, n)
    row = np.arange(count + 1)
    _sum(out, indices.reshape(-1), rows.view(np.float32), row * k, row[:-1] * (stride // 4 - k), weight)


# ---- low rank --------------------------------------------------------------------------------------------------------


@_loop
def _product_range(p, q, out, weight, accumulate, first, last):
    """Rows [first, last) of weight · p·q, q of shape (r, m), some columns at a time: that piece of q stays in L2."""
    r, m = q.shape
    total = np.empty(min(m, COLUMNS), np.float32)
    for begin in range(0, m, COLUMNS):
        count = min(COLUMNS, m - begin)
        for i in range(first, last):
            for j in range(count):
                total[At(j)] = F32(p[i, 0] * q[0, At(begin + j)])
            k = 1
            while k + 4 <= r:  # four terms at a time, one after the other
                a, b, c, d = p[i, k], p[i, k + 1], p[i, k + 2], p[i, k + 3]
                for j in range(count):
                    t = F32(total[At(j)] + F32(a * q[k, At(begin + j)]))
                    t = F32(t + F32(b * q[k + 1, At(begin + j)]))
                    t = F32(t + F32(c * q[k + 2, At(begin + j)]))
                    total[At(j)] = F32(t + F32(d * q[k + 3, At(begin + j)]))
                k += 4
            while k < r:
                a = p[i, k]
                for j in range(count):
                    total[At(j)] = F32(total[At(j)] + F32(a * q[k, At(begin + j)]))
                k += 1
            if accumulate:
                for j in range(count):
                    out[i, At(begin + j)] += F32(weight * total[At(j)])
            else:
                for j in range(count):
                    out[i, At(begin + j)] = F32(weight * total[At(j)])


def low_rank_product(out: Tensor, p: Tensor, q: Tensor, *, weight: float = 1.0, accumulate: bool = False) -> None:
    n, r = p.shape
    matrix = out.view(n, -1).numpy()
    form = p.numpy(), np.ascontiguousarray(q.numpy().T), matrix, F32(weight), accumulate
    _spread(n, r * matrix.size // 2, lambda a, b: _product_range(*form, a, b))
