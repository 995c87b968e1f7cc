"""End a command with one of five exit codes, and with one sentence if something went wrong.

All commands follow this convention, those of ``narrowband`` and ``python -m reproduce.…`` alike:

==== =================================================================================================================
code meaning
==== =================================================================================================================
0    done
1    the run failed: a rank ended early, memory or disk ran out, a budget could not be met
2    what was given is wrong: an unknown command or option, a value out of range, a file that is missing or holds
     something else, a place that nothing can be written to, or a feature that this machine or installation lacks
130  stopped by Ctrl-C
143  stopped by SIGTERM, in the same way: finished rows are kept, and ranks and temporary files are gone
==== =================================================================================================================

``narrowband lab`` passes on the exit code of its ranks, and returns 124 after a time-out.

Users need no traceback to learn what to change. ``NARROWBAND_DEBUG=1`` shows one all the same.
"""

from __future__ import annotations

import contextlib
import errno
import io
import multiprocessing
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from narrowband.bench.ranks import RankError
from narrowband.errors import UnsupportedError, is_out_of_memory

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "CONVENTION", "DEBUG", "DONE", "FAILED", "STOPPED", "TERMINATED", "WRONG", "check_folder", "check_output", "finish",
]  # fmt: skip

DONE, FAILED, WRONG, STOPPED, TERMINATED = 0, 1, 2, 130, 143

#: The convention in one sentence, for help.
CONVENTION = (
    f"Exit codes: {DONE} done; {FAILED} the run failed; {WRONG} what was given is wrong (an option, a value, a file); "
    f"{STOPPED} stopped by Ctrl-C; {TERMINATED} stopped by SIGTERM."
)

#: The environment variable that turns tracebacks on.
DEBUG = "NARROWBAND_DEBUG"

#: Errors that come from a wrong path, and not from the machine.
_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)

