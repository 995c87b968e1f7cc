"""The tables of :mod:`reproduce.cssgd`, and its page of results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.coded import Assignment
from narrowband.units import format_bytes, format_seconds
from reproduce.cssgd_found import (
    Count,
    Method,
    Result,
    averaged,
    counted_steps,
    counts_of,
    less_time,
    methods_of,
    points_of,
    predicted_s,
    rows_in,
    scheme,
    sent_until,
)
from reproduce.cssgd_problem import (
    ALL_REDUCE,
    ALONE,
    ASGD,
    BASELINES,
    CHOSEN,
    FIGURES,
    MULTICAST,
    NAMED,
    SAVED,
    TITLES,
)
from reproduce.cssgd_ranks import equation_19
from reproduce.groups import NOTHING, Claim
from reproduce.pairs import Difference, every
from reproduce.pictures import Bar, Panel
from reproduce.report import Opening, beginning, covered, seeded, source, write_page

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LEGEND", "PAPER", "Sheet", "page", "sheets"]

PAPER = "Li, Xie, Mao et al. 2021, CSSGD (DOI 10.19678/j.issn.1000-3428.0057340)"


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: up to a comma it is the heading; all of it stands below that.
        figures: what its figures are, and how exact.
        headings: of columns.
        rows: of cells.
    """

    title: str
    figures: str
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
            f"### {self.title.partition(': ')[0]}",
            "",
            f"{self.title.partition(': ')[2] or self.title}. {self.figures}",
            "",
            "| " + " | ".join(self.headings) + " |",
        ]
        lines += ["| --- |" + " ---: |" * (len(self.headings) - 1)]
        return [*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""]


LEGEND = (
    "Time: to the target, without tests; mean ± standard deviation over seeds. Sent: by all ranks, by the links' "
    "counters, multicast once (and with all headers, where TCP's are counted for several packets at a time). Less: "
    "how much less time than that row the chosen r takes, ± half of the 95 % interval (Student's t): than ASGD, by "
    "pairs of one seed; than a synchronous method, which takes the same steps, by stretches of steps, or rounds, of "
    "the one run in which each was timed, so that what another run would change is not in it; without ±: of unknown "
    "noise; paper: how much less with its best r. All-reduce and alone are not in the paper. L: what a rank "
    "multicasts, in gradients. T(r): r · T_compute + T_communicate · L, from what r = 1 takes; paper's: r · T_compute "
    "+ T_communicate / r."
)

_BYTES = "Bytes are counted, and do not depend on how busy the machine is, but for packets that are sent again."
_TIMES = "Times are of this machine, whose cores all ranks share."


def sheets(results: Sequence[Result]) -> Iterator[Sheet]:
    """All that was measured, in tables."""
    for task, title in TITLES.items():
        methods = methods_of(results, task)
        if methods:
            yield _training_sheet(title, task, methods)
        counts = counts_of(results, task)
        if counts:
            yield _nodes_sheet(title, task, counts)
            yield _steps_sheet(title, task, counts, results)
        points = points_of(results, task)
        if points:
            yield _redundancy_sheet(title, points)
    uneven = rows_in(results, "shares")
    if uneven:
        yield _shares_sheet(uneven)
    kept = rows_in(results, "best")
    if kept:
        yield _best_sheet(kept)
    asked = rows_in(results, "choice")
    if asked:
        yield _choice_sheet(asked)
    counted = rows_in(results, "bytes")
    if counted:
        yield _bytes_sheet(counted)


