"""Sensitivity by the loss: one layer at a time, against the run that compresses nothing."""

from __future__ import annotations

import numpy as np
import pytest

from narrowband.adapt.sensitivity import correlation, loss_table


def test_every_run_compresses_one_layer():
    runs = []

    def train(specs):
        runs.append(dict(specs))
        return 2.0 + sum({"a": 1.0, "b": 5.0}[name] * int(spec) for name, spec in specs.items())

    assert loss_table(train, ["a", "b"], ["1", "2"]).tolist() == [[1.0, 2.0], [5.0, 10.0]]
    assert runs == [{}, {"a": "1"}, {"a": "2"}, {"b": "1"}, {"b": "2"}]


def test_correlations():
    x = np.random.default_rng(0).standard_normal((5, 6))
    assert correlation(x, 2 * x + 1) == pytest.approx((1.0, 1.0))
    linear, ranks = correlation(x, np.exp(5 * x))
    assert ranks == pytest.approx(1.0)
    assert linear < 0.9
    assert correlation([1, 1, 2, 3], [1, 1, 5, 9])[1] == pytest.approx(1.0)
    assert correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx((-1.0, -1.0))
    with pytest.raises(ValueError, match="neither of them constant"):
        correlation([1, 1], [1, 2])
