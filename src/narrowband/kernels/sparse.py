"""Sparse vectors: sorted indices with values, their sums, and the encoding of indices in few bits.

**Elias–Fano** of k sorted indices below n: ``l`` = the smallest integer ≥ 0 with k·2**l ≥ n. First the upper part:
2k bits, little-endian within bytes, bit ``(index_i >> l) + i`` set for each i: ceil(2k / 8) bytes. Then the lower part:
the l low bits of each index one after the other, least significant first: ceil(k·l / 8) bytes. That is k·(2 + l) bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "check_indices",
    "elias_fano_decode",
    "elias_fano_decode_all",
    "elias_fano_encode",
    "elias_fano_encode_all",
    "elias_fano_low_bits",
    "elias_fano_nbytes",
    "sparse_accumulate",
    "sparse_accumulate_all",
    "sparse_sum",
    "sparse_sum_all",
    "sparse_sum_rows",
]


def elias_fano_low_bits(k: int, n: int) -> int:
    """Return the number of low bits per index: the smallest l ≥ 0 with k·2**l ≥ n (0 if there is nothing to store)."""
    return (-(-n // k) - 1).bit_length() if 0 < k < n else 0


def elias_fano_nbytes(k: int, n: int) -> int:
    """Return the bytes of k sorted indices below n: k·(2 + l) bits, each of the two parts rounded up to a byte."""
    if k == 0:
        return 0
    return -(-2 * k // 8) + -(-k * elias_fano_low_bits(k, n) // 8)


def check_indices(indices: Tensor, n: int) -> None:
    """Raise :class:`PayloadError` unless the int32 indices are in [0, n) and never descend."""
    backend_of(indices).check_indices(indices, n)


def sparse_accumulate(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    """``out[indices] += weight · values``. Indices are sorted (values at equal indices add up) and already checked."""
    backend_of(out).sparse_accumulate(out, indices, values, weight)


def sparse_accumulate_all(
    outs: Sequence[Tensor], indices: Sequence[Tensor], values: Sequence[Tensor], weight: float = 1.0
) -> None:
    """Apply :func:`sparse_accumulate` to several tensors, with no more GPU kernel launches than for one."""
    if outs:
        backend_of(outs[0]).sparse_accumulate_all(outs, indices, values, weight)


def sparse_sum(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], weight: float = 1.0) -> None:
    """``out = Σ weight · part``, each part as (indices, values) for :func:`sparse_accumulate`.

    The result has the same bits as setting ``out`` to zero and accumulating part by part.
    """
    backend_of(out).sparse_sum(out, parts, weight)


def sparse_sum_rows(out: Tensor, payloads: Tensor, k: int, weight: float = 1.0) -> None:
    """Apply :func:`sparse_sum` to payloads: rows of k float32 values each, then k indices as :func:`elias_fano_encode`
    writes them.

    ``payloads`` is uint8 of shape (parts, bytes), each row contiguous and beginning at a multiple of four bytes. Raises
    :class:`PayloadError` as :func:`elias_fano_decode` does, before anything is written.
    """
    backend_of(out).sparse_sum_rows(out, payloads, k, weight)


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
    """Apply :func:`sparse_sum_rows` to several tensors, with no more GPU kernel launches than for one.

    Args:
        outs: flat float32.
        payloads: (parts, bytes), uint8: each row holds one part of every tensor.
        begins: for each tensor, the byte of a row where its payload begins, a multiple of four.
        ks: for each tensor, the number of elements in a row.
        weight: as for :func:`sparse_sum`.
        values: if given, float32 of shape (parts, k), one per tensor, of equal strides: the values. Payloads are then
            indices alone.
        accumulate: whether the sums are added to what ``outs`` hold.
    """
    if outs:
        backend_of(payloads).sparse_sum_all(
            outs, payloads, begins, ks, weight, values=values, accumulate=accumulate
        )  # fmt: skip


def elias_fano_encode(indices: Tensor, n: int, out: Tensor) -> None:
    """Write k sorted indices below n into ``out`` (uint8, exactly :func:`elias_fano_nbytes` long)."""
    backend_of(indices).elias_fano_encode(indices, n, out)


def elias_fano_encode_all(indices: Sequence[Tensor], ns: Sequence[int], outs: Sequence[Tensor]) -> None:
    """Apply :func:`elias_fano_encode` to several lists of indices, with no more GPU kernel launches than for one."""
    if indices:
        backend_of(indices[0]).elias_fano_encode_all(indices, ns, outs)


def elias_fano_decode(payload: Tensor, k: int, n: int) -> Tensor:
    """Return the k indices (int32) in ``payload`` (uint8, exactly :func:`elias_fano_nbytes` long).

    Raises :class:`PayloadError` unless it holds exactly k indices, all below n, never descending.
    """
    return cast("Tensor", backend_of(payload).elias_fano_decode(payload, k, n))


def elias_fano_decode_all(
    payloads: Tensor, begins: Sequence[int], ks: Sequence[int], ns: Sequence[int]
) -> list[Tensor]:
    """Apply :func:`elias_fano_decode` to several lists in each row of bytes, with no more GPU kernel launches than for
    one.

    Args:
        payloads: (rows, bytes), uint8.
        begins: for each list, the byte of a row where it begins.
        ks: for each, the number of its indices.
        ns: for each, the number that all of its indices are below.

    Returns:
        For each list, its indices in every row: int32 of shape (rows, k).
    """
    return cast("list[Tensor]", backend_of(payloads).elias_fano_decode_all(payloads, begins, ks, ns))
