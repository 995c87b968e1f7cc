"""Error feedback in one pass, in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference import common
from narrowband.kernels.reference.common import magnitude_bits, runs_of_groups
from narrowband.kernels.reference.selection import select_topk
from narrowband.kernels.reference.sparse import elias_fano_encode
from narrowband.kernels.sparse import elias_fano_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


__all__ = [
    "all_finite",
    "all_zero",
    "all_zero_each",
    "clear_all_if",
    "compensate",
    "compensate_select_topk",
    "compensate_select_topk_all",
    "difference",
    "encode_topk",
    "encode_topk_all",
    "poison_all_if",
    "restore_all_if",
    "take_difference",
]


def compensate(x: Tensor, residual: Tensor, *, decay: float = 1.0, below: float = math.inf) -> bool:
    for begin, end, _ in runs_of_groups(x.numel(), common.CHUNK):
        old = residual[begin:end].clone()
        residual[begin:end] *= decay
        residual[begin:end] += x[begin:end]
        x[begin:end] = old
    return all_finite(residual, below=below)


def compensate_select_topk(
    x: Tensor, residual: Tensor, k: int, *, decay: float = 1.0, sampled: bool = False, seed: int = 0
) -> tuple[bool, Tensor, Tensor]:
    finite = compensate(x, residual, decay=decay)
    at = select_topk(residual, k, sampled=sampled, seed=seed)
    return finite, at, residual[at]


def encode_topk(
    x: Tensor,
    residual: Tensor,
    k: int,
    out: Tensor,
    *,
    decay: float = 1.0,
    sampled: bool = False,
    seed: int = 0,
    subtract: bool = False,
) -> bool:
    finite, at, values = compensate_select_topk(x, residual, k, decay=decay, sampled=sampled, seed=seed)
    if finite:
        write_payload(at, values, x.numel(), k, out)
        if subtract:
            residual[at] = 0.0
    return finite


def write_payload(at: Tensor, values: Tensor, n: int, k: int, out: Tensor) -> None:
    number, cut = at.numel(), 4 * k
    end = cut + elias_fano_nbytes(k, n)
    out[4 * number :] = 0
    out[: 4 * number].view(torch.float32).copy_(values)
    elias_fano_encode(torch.cat([at, at.new_full((k - number,), n - 1)]), n, out[cut:end])


def encode_topk_all(
    xs: Sequence[Tensor],
    ks: Sequence[int],
    outs: Sequence[Tensor],
    *,
    residuals: Sequence[Tensor] = (),
    decay: float = 1.0,
    subtract: bool = True,
    least: Tensor | None = None,
) -> bool:
    finite = True
    for number, (x, residual, k, out) in enumerate(zip(xs, residuals or xs, ks, outs, strict=True)):
        if residuals:
            well, at, values = compensate_select_topk(x, residual, k, decay=decay)
            finite &= well
            if well:
                write_payload(at, values, x.numel(), k, out)
                if subtract:
                    residual[at] = 0.0 if least is None else torch.nan
            if least is not None:
                least[number] = values.abs().amin()
        else:
            at = select_topk(x, k)
            write_payload(at, x[at], x.numel(), k, out)
            finite &= all_finite(x)
    return finite


def compensate_select_topk_all(
    xs: Sequence[Tensor],
    ks: Sequence[int],
    outs: Sequence[Tensor],
    *,
    residuals: Sequence[Tensor] = (),
    decay: float = 1.0,
) -> tuple[bool, list[Tensor], list[Tensor]]:
    every, indices, values = True, [], []
    for x, total, k, out in zip(xs, residuals or xs, ks, outs, strict=True):
        every &= compensate(x, total, decay=decay) if residuals else all_finite(x)
        at = select_topk(total, k)
        write_indices(at, total.numel(), out)
        indices.append(at)
        values.append(total[at])
        if residuals:
            total[at] = -0.0
    return every, indices, values


def write_indices(at: Tensor, n: int, out: Tensor) -> None:
    nbytes = elias_fano_nbytes(at.numel(), n)
    elias_fano_encode(at, n, out[:nbytes])
    out[nbytes:] = 0


def difference(x: Tensor, base: Tensor, out: Tensor, *, below: float = math.inf) -> bool:
    torch.sub(x, base, out=out)
    return all_finite(out, below=below)


def take_difference(x: Tensor, base: Tensor) -> bool:
    difference = x - base
    x.copy_(base)
    base.copy_(difference)
    return all_finite(base)


def all_zero(x: Tensor) -> bool:
    return not bool(x.any())


def all_zero_each(xs: Sequence[Tensor]) -> list[bool]:
    return [all_zero(x) for x in xs]


def all_finite(x: Tensor, *, below: float = math.inf) -> bool:
    limit = torch.tensor(min(below, math.inf), dtype=torch.float32, device="cpu").view(torch.int32)
    tops = [magnitude_bits(x[begin:end]).amax() for begin, end, _ in runs_of_groups(x.numel(), common.CHUNK)]
    return not tops or bool(torch.stack(tops).amax().cpu() < limit)


def restore_all_if(bad: Tensor, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    for out, x in zip(outs, xs, strict=True):
        out.copy_(torch.where(bad != 0, x, out))


def poison_all_if(bad: Tensor, xs: Sequence[Tensor]) -> None:
    _fill_all_if(bad, xs, math.nan)


def clear_all_if(bad: Tensor, xs: Sequence[Tensor]) -> None:
    _fill_all_if(bad, xs, 0.0)


def _fill_all_if(bad: Tensor, xs: Sequence[Tensor], value: float) -> None:
    wrong = (bad != 0).any()
    for x in xs:
        x.masked_fill_(wrong, value)
