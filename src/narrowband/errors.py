"""The library's exceptions, checks of optional packages, and messages for errors that users' code raises.

Wrong arguments raise ValueError or TypeError; the exceptions here are for what those two cannot express.
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

#: The name of the distribution, for pip. It differs from ``import narrowband`` and from the command ``narrowband``,
#: because the name ``narrowband`` on PyPI belongs to another project (for NB-IoT modems).
DISTRIBUTION = "torch-narrowband"


class DisagreementError(ValueError):
    """Ranks have different settings or arguments. Raised on all ranks, before anything is exchanged."""


class PayloadError(ValueError):
    """Bytes that cannot be decoded: too short, too long, or naming an element that does not exist.

    Raised before anything is written to the output.
    """


class UnsupportedError(RuntimeError):
    """A combination of features that cannot work, refused at set-up rather than at step 1,000."""


def pip_install(extra: str) -> str:
    """Return how to install an optional part of this library, for messages that say that the part is missing.

    The command is for a clone of the repository: the library is not on PyPI yet, where anybody may take its name.

    Args:
        extra: ``adapt`` or ``plots``, for example, as in pyproject.toml.

    Example:
        >>> pip_install("plots")
        "install the extra 'plots' of narrowband: pip install '.[plots]' in the clone"
    """
    return f"install the extra '{extra}' of narrowband: pip install '.[{extra}]' in the clone"


def need(package: str, oldest: str, newest: str, *, extra: str) -> None:
    """Check that an optional package is installed in a version that this library works with.

    Args:
        package: its name for pip.
        oldest: the oldest supported version, such as ``"2.4"``.
        newest: the newest supported major version, such as ``"2"``.
        extra: the extra of this library that installs the package.

    Raises:
        ImportError: the package is not installed.
        UnsupportedError: its version is older than ``oldest``, or of a later major version than ``newest``.

    Example:
        >>> need("torch", "2.11", "2", extra="accelerate")
    """
    from importlib import metadata  # imported here to keep `import narrowband` cheap

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
    """Turn an exception that a user's own code raises into a ValueError of one sentence.

    Errors of running out of memory pass through unchanged.

    Args:
        what: the beginning of the sentence.
        path: of a user's file. If the error was raised in it, the sentence names the line.

    Raises:
        ValueError: with the sentence as its message.

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
    """Return whether the error says that this machine or its GPU ran out of memory.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(KeyError("deep"))
        (True, False)
    """
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    import torch  # imported here, because this module is imported before torch

    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
