"""What rows come to together: means over seeds, tables, and claims that held or did not."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from narrowband.files import write_text
from narrowband.report.record import read_json
from narrowband.units import format_bytes, format_seconds
from reproduce.pairs import Difference, Finding, difference, in_blocks
from reproduce.pictures import Bar, Panel, embedded, write
from reproduce.settings import in_common, settings

__all__ = [
    "COLUMNS",
    "DENSE",
    "MARGIN",
    "NOTHING",
    "PER_TASK",
    "Claim",
    "Group",
    "Layout",
    "Opening",
    "as_good_as",
    "beginning",
    "claimed",
    "compared",
    "covered",
    "cpus_of",
    "groups",
    "judged",
    "markdown",
    "named",
    "needed",
    "pictures_of",
    "ran_on",
    "score_panel",
    "seeded",
    "sent_panel",
    "source",
    "summed",
    "table",
    "verdicts",
    "write_page",
]

#: The row that others are compared with.
DENSE = "dense"

#: Stands where a row has no such figure.
NOTHING = "–"
_DIVERGED = "diverged"

#: How :mod:`reproduce.pairs` finds the margin of a difference, for legends.
MARGIN = (
    "Student's t, paired; of one pair: by the spread of the dense rows; of two: by that of all rows of the table which "
    "have both seeds, as if all were as noisy"
)


@dataclass(frozen=True)
class Group:
    """One row over its seeds.

    Attributes:
        task: of the rows.
        name: of the rows.
        spec: for ``nb.compress_gradients``, or what crosses boundaries forward and backward.
        metric: what ``scores`` are.
        higher_is_better: whether more of the metric is better.
        epochs: of each row.
        nodes: ranks.
        parameters: that are trained.
        seeds: one per row.
        scores: of the last epoch; None where a row diverged.
        mean: of the scores; None if one diverged.
        std: the sample's standard deviation; None for fewer than two.
        against_dense: how far the dense row of the same task and epochs is away, over the seeds that both have; None
            without such, or where one diverged.
        margin: of that difference at 95 %, see :mod:`reproduce.pairs`; None where the noise is unknown.
        dense_scores: of that dense row, a score per seed: their spread is the noise where there is one pair.
        beside: seed → score of all rows of the same task and epochs: their noise together is that of two pairs.
        sent_bytes_per_step: by a rank, in the last epoch.
        ratio: bytes of a dense ring all-reduce over bytes sent.
        mean_ratio: the same, over all steps of training.
        compressed_ratio: the same, over the steps after those that are not compressed at first.
        payload_ratio: bytes of a dense gradient over bytes of one rank's payload.
        matrix_ratio: the same of compressed tensors alone.
        step_s: a step of the last epoch; the median over steps and then seeds.
        uncompressed: of rows with boundaries: the mean where these compress in training alone; None if one diverged.
        uncompressed_scores: one per seed.
        boundaries: for each boundary, how many times fewer bytes crossed it forward and backward.
        samples_per_s: samples in a second of training; the median over seeds.
        plain_bytes: of rows with a policy for activations: what backward would keep of a step's without it.
        kept_bytes: what it keeps with it.
        decide_share: seconds in which a policy decided, as a share of those of training.
        gradient_error: how far that takes a gradient from the exact one, as a share of its norm; the mean over seeds.
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
        """The mean, and its spread where there are several seeds."""
        if self.mean is None:
            return _DIVERGED
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"

    def of_seeds(self, seeds: Collection[int]) -> Group:
        """The same with scores of these seeds alone, so that it may stand beside rows that have no others."""
        own = tuple((seed, score) for seed, score in zip(self.seeds, self.scores, strict=True) if seed in seeds)
        off = self.uncompressed_scores and tuple(
            score for seed, score in zip(self.seeds, self.uncompressed_scores, strict=True) if seed in seeds
        )
        scores = tuple(score for _, score in own)
        mean, said = _mean(scores), ", ".join(str(seed) for seed, _ in own)
        return replace(
            self,
            seeds=tuple(seed for seed, _ in own),
            scores=scores,
            mean=mean,
            std=_std(scores),
            uncompressed=_mean(off) if off else None,
            uncompressed_scores=off,
            settings=self.settings | ({"seeds": said} if "seeds" in self.settings else {}),
        )

    def versus_dense(self) -> str:
        """The paired difference from the dense row, and its margin where the noise is known."""
        if self.name == DENSE or self.against_dense is None:
            return NOTHING
        return f"{self.against_dense:+.2f}" + ("" if self.margin is None else f" ± {self.margin:.2f}")


