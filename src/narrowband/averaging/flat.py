"""Tensors end to end in one flat tensor, in which a place feeds them to the core of averaging.

In a flat tensor, as in DDP's buckets, the elements of a tensor have the order that they have in memory. In PyTorch's
memory format channels_last that is another one than in a contiguous tensor. What two ranks send, or one rank in two
steps, belongs together only if this order is the same. So it is taken once, at set-up, as the tensor's :class:`Form`,
and ranks compare it there. Whatever becomes of the tensor's own strides later, its part stays as it was.
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

#: Groups have about so many bytes: as DDP's buckets, large enough for few messages, and small enough for the next group
#: to be encoded while one is on its way.
GROUP_NBYTES = 25 << 20

#: Name in PyTorch → dimensions from the one whose elements are farthest apart.
_FORMATS = {"channels_last": (0, 2, 3, 1), "channels_last_3d": (0, 2, 3, 4, 1)}


class Form(NamedTuple):
    """How the elements of a tensor lie in its part of a flat one: without gaps.

    Attributes:
        shape: of the tensor, with complex numbers as pairs of real ones.
        stride: of each dimension.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def memory_format(self) -> str:
        """The order of elements, by PyTorch's name for it if there is one. It is the same for two forms of one shape if
        their elements lie in the same order.

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
    """That in which a tensor lies in memory; row by row where it has gaps or overlaps there."""
    own = real(x.detach())
    return Form(own.shape, own.stride()) if _is_dense(own) else rows_of(own)


def rows_of(x: Tensor) -> Form:
    """Row by row, as in a contiguous tensor, wherever its elements lie in memory."""
    shape = real(x.detach()).shape
    return Form(shape, torch.empty(shape, dtype=x.dtype, device="meta").stride())


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


def parts_of(flat: Tensor, forms: Iterable[Form]) -> Iterator[Tensor]:
    """The part of each tensor, in its shape."""
    start = flat.storage_offset()
    for form in forms:
        yield flat.as_strided(form.shape, form.stride, start)
        start += form.numel


def in_memory_order(x: Tensor) -> Tensor | None:
    """All elements as a flat view, in the order in which they lie in memory; None where there are gaps or overlaps."""
    return x.as_strided((x.numel(),), (1,)) if _is_dense(x) else None


def _is_dense(x: Tensor) -> bool:
    """Whether it lies in memory without gaps and overlaps."""
    return _are_dense(x.shape, x.stride())


@functools.lru_cache(maxsize=4096)
def _are_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether strides leave no gaps and overlaps: empty_like keeps such strides, and no others."""
    return torch.empty_like(torch.empty_strided(shape, stride, dtype=torch.float32, device="meta")).stride() == stride


def local(x: Tensor) -> Tensor:
    """A tensor itself; of a sharded one this rank's part. Detached."""
    whole = x.detach()
    return whole.to_local() if hasattr(whole, "to_local") else whole


def real(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(x) if x.is_complex() else x
