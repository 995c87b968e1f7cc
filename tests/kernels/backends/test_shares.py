"""Shares of flat tensors: every element has one owner, comes back, and is added where it belongs, on all backends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.kernels import Shared
from tests.kernels.backends.common import BACKENDS, assert_all_same, back, lean, place
from tests.thorough import examples


def sorted_indices(n: int, k: int, seed: int) -> torch.Tensor:
    chosen = np.random.default_rng(seed).choice(n, min(k, n), replace=False)
    return torch.from_numpy(np.sort(chosen).astype(np.int32))


def beside(ns: list[int], turn: int, room: int) -> list[Shared]:
    """Tensors side by side, each with as many columns, and one column in front of each that belongs to none."""
    firsts = np.cumsum([0, *(kernels.share_numel(n, 1) for n in ns)]).tolist()
    return [
        Shared(n, turn + at, slice(at * (room + 1) + 1, (at + 1) * (room + 1)), firsts[at]) for at, n in enumerate(ns)
    ]


def split(backend, tensors, indices, values, ranks: int):
    width = tensors[-1].columns.stop + 3
    local = place(backend, torch.full((ranks, width), -7, dtype=torch.int32))
    sorted_values = place(backend, torch.full((ranks, width), -7.0))
    backend.split_shares_all(tensors, place(backend, indices), place(backend, values), local, sorted_values)
    return back((local, sorted_values))


@given(
    ns=st.lists(st.integers(1, 200_000), min_size=1, max_size=3),
    k=st.integers(0, 500) | st.just(3000),
    ranks=st.sampled_from([1, 2, 3, 5, 8, 33]),
    turn=st.integers(0, 2000),
    seed=st.integers(0, 99),
    room=st.integers(0, 400),
)
@settings(lean, max_examples=examples(80))
def test_every_element_has_one_owner_and_comes_back(
    ns: list[int], k: int, ranks: int, turn: int, seed: int, room: int
) -> None:
    indices = [sorted_indices(n, k, seed + at) for at, n in enumerate(ns)]
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randint(1, 50, (at.numel(),), generator=generator).float() for at in indices]  # with ties
    tensors = beside(ns, turn, room)
    results = [split(backend, tensors, indices, values, ranks) for backend in BACKENDS]
    for part in zip(*results, strict=True):
        assert_all_same(list(part))
    local, sorted_values = results[0]
    others = torch.ones(local.shape[1], dtype=torch.bool)
    for tensor in tensors:
        others[tensor.columns] = False
    assert bool((local[:, others] == -7).all() and (sorted_values[:, others] == -7).all())
    starts = [torch.randn(n, generator=generator) for n in ns]
    added = []
    for backend in BACKENDS:
        outs = place(backend, [start.clone() for start in starts])
        backend.add_shares_all(outs, tensors, place(backend, local), place(backend, sorted_values), -0.5)
        added.append(back(outs))
    assert_all_same(added)
    for tensor, at, own, start, out in zip(tensors, indices, values, starts, added[0], strict=True):
        mine, its = local[:, tensor.columns] - tensor.first, sorted_values[:, tensor.columns]
        assert bool((mine[:, 1:] >= mine[:, :-1]).all())
        assert not room or 0 <= int(mine.min()) <= int(mine.max()) < max(1, kernels.share_numel(tensor.n, ranks))
        found = [back(backend.from_share(place(backend, mine), turn=tensor.turn)) for backend in BACKENDS]
        assert_all_same(found)
        there = its != 0
        whole, order = found[0][there].sort()
        assert set(zip(whole.tolist(), its[there][order].tolist(), strict=True)) <= set(
            zip(at.tolist(), own.tolist(), strict=True)
        )
        full = there.all(1)
        if not bool(full.any()):
            assert torch.equal(whole, at)
        left = sorted(set(at.tolist()) - set(whole.tolist()))
        value_of = dict(zip(at.tolist(), own.tolist(), strict=True))
        if left and room:  # what a row that is full does not have is no larger than anything in it
            assert max(value_of[i] for i in left) <= its[full].amin(1).max()
        expected = start.clone()
        expected[whole.long()] += its[there][order] * -0.5
        assert torch.equal(out, expected)


def test_of_too_many_elements_an_owner_gets_the_largest_and_of_equal_ones_the_first() -> None:
    at, values = torch.arange(10, dtype=torch.int32), torch.tensor([1.0, -3, 2, 3, -2, 3, 1, 0.5, -3, 2])
    tensor = Shared(16, 0, slice(0, 4), 0)
    for backend in BACKENDS:
        local, sorted_values = split(backend, [tensor], [at], [values], 1)
        assert local[0, :4].tolist() == [1, 3, 5, 8]
        assert sorted_values[0, :4].tolist() == [-3, 3, 3, -3]
        local, sorted_values = split(backend, [tensor._replace(columns=slice(0, 6))], [at], [values], 1)
        assert local[0, :6].tolist() == [1, 2, 3, 4, 5, 8]


def test_values_that_are_not_finite_and_elements_behind_the_last_stay_inside_of_the_tensor() -> None:
    """A tensor of 20 elements, whose first owner's share has whole blocks of 16, and one that has damaged indices."""
    local = torch.tensor([[0, 15, 31, -5, 2_000_000_000]], dtype=torch.int32)
    values = torch.tensor([[float("nan"), 1.0, 2.0, 3.0, 4.0]])
    tensor, results = Shared(20, 0, slice(0, 5), 0), []
    for backend in BACKENDS:
        around = place(backend, torch.zeros(60))
        backend.add_shares_all([around[20:40]], [tensor], place(backend, local), place(backend, values), 1.0)
        results.append(back(around))
    assert_all_same(results)
    assert results[0].isnan().nonzero().view(-1).tolist() == [20]
    assert results[0].nan_to_num().nonzero().view(-1).tolist() == [35]


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
        tensor = Shared(mask.numel(), turn, slice(0, at.numel()), 0)
        kernels.split_shares_all([tensor], [at], [torch.ones(at.numel())], local, values)
        counts = values.sum(1)
        assert int(counts.max()) < 1.3 * at.numel() / ranks
        assert int(counts.min()) > 0.7 * at.numel() / ranks
