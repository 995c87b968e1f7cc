"""``narrowband report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from narrowband.cli.exits import DONE, check_output

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Report"]

_REMEDY = "give the file of an nb.Recorder, or what a benchmark wrote with --json"


@dataclass(frozen=True)
class Report:
    """Make one HTML page of a recorded run: loss, times, bytes, errors and residuals by layer, and what policies chose.

    Three lines in a training script record a run: ``recorder = nb.Recorder(handle, "run.jsonl")`` before the loop,
    ``recorder.step(loss=loss)`` after every optimizer step, and ``recorder.close()`` at the end. The page
    needs no network and no other files. It can be made while the run goes on. Files that a benchmark wrote with --json
    work, too.

    Examples:
      narrowband report run.jsonl
      narrowband report run.jsonl --beside uncompressed.jsonl --output report.html
      narrowband report ddp-200mbit.json
    """

    run: Annotated[Path, tyro.conf.Positional]
    """File that the recorder wrote, or a benchmark (.json)."""
    beside: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The same training without compression (spec none), to be shown beside it."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE.html")] = None
    """Where the page goes; left out: beside the run, with .html."""

    def __call__(self, console: Console) -> int:
        from narrowband.files import write_text
        from narrowband.report.record import read_json
        from narrowband.report.record_page import record_page
        from narrowband.report.recorder import is_run, read_run
        from narrowband.report.run_page import run_page

        if not self.run.name:
            raise ValueError(f"{self.run} is a folder; {_REMEDY}")
        output = self.run.with_suffix(".html") if self.output is None else self.output
        check_output(output, reads=(self.run, self.beside))
        if self.run.suffix == ".json" and not is_run(self.run):
            if self.beside is not None:
                raise ValueError(
                    f"--beside compares recorded runs, but {self.run} is the record of a benchmark: leave out --beside"
                )
            page = record_page(read_json(self.run, remedy=_REMEDY), self.run.stem)
        else:
            page = run_page(read_run(self.run), self.run.stem, None if self.beside is None else read_run(self.beside))
        write_text(output, page)
        console.print(f"written: {output}", style="dim", markup=False, highlight=False)
        return DONE
