"""Hot loops, grouped in families, and the choice of the backend that runs them.

A family of loops has the same file name in every folder. ``quantized.py`` has the public functions, their shapes and
the payload format; ``reference/quantized.py`` defines the functions in plain torch, for any device;
``cpu/quantized.py`` has the fast loops for CPU, in Numba; ``cuda/quantized.py`` those for GPU, in Triton. A public
function picks the backend by the device of its first tensor (``backends.py``). A backend takes loops that it lacks from
the reference. All backends produce the same bytes from the same input and seed (stochastic rounding may differ by one
quantization level where fp32 sums are ordered differently).

All functions take flat, contiguous tensors: values are float32, payloads uint8, indices int32 and sorted ascending.
Callers (``narrowband.codecs``) flatten, convert and check sizes. Kernels trust the shapes, and check only the content
of payloads that another rank sent. The loops for saved activations (rows, masks) also take bfloat16 and any shape, and
read a contiguous tensor in memory order. They widen bfloat16 to float32 exactly, and round float32 to bfloat16 to
nearest, ties to even.

**Random numbers** come from a counter-based hash, so they depend on (seed, element index) and on nothing else::

    mix(h)       = h ^= h >> 16; h *= 0x7feb352d; h ^= h >> 15; h *= 0x846ca68b; h ^= h >> 16      (uint32, wrapping)
    fold(seed)   = mix(low 32 bits of seed) + 0x9e3779b9 * mix(high 32 bits of seed) + 0x85ebca6b   (uint32, wrapping)
    hash(i,seed) = mix(i + fold(seed))                                                              (uint32, wrapping)
    uniform(i)   = (hash(i, seed) >> 8) * 2**-24                                                    (float32 in [0, 1))

A uniform number of b bits is (hash(i, seed) >> 32 − b) * 2**-b.
"""

from __future__ import annotations

from narrowband.kernels.backends import backend_for, fuses
from narrowband.kernels.checksums import checksum
from narrowband.kernels.compensation import (
    all_finite,
    all_zero,
    all_zero_each,
    clear_all_if,
    compensate,
    compensate_select_topk,
    compensate_select_topk_all,
    difference,
    encode_topk,
    encode_topk_all,
    poison_all_if,
    restore_all_if,
    take_difference,
)
from narrowband.kernels.findings import Findings, Late, answers, holds
from narrowband.kernels.fixed import fixed_decode, fixed_dequantize, fixed_quantize, fixed_sum
from narrowband.kernels.kept import compensate_kept, take_former, take_former_all_if
from narrowband.kernels.knapsack import cheapest_within
from narrowband.kernels.levels import levels_decode, levels_encode, levels_nbytes
from narrowband.kernels.lowrank import (
    compensate_project,
    compensate_project_all,
    low_rank_product,
    low_rank_products,
    orthonormalize,
    orthonormalize_all,
)
from narrowband.kernels.masks import Windows, apply_mask, mask_between, pool_places, pool_positions
from narrowband.kernels.mixed import encode_mixed_all
from narrowband.kernels.momentum import encode_momentum_topk_all, forget, momentum_topk, remember_all_if
from narrowband.kernels.outliers import dwarfed_rows
from narrowband.kernels.quantized import (
    Scale,
    dequantize_groups,
    dequantize_means,
    group_minmax,
    levels_are_finite,
    packed_nbytes,
    quantize_all,
    quantize_groups,
)
from narrowband.kernels.rotated import (
    dequantize_rotated,
    dequantize_rotated_means,
    quantize_rotated,
    quantize_rotated_all,
    rotated_steps_are_finite,
)
from narrowband.kernels.rows import (
    Affine,
    Rows,
    Standard,
    code_ranges,
    dequantize_rows,
    learn_ranges,
    quantize_rows,
    quantize_rows_adapting,
    quantize_rows_extremes,
    quantize_rows_learning,
    row_extremes,
)
from narrowband.kernels.selection import (
    randomk_indices,
    sample_rank,
    sample_size,
    select_threshold,
    select_topk,
    select_topk_all,
    select_topk_rows,
)
from narrowband.kernels.shares import SHARE_BLOCK, Shared, add_shares_all, from_share, share_numel, split_shares_all
from narrowband.kernels.sparse import (
    check_indices,
    elias_fano_decode,
    elias_fano_decode_all,
    elias_fano_encode,
    elias_fano_encode_all,
    elias_fano_low_bits,
    elias_fano_nbytes,
    sparse_accumulate,
    sparse_accumulate_all,
    sparse_sum,
    sparse_sum_all,
    sparse_sum_rows,
)
from narrowband.kernels.stores import (
    LEAST_POWER,
    STORE_GROUP,
    Stored,
    keep_all,
    keep_in_8,
    keep_in_16,
    read_all,
    read_from_8,
)

__all__ = [
    "LEAST_POWER",
    "SHARE_BLOCK",
    "STORE_GROUP",
    "Affine",
    "Findings",
    "Late",
    "Rows",
    "Scale",
    "Shared",
    "Standard",
    "Stored",
    "Windows",
    "add_shares_all",
    "all_finite",
    "all_zero",
    "all_zero_each",
    "answers",
    "apply_mask",
    "backend_for",
    "cheapest_within",
    "check_indices",
    "checksum",
    "clear_all_if",
    "code_ranges",
    "compensate",
    "compensate_kept",
    "compensate_project",
    "compensate_project_all",
    "compensate_select_topk",
    "compensate_select_topk_all",
    "dequantize_groups",
    "dequantize_means",
    "dequantize_rotated",
    "dequantize_rotated_means",
    "dequantize_rows",
    "difference",
    "dwarfed_rows",
    "elias_fano_decode",
    "elias_fano_decode_all",
    "elias_fano_encode",
    "elias_fano_encode_all",
    "elias_fano_low_bits",
    "elias_fano_nbytes",
    "encode_mixed_all",
    "encode_momentum_topk_all",
    "encode_topk",
    "encode_topk_all",
    "fixed_decode",
    "fixed_dequantize",
    "fixed_quantize",
    "fixed_sum",
    "forget",
    "from_share",
    "fuses",
    "group_minmax",
    "holds",
    "keep_all",
    "keep_in_8",
    "keep_in_16",
    "learn_ranges",
    "levels_are_finite",
    "levels_decode",
    "levels_encode",
    "levels_nbytes",
    "low_rank_product",
    "low_rank_products",
    "mask_between",
    "momentum_topk",
    "orthonormalize",
    "orthonormalize_all",
    "packed_nbytes",
    "poison_all_if",
    "pool_places",
    "pool_positions",
    "quantize_all",
    "quantize_groups",
    "quantize_rotated",
    "quantize_rotated_all",
    "quantize_rows",
    "quantize_rows_adapting",
    "quantize_rows_extremes",
    "quantize_rows_learning",
    "randomk_indices",
    "read_all",
    "read_from_8",
    "remember_all_if",
    "restore_all_if",
    "rotated_steps_are_finite",
    "row_extremes",
    "sample_rank",
    "sample_size",
    "select_threshold",
    "select_topk",
    "select_topk_all",
    "select_topk_rows",
    "share_numel",
    "sparse_accumulate",
    "sparse_accumulate_all",
    "sparse_sum",
    "sparse_sum_all",
    "sparse_sum_rows",
    "split_shares_all",
    "take_difference",
    "take_former",
    "take_former_all_if",
]
