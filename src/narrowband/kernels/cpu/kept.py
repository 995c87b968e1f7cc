"""Error feedback on a residual that is stored in fewer bits, on CPU.

One pass reads gradient and residual, collects the large sums, stores the others in the residual and writes the old
residual into the gradient's memory. With 8 bits, 5 bytes per element are read and 2 written; a float32 residual in
between would add 16. Before it begins, the pass needs the threshold for large sums and the bound of the powers of two.
Both are estimated from a sample and are only certain after the pass. So the part of the gradient that is overwritten is
saved (*aside*) until then.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import overload

from narrowband.kernels.cpu.compensation import all_finite
from narrowband.kernels.cpu.elements import FLOATS, INTS, splat_int
from narrowband.kernels.cpu.loops import (
    F32,
    I32,
    LANES,
    MAGNITUDE,
    NON_FINITE,
    At,
    fold_seed,
    inlined,
    instruction,
    loop,
    splat,
)
from narrowband.kernels.cpu.selection import (
    AHEAD,
    BLOCK,
    OVERSAMPLE_OF_RUNS,
    RUN,
    Survivors,
    ask_for,
    finish_topk,
    joined,
    kth_largest,
    look_again,
    lowest,
    most_survivors,
    nothing,
    reaching,
    room_for,
    room_for_sample,
    strata,
)
from narrowband.kernels.cpu.stores import (
    keep_in_8,
    keep_in_16,
    keep_one,
    lanes_of_group,
    operation,
    power_of,
    power_of_lanes,
    rounded_lanes,
    unit_of,
)
from narrowband.kernels.cpu.threads import spread
from narrowband.kernels.kept import former_places, put_former, take_former
from narrowband.kernels.selection import OVERSAMPLE, sample_rank, sample_size
from narrowband.kernels.stores import STORE_GROUP

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]

assert BLOCK == STORE_GROUP  # the elements that are compared at once share a power of two

#: Blocks whose sums stay in L1 until the large ones have been collected.
_CHUNK = 32
#: Survivors of a block that are written without checking whether it has so many: that branch is often mispredicted.
_UNASKED = 3
_NONE = np.empty(0, np.int8)
_LAST = np.uint64(1 << 63)


def _kept(codes, unit, i):
    """Return element i of the residual."""


@overload(_kept, inline="always")
def _(codes, unit, i):  # noqa: ARG001
    def upper_half(codes, unit, i):  # noqa: ARG001
        return I32(I32(codes[At(i)]) << I32(16)).view(np.float32)

    def of_units(codes, unit, i):
        return F32(F32(codes[At(i)]) * unit)

    return upper_half if codes.dtype == types.int16 else of_units


def _unit(codes, exponents, group):
    """Return the power of two of a group; 1 for bfloat16, which has none."""


@overload(_unit, inline="always")
def _(codes, exponents, group):  # noqa: ARG001
    def nothing(codes, exponents, group):  # noqa: ARG001
        return F32(1)

    def power(codes, exponents, group):  # noqa: ARG001
        return unit_of(exponents, group)

    return nothing if codes.dtype == types.int16 else power


@inlined
def _sum(x, codes, unit, decay, i):
    return F32(F32(decay * _kept(codes, unit, i)) + x[At(i)])


@inlined
def _sum_at(x, codes, exponents, decay, i):
    return _sum(x, codes, _unit(codes, exponents, i // BLOCK), decay, i)


@instruction
def _keep_group(typing, x, codes, aside, buffer, slot, begin, unit, decay, threshold, most, folded):  # noqa: ARG001
    """Store the sums of the group from ``begin`` on, with a power of two of at most ``most``.

    Sums that reach the threshold are stored as zeros. All sums are written to ``slot`` of a buffer. The old residual is
    written to where the gradient was, and what it overwrites there is saved aside.

    Returns the power of two, and a word with a one for each sum that reaches the threshold.
    """

    def generate(context, builder, signature, arguments):
        x, codes, aside, buffer, slot, begin, unit, decay, threshold, most, folded = arguments
        unit, decay, level = (splat(builder, scalar) for scalar in (unit, decay, threshold))
        i32, i64 = ir.IntType(32), ir.IntType(64)
        x_at = lanes_of_group(context, builder, signature.args[0], x, begin)
        codes_at = lanes_of_group(context, builder, signature.args[1], codes, begin)
        gradient, own, sums = [], [], []
        for gradient_at, code_at in zip(x_at, codes_at, strict=True):
            gradient.append(builder.load(gradient_at))
            own.append(builder.load(code_at))
            gradient[-1].align, own[-1].align = 4, 1
            if own[-1].type.element.width == 16:
                kept = builder.bitcast(builder.shl(builder.zext(own[-1], INTS), splat_int(16)), FLOATS)
            else:
                kept = builder.fmul(builder.sitofp(builder.sext(own[-1], INTS), FLOATS), unit)
            sums.append(builder.fadd(builder.fmul(decay, kept), gradient[-1]))
        for total, place in zip(sums, lanes_of_group(context, builder, signature.args[3], buffer, slot), strict=True):
            builder.store(total, place).align = 4
        word, rest = ir.Constant(i64, 0), []
        for q, total in enumerate(sums):
            reached = reaching(builder, total, level)
            word = builder.or_(word, builder.shl(reached, ir.Constant(i64, q * LANES)))
            mask = builder.bitcast(builder.trunc(reached, ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))
            rest.append(builder.select(mask, ir.Constant(FLOATS, None), total))
        exponent = operation(builder, "llvm.smin.i32", i32, power_of_lanes(builder, sums), most)
        new = rounded_lanes(builder, rest, exponent, begin, folded, own[0].type)
        former = builder.bitcast(x_at[0], own[0].type.as_pointer())
        for q, (code, before, place) in enumerate(zip(new, own, codes_at, strict=True)):
            builder.store(code, place).align = 1
            builder.store(before, builder.gep(former, [i32(q)])).align = 1
        parts = own[0].type.element.width // 8
        data = context.make_array(signature.args[2])(context, builder, aside).data
        first = builder.mul(builder.lshr(begin, ir.Constant(i64, 6)), ir.Constant(i64, parts * LANES))
        aside_at = builder.bitcast(builder.gep(data, [first]), FLOATS.as_pointer())
        for q in range(parts):
            stored = builder.store(gradient[q], builder.gep(aside_at, [i32(q)]))
            stored.align = 64
            stored.set_metadata("nontemporal", builder.module.add_metadata([i32(1)]))  # rarely read again
        return context.make_tuple(builder, signature.return_type, (exponent, word))

    form = (
        x,
        codes,
        aside,
        buffer,
        types.uintp,
        types.uintp,
        types.float32,
        types.float32,
        types.int32,
        types.int32,
        types.uint32,
    )
    return types.Tuple((types.int32, types.uint64))(*form), generate


@loop
def _keep_range(x, codes, exponents, decay, aside, memory, threshold, most, folded, found, kept, first, last):
    """Store blocks [first, last) except the sums that reach the threshold.

    Returns how many these are, and the largest magnitude among them. Their indices and bits are written while there is
    room. ``memory`` is the memory of x, in elements of the type of codes.
    """
    count, top = np.int64(0), I32(0)
    whole = min(last, x.size // BLOCK)
    words, sums = np.empty(_CHUNK, np.uint64), np.empty(_CHUNK * BLOCK, np.float32)
    sum_bits, places = sums.view(np.int32), np.empty(_CHUNK * BLOCK + _UNASKED, np.int32)
    for chunk in range(first, last, _CHUNK):
        base, number = chunk * BLOCK, np.int64(0)
        stop = min(chunk + _CHUNK, whole)
        for block in range(chunk, stop):
            begin, unit = block * BLOCK, _unit(codes, exponents, block)
            exponent, words[At(block - chunk)] = _keep_group(
                x, codes, aside, sums, At(begin - base), At(begin), unit, decay, threshold, most, folded
            )
            if exponents.size:
                exponents[At(block)] = np.int8(exponent)
        for block in range(chunk, stop):
            word, slot = words[At(block - chunk)], (block - chunk) * BLOCK
            for _ in range(_UNASKED):
                places[At(number)] = I32(slot + lowest(word | _LAST))
                number += np.int64(word != 0)
                word &= word - np.uint64(1)
            while word:
                places[At(number)] = I32(slot + lowest(word))
                number += 1
                word &= word - np.uint64(1)
        if chunk + _CHUNK >= last and whole < last:  # a short block ends the tensor
            begin, unit, high = whole * BLOCK, _unit(codes, exponents, whole), I32(0)
            slot, m, width = begin - base, x.size - begin, aside.shape[1]
            for j in range(m):
                sums[At(slot + j)] = _sum(x, codes, unit, decay, begin + j)
                magnitude = I32(sum_bits[At(slot + j)] & MAGNITUDE)
                high = max(high, magnitude)
                places[At(number)] = I32(slot + j)
                number += np.int64(magnitude >= threshold)
            for j in range(min(m, width)):
                aside[whole, j] = x[At(begin + j)]
            exponent = min(power_of(high), most)
            for j in range(m):
                memory[At(begin * (memory.size // x.size) + j)] = codes[At(begin + j)]
                stays = I32(sum_bits[At(slot + j)] & MAGNITUDE) < threshold
                keep_one(codes, exponent, begin + j, sums[At(slot + j)] if stays else F32(0), True, folded)
            if exponents.size:
                exponents[At(whole)] = np.int8(exponent)
        for i in range(number):
            bits = sum_bits[At(places[At(i)])]
            top = max(top, I32(bits & MAGNITUDE))
            if count + i < found.size:
                found[At(count + i)] = I32(base + places[At(i)])
                kept[At(count + i)] = bits
        count += number
    return count, top


@loop
def _threshold_of_runs(x, codes, exponents, decay, rank, expected, fold, out, out_bits):
    """Do what :func:`.selection.threshold_of_runs` does for a float32 residual; also return the magnitude that k
    elements are expected to reach.
    """
    runs = (out.size + RUN - 1) // RUN
    at = np.empty(runs, np.int32)
    strata(x.size - RUN, runs, fold, np.int64(0), runs, at)
    for r in range(runs):
        ahead = np.int64(at[min(r + AHEAD, runs - 1)])
        ask_for(x, At(ahead))
        ask_for(x, At(ahead + RUN - 1))
        ask_for(codes, At(ahead))
        if exponents.size:
            ask_for(exponents, At(ahead // BLOCK))
        for j in range(min(RUN, out.size - r * RUN)):
            out[At(r * RUN + j)] = _sum_at(x, codes, exponents, decay, np.int64(at[r]) + j)
    return kth_largest(out_bits, rank)[0], kth_largest(out_bits, expected)[0]


@loop
def _sample_range(x, codes, exponents, decay, size, fold, first, last, out):
    """Compute sums [first, last) of a sample."""
    at = np.empty(last - first, np.int32)
    strata(x.size, size, fold, first, last, at)
    for i in range(at.size):
        out[At(first + i)] = _sum_at(x, codes, exponents, decay, np.int64(at[i]))


def _thresholds(arrays: tuple[Any, ...], n: int, k: int, seed: int, sampled: bool) -> tuple[Any, Any]:
    """Return (the magnitude, as bits, to select k elements with; the expected magnitude of the least selected)."""
    size, fold, expected = sample_size(n, k), fold_seed(seed), sample_rank(n, k, 1.0)
    sample = room_for_sample(size)
    if not sampled and n >= 4 * size:
        level, least = _threshold_of_runs(*arrays, sample_rank(n, k, OVERSAMPLE_OF_RUNS), expected, fold, *sample)
        return level, least
    spread(size, 8 * size, lambda a, b: _sample_range(*arrays, size, fold, a, b, sample[0]))
    return kth_largest(sample[1], sample_rank(n, k, OVERSAMPLE))[0], kth_largest(sample[1], expected)[0]


@loop
def _power_of(magnitude):
    return power_of(magnitude)


@loop
def _divide(found, kept, threshold, ties, chosen, chosen_kept, rest, rest_kept):
    """Move elements above the threshold, and the first ``ties`` equal to it, to one side, all others to the other side.

    Each side has room for one element more.
    """
    at, other = np.int64(0), np.int64(0)
    for i in range(found.size):  # without a branch: write each to both sides, and overwrite it where it does not belong
        chosen[At(at)] = rest[At(other)] = found[i]
        chosen_kept[At(at)] = rest_kept[At(other)] = kept[i]
        magnitude = kept[i] & MAGNITUDE
        tie = np.int64(magnitude == threshold) & np.int64(ties > 0)
        ties -= tie
        taken = np.int64(magnitude > threshold) | tie
        at += taken
        other += np.int64(1) - taken


@loop
def _put_back(codes, exponents, at, values, folded, first, last):
    """Store a few more elements, with the powers of two that their groups have."""
    for i in range(first, last):
        place = np.int64(at[At(i)])
        exponent = I32(exponents[At(place // BLOCK)]) if exponents.size else I32(0)
        keep_one(codes, exponent, place, values[At(i)], True, folded)


@loop
def _sums_range(x, codes, exponents, decay, out, first, last):
    for i in range(first, last):
        out[At(i)] = _sum_at(x, codes, exponents, decay, i)


_memory = threading.local()


def _aside(blocks: int, width: int) -> Array:
    """Return memory of this thread, aligned to cache lines. It is reused, because fresh memory is slow."""
    numel, line = blocks * width, 16
    held = getattr(_memory, "aside", None)
    if held is None or held.size < numel + line:
        held = _memory.aside = np.empty(numel + line, np.float32)
    first = -(held.ctypes.data // 4) % line
    aside: Array = held[first : first + numel].reshape(blocks, width)
    return aside


def compensate_kept(
    x: Tensor,
    codes: Tensor,
    exponents: Tensor | None,
    k: int,
    *,
    decay: float = 1.0,
    sampled: bool = False,
    seed: int = 0,
    rounding: int = 0,
) -> tuple[bool, Tensor, Tensor]:
    step = _Step(x, codes, exponents, F32(decay), rounding)
    if k == step.n:
        return step.with_all_sums(k, seed)
    threshold, likely = _thresholds(step.arrays, step.n, k, seed, sampled)
    threshold, most = I32(min(threshold, NON_FINITE)), step.power_of(likely)
    finite, survivors = step.keep(threshold, most, most_survivors(k, step.n))
    if not finite:
        step.undo()
        return False, *nothing()
    if survivors is None or (survivors[0].size < k and not sampled):
        step.undo()
        return step.with_all_sums(k, seed)
    found, kept = survivors
    rest, rest_kept = found[:0], kept[:0]
    if found.size > k:
        least, ties = kth_largest(kept, k)
        (found, kept), (rest, rest_kept) = room_for(k + 1), room_for(found.size - k + 1)
        _divide(*survivors, least, ties, found, kept, rest, rest_kept)
        found, kept, rest, rest_kept = found[:k], kept[:k], rest[:-1], rest_kept[:-1]
    else:
        least = (kept & MAGNITUDE).min()
    if step.power_of(least) != most:
        step.undo()
        step.keep(threshold, step.power_of(least), 0)
    step.put_back(rest, rest_kept)
    step.leave_powers()
    return True, torch.from_numpy(found), torch.from_numpy(kept.view(np.float32))


class _Step:
    """One call of :func:`compensate_kept`: the arguments of the loops, and what is needed to undo them."""

    def __init__(self, x: Tensor, codes: Tensor, exponents: Tensor | None, decay: Any, rounding: int) -> None:
        self.n = x.numel()
        self._x, self._codes, self._exponents, self._rounding = x, codes, exponents, rounding
        self._whole = codes.view(torch.int16) if exponents is None else codes
        self._blocks = -(-self.n // BLOCK)
        self._aside = _aside(self._blocks, BLOCK * codes.itemsize // 4)
        powers = _NONE if exponents is None else exponents.numpy()
        self.arrays = x.numpy(), self._whole.numpy(), powers, decay
        self._former = powers.copy()  # few: not worth waking threads

    def power_of(self, magnitude: Any) -> Any:
        """Return the bound of the groups' powers of two if this is the least selected magnitude."""
        return I32(0) if self._exponents is None else I32(_power_of(I32(min(magnitude, NON_FINITE - 1))))

    def keep(self, threshold: Any, most: Any, room: int) -> tuple[bool, tuple[Array, Array] | None]:
        """Store what is below the threshold. Returns whether all is finite, and the other elements if there is room."""
        memory, fold = self._x.view(self._whole.dtype).numpy(), fold_seed(self._rounding)

        def work(first: int, last: int) -> tuple[int, Survivors]:
            found, kept = room_for(min(room, (last - first) * BLOCK))
            form = self._aside, memory, threshold, most, fold, found, kept
            count, top = _keep_range(*self.arrays, *form, first, last)
            return top, Survivors(count, found, kept)

        parts = spread(self._blocks, self.n, work)
        return all(top < NON_FINITE for top, _ in parts), joined([part for _, part in parts])

    def undo(self) -> None:
        """Restore the gradient and the residual."""
        take_former(self._x, self._whole, None)
        gradient, _, powers, _ = self.arrays
        width = self._aside.shape[1]
        powers[:] = self._former
        whole = self.n // BLOCK
        gradient[: whole * BLOCK].reshape(whole, BLOCK)[:, :width] = self._aside[:whole]
        rest = gradient[whole * BLOCK :][:width]
        rest[:] = self._aside[whole:].reshape(-1)[: rest.size]

    def put_back(self, at: Array, bits: Array) -> None:
        """Store a few more sums."""
        form = *self.arrays[1:3], at, bits.view(np.float32), fold_seed(self._rounding)
        spread(at.size, at.size, lambda a, b: _put_back(*form, a, b))

    def leave_powers(self) -> None:
        """Write the old powers of two to where :func:`take_former` looks for them."""
        if self._exponents is not None:
            for memory, own in former_places(self._x, None, torch.from_numpy(self._former)):
                memory.numpy()[...] = own.numpy()

    def with_all_sums(self, k: int, seed: int) -> tuple[bool, Tensor, Tensor]:
        """Run the whole step with all sums in memory, for when a sample is no help."""
        sums = np.empty(self.n, np.float32)
        spread(self.n, self.n, lambda a, b: _sums_range(*self.arrays, sums, a, b))
        total, bits = torch.from_numpy(sums), sums.view(np.int32)
        if not all_finite(total):
            return False, *nothing()
        found = np.arange(k, dtype=np.int32)
        if k < self.n:
            found, _ = finish_topk(bits, look_again(bits, k, seed), k, seed, sampled=False)
        at, values = torch.from_numpy(found), torch.from_numpy(sums[found])
        put_former(self._x, self._codes, self._exponents)
        total[at] = values.abs().amin()  # bounds the power of two of groups with sent elements
        if self._exponents is None:
            keep_in_16(total, self._codes, seed=self._rounding)
        else:
            keep_in_8(total, self._codes, self._exponents, seed=self._rounding)
        self._codes[at] = 0
        return True, at, values
