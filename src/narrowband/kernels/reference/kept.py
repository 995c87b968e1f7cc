"""Error feedback on a residual that is stored in fewer bits, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from narrowband.kernels.kept import former_places, put_former
from narrowband.kernels.reference import compensation, stores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["compensate_kept", "take_former_all_if"]


class Options(NamedTuple):
    """The keyword arguments of :func:`compensate_kept`."""

    decay: float
    sampled: bool
    seed: int
    rounding: int


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
    options = Options(decay, sampled, seed, rounding)
    return kept_by_parts(stores, compensation, x, codes, exponents, k, options)


def take_former_all_if(
    bad: Tensor, xs: Sequence[Tensor], codes: Sequence[Tensor], exponents: Sequence[Tensor | None]
) -> None:
    for each in zip(xs, codes, exponents, strict=True):
        for memory, own in former_places(*each):
            own.copy_(torch.where(bad != 0, memory, own))


def kept_by_parts(
    stores: Any,
    compensation: Any,
    x: Tensor,
    codes: Tensor,
    exponents: Tensor | None,
    k: int,
    options: Options,
) -> tuple[bool, Tensor, Tensor]:
    """Run :func:`compensate_kept` as a sequence of a backend's loops."""
    if exponents is None:
        total = codes.float()
    else:
        total = torch.empty_like(x)
        stores.read_from_8(codes, exponents, total)
    form = {"decay": options.decay, "sampled": options.sampled, "seed": options.seed}
    finite, at, values = compensation.compensate_select_topk(x.clone(), total, k, **form)
    if not finite:
        return False, at[:0], values[:0]
    put_former(x, codes, exponents)
    total[at] = values.abs().amin()  # bounds the power of two of groups with sent elements
    if exponents is None:
        stores.keep_in_16(total, codes, seed=options.rounding)
    else:
        stores.keep_in_8(total, codes, exponents, seed=options.rounding)
    codes[at] = 0
    return True, at, values
