"""Run a function on N real gloo processes, from a test, fast.

::

    from tests.ranks import run_ranks


    def mean_of_ranks(rank, world_size, value):
        x = torch.tensor([value + rank])
        dist.all_reduce(x)
        return x.item() / world_size


    def test_mean():
        assert run_ranks(mean_of_ranks, 4, 1.0) == [2.5] * 4

The function runs once per rank as ``fn(rank, world_size, *args)``, in a process of its own, with a gloo process group
over the loopback interface already initialised, one torch thread and ``torch.manual_seed(0)``. Results come back
pickled, in rank order; tensors are copied.

- ``fn`` is a module-level function (it is pickled by name) and so are the classes of its arguments and results.
- The processes are kept and used again, which makes the second call take milliseconds. What a function changes in its
  process (environment, default dtype, patched modules) is seen by the next one; ``fresh=True`` runs in new processes
  that are thrown away afterwards, and :func:`ranks_apart` in some that only its own calls use.
- The environment is the one at the first call: ``monkeypatch.setenv`` does not reach the ranks, ``os.environ[...] =
  ...`` inside ``fn`` does.
- An exception on a rank, a rank that dies, or a time-out raises :class:`RankError` with every rank's traceback, and for
  ranks that were still running (say, blocked in a collective that will never complete) the stack they stood in. All
  ranks of the call are then killed and replaced, so the suite neither hangs nor inherits a broken process group.
- Plain ``assert`` in ``fn`` is not rewritten by pytest and shows no values: return the values and assert in the test,
  or use ``torch.testing.assert_close``.

How: a fork server imports torch once, so a new process costs a fork and not seconds of imports. Nothing in the server
runs torch code, so there are no threads or OpenMP pools that a fork could break.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

__all__ = ["RankError", "ranks_apart", "run_ranks"]

#: After the first failure the other ranks get this long to fail too: an error that all share is reported by all.
GRACE_S = 0.5

_context = get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


class RankError(RuntimeError):
    """At least one rank did not return.

    ``reports`` maps each such rank to what is known: the traceback of its exception, how it died, or where it stood;
    ``results`` the others to what they returned.
    """

    def __init__(self, headline: str, reports: dict[int, str], results: dict[int, Any]) -> None:
        body = "\n".join(f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(reports.items()))
        super().__init__(f"{headline}\n{body}")
        self.reports, self.results = reports, results


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 180.0,
    fresh: bool = False,
    group: bool = True,
    grace_s: float = GRACE_S,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` gloo processes; their results in rank order.

    ``timeout_s`` bounds the whole call and every collective in it. With ``group=False`` no process group is there:
    ``fn`` makes its own. After a rank's failure the others get ``grace_s`` to return. See the top of this file for the
    rest.
    """
    task = pickle.dumps((fn, args))
    if not fresh:
        return _pool.run(task, fn.__qualname__, world_size, timeout_s, group, grace_s)
    with contextlib.closing(_Pool()) as pool:
        return pool.run(task, fn.__qualname__, world_size, timeout_s, group, grace_s)


@contextlib.contextmanager
def ranks_apart() -> Iterator[Callable[..., list[Any]]]:
    """A function like :func:`run_ranks`, whose processes serve no other calls than its own and end with the block: for
    functions that change their process for good, but may be called there again.
    """
    with contextlib.closing(_Pool()) as pool:

        def run(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 180.0) -> list[Any]:
            return pool.run(pickle.dumps((fn, args)), fn.__qualname__, world_size, timeout_s, True, GRACE_S)

        yield run


# ---- the test's side -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Worker:
    process: ForkServerProcess
    pipe: Connection
    stacks: Path  # where the process dumps its stacks on SIGUSR1 or a crash

    @classmethod
    def start(cls, folder: Path) -> _Worker:
        handle, stacks = tempfile.mkstemp(prefix="stacks-", dir=folder)
        os.close(handle)
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_serve, args=(theirs, stacks))
        process.start()
        theirs.close()
        return cls(process, ours, Path(stacks))

    def stand(self) -> str:
        """Where a process that is still running stands, innermost frame first."""
        text = ""
        for look in range(1200):  # looks, not seconds: on a machine that stands still both processes lose the same time
            if self.process.exitcode is not None:  # it has ended just now
                return self.obituary()
            if not text and look % 100 == 0:  # a process that waits for its disk answers late
                os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.05)
            before, text = text, self.stacks.read_text(errors="replace")
            if text and text == before:
                break
        return f"still running, killed. It stood here:\n{text or '(no answer)'}"

    def obituary(self) -> str:
        """How a process that is gone went."""
        self.process.join(5.0)
        code = self.process.exitcode
        cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return f"died without an answer ({cause})\n{self.stacks.read_text(errors='replace')}"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


