"""Differences between two rows over seeds, and what the noise between seeds lets one conclude from them.

Rows of one seed begin with the same parameters and see the same batches, so they are compared only with each other:
d_s = a_s − b_s for every seed s that both rows have. Over n seeds the difference is

    mean(d) ± t · s_d / √n

with the sample's standard deviation s_d and Student's t for 95 % and n − 1 degrees of freedom (Student 1908, "The
probable error of a mean", Biometrika 6, 1–25). One seed alone does not show its noise. In that case the noise is taken
from the rows without compression: with m ≥ 2 seeds whose scores have the standard deviation s, two runs differ by
chance with √2 · s, so the margin is t · √2 · s with m − 1 degrees of freedom. This margin is rather large, because
rows of one seed have something in common. If there are no such rows either, the noise is unknown and no conclusion is
drawn.

Two seeds say little about their noise (t = 12.7). If several rows of a table have the same two seeds, their noise is
pooled, as in an experiment in randomized blocks (Fisher 1935, "The Design of Experiments", chapter 4): a score is an
effect of its row, plus an effect of its seed on all rows, plus chance. The remainder after both effects has
(R − 1)(n − 1) degrees of freedom for R rows of n seeds. :func:`in_blocks` returns how far chance alone moves a paired
difference. This assumes that all rows of the table are about equally noisy.

A row that diverged is worse than any that did not, whatever the noise.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Difference", "Finding", "Spread", "difference", "every", "in_blocks", "mean_of", "some", "student"]

#: Student's t for two-sided 95 % and 1, 2, … degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student(degrees: int) -> float:
    """Return Student's t for two-sided 95 %; above ten degrees of freedom that of ten, which is on the safe side.

    Raises:
        ValueError: less than one degree of freedom.
    """
    if degrees < 1:
        raise ValueError(f"degrees={degrees} must be at least 1: a spread takes two values")
    return _STUDENT[min(degrees, len(_STUDENT)) - 1]


@dataclass(frozen=True)
class Finding:
    """Whether figures support a statement. Findings are combined with ``&``, ``|`` and ``~``.

    If one part is not resolved, so is the whole, unless the other part decides it: a false part decides ``&``, and a
    true part decides ``|`` (Kleene's three-valued logic). ``and``, ``or``, ``not`` and ``all`` cannot do this, so a
    finding has no truth value.

    Attributes:
        held: whether the statement held; None if noise prevents a conclusion.
        figures: the figures that were compared.

    Example:
        >>> (Finding(True, ("0.2 ± 0.1",)) & Finding(None, ("0.5 ± 1",))).held is None
        True
    """

    held: bool | None
    figures: tuple[str, ...] = ()

    def __and__(self, other: Finding | bool) -> Finding:
        return self._joined(other, decides=False)

    def __or__(self, other: Finding | bool) -> Finding:
        return self._joined(other, decides=True)

    __rand__ = __and__
    __ror__ = __or__

    def __invert__(self) -> Finding:
        return Finding(None if self.held is None else not self.held, self.figures)

    def __bool__(self) -> bool:
        raise TypeError("a finding may be unresolved, so it is neither true nor false: join findings with &, | and ~")

    def _joined(self, other: Finding | bool, *, decides: bool) -> Finding:
        own = other if isinstance(other, Finding) else Finding(other)
        both = (self.held, own.held)
        held = decides if decides in both else None if None in both else not decides
        return Finding(held, tuple(dict.fromkeys((*self.figures, *own.figures))))


def every(findings: Iterable[Finding | bool]) -> Finding:
    """Return the conjunction: it held if every finding held, and did not if one did not."""
    return functools.reduce(Finding.__and__, findings, Finding(True))


def some(findings: Iterable[Finding | bool]) -> Finding:
    """Return the disjunction: it held if one finding held, and did not if none did."""
    return functools.reduce(Finding.__or__, findings, Finding(False))


@dataclass(frozen=True)
class Difference:
    """The difference between the scores of two rows, made by :func:`difference`.

    Attributes:
        names: names of the two rows.
        scores: each row's mean over the seeds that both have; None if the row diverged.
        mean: mean of the paired differences, first − second; ± inf if one row diverged, NaN if both did.
        margin: half of the 95 % interval; None if the noise is unknown.
        seeds: the seeds that both rows have.
        higher_is_better: whether a higher score is better.
        relative: whether the difference is a share of the second row's score.
        of: what the pairs are, in words, if they are not seeds.
        without: text for a row that has no score.
    """

    names: tuple[str, str]
    scores: tuple[float | None, float | None]
    mean: float
    margin: float | None
    seeds: tuple[int, ...]
    higher_is_better: bool
    relative: bool = False
    of: str = ""
    without: str = "diverged"

    def no_worse(self, by: float = 0.0) -> Finding:
        """Return whether the first row is worse than the second by no more than ``by``."""
        return self._found(lambda worse, margin: _at_most(worse, margin, by))

    def worse(self, by: float = 0.0) -> Finding:
        """Return whether the first row is worse than the second by more than ``by``."""
        return ~self.no_worse(by)

    def better(self, by: float = 0.0) -> Finding:
        """Return whether the first row is better than the second by more than ``by``."""
        return ~self._found(lambda worse, margin: _at_most(-worse, margin, by))

    def within(self, by: float) -> Finding:
        """Return whether the first row is neither worse nor better than the second by more than ``by``."""
        return self.no_worse(by) & ~self.better(by)

    def figure(self) -> str:
        """Format the difference and its margin: ``-0.36 ± 0.50``, or in per cent."""
        if not math.isfinite(self.mean):
            return self.without
        unit = 100.0 if self.relative else 1.0
        sign = " %" if self.relative else ""
        margin = "" if self.margin is None else f" ± {unit * self.margin:.2f}{sign}"
        return f"{unit * self.mean:+.2f}{sign}{margin}"

    def said(self) -> str:
        """Format both scores, the difference, and the seeds or other pairs that it is taken over."""
        means = ", ".join(
            f"{name} {self.without if score is None else format(score, '.2f')}"
            for name, score in zip(self.names, self.scores, strict=True)
        )
        seeds = f"{'seed' if len(self.seeds) == 1 else 'seeds'} {', '.join(map(str, self.seeds))}"
        unknown = ", of unknown noise" if self.margin is None and math.isfinite(self.mean) else ""
        return f"{means}: {self.figure()}{unknown} ({self.of or seeds})"

    def _found(self, says: Callable[[float, float | None], bool | None]) -> Finding:
        return Finding(says(-self.mean if self.higher_is_better else self.mean, self.margin), (self.said(),))


@dataclass(frozen=True)
class Spread:
    """The standard deviation of a paired difference, estimated from several rows, and its degrees of freedom."""

    std: float
    degrees: int


def in_blocks(rows: Iterable[Mapping[int, float | None]], seeds: Sequence[int]) -> Spread | None:
    """Estimate how far chance moves the difference of two rows of one seed, from all rows that have these seeds.

    Args:
        rows: seed → score, for each row of a table; rows that lack a seed or diverged are left out.
        seeds: seeds of the pairs.

    Returns:
        The spread; None with fewer than three rows, because it would be the spread of the difference itself.

    Example:
        >>> in_blocks([{0: 1.0, 1: 2.0}, {0: 3.0, 1: 4.0}, {0: 6.0, 1: 7.0}], (0, 1))
        Spread(std=0.0, degrees=2)
    """
    whole = [[score for seed in seeds if (score := row.get(seed)) is not None] for row in rows]
    table = [scores for scores in whole if len(scores) == len(seeds)]
    if len(table) < 3 or len(seeds) < 2:
        return None
    of_seed = [statistics.mean(scores) for scores in zip(*table, strict=True)]
    overall = statistics.mean(of_seed)
    left = [
        score - statistics.mean(scores) - block + overall
        for scores in table
        for score, block in zip(scores, of_seed, strict=True)
    ]
    degrees = (len(table) - 1) * (len(seeds) - 1)
    return Spread(math.sqrt(2.0 * sum(each * each for each in left) / degrees), degrees)


def difference(
    first: Mapping[int, float | None],
    second: Mapping[int, float | None],
    *,
    names: tuple[str, str],
    higher_is_better: bool,
    dense: Sequence[float | None] = (),
    together: Callable[[Sequence[int]], Spread | None] = lambda _: None,
    relative: bool = False,
) -> Difference:
    """Compare one row's scores with another's, over the seeds that both have.

    Args:
        first: seed → score of the first row; None where it diverged.
        second: the same for the second row.
        names: names of the two rows.
        higher_is_better: whether a higher score is better.
        dense: scores of rows without compression, one per seed. Their spread is the noise if there is only one pair.
        together: called with the seeds if there are exactly two; returns the spread of a difference, estimated from the
            table's rows.
        relative: take each difference as a share of the second row's score.

    Raises:
        LookupError: the two have no seed in common.

    Example:
        >>> found = difference({0: 81.0, 1: 80.0}, {0: 81.5, 1: 80.5}, names=("a", "b"), higher_is_better=True)
        >>> found.mean, found.margin, found.no_worse(1.0).held
        (-0.5, 0.0, True)
    """
    seeds = tuple(seed for seed in first if seed in second)
    if not seeds:
        raise LookupError(f"needs rows {names[0]} and {names[1]} of one seed")
    pairs = [(first[seed], second[seed]) for seed in seeds]
    bad = -math.inf if higher_is_better else math.inf
    apart = []
    for one, other in pairs:
        own, to = (bad if score is None else score for score in (one, other))
        apart.append((own - to) / (to if relative and math.isfinite(to) else 1.0))
    mean = sum(apart) / len(apart)
    there = [score for score in dense if score is not None]
    margin = None
    unit = abs(statistics.mean(score or 1.0 for _, score in pairs)) if relative else 1.0
    if not math.isfinite(mean):
        margin = None
    elif len(apart) == 2 and (spread := together(seeds)) is not None and spread.degrees > 1:
        margin = student(spread.degrees) * spread.std / (math.sqrt(2.0) * unit)
    elif len(apart) > 1:
        margin = student(len(apart) - 1) * statistics.stdev(apart) / math.sqrt(len(apart))
    elif len(there) == len(dense) > 1:
        margin = student(len(there) - 1) * math.sqrt(2.0) * statistics.stdev(there) / unit
    one, other = (mean_of([pair[at] for pair in pairs]) for at in (0, 1))
    return Difference(names, (one, other), mean, margin, seeds, higher_is_better, relative)


def _at_most(worse: float, margin: float | None, bound: float) -> bool | None:
    if math.isnan(worse):
        return None
    if math.isinf(worse):
        return worse < 0
    if margin is None:
        return None
    if worse + margin <= bound:
        return True
    return False if worse - margin > bound else None


def mean_of(scores: Sequence[float | None]) -> float | None:
    """Return the mean of scores; None if one of them is missing."""
    there = [score for score in scores if score is not None]
    return statistics.mean(there) if len(there) == len(scores) else None