@dataclass(frozen=True)
class Claim:
    """Something a paper says, and whether it was so here.

    Attributes:
        text: what is claimed.
        held: None where that cannot be said.
        figures: what was found.
        resolved: False where the rows were trained, and the noise between seeds does not let one say.
        setup: whether it is about how rows were made comparable, and not about what came of them: it is not counted.
    """

    text: str
    held: bool | None
    figures: str
    resolved: bool = True
    setup: bool = False

    def __post_init__(self) -> None:
        if not self.resolved and self.held is not None:
            raise ValueError(f"held={self.held} is a verdict, and resolved=False says that there is none: give one")

    def verdict(self) -> str:
        """In words: held, not held, not resolved or not tested."""
        return {True: "held", False: "not held", None: "not tested" if self.resolved else "not resolved"}[self.held]


def claimed(text: str, finding: Finding | bool, figures: str = "") -> Claim:
    """The claim that a finding bears out or does not: held, not held or not resolved.

    Args:
        text: what is claimed.
        finding: of rows that were trained; a bool where there is no noise, as of bytes.
        figures: beside those of the finding.
    """
    own = finding if isinstance(finding, Finding) else Finding(finding)
    said = "; ".join(part for part in (*own.figures, figures) if part)
    return Claim(text, own.held, said, resolved=own.held is not None)


def groups(rows: Sequence[dict[str, Any]]) -> list[Group]:
    """Rows put together by task, epochs and name, in order of appearance; :func:`reproduce.training.run` returns them.

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
        mean, dense = _mean(scores), by_seed.get((task, epochs, DENSE), {})
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
                ratio=_mean([row["ratio"] for row in own]),
                mean_ratio=_mean([row.get("mean_ratio") for row in own]),
                payload_ratio=first["payload_ratio"],
                matrix_ratio=first["matrix_ratio"],
                step_s=statistics.median(row["step_s"] for row in own),
                uncompressed=_mean(off) if off else None,
                uncompressed_scores=off,
                boundaries=tuple((forward, backward) for forward, backward in first.get("boundaries", ())),
                samples_per_s=statistics.median(speeds) if speeds else None,
                plain_bytes=first.get("plain_bytes"),
                kept_bytes=first.get("kept_bytes"),
                gradient_error=_mean([row.get("gradient_error") for row in own]),
                decide_share=_mean([row["decide_s"] / row["wall_s"] if row.get("plans") else None for row in own]),
                compressed_ratio=_mean([row.get("compressed_ratio", row.get("mean_ratio")) for row in own]),
                settings=settings(first) | {"seeds": ", ".join(str(row["seed"]) for row in own)},
                beside=beside,
            )
        )
    return found


def _std(scores: Sequence[float | None]) -> float | None:
    there = [score for score in scores if score is not None]
    return statistics.stdev(there) if len(there) == len(scores) > 1 else None


def _mean(scores: Sequence[float | None]) -> float | None:
    there = [score for score in scores if score is not None]
    return statistics.mean(there) if len(there) == len(scores) else None


def named(found: Sequence[Group], task: str, name: str, epochs: int | None = None) -> Group | None:
    """The group of that task and name, if its rows were trained; of several lengths, the first."""
    own = (group for group in found if (group.task, group.name) == (task, name) and epochs in (None, group.epochs))
    return next(own, None)


def needed(found: Sequence[Group], task: str, name: str, epochs: int | None = None) -> Group:
    """As :func:`named`, for what cannot be said without the row.

    Raises:
        LookupError: it was not trained.
    """
    own = named(found, task, name, epochs)
    if own is None:
        raise LookupError(f"needs the row {name} of task {task}")
    return own


def compared(
    first: Group, second: Group, *, relative: bool = False, of: Callable[[float], float] | None = None
) -> Difference:
    """What two groups differ by, over the seeds that both have; a claim that compares rows asks this and nothing else.

    Args:
        first: the one that is spoken of.
        second: the one that it is compared with.
        relative: take differences as shares of the second one's scores.
        of: turns a score into what is compared, such as ``math.log`` for the loss of a perplexity.

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


