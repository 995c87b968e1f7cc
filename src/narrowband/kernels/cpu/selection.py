"""Selection of large elements on CPU: a threshold from a sample, one pass that collects the elements that reach it
(*survivors*), and the exact choice among these few.

Magnitudes are compared as integers. One word per block says which of its elements survive, before any of them is
handled. Survivors are stored with their bits, so that nothing is fetched twice.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types

from narrowband.kernels.cpu.elements import INTS, splat_int
from narrowband.kernels.cpu.loops import (
    F32,
    I32,
    LANES,
    MAGNITUDE,
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
from narrowband.kernels.cpu.threads import spread
from narrowband.kernels.selection import OVERSAMPLE, sample_rank, sample_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]

#: Elements that are compared with a threshold at once; the result is a word with one bit for each.
BLOCK = 64
#: Neighbours in a run of a sample: a random memory access costs more than reading 32 neighbours there.
RUN = 32
#: How many survivors per element wanted a sample of runs aims at. Neighbours are alike, so its threshold is less
#: certain; and if too few elements survive, a second pass over all is needed.
OVERSAMPLE_OF_RUNS = 1.5
#: How many survivors per element wanted the second pass aims at.
SECOND_OVERSAMPLE = 2.0
#: A threshold that no finite magnitude reaches: no selection.
NEVER = np.int32(0x7FFFFFFF)


#: The size of a histogram of magnitudes.
_BIN_BITS = 11
_BINS = 1 << _BIN_BITS


@inlined
def _bin_of(histogram, wanted):
    """Return the bin of the element of this rank, counted from the largest, and its rank within the bin."""
    digit = _BINS - 1
    while histogram[digit] < wanted:
        wanted -= histogram[digit]
        digit -= 1
    return digit, wanted


@loop
def kth_largest(bits, k):
    """Return (the k-th largest magnitude, how many elements equal to it belong to the k largest).

    A histogram over all magnitudes narrows them down to a few candidates, and further histograms narrow these down. If
    k is zero, no element is larger than the returned magnitude.
    """
    if k == 0:
        return MAGNITUDE, k
    low, high = MAGNITUDE, I32(0)
    for i in range(bits.size):
        magnitude = I32(bits[At(i)] & MAGNITUDE)
        low, high = min(low, magnitude), max(high, magnitude)
    shift = 0
    while I32(high - low) >> I32(shift) >= _BINS:
        shift += 1
    histogram = np.zeros(_BINS, np.int32)
    for i in range(bits.size):
        histogram[At(I32(I32(bits[At(i)] & MAGNITUDE) - low) >> I32(shift))] += I32(1)
    digit, wanted = _bin_of(histogram, k)
    low = I32(low + I32(digit << shift))
    rest = np.empty(histogram[digit] + 1 if shift else 1, np.int32)
    if shift:
        at = np.int64(0)
        for i in range(bits.size):  # without a branch: write each, and overwrite it unless it is in the bin
            above = I32(I32(bits[At(i)] & MAGNITUDE) - low)
            rest[At(at)] = above
            at += np.int64(above >= 0) & np.int64(above >> I32(shift) == 0)
    number = np.int64(rest.size - 1)
    while shift:
        shift = max(shift - _BIN_BITS, 0)
        histogram[:] = 0
        for i in range(number):
            histogram[At(rest[At(i)] >> I32(shift))] += I32(1)
        digit, wanted = _bin_of(histogram, wanted)
        begin = I32(digit << shift)
        low = I32(low + begin)
        at = np.int64(0)
        for i in range(number):
            above = I32(rest[At(i)] - begin)
            rest[At(at)] = above
            at += np.int64(above >= 0) & np.int64(above >> I32(shift) == 0)
        number = at
    return low, wanted


def reaching(builder: Any, values: Any, level: Any) -> Any:
    """In IR: return a word of LANES bits, one for each of these float32 whose magnitude is at least ``level``, given as
    bits.
    """
    magnitudes = builder.and_(builder.bitcast(values, INTS), splat_int(0x7FFFFFFF))
    reached = builder.bitcast(builder.icmp_signed(">=", magnitudes, level), ir.IntType(LANES))
    return builder.zext(reached, ir.IntType(64))


@instruction
def _reaching(typing, bits, begin, threshold):  # noqa: ARG001 - they are types here
    """Return a word with a one for each of the BLOCK elements from ``begin`` on that reaches the threshold."""

    def generate(context, builder, signature, arguments):
        i64 = ir.IntType(64)
        thresholds = splat(builder, arguments[2])
        word = ir.Constant(i64, 0)
        for at in range(0, BLOCK, LANES):  # with wider vectors, LLVM assembles the word bit by bit
            place = neighbours(
                context, builder, signature.args[0], arguments[0], builder.add(arguments[1], ir.Constant(i64, at))
            )
            values = builder.load(place)
            values.align = 4
            word = builder.or_(word, builder.shl(reaching(builder, values, thresholds), ir.Constant(i64, at)))
        return word

    return types.uint64(bits, types.uintp, types.int32), generate


@instruction
def lowest(typing, word):  # noqa: ARG001
    """Return the position of the lowest one in a word that is not zero."""

    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@inlined
def survivors_of_block(bits, begin, index, threshold, found, kept, count):
    """Write the survivors' indices behind ``found[:count]`` and their bits behind ``kept[:count]``.

    Without room, survivors are only counted. The element at ``begin`` has the index ``index``.
    """
    word = _reaching(bits, At(begin), threshold)
    while word:
        if count < found.size:
            j = I32(lowest(word))
            found[At(count)] = I32(index + j)
            kept[At(count)] = bits[At(begin + j)]
        word &= word - np.uint64(1)
        count += 1
    return count


@inlined
def survivors_of_rest(bits, begin, end, index, threshold, found, kept, count):
    for j in range(begin, end):
        if (bits[At(j)] & MAGNITUDE) >= threshold:
            if count < found.size:
                found[At(count)] = I32(index + j - begin)
                kept[At(count)] = bits[At(j)]
            count += 1
    return count


@loop
def _survivors_range(bits, threshold, found, kept, first, last):
    """Collect the elements of blocks [first, last) with a magnitude ≥ threshold; only count them once ``found`` is
    full.
    """
    count = np.int64(0)
    whole = min(last, bits.size // BLOCK)
    for block in range(first, whole):
        count = survivors_of_block(bits, block * BLOCK, block * BLOCK, threshold, found, kept, count)
    if whole < last:
        count = survivors_of_rest(bits, whole * BLOCK, bits.size, whole * BLOCK, threshold, found, kept, count)
    return count


@loop
def take_largest(found, kept, k, out, out_kept):
    """Write the k largest of ``found`` (sorted) to ``out``, sorted, ties to the lower index, and their bits to
    ``out_kept``.

    The outputs have room for k + 1. Returns the smallest magnitude taken, and whether all elements that reach it are
    taken.
    """
    threshold, wanted = kth_largest(kept, k)
    at, ties = np.int64(0), wanted
    equal = np.int64(0)
    for i in range(found.size):  # without a branch: write each, and overwrite it unless it is taken
        out[At(at)] = found[i]
        out_kept[At(at)] = kept[i]
        magnitude = kept[i] & MAGNITUDE
        same = np.int64(magnitude == threshold)
        tie = same & np.int64(ties > 0)
        equal += same
        ties -= tie
        at += np.int64(magnitude > threshold) | tie
    return threshold, equal == wanted


@loop
def strata(n, size, fold, first, last, out):
    """Write one position from each of the strata [first, last), of ``size`` equal strata over n elements."""
    whole, part = n // size, n % size
    low = first * n // size
    left = first * n % size
    for i in range(first, last):
        width = np.int64(whole)
        left += part
        if left >= size:
            left -= size
            width += 1
        draw = np.int64(mix(U32(U32(i) + fold)))
        out[i - first] = I32(low + ((draw * width) >> 32))
        low += width


@loop
def _sample_range(x, residual, decay, size, fold, first, last, out):
    """Write values [first, last) of the sample of x; of decay · residual + x if there is a residual."""
    at = np.empty(last - first, np.int32)
    strata(x.size, size, fold, first, last, at)
    if residual.size:
        for i in range(at.size):
            out[first + i] = F32(F32(decay * residual[at[i]]) + x[at[i]])
    else:
        for i in range(at.size):
            out[first + i] = x[at[i]]


#: How many runs ahead to prefetch: runs are at random places, which hardware prefetching does not predict.
AHEAD = 16


@instruction
def ask_for(typing, array, index):  # noqa: ARG001
    """Prefetch this element into the caches."""

    def generate(context, builder, signature, arguments):
        place = builder.gep(context.make_array(signature.args[0])(context, builder, arguments[0]).data, [arguments[1]])
        prefetch(builder, place, 0)
        return context.get_dummy_value()

    return types.void(array, types.uintp), generate


@loop
def threshold_of_runs(x, residual, decay, rank, fold, out, out_bits):
    """Return the magnitude (as bits) of this rank in a sample of runs of RUN neighbours, one from each of equal strata.

    The sample is written into ``out``, whose size is that of the sample.
    """
    runs = (out.size + RUN - 1) // RUN
    at = np.empty(runs, np.int32)
    strata(x.size - RUN, runs, fold, np.int64(0), runs, at)
    for r in range(runs):
        ahead = np.int64(at[min(r + AHEAD, runs - 1)])
        ask_for(x, At(ahead))
        ask_for(x, At(ahead + RUN - 1))
        if residual.size:
            ask_for(residual, At(ahead))
            ask_for(residual, At(ahead + RUN - 1))
        for j in range(min(RUN, out.size - r * RUN)):
            value = x[At(at[r] + j)]
            out[At(r * RUN + j)] = F32(F32(decay * residual[At(at[r] + j)]) + value) if residual.size else value
    return kth_largest(out_bits, rank)[0]


@loop
def _histogram_range(bits, prefix, shift, width, first, last):
    histogram = np.zeros(1 << width, np.int64)
    above = shift + width
    digit_mask = I32((1 << width) - 1)
    for i in range(first, last):
        b = I32(bits[i] & MAGNITUDE)
        if above >= 31 or (b >> above) == prefix:
            histogram[(b >> shift) & digit_mask] += 1
    return histogram


@loop
def _take_exact(bits, threshold, ties, out):
    """Write all indices above the threshold and the first ``ties`` equal to it, sorted, into ``out`` (just large
    enough).
    """
    at = 0
    for begin in range(0, bits.size, BLOCK):
        m = min(BLOCK, bits.size - begin)
        if max_magnitude(bits, begin, m) < threshold:
            continue
        for j in range(m):
            b = I32(bits[At(begin + j)] & MAGNITUDE)
            if b > threshold or (b == threshold and ties > 0):
                ties -= b == threshold
                out[at] = I32(begin + j)
                at += 1


def _exact_topk(bits: Array, k: int) -> Array:
    """Select the k largest of any data: three histograms over the bits of the magnitude, then one collecting pass."""
    prefix, wanted = 0, k
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        above = I32(prefix >> (shift + width))
        digit = functools.partial(_histogram_range, bits, above, shift, width)
        parts = spread(bits.size, bits.size, digit)
        reached = np.cumsum(np.sum(parts, axis=0)[::-1])
        down = int(np.searchsorted(reached, wanted))
        wanted -= int(reached[down - 1]) if down else 0
        prefix |= ((1 << width) - 1 - down) << shift
    out = np.empty(k, np.int32)
    _take_exact(bits, I32(prefix), wanted, out)
    return out


def _sampled_threshold(x: Array, residual: Array, k: int, seed: int, oversample: float, decay: float = 1.0) -> Any:
    """Return the magnitude (as bits) that about oversample·k elements of x (+ decay · residual) should reach."""
    size, fold = sample_size(x.size, k), fold_seed(seed)
    sample = np.empty(size, np.float32)
    spread(size, 8 * size, lambda a, b: _sample_range(x, residual, F32(decay), size, fold, a, b, sample))
    return kth_largest(sample.view(np.int32), sample_rank(x.size, k, oversample))[0]


def first_threshold(x: Array, residual: Array, k: int, seed: int, sampled: bool, decay: float = 1.0) -> Any:
    """Return the threshold for the first pass of selecting k elements."""
    size = sample_size(x.size, k)
    if sampled or x.size < 4 * size:
        return _sampled_threshold(x, residual, k, seed, OVERSAMPLE, decay)
    # The sample makes no difference to the result, so take the one with the fewest cache misses.
    return threshold_of_runs(
        x, residual, F32(decay), sample_rank(x.size, k, OVERSAMPLE_OF_RUNS), fold_seed(seed), *room_for_sample(size)
    )


def most_survivors(k: int, n: int) -> int:
    """Return the room for survivors per thread: ample for a threshold that aims at 1.5·k or 2·k, and small beside x."""
    return min(n, 3 * k + 1024)


class Survivors(NamedTuple):
    """The result of one thread's range: the number of survivors, and as many of them as there was room for."""

    number: int
    found: Array
    kept: Array


