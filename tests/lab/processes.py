"""Whether a lab can be had, and programs that its ranks run."""

from __future__ import annotations

import functools
import sys
import textwrap

from narrowband.lab import LabConfig, requirements

LIMIT_S = 240.0  # only a lab that hangs takes this long; no test measures it


@functools.cache
def lacking(*, netem: bool = False) -> list[str]:
    """What this machine lacks for tests that are marked with ``lab``.

    A lab is tried to find out, so this is not asked as a file is imported, which all ranks and test runners do.
    """
    return requirements(LabConfig(nodes=1, **({"delay": "5ms", "loss": "50%"} if netem else {})))


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]
