"""Show groups and claims: as tables, and as the pages of results."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from narrowband.files import write_text
from narrowband.report.record import read_json
from narrowband.units import format_bytes, format_seconds
from reproduce.claims import plain, table_lines, tables
from reproduce.groups import MARGIN, NOTHING, Claim, Group, counted, summed
from reproduce.pictures import Bar, Panel, embedded, write
from reproduce.settings import in_common

__all__ = [
    "COLUMNS",
    "LESS",
    "PER_TASK",
    "SCORE",
    "STEP",
    "Layout",
    "Legend",
    "Opening",
    "beginning",
    "covered",
    "cpus_of",
    "markdown",
    "pictures_of",
    "ran_on",
    "score_panel",
    "seeded",
    "sent_panel",
    "source",
    "table",
    "write_page",
    "write_results",
]

# ---- tables ----------------------------------------------------------------------------------------------------------


def _optional(form: Callable[[float], str], value: float | None) -> str:
    return NOTHING if value is None else form(value)


#: A heading, and a function from a line's subject to the text of its cell. Subjects are groups, unless a layout shows
#: something else.
Column = tuple[str, Callable[[Any], str]]

#: Columns of a table that has no columns of its own.
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

#: Words of a table, mostly headings, and what they mean.
Legend = Sequence[tuple[str, str]]

SCORE = ("score", "mean ± standard deviation over seeds; without ±, of one seed")
LESS = (
    "− dense",
    (
        f"how far that is from the uncompressed row, seed by seed: the mean, ± half of its 95 % interval ({MARGIN}); "
        "without ±, the noise is unknown"
    ),
)
STEP = (
    "step",
    "the median of the last epoch on rank 0, however busy the machine was; links have [their own page](benchmarks.md)",
)
_LEGEND: Legend = (
    SCORE,
    LESS,
    ("sent", "by one rank in a step of the last epoch"),
    ("ratio", "how many times less that is than an uncompressed ring all-reduce sends"),
    ("mean", "the same, over all of training"),
    ("payload", "how many times smaller one rank's payload is than its gradient, norms and biases included"),
    ("matrix", "the same without norms and biases"),
    STEP,
)


def _per_task(found: Sequence[Group]) -> Iterator[tuple[str, list[Group]]]:
    for task, epochs in dict.fromkeys((group.task, group.epochs) for group in found):
        yield task, [group for group in found if (group.task, group.epochs) == (task, epochs)]


def _caption(title: str, own: Sequence[Group]) -> str:
    first = own[0]
    seeds = sorted({seed for group in own for seed in group.seeds})
    *fewer, most = sorted({group.epochs for group in own})
    epochs = "".join(f"{each} or " for each in fewer) + counted(most, "epoch")
    return (
        f"{title}, {first.parameters:,} parameters, {counted(first.nodes, 'rank')}, {epochs}, {seeded(seeds)}; score: "
        f"{first.metric}"
    )


def seeded(seeds: Sequence[int]) -> str:
    """Return seeds in words: ``seed 0``, or ``seeds 0, 1, 2``."""
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


_ALL = "- All rows: "


def _settings(own: Sequence[Any]) -> list[str]:
    """List the settings that all lines share, and then the others with their lines; empty if a line has no settings."""
    if not all(getattr(line, "settings", None) for line in own):
        return []
    specs = [{"spec": f"`{line.spec}`"} if hasattr(line, "spec") else {} for line in own]
    shared, others = in_common([line.settings | spec for line, spec in zip(own, specs, strict=True)])
    lines = [f"{_ALL}{'; '.join(f'{name}: {value}' for name, value in shared.items())}."]
    for name in dict.fromkeys(itertools.chain.from_iterable(others)):
        by_value: dict[str, list[str]] = {}
        for line, more in zip(own, others, strict=True):
            if name in more:
                by_value.setdefault(more[name], []).append(plain(line.name))
        most = max(by_value, key=lambda value: len(by_value[value]))
        usual = len(by_value[most]) > len(own) / 2 and sum(map(len, by_value.values())) == len(own)
        said = [f"{value}: *{'; '.join(rows)}*" for value, rows in by_value.items() if not usual or value != most] + (
            [f"{most}: all others"] if usual else []
        )
        lines.append(f"- **{name}**: {' · '.join(said)}")
    return lines


@dataclass(frozen=True)
class Layout:
    """How results (groups, or whatever else a module has found) are shown.

    Attributes:
        tables: divides results into tables; returns pairs of the key of a table's title and its lines.
        columns: key → columns of that table.
        legend: meanings of columns and of other words in the tables.
        caption: title and lines → caption of that table.
        notes: lines → what a page lists below the table, beside settings.
        pictures: key → pictures that a page shows below that table: pairs of a file's name and a description.
    """

    tables: Callable[[Sequence[Any]], Iterable[tuple[str, list[Any]]]] = _per_task
    columns: Callable[[str], Sequence[Column]] = lambda _: COLUMNS
    legend: Legend = _LEGEND
    caption: Callable[[str, Sequence[Any]], str] = _caption
    notes: Callable[[Sequence[Any]], Sequence[str]] = lambda _: ()
    pictures: Callable[[str], Sequence[tuple[str, str]]] = lambda _: ()


#: A table per task and number of epochs.
PER_TASK = Layout()


def table(found: Sequence[Any], titles: dict[str, str], layout: Layout = PER_TASK) -> Iterator[Table]:
    """Yield tables for the terminal: one per task and number of epochs, unless the layout divides results otherwise."""
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

#: For each bar: its label, its group, and whether the page is about this group.
Shown = Sequence[tuple[str, Group, bool]]


def sent_panel(title: str, shown: Shown) -> Panel:
    """Return a panel of what a rank sends in a step of the last epoch."""
    return Panel(
        title,
        "sent per step and rank",
        [
            Bar(label, group.sent_bytes_per_step, format_bytes(group.sent_bytes_per_step), strong)
            for label, group, strong in shown
        ],
    )


def score_panel(title: str, shown: Shown) -> Panel:
    """Return a panel of final scores, over the seeds that all groups have, so that bars are comparable."""
    first = shown[0][1]
    better = "higher" if first.higher_is_better else "lower"
    common = [seed for seed in first.seeds if all(seed in group.seeds for _, group, _ in shown)]
    same = [(label, group.of_seeds(common) if common else group, strong) for label, group, strong in shown]
    every = all(len(group.seeds) == len(common) for _, group, _ in shown)
    return Panel(
        title,
        f"{better} is better; {counted(first.epochs, 'epoch')}{'' if every or not common else f'; {seeded(common)}'}",
        [Bar(label, group.mean, group.score(), strong) for label, group, strong in same],
    )


# ---- pages -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opening:
    """The top of a page, for those who read no further: three short paragraphs, and a picture.

    Attributes:
        title: title of the page.
        says: the question, and the paper's answer.
        ran: what was run here; or a function that returns it from the results that the page shows.
        found: function from the results that the page shows to a conclusion with two or three figures. Raises
            LookupError if the results are not enough for one.
        panels: function from the same results to the panels of the picture.
        departs: differences between what was run and the paper, one sentence each.
        covers: the paper's tables and figures, each with its place on the page or the reason why it is missing; or a
            function that returns them from the results that the page shows.
    """

    title: str
    says: str
    ran: str | Callable[[Any], str]
    found: Callable[[Any], str]
    panels: Callable[[Any], Sequence[Panel]]
    covers: Sequence[tuple[str, str]] | Callable[[Any], Sequence[tuple[str, str]]] = ()
    departs: Sequence[str] = ()


#: Name of the opening's picture, in the folder of a page's pictures.
_PICTURE = "opening"
_LINKS = (
    (re.compile(r"arXiv (\d{4}\.\d{5})"), "https://arxiv.org/abs/"),
    (re.compile(r"DOI (10\.[^\s)]+)"), "https://doi.org/"),
)


def pictures_of(page: Path) -> Path:
    """Return the folder of a page's pictures."""
    return page.parent / "pictures" / page.stem


