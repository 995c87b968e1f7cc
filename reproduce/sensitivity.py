"""Is the error of a gradient the right thing to budget? L-GreCo's metric against the loss (section 5.4 of its paper).

L-GreCo (Alimohammadi et al. 2022, arXiv 2210.17357) budgets errors: the norm of what one encoding loses of each layer's
gradient. The quantity of interest is the loss. The paper therefore measures a second metric: from checkpoints of a run
without compression it does short runs (up to 50 steps), always with the same data, in which one layer alone is
compressed. The metric is the change of the loss against a run without compression; measuring it takes as long as
training itself. The paper finds the two metrics highly correlated (figure 11a), and plans made by either alike.

Here a small GPT is trained on bytes of WikiText-2 until it knows more than the frequencies of bytes. From there on all
arithmetic is float64: parameters, gradients and losses; only codecs get gradients in float32, as usual. For every layer
and choice the metric is |Δ|, the magnitude of the change of the held-out loss after the short run. A lower loss counts
as a change like a higher one: a budget for the sum of signed differences would give lower losses for free.

The reliability of |Δ| is measured, too, in three ways.

* **The floor.** Rounding one layer's gradients to float32 and nothing else changes the loss by 10⁻¹⁴ to 10⁻¹²: a codec
  without any loss would do the same. Cells at or below their layer's floor show no effect of compression; they are
  counted, and left out of the correlations. (A training run in float32 has a floor of 10⁻⁷ in its loss alone, which is
  more than many choices change it by.)
* **The metric against itself.** Every cell is measured twice, with other data in the short run, other held-out windows
  and other random numbers in codecs. The rank correlation of the two tables says how much of |Δ| is due to the choice
  and not to the draw. It bounds the correlation of |Δ| with any other metric.
* **Seeds.** There are three models, with other parameters and other data. A correlation is reported as its mean over
  them, with the interval of Student's t.

All results are reported with and without the head, because the largest layer can make a correlation by itself.

Run ``python -m reproduce.sensitivity`` (a quarter of an hour on two cores), ``--quick`` (seconds), ``--help``.

Differences from the paper: the model is small, and short runs take four steps, which are enough in float64. They use
plain SGD, whose steps are as long as the gradients are. From the last checkpoint they are repeated with the AdamW that
the model was trained with, which divides a layer's gradient by its usual size.

Short runs and errors are in :mod:`reproduce.sensitivity_runs`, claims and tables in :mod:`reproduce.sensitivity_page`.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from narrowband.report.record import provenance, read_json, write_json
from reproduce.command import RESULTS, command_line, progress, show
from reproduce.data import about
from reproduce.html import write_pages
from reproduce.row import files_of
from reproduce.sensitivity_page import LAYOUT, TITLES, claims, lines_of, page
from reproduce.sensitivity_runs import QUICK_STEPS, Options, Unit, measure

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Options", "main", "units_of"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line(
        "sensitivity",
        Options,
        _run,
        argv,
        stopped="Models that were measured are kept: the same command goes on from there.",
    )


def units_of(options: Options) -> list[Unit]:
    """Return the units to measure, the longest first."""
    last, all_of_them = options.checkpoints[-1], sorted(options.checkpoints, reverse=True)
    return [
        *(Unit(seed, last, "adamw") for seed in options.seeds if options.adamw),
        *(Unit(seed, checkpoint, "sgd") for checkpoint in all_of_them for seed in options.seeds),
    ]


def _measured(options: Options, units: Sequence[Unit]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each unit as soon as it is finished; ``options.nodes`` processes work at a time."""
    if min(options.nodes, len(units)) <= 1:
        for unit in units:
            yield measure(options, unit)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.nodes, context, torch.set_num_threads, (1,)) as pool:
        for done in as_completed([pool.submit(measure, options, unit) for unit in units]):
            yield done.result()


def _run(options: Options, command: list[str], console: Console) -> None:
    if options.quick:
        options = replace(options, checkpoints=(QUICK_STEPS,), seeds=options.seeds[:1], steps=2, looks=2, adamw=False)
    record = provenance(options.seeds[0], command)
    written = (options.output or RESULTS / "sensitivity") / "summary.json"
    config = {
        key: value
        for key, value in asdict(options).items()
        if key not in ("data_dir", "markdown", "nodes", "output", "resume", "seeds")
    }
    config = json.loads(json.dumps(config))
    there: list[dict[str, Any]] = []
    if options.resume and written.exists():
        earlier = read_json(written, ("config", "rows"))
        if earlier["config"] == config:
            there = earlier["rows"]
    finished = {Unit(row["seed"], row["checkpoint"], row["optimizer"]) for row in there}
    units = units_of(options)
    settings = {name: getattr(options, name) for name in ("steps", "batch", "lr", "repeats", "heldout", "looks")}
    settings["data"] = about(files_of("gpt"), options.data_dir)
    with progress(console) as bars:
        there_already = len(finished.intersection(units))
        bar = bars.add_task("models measured", total=len(units), completed=there_already, said="")
        for rows in _measured(options, [unit for unit in units if unit not in finished]):
            there += [row | settings | {"commit": record["commit"]} for row in rows]
            write_json(written, record | {"config": config, "rows": there})
            bars.advance(bar)
    lines = lines_of([row for row in there if Unit(row["seed"], row["checkpoint"], row["optimizer"]) in units])
    wanted = [row for line in lines for row in line.rows]
    said = [] if options.quick else claims(wanted)
    show(console, lines, TITLES, said, LAYOUT)
    whole = record | {"config": config, "claims": [claim.record() for claim in said], "rows": wanted}
    write_json(written, whole | {"rows": there})
    write_pages(written, whole, options.markdown, page, console)


if __name__ == "__main__":
    sys.exit(main())
