"""Show a run as one HTML page that needs no network and no other files, in light and dark.

Charts are drawn by `Vega-Lite <https://vega.github.io/vega-lite/>`_ (through Altair), which makes the smallest
self-contained page of the libraries that were compared. One line chart takes 0.90 MB with Altair 5.5
(``save(…, inline=True)``), 1.27 MB with Bokeh 3.9 (``file_html(…, INLINE)``) and 4.82 MB with Plotly 7.1
(``to_html(include_plotlyjs=True)``). Charts have tooltips, and lines can be zoomed.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from narrowband.errors import UnsupportedError, need, pip_install
from narrowband.planning.advice import WORTH_IT
from narrowband.units import format_bytes, format_count

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from narrowband.averaging import LayerStats
    from narrowband.report.recorder import Run

__all__ = ["Curves", "can_make_pages", "record_page", "run_page"]

#: The packages that pages are made with: the oldest supported version, and the newest supported major version.
_PACKAGES = {"altair": ("5.5", "6"), "jinja2": ("3.1", "3"), "vl-convert-python": ("1.7", "1")}

#: The most points of a line. If there are more records, neighbours are averaged, so that pages stay small.
_POINTS = 1000

#: Number of layers that are shown one by one: those that send the most.
_LAYERS = 60

#: Height of the row of one layer, in pixels.
_ROW = 16

#: If the largest value is more than this many times the smallest, the axis is logarithmic.
_WIDE = 1000

_PLAIN = "uncompressed"


@dataclass(frozen=True)
class _Chart:
    """A chart with its text.

    Attributes:
        name: the identifier of its place on the page.
        title: above the chart.
        says: what the chart shows, below the title.
        spec: the specification for Vega-Lite.
    """

    name: str
    title: str
    says: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class Curves:
    """Values over the steps of several rows, for one chart.

    Attributes:
        title: above the chart.
        unit: of the values.
        lines: name of a row → pairs of step and value.
    """

    title: str
    unit: str
    lines: Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class _Table:
    """A table of numbers, collapsed unless it is open; its first column is text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    open: bool = False


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
    alt = _altair()
    layers = [
        (layer, own.spec, f"{own.numel:,}", format_bytes(own.sent_bytes), format_bytes(own.raw_bytes),
         _number(own.relative_error), _number(own.residual_norm))
        for layer, own in _last_layers(run)
    ]  # fmt: skip
    columns = ("layer", "spec", "elements", "sent", _PLAIN, "relative error", "‖residual‖")
    note = "" if run.ended else "This run is still going, or was stopped: the page shows what was written so far."
    with _unchecked():
        charts = [chart for make in _CHARTS for chart in make(alt, run, beside)]
    return _page(
        alt,
        name,
        charts,
        [_Table("All layers, as numbers", columns, layers)] if layers else [],
        run.start,
        note=note,
        verdict=_verdict(run, beside),
        cards=list(_cards(run, beside)),
    )


def record_page(record: Mapping[str, Any], name: str, curves: Sequence[Curves] = ()) -> str:
    """Make a page of the rows of a benchmark's record: a chart for every number, and a table.

    Args:
        record: has ``rows``, and the fields of :func:`~narrowband.report.record.provenance`.
        name: of the record.
        curves: charts to show first.

    Returns:
        HTML, in one piece.

    Raises:
        ValueError: the record has no rows.
        UnsupportedError: Altair is not installed.
    """
    rows = record.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"{name} has no rows to show: it is neither a record of a benchmark nor a run")
    alt = _altair()
    names = list(dict.fromkeys(key for row in rows for key in row))
    words = [key for key in names if any(isinstance(row.get(key), str) for row in rows)]
    numbers = [key for key in names if key not in words and _differ([row.get(key) for row in rows])]
    label = [" · ".join(str(row[key]) for key in words if _differ_at(rows, key) and row.get(key)) for row in rows]
    label = [own or str(number) for number, own in enumerate(label, 1)]
    with _unchecked():
        charts = [
            _Chart(f"curves{at}", each.title, "", _lines(alt, drawn, each.unit, log=_is_wide(drawn)))
            for at, each in enumerate(curves)
            if (drawn := _line_rows(each))
        ]
        charts += [
            _Chart(f"plane{at}", f"{_words(y)} over {_words(x)}".capitalize(), _PLANE, _dots(alt, label, rows, x, y))
            for at, (x, y) in enumerate(_PLANES)
            if x in numbers and y in numbers
        ]
        charts += [
            _Chart(f"chart{at}", _words(key), "", _bars(alt, label, [row.get(key) for row in rows], key))
            for at, key in enumerate(numbers)
        ]
    shown = [key for key in names if key not in words and any(_is_number(row.get(key)) for row in rows)]
    cells = [[own, *(_cell(row.get(key)) for key in shown)] for own, row in zip(label, rows, strict=True)]
    table = _Table("All rows", ["", *map(_words, shown)], cells, open=True)
    return _page(alt, name, charts, [table], record, note="", verdict="", cards=[])


