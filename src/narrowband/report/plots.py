"""Draw pictures with matplotlib (the ``plots`` extra), without a display."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.errors import UnsupportedError, need, pip_install
from narrowband.units import format_rate

if TYPE_CHECKING:
    from narrowband.adapt import Plan

__all__ = ["can_plot", "check_picture", "loss_curves", "plan_profile", "range_picture"]


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_picture(path: Path | None) -> None:
    """Check that a picture can be drawn, before minutes of work are lost because it cannot.

    Args:
        path: of the picture; None is accepted.

    Raises:
        ValueError: the extension is not one of matplotlib's formats.
        UnsupportedError: matplotlib is not installed, or not in a supported version.

    Example:
        >>> check_picture(None)
    """
    if path is None:
        return
    if not can_plot():
        raise UnsupportedError(f"pictures need matplotlib: {pip_install('plots')}")
    need("matplotlib", "3.8", "3", extra="plots")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"{path} cannot be drawn: give a name that ends in .png, .svg or .pdf")


def loss_curves(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the held-out loss of each row of the demo over steps and over bytes sent per rank, as a PNG.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    if not can_plot():
        raise UnsupportedError(f"pictures need matplotlib: {pip_install('plots')}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    over_steps, over_bytes = figure.subplots(1, 2, sharey=True)
    for row in rows:
        steps = [step for step, _ in row["curve"]]
        losses = [float("nan") if loss is None else loss for _, loss in row["curve"]]
        over_steps.plot(steps, losses, marker=".", label=row["codec"])
        over_bytes.plot([step * row["sent_bytes_per_step"] / 1e6 for step in steps], losses, marker=".")
    over_steps.set(xlabel="steps", ylabel="held-out loss (nats per byte)")
    sent = any(row["sent_bytes_per_step"] for row in rows)  # one rank sends nothing
    over_bytes.set(xlabel="MB sent per rank", xscale="log" if sent else "linear")
    for axes in (over_steps, over_bytes):
        axes.grid(alpha=0.3)
    over_steps.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def plan_profile(plan: Plan, path: Path) -> None:
    """Draw how many times less each layer of a plan sends, over its size: bars in the model's order, as a PNG.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    if not can_plot():
        raise UnsupportedError(f"pictures need matplotlib: {pip_install('plots')}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 0.3 * len(plan.layers)), 4.2), layout="constrained")
    axes = figure.subplots()
    at = range(len(plan.layers))
    ratios = [plan.layer_ratio(layer) for layer in plan.layers]
    axes.bar(at, ratios, width=0.6, color="tab:blue", label="plan")
    if plan.reference_nbytes:
        axes.axhline(plan.dense_nbytes / plan.reference_nbytes, color="tab:red", label=f"uniform {plan.reference}")
    axes.set(ylabel="times fewer bytes", xlabel="layers, in the model's order", yscale="log")
    axes.set_xticks(list(at), [layer.name for layer in plan.layers], rotation=90, fontsize=6)
    sizes = axes.twinx()
    sizes.bar(at, [layer.numel for layer in plan.layers], width=0.9, color="gray", alpha=0.25)
    sizes.set(ylabel="elements", yscale="log")
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def range_picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw which option to choose by number of machines and link, with a colour for each option, as a PNG.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    if not can_plot():
        raise UnsupportedError(f"pictures need matplotlib: {pip_install('plots')}")
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    nodes = sorted({row["nodes"] for row in rows})
    rates = sorted({row["rate_bits_per_s"] for row in rows})
    names = list(dict.fromkeys(_choice(row) for row in sorted(rows, key=lambda row: row["compress"])))
    cells = {(row["nodes"], row["rate_bits_per_s"]): row for row in rows}
    grid = [[names.index(_choice(cells[count, rate])) for rate in rates] for count in nodes]
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["tab20"]
    axes.imshow(grid, origin="lower", aspect="auto", cmap=colours, vmin=-0.5, vmax=19.5)
    for at, count in enumerate(nodes):
        for column, rate in enumerate(rates):
            if cells[count, rate]["compress"]:
                axes.text(
                    column, at, f"{cells[count, rate]['times_as_fast']:.1f}×", ha="center", va="center", fontsize=7
                )
    axes.set_xticks(range(len(rates)), [format_rate(rate) for rate in rates], rotation=30, ha="right")
    axes.set_yticks(range(len(nodes)), [f"{count:,}" for count in nodes])
    axes.set(xlabel="link of a machine", ylabel="machines")
    patches = [Patch(color=colours(at / 20 + 1e-3), label=name) for at, name in enumerate(names)]
    axes.legend(handles=patches, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _choice(row: dict[str, Any]) -> str:
    return "do not compress" if row["spec"] is None else row["name"]
