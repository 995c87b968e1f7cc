"""Make the tables of :mod:`reproduce.cssgd` and its page of results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from narrowband.coded import Assignment
from narrowband.units import format_bytes, format_seconds
from reproduce.claims import table_lines
from reproduce.cssgd_claims import claims
from reproduce.cssgd_found import (
    Count,
    Method,
    Result,
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
    TITLES,
)
from reproduce.cssgd_ranks import equation_19
from reproduce.groups import NOTHING
from reproduce.pairs import Difference
from reproduce.pictures import Bar, Panel
from reproduce.report import Legend, Opening, beginning, covered, seeded, source, write_page

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LEGEND", "PAPER", "Sheet", "page", "sheets"]

_Some = TypeVar("_Some")

PAPER = "Li, Xie, Mao et al. 2021, CSSGD (DOI 10.19678/j.issn.1000-3428.0057340)"


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: the part before a comma is the heading; the whole title stands below the heading.
        figures: what the figures are, and how exact.
        headings: headings of the columns.
        rows: cells of each row.
        paged: whether the page has this table, too; some tables say no more than claims do.
    """

    title: str
    figures: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    paged: bool = True

    def drawn(self) -> Table:
        """Return the table for the terminal."""
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
        """Return the table as lines of a page."""
        heading, _, about = self.title.partition(": ")
        said = f"{_capital(about)}. {self.figures}" if about else self.figures
        return [f"### {heading}", "", said, "", *table_lines(self.headings, self.rows)]


LEGEND: Legend = (
    (
        "time, sent",
        (
            "to the target, without tests: the mean ± standard deviation over seeds; until then by all ranks, by the "
            "links' counters, multicast once"
        ),
    ),
    (
        "less",
        (
            "how much less time the chosen r takes, ± half of the 95 % interval (Student's t): than ASGD by pairs of "
            "one seed; than a synchronous method, which takes the same steps, by stretches of the one run in which "
            "each was timed, so that what another run would change is not in it"
        ),
    ),
    ("all-reduce, alone", "one machine alone, and a ring all-reduce in float32; neither is in the paper"),
    (
        "r, g, L",
        (
            "every block of a mini-batch is computed on r nodes, packets are coded among g nodes, and a rank "
            "multicasts L gradients"
        ),
    ),
    (
        "T(r)",
        "r · T_compute + T_communicate · L, from what r = 1 takes; the paper's: r · T_compute + T_communicate / r",
    ),
)

_BYTES = "Bytes are counted, and do not depend on how busy the machine is, but for packets that are sent again."
_TIMES = "Times are of this machine, whose cores all ranks share."


def sheets(results: Sequence[Result]) -> Iterator[Sheet]:
    """Yield tables of everything measured; columns of the two tasks stand side by side."""
    methods = _with_any({task: methods_of(results, task) for task in TITLES})
    if methods:
        yield _training_sheet(methods)
    counts = _with_any({task: counts_of(results, task) for task in TITLES})
    if counts:
        yield _nodes_sheet(counts, results)
    points = _with_any({task: points_of(results, task) for task in TITLES})
    if points:
        yield _redundancy_sheet(points)
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


def _with_any(found: Mapping[str, _Some]) -> dict[str, _Some]:
    return {task: own for task, own in found.items() if own}


def _side_by_side(own: Iterable[str], headings: Sequence[str]) -> list[str]:
    """Repeat the headings for each task, with the task's title in front of the first."""
    heads = []
    for task in own:
        first, *others = headings
        heads += [f"{TITLES[task]}: {first}", *others]
    return heads


