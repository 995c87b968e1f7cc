"""What the families of the reference share: random numbers, magnitudes as integers, and packed codes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from narrowband.kernels.quantized import plane_widths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


#: Elements per temporary: large enough to keep a GPU busy, 32 MiB as int64.
CHUNK = 1 << 22
UINT32 = 0xFFFFFFFF
#: All bits of a float except the sign. Without the sign bit, finite floats read as integers order by magnitude.
MAGNITUDE = 0x7FFFFFFF
#: Magnitude bits of infinity; anything at or above it is inf or NaN.
NON_FINITE = 0x7F800000
#: The smallest normal float: 1 / step is infinite or imprecise below it.
TINY = 2.0**-126


def mix(h: int) -> int:
    h ^= h >> 16
    h = h * 0x7FEB352D & UINT32
    h ^= h >> 15
    h = h * 0x846CA68B & UINT32
    return h ^ h >> 16


def fold(seed: int) -> int:
    low, high = seed & UINT32, seed >> 32 & UINT32
    return (mix(low) + 0x9E3779B9 * _mixed(high) + 0x85EBCA6B) & UINT32


#: For the high half of seeds, which is the same for many draws.
_mixed = functools.lru_cache(maxsize=1 << 8)(mix)


def hashes(begin: int, end: int, seed: int, device: torch.device) -> Tensor:
    """Return ``hash(i, seed)`` for i in [begin, end), as int64 in [0, 2**32)."""
    return mix_all_(torch.arange(begin, end, dtype=torch.int64, device=device).add_(fold(seed)).bitwise_and_(UINT32))


def mix_all_(h: Tensor) -> Tensor:
    """Apply ``mix`` to int64 numbers in [0, 2**32), in place."""
    h ^= h >> 16
    h.mul_(0x7FEB352D).bitwise_and_(UINT32)
    h ^= h >> 15
    h.mul_(0x846CA68B - (1 << 32)).bitwise_and_(UINT32)  # equal modulo 2**32, and the product fits in int64
    h ^= h >> 16
    return h


def uniform(begin: int, end: int, seed: int, device: torch.device, bits: int = 24) -> Tensor:
    """Return ``uniform(i)`` for i in [begin, end): float32 in [0, 1), of ``bits`` bits."""
    return (hashes(begin, end, seed, device) >> 32 - bits).to(torch.float32).mul_(2.0**-bits)


def strata(n: int, size: int, seed: int, device: torch.device) -> Tensor:
    """Return one int64 position from each of ``size`` equal strata of [0, n)."""
    if size == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    # the lo of every stratum, then the hi of the last one
    edges = torch.arange(size + 1, dtype=torch.int64, device=device).mul_(n).div_(size, rounding_mode="floor")
    width = edges[1:] - edges[:-1]
    return width.mul_(hashes(0, size, seed, device)).bitwise_right_shift_(32).add_(edges[:-1])


def runs_of_groups(numel: int, group: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, elements per group): runs of whole groups, about CHUNK elements, then a shorter last group."""
    whole = numel - numel % group
    run = max(CHUNK // group, 1) * group
    for begin in range(0, whole, run):
        yield begin, min(begin + run, whole), group
    if whole < numel:
        yield whole, numel, numel - whole


def magnitude_bits(x: Tensor) -> Tensor:
    """Return int32 that order as |x| does, inf and NaN last."""
    return x.view(torch.int32) & MAGNITUDE


def ordered_bits(bits: Tensor) -> Tensor:
    """Map the bits of floats to int32 that order as the floats do, −0 below +0, or back: it is its own inverse."""
    return bits ^ ((bits >> 31) & MAGNITUDE)


def floats_where_finite(least_G: Tensor, most_G: Tensor) -> tuple[Tensor, Tensor]:
    """Return the floats of these ordered integers; both extremes of a group are NaN if one is not finite."""
    low_G, high_G = (ordered_bits(extreme).view(torch.float32) for extreme in (least_G, most_G))
    finite_G = torch.isfinite(low_G) & torch.isfinite(high_G)
    return torch.where(finite_G, low_G, torch.nan), torch.where(finite_G, high_G, torch.nan)


def pack_codes(codes_GM: Tensor, bits: int) -> Tensor:
    """Pack codes into the bytes of each group, plane after plane: uint8 (G, B)."""
    groups, m = codes_GM.shape
    planes = []
    shift = 0
    for width in plane_widths(bits):
        stride, parts = -(-m * width // 8), 8 // width
        plane_GM = (codes_GM >> shift) & ((1 << width) - 1)
        padded = torch.nn.functional.pad(plane_GM, (0, stride * parts - m)).view(groups, parts, stride)
        plane_GB = padded[:, 0].clone()
        for part in range(1, parts):
            plane_GB |= padded[:, part] << (part * width)
        planes.append(plane_GB)
        shift += width
    return torch.cat(planes, 1)


def unpack_codes(packed_GB: Tensor, bits: int, m: int) -> Tensor:
    """Undo :func:`pack_codes`: return uint8 codes (G, M)."""
    codes_GM = torch.zeros(packed_GB.shape[0], m, dtype=torch.uint8, device=packed_GB.device)
    at = shift = 0
    for width in plane_widths(bits):
        stride, parts = -(-m * width // 8), 8 // width
        plane_GB = packed_GB[:, at : at + stride]
        padded = torch.cat([(plane_GB >> (part * width)) & ((1 << width) - 1) for part in range(parts)], 1)
        codes_GM |= padded[:, :m] << shift
        at += stride
        shift += width
    return codes_GM
