"""Command lines that pages show: read by the parsers that will read them, and run where that is quick."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import tyro
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser

from narrowband.cli import main
from tests.docs.pages import ROOT, SCRIPT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.docs.pages import Page

__all__ = ["SLOWER", "CommandError", "Line", "check", "inline", "lines", "run_quick"]

#: What pip knows the library by.
DISTRIBUTION = "torch-narrowband"
#: Commands of narrowband that take a second or two, and need nothing but the files of their page.
QUICK = ("doctor", "codecs", "adapt")
#: One that measures for ten seconds; tests/cli/test_cli_memory.py runs it with models of its own.
SLOWER = ("memory",)

_INLINE = re.compile(
    r"`((?:\.venv/bin/|\$ )?(?:narrowband|python -m reproduce\.\w+|make|pip install|torchrun)(?: [^`]+)?)`"
)
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=.*")


class CommandError(AssertionError):
    """A command that does not work as a page shows it."""


class _Parsed(BaseException):
    """The parser has read the command line. No Exception, which commands would turn into a message."""


@dataclass(frozen=True)
class Line:
    """One command, and where it stands. ``block`` is false for one inside a sentence, which may lack arguments."""

    text: str
    where: str
    block: bool = True

    @property
    def words(self) -> list[str]:
        """What the shell makes of it, without assignments in front and redirections behind."""
        words = shlex.split(self.text, comments=True)
        while words and _ASSIGNMENT.fullmatch(words[0]):
            del words[0]
        return words


def lines(page: Page) -> list[Line]:
    """The commands of a page's console blocks. Where some lines begin with ``$``, the others are output."""
    found = []
    for block in page.of("console"):
        if block.not_run:
            continue
        numbered = list(enumerate(block.text.splitlines(), start=block.line))
        prompts = any(text.startswith("$ ") for _, text in numbered)
        waiting = ""
        for number, text in numbered:
            if prompts and not waiting and not text.startswith("$ "):
                continue
            said = (waiting + text.removeprefix("$ ")).strip()
            waiting = said[:-1] if said.endswith("\\") else ""
            if said and not waiting:
                found += [Line(part, f"{page.name}:{number}") for part in said.split(" && ")]
    return [line for line in found if line.words]


def inline(page: Page) -> list[Line]:
    """Commands inside sentences, but for those that are cut short by ``…`` or name no command."""
    found = []
    for number, text in enumerate(page.path.read_text().splitlines(), start=1):
        found += [
            Line(match.removeprefix("$ "), f"{page.name}:{number}", block=False)
            for match in _INLINE.findall(text)
            if "…" not in match and "COMMAND" not in match and " " in match
        ]
    return found


def check(line: Line, folder: Path) -> None:
    """Have a command line read by whatever would run it, and look for the files it names in ``folder`` and here.

    Raises:
        CommandError: it would not work.
    """
    words = line.words
    program = words[0].removeprefix(".venv/bin/").removeprefix("bin/")
    try:
        if program == "narrowband":
            _check_narrowband(words[1:], folder, complete=line.block)
        elif program in ("python", "python3"):
            _check_python(words[1:], folder)
        elif program == "torchrun":
            _check_torchrun(words[1:], folder)
        elif program == "make":
            _check_make(words[1:])
        elif program in ("pip", "pip3"):
            _check_pip(words[1:], warned=not line.block)
        elif program in ("cd", "export", "apt", "sudo", "ip", "ping", "iperf3", "nc", "ufw", "pre-commit"):
            pass  # not ours
        else:
            raise CommandError(f"nobody knows {program!r}; teach it to {Path(__file__).name}")
    except CommandError as error:
        raise CommandError(f"{line.where}: {line.text}\n{error}") from None


def run_quick(line: Line, run_main, these: Sequence[str] = QUICK) -> None:
    """Run a command of narrowband, if it is one of these; the working directory has the page's files."""
    words = line.words
    if words[0].endswith("narrowband") and (words[1] in these or "--help" in words):
        code, out, err = run_main(words[1:])
        if code != 0:
            raise CommandError(f"{line.where}: {line.text}\nexit code {code}\n{out}\n{err}")


def _parse(run, said: str) -> None:
    """Run something up to the moment when its command line has been read."""

    def parse_only(*args, **kwargs):
        cli(*args, **kwargs)
        raise _Parsed

    cli, errors = tyro.cli, io.StringIO()
    with mock.patch.object(tyro, "cli", parse_only), contextlib.redirect_stderr(errors):
        try:
            code = run()
        except _Parsed:
            return
        except SystemExit as end:
            code = end.code
    if code != 0:
        raise CommandError(f"{said} cannot read it:\n{errors.getvalue()}")


def _check_narrowband(words: list[str], folder: Path, *, complete: bool) -> None:
    if not complete and words and not any(word.startswith("-") or ":" in word for word in words):
        words = [*words, "--help"]  # only the command's name
    cut = words.index("--") if "--" in words else len(words)
    if words[cut + 1 :]:
        check(Line(shlex.join(words[cut + 1 :]), "behind --"), folder)
    _parse(lambda: main(words), "narrowband")


def _check_python(words: list[str], folder: Path) -> None:
    if words[0] != "-m":
        _check_script(words[0], folder)
        return
    module, rest = words[1], words[2:]
    if module.startswith("reproduce."):
        if importlib.util.find_spec(module) is None:
            raise CommandError(f"there is no module {module}")
        with mock.patch.object(sys, "argv", [module, *rest]), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a test may have imported it before
            _parse(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), module)
    elif module not in ("venv", "pip") and importlib.util.find_spec(module) is None:
        raise CommandError(f"there is no module {module}")


def _check_torchrun(words: list[str], folder: Path) -> None:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            given = get_args_parser().parse_args(words)
        except SystemExit:
            raise CommandError(errors.getvalue()) from None
    if given.module:
        if given.training_script != "narrowband.cli":
            raise CommandError(f"torchrun -m runs narrowband.cli here, and not {given.training_script}")
        _check_narrowband(given.training_script_args, folder, complete=True)
    else:
        _check_script(given.training_script, folder)


def _check_script(name: str, folder: Path) -> None:
    if name != SCRIPT and not (folder / name).is_file() and not (ROOT / name).is_file():
        raise CommandError(f"there is no {name}: neither in the repository nor as a block with that title")


def _check_make(words: Sequence[str]) -> None:
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(done.stderr)


def _check_pip(words: Sequence[str], *, warned: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if list(words) == ["uninstall", DISTRIBUTION]:
        return
    if words[0] != "install":
        raise CommandError(f"pip does what here? only 'install' and 'uninstall {DISTRIBUTION}' are known")
    for word in words[1:]:
        if word.startswith("-"):
            continue
        wanted = Requirement(word.replace(".", DISTRIBUTION, 1) if word.startswith(".") else word)
        if wanted.name == DISTRIBUTION:
            unknown = wanted.extras - set(project["optional-dependencies"])
            if unknown:
                raise CommandError(f"{DISTRIBUTION} has no extra {', '.join(sorted(unknown))}")
        elif wanted.name == "narrowband" and (wanted.extras or not warned):  # a sentence may warn of it
            raise CommandError(f"that is another project's library; this one is {DISTRIBUTION}")