def can_make_pages() -> bool:
    """Return whether Altair and the packages that it needs are installed, in supported versions."""
    try:
        _check_packages()
    except UnsupportedError:
        return False
    return True


def _check_packages() -> None:
    try:
        for package, (oldest, newest) in _PACKAGES.items():
            need(package, oldest, newest, extra="report")
    except ImportError as error:
        raise UnsupportedError(f"a report needs Altair, Jinja2 and vl-convert, and {error}") from error


def _altair() -> Any:
    _check_packages()
    try:
        import altair as alt
        import jinja2  # noqa: F401  a page needs all three
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"a report needs Altair, Jinja2 and vl-convert ({error}): {pip_install('report')}"
        ) from error
    return alt


def _unchecked() -> AbstractContextManager[None]:
    """Turn off Altair's check of charts against the schema of Vega-Lite, which takes many times as long as making them.
    Tests check the charts of a page instead.
    """
    from altair.utils.schemapi import debug_mode

    return debug_mode(False)


def _page(
    alt: Any,
    name: str,
    charts: Sequence[_Chart],
    tables: Sequence[_Table],
    start: Mapping[str, Any],
    *,
    note: str,
    verdict: str,
    cards: Sequence[tuple[str, str]],
) -> str:
    from jinja2 import Environment

    template = files("narrowband.report").joinpath("page.html").read_text("utf-8")
    return (
        Environment(autoescape=True)
        .from_string(template)
        .render(
            name=name,
            note=note,
            verdict=verdict,
            cards=cards,
            charts=charts,
            tables=tables,
            specs=_in_script(json.dumps({chart.name: chart.spec for chart in charts})),
            script=_in_script(_drawing_program(alt.SCHEMA_VERSION.rpartition(".")[0])),
            facts=_facts(start),
        )
    )


@functools.cache
def _drawing_program(version: str) -> str:
    """Bundle Vega, Vega-Lite of this version and Vega-Embed into one script, which takes seconds."""
    import vl_convert

    try:
        program: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    except (ValueError, RuntimeError) as error:  # both packages have supported versions, but do not fit together
        raise UnsupportedError(
            f"this Altair draws with Vega-Lite {version}, which this vl-convert does not support "
            f"({str(error).splitlines()[0]}): {pip_install('report')}"
        ) from error
    return program


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


