"""Tables of arguments in guides name all that the functions and commands take, and the defaults that these have."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

import narrowband as nb
from narrowband.cli.lab import Lab
from narrowband.cli.plan import Plan
from tests.docs.pages import ROOT

HOW_TO = ROOT / "docs" / "how-to"

#: Page, what the first column is called, what the table is of, and the arguments that the text around it is about.
TABLES = [
    ("choose-a-codec.md", "argument", nb.compress_gradients, {"model", "spec"}),
    (
        "updates.md",
        "argument",
        nb.compress_updates,
        {"model", "optimizer", "spec", "min_numel", "small", "collective", "seed", "message_nbytes", "early_nbytes"},
    ),
    ("peers.md", "argument", nb.Rendezvous, set()),
    ("adapt.md", "argument", nb.LGreCo, set()),
    ("activations.md", "setting", nb.ActivationPolicy, {"bits", "operators", "modules"}),
    ("lab.md", "option", Lab, set()),
    ("plan.md", "option", Plan, {"model"}),
]


def defaults_of(called: Any) -> dict[str, Any]:
    """Argument → default. A command has the fields of its configuration as options of its own."""
    found = {name: each.default for name, each in inspect.signature(called).parameters.items()}
    if "config" in found:
        (config,) = (each.default_factory for each in dataclasses.fields(called) if each.name == "config")
        found |= defaults_of(config)
        del found["config"]
    return found


def told(page: str, head: str) -> dict[str, str]:
    """Argument → default, as the only table of a page with this head says it. A row may have several arguments."""
    (rows,) = re.findall(
        rf"^\| {head} \|[^\n]*\| default \|\n\|[-| :]+\|\n((?:\|[^\n]*\|\n)+)",
        (HOW_TO / page).read_text(),
        re.MULTILINE,
    )
    found: dict[str, str] = {}
    for row in rows.splitlines():
        names, *_, default = (cell.strip() for cell in row[1:-1].split(" |"))
        arguments = [name.strip("-").replace("-", "_") for name in re.findall(r"`([\w-]+)`", names)]
        each = default.split(", ") if default.count(", ") == len(arguments) - 1 else [default] * len(arguments)
        found |= dict(zip(arguments, each, strict=True))
    return found


def says(cell: str, default: Any) -> bool:
    """Whether a cell of a table says a default. Where that is None or empty, it has words of its own."""
    if isinstance(default, bool):
        return cell in (f"`{default}`", {True: "on", False: "off"}[default])
    if isinstance(default, int | float):
        number = re.match(r"[\d,.]*\d", cell)
        return number is not None and float(number[0].replace(",", "")) == default
    if isinstance(default, str) and default:
        return cell in (f"`{default}`", f'`"{default}"`')
    return True


@pytest.mark.parametrize(("page", "head", "called", "elsewhere"), TABLES, ids=[page for page, *_ in TABLES])
def test_the_table_has_every_argument_and_its_default(page, head, called, elsewhere):
    table, defaults = told(page, head), defaults_of(called)
    assert table.keys() == defaults.keys() - elsewhere
    assert {name: cell for name, cell in table.items() if not says(cell, defaults[name])} == {}


@pytest.mark.parametrize("argument", ["message_nbytes", "early_nbytes"])
def test_a_docstring_has_the_number_where_the_signature_has_the_name_of_a_constant(argument):
    """Pages of the reference show that name as the default."""
    assert f"; {defaults_of(nb.compress_gradients)[argument]:,} by default." in " ".join(
        nb.compress_gradients.__doc__.split()
    )
