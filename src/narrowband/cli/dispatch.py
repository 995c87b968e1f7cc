"""Dispatch ``sys.argv`` to a command. How a command ends, and with which exit code, is in ``exits.py``."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from narrowband.cli.exits import CONVENTION, DEBUG, WRONG, finish

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["run"]

#: Command line words → module and class. A module is imported when its command is run. A command is a dataclass of its
#: options. It is called with the console to print results on, and returns the exit code.
_COMMANDS = {
    "demo": ("demo", "Demo"),
    "bench kernels": ("bench", "BenchKernels"),
    "bench ddp": ("bench", "BenchDDP"),
    "bench plan": ("bench", "BenchPlan"),
    "bench pipeline": ("bench", "BenchPipeline"),
    "bench peers": ("bench", "BenchPeers"),
    "bench adapt": ("bench", "BenchAdapt"),
    "bench memory": ("bench", "BenchMemory"),
    "bench gpu": ("bench", "BenchGPU"),
    "lab": ("lab", "Lab"),
    "rendezvous": ("rendezvous", "Rendezvous"),
    "plan": ("plan", "Plan"),
    "adapt": ("adapt", "Adapt"),
    "memory": ("memory", "Memory"),
    "report": ("report", "Report"),
    "codecs": ("codecs", "Codecs"),
    "doctor": ("doctor", "Doctor"),
}

#: The subcommands that start another command, given after "--": they are also called with its words; None: no "--".
_WITH_A_COMMAND = ("lab", "bench gpu")

_EXAMPLES = (
    ("narrowband demo", "see what compression does, in a few minutes"),
    ("narrowband codecs", "every codec, its keys and what it costs"),
    ("narrowband bench ddp --rate 200mbit", "step times behind slow links"),
    ("narrowband plan model.py:build --link 200mbit --nodes 4", "does compression pay, and which?"),
    ("narrowband memory model.py:build --budget 8GB", "what backward keeps, and what would fit"),
    ("narrowband lab --nodes 4 -- python train.py", "your script behind slow links"),
)


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:  # without Rich there is no console to say so on
        sys.stderr.write(f"{sys.executable} lacks the package {error.name}: pip install . in the clone installs it\n")
        return WRONG

    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    words, behind = words[:cut], words[cut + 1 :] if cut < len(words) else None
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    width = 80 if os.environ.get("COLUMNS") == "0" else None  # some systems report width 0; Rich would print nothing
    console, errors = (Console(stderr=stderr, emoji=False, width=width) for stderr in (False, True))  # `a:ok` is a path
    return finish(lambda: _dispatch(words, behind, console), errors, debug=debug)


def _dispatch(words: list[str], behind: list[str] | None, console: Console) -> int:
    if words[:1] == ["--version"]:
        import narrowband

        console.print(f"narrowband {narrowband.__version__}", highlight=False)
        return 0
    for name in (" ".join(words[:2]), " ".join(words[:1])):
        if name in _COMMANDS:
            return _run(name, words[len(name.split()) :], behind, console)
    family = words[0] if words and _family(words[0]) else ""
    rest = words[1:] if family else words
    if not rest or rest[0] in ("-h", "--help", "help"):
        _print_help(console, family)
        return 0
    there = {name.removeprefix(family).strip(): name for name in (_family(family) if family else _COMMANDS)}
    close = get_close_matches(rest[0], there, n=1)
    hint = f" (did you mean {there[close[0]]!r}?)" if close else ""
    tried = f"{family} {rest[0]}".strip()
    raise ValueError(f"unknown command {tried!r}{hint}; there are: {', '.join(there.values())}")


def _family(word: str) -> list[str]:
    return [name for name in _COMMANDS if name.startswith(f"{word} ")]


def _load(name: str) -> Any:
    module, kind = _COMMANDS[name]
    return getattr(import_module(f"narrowband.cli.{module}"), kind)


def _run(name: str, options: list[str], behind: list[str] | None, console: Console) -> int:
    import tyro

    kind = _load(name)
    if behind is not None and name not in _WITH_A_COMMAND:
        raise ValueError(
            f"narrowband {name} takes nothing after '--'; only narrowband lab and narrowband bench gpu start a "
            "command given there"
        )
    if name == "lab" and behind is None and (at := _first_word(options)) is not None:
        raise ValueError(
            f"the command of the ranks stands after '--': narrowband {' '.join(['lab', *options[:at]])} -- "
            f"{' '.join(options[at:])}"
        )
    if {"-h", "--help"} & set(options):  # Tyro does not wrap what it is given as a description
        console.print(
            _wrapped(kind.__doc__, console.width), "", sep="\n", highlight=False, markup=False, soft_wrap=True
        )
        _join_lines_of_help(kind)
        _name_empty_defaults(kind)
    command: Callable[..., int] = tyro.cli(kind, prog=f"narrowband {name}", description="", args=options)
    _refuse_unused(command, options)
    return command(console, behind) if name in _WITH_A_COMMAND else command(console)


def _refuse_unused(command: object, words: Sequence[str]) -> None:
    """Refuse options that the command would not look at beside the others. Its method ``unused`` names them: option →
    the rest of a sentence that says why. Only the words tell whether an option was given, perhaps as it is by default.

    Raises:
        ValueError: there is one.
    """
    given = {word.partition("=")[0].replace("_", "-").replace("--no-", "--") for word in words if word[:2] == "--"}
    for name, why in getattr(command, "unused", dict)().items():
        if (option := f"--{name.replace('_', '-')}") in given:
            raise ValueError(f"{option} {why}")


def _join_lines_of_help(kind: type) -> None:
    """Give tyro what is said of each field as one line. Of docstrings it would keep the breaks, and wrap each line."""
    (source,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(source, ast.ClassDef)
    said = {}
    for field, below in pairwise(source.body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            said[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    for each in fields(kind):
        if each.name in said:
            each.metadata = MappingProxyType({**each.metadata, "help": said[each.name]})


def _name_empty_defaults(kind: type) -> None:
    """Have tyro write "none" where the default of an option is an empty list, of which it writes nothing."""
    import tyro

    for each in fields(kind):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if isinstance(default, (tuple, list)) and not default:
            hint = tyro.conf.arg(help_behavior_hint="(default: none)")
            kind.__annotations__[each.name] = Annotated[each.type, hint]
        elif is_dataclass(default) and not isinstance(default, type):
            _name_empty_defaults(type(default))


def _first_word(options: list[str]) -> int | None:
    """Return the place of the first word that is neither an option nor the value of one, if each option has a value."""
    at = 0
    while at < len(options) and options[at].startswith("-"):
        at += 1 if "=" in options[at] or options[at] in ("-h", "--help") else 2
    return at if at < len(options) else None


def _prose(docstring: str) -> str:
    """Return a docstring for a terminal."""
    return inspect.cleandoc(docstring).replace("``", "`")


def _wrapped(docstring: str, width: int) -> str:
    """Return a docstring for a terminal of this width. Indented lines, which are to be copied, stay as they are."""
    return "\n\n".join(
        paragraph if "\n  " in paragraph else textwrap.fill(" ".join(paragraph.split()), width, break_on_hyphens=False)
        for paragraph in _prose(docstring).split("\n\n")
    )


def _summary(name: str) -> str:
    """Return the first paragraph of a command's docstring, in one line.

    It is read from the source, because a command's module may import PyTorch, for seconds.
    """
    module, kind = _COMMANDS[name]
    source = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    (found,) = (each for each in source.body if isinstance(each, ast.ClassDef) and each.name == kind)
    return " ".join(_prose(ast.get_docstring(found) or "").partition("\n\n")[0].split())


def _print_help(console: Console, family: str) -> None:
    from rich.table import Column, Table

    names = _family(family) if family else list(_COMMANDS)
    console.print("Train over slow links and in little memory: compress what training sends and keeps.\n")
    usage = f"narrowband {family} COMMAND [OPTIONS]" if family else "narrowband COMMAND [OPTIONS]"
    console.print(f"usage: {usage}\n", highlight=False, markup=False)
    table = Table("", Column(overflow="fold"), box=None, show_header=False, padding=(0, 2))
    for name in names:
        table.add_row(f"[bold]narrowband {name}", _summary(name))
    console.print(table)
    if not family:
        console.print("\nexamples:")
        table = Table("", Column(overflow="fold"), box=None, show_header=False, padding=(0, 2))
        for line, meaning in _EXAMPLES:
            table.add_row(line, f"[dim]{meaning}")
        console.print(table)
    console.print(
        f"\n`narrowband COMMAND --help` says more. --debug (or {DEBUG}=1) shows the traceback of an error.",
        highlight=False,
    )
    console.print(CONVENTION, highlight=False)
