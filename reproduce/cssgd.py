"""CSSGD (Li, Xie, Mao et al. 2021, DOI 10.19678/j.issn.1000-3428.0057340): compute r times, send less.

The paper trains a DNN on MNIST and a CNN on CIFAR-10 until a common accuracy, and compares coded data parallelism with
synchronous SGD by unicast and by multicast, and with asynchronous SGD and a parameter server. With the best r it finds
53.97 % and 26.89 % less time than SSGD and ASGD for the DNN, 39.11 % and 26.37 % for the CNN; less traffic (figures 9
and 11); and for each network an r with the shortest batch, 3 and 2 on 8 nodes (figures 12 and 13).

Here ranks are behind emulated links on this machine (:mod:`narrowband.lab`), which takes Linux and root. Measured are

* time and bytes to a common accuracy on a slow link, for the paper's methods, for CSSGD with r = 2 and 3, and for what
  ``nb.choose_redundancy`` chooses;
* the same for two rivals that the paper leaves out: an all-reduce (DistributedDataParallel), and *alone*, where every
  rank computes the whole mini-batch and sends nothing;
* a batch's time against r on 8 ranks, beside T(r) = r · T_compute + T_communicate · L(r) from measured times, and the
  paper's r · T_compute + T_communicate / r;
* what the tool says on the slow link and on a fast one;
* bytes of an exchange by the links' own counters for 4 to 8 ranks and r = 1 to 4, beside equation 19.

Run ``python -m reproduce.cssgd`` (about three quarters of an hour on two cores), ``--quick`` (a minute), ``--help``.

Differences from the paper:

* Four ranks that share two cores, instead of ten machines: computing is slow, and what counts is its ratio to the link.
  Links are full duplex and as fast in both directions. Each rank of a multicast receives n − 1 times what it sends, so
  multicast saves bytes and no time there: a step of SSGD takes as long by unicast.
* Baselines send one gradient per node and step (the sum over its samples). Equation 19 compares with one per *block*.
* Networks are small, since the paper does not say how large its own are. SGD is plain, at a learning rate at which
  synchronous methods are fast, and ASGD at its own (``--lr`` and ``--asgd-lr`` try others). The CNN's target is lower
  than the paper's 70 %, which would take hours; the DNN's is higher than its 82 %, which takes two dozen steps. ASGD
  runs once; the paper has the mean of ten runs.
* With r = 1 every rank adds up its own gradient and multicasts it: CSSGD is then SSGD by multicast in fixed point.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.bench.ranks import run_ranks
from narrowband.coded import Assignment
from narrowband.errors import UnsupportedError
from narrowband.lab import LabConfig, requirements
from narrowband.report.record import commit, provenance, read_json, write_json
from narrowband.units import format_bytes, format_seconds
from reproduce.command import command_line, say
from reproduce.cssgd_ranks import Row, equation_19, images_of
from reproduce.pictures import Bar, Panel
from reproduce.report import NOTHING, Claim, Opening, beginning, source, write_page
from reproduce.training import key

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

__all__ = ["Options", "claims", "main", "rows_of", "sheets"]

_PAPER = "Li, Xie, Mao et al. 2021, CSSGD (DOI 10.19678/j.issn.1000-3428.0057340)"
_TITLES = {"dnn": "MNIST, DNN", "cnn": "CIFAR-10, CNN"}
_KINDS = ("bytes", "choice", "train", "batch")

#: Less time than SSGD by multicast and than ASGD, in percent, and the best r on 8 nodes (figures 12 to 15).
_SAVED = {"dnn": (53.97, 26.89), "cnn": (39.11, 26.37)}
_BEST = {"dnn": 3, "cnn": 2}

_UNICAST, _MULTICAST, _ASGD, _CHOSEN = "SSGD unicast", "SSGD multicast", "ASGD", "CSSGD, chosen"
_ALL_REDUCE, _ALONE = "all-reduce", "alone"
_METHODS = {
    _UNICAST: "unicast", _MULTICAST: "multicast", _ASGD: "asgd", _CHOSEN: "chosen", _ALL_REDUCE: "all-reduce",
    _ALONE: "alone",
}  # fmt: skip
#: The methods that the paper compares with.
_BASELINES = (_UNICAST, _MULTICAST, _ASGD)
_REDUNDANCIES = (2, 3)


@dataclass(frozen=True)
class _Setting:
    """How a task is trained, on links on which communication dominates."""

    rate: str
    batch: int
    target: float
    every: int
    lr: float
    asgd_lr: float


_SETTINGS = {
    "dnn": _Setting(rate="50mbit", batch=1024, target=90.0, every=2, lr=0.3, asgd_lr=0.1),
    "cnn": _Setting(rate="20mbit", batch=128, target=45.0, every=5, lr=0.05, asgd_lr=0.05),
}
#: Of the links on which bytes are counted.
_COUNTED_RATE = "50mbit"
_STEPS = 2_000

#: Ranks and redundancies whose bytes are counted.
_COUNTED = tuple((nodes, r) for nodes in range(4, 9) for r in range(1, 5) if r < nodes)
_WITHIN = 0.05
#: Share of the predicted time within which a batch's time is as predicted.
_AS_PREDICTED = 0.25

#: What a row may take on a busy machine, its training left out.
_AROUND_S = 180.0

#: A run of ``--quick``: enough to see that everything works, not to learn anything.
_QUICK_NODES, _QUICK_RATE, _QUICK_BATCH, _QUICK_LIMIT, _QUICK_STEPS = 3, "200mbit", 48, 960, 5


@dataclass(frozen=True)
class Options:
    """Train small networks behind emulated links with CSSGD, what its paper compares with, and what it does not.

    Rows that are finished are kept, each as soon as it is done: after Ctrl-C, the same command goes on from there.
    Needs Linux and root, for network namespaces.
    """

    nodes: int = 4
    """Ranks that train; ASGD has a server more."""
    figure_nodes: int = 8
    """Ranks for a batch's time against r."""
    slow: str | None = None
    """Rate of links on which communication dominates; 50mbit for the DNN and 20mbit for the CNN when left out."""
    fast: str = "10gbit"
    """Rate of links on which it should not."""
    tasks: tuple[str, ...] = tuple(_TITLES)
    """dnn, cnn; both when left out."""
    kinds: tuple[str, ...] = _KINDS
    """train, choice, batch, bytes; all when left out."""
    rows: tuple[str, ...] = ()
    """Train only rows of these names, such as "ASGD"; all when left out."""
    lr: float | None = None
    """Learning rate of all rows but ASGD; the task's own when left out."""
    asgd_lr: float | None = None
    """Learning rate of ASGD, whose gradients are of fewer samples and come late; the task's own when left out."""
    seed: int = 0
    """Of parameters and of the order of samples."""
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
        trained = (*_METHODS, *map(_coded, _REDUNDANCIES))
        for given, there in ((self.tasks, tuple(_TITLES)), (self.kinds, _KINDS), (self.rows, trained)):
            for name in given:
                if name not in there:
                    raise ValueError(f"cssgd has no {name!r}; there are: {', '.join(there)}")
        for name in ("nodes", "figure_nodes"):
            if getattr(self, name) < 3:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 3: r = 2 needs a rank that lacks a block"
                )
        for name in ("limit_s", "lr", "asgd_lr"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        for rate in (self.slow, self.fast):
            LabConfig(rate=rate)

    def of(self, task: str) -> _Setting:
        """How this run trains a task."""
        own = _SETTINGS[task]
        if self.quick:
            own = replace(own, rate=_QUICK_RATE, batch=_QUICK_BATCH, every=1, target=100.0)
        return replace(own, rate=self.slow or own.rate, lr=self.lr or own.lr, asgd_lr=self.asgd_lr or own.asgd_lr)


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows_of(options: Options) -> list[Row]:
    """What is measured, in the order of tables."""
    nodes, figure_nodes, fast = options.nodes, options.figure_nodes, options.fast
    counted, counted_rate = _COUNTED, _COUNTED_RATE
    if options.quick:
        nodes = figure_nodes = _QUICK_NODES
        fast = counted_rate = _QUICK_RATE
        counted = tuple((_QUICK_NODES + 1, r) for r in _REDUNDANCIES)
    found = {"bytes": [_counted(n, r, counted_rate, options.seed) for n, r in counted]}
    for task in options.tasks:
        own = options.of(task)
        for n, rate in dict.fromkeys(((nodes, own.rate), (nodes, fast), (figure_nodes, own.rate))):
            asked = Row("choice", task, f"choice of {n} at {rate}", n, rate, options.seed, own.batch)
            found.setdefault("choice", []).append(asked)
        found.setdefault("train", []).extend(_trained(task, nodes, own, options))
        for r, g in _schemes(figure_nodes):
            timed = Row("batch", task, f"r = {r}, g = {g}", figure_nodes, own.rate, options.seed, own.batch)
            found.setdefault("batch", []).append(replace(timed, redundancy=r, group=g))
    rows = [row for kind in _KINDS if kind in options.kinds for row in found.get(kind, ())]
    return [_quick(row) for row in rows] if options.quick else rows


def _counted(nodes: int, redundancy: int, rate: str, seed: int) -> Row:
    name = f"n = {nodes}, r = {redundancy}"
    return Row("bytes", "bytes", name, nodes, rate, seed, batch=nodes, redundancy=redundancy)


def _trained(task: str, nodes: int, own: _Setting, options: Options) -> Iterator[Row]:
    for name, method, r in (
        *((name, _METHODS[name], 1) for name in _BASELINES),
        *((_coded(r), "coded", r) for r in _REDUNDANCIES if r < nodes),
        *((name, _METHODS[name], 1) for name in (_CHOSEN, _ALL_REDUCE, _ALONE)),
    ):
        if name in (options.rows or (name,)):
            yield Row(
                "train", task, name, nodes, own.rate, options.seed, own.batch, method=method, redundancy=r,
                lr=own.asgd_lr if name == _ASGD else own.lr, target=own.target, every=own.every, steps=_STEPS,
                limit_s=options.limit_s,
            )  # fmt: skip


def _coded(redundancy: int) -> str:
    return f"CSSGD, r = {redundancy}"


def _schemes(nodes: int) -> list[tuple[int, int]]:
    """Redundancies and groups of the figure: plain, coded among all, and in groups that compute the same."""
    repeated = [(r, r) for r in range(2, nodes) if nodes % r == 0]
    return [(1, 1), *((r, nodes) for r in range(2, nodes)), *repeated]


def _quick(row: Row) -> Row:
    steps = _QUICK_STEPS if row.kind == "train" else 1
    return replace(row, steps=steps, limit=None if row.kind == "bytes" else _QUICK_LIMIT)


def _places(rows: Sequence[Row], output: Path, data_dir: Path | None) -> list[Path]:
    """Where each row is kept when it is finished. Images are decoded on the way, before all ranks want them."""
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
    """What each row came to, in the given order; rows of one link and number of ranks share their processes.

    Raises:
        UnsupportedError: links cannot be emulated here.
        RankError: a rank ended early, or rows took longer than they may.
    """
    results: dict[int, dict[str, Any]] = {}
    for number, place in enumerate(places):
        if resume and place.exists():
            results[number] = read_json(place, ("kind", "task", "name"))
            on_event({"event": "row", "row": number, "result": results[number]})

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "row":
            results[event["row"]] = event["result"]
            write_json(places[event["row"]], event["result"])
        on_event(event)

    config = {"data_dir": None if data_dir is None else str(data_dir.absolute()), "commit": commit()}
    missing = [number for number in range(len(rows)) if number not in results]
    if missing:
        _require_lab(rows[missing[0]])
    for ranks, rate in dict.fromkeys((rows[number].ranks, rows[number].rate) for number in missing):
        own = [number for number in missing if (rows[number].ranks, rows[number].rate) == (ranks, rate)]
        longest = sum(_AROUND_S + 2 * rows[number].limit_s * (rows[number].kind == "train") for number in own)
        told = [[number, asdict(rows[number])] for number in own]
        where = LabConfig(nodes=ranks, rate=rate, timeout_s=longest)
        run_ranks("reproduce.cssgd_ranks", config | {"rows": told}, where, note)
    return [results[number] for number in range(len(rows))]


def _require_lab(row: Row) -> None:
    problems = requirements(LabConfig(nodes=row.ranks, rate=row.rate))
    if problems:
        raise UnsupportedError(
            "ranks are put behind emulated links, which cannot be made here; --recorded shows what was measured where "
            f"they can. {' '.join(problems)}"
        )


# ---- claims ----------------------------------------------------------------------------------------------------------

_Result = dict[str, Any]


def claims(results: Sequence[_Result]) -> list[Claim]:
    """What the paper says, and what its scheme should do on such links, by these rows."""
    tasks = [task for task in _TITLES if any(result["task"] == task for result in results)]
    judges = (_sooner, _as_much_sooner, _less_sent, _plain_when_fast, _best, _predicted)
    found = [judge(results, task) for task, judge in itertools.product(tasks, judges)]
    return [*found, _counted_bytes(results)]


def _of(results: Sequence[_Result], kind: str, task: str | None = None) -> list[_Result]:
    return [result for result in results if result["kind"] == kind and task in (None, result["task"])]


def _runs(results: Sequence[_Result], task: str) -> dict[str, _Result]:
    return {result["name"]: result for result in _of(results, "train", task)}


def _needs(runs: dict[str, _Result], names: Sequence[str], text: str) -> Claim | None:
    if all(name in runs for name in names):
        return None
    return Claim(text, None, f"needs the rows {'; '.join(names)}")


def _seconds(run: _Result) -> float:
    """To the target; for ever where it was not reached."""
    return float(run["reached"][1]) if run["reached"] else math.inf


def _took(run: _Result) -> str:
    scheme = f" ({_scheme(run)})" if run["name"] == _CHOSEN else ""
    return f"{run['name']}{scheme} {_time(run)}"


def _time(run: _Result) -> str:
    return format_seconds(_seconds(run)) if run["reached"] else f"> {format_seconds(run['curve'][-1][1])}"


def _scheme(run: _Result) -> str:
    """Redundancy and group of a run, where it has any."""
    if run["method"] == "chosen":
        return f"r = {run['choice']['redundancy']}, g = {run['choice']['group']}"
    return f"r = {run['redundancy']}, g = {run['group'] or run['nodes']}" if run["method"] == "coded" else NOTHING


def _sooner(results: Sequence[_Result], task: str) -> Claim:
    text = (
        f"{_TITLES[task]}: on a link so slow that communication dominates, CSSGD at the r that the tool chooses is "
        "sooner at the target than SSGD by unicast, SSGD by multicast and ASGD"
    )
    runs = _runs(results, task)
    names = (_CHOSEN, *_BASELINES)
    lacks = _needs(runs, names, text)
    if lacks:
        return lacks
    chosen = runs[_CHOSEN]
    beside = "; ".join(_took(runs[name]) for name in (_ALL_REDUCE, _ALONE) if name in runs)
    figures = "; ".join(_took(runs[name]) for name in names) + (f"; beside them: {beside}" if beside else "")
    return Claim(text, all(_seconds(chosen) < _seconds(runs[name]) for name in _BASELINES), figures)


def _saved(runs: dict[str, _Result], name: str) -> float:
    """How much less time the chosen r takes than another row, in percent; the target may be out of reach of either."""
    own, other = _seconds(runs[_CHOSEN]), _seconds(runs[name])
    return -math.inf if math.isinf(own) else 100.0 * (1 - own / other)


def _as_much_sooner(results: Sequence[_Result], task: str) -> Claim:
    of_ssgd, of_asgd = _SAVED[task]
    text = (
        f"{_TITLES[task]}: CSSGD at that r takes at least {of_ssgd} % less time than SSGD by multicast, and "
        f"{of_asgd} % less than ASGD"
    )
    runs = _runs(results, task)
    lacks = _needs(runs, (_CHOSEN, _MULTICAST, _ASGD), text)
    if lacks:
        return lacks
    ours = _saved(runs, _MULTICAST), _saved(runs, _ASGD)
    return Claim(text, ours[0] >= of_ssgd and ours[1] >= of_asgd, f"{ours[0]:.1f} % and {ours[1]:.1f} %")


def _less_sent(results: Sequence[_Result], task: str) -> Claim:
    text = f"{_TITLES[task]}: CSSGD, with r = 2 as with r = 3, sends less until then than SSGD by multicast"
    runs = _runs(results, task)
    coded = [_coded(r) for r in _REDUNDANCIES]
    lacks = _needs(runs, (_MULTICAST, *coded), text)
    if lacks:
        return lacks
    sent = {name: runs[name]["reached"][2] if runs[name]["reached"] else math.inf for name in (_MULTICAST, *coded)}
    figures = "; ".join(f"{name} {_sent(runs[name])}" for name in sent)
    return Claim(text, all(sent[name] < sent[_MULTICAST] for name in coded), figures)


def _sent(run: _Result) -> str:
    return format_bytes(run["reached"][2]) if run["reached"] else NOTHING


def _plain_when_fast(results: Sequence[_Result], task: str) -> Claim:
    text = f"{_TITLES[task]}: on a fast link the tool itself says r = 1"
    asked = _of(results, "choice", task)
    nodes = min((result["nodes"] for result in asked), default=0)
    fast = max(
        (r for r in asked if r["nodes"] == nodes), key=lambda r: LabConfig(rate=r["rate"]).shape().rate, default=None
    )
    if fast is None or len({r["rate"] for r in asked}) < 2:
        return Claim(text, None, "needs rows of a slow and of a fast link")
    way = min(fast["choices"], key=lambda way: _predicted_s(fast["choices"][way]))
    figures = "; ".join(
        f"{name}: r = {said['redundancy']}, {format_seconds(_predicted_s(said))}"
        for name, said in fast["choices"].items()
    )
    return Claim(text, fast["choices"][way]["redundancy"] == 1, f"{fast['rate']}, {figures}")


def _predicted_s(said: dict[str, Any]) -> float:
    """What the tool predicts for what it chooses."""
    chosen = (said["redundancy"], said["group"])
    return float(next(c["seconds"] for c in said["candidates"] if (c["redundancy"], c["group"]) == chosen))


def _figure(results: Sequence[_Result], task: str) -> list[dict[str, Any]]:
    """A batch's time against r: what was measured, what T(r) says, and what the paper's formula says."""
    rows = _of(results, "batch", task)
    points = []
    for row in rows:
        r, g, n = row["redundancy"], row["group"], row["nodes"]
        place = (n, row["rate"])
        said = next((c["choices"] for c in _of(results, "choice", task) if (c["nodes"], c["rate"]) == place), None)
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


def _best(results: Sequence[_Result], task: str) -> Claim:
    text = f"{_TITLES[task]}: of batches coded among all 8 nodes, and r = 1, that with r = {_BEST[task]} is shortest"
    points = [p for p in _figure(results, task) if p["n"] == 8 and (p["r"] == 1 or p["g"] == p["n"])]
    if not any(p["r"] == _BEST[task] for p in points) or len(points) < 2:
        return Claim(text, None, "needs rows of 8 nodes")
    best = min(points, key=lambda p: p["measured"])
    figures = "; ".join(f"r = {p['r']}: {format_seconds(p['measured'])}" for p in points)
    return Claim(text, best["r"] == _BEST[task], figures)


def _predicted(results: Sequence[_Result], task: str) -> Claim:
    text = (
        f"{_TITLES[task]}: T(r) = r · T_compute + T_communicate · L(r) is within {_AS_PREDICTED:.0%} of what batches "
        "take"
    )
    points = [p for p in _figure(results, task) if "predicted" in p]
    if not points:
        return Claim(text, None, "needs rows of batches, and what the tool measured beside them")
    worst = max(points, key=lambda p: abs(p["measured"] / p["predicted"] - 1))
    off = worst["measured"] / worst["predicted"] - 1
    figures = f"at worst {off:+.0%}, with r = {worst['r']}, g = {worst['g']}"
    return Claim(text, abs(off) <= _AS_PREDICTED, figures)


def _counted_bytes(results: Sequence[_Result]) -> Claim:
    text = (
        f"bytes on the links are within {_WITHIN:.0%} of equation 19 plus stated headers, for 4 to 8 nodes and "
        "r = 1 to 4"
    )
    rows = {
        (row["nodes"], row["redundancy"]): row["link_bytes"] / row["stated_bytes"] - 1 for row in _of(results, "bytes")
    }
    if not set(_COUNTED) <= set(rows):
        return Claim(text, None, "needs rows of all of these")
    (n, r), off = max(rows.items(), key=lambda item: abs(item[1]))
    return Claim(text, abs(off) <= _WITHIN, f"at worst {off:+.1%}, with n = {n}, r = {r}")


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sheet:
    """A table: title, headings, and rows of cells."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def drawn(self) -> Table:
        """For the terminal."""
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape
        from rich.table import Table

        table = Table(
            title=escape(self.title), title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0),
            show_edge=False,
        )  # fmt: skip
        for position, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if position else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> list[str]:
        """As lines of a page."""
        lines = [
            f"### {self.title.partition(',')[0]}",
            "",
            f"{self.title}.",
            "",
            "| " + " | ".join(self.headings) + " |",
        ]
        lines += ["| --- |" + " ---: |" * (len(self.headings) - 1)]
        return [*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""]


_LEGEND = (
    "Time: to the target, without tests. Sent: by all ranks until then, by the links' counters, multicast once (and "
    "with all headers, where TCP's are counted for several packets at a time). Less: how much less time than that row "
    "the chosen r takes; paper: how much less with its best r. All-reduce and alone are not in the paper. L: what a "
    "rank multicasts, in gradients. T(r): r · T_compute + T_communicate · L, from what r = 1 takes; paper's: "
    "r · T_compute + T_communicate / r."
)


def sheets(results: Sequence[_Result]) -> Iterator[Sheet]:
    """All that was measured, in tables."""
    for task, title in _TITLES.items():
        runs = _runs(results, task)
        if runs:
            yield _training_sheet(title, task, runs)
        points = _figure(results, task)
        if points:
            yield Sheet(
                f"{title}: a batch against r, {points[0]['n']} ranks",
                ("scheme", "L", "measured", "T(r)", "paper's", "sent"),
                [
                    (
                        f"r = {p['r']}, g = {p['g']}",
                        f"{p['load']:.3g}",
                        format_seconds(p["measured"]),
                        *(format_seconds(p[which]) if which in p else NOTHING for which in ("predicted", "paper")),
                        format_bytes(p["sent"]),
                    )
                    for p in points
                ],
            )
    asked = _of(results, "choice")
    if asked:
        yield Sheet(
            "What the tool measures and chooses",
            ("task", "ranks", "link", "transport", "T_compute", "T_communicate", "all-reduce", "r", "g", "step"),
            [
                (
                    row["task"],
                    str(row["nodes"]),
                    row["rate"],
                    way,
                    *(format_seconds(said[which]) for which in ("compute_s", "communicate_s", "all_reduce_s")),
                    str(said["redundancy"]),
                    str(said["group"]),
                    format_seconds(_predicted_s(said)),
                )
                for row in asked
                for way, said in row["choices"].items()
            ],
        )
    counted = _of(results, "bytes")
    if counted:
        yield Sheet(
            "Bytes of an exchange, of all ranks, over those of ranks that send each block's gradient to everybody",
            ("nodes, redundancy", "equation 19", "with headers", "counted", "off", "sent again"),
            [
                (
                    row["name"],
                    f"{equation_19(row['nodes'], row['redundancy']):.4f}",
                    f"{row['stated_bytes'] / row['normal_bytes']:.4f}",
                    f"{row['link_bytes'] / row['normal_bytes']:.4f}",
                    f"{row['link_bytes'] / row['stated_bytes'] - 1:+.1%}",
                    f"{row['repair_datagrams']:g}",
                )
                for row in counted
            ],
        )


def _training_sheet(title: str, task: str, runs: dict[str, _Result]) -> Sheet:
    first = next(iter(runs.values()))
    theirs = dict(zip((_MULTICAST, _ASGD), _SAVED[task], strict=True))
    rows = []
    for name, run in runs.items():
        compared = _CHOSEN in runs and runs[_CHOSEN]["reached"] and run["reached"] and name != _CHOSEN
        less = f"{_saved(runs, name):.0f} %" if compared else NOTHING
        steps = str(run["reached"][0]) if run["reached"] else NOTHING
        paper = f"{theirs[name]} %" if name in theirs else NOTHING
        rows.append((name, _scheme(run), steps, format_seconds(run["step_s"]), _time(run), _sent(run), less, paper))
    return Sheet(
        f"{title}, {first['parameters']:,} parameters, {first['nodes']} ranks behind {first['rate']}, mini-batches of "
        f"{first['batch']}, to {first['target']:g} % of test images",
        ("row", "scheme", "steps", "step", "time", "sent", "less", "paper"),
        rows,
    )


# ---- the page --------------------------------------------------------------------------------------------------------


def _conclusion(results: Sequence[_Result]) -> str:
    told, sooner, alone = [], True, True
    for task, title in _TITLES.items():
        runs = _reached(results, task)
        own = _seconds(runs[_CHOSEN])
        sooner &= all(own < _seconds(runs[name]) for name in _BASELINES)
        alone &= _seconds(runs[_ALONE]) < own
        told.append(
            f"{title} {_time(runs[_CHOSEN])} with the redundancy that the tool chooses, {_time(runs[_MULTICAST])} with "
            f"synchronous SGD by multicast, {_time(runs[_ALL_REDUCE])} with an all-reduce, {_time(runs[_ALONE])} on "
            "one machine alone"
        )
    said = f"Time to the target on a slow link: {'; '.join(told)}."
    if sooner:
        said += " So coding is faster than what the paper compares it with."
    if alone:
        said += " One machine alone is faster still: networks this small are better not distributed."
    return said


def _reached(results: Sequence[_Result], task: str) -> dict[str, _Result]:
    """Runs of a task by name.

    Raises:
        LookupError: one of those that a conclusion needs is missing, or did not come to the target.
    """
    runs = {name: run for name, run in _runs(results, task).items() if run["reached"]}
    missing = [name for name in _METHODS if name not in runs]
    if missing:
        raise LookupError(f"needs the rows {'; '.join(missing)} of task {task}")
    return runs


def _panels(results: Sequence[_Result]) -> list[Panel]:
    panels = []
    for task, title in _TITLES.items():
        runs = _reached(results, task)
        first = runs[_CHOSEN]
        bars = [Bar(name, _seconds(runs[name]), _time(runs[name]), name == _CHOSEN) for name in _METHODS]
        panels.append(Panel(title, f"time to {first['target']:g} % at {first['rate']}", bars))
    return panels


_OPENING = Opening(
    title="Coded data parallelism (CSSGD)",
    says="Where communication dominates, computing every block of a mini-batch on r ranks and multicasting sums of "
    "gradients takes 54 % (a DNN) and 39 % (a CNN) less time than synchronous SGD, and sends less.",
    ran="Small networks on MNIST and CIFAR-10, on real ranks behind emulated links, with the paper's methods, and with "
    "two that it leaves out: an all-reduce, and one machine alone.",
    found=_conclusion,
    panels=_panels,
)


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of a record: what is in ``summary.json``."""
    results, said = record["rows"], [Claim(**claim) for claim in record["claims"]]
    lines = [
        *beginning(results, said, _OPENING, paper=_PAPER, page=path.stem),
        *("## Tables", "", _LEGEND, ""),
        *itertools.chain.from_iterable(sheet.markdown() for sheet in sheets(results)),
        source(dict(record), sorted({str(row["commit"]) for row in results})),
    ]
    write_page(path, lambda _: "\n".join(lines) + "\n", results, _OPENING)


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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    output = options.output or Path(__file__).parent / "results" / "cssgd"
    rows = rows_of(options)
    places = _places(rows, output, options.data_dir)
    if options.recorded:
        kept = [(row, place) for row, place in zip(rows, places, strict=True) if place.exists()]
        if not kept:
            raise ValueError(f"none of these rows is finished in {output}: leave --recorded out to measure them")
        rows, places = [row for row, _ in kept], [place for _, place in kept]
    record = provenance(options.seed, command)
    console.print(_PAPER, style="bold", markup=False, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        show = _Show(progress, rows)
        results = measure(
            rows, places, data_dir=options.data_dir, resume=options.resume or options.recorded, on_event=show
        )
    said = [] if options.quick else claims(results)
    tables = list(sheets(results))
    for sheet in tables:
        console.print(sheet.drawn())
    console.print(_LEGEND, style="dim", highlight=False, markup=False)
    say(said, console)
    written = output / "summary.json"
    whole = record | {"paper": _PAPER, "claims": [asdict(claim) for claim in said], "rows": results}
    write_json(written, whole)
    if options.markdown is not None:
        page(whole, options.markdown)
    console.print(f"written: {written}", style="dim", markup=False, highlight=False)


class _Show:
    """A bar over all rows, with the one at work; a line for each that is done."""

    def __init__(self, progress: Progress, rows: Sequence[Row]) -> None:
        self._progress, self._rows = progress, rows
        self._bar = progress.add_task("starting ranks", total=len(rows))

    def __call__(self, event: dict[str, Any]) -> None:
        row = self._rows[event["row"]]
        label = f"{row.task}, {row.name}, {row.nodes} ranks at {row.rate}"
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


def _told(result: _Result) -> str:
    """A finished row in a few words."""
    if result["kind"] == "train":
        return f"{result['target']:g} % {'after' if result['reached'] else 'not yet,'} {_time(result)}"
    if result["kind"] == "choice":
        said = (f"r = {c['redundancy']}, g = {c['group']} by {way}" for way, c in result["choices"].items())
        return "; ".join(said)
    if result["kind"] == "batch":
        return f"{format_seconds(result['step_s'])} a step"
    return f"{format_bytes(result['link_bytes'])} a step, {result['link_bytes'] / result['stated_bytes'] - 1:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
