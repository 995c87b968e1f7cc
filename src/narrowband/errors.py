"""The library's own exceptions, and how to install what is missing.

Arguments raise ValueError or TypeError; the exceptions say what those cannot.
"""

from __future__ import annotations

__all__ = ["DISTRIBUTION", "DisagreementError", "PayloadError", "UnsupportedError", "pip_install"]

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
    """The command that installs this library with an optional part; for messages that say that the part is missing.

    Args:
        extra: ``adapt`` or ``plots``, for example, as in pyproject.toml.

    Example:
        >>> pip_install("plots")
        "pip install -U 'torch-narrowband[plots]'"
    """
    return f"pip install -U '{DISTRIBUTION}[{extra}]'"
