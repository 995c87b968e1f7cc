"""L-GreCo's published solver, in other words: what is chosen here is never larger, and loses no more than is allowed.

Compared with github.com/LGrCo/L-GreCo at commit 13942f0d2c24: the dynamic program of ``lgreco_hook.py`` in
``ResNet50/image_classification/hooks``, which was run on the tables of these tests. It rounds every error up to a
ten-thousandth of the budget, and at least to one, so that on many layers some of the budget is left over.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from narrowband.adapt.lgreco import solve

BUCKETS = 10_000


def table(layers, seed):
    """(sizes, errors) of ranks 2 to 8 of matrices whose singular values fall like powers; the reference has rank 4."""
    rng = np.random.default_rng(seed)
    sizes, errors = [], []
    for _ in range(layers):
        n, m = rng.integers(16, 512, 2)
        values = rng.uniform(0.1, 10) * np.arange(1, min(n, m) + 1) ** -rng.uniform(0.3, 1.5)
        sizes.append([rank * (n + m) for rank in range(2, 9)])
        errors.append([math.sqrt(float((values[rank:] ** 2).sum())) for rank in range(2, 9)])
    return np.array(sizes, float), np.array(errors)


def published(sizes, errors, budget):
    """The choice of every layer, by their program: the smallest size for every sum of rounded errors."""
    rounded = np.clip(np.ceil(np.minimum(errors, budget + 1) / (budget / BUCKETS)), 1, BUCKETS).astype(int)
    least = np.full((len(sizes), BUCKETS + 1), math.inf)
    taken = np.full((len(sizes), BUCKETS + 1), -1)
    for choice, error in enumerate(rounded[0]):
        better = (np.arange(BUCKETS + 1) > error) & (sizes[0, choice] < least[0])
        least[0][better], taken[0][better] = sizes[0, choice], choice
    for layer in range(1, len(sizes)):
        for choice, error in enumerate(rounded[layer]):
            with_it = least[layer - 1][: BUCKETS + 1 - error] + sizes[layer, choice]
            better = np.concatenate([np.full(error, False), with_it < least[layer][error:]])
            least[layer][better], taken[layer][better] = with_it[better[error:]], choice
    spent, chosen = int(np.argmin(least[-1])), []
    for layer in reversed(range(len(sizes))):
        chosen.append(int(taken[layer, spent]))
        spent -= rounded[layer, chosen[-1]]
    return chosen[::-1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layers", [3, 20, 60])
def test_no_choice_of_theirs_is_smaller(layers, seed):
    sizes, errors = table(layers, seed)
    rows, uniform = np.arange(layers), 2  # rank 4
    budget = math.fsum(errors[:, uniform])
    theirs, ours = published(sizes, errors, budget), solve(sizes, errors, budget, BUCKETS)
    assert min(theirs) >= 0
    assert math.fsum(errors[rows, ours]) <= budget * (1 + 1e-12)
    assert math.fsum(errors[rows, theirs]) <= budget * (1 + 1e-12)
    assert sizes[rows, ours].sum() <= sizes[rows, theirs].sum() <= sizes[:, uniform].sum()