def _training_sheet(title: str, task: str, methods: dict[str, Method]) -> Sheet:
    first = next(iter(methods.values())).run
    theirs = dict(zip((MULTICAST, ASGD), SAVED[task], strict=True))
    rows = []
    for name, method in methods.items():
        compared = CHOSEN in methods and name != CHOSEN
        saved = _saved(less_time(methods[CHOSEN], method, name)) if compared else NOTHING
        steps = " ".join(NOTHING if taken is None else str(taken) for taken in method.steps.values())
        paper = f"{theirs[name]} %" if name in theirs else NOTHING
        step_s = format_seconds(method.run["step_s"])
        rows.append((name, scheme(method.run), steps, step_s, method.time(), sent_until(method.run), saved, paper))
    seeds = list(methods[MULTICAST].times if MULTICAST in methods else [first["seed"]])
    rates = {name: method.run["lr"] for name, method in methods.items()}
    return Sheet(
        f"{title}, figures {_TRAINED[task]}: {first['parameters']:,} parameters, {first['nodes']} ranks behind "
        f"{first['rate']}, mini-batches of {first['batch']}, to {first['target']:g} % of test images; SGD without "
        f"momentum and weight decay, learning rate {_rates(rates)}; {seeded(seeds)}",
        f"Steps and times: {_behind_links(methods)} Sent is of the first seed. {_BYTES}",
        ("row", "scheme", "steps, by seed", "step", "time", "sent", "less", "paper"),
        rows,
    )


_TRAINED = {"dnn": "8 and 9", "cnn": "10 and 11"}


def _behind_links(methods: Mapping[str, Method]) -> str:
    """With which seeds methods were trained behind links, and where times of the others are from."""
    trained: dict[tuple[int, ...], list[str]] = {}
    for name, method in methods.items():
        trained.setdefault(method.trained, []).append(name)
    most = max(trained.values(), key=len)
    said = [
        f"{'all others' if names is most and len(trained) > 1 else 'all' if names is most else _listed(names)} with "
        f"{seeded(seeds)}"
        for seeds, names in sorted(trained.items(), key=lambda item: item[1] is most)
    ]
    told = f"trained behind links were {', '.join(said)}."
    if any(set(method.times) - set(method.trained) for method in methods.values()):
        told += (
            " With other seeds the steps of synchronous methods, which are the same for all of them, are counted in "
            "one process, and times are these steps times the measured seconds of a step: their ± is that of steps."
        )
    return told


def _rates(rates: dict[str, float]) -> str:
    others = {rate for name, rate in rates.items() if name != ASGD}
    said = " or ".join(f"{rate:g}" for rate in sorted(others))
    return f"{said} ({ASGD}: {rates[ASGD]:g})" if ASGD in rates else said


def _listed(numbers: Iterable[Any]) -> str:
    return ", ".join(map(str, numbers))


def _saved(apart: Difference) -> str:
    """How much less, in percent, and the margin; of more than twice as much, how many times."""
    if not math.isfinite(apart.mean):
        return NOTHING
    if apart.mean > 1.0:
        return f"{1.0 + apart.mean:.1f} times as much"
    margin = "" if apart.margin is None else f" ± {100 * apart.margin:.1f}"
    return f"{-100 * apart.mean:.1f}{margin} %"


def _nodes_sheet(title: str, task: str, counts: Sequence[Count]) -> Sheet:
    rows = [
        (
            str(count.nodes),
            *(count.time(name) for name in (MULTICAST, ASGD, CHOSEN, ALL_REDUCE)),
            count.scheme(),
            *(_less_on(count, name) for name in (MULTICAST, ASGD)),
            *(_sent_per_step(count, name) for name in (MULTICAST, ASGD, CHOSEN, ALL_REDUCE)),
        )
        for count in counts
    ]
    try:
        means = [_saved(averaged(counts, name)) for name in (MULTICAST, ASGD)]
    except LookupError:
        means = [NOTHING, NOTHING]
    rows.append(("mean", *[NOTHING] * 5, *means, *[NOTHING] * 4))
    theirs = [f"{saved} %" for saved in SAVED[task]]
    rows.append(("paper's mean", *[NOTHING] * 5, *theirs, *[NOTHING] * 4))
    first = next(iter(counts[0].timed.values()))
    return Sheet(
        f"{title}, figure {FIGURES[task]}: time to the target on 2 to 10 nodes behind {first['rate']}, each with "
        f"{first['batch'] // first['nodes']} samples of a mini-batch; n nodes train on the first n classes, as in the "
        "paper",
        f"Time: steps, counted in one process, times the measured seconds of a step. {_TIMES} Sent: by all ranks in a "
        f"step. {_BYTES}",
        (
            "nodes", "SSGD multicast", "ASGD", "CSSGD", "all-reduce", "scheme", "less than SSGD", "less than ASGD",
            "SSGD sends", "ASGD sends", "CSSGD sends", "all-reduce sends",
        ),
        rows,
    )  # fmt: skip


