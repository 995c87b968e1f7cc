"""Residuals stored in fewer bits, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference import common
from narrowband.kernels.stores import LEAST_POWER, STORE_GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.kernels.stores import Stored

__all__ = ["keep_all", "keep_in_8", "keep_in_16", "read_all", "read_from_8"]


def _noise(n: int, seed: int, device: torch.device) -> Tensor:
    """Return 16 random bits for each of n elements, as int64."""
    half = STORE_GROUP // 2
    hashes_GH = common.hashes(0, -(-n // STORE_GROUP) * half, seed, device).view(-1, half)
    return torch.cat([hashes_GH & 0xFFFF, hashes_GH >> 16], 1).view(-1)[:n]


def keep_in_16(x: Tensor, out: Tensor, *, seed: int | None) -> None:
    if seed is None:
        out.copy_(x)
        return
    noise = _noise(x.numel(), seed, x.device)
    bits = x.view(torch.int32).long().bitwise_and_(common.UINT32).add_(noise).bitwise_and_(0xFFFF0000)
    out.copy_(torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32).view(torch.float32))


def keep_in_8(x: Tensor, codes: Tensor, exponents: Tensor, *, seed: int | None) -> None:
    n = x.numel()
    wide = torch.nn.functional.pad(x, (0, -n % STORE_GROUP)).view(-1, STORE_GROUP)
    fraction, exponent = torch.frexp(wide.abs().amax(1))
    exponent = torch.where(fraction <= 127 / 128, exponent - 7, exponent - 6)
    exponent = torch.where(fraction == 0, LEAST_POWER, exponent).clamp(LEAST_POWER, 127)
    fixed = torch.round(torch.ldexp(wide.double(), 16 - exponent[:, None])).long().view(-1)[:n]
    noise = 1 << 15 if seed is None else _noise(n, seed, x.device)
    codes.copy_((fixed + noise) >> 16)
    exponents.copy_(exponent)


def read_from_8(codes: Tensor, exponents: Tensor, out: Tensor) -> None:
    scale = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32, device=out.device), exponents.int())
    torch.mul(codes.float(), scale.repeat_interleave(STORE_GROUP)[: out.numel()], out=out)


def read_all(stored: Sequence[Stored], outs: Sequence[Tensor]) -> None:
    for (codes, exponents), out in zip(stored, outs, strict=True):
        if exponents is None:
            out.copy_(codes)
        else:
            read_from_8(codes, exponents, out)


def keep_all(
    xs: Sequence[Tensor],
    stored: Sequence[Stored],
    *,
    seeds: Sequence[int],
    formers: Sequence[Tensor] = (),
    least: Tensor | None = None,
) -> None:
    for at, (x, (codes, exponents), seed) in enumerate(zip(xs, stored, seeds, strict=True)):
        sent = x.isnan()
        if formers:
            parts = [own.view(torch.uint8) for own in (codes, exponents) if own is not None]
            torch.cat(parts, out=formers[at])
        if least is not None:
            x = torch.where(sent, least[at], x)  # noqa: PLW2901
        if exponents is None:
            keep_in_16(x, codes, seed=seed)
        else:
            keep_in_8(x, codes, exponents, seed=seed)
        if least is not None:
            codes.masked_fill_(sent, 0)