def beginning(found: Any, claims: Sequence[Claim], opening: Opening, *, paper: str, page: str) -> list[str]:
    """Return the first lines of a page: title, source, conclusion, picture, and how many claims held.

    Args:
        found: results that the opening describes.
        claims: claims with their verdicts.
        opening: how the page begins.
        paper: authors, title, arXiv id; or another source of the figures.
        page: name of the page's file, without its extension.
    """
    for pattern, place in _LINKS:
        paper = pattern.sub(rf"[\g<0>]({place}\g<1>)", paper)
    lines = [
        f"# {opening.title}",
        "",
        f"{paper}.",
        "",
        f"**What was asked.** {opening.says}",
        "",
        f"**What was run.** {opening.ran if isinstance(opening.ran, str) else opening.ran(found)}",
        "",
    ]
    with contextlib.suppress(LookupError):  # a run may have left out rows that the conclusion needs
        tested = f" {summed(claims)} ([each, with its figures](#claims))." if claims else ""
        lines += [f"**What came out.** {opening.found(found)}{tested}", ""]
        lines += [embedded(opening.panels(found), f"pictures/{page}/{_PICTURE}"), ""]
    return [*lines, "## Claims", "", *tables(claims)] if claims else lines


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
    """Return a page of the documentation: a conclusion, the claims, and the same tables as in the terminal.

    Args:
        found: groups, or whatever else the layout shows.
        titles: key → title of a table.
        claims: claims with their verdicts.
        layout: how to show the results.
        opening: how the page begins.
        paper: authors, title, arXiv id; or another heading.
        page: name of the page's file, without its extension.
        pictures: names of the pictures in the page's folder, without that of the opening.
        record: what :func:`narrowband.report.record.provenance` returns.
        commits: commits at which rows were trained.
    """
    lines = [*beginning(found, claims, opening, paper=paper, page=page), "## Tables", ""]
    lines += [*(f"- **{plain(word)}**: {meaning}" for word, meaning in layout.legend), ""]
    tables_, before = list(layout.tables(found)), set[str]()
    for key, own in tables_:
        columns = layout.columns(key)
        twice = sum(key == other for other, _ in tables_) > 1  # some rows of the task were trained for longer
        length = f", {counted(own[0].epochs, 'epoch')}" if twice else ""
        about = layout.caption(titles[key], own).removeprefix(titles[key]).lstrip(",;: ")
        lines += [f"### {titles[key]}{length}", "", *([f"{_sentence(about)}.", ""] if about else [])]
        heads = [plain(column) for column, _ in columns]
        lines += table_lines(
            heads, ([plain(columns[0][1](line)), *(cell(line) for _, cell in columns[1:])] for line in own)
        )
        for name, alt in layout.pictures(key):
            place = f"pictures/{page}/{name}"
            lines += [f"[![{alt}]({place})]({place})", ""] if name in pictures else []
        told = [*_settings(own), *(f"- {plain(note)}" for note in layout.notes(own))]
        told = ["- All rows: as above." if line in before and line.startswith(_ALL) else line for line in told]
        before.update(told)
        if told:
            lines += ['<details markdown="1"><summary>Settings</summary>', "", *told, "", "</details>", ""]
    return "\n".join([*lines, *covered(found, opening), "## Source", "", source(record, commits)]) + "\n"


