"""What is said where a trainer is not installed, or is one that nobody has tried."""

from __future__ import annotations

import re
from importlib import metadata

from narrowband.errors import UnsupportedError, pip_install

__all__ = ["need"]


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
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed: {pip_install(extra)}", name=package) from None
    numbers = _numbers(version)
    if numbers < _numbers(oldest) or numbers[0] > int(newest):
        raise UnsupportedError(
            f"{package} {version} is installed, and narrowband works with {oldest} and later of version {newest}: "
            f"{pip_install(extra)}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
