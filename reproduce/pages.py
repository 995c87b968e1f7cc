"""Write the pages of results, tables of a guide, and the picture of the front page, from the repository's records.

Nothing is measured or trained: every figure on a page and in a picture is in a record, and a test compares them. Run
``python -m reproduce.pages`` from the repository's root, after a record or the look of a page has changed.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.files import write_text
from reproduce import (
    benchmarks,
    candidates_page,
    command,
    cssgd_page,
    dgc,
    fidelity_page,
    guide,
    lgreco,
    lgreco_times_page,
    local,
    local_times,
    mesa,
    mesa_language,
    mesa_memory,
    model_parallel,
    optimizers_page,
    powersgd,
    predictions,
    sensitivity_page,
    sharded,
    sparsity,
    sums,
)
from reproduce.pictures import write

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["FRONT", "GUIDE", "PAGES", "Options", "main", "record_of"]

_ROOT = Path(__file__).parent.parent

#: The guide whose tables are written, in the folder of the documentation.
GUIDE = "explanation/gradients-or-updates.md"

#: The picture of the front page: its path without theme and file extension.
FRONT = "pictures/front"


def _experiment(experiment: command.Experiment, record: Mapping[str, Any], path: Path) -> None:
    command.page(experiment, record["rows"], dict(record), path)


#: Module → function that writes the page of its record.
PAGES: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    **{
        module.EXPERIMENT.module: functools.partial(_experiment, module.EXPERIMENT)
        for module in (dgc, lgreco, local, mesa, mesa_language, model_parallel, powersgd, sharded, sparsity, sums)
    },
    "candidates": candidates_page.page,
    "cssgd": cssgd_page.page,
    "fidelity": fidelity_page.page,
    "lgreco_times": lgreco_times_page.page,
    "local_times": local_times.page,
    "mesa_memory": mesa_memory.page,
    "optimizers": optimizers_page.page,
    "sensitivity": sensitivity_page.page,
}


@dataclass(frozen=True)
class Options:
    """Write pages of results and pictures from the records in the repository. Nothing is measured."""

    docs: Path = _ROOT / "docs"
    """Folder of the documentation."""


def record_of(module: str) -> dict[str, Any]:
    """Return the record of a module of this package, as it is in the repository."""
    record: dict[str, Any] = json.loads((_ROOT / "reproduce/results" / module / "summary.json").read_text())
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command.command_line("pages", Options, _run, argv, stopped="Pages that were written are whole.")


def _run(options: Options, _: list[str], console: Console) -> None:
    for module, page in PAGES.items():
        path = options.docs / "results" / f"{module}.md"
        page(record_of(module), path)
        console.print(f"written: {path}", style="dim", markup=False, highlight=False)
    path = options.docs / GUIDE
    write_text(path, guide.rewritten(path.read_text(), record_of("local"), record_of("local_times")))
    console.print(f"written: {path}", style="dim", markup=False, highlight=False)
    found = benchmarks.records()
    benchmarks.page(found, options.docs / "results" / "benchmarks.md")
    predictions.page(predictions.record(), options.docs / "results" / "predictions.md")
    write(benchmarks.front(found), options.docs / FRONT)


if __name__ == "__main__":
    sys.exit(main())