def _training_sheet(tasks: Mapping[str, Mapping[str, Method]]) -> Sheet:
    rows, about = [], []
    names = dict.fromkeys(itertools.chain.from_iterable(tasks.values()))
    for name in names:
        cells = []
        for methods in tasks.values():
            method = methods.get(name)
            compared = method is not None and CHOSEN in methods and name != CHOSEN
            cells += (
                [NOTHING] * 4
                if method is None
                else [
                    format_seconds(method.run["step_s"]), method.time(), sent_until(method.run),
                    _saved(less_time(methods[CHOSEN], method, name)) if compared else NOTHING,
                ]
            )  # fmt: skip
        run = next(methods[name].run for methods in tasks.values() if name in methods)
        rows.append((name, scheme(run), *cells))
    for task, methods in tasks.items():
        first = next(iter(methods.values())).run
        steps = next(iter(methods.values())).steps
        own = f"; {ASGD} {_by_seed(methods[ASGD].steps)}" if ASGD in methods else ""
        seeds = list(methods[MULTICAST].times if MULTICAST in methods else [first["seed"]])
        rates = {name: method.run["lr"] for name, method in methods.items()}
        about.append(
            f"{TITLES[task]}: {first['parameters']:,} parameters, {first['nodes']} ranks behind {first['rate']}, "
            f"mini-batches of {first['batch']}, to {first['target']:g} % of test images, learning rate "
            f"{_rates(rates)}, {seeded(seeds)} with {_by_seed(steps)} steps{own}"
        )
    behind = dict.fromkeys(_behind_links(methods) for methods in tasks.values())
    return Sheet(
        f"Time and bytes to the target, figures {_TRAINED}: {'. '.join(about)}. All by SGD without momentum and weight "
        "decay",
        f"{' '.join(_capital(said) for said in behind)} Sent is of the first seed. {_BYTES}",
        ("row", "scheme", *_side_by_side(tasks, ("step", "time", "sent", "less"))),
        rows,
    )


def _capital(said: str) -> str:
    return said[0].upper() + said[1:]


def _by_seed(steps: Mapping[int, int | None]) -> str:
    return ", ".join(NOTHING if taken is None else str(taken) for taken in steps.values()) or NOTHING


_TRAINED = "8 to 11"


def _behind_links(methods: Mapping[str, Method]) -> str:
    """Say with which seeds methods were trained behind links, and where the times of other seeds come from."""
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
    """Format how much less time it took, in percent with the margin; above twice as much, as a factor."""
    if not math.isfinite(apart.mean):
        return NOTHING
    if apart.mean > 1.0:
        return f"{1.0 + apart.mean:.1f} times as much"
    margin = "" if apart.margin is None else f" ± {100 * apart.margin:.1f}"
    return f"{-100 * apart.mean:.1f}{margin} %"


def _nodes_sheet(tasks: Mapping[str, Sequence[Count]], results: Sequence[Result]) -> Sheet:
    by_nodes = {task: {count.nodes: count for count in counts} for task, counts in tasks.items()}
    rows = []
    for nodes in sorted(set(itertools.chain.from_iterable(by_nodes.values()))):
        cells = []
        for own in by_nodes.values():
            count = own.get(nodes)
            times = (
                [NOTHING] * 5
                if count is None
                else [*(count.time(name) for name in (MULTICAST, ASGD, CHOSEN, ALL_REDUCE)), count.scheme()]
            )
            cells += times
        rows.append((str(nodes), *cells))
    links = []
    for task, counts in tasks.items():
        first = next(iter(counts[0].timed.values()))
        links.append(f"{TITLES[task]} behind {first['rate']} with {first['batch'] // first['nodes']} samples per node")
    figures = " and ".join(f"figure {FIGURES[task]}" for task in tasks)
    return Sheet(
        f"Time on 2 to 10 nodes, {figures}: {', '.join(links)}; n nodes train on the first n classes, as in the paper",
        "Times are steps, counted in one process, times the measured seconds of a step. "
        f"{_TIMES}{_in_process(results)}",
        ("nodes", *_side_by_side(tasks, ("SSGD multicast", "ASGD", "CSSGD", "all-reduce", "scheme"))),
        rows,
    )


def _in_process(results: Sequence[Result]) -> str:
    """Say how many steps ASGD takes with all classes, in one process (workers take turns) and behind links."""
    told = []
    for task, title in TITLES.items():
        methods = methods_of(results, task)
        rows = [row for row in rows_in(results, "train", task) if row["kind"] == "steps"]
        if rows and ASGD in methods:
            own = counted_steps(results, task, "train", rows[0]["nodes"], ASGD)
            behind = {seed: methods[ASGD].steps[seed] for seed in methods[ASGD].trained}
            told.append(f"{title}, {_by_seed(own)} and {_by_seed(behind)}")
    return f" With all classes ASGD takes, in one process and behind links: {'; '.join(told)}." if told else ""


