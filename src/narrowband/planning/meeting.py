"""Exchange small messages between ranks that have no process group yet.

A process group of gloo connects every rank with every other when it is created, so a single closed port makes it fail.
The code that looks for the closed port can therefore not communicate through a process group. It uses the store at
``MASTER_ADDR``, which needs one connection per rank, to a port that ``torchrun`` has connected to before.

On a link that drops large packets, small ones still get through. So no message here is longer than
:data:`_PART_NBYTES`, and a rank waits for the answer to one part before it sends the next, because the kernel would
otherwise join them into one packet.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # what dist's are, for type checkers

from narrowband.errors import DisagreementError, UnsupportedError

__all__ = ["Lockstep", "Meeting", "MeetingError", "OtherRankError", "address_towards", "join", "seconds"]

#: Bytes that fit beside headers and the store's protocol into a packet of 1,280 bytes, the smallest MTU of IPv6.
_PART_NBYTES = 900

#: Seconds between attempts to connect to a port that is not open yet.
_AGAIN_S = 0.2


class MeetingError(RuntimeError):
    """Some ranks did not come together. The message says which, where, and what to do."""


class Meeting:
    """Exchange values between ranks through a store.

    Args:
        store: a store that all ranks reach.
        rank, size: the number of this rank, and of ranks.
        where: the address of the store, for messages.
        wait_s: seconds to wait for other ranks, which may be started one after the other.

    Example:
        >>> from torch._C._distributed_c10d import HashStore
        >>> alone = Meeting(HashStore(), 0, 1, "here", wait_s=5.0)
        >>> alone.all("greeting", {"hello": 1})
        [{'hello': 1}]
    """

    def __init__(self, store: Store, rank: int, size: int, where: str, wait_s: float) -> None:
        self._store, self.rank, self.size, self.where, self.wait_s = store, rank, size, where, wait_s

    def store_of(self, name: str) -> Store:
        """Return a store with a namespace of its own, for two ranks that make a group."""
        return PrefixStore(name, self._store)

    def put(self, key: str, value: Any) -> None:
        """Store a JSON-able value for the other ranks."""
        text = json.dumps(value, ensure_ascii=True)
        parts = [text[at : at + _PART_NBYTES] for at in range(0, len(text), _PART_NBYTES)]
        for number, part in enumerate(parts):
            self._set(f"{key}/{number}", part)
        self._set(key, str(len(parts)))

    def get(self, key: str, within_s: float) -> Any:
        """Return the value that a rank has stored under a key; wait for it if it is not there yet.

        Raises:
            MeetingError: no rank stored it within ``within_s`` seconds.
        """
        if not self._has(key, within_s):
            raise MeetingError(
                f"no rank stored {key!r} at {self.where} within {within_s:g} s; see what the other ranks printed"
            )
        parts = int(self._store.get(key))
        return json.loads("".join(self._store.get(f"{key}/{number}").decode() for number in range(parts)))

    def all(self, key: str, mine: Any, later_s: float = 0.0) -> list[Any]:
        """All-gather a value: return the values of all ranks, in the order of ranks.

        Args:
            later_s: seconds that a rank may take before its call, in addition to ``wait_s``.

        Raises:
            MeetingError: some ranks stored no value in time; the message names all of them.
        """
        self.put(f"{key}/{self.rank}", mine)
        within_s = self.wait_s + later_s
        deadline = time.monotonic() + within_s
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        lacking = [
            rank for rank, each in enumerate(keys) if not self._has(each, max(0.05, deadline - time.monotonic()))
        ]
        if lacking:
            names = ", ".join(map(str, lacking))
            raise MeetingError(
                f"of {self.size} ranks, {names} did not arrive at {self.where} within {within_s:g} s. Check that they "
                "were started with the same command, that their machines can connect to that port, and what they "
                "printed"
            )
        return [self.get(each, within_s) for each in keys]

    def leave(self, code: int) -> None:
        """Wait until rank 0 has printed its results, because ``torchrun`` ends all ranks when one exits with an error.

        Rank 0 may host the store, so it waits until the others have left. Those do not wait for an answer to their last
        message, because the store may be gone by then.
        """
        if self.rank:
            self.get("said", self.wait_s)
            self._store.set(f"gone/{self.rank}", "1")
            return
        self.put("said", code)
        for rank in range(1, self.size):
            self._has(f"gone/{rank}", self.wait_s)

    def _set(self, key: str, text: str) -> None:
        self._store.set(key, text)
        self._store.check([key])  # wait for an answer, so that the kernel does not join messages

    def _has(self, key: str, within_s: float) -> bool:
        try:
            self._store.wait([key], seconds(within_s))
        except dist.DistStoreError:
            return False
        return True


class OtherRankError(ValueError):
    """Some rank cannot go on, so no rank does. Raised on all ranks, with the same message."""


class Lockstep:
    """Keep ranks in step: if one cannot go on, none does, and all report which one and why.

    Args:
        meeting: of the ranks.
        patience_s: seconds that a rank may take from one point to the next.

    Example:
        >>> from torch._C._distributed_c10d import HashStore
        >>> lockstep = Lockstep(Meeting(HashStore(), 0, 1, "here", wait_s=5.0), patience_s=5.0)
        >>> lockstep.compare("what to do", {"codecs": ["fp16"]})
        >>> with lockstep.together():
        ...     raise ValueError("there is no such file")
        Traceback (most recent call last):
        narrowband.planning.meeting.OtherRankError: rank 0: there is no such file
    """

    def __init__(self, meeting: Meeting, patience_s: float) -> None:
        self._meeting, self._patience_s = meeting, patience_s
        self._points = 0

    def compare(self, what: str, mine: Mapping[str, Any]) -> None:
        """Check that all ranks have the same JSON-able values under the same names.

        Raises:
            DisagreementError: values differ. Raised on all ranks, with the first name that differs, and on which rank.
            OtherRankError: some rank failed before this point.
            MeetingError: some rank did not answer.
        """
        said = self._exchange(values=dict(mine))
        for rank, own in enumerate(said):
            for name in dict.fromkeys([*said[0], *own]):
                first, other = said[0].get(name), own.get(name)
                if first != other:
                    raise DisagreementError(
                        f"ranks disagree on {what}: {name} is {_words(other)} on rank {rank} and {_words(first)} on "
                        "rank 0; start all ranks with the same command and the same files"
                    )

    def point(self, error: str | None = None) -> None:
        """Wait until all ranks are here.

        Args:
            error: why this rank cannot go on.

        Raises:
            OtherRankError: some rank cannot go on. Raised on all ranks.
            MeetingError: some rank did not answer.
        """
        self._exchange(error)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """End the block on all ranks if it fails on one. Calls :meth:`point` at the end; the block may call it, too.

        Raises:
            OtherRankError: on some rank an argument or a setting is wrong.
            Exception: any other error on this rank; the other ranks raise an OtherRankError.
        """
        try:
            yield
        except (OtherRankError, DisagreementError, MeetingError):
            raise  # the other ranks know of these
        except (ValueError, UnsupportedError) as error:
            self.point(str(error))
        except Exception as error:
            with contextlib.suppress(OtherRankError):
                self.point(traceback.format_exception_only(error)[-1].strip())
            self._meeting.leave(1)
            raise
        else:
            self.point()

    def _exchange(self, error: str | None = None, values: Any = None) -> list[Any]:
        """All-gather values at a point. A rank that fails reports it at the next point, whatever that point is for."""
        self._points += 1
        said = self._meeting.all(f"point/{self._points}", [error, values], self._patience_s)
        for rank, (each, _) in enumerate(said):
            if each is not None:
                raise OtherRankError(f"rank {rank}: {each}")
        return [own for _, own in said]


def _words(value: Any) -> str:
    """Format a value as users write it."""
    if value is None:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def join(within_s: float = 60.0) -> Meeting:
    """Meet the other ranks at ``MASTER_ADDR``, as ``torchrun`` has set it.

    Args:
        within_s: seconds in which the store has to answer, and the other ranks have to come.

    Raises:
        ValueError: torchrun has not started this process.
        MeetingError: the name cannot be resolved here, or nothing answers at the address.
    """
    lacking = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if lacking:
        raise ValueError(
            f"not set in the environment: {', '.join(lacking)}. Start the ranks with torchrun, which sets them"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _reach(host, port, rank, within_s)
    try:
        store = TCPStore(host, port, size, serves, seconds(within_s), wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        what = "rank 0 cannot serve the store" if serves else f"rank {rank} found no store of PyTorch"
        raise MeetingError(f"{what} at {host}, port {port}: {str(error).splitlines()[0]}") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Meeting(PrefixStore(f"narrowband {attempt}", store), rank, size, f"{host}, port {port}", within_s)


def address_towards(host: str, port: int) -> str:
    """Return the address from which this machine reaches another; empty if there is no route. Sends nothing."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as trial:
            trial.connect(where)
            return str(trial.getsockname()[0])
    except OSError:
        return ""


