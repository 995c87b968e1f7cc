"""The command line of every experiment: choose rows, train them, print tables and claims, write JSON."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from narrowband.bench.ranks import check_seed
from narrowband.cli.exits import CONVENTION, DONE, check_folder, check_output, finish
from narrowband.report.plots import can_plot
from narrowband.report.record import provenance, write_json
from narrowband.units import format_loss, format_seconds
from reproduce.data import places
from reproduce.groups import Claim, Group, groups
from reproduce.html import write_pages
from reproduce.report import PER_TASK, Layout, Opening, pictures_of, ran_on, table, write_results
from reproduce.row import Row
from reproduce.training import recorded, run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = [
    "QUICK_LIMIT",
    "RESULTS",
    "Experiment",
    "Options",
    "Recipe",
    "chosen",
    "command_line",
    "main",
    "page",
    "progress",
    "say",
    "show",
    "took",
]

_Chosen = TypeVar("_Chosen")

#: The records in the repository, a folder for each module.
RESULTS = Path(__file__).parent / "results"

#: Size of a ``--quick`` run: enough to see that everything works, too small for results.
_QUICK_ROWS = 2
_QUICK_BATCH = 16
QUICK_LIMIT = {
    "cifar": 512, "lstm": 20_000, "llama": 20_000, "shakespeare": 20_000, "gpt": 20_000, "tuned": 20_000, "vit": 512,
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A row of an experiment and the seeds that it is trained with.

    Attributes:
        row: the row with seed 0.
        turn: rows of a lower turn are trained first, for all their seeds.
        ablation: whether the row only shows what a part of the method contributes; such rows get ``ablation_seeds``.
        long: whether the row is trained only on request (``--long``), because it takes too long.
        seeds: this row's own seeds, whatever seeds others get; None: the same as others.
    """

    row: Row
    turn: int = 0
    ablation: bool = False
    long: bool = False
    seeds: tuple[int, ...] | None = None

    def seeds_of(self, seeds: Sequence[int], ablation_seeds: Sequence[int]) -> Sequence[int]:
        """Return this row's seeds, given the seeds of other rows and of ablations."""
        if self.seeds is not None:
            return self.seeds
        return ablation_seeds if self.ablation else seeds


@dataclass(frozen=True)
class Experiment:
    """The experiment that repeats a paper: its rows, and the claims that they should confirm.

    Attributes:
        module: the last part of the module's name.
        paper: authors, title and arXiv id of the paper.
        titles: key of a table, usually the task → title.
        recipes: all rows, the dense one of each task first.
        claims: judges the paper's claims by the groups that were trained.
        opening: how the page of results begins.
        draw: draws pictures of rows into a directory and returns their paths; needs matplotlib.
        seeds: seeds of the rows that claims are about: as many as two cores can train in some hours; ``--seeds`` gives
            more.
        nodes: number of ranks, unless ``--nodes`` is given.
        layout: layout of the tables.
    """

    module: str
    paper: str
    titles: dict[str, str]
    recipes: tuple[Recipe, ...]
    claims: Callable[[Sequence[Group]], list[Claim]]
    opening: Opening
    draw: Callable[[Sequence[dict[str, Any]], Path], list[Path]] | None = None
    seeds: tuple[int, ...] = (0,)
    nodes: int = 4
    layout: Layout = PER_TASK


