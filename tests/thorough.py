"""Parameters that only ``make thorough`` runs: one more combination of what the others run."""

from __future__ import annotations

import os
from typing import Any

import pytest

__all__ = ["examples", "thorough"]


def thorough(*values: Any) -> list[Any]:
    """For a ``parametrize`` list: ``[4, *thorough(3, 8)]``. A tuple stands for several arguments."""
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=pytest.mark.thorough) for each in several]


def examples(number: int) -> int:
    """How many examples a property is tested with: so many where a developer runs the tests, a fifth in CI, where they
    are always the same.
    """
    return number // 5 if os.environ.get("CI") else number
