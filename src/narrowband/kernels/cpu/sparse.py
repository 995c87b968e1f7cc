"""Sparse vectors on CPU: sums of them, and their indices as Elias–Fano writes them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from narrowband.errors import PayloadError
from narrowband.kernels import elias_fano_low_bits
from narrowband.kernels.cpu.loops import F32, I32, U8, At, inlined, instruction, loop
from narrowband.kernels.cpu.selection import lowest
from narrowband.kernels.cpu.threads import spread, threads_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]

#: Elements of an output that take part in several passes while they stay in L2.
CACHED = 1 << 16


@loop
def _accumulate_range(out, indices, values, weight, first, last):
    for i in range(first, last):
        out[indices[i]] += F32(weight * values[i])


@loop
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

    spread(at.size, 8 * at.size, work)


@loop
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
    spread(out.numel(), out.numel() + 8 * indices.size, lambda a, b: _sum_range(*form, a, b))


@loop
def write_elias_fano(indices, low_bits, upper, lower):
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


@instruction
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


@inlined
def _word_or_rest(data, at):
    """The same, with zeros for what lies behind the end."""
    if at + 8 <= data.size:
        return _word_at(data, At(at))
    word = np.uint64(0)
    for byte in range(data.size - at):
        word |= np.uint64(data[At(at + byte)]) << np.uint64(8 * byte)
    return word


@loop
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
            index = ((np.int64(8 * begin - i) + np.int64(lowest(word))) << low_bits) | np.int64(low)
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
    write_elias_fano(indices.numpy(), elias_fano_low_bits(k, n), parts[:cut], parts[cut:])


def elias_fano_decode(payload: Tensor, k: int, n: int) -> Tensor:
    out = np.empty(k, np.int32)
    parts = payload.numpy()
    cut = -(-2 * k // 8)
    if k and not _elias_fano_decode(parts[:cut], parts[cut:], elias_fano_low_bits(k, n), n, out):
        raise _damaged(k, n)
    return torch.from_numpy(out)


def _damaged(k: int, n: int) -> PayloadError:
    return PayloadError(f"the Elias–Fano part does not hold {k} sorted indices below {n}: the payload is damaged")


@loop
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


@loop
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
    if threads_for(n) == 1:
        if not _sum_rows_whole(out.numpy(), rows, count, stride, k, elias_fano_low_bits(k, n), F32(weight)):
            raise _damaged(k, n)
        return
    indices = np.empty((count, k), np.int32)
    form = rows, stride, elias_fano_low_bits(k, n), n, indices
    if not all(spread(count, 8 * indices.size, lambda a, b: _elias_fano_rows(*form, a, b))):
        raise _damaged(k, n)
    row = np.arange(count + 1)
    _sum(out, indices.reshape(-1), rows.view(np.float32), row * k, row[:-1] * (stride // 4 - k), weight)
