"""The time that Mesa costs: steps of every policy of :mod:`reproduce.mesa` beside plain ones (arXiv 2111.11124).

Steps with all policies are timed in one process, each right after a step of the plain model, and reported as ratios to
that step, so that other load on the machine affects both alike. ``python -m reproduce.mesa_memory`` times them, on one
thread; its record and page have them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from narrowband.bench.memory import compare
from narrowband.bench.subjects import Subject
from narrowband.bench.ways import Way
from narrowband.units import NOTHING
from reproduce.activations import read_policy
from reproduce.groups import Claim, claimed
from reproduce.mesa import TIMED
from reproduce.pairs import Finding, difference
from reproduce.report import Column, Legend

__all__ = ["COLUMNS", "LEGEND", "Step", "claims", "measure", "timed"]

#: The share of the plain speed that is left with 8 bits, according to the paper.
_HALF = 0.5


@dataclass(frozen=True)
class Step:
    """The time of a step under one policy.

    Attributes:
        name: name of the row of :mod:`reproduce.mesa`.
        ratios: the step's time over that of the plain step right before it, one ratio per round.
        kept_share: bytes kept for backward, as a share of those kept plain in the same arithmetic.
    """

    name: str
    ratios: list[float]
    kept_share: float

    @property
    def table(self) -> str:
        """The table that this line belongs to."""
        return "steps"

    @property
    def ratio(self) -> float:
        """The median of ``ratios``."""
        return statistics.median(self.ratios)

    def spread(self) -> str:
        """Return the quartiles of ``ratios``, in words."""
        if len(self.ratios) < 2:
            return NOTHING
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return f"{low:.2f} to {high:.2f}"


def timed(*, quick: bool = False) -> list[Way]:
    """Return the ways whose steps are timed; the plain one is first. ``quick``: it and the paper's policy alone."""
    own = [Way(row.name, read_policy(row.activations), amp=row.amp) for row in TIMED]
    return [way for way in own if not quick or way.name in ("dense", "mesa")]


def measure(
    ways: Sequence[Way],
    build: Callable[[], Subject],
    *,
    rounds: int,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Step]:
    """Time ``rounds`` steps of each way, the first of which is the plain one.

    Args:
        ways: ways to train, the plain one first.
        build: returns the model, and a batch of inputs.
        rounds: timed steps of each way.
        seed: of parameters and inputs.
        tell: called for every timed step with a short message about it.
    """
    rows = compare(ways, build, rounds=rounds, peaks=False, seed=seed, on_event=tell)
    return [Step(row["name"], row["ratios"], 1 - row["saved_of_own"]) for row in rows]


def claims(found: Sequence[Step]) -> Iterator[Claim]:
    """Yield the paper's claims about the time of a step, and whether they held."""
    steps = {step.name: step for step in found}
    half = f"8 bits of everything: training is at least {_HALF:.0%} as fast"
    yield _faster(half, steps, "mesa", None)
    yield _faster("table 2: running estimates are faster than statistics per sample", steps, "mesa", "per sample")
    yield _faster("table 3: rounding to the nearest is faster than at random", steps, "nearest", "mesa")
    yield _faster("table 4: symmetric ranges are faster than asymmetric ones", steps, "symmetric", "mesa")
    yield _faster("table 8: attention costs more time than feed-forward", steps, "feed-forward", "attention")


def _faster(text: str, steps: Mapping[str, Step], one: str, other: str | None) -> Claim:
    """Judge, by paired rounds, the claim that a row's step is faster than another row's, or than two plain steps."""
    if not {one, other or one} <= steps.keys():
        return Claim(text, None, f"needs steps of {one}{f' and {other}' if other else ''}")
    own = dict(enumerate(steps[one].ratios))
    to = dict(enumerate(steps[other].ratios)) if other else dict.fromkeys(own, 1 / _HALF)
    apart = difference(own, to, names=(one, other or "the bound"), higher_is_better=False)
    told = "; ".join(
        f"{name} {steps[name].ratio:.2f} times a plain step (quartiles {steps[name].spread()})"
        for name in (one, other)
        if name
    )
    figures = f"{told}; {f'round by round {apart.figure()}' if other else f'{apart.figure()} from {1 / _HALF:g} times'}"
    return claimed(text, Finding(apart.better().held), figures)


LEGEND: Legend = (
    ("step", "the median over rounds of a row's step over the plain float32 step right before it, in one process"),
    ("kept", "of a step's activations, as a share of what is kept plain in the same arithmetic"),
)

COLUMNS: tuple[Column, ...] = (
    ("row", lambda step: step.name),
    ("step", lambda step: f"{step.ratio:.2f}×"),
    ("quartiles", Step.spread),
    ("kept", lambda step: f"{step.kept_share:.0%}"),
)
