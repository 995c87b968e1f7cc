"""Seconds until a loss is reached, behind slow links: gradients, compressed gradients, updates, and rounds of updates.

A method that sends less may need more steps. What counts is the product: steps until the loss is reached, times the
seconds of a step. The two factors are measured apart, because what ranks compute does not depend on how fast they send:

* *steps* come from the record of ``reproduce.local``, which has the held-out loss after every epoch. The loss to reach
  is the one that DDP without compression ends with, plus one per cent, for each seed that both have. Between two epochs
  the loss is interpolated;
* *seconds* are measured on some steps of the same training behind emulated links: four ranks on this machine, each with
  a link of its own. The time of a step that sends nothing shows how much of the time is computing.

Run ``python -m reproduce.local_times`` (half an hour on two idle cores; needs what ``narrowband lab`` needs: Linux and
root), ``--rates none --quick`` (seconds, anywhere), ``--help``.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.files import write_text
from narrowband.lab.config import parse_rate
from narrowband.report.record import provenance, read_json, write_json
from narrowband.units import format_bytes, format_rate, format_seconds
from reproduce import local
from reproduce.command import RESULTS, command_line, progress
from reproduce.groups import DENSE, NOTHING
from reproduce.html import write_pages
from reproduce.local_rows import at_other_length
from reproduce.local_words import shortly
from reproduce.pairs import student
from reproduce.pictures import Bar, Panel, embedded, write
from reproduce.report import pictures_of, ran_on, source
from reproduce.row import Row
from reproduce.training import run

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["METHODS", "Line", "Options", "lines", "main", "page", "steps_to"]

_MODULE = "local_times"
_TASK = "shakespeare"

#: Method that is timed → the row of ``reproduce.local`` that its number of steps comes from.
METHODS: dict[str, str] = {
    "gradients, 32 bits": DENSE,
    "gradients, 16 bits": DENSE,
    "gradients, 4 bits": "gradients, 4 bits",
    "updates, sign, in place": "updates, sign, in place",
    "updates, top 1%": "updates, top 1%",
    "every 3, 2 bits, in place": "every 3, 2 bits, in place",
    "every 15, DiLoCo": "every 15, DiLoCo",
    "every 15, 2 bits, in place": "every 15, 2 bits, in place",
    "every 15, top 1/16, 2 bits, in place": "every 15, top 1/16, 2 bits, in place",
    "every 15, top 1/64, 2 bits, in place": "every 15, top 1/64, 2 bits, in place",
    "every 15, Streaming DiLoCo": "every 15, Streaming DiLoCo",
}
_SIXTEEN = "gradients, 16 bits"

#: The row that sends nothing.
COMPUTING = "computing alone"

#: Numbers of untimed and of timed steps; both are whole rounds.
_FIRST, _STEPS = 30, 60

#: The loss counts as reached when it is at most this share above the dense row's last loss.
_MORE = 0.01


@dataclass(frozen=True)
class Options:
    """Time steps behind emulated links, and say how long each method takes to reach a loss.

    Needs an otherwise idle machine, and the record of reproduce.local. Rows that are finished are kept: after Ctrl-C,
    the same command goes on from there.
    """

    rates: tuple[str, ...] = ("20mbit", "100mbit", "500mbit")
    """Rates of every link, in both directions; none: ranks on loopback, unshaped."""
    nodes: int = 4
    """Ranks on this machine."""
    data_dir: Path | None = None
    """Folder with the data; else NARROWBAND_DATA names it; else sets are downloaded."""
    output: Path | None = None
    """Directory of the results; reproduce/results/local_times when left out."""
    losses: Path = RESULTS / "local" / "summary.json"
    """The record of reproduce.local."""
    resume: bool = True
    """Take rows that an earlier run finished."""
    quick: bool = False
    """A few steps of two rows: to see in seconds that everything works."""
    markdown: Path | None = None
    """Also write the page for the documentation to this file."""


@dataclass(frozen=True)
class Line:
    """One method at one rate.

    Attributes:
        rate: rate of every link.
        method: a key of :data:`METHODS`, or :data:`COMPUTING`.
        step_s: mean seconds of a step, rounds included.
        computing: time of a step that sends nothing, as a share of this method's step.
        sent_bytes: bytes that a rank sends per step.
        steps: seed → steps until the loss is reached, which is that of DDP's row with the same seed. Empty where one
            seed does not reach it, or the record lacks the row.
        faster: seed → how many times faster than DDP in 32 bits; empty in the same cases.
        trained: steps after which the loss was last measured; 0: the record lacks the row.
    """

    rate: str
    method: str
    step_s: float
    computing: float
    sent_bytes: float
    steps: Mapping[int, float]
    faster: Mapping[int, float]
    trained: int = 0

    @property
    def seconds(self) -> float | None:
        """Return the seconds until the loss is reached: mean steps over seeds, times the seconds of a step."""
        return self.step_s * statistics.mean(self.steps.values()) if self.steps else None

    @property
    def factor(self) -> str:
        """Say how many times faster than DDP in 32 bits: the mean over seeds, ± half of its 95 % interval."""
        values = list(self.faster.values())
        if not values:
            return NOTHING
        said = f"{statistics.mean(values):.1f}"
        if math.isclose(min(values), max(values)):  # one seed only, or equal steps by definition
            return said
        return f"{said} ± {_half(values):.1f}"


def timed(quick: bool = False) -> list[Row]:
    """Return the rows to time: those of ``reproduce.local`` over a short text, and one that sends nothing."""
    there = {r.row.name: r.row for r in local.EXPERIMENT.recipes if r.row.task == _TASK}
    dense = there[DENSE]
    steps = 4 if quick else _FIRST + _STEPS
    # A step reads a batch of windows of 64 bytes; the random offset of an epoch takes up to one window more.
    limit = 64 * (steps * dense.batch + 1) + 64
    rows = [replace(there[DENSE if name == _SIXTEEN else of], name=name) for name, of in METHODS.items()]
    rows = [replace(row, spec="fp16") if row.name == _SIXTEEN else row for row in rows]
    rows.append(replace(there[DENSE], name=COMPUTING, isolated=True))
    rows = [replace(row, epochs=1, limit=limit) for row in rows]
    return [rows[0], rows[-1]] if quick else rows


def steps_to(target: float, scores: Sequence[float | None], steps: int) -> float | None:
    """Return the number of steps until the loss is at most ``target``, or None if it never is.

    Args:
        target: loss in nats.
        scores: perplexity after each epoch; None where it is not finite.
        steps: number of steps of all epochs together.

    Example:
        >>> steps_to(2.0, [math.exp(3.0), math.exp(1.0)], 200)
        150.0
    """
    each = steps / len(scores)
    before = None
    for at, score in enumerate(scores):
        loss = math.inf if score is None else math.log(score)
        if loss <= target:
            if before is None or math.isinf(before):
                return each * (at + 1)
            return each * (at + (before - target) / (before - loss))
        before = loss
    return None


def lines(rows: Mapping[str, Sequence[Mapping[str, Any]]], losses: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Combine timed steps and recorded losses into lines.

    Args:
        rows: rate → results that :func:`reproduce.training.run` returned for the rows of :func:`timed`.
        losses: the rows of ``reproduce.local``'s record.
    """
    known: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in losses:
        if row["task"] == _TASK:
            known.setdefault(row["name"], {}).setdefault(row["seed"], row)
    targets = {
        seed: (1 + _MORE) * math.log(row["score"])
        for seed, row in known.get(DENSE, {}).items()
        if row["score"] is not None
    }
    found = []
    for rate, own in rows.items():
        alone = next(_mean_step(row) for row in own if row["name"] == COMPUTING)
        first_s, first_steps = _mean_step(own[0]), _reached(known, METHODS[own[0]["name"]], targets)
        for row in own:
            of, step_s = METHODS.get(row["name"], ""), _mean_step(row)
            steps = _reached(known, of, targets)
            tried = [told for name in _lengths(of) for told in known.get(name, {}).values()]
            found.append(
                Line(
                    rate=rate,
                    method=row["name"],
                    step_s=step_s,
                    computing=alone / step_s,
                    sent_bytes=row["sent_bytes_per_step"],
                    steps=steps,
                    faster={
                        seed: first_steps[seed] * first_s / (each * step_s)
                        for seed, each in steps.items()
                        if seed in first_steps
                    },
                    trained=max((told["steps"] for told in tried), default=0),
                )
            )
    return found


