"""Memory for the codes of a pass.

Codes live until backward, activations for a moment. Side by side in one heap, codes that are freed leave gaps there,
which stay with the process. So codes have large pieces of memory to themselves.

A piece that is new to a process costs more than to write codes into it. Linux gives it page by page: 64 MiB in pages
of 4 KiB take 21 ms, in pages of 2 MiB 2.5 ms where there are whole ones, and 120 ms where it has to make them out of
small ones first (AMD EPYC, one thread; to make codes of that size takes 18 ms). So pieces are kept from pass to
pass.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["Arena", "Pieces"]

#: Bytes.
_HUGE_PAGE = 2 << 20


class Pieces:
    """Pieces of memory that codes of earlier passes had, and codes of later ones get again. Any thread may take them.

    A piece comes back when nothing holds a part of it any more. While nobody uses it, Linux may take its pages away if
    it is short of memory. All pieces together take no more than those that were in use at once, in the last
    :data:`_RECENT` to 2 · :data:`_RECENT` passes.

    Nothing here takes a lock: pieces come back wherever Python lets go of an object, which may be in the middle of
    anything. What is done to the collections is one operation each.

    Example:
        >>> pieces = Pieces()
        >>> first = pieces.take(1000)
        >>> first.numel(), pieces.nbytes, pieces.idle_nbytes
        (2097152, 2097152, 0)
        >>> where = first.data_ptr()
        >>> del first
        >>> pieces.nbytes, pieces.idle_nbytes, pieces.take(2000).data_ptr() == where
        (2097152, 2097152, True)
    """

    #: Passes.
    _RECENT = 64

    def __init__(self) -> None:
        self._idle: deque[mmap.mmap] = deque()
        self._in_use: dict[int, int] = {}  # bytes by the piece's identity
        self._passes = 0
        self._most = self._most_before = 0  # bytes in use at once, of these passes and of those before

    @property
    def idle_nbytes(self) -> int:
        """Bytes that no codes are in."""
        return sum(len(piece) for piece in tuple(self._idle))

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return self.idle_nbytes + self._busy()

    def begin(self) -> None:
        """A pass begins."""
        self._passes += 1
        if self._passes % self._RECENT == 0:
            self._most, self._most_before = self._busy(), self._most
            self._trim()

    def take(self, nbytes: int) -> Tensor:
        """A piece of so many bytes or more, uint8, flat; of any content."""
        piece = self._found(nbytes) or _new_memory(nbytes)
        part = np.frombuffer(piece, np.uint8)
        self._in_use[id(piece)] = len(piece)
        # The tensor's memory holds this view, and nothing else does.
        weakref.finalize(part, _back, weakref.ref(self), piece).atexit = False
        self._most = max(self._most, self._busy())
        self._trim()
        return torch.from_numpy(part)

    def _busy(self) -> int:
        return sum(tuple(self._in_use.values()))

    def _found(self, nbytes: int) -> mmap.mmap | None:
        for _ in range(len(self._idle)):
            try:
                piece = self._idle.pop()  # whose pages were used last
            except IndexError:  # another thread was faster
                return None
            if len(piece) >= nbytes:
                return piece
            self._idle.appendleft(piece)
        return None

    def _trim(self) -> None:
        """Give back to the system what was not in use lately."""
        most = max(self._most, self._most_before)
        while self._idle and self.nbytes > most:
            with contextlib.suppress(IndexError):
                self._idle.popleft()

    def put(self, piece: mmap.mmap) -> None:
        """A piece that nothing is in any more."""
        self._in_use.pop(id(piece), None)
        free: int | None = getattr(mmap, "MADV_FREE", None)
        if free is not None:
            with contextlib.suppress(OSError):
                piece.madvise(free)
        self._idle.append(piece)


def _back(pieces: weakref.ref[Pieces], piece: mmap.mmap) -> None:
    owner = pieces()
    if owner is not None:
        owner.put(piece)


def _new_memory(nbytes: int) -> mmap.mmap:
    """Memory that nobody had before, in pages of 2 MiB where Linux gives them."""
    rounded = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    huge: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
    if huge is None:  # no Linux
        return mmap.mmap(-1, rounded)
    memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel that has none: then pages are small
        memory.madvise(huge)
    return memory


class Arena:
    """Memory for the codes of one pass: pieces that hold nothing else, filled one after the other.

    A piece is free again with the last of the codes in it, and backward needs them in the opposite order. On devices,
    PyTorch's own allocator sees to that.

    Args:
        pieces: where they come from.

    Example:
        >>> arena, cpu = Arena(), torch.device("cpu")
        >>> a, b = arena.take(100, cpu), arena.take(100, cpu)
        >>> a.numel(), b.data_ptr() - a.data_ptr()
        (100, 128)
    """

    #: Bytes of a piece. What was never written to takes no memory.
    PIECE_NBYTES = 64 << 20
    _ALIGNED = 64
    #: On CPUs; where PyTorch shall count them, codes come from its allocator, as on devices.
    pools: ClassVar[bool] = True

    def __init__(self, pieces: Pieces | None = None) -> None:
        self._pieces = pieces or Pieces()
        self._piece, self._used = np.empty(0, np.uint8), 0
        self._pieces.begin()

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory for so many bytes: uint8, flat."""
        if device.type != "cpu" or not self.pools:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        if nbytes > self._piece.size - self._used:
            self._piece, self._used = self._pieces.take(max(nbytes, self.PIECE_NBYTES)).numpy(), 0
        begin = self._used
        self._used += -(-nbytes // self._ALIGNED) * self._ALIGNED
        return torch.from_numpy(self._piece[begin : begin + nbytes])  # no view, of whose changes autograd keeps count
