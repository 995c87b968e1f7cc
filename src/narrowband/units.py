"""Format numbers for people, in decimal units as links and storage are sold: 1 MB is 10**6 bytes.

A value that was not measured, or is not finite, is printed as a dash, because "nan" tells a reader nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, SupportsIndex

__all__ = [
    "NOTHING",
    "counted",
    "format_bytes",
    "format_count",
    "format_loss",
    "format_or_dash",
    "format_rate",
    "format_seconds",
    "plain_number",
    "whole_number",
]

NOTHING = "–"


def whole_number(name: str, value: SupportsIndex) -> int:
    """Convert an integer, which may be NumPy's, to a Python int.

    NumPy's integers overflow in the arithmetic of seeds, and ``torch.load`` refuses a state that holds one.

    Raises:
        TypeError: ``value`` is not an integer; the message has the name.

    Example:
        >>> import numpy as np
        >>> whole_number("seed", np.int64(3))
        3
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is not a whole number") from None


def plain_number(value: Any) -> Any:
    """Convert a number, which may be NumPy's, to Python's own type. Other values are returned as they are.

    Example:
        >>> import numpy as np
        >>> plain_number(np.int64(3)), plain_number(np.float32(0.5)), plain_number("off")
        (3, 0.5, 'off')
    """
    if type(value) in (bool, int, float):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


def format_or_dash(form: Callable[[float], str], value: float | None) -> str:
    """``form(value)``, or a dash where there is no such number: ``format_or_dash("{:.2f}".format, None) == "–"``."""
    return NOTHING if value is None or not math.isfinite(value) else form(value)


def format_loss(loss: float | None, digits: int = 3) -> str:
    """``format_loss(2.4294) == "2.429"``; "diverged" for one that is missing or not finite."""
    return f"{loss:.{digits}f}" if loss is not None and math.isfinite(loss) else "diverged"


def format_bytes(count: float) -> str:
    """``format_bytes(13_267_200) == "13.3 MB"``."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def format_count(count: float) -> str:
    """``format_count(3_307_008) == "3.31 M"``."""
    return _scaled(count, ("", "k", "M", "G")).rstrip()


def counted(count: int, one: str, several: str | None = None) -> str:
    """``counted(1, "step") == "1 step"``, ``counted(2, "step") == "2 steps"``; and, with a verb,
    ``counted(2, "step is", "steps are") == "2 steps are"``.
    """
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def format_rate(bits_per_second: float) -> str:
    """``format_rate(200e6) == "200 Mbit/s"``."""
    return _scaled(bits_per_second, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def format_seconds(seconds: float) -> str:
    """``format_seconds(0.0123) == "12.3 ms"``."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds >= 120.0:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    if seconds >= 1.0 or seconds == 0.0:
        return f"{seconds:.3g} s"
    return _scaled(seconds * 1e9, ("ns", "µs", "ms", "s"))


def _scaled(value: float, units: tuple[str, ...]) -> str:
    if not math.isfinite(value):
        return NOTHING
    position = 0
    while abs(value) >= 999.5 and position < len(units) - 1:
        value /= 1000.0
        position += 1
    return f"{value:.3g} {units[position]}"
