"""Programs that ranks run, where a lab can be had."""

from __future__ import annotations

import sys
import textwrap

import pytest

from narrowband.lab import LabConfig, requirements

MISSING = requirements(LabConfig(nodes=1))


needs_lab = pytest.mark.skipif(bool(MISSING), reason=" ".join(MISSING))


LIMIT_S = 240.0  # only a lab that hangs takes this long; no test measures it


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]
