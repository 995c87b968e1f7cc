"""Compute times to the target from the rows of :mod:`reproduce.cssgd`, by method, number of nodes and seed.

A time to the target is the number of steps times the seconds of a step. Training behind links measures the product
directly. Elsewhere the two factors are measured apart: steps are counted in one process, seed by seed (all synchronous
methods take the same number), and a step is timed behind links. Only times of the same seed are compared
(:mod:`reproduce.pairs`).

Two synchronous methods take the same steps with every seed, so their times differ by the same share with every seed,
and seeds say nothing about the noise. The noise is in the timing: the stretches between two tests, or the rounds in
which steps were timed, are paired in order between the two runs. Such a margin does not cover what would change in a
run on another day.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrowband.coded import Assignment
from narrowband.units import format_bytes, format_seconds
from reproduce.cssgd_problem import ALONE, ASGD, CHOSEN, NAMED
from reproduce.groups import NOTHING
from reproduce.pairs import Difference, difference
from reproduce.report import seeded

__all__ = [
    "Count",
    "Method",
    "Result",
    "Times",
    "averaged",
    "counted_steps",
    "counts_of",
    "less_time",
    "methods_of",
    "points_of",
    "predicted_s",
    "rows_in",
    "scheme",
    "sent_until",
    "uneven_pairs",
]

Result = dict[str, Any]

#: Seed → seconds to the target; None where the target was not reached.
Times = dict[int, float | None]


def rows_in(results: Sequence[Result], section: str, task: str | None = None) -> list[Result]:
    """Return the rows of a section, of one task or of all tasks."""
    return [
        result
        for result in results
        if (result.get("section") or result["kind"]) == section and task in (None, result["task"])
    ]


@dataclass(frozen=True)
class Method:
    """A method's training behind links, over seeds.

    Attributes:
        run: the run of the first seed.
        times: seconds to the target by seed. Where only the first seed was trained behind links, the others' times are
            their steps, counted in one process, times the seconds of a step in the first seed's run.
        steps: steps to the target by seed.
        trained: the seeds trained behind links.
    """

    run: Result
    times: Times
    steps: dict[int, int | None]
    trained: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Return the mean time over seeds; infinite where one seed did not reach the target."""
        return statistics.mean(math.inf if seconds is None else seconds for seconds in self.times.values())

    def time(self) -> str:
        """Return the mean time in words, with its spread where there are several seeds."""
        if not math.isfinite(self.seconds):
            return f"> {format_seconds(self.run['curve'][-1][1])}"
        there = [seconds for seconds in self.times.values() if seconds is not None]
        spread = f" ± {format_seconds(statistics.stdev(there))}" if len(there) > 1 else ""
        return f"{format_seconds(self.seconds)}{spread}"


def methods_of(results: Sequence[Result], task: str) -> dict[str, Method]:
    """Return the methods trained behind links, by name."""
    found: dict[str, Method] = {}
    runs = [run for run in rows_in(results, "train", task) if run["kind"] == "train"]
    for name in dict.fromkeys(run["name"] for run in runs):
        own = {run["seed"]: run for run in runs if run["name"] == name}
        first = next(iter(own.values()))
        steps = {seed: run["reached"] and int(run["reached"][0]) for seed, run in own.items()}
        times = {seed: run["reached"] and run["reached"][1] for seed, run in own.items()}
        if name != ASGD and first["reached"]:
            counted = counted_steps(results, task, "train", first["nodes"], ALONE)
            steps = counted | steps
            step_s = first["reached"][1] / first["reached"][0]
            times = {seed: None if taken is None else taken * step_s for seed, taken in counted.items()} | times
        in_order = sorted(times)
        found[name] = Method(
            first, {seed: times[seed] for seed in in_order}, {seed: steps[seed] for seed in in_order}, tuple(own)
        )
    return found


def counted_steps(results: Sequence[Result], task: str, section: str, nodes: int, name: str) -> dict[int, int | None]:
    """Return the steps to the target counted in one process, by seed."""
    return {
        row["seed"]: row["reached"]
        for row in rows_in(results, section, task)
        if row["kind"] == "steps" and (row["nodes"], row["name"]) == (nodes, name)
    }


