"""Pipelines that are saved, resumed, or given new stages at any step have the bits of those that are not.

``python -m tests.pipeline.interrupting`` runs any seeds.
"""

from __future__ import annotations

import pytest

from tests.interrupted import broken
from tests.thorough import thorough

LOOPS = "tests.pipeline.interrupting"

#: The statistics of its batch norm once were other ones in each run.
SEEDS = (9,)


@pytest.mark.parametrize("seeds", [SEEDS, *thorough(*(range(at, at + 10) for at in range(200, 230, 10)))])
def test_an_interrupted_pipeline_has_the_bits_of_one_that_is_not(seeds):
    assert broken(LOOPS, seeds) == {}


@pytest.mark.parametrize("seeds", thorough(range(400, 405)))
def test_the_same_holds_on_three_ranks(seeds):
    assert broken(LOOPS, seeds, 3) == {}
