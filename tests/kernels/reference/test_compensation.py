"""Error feedback in one pass against its parts."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.reference.naive import (
    ints,
    lean,
    make,
    seeds,
    some_values,
)
from tests.kernels.tables import reference


@given(x=some_values(), seed=st.integers(0, 99), decay=st.sampled_from([1.0, 0.75]))
@lean
def test_compensate_adds_swaps_and_can_be_undone(x: np.ndarray, seed: int, decay: float) -> None:
    owed = make("normal", x.size, seed)
    t, r = torch.from_numpy(x.copy()), torch.from_numpy(owed.copy())
    finite = reference.compensate(t, r, decay=decay)
    total = owed * np.float32(decay) + x
    np.testing.assert_array_equal(r.numpy(), total)
    assert finite == bool(np.isfinite(total).all())
    assert t.numpy().tobytes() == owed.tobytes()
    r.copy_(t)
    assert r.numpy().tobytes() == owed.tobytes()


def test_compensate_notices_a_sum_that_overflows() -> None:
    x, residual = torch.full((3,), 3e38), torch.tensor([0.0, 3e38, 0.0])
    assert not reference.compensate(x, residual)
    assert reference.all_finite(x)
    assert not reference.all_finite(residual)


@given(x=some_values(8), share=st.floats(0, 1), sampled=st.booleans(), seed=seeds)
@lean
def test_fused_compensation_is_its_two_parts(x: np.ndarray, share: float, sampled: bool, seed: int) -> None:
    k = round(share * x.size)
    owed = make("normal", x.size, 3)
    t, r = torch.from_numpy(x.copy()), torch.from_numpy(owed.copy())
    finite, indices, values = reference.compensate_select_topk(t, r, k, sampled=sampled, seed=seed)
    assert finite
    assert t.numpy().tobytes() == owed.tobytes()
    np.testing.assert_array_equal(r.numpy(), owed + x)
    assert ints(indices) == ints(reference.select_topk(torch.from_numpy(owed + x), k, sampled=sampled, seed=seed))
    np.testing.assert_array_equal(values.numpy(), (owed + x)[ints(indices)])


@given(x=some_values())
@lean
def test_all_finite(x: np.ndarray) -> None:
    assert reference.all_finite(torch.from_numpy(x)) == bool(np.isfinite(x).all())


@given(x=some_values(), below=st.sampled_from([math.inf, 1.0]), seed=st.integers(0, 99))
@lean
def test_difference(x: np.ndarray, below: float, seed: int) -> None:
    base = make("normal", x.size, seed)
    out = torch.empty(x.size)
    fine = reference.difference(torch.from_numpy(x), torch.from_numpy(base), out, below=below)
    np.testing.assert_array_equal(out.numpy(), x - base)
    assert fine == bool((np.abs(x - base) < below).all())


@given(x=some_values(), seed=st.integers(0, 99))
@lean
def test_take_difference(x: np.ndarray, seed: int) -> None:
    base = make("normal", x.size, seed)
    now, before = torch.from_numpy(x.copy()), torch.from_numpy(base.copy())
    fine = reference.take_difference(now, before)
    np.testing.assert_array_equal(now.numpy(), base)
    np.testing.assert_array_equal(before.numpy(), x - base)
    assert fine == bool(np.isfinite(x - base).all())