@dataclass(frozen=True)
class Options:
    """Train small real models on real ranks with and without compression, and judge a paper's claims by it.

    Rows that are finished are kept, each as soon as it is done: after Ctrl-C, the same command goes on from there.
    """

    tasks: tuple[str, ...] = ()
    """Only these tasks; all when left out."""
    rows: tuple[str, ...] = ()
    """Only rows of these names; all when left out, but for those of --long."""
    long: bool = False
    """Also rows for which two cores need hours more."""
    seeds: tuple[int, ...] | None = None
    """Seeds of the rows that claims are about, such as 0 1 2; the module's own when left out."""
    ablation_seeds: tuple[int, ...] = (0,)
    """Seeds of the rows that leave a part of the method out."""
    epochs: int | None = None
    """Epochs of every row; the task's own number when left out."""
    nodes: int | None = None
    """Ranks on this machine, or, where one process trains a row, how many of these at a time; 4 or 2 when left out."""
    data_dir: Path | None = None
    """Folder with the data; else NARROWBAND_DATA names it; else sets are downloaded."""
    output: Path | None = None
    """Directory of the results; reproduce/results/<module> when left out."""
    resume: bool = True
    """Take rows that an earlier run finished; --no-resume trains them again."""
    recorded: bool = False
    """Train nothing: tables and claims of the rows that are finished."""
    quick: bool = False
    """Two rows, one seed, one epoch, a handful of samples: to see in seconds that everything works."""
    markdown: Path | None = None
    """Also write conclusion, claims and tables to this file, for the documentation, and pictures beside it."""


def chosen(experiment: Experiment, options: Options) -> list[Row]:
    """Return the rows to train, ordered by turn, then task, then seed.

    Raises:
        ValueError: the experiment has no such task or row, the chosen tasks have no such row, the number of ranks is
            below 1, or seeds are missing or invalid.
    """
    for given, there in (
        (options.tasks, dict.fromkeys(r.row.task for r in experiment.recipes)),
        (options.rows, dict.fromkeys(r.row.name for r in experiment.recipes)),
    ):
        for name in given:
            if name not in there:
                raise ValueError(f"{experiment.module} has no {name!r}; there are: {', '.join(there)}")
    recipes = [
        r
        for r in experiment.recipes
        if r.row.task in (options.tasks or (r.row.task,))
        and (r.row.name in options.rows if options.rows else options.long or options.recorded or not r.long)
    ]
    if not recipes:
        there = dict.fromkeys(r.row.name for r in experiment.recipes if r.row.task in options.tasks)
        raise ValueError(
            f"{', '.join(options.tasks)}: of {experiment.module}'s rows there are {'; '.join(there)}; "
            f"not {'; '.join(options.rows)}"
            if options.rows
            else f"{', '.join(options.tasks)}: {experiment.module} has rows of --long alone: add it"
        )
    if options.nodes is not None and options.nodes < 1:
        raise ValueError(f"nodes={options.nodes} must be at least 1")
    seeds = experiment.seeds if options.seeds is None else options.seeds
    if not seeds:
        raise ValueError("no seed: give at least one, as in --seeds 0")
    for seed in (*seeds, *options.ablation_seeds):
        check_seed(seed)
    if options.quick:
        return [_quick(row) for row in _once(replace(r.row, seed=seeds[0]) for r in recipes)[:_QUICK_ROWS]]
    rows = []
    for turn, task in itertools.product(sorted({r.turn for r in recipes}), dict.fromkeys(r.row.task for r in recipes)):
        own = [r for r in recipes if (r.turn, r.row.task) == (turn, task)]
        its = [(r.row, r.seeds_of(seeds, options.ablation_seeds)) for r in own]
        for seed in dict.fromkeys(itertools.chain(seeds, options.ablation_seeds, *(given for _, given in its))):
            rows += [replace(row, seed=seed) for row, given in its if seed in given]
    rows = list(dict.fromkeys(rows))  # two recipes may give the same row; it is trained once
    return rows if options.epochs is None else [_with_epochs(row, options.epochs) for row in _once(rows)]


def _once(rows: Iterable[Row]) -> list[Row]:
    """Keep the first of rows that share task, name and seed, and so differ only in their number of epochs."""
    found: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        found.setdefault((row.task, row.name, row.seed), row)
    return list(found.values())


def _with_epochs(row: Row, epochs: int) -> Row:
    """Set the number of epochs, and end the warm-up before the last one, in which bytes are measured."""
    return replace(row, epochs=epochs, warmup_epochs=max(0, min(row.warmup_epochs, epochs - 1)))


