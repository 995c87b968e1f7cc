"""What may be said of two rows: each verdict against intervals that were worked out by hand, or again in float64."""

from __future__ import annotations

import math
import random
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reproduce.pairs import Finding, Spread, difference, every, in_blocks, some, student

OUTCOMES = (True, False, None)


def apart(first, second, **more):
    told = {"names": ("own", "other"), "higher_is_better": True} | more
    return difference(dict(enumerate(first)), dict(enumerate(second)), **told)


@pytest.mark.parametrize("degrees", range(1, 12))
def test_students_t_leaves_five_per_cent_outside(degrees):
    """The density's integral, in float64; for eleven degrees the value of ten leaves a little less."""
    x = np.linspace(0.0, student(degrees), 200_001)
    density = (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    within = 2 * scale * float(np.sum((density[1:] + density[:-1]) / 2 * np.diff(x)))
    assert within == pytest.approx(0.95, abs=5e-5 if degrees < 11 else 3e-3)
    assert within > 0.95 or degrees < 11


def test_a_spread_takes_two_values():
    with pytest.raises(ValueError, match="degrees=0"):
        student(0)


def test_a_difference_is_the_mean_over_common_seeds_with_students_interval():
    """Differences −1, −0.5, 0: mean −0.5, standard deviation 0.5, interval ± 4.303 · 0.5 / √3."""
    found = apart([79.0, 80.5, 82.0, 99.0], [80.0, 81.0, 82.0])
    assert found.seeds == (0, 1, 2)
    assert found.scores == (80.5, 81.0)
    assert found.mean == -0.5
    assert found.margin == pytest.approx(4.303 * 0.5 / math.sqrt(3))
    assert found.said() == "own 80.50, other 81.00: -0.50 ± 1.24 (seeds 0, 1, 2)"


def test_pairs_may_agree_where_scores_do_not():
    """Seeds that are far apart move both rows: what is compared is what they differ by."""
    found = apart([60.0, 90.0, 75.0], [60.5, 90.5, 75.5])
    assert (found.mean, found.margin) == (-0.5, 0.0)
    assert found.no_worse(0.5).held is True
    assert found.no_worse(0.4).held is False


@pytest.mark.parametrize(
    ("bound", "held"),
    [(1.8, True), (1.7, None), (0.5, None), (-0.7, None), (-0.8, False)],
)
def test_a_bound_within_the_margin_is_not_resolved(bound, held):
    """Worse by 0.5 ± 1.242: from −0.742 to 1.742."""
    assert apart([79.0, 80.5, 82.0], [80.0, 81.0, 82.0]).no_worse(bound).held is held


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_worse_and_better_follow_the_metric(higher_is_better):
    high, low = [5.0, 6.0, 7.0], [4.0, 5.0, 6.0]
    good, bad = (high, low) if higher_is_better else (low, high)
    found = apart(good, bad, higher_is_better=higher_is_better)
    assert found.better().held is True
    assert found.better(0.9).held is True
    assert found.better(1.1).held is False
    assert found.worse().held is False
    assert found.within(0.9).held is False
    assert found.within(1.1).held is True
    assert apart(bad, good, higher_is_better=higher_is_better).worse(0.9).held is True


def test_equal_rows_are_neither_worse_nor_better():
    found = apart([1.0, 2.0], [1.0, 2.0])
    assert [found.no_worse().held, found.worse().held, found.better().held] == [True, False, False]


def test_a_share_is_taken_pair_by_pair():
    """1 % and 3 % above: mean 2 %, standard deviation √2 %, interval ± 12.706 · √2 / √2 %."""
    found = apart([5.05, 10.3], [5.0, 10.0], relative=True, higher_is_better=False)
    assert found.mean == pytest.approx(0.02)
    assert found.margin == pytest.approx(0.12706)
    assert found.figure() == "+2.00 % ± 12.71 %"
    assert found.no_worse(0.15).held is True
    assert found.no_worse(0.01).held is None


def test_one_pair_has_the_noise_of_rows_without_compression():
    """Standard deviation 0.1 of three: 4.303 · √2 · 0.1."""
    found = apart([79.0], [80.0, 80.1, 80.2], dense=[80.0, 80.1, 80.2])
    assert found.seeds == (0,)
    assert found.margin == pytest.approx(4.303 * math.sqrt(2) * 0.1)
    assert found.no_worse(1.7).held is True
    assert found.no_worse(1.0).held is None
    assert found.no_worse(0.3).held is False
    share = apart([79.0], [80.0], dense=[80.0, 80.1, 80.2], relative=True)
    assert share.margin == pytest.approx(4.303 * math.sqrt(2) * 0.1 / 80.0)


@pytest.mark.parametrize("dense", [(), (80.0,), (80.0, None)])
def test_nothing_is_said_of_one_pair_without_noise(dense):
    found = apart([10.0], [80.0], dense=dense)
    assert found.margin is None
    assert [found.no_worse(bound).held for bound in (0.0, 1000.0)] == [None, None]
    assert found.said() == "own 10.00, other 80.00: -70.00, of unknown noise (seed 0)"


@pytest.mark.parametrize("higher_is_better", [True, False])
@pytest.mark.parametrize("relative", [True, False])
def test_a_row_that_diverged_is_worse_than_any(higher_is_better, relative):
    told = {"higher_is_better": higher_is_better, "relative": relative}
    assert apart([None], [80.0], **told).no_worse(1e9).held is False
    assert apart([None, 80.0], [80.0, 80.0], **told).no_worse(1e9).held is False
    assert apart([80.0], [None], **told).better(1e9).held is True
    assert apart([None], [None], **told).no_worse(1e9).held is None
    assert apart([None], [80.0], **told).said() == "own diverged, other 80.00: diverged (seed 0)"


def test_two_seeds_take_their_noise_from_all_rows_of_the_table():
    """By hand: without what rows and seeds add, ±0.5 is left four times and 0 twice, of 2 degrees of freedom."""
    rows = [{0: 1.0, 1: 3.0}, {0: 5.0, 1: 6.0}, {0: 9.0, 1: 12.0}]
    found = in_blocks(rows, (0, 1))
    assert found == Spread(pytest.approx(math.sqrt(2 * (4 * 0.25) / 2)), 2)
    assert in_blocks([*rows, {0: 1.0}, {0: 1.0, 1: None}], (0, 1)) == found, "rows that lack a seed or diverged"
    assert in_blocks(rows[:2], (0, 1)) is None
    apart = difference(rows[1], rows[0], names=("a", "b"), higher_is_better=True, together=partial(in_blocks, rows))
    assert apart.mean == 3.5
    assert apart.margin == pytest.approx(student(2) * found.std / math.sqrt(2))
    relative = difference(
        rows[1], rows[0], names=("a", "b"), higher_is_better=True, together=partial(in_blocks, rows), relative=True
    )
    assert relative.margin == pytest.approx(apart.margin / 2.0), "as a share of the second row's mean"


def test_three_seeds_have_their_own_noise():
    rows = [{0: 1.0, 1: 3.0, 2: 2.0}, {0: 5.0, 1: 6.0, 2: 7.0}, {0: 9.0, 1: 12.0, 2: 0.0}]
    alone = difference(rows[1], rows[0], names=("a", "b"), higher_is_better=True)
    together = partial(in_blocks, rows)
    assert difference(rows[1], rows[0], names=("a", "b"), higher_is_better=True, together=together) == alone


@settings(max_examples=50)
@given(st.integers(0, 2**31))
def test_the_noise_of_a_table_is_found_whatever_rows_and_seeds_add(seed):
    """Of 400 rows with noise of 0.3 a paired difference has √2 · 0.3, however good rows are and easy seeds."""
    rng = random.Random(seed)
    easy = [rng.uniform(-50, 50) for _ in range(2)]
    rows = [
        {at: rng.gauss(0, 0.3) + easy[at] + level for at in (0, 1)}
        for level in (rng.uniform(-50, 50) for _ in range(400))
    ]
    found = in_blocks(rows, (0, 1))
    assert found is not None
    assert found.degrees == 399
    assert found.std == pytest.approx(math.sqrt(2) * 0.3, rel=0.25)


def test_rows_of_other_seeds_are_not_compared():
    with pytest.raises(LookupError, match="needs rows own and other of one seed"):
        difference({0: 1.0}, {1: 1.0}, names=("own", "other"), higher_is_better=True)


@pytest.mark.parametrize("first", OUTCOMES)
@pytest.mark.parametrize("second", OUTCOMES)
def test_findings_are_joined_as_if_what_is_open_could_be_either(first, second):
    def known(held):
        return {True, False} if held is None else {held}

    def seen(outcomes):
        return outcomes.pop() if len(outcomes) == 1 else None

    one, other = Finding(first, ("a",)), Finding(second, ("b",))
    both = {(a, b) for a in known(first) for b in known(second)}
    assert (one & other).held is seen({a and b for a, b in both})
    assert (one | other).held is seen({a or b for a, b in both})
    assert every([one, other]).held is (one & other).held
    assert some([one, other]).held is (one | other).held
    assert (~one).held is seen({not a for a in known(first)})
    assert (one & other).figures == (one | other).figures == ("a", "b")


def test_facts_without_noise_join_in():
    assert (Finding(None) & False).held is False
    assert (True & Finding(None)).held is None
    assert (True | Finding(None)).held is True
    assert every([]).held is True
    assert some([]).held is False


def test_a_finding_is_not_taken_for_true():
    with pytest.raises(TypeError, match="neither true nor false"):
        all([Finding(None)])
