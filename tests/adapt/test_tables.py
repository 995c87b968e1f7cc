"""Tables from one look at a gradient say what encoding and decoding does to it, choice by choice."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowband as nb
from narrowband.adapt import tables
from narrowband.adapt.tables import error_table

FAMILIES = {
    "topk": [f"topk:density={d}+ef" for d in (0.001, 0.01, 0.05, 0.3, 1.0)],
    "quantized": [f"qsgd:bits={bits}" for bits in (2, 4, 8)] + ["sign+ef", "fp16", "none"],
    "other": ["topk:density=0.1,values=fp16+ef", "topk:density=0.1,scope=sample+ef", "threshold:value=0.5+ef"],
}
SHAPES = [(64, 40), (30, 7, 3, 3), (500,), (1, 9), (3,), ()]


def gradients(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return {
        str(shape): scale * torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 4
        for shape in SHAPES
    }


@pytest.mark.parametrize("family", [*FAMILIES, "all"])
def test_errors_are_what_a_roundtrip_loses(family):
    choices = FAMILIES.get(family) or [choice for own in FAMILIES.values() for choice in own]
    found = gradients()
    if any("scope=sample" in choice for choice in choices):
        found = {name: x for name, x in found.items() if x.dim() > 1}
    table = error_table(found, choices)
    for row, x in enumerate(found.values()):
        for column, choice in enumerate(choices):
            codec = nb.compression(choice).codec
            lost = float((x.double() - codec.roundtrip(x).double()).norm())
            assert table.errors[row, column] == pytest.approx(lost, rel=1e-5, abs=1e-6 * float(x.norm())), choice
            assert table.sizes[row, column] == codec.payload_nbytes(x.shape) or codec.name == "threshold"


def ranked(n, m, decay):
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.linalg.qr(torch.randn(k, min(n, m), generator=generator, dtype=torch.float64))[0] for k in (n, m))
    return (u * decay ** torch.arange(min(n, m), dtype=torch.float64)) @ v.T


@pytest.mark.parametrize("shape", [(60, 200), (200, 60), (300, 1000)])
@pytest.mark.parametrize("ranks", [range(1, 5), range(1, 21)])
def test_errors_of_ranks_are_what_the_best_factors_lose(shape, ranks):
    matrix = ranked(*shape, decay=0.8)
    singular = torch.linalg.svdvals(matrix)
    energy = float(matrix.square().sum())
    table = error_table({"w": matrix.float()}, [f"powersgd:rank={r}" for r in ranks])
    for column, r in enumerate(ranks):
        best = float(singular[r:].norm())
        lost = float(table.errors[0, column])
        assert lost <= best * 1.05 + 1e-6
        assert lost**2 >= best**2 * (1 - 1e-4) - 1e-6 * energy  # what is kept is taken away from all, in float32
        assert table.sizes[0, column] == 4 * r * sum(shape)


@pytest.mark.parametrize("shape", [(150, 300), (300, 150), (1, 30)])
def test_singular_values_and_power_iteration_agree(shape):
    matrix = ranked(*shape, decay=0.8).float()
    rank, energy = min(8, *shape), float(matrix.double().square().sum())
    whole = tables._behind_singular_values(matrix)[: rank + 1]
    found = tables._behind_power_iteration(matrix, rank, energy, seed=0)
    assert found == pytest.approx(whole, rel=0.05, abs=1e-5 * energy)
    assert (found >= whole * (1 - 1e-4) - 1e-6 * energy).all()


def test_few_ranks_take_power_iteration_and_many_singular_values(monkeypatch):
    called = []
    for name in ("_behind_singular_values", "_behind_power_iteration"):
        true = getattr(tables, name)
        monkeypatch.setattr(tables, name, lambda *a, name=name, true=true: called.append(name) or true(*a))
    x = {"w": torch.randn(200, 400)}
    error_table(x, ["powersgd:rank=1"])
    error_table(x, ["powersgd:rank=1", "lowrank:rank=130+ef"])
    assert called == ["_behind_power_iteration", "_behind_singular_values"]


def test_a_rank_that_is_not_worth_it_sends_the_matrix():
    x = torch.randn(10, 10)
    table = error_table({"w": x, "b": torch.randn(10)}, ["powersgd:rank=2", "powersgd:rank=4"])
    assert table.sizes.tolist() == [[160, 400], [40, 40]]
    assert table.errors[0, 0] > 0
    assert table.errors[0, 1] == table.errors[1, 0] == 0


@settings(max_examples=50)
@given(
    n=st.integers(1, 300),
    densities=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6, unique=True),
    seed=st.integers(0, 100),
)
def test_any_densities(n, densities, seed):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    choices = [f"topk:density={d!r}" for d in densities]
    table = error_table({"w": x}, choices)
    for column, choice in enumerate(choices):
        lost = float((x.double() - nb.codec(choice).roundtrip(x).double()).norm())
        assert table.errors[0, column] == pytest.approx(lost, rel=1e-5, abs=1e-6)


def test_zero_gradients_lose_nothing():
    table = error_table({"w": torch.zeros(20, 20)}, ["topk:density=0.1+ef", "powersgd:rank=1", "qsgd:bits=4"])
    assert not table.errors.any()
    assert np.isfinite(table.sizes).all()


def test_what_makes_no_table_is_refused():
    x = {"w": torch.ones(4, 4)}
    with pytest.raises(ValueError, match="no gradients"):
        error_table({}, ["none"])
    with pytest.raises(ValueError, match="no choices"):
        error_table(x, [])
    with pytest.raises(ValueError, match=r"twice: topk:density=0.1"):
        error_table(x, ["topk:density=0.1", "none", "topk:density=1e-1"])
    with pytest.raises(ValueError, match="'w' is not finite"):
        error_table({"w": torch.tensor([1.0, math.nan])}, ["none"])
    with pytest.raises(ValueError, match=r"'fp16' is not among the choices: none"):
        error_table(x, ["none"]).column("fp16")