def _redundancy_sheet(tasks: Mapping[str, Sequence[dict[str, Any]]]) -> Sheet:
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for task, points in tasks.items():
        for p in points:
            rows.setdefault(f"r = {p['r']}, g = {p['g']}", {})[task] = p
    cells = []
    for name, own in rows.items():
        times = [
            format_seconds(own[task][which]) if task in own and which in own[task] else NOTHING
            for task in tasks
            for which in ("measured", "predicted", "paper")
        ]
        cells.append((name, f"{next(iter(own.values()))['load']:.3g}", *times))
    ranks = next(iter(tasks.values()))[0]["n"]
    return Sheet(
        f"A batch against r, figures 12 and 13: {ranks} ranks",
        f"Measured is the median of three. {_TIMES}",
        ("scheme", "L", *_side_by_side(tasks, ("measured", "T(r)", "paper's"))),
        cells,
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
        paged=False,
    )


def _best_sheet(rows: Sequence[Result]) -> Sheet:
    tasks = {task: [row for row in rows if row["task"] == task] for task in dict.fromkeys(row["task"] for row in rows)}
    return Sheet(
        "The best weights, line 8 of algorithm 1: synchronous training for a fixed number of steps, and the weights "
        "that had the least loss F on the first 2,000 training images; test accuracy in percent, by seed",
        f"F, all images: how many steps F takes over all of them, which line 8 asks for in every step. {_TIMES}",
        ("task", "seeds", "steps", "last", "kept", "F, all images"),
        [
            (
                TITLES[task], ", ".join(str(row["seed"]) for row in own), str(own[0]["curve"][-1][0]),
                *(", ".join(f"{row['curve'][-1][at]:.2f}" for row in own) for at in (2, 3)),
                ", ".join(f"{row['whole_s'] / row['step_s']:.0f}" for row in own),
            )
            for task, own in tasks.items()
        ],
        paged=False,
    )  # fmt: skip


def _choice_sheet(asked: Sequence[Result]) -> Sheet:
    ways = list(dict.fromkeys(way for row in asked for way in row["choices"]))
    cells = []
    for row in asked:
        own = [NOTHING if way not in row["choices"] else _choice(row["choices"][way]) for way in ways]
        reduced = min(said["all_reduce_s"] for said in row["choices"].values())
        cells.append((f"{TITLES[row['task']]}, {row['nodes']} ranks, {row['rate']}", *own, format_seconds(reduced)))
    return Sheet(
        "What the tool measures and chooses: r, g and the step that it predicts, from T_compute and T_communicate",
        _TIMES,
        ("task", *ways, "all-reduce"),
        cells,
    )


def _choice(said: dict[str, Any]) -> str:
    computes, sends = (format_seconds(said[which]) for which in ("compute_s", "communicate_s"))
    return f"r = {said['redundancy']}, g = {said['group']}: {format_seconds(predicted_s(said))} ({computes}, {sends})"


def _bytes_sheet(counted: Sequence[Result]) -> Sheet:
    def span(values: Iterable[float], form: str) -> str:
        least, most = (f"{value:{form}}" for value in _ends(values))
        return least if least == most else f"{least} to {most}"

    by_r = {
        r: [row for row in counted if row["redundancy"] == r] for r in dict.fromkeys(r["redundancy"] for r in counted)
    }
    return Sheet(
        "Bytes of an exchange, equation 19: of all ranks, over those of ranks that send each block's gradient to "
        "everybody",
        f"Off: counted bytes beside the equation with stated headers. {_BYTES}",
        ("redundancy", "nodes", "equation 19", "counted", "off", "packets sent again"),
        [
            (
                f"r = {r}",
                span((row["nodes"] for row in rows), "d"),
                span((equation_19(row["nodes"], r) for row in rows), ".4f"),
                span((row["link_bytes"] / row["normal_bytes"] for row in rows), ".4f"),
                span((row["link_bytes"] / row["stated_bytes"] - 1 for row in rows), "+.1%"),
                span((row["repair_datagrams"] for row in rows), ".0f"),
            )
            for r, rows in sorted(by_r.items())
        ],
    )


