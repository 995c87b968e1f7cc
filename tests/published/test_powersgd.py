"""PowerSGD's published research code, in other words: averages and memories of its reducer, to float32's noise.

Compared with github.com/epfml/powersgd at commit f07be924eda5: ``RankKReducer`` of ``paper-code/gradient_reducers.py``,
which leaves Q as it is and orthogonalizes P alone. It was run with one worker on the gradients of these tests: averages
and residuals agree with this library's, and with the derivation's, to 2e-5 of the largest element.

The package beside it, ``powersgd/powersgd.py``, makes half rounds: tests/gradients/test_half_rounds.py has its
derivation. ``BasicPowerSGD`` was run on three gloo ranks beside this library for 12 steps of rank 2: averages and
residuals agree to 2e-6 of their largest element with one half round per step, to 1e-5 with two and to 4e-5 with three.
"""

from __future__ import annotations

import pytest
import torch

import narrowband as nb
from narrowband.codecs.lowrank import start
from narrowband.collectives import Operand, Peers, collective

SHAPES = {"tall": (48, 20), "wide": (20, 48), "four dimensions": (24, 3, 5, 5)}


class Reducer:
    """``reduce`` of one rank, in float64: P = M·Q, orthogonalized; Q = Mᵀ·P; the memory is what P·Qᵀ lacks."""

    def __init__(self, n, m, q):
        self.memory, self.q = torch.zeros(n, m, dtype=torch.float64), q.double()

    def step(self, gradient):
        matrix = gradient.double().view(self.memory.shape) + self.memory
        p = matrix @ self.q
        for a in range(p.shape[1]):  # Gram and Schmidt, in the order of columns
            p[:, a] /= p[:, a].norm()
            for b in range(a + 1, p.shape[1]):
                p[:, b] -= (p[:, a] @ p[:, b]) * p[:, a]
        self.q = matrix.T @ p
        average = p @ self.q.T
        self.memory = matrix - average
        return average


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rank", [1, 3])
def test_every_step_of_the_reducer(rank, shape):
    chosen = nb.compression(f"powersgd:rank={rank},min_ratio=0")
    state, kind = chosen.new_feedback(), collective("factor_reduce")
    n, m, r = state.factors(chosen.codec, shape)
    assert r == rank
    reducer = Reducer(n, m, start(m, r, 0, torch.device("cpu")).T)
    decay = torch.linspace(1, 0.05, m)
    for step in range(15):
        gradient = torch.randn(n, m, generator=torch.Generator().manual_seed(step)) * decay
        operand = Operand("w", gradient.flatten().clone(), shape, chosen.codec, None, lambda _: 0)
        exchange = kind([operand], Peers(None, 0, 1), measure=False, state=state)
        exchange.encode()
        for _ in exchange.job():
            pass
        exchange.deliver(good=True)
        expected = reducer.step(gradient)
        scale = float(expected.abs().max())
        torch.testing.assert_close(operand.average.view(n, m).double(), expected, rtol=0, atol=2e-5 * scale)
        residual = state.residual("w").view(n, m).double()
        torch.testing.assert_close(residual, reducer.memory, rtol=0, atol=2e-5 * scale)
