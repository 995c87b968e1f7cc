"""Run the command as ``python -m narrowband.cli``, without an installed entry point."""

from __future__ import annotations

import sys

from narrowband.cli import main

if __name__ == "__main__":
    sys.exit(main())