def nothing() -> tuple[Tensor, Tensor]:
    """Return empty indices and values."""
    return torch.empty(0, dtype=torch.int32, device="cpu"), torch.empty(0, dtype=torch.float32, device="cpu")


def room_for(room: int) -> tuple[Array, Array]:
    return np.empty(room, np.int32), np.empty(room, np.int32)


def room_for_sample(size: int) -> tuple[Array, Array]:
    """Return memory for a sample, as floats and as their bits."""
    values = np.empty(size, np.float32)
    return values, values.view(np.int32)


def joined(parts: Sequence[Survivors]) -> tuple[Array, Array] | None:
    """Join the survivors of all threads and their bits, in the order of ranges; None if a thread ran out of room."""
    if any(part.number > part.found.size for part in parts):
        return None
    cut = [(part.found[: part.number], part.kept[: part.number]) for part in parts]
    if len(cut) == 1:
        return cut[0]
    return np.concatenate([found for found, _ in cut]), np.concatenate([kept for _, kept in cut])


def _select_above(bits: Array, threshold: Any, k: int) -> tuple[Array, Array] | None:
    room = most_survivors(k, bits.size)

    def work(first: int, last: int) -> Survivors:
        arrays = room_for(min(room, (last - first) * BLOCK))
        return Survivors(_survivors_range(bits, I32(threshold), *arrays, first, last), *arrays)

    return joined(spread(-(-bits.size // BLOCK), bits.size, work))


def look_again(bits: Array, k: int, seed: int) -> tuple[Array, Array]:
    """Return at least k of the largest, and their bits: by a more even sample than one of runs, or else exactly."""
    values = bits.view(np.float32)
    survivors = _select_above(bits, _sampled_threshold(values, values[:0], k, seed, SECOND_OVERSAMPLE), k)
    if survivors is None or survivors[0].size < k:
        found = _exact_topk(bits, k)  # a sample is no help here
        return found, bits[found]
    return survivors


def finish_topk(
    bits: Array, survivors: tuple[Array, Array] | None, k: int, seed: int, sampled: bool
) -> tuple[Array, Array]:
    """Return the largest k of the survivors, and their bits."""
    if survivors is None:
        found = _exact_topk(bits, k)
        return found, bits[found]
    if survivors[0].size < k and not sampled:
        survivors = look_again(bits, k, seed)
    if survivors[0].size > k:
        out = room_for(k + 1)
        take_largest(*survivors, k, *out)
        return out[0][:k], out[1][:k]
    return survivors


def select_topk(x: Tensor, k: int, *, sampled: bool = False, seed: int = 0) -> Tensor:
    n = x.numel()
    if k == n:
        return torch.arange(n, dtype=torch.int32, device="cpu")
    values = x.numpy()
    bits = values.view(np.int32)
    survivors = _select_above(bits, first_threshold(values, values[:0], k, seed, sampled), k)
    return torch.from_numpy(finish_topk(bits, survivors, k, seed, sampled)[0])


def select_topk_all(xs: Sequence[Tensor], ks: Sequence[int]) -> list[Tensor]:
    return [select_topk(x, k) for x, k in zip(xs, ks, strict=True)]


@loop
def _topk_rows(x, bits, k, rank, fold, room, first, last, out, sample, sample_bits):
    """Select the k largest of each of the rows [first, last): by a threshold from a sample if a row is long enough for
    that to pay, else exactly.
    """
    width = x.shape[1]
    found, kept = np.empty(room, np.int32), np.empty(room, np.int32)
    taken, spare = np.empty(k + 1, np.int32), np.empty(k + 1, np.int32)
    for r in range(first, last):
        row, chosen = bits[r], out[r]
        count = np.int64(-1)
        if width >= 4 * sample.size:
            threshold = threshold_of_runs(x[r], x[r, :0], F32(1), rank, fold, sample, sample_bits)
            count = _survivors_range(row, threshold, found, kept, np.int64(0), -(-width // BLOCK))
        if k <= count <= room:
            take_largest(found[:count], kept[:count], k, taken, spare)
            for i in range(k):
                chosen[At(i)] = taken[At(i)]
        else:
            threshold, ties = kth_largest(row, k)
            _take_exact(row, threshold, ties, chosen)
        for i in range(k):
            chosen[At(i)] += I32(r * width)


def select_topk_rows(x: Tensor, k: int) -> Tensor:
    rows, width = x.shape
    out = np.empty((rows, k), np.int32)
    if out.size:
        values = x.numpy()
        size, rank = sample_size(width, k), sample_rank(width, k, OVERSAMPLE_OF_RUNS)
        work = functools.partial(
            _topk_rows, values, values.view(np.int32), k, rank, fold_seed(0), most_survivors(k, width)
        )
        spread(rows, x.numel(), lambda first, last: work(first, last, out, *room_for_sample(size)))
    return torch.from_numpy(out.reshape(-1))


def select_threshold(x: Tensor, value: float) -> Tensor:
    bits = x.numpy().view(np.int32)
    threshold = np.array([value], np.float32).view(np.int32)[0]

    def work(first: int, last: int) -> Survivors:
        arrays = room_for((last - first) * BLOCK // 16 + 1024)
        count = _survivors_range(bits, threshold, *arrays, first, last)
        if count > arrays[0].size:  # allocate again, as the exact size is known now
            arrays = room_for(count)
            _survivors_range(bits, threshold, *arrays, first, last)
        return Survivors(count, *arrays)

    survivors = joined(spread(-(-bits.size // BLOCK), bits.size, work))
    assert survivors is not None
    return torch.from_numpy(survivors[0])


def randomk_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    out = np.empty(k, np.int32)
    strata(n, k, fold_seed(seed), 0, k, out)
    return torch.from_numpy(out).to(device)
