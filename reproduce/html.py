"""Write a record as an HTML page: curves of losses, and a bar chart over all rows for each number that was measured.

A page contains the program that draws it, which is nine tenths of a megabyte. So pages are made where a command runs,
and are not kept in the repository. Without the ``report`` extra no page is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.files import write_text
from narrowband.report.page import can_make_pages
from narrowband.report.record_page import Curves, record_page
from reproduce.row import Row

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["html_of", "write_pages"]

#: Fields that identify a row, as far as the row has them.
_NAMES = ("task", "group", "kind", "name", "reference", "optimizer", "spec", "what", "seed")

#: Settings of rows; pages leave them out, since they show what was measured.
_SETTINGS = {field.name for field in fields(Row)} - set(_NAMES)


def write_pages(
    written: Path,
    record: Mapping[str, Any],
    markdown: Path | None,
    page: Callable[[Mapping[str, Any], Path], None],
    console: Console,
) -> None:
    """Write the pages of a record that has been written, and print where record and pages are.

    Args:
        written: the record's file. If the record has a sequence of rows, and pages can be made, one in HTML of the same
            name is made beside it.
        record: has the fields of :func:`~narrowband.report.record.provenance`.
        markdown: where to write the page of results; None: nowhere.
        page: writes the page of results.
        console: prints the paths.
    """
    if markdown is not None:
        page(record, markdown)
    console.print(f"written: {written}", style="dim", markup=False, highlight=False)
    rows = record.get("rows")
    if isinstance(rows, Sequence) and rows and can_make_pages():
        beside = written.with_suffix(".html")
        write_text(beside, html_of(record, written.parent.name))
        console.print(f"a page of it: {beside}", style="dim", markup=False, highlight=False)


def html_of(record: Mapping[str, Any], name: str) -> str:
    """Return the page of a record as HTML.

    Args:
        record: see :func:`write_pages`; has a sequence of rows.
        name: name of the record.

    Raises:
        UnsupportedError: the ``report`` extra is not installed.
    """
    return record_page({**record, "rows": [_shown(row) for row in record["rows"]]}, name, _curves(record["rows"]))


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's identifying fields, as strings, and the numbers that were measured."""
    numbers = {key: x for key, x in row.items() if isinstance(x, (int, float)) and key not in {*_NAMES, *_SETTINGS}}
    return {key: f"seed {row[key]}" if key == "seed" else str(row[key]) for key in _named(row)} | numbers


def _named(row: Mapping[str, Any]) -> list[str]:
    """Return the fields that identify a row; a name makes spec and optimizer superfluous."""
    implied = {"optimizer", "spec"} if "name" in row else set()
    return [key for key in _NAMES if row.get(key) not in (None, "") and key not in implied]


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[Curves]:
    """Return a chart per task with the training losses of the first seed, for rows of :mod:`reproduce.training`."""
    found: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    trained = [row for row in rows if "scores" in row]
    for task in dict.fromkeys(row["task"] for row in trained):
        own = [row for row in trained if row["task"] == task]
        first = min(row["seed"] for row in own)
        lines = {
            row["name"]: [(step, loss) for step, loss in row["curve"] if loss is not None]
            for row in own
            if row["seed"] == first
        }
        found[task, first] = {name: points for name, points in lines.items() if points}
    return [
        Curves(f"Training loss: {task}, seed {seed}", "loss", lines) for (task, seed), lines in found.items() if lines
    ]
