"""``narrowband plan``."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from narrowband.bench import plan
from narrowband.cli.exits import DONE, check_output
from narrowband.cli.records import written_first

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """Does compression pay: predict a step with each codec on your link, before you train.

    It measures the step of your model, and how long codecs take with its gradients, in this process. Then it simulates
    a step among your ranks. The answer may be "do not compress". Nothing is sent anywhere.

    Examples:
      narrowband plan model.py:build --link 200mbit --nodes 4
      narrowband plan model.py:build --link 20mbit/100mbit --delay 20ms --nodes 2 --optimizer sgd --json plan-rows.json
      narrowband plan gpt --link 1gbit --nodes 4 --per-node 2 --apply plan.json
      narrowband plan model.py:build --nodes 1..10000 --plot range.png
      narrowband lab --nodes 2 --rate 200mbit -- python -m narrowband.cli plan model.py:build --measure
      narrowband plan model.py:build --link 100mbit --codecs none fp16 qsgd:bits=2+ef --every 10 50
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """file.py:function, which is called with the batch size and returns a module and the tuple of its inputs; or
    deit-tiny, deit-small, gpt, resnet18; or a small model of narrowband bench memory --zoo, such as bert."""
    config: Annotated[plan.Config, tyro.conf.arg(name="")] = field(default_factory=plan.Config)
    apply: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write what is advised to this file: a plan that compress_gradients and compress_updates take."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE.png")] = None
    """For a range of machines: draw what to do for each number of machines and each link."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the rows to this file, with all that was measured, machine, versions and command."""

    def __call__(self, console: Console) -> int:
        if self.apply is not None and self.config.is_range:
            raise ValueError(
                "--apply writes the plan for one cluster, but --nodes is a range; give one number of machines"
            )
        if self.plot is not None and not self.config.is_range:
            raise ValueError("--plot draws a range of machines; give a range, such as --nodes 1..10000")
        from narrowband.report.plots import check_picture

        check_output(self.apply, self.plot, self.json, reads=(self.model,))
        check_picture(self.plot)
        with console.status("building") as status:
            report = plan.run(self.model, self.config, status.update)
        if self.config.measure and os.environ["RANK"] != "0":
            return DONE  # all ranks have the same results, and one prints them
        with written_first(lambda: self._write(report)):
            if self.config.is_range:
                self._show_range(console, report)
            else:
                self._show_one(console, report)
        if self.json is not None:
            console.print(f"written: {self.json}", style="dim", markup=False, highlight=False)
        return DONE

    def _write(self, report: plan.Report) -> None:
        from narrowband.report.record import provenance, write_json

        if self.json is not None:
            config = {"model": self.model, **asdict(self.config)}
            write_json(self.json, provenance(self.config.seed) | {"config": config, **report.record()})

    def _show_one(self, console: Console, report: plan.Report) -> None:
        from narrowband.planning import call_of
        from narrowband.report.tables import advice_legend, advice_table, pairs_table

        if report.pairs:
            console.print(pairs_table([asdict(pair) for pair in report.pairs]))
        found = report.found[0]
        network, advice = found.network, found.advice
        title = f"{self._named(report)}, {network.cluster} behind {network.link}: predicted steps"
        console.print(advice_table(found.rows(), title, console.width))
        console.print(advice_legend(console.width), style="dim", markup=False, highlight=False)
        self._note(console, report)
        console.print(advice.sentence, style="bold", markup=False, highlight=False)
        if self.apply is not None:
            found.plan().save(self.apply)
            console.print(f"written: {self.apply}", style="dim", markup=False, highlight=False)
        option, name = advice.row.option, None if self.apply is None else str(self.apply)
        if name is not None or option.spec is not None:
            line = call_of(option, network.cluster, name, advice.row.fact)
            console.print(f"In your script: {line}", markup=False, highlight=False, soft_wrap=True)

    def _show_range(self, console: Console, report: plan.Report) -> None:
        from narrowband.report.tables import RANGE, range_table

        rows = [found.summary() for found in report.found]
        console.print(range_table(rows, f"{self._named(report)}: what to do among how many machines, on which links"))
        console.print(RANGE, style="dim", markup=False, highlight=False)
        self._note(console, report)
        if self.plot is not None:
            from narrowband.report.plots import range_picture

            range_picture(rows, self.plot)
            console.print(f"drawn: {self.plot}", style="dim", markup=False, highlight=False)

    def _named(self, report: plan.Report) -> str:
        from narrowband.units import format_count

        return f"{self.model} ({format_count(report.parameters)} parameters)"

    @staticmethod
    def _note(console: Console, report: plan.Report) -> None:
        for note in report.notes:
            console.print(note, style="yellow", markup=False, highlight=False)