def seconds(number: float) -> timedelta:
    """Convert seconds to a timedelta, as PyTorch takes time-outs."""
    return timedelta(seconds=number)


def _reach(host: str, port: int, rank: int, within_s: float) -> None:
    """Check that something listens at the store's port, because PyTorch's own error message is long and unclear.

    Raises:
        MeetingError: nothing does.
    """
    here = f"rank {rank} on {socket.gethostname()}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MeetingError(
            f"{here} cannot look up MASTER_ADDR={host} ({error.strerror}). Give that machine's address instead, as in "
            f"--rdzv-endpoint 10.0.0.1:{port}, or add it to /etc/hosts here"
        ) from None
    known = ", ".join(dict.fromkeys(str(each[4][0]) for each in found))
    there = host if known == host else f"{host} ({known})"
    deadline = time.monotonic() + within_s
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), max(0.05, left)).close()
            return
        except OSError as error:
            if left > _AGAIN_S:
                time.sleep(_AGAIN_S)
                continue
            raise MeetingError(f"{here} {_what(error, there, host, port, within_s)}") from None


def _what(error: OSError, there: str, host: str, port: int, within_s: float) -> str:
    """Say why a connection failed, and what to do."""
    if isinstance(error, TimeoutError):
        own = address_towards(host, port) or "this machine"
        return (
            f"got no answer from {there} on TCP port {port} within {within_s:g} s: a firewall drops the packets, or no "
            f"machine has that address. Open the port there: sudo ufw allow from {own} to any port {port} "
            "proto tcp"
        )
    if isinstance(error, ConnectionRefusedError):
        return (
            f"was refused by {there} on TCP port {port} for {within_s:g} s: rank 0 is not running there, MASTER_ADDR "
            "names another machine, or a firewall rejects the connection"
        )
    return f"cannot reach {there}, TCP port {port} ({error.strerror or error}): check the address and the routes"