def _quick(row: Row) -> Row:
    return replace(_with_epochs(row, 1), batch=_QUICK_BATCH, limit=QUICK_LIMIT[row.task])


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code, as ``narrowband``'s commands do."""
    return command_line(
        experiment.module,
        Options,
        functools.partial(_run, experiment),
        argv,
        stopped="Rows that were finished are kept: the same command goes on from there.",
    )


def command_line(
    module: str,
    options: type[_Chosen],
    work: Callable[[_Chosen, list[str], Console], None],
    argv: Sequence[str] | None = None,
    *,
    stopped: str,
) -> int:
    """Parse a command line, call ``work``, and return an exit code of :mod:`narrowband.cli.exits`.

    Args:
        module: the last part of the module's name.
        options: dataclass of the command line's options.
        work: called with the options, the command as given, and the console to print to.
        argv: ``sys.argv`` when None.
        stopped: the message after Ctrl-C or SIGTERM.
    """
    import tyro
    from rich.console import Console

    words = list(sys.argv[1:] if argv is None else argv)
    console, errors = (Console(stderr=stderr, emoji=False) for stderr in (False, True))

    def run() -> int:
        about = f"{inspect.cleandoc(options.__doc__ or '')}\n\n{CONVENTION}"
        given = tyro.cli(options, args=words, prog=f"python -m reproduce.{module}", description=about)
        _check_paths(given, module)
        work(given, ["python", "-m", f"reproduce.{module}", *words], console)
        return DONE

    return finish(run, errors, stopped=stopped)


def _check_paths(given: object, module: str) -> None:
    """Check that results can be written, and that no output overwrites data or a record that commands here read.

    Raises:
        ValueError: results cannot be written, or would overwrite such a file.
    """
    output, losses = (getattr(given, name, None) for name in ("output", "losses"))
    page = getattr(given, "markdown", None) or getattr(given, "file", None)
    check_folder(output)
    folder = output or RESULTS / module
    sources = [*places(getattr(given, "data_dir", None)), losses]
    record = folder / "summary.json"
    # The page must not overwrite finished rows or records. The command that wrote these may overwrite them.
    check_output(page, reads=[*sources, *folder.rglob("*.json"), *RESULTS.rglob("*.json")])
    if hasattr(given, "output"):
        check_output(page, record, record.with_suffix(".html"), reads=sources)


def _run(experiment: Experiment, options: Options, command: list[str], console: Console) -> None:
    output = options.output or RESULTS / experiment.module
    rows = chosen(experiment, options)
    nodes = experiment.nodes if options.nodes is None else options.nodes
    if options.recorded:
        rows = recorded(rows, output, nodes=nodes, data_dir=options.data_dir)
        if not rows:
            raise ValueError(f"none of these rows is finished in {output}: leave --recorded out to train them")
    record = provenance(rows[0].seed, command)
    console.print(experiment.paper, style="bold", markup=False, highlight=False)
    with progress(console) as bars:
        results = run(
            rows,
            output,
            nodes=nodes,
            data_dir=options.data_dir,
            resume=options.resume,
            on_event=_Show(bars, rows),
        )
    found = groups(results)
    claims = [] if options.quick else experiment.claims(found)
    show(console, found, experiment.titles, claims, experiment.layout)
    commits = sorted({str(row["commit"]) for row in results})
    others = [commit for commit in commits if commit != str(record["commit"])]
    if others:
        console.print(f"Some rows were trained at other commits: {', '.join(others)}", style="yellow", markup=False)
    written = output / "summary.json"
    record["cpus"] = ran_on(results, written)
    whole = record | {
        "paper": experiment.paper,
        "seeds": sorted({row.seed for row in rows}),
        # ``beside`` only repeats the scores of the other rows.
        "groups": [{key: value for key, value in asdict(group).items() if key != "beside"} for group in found],
        "claims": [claim.record() for claim in claims],
        # Traces of ranges are long, and the rows' own files have them.
        "rows": [{key: value for key, value in row.items() if key != "ranges"} for row in results],
    }
    write_json(written, whole)
    if experiment.draw is not None and can_plot():
        for picture in experiment.draw(results, output if options.markdown is None else pictures_of(options.markdown)):
            console.print(f"drawn: {picture}", style="dim", markup=False, highlight=False)
    write_pages(
        written,
        whole,
        options.markdown,
        lambda _, path: page(experiment, results, record, path, claims),
        console,
    )


