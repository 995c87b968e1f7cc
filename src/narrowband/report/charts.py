"""Draw charts: rows in, the specification of a chart for `Vega-Lite <https://vega.github.io/vega-lite/>`_ out.

Nothing but this module knows Altair, which is imported where a chart is drawn. All charts are as wide as their page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    Rows = Sequence[Mapping[str, Any]]

__all__ = ["Chart", "bars", "dots", "heat", "layer_bars", "lines", "ticks", "unchecked"]

#: Height of the row of one bar or layer, in pixels.
_ROW = 16


@dataclass(frozen=True)
class Chart:
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


def unchecked() -> AbstractContextManager[None]:
    """Turn off Altair's check of charts against the schema of Vega-Lite, which takes longer than making them.
    Tests check the charts of a page instead.
    """
    from altair.utils.schemapi import debug_mode

    return debug_mode(False)


def lines(rows: Rows, unit: str, *, over: str = "step", log: bool = False) -> dict[str, Any]:
    """Draw one line for each "what" of rows with step, what and value, of this unit, over what the steps are."""
    import altair as alt

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
    return _written(chart, rows)


def dots(rows: Rows, x: str, y: str, titles: Mapping[str, str]) -> dict[str, Any]:
    """Draw a dot with its name for each of these rows, which have "row" (the name), ``x`` and ``y`` (above 0).

    ``titles`` holds the axes' titles by field; the axis of ``y`` is logarithmic.
    """
    import altair as alt

    place = alt.Chart().encode(
        x=alt.X(f"{x}:Q", title=titles[x], scale=alt.Scale(zero=False, padding=30)),
        y=alt.Y(f"{y}:Q", title=titles[y], axis=alt.Axis(format="~s"), scale=alt.Scale(type="log", padding=20)),
        tooltip=["row:N", alt.Tooltip(f"{x}:Q", format=".4g"), alt.Tooltip(f"{y}:Q", format=".4s")],
    )
    names = place.mark_text(align="left", dx=8, fontSize=11, color="gray").encode(text="row:N")
    chart = alt.layer(place.mark_circle(size=70, opacity=0.9), names, data=alt.NamedData(name="rows"))
    return _written(chart.properties(width="container", height=320), rows)


def bars(rows: Rows, title: str) -> dict[str, Any]:
    """Draw one bar for each of these rows, which have "row" (the name) and value."""
    import altair as alt

    chart = (
        alt.Chart(alt.NamedData(name="rows"))
        .mark_bar()
        .encode(
            x=alt.X("value:Q", title=title),
            y=alt.Y("row:N", sort=None, title=None, axis=alt.Axis(labelLimit=300)),
            tooltip=["row:N", alt.Tooltip("value:Q", format=".4g")],
        )
        .properties(width="container", height=_ROW * len(rows))
    )
    return _written(chart, rows)


def layer_bars(rows: Rows, field: str, title: str) -> dict[str, Any]:
    """Draw one bar for each layer, as long as ``field``; rows have layer, spec, sent (kB), less (a ratio) and error."""
    import altair as alt

    chart = (
        alt.Chart(alt.NamedData(name="rows"))
        .properties(width="container", height=_ROW * len(rows))
        .mark_bar()
        .encode(
            x=alt.X(f"{field}:Q", title=title),
            y=alt.Y("layer:N", sort=None, title=None, axis=alt.Axis(labelLimit=260)),
            color="spec:N",
            tooltip=[
                "layer:N",
                "spec:N",
                alt.Tooltip("sent:Q", format=".4g", title="kB sent"),
                alt.Tooltip("less:Q", format=".3g", title="times less"),
                alt.Tooltip("error:Q", format=".3g", title="relative error"),
            ],
        )
    )
    return _written(chart, rows)


def heat(rows: Rows, title: str, *, names: bool) -> dict[str, Any]:
    """Draw a rectangle in the color of its value, a name or a number, for each of these rows: layer, step, value."""
    import altair as alt

    kind = "N" if names else "Q"
    colors = alt.Scale(scheme="tableau20") if names else alt.Scale(scheme="viridis")
    chart = (
        alt.Chart(alt.NamedData(name="rows"))
        .mark_rect()
        .encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelOverlap=True, labelAngle=0)),
            y=alt.Y("layer:N", sort=None, title=None, axis=alt.Axis(labelLimit=260)),
            color=alt.Color(f"value:{kind}", title=title, scale=colors),
            tooltip=["layer:N", "step:O", f"value:{kind}"],
        )
        .properties(width="container", height=_ROW * len({row["layer"] for row in rows}))
    )
    return _written(chart, rows)


def ticks(rows: Rows) -> dict[str, Any]:
    """Draw a tick at the step of each of these rows, which have step and steps."""
    import altair as alt

    chart = (
        alt.Chart(alt.NamedData(name="rows"))
        .mark_tick(thickness=2)
        .encode(x=alt.X("step:Q", axis=alt.Axis(format="d")), tooltip=["step:Q", "steps:Q"])
        .properties(width="container", height=40)
    )
    return _written(chart, rows)


def _written(chart: Any, rows: Rows) -> dict[str, Any]:
    """Convert a chart as wide as the page to JSON, and add its data, which Altair would check value by value."""
    import altair as alt

    fitting = chart.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding"))
    return {**fitting.to_dict(validate=False), "datasets": {"rows": [{**row} for row in rows]}}
