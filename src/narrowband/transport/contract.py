"""The interface of transports, which move coded packets from every rank to the ranks that need them.

In an *exchange* every rank contributes one buffer of bytes. All ranks know all sizes beforehand, and each rank names
the ranges of each other rank's buffer that it needs: a coded packet is made for r other ranks, and only they need it.

If multicast reaches all ranks, ``multicast`` (:mod:`narrowband.transport.multicast`) sends a packet once, for all ranks
that need it; this is what coding is for. ``broadcast`` uses the process group, which works everywhere. Its links are
from one rank to one other, so it sends a packet to each rank that needs it, and to no other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch import Tensor

    Range = tuple[int, int]
    #: Half-open ranges of bytes, in ascending order, of each rank's buffer.
    Wanted = Sequence[Sequence[Range]]

__all__ = ["RanksLostError", "Transport", "check_exchange"]


class RanksLostError(RuntimeError):
    """Ranks that an exchange waits for did not answer, or have closed the transport. ``ranks`` are the ranks at fault;
    this rank itself, if the others have gone on without it.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class Transport(ABC):
    """Moves buffers between ranks.

    Attributes:
        name: the name by which users choose the transport.
        multicast: whether a buffer is sent once, however many ranks need it.
        device: the device of outgoing and incoming buffers.
        max_failures: how many ranks may be lost. An exchange that fails because of a lost rank raises
            :class:`RanksLostError`, once on each of the other ranks, and later exchanges go on without the lost rank.
        lost: the ranks that are lost. Nothing may be wanted of them.
        readmits: whether a lost rank that is still alive may take part again. It asks and waits (:meth:`rejoin`); the
            others see that it asks (:attr:`returning`), and let it back in (:meth:`readmit`).
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
        """Whether the lost rank is heard again, and asks to be let back in."""
        return False

    def readmit(self) -> None:
        """Let the lost rank take part again from the next exchange on. All other ranks call this between the same two
        exchanges.
        """
        raise UnsupportedError(f"the transport, {self.name}, lets no rank back in")

    def drop(self) -> None:
        """Never let the lost rank back in; it is told so when it asks."""
        raise UnsupportedError(f"the transport, {self.name}, lets no rank back in")

    def rejoin(self) -> None:
        """Ask to be let back in, and wait until the others do so. Called on a rank after an exchange has raised that
        the others go on without it. Its next exchange is the first one after :meth:`readmit` on the others.

        Raises:
            RanksLostError: the others do not let this rank back in, or none of them answers.
        """
        raise UnsupportedError(f"the transport, {self.name}, lets no rank back in")

    @abstractmethod
    def exchange(self, outgoing: Tensor, incoming: Sequence[Tensor | None], wanted: Wanted) -> None:
        """Send this rank's buffer, and receive the wanted ranges of the others' buffers. All ranks call this in the
        same order. When it returns, the wanted ranges have arrived, and ``outgoing`` may be changed.

        ``wanted`` changes on all ranks in the same call, or on none.

        Args:
            outgoing: uint8, contiguous; what this rank sends.
            incoming: for rank k a contiguous uint8 buffer, as large as what rank k sends; None for this rank.
            wanted: for rank k the half-open ranges of its buffer, in bytes and ascending, that this rank needs. Bytes
                outside of the ranges may be written or not.

        Raises:
            ValueError: malformed buffers or ranges.
            RuntimeError: a rank did not answer in time; a :class:`RanksLostError` if it is known which one.
        """

    def wait_at_most(self, timeout: timedelta) -> None:
        """Change how long exchanges wait for a rank: those that begin from now on, at least."""
        del timeout  # a transport that has no time-out has none to change

    @abstractmethod
    def close(self) -> None:
        """Release sockets, threads and memory. A second call does nothing."""

    def break_off(self) -> None:
        """End the transport in the middle of a step, as where Ctrl-C came between two exchanges. Ranks that wait for
        this one get an error soon.
        """
        self.close()


def check_exchange(outgoing: Tensor, incoming: Sequence[Tensor | None], wanted: Wanted, rank: int, size: int) -> None:
    """Raise ValueError for malformed arguments of :meth:`Transport.exchange`."""
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
                f"buffers must be flat, contiguous and uint8, not {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    for k, ranges in enumerate(wanted):
        buffer, end = incoming[k], 0
        if buffer is None and k != rank:
            raise ValueError(f"incoming[{k}] is None; only rank {rank}'s own entry may be None")
        for start, stop in ranges:
            if buffer is None or not end <= start < stop <= buffer.numel():
                nbytes = 0 if buffer is None else buffer.numel()
                raise ValueError(
                    f"wanted[{k}]={list(ranges)} are not ascending ranges of the {nbytes} bytes that rank {k} sends"
                )
            end = stop
