"""The choice per layer, against every possible choice, and against the budget."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband.adapt import lgreco
from tests.thorough import examples

NUMBERS = st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 2.0, 1e-9, math.inf])


@st.composite
def problems(draw):
    layers, choices = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    table = st.lists(st.lists(NUMBERS, min_size=choices, max_size=choices), min_size=layers, max_size=layers)
    return np.array(draw(table)), np.array(draw(table))


def best(sizes, errors, budget):
    """The smallest total of any choice within the budget; inf if there is none."""
    found = math.inf
    for choice in itertools.product(range(sizes.shape[1]), repeat=len(sizes)):
        at = np.arange(len(sizes)), np.array(choice)
        if math.fsum(errors[at]) <= budget:
            found = min(found, math.fsum(sizes[at]))
    return found


@settings(max_examples=examples(300))
@given(
    problem=problems(), share=st.floats(0, 1.5), discretization=st.sampled_from([1, 10, 1000]), known=st.integers(0, 3)
)
def test_is_the_best_there_is_up_to_the_discretization(problem, share, discretization, known):
    sizes, errors = problem
    finite = errors[np.isfinite(errors)]
    budget = share * float(finite.sum()) if finite.size else 1.0
    optimum = best(sizes, errors, budget)
    if math.isinf(optimum):
        with pytest.raises(ValueError, match=r"no combination of choices|no choice is allowed"):
            lgreco.solve(sizes, errors, budget, discretization)
        return
    layers = np.arange(len(sizes))
    chosen = lgreco.solve(sizes, errors, budget, discretization)
    total = math.fsum(sizes[layers, chosen])
    assert math.fsum(errors[layers, chosen]) <= budget
    assert total >= optimum * (1 - 1e-12)

    allowed = np.isfinite(sizes) & np.isfinite(errors)
    least = math.fsum(np.where(allowed, errors, math.inf).min(axis=1))
    coarser = max(0.0, 1 - (len(sizes) + 1) / discretization) * (1 - 1e-9)
    assert total <= best(sizes, errors, least + (budget - least) * coarser) * (1 + 1e-12)

    sums = 1e-9 * sizes[allowed].sum()  # what rounding may make of a bound
    bound = lgreco.lower_bound(sizes, errors, budget * (1 + 1e-12))
    differences = [max(row) - min(row) for row in (own[own < math.inf] for own in np.where(allowed, sizes, math.inf))]
    assert bound - sums <= optimum
    assert total <= bound + max(differences) + sums

    column = np.full(len(sizes), min(known, sizes.shape[1] - 1))
    beside = lgreco.solve(sizes, errors, budget, discretization, known=column)
    assert math.fsum(errors[layers, beside]) <= budget
    if math.fsum(errors[layers, column]) <= budget:
        assert math.fsum(sizes[layers, beside]) <= min(total, math.fsum(sizes[layers, column]))


@pytest.mark.parametrize("seed", range(3))
def test_200_layers_are_within_a_percent_of_the_bound_where_their_least_errors_are_half_of_the_budget(seed):
    """Where the whole budget is discretized into 10,000 steps, results are 4 to 13.6 % above the bound here."""
    rng = np.random.default_rng(seed)
    errors = np.sort(rng.uniform(1, 3, (200, 16)), axis=1)
    errors[:, 0] = 1.0
    for fall in (4.0, 10.0):
        sizes = 10 ** rng.uniform(2, 5, (200, 1)) * fall ** -np.cumsum(rng.uniform(0, 1, (200, 16)), axis=1)
        chosen = lgreco.solve(sizes, errors, budget=400.0)
        layers = np.arange(200)
        bound = lgreco.lower_bound(sizes, errors, 400.0)
        # By the definition of the bound: no multiplier of the budget gives a larger one.
        multipliers = np.geomspace(1e-2, 1e8, 2_000)
        dual = [(sizes + m * errors).min(axis=1).sum() - m * 400.0 for m in multipliers]
        assert max(dual) <= bound * (1 + 1e-9)
        assert max(dual) >= bound * 0.99
        assert errors[layers, chosen].sum() <= 400.0
        assert bound <= sizes[layers, chosen].sum() <= 1.01 * bound