def page(
    experiment: Experiment,
    rows: Sequence[dict[str, Any]],
    record: dict[str, Any],
    path: Path,
    claims: Sequence[Claim] | None = None,
) -> None:
    """Write an experiment's page of the documentation.

    Args:
        experiment: the experiment that was run.
        rows: results of the rows that were trained.
        record: command and machine.
        path: where to write the page.
        claims: judged claims; judged by the rows when left out.
    """
    found = groups(rows)
    write_results(
        path,
        found,
        experiment.titles,
        experiment.claims(found) if claims is None else claims,
        experiment.layout,
        opening=experiment.opening,
        paper=experiment.paper,
        record=record | {"took": took(rows)},
        commits=sorted({str(row["commit"]) for row in rows}),
    )


def took(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say in words how long training took in all; an empty string if a row did not record its time.

    Example:
        >>> took([{"wall_s": 3600.0}, {"wall_s": 5400.0}])
        'Training 2 rows took 2.5 h, added up, however busy the machine was'
    """
    if not rows or not all("wall_s" in row for row in rows):
        return ""
    hours = sum(row["wall_s"] for row in rows) / 3600
    alone = " of one process each" if all(row.get("forward") or row.get("activations") for row in rows) else ""
    said = f"{hours:.1f} h" if hours >= 0.1 else f"{60 * hours:.0f} min"
    count = f"{len(rows)} row" if len(rows) == 1 else f"{len(rows)} rows"
    return f"Training {count} took {said}{alone}, added up, however busy the machine was"


def show(
    console: Console, found: Sequence[Any], titles: dict[str, str], claims: Sequence[Claim], layout: Layout
) -> None:
    """Print tables, the meaning of their columns, and the verdicts of claims."""
    for drawn in table(found, titles, layout):
        console.print(drawn)
    for word, meaning in layout.legend:
        console.print(f"{word}: {meaning}", style="dim", highlight=False, markup=False)
    say(claims, console)


def say(claims: Sequence[Claim], console: Console) -> None:
    """Print the verdicts of claims."""
    for claim in claims:
        style = {"held": "green", "not held": "red", "not resolved": "yellow"}.get(claim.verdict(), "dim")
        console.print(f"{claim.verdict()}: {claim.text} ({claim.figures})", style=style, markup=False, highlight=False)


def progress(console: Console) -> Progress:
    """Make progress bars that disappear when done; each has the field ``said``, for a short text beside the bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class _Show:
    """Show events of training: a bar for each row in training, and a line for each finished one."""

    def __init__(self, progress: Progress, rows: Sequence[Row]) -> None:
        self._progress = progress
        self._rows = rows
        self._starting: TaskID | None = progress.add_task("starting ranks", total=None, said="")
        self._bars: dict[int, TaskID] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        number = event["row"]
        row = self._rows[number]
        label = f"[{number + 1}/{len(self._rows)}] {row.task} {row.name}, seed {row.seed}"
        if event["event"] == "step":
            if self._starting is not None:
                self._progress.remove_task(self._starting)
                self._starting = None
            if number not in self._bars:
                self._bars[number] = self._progress.add_task(label, total=event["of"], said="")
            self._progress.update(
                self._bars[number], completed=event["step"], said=f"loss {format_loss(event['loss'], 2)}"
            )
        elif event["event"] == "row":
            if number in self._bars:
                self._progress.remove_task(self._bars.pop(number))
            result = event["result"]
            score = format_loss(result["score"], 2)
            self._progress.console.print(
                f"{label}: {score} ({result['metric']}), {format_seconds(result['wall_s'])}",
                markup=False,
                highlight=False,
            )
