"""Record how a result was made, and write and read the JSON files that hold it.

So that results can be repeated, every JSON file names the command, the commit, the machine, the versions and the seed
beside its rows.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from importlib import import_module
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowband.files import write_text

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "commit",
    "commit_of",
    "machine",
    "provenance",
    "read_json",
    "sources",
    "sources_of",
    "versions",
    "write_json",
]

#: Distributions whose versions change results, besides this one and PyTorch.
_DISTRIBUTIONS = ("numpy", "numba")


def machine() -> dict[str, str | int | float | None]:
    """Describe the hardware and the kernel, without anything that identifies the host or its user."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": platform.system(),
        "release": platform.release(),
        "architecture": platform.machine(),
        "gpu": _gpu(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on, as far as they are installed."""
    # Read __version__, not the distribution's metadata: a distribution named narrowband would be another project's, and
    # PyTorch's metadata does not always name the build.
    own = {name: str(import_module(name).__version__) for name in ("narrowband", "torch")}
    found = {"python": platform.python_version(), **own}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def sources() -> str:
    """Return a hash of this package's code. It also identifies code outside a checkout, or in one with changes."""
    return sources_of(files("narrowband"))


def sources_of(package: Traversable) -> str:
    """Return the same hash of any folder, or of one in a zip archive.

    Example:
        >>> len(sources_of(Path(nb.__file__).parent))
        16
    """
    digest = hashlib.sha256()
    for name, file in sorted(_source_files(package), key=itemgetter(0)):
        content = file.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _source_files(folder: Traversable, inside: str = "") -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        name = inside + each.name
        if each.is_dir() and each.name != "__pycache__":
            yield from _source_files(each, f"{name}/")
        elif name.endswith(_SOURCES) and each.is_file():  # an editor's lock is a link to nowhere
            yield name, each


#: Extensions of files that run, or are read at run time. Outside of caches, compiled files are those of a package
#: without sources.
_SOURCES = (".py", ".pyc", ".json", ".html")


def commit() -> str | None:
    """Return the commit of this code, with ``-dirty`` appended if it was changed; None outside a checkout."""
    return commit_of(Path(__file__).resolve().parent)


def commit_of(folder: Path) -> str | None:
    """Return the commit that a folder was checked out from; None outside a checkout.

    ``-dirty`` is appended if any tracked file of the checkout was changed, except results: what one run has written
    does not change the next one. Also None for a folder that no commit contains, because an installation in a virtual
    environment may lie in the checkout of another project.
    """
    try:
        _git(folder, "ls-files", "--error-unmatch", ".")  # fails if nothing in the folder is tracked
        found = _git(folder, "rev-parse", "HEAD")
        results = [f":(top,exclude){name}" for name in _RESULTS]
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", *results)
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{found}-dirty" if changed else found


#: Folders of a checkout that hold results, and pages that are generated from them.
_RESULTS = ("benchmarks/results", "reproduce/results", "docs/results")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


#: Environment variables that a measurement may depend on.
_DECIDES = ("LD_PRELOAD", "MALLOC_CONF", "GLIBC_TUNABLES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "NARROWBAND_LAB")


def provenance(seed: int | None = None, command: list[str] | None = None) -> dict[str, Any]:
    """Return the fields that every result file has beside its rows.

    Args:
        seed: None if nothing is random.
        command: None: this process's own.
    """
    if command is None:
        command = ["narrowband", *sys.argv[1:]]
    return {
        "command": shlex.join(command),
        "commit": commit(),
        "sources": sources(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": seed,
        "machine": machine(),
        "versions": versions(),
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """Return the environment variables that affect memory allocation and threads, or state a rank's link in the lab.

    Only variables that are set are returned.
    """
    found = {name: os.environ[name] for name in _DECIDES if os.environ.get(name)}
    if "LD_PRELOAD" in found:  # keep the names of libraries, not their paths on this machine
        found["LD_PRELOAD"] = " ".join(Path(path).name for path in found["LD_PRELOAD"].replace(":", " ").split())
    return found


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` to ``path`` atomically, creating the directories above it."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_json(
    path: Path, keys: Iterable[str] = (), *, remedy: str = "delete it to have it made again"
) -> dict[str, Any]:
    """Read a file of :func:`write_json`, and check that it holds a JSON object with these keys.

    Args:
        path: of the file.
        keys: keys that the object must have.
        remedy: what to do about an invalid file, for the message. The default suits files that are made on demand.

    Raises:
        ValueError: the file is truncated, is something else, or comes from a version that recorded other keys. The
            message says what to do.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON's and UTF-8's
        raise ValueError(f"{path} is incomplete or not a JSON file: {error}; {remedy}") from error
    if not isinstance(content, dict):
        lacks = "is not a JSON object"
    elif missing := [key for key in keys if key not in content]:
        lacks = f"lacks {', '.join(missing)}"
    else:
        return content
    raise ValueError(f"{path} {lacks}: another version or another program wrote it; {remedy}")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