def _lengths(name: str) -> tuple[str, str]:
    """Return the names of a row and of the same row trained for another number of epochs."""
    return name, at_other_length(_TASK, name)


def _reached(
    known: Mapping[str, Mapping[int, Mapping[str, Any]]], of: str, targets: Mapping[int, float]
) -> dict[int, float]:
    """Return seed → steps until the loss is reached, in the shortest training that reaches it with all its seeds."""
    for name in _lengths(of):
        paired = {seed: told for seed, told in known.get(name, {}).items() if seed in targets}
        steps = {seed: steps_to(targets[seed], told["scores"], told["steps"]) for seed, told in sorted(paired.items())}
        reached = {seed: each for seed, each in steps.items() if each is not None}
        if reached and len(reached) == len(steps):
            return reached
    return {}


def _mean_step(row: Mapping[str, Any]) -> float:
    taken = row["step_seconds"]
    timed_steps = taken[_FIRST:] if len(taken) > _FIRST else taken
    return float(sum(timed_steps) / len(timed_steps))


# ---- the page --------------------------------------------------------------------------------------------------------

_HEADINGS = ("method", "step", "computing", "sent", "steps", "time", "× faster")


def _cells(line: Line) -> tuple[str, ...]:
    unreached = f"not in {line.trained:,}" if line.trained else NOTHING
    return (
        shortly(line.method),
        format_seconds(line.step_s),
        f"{min(1.0, line.computing):.0%}",
        format_bytes(line.sent_bytes) if line.method != COMPUTING else NOTHING,
        _steps(line.steps) if line.steps else unreached,
        NOTHING if line.seconds is None else format_seconds(line.seconds),
        line.factor,
    )


