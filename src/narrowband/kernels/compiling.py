"""Set-up says when it has to wait for a compiler, and the processes of a machine wait for one of them.

The loops on CPU are compiled when a machine needs them for the first time, which takes seconds. :func:`announced` goes
around what set-up does to have them compiled. Where all come from disk it does nothing at all. What is compiled without
it, because a codec was used by itself or a dtype came that set-up did not know of, is said once per process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["announced", "begins", "ends"]


class _Announcement:
    """One set-up: the lock it holds, and the line it has written."""

    def __init__(self, what: str, say: bool) -> None:
        self._what, self._say = what, say
        self._loops, self._since, self._progress = 0, 0.0, ""
        self._lock: IO[bytes] | None = None

    def begins(self, folder: Path | None, refused: Path | None) -> bool:
        """Whether to look on disk once more: this process had to wait for another one."""
        if self._since:
            return False
        self._since = time.monotonic()
        self._write(f"narrowband: compiling loops for {self._what}, {_how(folder, refused)} …")
        if folder is None:
            return False
        with contextlib.suppress(OSError, ImportError):  # a file system without locks: all compile
            import fcntl

            self._lock = open(folder / ".lock", "ab")  # noqa: SIM115 - until the set-up is done
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        return True

    def ends(self) -> None:
        self._loops += 1
        if sys.stderr.isatty():
            self._show_progress()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
        if self._since:
            self._show_progress()
            self._write("\n")

    def _show_progress(self) -> None:
        """Over what it was before: the line may be longer than the terminal is wide, so not from its beginning."""
        progress = f" {self._done()}"
        self._write("\b" * len(self._progress) + progress)
        self._progress = progress

    def _done(self) -> str:
        done = f"{self._loops} done" if self._loops else "another process did"
        return f"{done}, {time.monotonic() - self._since:.0f} s"

    def _write(self, text: str) -> None:
        if self._say:
            sys.stderr.write(text)
            sys.stderr.flush()


def _how(folder: Path | None, refused: Path | None) -> str:
    """How often, and where they are kept."""
    if folder is None:
        return "in every process, as no folder is writable (set NUMBA_CACHE_DIR), or the sources are not installed"
    instead = "" if refused is None else f", as {_short(refused)} cannot be written"
    return f"once per machine (kept in {_short(folder.parent)}{instead})"


def _short(path: Path) -> str:
    with contextlib.suppress(RuntimeError, ValueError):  # no home, or not in it
        return f"~/{path.relative_to(Path.home())}"
    return str(path)


_now: _Announcement | None = None
_said = False
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def announced(what: str, *, say: bool | None = None) -> Iterator[None]:
    """Around calls that have loops compiled: says so on stderr, in one line, as soon as one is not found on disk.

    Until the end other processes of this machine that lack a loop wait, and find it then.

    Args:
        what: what the loops are for, such as ``topk:density=0.01+ef``.
        say: whether this process writes; by default, whether it is rank 0 of all (or there are no ranks).

    Example:
        >>> with announced("qsgd:bits=4"):
        ...     codec.decode(codec.encode(x), out)
    """
    global _now  # noqa: PLW0603
    with _one_at_a_time:
        before, _now = _now, _now or _Announcement(what, _is_first() if say is None else say)
        try:
            yield
        finally:
            if before is None:
                _now.close()
            _now = before


def _is_first() -> bool:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def begins(folder: Path | None, refused: Path | None = None) -> bool:
    """A loop is about to be compiled.

    Args:
        folder: in which it is not; None: there is none that can be written.
        refused: the folder that was asked for instead of this one, and cannot be written.

    Returns:
        Whether to look in the folder again, since another process may have compiled it meanwhile.
    """
    global _said  # noqa: PLW0603
    if _now is not None:
        return _now.begins(folder, refused)
    if not _said:
        _said = True
        if _is_first():
            sys.stderr.write(f"narrowband: compiling loops as they are needed, {_how(folder, refused)} …\n")
            sys.stderr.flush()
    return False


def ends() -> None:
    """A loop has been compiled."""
    if _now is not None:
        _now.ends()
