"""Selection against a stable sort."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.reference.naive import (
    f32,
    ints,
    lean,
    make,
    naive_magnitude,
    naive_strata,
    naive_topk,
    seeds,
    some_values,
)
from tests.kernels.tables import reference
from tests.thorough import thorough


@given(x=some_values(), share=st.floats(0, 1), levels=st.sampled_from([0, 3]))
@lean
def test_topk_is_a_stable_sort_by_magnitude(x: np.ndarray, share: float, levels: int) -> None:
    if levels:
        x = np.round(np.clip(np.nan_to_num(x), -4, 4) * levels).astype(f32)  # many ties
    k = round(share * x.size)
    assert ints(reference.select_topk(torch.from_numpy(x), k)) == naive_topk(x, k)


#: Elements, and how many are selected.
SIZES = [(1000, 1), (5000, 50), (5000, 2500), (5000, 4999), (20_000, 30), (3000, 3000)]


@pytest.mark.parametrize(
    ("kind", "n", "k"),
    [
        *(("normal", *size) for size in SIZES),
        *((kind, *size) for kind in ("equal", "non-finite") for size in SIZES[::2]),
        *thorough(*((kind, *size) for kind in ("equal", "non-finite") for size in SIZES[1::2])),
    ],
)
def test_sampled_topk_is_topk_of_what_passes_the_sampled_threshold(kind: str, n: int, k: int) -> None:
    x = make(kind, n, n + k)
    few = enough = 0
    for seed in (0, 1, 2**40 + 3):
        got = ints(reference.select_topk(torch.from_numpy(x), k, sampled=True, seed=seed))
        if k == n:
            assert got == list(range(n))
            continue
        size = min(n, max(1024, math.ceil(128 * n / k)))
        rank = min(size, math.ceil(1.3 * size * k / n))
        sample = sorted((naive_magnitude(x[i]) for i in naive_strata(n, size, seed)), reverse=True)
        survivors = [i for i in range(n) if naive_magnitude(x[i]) >= sample[rank - 1]]
        if len(survivors) < k:
            few += 1
            assert got == survivors
        else:
            enough += 1
            assert got == naive_topk(x, k)
    assert few + enough == 3 or k == n


@given(x=some_values(), value=st.floats(2.0**-10, 1024, width=32))
@lean
def test_threshold(x: np.ndarray, value: float) -> None:
    expected = [i for i, v in enumerate(x.tolist()) if math.isnan(v) or abs(v) >= value]
    assert ints(reference.select_threshold(torch.from_numpy(x), value)) == expected


def test_threshold_itself_passes() -> None:
    x = torch.tensor([0.5, -0.5, 0.49999997, float("nan"), float("-inf"), 0.0])
    assert ints(reference.select_threshold(x, 0.5)) == [0, 1, 3, 4]


@given(n=st.integers(1, 2**31 - 1), k=st.integers(1, 40), seed=seeds)
@lean
def test_randomk_takes_one_of_each_stratum(n: int, k: int, seed: int) -> None:
    k = min(k, n)
    got = ints(reference.randomk_indices(n, k, seed, torch.device("cpu")))
    assert got == naive_strata(n, k, seed)
    assert len(set(got)) == k
    assert got[0] >= 0
    assert got[-1] < n


def test_randomk_of_nothing_and_of_everything() -> None:
    assert ints(reference.randomk_indices(0, 0, 1, torch.device("cpu"))) == []
    assert ints(reference.randomk_indices(9, 9, 1, torch.device("cpu"))) == list(range(9))
