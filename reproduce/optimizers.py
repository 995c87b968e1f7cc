"""Which codec goes with which optimizer? A small GPT, trained by four optimizers, with and without compression.

The optimizer decides what a codec's error does. AdamW divides every element by a running size of its gradient. SGD adds
up what arrives. Muon makes all directions of a matrix equally large. LoRA trains thin matrices only. No paper is
reproduced here: rows answer the question for one small model, on two ranks of this machine.

Method:

* The model learns bytes of tiny shakespeare. With LoRA, adapters learn these bytes, on a base that was trained briefly
  on bytes of WikiText-2.
* Every optimizer has its usual settings (see :data:`~reproduce.optimizers_ranks.ABOUT`). Its learning rate is chosen
  once from a few (:data:`RATES`), without compression and with a seed that no comparison uses; all codecs get the same
  rate.
* A codec is judged by how far its held-out loss is above that without compression (:mod:`reproduce.optimizers_page`).

Run ``python -m reproduce.optimizers`` (an hour of one core), ``--size medium`` (hours), ``--quick``
(seconds), ``--help``.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from narrowband.bench.ranks import Loopback, run_ranks
from narrowband.report.plots import can_plot
from narrowband.report.record import commit, provenance, write_json
from narrowband.units import format_seconds
from reproduce.command import RESULTS, command_line, progress
from reproduce.data import about, locate
from reproduce.html import write_pages
from reproduce.kept import Kept
from reproduce.optimizers_page import LAYOUT, LEGEND, conclusion, draw, lines, page, warning
from reproduce.optimizers_ranks import DENSE, NAMES, OF_SGD, SPECS, Optimizer, Row
from reproduce.report import pictures_of, ran_on, table
from reproduce.row import key

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["RATES", "Options", "chosen_rates", "compared", "main", "run", "tuning"]

_MODULE = "optimizers"

#: Learning rates that are tried without compression.
RATES: dict[str, tuple[float, ...]] = {
    "adamw": (0.001, 0.003, 0.01, 0.03),
    "sgd": (0.1, 0.3, 1.0),
    "muon": (0.01, 0.02, 0.04, 0.08, 0.16),
    "lora": (0.003, 0.01, 0.03),
}

#: The seed with which learning rates are chosen; gaps are measured with other seeds.
_TUNING_SEED = 1000

#: Seeds where the command names none. With AdamW, gaps differ most between seeds.
_SEEDS = (0, 1, 2)
_SEEDS_OF: dict[str, tuple[int, ...]] = {"adamw": tuple(range(8))}

SIZES: dict[str, dict[str, int]] = {
    "small": {},
    "medium": {"dim": 192, "blocks": 4, "heads": 6, "sequence": 128, "steps": 1000, "base_steps": 1000},
    "tiny": {
        "dim": 16,
        "blocks": 1,
        "heads": 2,
        "sequence": 16,
        "batch": 8,
        "steps": 6,
        "base_steps": 4,
        "limit": 20_000,
    },
}


@dataclass(frozen=True)
class Options:
    """Which codec goes with AdamW, SGD, Muon and LoRA? Trains a small GPT with each, without and with compression.

    Rows that are finished are kept, each as soon as it is done: after Ctrl-C, the same command goes on from there.
    """

    optimizers: tuple[Optimizer, ...] = get_args(Optimizer)
    """Train with only these optimizers."""
    specs: tuple[str, ...] = ()
    """Train with only these specs, and with none; all specs when left out."""
    seeds: tuple[int, ...] = ()
    """Seeds; each codec is compared with none of the same seed. Left out: 0 to 7 with AdamW, 0 to 2 with others."""
    size: Literal["small", "medium"] = "small"
    """Size of model and training: small takes an hour of one core, medium hours."""
    nodes: int = 2
    """Ranks on this machine."""
    data_dir: Path | None = None
    """Folder with the data; else NARROWBAND_DATA names it; else sets are downloaded."""
    output: Path | None = None
    """Directory of the results; reproduce/results/optimizers when left out."""
    resume: bool = True
    """Take rows that an earlier run finished."""
    recorded: bool = False
    """Train nothing: tables of the rows that are finished."""
    quick: bool = False
    """A tiny model, six steps, two codecs, one learning rate: to see in seconds that everything works."""
    markdown: Path | None = None
    """Also write the page for the documentation to this file, with pictures beside it."""


# ---- rows ------------------------------------------------------------------------------------------------------------


def tuning(options: Options) -> list[Row]:
    """Return rows without compression, one for every learning rate to try."""
    size = SIZES["tiny" if options.quick else options.size]
    return [
        Row(optimizer, DENSE, lr, seed=_TUNING_SEED, **size)
        for optimizer in options.optimizers
        for lr in RATES[optimizer][: 1 if options.quick else None]
    ]


def chosen_rates(results: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return for each optimizer the learning rate with the lowest held-out loss.

    Raises:
        ValueError: an optimizer's training diverged with all learning rates.
    """
    best: dict[str, tuple[float, float]] = {}
    for result in results:
        loss = math.inf if result["loss"] is None else result["loss"]
        best[result["optimizer"]] = min(best.get(result["optimizer"], (math.inf, math.inf)), (loss, result["lr"]))
    for optimizer, (loss, _) in best.items():
        if not math.isfinite(loss):
            raise ValueError(f"{optimizer}: training diverged with every learning rate of {RATES[optimizer]}")
    return {optimizer: lr for optimizer, (_, lr) in best.items()}


