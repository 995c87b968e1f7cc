"""Make a page of a benchmark's record: a chart for every number that differs between rows, and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowband.report.charts import Chart, bars, dots, lines, unchecked
from narrowband.report.page import Table, check_packages, page_of

__all__ = ["Curves", "record_page"]

#: If the largest value is more than this many times the smallest, the axis is logarithmic.
_WIDE = 1000

#: Trade-offs: pairs of numbers of a row, of which less is better. Each pair makes one chart.
_PLANES = (("ratio_to_plain", "kept_bytes"), ("ratio_to_plain", "peak_bytes"), ("step_s", "sent_bytes_per_step"))


_PLANE = "Less of both is better: what is nearer to the lower left corner."


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
    check_packages()
    names = list(dict.fromkeys(key for row in rows for key in row))
    words = [key for key in names if any(isinstance(row.get(key), str) for row in rows)]
    numbers = [key for key in names if key not in words and _differ([row.get(key) for row in rows])]
    label = [" · ".join(str(row[key]) for key in words if _differ_at(rows, key) and row.get(key)) for row in rows]
    label = [own or str(number) for number, own in enumerate(label, 1)]
    with unchecked():
        charts = [
            Chart(f"curves{at}", each.title, "", lines(drawn, each.unit, log=_is_wide(drawn)))
            for at, each in enumerate(curves)
            if (drawn := _line_rows(each))
        ]
        charts += [
            _plane(f"plane{at}", label, rows, x, y)
            for at, (x, y) in enumerate(_PLANES)
            if x in numbers and y in numbers
        ]
        for at, key in enumerate(numbers):
            there = [(own, row[key]) for own, row in zip(label, rows, strict=True) if _is_number(row.get(key))]
            drawn = [{"row": own, "value": x} for own, x in there]
            charts.append(Chart(f"chart{at}", _words(key), "", bars(drawn, _words(key))))
    shown = [key for key in names if key not in words and any(_is_number(row.get(key)) for row in rows)]
    cells = [[own, *(_cell(row.get(key)) for key in shown)] for own, row in zip(label, rows, strict=True)]
    return page_of(name, charts, [Table("All rows", ["", *map(_words, shown)], cells, open=True)], record)


def _plane(name: str, labels: Sequence[str], rows: Sequence[Mapping[str, Any]], x: str, y: str) -> Chart:
    """Draw the rows that have both of two numbers."""
    there = [
        {"row": own, x: row[x], y: row[y]}
        for own, row in zip(labels, rows, strict=True)
        if _is_number(row.get(x)) and _is_number(row.get(y)) and row[y] > 0
    ]
    titles = {x: _words(x), y: _words(y)}
    return Chart(name, f"{titles[y]} over {titles[x]}".capitalize(), _PLANE, dots(there, x, y, titles))


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