def as_good_as(
    found: Sequence[Group], task: str, name: str, text: str, *, within: float, relative: bool, epochs: int | None = None
) -> Claim:
    """The claim that a row's metric is no worse than the dense row's by more than ``within``, seed by seed.

    Args:
        within: in units of the metric, or, with ``relative``, as a share of the dense row's.
        epochs: of the row; the first that there are when None.
    """
    own = named(found, task, name, epochs)
    dense = None if own is None else named(found, task, DENSE, own.epochs)
    if own is None or dense is None:
        return Claim(text, None, f"needs the rows {DENSE} and {name} of task {task}")
    try:
        apart = compared(own, dense, relative=relative)
    except LookupError as error:
        return Claim(text, None, str(error))
    return claimed(text, apart.no_worse(within), f"{own.metric}, {_count(own.epochs, 'epoch')}")


def judged(
    found: Sequence[Group],
    task: str,
    text: str,
    names: Sequence[str],
    verdict: Callable[..., Finding | bool],
    describe: Callable[[Group], str] | None = None,
    epochs: int | None = None,
) -> Claim:
    """The claim of several rows.

    Args:
        found: rows, put together.
        task: of the rows.
        text: what is claimed.
        names: of the rows, beside the dense one.
        verdict: gets the dense group, and then theirs; what compares scores goes through :func:`compared`.
        describe: what figures say of a group beside what was compared; nothing when None.
        epochs: of the rows; the first that there are when None.
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


# ---- tables ----------------------------------------------------------------------------------------------------------


def _optional(form: Callable[[float], str], value: float | None) -> str:
    return NOTHING if value is None else form(value)


#: A heading, and what the column says of a line's subject: of a group, unless a layout shows something else.
Column = tuple[str, Callable[[Any], str]]

#: What a table says of a row, unless it has others to say.
COLUMNS: tuple[Column, ...] = (
    ("row", lambda group: group.name),
    ("score", Group.score),
    ("− dense", Group.versus_dense),
    ("sent", lambda group: format_bytes(group.sent_bytes_per_step)),
    ("ratio", lambda group: _optional("{:.1f}".format, group.ratio)),
    ("mean", lambda group: _optional("{:.1f}".format, group.mean_ratio)),
    ("payload", lambda group: _optional("{:.0f}".format, group.payload_ratio)),
    ("matrix", lambda group: _optional("{:.0f}".format, group.matrix_ratio)),
    ("step", lambda group: format_seconds(group.step_s)),
)

#: What the columns mean.
_LEGEND = (
    "Score: mean ± standard deviation over the row's seeds; without ± it is one seed's. − dense: the mean difference "
    "from the dense row of the same seed, over the seeds that both have, ± half of its 95 % interval "
    f"({MARGIN}; without ±: of unknown noise). Sent: by one rank in a step of the "
    "last epoch; ratio: how many times less that is than a dense ring all-reduce; mean: over all of training. Payload: "
    "how many times smaller than its dense gradient one rank's payload is, norms and biases included; matrix: without "
    "them. Step: the median of the last epoch on rank 0, however busy the machine was; for speed see the link "
    "benchmarks."
)


def _per_task(found: Sequence[Group]) -> Iterator[tuple[str, list[Group]]]:
    for task, epochs in dict.fromkeys((group.task, group.epochs) for group in found):
        yield task, [group for group in found if (group.task, group.epochs) == (task, epochs)]


def _caption(title: str, own: Sequence[Group]) -> str:
    first = own[0]
    seeds = sorted({seed for group in own for seed in group.seeds})
    return (
        f"{title}, {first.parameters:,} parameters, {_count(first.nodes, 'rank')}, {_count(first.epochs, 'epoch')}, "
        f"{seeded(seeds)}; score: {first.metric}"
    )


def seeded(seeds: Sequence[int]) -> str:
    """Seeds in words: ``seed 0``, or ``seeds 0, 1, 2``."""
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _specs(own: Sequence[Group]) -> list[str]:
    return [f"{group.name}: `{group.spec}`" for group in own]


def _settings(own: Sequence[Any]) -> tuple[str, list[str]]:
    """What all lines of a table were trained with, and what each had beside that; nothing of lines without settings."""
    if not all(getattr(line, "settings", None) for line in own):
        return "", []
    shared, others = in_common([line.settings for line in own])
    return _told(shared), [f"{line.name}: {_told(more)}" for line, more in zip(own, others, strict=True) if more]


def _told(words: dict[str, str]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in words.items())


@dataclass(frozen=True)
class Layout:
    """How results are shown: groups, or whatever else a module has found.

    Attributes:
        tables: puts them into tables, each with the key of its title.
        columns: of the table with that key.
        legend: what columns mean.
        caption: of a table with that title and those lines.
        notes: what a page lists below the table.
        pictures: that a page shows below the table with that key: a file's name, and what there is to see.
    """

    tables: Callable[[Sequence[Any]], Iterable[tuple[str, list[Any]]]] = _per_task
    columns: Callable[[str], Sequence[Column]] = lambda _: COLUMNS
    legend: str = _LEGEND
    caption: Callable[[str, Sequence[Any]], str] = _caption
    notes: Callable[[Sequence[Any]], Sequence[str]] = _specs
    pictures: Callable[[str], Sequence[tuple[str, str]]] = lambda _: ()


#: A table per task and number of epochs.
PER_TASK = Layout()


def table(found: Sequence[Any], titles: dict[str, str], layout: Layout = PER_TASK) -> Iterator[Table]:
    """Tables for the terminal; a table per task and number of epochs, unless the layout has others."""
    for key, own in layout.tables(found):
        columns = layout.columns(key)
        drawn = Table(
            title=escape(layout.caption(titles[key], own)),
            title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False,
        )  # fmt: skip
        for position, (column, _) in enumerate(columns):
            drawn.add_column(column, justify="right" if position else "left", no_wrap=position > 0)
        for line in own:
            drawn.add_row(*(escape(cell(line)) for _, cell in columns))
        yield drawn


# ---- pictures --------------------------------------------------------------------------------------------------------

#: What bars are called, the groups that they are of, and whether these are what the page is about.
Shown = Sequence[tuple[str, Group, bool]]


def sent_panel(title: str, shown: Shown) -> Panel:
    """What a rank sends in a step of the last epoch."""
    return Panel(
        title,
        "sent per step and rank",
        [
            Bar(label, group.sent_bytes_per_step, format_bytes(group.sent_bytes_per_step), strong)
            for label, group, strong in shown
        ],
    )


def score_panel(title: str, shown: Shown) -> Panel:
    """How good models became, with the seeds that all of them have: bars side by side are of the same seeds."""
    first = shown[0][1]
    better = "higher" if first.higher_is_better else "lower"
    common = [seed for seed in first.seeds if all(seed in group.seeds for _, group, _ in shown)]
    same = [(label, group.of_seeds(common) if common else group, strong) for label, group, strong in shown]
    every = all(len(group.seeds) == len(common) for _, group, _ in shown)
    return Panel(
        title,
        f"{better} is better; {_count(first.epochs, 'epoch')}{'' if every or not common else f'; {seeded(common)}'}",
        [Bar(label, group.mean, group.score(), strong) for label, group, strong in same],
    )


# ---- pages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opening:
    """How a page begins, for those who read no further: a conclusion in three sentences, and a picture.

    Attributes:
        title: of the page.
        says: what the paper claims, or what is asked, in one sentence.
        ran: what was run here, in one; or gets what a page shows, and says it of what is there.
        found: gets what a page shows, and says what came of it, in one that goes on behind a colon where there are
            claims; raises LookupError where what is shown is not enough.
        panels: gets the same; what is drawn of it.
        departs: where what was run is not what the paper has, each in a sentence.
        covers: the paper's tables and figures, each with where on the page it is, or why it is not; or gets what a page
            shows, and returns them.
    """

    title: str
    says: str
    ran: str | Callable[[Any], str]
    found: Callable[[Any], str]
    panels: Callable[[Any], Sequence[Panel]]
    covers: Sequence[tuple[str, str]] | Callable[[Any], Sequence[tuple[str, str]]] = ()
    departs: Sequence[str] = ()


#: The picture at the beginning of a page, in the folder of its pictures.
_PICTURE = "opening"
_LINKS = (
    (re.compile(r"arXiv (\d{4}\.\d{5})"), "https://arxiv.org/abs/"),
    (re.compile(r"DOI (10\.[^\s)]+)"), "https://doi.org/"),
)


def pictures_of(page: Path) -> Path:
    """The folder of a page's pictures."""
    return page.parent / "pictures" / page.stem


