"""Sparse vectors in plain torch. K indices, L low bits of an index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.errors import PayloadError
from narrowband.kernels.reference import common
from narrowband.kernels.sparse import elias_fano_low_bits, elias_fano_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


__all__ = [
    "check_indices",
    "elias_fano_decode",
    "elias_fano_decode_all",
    "elias_fano_encode",
    "elias_fano_encode_all",
    "sparse_accumulate",
    "sparse_accumulate_all",
    "sparse_sum",
    "sparse_sum_all",
    "sparse_sum_rows",
]


def check_indices(indices: Tensor, n: int) -> None:
    if indices.numel() and (indices[0] < 0 or indices[-1] >= n or bool((indices[1:] < indices[:-1]).any())):
        raise PayloadError(f"indices must be sorted and in [0, {n}): the payload is damaged, or not for this tensor")


def sparse_accumulate(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    out.index_add_(0, indices, values * weight)


def sparse_accumulate_all(
    outs: Sequence[Tensor], indices: Sequence[Tensor], values: Sequence[Tensor], weight: float = 1.0
) -> None:
    for each in zip(outs, indices, values, strict=True):
        sparse_accumulate(*each, weight)


def sparse_sum(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], weight: float = 1.0) -> None:
    out.zero_()
    for indices, values in parts:
        sparse_accumulate(out, indices, values, weight)


def _bits_to_bytes(bits: Tensor) -> Tensor:
    """Pack zeros and ones (uint8) into bytes, eight each, the first in the lowest bit; zeros fill the last byte."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _bytes_to_bits(packed: Tensor) -> Tensor:
    """Undo :func:`_bits_to_bytes`: return eight zeros and ones (uint8) per byte."""
    return ((packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).view(-1)


def _low_bits_pieces(k: int, low_bits: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first index, last index, first byte, last byte) of runs of about CHUNK low bits; each starts at a byte."""
    run = max(common.CHUNK // (8 * max(low_bits, 1)), 1) * 8
    for first in range(0, k, run):
        last = min(first + run, k)
        yield first, last, first * low_bits // 8, -(-last * low_bits // 8)


def elias_fano_encode(indices: Tensor, n: int, out: Tensor) -> None:
    k = indices.numel()
    if k == 0:
        return
    low_bits = elias_fano_low_bits(k, n)
    cut = -(-2 * k // 8)
    upper = torch.zeros(2 * k, dtype=torch.uint8, device=indices.device)
    upper[(indices >> low_bits).long() + torch.arange(k, dtype=torch.int64, device=indices.device)] = 1
    out[:cut] = _bits_to_bytes(upper)
    shifts_L = torch.arange(low_bits, dtype=torch.int32, device=indices.device)
    for first, last, begin, end in _low_bits_pieces(k, low_bits):
        bits_KL = (indices[first:last, None] >> shifts_L) & 1
        out[cut + begin : cut + end] = _bits_to_bytes(bits_KL.to(torch.uint8).view(-1))


def elias_fano_encode_all(indices: Sequence[Tensor], ns: Sequence[int], outs: Sequence[Tensor]) -> None:
    for each in zip(indices, ns, outs, strict=True):
        elias_fano_encode(*each)


def elias_fano_decode(payload: Tensor, k: int, n: int) -> Tensor:
    indices = torch.empty(k, dtype=torch.int32, device=payload.device)
    if k == 0:
        return indices
    damaged = PayloadError(f"the Elias–Fano part does not hold {k} sorted indices below {n}: the payload is damaged")
    low_bits = elias_fano_low_bits(k, n)
    cut = -(-2 * k // 8)
    positions = _bytes_to_bits(payload[:cut]).nonzero().view(-1)
    if positions.numel() != k:
        raise damaged
    upper = positions.sub_(torch.arange(k, dtype=torch.int64, device=payload.device))
    if upper[-1] << low_bits >= n:
        raise damaged
    shifts_L = torch.arange(low_bits, dtype=torch.int32, device=payload.device)
    for first, last, begin, end in _low_bits_pieces(k, low_bits):
        bits = _bytes_to_bits(payload[cut + begin : cut + end])[: (last - first) * low_bits].to(torch.int32)
        lower = (bits.view(last - first, low_bits) << shifts_L).sum(1, dtype=torch.int64)
        indices[first:last] = (upper[first:last] << low_bits) | lower
    if indices[-1] >= n or bool((indices[1:] < indices[:-1]).any()):
        raise damaged
    return indices


def sparse_sum_rows(out: Tensor, payloads: Tensor, k: int, weight: float = 1.0) -> None:
    n, cut = out.numel(), 4 * k
    end = cut + elias_fano_nbytes(k, n)
    parts = [(elias_fano_decode(row[cut:end], k, n), row[:cut].view(torch.float32)) for row in payloads]
    sparse_sum(out, parts, weight)


def sparse_sum_all(
    outs: Sequence[Tensor],
    payloads: Tensor,
    begins: Sequence[int],
    ks: Sequence[int],
    weight: float = 1.0,
    *,
    values: Sequence[Tensor] = (),
    accumulate: bool = False,
) -> None:
    for at, (out, begin, k) in enumerate(zip(outs, begins, ks, strict=True)):
        n, head = out.numel(), begin + (0 if values else 4 * k)
        parts = [elias_fano_decode(row[head : head + elias_fano_nbytes(k, n)], k, n) for row in payloads]
        own = values[at] if values else payloads[:, begin:head].contiguous().view(torch.float32)
        if not accumulate:
            out.zero_()
        for indices, value in zip(parts, own, strict=True):
            sparse_accumulate(out, indices, value, weight)


def elias_fano_decode_all(
    payloads: Tensor, begins: Sequence[int], ks: Sequence[int], ns: Sequence[int]
) -> list[Tensor]:
    spans = [slice(begin, begin + elias_fano_nbytes(k, n)) for begin, k, n in zip(begins, ks, ns, strict=True)]
    return [
        torch.stack([elias_fano_decode(row[span], k, n) for row in payloads])
        for span, k, n in zip(spans, ks, ns, strict=True)
    ]
