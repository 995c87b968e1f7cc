"""Announce the compilation of CPU loops, and let the processes of a machine share one compilation.

The CPU loops are compiled when a machine needs them for the first time, which takes seconds. Set-up wraps the calls
that compile them in :func:`announced`, which does nothing at all if every loop is cached on disk. Loops compiled
outside of it, because a codec was used by itself or with a dtype that set-up did not expect, are announced once per
process.
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
        """Announce a compilation. Returns whether to look on disk again: this process had to wait for another one."""
        if self._since:
            return False
        self._since = time.monotonic()
        self._write(f"narrowband: compiling loops for {self._what}, {_how(folder, refused)} …")
        if folder is None:
            return False
        with contextlib.suppress(OSError, ImportError):  # on a file system without locks, every process compiles
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
        """Overwrite the last progress with backspaces, not from the line's beginning: the line may be wider than the
        terminal.
        """
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
    """Say how often loops are compiled, and where they are kept."""
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
    """Wrap calls that compile loops: as soon as a loop is not found on disk, say so on stderr, in one line.

    Other processes of this machine that lack a loop wait until the end of the context, and then find the loop on disk.

    Args:
        what: what the loops are for, such as ``topk:density=0.01+ef``.
        say: whether this process writes the line; by default, whether it is rank 0 (or there are no ranks).

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
    """Report that a loop is about to be compiled.

    Args:
        folder: the cache folder that lacks the loop; None: no folder can be written.
        refused: the folder that was asked for instead of this one, and cannot be written.

    Returns:
        Whether to look in the folder again, since another process may have compiled the loop meanwhile.
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
    """Report that a loop has been compiled."""
    if _now is not None:
        _now.ends()
