"""CSSGD (Li, Xie, Mao et al. 2021, DOI 10.19678/j.issn.1000-3428.0057340): compute r times, send less.

The paper trains a DNN on MNIST and a CNN on CIFAR-10 until a common accuracy. It compares coded data parallelism with
synchronous SGD by unicast and by multicast, and with asynchronous SGD with a parameter server. This module measures
rows in these sections, and :mod:`reproduce.cssgd_page` makes tables of them:

=========  =============================================================================================================
bytes      bytes of an exchange by the links' own counters, for 2 to 10 nodes and r = 1 to 4, compared with equation 19
nodes      time of a step of each method on 2 to 10 nodes (figures 14 and 15)
steps      number of steps that these methods take to the target, counted in one process, seed by seed
shares     time of a step with a slow node, with equal and with uneven shares (section 2.1)
best       what keeping the best weights changes, and costs (line 8 of algorithm 1)
choice     what ``nb.choose_redundancy`` chooses on a slow link and on a fast one
train      training to the target behind links: the paper's methods, and two that it leaves out (figures 8 to 11)
batch      time of a step against r on 8 nodes (figures 12 and 13)
=========  =============================================================================================================

Ranks are behind emulated links on this machine (:mod:`narrowband.lab`), which needs Linux and root. Run ``python -m
reproduce.cssgd`` (about an hour and a half on two cores), ``--quick`` (a minute or two), ``--help``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.bench.ranks import run_ranks
from narrowband.errors import UnsupportedError
from narrowband.lab import LabConfig, requirements
from narrowband.report.record import commit, provenance, write_json
from narrowband.units import format_bytes, format_seconds
from reproduce import cssgd_serial
from reproduce.command import RESULTS, command_line, progress, say
from reproduce.cssgd_claims import claims
from reproduce.cssgd_page import LEGEND, PAPER, page, sheets
from reproduce.cssgd_problem import (
    ALL_REDUCE,
    ALONE,
    ASGD,
    BASELINES,
    CHOSEN,
    CLASSES,
    FILES,
    MULTICAST,
    NAMED,
    REDUNDANCIES,
    SECTIONS,
    TITLES,
    Problem,
    Row,
    coded,
    images_of,
)
from reproduce.data import about
from reproduce.html import write_pages
from reproduce.kept import Kept
from reproduce.report import ran_on
from reproduce.row import key

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["Options", "main", "measure", "rows_of"]


@dataclass(frozen=True)
class _Setting:
    """How a task is trained.

    Attributes:
        rate: rate of links on which communication dominates.
        batch: samples of a mini-batch over four nodes; other numbers of nodes have as many samples per node.
        target: test accuracy in percent, over all classes, that ends training.
        every: steps between two tests.
        lr: learning rate of synchronous methods.
        asgd_lr: learning rate of ASGD on up to four nodes. With n > 4 nodes it is multiplied by 4/n, so that one update
            by every worker moves the parameters as far as with four.
        nodes_target: ``target`` where numbers of nodes are compared; :func:`_above_chance` adapts it to the classes.
        nodes_every: ``every`` where numbers of nodes are compared.
        best: steps of training, and steps between two tests, in the section ``best``.
    """

    rate: str
    batch: int
    target: float
    every: int
    lr: float
    asgd_lr: float
    nodes_target: float
    nodes_every: int
    best: tuple[int, int]


_SETTINGS = {
    "dnn": _Setting("50mbit", 1024, 90.0, 2, lr=0.3, asgd_lr=0.1, nodes_target=90.0, nodes_every=1, best=(100, 2)),
    "cnn": _Setting("20mbit", 128, 45.0, 5, lr=0.05, asgd_lr=0.05, nodes_target=35.0, nodes_every=5, best=(200, 10)),
}
#: The number of nodes that the settings above are for.
_NODES = 4
_STEPS = 2_000
#: Steps after which training in one process is given up.
_SERIAL_STEPS = 600

#: For counting bytes: the links' rate, pairs of nodes and redundancy, and the largest number of nodes with more than
#: one exchange.
_COUNTED_RATE = "50mbit"
_COUNTED = tuple((nodes, r) for nodes in range(2, 11) for r in range(1, 5) if r < nodes)
_COUNTED_THRICE = 8

#: Speeds of four nodes, the last half as fast; the task that they train; and the seconds that a fast node's emulated
#: processor takes for a sample, chosen so that computing and sending take about as long.
_UNEVEN, _UNEVEN_TASK, _SAMPLE_S = (2.0, 2.0, 2.0, 1.0), "dnn", 0.0005
_UNEVEN_SCHEMES = ((1, 1), (3, 4))

#: Seconds that a row may take on a busy machine, not counting its training.
_AROUND_S = 180.0

#: Size of a ``--quick`` run: enough to see that everything works, too small for results.
_QUICK_NODES, _QUICK_RATE, _QUICK_BATCH, _QUICK_LIMIT, _QUICK_STEPS = 3, "200mbit", 48, 960, 5


@dataclass(frozen=True)
class Options:
    """Train small networks behind emulated links with CSSGD, with its paper's baselines, and with two further ones.

    Rows that are finished are kept, each as soon as it is done: after Ctrl-C, the same command goes on from there.
    Needs Linux and root, for network namespaces.
    """

    nodes: int = 4
    """Ranks that train; ASGD has a server in addition."""
    figure_nodes: int = 8
    """Ranks with which a batch's time is measured against r."""
    slow: str | None = None
    """Rate of links on which communication dominates; 50mbit for the DNN and 20mbit for the CNN when left out."""
    fast: str = "10gbit"
    """Rate of links on which communication should not dominate."""
    node_counts: tuple[int, ...] = tuple(range(2, 11))
    """Numbers of ranks in figures 14 and 15; ASGD has a server in addition."""
    tasks: tuple[str, ...] = tuple(TITLES)
    """dnn, cnn; both when left out."""
    sections: tuple[str, ...] = SECTIONS
    """bytes, nodes, steps, shares, best, choice, train, batch; all when left out."""
    rows: tuple[str, ...] = ()
    """Train only rows of these names, such as "ASGD"; all when left out."""
    lr: float | None = None
    """Learning rate of all rows but ASGD; the task's own when left out."""
    asgd_lr: float | None = None
    """Learning rate of ASGD, whose gradients are of fewer samples and come late; the task's own when left out."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of parameters and of the order of samples, for ASGD and for rows trained in one process. Other rows have
    the first seed only, since a step of a synchronous method takes as long with any seed."""
    limit_s: float = 300.0
    """Seconds after which the training of a row is given up."""
    data_dir: Path | None = None
    """Folder with the data; else NARROWBAND_DATA names it; else sets are downloaded."""
    output: Path | None = None
    """Directory of the results; reproduce/results/cssgd when left out."""
    resume: bool = True
    """Take rows that an earlier run finished; --no-resume measures them again."""
    recorded: bool = False
    """Measure nothing: tables and claims of the rows that are finished."""
    quick: bool = False
    """Three ranks, little data, a low target, few exchanges: to see within a minute that everything works."""
    markdown: Path | None = None
    """Also write the tables and claims to this file, for the documentation."""

    def __post_init__(self) -> None:
        trained = (*NAMED, *map(coded, REDUNDANCIES))
        for given, there in ((self.tasks, tuple(TITLES)), (self.sections, SECTIONS), (self.rows, trained)):
            for name in given:
                if name not in there:
                    raise ValueError(f"cssgd has no {name!r}; there are: {', '.join(there)}")
        for name in ("nodes", "figure_nodes"):
            if getattr(self, name) < 3:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 3: r = 2 needs a rank that lacks a block"
                )
        for nodes in self.node_counts:
            if not 2 <= nodes <= CLASSES:
                raise ValueError(f"node_counts={nodes} is not in [2, {CLASSES}]: n nodes train n of {CLASSES} classes")
        if not self.seeds:
            raise ValueError("seeds are empty; give one at least, such as --seeds 0")
        for name in ("limit_s", "lr", "asgd_lr"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        for rate in (self.slow, self.fast):
            LabConfig(rate=rate)

    def of(self, task: str) -> _Setting:
        """Return how this run trains a task."""
        own = _SETTINGS[task]
        if self.quick:
            own = replace(own, rate=_QUICK_RATE, batch=_QUICK_BATCH, every=1, target=100.0, best=(_QUICK_STEPS, 1))
        return replace(own, rate=self.slow or own.rate, lr=self.lr or own.lr, asgd_lr=self.asgd_lr or own.asgd_lr)


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows_of(options: Options) -> list[Row]:
    """Return the rows to measure, in the order of measuring."""
    if options.quick:
        options = replace(
            options, nodes=_QUICK_NODES, figure_nodes=_QUICK_NODES, node_counts=(_QUICK_NODES,), fast=_QUICK_RATE,
            seeds=options.seeds[:1],
        )  # fmt: skip
    found: dict[str, list[Row]] = {section: [] for section in SECTIONS}
    found["bytes"] = list(_counted(options))
    for task in options.tasks:
        own = options.of(task)
        found["nodes"] += _timed(task, own, options)
        found["steps"] += _stepped(task, own, options)
        found["shares"] += _shared(own, options) if task == _UNEVEN_TASK else ()
        found["best"] += _kept(task, own, options)
        found["choice"] += _asked(task, own, options)
        found["train"] += _trained(task, own, options)
        found["batch"] += _schemes(task, own, options)
    rows = [row for section in SECTIONS if section in options.sections for row in found[section]]
    return [_quick(row) for row in rows] if options.quick else rows


def _counted(options: Options) -> Iterator[Row]:
    """Rows that count the bytes of exchanging a vector."""
    counted, rate = _COUNTED, _COUNTED_RATE
    if options.quick:
        counted, rate = tuple((_QUICK_NODES, r) for r in range(1, _QUICK_NODES)), _QUICK_RATE
    for n, r in counted:
        row = Row("bytes", "bytes", f"n = {n}, r = {r}", n, rate, options.seeds[0], batch=n, redundancy=r)
        yield row if n <= _COUNTED_THRICE else replace(row, steps=1)


def _timed(task: str, own: _Setting, options: Options) -> Iterator[Row]:
    """Rows that time a step of each method, for each number of nodes."""
    for n in options.node_counts:
        for name in (MULTICAST, ASGD, CHOSEN, ALL_REDUCE):
            yield Row(
                "batch", task, name, n, own.rate, options.seeds[0], own.batch // _NODES * n, method=NAMED[name],
                classes=n, section="nodes",
            )  # fmt: skip


def _stepped(task: str, own: _Setting, options: Options) -> Iterator[Row]:
    """Rows that count steps to the target: with as many classes as nodes, and with all classes as behind links."""
    for n, classes in (*((n, n) for n in options.node_counts), (options.nodes, 0)):
        for seed in options.seeds:
            for name in (ALONE, ASGD):
                row = Row(
                    "steps", task, name, n, "", seed, own.batch // _NODES * n, method=NAMED[name],
                    lr=own.asgd_lr * min(1.0, _NODES / n) if name == ASGD else own.lr, steps=_SERIAL_STEPS,
                )  # fmt: skip
                if classes:
                    target = _above_chance(own.nodes_target, classes)
                    yield replace(row, classes=classes, target=target, every=own.nodes_every)
                else:
                    yield replace(row, section="train", target=own.target, every=own.every)


def _above_chance(target: float, classes: int) -> float:
    """Return the accuracy (in percent) that is as far above chance with ``classes`` as ``target`` is with all."""
    share = (target / 100.0 - 1 / CLASSES) / (1 - 1 / CLASSES)
    return round(100.0 * (1 / classes + share * (1 - 1 / classes)), 2)


def _shared(own: _Setting, options: Options) -> Iterator[Row]:
    """Rows that time a step with a slow last node, with equal shares and with shares that match the nodes' speeds."""
    sample_s = tuple(_SAMPLE_S * max(_UNEVEN) / speed for speed in _UNEVEN)
    for r, g in _UNEVEN_SCHEMES:
        for shares, name in (((), "equal shares"), (_UNEVEN, f"shares {':'.join(f'{s:g}' for s in _UNEVEN)}")):
            yield Row(
                "batch", _UNEVEN_TASK, f"{name}, r = {r}", len(_UNEVEN), own.rate, options.seeds[0], own.batch,
                redundancy=r, group=g, shares=shares, sample_s=sample_s, section="shares",
            )  # fmt: skip


def _kept(task: str, own: _Setting, options: Options) -> Iterator[Row]:
    steps, every = own.best
    for seed in options.seeds:
        yield Row("best", task, ALONE, 1, "", seed, own.batch, method="alone", lr=own.lr, every=every, steps=steps)


def _asked(task: str, own: _Setting, options: Options) -> Iterator[Row]:
    places = ((options.nodes, own.rate), (options.nodes, options.fast), (options.figure_nodes, own.rate))
    for n, rate in dict.fromkeys(places):
        yield Row("choice", task, f"choice of {n} at {rate}", n, rate, options.seeds[0], own.batch)


def _trained(task: str, own: _Setting, options: Options) -> Iterator[Row]:
    for name, method, r in (
        *((name, NAMED[name], 1) for name in BASELINES),
        *((coded(r), "coded", r) for r in REDUNDANCIES if r < options.nodes),
        *((name, NAMED[name], 1) for name in (CHOSEN, ALL_REDUCE, ALONE)),
    ):
        if name in (options.rows or (name,)):
            for seed in options.seeds if name == ASGD else options.seeds[:1]:
                yield Row(
                    "train", task, name, options.nodes, own.rate, seed, own.batch, method=method, redundancy=r,
                    lr=own.asgd_lr if name == ASGD else own.lr, target=own.target, every=own.every, steps=_STEPS,
                    limit_s=options.limit_s,
                )  # fmt: skip


def _schemes(task: str, own: _Setting, options: Options) -> Iterator[Row]:
    """Rows that time a step against r: uncoded, coded among all nodes, and in groups that compute the same."""
    nodes = options.figure_nodes
    repeated = [(r, r) for r in range(2, nodes) if nodes % r == 0]
    for r, g in ((1, 1), *((r, nodes) for r in range(2, nodes)), *repeated):
        yield Row(
            "batch", task, f"r = {r}, g = {g}", nodes, own.rate, options.seeds[0], own.batch, redundancy=r, group=g
        )


def _quick(row: Row) -> Row:
    steps = 1 if row.kind in ("bytes", "batch", "choice") else _QUICK_STEPS
    return replace(row, steps=steps, limit=None if row.kind == "bytes" else _QUICK_LIMIT)


def _places(rows: Sequence[Row], output: Path, data_dir: Path | None) -> list[Path]:
    """Return each row's file of results. This also decodes the images, so that ranks need not all do it at once."""
    digests = {task: images_of(task, data_dir).digest for task in {row.task for row in rows if row.kind != "bytes"}}
    return [output / "rows" / f"{key(row, row.ranks, digests.get(row.task, ''))}.json" for row in rows]


def measure(
    rows: Sequence[Row],
    places: Sequence[Path],
    *,
    data_dir: Path | None = None,
    resume: bool = True,
    on_event: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Measure rows, and return their results in the given order.

    Rows with the same link and number of ranks are measured by the same processes.

    Raises:
        UnsupportedError: links cannot be emulated here.
        RankError: a rank ended early, or rows exceeded their time limit.
    """
    kept = Kept(places, ("kind", "task", "name"), resume=resume, on_event=on_event)
    told = {"data_dir": None if data_dir is None else str(data_dir.absolute()), "commit": commit()}
    missing = kept.missing
    behind_links = [rows[number] for number in missing if not rows[number].serial]
    if behind_links:
        _require_lab(behind_links[0])
    for together in dict.fromkeys(_processes(rows[number]) for number in missing):
        own = [(number, rows[number]) for number in missing if _processes(rows[number]) == together]
        if own[0][1].serial:
            for number, row in own:
                _train_here(number, row, data_dir, kept.note)
            continue
        longest = sum(_AROUND_S + 2 * row.limit_s * (row.kind == "train") for _, row in own)
        where = LabConfig(nodes=own[0][1].ranks, rate=own[0][1].rate, timeout_s=longest)
        config = told | {"rows": [[number, asdict(row)] for number, row in own]}
        run_ranks("reproduce.cssgd_ranks", config, where, kept.note)
    return [kept.found[number] for number in range(len(rows))]


def _processes(row: Row) -> tuple[bool, int, str]:
    """Return a key; rows with the same key are measured by the same processes."""
    return row.kind == "bytes", row.ranks, row.rate


def _train_here(number: int, row: Row, data_dir: Path | None, note: Callable[[dict[str, Any]], None]) -> None:
    """Train a row in this process."""
    note({"event": "begin", "row": number})
    train = cssgd_serial.best if row.kind == "best" else cssgd_serial.steps_to_target
    found = train(row, Problem(row, data_dir), lambda **event: note(event | {"row": number}))
    note({"event": "row", "row": number, "result": asdict(row) | found | {"commit": commit()}})


def _require_lab(row: Row) -> None:
    problems = requirements(LabConfig(nodes=row.ranks, rate=row.rate))
    if problems:
        raise UnsupportedError(
            "ranks are put behind emulated links, which cannot be made here; --recorded shows what was measured where "
            f"they can. {' '.join(problems)}"
        )


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line(
        "cssgd",
        Options,
        _run,
        argv,
        stopped="Rows that were finished are kept: the same command goes on from there.",
    )


def _run(options: Options, command: list[str], console: Console) -> None:
    output = options.output or RESULTS / "cssgd"
    rows = rows_of(options)
    places = _places(rows, output, options.data_dir)
    if options.recorded:
        kept = [(row, place) for row, place in zip(rows, places, strict=True) if place.exists()]
        if not kept:
            raise ValueError(f"none of these rows is finished in {output}: leave --recorded out to measure them")
        rows, places = [row for row, _ in kept], [place for _, place in kept]
    record = provenance(options.seeds[0], command)
    console.print(PAPER, style="bold", markup=False, highlight=False)
    with progress(console) as bars:
        resume = options.resume or options.recorded
        results = measure(rows, places, data_dir=options.data_dir, resume=resume, on_event=_Show(bars, rows))
    said = [] if options.quick else claims(results)
    tables = list(sheets(results))
    for sheet in tables:
        console.print(sheet.drawn())
    for word, meaning in LEGEND:
        console.print(f"{word}: {meaning}", style="dim", highlight=False, markup=False)
    say(said, console)
    written = output / "summary.json"
    data = "; ".join(about(FILES[task], options.data_dir) for task in TITLES if task in {row.task for row in rows})
    about_rows = {"data": data, "cpus": ran_on(results, written), "claims": [claim.record() for claim in said]}
    whole = record | {"paper": PAPER} | about_rows | {"rows": results}
    write_json(written, whole)
    write_pages(written, whole, options.markdown, page, console)


class _Show:
    """Show events of measuring: one bar over all rows, labelled with the current one, and a line per finished row."""

    def __init__(self, progress: Progress, rows: Sequence[Row]) -> None:
        self._progress, self._rows = progress, rows
        self._bar = progress.add_task("starting ranks", total=len(rows), said="")

    def __call__(self, event: dict[str, Any]) -> None:
        row = self._rows[event["row"]]
        where = "in one process" if row.serial else f"at {row.rate}"
        label = f"{row.section or row.kind}: {row.task}, {row.name}, {row.nodes} ranks {where}, seed {row.seed}"
        if event["event"] == "begin":
            self._progress.update(self._bar, description=label)
        elif event["event"] == "test":
            so_far = f"{label}: {event['accuracy']:.1f} % after {format_seconds(event['seconds'])}"
            self._progress.update(self._bar, description=so_far)
        else:
            self._progress.advance(self._bar)
            self._progress.console.print(
                f"{label}: {_told(event['result'])}", markup=False, highlight=False, soft_wrap=True
            )


def _told(result: dict[str, Any]) -> str:
    """Summarize a finished row in a few words."""
    last = result["curve"][-1] if "curve" in result else []
    if result["kind"] == "train":
        reached = result["reached"]
        seconds = format_seconds((reached or last)[1])
        return f"{result['target']:g} % {'after' if reached else 'not yet, after'} {seconds}"
    if result["kind"] == "steps":
        return f"{result['target']:g} % {'after' if result['reached'] else 'not yet, after'} {last[0]} steps"
    if result["kind"] == "best":
        return f"{last[2]:.2f} %, kept {last[3]:.2f} %"
    if result["kind"] == "choice":
        said = (f"r = {c['redundancy']}, g = {c['group']} by {way}" for way, c in result["choices"].items())
        return "; ".join(said)
    if result["kind"] == "batch":
        return f"{format_seconds(result['step_s'])} a step"
    return f"{format_bytes(result['link_bytes'])} a step, {result['link_bytes'] / result['stated_bytes'] - 1:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