def _facts(start: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List how the result was made."""
    machine, versions = start.get("machine", {}), start.get("versions", {})
    for what, known in (("machine", machine), ("versions", versions)):
        if not isinstance(known, Mapping):
            raise ValueError(
                f"{what} is {known!r}; expected an object. Another program wrote this record: measure again"
            )
    found = {
        "command": start.get("command"),
        "spec": start.get("spec"),
        "ranks": start.get("ranks"),
        "handle": start.get("handle"),
        "machine": f"{machine.get('cpu')}, {machine.get('usable_cores')} cores, GPU: {machine.get('gpu') or 'none'}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": start.get("commit"),
        "date": start.get("date"),
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]


def _seconds(x: float) -> str:
    return f"{x:.2f} s" if x >= 1 else f"{1000 * x:.3g} ms"


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x:.3g}" if math.isfinite(x) else "not finite"


def _in_script(code: str) -> str:
    """Escape JSON or a program for a script element."""
    return re.sub("</(script)", r"<\\/\1", code, flags=re.IGNORECASE).replace("<!--", "<\\!--")


def _last_layers(run: Run) -> list[tuple[str, LayerStats]]:
    if not run.layers:
        return []
    last = run.layers[max(run.layers)]
    return sorted(last.items(), key=lambda item: -item[1].sent_bytes)


#: Trade-offs: pairs of numbers of a row, of which less is better. Each pair makes one chart.
_PLANES = (("ratio_to_plain", "kept_bytes"), ("ratio_to_plain", "peak_bytes"), ("step_s", "sent_bytes_per_step"))
_PLANE = "Less of both is better: what is nearer to the lower left corner."


# ---- charts ----------------------------------------------------------------------------------------------------------


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


def _dots(alt: Any, labels: Sequence[str], rows: Sequence[Mapping[str, Any]], x: str, y: str) -> dict[str, Any]:
    """Draw a dot with its name for each row that has both numbers."""
    values = [
        {"row": own, x: row[x], y: row[y]}
        for own, row in zip(labels, rows, strict=True)
        if _is_number(row.get(x)) and _is_number(row.get(y)) and row[y] > 0
    ]
    place = alt.Chart().encode(
        x=alt.X(f"{x}:Q", title=_words(x), scale=alt.Scale(zero=False, padding=30)),
        y=alt.Y(f"{y}:Q", title=_words(y), axis=alt.Axis(format="~s"), scale=alt.Scale(type="log", padding=20)),
        tooltip=["row:N", alt.Tooltip(f"{x}:Q", format=".4g"), alt.Tooltip(f"{y}:Q", format=".4s")],
    )
    names = place.mark_text(align="left", dx=8, fontSize=11, color="gray").encode(text="row:N")
    chart = alt.layer(place.mark_circle(size=70, opacity=0.9), names, data=alt.NamedData(name="rows"))
    return _written(alt, chart.properties(width="container", height=320), values)


def _bars(alt: Any, labels: Sequence[str], values: Sequence[Any], unit: str) -> dict[str, Any]:
    """Draw one bar for each row."""
    rows = [{"row": own, "value": x} for own, x in zip(labels, values, strict=True) if _is_number(x)]
    chart = (
        alt.Chart(alt.NamedData(name="rows"))
        .mark_bar()
        .encode(
            x=alt.X("value:Q", title=_words(unit)),
            y=alt.Y("row:N", sort=None, title=None, axis=alt.Axis(labelLimit=300)),
            tooltip=["row:N", alt.Tooltip("value:Q", format=".4g")],
        )
        .properties(width="container", height=_ROW * len(rows))
    )
    return _written(alt, chart, rows)


def _written(alt: Any, chart: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Convert a chart as wide as the page to JSON, and add its data, which Altair would check value by value."""
    fitting = chart.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding"))
    return {**fitting.to_dict(validate=False), "datasets": {"rows": [{**row} for row in rows]}}


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _differ(values: Sequence[Any]) -> bool:
    """Return whether at least two numbers differ, so that there is something to compare."""
    own = [x for x in values if _is_number(x)]
    return len(own) > 1 and len(set(own)) > 1


def _differ_at(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    return len({str(row.get(key)) for row in rows}) > 1


def _words(name: str) -> str:
    """Format a field's name, with its unit written out."""
    if name.endswith("_per_s"):
        return name.removesuffix("s").replace("_", " ") + "second"
    stem, _, unit = name.rpartition("_")
    units = {"s": "seconds", "ms": "milliseconds", "nbytes": "bytes"}
    return f"{stem}, {units[unit]}".replace("_", " ") if stem and unit in units else name.replace("_", " ")


def _cell(x: Any) -> str:
    return f"{x:,}" if isinstance(x, int) else f"{x:.4g}" if _is_number(x) else "–" if x is None else str(x)


def _lines(
    alt: Any, rows: Sequence[Mapping[str, Any]], unit: str, *, over: str = "step", log: bool = False
) -> dict[str, Any]:
    """Draw one line for each "what"."""
    scale = alt.Scale(type="log") if log else alt.Scale(zero=False)
    chart = (
        alt.Chart(alt.NamedData(name="rows"))
        .mark_line(interpolate="linear", point=len(rows) < 60)
        .encode(
            x=alt.X("step:Q", title=over, axis=alt.Axis(tickMinStep=1, format="d")),
            y=alt.Y("value:Q", title=unit, scale=scale),
            color=alt.Color("what:N", title=None, sort=None, legend=alt.Legend(orient="top", columns=4)),
            tooltip=[alt.Tooltip("step:Q", title=over), "what:N", alt.Tooltip("value:Q", format=".4g")],
        )
        .properties(width="container", height=240)
        .interactive(bind_y=False)
    )
    return _written(alt, chart, rows)


def _line_rows(curves: Curves) -> list[dict[str, Any]]:
    return [
        {"step": step, "what": name, "value": value}
        for name, points in curves.lines.items()
        for step, value in points
        if math.isfinite(value)
    ]


def _is_wide(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether values span so wide a range that one line, of a diverged run, would flatten all others."""
    values: list[float] = [row["value"] for row in rows]
    return min(values) > 0 and max(values) > _WIDE * min(values)


def _loss(alt: Any, run: Run, beside: Run | None) -> Iterator[_Chart]:
    rows = _points(run, {"loss": "this run"})
    if beside is not None:
        rows += _points(beside, {"loss": _PLAIN})
    if rows:
        says = " ".join(("As the training loop gave it.", *_divergences(run, beside)))
        yield _Chart("loss", "Loss", says, _lines(alt, rows, "loss"))
    if rows and beside is not None:
        clocks = {"this run": _clock(run), _PLAIN: _clock(beside)}
        for row in rows:
            row["step"] = clocks[row["what"]][row["step"]]
        says = "The same over the time of training: what counts where steps are faster and learn less each."
        yield _Chart("clock", "Loss over time", says, _lines(alt, rows, "loss", over="seconds"))


def _clock(run: Run) -> dict[int, float]:
    """Return step → seconds since the first record."""
    found, seconds, before = {}, 0.0, None
    for step, values in run.steps.items():
        seconds += values.get("seconds", 0.0) * (step - (step if before is None else before))
        found[step], before = seconds, step
    return found


def _step_time(alt: Any, run: Run, beside: Run | None) -> Iterator[_Chart]:
    rows = _points(run, {"seconds": "whole step", "waiting_s": "waiting for averages"})
    if beside is not None:
        rows += _points(beside, {"seconds": f"whole step, {_PLAIN}"})
    for row in rows:
        row["value"] *= 1000
    if rows:
        says = "What a step took, and how long training waited for averages when backward's own work was done."
        yield _Chart("time", "Step time", says, _lines(alt, rows, "milliseconds"))
    parts = {"encode_s": "encode", "wire_s": "on the wire", "decode_s": "decode", "decide_s": "policy"}
    rows = _points(run, {name: said for name, said in parts.items() if (run.mean(name) or 0.0) > 0})
    for row in rows:
        row["value"] *= 1000
    if rows:
        says = "On the engine's thread, most of it while backward still computes; the parts overlap with each other."
        yield _Chart("parts", "What compression does in a step", says, _lines(alt, rows, "milliseconds"))


def _sent(alt: Any, run: Run, beside: Run | None) -> Iterator[_Chart]:  # noqa: ARG001
    rows = _points(run, {"sent_bytes": "sent", "raw_bytes": _PLAIN})
    rows = [row | {"value": row["value"] / 1e6} for row in rows if row["value"] > 0]
    if rows:
        says = "By this rank, per step; uncompressed: what a ring all-reduce of the same gradients would send."
        yield _Chart("sent", "Bytes", says, _lines(alt, rows, "megabytes", log=True))


def _error(alt: Any, run: Run, beside: Run | None) -> Iterator[_Chart]:  # noqa: ARG001
    rows = _points(run, {"relative_error": "all layers"})
    if rows:
        says = (
            "‖p − C(p)‖² / ‖p‖² of what was encoded, p, with the residual where there is feedback; measured at times."
        )
        yield _Chart("error", "Relative error", says, _lines(alt, rows, "share of the squared norm"))


def _layer_bytes(alt: Any, run: Run, beside: Run | None) -> Iterator[_Chart]:  # noqa: ARG001
    layers = _last_layers(run)[:_LAYERS]
    if not layers:
        return
    rows = [
        {"layer": name, "sent": own.sent_bytes / 1e3, "less": own.raw_bytes / own.sent_bytes if own.sent_bytes else 1.0,
         "spec": own.spec, "error": own.relative_error}
        for name, own in layers
    ]  # fmt: skip
    base = alt.Chart(alt.NamedData(name="rows")).properties(width="container", height=_ROW * len(rows))
    layer = alt.Y("layer:N", sort=None, title=None, axis=alt.Axis(labelLimit=260))
    tip = ["layer:N", "spec:N", alt.Tooltip("sent:Q", format=".4g", title="kB sent"),
           alt.Tooltip("less:Q", format=".3g", title="times less"),
           alt.Tooltip("error:Q", format=".3g", title="relative error")]  # fmt: skip
    bars = base.mark_bar().encode(x=alt.X("sent:Q", title="kilobytes per step"), y=layer, color="spec:N", tooltip=tip)
    says = f"Of the last record{_most(run)}."
    yield _Chart("layers", "Bytes by layer", says, _written(alt, bars, rows))
    if any(row["error"] is not None for row in rows):
        errors = base.mark_bar().encode(
            x=alt.X("error:Q", title="relative error"), y=layer, color="spec:N", tooltip=tip
        )
        yield _Chart("errors", "Relative error by layer", says, _written(alt, errors, rows))


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


def _policies(alt: Any, run: Run, beside: Run | None) -> Iterator[_Chart]:  # noqa: ARG001
    rows = _over_time(run, lambda own: own.spec)
    if len({row["value"] for row in rows}) < 2:
        return
    heat = _heat(alt, rows, "N", alt.Color("value:N", title="spec", scale=alt.Scale(scheme="tableau20")))
    yield _Chart("policy", "What was chosen when", f"The spec of each layer{_most(run)}.", heat)


def _residuals(alt: Any, run: Run, beside: Run | None) -> Iterator[_Chart]:  # noqa: ARG001
    rows = [row for row in _over_time(run, lambda own: own.residual_norm) if math.isfinite(row["value"])]
    if rows:
        says = f"Norms of what this rank has not sent yet{_most(run)}. A layer that grows and grows keeps too little."
        color = alt.Color("value:Q", title="‖residual‖", scale=alt.Scale(scheme="viridis"))
        yield _Chart("residuals", "Residuals", says, _heat(alt, rows, "Q", color))


def _heat(alt: Any, rows: Sequence[Mapping[str, Any]], kind: str, color: Any) -> dict[str, Any]:
    chart = (
        alt.Chart(alt.NamedData(name="rows"))
        .mark_rect()
        .encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelOverlap=True, labelAngle=0)),
            y=alt.Y("layer:N", sort=None, title=None, axis=alt.Axis(labelLimit=260)),
            color=color,
            tooltip=["layer:N", "step:O", f"value:{kind}"],
        )
        .properties(width="container", height=_ROW * len({row["layer"] for row in rows}))
    )
    return _written(alt, chart, rows)


def _skipped(alt: Any, run: Run, beside: Run | None) -> Iterator[_Chart]:  # noqa: ARG001
    rows = [{"step": step, "steps": values["skipped"]} for step, values in run.steps.items() if values.get("skipped")]
    if rows:
        chart = (
            alt.Chart(alt.NamedData(name="rows"))
            .mark_tick(thickness=2)
            .encode(x=alt.X("step:Q", axis=alt.Axis(format="d")), tooltip=["step:Q", "steps:Q"])
            .properties(width="container", height=40)
        )
        says = "Steps in which a gradient was inf or NaN on some rank. They changed no residual."
        yield _Chart("skipped", "Skipped steps", says, _written(alt, chart, rows))


_CHARTS: Sequence[Callable[[Any, Run, Run | None], Iterator[_Chart]]] = (
    _loss,
    _step_time,
    _sent,
    _error,
    _layer_bytes,
    _policies,
    _residuals,
    _skipped,
)
