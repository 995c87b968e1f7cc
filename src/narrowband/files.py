"""Files that are whole, or not there at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["whole", "write_text"]


@contextlib.contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of ``path`` when all is written, and of nothing if that fails.

    Several processes may do so at once: the last one's file stays. Folders above it are made. Of a link it is what the
    link leads to that is written.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be written; or it is a device or a pipe, whose place no file may take.

    Example:
        >>> with whole(Path("runs/weights.bin")) as file:
        ...     file.write(b"all of it")
        9
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "is no regular file", str(path))
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_text(path: Path, content: str) -> None:
    """Write a text in UTF-8, whole or not at all.

    Example:
        >>> write_text(Path("runs/plan.json"), "{}")
        >>> Path("runs/plan.json").read_text()
        '{}'
    """
    with whole(path) as file:
        file.write(content.encode())