class _Pool:
    """Processes that wait for work. Worker i serves as rank i; a larger world starts more of them."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        self._calls = 0

    def run(self, task: bytes, name: str, world_size: int, timeout_s: float, group: bool, grace_s: float) -> list[Any]:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="narrowband-ranks-"))
        while len(self._workers) < world_size:
            self._workers.append(_Worker.start(self._folder))
        workers = self._workers[:world_size]

        deadline = time.monotonic() + timeout_s  # from here on: on a busy machine the first start takes a minute
        self._calls += 1
        store = self._folder / f"store-{self._calls}"
        reports: dict[int, str] = {}
        for rank, worker in enumerate(workers):
            with contextlib.suppress(BrokenPipeError):  # died between two calls: found out below, as an end of file
                worker.pipe.send_bytes(pickle.dumps((rank, world_size, str(store), timeout_s, group, task)))
        try:
            results = _collect(workers, deadline, reports, grace_s)
            waiting = [rank for rank in range(world_size) if rank not in results and rank not in reports]
            if reports or waiting:
                headline = (
                    f"{name} failed on rank {', '.join(map(str, sorted(reports)))} of {world_size}"
                    if reports
                    else f"{name} timed out after {timeout_s:g} s on {world_size} ranks"
                )
                reports |= {rank: workers[rank].stand() for rank in waiting}
                raise RankError(headline, reports, {rank: pickle.loads(result) for rank, result in results.items()})
            for worker in workers:  # everybody is done, so nobody pulls a connection from under another one
                worker.pipe.send_bytes(b"")
        except BaseException:  # KeyboardInterrupt, too, leaves ranks in the middle of something
            del self._workers[:world_size]
            for worker in workers:
                worker.end()
            raise
        finally:
            store.unlink(missing_ok=True)
        return [pickle.loads(results[rank]) for rank in range(world_size)]

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _collect(workers: Sequence[_Worker], deadline: float, reports: dict[int, str], grace_s: float) -> dict[int, bytes]:
    """Pickled results by rank, until all have answered or time is up; failures go into ``reports``."""
    results: dict[int, bytes] = {}
    pending = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while pending:
        ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pending.pop(pipe)  # type: ignore[index]
            try:
                returned, content = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                reports[rank] = workers[rank].obituary()
            else:
                if returned:
                    results[rank] = content
                else:
                    reports[rank] = content
        if reports:
            deadline = min(deadline, time.monotonic() + grace_s)
    return results


_pool = _Pool()
atexit.register(_pool.close)  # before multiprocessing's own handler, which would wait for the processes for ever


# ---- a rank's side ---------------------------------------------------------------------------------------------------


def _serve(pipe: Connection, stacks: str) -> None:
    """Life of a worker: tasks, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test runner's; it ends the workers
    # Benchmarks on loopback start the same fork server, with the signal blocked. Some tests send it to their own rank.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    stacks_file = open(stacks, "a")  # noqa: SIM115  stays open for the fault handler
    faulthandler.enable(stacks_file)

    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, messages), daemon=True).start()
    while True:
        message = messages.get()
        if message:
            faulthandler.unregister(
                signal.SIGUSR1
            )  # Lightning puts back the handlers that Python knows of: not this one
            faulthandler.register(signal.SIGUSR1, stacks_file)
            pipe.send_bytes(pickle.dumps(_work(*pickle.loads(message))))
        elif dist.is_initialized():
            dist.destroy_process_group()
            _forget_meshes()


def _forget_meshes() -> None:
    """DTensor remembers results together with their mesh, and a mesh its groups by names that the next group reuses."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _listen(pipe: Connection, messages: queue.SimpleQueue[bytes]) -> None:
    """Pass messages on; end the process, whatever it is doing, when the test runner is gone."""
    try:
        while True:
            messages.put(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _work(rank: int, world_size: int, store: str, timeout_s: float, group: bool, task: bytes) -> tuple[bool, Any]:
    """``(True, pickled result)``, or ``(False, traceback)``."""
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if group:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        fn, args = pickle.loads(task)
        return True, pickle.dumps(fn(rank, world_size, *args))
    except BaseException:  # also SystemExit and pytest's outcomes: a rank never leaves without a word
        return False, traceback.format_exc()
