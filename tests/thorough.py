"""Parameters that only ``make thorough`` runs: one more combination of what the others run."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["thorough"]


def thorough(*values: Any) -> list[Any]:
    """For a ``parametrize`` list: ``[4, *thorough(3, 8)]``. A tuple stands for several arguments."""
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=pytest.mark.thorough) for each in several]
