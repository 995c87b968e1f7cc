"""Quantization with ranges that many rows share, on CPU."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

from narrowband.kernels.cpu.elements import (
    FLOATS,
    INTS,
    array_at,
    array_of,
    floats_at,
    put,
    store_lanes,
    value_of,
)
from narrowband.kernels.cpu.extremes import (
    HIGHEST,
    LOWEST,
    PER_THREAD,
    cut_of,
    extremes_of,
    form_of,
    learn_ranges,
    lines_of,
    looked_at,
    no_extremes,
    row_extremes,
    take_in,
    to_floats,
    together,
    widen,
    widen_each,
)
from narrowband.kernels.cpu.loops import (
    F32,
    I32,
    LANES,
    U8,
    U32,
    At,
    fold_seed,
    folded,
    inlined,
    instruction,
    loop,
    mix,
    neighbours,
    splat,
    variant,
)
from narrowband.kernels.cpu.threads import spread, threads_for
from narrowband.kernels.reference.rows import affine_rows
from narrowband.kernels.rows import FEWEST_ZEROED, RAISE, TRIES

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    from narrowband.kernels.rows import Affine, Rows

    Array = npt.NDArray[Any]
    _Quantize = Callable[[Array, Array, int, int], None]

__all__ = [
    "code_ranges",
    "dequantize_rows",
    "learn_ranges",
    "quantize_rows",
    "quantize_rows_extremes",
    "quantize_rows_learning",
    "row_extremes",
]

#: The smallest normal float: 1 / step is infinite or imprecise below it.
TINY = np.float32(2.0**-126)
_NOTHING = np.empty(0, np.int32)


@instruction
def _dequantize_lanes(typing, codes, at, down, mask, low, step, out, begin):  # noqa: ARG001
    """Decode LANES values from the codes at bits ``down`` of the bytes ``codes[at:]``. In IR, the compiler need not
    check whether arrays overlap.
    """

    def generate(context, builder, signature, arguments):
        down, mask, low, step = (splat(builder, scalar) for scalar in arguments[2:6])
        packed = builder.load(neighbours(context, builder, signature.args[0], arguments[0], arguments[1]))
        packed.align = 1
        code = builder.and_(builder.lshr(builder.zext(packed, INTS), down), mask)
        value = builder.fadd(low, builder.fmul(builder.sitofp(code, FLOATS), step))
        place = neighbours(context, builder, signature.args[6], arguments[6], arguments[7])
        store_lanes(builder, place, signature.args[6].dtype, value)
        return context.get_dummy_value()

    i32, f32 = types.int32, types.float32
    return types.void(codes, types.uintp, i32, i32, f32, f32, out, types.uintp), generate


@functools.lru_cache(maxsize=1 << 12)
def _plan(rows: Rows, bits: int) -> tuple[int, tuple[int, int, int, int, int, int, int]]:
    """Return (number of elements, the integer arguments of the loops).

    These are: elements of a row, groups, rows of a part, the first row, the number of rows with elements, the number of
    ranges, and how many neighbouring groups share one range; see :func:`cut_of`.
    """
    cut, times = cut_of(rows, bits)
    return rows.numel, (*form_of(cut), 0, looked_at(cut), rows.parts * rows.groups, times)


def _each(ranges: Array, times: int) -> Array:
    """Repeat every number ``times`` times."""
    return ranges if times == 1 else np.repeat(ranges, times)


# ---- codes -----------------------------------------------------------------------------------------------------------


@inlined
def _code(x, low, inverse, shift, top):
    v = F32(F32(F32(x - low) * inverse) + shift)
    v = v if v > F32(0) else F32(0)
    return I32(v if v < top else top)


def _shift(i, fold):
    """Return what is added to element i before it is rounded down; ½ without a seed."""


@overload(_shift, inline="always")
def _(i, fold):  # noqa: ARG001
    if fold == types.none:
        return lambda i, fold: F32(0.5)  # noqa: ARG005
    return lambda i, fold: F32(F32(I32(mix(U32(U32(i) + fold)) >> U32(16))) * F32(2.0**-16))


@loop
def _quantize_singles(x, pitch, groups, per_part, lows, inverses, codes, width, fold, least, most, first, last):
    """``_quantize_range`` for rows of one element: neighbours in a line have neighbouring ranges."""
    top = F32((1 << width) - 1)
    r = first
    while r < last:
        group = r % groups
        count = min(groups - group, last - r)  # at most what is left of the line
        begin, at = r // groups * pitch + group, r // per_part * groups + group
        if least.size > 0:
            widen_each(x, begin, count, least, most, at)
        for j in range(count):
            code = _code(value_of(x, begin + j), lows[At(at + j)], inverses[At(at + j)], _shift(r + j, fold), top)
            codes[At(r + j)] = U8(code)
        r += count


@functools.cache
def _quantizer(width: int) -> Any:
    """Return the loop that makes codes of ``width`` bits. Each is compiled by itself: most programs need one or two."""

    def _quantize_range(x, pitch, inner, groups, per_part, lows, inverses, codes, fold, least, most, first, last):
        """Quantize rows [first, last). With room for them, ordered extremes are found, too: a row is then still in a
        cache when its codes are made.
        """
        watched = least.size > 0
        top = F32((1 << width) - 1)
        stride = (inner * width + 7) >> 3
        part, inside = first // per_part, first % per_part
        group, line = first % groups, first // groups
        for r in range(first, last):
            begin, to = line * pitch + group * inner, r * stride
            skipped = r * inner - begin  # random numbers count elements, without the gaps
            at = At(part * groups + group)
            low, inverse = lows[at], inverses[at]
            if watched:
                widen(x, begin, inner, least, most, at)
            if width == 8:
                for j in range(inner):
                    i = begin + j
                    codes[At(to + j)] = U8(_code(value_of(x, i), low, inverse, _shift(i + skipped, fold), top))
            elif width == 4:
                half = inner - stride
                for j in range(half):
                    i = begin + j
                    k = i + stride
                    one = _code(value_of(x, i), low, inverse, _shift(i + skipped, fold), top)
                    two = _code(value_of(x, k), low, inverse, _shift(k + skipped, fold), top)
                    codes[At(to + j)] = U8(one | I32(two << I32(4)))
                for j in range(half, stride):
                    i = begin + j
                    codes[At(to + j)] = U8(_code(value_of(x, i), low, inverse, _shift(i + skipped, fold), top))
            else:
                full = max(0, inner - 3 * stride)
                for j in range(full):
                    i = begin + j
                    word = _code(value_of(x, i), low, inverse, _shift(i + skipped, fold), top)
                    i += stride
                    word |= I32(_code(value_of(x, i), low, inverse, _shift(i + skipped, fold), top) << I32(2))
                    i += stride
                    word |= I32(_code(value_of(x, i), low, inverse, _shift(i + skipped, fold), top) << I32(4))
                    i += stride
                    word |= I32(_code(value_of(x, i), low, inverse, _shift(i + skipped, fold), top) << I32(6))
                    codes[At(to + j)] = U8(word)
                for j in range(full, stride):
                    word = I32(0)
                    for p in range(4):
                        k = p * stride + j
                        if k < inner:
                            i = begin + k
                            one = _code(value_of(x, i), low, inverse, _shift(i + skipped, fold), top)
                            word |= I32(one << I32(2 * p))
                    codes[At(to + j)] = U8(word)
            group += 1
            if group == groups:
                group = 0
                line += 1
            inside += 1
            if inside == per_part:
                inside = 0
                part += 1

    return variant(_quantize_range, width)


@loop
def _dequantize_singles(codes, groups, per_part, lows, steps, out, width, first, last):
    """``_dequantize_range`` for rows of one element."""
    mask = I32((1 << width) - 1)
    r = first
    while r < last:
        group = r % groups
        count = min(groups - group, last - r)  # at most what is left of the line
        at = r // per_part * groups + group
        for j in range(count):
            code = I32(codes[At(r + j)]) & mask
            put(out, r + j, F32(lows[At(at + j)] + F32(F32(code) * steps[At(at + j)])))
        r += count


@loop
def _dequantize_range(codes, inner, groups, per_part, lows, steps, out, width, first, last):
    """Decode rows [first, last), one bit position after the other: codes of neighbours are in neighbouring bytes."""
    mask = I32((1 << width) - 1)
    stride = (inner * width + 7) >> 3
    part, inside = first // per_part, first % per_part
    group = inside % groups
    for r in range(first, last):
        begin, source = r * inner, r * stride
        at = At(part * groups + group)
        low, step = lows[at], steps[at]
        shift = 0
        while shift < 8:
            count = max(0, min(stride, r * inner + inner - begin))  # the last bits of short rows are unused
            whole = count // LANES * LANES
            for j in range(0, whole, LANES):
                _dequantize_lanes(codes, At(source + j), I32(shift), mask, low, step, out, At(begin + j))
            for j in range(whole, count):
                code = I32(I32(codes[At(source + j)]) >> I32(shift)) & mask
                put(out, begin + j, F32(low + F32(F32(code) * step)))
            begin += stride
            shift += width
        group += 1
        if group == groups:
            group = 0
        inside += 1
        if inside == per_part:
            inside = 0
            part += 1


@inlined
def _inverse(step):
    return F32(0) if step < TINY else F32(F32(1) / step)


@loop
def _invert(steps, inverses):
    for j in range(steps.size):
        inverses[At(j)] = _inverse(steps[At(j)])


def _inverses(steps: Array) -> Array:
    inverses = np.empty_like(steps)
    _invert(steps, inverses)
    return inverses


def _quantize(x: Tensor, out: Tensor, rows: Rows, low: Array, inverse: Array, bits: int, fold: Any) -> _Quantize:
    """Return a function that quantizes rows [first, last), given arrays for their extremes, or empty ones."""
    (lines, pitch), (inner, *form), codes = lines_of(x, rows), form_of(rows), out.numpy()
    if inner == 1:
        singles = lines, pitch, *form, low, inverse, codes, bits, fold
        return lambda least, most, first, last: _quantize_singles(*singles, least, most, first, last)
    loop, several = _quantizer(bits), (lines, pitch, inner, *form, low, inverse, codes, fold)
    return lambda least, most, first, last: loop(*several, least, most, first, last)


def _fold(stochastic: bool, seed: int) -> Any:
    return fold_seed(seed) if stochastic else None


@loop
def _settle(estimates, bits, symmetric, zeroed, ranges):
    """Compute low and step of every range; see :func:`narrowband.kernels.rows.code_ranges`."""
    lows, steps, words = ranges[0], ranges[1], ranges[1].view(np.int32)
    top, middle = F32((1 << bits) - 1), F32((1 << (bits - 1)) - 1)
    for g in range(lows.size):
        i = At(g)
        alpha, beta = estimates[0, i], estimates[1, i]
        high, step, zero = F32(alpha + beta), F32(alpha / top), F32(0)
        if symmetric:
            far = high if high > -beta or np.isnan(high) else F32(-beta)
            step, zero = F32(F32(F32(2) * far) / F32(F32(2) * middle)), middle
        elif zeroed and beta < F32(0) and high >= F32(0):
            below = min(F32(np.floor(F32(F32(F32(-beta) / alpha) * top))), top)
            above = F32(F32(top - F32(1)) - below)
            if F32(F32(-beta) * above) <= F32(high * below):
                step, zero = F32(F32(-beta) / below), below
            else:
                step, zero = F32(high / above), F32(below + F32(1))
        lows[i], steps[i] = beta, step
        if zero > F32(0):
            if step < TINY:
                steps[i] = F32(0)
            elif step < F32(np.inf):
                words[i] = I32(I32(words[i] + I32(0xFF)) & I32(~0xFF))
                for _ in range(TRIES - 1):
                    if F32(F32(zero * steps[i]) * F32(F32(1) / steps[i])) == zero:
                        break
                    words[i] = I32(words[i] + I32(RAISE))
            lows[i] = F32(-F32(zero * steps[i]))


def code_ranges(estimates: Tensor, *, bits: int, symmetric: bool, zeroed: bool) -> Tensor:
    ranges = torch.empty(estimates.shape, dtype=torch.float32, device=estimates.device)
    _settle(estimates.contiguous().numpy(), bits, symmetric, zeroed, ranges.numpy())
    return ranges


@loop
def _begin(estimates, bits, symmetric, ranges, each, times):
    """Compute low and step of every range.

    Also fill ``each``, for each of the ``times`` neighbours that share a range: low, one over the step, and empty
    extremes.
    """
    lows, inverses = each[0], each[1]
    least, most = each[2].view(np.int32), each[3].view(np.int32)
    _settle(estimates, bits, symmetric, bits >= FEWEST_ZEROED, ranges)
    for g in range(ranges.shape[1]):
        i = At(g)
        inverse = _inverse(ranges[1, i])
        for j in range(g * times, (g + 1) * times):
            k = At(j)
            lows[k], inverses[k] = ranges[0, i], inverse
            least[k], most[k] = HIGHEST, LOWEST


@loop
def _end(estimates, each, times, decay, rest, seen, learned):
    """Merge ordered extremes of ``times`` neighbours, turn them into floats, and let estimates learn from them."""
    least, most = each[2].view(np.int32), each[3].view(np.int32)
    low, high = seen[0].view(np.int32), seen[1].view(np.int32)
    for g in range(low.size):
        smallest, largest = HIGHEST, LOWEST
        for j in range(g * times, (g + 1) * times):
            smallest, largest = min(smallest, least[At(j)]), max(largest, most[At(j)])
        low[At(g)], high[At(g)] = smallest, largest
    to_floats(low, high)
    return take_in(estimates, seen[0], seen[1], decay, rest, learned)


@functools.cache
def _learner(width: int, half: bool) -> Any:
    """Return all of :func:`quantize_rows_learning` on one thread, as one call that takes addresses.

    Making an array of a tensor takes longer than the elements of a small tensor. Width 0 stands for rows of one
    element, with any width.
    """
    quantize, dtype = _quantizer(width) if width else _quantize_singles, np.int16 if half else np.int32

    def _learn_rows(
        x, pitch, inner, groups, per_part, first, last, size, times, bits, symmetric, estimates, codes, found, low,
        high, decay, drift,
    ):  # fmt: skip
        before, ranges = floats_at(estimates, 2, size), floats_at(found, 4, size)
        learned = np.empty((2, size), np.float32)
        each = np.empty((4, size * times), np.float32)
        lows, inverses = each[0], each[1]
        least, most = each[2].view(np.int32), each[3].view(np.int32)
        _begin(before, bits, symmetric, ranges[0:2], each, times)
        lines, to, fold = array_at(x, dtype), array_at(codes, np.uint8), folded(low, high)
        if width:
            quantize(lines, pitch, inner, groups, per_part, lows, inverses, to, fold, least, most, first, last)
        else:
            quantize(lines, pitch, groups, per_part, lows, inverses, to, bits, fold, least, most, first, last)
        finite, moved = _end(before, each, times, F32(decay), F32(1 - decay), ranges[2:4], learned)
        if finite and moved <= drift:
            for i in range(size):
                before[0, At(i)], before[1, At(i)] = learned[0, At(i)], learned[1, At(i)]
        return finite, moved

    return variant(_learn_rows, width, "bf16" if half else "float32")


def quantize_rows_learning(
    x: Tensor, out: Tensor, rows: Rows, estimates: Tensor, decay: float, *, bits: int, stochastic: bool, seed: int = 0,
    apart: int | None = None, drift: float = math.inf, symmetric: bool = False,
) -> tuple[Tensor, bool, float]:  # fmt: skip
    numel, plan = _plan(rows, bits)
    own = estimates.contiguous()
    found = own.new_empty((4, rows.parts * rows.groups))
    if threads_for(numel, PER_THREAD) == 1:
        if apart is None:
            apart = rows.groups * rows.inner if x.is_contiguous() else x.stride(0)
        halves = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF) if stochastic else (None, None)
        finite, moved = _learner(bits if plan[0] != 1 else 0, x.dtype is torch.bfloat16)(
            x.data_ptr(), apart, *plan, bits, symmetric, own.data_ptr(), out.data_ptr(), found.data_ptr(), *halves,
            float(decay), float(drift),
        )  # fmt: skip
    else:
        if apart is not None:
            x = x.detach().as_strided((rows.parts * rows.outer, rows.groups * rows.inner), (apart, 1))
        finite, moved = _learn_together(
            x, out, rows, own, found, decay, bits, symmetric, _fold(stochastic, seed), drift
        )
    if own is not estimates:
        estimates.copy_(own)
    return found, finite, moved


def _learn_together(
    x: Tensor,
    out: Tensor,
    rows: Rows,
    estimates: Tensor,
    found: Tensor,
    decay: float,
    bits: int,
    symmetric: bool,
    fold: Any,
    drift: float,
) -> tuple[bool, float]:
    """Run :func:`quantize_rows_learning` on several threads."""
    cut, times = cut_of(rows, bits)
    before, numbers = estimates.numpy(), found.numpy()
    each = np.empty((4, found.shape[1] * times), np.float32)
    _begin(before, bits, symmetric, numbers[:2], each, times)
    quantize = _quantize(x, out, cut, each[0], each[1], bits, fold)
    each[2:].view(np.int32)[:] = together(_watching(quantize, cut, rows.numel), 1)
    learned = np.empty_like(before)
    finite, moved = _end(before, each, times, F32(decay), F32(1 - decay), numbers[2:], learned)
    if finite and moved <= drift:
        before[:] = learned
    return finite, moved


def quantize_rows(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> None:
    quantize, cut, _ = _with(x, out, rows, low, step, bits, _fold(stochastic, seed))
    spread(cut.total, x.numel(), lambda a, b: quantize(_NOTHING, _NOTHING, a, b), least=PER_THREAD)


def quantize_rows_extremes(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    quantize, cut, times = _with(x, out, rows, low, step, bits, _fold(stochastic, seed))
    return extremes_of(_watching(quantize, cut, x.numel()), times)


def _with(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, bits: int, fold: Any
) -> tuple[_Quantize, Rows, int]:
    """Return (the function that makes codes with given ranges, the rows that it takes, how many of their neighbouring
    ranges are one); see :func:`cut_of`.
    """
    cut, times = cut_of(rows, bits)
    lows, inverses = (_each(ranges, times) for ranges in (low.numpy(), _inverses(step.numpy())))
    return _quantize(x, out, cut, lows, inverses, bits, fold), cut, times


def _watching(quantize: _Quantize, cut: Rows, numel: int) -> list[tuple[Array, Array]]:
    """Make all codes, and return the ordered extremes that each thread found."""

    def work(first: int, last: int) -> tuple[Array, Array]:
        found = no_extremes(cut)
        quantize(*found, first, last)
        return found

    return spread(looked_at(cut), numel, work, least=PER_THREAD)


@functools.cache
def _restorer(half: bool, single: bool) -> Any:
    """Return all of :func:`dequantize_rows` on one thread, as one call that takes addresses."""
    dtype = np.int16 if half else np.float32

    def _restore_rows(codes, out, ranges, inner, groups, per_part, first, last, size, times, width):
        both = floats_at(ranges, 2, size)
        if times > 1:
            each = np.empty((2, size * times), np.float32)
            for i in range(size):
                for j in range(i * times, (i + 1) * times):
                    each[0, At(j)], each[1, At(j)] = both[0, At(i)], both[1, At(i)]
            both = each
        packed, to = array_at(codes, np.uint8), array_at(out, dtype)
        if single:
            _dequantize_singles(packed, groups, per_part, both[0], both[1], to, width, first, last)
        else:
            _dequantize_range(packed, inner, groups, per_part, both[0], both[1], to, width, first, last)

    return variant(_restore_rows, "bf16" if half else "float32", "singles" if single else "rows")


def dequantize_rows(
    codes: Tensor, out: Tensor, rows: Rows, ranges: Tensor, *, bits: int, affine: Affine | None = None
) -> None:
    if affine is not None:
        affine_rows(dequantize_rows, codes, out, rows, ranges, affine, bits)
        return
    numel, plan = _plan(rows, bits)
    ranges = ranges.contiguous()
    if threads_for(numel, PER_THREAD) == 1:
        _restorer(out.dtype is torch.bfloat16, plan[0] == 1)(
            codes.data_ptr(), out.data_ptr(), ranges.data_ptr(), *plan, bits
        )
        return
    inner, groups, per_part, _, count, size, times = plan
    flat = ranges.numpy().reshape(-1)
    lows, steps = _each(flat[:size], times), _each(flat[size : 2 * size], times)
    packed, arrays = codes.numpy(), (groups, per_part, lows, steps, array_of(out), bits)

    def work(first: int, last: int) -> None:
        if inner == 1:
            _dequantize_singles(packed, *arrays, first, last)
        else:
            _dequantize_range(packed, inner, *arrays, first, last)

    spread(count, numel, work, least=PER_THREAD)
