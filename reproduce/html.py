"""A record as one HTML page beside it: how losses went, and a bar of every row for each number that was measured.

A page holds the program that draws it, which is nine tenths of a megabyte, so pages are made where a command runs and
are not kept in the repository. Without the ``report`` extra there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.files import write_text
from narrowband.report.page import Curves, can_make_pages, record_page
from reproduce.row import Row

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["html_of", "write_beside"]

#: What tells rows apart, as far as they have it.
_NAMES = ("task", "group", "kind", "name", "reference", "optimizer", "spec", "what", "seed")

#: Settings: pages show what was measured.
_SETTINGS = {field.name for field in fields(Row)} - set(_NAMES)


def write_beside(written: Path, record: Mapping[str, Any], console: Console) -> None:
    """Write the page of a record beside it, and say so; nothing where pages cannot be made.

    Args:
        written: the record's file; the page has its name, with ``.html``.
        record: with ``rows``, and what :func:`~narrowband.report.record.provenance` says.
        console: for the line that names the page.
    """
    if not record["rows"] or not can_make_pages():
        return
    page = written.with_suffix(".html")
    write_text(page, html_of(record, written.parent.name))
    console.print(f"a page of it: {page}", style="dim", markup=False, highlight=False)


def html_of(record: Mapping[str, Any], name: str) -> str:
    """The page.

    Args:
        record: as :func:`write_beside` takes it.
        name: what it is called.

    Raises:
        UnsupportedError: the ``report`` extra is not installed.
    """
    return record_page({**record, "rows": [_shown(row) for row in record["rows"]]}, name, _curves(record["rows"]))


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Its names, as words, and its numbers."""
    numbers = {key: x for key, x in row.items() if isinstance(x, (int, float)) and key not in {*_NAMES, *_SETTINGS}}
    return {key: f"seed {row[key]}" if key == "seed" else str(row[key]) for key in _named(row)} | numbers


def _named(row: Mapping[str, Any]) -> list[str]:
    """A name stands for its spec and optimizer."""
    implied = {"optimizer", "spec"} if "name" in row else set()
    return [key for key in _NAMES if row.get(key) not in (None, "") and key not in implied]


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[Curves]:
    """Training losses of the first seed, a chart for each task, of rows that :mod:`reproduce.training` wrote."""
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