def beginning(found: Any, claims: Sequence[Claim], opening: Opening, *, paper: str, page: str) -> list[str]:
    """The first lines of a page: title, source, conclusion, picture, and what became of the claims.

    Args:
        found: what the opening speaks of.
        claims: and what became of them.
        opening: how to begin.
        paper: authors, title, arXiv id; or what else the figures are about.
        page: name of the page's file, without the ending.
    """
    for pattern, place in _LINKS:
        paper = pattern.sub(rf"[\g<0>]({place}\g<1>)", paper)
    lines = [
        f"# {opening.title}",
        "",
        f"{paper}.",
        "",
        f"**What is claimed.** {opening.says}",
        "",
        f"**What was run.** {opening.ran if isinstance(opening.ran, str) else opening.ran(found)}",
        "",
    ]
    counted = f"{summed(claims)} ([each, with its figures](#claims)): " if claims else ""
    with contextlib.suppress(LookupError):  # rows that the conclusion is about may be left out of a run
        said = opening.found(found)
        lines += [f"**What held.** {counted}{said if counted else said[:1].upper() + said[1:]}", ""]
        lines += [embedded(opening.panels(found), f"pictures/{page}/{_PICTURE}"), ""]
    return [*lines, "## Claims", "", *verdicts(claims), ""] if claims else lines


