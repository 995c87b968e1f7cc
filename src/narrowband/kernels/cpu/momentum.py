"""Momentum correction on CPU: velocity, accumulation and selection in one pass over three arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from narrowband.kernels.cpu.loops import (
    F32,
    I32,
    LANES,
    NON_FINITE,
    PAGE,
    At,
    fold_seed,
    inlined,
    instruction,
    loop,
    neighbours,
    prefetch,
    splat,
)
from narrowband.kernels.cpu.selection import (
    BLOCK,
    Survivors,
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
from narrowband.kernels.cpu.threads import spread
from narrowband.kernels.selection import sample_rank, sample_size

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]

#: How many elements per element wanted should reach the threshold of the next step, so that too few rarely do.
AHEAD = 1.5
#: The factor by which that threshold is lowered if it is not known how many would reach it.
LOWER = 0.98
#: One in so many elements may reach the threshold before a second pass is needed: sums grow fast in the first steps.
ROOM = 32


@inlined
def _corrected(now, before, i, momentum, nesterov):
    """Return the corrected sum after a step: the newest sum; Nesterov's variant adds momentum times its last change."""
    new = before[i]
    return F32(new + F32(momentum * F32(new - now[i]))) if nesterov else new


@inlined
def _advance_one(x, now, before, i, momentum, scale):
    oldest, old = before[i], now[i]
    before[i] = F32(old + F32(F32(momentum * F32(old - oldest)) + F32(scale * x[i])))
    x[i] = oldest


@instruction
def _advance_block(typing, x, now, before, begin, momentum, scale, nesterov, threshold):  # noqa: ARG001 - they are types here
    """Run ``_advance_one`` on the BLOCK elements from ``begin`` on.

    Returns a word with a one for each element whose ``_corrected`` reaches the threshold. In IR, the compiler need not
    check whether the arrays overlap, and nothing is read twice.
    """

    def generate(context, builder, signature, arguments):
        x, now, before = zip(signature.args[:3], arguments[:3], strict=True)
        begin, momentum, scale, nesterov, threshold = arguments[3:]
        factor, gain, level = (splat(builder, scalar) for scalar in (momentum, scale, threshold))
        i64 = ir.IntType(64)
        word = ir.Constant(i64, 0)
        for at in range(0, BLOCK, LANES):
            index = builder.add(begin, ir.Constant(i64, at))
            places = [neighbours(context, builder, *array, index) for array in (x, now, before)]
            gradient, old, oldest = values = [builder.load(place) for place in places]
            for value in values:
                value.align = 4
            for place in places:
                prefetch(builder, place, PAGE)
            step = builder.fadd(builder.fmul(factor, builder.fsub(old, oldest)), builder.fmul(gain, gradient))
            new = builder.fadd(old, step)
            builder.store(new, places[2]).align = 4
            builder.store(oldest, places[0]).align = 4
            ahead = builder.fadd(new, builder.fmul(factor, builder.fsub(new, old)))
            reached = reaching(builder, builder.select(nesterov, ahead, new), level)
            word = builder.or_(word, builder.shl(reached, ir.Constant(i64, at)))
        return word

    form = x, now, before, types.uintp, types.float32, types.float32, types.boolean, types.int32
    return types.uint64(*form), generate