def _sentence(said: str) -> str:
    return said[:1].upper() + said[1:]


def write_results(
    path: Path,
    found: Sequence[Any],
    titles: dict[str, str],
    claims: Sequence[Claim],
    layout: Layout,
    *,
    opening: Opening,
    paper: str,
    record: Mapping[str, Any],
    commits: Sequence[str],
) -> None:
    """Write the page of :func:`markdown`, which has the other arguments, and its opening's picture.

    Args:
        path: where to write the page.
    """
    write_page(
        path,
        lambda pictures: markdown(
            found,
            titles,
            claims,
            layout,
            opening=opening,
            paper=paper,
            page=path.stem,
            pictures=pictures,
            record=dict(record),
            commits=commits,
        ),
        found,
        opening,
    )


def covered(found: Any, opening: Opening) -> list[str]:
    """Return sections on differences from the paper and on its tables and figures, as far as the opening has them."""
    covers = opening.covers(found) if callable(opening.covers) else opening.covers
    told = [f"- {what}: {where}" for what, where in covers]
    departs = [f"- {each}" for each in opening.departs]
    return [
        *(["## Where this departs from the paper", "", *departs, ""] if departs else []),
        *(["## The paper's tables and figures", "", *told, ""] if told else []),
    ]


def cpus_of(record: Mapping[str, Any]) -> list[str]:
    """Return the processors that a record's rows ran on; if it names none, the one that the record was written on."""
    cpus: list[str] = record.get("cpus") or [str(record["machine"]["cpu"])]
    return cpus


def ran_on(rows: Iterable[Mapping[str, Any]], summary: Path) -> list[str]:
    """Return the processors that rows ran on, as far as known.

    Args:
        rows: each has its ``cpu``, but for rows from before it was recorded. Those are assumed to have run on the
            processors that the earlier summary names.
        summary: path of the earlier summary, which may not exist. It is about to be overwritten, so its processors are
            also kept if a row without ``cpu`` lies beside it, even one that is not among ``rows`` this time.
    """
    own = [row.get("cpu") for row in rows]
    found = {cpu for cpu in own if cpu is not None}
    beside = (file for pattern in ("rows/*.json", "*/rows/*.json") for file in summary.parent.glob(pattern))
    if summary.exists() and (None in own or any("cpu" not in read_json(file, ()) for file in beside)):
        found.update(cpus_of(read_json(summary, ("machine",))))
    return sorted(found)


def source(record: dict[str, Any], commits: Sequence[str]) -> str:
    """Say where figures come from: command, machines, commits, and, if the record has them, ``data`` and ``took`` as
    returned by :func:`reproduce.data.about` and :func:`reproduce.command.took`.
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
        path: where to write the page.
        text: function from the names of the other pictures that exist to the page.
        found: results that the opening describes.
        opening: how the page begins.
    """
    folder = pictures_of(path)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(LookupError):  # without a conclusion, as on the page
        write(opening.panels(found), folder / _PICTURE)
    write_text(path, text({place.name for place in folder.iterdir()}))
