"""Time a step of L-GreCo's rows on a slow link.

Every row that :mod:`reproduce.lgreco` has trained runs for some steps between ranks behind emulated links, and sends
what it sent at the end of its training: each layer as the last plan says. ``python -m reproduce.lgreco --recorded``
then shows the median step beside the scores.

Run ``python -m reproduce.lgreco_links`` (ten minutes on two cores, with nothing else to do; needs what
``narrowband lab`` needs), ``--help``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.lab import LabConfig
from narrowband.report.record import provenance, write_json
from narrowband.units import format_seconds
from reproduce.command import RESULTS, command_line, progress
from reproduce.lgreco import EXPERIMENT, LINKS
from reproduce.row import Row
from reproduce.training import recorded, run

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Options", "main", "timed"]

_MODULE = "lgreco_links"

#: Characters of a sample, for tasks whose ``limit`` counts characters.
_READ = {"gpt": 128}


@dataclass(frozen=True)
class Options:
    """Time steps of the rows that reproduce.lgreco has trained, on emulated links: how much time a plan saves there.

    Needs an otherwise idle machine. Rows that are finished are kept: after Ctrl-C, the same command goes on from there.
    """

    rate: str = "100mbit"
    """Rate of every link, in both directions."""
    steps: int = 24
    """Timed steps of each row; the median counts."""
    nodes: int = 4
    """Ranks."""
    data_dir: Path | None = None
    """Folder with the data; else NARROWBAND_DATA names it; else sets are downloaded."""
    output: Path | None = None
    """Directory of reproduce.lgreco's results; reproduce/results/lgreco when left out."""


def timed(row: Row, result: dict[str, Any], steps: int) -> Row:
    """Return a row that compresses by the last plan of a trained row for some steps.

    Args:
        row: the row that was trained.
        result: its result.
        steps: number of steps.
    """
    plan = json.dumps(result["plans"][-1][2], sort_keys=True) if result["plans"] else ""
    limit = (steps * row.batch + 1) * _READ.get(row.task, 1)
    return replace(row, epochs=1, limit=limit, policy="", high="", choices="", delay=0.0, plan=plan)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line(
        _MODULE, Options, _run, argv, stopped="Rows that were timed are kept: the same command goes on from there."
    )


def _run(options: Options, command: list[str], console: Console) -> None:
    for name in ("steps", "nodes"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} must be at least 1")
    LabConfig(nodes=options.nodes, rate=options.rate)
    output = options.output or RESULTS / EXPERIMENT.module
    there = recorded(
        list(dict.fromkeys(recipe.row for recipe in EXPERIMENT.recipes)),
        output,
        nodes=options.nodes,
        data_dir=options.data_dir,
    )
    if not there:
        raise ValueError(f"none of reproduce.lgreco's rows is finished in {output}: train them first")
    trained = run(there, output, nodes=options.nodes, data_dir=options.data_dir)
    rows = [timed(row, result, options.steps) for row, result in zip(there, trained, strict=True)]
    record = provenance(0, command)
    with progress(console) as bars:
        bar = bars.add_task("rows", total=len(rows), said="")

        def note(event: dict[str, Any]) -> None:
            if event["event"] == "row":
                told = event["result"]
                bars.update(bar, advance=1, said=f"{told['task']} {told['name']}: {format_seconds(told['step_s'])}")

        results = run(
            rows,
            output / "links" / options.rate,
            nodes=options.nodes,
            rate=options.rate,
            data_dir=options.data_dir,
            on_event=note,
        )
    columns = ("task", "name", "spec", "step_s", "sent_bytes_per_step")
    told = [{name: result[name] for name in columns} for result in results]
    for one in told:
        console.print(f"{one['task']} {one['name']}: {format_seconds(one['step_s'])}", markup=False, highlight=False)
    write_json(output / LINKS, record | {"rate": options.rate, "steps": options.steps, "rows": told})
    console.print(f"written: {output / LINKS}", style="dim", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