def _less_on(count: Count, name: str) -> str:
    try:
        return _saved(count.less(name))
    except LookupError:
        return NOTHING


def _sent_per_step(count: Count, name: str) -> str:
    return format_bytes(count.timed[name]["sent_bytes"]) if name in count.timed else NOTHING


def _steps_sheet(title: str, task: str, counts: Sequence[Count], results: Sequence[Result]) -> Sheet:
    def by_seed(steps: Mapping[int, int | None]) -> str:
        return " ".join(NOTHING if taken is None else str(taken) for taken in steps.values()) or NOTHING

    rows = []
    for count in counts:
        seconds = (
            format_seconds(count.timed[name]["step_s"]) if name in count.timed else NOTHING
            for name in (MULTICAST, ASGD, CHOSEN, ALL_REDUCE)
        )  # fmt: skip
        rows.append(
            (
                f"{count.nodes}, {count.nodes} classes", f"{count.target:.1f} %", by_seed(count.steps[ALONE]),
                by_seed(count.steps[ASGD]), *seconds,
            )
        )  # fmt: skip
    in_process = [row for row in rows_in(results, "train", task) if row["kind"] == "steps"]
    methods = methods_of(results, task)
    for nodes, target in dict.fromkeys((row["nodes"], f"{row['target']:.1f} %") for row in in_process):
        counted = (counted_steps(results, task, "train", nodes, name) for name in (ALONE, ASGD))
        rows.append((f"{nodes}, all classes", target, *map(by_seed, counted), *[NOTHING] * 4))
        if {MULTICAST, ASGD} <= set(methods):
            behind = ({seed: methods[name].steps[seed] for seed in methods[name].trained} for name in (MULTICAST, ASGD))
            rows.append(("the same, behind links", target, *map(by_seed, behind), *[NOTHING] * 4))
    return Sheet(
        f"{title}, steps: what the times of figure {FIGURES[task]} are made of, steps to the target by seed, and "
        "seconds of a step",
        "Steps are counted in one process, where ASGD's workers take turns; the last line has those of SSGD and ASGD "
        f"behind links. Seconds are the median of three steps. {_TIMES}",
        (
            "nodes", "target", "synchronous steps", "ASGD steps", "SSGD multicast", "ASGD", "CSSGD", "all-reduce",
        ),
        rows,
    )  # fmt: skip


