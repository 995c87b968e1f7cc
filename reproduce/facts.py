"""Write the facts about losses that ``narrowband plan`` uses, from the repository's records.

Run ``python -m reproduce.facts``. Nothing is trained: each fact comes from a record in ``reproduce/results``, and names
the command that made the record.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.files import write_text
from reproduce.command import RESULTS, command_line
from reproduce.groups import DENSE, compared, groups, named, needed
from reproduce.local_rows import (
    DILOCO,
    GRADIENT_1,
    IN_PLACE,
    ONE_BIT_ROUNDS,
    OTHER_TASK,
    OURS,
    RECIPES,
    ROUNDS,
    SIGN_IN_PLACE,
    SIXTEENTH,
    TASK,
    TOP,
    TWO_BIT_ROUNDS,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["TARGET", "Options", "main", "table"]

TARGET = Path(__file__).parent.parent / "src" / "narrowband" / "planning" / "facts.json"

#: Rows of ``reproduce.local`` that become facts: those that average updates, and gradients that no other record has.
#: Rows that are not recorded are left out.
_ROWS = (
    GRADIENT_1,
    SIGN_IN_PLACE,
    TOP,
    *(name.format(every) for every in ROUNDS for name in (DILOCO, TWO_BIT_ROUNDS, SIXTEENTH, IN_PLACE)),
    OURS.format(ROUNDS[0]),
    ONE_BIT_ROUNDS.format(ROUNDS[0]),
)

#: Task → name of its text in sentences.
_TEXTS = {TASK: "tiny shakespeare", OTHER_TASK: "WikiText-2"}


def table() -> list[dict[str, Any]]:
    """Return all facts, with the fields of :class:`narrowband.planning.facts.Fact`."""
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


def _local() -> Iterator[dict[str, Any]]:
    """Yield facts of ``reproduce.local``. Its scores are perplexities, whose logarithm is the loss.

    Rows that diverged are left out: they are no facts to choose by.
    """
    record = json.loads((RESULTS / "local" / "summary.json").read_text())
    found = groups(record["rows"])
    rows = {(recipe.row.task, recipe.row.name): recipe.row for recipe in RECIPES}
    for task, name in itertools.product(_TEXTS, _ROWS):
        own = named(found, task, name)
        if own is None:
            continue
        row = rows[task, name]
        gap = compared(own, needed(found, task, DENSE), relative=True, of=math.log)
        if not math.isfinite(gap.mean):
            continue
        yield {
            "optimizer": row.optimizer,
            "spec": row.spec,
            "every": row.updates,
            "gap": round(gap.mean, 4),
            "margin": None if gap.margin is None else round(gap.margin, 4),
            "seeds": len(gap.seeds),
            "what": f"{own.parameters:,} parameters, {own.epochs} epochs of {_TEXTS[task]}, {own.nodes} ranks"
            + (", DiLoCo's outer step" if row.outer == "nesterov" else ""),
            "command": "python -m reproduce.local",
            "outer": row.outer,
            "residuals": row.residuals,
        }


@dataclass(frozen=True)
class Options:
    """Write the facts about losses that ``narrowband plan`` uses, from the repository's records; measure nothing."""

    file: Path = TARGET
    """The file to write."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line("facts", Options, _run, argv, stopped="The file is whole, if it was written.")


def _run(options: Options, _: list[str], console: Console) -> None:
    lines = ",\n".join(f" {json.dumps(fact, ensure_ascii=False)}" for fact in table())
    write_text(options.file, f"[\n{lines}\n]\n")
    console.print(f"written: {options.file}", style="dim", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
