"""What the architecture page says of files is true: those that it names exist, and rooms that list theirs list all."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import narrowband
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "architecture.md"
ROOMS = {path.parent.name: path.parent for path in sorted(Path(narrowband.__file__).parent.glob("*/__init__.py"))}


def listed(room):
    """The files that a room's ``__init__.py`` lists in a table, from the interface down."""
    said = ast.get_docstring(ast.parse((ROOMS[room] / "__init__.py").read_text())) or ""
    return re.findall(r"^:mod:`\.(\w+)`", said, re.MULTILINE), re.findall(r":mod:`\.(\w+)`", said)


def files(room):
    return {path.stem: path.read_text() for path in ROOMS[room].glob("*.py") if not path.stem.startswith("__")}


def test_files_that_the_page_names_are_in_the_room():
    page = PAGE.read_text()
    parts = re.findall(r"^### (.*?)\n(.*?)(?=^### |^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert {room for title, _ in parts for room in title.split(", ")} == ROOMS.keys()
    for title, text in parts:
        there = {path.name for room in title.split(", ") for path in ROOMS[room].rglob("*.py")}
        assert set(re.findall(r"`(\w+\.py)`", text)) <= there | {"__init__.py"}, title


def test_files_to_begin_in_are_there():
    (table,) = re.findall(r"^## Where to change what\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    named = re.findall(r"`([\w/]+(?:\.py|/))`", table)
    assert len(named) > 20
    assert not [name for name in named if not (Path(narrowband.__file__).parent / name).exists()]


def test_rooms_that_list_their_files_list_all_of_them():
    page = PAGE.read_text()
    listing = {room for room in ROOMS if listed(room)[0]}
    assert listing == set(re.findall(r"`(\w+)`", re.search(r"`__init__.py` of\s(.*?) lists", page, re.DOTALL)[1]))
    for room in listing:
        assert set(listed(room)[1]) == files(room).keys(), room


def test_files_of_activations_import_only_from_those_below():
    rows, sources = listed("activations")[0], files("activations")
    for at, name in enumerate(rows):
        imported = set(re.findall(r"from narrowband\.activations\.(\w+) import", sources[name]))
        assert not imported & set(rows[:at]), name
