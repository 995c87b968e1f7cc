"""Ranks on this machine's loopback interface: one process imports what takes seconds, and forks them.

The parent calls :func:`run_on_loopback`, which starts this module as a process of its own, the *launcher*. The launcher
imports PyTorch and Numba, forks one process per rank, each of which runs a module as ``python -m`` would, and ends with
the first failure or when all are done. Where a fork is not safe after such imports, on macOS, it starts each rank anew.

Everyone ends with the parent, however that ends. The parent holds the writing end of a pipe that the launcher and all
ranks have as standard input. Nothing is ever written, so reading from it returns when the parent is gone.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WATCH_STDIN", "end_with_parent", "run_on_loopback"]

#: The environment variable of ranks that end with their parent.
WATCH_STDIN = "NARROWBAND_END_WITH_STDIN"

#: What ranks get to end by themselves.
_GRACE_S = 5.0
_POLL_S = 0.1
_SIGNALLED = 128  # exit codes above it: ended by a signal


def run_on_loopback(module: str, arguments: Sequence[str], nodes: int, output: int) -> int:
    """Run ``python -m module arguments`` once per rank, with torchrun's environment variables.

    Args:
        module: dotted name.
        arguments: the ranks' ``sys.argv[1:]``.
        nodes: number of ranks.
        output: file descriptor of what ranks print.

    Returns:
        0 when all ranks ended well, or else the exit code of the first that did not; 128 + n after signal n.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(nodes),
        "LOCAL_WORLD_SIZE": str(nodes),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    shared.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores already
    launcher = subprocess.Popen(
        [sys.executable, "-m", "narrowband.bench.loopback", module, *arguments],
        env=shared,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends the launcher and all ranks
    )
    try:
        code = launcher.wait()
        return code if code >= 0 else _SIGNALLED - code
    finally:
        if launcher.poll() != 0:
            _end_group(launcher)
        if launcher.stdin is not None:
            launcher.stdin.close()


def _end_group(launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher and the ranks that are left: first by asking."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(launcher.pid, how)
        except (ProcessLookupError, PermissionError):
            break
        deadline = time.monotonic() + _GRACE_S
        while _is_there(launcher) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
    launcher.wait()


def _is_there(launcher: subprocess.Popen[bytes]) -> bool:
    """Whether the launcher, or a rank, still runs."""
    launcher.poll()
    try:
        os.killpg(launcher.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_with_parent() -> None:
    """End this process when its parent has gone: to be called once, by a process of :func:`run_on_loopback`."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- the launcher ----------------------------------------------------------------------------------------------------


def _launch(module: str, arguments: Sequence[str]) -> int:
    """Start the ranks and wait: 0, or the first failure's exit code. The parent ends those that are left."""
    start = _fork if sys.platform == "linux" else _spawn
    if start is _fork:
        _import_slowly()
    ranks = {start(module, arguments, rank) for rank in range(int(os.environ["WORLD_SIZE"]))}
    end_with_parent()  # after the forks: a forked process has no threads
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code:
            return code if code > 0 else _SIGNALLED - code
    return 0


def _import_slowly() -> None:
    """What every rank needs, and takes seconds. None of it may start a thread."""
    import numba  # noqa: F401

    import narrowband  # noqa: F401


def _place(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), WATCH_STDIN: "1"}


def _fork(module: str, arguments: Sequence[str], rank: int) -> int:
    pid = os.fork()
    if not pid:
        os.environ.update(_place(rank))
        sys.argv = [module, *arguments]
        _as_a_program(module)
    return pid


def _as_a_program(module: str) -> NoReturn:
    """Run a module as ``python -m`` does, and end this process as the interpreter would."""
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _spawn(module: str, arguments: Sequence[str], rank: int) -> int:
    command = [sys.executable, "-m", module, *arguments]
    return os.posix_spawn(sys.executable, command, os.environ | _place(rank))  # a Popen might wait in _launch's place


if __name__ == "__main__":
    sys.exit(_launch(sys.argv[1], sys.argv[2:]))
