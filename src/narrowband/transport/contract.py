"""How coded packets get from every rank to those that need them: one interface, and the way that works everywhere.

In an *exchange* every rank contributes one buffer of bytes. All sizes are known to all beforehand, and each rank names
the ranges of each other rank's buffer that it needs: a coded packet is needed by the r other members of its group and
by nobody else.

Where multicast reaches all ranks, a packet leaves its sender once, and that is what coding is for: ``multicast``
(:mod:`narrowband.transport.multicast`). ``broadcast`` goes through the process group, whose links are from one rank to
one other: it sends a packet to each rank that needs it, and to no other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    Range = tuple[int, int]
    #: Half-open ranges of bytes, in ascending order, of each rank's buffer.
    Wanted = Sequence[Sequence[Range]]

__all__ = ["RanksLostError", "Transport", "check_exchange"]


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
        multicast: whether a buffer leaves its rank once, however many ranks need it.
        device: where outgoing and incoming buffers have to live.
        max_failures: how many ranks may be lost: an exchange that fails for want of them says so
            (:class:`RanksLostError`), once on each of the others, and later ones go on without them.
        lost: the ranks that are lost. Nothing may be wanted of them.
        readmits: whether a rank that was lost, and lives, may take part again: the others let it back in where it asks
            (:attr:`returning`, :meth:`readmit`), and it waits for that (:meth:`rejoin`).
    """

    name: ClassVar[str]
    multicast: ClassVar[bool] = False
    device: torch.device = torch.device("cpu")
    max_failures: int = 0
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