def compared(options: Options, rates: dict[str, float]) -> list[Row]:
    """Return the rows that are compared, seed by seed.

    Raises:
        ValueError: the options name a spec that does not exist here.
    """
    there = (*SPECS, *OF_SGD)
    for spec in options.specs:
        if spec not in there:
            raise ValueError(f"{_MODULE} has no spec {spec!r}; there are: {'; '.join(there)}")
    size = SIZES["tiny" if options.quick else options.size]
    wanted = options.specs or (("fp16", "topk:density=0.01+ef") if options.quick else there)
    seeds = {
        optimizer: options.seeds or (_SEEDS if options.quick else _SEEDS_OF.get(optimizer, _SEEDS))
        for optimizer in options.optimizers
    }
    return [
        Row(optimizer, spec, rates[optimizer], seed=seed, **size)
        for seed in dict.fromkeys(seed for own in seeds.values() for seed in own)
        for optimizer in options.optimizers
        if optimizer in rates and seed in seeds[optimizer]
        for spec in ((*SPECS, *OF_SGD) if optimizer == "sgd" else SPECS)
        if spec == DENSE or spec in wanted
    ]


def run(
    rows: Sequence[Row],
    directory: Path,
    *,
    nodes: int,
    data_dir: Path | None = None,
    resume: bool = True,
    recorded: bool = False,
    on_event: Callable[[dict[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Train rows one after the other and return their results; see :func:`reproduce.optimizers_ranks.train`.

    Args:
        rows: trained in this order.
        directory: finished rows are kept in its ``rows/``.
        nodes: number of ranks on this machine.
        data_dir: the data folder, see :mod:`reproduce.data`.
        resume: reuse rows that an earlier run finished.
        recorded: return only rows that an earlier run finished, and train nothing.
        on_event: called with ``{"event": "step", "row": number, "step": …, "of": …, "loss": …}`` and
            ``{"event": "row", "row": …, "result": …}``.

    Raises:
        FileNotFoundError: data is missing.
        RankError: a rank ended early.
    """
    digest = {kind: _digest(kind, data_dir) for kind in {row.optimizer == "lora" for row in rows}}
    files = [directory / "rows" / f"{key(row, nodes, digest[row.optimizer == 'lora'])}.json" for row in rows]
    kept = Kept(files, ("optimizer", "spec", "loss"), resume=resume or recorded, on_event=on_event)
    missing = [[number, asdict(rows[number])] for number in kept.missing]
    if missing and not recorded:
        config = {"data_dir": None if data_dir is None else str(data_dir), "commit": commit(), "rows": missing}
        run_ranks("reproduce.optimizers_ranks", config, Loopback(nodes), kept.note)
    return [kept.found[number] for number in sorted(kept.found)]


def _files(with_base: bool) -> tuple[str, ...]:
    """Return the files that rows read; LoRA's base reads more."""
    return ("tinyshakespeare/input.txt", *(("wikitext2/validation.parquet", "wikitext2/test.parquet") * with_base))


def _digest(with_base: bool, data_dir: Path | None) -> str:
    """Return the digest of the files that a row reads."""
    digest = hashlib.sha256()
    for name in _files(with_base):
        digest.update(locate(name, data_dir).read_bytes())
    return digest.hexdigest()


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line(
        _MODULE,
        Options,
        _run,
        argv,
        stopped="Rows that were finished are kept: the same command goes on from there.",
    )


def _run(options: Options, command: list[str], console: Console) -> None:
    if not options.optimizers:
        raise ValueError("give at least one optimizer, as in --optimizers adamw")
    output = options.output or RESULTS / _MODULE
    compared(options, {})  # raises if options are wrong, before anything is trained
    record = provenance((options.seeds or _SEEDS)[0], command)

    def train(rows: Sequence[Row], what: str) -> list[dict[str, Any]]:
        with progress(console) as bars:
            bar = bars.add_task(what, total=len(rows), said="")

            def note(event: dict[str, Any]) -> None:
                if event["event"] == "step":
                    row = rows[event["row"]]
                    said = f"{row.optimizer} {row.spec}: step {event['step']}, loss {event['loss']:.2f}"
                    bars.update(bar, said=said)
                elif event["event"] == "row":
                    told = event["result"]
                    loss = "diverged" if told["loss"] is None else f"{told['loss']:.4f}"
                    bars.update(bar, advance=1)
                    bars.console.print(
                        f"{told['optimizer']} {told['spec']}, learning rate {told['lr']:g}, seed {told['seed']}: "
                        f"{loss}, {format_seconds(told['wall_s'])}",
                        markup=False,
                        highlight=False,
                    )

            return run(
                rows, output, nodes=options.nodes, data_dir=options.data_dir, resume=options.resume,
                recorded=options.recorded, on_event=note,
            )  # fmt: skip

    tuned = train(tuning(options), "learning rates")
    results = train(compared(options, chosen_rates(tuned)), "codecs")
    found = lines(results)
    if not found:
        raise ValueError(f"no row is finished in {output}: leave --recorded out to train them")
    for drawn in table(found, NAMES, LAYOUT):
        console.print(drawn)
    console.print(LEGEND, style="dim", highlight=False, markup=False)
    for sentence in (*conclusion(found), *warning(found)):
        console.print(sentence, highlight=False, markup=False)
    commits = sorted({str(row["commit"]) for row in (*tuned, *results)})
    written = output / "summary.json"
    data = about(_files(any(row["optimizer"] == "lora" for row in results)), options.data_dir)
    record |= {
        "data": data,
        "commits": commits,
        "cpus": ran_on((*tuned, *results), written),
        "tuning": tuned,
        "lines": [asdict(line) for line in found],
        "rows": results,
    }
    write_json(written, record)
    if can_plot():
        draw(found, output if options.markdown is None else pictures_of(options.markdown))
    write_pages(written, record, options.markdown, page, console)


if __name__ == "__main__":
    sys.exit(main())
