"""Rows of codes with shared ranges, in plain torch. R rows, I elements of a row."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference import common
from narrowband.kernels.reference.common import (
    TINY,
    floats_where_finite,
    ordered_bits,
    pack_codes,
    uniform,
    unpack_codes,
)
from narrowband.kernels.rows import FEWEST_ZEROED, RAISE, TRIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from narrowband.kernels.rows import Affine, Rows, Standard

__all__ = [
    "code_ranges",
    "dequantize_rows",
    "learn_ranges",
    "quantize_rows",
    "quantize_rows_adapting",
    "quantize_rows_extremes",
    "quantize_rows_learning",
    "row_extremes",
]


def _runs(rows: Rows, device: torch.device) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first row, last row, the range of each row) for runs of rows of about CHUNK elements each."""
    run = max(common.CHUNK // max(rows.inner, 1), 1)
    for first in range(0, rows.total, run):
        last = min(first + run, rows.total)
        row_R = torch.arange(first, last, dtype=torch.int64, device=device)
        part_R = row_R.div(rows.outer * rows.groups, rounding_mode="floor")
        yield first, last, part_R * rows.groups + row_R % rows.groups


def _rows_of(x: Tensor, rows: Rows, first: int, last: int) -> Tensor:
    """Return rows [first, last) as a view, (R, I)."""
    return x.view(-1)[first * rows.inner : last * rows.inner].view(last - first, rows.inner)


def row_extremes(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    size, device = rows.parts * rows.groups, x.device
    x = x.contiguous()
    if rows.numel == 0:
        low = torch.full((size,), torch.nan, dtype=torch.float32, device=device)
        return low, low.clone()
    least = torch.empty(rows.total, dtype=torch.int32, device=device)
    most = torch.empty_like(least)
    for first, last, _ in _runs(rows, device):
        ordered_RI = ordered_bits(_rows_of(x, rows, first, last).float().view(torch.int32))
        least[first:last], most[first:last] = ordered_RI.amin(1), ordered_RI.amax(1)
    shape = rows.parts, rows.outer, rows.groups
    return floats_where_finite(least.view(shape).amin(1).view(-1), most.view(shape).amax(1).view(-1))


def quantize_rows(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> None:
    x, inverse = x.contiguous(), torch.where(step < TINY, 0.0, 1.0 / step)
    stride = -(-rows.inner * bits // 8)
    for first, last, range_R in _runs(rows, x.device):
        value_RI = _rows_of(x, rows, first, last).float() - low[range_R, None]
        value_RI.mul_(inverse[range_R, None])
        if stochastic:
            u = uniform(first * rows.inner, last * rows.inner, seed, x.device, 16)
            value_RI.add_(u.view(value_RI.shape))
        else:
            value_RI.add_(0.5)
        codes_RI = value_RI.nan_to_num_(nan=0.0).floor_().clamp_(0, (1 << bits) - 1).to(torch.uint8)
        out[first * stride : last * stride] = pack_codes(codes_RI, bits).view(-1)


def quantize_rows_extremes(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    quantize_rows(x, out, rows, low, step, bits=bits, stochastic=stochastic, seed=seed)
    return row_extremes(x, rows)


def _learned(estimates: Tensor, low: Tensor, high: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """Return the new estimates, and the share of its width by which an end of each range has moved."""
    learned = estimates * decay + torch.stack((high - low, low)) * (1 - decay)
    width, beta = learned - estimates
    moved = torch.maximum(beta.abs(), (beta + width).abs())
    return learned, torch.where(moved == 0, 0.0, moved / learned[0])


def learn_ranges(estimates: Tensor, low: Tensor, high: Tensor, decay: float) -> tuple[Tensor, bool, float]:
    learned, share = _learned(estimates, low, high, decay)
    whole = torch.isfinite(2 * torch.maximum(high, -low)).all()
    largest = share.amax() if share.numel() else whole.new_zeros((), dtype=torch.float32)
    finite, far = torch.stack((whole.float(), largest)).tolist()
    return learned, bool(finite), far


def code_ranges(estimates: Tensor, *, bits: int, symmetric: bool, zeroed: bool) -> Tensor:
    alpha, beta = estimates.unbind()
    high, top = alpha + beta, (1 << bits) - 1
    levels = alpha.new_full((), top)  # some devices would multiply by a number's inverse
    if symmetric:
        middle = torch.full_like(alpha, top // 2)
        step = _centred(2 * torch.maximum(high, -beta) / (2 * middle), middle)
        return torch.stack((-(middle * step), step))
    if not zeroed:
        return torch.stack((beta, alpha / levels))
    inside = (beta < 0) & (high >= 0)
    below = (-beta / alpha * levels).floor().clamp(max=top)
    above = top - 1 - below
    lower = -beta * above <= high * below
    width, count, zero = (torch.where(lower, *of) for of in ((-beta, high), (below, above), (below, below + 1)))
    step = torch.where(inside, width, alpha) / torch.where(inside, count, levels)
    step = torch.where(inside, _centred(step, zero), step)
    return torch.stack((torch.where(inside, -(zero * step), beta), step))


def _centred(step: Tensor, zero: Tensor) -> Tensor:
    """Return steps with which the codes ``zero`` stand for exactly zero."""
    step = torch.where(step < TINY, 0.0, step)
    regular = (step > 0) & (step < torch.inf)
    step = torch.where(regular, ((step.view(torch.int32) + 0xFF) & ~0xFF).view(torch.float32), step)
    for _ in range(TRIES - 1):
        missed = regular & ((zero * step) * (1 / step) != zero)
        step = (step.view(torch.int32) + missed.int() * RAISE).view(torch.float32)
    return step


def learning(
    settle: Callable[..., Tensor], quantize: Callable[..., tuple[Tensor, Tensor]],
    learn: Callable[..., tuple[Tensor, bool, float]], x: Tensor, out: Tensor, rows: Rows, estimates: Tensor,
    decay: float, *, bits: int, stochastic: bool, seed: int = 0,
    apart: int | None = None, drift: float = math.inf, symmetric: bool = False,
) -> tuple[Tensor, bool, float]:  # fmt: skip
    """Run ``quantize_rows_learning`` as three loops: for ranges, for codes and extremes, and for estimates."""
    if apart is not None:
        x = x.detach().as_strided((rows.parts * rows.outer, rows.groups * rows.inner), (apart, 1))
    own = estimates.contiguous()
    ranges = settle(own, bits=bits, symmetric=symmetric, zeroed=bits >= FEWEST_ZEROED)
    seen = quantize(x, out, rows, *ranges, bits=bits, stochastic=stochastic, seed=seed)
    found = torch.cat((ranges, torch.stack(seen)))
    learned, finite, moved = learn(own, *seen, decay)
    if finite and moved <= drift:
        estimates.copy_(learned)
    return found, finite, moved


quantize_rows_learning = functools.partial(learning, code_ranges, quantize_rows_extremes, learn_ranges)


def quantize_rows_adapting(
    x: Tensor,
    out: Tensor,
    rows: Rows,
    estimates: Tensor,
    decay: float,
    note: Tensor,
    *,
    drift: float,
    jump: float,
    bits: int,
    stochastic: bool,
    seed: int = 0,
    apart: int | None = None,
    standard: Standard | None = None,
    symmetric: bool = False,
) -> tuple[Tensor, Tensor]:
    if apart is not None:
        x = x.detach().as_strided((rows.outer, rows.groups * rows.inner), (apart, 1))
    if standard is not None:
        x = (x.float().view(-1, standard.length) - standard.mean.view(-1, 1)).mul_(standard.deviation.view(-1, 1))
    low, high = row_extremes(x, rows)
    learned, share = _learned(estimates, low, high, decay)
    own, finite = torch.stack((high - low, low)), torch.isfinite(2 * torch.maximum(high, -low))
    wider = torch.where(own[0] == 0, 0.0, own[0] / estimates[0])
    top = torch.where(finite, wider, torch.inf).amax() if wider.numel() else note.new_zeros(())
    note.copy_(torch.maximum(note.view(()), top).view(note.shape))
    chosen = torch.where(share > drift, torch.where(own[0] > jump * estimates[0], own, learned), estimates)
    chosen, learned = torch.where(finite, chosen, torch.nan), torch.where(finite, learned, estimates)
    ranges = code_ranges(chosen, bits=bits, symmetric=symmetric, zeroed=bits >= FEWEST_ZEROED)
    quantize_rows(x, out, rows, *ranges, bits=bits, stochastic=stochastic, seed=seed)
    return ranges, learned


def dequantize_rows(
    codes: Tensor, out: Tensor, rows: Rows, ranges: Tensor, *, bits: int, affine: Affine | None = None
) -> None:
    if affine is not None:
        affine_rows(dequantize_rows, codes, out, rows, ranges, affine, bits)
        return
    size = rows.parts * rows.groups
    low, step = ranges.view(-1)[: 2 * size].view(2, size)
    stride = -(-rows.inner * bits // 8)
    for first, last, range_R in _runs(rows, out.device):
        packed = codes[first * stride : last * stride].view(last - first, stride)
        value_RI = unpack_codes(packed, bits, rows.inner).to(torch.float32)
        _rows_of(out, rows, first, last).copy_(value_RI.mul_(step[range_R, None]).add_(low[range_R, None]))


def affine_rows(
    dequantize: Callable[..., None],
    codes: Tensor,
    out: Tensor,
    rows: Rows,
    ranges: Tensor,
    affine: Affine | None,
    bits: int,
) -> None:
    """Decode by a loop without an affine part, then apply the affine map to the decoded values."""
    wide = out if out.dtype == torch.float32 else torch.empty(rows.numel, dtype=torch.float32, device=out.device)
    dequantize(codes, wide, rows, ranges, bits=bits)
    if affine is not None:
        given = affine.factor if affine.factor is not None else affine.term
        whole = given.numel() if affine.by_row and given is not None else wide.numel() // affine.length
        value_NL = wide.view(-1)[: whole * affine.length].view(-1, affine.length)  # padding may follow
        form = (-1, 1) if affine.by_row else (-1,)
        if affine.factor is not None:
            value_NL.mul_(affine.factor.view(form))
        if affine.term is not None:
            value_NL.add_(affine.term.view(form))
    if wide is not out:
        out.view(-1).copy_(wide)