def _ends(values: Iterable[float]) -> tuple[float, float]:
    there = list(values)
    return min(there), max(there)


# ---- the page --------------------------------------------------------------------------------------------------------

_COVERS = (
    ("Figures 1 to 3, what is sent", "drawings; the library does what they show, and its tests hold it to that"),
    (
        "Tables 1 and 2 and figures 4 to 7",
        (
            "not reproduced: the authors' ten machines, networks that are not described, accuracy until it rises no "
            "more, and how targets were chosen; ours are set before, not where methods differ most"
        ),
    ),
    ("Figures 8 to 11, time and bytes to the target", ("train", "here on {nodes}")),
    ("Figures 12 and 13, a batch against r on 8 nodes", ("batch", "here")),
    (
        "Figures 14 and 15, time on 2 to 10 nodes",
        ("nodes", "here on {nodes}, with steps that are counted in one process"),
    ),
    ("Equations 19 and 28 to 30, bytes", ("bytes", "here on {nodes}")),
    (
        "Algorithms 1 to 4",
        (
            "implemented, but for line 8 of the first: F over all training images in every step takes longer than the "
            "step; [Coded data parallelism](../how-to/coded.md#keep-the-best-weights) says how to do it once per epoch"
        ),
    ),
)


def _covers(results: Sequence[Result]) -> list[tuple[str, str]]:
    """List the paper's tables and figures, and how the recorded rows cover them."""
    return [(what, where if isinstance(where, str) else _where(results, *where)) for what, where in _COVERS]


def _where(results: Sequence[Result], section: str, here: str) -> str:
    """Describe a section's rows by the text ``here``, and name the tasks without rows."""
    own = {task: rows_in(results, section, task) for task in (TITLES if section != "bytes" else ("bytes",))}
    there = {task: rows for task, rows in own.items() if rows}
    if not there:
        return "not measured yet"
    said = here.format(nodes=_nodes(row for rows in there.values() for row in rows))
    missing = [TITLES[task] for task in own if task not in there]
    return said + (f"; not measured yet: {_listed(missing)}" if missing else "")


def _nodes(rows: Iterable[Result]) -> str:
    """Say the numbers of nodes in words: ``4 nodes``, or ``2 to 10 nodes``."""
    counts = {row["nodes"] for row in rows}
    least, most = min(counts), max(counts)
    return f"{least} nodes" if least == most else f"{least} to {most} nodes"


#: Differences from the paper, each a bullet on the page.
_DEPARTURES = (
    (
        "**Machines.** All ranks share two cores, instead of ten machines. Computing is slow there, and what counts is "
        "its ratio to the link. Links are full duplex and as fast in both directions. Each rank of a multicast "
        "receives n − 1 times what it sends, which bounds the time that multicast saves."
    ),
    (
        "**Load per node (algorithm 2).** The same: C(n, r) blocks, of which each node has r·C(n, r)/n. The paper says "
        "that the samples of a node can be adjusted to what it is capable of, and not how. Here the sizes of blocks do "
        "it, and no node can have more than 1/r of the work. That changes what other nodes compute, though not what "
        "they send."
    ),
    (
        "**Packets (algorithm 3) and whole numbers (section 3.1).** As it is written, the algorithm makes a packet for "
        "every r of a node's blocks: 20 packets instead of 4 for n = 5, r = 3. Section 2.4 counts one for each set of "
        "r other nodes, and so does the library. The paper maps [−10, 10] to all of an int32. Here the sum over all "
        "blocks has to fit, so the unit is C(n, r) times as large. What is out of reach widens the span and is sent "
        "again."
    ),
    (
        "**Baselines, networks and targets.** Baselines send one gradient per node and step, the sum over its samples. "
        "Equation 19 compares with one per *block*. Networks are small, since the paper does not say how large its own "
        "are. The CNN's target is lower than the paper's 70 %, which would take hours. The DNN's is higher than the "
        "paper's 82 %, which takes two dozen steps. With fewer classes, targets are as far above chance."
    ),
)


