"""What older versions of PyTorch cannot do by themselves, so that nothing of this library can be tested there."""

from __future__ import annotations

import pytest
import torch

__all__ = ["OLDEST", "since_2_12"]

#: Whether this is the oldest version that the library works with.
OLDEST = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


def since_2_12(why: str) -> pytest.MarkDecorator:
    """Skip a test with PyTorch 2.11."""
    return pytest.mark.skipif(OLDEST, reason=f"PyTorch {torch.__version__}: {why}")
