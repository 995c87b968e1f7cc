"""The choice per layer, against every possible choice, and against the budget."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband.adapt import lgreco

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


@settings(max_examples=300)
@given(problem=problems(), share=st.floats(0, 1.5), discretization=st.sampled_from([1, 10, 1000]))
def test_is_the_best_there_is_up_to_the_discretization(problem, share, discretization):
    sizes, errors = problem
    finite = errors[np.isfinite(errors)]
    budget = share * float(finite.sum()) if finite.size else 1.0
    optimum = best(sizes, errors, budget)
    if math.isinf(optimum):
        with pytest.raises(ValueError, match=r"no choice|nothing is allowed"):
            lgreco.solve(sizes, errors, budget, discretization)
        return
    chosen = lgreco.solve(sizes, errors, budget, discretization)
    at = np.arange(len(sizes)), chosen
    assert math.fsum(errors[at]) <= budget
    assert math.fsum(sizes[at]) >= optimum * (1 - 1e-12)
    coarser = best(sizes, errors, budget * (1 - len(sizes) / discretization) * (1 - 1e-9))
    assert math.fsum(sizes[at]) <= coarser * (1 + 1e-12)
