"""Group rows over seeds, compare groups, and judge claims by them."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reproduce.pairs import Difference, Finding, difference, in_blocks, mean_of
from reproduce.settings import settings

__all__ = [
    "DENSE",
    "MARGIN",
    "NOTHING",
    "Claim",
    "Group",
    "as_good_as",
    "claimed",
    "compared",
    "counted",
    "groups",
    "judged",
    "named",
    "needed",
    "summed",
]

#: Name of the row without compression, which others are compared with.
DENSE = "dense"

#: Shown in place of a figure that a row does not have.
NOTHING = "–"
_DIVERGED = "diverged"

#: How :mod:`reproduce.pairs` computes the margin of a difference, for legends.
MARGIN = (
    "Student's t over pairs; of a single seed by the spread of the uncompressed rows, of two by that of all rows of "
    "the table"
)


@dataclass(frozen=True)
class Group:
    """One row over its seeds.

    Attributes:
        task: task of the rows.
        name: name of the rows.
        spec: spec for ``nb.compress_gradients``, or what crosses boundaries forward and backward.
        metric: what ``scores`` measure.
        higher_is_better: whether a higher score is better.
        epochs: epochs of each row.
        nodes: number of ranks.
        parameters: number of trained parameters.
        seeds: a seed per row.
        scores: a score per row, of the last epoch; None where a row diverged.
        mean: mean of the scores; None if one diverged.
        std: sample standard deviation of the scores; None for fewer than two, or if one diverged.
        against_dense: mean difference from the dense row of the same task and epochs, over the seeds that both have;
            None without such seeds, or where one diverged.
        margin: margin of that difference at 95 %, see :mod:`reproduce.pairs`; None where the noise is unknown.
        dense_scores: scores of that dense row, one per seed; their spread gives the noise where there is one pair.
        beside: seed → score, of each row of the same task and epochs; pooled, they give the noise of two pairs.
        sent_bytes_per_step: bytes that a rank sends per step in the last epoch.
        ratio: bytes of a dense ring all-reduce over bytes sent.
        mean_ratio: the same, over all steps of training.
        compressed_ratio: the same, without the first steps that are not compressed.
        payload_ratio: bytes of a dense gradient over bytes of one rank's payload.
        matrix_ratio: the same, of compressed tensors alone.
        step_s: seconds of a step in the last epoch; the median over steps and then seeds.
        uncompressed: for rows with boundaries: the mean score when boundaries do not compress in evaluation; None if
            one diverged.
        uncompressed_scores: these scores, one per seed.
        boundaries: for each boundary, how many times fewer bytes crossed it forward and backward.
        samples_per_s: samples per second of training; the median over seeds.
        plain_bytes: for rows with an activation policy: bytes that backward would keep of a step without the policy.
        kept_bytes: bytes that backward keeps of a step with the policy.
        decide_share: seconds that a policy took to decide, as a share of the seconds of training.
        gradient_error: for rows with an activation policy: distance of a gradient from the exact one, as a share of its
            norm; the mean over seeds.
        settings: what the rows were trained with, in words, see :mod:`reproduce.settings`.
    """

    task: str
    name: str
    spec: str
    metric: str
    higher_is_better: bool
    epochs: int
    nodes: int
    parameters: int
    seeds: tuple[int, ...]
    scores: tuple[float | None, ...]
    mean: float | None
    std: float | None
    against_dense: float | None
    margin: float | None
    dense_scores: tuple[float | None, ...]
    sent_bytes_per_step: float
    ratio: float | None
    mean_ratio: float | None
    payload_ratio: float | None
    matrix_ratio: float | None
    step_s: float
    uncompressed: float | None = None
    uncompressed_scores: tuple[float | None, ...] = ()
    boundaries: tuple[tuple[float, float], ...] = ()
    samples_per_s: float | None = None
    plain_bytes: int | None = None
    kept_bytes: int | None = None
    gradient_error: float | None = None
    decide_share: float | None = None
    compressed_ratio: float | None = None
    settings: dict[str, str] = field(default_factory=dict)
    beside: tuple[dict[int, float | None], ...] = ()

    def score(self) -> str:
        """Return the mean score in words, with its standard deviation where there are several seeds."""
        if self.mean is None:
            return _DIVERGED
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"

    def of_seeds(self, seeds: Collection[int]) -> Group:
        """Return this group with the scores of ``seeds`` only, to compare it with rows that have no other seeds."""
        own = tuple((seed, score) for seed, score in zip(self.seeds, self.scores, strict=True) if seed in seeds)
        off = self.uncompressed_scores and tuple(
            score for seed, score in zip(self.seeds, self.uncompressed_scores, strict=True) if seed in seeds
        )
        scores = tuple(score for _, score in own)
        mean, said = mean_of(scores), ", ".join(str(seed) for seed, _ in own)
        return replace(
            self,
            seeds=tuple(seed for seed, _ in own),
            scores=scores,
            mean=mean,
            std=_std(scores),
            uncompressed=mean_of(off) if off else None,
            uncompressed_scores=off,
            settings=self.settings | ({"seeds": said} if "seeds" in self.settings else {}),
        )

    def versus_dense(self) -> str:
        """Return the paired difference from the dense row in words, with its margin where the noise is known."""
        if self.name == DENSE or self.against_dense is None:
            return NOTHING
        return f"{self.against_dense:+.2f}" + ("" if self.margin is None else f" ± {self.margin:.2f}")


@dataclass(frozen=True)
class Claim:
    """A claim, usually of a paper, and whether it held here.

    ``topic`` and the attributes after it are for pages alone (:mod:`reproduce.claims`); records do not keep them.

    Attributes:
        text: what is claimed.
        held: whether the claim held; None where that cannot be said.
        figures: what was found.
        resolved: False where the rows were trained, but the noise between seeds is too large for a verdict.
        setup: whether the claim is about how rows were made comparable, not about their results; such claims are not
            counted.
        topic: heading of the page's table with this claim.
        case: what the claim was tested with, such as a data set; claims that differ only in this share a row.
        said: the claim's text in that table, which need not repeat topic and case; ``text`` when empty.
        found: the figures in that table; ``figures`` when empty.
    """

    text: str
    held: bool | None
    figures: str
    resolved: bool = True
    setup: bool = False
    topic: str = ""
    case: str = ""
    said: str = ""
    found: str = ""

    def __post_init__(self) -> None:
        if not self.resolved and self.held is not None:
            raise ValueError(f"held={self.held} is a verdict, and resolved=False says that there is none: give one")

    def record(self) -> dict[str, Any]:
        """Return the fields that a record keeps."""
        kept = ("text", "held", "figures", "resolved", "setup")
        return {name: getattr(self, name) for name in kept}

    def verdict(self) -> str:
        """Return the verdict in words: held, not held, not resolved or not tested."""
        return {True: "held", False: "not held", None: "not tested" if self.resolved else "not resolved"}[self.held]


def claimed(text: str, finding: Finding | bool, figures: str = "") -> Claim:
    """Make a claim with the verdict of a finding: held, not held or not resolved.

    Args:
        text: what is claimed.
        finding: comparison of rows that were trained; a bool where there is no noise, as with bytes.
        figures: figures to add to those of the finding.
    """
    own = finding if isinstance(finding, Finding) else Finding(finding)
    said = "; ".join(part for part in (*own.figures, figures) if part)
    return Claim(text, own.held, said, resolved=own.held is not None)


def groups(rows: Sequence[dict[str, Any]]) -> list[Group]:
    """Group the rows that :func:`reproduce.training.run` returns by task, epochs and name, in order of appearance.

    Example:
        >>> [group.name for group in groups(rows)]
        ['dense', 'dgc']
    """
    together: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        together.setdefault((row["task"], row["epochs"], row["name"]), []).append(row)
    by_seed = {place: {row["seed"]: row["score"] for row in own} for place, own in together.items()}
    found = []
    for (task, epochs, name), own in together.items():
        first, scores = own[0], tuple(row["score"] for row in own)
        mean, dense = mean_of(scores), by_seed.get((task, epochs, DENSE), {})
        beside = tuple(each for place, each in by_seed.items() if place[:2] == (task, epochs))
        off = tuple(row["uncompressed_score"] for row in own if "uncompressed_score" in row)
        apart = None
        if dense.keys() & by_seed[task, epochs, name].keys():
            apart = difference(
                by_seed[task, epochs, name], dense, names=(name, DENSE),
                higher_is_better=first["higher_is_better"], dense=tuple(dense.values()),
                together=functools.partial(in_blocks, beside),
            )  # fmt: skip
        speeds = [row["samples_per_s"] for row in own if "samples_per_s" in row]
        found.append(
            Group(
                task=task,
                name=name,
                spec=first["spec"],
                metric=first["metric"],
                higher_is_better=first["higher_is_better"],
                epochs=epochs,
                nodes=first["nodes"],
                parameters=first["parameters"],
                seeds=tuple(row["seed"] for row in own),
                scores=scores,
                mean=mean,
                std=_std(scores),
                against_dense=None if apart is None or not math.isfinite(apart.mean) else apart.mean,
                margin=None if apart is None else apart.margin,
                dense_scores=tuple(dense.values()),
                sent_bytes_per_step=statistics.mean(row["sent_bytes_per_step"] for row in own),
                ratio=_times_less(own, together.get((task, epochs, DENSE), [])),
                mean_ratio=mean_of([row.get("mean_ratio") for row in own]),
                payload_ratio=first["payload_ratio"],
                matrix_ratio=first["matrix_ratio"],
                step_s=statistics.median(row["step_s"] for row in own),
                uncompressed=mean_of(off) if off else None,
                uncompressed_scores=off,
                boundaries=tuple((forward, backward) for forward, backward in first.get("boundaries", ())),
                samples_per_s=statistics.median(speeds) if speeds else None,
                plain_bytes=first.get("plain_bytes"),
                kept_bytes=first.get("kept_bytes"),
                gradient_error=mean_of([row.get("gradient_error") for row in own]),
                decide_share=mean_of([row["decide_s"] / row["wall_s"] if row.get("plans") else None for row in own]),
                compressed_ratio=mean_of([row.get("compressed_ratio", row.get("mean_ratio")) for row in own]),
                settings=settings(first) | {"seeds": ", ".join(str(row["seed"]) for row in own)},
                beside=beside,
            )
        )
    return found


def _times_less(own: Sequence[dict[str, Any]], dense: Sequence[dict[str, Any]]) -> float | None:
    """Return how many times fewer bytes were sent than uncompressed: by FSDP2, than its own rows have sent, since that
    depends on the backend; elsewhere as each row has counted it.
    """
    if dense and own[0].get("gathered"):
        sent, uncompressed = ([float(row["sent_bytes_per_step"]) for row in rows] for rows in (own, dense))
        return statistics.mean(uncompressed) / statistics.mean(sent)
    return mean_of([row["ratio"] for row in own])


def _std(scores: Sequence[float | None]) -> float | None:
    there = [score for score in scores if score is not None]
    return statistics.stdev(there) if len(there) == len(scores) > 1 else None


def named(found: Sequence[Group], task: str, name: str, epochs: int | None = None) -> Group | None:
    """Return the group of this task and name, or None if it was not trained; the first if several lengths match."""
    own = (group for group in found if (group.task, group.name) == (task, name) and epochs in (None, group.epochs))
    return next(own, None)


def needed(found: Sequence[Group], task: str, name: str, epochs: int | None = None) -> Group:
    """Return the group as :func:`named` does, where it is required.

    Raises:
        LookupError: the group was not trained.
    """
    own = named(found, task, name, epochs)
    if own is None:
        raise LookupError(f"needs the row {name} of task {task}")
    return own


def compared(
    first: Group, second: Group, *, relative: bool = False, of: Callable[[float], float] | None = None
) -> Difference:
    """Compare two groups over the seeds that both have. All claims that compare rows use this function.

    Args:
        first: the group that the claim is about.
        second: the group to compare it with.
        relative: express differences as shares of the second group's scores.
        of: maps a score to what is compared, such as ``math.log`` for the loss of a perplexity.

    Raises:
        LookupError: they have no seed in common.

    Example:
        >>> compared(dgc, dense).no_worse(0.5) & compared(dgc, plain).better()
    """

    def made(scores: Sequence[float | None]) -> list[float | None]:
        return [score if score is None or of is None else of(score) for score in scores]

    own, other = (dict(zip(group.seeds, made(group.scores), strict=True)) for group in (first, second))
    beside = [dict(zip(row, made(list(row.values())), strict=True)) for row in first.beside]
    return difference(
        own, other, names=(first.name, second.name), higher_is_better=first.higher_is_better,
        dense=made(first.dense_scores), together=functools.partial(in_blocks, beside), relative=relative,
    )  # fmt: skip


def as_good_as(found: Sequence[Group], task: str, name: str, text: str, *, within: float, relative: bool) -> Claim:
    """Judge the claim that a row's metric is worse than the dense row's by at most ``within``, seed by seed.

    Args:
        within: in units of the metric, or, with ``relative``, as a share of the dense row's metric.
    """
    own = named(found, task, name)
    dense = None if own is None else named(found, task, DENSE, own.epochs)
    if own is None or dense is None:
        return Claim(text, None, f"needs the rows {DENSE} and {name} of task {task}")
    try:
        apart = compared(own, dense, relative=relative)
    except LookupError as error:
        return Claim(text, None, str(error))
    return claimed(text, apart.no_worse(within), f"{own.metric}, {counted(own.epochs, 'epoch')}")


def judged(
    found: Sequence[Group],
    task: str,
    text: str,
    names: Sequence[str],
    verdict: Callable[..., Finding | bool],
    describe: Callable[[Group], str] | None = None,
    epochs: int | None = None,
) -> Claim:
    """Judge a claim about several rows.

    Args:
        found: all groups.
        task: task of the rows.
        text: what is claimed.
        names: names of the rows, without the dense one.
        verdict: called with the dense group and then the named groups; uses :func:`compared` to compare scores.
        describe: returns figures of a group to add to those of the comparison; none when None.
        epochs: epochs of the rows; the first length found when None.
    """
    own = [named(found, task, name, epochs) for name in (DENSE, *names)]
    there = [group for group in own if group is not None]
    if len(there) < len(own):
        return Claim(text, None, f"needs the rows {DENSE}, {'; '.join(names)} of task {task}")
    try:
        finding = verdict(*there)
    except LookupError as error:
        return Claim(text, None, str(error))
    more = [] if describe is None else filter(None, map(describe, there))
    return claimed(text, finding, "; ".join([*more, there[0].metric]))


def summed(claims: Sequence[Claim]) -> str:
    """Count the verdicts in words, without claims about the setup: ``3 of 5 claims held, 1 did not``."""
    counts = {
        word: sum(claim.verdict() == word for claim in claims if not claim.setup)
        for word in ("held", "not held", "not resolved")
    }
    tested = sum(counts.values())
    open_ = counts["not resolved"]
    parts = [f"{counts['held']} of {counted(tested, 'claim')} held"]
    parts += [f"{counts['not held']} did not"] if counts["not held"] else []
    parts += [f"{open_} {'is' if open_ == 1 else 'are'} not resolved"] if open_ else []
    return ", ".join(parts)


def counted(number: int, what: str) -> str:
    """Return number and noun, such as ``1 epoch`` or ``2 epochs``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
