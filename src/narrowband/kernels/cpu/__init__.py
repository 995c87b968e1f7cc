"""The loops of :mod:`narrowband.kernels` on CPU, in Numba.

What makes them fast: blocks that stay in L1 between two passes, integer loops that LLVM vectorizes (the magnitude of a
float is its bits without the sign), no temporaries as large as the tensor, and no calls inside of loops.
"""

from __future__ import annotations

from narrowband.kernels.cpu.checksums import checksum
from narrowband.kernels.cpu.compensation import (
    all_finite,
    all_zero,
    compensate,
    compensate_select_topk,
    difference,
    encode_topk,
    take_difference,
)
from narrowband.kernels.cpu.extremes import learn_ranges, row_extremes
from narrowband.kernels.cpu.fixed import fixed_decode, fixed_dequantize, fixed_quantize, fixed_sum
from narrowband.kernels.cpu.kept import compensate_kept
from narrowband.kernels.cpu.knapsack import cheapest_within
from narrowband.kernels.cpu.levels import levels_decode, levels_encode
from narrowband.kernels.cpu.lowrank import compensate_project, low_rank_product, orthonormalize
from narrowband.kernels.cpu.masks import apply_mask, mask_between, pool_places, pool_positions
from narrowband.kernels.cpu.momentum import forget, momentum_topk
from narrowband.kernels.cpu.outliers import dwarfed_rows
from narrowband.kernels.cpu.quantized import dequantize_groups, group_minmax, quantize_groups
from narrowband.kernels.cpu.rows import (
    dequantize_rows,
    quantize_rows,
    quantize_rows_extremes,
    quantize_rows_learning,
)
from narrowband.kernels.cpu.selection import randomk_indices, select_threshold, select_topk, select_topk_rows
from narrowband.kernels.cpu.shares import from_share, split_shares
from narrowband.kernels.cpu.sparse import (
    check_indices,
    elias_fano_decode,
    elias_fano_encode,
    sparse_accumulate,
    sparse_sum,
    sparse_sum_rows,
)
from narrowband.kernels.cpu.stores import keep_in_8, keep_in_16, read_from_8

FUSES = True

__all__ = [
    "FUSES",
    "all_finite",
    "all_zero",
    "apply_mask",
    "cheapest_within",
    "check_indices",
    "checksum",
    "compensate",
    "compensate_kept",
    "compensate_project",
    "compensate_select_topk",
    "dequantize_groups",
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
    "pool_places",
    "pool_positions",
    "quantize_groups",
    "quantize_rows",
    "quantize_rows_extremes",
    "quantize_rows_learning",
    "randomk_indices",
    "read_from_8",
    "row_extremes",
    "select_threshold",
    "select_topk",
    "select_topk_rows",
    "sparse_accumulate",
    "sparse_sum",
    "sparse_sum_rows",
    "split_shares",
    "take_difference",
]
