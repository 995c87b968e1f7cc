"""Sparse vectors on CPU: their sums, and Elias–Fano encoding of their indices."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from narrowband.errors import PayloadError
from narrowband.kernels.cpu.loops import F32, I32, U8, At, inlined, instruction, loop
from narrowband.kernels.cpu.selection import lowest
from narrowband.kernels.cpu.threads import spread, threads_for
from narrowband.kernels.sparse import elias_fano_low_bits, elias_fano_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]

_NOTHING = np.empty(0, np.int32)
#: Elements of the output that stay in L2 during several passes.
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
        """Move a cut inside a run of equal indices behind the run, so that one thread handles all of it."""
        return int(np.searchsorted(at, at[cut - 1], side="right")) if 0 < cut < at.size else cut

    def work(first: int, last: int) -> None:
        first, last = behind_equals(first), behind_equals(last)
        _accumulate_range(*arrays, first, last)

    spread(at.size, 8 * at.size, work)


@loop
def _sum_range(out, indices, values, bounds, at, shifts, weight, begin, end):
    """Add the parts indices[bounds[p] : bounds[p + 1]], one after the other, to out[begin:end], piece by piece.

    ``at`` holds the progress in each part. The values of part p are ``shifts[p]`` places further on in ``values`` than
    its indices in ``indices``.
    """
    for p in range(at.size):
        low, high = bounds[p], bounds[p + 1]
        while begin and low < high:  # bisect for the first index ≥ ``begin``
            middle = (low + high) >> 1
            if indices[middle] < begin:
                low = middle + 1
            else:
                high = middle
        at[p] = low
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
    arrays, factor = (out.numpy(), indices, values, bounds), F32(weight)
    spread(
        out.numel(),
        out.numel() + 8 * indices.size,
        lambda a, b: _sum_range(*arrays, np.empty_like(shifts), shifts, factor, a, b),
    )


@instruction
def _put_word(typing, data, at, word):  # noqa: ARG001
    """Write eight bytes to ``data[at:]``, the lowest first, aligned or not."""

    def generate(context, builder, signature, arguments):
        data, at, word = arguments
        place = builder.gep(context.make_array(signature.args[0])(context, builder, data).data, [at])
        word = builder.bswap(word) if sys.byteorder == "big" else word
        builder.store(word, builder.bitcast(place, ir.IntType(64).as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(data, types.uintp, types.uint64), generate


@inlined
def _put_rest(data, at, word):
    """Do what ``_put_word`` does, as far as there is room."""
    for i in range(at, min(at + 8, data.size)):
        data[At(i)] = U8(word & np.uint64(255))
        word >>= np.uint64(8)


@inlined
def _write_elias_fano(indices, low_bits, upper, lower):
    """Write both parts, eight bytes at a time. Full words always fit, because more bits follow them."""
    upper[:] = 0
    mask = np.uint64((1 << low_bits) - 1)
    pending, ones = np.uint64(0), np.uint64(0)
    held, at, here = 0, 0, np.int64(0)
    for i in range(indices.size):
        index = np.uint64(indices[i])
        position = np.int64(index >> np.uint64(low_bits)) + i
        if position >> 6 != here:
            _put_word(upper, At(here << 3), ones)
            ones, here = np.uint64(0), position >> 6
        ones |= np.uint64(1) << np.uint64(position & 63)
        low = index & mask
        pending |= low << np.uint64(held)
        held += low_bits
        if held >= 64:
            _put_word(lower, At(at), pending)
            held, at = held - 64, at + 8
            pending = low >> np.uint64(low_bits - held)
    _put_rest(upper, here << 3, ones)
    _put_rest(lower, at, pending)


@loop
def write_sparse(found, kept, k, n, low_bits, values, indices, residual_bits):
    """Write a payload of k elements below n: their values, and their Elias–Fano indices.

    If fewer elements are found, index n − 1 with value zero fills up. With a residual, the elements are set to zero
    there. No values are written if ``values`` is empty.
    """
    number = found.size
    at = found
    if number < k:
        at = np.empty(k, np.int32)
        for i in range(k):
            at[At(i)] = found[At(i)] if i < number else I32(n - 1)
    for i in range(values.size):
        values[At(i)] = kept[At(i)] if i < number else I32(0)
    cut = (2 * k + 7) >> 3
    end = cut + ((k * low_bits + 7) >> 3)
    _write_elias_fano(at, low_bits, indices[:cut], indices[cut:end])
    for i in range(end, indices.size):
        indices[At(i)] = 0
    if residual_bits.size:
        for i in range(number):
            residual_bits[At(found[i])] = 0


@instruction
def _word_at(typing, data, at):  # noqa: ARG001
    """Read eight bytes from ``data[at:]``, the first as the lowest, aligned or not."""

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
    """Do what ``_word_at`` does, also near the end of data: bits above what is left are arbitrary. Data has eight bytes
    at least.
    """
    over = max(np.int64(0), at + 8 - data.size)
    return _word_at(data, At(at - over)) >> np.uint64(8 * over & 63)


@loop
def _elias_fano_rows(rows, stride, values, low_bits, n, k, out, first, last):
    """Decode the indices behind the values of each of the rows [first, last); ``values`` is the number of their bytes.

    Returns False unless each row has exactly k indices, sorted and below n.
    """
    mask = np.uint64((1 << low_bits) - 1)
    nbytes = (2 * k + 7) >> 3
    good = True
    for r in range(first, last):
        upper = r * stride + values
        lower, i, end = upper + nbytes, r * k, r * k + k
        previous = np.int64(0)
        for begin in range(0, nbytes, 8):
            word = _word_or_rest(rows, upper + begin)
            if nbytes - begin < 8:
                word &= (np.uint64(1) << np.uint64(8 * (nbytes - begin))) - np.uint64(1)
            while word:
                if i == end:
                    return False
                bit = (i - r * k) * low_bits
                low = (_word_or_rest(rows, lower + (bit >> 3)) >> np.uint64(bit & 7)) & mask
                index = ((np.int64(8 * begin - (i - r * k)) + np.int64(lowest(word))) << low_bits) | np.int64(low)
                word &= word - np.uint64(1)
                good &= previous <= index < n
                out[At(i)] = I32(index)
                previous = index
                i += 1
        good &= i == end
    return good


def elias_fano_encode(indices: Tensor, n: int, out: Tensor) -> None:
    k, at = indices.numel(), indices.numpy()
    write_sparse(at, at, k, n, elias_fano_low_bits(k, n), _NOTHING, out.numpy(), _NOTHING)


def elias_fano_encode_all(indices: Sequence[Tensor], ns: Sequence[int], outs: Sequence[Tensor]) -> None:
    for each in zip(indices, ns, outs, strict=True):
        elias_fano_encode(*each)


def elias_fano_decode(payload: Tensor, k: int, n: int) -> Tensor:
    out, row = np.empty(k, np.int32), payload.numpy()
    if row.size < 8:
        row = np.concatenate([row, np.zeros(8, np.uint8)])
    if k and not _elias_fano_rows(row, 0, 0, elias_fano_low_bits(k, n), n, k, out, 0, 1):
        raise _damaged(k, n)
    return torch.from_numpy(out)


def _damaged(k: int, n: int) -> PayloadError:
    return PayloadError(f"the Elias–Fano part does not hold {k} sorted indices below {n}: the payload is damaged")


@functools.lru_cache(maxsize=1 << 10)
def _layout_of_rows(count: int, k: int, stride: int) -> tuple[Array, Array]:
    """Return where the indices of each row begin in the array of all indices, and how much further its values lie."""
    row = np.arange(count + 1)
    return row * k, row[:-1] * (stride // 4 - k)


def sparse_sum_rows(out: Tensor, payloads: Tensor, k: int, weight: float = 1.0) -> None:
    n, (count, width), stride = out.numel(), payloads.shape, payloads.stride(0)
    rows = payloads.as_strided(((count - 1) * stride + width,), (1,)).numpy()  # a value and an index: eight bytes
    indices = np.empty(count * k, np.int32)
    form = rows, stride, 4 * k, elias_fano_low_bits(k, n), n, k, indices
    bounds, shifts = _layout_of_rows(count, k, stride)
    if threads_for(n) == 1:
        if not _elias_fano_rows(*form, 0, count):
            raise _damaged(k, n)
        values, at = rows.view(np.float32), np.empty_like(shifts)
        _sum_range(out.numpy(), indices, values, bounds, at, shifts, F32(weight), 0, n)
        return
    if not all(spread(count, 8 * indices.size, lambda a, b: _elias_fano_rows(*form, a, b))):
        raise _damaged(k, n)
    _sum(out, indices, rows.view(np.float32), bounds, shifts, weight)


def elias_fano_decode_all(
    payloads: Tensor, begins: Sequence[int], ks: Sequence[int], ns: Sequence[int]
) -> list[Tensor]:
    spans = [slice(begin, begin + elias_fano_nbytes(k, n)) for begin, k, n in zip(begins, ks, ns, strict=True)]
    return [
        torch.stack([elias_fano_decode(row[span], k, n) for row in payloads])
        for span, k, n in zip(spans, ks, ns, strict=True)
    ]
