"""Flags do what their names say, and help says so."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from itertools import pairwise
from typing import get_args, get_origin, get_type_hints

import pytest
import tyro

from narrowband.cli import dispatch

KINDS = {name: dispatch._load(name) for name in dispatch._COMMANDS} | {
    f"reproduce.{name}": import_module(f"reproduce.{name}").Options
    for name in ("command", "cssgd", "fidelity", "lgreco_links", "mesa_memory", "sensitivity")
}
#: What else a command line needs to be read.
NEEDED = {"adapt": ["gradients.pt"], "memory": ["gpt"], "plan": ["gpt"]}
#: What a flag needs beside it.
WITH = {("bench ddp", "sharded"): ["--codecs", "none/none"]}


def flags(kind, path=()):
    """(path to the field, its default) of every option that is true or false, configurations inside included."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint = hints[field.name]
        hint = get_args(hint)[0] if get_origin(hint) is not None and hasattr(hint, "__metadata__") else hint
        if is_dataclass(hint):
            yield from flags(hint, (*path, field.name))
        elif hint is bool:
            yield (*path, field.name), field.default


FLAGS = [(name, path, default) for name, kind in KINDS.items() for path, default in flags(kind)]


def test_there_are_flags_of_both_kinds():
    assert {default for _, _, default in FLAGS} == {True, False}
    assert {"mixed", "peaks", "resume", "baselines"} <= {path[-1] for _, path, _ in FLAGS}


@pytest.mark.parametrize(("name", "path", "default"), FLAGS, ids=[f"{name} {path[-1]}" for name, path, _ in FLAGS])
def test_a_flag_does_what_its_name_says(name, path, default, capsys):
    def read(*words):
        value = tyro.cli(KINDS[name], args=[*NEEDED.get(name, ()), *words])
        for step in path:
            value = getattr(value, step)
        return value

    option = path[-1].replace("_", "-")
    assert not option.startswith("no-")
    with_it = WITH.get((name, path[-1]), [])
    assert [read(), read(f"--{option}", *with_it), read(f"--no-{option}")] == [default, True, False]

    with pytest.raises(SystemExit):
        tyro.cli(KINDS[name], args=["--help"], prog=name)
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert f"--{option}, --no-{option}" in shown
    if default:  # who reads the help wants to know what leaving it out does
        assert f"--no-{option} " in shown.partition(f"--{option}, --no-{option}")[2]


def test_commands_are_read_in_the_way_that_is_tested(narrow):
    _, out, _ = narrow("bench", "memory", "--help")
    assert "--peaks, --no-peaks" in out


@pytest.mark.parametrize("name", dispatch._COMMANDS)
def test_help_breaks_no_line_that_fits(narrow, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "1000")
    _, out, _ = narrow(*name.split(), "--help")
    assert "(default: )" not in out
    options = re.sub(r"[│╭╮╰╯─]", " ", out).partition(" options  ")[2]
    rows = [row for row in map(str.strip, options.splitlines()) if row.strip("-")]
    assert rows[0].startswith("-h, --help ")
    for above, row in pairwise(rows):
        if not row.startswith("-"):  # what is said of an option whose name is long
            assert re.fullmatch(r"--\S+( \S+)*", above), row
