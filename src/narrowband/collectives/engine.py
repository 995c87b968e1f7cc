"""A thread that encodes, communicates and decodes while backward runs, in the same order on all ranks.

Work comes as *jobs*: generators that compute, yield a :class:`Transfer` (a collective to issue), are resumed when the
collective has completed, and so on. The engine guarantees two things.

*One order.* Collectives are issued in the order in which jobs were started, and within a job in the order of its
phases; all phases of a job are issued before the first of the next. As every rank starts the same jobs in the same
order, collectives match across ranks whatever the timing. Nothing is ever issued from a completion callback: a callback
only posts a function to the thread's inbox. There are two queues, each with that order and independent of the other:
``group`` for collectives of the process group, and ``pairs`` for point-to-point exchanges.

*No idle waiting.* While a collective is on the wire, the thread encodes the next job; only issuing waits for its turn.

On CUDA the thread works on a side stream. A job begins by waiting for the work that the main stream had queued.

*A word when nothing arrives.* If ranks wait for each other in collectives of different groups, as where one has left
the training loop, no error comes before the time-out. So the thread logs when it has waited for long.

*A clean exit.* After a collective has completed, a thread of torch releases its tensors, for which it needs the
interpreter's lock. If the interpreter is exiting by then, the process aborts. Nothing tells when the thread has done
that, so a process that exits right after a collective waits for a moment (:func:`_settle`). A script that ends with
``torch.distributed.destroy_process_group()`` joins those threads.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from narrowband.collectives.executor import SerialExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

__all__ = ["Engine", "Job", "Pending", "QueueName", "Transfer"]

log = logging.getLogger(__name__)

#: Seconds from the completion of a collective in which torch's thread has released its tensors, on a busy machine, too.
SETTLE_S = 0.1


#: Seconds for which a collective may be under way before the log says so; twice as many before it does so again.
LONG_S = 120.0

#: What is behind most errors of a collective.
_CAUSES = (
    "another rank has failed or ended (its own output says why), has fewer batches (DistributedDataParallel.join "
    "helps), or has left the loop alone, as by a stop that it decided by its own loss"
)
_OTHERS = f". Most often {_CAUSES}"


QueueName = Literal["group", "pairs"]


@dataclass
class Transfer:
    """A collective to issue: ``issue()`` starts it and returns its handle, or None if it has completed already."""

    issue: Callable[[], Pending | None]
    queue: QueueName = "group"
    #: The queues that the job's later transfers will use.
    later: Sequence[QueueName] = ()


if TYPE_CHECKING:
    Job = Generator[Transfer, None, None]
else:
    Job = Any


class _Latest:
    """When the latest collective of this process has completed, and whether the interpreter is exiting."""

    completed_at = -SETTLE_S
    exiting = False


def _settle() -> None:
    """Wait until torch's threads have released the tensors of the latest collective."""
    _Latest.exiting = True
    time.sleep(max(0.0, _Latest.completed_at + SETTLE_S - time.monotonic()))


atexit.register(_settle)


class Pending(Protocol):
    """What the engine needs of a ``torch.distributed.Work``."""

    def wait(self) -> Any: ...

    def get_future(self) -> Any: ...


class _Arrived:
    """The handle of a collective that had completed when it was issued, such as one among a single rank."""

    def wait(self) -> None: ...


@dataclass(eq=False)
class _Running:
    """A job between two phases."""

    job: Job
    done: Callable[[], None]
    transfer: Transfer | None = None
    work: Pending | _Arrived | None = None
    issued_at: float = field(default=0.0)