def _redundancy_sheet(title: str, points: Sequence[dict[str, Any]]) -> Sheet:
    return Sheet(
        f"{title}, figure {12 if title == TITLES['dnn'] else 13}: a batch against r, {points[0]['n']} ranks",
        f"Measured is the median of three. {_TIMES} {_BYTES}",
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


def _shares_sheet(rows: Sequence[Result]) -> Sheet:
    cells = []
    for row in rows:
        assignment = Assignment(row["nodes"], row["redundancy"], row["group"], tuple(row["shares"]))
        work = assignment.work(row["batch"])
        emulated = max(seconds * samples for seconds, samples in zip(row["sample_s"], work, strict=True))
        cells.append(
            (
                row["name"], _listed(work), format_seconds(emulated), format_seconds(row["step_s"]),
                format_bytes(row["sent_bytes"]),
            )
        )  # fmt: skip
    first = rows[0]
    speeds = ", ".join(f"{1e3 * seconds:g} ms" for seconds in first["sample_s"])
    return Sheet(
        f"Uneven shares, section 2.1: {first['nodes']} ranks behind {first['rate']}, mini-batches of {first['batch']}, "
        f"the DNN, and emulated processors that take {speeds} for a sample",
        f"Work: samples that each node computes. Computing: of the slowest node, as emulated. {_BYTES} {_TIMES}",
        ("row", "work", "computing", "step", "sent"),
        cells,
    )


def _best_sheet(rows: Sequence[Result]) -> Sheet:
    return Sheet(
        "The best weights, line 8 of algorithm 1: synchronous training for a fixed number of steps, and the weights "
        "that had the least loss F on the first 2,000 training images; test accuracy in percent",
        f"F, all images: seconds of F over all training images, which line 8 asks for in every step. {_TIMES}",
        ("task and seed", "steps", "last", "kept", "step", "F, all images", "F in steps"),
        [
            (
                f"{row['task']}, seed {row['seed']}", str(row["curve"][-1][0]), f"{row['curve'][-1][2]:.2f}",
                f"{row['curve'][-1][3]:.2f}", format_seconds(row["step_s"]), format_seconds(row["whole_s"]),
                f"{row['whole_s'] / row['step_s']:.0f}",
            )
            for row in rows
        ],
    )  # fmt: skip


def _choice_sheet(asked: Sequence[Result]) -> Sheet:
    return Sheet(
        "What the tool measures and chooses",
        _TIMES,
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
                format_seconds(predicted_s(said)),
            )
            for row in asked
            for way, said in row["choices"].items()
        ],
    )


def _bytes_sheet(counted: Sequence[Result]) -> Sheet:
    return Sheet(
        "Bytes of an exchange, equation 19: of all ranks, over those of ranks that send each block's gradient to "
        "everybody",
        _BYTES,
        ("nodes, redundancy", "equation 19", "with headers", "counted", "off", "sent again"),
        [
            (
                row["name"],
                f"{equation_19(row['nodes'], row['redundancy']):.4f}",
                f"{row['stated_bytes'] / row['normal_bytes']:.4f}",
                f"{row['link_bytes'] / row['normal_bytes']:.4f}",
                f"{row['link_bytes'] / row['stated_bytes'] - 1:+.1%}",
                f"{row['repair_datagrams']:.1f}",
            )
            for row in counted
        ],
    )


# ---- the page --------------------------------------------------------------------------------------------------------

_COVERS = (
    ("Table 1, the machines", "not reproduced: they are the authors' ten; ours is at the foot of this page"),
    ("Table 2, accuracy on one machine", "not reproduced: the networks that it is of are not described"),
    ("Figures 1 to 3, what is sent", "drawings; the library does what they show, and its tests hold it to that"),
    ("Figures 4 and 5, accuracy until it rises no more", "not reproduced: hours behind such links; we end at a target"),
    ("Figures 6 and 7, choice of the targets", "not reproduced: ours are set before, not where methods differ most"),
    ("Figures 8 and 10, time to the target", ("train", "here on {nodes}, column *time*")),
    ("Figures 9 and 11, bytes until then", ("train", "here on {nodes}, column *sent*")),
    ("Figures 12 and 13, a batch against r on 8 nodes", ("batch", "here")),
    (
        "Figures 14 and 15, time on 2 to 10 nodes",
        ("nodes", "here on {nodes}, with steps that are counted in one process"),
    ),
    ("Equations 19 and 28 to 30, bytes", ("bytes", "here on {nodes}")),
    ("Algorithms 1 to 4", "implemented, but for line 8 of the first; where we depart is below"),
)


def _covers(results: Sequence[Result]) -> list[tuple[str, str]]:
    """The paper's tables and figures, by the rows that are there."""
    return [(what, where if isinstance(where, str) else _where(results, *where)) for what, where in _COVERS]


