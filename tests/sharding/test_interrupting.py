"""Models that FSDP2 shards, in loops that are saved, resumed, attached anew, set back, or asked for what is refused, at
any step, have the bits of those in loops that are not.

``python -m tests.sharding.interrupting`` runs any seeds.
"""

from __future__ import annotations

import pytest

from tests.interrupted import broken
from tests.thorough import thorough

LOOPS = "tests.sharding.interrupting"

#: Its bits once were other ones.
SEEDS = (42,)


@pytest.mark.parametrize("seeds", [SEEDS, *thorough(*(range(at, at + 10) for at in range(200, 230, 10)))])
def test_an_interrupted_loop_has_the_bits_of_one_that_is_not(seeds):
    assert broken(LOOPS, seeds) == {}


@pytest.mark.parametrize("seeds", thorough(range(400, 405)))
def test_the_same_holds_on_four_ranks(seeds):
    assert broken(LOOPS, seeds, 4) == {}
