"""Rotated quantization in plain torch. G groups, N elements of a group, B bytes of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.findings import holds
from narrowband.kernels.quantized import packed_nbytes
from narrowband.kernels.reference.common import (
    NON_FINITE,
    TINY,
    UINT32,
    fold,
    magnitude_bits,
    mix_all_,
    pack_codes,
    runs_of_groups,
    unpack_codes,
)
from narrowband.kernels.reference.compensation import compensate
from narrowband.kernels.rotated import SPACINGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["dequantize_rotated", "dequantize_rotated_means", "quantize_rotated", "quantize_rotated_all"]

_EXPONENT = NON_FINITE


def _signs(group: int, folded: Tensor | int, device: torch.device) -> Tensor:
    """Return the diagonal of D: float32, ±1."""
    h = torch.arange(group, dtype=torch.int64, device=device).add_(folded).bitwise_and_(UINT32)
    return (mix_all_(h) >> 31).to(torch.float32).mul_(-2.0).add_(1.0)


def _rotated(x_GN: Tensor) -> Tensor:
    """Return ``H·x`` of each group."""
    groups, n = x_GN.shape
    apart = 1
    while apart < n:
        pairs = x_GN.view(groups, n // (2 * apart), 2, apart)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        x_GN = torch.stack([first + second, first - second], 2).view(groups, n)
        apart *= 2
    return x_GN


def _total(x_GN: Tensor) -> Tensor:
    """Return the sum of each group, taken in pairs."""
    while x_GN.shape[1] > 1:
        half = x_GN.shape[1] // 2
        x_GN = x_GN[:, :half] + x_GN[:, half:]
    return x_GN[:, 0]


def _runs(numel: int, group: int) -> Iterator[tuple[int, int]]:
    """Yield runs of groups: the first group, and the one behind the last."""
    for begin, end, _ in runs_of_groups(-(-numel // group) * group, group):
        yield begin // group, end // group


def quantize_rotated(x: Tensor, out: Tensor, *, bits: int, group: int, seed: int = 0) -> None:
    groups, each = -(-x.numel() // group), packed_nbytes(group, bits, group)
    folded = fold(seed)
    out[:4] = torch.tensor(list(folded.to_bytes(4, "little")), dtype=torch.uint8, device=out.device)
    out = out[4:]
    signs_N = _signs(group, folded, x.device)
    spacing = torch.tensor(SPACINGS[bits], dtype=torch.float32, device=x.device)
    top, codes = (1 << bits) - 1, out[4 * groups :]
    for first, last in _runs(x.numel(), group):
        own = x[first * group : last * group]
        x_GN = torch.nn.functional.pad(own, (0, (last - first) * group - own.numel())).view(-1, group)
        top_G = magnitude_bits(x_GN).amax(1)
        there_G, finite_G = top_G.view(torch.float32) >= TINY, top_G < NON_FINITE
        # The exponent of the largest magnitude, in its place; so far from its ends that the inverse is a normal number.
        exponent_G = (top_G & _EXPONENT).clamp(1 << 23, 253 << 23)
        scaled_GN = x_GN * ((254 << 23) - exponent_G).view(torch.float32)[:, None]
        square_G = _total(scaled_GN * scaled_GN)
        y_GN = _rotated(scaled_GN * signs_N)
        inverse_G = torch.where(there_G, 1.0 / (spacing * square_G.sqrt()), 0.0)
        level_GN = (y_GN * inverse_G[:, None]).add_(1 << (bits - 1)).nan_to_num_(nan=0.0).floor_().clamp_(0, top)
        level_GN = torch.where(finite_G[:, None], level_GN, 0.0)
        step_G = square_G / _total(y_GN * (level_GN - top / 2)) * exponent_G.view(torch.float32)
        step_G = torch.where(there_G & ~(step_G < TINY), step_G, 0.0)
        step_G = torch.where(finite_G & (step_G * (group * top / 2) < torch.inf), step_G, torch.nan)
        # Write bytes, because a payload may start at any address.
        out[4 * first : 4 * last] = step_G.view(torch.uint8)
        codes[each * first : each * last] = pack_codes(level_GN.to(torch.uint8), bits).view(-1)


def dequantize_rotated(
    payload: Tensor,
    out: Tensor,
    *,
    bits: int,
    group: int,
    weight: float = 1.0,
    accumulate: bool = False,
) -> None:
    groups, each = -(-out.numel() // group), packed_nbytes(group, bits, group)
    signs_N = _signs(group, payload[:4].clone().view(torch.int32), out.device)
    payload = payload[4:]
    codes = payload[4 * groups :]
    for first, last in _runs(out.numel(), group):
        step_G = payload[4 * first : 4 * last].clone().view(torch.float32)
        code_GN = unpack_codes(codes[each * first : each * last].view(-1, each), bits, group)
        value_GN = (code_GN.to(torch.float32) - ((1 << bits) - 1) / 2) * step_G[:, None]
        own = out[first * group : last * group]
        value = (_rotated(value_GN) * signs_N).mul_(weight).view(-1)[: own.numel()]
        if accumulate:
            own += value
        else:
            own.copy_(value)


def quantize_rotated_all(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    bits: int,
    group: int,
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
        quantize_rotated(total, out, bits=bits, group=group, seed=seed)
        steps = out[4 : 4 + 4 * -(-x.numel() // group)].clone().view(torch.float32)
        finite &= holds(~steps.isnan().any())
        if residuals:
            dequantize_rotated(out, total, bits=bits, group=group, weight=-1.0, accumulate=True)
    return finite


def dequantize_rotated_means(
    payloads: Tensor,
    places: Sequence[slice],
    outs: Sequence[Tensor],
    *,
    bits: int,
    group: int,
    accumulate: bool = False,
) -> None:
    weight = 1.0 / len(payloads)
    for place, out in zip(places, outs, strict=True):
        for rank, row in enumerate(payloads):
            adds = accumulate or rank > 0
            dequantize_rotated(row[place], out, bits=bits, group=group, weight=weight, accumulate=adds)
