"""Lend process groups, and reuse those that are given back.

An engine needs a process group of its own, so that collectives of other threads cannot come between its own. PyTorch
cannot safely destroy a group and create another one among the same ranks. It names groups by how many there are, so a
later group finds the addresses of the destroyed one; and ranks that destroy theirs at different times, as garbage
collection does, name the next one differently. So a group that is given back is kept, and lent again. Borrowing is
collective: the ranks agree on a group that is free on all of them, and create a new one only if there is none. So a
process holds as many groups as it ever needed at one time.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Loan",
    "borrow",
    "can_send_from",
    "group_of",
    "group_or",
    "is_gloo",
    "new_group",
    "to_connect",
    "wait_for",
    "waiting_in",
]

#: Gloo waits this many time-outs for a connection. (In the first of them the ranks' addresses have to arrive.)
_TIMEOUTS_TO_CONNECT = 5

#: Nobody waits less for a connection: a machine that is short of memory or cores pauses, and goes on.
_PAUSES = timedelta(seconds=5)


@dataclass(eq=False)
class Loan:
    """A process group that is lent to one borrower alone.

    Attributes:
        group: the group, until it is handed over.
        timeout: its time-out; None if it is not known.
    """

    group: dist.ProcessGroup
    number: int
    _shelf: _Shelf
    _timeout_of_like: Callable[[], timedelta | None]
    timeout: timedelta | None
    #: Whether a collective failed in the group, which then cannot be lent again.
    broken: bool = False
    _handed_over: weakref.ref[dist.ProcessGroup] | None = None

    def follow(self) -> bool:
        """Take over the time-out of the group that this one was borrowed like, if it was changed since then. Return
        whether it was; if the group was handed over, only :attr:`timeout` has changed.
        """
        timeout = self._timeout_of_like()
        if timeout is None or timeout == self.timeout:
            return False
        self.timeout = timeout
        if self._handed_over is None:
            self.group.set_timeout(timeout)
        return True

    def hand_over(self) -> dist.ProcessGroup:
        """Return the group, and refer to it only weakly from now on.

        For a borrower that may destroy the group to close its connections, which stay open as long as anything refers
        to it. A group that was destroyed is not lent again.
        """
        group = self.group
        self._handed_over = weakref.ref(group)
        del self.group
        return group

    def give_back(self) -> None:
        """Make the group free for the next borrower. Call it when no collective of this rank is in flight in the group.

        A broken group is released instead: its connections are closed when nothing refers to it any more.
        """
        group = vars(self).pop("group", None) if self._handed_over is None else self._handed_over()
        if group is not None and not self.broken:
            self._shelf.free[self.number] = weakref.ref(group)


class _Shelf:
    """The groups created for one set of ranks and one backend."""

    def __init__(self) -> None:
        #: Number → group. Weak references: PyTorch holds groups until they are destroyed. Groups are given back by any
        #: thread, and by garbage collection at any time: a copy of the numbers is one operation on a plain dictionary.
        self.free: dict[int, weakref.ref[dist.ProcessGroup]] = {}
        self.next_number = 0


_shelves: dict[tuple[object, ...], _Shelf] = {}


def group_or(given: object, default: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return the process group that a user gave, or else the default, which is that of all ranks if it is None.

    Raises:
        TypeError: it is no process group, such as a DeviceMesh.
        ValueError: this rank is not in it.
    """
    if given is None:
        return default or cast("dist.ProcessGroup", dist.group.WORLD)
    if isinstance(given, DeviceMesh):
        raise TypeError(
            "process_group is a DeviceMesh; pass the group of one of its dimensions, such as "
            'mesh["replicas"].get_group()'
        )
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in process_group; set compression up on the group's ranks alone")
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"process_group is {given!r}, of type {type(given).__name__}; pass a group that "
            "torch.distributed.new_group(…) or a DeviceMesh's get_group() returned"
        )
    return given


def waiting_in(given: object) -> dist.ProcessGroup | None:
    """Return the group in which other ranks wait for this one to check what it was given, also if that is wrong.

    Args:
        given: what a user passed as process group. For a DeviceMesh of one dimension, ranks that were given its group
            wait there. For anything else that is no group, all ranks are assumed to wait.

    Returns:
        None if there is no such group: none was initialized, or this rank is not in the group.
    """
    if isinstance(given, DeviceMesh) and given.ndim == 1:
        group: dist.ProcessGroup = given.get_group()
        return group
    if isinstance(given, dist.ProcessGroup):
        return given
    return None if given is dist.GroupMember.NON_GROUP_MEMBER else dist.group.WORLD


def borrow(like: dist.ProcessGroup, device: torch.device) -> Loan:
    """Borrow a group with the ranks, backend and time-out of ``like``, for this borrower alone. All ranks must call."""
    ranks = dist.get_process_group_ranks(like)
    backend, timeout = dist.get_backend(like), _timeout_of(like, device)
    shelf = _shelves.setdefault((tuple(ranks), backend), _Shelf())
    for number in list(shelf.free):
        if (found := shelf.free[number]()) is None or not _alive(found):
            del shelf.free[number]
    of_all: list[Any] = [None] * len(ranks)
    dist.all_gather_object(of_all, (sorted(shelf.free), shelf.next_number), group=like)
    everywhere = set.intersection(*(set(free) for free, _ in of_all))
    if everywhere:
        number = min(everywhere)
        found = shelf.free.pop(number)()
        assert found is not None
        group = found
        if timeout is not None:
            group.set_timeout(timeout)
    else:
        number = max(following for _, following in of_all)
        shelf.next_number = number + 1
        group = new_group(ranks, like, timeout)
    given = weakref.ref(_origins.get(like, like))
    return Loan(group, number, shelf, lambda: None if (own := given()) is None else _timeout_of(own, device), timeout)


