"""``narrowband lab``."""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from narrowband.cli.exits import check_output
from narrowband.cli.records import written_first

if TYPE_CHECKING:
    from rich.console import Console

    from narrowband.lab import LabReport

__all__ = ["Lab"]

#: The exit code after a time-out.
_OUT_OF_TIME = 124


@dataclass(frozen=True)
class Lab:
    """Run a command once per rank, each rank behind an emulated link of its own, or several behind one.

    What follows ``--`` is started once per rank with torchrun's environment variables, in a network namespace whose
    only card is shaped in both directions, on its own share of this machine's cores. So an unchanged training script
    runs as if on that many machines. The kernel's byte counts are printed at the end. Linux; root, or unprivileged user
    namespaces (see ``narrowband doctor``).

    Examples:
      narrowband lab --nodes 4 --rate 200mbit -- python examples/train_ddp.py
      narrowband lab --nodes 2 --rate 1gbit --delay 5ms --loss 0.1% -- python examples/train_ddp.py --steps 20
      narrowband lab --nodes 2 --per-node 4 --rate 1gbit -- python examples/train_ddp.py
      narrowband lab --nodes 2 --up 20mbit,50mbit --down 100mbit -- python examples/train_ddp.py
      narrowband lab --rate none --json counts.json -- python examples/train_ddp.py
    """

    nodes: int = 4
    """Number of machines, each behind a link of its own."""
    per_node: int = 1
    """Ranks on each machine: they share its link, and reach each other without it."""
    rate: str = "200mbit"
    """Rate of every link in both directions: 200mbit, 1gbit, …; of each machine's: 200mbit,1gbit; none leaves the links
    unshaped."""
    up: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Rate at which machines send, if they receive at another one: one for all, or one for each: 20mbit,50mbit."""
    down: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Rate at which they receive."""
    delay: Annotated[str | None, tyro.conf.arg(metavar="TIME")] = None
    """One-way delay between two ranks: 5ms, …"""
    loss: Annotated[str | None, tyro.conf.arg(metavar="SHARE")] = None
    """Share of packets lost: 0.1%, …"""
    timeout: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Seconds after which all ranks are ended, with exit code 124."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also write the counts to this file, and what each rank tells: a JSON value in NARROWBAND_TOLD/RANK.json."""

    def unused(self) -> dict[str, str]:
        """Return why some options say nothing beside the others."""
        if self.up is None or self.down is None:
            return {}
        return {"rate": "is that of both directions, and --up and --down give each its own: leave it out"}

    def __call__(self, console: Console, behind: list[str] | None) -> int:
        from narrowband.lab import LabConfig, run
        from narrowband.report.record import provenance, write_json

        if not behind:
            raise ValueError(
                "no command to run: give it after '--', as in narrowband lab --nodes 4 --rate 200mbit -- python "
                "train.py"
            )
        check_output(self.json, reads=behind)
        config = LabConfig(
            nodes=self.nodes,
            per_node=self.per_node,
            up=self.up,
            down=self.down,
            rate=None if self.rate == "none" else self.rate,
            delay=self.delay,
            loss=self.loss,
            timeout_s=self.timeout,
        )
        if self.json is None:  # reports are shown on Ctrl-C, too
            return run(config, behind, on_end=functools.partial(self._show, console=console)).exit_code
        with tempfile.TemporaryDirectory(prefix="narrowband-told-") as folder:

            def keep(report: LabReport) -> None:
                told = [_told(Path(folder) / f"{rank}.json") for rank in range(config.ranks)]
                record = provenance() | {"config": asdict(config)} | report.to_dict() | {"told": told}
                assert self.json is not None
                with written_first(functools.partial(write_json, self.json, record)) as written:
                    self._show(report, console)
                    if written:
                        console.print(f"written: {self.json}", style="dim", markup=False, highlight=False)

            return run(config, behind, {"NARROWBAND_TOLD": folder}, on_end=keep).exit_code

    def _show(self, report: LabReport, console: Console) -> None:
        from narrowband.report.tables import lab_table

        console.print(lab_table(report))
        if self.timeout is not None and report.seconds >= self.timeout and report.exit_code == _OUT_OF_TIME:
            console.print(f"The ranks were ended after --timeout {self.timeout:g} s.", highlight=False)


def _told(path: Path) -> object:
    """Read the JSON value that a rank has written; None if there is none, or it is not JSON.

    NaN and inf in it, which Python writes but JSON lacks, also become None.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError):
        return None