def markdown(
    found: Sequence[Any],
    titles: dict[str, str],
    claims: Sequence[Claim],
    layout: Layout = PER_TASK,
    *,
    opening: Opening,
    paper: str,
    page: str,
    pictures: Collection[str] = (),
    record: dict[str, Any],
    commits: Sequence[str],
) -> str:
    """A conclusion, the claims, and the same tables as a page of documentation.

    Args:
        found: rows, put together, or whatever else the layout shows.
        titles: of each table.
        claims: and what became of them.
        layout: how to show them.
        opening: how the page begins.
        paper: authors, title, arXiv id; or another heading.
        page: name of the page's file, without the ending.
        pictures: names of those in the page's folder, beside that of the opening.
        record: what :func:`narrowband.report.record.provenance` says.
        commits: those at which rows were trained.
    """
    lines = [*beginning(found, claims, opening, paper=paper, page=page), "## Tables", "", layout.legend, ""]
    tables = list(layout.tables(found))
    for key, own in tables:
        columns = layout.columns(key)
        twice = sum(key == other for other, _ in tables) > 1  # a task that was trained for longer, too
        length = f", {_count(own[0].epochs, 'epoch')}" if twice else ""
        shared, others = _settings(own)
        lines += [f"### {titles[key]}{length}", "", layout.caption(titles[key], own) + ".", ""]
        lines += [f"All rows: {shared}.", ""] if shared else []
        lines += ["| " + " | ".join(column for column, _ in columns) + " |"]
        lines += ["| --- |" + " ---: |" * (len(columns) - 1)]
        lines += ["| " + " | ".join(cell(line) for _, cell in columns) + " |" for line in own]
        lines += [""]
        for name, alt in layout.pictures(key):
            place = f"pictures/{page}/{name}"
            lines += [f"[![{alt}]({place})]({place})", ""] if name in pictures else []
        for what, notes in (("What rows differ in", others), ("The rows, as specs", layout.notes(own))):
            if notes:
                lines += [f'<details markdown="1"><summary>{what}</summary>', "", *(f"- {note}" for note in notes), ""]
                lines += ["</details>", ""]
    return "\n".join([*lines, *covered(found, opening), source(record, commits)]) + "\n"


