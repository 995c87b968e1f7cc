"""Codes in a compiled graph: 8, 4 or 2 bits of neighbours that share a range, in operators that a compiler can fuse.

The range, low and step, is that of ``group`` neighbours in memory, taken from every tensor and kept beside its codes::

    step = (max − min) / (2^b − 1)      code = ⌊(x − min) / step + u⌋      x̂ = min + code · step

with u in [0, 1) for stochastic rounding, or ½. These are equations 3 to 5 of Pan et al. 2021, Mesa (arXiv 2111.11124);
running estimates of the range (6, 7) would be state, and a graph has none. u is a hash of the element's place and bits.

Shapes: n elements, G groups of M, P codes per byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode", "encode", "groups", "packed", "unpacked"]

_UINT32 = 0xFFFFFFFF


def groups(flat: Tensor, group: int) -> Tensor:
    """(G, M), the last one filled up with its last element, which does not widen its range."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    numel = flat.shape[0]
    if not statically_known_true(numel % group == 0):
        # How much is missing is nowhere asked: with dynamic shapes each answer would be a graph of its own.
        places = torch.arange((numel + group - 1) // group * group, dtype=torch.int64, device=flat.device)
        flat = flat[places.clamp(max=numel - 1)]
    return flat.view(-1, group)


#: What stands for a number above zero of which only the sign is kept: the smallest one of float16.
_ABOVE_ZERO = 2.0**-24
#: What share of a group has to lie within what share of a step of zero, so that zero has a code of its own. In 2 bits
#: steps are so large that ordinary elements do.
_SHARE, _NEAR_ZERO, _NEAR_ZERO_OF_2_BITS = 1 / 4, 1 / 8, 1 / 32


def encode(x_GM: Tensor, bits: int, *, stochastic: bool, signs: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (G, M · bits / 8) uint8, low and step (G, 1) float32.

    Where an outlier widens a group, its step is large beside the other elements, and rounding them up or down to one of
    two levels, neither of which is near zero, would drown all else. So where a good part of a group lies much closer to
    zero than a step, levels are moved and widened a little such that one of them is zero. Where signs are kept, another
    one there stands for whatever is above zero and rounds to it. In place of low is then the code of zero, and step is
    negative.
    """
    top = (1 << bits) - 1
    levels = top - 1 if signs else top
    low, high = x_GM.amin(1, keepdim=True), x_GM.amax(1, keepdim=True)
    # Of a constant group any code is that constant. Where step is inf or NaN all codes are 0, and 0 · inf is NaN.
    step = (high - low) / top
    near = (_NEAR_ZERO_OF_2_BITS if bits == 2 else _NEAR_ZERO) * step
    small = (x_GM.abs() < near).to(torch.float32).mean(1, keepdim=True)
    zeroed = (small >= _SHARE) & torch.isfinite(step)
    zero = (-low / step * (levels / top)).round()
    zero = torch.minimum(torch.maximum(zero, (low < 0).float()), levels - (high > 0).float())
    above = torch.where(levels > zero, high / (levels - zero), 0.0)
    below = torch.where(zero > 0, -low / zero, 0.0)
    wide = _coarse(torch.maximum(above, below))
    step, low = torch.where(zeroed, wide, step), torch.where(zeroed, -zero * wide, low)
    codes = ((x_GM - low) / step + (_noise(x_GM) if stochastic else 0.5)).floor()
    codes = torch.where(codes > 0, codes, 0.0)  # NaN, which is no integer, is not above zero
    if signs:
        restored = low + codes * step
        up = ((x_GM > 0) & (restored <= 0)).float()
        down = ((x_GM <= 0) & (restored > 0)).float()
        within = codes.clamp(max=levels)
        moved = within + ((within > zero) | ((within == zero) & (x_GM > 0))).float()
        codes = torch.where(zeroed, moved, codes + up - down)
        low, step = torch.where(zeroed, zero, low), torch.where(zeroed, -step, step)
    return packed(codes.clamp(0, top).to(torch.int32), bits), low, step


def decode(codes_GM: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """The values that :func:`encode` made codes of."""
    codes = codes_GM.float()
    from_zero, width = codes - low, -step
    least = torch.clamp(width, max=_ABOVE_ZERO)
    signed = torch.where(from_zero == 1, least, (from_zero - (from_zero > 0).float()) * width)
    return torch.where(step < 0, signed, low + codes * step)


def _coarse(step: Tensor) -> Tensor:
    """At least the step, of 16 bits: so that its products with codes are exact."""
    return ((step.view(torch.int32) + 0xFF) & ~0xFF).view(torch.float32)


def packed(codes_GM: Tensor, bits: int) -> Tensor:
    """(G, M / P) uint8: byte j has the codes j, j + M / P, … of its group, the first one lowest."""
    if bits == 8:
        return codes_GM.to(torch.uint8)
    places = _places(bits, codes_GM.device)
    planes_GPB = codes_GM.view(codes_GM.shape[0], places.shape[0], -1)
    return (planes_GPB << places).sum(1, dtype=torch.int32).to(torch.uint8)


def unpacked(bytes_GB: Tensor, bits: int, group: int) -> Tensor:
    """(G, M) int32."""
    codes = bytes_GB.to(torch.int32)
    if bits == 8:
        return codes
    return ((codes.unsqueeze(1) >> _places(bits, codes.device)) & ((1 << bits) - 1)).view(-1, group)


def _places(bits: int, device: torch.device) -> Tensor:
    """(P, 1): where the codes of a byte begin."""
    return torch.arange(0, 8, bits, dtype=torch.int32, device=device).unsqueeze(1)


def _noise(x_GM: Tensor) -> Tensor:
    """Float32 in [0, 1), from each element's place and bits: another one as soon as either changes.

    A generator in the graph would move the one that dropout uses, and training would not be what it is without hooks.
    """
    places = torch.arange(x_GM.numel(), dtype=torch.int64, device=x_GM.device).view(x_GM.shape)
    # 32-bit arithmetic, in 64 bits: signed integers have no defined overflow in C++. Multiplied by 2³² / φ², places
    # that are neighbours are far apart.
    h = (x_GM.view(torch.int32) + places * 0x61C88647) & _UINT32
    h = (h ^ h >> 16) * 0x7FEB352D & _UINT32
    h = (h ^ h >> 15) * (0x846CA68B - (1 << 32)) & _UINT32  # the same modulo 2³², and the product stays inside 64 bits
    h = h ^ h >> 16
    return (h >> 16).float() * 2.0**-16  # so few bits that a code below 2⁸ does not round up with it to the next
