"""The loops of :mod:`narrowband.kernels` in plain torch: what they mean, and how they run on any device.

The formats are defined beside the public functions, in the file of the same name one folder up; here they are written
down as whole-tensor operations that can be checked line by line. Arithmetic on floats is one float32 operation per step
and never fused, so that a faster backend can reproduce every byte. Unsigned 32-bit arithmetic is done in int64 and
masked. Wide temporaries are made ``CHUNK`` elements at a time, so the reference needs little more memory than the
tensor it works on.
"""

from __future__ import annotations

from narrowband.kernels.reference.checksums import checksum
from narrowband.kernels.reference.compensation import (
    all_finite,
    all_zero,
    compensate,
    compensate_select_topk,
    difference,
    encode_topk,
    poison_all_if,
    restore_all_if,
    restore_if,
    take_difference,
)
from narrowband.kernels.reference.fixed import fixed_decode, fixed_dequantize, fixed_quantize, fixed_sum
from narrowband.kernels.reference.kept import compensate_kept
from narrowband.kernels.reference.knapsack import cheapest_within
from narrowband.kernels.reference.levels import levels_decode, levels_encode
from narrowband.kernels.reference.lowrank import compensate_project, low_rank_product, orthonormalize
from narrowband.kernels.reference.masks import apply_mask, mask_between, pool_places, pool_positions
from narrowband.kernels.reference.momentum import forget, momentum_topk
from narrowband.kernels.reference.outliers import dwarfed_rows
from narrowband.kernels.reference.quantized import (
    dequantize_groups,
    dequantize_means,
    group_minmax,
    quantize_all,
    quantize_groups,
)
from narrowband.kernels.reference.rows import (
    dequantize_rows,
    learn_ranges,
    quantize_rows,
    quantize_rows_adapting,
    quantize_rows_extremes,
    quantize_rows_learning,
    row_extremes,
)
from narrowband.kernels.reference.selection import randomk_indices, select_threshold, select_topk, select_topk_rows
from narrowband.kernels.reference.shares import from_share, split_shares
from narrowband.kernels.reference.sparse import (
    check_indices,
    elias_fano_decode,
    elias_fano_encode,
    sparse_accumulate,
    sparse_sum,
    sparse_sum_all,
    sparse_sum_rows,
)
from narrowband.kernels.reference.stores import keep_in_8, keep_in_16, read_from_8

FUSES = False

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
