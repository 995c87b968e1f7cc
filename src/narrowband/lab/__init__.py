"""Run ranks behind emulated links on one machine.

:func:`run` starts a command once per rank, each rank in a network namespace of its own, joined to the others by one
switch through a link that is shaped in both directions by the kernel. What a rank sees is a machine with one network
card and torchrun's environment variables, so an unchanged training script runs as if on N machines.

    >>> from narrowband.lab import LabConfig, run
    >>> report = run(LabConfig(nodes=4, rate="200mbit"), ["python", "train.py"])  # doctest: +SKIP
    >>> report.exit_code, report.ranks[0].sent_bytes  # doctest: +SKIP

``config.py`` describes a lab. ``runner.py`` starts a lab and waits for it. ``supervisor.py`` is the process that owns
the namespaces: only it talks to the kernel, and everything in the lab ends when it ends.
"""

from __future__ import annotations

from narrowband.lab.config import LabConfig, parse_delay, parse_loss, parse_rate
from narrowband.lab.runner import LabReport, RankReport, requirements, run

__all__ = [
    "LabConfig",
    "LabReport",
    "RankReport",
    "parse_delay",
    "parse_loss",
    "parse_rate",
    "requirements",
    "run",
]
