"""The command ``narrowband``. Each subcommand is a dataclass: its fields are the options, its docstring is the help."""

from __future__ import annotations

import signal
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code.

    Ctrl-C ends a process that runs ``sys.argv`` at once before the command begins, and after it has ended. Nothing has
    to be cleaned up then, and a ``KeyboardInterrupt`` would print a traceback.

    Example:
        >>> main(["--version"])  # doctest: +SKIP
        narrowband 0.1.0
        0
    """
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from narrowband.cli.dispatch import run  # after that line, because it imports for a while

    return run(argv)
