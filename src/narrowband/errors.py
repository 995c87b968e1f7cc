"""The library's own exceptions. Arguments raise ValueError or TypeError; these say what those cannot."""

from __future__ import annotations

__all__ = ["DisagreementError", "PayloadError", "UnsupportedError"]


class DisagreementError(ValueError):
    """Ranks were given, or told, different things. Raised on all of them, before anything was exchanged."""


class PayloadError(ValueError):
    """Bytes that cannot be decoded: too short, too long, or naming an element that does not exist.

    Raised before anything is written to the output.
    """


class UnsupportedError(RuntimeError):
    """A combination of features that cannot work, refused at set-up rather than at step 1,000."""
