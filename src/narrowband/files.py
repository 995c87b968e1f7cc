"""Write files atomically: a file is complete, or it is not there at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["whole", "write_text"]

#: Errors of a disk. Others may come from what the block does besides, such as from a connection.
_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@contextlib.contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces ``path`` when the block ends, and that is deleted if the block raises.

    Several processes may write the same path at once: the file of the last one stays. Missing folders are created. If
    ``path`` is a symbolic link, the file that it points to is replaced. A file that replaces another has the other's
    permissions; a new one has those of the umask.

    Args:
        path: of the file.

    Raises:
        OSError: the file cannot be written, or ``path`` is a device or a pipe, which no file may replace.

    Example:
        >>> with whole(Path("runs/weights.bin")) as file:
        ...     file.write(b"all of it")
        9
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "is not a regular file", str(path))
    given, path = path, Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        if mode is not None:
            os.chmod(temporary, mode)  # without what the umask took away
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError) and error.errno in _OF_DISKS and error.filename is None:
            error.filename = str(given)  # a disk that is full does not say which file it has no room for
        raise


def write_text(path: Path, content: str) -> None:
    """Write a text in UTF-8, atomically.

    Example:
        >>> write_text(Path("runs/plan.json"), "{}")
        >>> Path("runs/plan.json").read_text()
        '{}'
    """
    with whole(path) as file:
        file.write(content.encode())
