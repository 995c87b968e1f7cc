"""Memory for the codes of a pass.

Codes live until backward, activations for a moment only. If both were in one heap, freed codes would leave gaps there,
which the process cannot return to the system. So codes have large pieces of memory to themselves.

Linux provides a new piece page by page, at the first write to each page. Pages of 2 MiB are fewer than those of 4 KiB,
but where no whole one is free, Linux first compacts small pages, which can take longer than to make the codes. So
pieces are kept from pass to pass.
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

_CPU = torch.device("cpu")
#: The bytes of a huge page on Linux.
_HUGE_PAGE = 2 << 20


class Pieces:
    """A pool of memory pieces for codes, reused from pass to pass. Any thread may take pieces.

    A piece returns to the pool when nothing refers to any part of it. While it is idle, Linux may reclaim its pages if
    memory is short. All pieces together take no more bytes than were in use at once in the last :data:`_RECENT` to
    2 · :data:`_RECENT` passes.

    Nothing here takes a lock: a piece returns wherever Python frees an object, which may happen at any point. Instead,
    each access to the collections is a single operation. (A copy as a list is one. One as a tuple is none: garbage
    collection may run after its iteration has begun.)

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

    #: The number of passes in a window over which the most bytes in use are found.
    _RECENT = 64

    def __init__(self) -> None:
        self._idle: deque[mmap.mmap] = deque()
        self._in_use: dict[int, int] = {}  # bytes by the piece's identity
        self._passes = 0
        self._most = self._most_before = 0  # most bytes in use at once: in this window of passes, in the one before

    @property
    def idle_nbytes(self) -> int:
        """Bytes of the pieces that are not in use."""
        return sum(len(piece) for piece in list(self._idle))

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return self.idle_nbytes + self._busy()

    def begin(self) -> None:
        """Count a pass that begins."""
        self._passes += 1
        if self._passes % self._RECENT == 0:
            self._most, self._most_before = self._busy(), self._most
            self._trim()

    def take(self, nbytes: int) -> Tensor:
        """Return a piece of at least so many bytes, flat uint8, uninitialized."""
        piece = self._found(nbytes) or _new_memory(nbytes)
        part = np.frombuffer(piece, np.uint8)
        self._in_use[id(piece)] = len(piece)
        # Only the tensor's memory refers to this view, so its end is the end of the piece's use.
        weakref.finalize(part, _back, weakref.ref(self), piece).atexit = False
        self._most = max(self._most, self._busy())
        self._trim()
        return torch.from_numpy(part)

    def _busy(self) -> int:
        return sum(list(self._in_use.values()))

    def _found(self, nbytes: int) -> mmap.mmap | None:
        for _ in range(len(self._idle)):
            try:
                piece = self._idle.pop()  # the most recently used one
            except IndexError:  # another thread has taken it
                return None
            if len(piece) >= nbytes:
                return piece
            self._idle.appendleft(piece)
        return None

    def _trim(self) -> None:
        """Return idle pieces to the system, down to the most bytes that were in use lately."""
        most = max(self._most, self._most_before)
        while self._idle and self.nbytes > most:
            with contextlib.suppress(IndexError):
                self._idle.popleft()

    def put(self, piece: mmap.mmap) -> None:
        """Take back a piece that is no longer in use."""
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
    """Allocate memory, in pages of 2 MiB where Linux provides them."""
    rounded = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    huge: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
    if huge is None:  # not Linux
        return mmap.mmap(-1, rounded)
    memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: pages are small then
        memory.madvise(huge)
    return memory


class Arena:
    """Memory for the codes of one pass: pieces that hold nothing else, filled one after the other.

    A piece is free again when the last codes in it are freed; backward frees codes in reverse order. On other devices
    than the CPU, codes come from PyTorch's own allocator.

    Args:
        pieces: the pool that pieces come from.

    Example:
        >>> arena, cpu = Arena(), torch.device("cpu")
        >>> a, b = arena.take(100, cpu), arena.take(100, cpu)
        >>> a.numel(), b.data_ptr() - a.data_ptr()
        (100, 128)
        >>> arena.give(a)
        >>> arena.take(100, cpu).data_ptr() == a.data_ptr()
        True
    """

    #: The least bytes of a piece. Pages that were never written to take no memory.
    PIECE_NBYTES = 64 << 20
    _ALIGNED = 64
    #: Whether to use pieces on CPUs. If False, codes come from PyTorch's allocator, as on devices, and PyTorch counts
    #: them.
    pools: ClassVar[bool] = True

    def __init__(self, pieces: Pieces | None = None) -> None:
        self._pieces = pieces or Pieces()
        self._piece, self._used = np.empty(0, np.uint8), 0
        self._given: dict[int, list[Tensor]] = {}
        self._pieces.begin()

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory for so many bytes, flat uint8."""
        if device != _CPU or not self.pools:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        given = self._given.get(nbytes)
        if given:
            return given.pop()
        if nbytes > self._piece.size - self._used:
            self._piece, self._used = self._pieces.take(max(nbytes, self.PIECE_NBYTES)).numpy(), 0
        begin = self._used
        self._used += -(-nbytes // self._ALIGNED) * self._ALIGNED
        return torch.from_numpy(self._piece[begin : begin + nbytes])  # no view of a tensor: no shared version counter

    def give(self, memory: Tensor) -> None:
        """Take back memory that nothing uses any more, for the next one in this pass who takes as many bytes."""
        if memory.is_cpu and self.pools:
            self._given.setdefault(memory.numel(), []).append(memory)
