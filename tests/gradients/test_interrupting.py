"""Loops that are saved, resumed and attached anew at any step have the bits of those that are not.

``python -m tests.gradients.interrupting`` runs any seeds.
"""

from __future__ import annotations

import pytest

from tests.interrupted import broken
from tests.thorough import thorough

LOOPS = "tests.gradients.interrupting"

#: Of each, some bits once were other ones.
SEEDS = (5, 15, 23, 31, 39)


@pytest.mark.parametrize("seeds", [SEEDS, *thorough(*(range(at, at + 20) for at in range(200, 300, 20)))])
def test_an_interrupted_loop_has_the_bits_of_one_that_is_not(seeds):
    assert broken(LOOPS, seeds) == {}


@pytest.mark.parametrize("seeds", thorough(*(range(at, at + 10) for at in (400, 410))))
def test_the_same_holds_on_three_ranks(seeds):
    assert broken(LOOPS, seeds, 3) == {}
