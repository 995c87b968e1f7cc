"""Ctrl-C or SIGTERM of the command line, in a process of its own, when something has been written."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

from narrowband.cli import main
from narrowband.cli.exits import STOPPED, TERMINATED
from tests.ranks import run_ranks

LIMIT_S = 180.0  # only a failure takes this long


def stopped(words: Sequence[str], folder: Path, ready: str, how: signal.Signals = signal.SIGINT) -> str:
    """Run a command line until ``folder`` has a file of the pattern ``ready``, and then press Ctrl-C, or send SIGTERM;
    what it printed, in one line.

    The command must end as a shell expects, and print nothing but that it was stopped. Its process and those of its
    ranks come from the fork server of the tests, which has imported PyTorch. ``tests/bench/test_loopback.py`` stops
    processes that start a server of their own.
    """
    told = dict(os.environ), str(folder), ready, int(how)
    ((code, out, err),) = run_ranks(_command, 1, list(words), *told, fresh=True, group=False, timeout_s=LIMIT_S)
    assert code == {signal.SIGINT: STOPPED, signal.SIGTERM: TERMINATED}[how], err
    (sentence,) = (line for line in err.splitlines() if not line.startswith("narrowband: compiling loops"))
    assert sentence.startswith("Stopped.")
    return " ".join(out.split())


def _command(
    rank: int, world_size: int, words: list[str], environment: dict[str, str], folder: str, ready: str, how: int
) -> tuple[int, str, str]:
    """The command's exit code, and what it and its ranks wrote to standard output and error."""
    os.environ.update(environment | {"COLUMNS": "1000"})
    tempfile.tempdir = None  # so that TMPDIR is read again
    for server in (forkserver, forkserver._forkserver):  # ranks come from where this process has come from
        server.ensure_running = lambda: None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done = threading.Event()

    def stop() -> None:
        while not done.wait(0.05):
            if any(Path(folder).glob(ready)):
                os.kill(os.getpid(), how)
                return

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        kept = os.dup(1), os.dup(2)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        thread = threading.Thread(target=stop, daemon=True)
        thread.start()
        try:
            code = main(words)
        finally:
            done.set()
            thread.join()
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()
