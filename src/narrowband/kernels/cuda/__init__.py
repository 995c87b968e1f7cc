"""The loops of :mod:`narrowband.kernels` on GPUs, in Triton.

Two loops are missing: the knapsack runs on the CPU by its contract, and ``all_zero`` is a single reduction of PyTorch.
A loop waits for the device only if its contract requires it, because it returns a Python value or a number of elements
that depends on the data: whether all is finite or damaged, ``fixed_quantize``, ``learn_ranges``, thresholds and
samples. Every loop gives the same bits each time. If ``TRITON_INTERPRET=1`` is set before the first
import, Triton runs these loops on the CPU, one NumPy operation after the other: slow, but enough to test every byte
without a GPU.

To keep bytes equal to the reference's, products and sums are never fused (``enable_fp_fusion=False``), divisions round
to nearest, and sums are taken in float64.
"""

from __future__ import annotations

#: Fused: loops limited by memory bandwidth read it once, and a launch costs more than its work on a small matrix.
FUSES = True