def covered(found: Any, opening: Opening) -> list[str]:
    """Where this departs from the paper, and what became of its tables and figures; nothing that the opening lacks."""
    covers = opening.covers(found) if callable(opening.covers) else opening.covers
    told = [f"- {what}: {where}" for what, where in covers]
    departs = [f"- {each}" for each in opening.departs]
    return [
        *(["## Where this departs from the paper", "", *departs, ""] if departs else []),
        *(["## The paper's tables and figures", "", *told, ""] if told else []),
    ]


def summed(claims: Sequence[Claim]) -> str:
    """How many claims came to what, without those of setting up: ``3 of 5 claims held, 1 did not``."""
    counts = {
        word: sum(claim.verdict() == word for claim in claims if not claim.setup)
        for word in ("held", "not held", "not resolved")
    }
    tested = sum(counts.values())
    open_ = counts["not resolved"]
    parts = [f"{counts['held']} of {_count(tested, 'claim')} held"]
    parts += [f"{counts['not held']} did not"] if counts["not held"] else []
    parts += [f"{open_} {'is' if open_ == 1 else 'are'} not resolved"] if open_ else []
    return ", ".join(parts)


def verdicts(claims: Sequence[Claim]) -> list[str]:
    """What became of the claims, as a list; those of setting up in one of their own."""
    own, setup = (
        [f"- **{claim.verdict()}**: {claim.text} ({claim.figures})" for claim in claims if claim.setup is which]
        for which in (False, True)
    )
    return [*own, "", "How rows were made comparable (not counted above):", "", *setup] if setup else own


def cpus_of(record: Mapping[str, Any]) -> list[str]:
    """The processors that rows of a record ran on: where it does not name them, the one that it was written on."""
    cpus: list[str] = record.get("cpus") or [str(record["machine"]["cpu"])]
    return cpus


def ran_on(rows: Iterable[Mapping[str, Any]], summary: Path) -> list[str]:
    """The processors that rows ran on, as far as anyone knows.

    Args:
        rows: each says its ``cpu``; those of a time when they did not are taken to be of the processors that an earlier
            summary tells of.
        summary: that summary, if it is there.
    """
    own = [row.get("cpu") for row in rows]
    found = {cpu for cpu in own if cpu is not None}
    if None in own and summary.exists():
        found.update(cpus_of(read_json(summary, ("machine",))))
    return sorted(found)


def source(record: dict[str, Any], commits: Sequence[str]) -> str:
    """Where figures come from: command, machines, commits, and the record's ``data`` and ``took`` if it has any, as
    :func:`reproduce.data.about` and :func:`reproduce.command.took` say it.
    """
    machine, versions = record["machine"], record["versions"]
    where = f"{machine['cores']} cores ({' and '.join(cpus_of(record))}), PyTorch {versions['torch']}"
    trained_at = ", ".join(commit[:12] + "-dirty" * commit.endswith("-dirty") for commit in commits)
    if any(commit.endswith("-dirty") for commit in commits):
        trained_at += " (dirty: files lay beside it that were changed and not committed)"
    data = f" Data: {record['data']}." if "data" in record else ""
    took = f" {record['took']}." if record.get("took") else ""
    return f"Command: `{record['command']}`, on {where}, commit {trained_at}.{data}{took}"


def write_page(path: Path, text: Callable[[Collection[str]], str], found: Any, opening: Opening) -> None:
    """Write a page and its opening's picture.

    Args:
        path: of the page.
        text: gets the names of other pictures that are there, and returns the page.
        found: what the opening speaks of.
        opening: how the page begins.
    """
    folder = pictures_of(path)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(LookupError):  # as on the page
        write(opening.panels(found), folder / _PICTURE)
    write_text(path, text({place.name for place in folder.iterdir()}))