@loop
def _advance_range(x, now, before, momentum, scale, nesterov, threshold, found, kept, first, last):
    """Advance, and write the indices and values of the corrected sums that reach the threshold.

    Without room, elements are only counted. Returns the count, and whether all is finite: non-finite elements reach
    every threshold.
    """
    count = np.int64(0)
    finite = True
    limit = I32(threshold).view(np.float32)
    whole = min(last, x.size // BLOCK)
    for block in range(first, whole):
        begin = block * BLOCK
        word = _advance_block(x, now, before, At(begin), momentum, scale, nesterov, threshold)
        while word:
            i = At(begin + lowest(word))
            corrected = _corrected(now, before, i, momentum, nesterov)
            finite &= np.isfinite(corrected)
            if count < found.size:
                found[At(count)] = I32(i)
                kept[At(count)] = corrected
            word &= word - np.uint64(1)
            count += 1
    for j in range(whole * BLOCK, x.size if whole < last else 0):
        i = At(j)
        _advance_one(x, now, before, i, momentum, scale)
        corrected = _corrected(now, before, i, momentum, nesterov)
        finite &= np.isfinite(corrected)
        if not abs(corrected) < limit:  # true for NaN, too
            if count < found.size:
                found[At(count)] = I32(i)
                kept[At(count)] = corrected
            count += 1
    return count, finite


@loop
def _sample_range(x, now, before, momentum, scale, nesterov, size, fold, first, last, out):
    """Compute values [first, last) of a sample of the corrected sums after this step."""
    at = np.empty(last - first, np.int32)
    strata(x.size, size, fold, first, last, at)
    for i in range(at.size):
        j = At(at[i])
        old = now[j]
        step = F32(F32(momentum * F32(old - before[j])) + F32(scale * x[j]))
        new = F32(old + step)
        out[first + i] = F32(new + F32(momentum * F32(new - old))) if nesterov else new


@loop
def _corrected_range(now, before, momentum, out, first, last):
    for j in range(first, last):
        out[At(j)] = _corrected(now, before, At(j), momentum, True)


def momentum_topk(
    x: Tensor,
    now: Tensor,
    before: Tensor,
    k: int,
    *,
    momentum: float,
    nesterov: bool = False,
    scale: float = 1.0,
    threshold: float = 0.0,
    sampled: bool = False,
    seed: int = 0,
) -> tuple[bool, Tensor, Tensor, float]:
    gradient, last, new, n = x.numpy(), now.numpy(), before.numpy(), x.numel()
    m, gain = F32(momentum), F32(scale)
    room = max(most_survivors(k, n), n // ROOM) if (threshold > 0 or sampled) and k < n else 0
    level = np.float32(threshold).view(np.int32) if room else NON_FINITE
    if room and sampled:
        size, fold = sample_size(n, k), fold_seed(seed)
        sample, bits = room_for_sample(size)
        spread(
            size, 8 * size,
            lambda a, b: _sample_range(gradient, last, new, m, gain, nesterov, size, fold, a, b, sample),
        )  # fmt: skip
        level = min(kth_largest(bits, sample_rank(n, k))[0], NON_FINITE)  # non-finite sums have to reach it

    def work(first: int, stop: int) -> tuple[bool, Survivors]:
        found, kept = room_for(min(room, (stop - first) * BLOCK))
        count, finite = _advance_range(
            gradient, last, new, m, gain, nesterov, level, found, kept.view(np.float32), first, stop
        )
        return finite, Survivors(count, found, kept)

    parts = spread(-(-n // BLOCK), 2 * n, work)
    if not all(finite for finite, _ in parts):
        return False, *nothing(), threshold
    survivors = joined([part for _, part in parts]) if room else None
    bits = new.view(np.int32)
    if survivors is None or (
        survivors[0].size < k and not sampled
    ):  # no hint, or a bad one: look at all corrected sums
        if nesterov:
            corrected = np.empty(n, np.float32)
            spread(n, n, lambda a, b: _corrected_range(last, new, m, corrected, a, b))
            bits = corrected.view(np.int32)
        if k == n:
            everywhere = torch.arange(n, dtype=torch.int32, device="cpu")
            return True, everywhere, torch.from_numpy(bits.copy().view(np.float32)), 0.0
        survivors = look_again(bits, k, seed)
    if sampled:
        found, kept = finish_topk(bits, survivors, k, seed, sampled=True)
        return True, torch.from_numpy(found), torch.from_numpy(kept.view(np.float32)), 0.0
    wanted, number = int(AHEAD * k), survivors[0].size
    hint = np.int32(kth_largest(survivors[1], min(wanted, number))[0]).view(np.float32)
    found, kept = finish_topk(bits, survivors, k, seed, sampled=False)
    values = torch.from_numpy(kept.view(np.float32))
    return True, torch.from_numpy(found), values, float(hint) * (1.0 if number >= wanted else LOWER)


@loop
def _forget(now, before, at, momentum, nesterov, masking, old):
    for i in range(at.size):
        j = At(at[i])
        old[i] = now[j]
        velocity = F32(0) if masking else F32(before[j] - now[j])
        sum_left = F32(-F32(momentum * velocity)) if nesterov else F32(0)  # makes the corrected sum zero
        before[j] = sum_left
        now[j] = F32(sum_left - velocity)


def forget(
    now: Tensor, before: Tensor, indices: Tensor, *, momentum: float, nesterov: bool = False, masking: bool = True
) -> Tensor:
    old = torch.empty(indices.numel(), dtype=torch.float32, device="cpu")
    _forget(now.numpy(), before.numpy(), indices.numpy(), F32(momentum), nesterov, masking, old.numpy())
    return old
