"""Process groups that are used again.

An engine needs a process group of its own: collectives of other threads must not slip between its own. PyTorch cannot
safely end one and make another among the same ranks: it names them by how many there are, so a later group finds the
addresses of the one that has ended, and ranks that end theirs at different times (garbage collection does) name the
next one differently. So a group that is given back is kept, and lent again. Who borrows agrees with the other ranks on
a group that all of them have at hand; only if there is none, all make a new one. A process holds as many groups as it
ever needed at one time.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["Loan", "borrow", "can_send_from", "group_of", "new_group"]


@dataclass(eq=False)
class Loan:
    """A group that its borrower has for itself."""

    group: dist.ProcessGroup
    number: int
    _shelf: _Shelf
    #: Whether a collective failed in it: nobody can have it any more.
    broken: bool = False

    def give_back(self) -> None:
        """Let the next one have it, when nothing of this rank is on its way in it. A broken one is let go of: its
        connections are closed when nobody holds it.
        """
        if not self.broken:
            self._shelf.free[self.number] = self.group
        del self.group


class _Shelf:
    """The groups that were made among the ranks of one group, with one backend and time-out."""

    def __init__(self) -> None:
        #: PyTorch holds them, until they are destroyed.
        self.free: weakref.WeakValueDictionary[int, dist.ProcessGroup] = weakref.WeakValueDictionary()
        self.next_number = 0


_shelves: dict[tuple[object, ...], _Shelf] = {}


def borrow(like: dist.ProcessGroup, device: torch.device) -> Loan:
    """A group of the same ranks, backend and time-out as ``like``, for one borrower alone. Call on all of its ranks."""
    ranks = dist.get_process_group_ranks(like)
    backend, timeout = dist.get_backend(like), _timeout_of(like, device)
    shelf = _shelves.setdefault((tuple(ranks), backend, timeout), _Shelf())
    for number, group in list(shelf.free.items()):
        if not _alive(group):
            del shelf.free[number]
    of_all: list[Any] = [None] * len(ranks)
    dist.all_gather_object(of_all, (sorted(shelf.free), shelf.next_number), group=like)
    everywhere = set.intersection(*(set(free) for free, _ in of_all))
    if everywhere:
        number = min(everywhere)
        return Loan(shelf.free.pop(number), number, shelf)
    number = max(following for _, following in of_all)
    shelf.next_number = number + 1
    return Loan(new_group(ranks, like, timeout), number, shelf)


#: Groups that were made of some ranks, by these and the backend.
_made: weakref.WeakValueDictionary[tuple[object, ...], dist.ProcessGroup] = weakref.WeakValueDictionary()


def group_of(ranks: Sequence[int], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group of some ranks of another one, with its backend and time-out. Call on all ranks of the other one, each of
    which names those that it will be together with.

    It is made once in a process: ranks borrow theirs from it.
    """
    timeout = _timeout_of(like, device)
    key = (*ranks, dist.get_backend(like), timeout)
    known = key in _made and _alive(_made[key])
    number = _agreed_number(like, needed=not known)
    if not known:
        _made[key] = _new_group(ranks, like, timeout, number)
    return _made[key]


def new_group(ranks: Sequence[int], like: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """A new group of some ranks of another one, with its backend. Call on all ranks of the other one, each of which
    names those that it will be together with.
    """
    return _new_group(ranks, like, timeout, _agreed_number(like))


def _new_group(
    ranks: Sequence[int], like: dist.ProcessGroup, timeout: timedelta | None, number: int
) -> dist.ProcessGroup:
    backend = dist.get_backend(like)
    world = dist.distributed_c10d._world  # noqa: SLF001 - there is no other way
    held = world.group_count
    if _names_by_count():
        world.group_count = number
    try:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True
        )
    finally:
        world.group_count = held  # ranks that take no part have to go on with the same names for groups of their own
    return made


@functools.cache
def _names_by_count() -> bool:
    """Whether PyTorch names a group by its ranks and by how many groups were made, as from 2.14 on; before, it was by
    how many there are.
    """
    naming = getattr(dist.distributed_c10d, "_hash_ranks_to_str", None)
    return naming is None or "group_count" in naming.__code__.co_names


#: The number of the group that is made next: far above whatever PyTorch counts for others.
_next_number = 1 << 32


def _agreed_number(like: dist.ProcessGroup, *, needed: bool = True) -> int:
    """Let all ranks of a group give the same name to the group that they make next, where any of them is about to make
    one.

    PyTorch names a group by its ranks and a number that each process counts for itself: how many groups it made, or, in
    older versions, how many it holds. Ranks that count differently, such as after ``new_group([0])``, would look for
    each other under different names until time is up. So they agree on the number; where it cannot be set, those that
    hold fewer groups make groups of themselves alone.

    Returns:
        The number, which no group of theirs had before.
    """
    global _next_number  # noqa: PLW0603 - it counts what this process names, as PyTorch does
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
    """Whether a group has a backend for tensors there: NCCL's has none on the CPU, unless gloo stands beside it
    (``init_process_group("cpu:gloo,cuda:nccl")``, PyTorch's default).
    """
    with contextlib.suppress(RuntimeError):
        return group is not None and group._get_backend(device) is not None
    return False


def _alive(group: dist.ProcessGroup) -> bool:
    """Whether it is still one: the end of the default group ends all."""
    with contextlib.suppress(KeyError, ValueError, RuntimeError):
        return bool(dist.get_process_group_ranks(group))
    return False


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long collectives of a group wait."""
    try:
        options = group._get_backend(device).options
    except (RuntimeError, AttributeError):  # a backend without options
        return None
    return cast("timedelta | None", getattr(options, "_timeout", None))