def _where(results: Sequence[Result], section: str, here: str) -> str:
    """What is said of a section's rows, task by task where one has none."""
    own = {task: rows_in(results, section, task) for task in (TITLES if section != "bytes" else ("bytes",))}
    there = {task: rows for task, rows in own.items() if rows}
    if not there:
        return "not measured yet"
    said = here.format(nodes=_nodes(row for rows in there.values() for row in rows))
    missing = [TITLES[task] for task in own if task not in there]
    return said + (f"; not measured yet: {_listed(missing)}" if missing else "")


def _nodes(rows: Iterable[Result]) -> str:
    """Numbers of nodes in words: ``4 nodes``, or ``2 to 10 nodes``."""
    counts = {row["nodes"] for row in rows}
    least, most = min(counts), max(counts)
    return f"{least} nodes" if least == most else f"{least} to {most} nodes"


_DEPARTURES = """
- **Machines.** All ranks share two cores, instead of ten machines. Computing is slow there, and what counts is its
  ratio to the link. Links are full duplex and as fast in both directions. Each rank of a multicast receives n − 1
  times what it sends, which bounds the time that multicast saves.
- **Load per node (algorithm 2).** The same: C(n, r) blocks, of which each node has r·C(n, r)/n. Where a mini-batch
  cannot be cut evenly, the first blocks have one sample more. The paper says that the samples of a node can be
  adjusted to what it is capable of, and not how. Here the sizes of blocks do it, and no node can have more than 1/r
  of the work. The paper says, too, that this does not affect the load of other nodes. That is so of what they send.
  What they compute does change, since all nodes together compute r times the mini-batch.
- **Packets (algorithm 3).** As it is written, it makes a packet for every r of a node's blocks, of which some have no
  receiver and others repeat what is known: 20 packets instead of 4 for n = 5, r = 3. Section 2.4 counts one for each
  set of r other nodes, C(n−1, r), and so does the library. With r = 2 both are the same.
- **Whole numbers (section 3.1).** The paper maps [−10, 10] to all of an int32. Here the sum over all blocks has to
  fit, so the unit is C(n, r) times as large. What is out of reach widens the span and is sent again.
- **The best weights (algorithm 1, line 8).** F over all training images in every step takes longer than the step, so
  the library does not do it. The table shows what it would change, and [Coded data
  parallelism](../how-to/coded.md#keep-the-best-weights) how to do it once per epoch.
- **Baselines** send one gradient per node and step, the sum over its samples. Equation 19 compares with one per
  *block*. With r = 1 CSSGD is SSGD by multicast in fixed point.
- **Networks and targets.** Networks are small, since the paper does not say how large its own are. The CNN's target
  is lower than the paper's 70 %, which would take hours. The DNN's is higher than the paper's 82 %, which takes two
  dozen steps. With fewer classes, targets are as far above chance.
"""


def _of_asgd(results: Sequence[Result]) -> str:
    """With which seeds ASGD runs, behind links and in one process."""
    told = []
    for task, title in TITLES.items():
        rows = [row for row in results if row["task"] == task and row["name"] == ASGD]
        kinds = (("train", "behind links"), ("steps", "in one process"))
        seeds = {where: sorted({row["seed"] for row in rows if row["kind"] == kind}) for kind, where in kinds}
        said = " and ".join(f"{where} with {seeded(own)}" for where, own in seeds.items() if own)
        told += [f"{title}, {said}"] if said else []
    return (
        f"- **ASGD** runs, for {'; for '.join(told)}; the paper has the mean of ten runs. It has a learning rate of "
        "its own, which more than four nodes share, so that a round of all workers' updates goes as far as with four.\n"
    )


