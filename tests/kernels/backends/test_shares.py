"""Shares of a flat tensor: each backend against the reference, and how even they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowband import kernels
from tests.kernels.backends.common import BACKENDS, assert_all_same, back, lean, place


def sorted_indices(n: int, k: int, seed: int) -> torch.Tensor:
    chosen = np.random.default_rng(seed).choice(n, min(k, n), replace=False)
    return torch.from_numpy(np.sort(chosen).astype(np.int32))


def split(backend, at: torch.Tensor, values: torch.Tensor, ranks: int, room: int, n: int, turn: int):
    """A table inside a larger one, as tensors of one message have."""
    local = place(backend, torch.full((ranks, room + 5), -7, dtype=torch.int32))
    sorted_values = place(backend, torch.full((ranks, room + 5), -7.0))
    arrays = place(backend, at), place(backend, values), local[:, 2:-3], sorted_values[:, 2:-3]
    most = int(backend.split_shares(*arrays, n=n, turn=turn))
    return back((local, sorted_values, most))


@given(n=st.integers(1, 200_000), k=st.integers(0, 500) | st.just(3000), ranks=st.integers(1, 33),
       turn=st.integers(0, 2000), seed=st.integers(0, 99), room=st.integers(0, 400))  # fmt: skip
@lean
def test_every_element_has_one_owner_and_comes_back(
    n: int, k: int, ranks: int, turn: int, seed: int, room: int
) -> None:
    at = sorted_indices(n, k, seed)
    values = torch.randn(at.numel(), generator=torch.Generator().manual_seed(seed)).abs() + 0.1
    results = [split(backend, at, values, ranks, room, n, turn) for backend in BACKENDS]
    for part in zip(*results, strict=True):
        assert_all_same(list(part))
    local, sorted_values, most = results[0]
    assert most >= -(-at.numel() // ranks)
    assert bool((local[:, :2] == -7).all() and (local[:, -3:] == -7).all() and (sorted_values[:, -3:] == -7).all())
    local, sorted_values = local[:, 2:-3], sorted_values[:, 2:-3]
    assert bool((local[:, 1:] >= local[:, :-1]).all())
    assert not room or 0 <= int(local.min()) <= int(local.max()) < max(1, kernels.share_numel(n, ranks))
    found = [back(backend.from_share(place(backend, local), turn=turn)) for backend in BACKENDS]
    assert_all_same(found)
    there = sorted_values != 0
    whole, order = found[0][there].sort()
    if most <= room:
        assert torch.equal(whole, at)
        assert torch.equal(sorted_values[there][order], values)
    else:
        assert set(whole.tolist()) < set(at.tolist())


@pytest.mark.parametrize("ranks", [4, 8, 32])
@pytest.mark.parametrize("where", ["a corner", "a few rows", "a few columns", "every eighth row"])
def test_owners_have_about_as_much_wherever_the_largest_lie(ranks: int, where: str) -> None:
    """Of a matrix of 2048 × 512, whose elements are not alike."""
    mask = torch.zeros(2048, 512, dtype=torch.bool)
    if where == "a corner":
        mask[:256, :256] = True
    elif where == "a few rows":
        mask[torch.randperm(2048, generator=torch.Generator().manual_seed(0))[:150]] = True
    elif where == "a few columns":
        mask[:, :37] = True
    else:
        mask[::8] = True
    at = mask.view(-1).nonzero().view(-1).to(torch.int32)
    for turn in range(3):
        local, values = torch.empty(ranks, at.numel(), dtype=torch.int32), torch.empty(ranks, at.numel())
        kernels.split_shares(at, torch.ones(at.numel()), local, values, n=mask.numel(), turn=turn)
        counts = values.sum(1)
        assert int(counts.max()) < 1.3 * at.numel() / ranks
        assert int(counts.min()) > 0.7 * at.numel() / ranks
