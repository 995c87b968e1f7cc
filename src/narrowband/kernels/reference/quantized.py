"""Grouped quantization in plain torch. G groups, M elements of a group, B bytes of a group or of a plane of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.findings import holds
from narrowband.kernels.quantized import levels_are_finite, plane_widths
from narrowband.kernels.reference.common import (
    NON_FINITE,
    TINY,
    floats_where_finite,
    magnitude_bits,
    ordered_bits,
    pack_codes,
    runs_of_groups,
    uniform,
    unpack_codes,
)
from narrowband.kernels.reference.compensation import compensate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.kernels.quantized import Scale

__all__ = ["dequantize_groups", "dequantize_means", "group_minmax", "quantize_all", "quantize_groups"]


def _extremes(x_GM: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value of each group; NaN if the group is not finite."""
    ordered_GM = ordered_bits(x_GM.view(torch.int32))
    return floats_where_finite(ordered_GM.amin(1), ordered_GM.amax(1))


def _centre(bits: int) -> int:
    """Return s, the code of zero in the symmetric scales."""
    return (1 << (bits - 1)) - 1


def _header(x_GM: Tensor, bits: int, scale: Scale) -> tuple[Tensor, Tensor]:
    """Return (lo, step) of each group; lo is zero in the symmetric scales."""
    # The divisor is a tensor: CUDA would turn a division by a Python number into a product with its inverse.
    levels = torch.tensor(
        (1 << bits) - 1 if scale == "minmax" else _centre(bits), dtype=torch.int64, device=x_GM.device
    )
    if scale == "minmax":
        low_G, high_G = _extremes(x_GM)
        return low_G, (high_G - low_G) / levels
    top_G = magnitude_bits(x_GM).amax(1)
    if scale == "absmax":
        step_G = top_G.view(torch.float32) / levels
    elif scale == "l2":
        step_G = (x_GM.double().square_().sum(1).sqrt_() / levels).float()
    else:
        step_G = (
            2.0 * x_GM.double().abs_().sum(1) / torch.tensor(x_GM.shape[1], dtype=torch.int64, device=x_GM.device)
        ).float()
    return torch.zeros_like(step_G), torch.where(top_G < NON_FINITE, step_G, torch.nan)


def group_minmax(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    pieces = [_extremes(x[begin:end].view(-1, m)) for begin, end, m in runs_of_groups(x.numel(), group)]
    if not pieces:
        return x.new_empty(0), x.new_empty(0)
    return torch.cat([low for low, _ in pieces]), torch.cat([high for _, high in pieces])


def quantize_groups(
    x: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, stochastic: bool, seed: int = 0
) -> None:
    groups = -(-x.numel() // group)
    header = []
    at = 4 * groups * (2 if scale == "minmax" else 1)
    for begin, end, m in runs_of_groups(x.numel(), group):
        x_GM = x[begin:end].view(-1, m)
        low_G, step_G = _header(x_GM, bits, scale)
        header.append((low_G, step_G))
        if scale == "mean":
            codes_GM = ((x_GM >= 0) & ~step_G.isnan()[:, None]).to(torch.uint8)
        else:
            inverse_G = torch.where(step_G < TINY, 0.0, 1.0 / step_G)
            centre, top = (0, (1 << bits) - 1) if scale == "minmax" else (_centre(bits), 2 * _centre(bits))
            value_GM = (x_GM - low_G[:, None]).mul_(inverse_G[:, None])
            if stochastic:
                value_GM.add_(uniform(begin, end, seed, x.device, 25 - bits if centre else 24).add_(centre).view(-1, m))
            else:
                value_GM.add_(centre + 0.5)
            # NaN becomes code 0: whole groups whose header is NaN, and lo + inf · 0 if max − min overflows
            codes_GM = value_GM.nan_to_num_(nan=0.0).floor_().clamp_(0, top).to(torch.uint8)
        packed = pack_codes(codes_GM, bits).view(-1)
        out[at : at + packed.numel()] = packed
        at += packed.numel()
    out[at:] = 0
    if header:
        # Write bytes, because a payload may start at any address.
        floats = [low_G for low_G, _ in header] if scale == "minmax" else []
        floats += [step_G for _, step_G in header]
        bytes_ = torch.cat(floats).view(torch.uint8)
        out[: bytes_.numel()] = bytes_


def dequantize_groups(
    payload: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, weight: float = 1.0, accumulate: bool = False
) -> None:
    groups = -(-out.numel() // group)
    at = 4 * groups * (2 if scale == "minmax" else 1)
    floats = payload[:at].clone().view(torch.float32)  # the copy is aligned, whatever the payload's address
    steps = floats[-groups:] if groups else floats
    lows = floats[:groups] if scale == "minmax" else torch.zeros_like(steps)
    offset = {"minmax": 0.0, "mean": 0.5}.get(scale, float(_centre(bits)))
    first = 0
    for begin, end, m in runs_of_groups(out.numel(), group):
        last = first + (end - begin) // m
        nbytes = (last - first) * sum(-(-m * width // 8) for width in plane_widths(bits))
        codes_GM = unpack_codes(payload[at : at + nbytes].view(last - first, -1), bits, m)
        value_GM = codes_GM.to(torch.float32).sub_(offset).mul_(steps[first:last, None]).add_(lows[first:last, None])
        value = value_GM.mul_(weight).view(-1)
        if accumulate:
            out[begin:end] += value
        else:
            out[begin:end] = value
        at += nbytes
        first = last


def quantize_all(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    bits: int,
    group: int,
    scale: Scale,
    stochastic: bool,
    seeds: Sequence[int],
    residuals: Sequence[Tensor] = (),
    decay: float = 1.0,
) -> bool:
    finite = True
    for at, (x, out, seed) in enumerate(zip(xs, outs, seeds, strict=True)):
        total = x
        if residuals:
            total = residuals[at]
            compensate(x, total, decay=decay)
        quantize_groups(total, out, bits=bits, group=group, scale=scale, stochastic=stochastic, seed=seed)
        header = out[: 4 * -(-x.numel() // group) * (2 if scale == "minmax" else 1)].clone().view(torch.float32)
        finite &= holds(levels_are_finite(header, bits=bits, scale=scale) if residuals else ~header.isnan().any())
        if residuals:
            dequantize_groups(out, total, bits=bits, group=group, scale=scale, weight=-1.0, accumulate=True)
    return finite


def dequantize_means(
    payloads: Tensor,
    places: Sequence[slice],
    outs: Sequence[Tensor],
    *,
    bits: int,
    group: int,
    scale: Scale,
    accumulate: bool = False,
) -> None:
    weight = 1.0 / len(payloads)
    for place, out in zip(places, outs, strict=True):
        for rank, row in enumerate(payloads):
            adds = accumulate or rank > 0
            dequantize_groups(row[place], out, bits=bits, group=group, scale=scale, weight=weight, accumulate=adds)
