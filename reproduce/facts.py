"""Write what ``narrowband plan`` knows of losses, from the records in the repository: ``python -m reproduce.facts``.

Nothing is trained: each line is of a record in ``reproduce/results``, and names the command that made it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.files import write_text
from reproduce.command import RESULTS, command_line
from reproduce.local import EXPERIMENT
from reproduce.report import DENSE, compared, groups, named, needed

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["TARGET", "Options", "main", "table"]

TARGET = Path(__file__).parent.parent / "src" / "narrowband" / "planning" / "facts.json"

_TASK = "shakespeare"

#: Rows of ``reproduce.local`` that average updates, and that are worth knowing; what is not recorded is left out.
_UPDATES = (
    "updates, sign, in place",
    "updates, top 1%",
    "every 15, DiLoCo",
    "every 15, 2 bits, in place",
    "every 15, top 1/16, 2 bits, in place",
    "every 15, top 1/64, 2 bits, in place",
    "every 15, top 1/64, 2 bits",
)


def table() -> list[dict[str, Any]]:
    """All facts, as :class:`narrowband.planning.facts.Fact` has them."""
    return [*_optimizers(), *_local()]


def _optimizers() -> list[dict[str, Any]]:
    record = json.loads((RESULTS / "optimizers" / "summary.json").read_text())
    return [
        {
            "optimizer": line["optimizer"],
            "spec": line["spec"],
            "every": 0,
            "gap": round(line["gap"] / 100, 4),
            "margin": round(line["margin"] / 100, 4),
            "seeds": len(line["seeds"]),
            "what": f"{line['parameters']:,} parameters, {line['steps']} steps, {line['nodes']} ranks",
            "command": "python -m reproduce.optimizers",
        }
        for line in record["lines"]
        if line["spec"] != "none"
    ]


def _local() -> list[dict[str, Any]]:
    """Perplexities; a loss is their logarithm. What diverged is no fact to choose by, and is left out."""
    record = json.loads((RESULTS / "local" / "summary.json").read_text())
    found = groups(record["rows"])
    rows = {recipe.row.name: recipe.row for recipe in EXPERIMENT.recipes if recipe.row.task == _TASK}
    dense = needed(found, _TASK, DENSE)
    recorded = [(rows[name], own) for name in _UPDATES if (own := named(found, _TASK, name)) is not None]
    gaps = [compared(own, dense, relative=True, of=math.log) for _, own in recorded]
    return [
        {
            "optimizer": row.optimizer,
            "spec": row.spec,
            "every": row.updates,
            "gap": round(gap.mean, 4),
            "margin": None if gap.margin is None else round(gap.margin, 4),
            "seeds": len(gap.seeds),
            "what": f"{own.parameters:,} parameters, {own.epochs} epochs, {own.nodes} ranks"
            + (", DiLoCo's outer step" if row.outer == "nesterov" else ""),
            "command": "python -m reproduce.local",
            "outer": row.outer,
            "residuals": row.residuals,
        }
        for (row, own), gap in zip(recorded, gaps, strict=True)
        if math.isfinite(gap.mean)
    ]


@dataclass(frozen=True)
class Options:
    """Write what ``narrowband plan`` knows of losses, from the records in the repository. Nothing is measured."""

    file: Path = TARGET
    """Where it goes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line("facts", Options, _run, argv, stopped="The file is whole, if it was written.")


def _run(options: Options, _: list[str], console: Console) -> None:
    lines = ",\n".join(f" {json.dumps(fact, ensure_ascii=False)}" for fact in table())
    write_text(options.file, f"[\n{lines}\n]\n")
    console.print(f"written: {options.file}", style="dim", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
