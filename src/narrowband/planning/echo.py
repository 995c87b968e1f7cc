"""A process group of one process that answers as N ranks would, if all of them sent what this one sends.

With it, an exchange among N ranks can be run and timed in one process: encoding and decoding are real, but nothing is
sent. An all-reduce multiplies the tensor by N; an all-gather and an all-to-all give N copies of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["EchoGroup"]


class _Done:
    """The work handle of a collective that is complete from the start."""

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        return True

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


class EchoGroup(dist.ProcessGroup):
    """The process group of rank 0 among ``ranks`` ranks that all do the same.

    Attributes:
        calls: the names of the collectives that were called, in order.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from narrowband.planning.echo import EchoGroup
        >>> x = torch.ones(2)
        >>> work = dist.all_reduce(x, group=EchoGroup(4), async_op=True)
        >>> x
        tensor([4., 4.])
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks)  # type: ignore[call-arg]  # the one that stubs know has a store
        self._ranks = ranks
        self.calls: list[str] = []

    def allreduce(self, tensors: list[Tensor], *_: Any) -> _Done:  # type: ignore[override]
        """Multiply by the number of ranks, the sum of equal tensors."""
        self.calls.append("all_reduce")
        tensors[0].mul_(self._ranks)
        return _Done()

    def all_gather_single(self, out: Tensor, x: Tensor, *_: Any) -> _Done:  # type: ignore[override]
        """``out[r]`` ← ``x``."""
        self.calls.append("all_gather")
        out.view(self._ranks, -1).copy_(x.reshape(1, -1))
        return _Done()

    def all_to_all_single(self, out: Tensor, x: Tensor, out_sizes: list[int], *_: Any) -> _Done:  # type: ignore[override]
        """Receive from every rank what this rank sends to itself."""
        self.calls.append("all_to_all")
        own = x.view(-1)[: out_sizes[0]]
        out.view(self._ranks, -1).copy_(own.reshape(1, -1))
        return _Done()

    # The names of these methods before PyTorch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
