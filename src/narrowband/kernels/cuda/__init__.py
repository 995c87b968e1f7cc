"""The loops of :mod:`narrowband.kernels` on GPUs, in Triton.

Two are not here: the knapsack is on the CPU by its contract, and ``all_zero`` is one reduction of PyTorch's own. A loop
waits for the device only where its contract says so, because it returns a Python value or as many elements as there
are: whether all is finite or damaged, ``fixed_quantize``, ``learn_ranges``, ``split_shares``, thresholds and samples.
Every loop gives the same bits each time. Where ``TRITON_INTERPRET=1`` is set
before the first import, Triton runs these loops on the CPU, one operation of NumPy after the other: slow, and enough to
test every byte without a GPU.

What keeps bytes equal to the reference's: products and sums are never fused (``enable_fp_fusion=False``), divisions
round to the nearest, and sums are taken in float64.
"""

from __future__ import annotations

#: What is bound by memory goes through it once, and a launch costs more than what it does to a small matrix.
FUSES = True
