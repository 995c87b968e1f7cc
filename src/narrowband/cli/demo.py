"""``narrowband demo``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from narrowband.bench import demo
from narrowband.cli.exits import DONE, check_folder
from narrowband.errors import pip_install
from narrowband.units import format_loss, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["Demo"]


@dataclass(frozen=True)
class Demo:
    """Train a small GPT on real text with and without compression, and say whether it was worth it.

    Four ranks on this machine train a byte-level GPT on the source of Python's standard library: fp32 and fp16
    first, then each codec, from the same parameters, on the same batches. At the end stand a table, estimates for
    slow and fast links, a verdict in plain words, and, in runs/demo, summary.json and a picture of the loss curves.
    Bytes and losses hardly depend on the machine, but times do: the verdict says what it rests on. Nothing is
    downloaded; no rights are needed.

    Examples:
      narrowband demo
      narrowband demo --resume
      narrowband demo --codecs topk:density=0.001+ef sign+ef --steps 400 --out runs/longer
    """

    config: Annotated[demo.Config, tyro.conf.arg(name="")] = field(default_factory=demo.Config)
    out: Path = Path("runs/demo")
    """Directory of the results."""
    resume: bool = False
    """Keep rows that an earlier run with the same options finished; each is kept as soon as it is done."""

    def __call__(self, console: Console) -> int:
        from rich.panel import Panel

        from narrowband.report import plots
        from narrowband.report.record import provenance, write_json
        from narrowband.report.tables import RELATIVE_ERROR, demo_table, estimate_table

        check_folder(self.out)
        if self.config.nodes == 1:
            console.print("One rank sends nothing: what follows shows what codecs cost, and not what they save.")
        written = [self.out / "summary.json"]
        try:
            with _progress(console) as progress:
                show = _Show(progress, self.config)
                summary = demo.run(self.config, self.out, resume=self.resume, on_event=show)
                write_json(written[0], provenance(self.config.seed) | summary)  # before printing, which may fail
        except KeyboardInterrupt:
            console.print("Rows that were finished are kept: the same command with --resume goes on from there.")
            raise
        console.print(demo_table(summary["rows"]))
        console.print(RELATIVE_ERROR, style="dim", markup=False, highlight=False)
        if summary["estimates"]:
            console.print()
            console.print(estimate_table(summary["estimates"], summary["estimate"]))
            console.print(
                f"Estimates for machines as fast as one rank here (compute: {format_seconds(summary['compute_s'])}, "
                "measured), nothing overlapped, no latency.",
                style="dim",
                highlight=False,
            )
        console.print(Panel(summary["verdict"], title="Verdict", title_align="left"), highlight=False, markup=False)
        if plots.can_plot():
            written.append(self.out / "loss.png")
            plots.loss_curves(summary["rows"], written[1])
        else:
            console.print(
                f"No picture: it needs matplotlib, {pip_install('plots')}",
                style="yellow",
                markup=False,
                highlight=False,
            )
        console.print(f"written: {', '.join(map(str, written))}", style="dim", markup=False, highlight=False)
        return DONE


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
    )


class _Show:
    """A bar for the work before the first row, and one per row, which the events of the ranks update."""

    def __init__(self, progress: Progress, config: demo.Config) -> None:
        self._progress = progress
        self._steps = config.steps
        self._setup: TaskID | None = None
        self._bars = {
            spec: progress.add_task(spec, total=config.steps, start=False, loss="") for spec in config.specs()
        }

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "setup":
            self._end_setup()
            self._setup = self._progress.add_task(event["what"], total=None, loss="")
            return
        bar = self._bars[event["codec"]]
        self._progress.start_task(bar)
        if event["event"] == "step":
            self._end_setup()
            self._progress.update(bar, completed=event["step"], loss=f"loss {format_loss(event['loss'], 2)}")
        else:
            loss = event["row"]["heldout_loss"]
            self._progress.update(bar, completed=self._steps, loss=f"held-out {format_loss(loss)}")
            self._progress.stop_task(bar)

    def _end_setup(self) -> None:
        if self._setup is not None:
            self._progress.remove_task(self._setup)
            self._setup = None
