"""Which backend runs a tensor, and what that imports."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from narrowband import kernels

if TYPE_CHECKING:
    pass


def test_the_backend_is_chosen_by_device_and_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NARROWBAND_KERNELS", raising=False)
    assert kernels.backend_for("cpu").name == "cpu"
    assert kernels.backend_for("cuda").name == "reference"
    monkeypatch.setenv("NARROWBAND_KERNELS", "reference")
    assert kernels.backend_for("cpu").name == "reference"


def test_importing_the_package_does_not_import_numba() -> None:
    code = "import sys, narrowband.kernels; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
