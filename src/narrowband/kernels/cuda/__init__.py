"""The loops of :mod:`narrowband.kernels` on GPUs, in Triton.

A loop that is not here runs in plain torch (:mod:`narrowband.kernels.reference`). Where ``TRITON_INTERPRET=1`` is set
before the first import, Triton runs these loops on the CPU, one operation of NumPy after the other: slow, and enough to
test every byte without a GPU.

What keeps bytes equal to the reference's: products and sums are never fused (``enable_fp_fusion=False``), divisions
round to the nearest, and sums are taken in float64.
"""

from __future__ import annotations

from narrowband.kernels.cuda.compensation import all_finite, compensate, difference, take_difference
from narrowband.kernels.cuda.quantized import dequantize_groups, group_minmax, quantize_groups
from narrowband.kernels.cuda.stores import keep_in_8, keep_in_16, read_from_8

FUSES = False

__all__ = [
    "FUSES",
    "all_finite",
    "compensate",
    "dequantize_groups",
    "difference",
    "group_minmax",
    "keep_in_8",
    "keep_in_16",
    "quantize_groups",
    "read_from_8",
    "take_difference",
]
