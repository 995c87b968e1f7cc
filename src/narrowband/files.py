"""Files that are whole, or not there at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["whole", "write_text"]


@contextlib.contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of ``path`` when all is written, and of nothing if that fails.

    Several processes may do so at once: the last one's file stays. Folders above it are made.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be written.

    Example:
        >>> with whole(Path("runs/weights.bin")) as file:
        ...     file.write(b"all of it")
        9
    """
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
