"""The tables of loops that tests compare with each other, and call by themselves."""

from __future__ import annotations

from narrowband.kernels.backends import Backend

cpu, reference = (Backend(f"narrowband.kernels.{name}") for name in ("cpu", "reference"))
