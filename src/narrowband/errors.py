"""The library's own exceptions, how to install what is missing, and what is said of errors of users' code.

Arguments raise ValueError or TypeError; the exceptions say what those cannot.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "DISTRIBUTION",
    "DisagreementError",
    "PayloadError",
    "UnsupportedError",
    "is_out_of_memory",
    "need",
    "pip_install",
    "users_errors",
]

#: What pip installs. ``import narrowband`` and the command ``narrowband`` have another name than this, because on PyPI
#: the name ``narrowband`` belongs to another project (for NB-IoT modems).
DISTRIBUTION = "torch-narrowband"


class DisagreementError(ValueError):
    """Ranks were given, or told, different things. Raised on all of them, before anything was exchanged."""


class PayloadError(ValueError):
    """Bytes that cannot be decoded: too short, too long, or naming an element that does not exist.

    Raised before anything is written to the output.
    """


class UnsupportedError(RuntimeError):
    """A combination of features that cannot work, refused at set-up rather than at step 1,000."""


def pip_install(extra: str) -> str:
    """How to install an optional part of this library; for messages that say that the part is missing.

    Nothing is on PyPI yet, and anybody may take a name there: so this is a command for the clone.

    Args:
        extra: ``adapt`` or ``plots``, for example, as in pyproject.toml.

    Example:
        >>> pip_install("plots")
        "install the extra 'plots' of narrowband: pip install '.[plots]' in the clone"
    """
    return f"install the extra '{extra}' of narrowband: pip install '.[{extra}]' in the clone"


def need(package: str, oldest: str, newest: str, *, extra: str) -> None:
    """Refuse to go on without a version of a package that this library works with.

    Args:
        package: its name for pip.
        oldest: the first version that will do, such as ``"2.4"``.
        newest: the last major version that will do, such as ``"2"``.
        extra: the optional part of this library that installs it.

    Raises:
        ImportError: it is not installed.
        UnsupportedError: it is an older version, or a later major one.

    Example:
        >>> need("torch", "2.11", "2", extra="accelerate")
    """
    from importlib import metadata  # where it is used: `import narrowband` stays cheap

    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed: {pip_install(extra)}", name=package) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    least = tuple(map(int, oldest.split(".")))
    if numbers < least or numbers[0] > int(newest):
        raise UnsupportedError(
            f"{package} {version} is installed, and narrowband works with {oldest} and later, up to version {newest}: "
            f"pip install -U '{package}>={oldest},<{int(newest) + 1}'"
        )


@contextlib.contextmanager
def users_errors(what: str, path: str | None = None) -> Iterator[None]:
    """Say in one sentence what a user's own code raises; nothing is said of memory that ran out.

    Args:
        what: the sentence begins with this.
        path: of a user's file, whose line is named where the error comes from it.

    Raises:
        ValueError: the sentence.

    Example:
        >>> with users_errors("forward raised"):
        ...     raise KeyError("deep")
        Traceback (most recent call last):
        ValueError: forward raised KeyError: 'deep'
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        text = str(error).strip().splitlines()
        here = path and Path(path).resolve()
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == here]
        at = f" ({path}, line {lines[-1]})" if lines else ""
        raise ValueError(f"{what} {type(error).__name__}{': ' if text else ''}{text[0] if text else ''}{at}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of this machine or of its GPU.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(KeyError("deep"))
        (True, False)
    """
    import torch  # where it is used: this module is imported before it

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
