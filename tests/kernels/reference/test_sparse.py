"""Sparse vectors and Elias–Fano, bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.errors import PayloadError
from tests.kernels.reference.naive import (
    SIZES,
    elias_fano,
    f32,
    ints,
    lean,
    naive_elias_fano,
    naive_strata,
    pick,
    seeds,
)
from tests.kernels.tables import reference


def test_check_indices() -> None:
    for good in ([], [0], [4], [0, 0, 4, 4], [0, 1, 2, 3, 4]):
        reference.check_indices(torch.tensor(good, dtype=torch.int32), 5)
    for bad in ([-1], [5], [1, 0], [0, 5, 1], [-(2**31), 0], [0, 2**31 - 1], [3, 4, 2, 4]):
        with pytest.raises(PayloadError, match=r"sorted and in \[0, 5\)"):
            reference.check_indices(torch.tensor(bad, dtype=torch.int32), 5)


@given(n=st.sampled_from(SIZES[1:]), seed=st.integers(0, 999), weight=st.sampled_from([1.0, 0.25, -1 / 3]))
@lean
def test_sparse_accumulate_adds_every_neighbour(n: int, seed: int, weight: float) -> None:
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.integers(0, n, 200)).astype(np.int32)  # with repetitions
    values, out = rng.standard_normal(200).astype(f32), rng.standard_normal(n).astype(f32)
    expected = out.copy()
    for index, value in zip(indices, values, strict=True):
        expected[index] += f32(weight) * value
    got = torch.from_numpy(out)
    reference.sparse_accumulate(got, torch.from_numpy(indices), torch.from_numpy(values), weight)
    np.testing.assert_array_equal(got.numpy(), expected)


@given(n=st.one_of(st.sampled_from(SIZES[1:]), st.integers(1, 2**31 - 1)), share=st.floats(0, 1), seed=seeds)
@lean
def test_elias_fano_bit_by_bit(n: int, share: float, seed: int) -> None:
    k = max(1, round(share * min(n, 300)))
    indices = pick(n, k, seed) if n <= 5000 else naive_strata(n, k, seed)
    payload = elias_fano(indices, n)
    assert payload.numpy().tobytes() == naive_elias_fano(indices, n)
    assert ints(reference.elias_fano_decode(payload, k, n)) == indices


@given(n=st.integers(1, 2**31 - 1), k=st.integers(1, 2**31 - 1))
@lean
def test_elias_fano_takes_two_bits_and_the_low_ones(n: int, k: int) -> None:
    k = min(n, k)
    low = kernels.elias_fano_low_bits(k, n)
    assert k * 2**low >= n
    assert low == 0 or k * 2 ** (low - 1) < n
    assert kernels.elias_fano_nbytes(k, n) == math.ceil(2 * k / 8) + math.ceil(k * low / 8)


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_elias_fano_of_nothing_takes_nothing(n: int) -> None:
    assert elias_fano([], n).numel() == 0
    assert ints(reference.elias_fano_decode(torch.empty(0, dtype=torch.uint8), 0, n)) == []


@given(n=st.sampled_from([1, 5, 8, 9, 127, 1000, 10**6, 2**31 - 1]), k=st.integers(1, 60), seed=seeds)
@settings(max_examples=60, deadline=None)
def test_elias_fano_decoding_of_any_bytes_is_valid_or_refused(n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    payload = np.frombuffer(rng.bytes(kernels.elias_fano_nbytes(k, n)), np.uint8).copy()
    if seed % 2:  # exactly k ones in the upper part, so that the later checks are reached
        upper = np.zeros(8 * -(-2 * k // 8), np.uint8)
        upper[rng.choice(2 * k, k, replace=False)] = 1
        payload[: upper.size // 8] = np.packbits(upper, bitorder="little")
    try:
        indices = ints(reference.elias_fano_decode(torch.from_numpy(payload), k, n))
    except PayloadError:
        return
    assert len(indices) == k
    assert indices == sorted(indices)
    assert indices[0] >= 0
    assert indices[-1] < n


@given(n=st.sampled_from([10, 1000, 10**6]), k=st.integers(1, 40), where=st.integers(0, 10**6), seed=seeds)
@lean
def test_elias_fano_refuses_one_bit_more_or_less(n: int, k: int, where: int, seed: int) -> None:
    k = min(k, n)
    payload = elias_fano(naive_strata(n, k, seed), n)
    bit = where % (8 * -(-2 * k // 8))
    payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PayloadError, match=f"does not hold {k} sorted indices below {n}"):
        reference.elias_fano_decode(payload, k, n)


@given(n=st.sampled_from([9, 100, 1000]), k=st.integers(2, 7), where=st.integers(0, 999))
@lean
def test_elias_fano_refuses_an_index_that_is_too_large_or_descends(n: int, k: int, where: int) -> None:
    low = kernels.elias_fano_low_bits(k, n)
    assume(low > 0)
    cell = where % n >> low << low
    for wrong in ([cell + 1] + [cell] * (k - 1), [0] * (k - 1) + [n]):
        payload = torch.tensor(list(naive_elias_fano(wrong, n)), dtype=torch.uint8)
        with pytest.raises(PayloadError):
            reference.elias_fano_decode(payload, k, n)
