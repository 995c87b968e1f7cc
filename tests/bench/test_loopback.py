"""Ranks on loopback: what their server leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
from pathlib import Path
from narrowband.bench.loopback import run_on_loopback

log = Path(sys.argv[1])
log.touch()
sys.exit(run_on_loopback("platform", [], 2, log))
"""


def test_nothing_is_printed_after_the_command_has_ended(tmp_path):
    """The fork server outlives the command for a moment, and holds its terminal: so this waits for both."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "log")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len((tmp_path / "log").read_text().splitlines()) == 2, "a line of each rank"