def _resolved(line: Line, least: Line) -> bool:
    """Return whether the method is slower than the fastest one beyond the noise between seeds."""
    apart = [
        least.step_s * steps / (line.step_s * line.steps[seed])
        for seed, steps in least.steps.items()
        if seed in line.steps
    ]
    return len(apart) > 1 and statistics.mean(apart) + _half(apart) < 1.0


def _half(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean."""
    return student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def _steps(by_seed: Mapping[int, float]) -> str:
    values = list(by_seed.values())
    spread = f" ± {statistics.stdev(values):,.0f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):,.0f}{spread}"


def _links(rate: str) -> str:
    """Name the links that ranks were behind."""
    return "loopback" if rate == "none" else f"links of {format_rate(parse_rate(rate))}"


def _sentence(said: str) -> str:
    return said[0].upper() + said[1:]


def _by_rate(found: Sequence[Line]) -> dict[str, list[Line]]:
    return {rate: [line for line in found if line.rate == rate] for rate in dict.fromkeys(line.rate for line in found)}


def _panels(found: Sequence[Line]) -> list[Panel]:
    return [
        Panel(
            _sentence(_links(rate)),
            "time to the loss; lower is better",
            [
                Bar(
                    shortly(line.method),
                    line.seconds,
                    (f"not in {line.trained:,} steps" if line.trained else "not trained")
                    if line.seconds is None
                    else format_seconds(line.seconds),
                    line.method.startswith(("updates", "every")),
                )
                for line in own
                if line.method != COMPUTING
            ],
        )
        for rate, own in _by_rate(found).items()
    ]


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of results.

    Args:
        record: the content of ``summary.json``.
        path: where to write the page.
    """
    found = lines(record["rows"], record["losses"])
    panels = _panels(found)
    write(panels, pictures_of(path) / "opening")
    best = []
    for rate, own in _by_rate(found).items():
        reached = [line for line in own if line.seconds is not None]
        if reached:
            first, least = own[0], min(reached, key=lambda line: line.seconds or math.inf)
            said = (
                f"behind {_links(rate)} {shortly(least.method)} were first, in {format_seconds(least.seconds or 0.0)}"
            )
            if least.faster and least is not first:
                said += f" and {least.factor} times as fast as DDP in 32 bits"
            near = [shortly(line.method) for line in reached if line is not least and not _resolved(line, least)]
            if len(least.steps) == 1:
                said += " (of one seed)"
            elif near:
                said += f" (not resolved from these: {'; '.join(near)})"
            best.append(said)
    out = ["# Time to a loss", ""]
    out += [
        (
            "**What was asked.** Which way to average is first at the loss that DDP without compression ends with, "
            f"plus {_MORE:.0%}, behind links of which speed?"
        ),
        "",
        (
            "**What was run.** A small GPT learned bytes of tiny shakespeare with AdamW on four ranks; steps until the "
            f"loss are those of [another page](local.md), and seconds of a step are means over {_STEPS} steps behind "
            "emulated links, with the rounds that fall into them."
        ),
        "",
        f"**What came out.** {_sentence('; '.join(best)) if best else 'No row reached the loss'}.",
        "",
        embedded(panels, f"pictures/{path.stem}/opening"),
        "",
    ]
    for rate, own in _by_rate(found).items():
        out += [
            f"## {_sentence(_links(rate))}",
            "",
            f"| {' | '.join(_HEADINGS)} |",
            "| --- |" + " ---: |" * (len(_HEADINGS) - 1),
        ]
        out += [f"| {' | '.join(_cells(line))} |" for line in own] + [""]
    out += [
        (
            "Step: the mean, with rounds. Computing: a step that sends nothing, as a share of it. Sent: per step and "
            "rank. Steps: until the loss is reached that DDP's row of the same seed ends with; the mean ± standard "
            "deviation over seeds (without ±: of one seed), interpolated between epochs; of rounds that do not reach "
            "it with every seed in as many epochs as gradients have, those of rounds trained longer. Not in so many "
            "steps: with one seed or more it was not reached when training ended; –: that row was not trained yet. "
            "Learning rates fall until training ends, so that each might reach it sooner in a shorter training. Time: "
            "the mean of steps times that of a step. × faster: than DDP in 32 bits, paired by seed; the mean ± half of "
            "its 95 % interval by Student's t, in which the noise of a step's time is not. "
            "16 bits are given the steps of 32. Ranks share two cores, so that they compute more slowly than "
            "machines of their own "
            "would; on these, sending is a larger share of a step."
        ),
        "",
        source(dict(record), record["commits"]),
    ]
    write_text(path, "\n".join(out) + "\n")


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line(
        _MODULE, Options, _run, argv, stopped="Rows that were finished are kept: the same command goes on from there."
    )


def _run(options: Options, command: list[str], console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    output, told = options.output or RESULTS / _MODULE, options.losses
    if not options.rates:
        raise ValueError("give at least one rate, such as --rates 100mbit")
    if not told.exists() and not options.quick:
        raise FileNotFoundError(f"{told} is not there: run python -m reproduce.local first, or name its record")
    keys = ("task", "name", "seed", "score", "scores", "steps", "commit")
    losses = read_json(told, ("rows",))["rows"] if told.exists() else []
    losses = [{key: row[key] for key in keys} for row in losses if row["task"] == _TASK]
    rows, record = timed(options.quick), provenance(0, command)
    found: dict[str, list[dict[str, Any]]] = {}
    for rate in options.rates:
        with progress(console) as bars:
            bar = bars.add_task(rate, total=len(rows), said="starting ranks")

            def note(event: dict[str, Any], bars: Any = bars, bar: Any = bar) -> None:
                if event["event"] == "step":
                    bars.update(bar, said=f"{rows[event['row']].name}: step {event['step']} of {event['of']}")
                elif event["event"] == "row":
                    bars.update(bar, advance=1)

            found[rate] = run(
                rows,
                output / rate,
                nodes=options.nodes,
                rate=None if rate == "none" else rate,
                data_dir=options.data_dir,
                resume=options.resume,
                on_event=note,
            )
    made = lines(found, losses)
    for rate, own in _by_rate(made).items():
        drawn = Table(title=_sentence(_links(rate)), title_justify="left", box=SIMPLE_HEAD)
        for at, heading in enumerate(_HEADINGS):
            drawn.add_column(heading, justify="right" if at else "left")
        for line in own:
            drawn.add_row(*_cells(line))
        console.print(drawn)
    commits = sorted({str(row["commit"]) for own in found.values() for row in own} | {str(r["commit"]) for r in losses})
    written = output / "summary.json"
    record |= {
        "commits": commits,
        "rows": found,
        "losses": losses,
        "lines": [asdict(line) | {"seconds": line.seconds} for line in made],
    }
    record["cpus"] = ran_on((row for own in found.values() for row in own), written)
    write_json(written, record)
    write_pages(written, record, options.markdown, page, console)


if __name__ == "__main__":
    sys.exit(main())
