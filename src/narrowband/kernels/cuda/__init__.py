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

from narrowband.kernels.cuda.checksums import checksum
from narrowband.kernels.cuda.compensation import (
    all_finite,
    compensate,
    compensate_select_topk,
    difference,
    encode_topk,
    poison_all_if,
    restore_all_if,
    restore_if,
    take_difference,
)
from narrowband.kernels.cuda.fixed import fixed_decode, fixed_dequantize, fixed_quantize, fixed_sum
from narrowband.kernels.cuda.kept import compensate_kept
from narrowband.kernels.cuda.levels import levels_decode, levels_encode
from narrowband.kernels.cuda.lowrank import compensate_project, low_rank_product, orthonormalize
from narrowband.kernels.cuda.masks import apply_mask, mask_between, pool_places, pool_positions
from narrowband.kernels.cuda.momentum import forget, momentum_topk
from narrowband.kernels.cuda.outliers import dwarfed_rows
from narrowband.kernels.cuda.quantized import (
    dequantize_groups,
    dequantize_means,
    group_minmax,
    quantize_all,
    quantize_groups,
)
from narrowband.kernels.cuda.rows import (
    dequantize_rows,
    learn_ranges,
    quantize_rows,
    quantize_rows_adapting,
    quantize_rows_extremes,
    quantize_rows_learning,
    row_extremes,
)
from narrowband.kernels.cuda.selection import randomk_indices, select_threshold, select_topk, select_topk_rows
from narrowband.kernels.cuda.shares import from_share, split_shares
from narrowband.kernels.cuda.sparse import (
    check_indices,
    elias_fano_decode,
    elias_fano_encode,
    sparse_accumulate,
    sparse_sum,
    sparse_sum_all,
    sparse_sum_rows,
)
from narrowband.kernels.cuda.stores import keep_in_8, keep_in_16, read_from_8

#: What is bound by memory goes through it once, and a launch costs more than what it does to a small matrix.
FUSES = True

__all__ = [
    "FUSES",
    "all_finite",
    "apply_mask",
    "check_indices",
    "checksum",
    "compensate",
    "compensate_kept",
    "compensate_project",
    "compensate_select_topk",
    "dequantize_groups",
    "dequantize_means",
    "dequantize_rows",
    "difference",
    "dwarfed_rows",
    "elias_fano_decode",
    "elias_fano_encode",
    "encode_topk",
    "fixed_decode",
    "fixed_dequantize",
    "fixed_quantize",
    "fixed_sum",
    "forget",
    "from_share",
    "group_minmax",
    "keep_in_8",
    "keep_in_16",
    "learn_ranges",
    "levels_decode",
    "levels_encode",
    "low_rank_product",
    "mask_between",
    "momentum_topk",
    "orthonormalize",
    "poison_all_if",
    "pool_places",
    "pool_positions",
    "quantize_all",
    "quantize_groups",
    "quantize_rows",
    "quantize_rows_adapting",
    "quantize_rows_extremes",
    "quantize_rows_learning",
    "randomk_indices",
    "read_from_8",
    "restore_all_if",
    "restore_if",
    "row_extremes",
    "select_threshold",
    "select_topk",
    "select_topk_rows",
    "sparse_accumulate",
    "sparse_sum",
    "sparse_sum_all",
    "sparse_sum_rows",
    "split_shares",
    "take_difference",
]
