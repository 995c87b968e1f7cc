"""A page of each record: made of rows as they were recorded."""

from __future__ import annotations

import json
import re

import pytest

from reproduce.html import html_of
from reproduce.pages import PAGES, record_of
from tests.thorough import thorough

pytest.importorskip("altair", reason="the report extra is not installed")

#: Some of every kind, and all others that have rows.
SOME = ("cssgd", "optimizers")
OTHERS = [name for name in PAGES if name not in SOME and isinstance(record_of(name).get("rows"), list)]


def specs_of(page):
    """What charts draw, by their titles."""
    specs = json.loads(re.search(r"^const charts = (\{.*\});$", page, re.MULTILINE)[1])
    titles = dict(re.findall(r'<h2>([^<]+)</h2>(?:(?!<h2>).)*?<div class="chart[^"]*" id="(\w+)"', page, re.DOTALL))
    return {title: specs[name] for title, name in titles.items()}


@pytest.mark.parametrize("module", [*SOME, *thorough(*OTHERS)])
def test_every_record_has_a_page_that_says_where_it_comes_from(module):
    record = record_of(module)
    page = html_of(record, module)
    assert specs_of(page)
    assert str(record["commit"]) in page


def test_the_curves_and_bars_are_those_of_the_rows():
    rows = record_of("dgc")["rows"]
    charts = specs_of(html_of(record_of("dgc"), "dgc"))
    drawn = [(p["what"], p["step"], p["value"]) for p in charts["Training loss: cifar, seed 0"]["datasets"]["rows"]]
    of_seed = [row for row in rows if (row["task"], row["seed"]) == ("cifar", 0)]
    told = [(row["name"], *point) for row in of_seed for point in row["curve"]]
    assert drawn == [point for point in told if point[2] is not None]
    assert drawn
    bars = [point["value"] for point in charts["sent bytes per step"]["datasets"]["rows"]]
    assert bars == [row["sent_bytes_per_step"] for row in rows]
    assert "lr" not in charts  # a setting


def test_a_row_that_diverged_leaves_the_others_to_be_seen():
    rows = record_of("dgc")["rows"][:2]
    for factor, scale in ((1.0, None), (1e6, "log")):
        torn = rows[1] | {"curve": [[step, loss * factor] for step, loss in rows[1]["curve"]]}
        charts = specs_of(html_of(record_of("dgc") | {"rows": [rows[0], torn]}, "dgc"))
        assert charts["Training loss: cifar, seed 0"]["encoding"]["y"]["scale"].get("type") == scale
