"""Momentum correction: each backend against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband.kernels.cpu import momentum
from tests.kernels.backends.common import BACKENDS, assert_all_same, back, place
from tests.kernels.tables import cpu, reference

if TYPE_CHECKING:
    from torch import Tensor

from tests.kernels.backends.common import (
    assert_same,
    inputs,
    make,
    seeds,
    threads,
)
from tests.thorough import examples


@given(
    x=inputs, share=st.floats(0, 1), momentum=st.sampled_from([0.0, 0.9]), nesterov=st.booleans(),
    masking=st.booleans(), scale=st.sampled_from([1.0, 0.0, 0.1, 3e-30]),
    threshold=st.sampled_from([0.0, 1e-30, 0.5, 2.0, 1e30]), sampled=st.booleans(), seed=seeds,
)  # fmt: skip
@settings(max_examples=examples(200), deadline=None)
def test_momentum_topk_and_forget(
    x: Tensor,
    share: float,
    momentum: float,
    nesterov: bool,
    masking: bool,
    scale: float,
    threshold: float,
    sampled: bool,
    seed: int,
) -> None:
    n = x.numel()
    k = min(n, max(1, round(share * n)))
    form = {"momentum": momentum, "nesterov": nesterov}
    outcomes = []
    for backend in BACKENDS:
        gradient, now, before = (place(backend, t) for t in (x, make("normal", n, 1), make("few-levels", n, 2)))
        held = now.clone(), before.clone()
        finite, indices, values, _ = backend.momentum_topk(
            gradient, now, before, k, **form, scale=scale, threshold=threshold, sampled=sampled, seed=seed
        )
        assert torch.equal(gradient, held[1])
        outcomes.append(back([finite, gradient, now.clone(), before.clone(), indices, values]))
        if finite:
            old = backend.forget(now, before, indices, **form, masking=masking)
            owed = before + (before - now) * momentum if nesterov else before
            parts = values.abs() + before[indices].abs() + now[indices].abs()  # which may cancel out
            assert (owed[indices].abs() <= 1e-6 * parts).all()
            outcomes[-1] += back([old, now.clone(), before.clone()])
            now[indices] = old
        before.copy_(gradient)
        assert torch.equal(now, held[0])
        assert torch.equal(before, held[1])
    assert_all_same(outcomes)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("k", "broken"), [(300, 0.0), (3000, 0.0), (300, torch.inf), (300, torch.nan)])
def test_a_sample_of_a_long_tensor_chooses_alike_on_all_backends(k: int, broken: float, nesterov: bool) -> None:
    n, outcomes = 300_000, []
    for backend, count in [(cpu, 1), (cpu, 2), (reference, 2)]:
        x, now, before = (make("normal", n, seed) for seed in range(3))
        x[777] += broken
        with threads(count):
            outcome = backend.momentum_topk(x, now, before, k, momentum=0.9, nesterov=nesterov, sampled=True, seed=5)
        assert outcome[0] is (broken == 0.0)
        outcomes.append([*outcome[:3], x, now, before])
    assert_same(outcomes[0], outcomes[1])
    assert_same(outcomes[0], outcomes[2])
    assert 0.7 * k <= outcomes[0][1].numel() <= k or broken


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_threshold_from_the_step_before_saves_looks_and_changes_nothing(count, nesterov, monkeypatch):
    looks = 0
    again = momentum.look_again

    def look_again(*arguments):
        nonlocal looks
        looks += 1
        return again(*arguments)

    monkeypatch.setattr(momentum, "look_again", look_again)
    n, k = 300_000, 3000
    form = {"momentum": 0.9, "nesterov": nesterov}
    states, hint = [torch.zeros(n) for _ in range(4)], 0.0
    with threads(count):
        for step in range(30):
            x = make("normal", n, step)
            _, at, values, hint = cpu.momentum_topk(x.clone(), *states[:2], k, **form, threshold=hint, seed=step)
            _, expected, theirs, _ = reference.momentum_topk(x.clone(), *states[2:], k, **form)
            assert_same([at, values], [expected, theirs])
            for now, before in (states[:2], states[2:]):
                cpu.forget(now, before, at, **form)
            states = [states[1], states[0], states[3], states[2]]
    assert 1 <= looks < 15, looks
