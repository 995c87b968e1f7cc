"""Error feedback in one pass on a residual that is stored in fewer bits (:mod:`narrowband.kernels.stores`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from narrowband.kernels.backends import backend_of
from narrowband.kernels.stores import STORE_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["GROUPS", "compensate_kept", "former_places", "put_former", "take_former", "take_former_all_if"]

#: Number of groups whose powers of two lie together in the gradient's memory.
GROUPS = 64


def compensate_kept(
    x: Tensor,
    codes: Tensor,
    exponents: Tensor | None,
    k: int,
    *,
    decay: float = 1.0,
    sampled: bool = False,
    seed: int = 0,
    rounding: int = 0,
) -> tuple[bool, Tensor, Tensor]:
    """Select the k largest elements of ``decay · kept + x``, and keep the rest as the new residual.

    The new residual is the sum with zeros at the selected indices. It is rounded as by :func:`keep_in_16` and
    :func:`keep_in_8`, with one exception: a group's power of two is at most the smallest one with which the least
    selected magnitude fits. So a group's power can be fixed before all large elements are known. The old residual
    is written into the memory of ``x``, see :func:`take_former`. If the sum is not finite, nothing changes, and indices
    and values are empty.

    Args:
        x: flat float32, at least one element.
        codes, exponents: the residual: int8 and its powers of two; or bfloat16 and None.
        k: at least 1.
        decay: the factor by which the residual is multiplied first.
        sampled, seed: as for :func:`select_topk`.
        rounding: the seed of stochastic rounding.

    Returns:
        (whether the sum is finite, the selected indices, the sum at these indices).
    """
    options = {"decay": decay, "sampled": sampled, "seed": seed, "rounding": rounding}
    return cast("tuple[bool, Tensor, Tensor]", backend_of(x).compensate_kept(x, codes, exponents, k, **options))


def take_former(x: Tensor, codes: Tensor, exponents: Tensor | None) -> None:
    """Undo :func:`compensate_kept`, to the bit: restore the residual from the gradient's memory."""
    for memory, own in former_places(x, codes, exponents):
        own.copy_(memory)


def take_former_all_if(
    bad: Tensor, xs: Sequence[Tensor], codes: Sequence[Tensor], exponents: Sequence[Tensor | None]
) -> None:
    """Apply :func:`take_former` to several residuals of one format, if ``bad``, one int32 on their device, is not zero.
    The host does not wait for ``bad``.
    """
    if xs:
        backend_of(xs[0]).take_former_all_if(bad, xs, codes, exponents)


def put_former(x: Tensor, codes: Tensor, exponents: Tensor | None) -> None:
    """Write the residual into the gradient's memory.

    The codes of each group go to where its first elements are, so that a group needs nothing beyond its own elements.
    The powers of two of 64 groups go behind the codes of the first of these groups.
    """
    for memory, own in former_places(x, codes, exponents):
        memory.copy_(own)


def former_places(x: Tensor, codes: Tensor | None, exponents: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (part of the gradient's memory, part of the residual that is written there): codes, then powers of two."""
    n = x.numel()
    if codes is not None:
        memory, groups, room = x.view(codes.dtype), n // STORE_GROUP, STORE_GROUP * (4 // codes.itemsize)
        whole = groups * STORE_GROUP
        yield memory[: groups * room].view(groups, room)[:, :STORE_GROUP], codes[:whole].view(groups, STORE_GROUP)
        yield memory[groups * room :][: n - whole], codes[whole:]
    if exponents is not None:
        memory, size = x.view(torch.int8), GROUPS * STORE_GROUP
        several = n // size
        behind = memory[: 4 * several * size].view(several, 4 * size)[:, STORE_GROUP : STORE_GROUP + GROUPS]
        yield behind, exponents[: several * GROUPS].view(several, GROUPS)
        rest = exponents[several * GROUPS :]
        begin = 4 * several * size + min(STORE_GROUP, n - several * size)
        yield memory[begin : begin + rest.numel()], rest
