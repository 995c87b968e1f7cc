"""Reduce-scatter and all-gather among the ranks of one node, through shared memory where possible.

On GPUs the process group's own collectives (NCCL) are best. On CPUs gloo sends everything by TCP through the kernel,
which takes as long as a fast network does. So the ranks of one host map the same memory, write into it, wait for each
other, and read.

The memory has two halves, used in turn. A rank that writes into one half has waited for all ranks after the other half
was written. By then, all ranks had finished reading what this half held before.
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

#: At most this part of the free shared memory is used.
_SHARE = 0.5


class Node:
    """Collectives among the ranks of a node.

    Args:
        group: the ranks of the node.
        device: of the tensors that are summed.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._shares = device.type == "cpu" and dist.get_backend(group) == "gloo" and _FOLDER.is_dir()
        # Gloo's own reduce-scatter takes longer than an all-to-all of rows and a local sum.
        self._exchanges = dist.get_backend(group) == "gloo"
        self._memory: Tensor | None = None  # uint8 (2 halves, ranks, bytes)
        self._turn = 0

    def rows(self, longest: int, like: Tensor) -> Tensor:
        """Return the input of :meth:`sum_of_own`, to be written by this rank: (ranks, longest), a row for each rank.

        The rows may hold old values.
        """
        if self._shares:
            self._reserve(self.size * longest * like.element_size())
        if self._memory is None:
            return torch.zeros(self.size, longest, dtype=like.dtype, device=like.device)
        self._turn ^= 1
        return self._written(like.dtype, self.size * longest)[self.rank].view(self.size, longest)

    def sum_of_own(self, rows: Tensor) -> Tensor:
        """Return the sum over all ranks of the row that each has written for this rank: a reduce-scatter."""
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
        """All-gather ``own``: one row per rank. Read the result before the next call of this object's methods."""
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
        """Return the current half of the shared memory: (ranks, numel), a row written by each rank."""
        assert self._memory is not None
        return self._memory[self._turn, :, : numel * dtype.itemsize].view(dtype)

    def _wait(self) -> None:
        """Wait until all ranks have written."""
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"), group=self.group)

    def _reserve(self, nbytes: int) -> None:
        """Map shared memory with a row of at least ``nbytes`` bytes per rank and half. A collective.

        If any rank cannot map it, because it is on another host or in another container, or there is no room, no rank
        uses shared memory from then on.
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
            path.unlink(missing_ok=True)  # the memory lives on until the last rank unmaps it
        if bool(all_have) and mapped is not None:
            self._memory = mapped.view(shape)
        else:
            self._shares = False


def _made(nbytes: int) -> Path | None:
    """Create a file of this size in shared memory; None if there is no room."""
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
