"""Compiling without a look at how long guards take: for that Dynamo flushes the processor's cache with each graph, and
that is a sixth of the time in which a small one is compiled. The figure goes into its statistics, which no test reads.
"""

from __future__ import annotations

import sys

__all__ = ["measure_none"]


def measure_none() -> None:
    """Compile so from now on in this process, if it has imported Dynamo."""
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[union-attr]
