"""How coded packets get from every rank to those that need them: one interface, and the way that works everywhere.

In an *exchange* every rank contributes one buffer of bytes. All sizes are known to all beforehand, and each rank names
the ranges of each other rank's buffer that it needs: a coded packet is needed by the r other members of its group and
by nobody else.

Where multicast reaches all ranks, a packet leaves its sender once, and that is what coding is for: ``multicast``
(:mod:`narrowband.coded.multicast`). ``broadcast`` goes through the process group, whose links are from one rank to one
other: it sends a packet to each rank that needs it, and to no other.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch import Tensor

    Range = tuple[int, int]
    #: Half-open ranges of bytes, in ascending order, of each rank's buffer.
    Wanted = Sequence[Sequence[Range]]

__all__ = ["TRANSPORTS", "Broadcast", "RanksLostError", "Transport", "connect"]

log = logging.getLogger(__name__)

#: What users may choose.
TRANSPORTS = ("auto", "broadcast", "multicast")


class RanksLostError(RuntimeError):
    """Ranks that are waited for did not answer, or have closed. ``ranks`` are those at fault: this rank itself, where
    the others have gone on without it.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class Transport(ABC):
    """What moves buffers between ranks.

    Attributes:
        name: as users choose it.
        multicast: whether what a rank sends leaves it once, however many ranks need it.
        device: where outgoing and incoming buffers have to live.
        tolerate: how many ranks may be lost: an exchange that fails for want of them says so
            (:class:`RanksLostError`), once on each of the others, and later ones go on without them.
        lost: the ranks that are lost. Nothing may be wanted of them.
        readmits: whether a rank that was lost, and lives, may take part again: the others let it back in where it asks
            (:attr:`returning`, :meth:`readmit`), and it waits for that (:meth:`rejoin`).
    """

    name: ClassVar[str]
    multicast: ClassVar[bool] = False
    device: torch.device = torch.device("cpu")
    tolerate: int = 0
    readmits: bool = False

    @property
    def lost(self) -> tuple[int, ...]:
        return ()

    @property
    def returning(self) -> bool:
        """Whether the lost rank is heard again, and asks to be let back."""
        return False

    def readmit(self) -> None:
        """From the next exchange on the lost rank takes part again. All others call it between the same exchanges."""
        raise UnsupportedError(f"the transport, {self.name}, lets no rank back in")

    def drop(self) -> None:
        """The lost rank cannot return any more, and is told so where it asks."""
        raise UnsupportedError(f"the transport, {self.name}, lets no rank back in")

    def rejoin(self) -> None:
        """For a rank that the others go on without (an exchange has said so): ask to be let back, and wait for it. The
        next exchange is then the first after :meth:`readmit` on the others.

        Raises:
            RanksLostError: they let this rank in no more, or none of them answers.
        """
        raise UnsupportedError(f"the transport, {self.name}, lets no rank back in")

    @abstractmethod
    def exchange(self, outgoing: Tensor, incoming: Sequence[Tensor | None], wanted: Wanted) -> None:
        """Send a buffer and receive what is wanted of the others'. All ranks call it in the same order; when it
        returns, this rank has what it wanted, and ``outgoing`` may be changed.

        What is wanted follows from a plan that all ranks have: it changes on all of them in the same call, or on none.

        Args:
            outgoing: uint8, contiguous; what this rank sends.
            incoming: for rank k a contiguous uint8 buffer, as large as what rank k sends; None for this rank.
            wanted: for rank k the half-open ranges of its buffer, in bytes and ascending, that this rank needs. What
                lies outside of them may be filled or not.

        Raises:
            ValueError: buffers or ranges that cannot be meant.
            RuntimeError: a rank did not answer in time; a :class:`RanksLostError`, where it is known which.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back sockets, threads and memory. A second call does nothing."""


