"""A cache of compiled loops on disk: one file for each loop and types of arguments.

Numba's own cache lies beside the sources and identifies them by path. So every installation compiles anew, and two
processes that add to the same loop at once can store one's code under the other's name. Here the file name contains
everything that the content depends on (the sources of all loops, Python, Numba, the processor, the loop, its types),
and a file is moved into place when it is complete. So processes with the same sources find the same files, and it does
not matter which of them writes first.

Numba has no public way to set a cache for compiled code. :class:`LoopCache` contains all private parts of Numba that
are used instead: the attribute that holds a cache, and how a compiled result is serialized and rebuilt. If another
version of Numba does this differently, loops are compiled in every process, and a test reports it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import sys
import tempfile
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite
import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from narrowband.files import whole
from narrowband.kernels import compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LoopCache", "folder", "keep"]

#: How many folders of other sources or versions are kept: those that were used last.
_KEPT_FOLDERS = 16

_SOURCES = Path(__file__).parent


def keep(dispatcher: Any) -> Any:
    """Make a loop look for its code on disk before it is compiled, and store it there afterwards."""
    dispatcher._cache = LoopCache(dispatcher.py_func)
    return dispatcher


class LoopCache(NullCache):
    """The cache of one loop, with the interface that Numba calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"

    @property
    def cache_path(self) -> str | None:
        path = folder()
        return None if path is None else str(path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        found = self._load(sig, target_context)
        if found is None and compiling.begins(folder(), _refused()):  # another process may have compiled it just now
            found = self._load(sig, target_context)
        return found

    def _load(self, sig: Any, target_context: Any) -> Any:
        path = self._path(sig, target_context.codegen())
        if path is None or not path.is_file():
            return None
        with suppress(Exception):  # whatever is wrong with the file, compiling replaces it
            return CompileResult._rebuild(target_context, *pickle.loads(path.read_bytes()))
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        compiling.ends()
        path = self._path(sig, data.codegen)
        if path is None or data.library.has_dynamic_globals:
            return
        with suppress(OSError, AttributeError):  # full disk, or a changed Numba: the loop works without
            content = dumps(data._reduce())
            with whole(path) as file:
                file.write(content)

    def _path(self, sig: Any, codegen: Any) -> Path | None:
        here = folder()
        if here is None:
            return None
        what = hashlib.sha256(repr((str(sig), codegen.magic_tuple())).encode()).hexdigest()
        return here / f"{self.name}-{what[:24]}.loop"


@functools.cache
def folder() -> Path | None:
    """Return the folder for loops of these sources; None if nothing can be written, or the sources are unknown."""
    name = _fingerprint()
    if name is None:
        return None
    for parent in _parents():
        path = parent / name
        try:
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
            os.utime(path)
        except OSError:
            continue
        _forget_others(parent, path)
        return path
    return None


def _refused() -> Path | None:
    """Return the preferred folder, if loops are stored elsewhere because it cannot be written; else None."""
    here, first = folder(), next(_parents())
    return None if here is None or here.parent == first else first


def _parents() -> Iterator[Path]:
    chosen = getattr(numba.config, "CACHE_DIR", "")  # NUMBA_CACHE_DIR
    if chosen:
        yield Path(chosen) / "narrowband"
    caches = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # no home at all
        yield (Path(caches) if Path(caches).is_absolute() else Path.home() / ".cache") / "narrowband"
    yield _SOURCES / "__pycache__" / "narrowband"


def _fingerprint() -> str | None:
    """Hash all that code depends on except the processor.

    Equal sources have equal hashes wherever they are installed, also in a zip archive. None if the sources are not
    installed: code of different versions would have the same name.
    """
    parts = [sys.implementation.cache_tag or "", platform.python_version(), numba.__version__, llvmlite.__version__]
    digest = hashlib.sha256(repr(parts).encode())
    package = files("narrowband.kernels")  # its own files hold constants that compiled loops include
    found = {f"cpu/{file.name}": file for file in (package / "cpu").iterdir()}
    found |= {file.name: file for file in package.iterdir()}
    sources = {name: file for name, file in found.items() if name.endswith(".py")}
    for name in sorted(sources):
        digest.update(f"\0{name}\0".encode() + sources[name].read_bytes())
    return None if not sources else f"loops-{digest.hexdigest()[:24]}"


def _forget_others(parent: Path, mine: Path) -> None:
    """Delete the folders of other sources, except those used last."""
    with suppress(OSError):
        others = sorted(parent.glob("loops-*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[_KEPT_FOLDERS:]:
            if path != mine:
                for file in path.iterdir():
                    file.unlink(missing_ok=True)
                path.rmdir()
