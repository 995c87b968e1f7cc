"""Peers come, die, freeze, leave and return whenever they like: what always holds, holds.

``python -m tests.schedules`` runs any seeds.
"""

from __future__ import annotations

import pytest
import torch

from tests.schedules.drawing import Schedule, draw
from tests.schedules.invariants import Ledger
from tests.schedules.running import problems_of
from tests.thorough import thorough

#: Together they have all that may happen. In 7 a peer is interrupted when it has just been put into a round.
SEEDS = (7, 105, 108, 110, 125)


def test_the_seeds_have_all_that_may_happen():
    schedules = [draw(seed) for seed in SEEDS]
    happens = {what for s in schedules for what, *_ in s["events"]}
    assert happens == {"kill", "leave", "interrupt", "freeze", "come", "store"}
    assert {where for s in schedules for *_, where, _ in s["events"]} == {"training", "line", "after", "set-up"}
    assert {s["serves"] for s in schedules} == {"command", "peer"}


def test_a_schedule_is_what_its_line_says():
    for seed in range(300):
        assert Schedule.parse(str(draw(seed))) == draw(seed)


@pytest.mark.parametrize("seed", [*SEEDS, *thorough(*range(1000, 1040))])
def test_what_always_holds_holds(seed):
    s = draw(seed)
    problem = problems_of(s)
    assert not problem, f"{s}\n{problem}"


#: What each of two peers brings to a round, and the steps that it has taken for it.
UPDATES, WEIGHTS = ((1.0, 3.0), (2.0, -1.0)), (1.0, 3.0)
MEAN = (1.75, 0.0)


def reported(moved=MEAN, *, residual_after=0.0, votes=2, kept=0.0):
    """The ledger of a round that moved parameters so, and of a second one, to which a peer comes with this residual."""
    ledger = Ledger(Schedule())
    before = torch.zeros(2)
    view = [(str(peer), weight) for peer, weight in enumerate(WEIGHTS)]
    nothing = torch.zeros(0)
    ledger.after("0", 1, 1, before, nothing, 1.0, 2.0)
    for peer in range(votes):
        residuals = {"before": torch.zeros(2), "after": torch.full((2,), residual_after)}
        update = torch.tensor(UPDATES[peer], dtype=torch.float64)
        ledger.brings(2, 1, view, str(peer), {"update": update, "weight": WEIGHTS[peer], **residuals})
    ledger.outcome(2, committed=True)
    ledger.after("0", 2, 2, torch.tensor(moved), nothing, 1.0, 1.0)
    again = {"update": torch.zeros(2), "weight": 1.0, "before": torch.full((2,), kept), "after": torch.full((2,), kept)}
    ledger.brings(3, 2, view, "0", again)
    ledger.check()
    return ledger.problems


def test_the_ledger_notices_what_is_lost_or_applied_twice():
    assert reported() == []
    (problem,) = reported(moved=tuple(2 * x for x in MEAN))
    assert problem.startswith("round 2 moved parameters by 3.5, and the mean of what peers brought is 1.75")
    assert "round 2 moved" in reported(moved=(0.25, 0.75))[0]  # without the second peer
    assert "round 2 moved" in reported(residual_after=0.5, kept=0.5)[0]  # sent, and kept all the same
    assert reported(moved=(1.25, -0.5), residual_after=0.5, kept=0.5) == []
    assert "the residuals of 0 changed by 0.5 before it" in reported(kept=0.5)[0]
    assert "without the votes of ['1']" in reported(votes=1)[0]
