"""Tensors end to end in one flat tensor, in which a place feeds them to the core of averaging."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

__all__ = ["GROUP_NBYTES", "empty_like", "groups_of", "in_memory_order", "local", "parts_of", "real"]

#: Groups have about so many bytes: as DDP's buckets, large enough for few messages, and small enough for the next group
#: to be encoded while one is on its way.
GROUP_NBYTES = 25 << 20


def groups_of(
    tensors: Iterable[Tensor], *, alone: Callable[[Tensor], bool] = lambda _: False
) -> Iterator[list[Tensor]]:
    """Those that travel at the same time: of one dtype, from the model's end to its beginning.

    Args:
        tensors: in the model's order.
        alone: whether a tensor makes a group by itself.
    """
    group: list[Tensor] = []
    nbytes = 0
    for x in reversed(list(tensors)):
        by_itself = alone(x)
        if group and (by_itself or nbytes >= GROUP_NBYTES or x.dtype != group[0].dtype):
            yield group
            group, nbytes = [], 0
        group.append(x)
        nbytes += local(x).numel() * x.element_size()
        if by_itself:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def empty_like(tensors: Sequence[Tensor]) -> Tensor:
    """A flat tensor for tensors of one dtype, end to end; two elements for each complex one."""
    flat = torch.empty(sum(x.numel() for x in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    return real(flat).view(-1)


def parts_of(flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The part of each tensor, in its shape, in the order of its elements in memory, as in DDP's buckets."""
    start = 0
    for tensor in tensors:
        x = real(tensor.detach())
        part = flat[start : start + x.numel()]
        start += x.numel()
        yield part.as_strided(x.shape, x.stride(), part.storage_offset()) if _is_dense(x) else part.view(x.shape)


def in_memory_order(x: Tensor) -> Tensor | None:
    """All elements as a flat view, in the order in which they lie in memory; None where there are gaps or overlaps."""
    return x.as_strided((x.numel(),), (1,)) if _is_dense(x) else None


def _is_dense(x: Tensor) -> bool:
    """Whether it lies in memory without gaps and overlaps."""
    return _are_dense(x.shape, x.stride())


@functools.lru_cache(maxsize=4096)
def _are_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether strides leave no gaps and overlaps: empty_like keeps such strides, and no others."""
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride() == stride


def local(x: Tensor) -> Tensor:
    """A tensor itself; of a sharded one this rank's part. Detached."""
    whole = x.detach()
    return whole.to_local() if hasattr(whole, "to_local") else whole


def real(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(x) if x.is_complex() else x