def _conclusion(results: Sequence[Result]) -> str:
    told, sooner, alone = [], [], True
    for task, title in TITLES.items():
        methods = _reached(results, task)
        own = methods[CHOSEN].seconds
        sooner += [less_time(methods[CHOSEN], methods[name], name) for name in BASELINES]
        alone &= methods[ALONE].seconds < own
        said = {name: format_seconds(methods[name].seconds) for name in (CHOSEN, MULTICAST, ASGD, ALL_REDUCE, ALONE)}
        told.append(
            f"{title}, {said[CHOSEN]} with the redundancy chosen by the tool, {said[MULTICAST]} with synchronous SGD "
            f"by multicast, {said[ASGD]} with ASGD, {said[ALL_REDUCE]} with an all-reduce, and {said[ALONE]} on one "
            "machine alone"
        )
    faster = ""
    if all(apart.mean < 0 for apart in sooner):
        faster = "so coding is faster than what the paper compares it with"
        if every(apart.better() for apart in sooner).held is None:
            faster = (
                "so coding was faster than what the paper compares it with, which is not resolved beyond the noise for "
                f"{_listed(dict.fromkeys(apart.names[1] for apart in sooner if apart.better().held is None))}"
            )
    better = "one machine alone is faster still, since networks this small are better not distributed" if alone else ""
    after = ", and ".join(part for part in (faster, better) if part)
    return f"time to the target on a slow link is, for {'; for '.join(told)}{f'; {after}' if after else ''}."


def _reached(results: Sequence[Result], task: str) -> dict[str, Method]:
    """Methods of a task by name.

    Raises:
        LookupError: one of those that a conclusion needs is missing, or did not come to the target.
    """
    methods = {name: method for name, method in methods_of(results, task).items() if math.isfinite(method.seconds)}
    missing = [name for name in NAMED if name not in methods]
    if missing:
        raise LookupError(f"needs the rows {'; '.join(missing)} of task {task}")
    return methods


def _panels(results: Sequence[Result]) -> list[Panel]:
    panels = []
    for task, title in TITLES.items():
        methods = _reached(results, task)
        first = methods[CHOSEN].run
        bars = [
            Bar(name, methods[name].seconds, format_seconds(methods[name].seconds), name == CHOSEN) for name in NAMED
        ]
        panels.append(Panel(title, f"time to {first['target']:g} % at {first['rate']}", bars))
    return panels


def _ran(results: Sequence[Result]) -> str:
    """What was run, by the rows that are there."""
    told = [
        f"{said} on {_nodes(rows)}"
        for said, rows in (
            ("trained to a target", [row for row in rows_in(results, "train") if row["kind"] == "train"]),
            ("timed step by step against r", rows_in(results, "batch")),
            ("timed step by step with each method", rows_in(results, "nodes")),
            ("timed with a slow node", rows_in(results, "shares")),
        )
        if rows
    ]
    counted = rows_in(results, "bytes")
    return (
        f"Small networks on MNIST and CIFAR-10 were {_joined(told)}, real ranks behind emulated links, with the "
        "paper's methods and two that it leaves out, an all-reduce and one machine alone"
        f"{f', and bytes of exchanges were counted on {_nodes(counted)}' if counted else ''}."
    )


def _joined(parts: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(parts[:-1]), *parts[-1:]) if part)


_OPENING = Opening(
    title="Coded data parallelism (CSSGD)",
    says="Where communication dominates, computing every block of a mini-batch on r ranks and multicasting sums of "
    "gradients takes 54 % (a DNN) and 39 % (a CNN) less time than synchronous SGD, and sends less.",
    ran=_ran,
    found=_conclusion,
    panels=_panels,
    covers=_covers,
)


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of a record: what is in ``summary.json``."""
    results, said = record["rows"], [Claim(**claim) for claim in record["claims"]]
    lines = [
        *beginning(results, said, _OPENING, paper=PAPER, page=path.stem),
        *("## Tables", "", LEGEND, ""),
        *itertools.chain.from_iterable(sheet.markdown() for sheet in sheets(results)),
        *covered(results, _OPENING),
        *("## Where this departs from the paper", _DEPARTURES + _of_asgd(results)),
        source(dict(record), sorted({str(row["commit"]) for row in results})),
    ]
    write_page(path, lambda _: "\n".join(lines) + "\n", results, _OPENING)
