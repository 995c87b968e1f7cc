"""Models, policies and steps that nobody has thought of together: what always holds, holds.

``python -m tests.activations.drawing`` runs any seeds.
"""

from __future__ import annotations

import pytest

from tests.activations.drawing import FUNCTIONS, MODES, draw, problems
from tests.thorough import thorough

#: Together they have every mode. Compiling takes seconds, and is left to other seeds.
SEEDS = (0, 1, 2, 3, 4, 8, 12, 15, 21, 22, 25)


def test_every_function_and_mode_is_drawn():
    drawn = [draw(seed) for seed in range(300)]
    assert {name for c in drawn for name, *_ in c["layers"]} == {*FUNCTIONS}
    assert {draw(seed)["mode"] for seed in SEEDS} == {*MODES}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_what_always_holds_holds(seed):
    assert problems(draw(seed)) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", thorough(*range(10_000, 10_100, 20)))
def test_what_always_holds_holds_for_more_seeds(first):
    assert {seed: found for seed in range(first, first + 20) if (found := problems(draw(seed)))} == {}
