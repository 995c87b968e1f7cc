"""Pictures, by matplotlib (the ``plots`` extra), drawn without a display."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowband.errors import UnsupportedError

__all__ = ["can_plot", "loss_curves"]


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def loss_curves(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out loss of each row of the demo over steps and over bytes sent per rank, as a PNG.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    if not can_plot():
        raise UnsupportedError("pictures need matplotlib: pip install 'narrowband[plots]'")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    over_steps, over_bytes = figure.subplots(1, 2, sharey=True)
    for row in rows:
        steps = [step for step, _ in row["curve"]]
        losses = [float("nan") if loss is None else loss for _, loss in row["curve"]]
        over_steps.plot(steps, losses, marker=".", label=row["codec"])
        over_bytes.plot([step * row["sent_bytes_per_step"] / 1e6 for step in steps], losses, marker=".")
    over_steps.set(xlabel="steps", ylabel="held-out loss (nats per byte)")
    over_bytes.set(xlabel="MB sent per rank", xscale="log")
    for axes in (over_steps, over_bytes):
        axes.grid(alpha=0.3)
    over_steps.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
