"""Ctrl-C or SIGTERM of the command line, in a process of its own, when something has been written."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from narrowband.cli.exits import STOPPED, TERMINATED

LIMIT_S = 180.0  # only a failure takes this long


def stopped(command: Sequence[str], ready: Callable[[], object], how: int = signal.SIGINT) -> str:
    """Run a command until ``ready()``, and then press Ctrl-C, or send SIGTERM; what it printed, in one line.

    The command must end as a shell expects, and print nothing but that it was stopped. Its fork server, if it has one,
    outlives it for a moment and holds its terminal: this waits for both.
    """
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"COLUMNS": "1000"},
    )
    try:
        end = time.monotonic() + LIMIT_S
        while not ready():
            assert time.monotonic() < end
            assert run.poll() is None
            time.sleep(0.05)
        run.send_signal(how)
        out, err = run.communicate(timeout=LIMIT_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == {signal.SIGINT: STOPPED, signal.SIGTERM: TERMINATED}[how], err
    (sentence,) = (line for line in err.splitlines() if not line.startswith("narrowband: compiling loops"))
    assert sentence.startswith("Stopped.")
    return " ".join(out.split())
