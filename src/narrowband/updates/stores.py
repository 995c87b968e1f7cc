"""The store in which peers meet: who serves it, who reaches it, and how the peers of a round connect by way of it.

To connect, PyTorch waits in a store for the address of each peer, and knows nothing of turns and their outcomes. A peer
may have been interrupted, or may refuse the round, before it has written its address; then the round is aborted, but
the others would wait until they time out. So :class:`UntilAborted` looks for the outcome while it waits. As it waits in
Python, Ctrl-C ends it, too.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["UntilAborted", "connect", "host_and_port", "serve"]

#: ``torch.distributed`` as Any, since its type stubs hide the stores.
dist: Any = distributed

#: Time-out of connections and requests to the store, in seconds.
_STORE_S = 30.0

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


def serve(port: int, host: str = "0.0.0.0") -> Any:
    """Serve a store. It runs as long as the returned object lives.

    Args:
        port: port to listen at; 0: any free one.
        host: address of the only interface to listen at; ``0.0.0.0``: all, by IPv4; ``::``: all, by IPv6, too.
    """
    host = _without_brackets(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    # Without a socket given to it, the store would listen at all interfaces.
    with socket.create_server((host, port), family=family, dualstack_ipv6=both) as listening:
        return dist.TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_S),
            master_listen_fd=listening.detach(),
        )


def connect(host: str, port: int, patience_s: float) -> Any:
    """Connect a client to the store, which may come up a little later than this process.

    Args:
        host: address or name of the store's machine.
        port: port that it listens at.
        patience_s: seconds to wait for it, if that is less than usual.

    Raises:
        OSError: nobody listens there.
        RuntimeError: no store answers there.
    """
    end = time.monotonic() + min(_STORE_S, patience_s)
    while True:  # torch's own client logs a lot while it waits
        try:
            socket.create_connection((host, port), timeout=_STORE_S).close()
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S))


def host_and_port(address: str) -> tuple[str, str]:
    """Divide an address, ``host:port``, at its last colon; an IPv6 address comes without its brackets."""
    host, _, port = address.rpartition(":")
    return _without_brackets(host), port


def _without_brackets(host: str) -> str:
    """Return an IPv6 address without brackets, as sockets take it."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