def _of_asgd(results: Sequence[Result]) -> str:
    """Say with which seeds ASGD runs, behind links and in one process."""
    told = []
    for task, title in TITLES.items():
        rows = [row for row in results if row["task"] == task and row["name"] == ASGD]
        kinds = (("train", "behind links"), ("steps", "in one process"))
        seeds = {where: sorted({row["seed"] for row in rows if row["kind"] == kind}) for kind, where in kinds}
        said = " and ".join(f"{where} with {seeded(own)}" for where, own in seeds.items() if own)
        told += [f"{title}, {said}"] if said else []
    return (
        f"**ASGD** runs, for {'; for '.join(told)}; the paper has the mean of ten runs. It has a learning rate of "
        "its own, which more than four nodes share, so that a round of all workers' updates goes as far as with four."
    )


def _conclusion(results: Sequence[Result]) -> str:
    told, sooner, alone = [], [], True
    for task, title in TITLES.items():
        methods = _reached(results, task)
        own = methods[CHOSEN].seconds
        sooner += [less_time(methods[CHOSEN], methods[name], name) for name in BASELINES]
        alone &= methods[ALONE].seconds < own
        said = {name: format_seconds(methods[name].seconds) for name in (CHOSEN, MULTICAST, ALL_REDUCE, ALONE)}
        told.append(
            f"on {title}, coding takes {said[CHOSEN]} to the target, synchronous SGD by multicast {said[MULTICAST]}, "
            f"an all-reduce {said[ALL_REDUCE]}, and one machine alone {said[ALONE]}"
        )
    open_ = list(dict.fromkeys(apart.names[1] for apart in sooner if apart.better().held is None))
    faster = ""
    if all(apart.mean < 0 for apart in sooner):
        faster = " Coding was faster than what the paper compares it with" + (
            f"; beside {_listed(open_)} that is not resolved." if open_ else "."
        )
    better = " One machine alone was faster still: networks this small are better not distributed." if alone else ""
    return f"Behind a slow link, {'; '.join(told)}.{faster}{better}"


def _reached(results: Sequence[Result], task: str) -> dict[str, Method]:
    """Return the methods of a task, by name.

    Raises:
        LookupError: a method that the conclusion needs is missing, or did not reach the target.
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
    """Say what was run, by the recorded rows."""
    told = [
        f"{said} on {_nodes(rows)}"
        for said, rows in (
            ("trained to a target", [row for row in rows_in(results, "train") if row["kind"] == "train"]),
            ("timed step by step", rows_in(results, "nodes")),
        )
        if rows
    ]
    return (
        f"Small networks on MNIST and CIFAR-10 were {' and '.join(told)}, as real processes behind emulated links. "
        "Beside the paper's methods stand two that it leaves out: an all-reduce, and one machine alone."
    )


_OPENING = Opening(
    title="Coded data parallelism (CSSGD)",
    says="Does it pay to compute every block of a mini-batch on r ranks, so that one multicast sum of gradients serves "
    "several receivers? Behind slow links, the paper says, that takes 54 % (a DNN) and 39 % (a CNN) less time than "
    "synchronous SGD, and sends less.",
    ran=_ran,
    found=_conclusion,
    panels=_panels,
    covers=_covers,
)


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of results from a record, the content of ``summary.json``."""
    results = record["rows"]
    said = claims(results) if record["claims"] else []
    lines = [
        *beginning(results, said, _OPENING, paper=PAPER, page=path.stem),
        *("## Tables", "", *(f"- **{word}**: {meaning}" for word, meaning in LEGEND), ""),
        *itertools.chain.from_iterable(sheet.markdown() for sheet in sheets(results) if sheet.paged),
        *covered(results, _OPENING),
        *("## Where this departs from the paper", "", *(f"- {said}" for said in (*_DEPARTURES, _of_asgd(results))), ""),
        *("## Source", "", source(dict(record), sorted({str(row["commit"]) for row in results}))),
    ]
    write_page(path, lambda _: "\n".join(lines) + "\n", results, _OPENING)
