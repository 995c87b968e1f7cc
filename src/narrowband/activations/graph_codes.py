"""Codes of 8, 4 or 2 bits in a compiled graph: neighbours share a range, and a compiler can fuse all operators.

The range, low and step, of ``group`` neighbours in memory is computed for every tensor and kept beside its codes::

    step = (max − min) / (2^b − 1)      code = ⌊(x − min) / step + u⌋      x̂ = min + code · step

with u in [0, 1) for stochastic rounding, or ½; it is a hash of the element's position and bits. These are equations 3
to 5 of Pan et al. 2021, Mesa (arXiv 2111.11124); running estimates of the range (6, 7) would be state, which a graph
cannot have. With 8 and 4 bits, the levels of a group that contains zero are moved so that one of them is zero, as
:mod:`narrowband.kernels.rows` says.

Shapes: n elements, G groups of M, P codes per byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode", "encode", "groups", "is_sparse", "packed", "unpacked"]

_UINT32 = 0xFFFFFFFF


def groups(flat: Tensor, group: int) -> Tensor:
    """Cut flat elements into groups, (G, M). The last group is padded with its last element, which keeps its range."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    numel = flat.shape[0]
    if not statically_known_true(numel % group == 0):
        # The code does not branch on the length of the padding: with dynamic shapes, each length would need a graph.
        places = torch.arange((numel + group - 1) // group * group, dtype=torch.int64, device=flat.device)
        flat = flat[places.clamp(max=numel - 1)]
    return flat.view(-1, group)


#: The value of a positive number that only the sign is kept of: the smallest positive number of float16.
_ABOVE_ZERO = 2.0**-24
#: Zero gets its own code where at least _SHARE of a group lies within _NEAR_ZERO steps of zero. In 2 bits the limit is
#: lower, since steps are so large that ordinary elements lie within _NEAR_ZERO steps.
_SHARE, _NEAR_ZERO, _NEAR_ZERO_OF_2_BITS = 1 / 4, 1 / 8, 1 / 32


def encode(x_GM: Tensor, bits: int, *, stochastic: bool, signs: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (G, M · bits / 8) uint8, and low and step (G, 1) float32.

    Where an outlier widens a group, its step is large compared to the other elements. Rounding these to one of two
    levels, neither of which is near zero, would cause most of the error. So where a good part of a group lies much
    closer to zero than a step, a level is made zero in 2 bits, too. If signs are kept, one more level in such a group
    stands for positive elements that round to zero. Such a group's low is the code of zero, and its step is negative.
    """
    top = (1 << bits) - 1
    low, high = x_GM.amin(1, keepdim=True), x_GM.amax(1, keepdim=True)
    # In a constant group step is 0, and any code restores the constant. Where step is inf or NaN all codes are 0, and
    # 0 · inf is NaN.
    step = (high - low) / top
    inside = (low < 0) & (high >= 0) & torch.isfinite(step)
    sparse = is_sparse(x_GM, step, bits) if signs or bits == 2 else inside
    zeroed = sparse if bits == 2 else sparse | inside
    zero, wide = _around_zero(low, high, top)
    if signs:
        zero, wide = map(torch.where, (sparse, sparse), _around_zero(low, high, top - 1), (zero, wide))
    wide = _coarse(wide)
    step, low = torch.where(zeroed, wide, step), torch.where(zeroed, -zero * wide, low)
    codes = ((x_GM - low) / step + (_noise(x_GM) if stochastic else 0.5)).floor()
    codes = torch.where(codes > 0, codes, 0.0)  # this maps NaN, which has no integer value, to 0
    codes = torch.where(zeroed & (x_GM == 0), zero, codes)  # a compiler's division may be off by a bit
    if signs:
        levels = top - sparse.float()
        restored = low + codes * step
        up = ((x_GM > 0) & (restored <= 0)).float()
        down = ((x_GM <= 0) & (restored > 0)).float()
        within = torch.minimum(codes, levels)
        moved = within + ((within > zero) | ((within == zero) & (x_GM > 0))).float()
        codes = torch.where(sparse, moved, codes + up - down)
        low, step = torch.where(sparse, zero, low), torch.where(sparse, -step, step)
    return packed(codes.clamp(0, top).to(torch.int32), bits), low, step


def is_sparse(x_GM: Tensor, step: Tensor, bits: int) -> Tensor:
    """Whether a good part of each group lies much closer to zero than a step, (G, 1). False where a step is inf or NaN.

    Example:
        >>> x = torch.tensor([[0.1] * 7 + [200.0], [1.0] * 7 + [2.0]])
        >>> is_sparse(x, (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)) / 15, 4).tolist()
        [[True], [False]]
    """
    near = (_NEAR_ZERO_OF_2_BITS if bits == 2 else _NEAR_ZERO) * step
    small = (x_GM.abs() < near).to(torch.float32).mean(1, keepdim=True)
    return (small >= _SHARE) & torch.isfinite(step)


def _around_zero(low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return which of the levels 0 to ``levels`` stands for zero, and the smallest step with which they reach both
    extremes.

    Example:
        >>> _around_zero(torch.tensor(-3.0), torch.tensor(200.0), 15)
        (tensor(1.), tensor(14.2857))
    """
    below = (-low / ((high - low) / levels)).floor().clamp(0, levels)
    by_lower = torch.where(below > 0, -low / below, torch.inf)
    by_upper = torch.where(below < levels - 1, high / (levels - 1 - below), torch.inf)
    zero, step = torch.where(by_lower <= by_upper, below, below + 1), torch.minimum(by_lower, by_upper)
    return torch.where(low < 0, zero, 0.0), torch.where(low < 0, step, high / levels)


def decode(codes_GM: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """Return approximately the values that :func:`encode` made codes of."""
    codes = codes_GM.float()
    from_zero, width = codes - low, -step
    least = torch.clamp(width, max=_ABOVE_ZERO)
    signed = torch.where(from_zero == 1, least, (from_zero - (from_zero > 0).float()) * width)
    return torch.where(step < 0, signed, low + codes * step)


def _coarse(step: Tensor) -> Tensor:
    """Round steps up to 16 significant bits, so that their products with codes are exact."""
    return ((step.view(torch.int32) + 0xFF) & ~0xFF).view(torch.float32)


def packed(codes_GM: Tensor, bits: int) -> Tensor:
    """Pack codes into (G, M / P) uint8: byte j holds codes j, j + M / P, … of its group, the first in the low bits."""
    if bits == 8:
        return codes_GM.to(torch.uint8)
    places = _places(bits, codes_GM.device)
    planes_GPB = codes_GM.view(codes_GM.shape[0], places.shape[0], -1)
    return (planes_GPB << places).sum(1, dtype=torch.int32).to(torch.uint8)


def unpacked(bytes_GB: Tensor, bits: int, group: int) -> Tensor:
    """Return the codes of packed bytes, (G, M) int32."""
    codes = bytes_GB.to(torch.int32)
    if bits == 8:
        return codes
    return ((codes.unsqueeze(1) >> _places(bits, codes.device)) & ((1 << bits) - 1)).view(-1, group)


def _places(bits: int, device: torch.device) -> Tensor:
    """Return (P, 1): the lowest bit of each code in a byte."""
    return torch.arange(0, 8, bits, dtype=torch.int32, device=device).unsqueeze(1)


def _noise(x_GM: Tensor) -> Tensor:
    """Return random float32 in [0, 1): a hash of each element's position and bits.

    A random number generator in the graph would advance the one that dropout uses, so that training would differ from
    that without hooks.
    """
    places = torch.arange(x_GM.numel(), dtype=torch.int64, device=x_GM.device).view(x_GM.shape)
    # 32-bit arithmetic in int64, since signed integers have no defined overflow in C++. Multiplication by 2³² / φ²
    # moves neighbouring positions far apart.
    h = (x_GM.view(torch.int32) + places * 0x61C88647) & _UINT32
    h = (h ^ h >> 16) * 0x7FEB352D & _UINT32
    h = (h ^ h >> 15) * (0x846CA68B - (1 << 32)) & _UINT32  # the same modulo 2³², and the product stays inside 64 bits
    h = h ^ h >> 16
    return (h >> 16).float() * 2.0**-16  # so few bits that float32 holds code + u, of a code below 2⁸, exactly