@dataclass(frozen=True)
class Count:
    """Methods on one number of nodes.

    Attributes:
        nodes: the number.
        target: accuracy in percent.
        timed: method → its timed steps.
        steps: method → seed → steps to the target.
    """

    nodes: int
    target: float
    timed: dict[str, Result]
    steps: dict[str, dict[int, int | None]]

    def times(self, name: str) -> Times:
        """Return a method's seconds to the target, by seed."""
        step_s = self.timed[name]["step_s"]
        return {seed: None if taken is None else taken * step_s for seed, taken in self.steps[name].items()}

    def time(self, name: str) -> str:
        """Return the mean over seeds of a method's time to the target, in words."""
        times = list(self.times(name).values()) if name in self.timed else []
        there = [seconds for seconds in times if seconds is not None]
        return format_seconds(statistics.mean(there)) if there and len(there) == len(times) else NOTHING

    def less(self, name: str) -> Difference:
        """Return how much less time the chosen r takes than method ``name``.

        Raises:
            LookupError: rows are missing.
        """
        if not {name, CHOSEN} <= set(self.timed):
            raise LookupError(f"needs timed steps of {name} and {CHOSEN} on {self.nodes} nodes")
        if not self.synchronous(name):
            return _less(self.times(CHOSEN), self.times(name), name)
        apart = _less(self.rounds(CHOSEN), self.rounds(name), name)
        own, other = (self.timed[which]["step_s"] for which in (CHOSEN, name))
        return replace(apart, scores=(own, other), mean=own / other - 1.0, of=_rounds(apart))

    def synchronous(self, name: str) -> bool:
        """Return whether the method takes the same steps as the chosen r, and reaches the target with every seed."""
        return name != ASGD and all(self.steps[name].values())

    def rounds(self, name: str) -> Times:
        """Return a method's seconds per step, round by round."""
        return dict(enumerate(self.timed[name]["round_step_s"]))

    def scheme(self) -> str:
        """Return the redundancy and group that ``nb.choose_redundancy`` chose."""
        return _chosen_scheme(self.timed[CHOSEN]) if CHOSEN in self.timed else NOTHING


def counts_of(results: Sequence[Result], task: str) -> list[Count]:
    """Return a :class:`Count` for each number of nodes with measurements."""
    timed = rows_in(results, "nodes", task)
    found = []
    for nodes in sorted({row["nodes"] for row in timed}):
        counted = {name: counted_steps(results, task, "steps", nodes, name) for name in (ALONE, ASGD)}
        targets = [row["target"] for row in rows_in(results, "steps", task) if row["nodes"] == nodes]
        found.append(
            Count(
                nodes,
                targets[0] if targets else math.nan,
                {row["name"]: row for row in timed if row["nodes"] == nodes},
                {name: counted[ASGD if name == ASGD else ALONE] for name in NAMED},
            )
        )
    return found


def less_time(own: Method, other: Method, name: str) -> Difference:
    """Return how much less time the chosen r takes than another method, as a share.

    Stretches of one run each are paired. With ASGD, or where a seed of either method did not reach the target, times of
    the same seed are paired instead.

    Args:
        own: the method with the chosen r.
        other: the method to compare with.
        name: name of the other method.
    """
    if name == ASGD or not all(math.isfinite(method.seconds) for method in (own, other)):
        apart = _less(own.times, other.times, name)
        counted = [seed for seed in apart.seeds if seed not in own.trained]
        return replace(apart, of=f"{seeded(apart.seeds)}; {CHOSEN} by steps times one timing") if counted else apart
    apart = _less(_stretches(own.run), _stretches(other.run), name)
    scores = own.run["reached"][1], other.run["reached"][1]
    count = len(apart.seeds)
    of = f"one run each, {count} {'stretch' if count == 1 else 'stretches'} between tests"
    return replace(apart, scores=scores, mean=scores[0] / scores[1] - 1.0, of=of)


def _stretches(run: Result) -> Times:
    """Return the seconds per step in each stretch between two tests, keyed by the step at the stretch's end."""
    marks = [(0, 0.0), *((int(step), float(seconds)) for step, seconds, *_ in run["curve"])]
    return {there: (then - now) / (there - here) for (here, now), (there, then) in itertools.pairwise(marks)}