#: (ranks, backend, time-out) → the group that :func:`group_of` created.
_made: weakref.WeakValueDictionary[tuple[object, ...], dist.ProcessGroup] = weakref.WeakValueDictionary()

#: A group that :func:`group_of` created → the user's group whose time-out it has. PyTorch holds both.
_origins: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def group_of(ranks: Sequence[int], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return the group of some ranks of ``like``, with its backend and time-out, and create it if needed.

    All ranks of ``like`` must call; each passes the ranks of its own new group. The group is created once per process.
    Callers do not communicate in it: they :func:`borrow` groups like it.
    """
    timeout = _timeout_of(like, device)
    key = (*ranks, dist.get_backend(like), timeout)
    known = key in _made and _alive(_made[key])
    number = _agreed_number(like, needed=not known)
    if not known:
        _made[key] = _new_group(ranks, like, timeout, number)
    _origins[_made[key]] = like
    return _made[key]


def new_group(ranks: Sequence[int], like: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """Create a group of some ranks of ``like``, with its backend.

    All ranks of ``like`` must call; each passes the ranks of its own new group.
    """
    return _new_group(ranks, like, timeout, _agreed_number(like))


def _new_group(
    ranks: Sequence[int], like: dist.ProcessGroup, timeout: timedelta | None, number: int
) -> dist.ProcessGroup:
    backend = dist.get_backend(like)
    connects_in = to_connect(timeout) if timeout is not None and backend == "gloo" else timeout
    world = dist.distributed_c10d._world  # noqa: SLF001 - there is no other way
    held = world.group_count
    if _names_by_count():
        world.group_count = number
    try:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), backend=backend, timeout=connects_in, use_local_synchronization=True
        )
    finally:
        world.group_count = held  # ranks that take no part have not counted: keep names equal
    if connects_in != timeout and timeout is not None:
        made.set_timeout(timeout)
    return made


def to_connect(timeout: timedelta) -> timedelta:
    """Return the time-out with which a gloo group is made, so that ranks wait for one that has just died ``timeout`` in
    all, but not less than a busy machine may need.
    """
    return min(timeout, max(_PAUSES, timeout / _TIMEOUTS_TO_CONNECT))


def wait_for(message: dist.Work, group: dist.ProcessGroup | None) -> None:
    """Wait for a message from or to a single rank, as long as the group's time-out says.

    By itself gloo waits for as long as the group was told when it was made (:func:`to_connect`), whatever was set
    later. That is so for messages of this kind alone, not for collectives.
    """
    group, timeout = group_or(group), None
    if dist.get_backend(group) == "gloo":  # with NCCL, a wait that has a time-out holds the CPU up
        timeout = _timeout_of(group, torch.device("cpu"))
    if timeout is None:
        message.wait()
    else:
        message.wait(timeout)


@functools.cache
def _names_by_count() -> bool:
    """Return whether PyTorch names a group by its ranks and by how many groups were ever created (from 2.14 on).

    Older versions name it by how many groups exist.
    """
    naming = getattr(dist.distributed_c10d, "_hash_ranks_to_str", None)
    return naming is None or "group_count" in naming.__code__.co_names


#: The number of the next group that is created here: far above what PyTorch counts for other groups.
_next_number = 1 << 32


def _agreed_number(like: dist.ProcessGroup, *, needed: bool = True) -> int:
    """Let the ranks of a group agree on the name of the group that they create next, if any rank needs one.

    PyTorch names a group by its ranks and by a number that each process counts for itself: how many groups it has
    created, or, in older versions, how many it holds. Ranks with different counts, as after ``new_group([0])``, would
    look for each other under different names until the time-out. So the ranks agree on the number. Where the number
    cannot be set (older versions), ranks that hold fewer groups create groups of themselves alone until counts match.

    Returns:
        The number, which none of their groups had before.
    """
    global _next_number  # noqa: PLW0603 - a count per process, as PyTorch's own
    held = len(dist.distributed_c10d._world.pg_names)  # noqa: SLF001 - there is no other way
    of_all: list[Any] = [None] * dist.get_world_size(like)
    dist.all_gather_object(of_all, (held, _next_number, needed), group=like)
    number: int = max(count for _, count, _ in of_all)
    if any(wanted for _, _, wanted in of_all):
        _next_number = number + 1
        if not _names_by_count():
            for _ in range(max(count for count, _, _ in of_all) - held):
                _new_group([dist.get_rank()], like, None, number)
    return number


def can_send_from(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether a group has a backend for tensors on ``device``.

    An NCCL group has none for CPU tensors, unless it was created with gloo beside NCCL
    (``init_process_group("cpu:gloo,cuda:nccl")``, PyTorch's default).
    """
    with contextlib.suppress(RuntimeError):
        return group is not None and group._get_backend(device) is not None
    return False


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a group sends tensors on ``device`` by gloo."""
    with contextlib.suppress(RuntimeError):
        return bool(group._get_backend(device).name() == "gloo")
    return False


def _alive(group: dist.ProcessGroup) -> bool:
    """Return whether a group still exists: destroying the default group destroys all groups."""
    with contextlib.suppress(KeyError, ValueError, RuntimeError):
        return bool(dist.get_process_group_ranks(group))
    return False


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the time-out of a group's collectives; None if the backend has no options."""
    try:
        options = group._get_backend(device).options
    except (RuntimeError, AttributeError):  # a backend without options
        return None
    return cast("timedelta | None", getattr(options, "_timeout", None))
