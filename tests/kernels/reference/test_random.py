"""The random numbers that every loop uses."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowband.kernels.reference import common
from tests.kernels.reference.naive import (
    lean,
    naive_uniform,
    seeds,
)


@given(seed=seeds, begin=st.integers(0, 2**31 - 1))
@lean
def test_uniform_is_the_documented_hash(seed: int, begin: int) -> None:
    got = common.uniform(begin, begin + 5, seed, torch.device("cpu"))
    assert got.tolist() == [float(naive_uniform(i, seed)) for i in range(begin, begin + 5)]


def test_uniform_is_uniform() -> None:
    u = common.uniform(0, 1 << 20, 3, torch.device("cpu")).double()
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / u.numel())
    counts = torch.histc(u, 256, 0, 1)
    assert ((counts - 4096) ** 2 / 4096).sum() < 255 + 5 * math.sqrt(2 * 255)  # chi-squared, 255 degrees of freedom