def check_exchange(outgoing: Tensor, incoming: Sequence[Tensor | None], wanted: Wanted, rank: int, size: int) -> None:
    """Raise ValueError for arguments of :meth:`Transport.exchange` that cannot be meant."""
    if len(incoming) != size or len(wanted) != size:
        raise ValueError(
            f"an exchange among {size} ranks takes {size} incoming buffers and {size} lists of ranges, not "
            f"{len(incoming)} and {len(wanted)}"
        )
    if incoming[rank] is not None or wanted[rank]:
        raise ValueError(f"rank {rank} cannot receive from itself: incoming[{rank}] must be None, wanted[{rank}] empty")
    for tensor in (outgoing, *incoming):
        if tensor is not None and (tensor.dtype != torch.uint8 or not tensor.is_contiguous() or tensor.ndim != 1):
            raise ValueError(
                f"buffers are flat, contiguous and uint8, not {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    for k, ranges in enumerate(wanted):
        buffer, end = incoming[k], 0
        if buffer is None and k != rank:
            raise ValueError(f"incoming[{k}] is None, and only a rank's own entry may be")
        for start, stop in ranges:
            if buffer is None or not end <= start < stop <= buffer.numel():
                nbytes = 0 if buffer is None else buffer.numel()
                raise ValueError(
                    f"wanted[{k}]={list(ranges)} are not ascending ranges of the {nbytes} bytes that rank {k} sends"
                )
            end = stop


class Broadcast(Transport):
    """Over the process group, gloo or NCCL: each rank's ranges go to the ranks that want them, one after the other.

    In step s of n − 1, rank i sends to rank i + s and receives from rank i − s. Memory beside the buffers is what one
    pair exchanges in one step; time is bounded by the time-out of the group.

    Args:
        group: the ranks; best one of its own, so that nothing comes between.
    """

    name = "broadcast"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank(group)
        if dist.get_backend(group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._asked: dict[tuple[tuple[Range, ...], ...], list[list[Range]]] = {}

    def exchange(self, outgoing: Tensor, incoming: Sequence[Tensor | None], wanted: Wanted) -> None:
        size = len(self._ranks)
        check_exchange(outgoing, incoming, wanted, self._rank, size)
        asked = self._what_others_want(wanted)
        for step in range(1, size):
            to, source = (self._rank + step) % size, (self._rank - step) % size
            buffer = incoming[source]
            assert buffer is not None
            sent = _gathered(outgoing, asked[to])
            received = _staging(buffer, wanted[source])
            operations = []
            if sent.numel():
                operations.append(dist.P2POp(dist.isend, sent, self._ranks[to], self._group))
            if received.numel():
                operations.append(dist.P2POp(dist.irecv, received, self._ranks[source], self._group))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            _scatter(received, buffer, wanted[source])

    def close(self) -> None:
        self._asked.clear()

    def _what_others_want(self, wanted: Wanted) -> list[list[Range]]:
        """Of this rank's buffer, by rank: told once for every plan."""
        key = tuple(tuple(ranges) for ranges in wanted)
        if key not in self._asked:
            everybody: list[Wanted] = [()] * len(self._ranks)
            dist.all_gather_object(everybody, key, group=self._group)
            self._asked[key] = [list(theirs[self._rank]) for theirs in everybody]
        return self._asked[key]


def connect(
    name: str,
    group: dist.ProcessGroup,
    timeout: timedelta | None = None,
    *,
    tolerate: int = 0,
    patience: float | None = None,
    readmits: bool = False,
) -> Transport:
    """A transport among the ranks of a process group that nothing else uses. All of them call it.

    ``auto`` is the one that sends least of those that reach all ranks: multicast, or broadcast where multicast does not
    get through, which a warning says. Two ranks have nothing to gain by it.

    Args:
        name: one of ``TRANSPORTS``.
        group: the ranks.
        timeout: of the group, which multicast keeps, too.
        tolerate: how many ranks may be lost, 0 or 1. One takes multicast: a process group waits for its members.
        patience: after so many seconds without a sign of life a rank is lost; None: after the time-out.
        readmits: whether one that was lost may return.

    Raises:
        ValueError: a name that does not exist.
        UnsupportedError: ``multicast``, where it does not reach all ranks; what cannot tolerate a loss, but should.
    """
    if name not in TRANSPORTS:
        raise ValueError(f"transport={name!r} is none of {', '.join(TRANSPORTS)}")
    if name == "broadcast" and tolerate:
        raise UnsupportedError(
            f"tolerate={tolerate} takes transport='multicast': a process group cannot go on without one of its members"
        )
    if name == "broadcast" or (name == "auto" and dist.get_world_size(group) <= 2 and not tolerate):
        return Broadcast(group)
    from narrowband.coded.multicast import Multicast

    limits: dict[str, Any] = {} if timeout is None else {"timeout_s": timeout.total_seconds()}
    try:
        return Multicast(group, **limits, silence_s=patience, tolerate=tolerate, readmits=readmits)
    except UnsupportedError as error:
        if name == "multicast":
            raise
        if tolerate:
            raise UnsupportedError(f"tolerate={tolerate} takes multicast, and {error}") from error
        if dist.get_rank(group) == 0:
            log.warning("every packet is sent to each rank that needs it, by broadcast: %s", error)
        return Broadcast(group)


def _gathered(buffer: Tensor, ranges: Sequence[Range]) -> Tensor:
    """The ranges, one after the other: a view where they are one."""
    parts = [buffer[start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else buffer[:0]


def _staging(buffer: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Where the ranges arrive one after the other: in their place where they are one."""
    if len(ranges) == 1:
        return buffer[slice(*ranges[0])]
    return buffer.new_empty(sum(stop - start for start, stop in ranges))


def _scatter(received: Tensor, buffer: Tensor, ranges: Sequence[Range]) -> None:
    if len(ranges) == 1:
        return
    at = 0
    for start, stop in ranges:
        buffer[start:stop] = received[at : at + stop - start]
        at += stop - start
