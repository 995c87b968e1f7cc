"""Grouped quantization: values to codes of a few bits, with a header for each group.

**Grouped quantization.** ``x`` is cut into groups of ``group`` elements (the last may be shorter). A payload has a
header per group and a code of ``bits`` bits per element:

===========  ==========================  =================================  ==========================  ==============
``scale``    header (float32 arrays)     step of a group                    code (then clamped)         value decoded
===========  ==========================  =================================  ==========================  ==============
``minmax``   lo[groups], step[groups]    (max − min) / (2**bits − 1)        floor((x − lo)·inv + u)     lo + code·step
``absmax``   step[groups]                max|x| / s, s = 2**(bits−1) − 1    floor(x·inv + (s + u))      (code − s)·step
``l2``       step[groups]                ‖x‖₂ / s                           floor(x·inv + (s + u))      (code − s)·step
``mean``     step[groups]                2 · mean|x| (bits = 1)             1 if x ≥ 0 else 0           (code − ½)·step
===========  ==========================  =================================  ==========================  ==============

``inv`` is 1/step in float32, or 0 where step is below 2**-126. ``u`` is ½ (nearest) or uniform(element index)
(stochastic): of 24 bits, and of 25 − ``bits`` in the symmetric scales. So s + u is exact in the symmetric scales and
never rounded up to s + 1: zero decodes to zero, whatever the seed. Codes are clamped to [0, 2**bits − 1] (minmax) or
[0, 2s]. All elementwise arithmetic is float32, without fused multiply-add; sums (l2, mean) are taken in float64. A
group that holds inf or NaN gets lo = step = NaN and codes 0, so everything decoded from it is NaN: a broken gradient
stays visible.

Codes are packed group by group. ``bits`` is split into planes whose widths are the powers of two that sum to it,
largest first (7 = 4 + 2 + 1); the first plane holds the code's lowest bits. In a plane of width w over a group of m
elements, ``stride = ceil(m·w / 8)`` bytes; element j sits in byte ``j % stride`` at bit ``(j // stride)·w``. So a 4-bit
byte holds elements j and j + 64, not 2j and 2j + 1, which lets every loop vectorize. Unused bits are zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "Scale",
    "dequantize_groups",
    "dequantize_means",
    "group_minmax",
    "levels_are_finite",
    "packed_nbytes",
    "plane_widths",
    "quantize_all",
    "quantize_groups",
]


Scale = Literal["minmax", "absmax", "l2", "mean"]


def plane_widths(bits: int) -> list[int]:
    """Return the widths of the bit planes of a code, largest first: ``plane_widths(7) == [4, 2, 1]``."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def packed_nbytes(numel: int, bits: int, group: int) -> int:
    """Return the bytes that the packed codes of ``numel`` elements take, without header and padding."""
    widths = plane_widths(bits)
    full, rest = divmod(numel, group)
    return full * sum(-(-group * w // 8) for w in widths) + sum(-(-rest * w // 8) for w in widths)


def group_minmax(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value of each group: two float32 tensors of ceil(numel / group) elements. Both
    are NaN for a group that holds inf or NaN.
    """
    return cast("tuple[Tensor, Tensor]", backend_of(x).group_minmax(x, group))


def levels_are_finite(header: Tensor, *, bits: int, scale: Scale) -> Tensor:
    """Return one bool: whether every level of every group is finite. Rounding a step near the largest float may give
    inf.

    Args:
        header: float32, as it stands in a payload.
        bits, scale: of the payload. For ``l2`` the last level counts, ``‖x‖₂``, even if no element reaches it.
    """
    if scale == "minmax":
        low, step = header.view(2, -1).unbind()
        last = step.mul((1 << bits) - 1).add_(low)
    else:
        last = header.mul(1 if scale == "mean" else (1 << (bits - 1)) - 1)
    return last.abs_().lt(math.inf).all()  # NaN is not below inf, either


def quantize_groups(
    x: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, stochastic: bool, seed: int = 0
) -> None:
    """Quantize float32 ``x`` into ``out`` (uint8: header, codes, zero padding to its end)."""
    backend_of(x).quantize_groups(x, out, bits=bits, group=group, scale=scale, stochastic=stochastic, seed=seed)


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
    """Quantize several tensors, each with its seed, with no more GPU kernel launches than :func:`quantize_groups` takes
    for one.

    With residuals, one per tensor, do the work of error feedback before and after quantization, too: ``(x, residual) ←
    (residual, sum − decoded)``, where the quantized values are those of sum = decay · residual + x.

    Returns:
        Whether all quantized values are finite; with residuals, whether the decoded values are finite, too.
    """
    return cast(
        "bool",
        backend_of(xs[0]).quantize_all(
            xs, outs, bits=bits, group=group, scale=scale, stochastic=stochastic, seeds=seeds, residuals=residuals,
            decay=decay,
        ),
    )  # fmt: skip


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
    """``out = Σ decoded / ranks`` or, accumulating, ``out += Σ decoded / ranks`` for several tensors, with no more GPU
    kernel launches than for one.

    Sums are taken in the order of ranks, as if :func:`dequantize_groups` was called for one rank after the other.

    Args:
        payloads: (ranks, bytes), uint8: each row holds one rank's payloads.
        places: for each tensor, the bytes of a row that hold its payload.
        outs: flat float32.
        bits, group, scale: as for :func:`dequantize_groups`.
    """
    options = {"bits": bits, "group": group, "scale": scale, "accumulate": accumulate}
    backend_of(payloads).dequantize_means(payloads, places, outs, **options)


def dequantize_groups(
    payload: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, weight: float = 1.0, accumulate: bool = False
) -> None:
    """``out = weight · decoded`` or, accumulating, ``out += weight · decoded``. The caller checks the payload size."""
    backend_of(out).dequantize_groups(
        payload, out, bits=bits, group=group, scale=scale, weight=weight, accumulate=accumulate
    )
