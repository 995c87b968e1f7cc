"""Loops of rounds that are saved, resumed, attached anew, set back, or asked for what is refused, at any step, have the
bits of those that are not.

``python -m tests.updates.interrupting`` runs any seeds.
"""

from __future__ import annotations

import pytest

from tests.interrupted import broken
from tests.thorough import thorough

LOOPS = "tests.updates.interrupting"

#: It notices a measured length that is not loaded, and a fragment under way that lands at another step.
SEEDS = (9,)


@pytest.mark.parametrize("seeds", [SEEDS, *thorough(*(range(at, at + 10) for at in range(200, 240, 10)))])
def test_an_interrupted_loop_has_the_bits_of_one_that_is_not(seeds):
    assert broken(LOOPS, seeds) == {}


@pytest.mark.parametrize("seeds", thorough(range(400, 410)))
def test_the_same_holds_for_three_replicas(seeds):
    assert broken(LOOPS, seeds, 3) == {}
