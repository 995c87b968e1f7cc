"""The command ``narrowband``. Each subcommand is a dataclass: its fields are the options, its docstring is the help."""

from __future__ import annotations

from narrowband.cli.main import main

__all__ = ["main"]