#: A disk, a quota or a file that may not grow any more.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def finish(work: Callable[[], int], errors: Console, *, stopped: str = "", debug: bool = False) -> int:
    """Do the work of a command and return its exit code. Print one sentence if something goes wrong.

    Args:
        work: returns the exit code if nothing goes wrong.
        errors: the console for the sentence, on standard error.
        stopped: what to print after "Stopped." on Ctrl-C or SIGTERM.
        debug: raise errors instead. The environment variable ``NARROWBAND_DEBUG`` has the same effect.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal's encoding may lack characters of tables and names
        sys.stdout.reconfigure(errors="replace")
    try:
        with _interruptible():
            return work()
    except KeyboardInterrupt as stop:
        errors.print(f"Stopped. {stopped}".strip(), style="yellow", highlight=False)
        return TERMINATED if isinstance(stop, _Terminated) else STOPPED
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


class _Terminated(KeyboardInterrupt):
    """SIGTERM has arrived. Whatever cleans up after Ctrl-C does so then, too."""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` on Ctrl-C, and :class:`_Terminated` on SIGTERM, which would end this process before
    anything is cleaned up. A second SIGTERM does so all the same. Processes that this one has started for its work, and
    would wait for, are ended before.

    Callbacks of C swallow what a signal raises in them, and then what they were called for fails of something else:
    LLVM compiles with such callbacks. So any error that comes after a signal is taken for its consequence. PyTorch goes
    on without NumPy if a signal comes while it imports that. So a signal ends this process at once while PyTorch is
    imported, since nothing has begun then.

    Python handles signals in the main thread only, so in other threads nothing is changed, nor where another handler
    was set.
    """
    heard: list[KeyboardInterrupt] = []
    report = sys.unraisablehook

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for process in multiprocessing.active_children():
                process.terminate()
        if _imports_pytorch(frame):
            os.write(2, b"Stopped.\n")
            os._exit(TERMINATED if number == signal.SIGTERM else STOPPED)
        heard.append(_Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
        raise heard[-1]

    def note(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            report(unraisable)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is threading.main_thread():
        ours = [number for number, handler in before.items() if handler in (signal.SIG_DFL, signal.default_int_handler)]
    else:
        ours = []
    sys.unraisablehook = note
    try:
        for number in ours:
            signal.signal(number, interrupt)
        yield
    except Exception:
        if heard:
            raise heard[0] from None
        raise
    finally:
        for number in ours:
            signal.signal(number, before[number])
        sys.unraisablehook = report


def _imports_pytorch(frame: FrameType | None) -> bool:
    """Return whether this frame belongs to the import of PyTorch."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            return True
        frame = frame.f_back
    return False


def _is_unread() -> bool:
    """Return whether the reader of standard output has gone, as after ``| head -1``.

    If so, redirect standard output to /dev/null, so that nothing more is written to it, also when Python exits.
    """
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError):  # none, or one in memory
        return False
    poll = select.poll()
    poll.register(output, 0)
    if not poll.poll(0):  # with no events asked for, it reports only that the reader has gone
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _explained(error: Exception) -> tuple[int, str, bool]:
    """Return the exit code, a sentence, and whether the sentence has all that a user needs."""
    if isinstance(error, RankError):
        return FAILED, error.sentence, True
    if isinstance(error, _PATHS):
        return WRONG, _about_path(error), True
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return FAILED, f"{error.filename or 'the output'}: {error.strerror}; make room, or give another place", True
    if isinstance(error, OSError):
        return FAILED, f"the operating system reported an error: {_about_path(error)}", False
    if is_out_of_memory(error):
        return FAILED, f"not enough memory: {_first_line(error)}. A smaller batch or model needs less", False
    if isinstance(error, (ValueError, UnsupportedError)):
        return WRONG, str(error), True
    package = _unusable(error)
    if package is not None:
        sentence = f"{package} cannot be imported: {_first_line(error)}. pip check says what is missing or does not fit"
        return WRONG, sentence, False
    return FAILED, f"this is an error in narrowband, please report it: {_first_line(error)} ({_where(error)})", False


def _unusable(error: Exception) -> str | None:
    """Return the package of others that is not installed or fails as it is imported; None if the error is another one.

    It is another one if our own file asks a package that is there for something that it lacks.
    """
    if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
        package = error.name
    elif isinstance(error, ImportError):
        *_, frame = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        package = frame.f_globals.get("__name__", "").partition(".")[0]
    else:
        return None
    return None if package in ("narrowband", "reproduce", "__main__", "importlib") else package


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


#: Advice in messages about a path.
_ANOTHER = "give another name"


# ---- output paths, checked before the work ---------------------------------------------------------------------------


def check_output(*paths: Path | None, reads: Iterable[Path | str | None] = ()) -> None:
    """Check that files can be written and overwrite no input, before minutes of work are lost.

    Args:
        paths: files to write; the folders above them need not exist. None is ignored.
        reads: files that the command reads. Words that are no files are ignored, so this may include specs, and
            ``file.py:function``.

    Raises:
        ValueError: a path is a folder or a device, cannot be written to, is a file that the command reads, or is given
            twice.

    Example:
        >>> check_output(Path("run.jsonl"), reads=["run.jsonl"])
        Traceback (most recent call last):
        ValueError: run.jsonl is read by this command and would be overwritten; give another name
    """
    sources = [Path(re.sub(r"(?<=\.py):\w+$", "", str(each))) for each in reads if each is not None]
    for at, path in enumerate(paths):
        if path is None:
            continue
        if any(_is_one_file(path, source) for source in sources):
            raise ValueError(f"{path} is read by this command and would be overwritten; {_ANOTHER}")
        if any(other is not None and _is_one_file(path, other) for other in paths[:at]):
            raise ValueError(
                f"{path} would be written twice, and the second output would replace the first; {_ANOTHER}"
            )
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give the name of a file to write, such as {path / 'result'}")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is a device or a pipe, not a regular file; {_ANOTHER}")
        _check_folder(Path(os.path.realpath(path)).parent, path)
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"{path} cannot be written: there is no permission to change it; {_ANOTHER}")


def _is_one_file(one: Path, other: Path) -> bool:
    """Return whether two paths name the same file, also through links."""
    if one.absolute() == other.absolute():
        return True
    try:
        return one.samefile(other)
    except (OSError, ValueError):  # one of them does not exist, or is no valid file name
        return False


def check_folder(*paths: Path | None) -> None:
    """Check that folders can be created and written into.

    Raises:
        ValueError: a path is a file, or there is no permission to write there.
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
