"""Values on the levels of their group, in plain torch. K values, G groups."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["levels_decode", "levels_encode"]

#: The bits of NaN in bfloat16.
_NAN = 0x7FC0


def _groups(x: Tensor, group: int, fill: float) -> Tensor:
    """Return a matrix with a row per group; ``fill`` fills up the last row."""
    return torch.nn.functional.pad(x, (0, -x.numel() % group), value=fill).view(-1, group)


def _extremes(magnitudes: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return _groups(magnitudes, group, torch.inf).amin(1), _groups(magnitudes, group, 0.0).amax(1)


def _means(magnitudes: Tensor, group: int) -> tuple[Tensor, Tensor]:
    wide = _groups(magnitudes.double(), group, 0.0)
    there = _groups(torch.ones_like(magnitudes), group, 0.0) > 0
    mean = wide.sum(1) / there.sum(1)
    above = there & (wide >= mean[:, None])
    below = there & ~above
    high = torch.where(above, wide, 0.0).sum(1) / above.sum(1)
    low = torch.where(below, wide, 0.0).sum(1) / below.sum(1)
    return torch.where(below.any(1), low, high).float(), high.float()


def levels_encode(values: Tensor, out: Tensor, *, bits: int, group: int) -> None:
    k, top = values.numel(), (1 << (bits - 1)) - 1
    out.zero_()
    if not k:
        return
    magnitudes = values.abs()
    low, high = (_extremes if bits == 4 else _means)(magnitudes, group)
    finite = _groups(values.isfinite().float(), group, 1.0).amin(1) > 0
    ends = torch.stack([low, high], 1).clamp_max(torch.finfo(torch.bfloat16).max)
    ends = ends.to(torch.bfloat16).view(torch.int16)
    ends = torch.where(finite[:, None], ends, _NAN).view(torch.bfloat16)
    head = 4 * ends.shape[0]
    out[:head] = ends.view(torch.uint8).view(-1)

    low, step = _low_and_step(ends, k, group, top)
    codes = ((magnitudes - low) / step + 0.5).floor().clamp(0, top)
    codes = torch.where((step > 0) & step.isfinite(), codes, 0.0).to(torch.uint8)
    codes |= values.signbit().to(torch.uint8) << (bits - 1)
    per_byte = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=values.device)
    packed = (torch.nn.functional.pad(codes, (0, -k % per_byte)).view(-1, per_byte) << shifts).sum(1)
    out[head : head + packed.numel()] = packed.to(torch.uint8)


def levels_decode(payload: Tensor, k: int, *, bits: int, group: int) -> Tensor:
    top, head = (1 << (bits - 1)) - 1, 4 * -(-k // group)
    if not k:
        return torch.empty(0, dtype=torch.float32, device=payload.device)
    low, step = _low_and_step(payload[:head].clone().view(torch.bfloat16).view(-1, 2), k, group, top)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=payload.device)
    packed = payload[head : head - (-k * bits // 8)]
    codes = ((packed[:, None] >> shifts) & ((1 << bits) - 1)).view(-1)[:k]
    magnitudes = low + (codes & top).float() * step
    return torch.where(codes > top, -magnitudes, magnitudes)


def _low_and_step(ends: Tensor, k: int, group: int, top: int) -> tuple[Tensor, Tensor]:
    """Return, for each value, the lowest level of its group and the distance between levels."""
    low, high = ends.float().unbind(1)
    step = (high - low) / top
    return low.repeat_interleave(group)[:k], step.repeat_interleave(group)[:k]
