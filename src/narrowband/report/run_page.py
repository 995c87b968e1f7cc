"""Make a page of a recorded run: what it did in plain words, and charts of its steps and layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from narrowband.planning.advice import WORTH_IT
from narrowband.report.charts import Chart, heat, layer_bars, lines, ticks, unchecked
from narrowband.report.page import Table, check_packages, page_of
from narrowband.units import format_bytes, format_count

if TYPE_CHECKING:
    from narrowband.averaging import LayerStats
    from narrowband.report.recorder import Run

__all__ = ["run_page"]

#: The most points of a line. If there are more records, neighbours are averaged, so that pages stay small.
_POINTS = 1000

#: Number of layers that are shown one by one: those that send the most.
_LAYERS = 60

_PLAIN = "uncompressed"


def run_page(run: Run, name: str, beside: Run | None = None) -> str:
    """Make a page of a run.

    Args:
        run: read from a recorder's file.
        name: of the run.
        beside: the run of the same training without compression, if there is one.

    Returns:
        HTML, in one piece.

    Raises:
        ValueError: the run ``beside`` was compressed.
        UnsupportedError: Altair is not installed.
    """
    if beside is not None and (spec := beside.start.get("spec")) not in (None, "", "none"):
        raise ValueError(
            f"the run given to --beside must be the same training without compression, recorded with 'none'; it was "
            f"recorded with {spec!r}"
        )
    check_packages()
    layers = [
        (layer, own.spec, f"{own.numel:,}", format_bytes(own.sent_bytes), format_bytes(own.raw_bytes),
         _number(own.relative_error), _number(own.residual_norm))
        for layer, own in _last_layers(run)
    ]  # fmt: skip
    columns = ("layer", "spec", "elements", "sent", _PLAIN, "relative error", "‖residual‖")
    note = ""
    if not run.ended:
        note = "This run is still going, was stopped, or did not call recorder.close(). The page shows what there is."
    with unchecked():
        charts = list(_charts(run, beside))
    return page_of(
        name,
        charts,
        [Table("All layers, as numbers", columns, layers)] if layers else [],
        run.start,
        note=note,
        verdict=_verdict(run, beside),
        cards=list(_cards(run, beside)),
    )


# ---- words -----------------------------------------------------------------------------------------------------------


def _verdict(run: Run, beside: Run | None) -> str:
    """Summarize the run in one plain sentence."""
    sent, raw = run.mean("sent_bytes") or 0.0, run.mean("raw_bytes") or 0.0
    seconds, waiting = run.mean("seconds") or 0.0, run.mean("waiting_s")
    if not sent:
        said = "Nothing was sent in these steps"
    else:
        said = f"A step sent {format_bytes(sent)} instead of {format_bytes(raw)}, {raw / sent:.3g} times less"
    if seconds:
        said += f", and took {_seconds(seconds)}"
    if seconds and waiting is not None:
        said += f", of which it waited {_seconds(waiting)} ({waiting / seconds:.0%}) for averages"
    if beside is not None and (plain := beside.mean("seconds")) and seconds:
        said += f". Without compression a step took {_seconds(plain)}, {_judged(seconds / plain)}"
        ends = [max(_losses(each), default=0) for each in (run, beside)]
        last = min(ends)
        if (own := _last_loss(run, last)) is not None and (other := _last_loss(beside, last)) is not None and other > 0:
            side = "above" if own >= other else "below"
            steps = f"the last steps{f' up to {last:,}, which both runs have,' if last < max(ends) else ''}"
            said += f". The loss of {steps} is {abs(own / other - 1):.1%} {side} that without compression"
    return " ".join((*_divergences(run, beside), f"{said}."))


def _judged(change: float) -> str:
    """Judge a ratio of step times, with and without compression, by the threshold of ``narrowband plan``."""
    if change <= 1 - WORTH_IT:
        return f"so compression made steps {1 / change:.2f} times as fast"
    if change < 1 + WORTH_IT:
        return f"which is the same to {WORTH_IT:.0%}: on this link, do not compress"
    return f"so compression made steps {change:.2f} times as slow: on this link, do not compress"


def _divergences(run: Run, beside: Run | None) -> Iterator[str]:
    """Say which runs diverged. This comes first, because bytes and seconds of a diverged run mean nothing."""
    for who, each in (("This run", run), ("The run without compression", beside)):
        if each is not None and (step := _diverged_at(each)) is not None:
            yield f"{who} diverged: its loss is no longer finite since step {step:,}."


def _losses(run: Run) -> dict[int, float]:
    return {step: values["loss"] for step, values in run.steps.items() if "loss" in values}


def _diverged_at(run: Run) -> int | None:
    """Return the step from which on no loss is finite; None if the last loss is finite."""
    found = None
    for step, loss in reversed(_losses(run).items()):
        if math.isfinite(loss):
            break
        found = step
    return found


def _last_loss(run: Run, last: int) -> float | None:
    """Return the mean loss over the last tenth of the records up to a step; None if the run diverged."""
    losses = [loss for step, loss in _losses(run).items() if step <= last]
    own = [loss for loss in losses[-max(1, len(losses) // 10) :] if math.isfinite(loss)]
    return math.fsum(own) / len(own) if own and _diverged_at(run) is None else None


def _cards(run: Run, beside: Run | None) -> Iterator[tuple[str, str]]:
    steps = list(run.steps)
    yield "steps", format_count(steps[-1]) if steps[0] == 1 else f"{steps[0]} to {steps[-1]}"
    sent, raw = run.mean("sent_bytes"), run.mean("raw_bytes")
    if sent and raw:
        yield "fewer bytes", f"{raw / sent:.3g} ×"
    waiting = run.mean("waiting_s")
    if waiting is not None:
        yield "waiting, per step", _seconds(waiting)
    error = [values["relative_error"] for values in run.steps.values() if "relative_error" in values]
    if error:
        yield "relative error", _number(error[-1])
    for what, each in (("last loss", run), (f"last loss, {_PLAIN}", beside)):
        if each is not None and (losses := list(_losses(each).values())):
            yield what, _number(losses[-1]) if math.isfinite(losses[-1]) else "diverged"
    skipped = sum(values.get("skipped", 0.0) for values in run.steps.values())
    yield "skipped steps", format_count(round(skipped))


def _seconds(x: float) -> str:
    return f"{x:.2f} s" if x >= 1 else f"{1000 * x:.3g} ms"


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x:.3g}" if math.isfinite(x) else "not finite"


def _last_layers(run: Run) -> list[tuple[str, LayerStats]]:
    if not run.layers:
        return []
    last = run.layers[max(run.layers)]
    return sorted(last.items(), key=lambda item: -item[1].sent_bytes)


# ---- charts ----------------------------------------------------------------------------------------------------------


def _charts(run: Run, beside: Run | None) -> Iterator[Chart]:
    yield from _loss(run, beside)
    yield from _step_time(run, beside)
    for make in (_sent, _error, _layer_bytes, _policies, _residuals, _skipped):
        yield from make(run)


def _loss(run: Run, beside: Run | None) -> Iterator[Chart]:
    rows = _points(run, {"loss": "this run"})
    if beside is not None:
        rows += _points(beside, {"loss": _PLAIN})
    if rows:
        says = " ".join(("As the training loop gave it.", *_divergences(run, beside)))
        yield Chart("loss", "Loss", says, lines(rows, "loss"))
    if rows and beside is not None:
        clocks = {"this run": _clock(run), _PLAIN: _clock(beside)}
        for row in rows:
            row["step"] = clocks[row["what"]][row["step"]]
        says = "The same over the time of training: what counts where steps are faster and learn less each."
        yield Chart("clock", "Loss over time", says, lines(rows, "loss", over="seconds"))


def _clock(run: Run) -> dict[int, float]:
    """Return step → seconds since the first record."""
    found, seconds, before = {}, 0.0, None
    for step, values in run.steps.items():
        seconds += values.get("seconds", 0.0) * (step - (step if before is None else before))
        found[step], before = seconds, step
    return found


def _step_time(run: Run, beside: Run | None) -> Iterator[Chart]:
    rows = _points(run, {"seconds": "whole step", "waiting_s": "waiting for averages"})
    if beside is not None:
        rows += _points(beside, {"seconds": f"whole step, {_PLAIN}"})
    for row in rows:
        row["value"] *= 1000
    if rows:
        says = "What a step took, and how long training waited for averages when backward's own work was done."
        yield Chart("time", "Step time", says, lines(rows, "milliseconds"))
    parts = {"encode_s": "encode", "wire_s": "on the wire", "decode_s": "decode", "decide_s": "policy"}
    rows = _points(run, {name: said for name, said in parts.items() if (run.mean(name) or 0.0) > 0})
    for row in rows:
        row["value"] *= 1000
    if rows:
        says = "On the engine's thread, most of it while backward still computes; the parts overlap with each other."
        yield Chart("parts", "What compression does in a step", says, lines(rows, "milliseconds"))


def _sent(run: Run) -> Iterator[Chart]:
    rows = _points(run, {"sent_bytes": "sent", "raw_bytes": _PLAIN})
    rows = [row | {"value": row["value"] / 1e6} for row in rows if row["value"] > 0]
    if rows:
        says = "By this rank, per step; uncompressed: what a ring all-reduce of the same gradients would send."
        yield Chart("sent", "Bytes", says, lines(rows, "megabytes", log=True))


def _error(run: Run) -> Iterator[Chart]:
    rows = _points(run, {"relative_error": "all layers"})
    if rows:
        says = (
            "‖p − C(p)‖² / ‖p‖² of what was encoded, p, with the residual where there is feedback; measured at times."
        )
        yield Chart("error", "Relative error", says, lines(rows, "share of the squared norm"))


def _layer_bytes(run: Run) -> Iterator[Chart]:
    layers = _last_layers(run)[:_LAYERS]
    if not layers:
        return
    rows = [
        {"layer": name, "sent": own.sent_bytes / 1e3, "less": own.raw_bytes / own.sent_bytes if own.sent_bytes else 1.0,
         "spec": own.spec, "error": own.relative_error}
        for name, own in layers
    ]  # fmt: skip
    says = f"Of the last record{_most(run)}."
    yield Chart("layers", "Bytes by layer", says, layer_bars(rows, "sent", "kilobytes per step"))
    if any(row["error"] is not None for row in rows):
        yield Chart("errors", "Relative error by layer", says, layer_bars(rows, "error", "relative error"))


def _policies(run: Run) -> Iterator[Chart]:
    rows = _over_time(run, lambda own: own.spec)
    if len({row["value"] for row in rows}) < 2:
        return
    says = f"The spec of each layer{_most(run)}."
    yield Chart("policy", "What was chosen when", says, heat(rows, "spec", names=True))


def _residuals(run: Run) -> Iterator[Chart]:
    rows = [row for row in _over_time(run, lambda own: own.residual_norm) if math.isfinite(row["value"])]
    if rows:
        says = f"Norms of what this rank has not sent yet{_most(run)}. A layer that grows and grows keeps too little."
        yield Chart("residuals", "Residuals", says, heat(rows, "‖residual‖", names=False))


def _skipped(run: Run) -> Iterator[Chart]:
    rows = [{"step": step, "steps": values["skipped"]} for step, values in run.steps.items() if values.get("skipped")]
    if rows:
        says = "Steps in which a gradient was inf or NaN on some rank. They changed no residual."
        yield Chart("skipped", "Skipped steps", says, ticks(rows))


def _points(run: Run, names: Mapping[str, str], **more: str) -> list[dict[str, Any]]:
    """Return rows of step, what (by the names given) and value; if there are many, means over neighbours."""
    at = [step for step, values in run.steps.items() if any(name in values for name in names)]
    size = math.ceil(len(at) / _POINTS) or 1
    rows = []
    for first in range(0, len(at), size):
        together = [run.steps[step] for step in at[first : first + size]]
        for name, said in names.items():
            own = [values[name] for values in together if math.isfinite(values.get(name, math.nan))]
            if own:
                rows.append({"step": at[first], "what": said, "value": math.fsum(own) / len(own), **more})
    return rows


def _most(run: Run) -> str:
    count = len(_last_layers(run))
    return f", the {_LAYERS} of {count} layers that send the most" if count > _LAYERS else ""


def _over_time(run: Run, of: Callable[[LayerStats], Any]) -> list[dict[str, Any]]:
    """Return rows of layer, step and value, at no more than 60 steps."""
    shown = {name for name, _ in _last_layers(run)[:_LAYERS]}
    steps = sorted(run.layers)
    steps = steps[:: math.ceil(len(steps) / 60) or 1]
    return [
        {"layer": name, "step": step, "value": of(own)}
        for step in steps
        for name, own in run.layers[step].items()
        if name in shown and of(own) is not None
    ]
