"""Ranks on this machine's loopback interface.

A fork server (of ``multiprocessing``) imports PyTorch, Numba and narrowband once, and every rank of every run of this
process is forked from it, so that no rank waits seconds for imports. Where a fork is not safe after such imports, on
macOS, each rank is a new interpreter. Either way a rank runs its module as ``python -m`` would.

Everyone ends with the parent, however that ends: a rank watches it, and so does the server.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.process import BaseProcess
    from pathlib import Path

__all__ = ["IMPORTS", "end_with_parent", "run_on_loopback"]

#: The module that the fork server imports.
IMPORTS = "narrowband.bench.imports"

#: What ranks get to end by themselves.
_GRACE_S = 5.0
_POLL_S = 0.01
_SIGNALLED = 128  # exit codes above it: ended by a signal


def run_on_loopback(module: str, arguments: Sequence[str], nodes: int, log: Path) -> int:
    """Run ``python -m module arguments`` once per rank, with torchrun's environment variables.

    Args:
        module: dotted name.
        arguments: the ranks' ``sys.argv[1:]``.
        nodes: number of ranks.
        log: the file that what ranks print is appended to.

    Returns:
        0 when all ranks ended well, or else the exit code of the first that did not; 128 + n after signal n.
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
    context = _context()
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


def _context() -> multiprocessing.context.BaseContext:
    """How ranks are started."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([IMPORTS])  # counts where the server does not run yet
    resource_tracker.ensure_running()  # the server would start it, and let SIGINT through behind that
    with _without_ctrl_c():
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Keep Ctrl-C from processes that are started meanwhile, for good; this one hears it later.

    The server imports for seconds before it ignores the signal by itself, and would print a traceback.
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
    """End the ranks that are left, and what these started: first by asking."""
    ranks = [rank for rank in ranks if rank.pid is not None]  # the others were interrupted as they started
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
    """Send a rank's process group a signal (0: none), and say whether there is anybody."""
    try:
        os.killpg(group, how)
    except PermissionError:
        return False
    except ProcessLookupError:  # gone, or so young that it has no group of its own yet
        try:
            os.kill(group, how)
        except ProcessLookupError:
            return False
    return True


# ---- a rank ----------------------------------------------------------------------------------------------------------


def _rank(module: str, arguments: list[str], environment: dict[str, str], directory: str, log: str) -> None:
    """A rank's life."""
    os.setsid()  # Ctrl-C reaches the parent alone, which then ends all ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the server has it blocked
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:  # the parent was stopped as this rank started, and has taken its log along
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
    """In a process that :mod:`multiprocessing` has started: end it when the one that started it has ended, however."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
