"""What PowerSGD saves belongs to matrices of one shape."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from narrowband.feedback import PowerSGD
from tests.gradients.training import compress, refusal, same, wrap
from tests.ranks import run_ranks

SHAPES = {"w": (12, 6)}


@pytest.mark.parametrize(
    ("name", "shape", "fits"),
    [
        ("residual/w", (72,), True),
        ("residual/w", (36,), False),
        ("residual/v", (72,), False),
        ("factor/w", (2, 6), True),
        ("factor/w", (6, 6), True),  # of a larger rank: the next step leaves rows out
        ("factor/w", (7, 6), False),
        ("factor/w", (0, 6), False),
        ("factor/w", (2, 12), False),  # of the transposed matrix
        ("factor/w", (2, 3), False),  # 3 divides 72, too
        ("factor/w", (12,), False),
        ("factor/v", (2, 6), False),
        ("left/w", (2, 12), True),
        ("left/w", (2, 6), False),
    ],
)
def test_entries_of_a_state_have_the_shapes_of_the_models_matrices(name, shape, fits):
    assert PowerSGD(rank=2, halves=1).fits(name, torch.ones(shape), SHAPES, {}) == fits


def load_from_transposed(rank, world_size, spec):
    handles = []
    for sides in ((48, 32), (32, 48)):
        torch.manual_seed(0)
        model = wrap(nn.Linear(*sides, bias=False))
        handles.append(compress(model, spec, min_numel=64))
        for _ in range(2):
            model(torch.randn(4, sides[0])).square().sum().backward()
    here, there = handles
    before = copy.deepcopy(here.state_dict())
    error = refusal(lambda: here.load_state_dict(there.state_dict()))
    return error, same(before["feedback"], here.state_dict()["feedback"])


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "powersgd:rank=2,halves=1"])
def test_the_state_of_transposed_matrices_is_refused_before_anything_changes(spec):
    for error, unchanged in run_ranks(load_from_transposed, 2, spec):
        assert error is not None
        assert error[0] == "ValueError"
        assert "'factor/weight'" in error[1] or "'left/weight'" in error[1]
        assert unchanged


def test_another_unit_scales_what_waits_and_leaves_the_factors():
    state, (p, q) = PowerSGD(rank=2), (torch.randn(2, 12), torch.randn(2, 6))
    state.matrix("w", 12, 6, torch.device("cpu")).fill_(1.0)
    state.keep("w", q)
    state.record_sent("w", p, q)
    state.scale(0.5)
    torch.testing.assert_close(state.residual("w").view(12, 6), 0.5 * (1.0 - p.T @ q))
    assert torch.equal(state.state_dict()["factor/w"], q)
