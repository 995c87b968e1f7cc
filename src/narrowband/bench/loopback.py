"""Run ranks on this machine's loopback interface.

A fork server (of ``multiprocessing``) imports PyTorch, Numba and narrowband once, and every rank of every run of this
process is forked from it, so that no rank waits seconds for imports. On macOS, where a fork after such imports is not
safe, each rank is a new interpreter. Either way, a rank runs its module as ``python -m`` would.

All processes end with the parent, however it ends: every rank watches it, and so does the server.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.process import BaseProcess
    from pathlib import Path

__all__ = ["IMPORTS", "end_with_parent", "rank_context", "run_on_loopback"]

#: The module that the fork server imports.
IMPORTS = "narrowband.bench.imports"

#: Seconds that ranks get to end by themselves.
_GRACE_S = 5.0
_POLL_S = 0.01
_SOCKET_PATH = 107  # bytes in the path of a socket, at most
_SOCKET_NAME = len("/pymp-12345678/listener-12345678")  # what multiprocessing adds to the folder for temporary files
_SIGNALLED = 128  # exit codes above it: ended by a signal


def run_on_loopback(module: str, arguments: Sequence[str], nodes: int, log: Path) -> int:
    """Run ``python -m module arguments`` once per rank, with torchrun's environment variables.

    Args:
        module: dotted name.
        arguments: the ranks' ``sys.argv[1:]``.
        nodes: number of ranks.
        log: the file that what ranks print is appended to.

    Returns:
        0 if all ranks succeeded, else the exit code of the first that failed; 128 + n after signal n.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"OMP_NUM_THREADS": "1"} | os.environ  # ranks share the cores already
    shared |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(nodes),
        "LOCAL_WORLD_SIZE": str(nodes),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    context = rank_context()
    ranks: list[BaseProcess] = []
    code = None
    try:
        for rank in range(nodes):
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            told = (module, list(arguments), environment, os.getcwd(), str(log))
            ranks.append(context.Process(target=_rank, args=told, name=f"narrowband-rank{rank}"))  # type: ignore[attr-defined]
            ranks[-1].start()
        code = _first_failure(ranks)
        return code
    finally:
        if code != 0:
            _end(ranks)


def rank_context() -> multiprocessing.context.BaseContext:
    """Return the multiprocessing context that starts ranks: from the fork server, where a fork is safe.

    Ctrl-C is blocked in processes of the fork server.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([IMPORTS])  # has an effect only if the server is not running yet
    resource_tracker.ensure_running()  # otherwise the server would start it, and unblock SIGINT after that
    _let_sockets_fit()
    with _without_ctrl_c():
        forkserver.ensure_running()
    return context


def _let_sockets_fit() -> None:
    """Have multiprocessing make the folder of its sockets in /tmp if their paths would be too long in TMPDIR, where
    clusters and build systems put names of jobs.
    """
    chosen = tempfile.gettempdir()
    if len(os.fsencode(chosen)) + _SOCKET_NAME <= _SOCKET_PATH:
        return
    tempfile.tempdir = "/tmp"
    try:
        util.get_temp_dir()  # which it keeps
    finally:
        tempfile.tempdir = chosen


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C permanently in processes that are started in this block; this process gets it afterwards.

    The server imports modules for seconds before it ignores the signal itself, and would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _first_failure(ranks: Sequence[BaseProcess]) -> int:
    """Wait for the ranks: 0, or the exit code of the first that failed."""
    waiting = {rank.sentinel: rank for rank in ranks}
    while waiting:
        for sentinel in wait(list(waiting)):
            rank = waiting.pop(sentinel)  # type: ignore[arg-type]
            rank.join()
            if rank.exitcode:
                return rank.exitcode if rank.exitcode > 0 else _SIGNALLED - rank.exitcode
    return 0


def _end(ranks: Sequence[BaseProcess]) -> None:
    """End the remaining ranks and the processes that they started. Ask them first."""
    ranks = [rank for rank in ranks if rank.pid is not None]  # the others were interrupted while starting
    groups = [rank.pid for rank in ranks if rank.pid is not None]
    for how in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            _signal(group, how)
        deadline = time.monotonic() + _GRACE_S
        while any(_signal(group, 0) for group in groups) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    for rank in ranks:
        rank.join()


def _signal(group: int, how: int) -> bool:
    """Send a signal (0: none) to a rank's process group, and return whether the group exists."""
    try:
        os.killpg(group, how)
    except PermissionError:
        return False
    except ProcessLookupError:  # it has ended, or has no process group of its own yet
        try:
            os.kill(group, how)
        except ProcessLookupError:
            return False
    return True


# ---- a rank ----------------------------------------------------------------------------------------------------------


def _rank(module: str, arguments: list[str], environment: dict[str, str], directory: str, log: str) -> None:
    """Run a rank, from start to exit."""
    os.setsid()  # Ctrl-C then reaches only the parent, which ends all ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the server has blocked it
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:  # the parent was stopped while this rank started, and has deleted its log
        os._exit(1)
    for standard in (1, 2):
        os.dup2(output, standard)
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with_parent() -> None:
    """End this process, which :mod:`multiprocessing` has started, when its parent has ended, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
