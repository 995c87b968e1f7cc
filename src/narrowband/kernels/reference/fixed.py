"""Fixed point in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference import common
from narrowband.kernels.reference.common import MAGNITUDE, UINT32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


__all__ = [
    "fixed_decode",
    "fixed_dequantize",
    "fixed_quantize",
    "fixed_sum",
]


def fixed_quantize(x: Tensor, out: Tensor, unit: float, limit: int) -> tuple[float, int]:
    top = torch.tensor(float(limit), dtype=torch.float32, device="cpu")
    zero = torch.zeros((), dtype=torch.float32, device="cpu")
    top = (top if int(top) <= limit else torch.nextafter(top, zero)).to(x.device)
    largest = torch.zeros((), dtype=torch.int32, device=x.device)
    checksum = torch.zeros((), dtype=torch.int64, device=x.device)
    for begin in range(0, x.numel(), common.CHUNK):
        part = x[begin : begin + common.CHUNK]
        largest = torch.maximum(largest, (part.view(torch.int32) & MAGNITUDE).max())
        scaled = (part * (1.0 / unit)).round_()
        scaled = torch.where(scaled < top, scaled, top)
        codes = torch.where(scaled > -top, scaled, -top).to(torch.int32)
        out[begin : begin + common.CHUNK] = codes
        odd = torch.arange(begin, begin + part.numel(), dtype=torch.int64, device=x.device).mul_(2).add_(1)
        checksum += (codes * odd).sum()
    return float(largest.view(torch.float32)), int(checksum) & UINT32


def fixed_sum(source: Tensor, starts: Sequence[int], out: Tensor) -> None:
    out.copy_(source[starts[0] :][: out.numel()])
    for start in starts[1:]:
        out += source[start:][: out.numel()]


def fixed_decode(packet: Tensor, source: Tensor, starts: Sequence[int], total: Tensor) -> None:
    rest = packet.clone()
    for start in starts:
        rest -= source[start:][: packet.numel()]
    total += rest


def fixed_dequantize(total: Tensor, out: Tensor, factor: float) -> None:
    for begin in range(0, total.numel(), common.CHUNK):
        out[begin : begin + common.CHUNK] = total[begin : begin + common.CHUNK].double() * factor
