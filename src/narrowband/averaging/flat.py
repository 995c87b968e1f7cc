"""Flat tensors, in which several tensors lie end to end when they are fed to the core of averaging.

In a flat tensor, as in a DDP bucket, the elements of a tensor have the same order as in memory. In the memory format
channels_last this order differs from that of a contiguous tensor. Data of two ranks, or of one rank in two steps, fit
together only if the order is the same. So the order is recorded once, at set-up, as the tensor's :class:`Form`, and
ranks compare it there. Later changes of the tensor's own strides do not change its part of the flat tensor.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

__all__ = [
    "GROUP_NBYTES",
    "Form",
    "empty_like",
    "form_of",
    "groups_of",
    "in_memory_order",
    "local",
    "parts_of",
    "real",
    "rows_of",
]

#: About how many bytes a group has. As with DDP's buckets, it is large enough for few messages, and small enough for
#: the next group to be encoded while one is on its way.
GROUP_NBYTES = 25 << 20

#: PyTorch's name → dimensions, from the largest stride to the smallest.
_FORMATS = {"channels_last": (0, 2, 3, 1), "channels_last_3d": (0, 2, 3, 4, 1)}


class Form(NamedTuple):
    """The layout of a tensor's elements in its part of a flat tensor, without gaps.

    Attributes:
        shape: of the tensor, with complex numbers as pairs of real ones.
        stride: of each dimension.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements the part has."""
        return math.prod(self.shape)

    @property
    def memory_format(self) -> str:
        """The order of elements, by PyTorch's name if there is one. Two forms of one shape have the same name if and
        only if their elements are in the same order.

        Example:
            >>> weight = torch.empty(8, 4, 3, 3)
            >>> form_of(weight).memory_format, form_of(weight.to(memory_format=torch.channels_last)).memory_format
            ('contiguous', 'channels_last')
            >>> form_of(torch.empty(8, 4).t()).memory_format
            'dimensions in the order 1, 0'
        """
        dims = [dim for dim, size in enumerate(self.shape) if size > 1]
        order = sorted(dims, key=lambda dim: -self.stride[dim])
        if order == dims:
            return "contiguous"
        for name, usual in _FORMATS.items():
            if len(usual) == len(self.shape) and order == [dim for dim in usual if dim in dims]:
                return name
        return f"dimensions in the order {', '.join(map(str, order))}"


def form_of(x: Tensor) -> Form:
    """Return a tensor's layout in memory; row by row if it has gaps or overlaps there."""
    own = real(x.detach())
    return Form(own.shape, own.stride()) if _is_dense(own) else rows_of(own)


def rows_of(x: Tensor) -> Form:
    """Return the row-by-row layout, as of a contiguous tensor, whatever the tensor's layout in memory."""
    shape = real(x.detach()).shape
    return Form(shape, torch.empty(shape, dtype=x.dtype, device="meta").stride())


def groups_of(
    tensors: Iterable[Tensor], *, alone: Callable[[Tensor], bool] = lambda _: False
) -> Iterator[list[Tensor]]:
    """Yield groups of tensors that travel at the same time: of one dtype, from the model's end to its beginning.

    Args:
        tensors: in the model's order.
        alone: tells whether a tensor makes a group by itself.
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
    """Allocate a flat tensor for tensors of one dtype, end to end; complex numbers take two elements each."""
    flat = torch.empty(sum(x.numel() for x in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    return real(flat).view(-1)


def parts_of(flat: Tensor, forms: Iterable[Form]) -> Iterator[Tensor]:
    """Yield each tensor's part of a flat tensor, in the tensor's shape."""
    start = flat.storage_offset()
    for form in forms:
        yield flat.as_strided(form.shape, form.stride, start)
        start += form.numel


def in_memory_order(x: Tensor) -> Tensor | None:
    """Return a flat view of all elements in memory order; None if there are gaps or overlaps."""
    return x.as_strided((x.numel(),), (1,)) if _is_dense(x) else None


def _is_dense(x: Tensor) -> bool:
    """Whether a tensor has no gaps or overlaps in memory."""
    return _are_dense(x.shape, x.stride())


@functools.lru_cache(maxsize=4096)
def _are_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether strides leave no gaps or overlaps: ``empty_like`` keeps such strides, and no others."""
    return torch.empty_like(torch.empty_strided(shape, stride, dtype=torch.float32, device="meta")).stride() == stride


def local(x: Tensor) -> Tensor:
    """Return the detached tensor; of a DTensor, this rank's shard."""
    whole = x.detach()
    return whole.to_local() if hasattr(whole, "to_local") else whole


def real(x: Tensor) -> Tensor:
    """Return a view of complex numbers as pairs of real ones; a real tensor as it is."""
    return torch.view_as_real(x) if x.is_complex() else x
