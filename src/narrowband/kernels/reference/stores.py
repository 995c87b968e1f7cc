"""Float32 kept in fewer bits, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference import common
from narrowband.kernels.stores import STORE_GROUP

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["keep_in_8", "keep_in_16", "read_from_8"]

#: The power of two of a group without anything: the least.
_LEAST = -126


def keep_in_16(x: Tensor, out: Tensor, *, seed: int | None) -> None:
    if seed is None:
        out.copy_(x)
        return
    noise = common.hashes(0, x.numel(), seed, x.device) >> 16
    bits = x.view(torch.int32).long().bitwise_and_(common.UINT32).add_(noise).bitwise_and_(0xFFFF0000)
    out.copy_(torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32).view(torch.float32))


def keep_in_8(x: Tensor, codes: Tensor, exponents: Tensor, *, seed: int | None) -> None:
    n = x.numel()
    wide = torch.nn.functional.pad(x, (0, -n % STORE_GROUP)).view(-1, STORE_GROUP)
    fraction, exponent = torch.frexp(wide.abs().amax(1))
    exponent = torch.where(fraction <= 127 / 128, exponent - 7, exponent - 6)
    exponent = torch.where(fraction == 0, _LEAST, exponent).clamp(_LEAST, 127)
    scaled = torch.ldexp(wide.double(), -exponent[:, None]).view(-1)[:n]
    if seed is None:
        codes.copy_(torch.round(scaled))
    else:
        below = torch.floor(scaled)
        codes.copy_(below + (common.uniform(0, n, seed, x.device).double() < scaled - below))
    exponents.copy_(exponent)


def read_from_8(codes: Tensor, exponents: Tensor, out: Tensor) -> None:
    scale = torch.ldexp(torch.ones(exponents.shape, device=out.device), exponents.int())
    torch.mul(codes.float(), scale.repeat_interleave(STORE_GROUP)[: out.numel()], out=out)
