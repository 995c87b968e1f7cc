"""Rotated quantization: groups are rotated at random before their values become codes of a few bits.

A gradient has few large values among many small ones, and evenly spaced levels that reach the largest are coarse for
all others. After a random rotation all values of a group are about equally large, whatever they were before: nearly
normal, with the group's root mean square. So one set of levels fits every group. The receiver rotates back.

``x`` is cut into groups of ``group`` elements, a power of two; the last group is filled up with zeros. For a group of n
elements, with H the n × n Hadamard matrix (entries ±1, ``H·H = n``) and D a diagonal of random signs, which all groups
of a tensor share:

1. ``y = H·D·x``, in ``log2(n)`` stages of additions and subtractions
2. ``code = floor(y / (δ·‖x‖) + 2**(bits−1))``, clamped to [0, 2**bits − 1]; ``‖x‖`` is the root mean square of ``y``
3. ``step = ‖x‖² / Σ y·(code − o)``, where ``o = (2**bits − 1) / 2``: the header of the group, a float32
4. decoded: ``D·H·(code − o) · step``

δ (:data:`SPACINGS`) is the distance of the 2**bits evenly spaced levels that lose least of a normal variable (Max 1960,
Quantizing for minimum distortion, table II). The third line is the scale of EDEN (Vargaftik et al. 2022, arXiv
2108.08842, theorem 2.1): with it the decoded group is right on average over rotations, though codes are rounded to
nearest. Their rotations are uniformly random. With Hadamard's, as in their experiments, a bias is left. It is
small for long groups: of cubes of normal values, in groups of 512, its square is 0.2 % of the squared error.

A payload has the folded seed (uint32), so that nobody has to know the seed to decode it; the steps of all groups; and
their codes, packed as in :mod:`.quantized`. The sign of element i of a group is negative where ``mix(i + folded seed)``
has its highest bit.

Arithmetic is float32 without fused multiply-add, and sums are taken in pairs: of n numbers, the second half is added to
the first, and so on down to one. So all backends write the same bytes. Before step 1, a group is multiplied by the
power of two that brings its largest magnitude to [1, 2), and its step by the inverse, so that no square is out of
range. A group whose largest magnitude is below 2**-126 has step 0, and so has one whose step would be below that. A
group with inf or NaN has step NaN and codes 0. One whose decoded values might exceed float32 (``n·o·step`` does, which
takes elements above about 2**120) has step NaN, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "SPACINGS",
    "dequantize_rotated",
    "dequantize_rotated_means",
    "quantize_rotated",
    "quantize_rotated_all",
    "rotated_steps_are_finite",
]

#: By the number of bits: the distance of neighbouring levels, in standard deviations.
SPACINGS: dict[int, float] = {
    1: 1.59577, 2: 0.99569, 3: 0.58602, 4: 0.33520, 5: 0.18814, 6: 0.10406, 7: 0.05687, 8: 0.03076,
}  # fmt: skip


def rotated_steps_are_finite(steps: Tensor, *, bits: int, group: int) -> Tensor:
    """Return one bool: whether all that groups can decode to is finite, intermediate sums included.

    Args:
        steps: float32, as they stand in a payload.
        bits, group: of the payload.
    """
    return steps.mul(group * ((1 << bits) - 1) / 2).abs_().lt(math.inf).all()  # NaN is not below inf, either


def quantize_rotated(x: Tensor, out: Tensor, *, bits: int, group: int, seed: int = 0) -> None:
    """Quantize float32 ``x`` into ``out`` (uint8: folded seed, steps, codes).

    Args:
        x: flat, not empty.
        out: ``4 + G · (4 + group·bits/8)`` bytes, for G groups.
        bits: 1–8.
        group: a power of two, 32–4096.
        seed: of the rotation.
    """
    backend_of(x).quantize_rotated(x, out, bits=bits, group=group, seed=seed)


def dequantize_rotated(
    payload: Tensor,
    out: Tensor,
    *,
    bits: int,
    group: int,
    weight: float = 1.0,
    accumulate: bool = False,
) -> None:
    """``out ← weight · decoded``, or ``out ← out + weight · decoded`` when accumulating.

    Args:
        payload: as :func:`quantize_rotated` writes it.
        out: flat float32.
        bits, group: as the payload was quantized.
    """
    backend_of(out).dequantize_rotated(payload, out, bits=bits, group=group, weight=weight, accumulate=accumulate)


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
    """Quantize several tensors, each with its seed, with no more GPU kernel launches than one takes.

    With residuals, one per tensor, do the work of error feedback before and after quantization, too: ``(x, residual) ←
    (residual, sum − decoded)``, where the quantized values are those of sum = decay · residual + x.

    Returns:
        Whether all quantized values are finite, and so also what is decoded from them.
    """
    return cast(
        "bool",
        backend_of(xs[0]).quantize_rotated_all(
            xs, outs, bits=bits, group=group, seeds=seeds, residuals=residuals, decay=decay
        ),
    )


def dequantize_rotated_means(
    payloads: Tensor,
    places: Sequence[slice],
    outs: Sequence[Tensor],
    *,
    bits: int,
    group: int,
    accumulate: bool = False,
) -> None:
    """``out = Σ decoded / ranks`` or, accumulating, ``out += Σ decoded / ranks`` for several tensors, with no more GPU
    kernel launches than for one.

    Sums are taken in the order of ranks, as if :func:`dequantize_rotated` was called for one rank after the other.

    Args:
        payloads: (ranks, bytes), uint8: each row holds one rank's payloads.
        places: for each tensor, the bytes of a row that hold its payload.
        outs: flat float32.
        bits, group: as the payloads were quantized.
    """
    backend_of(payloads).dequantize_rotated_means(payloads, places, outs, bits=bits, group=group, accumulate=accumulate)
