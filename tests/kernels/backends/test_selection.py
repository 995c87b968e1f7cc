"""Selection: each backend against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.kernels.cpu import selection
from tests.kernels.backends.common import on_all
from tests.kernels.tables import reference

if TYPE_CHECKING:
    from torch import Tensor

from tests.kernels.backends.common import (
    FAST_BACKENDS,
    MILLION,
    SIZES,
    backends_for,
    inputs,
    lean,
    make,
    seeds,
)
from tests.thorough import examples, thorough


@pytest.mark.parametrize("kind", ["normal", "few-levels", *thorough("nan", "zeros")])
def test_selections_of_several_tensors(kind: str) -> None:
    """Some fit into a program of Triton's, some do not; of one, nothing is selected."""
    xs, ks = [make(kind, n, n) for n in (900, 17_000, 64, 20_000, 1)], [30, 100, 0, 5000, 1]
    found = on_all("select_topk_all", xs, ks)
    assert [at.numel() for at in found] == ks
    assert all(torch.equal(at, reference.select_topk(x, k)) for at, x, k in zip(found, xs, ks, strict=True))


@given(x=inputs, share=st.floats(0, 1), sampled=st.booleans(), seed=seeds)
@settings(max_examples=examples(200), deadline=None)
def test_select_topk(x: Tensor, share: float, sampled: bool, seed: int) -> None:
    if x.numel():
        on_all("select_topk", x, max(1, round(share * x.numel())), sampled=sampled, seed=seed)
    else:
        assert on_all("select_topk", x, 0, sampled=sampled, seed=seed).numel() == 0


@given(x=inputs, rows=st.integers(1, 3), share=st.floats(0, 1))
@lean
def test_select_topk_rows(x: Tensor, rows: int, share: float) -> None:
    width = x.numel() // rows
    if width:
        on_all("select_topk_rows", x[: rows * width].view(rows, width), max(1, round(share * width)))


@pytest.mark.parametrize("k", [1, 500, 5_000])
@pytest.mark.parametrize("kind", ["normal", "few", "equal", "outliers at one end"])
def test_rows_long_enough_for_a_sample(kind: str, k: int) -> None:
    x = torch.randn(5, 20_000, generator=torch.Generator().manual_seed(k))
    if kind == "few":
        x[:, 37:] = 0.0
    elif kind == "equal":
        x = torch.ones_like(x)
    elif kind == "outliers at one end":
        x[:, :300] *= 1e6
    indices = on_all("select_topk_rows", x, k, backends=FAST_BACKENDS)
    assert torch.equal(indices.view(5, k), torch.stack([kernels.select_topk(x[r], k) + r * 20_000 for r in range(5)]))


@given(x=inputs, value=st.one_of(st.floats(1e-6, 10), st.sampled_from([1e-45, 1.0, 2.0, 3.4e38, float("inf")])))
@settings(max_examples=examples(80), deadline=None)
def test_select_threshold(x: Tensor, value: float) -> None:
    on_all("select_threshold", x, value)


@given(n=st.one_of(st.sampled_from(SIZES[1:]), st.integers(1, 2**31 - 1)), k=st.integers(1, 3000), seed=seeds)
@lean
def test_randomk_indices(n: int, k: int, seed: int) -> None:
    indices = on_all("randomk_indices", n, min(n, k), seed, torch.device("cpu"))
    assert (indices[1:] > indices[:-1]).all()


def test_randomk_of_nothing() -> None:
    on_all("randomk_indices", 0, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "kind", ["normal", "equal", "descending", "few-levels", "nan", *thorough("zeros", "ascending")]
)
def test_topk_of_a_million(kind: str, sampled: bool) -> None:
    x = make(kind, MILLION)
    for k in (1, 1000, 100_000):
        indices = on_all("select_topk", x, k, sampled=sampled, seed=k, backends=FAST_BACKENDS)
        assert indices.numel() == k or sampled


@pytest.mark.parametrize("k", [MILLION * 9 // 10, MILLION - 1, MILLION])
def test_topk_of_nearly_everything(k: int) -> None:
    x = make("normal", MILLION)
    assert on_all("select_topk", x, k, backends=FAST_BACKENDS).numel() == k
    on_all("select_topk", x, k, sampled=True, backends=FAST_BACKENDS)


@pytest.mark.parametrize(("n", "k"), [(5000, 2000), (MILLION, 10_000)])
@pytest.mark.parametrize("large", ["where the sample looks", "where it does not look", "at its first positions"])
def test_topk_when_the_sample_misleads(n: int, k: int, large: str) -> None:
    seed = 3
    looks = reference.randomk_indices(n, kernels.sample_size(n, k), seed, torch.device("cpu")).long()
    x = make("normal", n).clamp_(-1, 1)
    if large == "where it does not look":  # every element passes a threshold this low
        aside = torch.ones(n, dtype=torch.bool)
        aside[looks] = False
        x[aside] += 1e6
    else:  # the threshold is so high that few pass
        x[looks[: kernels.sample_rank(n, k)] if large == "at its first positions" else looks] += 1e6
    among = backends_for(n)
    assert on_all("select_topk", x, k, seed=seed, backends=among).numel() == k
    sampled = on_all("select_topk", x, k, sampled=True, seed=seed, backends=among)
    assert sampled.numel() == k if large == "where it does not look" else 0 < sampled.numel() < k
    for sampled_ in (False, True):
        on_all("compensate_select_topk", x, torch.zeros(n), k, sampled=sampled_, seed=seed, backends=among)


@pytest.mark.parametrize("kind", ["normal", "equal", "zeros", "few-levels", "nan", "any-bits"])
@pytest.mark.parametrize("n", [1, 70, 5000])
def test_the_kth_largest_and_the_largest_of_what_was_found(kind: str, n: int) -> None:
    """Of any k, none at all included; what is written keeps to its room."""
    bits = make(kind, n, 3).numpy().view(np.int32)
    magnitudes = bits & 0x7FFFFFFF
    order = np.sort(magnitudes)[::-1]
    for k in {0, 1, n // 3, n - 1, n}:
        threshold, wanted = selection.kth_largest(bits, k)
        taken = np.flatnonzero(magnitudes > threshold)
        assert threshold == (order[k - 1] if k else 0x7FFFFFFF)
        assert wanted == k - taken.size
        out = np.full((2, k + 65), -7, np.int32)
        least, alone = selection.take_largest(np.arange(n, dtype=np.int32), bits, k, out[0, : k + 1], out[1, : k + 1])
        ties = np.flatnonzero(magnitudes == threshold)
        assert (out[0, :k] == np.sort(np.concatenate([taken, ties[:wanted]]))).all()
        assert (out[1, :k] == bits[out[0, :k]]).all()
        assert (out[:, k + 1 :] == -7).all()
        assert least == threshold
        assert alone == (ties.size == wanted)
