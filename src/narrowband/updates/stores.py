"""The store by which the peers of a round connect to each other.

To connect, PyTorch waits in a store for the address of each peer, and knows nothing of turns and their outcomes. A peer
may have been interrupted, or may refuse the round, before it has written its address; then the round is aborted, but
the others would wait until they time out. So this store looks for the outcome while it waits. As it waits in Python,
Ctrl-C ends it, too.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["UntilAborted"]

#: ``torch.distributed`` as Any, since its type stubs hide the stores.
dist: Any = distributed

#: Seconds between two looks: at first, and at most.
_LOOK_S, _LOOK_AT_MOST_S = 0.001, 0.05

#: Seconds that :meth:`UntilAborted.get` waits for a key.
_GET_S = 30.0


class UntilAborted(dist.Store):  # type: ignore[misc]
    """A store in which nobody waits any longer once the round is aborted.

    Args:
        store: where the keys are.
        outcome: returns the round's outcome; None while there is none.
    """

    def __init__(self, store: Any, outcome: Callable[[], str | None]) -> None:
        super().__init__()
        self._store, self._outcome = store, outcome

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys are there.

        Raises:
            RuntimeError: the round was aborted, or the time is over.
        """
        end, pause = time.monotonic() + timeout.total_seconds(), _LOOK_S
        while not self._store.check(list(keys)):
            if self._outcome() == "abort":
                raise RuntimeError("the round was given up while peers connected")
            if time.monotonic() > end:
                raise RuntimeError(f"a peer did not connect within {timeout.total_seconds():g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, _LOOK_AT_MOST_S)

    def get(self, key: str) -> bytes:
        """Return a key's value, and wait for it."""
        self.wait([key], timedelta(seconds=_GET_S))
        value: bytes = self._store.get(key)
        return value

    def set(self, key: str, value: Any) -> None:
        """Set a key's value."""
        self._store.set(key, value)

    def add(self, key: str, number: int) -> int:
        """Add to a key's number, and return it."""
        total: int = self._store.add(key, number)
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        there: bool = self._store.check(list(keys))
        return there

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key's value if it is as expected; return the value that it has then."""
        value: bytes = self._store.compare_set(key, expected, desired)
        return value

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it was there."""
        was_there: bool = self._store.delete_key(key)
        return was_there