class Engine(SerialExecutor):
    """The thread that runs jobs. Call :meth:`post` and :meth:`close` from anywhere, other methods on the thread only.

    Args:
        device: the device of the tensors.
        failed: called on the thread with the error that stopped it, and again for everything posted after that. It
            puts back what the error left half done.
        told: called after each call of ``failed``, when :attr:`error` is set. It tells those who wait.
        level: the level at which that error is logged, with its traceback.

    Attributes:
        error: the error that stopped the engine, or None.
    """

    def __init__(
        self,
        device: torch.device,
        failed: Callable[[BaseException], None],
        told: Callable[[], None] = lambda: None,
        level: int = logging.ERROR,
    ) -> None:
        super().__init__("narrowband-engine")
        self._level = level
        self._device = device
        self._failed, self._told = failed, told
        self._order: deque[_Running] = deque()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        #: Callbacks that torch's threads have to call and to release, and some that they have released. A WeakSet would
        #: run Python code in torch's thread after the release.
        self._callbacks: deque[weakref.ref[Callable[[Any], None]]] = deque()
        self.wire_seconds = 0.0
        self.error: BaseException | None = None
        self._awaits = False  # for a collective
        self._patience_s = LONG_S

    def post(self, what: Callable[[], None]) -> None:
        """Run ``what`` on the engine's thread, after everything posted before."""
        if self._stream is not None:
            event = torch.cuda.current_stream(self._device).record_event()
            stream, inner = self._stream, what

            def what() -> None:
                stream.wait_event(event)
                inner()

        super().post(lambda: self._try(what))

    def close(self) -> None:
        """End the thread when its inbox is done, and wait until torch's threads have released all callbacks.

        Each wait takes 5 seconds at most. A thread of torch that still has to release a callback when the interpreter
        exits crashes the process.
        """
        super().close()
        deadline = time.monotonic() + 5.0
        while self._is_held() and time.monotonic() < deadline:
            time.sleep(0.001)
        if _Latest.exiting:
            _settle()

    def _is_held(self) -> bool:
        """Whether a thread of torch still has to release a callback. Any thread may ask: nothing is removed here."""
        return any(callback() is not None for callback in list(self._callbacks))

    # ---- on the engine's thread --------------------------------------------------------------------------------------

    def start(self, job: Job, done: Callable[[], None]) -> None:
        """Run ``job`` up to its first collective now, the rest as its collectives complete; then call ``done()``."""
        running = _Running(job, done)
        if self._advance(running):
            self._order.append(running)
            self._issue()

    def _loop(self) -> None:
        # Gives this thread the number of threads that users have set. Until a thread asks for it, matrix products run
        # on as many threads as there are cores, and their last bits differ.
        torch.get_num_threads()
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                torch.cuda.set_device(self._device)
                stack.enter_context(torch.cuda.stream(self._stream))
            super()._loop()

    def _next(self) -> Callable[[], None] | None:
        if self._order:
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=self._patience_s)
            log.warning(
                "this rank has waited for other ranks for %g s in a collective. One of them may be busy with something "
                "of its own, such as an evaluation. Otherwise %s; this rank then waits until the other process ends, "
                "or the time-out of the process group is over",
                self._patience_s, _CAUSES,
            )  # fmt: skip
            self._patience_s *= 2
        return super()._next()

    def _try(self, what: Callable[[], None]) -> None:
        if self.error is not None:
            self._fail(self.error)  # the poster of this function may not know of the error yet
            return
        try:
            what()
        except BaseException as error:
            log.log(
                self._level,
                "the exchange stopped because of this error; nothing more is sent over its connections%s",
                _OTHERS if self._awaits else "",
                exc_info=True,
            )
            self._order.clear()
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failed(error)
        self.error = error  # whoever reads it finds everything put back, and whoever is told can read it
        self._told()

    def _advance(self, running: _Running) -> bool:
        """Resume a job up to its next transfer; return False when the job is finished."""
        try:
            running.transfer = next(running.job)
        except StopIteration:
            running.done()
            return False
        running.work = None
        return True

    def _issue(self) -> None:
        """Issue the transfers that are due: in each queue, those of a job once the job before has issued its last."""
        taken: set[QueueName] = set()
        for running in tuple(self._order):
            transfer = running.transfer
            assert transfer is not None
            if running.work is None and transfer.queue not in taken:
                running.issued_at = time.perf_counter()
                running.work = work = transfer.issue() or _Arrived()
                self._announce(running, work)
            if running.work is None:
                taken.add(transfer.queue)
            taken.update(transfer.later)

    def _announce(self, running: _Running, work: Pending | _Arrived) -> None:
        given = [running]

        def note(_: Any = None) -> None:
            # Torch's thread releases this function later. It must not be the one that releases the job and its work:
            # that lets go of the interpreter's lock, and to get it back while the interpreter exits is a crash.
            arrived = given.pop()
            SerialExecutor.post(self, lambda: self._try(lambda: self._arrived(arrived)))

        if isinstance(work, _Arrived):
            note()
        else:
            while self._callbacks and self._callbacks[0]() is None:
                self._callbacks.popleft()  # it was released
            self._callbacks.append(weakref.ref(note))
            work.get_future().add_done_callback(note)

    def _arrived(self, running: _Running) -> None:
        assert running.work is not None
        self._awaits = True
        running.work.wait()  # raises errors of the collective; on CUDA, makes this stream wait
        self._awaits = False
        _Latest.completed_at = time.monotonic()
        self.wire_seconds += time.perf_counter() - running.issued_at
        if not self._advance(running):
            self._order.remove(running)
        self._issue()
