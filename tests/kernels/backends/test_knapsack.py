"""The knapsack: each backend against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.tables import cpu, reference

if TYPE_CHECKING:
    pass


@settings(max_examples=60)
@given(rows=st.integers(0, 6), items=st.integers(1, 5), capacity=st.integers(0, 40), seed=st.integers(0, 1000))
def test_the_cheapest_within_is_the_same(rows, items, capacity, seed):
    rng = np.random.default_rng(seed)
    cost = torch.from_numpy(rng.choice([0.0, 1.0, 2.5, 7.0, np.inf], (rows, items)))
    weight = torch.from_numpy(rng.integers(0, 20, (rows, items)).astype(np.int32))
    found = cpu.cheapest_within(cost, weight, capacity)
    assert torch.equal(found, reference.cheapest_within(cost, weight, capacity))
    if rows and (found >= 0).all():
        assert int(weight[torch.arange(rows), found.long()].sum()) <= capacity
