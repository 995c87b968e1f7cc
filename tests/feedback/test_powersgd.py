"""What PowerSGD saves belongs to matrices of one shape."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from narrowband.collectives import Operand, Peers, collective
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


def test_another_unit_scales_what_waits_and_leaves_the_factors_and_a_state_replaces_both():
    state, (p, q) = PowerSGD(rank=2), (torch.randn(2, 12), torch.randn(2, 6))
    state.matrix("w", 12, 6, torch.device("cpu")).fill_(1.0)
    state.keep("w", q)
    state.record_sent("w", p, q)
    state.scale(0.5)
    torch.testing.assert_close(state.residual("w").view(12, 6), 0.5 * (1.0 - p.T @ q))
    assert torch.equal(state.state_dict()["factor/w"], q)
    state.record_sent("w", p, q)
    state.load_state_dict({})
    assert state.state_dict().keys() == {"residual/w"}
    assert not state.residual("w").any()


def averaged(state, x, step):
    """The average among one rank."""
    item = Operand("w", x.clone().view(-1), tuple(x.shape), state.codec, None, lambda _: step << 32, 0)
    exchange = collective(state.collective)([item], Peers(None, 0, 1, None), measure=False, state=state)
    exchange.encode()
    for transfer in exchange.job():
        transfer.issue()
    exchange.deliver(exchange.finite)
    return item.x.view(x.shape)


@pytest.mark.parametrize("halves", [0, 1, 2])
def test_a_factor_that_has_lost_a_direction_finds_a_new_one(halves):
    state = PowerSGD(rank=2, min_ratio=0.0, ef=False, halves=halves)
    alike, others = torch.ones(12, 6), torch.randn(12, 2) @ torch.randn(2, 6)
    for step in range(3):
        found = averaged(state, alike, step)
    torch.testing.assert_close(found, alike)
    kept = {name: x.clone() for name, x in state.state_dict().items()}
    assert not averaged(state, torch.zeros(12, 6), 3).any()
    assert same(state.state_dict(), kept), "a matrix of zeros has no direction"
    for step in range(4, 7):
        found = averaged(state, others, step)
        assert (found - others).norm() < others.norm(), "a projection, also onto a direction that is new"
    torch.testing.assert_close(found, others, rtol=1e-3, atol=1e-4)


def test_what_waited_for_a_matrix_that_is_factored_no_longer_is_sent_once():
    state, x = PowerSGD(rank=2, min_ratio=100.0), torch.randn(12, 6)
    state.add_residual("w", torch.ones(72))
    torch.testing.assert_close(averaged(state, x, 0), x + 1.0)
    torch.testing.assert_close(averaged(state, x, 1), x)
