"""Put charts and tables on one HTML page that needs no network and no other files, in light and dark.

Charts are drawn by `Vega-Lite <https://vega.github.io/vega-lite/>`_ (through Altair), which makes the smallest
self-contained page of the libraries that were compared. One line chart takes 0.90 MB with Altair 5.5
(``save(…, inline=True)``), 1.27 MB with Bokeh 3.9 (``file_html(…, INLINE)``) and 4.82 MB with Plotly 7.1
(``to_html(include_plotlyjs=True)``). Charts have tooltips, and lines can be zoomed.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from narrowband.errors import UnsupportedError, need, pip_install

if TYPE_CHECKING:
    from narrowband.report.charts import Chart

__all__ = ["Table", "can_make_pages", "check_packages", "page_of"]

#: The packages that pages are made with: the oldest supported version, and the newest supported major version.
_PACKAGES = {"altair": ("5.5", "6"), "jinja2": ("3.1", "3"), "vl-convert-python": ("1.7", "1")}


@dataclass(frozen=True)
class Table:
    """A table of numbers, collapsed unless it is open; its first column is text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    open: bool = False


def can_make_pages() -> bool:
    """Return whether Altair and the packages that it needs are installed, in supported versions."""
    try:
        _check_versions()
    except UnsupportedError:
        return False
    return True


def check_packages() -> None:
    """Check that pages can be made.

    Raises:
        UnsupportedError: Altair, or a package that it needs, is not installed, or not in a supported version.
    """
    _check_versions()
    try:
        import altair as alt  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"a report needs Altair, Jinja2 and vl-convert ({error}): {pip_install('report')}"
        ) from error


def _check_versions() -> None:
    try:
        for package, (oldest, newest) in _PACKAGES.items():
            need(package, oldest, newest, extra="report")
    except ImportError as error:
        raise UnsupportedError(f"a report needs Altair, Jinja2 and vl-convert, and {error}") from error


def page_of(
    name: str,
    charts: Sequence[Chart],
    tables: Sequence[Table],
    start: Mapping[str, Any],
    *,
    note: str = "",
    verdict: str = "",
    cards: Sequence[tuple[str, str]] = (),
) -> str:
    """Make a page, as HTML in one piece.

    Args:
        name: its heading.
        charts: in their order.
        tables: below the charts.
        start: how the result was made: the fields of :func:`~narrowband.report.record.provenance`, or of a run.
        note: below the heading.
        verdict: the result in plain sentences.
        cards: a few numbers: (what, number).

    Raises:
        ValueError: ``start`` is of another form.
        UnsupportedError: the packages that draw do not fit together.
    """
    import altair as alt
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


def _in_script(code: str) -> str:
    """Escape JSON or a program for a script element."""
    return re.sub("</(script)", r"<\\/\1", code, flags=re.IGNORECASE).replace("<!--", "<\\!--")
