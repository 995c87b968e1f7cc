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
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["Loan", "borrow", "can_send_from", "group_of"]


@dataclass(eq=False)
class Loan:
    """A group that its borrower has for itself."""

    group: dist.ProcessGroup
    number: int
    _shelf: _Shelf
    #: Whether a collective failed in it: nobody can have it any more.
    broken: bool = False

    def give_back(self) -> None:
        """Let the next one have it, when nothing of this rank is on its way in it."""
        if not self.broken:
            self._shelf.free[self.number] = self.group


class _Shelf:
    """The groups that were made among the ranks of one group, with one backend and time-out."""

    def __init__(self) -> None:
        self.free: dict[int, dist.ProcessGroup] = {}
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
    group = dist.new_group(ranks, backend=backend, timeout=timeout, use_local_synchronization=True)
    return Loan(group, number, shelf)


#: Groups that were made of some ranks, by these and the backend.
_made: dict[tuple[object, ...], dist.ProcessGroup] = {}


def group_of(ranks: Sequence[int], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group of these ranks, with the backend and time-out of another. Call on all of its ranks.

    It is made once in a process: ranks borrow theirs from it.
    """
    backend, timeout = dist.get_backend(like), _timeout_of(like, device)
    key = (*ranks, backend, timeout)
    if key not in _made or not _alive(_made[key]):
        _made[key] = dist.new_group(list(ranks), backend=backend, timeout=timeout, use_local_synchronization=True)
    return _made[key]


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
