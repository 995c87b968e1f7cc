"""Write what ``narrowband plan`` knows of losses, from the records in the repository: ``python -m reproduce.facts``.

Nothing is trained: each line is of a record in ``reproduce/results``, and names the command that made it.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.files import write_text
from reproduce.command import RESULTS, command_line
from reproduce.local import EXPERIMENT
from reproduce.pairs import student

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["TARGET", "Options", "main", "table"]

TARGET = Path(__file__).parent.parent / "src" / "narrowband" / "planning" / "facts.json"

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
    """Perplexities; a loss is their logarithm."""
    record = json.loads((RESULTS / "local" / "summary.json").read_text())
    groups = {group["name"]: group for group in record["groups"] if group["task"] == "shakespeare"}
    rows = {recipe.row.name: recipe.row for recipe in EXPERIMENT.recipes if recipe.row.task == "shakespeare"}
    dense = _losses(groups["dense"])
    return [
        {
            "optimizer": "adamw",
            "spec": groups[name]["spec"],
            "every": rows[name].updates,
            **_gap(_losses(groups[name]), dense),
            "what": f"{groups[name]['parameters']:,} parameters, {groups[name]['epochs']} epochs, "
            f"{groups[name]['nodes']} ranks" + (", DiLoCo's outer step" if rows[name].outer == "nesterov" else ""),
            "command": "python -m reproduce.local",
            "outer": rows[name].outer,
            "residuals": rows[name].residuals,
        }
        for name in _UPDATES
        if name in groups
    ]


def _losses(group: Mapping[str, Any]) -> dict[int, float]:
    """Seed → loss."""
    return {seed: math.log(score) for seed, score in zip(group["seeds"], group["scores"], strict=True)}


def _gap(own: Mapping[int, float], dense: Mapping[int, float]) -> dict[str, Any]:
    """How far losses are above others, seed by seed."""
    gaps = [own[seed] / dense[seed] - 1 for seed in own if seed in dense]
    few = len(gaps) < 2
    margin = None if few else student(len(gaps) - 1) * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return {
        "gap": round(statistics.mean(gaps), 4),
        "margin": None if margin is None else round(margin, 4),
        "seeds": len(gaps),
    }


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
