"""Error feedback in one pass on a residual that is kept in fewer bits (:mod:`narrowband.kernels.stores`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from narrowband.kernels.backends import backend_of
from narrowband.kernels.stores import STORE_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["compensate_kept", "former_places", "put_former", "take_former"]

#: Groups whose powers of two lie together in a gradient's memory.
_GROUPS = 64


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
    """The k largest of ``decay · kept + x``, and the rest is kept: (whether the sum is finite, the indices, the sum
    there).

    What is kept becomes the sum with zeros at these indices, rounded as :func:`keep_in_16` and :func:`keep_in_8` do it,
    except that a group's power of two is also the smallest with which the smallest magnitude that was found fits, where
    that is less. So it is known before all that is large is known. The gradient's memory takes what was kept, see
    :func:`take_former`. Where the sum is not finite nothing changes, and indices and values are empty.

    Args:
        x: flat float32, at least one element.
        codes, exponents: what is kept: int8 and its powers of two; or bfloat16 and None.
        k: at least 1.
        decay: what is left of the residual.
        sampled, seed: as for :func:`select_topk`.
        rounding: the seed of stochastic rounding.
    """
    options = {"decay": decay, "sampled": sampled, "seed": seed, "rounding": rounding}
    return cast("tuple[bool, Tensor, Tensor]", backend_of(x).compensate_kept(x, codes, exponents, k, **options))


def take_former(x: Tensor, codes: Tensor, exponents: Tensor | None) -> None:
    """Undo :func:`compensate_kept`, to the bit: keep what the gradient's memory holds."""
    for memory, own in former_places(x, codes, exponents):
        own.copy_(memory)


def put_former(x: Tensor, codes: Tensor, exponents: Tensor | None) -> None:
    """Write what is kept into a gradient's memory: the codes of each group to where its first elements are, so that a
    group needs nothing beyond its own elements; and the powers of two of 64 groups behind the codes of the first one.
    """
    for memory, own in former_places(x, codes, exponents):
        memory.copy_(own)


def former_places(x: Tensor, codes: Tensor | None, exponents: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a gradient's memory, and what is kept there: codes and powers of two, or one of these."""
    n = x.numel()
    if codes is not None:
        memory, groups, room = x.view(codes.dtype), n // STORE_GROUP, STORE_GROUP * (4 // codes.itemsize)
        whole = groups * STORE_GROUP
        yield memory[: groups * room].view(groups, room)[:, :STORE_GROUP], codes[:whole].view(groups, STORE_GROUP)
        yield memory[groups * room :][: n - whole], codes[whole:]
    if exponents is not None:
        memory, size = x.view(torch.int8), _GROUPS * STORE_GROUP
        several = n // size
        behind = memory[: 4 * several * size].view(several, 4 * size)[:, STORE_GROUP : STORE_GROUP + _GROUPS]
        yield behind, exponents[: several * _GROUPS].view(several, _GROUPS)
        rest = exponents[several * _GROUPS :]
        begin = 4 * several * size + min(STORE_GROUP, n - several * size)
        yield memory[begin : begin + rest.numel()], rest
