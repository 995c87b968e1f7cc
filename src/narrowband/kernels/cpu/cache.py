"""Compiled loops on disk: one file for each loop and the types of its arguments.

Numba's own cache lies beside the sources and knows them by path, so that every installation compiles anew, and two
processes that add to the same loop at once can leave one's code under the other's name. Here a file's name says all
that its content depends on (the sources of all loops, Python, Numba, the processor, the loop, its types), and a file is
moved into place when it is complete. So whoever has the same sources finds the same files, and it does not matter who
writes first.

Numba has no public way to say where compiled code is kept. What is used of it instead is in :class:`LoopCache`: the
attribute that holds a cache, and how a result is taken apart and put together. Where another version of Numba does that
otherwise, loops are compiled in every process; a test says so.
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

#: Folders of other sources or versions that are kept: the others have not been used for longer.
_KEPT_FOLDERS = 16

_SOURCES = Path(__file__).parent


def keep(dispatcher: Any) -> Any:
    """Have a loop look for its code on disk before it is compiled, and leave it there afterwards."""
    dispatcher._cache = LoopCache(dispatcher.py_func)
    return dispatcher


class LoopCache(NullCache):
    """What Numba asks for compiled code of one loop, and gives it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"

    @property
    def cache_path(self) -> str | None:
        path = folder()
        return None if path is None else str(path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        found = self._load(sig, target_context)
        if found is None and compiling.begins(folder(), _refused()):  # another process may just have compiled it
            found = self._load(sig, target_context)
        return found

    def _load(self, sig: Any, target_context: Any) -> Any:
        path = self._path(sig, target_context.codegen())
        if path is None or not path.is_file():
            return None
        with suppress(Exception):  # whatever is wrong with a file: compiling writes it anew
            return CompileResult._rebuild(target_context, *pickle.loads(path.read_bytes()))
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        compiling.ends()
        path = self._path(sig, data.codegen)
        if path is None or data.library.has_dynamic_globals:
            return
        with suppress(OSError, AttributeError):  # the disk is full, or Numba has changed: the loop works all the same
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
    """Where loops of these sources are kept; None where nothing can be written, or nobody knows what they are of."""
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
    """The folder that comes first, where loops are kept elsewhere because it cannot be written."""
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
    """Of all that code depends on but for the processor: equal for equal sources, wherever they are installed, in a zip
    archive too. None where the sources are left out: code of another version would have the same name.
    """
    parts = [sys.implementation.cache_tag or "", platform.python_version(), numba.__version__, llvmlite.__version__]
    digest = hashlib.sha256(repr(parts).encode())
    package = files("narrowband.kernels")  # its own files hold constants that loops take in when they are compiled
    found = {f"cpu/{file.name}": file for file in (package / "cpu").iterdir()}
    found |= {file.name: file for file in package.iterdir()}
    sources = {name: file for name, file in found.items() if name.endswith(".py")}
    for name in sorted(sources):
        digest.update(f"\0{name}\0".encode() + sources[name].read_bytes())
    return None if not sources else f"loops-{digest.hexdigest()[:24]}"


def _forget_others(parent: Path, mine: Path) -> None:
    """Keep the folders that were used last."""
    with suppress(OSError):
        others = sorted(parent.glob("loops-*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[_KEPT_FOLDERS:]:
            if path != mine:
                for file in path.iterdir():
                    file.unlink(missing_ok=True)
                path.rmdir()
