"""Long tensors in Triton, where several programs share a row and each takes several tiles: against the reference.

Tiles are small here and programs few, so that tensors need not be long.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from narrowband.kernels import reference
from tests.kernels.backends.common import BACKENDS, assert_same, back, make, place
from tests.thorough import thorough

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

N, SEED = 5003, 3


@pytest.fixture
def triton_(monkeypatch):
    """The backend, with tiles of 512, of which four programs take three each."""
    from narrowband.kernels.cuda import selection

    monkeypatch.setattr(selection, "BLOCK", 512)
    monkeypatch.setattr(selection, "_SHORT", 16)
    monkeypatch.setattr(selection, "_PROGRAMS", 4)
    return BACKENDS[1]


def both(backend, name, *arguments, **options):
    """A function on both: results, and tensors as they are afterwards."""
    outcomes = []
    for one in (backend, reference):
        own = [place(one, argument) for argument in arguments]
        outcomes.append(back([getattr(one, name)(*own, **options), *own]))
    return outcomes


@pytest.mark.parametrize("kind", ["few-levels", "any-bits", *thorough("normal", "equal", "nan", "descending")])
def test_the_largest_of_a_long_tensor(triton_, kind):
    x = make(kind, N, SEED)
    for k in (1, 700, N):
        assert_same(*both(triton_, "select_topk", x, k))
    for k in (40, 2500):
        assert_same(*both(triton_, "select_topk", x, k, sampled=True, seed=k))
    assert_same(*both(triton_, "select_threshold", x, 1.0))


@pytest.mark.parametrize(("rows", "width"), [(3, 1667), (9, 550)])
def test_the_largest_of_long_rows(triton_, rows, width):
    x = make("few-levels", rows * width, SEED).view(rows, width)
    assert_same(*both(triton_, "select_topk_rows", x, 37))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("broken", [0.0, torch.inf, *thorough(torch.nan)])
def test_a_sum_and_its_largest(triton_, sampled, broken):
    x, residual = make("normal", N, 1), make("few-levels", N, 2)
    x[N - 2] += broken
    options = {"sampled": sampled, "seed": SEED}
    own, expected = both(triton_, "compensate_select_topk", x, residual, 300, decay=0.9, **options)
    assert own[0][0] is expected[0][0] is (broken == 0.0)
    assert_same(*(outcome if broken == 0.0 else outcome[1:] for outcome in (own, expected)))
    out = torch.full((4000,), 0xAA, dtype=torch.uint8)
    forms = {**options, "subtract": True}
    own, expected = both(triton_, "encode_topk", x, residual, 300, out, **forms)
    assert_same(own, expected)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("broken", [0.0, *thorough(torch.nan)])
def test_a_step_of_momentum_and_its_largest(triton_, nesterov, sampled, broken):
    x, now, before = (make("normal", N, seed) for seed in range(3))
    x[7] += broken
    options = {"momentum": 0.9, "nesterov": nesterov, "scale": 0.1, "sampled": sampled, "seed": SEED}
    assert_same(*both(triton_, "momentum_topk", x, now, before, 300, **options))
