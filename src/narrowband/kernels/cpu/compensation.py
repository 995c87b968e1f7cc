"""Error feedback's update of a gradient on CPU, fused with the selection of what to send and the writing of the
payload.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

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
    max_magnitude,
    neighbours,
    splat,
)
from narrowband.kernels.cpu.selection import (
    BLOCK,
    NEVER,
    OVERSAMPLE_OF_RUNS,
    Survivors,
    finish_topk,
    first_threshold,
    joined,
    lowest,
    most_survivors,
    reaching,
    room_for,
    room_for_sample,
    survivors_of_rest,
    take_largest,
    threshold_of_runs,
)
from narrowband.kernels.cpu.sparse import write_sparse
from narrowband.kernels.cpu.threads import spread, threads_for
from narrowband.kernels.selection import sample_rank, sample_size
from narrowband.kernels.sparse import elias_fano_low_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]


@inlined
def _swap_add(x, residual, decay, begin, m):
    for j in range(m):
        old = residual[At(begin + j)]
        residual[At(begin + j)] = F32(F32(decay * old) + x[At(begin + j)])
        x[At(begin + j)] = old


@instruction
def _swap_add_block(typing, x, residual, decay, begin, threshold):  # noqa: ARG001 - they are types here
    """Run ``_swap_add`` on the BLOCK elements from ``begin`` on.

    Returns a word with a one for each sum whose magnitude reaches the threshold. In IR, the compiler need not check
    whether the arrays overlap, and nothing is read twice.
    """

    def generate(context, builder, signature, arguments):
        factor, level, i64 = splat(builder, arguments[2]), splat(builder, arguments[4]), ir.IntType(64)
        word = ir.Constant(i64, 0)
        for at in range(0, BLOCK, LANES):
            index = builder.add(arguments[3], ir.Constant(i64, at))
            places = [neighbours(context, builder, signature.args[k], arguments[k], index) for k in range(2)]
            gradient, old = values = [builder.load(place) for place in places]
            for value in values:
                value.align = 4
            total = builder.fadd(builder.fmul(factor, old), gradient)
            builder.store(old, places[0]).align = 4
            builder.store(total, places[1]).align = 4
            word = builder.or_(word, builder.shl(reaching(builder, total, level), ir.Constant(i64, at)))
        return word

    return types.uint64(x, residual, types.float32, types.uintp, types.int32), generate


@loop
def _compensate_range(x, residual, residual_bits, decay, threshold, found, kept, first, last):
    """Swap-add block by block; collect the sums that reach the threshold, and the largest magnitude among these."""
    count = np.int64(0)
    top = I32(0)
    whole = min(last, x.size // BLOCK)
    for block in range(first, whole):
        begin = block * BLOCK
        word = _swap_add_block(x, residual, decay, At(begin), threshold)
        while word:
            j = begin + lowest(word)
            bits = residual_bits[At(j)]
            top = max(top, I32(bits & MAGNITUDE))
            if count < found.size:
                found[At(count)] = I32(j)
                kept[At(count)] = bits
            word &= word - np.uint64(1)
            count += 1
    if whole < last:
        begin, m = whole * BLOCK, x.size - whole * BLOCK
        _swap_add(x, residual, decay, begin, m)
        top = max(top, max_magnitude(residual_bits, begin, m))
        count = survivors_of_rest(residual_bits, begin, x.size, begin, threshold, found, kept, count)
    return count, top


def _bits_of(below: float) -> Any:
    """Return the bits of a positive float32; those of infinity if it is larger."""
    return np.float32(min(below, np.inf)).view(np.int32)


def _compensate(
    x: Array, residual: Array, decay: float, threshold: Any, room: int, limit: Any = NON_FINITE
) -> tuple[bool, list[Survivors]]:
    bits = residual.view(np.int32)
    threshold = I32(min(threshold, limit))  # sums that are too large are among those that reach it

    def work(first: int, last: int) -> tuple[int, Survivors]:
        arrays = room_for(min(room, (last - first) * BLOCK))
        count, top = _compensate_range(x, residual, bits, F32(decay), threshold, *arrays, first, last)
        return top, Survivors(count, *arrays)

    parts = spread(-(-x.size // BLOCK), x.size, work)
    return all(top < limit for top, _ in parts), [survivors for _, survivors in parts]


def compensate(x: Tensor, residual: Tensor, *, decay: float = 1.0, below: float = math.inf) -> bool:
    return _compensate(x.numpy(), residual.numpy(), decay, NEVER, 0, _bits_of(below))[0]


def compensate_select_topk(
    x: Tensor, residual: Tensor, k: int, *, decay: float = 1.0, sampled: bool = False, seed: int = 0
) -> tuple[bool, Tensor, Tensor]:
    finite, found, kept = _compensate_select(x.numpy(), residual.numpy(), decay, k, sampled, seed)
    return finite, torch.from_numpy(found), torch.from_numpy(kept.view(np.float32))


def _compensate_select(
    x: Array, residual: Array, decay: float, k: int, sampled: bool, seed: int
) -> tuple[bool, Array, Array]:
    every = k == x.size
    threshold = NEVER if every else first_threshold(x, residual, k, seed, sampled, decay)
    finite, parts = _compensate(x, residual, decay, threshold, 0 if every else most_survivors(k, x.size))
    bits = residual.view(np.int32)
    if every or not finite:
        return finite, np.arange(k, dtype=np.int32), bits[:k].copy()
    return True, *finish_topk(bits, joined(parts), k, seed, sampled)


@loop
def _encode_topk_whole(
    x, residual, bits, decay, k, low_bits, rank, fold, room, sample, sample_bits, values, indices, subtract
):
    """Run all of ``encode_topk`` on one thread, in one call.

    Returns 1 if the payload is written, 0 if something is not finite, −1 or −2 if the sample let too few or too many
    elements survive. In the last two cases the sums are made, and the largest among them are still to be found.
    """
    threshold = I32(min(threshold_of_runs(x, residual, decay, rank, fold, sample, sample_bits), NON_FINITE))
    found, kept = np.empty(room, np.int32), np.empty(room, np.int32)
    blocks = (x.size + BLOCK - 1) // BLOCK
    count, top = _compensate_range(x, residual, bits, decay, threshold, found, kept, np.int64(0), blocks)
    if top >= NON_FINITE:
        return 0
    if count < k or count > room:
        return -1 if count < k else -2
    found, kept = found[:count], kept[:count]
    if count > k:
        largest, theirs = np.empty(k + 1, np.int32), np.empty(k + 1, np.int32)
        take_largest(found, kept, k, largest, theirs)
        found, kept = largest[:k], theirs[:k]
    write_sparse(found, kept, k, x.size, low_bits, values, indices, bits if subtract else bits[:0])
    return 1


def encode_topk(
    x: Tensor,
    residual: Tensor,
    k: int,
    out: Tensor,
    *,
    decay: float = 1.0,
    sampled: bool = False,
    seed: int = 0,
    subtract: bool = False,
) -> bool:
    gradient, errors, payload = x.numpy(), residual.numpy(), out.numpy()
    n, bits = gradient.size, errors.view(np.int32)
    low_bits, size = elias_fano_low_bits(k, n), sample_size(n, k)
    values, indices = payload[: 4 * k].view(np.int32), payload[4 * k :]
    if not sampled and n >= 4 * size and threads_for(n) == 1:
        form = low_bits, sample_rank(n, k, OVERSAMPLE_OF_RUNS), fold_seed(seed), most_survivors(k, n)
        sample = room_for_sample(size)
        done = _encode_topk_whole(gradient, errors, bits, F32(decay), k, *form, *sample, values, indices, subtract)
        if done >= 0:
            return bool(done)
        found, kept = finish_topk(bits, room_for(0) if done == -1 else None, k, seed, sampled)
    else:
        finite, found, kept = _compensate_select(gradient, errors, decay, k, sampled, seed)
        if not finite:
            return False
    write_sparse(found, kept, k, n, low_bits, values, indices, bits if subtract else bits[:0])
    return True


@loop
def _below_range(bits, limit, first, last):
    for begin in range(first, last, 4096):  # noqa: SIM110 - Numba compiles no generator
        if max_magnitude(bits, begin, min(4096, last - begin)) >= limit:
            return False
    return True


def all_finite(x: Tensor, *, below: float = math.inf) -> bool:
    bits, limit = x.numpy().view(np.int32), _bits_of(below)
    return all(spread(bits.size, bits.size, lambda a, b: _below_range(bits, limit, a, b)))


@instruction
def _difference_block(typing, x, base, out, begin, limit):  # noqa: ARG001 - they are types here
    """Compute ``out = x − base`` of the BLOCK elements from ``begin`` on.

    Returns a word with a one for each difference at or above the limit. In IR, the compiler need not check whether the
    arrays overlap, and nothing is read twice.
    """

    def generate(context, builder, signature, arguments):
        level, i64 = splat(builder, arguments[4]), ir.IntType(64)
        word = ir.Constant(i64, 0)
        for at in range(0, BLOCK, LANES):
            index = builder.add(arguments[3], ir.Constant(i64, at))
            places = [neighbours(context, builder, signature.args[k], arguments[k], index) for k in range(3)]
            values = [builder.load(place) for place in places[:2]]
            for value in values:
                value.align = 4
            difference = builder.fsub(*values)
            builder.store(difference, places[2]).align = 4
            word = builder.or_(word, reaching(builder, difference, level))
        return word

    return types.uint64(x, base, out, types.uintp, types.int32), generate


@loop
def _difference_range(x, base, out, out_bits, limit, first, last):
    word = np.uint64(0)
    whole = min(last, x.size // BLOCK)
    for block in range(first, whole):
        word |= _difference_block(x, base, out, At(block * BLOCK), limit)
    top = I32(0)
    if whole < last:
        begin, m = whole * BLOCK, x.size - whole * BLOCK
        for j in range(begin, x.size):
            out[At(j)] = F32(x[At(j)] - base[At(j)])
        top = max_magnitude(out_bits, begin, m)
    return word == 0 and top < limit


def difference(x: Tensor, base: Tensor, out: Tensor, *, below: float = math.inf) -> bool:
    arrays = x.numpy(), base.numpy(), out.numpy()
    bits, limit = arrays[2].view(np.int32), _bits_of(below)
    blocks = -(-bits.size // BLOCK)
    return all(spread(blocks, bits.size, lambda a, b: bool(_difference_range(*arrays, bits, limit, a, b))))


@instruction
def _take_difference_block(typing, x, base, begin):  # noqa: ARG001
    """Compute ``(x, base) ← (base, x − base)`` of the BLOCK elements from ``begin`` on.

    Returns a word with a one for each difference that is not finite.
    """

    def generate(context, builder, signature, arguments):
        i64 = ir.IntType(64)
        level = splat(builder, ir.Constant(ir.IntType(32), int(NON_FINITE)))
        word = ir.Constant(i64, 0)
        for at in range(0, BLOCK, LANES):
            index = builder.add(arguments[2], ir.Constant(i64, at))
            places = [neighbours(context, builder, signature.args[k], arguments[k], index) for k in range(2)]
            now, before = [builder.load(place) for place in places]
            now.align = before.align = 4
            difference = builder.fsub(now, before)
            builder.store(before, places[0]).align = 4
            builder.store(difference, places[1]).align = 4
            word = builder.or_(word, reaching(builder, difference, level))
        return word

    return types.uint64(x, base, types.uintp), generate


@loop
def _take_difference_range(x, base, base_bits, first, last):
    word = np.uint64(0)
    whole = min(last, x.size // BLOCK)
    for block in range(first, whole):
        word |= _take_difference_block(x, base, At(block * BLOCK))
    top = I32(0)
    if whole < last:
        begin, m = whole * BLOCK, x.size - whole * BLOCK
        for j in range(begin, x.size):
            before = base[At(j)]
            base[At(j)] = F32(x[At(j)] - before)
            x[At(j)] = before
        top = max_magnitude(base_bits, begin, m)
    return word == 0 and top < NON_FINITE


def take_difference(x: Tensor, base: Tensor) -> bool:
    now, before = x.numpy(), base.numpy()
    bits = before.view(np.int32)
    blocks = -(-bits.size // BLOCK)
    return all(spread(blocks, 2 * bits.size, lambda a, b: bool(_take_difference_range(now, before, bits, a, b))))


def all_zero_each(xs: Sequence[Tensor]) -> list[bool]:
    return [all_zero(x) if x.dtype == torch.float32 else not bool(x.any()) for x in xs]


def all_zero(x: Tensor) -> bool:
    bits = x.numpy().view(np.int32)
    return bool(_below_range(bits, I32(1), 0, bits.size))  # on one thread: it usually ends soon
