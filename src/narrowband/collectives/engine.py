"""One thread that encodes, communicates and decodes while backward goes on, in one order on all ranks.

Work comes as *jobs*: generators that compute, yield a :class:`Wire` (a collective to issue), are resumed when it has
arrived, and so on. The engine keeps two promises.

*One order.* Collectives are issued in the order in which jobs were started, and within a job in the order of its
phases; all phases of a job are issued before the first of the next. As every rank starts the same jobs in the same
order, collectives meet their peers whatever the timing. Nothing is ever issued from a completion callback: a callback
only puts a note into the inbox.

*No idle waiting.* While a collective is on the wire, the thread encodes the next job; only issuing waits for its turn.

On CUDA the thread works on a side stream, and a job begins by waiting for what the main stream had queued.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch.distributed import Work

__all__ = ["Engine", "Job", "Wire"]

log = logging.getLogger(__name__)


@dataclass
class Wire:
    """A collective to issue: ``issue()`` starts it and returns its handle; None when there is nobody to talk to."""

    issue: Callable[[], Work | None]
    #: Whether the job has no further phase.
    last: bool = True


if TYPE_CHECKING:
    Job = Generator[Wire, None, None]
else:
    Job = Any


class _Arrived:
    """The handle of a collective among one rank."""

    def wait(self) -> None: ...


@dataclass(eq=False)
class _Running:
    """A job between two phases."""

    job: Job
    done: Callable[[], None]
    wire: Wire | None = None
    work: Work | _Arrived | None = None
    issued_at: float = field(default=0.0)


class Engine:
    """A worker thread with an inbox. All methods but :meth:`post` and :meth:`close` belong to that thread.

    Args:
        device: where tensors live.
        failed: called on the thread with the error that ended it, and again for everything posted after that.
    """

    def __init__(self, device: torch.device, failed: Callable[[BaseException], None]) -> None:
        self._device = device
        self._failed = failed
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._order: deque[_Running] = deque()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.wire_seconds = 0.0
        self.error: BaseException | None = None

    # ---- from any thread ---------------------------------------------------------------------------------------------

    def post(self, what: Callable[[], None]) -> None:
        """Run ``what`` on the engine's thread, after everything posted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="narrowband-engine", daemon=True)
            self._thread.start()
        if self._stream is not None:
            event = torch.cuda.current_stream(self._device).record_event()
            stream, inner = self._stream, what

            def what() -> None:
                stream.wait_event(event)
                inner()

        self._inbox.put(what)

    def close(self) -> None:
        """End the thread when it has done what is in its inbox.

        A thread that the interpreter's exit catches inside native code takes the process down with it, so wait for it.
        """
        self._inbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    # ---- on the engine's thread --------------------------------------------------------------------------------------

    def start(self, job: Job, done: Callable[[], None]) -> None:
        """Run ``job`` up to its first collective now; the rest, and then ``done()``, as its collectives arrive."""
        running = _Running(job, done)
        if self._advance(running):
            self._order.append(running)
            self._issue()

    def _loop(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                torch.cuda.set_device(self._device)
                stack.enter_context(torch.cuda.stream(self._stream))
            while (what := self._inbox.get()) is not None:
                if self.error is not None:
                    self._failed(self.error)  # whoever posted this before hearing of it must hear of it
                    continue
                try:
                    what()
                except BaseException as error:
                    log.exception("the exchange stopped, and every later backward will say so")
                    self._order.clear()
                    self._failed(error)
                    self.error = error  # last: who reads it finds everything undone
                what = None  # keep nothing of it alive while waiting: the end of its owner is what ends this thread

    def _advance(self, running: _Running) -> bool:
        """Resume a job; False when it is finished."""
        try:
            running.wire = next(running.job)
        except StopIteration:
            running.done()
            return False
        running.work = None
        return True

    def _issue(self) -> None:
        """Issue what is due: a job's next phase when the job before has issued its last."""
        for running in tuple(self._order):
            wire = running.wire
            assert wire is not None
            if running.work is None:
                running.issued_at = time.perf_counter()
                running.work = work = wire.issue() or _Arrived()
                self._announce(running, work)
            if not wire.last:
                return

    def _announce(self, running: _Running, work: Work | _Arrived) -> None:
        def note(_: Any = None) -> None:
            self._inbox.put(lambda: self._arrived(running))

        if isinstance(work, _Arrived):
            note()
        else:
            work.get_future().add_done_callback(note)

    def _arrived(self, running: _Running) -> None:
        assert running.work is not None
        running.work.wait()  # raises what went wrong on the wire; on CUDA, makes this stream wait
        self.wire_seconds += time.perf_counter() - running.issued_at
        if not self._advance(running):
            self._order.remove(running)
        self._issue()
