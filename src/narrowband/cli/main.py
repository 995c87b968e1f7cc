"""From ``sys.argv`` to a command, and from an exception to one red line.

Exit codes: 0 done, 1 the work failed, 2 it could not be asked for like this, 130 Ctrl-C; ``narrowband lab`` passes on
that of its ranks.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Command", "main"]

_DEBUG = "NARROWBAND_DEBUG"

#: Command line words → module and class. A module is imported when its command is asked for.
_COMMANDS = {
    "demo": ("demo", "Demo"),
    "bench kernels": ("bench", "BenchKernels"),
    "bench ddp": ("bench", "BenchDDP"),
    "bench pipeline": ("bench", "BenchPipeline"),
    "bench adapt": ("bench", "BenchAdapt"),
    "bench memory": ("bench", "BenchMemory"),
    "lab": ("lab", "Lab"),
    "adapt": ("adapt", "Adapt"),
    "memory": ("memory", "Memory"),
    "codecs": ("codecs", "Codecs"),
    "doctor": ("doctor", "Doctor"),
}

_EXAMPLES = (
    ("narrowband demo", "see what compression does, in a few minutes"),
    ("narrowband codecs", "every codec, its keys and what it costs"),
    ("narrowband bench ddp --rate 200mbit", "step times behind slow links"),
    ("narrowband memory model.py:build --budget 8GB", "what backward keeps, and what would fit"),
    ("narrowband lab --nodes 4 -- python train.py", "your script behind slow links"),
)


class Command(Protocol):
    """What a command's dataclass has besides its fields."""

    def __call__(self, console: Console, behind: list[str] | None) -> int:
        """Do it and return the exit code.

        Args:
            console: where tables and results go.
            behind: the words that followed ``--`` on the command line; None if there was no ``--``.
        """
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code.

    Example:
        >>> main(["--version"])  # doctest: +SKIP
        narrowband 0.1.0
        0
    """
    from rich.console import Console

    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    words, behind = words[:cut], words[cut + 1 :] if cut < len(words) else None
    debug = "--debug" in words or os.environ.get(_DEBUG, "") not in ("", "0")
    words = [word for word in words if word != "--debug"]
    console, errors = Console(), Console(stderr=True)
    try:
        return _dispatch(words, behind, console)
    except KeyboardInterrupt:
        errors.print("Stopped.", style="yellow")
        return 130
    except Exception as error:
        if debug:
            raise
        expected = _expected(error)
        if expected is None:
            errors.print_exception()
            return 1
        errors.print(
            str(error) or type(error).__name__, style="bold red", markup=False, highlight=False, soft_wrap=True
        )
        if expected == 1:
            errors.print(f"({_DEBUG}=1 or --debug shows where)", style="dim")
        return expected


def _expected(error: Exception) -> int | None:
    """The exit code for an error that a user can do something about; None for one that is ours."""
    from narrowband.bench.ranks import RankError
    from narrowband.errors import UnsupportedError

    if isinstance(error, (ValueError, UnsupportedError)):
        return 2
    return 1 if isinstance(error, (RankError, OSError)) else None


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
    if not rest or rest[0] in ("-h", "--help"):
        _print_help(console, family)
        return 0
    tried = f"{family} {rest[0]}".strip()
    close = get_close_matches(tried, _COMMANDS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"unknown command {tried!r}{hint}; there are: {', '.join(_COMMANDS)}")


def _family(word: str) -> list[str]:
    return [name for name in _COMMANDS if name.startswith(f"{word} ")]


def _load(name: str) -> Any:
    module, kind = _COMMANDS[name]
    return getattr(import_module(f"narrowband.cli.{module}"), kind)


def _run(name: str, options: list[str], behind: list[str] | None, console: Console) -> int:
    import tyro

    kind = _load(name)
    if behind is not None and name != "lab":
        raise ValueError(
            f"narrowband {name} takes nothing behind '--'; that is for `narrowband lab … -- python train.py`"
        )
    command: Command = tyro.cli(
        kind,
        prog=f"narrowband {name}",
        description=inspect.cleandoc(kind.__doc__).replace("``", "`"),
        args=options,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return command(console, behind)


def _print_help(console: Console, family: str) -> None:
    from rich.table import Table

    names = _family(family) if family else list(_COMMANDS)
    console.print("Train over slow links and in little memory: compress what training sends and keeps.\n")
    usage = f"narrowband {family} COMMAND [OPTIONS]" if family else "narrowband COMMAND [OPTIONS]"
    console.print(f"usage: {usage}\n", highlight=False, markup=False)
    table = Table(box=None, show_header=False, padding=(0, 2))
    for name in names:
        table.add_row(f"[bold]narrowband {name}", inspect.cleandoc(_load(name).__doc__).splitlines()[0])
    console.print(table)
    if not family:
        console.print("\nexamples:")
        table = Table(box=None, show_header=False, padding=(0, 2))
        for line, meaning in _EXAMPLES:
            table.add_row(line, f"[dim]{meaning}")
        console.print(table)
    console.print(
        "\n`narrowband COMMAND --help` says more. --debug (or NARROWBAND_DEBUG=1) shows the traceback of an error.",
        highlight=False,
    )
