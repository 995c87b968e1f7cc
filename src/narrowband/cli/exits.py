"""How a command ends: with one of four exit codes, and with one sentence when something went wrong.

All commands hold to this, those of ``narrowband`` and ``python -m reproduce.…`` alike:

==== =================================================================================================================
code meaning
==== =================================================================================================================
0    done
1    the run failed: a rank ended early, memory or disk ran out, a budget could not be met
2    what was given is wrong: an unknown command or option, a value out of range, a file that is missing or holds
     something else, a place that nothing can be written to, or a feature that this machine or installation lacks
130  stopped by Ctrl-C
==== =================================================================================================================

``narrowband lab`` passes on the exit code of its ranks, and returns 124 after a time-out.

Nobody has to read a traceback to learn what to change; who wants one sets ``NARROWBAND_DEBUG=1``.
"""

from __future__ import annotations

import io
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from narrowband.bench.ranks import RankError
from narrowband.errors import UnsupportedError, is_out_of_memory

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["CONVENTION", "DEBUG", "DONE", "FAILED", "STOPPED", "WRONG", "check_folder", "check_output", "finish"]

DONE, FAILED, WRONG, STOPPED = 0, 1, 2, 130

#: The convention in one sentence, for help.
CONVENTION = (
    f"Exit codes: {DONE} done; {FAILED} the run failed; {WRONG} what was given is wrong (an option, a value, a file); "
    f"{STOPPED} stopped by Ctrl-C."
)

#: The variable that asks for tracebacks.
DEBUG = "NARROWBAND_DEBUG"

#: What is wrong with a path, and not with the machine.
_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def finish(work: Callable[[], int], errors: Console, *, stopped: str = "", debug: bool = False) -> int:
    """Do the work of a command and return its exit code; what goes wrong is said in one sentence.

    Args:
        work: returns the exit code when nothing went wrong.
        errors: where the sentence goes, standard error.
        stopped: what to say after Ctrl-C, behind "Stopped."
        debug: raise errors instead; so does the environment variable ``NARROWBAND_DEBUG``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may know fewer characters than tables and names have
        sys.stdout.reconfigure(errors="replace")
    try:
        return work()
    except KeyboardInterrupt:
        errors.print(f"Stopped. {stopped}".strip(), style="yellow", highlight=False)
        return STOPPED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return FAILED
        if debug or os.environ.get(DEBUG, "") not in ("", "0"):
            raise
        code, sentence, expected = _explained(error)
        errors.print(sentence, style="bold red", markup=False, highlight=False, soft_wrap=True)
        if not expected:
            errors.print(f"({DEBUG}=1 shows the traceback)", style="dim", highlight=False)
        return code


def _is_unread() -> bool:
    """Whether nobody reads standard output any more, as behind ``| head -1``. Nothing more is then written to it, also
    when Python ends.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not poll.poll(0):  # it tells of nothing but a reader that is gone
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _explained(error: Exception) -> tuple[int, str, bool]:
    """The exit code, a sentence, and whether it says all that a user needs."""
    if isinstance(error, RankError):
        return FAILED, error.sentence, True
    if isinstance(error, _PATHS):
        return WRONG, _about_path(error), True
    if isinstance(error, OSError):
        return FAILED, f"the system refused: {_about_path(error)}", False
    if is_out_of_memory(error):
        return FAILED, f"not enough memory: {_first_line(error)}. A smaller batch or model needs less", False
    if isinstance(error, (ValueError, UnsupportedError)):
        return WRONG, str(error), True
    return FAILED, f"this is an error in narrowband, please report it: {_first_line(error)} ({_where(error)})", False


def _about_path(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return str(error)
    path = error.filename if error.filename2 is None else error.filename2
    return f"{path}: {error.strerror}; check the path"


def _first_line(error: Exception) -> str:
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0]


def _where(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"


#: What to do about a path.
_ANOTHER = "give another name"


# ---- paths that are written to, looked at before the work and not after it -------------------------------------------


def check_output(*paths: Path | None, reads: Iterable[Path | str | None] = ()) -> None:
    """See whether files can be written, before minutes of work are lost because they cannot, or because one of them
    takes the place of what was given.

    Args:
        paths: files; the folders above them need not exist. None is passed over.
        reads: what the command reads. Words that are no files are passed over, so specs may be among them, and
            ``file.py:function``.

    Raises:
        ValueError: a path is a folder or a device, or nothing can be written there; it is a file that the command
            reads, or two of them are one.

    Example:
        >>> check_output(Path("run.jsonl"), reads=["run.jsonl"])
        Traceback (most recent call last):
        ValueError: run.jsonl is read by this command, and would be lost if it were written, too; give another name
    """
    sources = [Path(re.sub(r"(?<=\.py):\w+$", "", str(each))) for each in reads if each is not None]
    for at, path in enumerate(paths):
        if path is None:
            continue
        if any(_is_one_file(path, source) for source in sources):
            raise ValueError(f"{path} is read by this command, and would be lost if it were written, too; {_ANOTHER}")
        if any(other is not None and _is_one_file(path, other) for other in paths[:at]):
            raise ValueError(f"{path} would be written twice, and hold the last of two things only; {_ANOTHER}")
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file to write, such as {path / 'result'}")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is a device or a pipe, and no file may take its place; {_ANOTHER}")
        _check_folder(Path(os.path.realpath(path)).parent, path)
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"{path} cannot be written: it may not be changed; {_ANOTHER}")


def _is_one_file(one: Path, other: Path) -> bool:
    """Whether two names are one file's, by whatever link."""
    if one.absolute() == other.absolute():
        return True
    try:
        return one.samefile(other)
    except (OSError, ValueError):  # one of them is not there, or is a word that no file could have for a name
        return False


def check_folder(*paths: Path | None) -> None:
    """The same for folders that results are written into.

    Raises:
        ValueError: a path is a file, or nothing can be written there.
    """
    for path in paths:
        if path is not None:
            _check_folder(path.absolute(), path)


def _check_folder(folder: Path, path: Path) -> None:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise ValueError(f"{path} cannot be written: {there} is a file and not a folder; give another place")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{path} cannot be written: there is no permission to write in {there}; give another place")
