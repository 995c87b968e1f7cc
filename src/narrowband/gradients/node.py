"""The ranks of one node: sums and gathers among them, over shared memory where that is what they have.

On GPUs a node's ranks reach each other by what its collectives know best, NCCL. On CPUs gloo sends all by TCP, through
the kernel, which takes as long as a fast network does. So the ranks of one host write into memory that all of them
have mapped, wait for each other, and read.

There are two halves, used in turn: a rank that writes into one of them has waited for all after the other was written,
and so after they had read the one before.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from narrowband.collectives.primitives import all_gather_single, reduce_scatter_single

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Node"]

_FOLDER = Path("/dev/shm")

#: So much of the memory that is free for sharing is taken at most.
_SHARE = 0.5


class Node:
    """The ranks of a node.

    Args:
        group: these ranks.
        device: of what they add up.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._shares = device.type == "cpu" and dist.get_backend(group) == "gloo" and _FOLDER.is_dir()
        # Gloo's own reduce-scatter takes longer than an exchange of rows, and their sum.
        self._exchanges = dist.get_backend(group) == "gloo"
        self._memory: Tensor | None = None  # uint8 (2 halves, ranks, bytes)
        self._turn = 0

    def rows(self, longest: int, like: Tensor) -> Tensor:
        """Where this rank writes what others shall add up: a row for each rank, of this length; what is in them is
        anything.
        """
        if self._shares:
            self._reserve(self.size * longest * like.element_size())
        if self._memory is None:
            return torch.zeros(self.size, longest, dtype=like.dtype, device=like.device)
        self._turn ^= 1
        return self._written(like.dtype, self.size * longest)[self.rank].view(self.size, longest)

    def sum_of_own(self, rows: Tensor) -> Tensor:
        """The sum over all ranks of the row that each has for this one."""
        if self._memory is not None:
            self._wait()
            of_all = self._written(rows.dtype, rows.numel()).view(self.size, *rows.shape)
            return of_all[:, self.rank].sum(0)
        if self._exchanges:
            received = torch.empty_like(rows)
            dist.all_to_all_single(received.view(-1), rows.view(-1), group=self.group)
            return received.sum(0)
        own = torch.empty_like(rows[0])
        reduce_scatter_single(own, rows.view(-1), group=self.group)
        return own

    def gathered(self, own: Tensor) -> Tensor:
        """What all ranks have, a row each; to be read before anything else is done here."""
        if self._memory is not None:
            self._turn ^= 1
            rows = self._written(own.dtype, own.numel())
            rows[self.rank] = own
            self._wait()
            return rows
        rows = torch.empty(self.size, own.numel(), dtype=own.dtype, device=own.device)
        all_gather_single(rows.view(-1), own, group=self.group)
        return rows

    # ---- shared memory -----------------------------------------------------------------------------------------------

    def _written(self, dtype: torch.dtype, numel: int) -> Tensor:
        """The half whose turn it is: a row of each rank."""
        assert self._memory is not None
        return self._memory[self._turn, :, : numel * dtype.itemsize].view(dtype)

    def _wait(self) -> None:
        """Until all ranks have written."""
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"), group=self.group)

    def _reserve(self, nbytes: int) -> None:
        """Memory for rows of so many bytes of each rank. Where any of them cannot have it, because it is on another
        host or in another container, or there is no room, none shares memory.
        """
        if self._memory is not None and self._memory.shape[-1] >= nbytes:
            return
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        shape, self._memory = (2, self.size, nbytes), None
        said: list[Any] = [None]
        path = None
        if self.rank == 0:
            path = _made(2 * self.size * nbytes)
            said = [None if path is None else str(path)]
        dist.broadcast_object_list(said, dist.get_global_rank(self.group, 0), group=self.group)
        mapped = None
        if said[0] is not None:
            with contextlib.suppress(OSError, ValueError), Path(said[0]).open("r+b") as file:
                mapped = torch.frombuffer(mmap.mmap(file.fileno(), 2 * self.size * nbytes), dtype=torch.uint8)
        all_have = torch.tensor(float(mapped is not None), dtype=torch.float32, device="cpu")
        dist.all_reduce(all_have, dist.ReduceOp.MIN, group=self.group)
        if path is not None:
            path.unlink(missing_ok=True)  # it lives as long as somebody has it mapped
        if bool(all_have) and mapped is not None:
            self._memory = mapped.view(shape)
        else:
            self._shares = False


def _made(nbytes: int) -> Path | None:
    """A file of this size in memory; None where there is no room."""
    path = None
    try:
        free = os.statvfs(_FOLDER)
        if nbytes > _SHARE * free.f_bavail * free.f_frsize:
            return None
        handle, name = tempfile.mkstemp(prefix="narrowband-", dir=_FOLDER)
        path = Path(name)
        try:
            os.posix_fallocate(handle, 0, nbytes)
        finally:
            os.close(handle)
    except OSError:
        if path is not None:
            path.unlink(missing_ok=True)
        return None
    return path