def _rounds(apart: Difference) -> str:
    return f"{len(apart.seeds)} {'round' if len(apart.seeds) == 1 else 'rounds'} of timing"


def _less(own: Times, other: Times, name: str) -> Difference:
    found = difference(own, other, names=(CHOSEN, name), higher_is_better=False, relative=True)
    return replace(found, without="did not arrive")


def _chosen_scheme(result: Result) -> str:
    return f"r = {result['choice']['redundancy']}, g = {result['choice']['group']}"


def scheme(run: Result) -> str:
    """Return the redundancy and group of a run, in words, where it has any."""
    if run["method"] == "chosen":
        return _chosen_scheme(run)
    return f"r = {run['redundancy']}, g = {run['group'] or run['nodes']}" if run["method"] == "coded" else NOTHING


def averaged(counts: Sequence[Count], name: str) -> Difference:
    """Return how much less time the chosen r takes than method ``name``, on average over numbers of nodes.

    Averages are taken round by round. With ASGD, or where a seed did not reach the target, they are taken seed by seed.

    Raises:
        LookupError: rows are missing.
    """
    if not counts:
        raise LookupError("needs steps timed on several numbers of nodes, and counted")
    apart = [count.less(name) for count in counts]  # raises LookupError where rows are missing
    by_round = all(count.synchronous(name) for count in counts)
    pairs: dict[int, list[tuple[float | None, float | None]]] = {}
    for count in counts:
        own, other = (count.rounds(which) if by_round else count.times(which) for which in (CHOSEN, name))
        for at in sorted(own.keys() & other.keys()):
            pairs.setdefault(at, []).append((own[at], other[at]))
    shares: Times = {}
    whole: Times = {}
    for at, found in pairs.items():
        reached = [(one, two) for one, two in found if one is not None and two is not None]
        shares[at] = None if any(one is None for one, _ in found) else statistics.mean(a / b for a, b in reached)
        whole[at] = None if any(two is None for _, two in found) else 1.0
    mean = _less(shares, whole, name)
    if not by_round:
        return mean
    share = statistics.mean(one.mean for one in apart)
    return replace(mean, scores=(1.0 + share, 1.0), mean=share, of=_rounds(mean))


def sent_until(run: Result) -> str:
    """Return the bytes sent until the target, in words."""
    return format_bytes(run["reached"][2]) if run["reached"] else NOTHING


def predicted_s(said: dict[str, Any]) -> float:
    """Return the seconds that ``nb.choose_redundancy`` predicts for its choice."""
    chosen = (said["redundancy"], said["group"])
    return float(next(c["seconds"] for c in said["candidates"] if (c["redundancy"], c["group"]) == chosen))


def points_of(results: Sequence[Result], task: str) -> list[dict[str, Any]]:
    """Return a batch's time against r: as measured, by the library's model T(r), and by the paper's formula."""
    points = []
    for row in rows_in(results, "batch", task):
        r, g, n = row["redundancy"], row["group"], row["nodes"]
        place = (n, row["rate"])
        said = next((c["choices"] for c in rows_in(results, "choice", task) if (c["nodes"], c["rate"]) == place), None)
        load = Assignment(n, r, g).load()
        point: dict[str, Any] = {
            "r": r,
            "g": g,
            "n": n,
            "load": load,
            "measured": row["step_s"],
            "sent": row["sent_bytes"],
        }
        if said is not None:
            compute, communicate = said["multicast"]["compute_s"], said["multicast"]["communicate_s"]
            point["predicted"] = r * compute + communicate * load
            point["paper"] = r * compute + communicate / r
        points.append(point)
    return points


def uneven_pairs(results: Sequence[Result]) -> list[tuple[Result, Result]]:
    """Return pairs of rows with equal and with uneven shares, one pair per redundancy."""
    rows = {(row["redundancy"], bool(row["shares"])): row for row in rows_in(results, "shares")}
    return [(rows[r, False], rows[r, True]) for r, uneven in rows if uneven and (r, False) in rows]
