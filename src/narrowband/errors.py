"""The library's own exceptions, and how to install what is missing.

Arguments raise ValueError or TypeError; the exceptions say what those cannot.
"""

from __future__ import annotations

import re

__all__ = ["DISTRIBUTION", "DisagreementError", "PayloadError", "UnsupportedError", "need", "pip_install"]

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
