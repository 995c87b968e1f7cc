"""A thread that runs the functions posted to it, one after the other."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SerialExecutor"]


class SerialExecutor:
    """A thread that runs functions in the order in which they were posted.

    The first post starts the thread. The thread is a daemon: it does not keep the interpreter from exiting.

    Args:
        name: the thread's name.

    Example:
        >>> executor = SerialExecutor("example")
        >>> executor.post(lambda: print("first"))
        >>> executor.close()
        first
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the thread, after everything posted before. ``function`` must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._inbox.put(function)

    def close(self) -> None:
        """Wait until everything posted has run, for 5 seconds at most, and end the thread.

        A thread that is inside native code when the interpreter exits crashes the process.
        """
        self._inbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next function; None ends the thread."""
        return self._inbox.get()

    def _loop(self) -> None:
        while (function := self._next()) is not None:
            function()
            function = None  # a waiting thread must not keep alive the object whose finalizer ends the thread
