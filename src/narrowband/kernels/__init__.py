"""Hot loops, and the one place that decides which backend runs them.

``reference.py`` is the meaning, in plain torch, on any device. ``cpu/`` is the speed on CPU, in Numba. Every function
here picks a backend by the device of its first tensor and forwards; both backends produce the same bytes from the same
input and seed (stochastic rounding may differ by one quantization level where fp32 sums are ordered differently).

Everything below works on flat, contiguous tensors: values are float32, payloads uint8, indices int32 and sorted
ascending. Callers (``narrowband.codecs``) flatten, convert and check sizes; kernels trust their shapes and check only
what comes from a wire. The loops of saved activations (rows, masks) also take bfloat16 and any shape, and read a
contiguous tensor in memory order; bfloat16 is widened to float32 exactly, and float32 rounded to it to nearest, ties to
even.

**Random numbers** are a counter-based hash, so they depend on (seed, element index) and on nothing else::

    mix(h)       = h ^= h >> 16; h *= 0x7feb352d; h ^= h >> 15; h *= 0x846ca68b; h ^= h >> 16      (uint32, wrapping)
    fold(seed)   = mix(low 32 bits of seed) + 0x9e3779b9 * mix(high 32 bits of seed) + 0x85ebca6b   (uint32, wrapping)
    hash(i,seed) = mix(i + fold(seed))                                                              (uint32, wrapping)
    uniform(i)   = (hash(i, seed) >> 8) * 2**-24                                                    (float32 in [0, 1))

**Grouped quantization.** ``x`` is cut into groups of ``group`` elements (the last may be shorter). A code of ``bits``
bits per element, and a header per group:

===========  ==========================  =================================  ==========================  ==============
``scale``    header (float32 arrays)     step of a group                    code (then clamped)         value decoded
===========  ==========================  =================================  ==========================  ==============
``minmax``   lo[groups], step[groups]    (max − min) / (2**bits − 1)        floor((x − lo)·inv + u)     lo + code·step
``absmax``   step[groups]                max|x| / s, s = 2**(bits−1) − 1    floor(x·inv + (s + u))      (code − s)·step
``l2``       step[groups]                ‖x‖₂ / s                           floor(x·inv + (s + u))      (code − s)·step
``mean``     step[groups]                2 · mean|x| (bits = 1)             1 if x ≥ 0 else 0           (code − ½)·step
===========  ==========================  =================================  ==========================  ==============

``inv`` is 1/step in float32, or 0 where step is below 2**-126. ``u`` is ½ (nearest) or uniform(element index)
(stochastic). Codes are clamped to [0, 2**bits − 1] (minmax) or [0, 2s]. All elementwise arithmetic is float32, without
fused multiply-add; sums (l2, mean) are taken in float64. A group that holds inf or NaN gets lo = step = NaN and
codes 0, so everything decoded from it is NaN: a broken gradient stays visible.

Codes are packed group by group. ``bits`` is split into planes whose widths are the powers of two that sum to it,
largest first (7 = 4 + 2 + 1); the first plane holds the code's lowest bits. In a plane of width w over a group of m
elements, ``stride = ceil(m·w / 8)`` bytes; element j sits in byte ``j % stride`` at bit ``(j // stride)·w``. So a 4-bit
byte holds elements j and j + 64, not 2j and 2j + 1, which lets every loop vectorize. Unused bits are zero.

**Rows of saved activations.** A tensor is seen, in memory order, as (parts, outer, groups, inner): rows of ``inner``
elements, where the ``outer`` rows of one part and one group share a range (see :class:`Rows`). The caller chooses the
ranges and keeps them: ``low`` and ``step``, float32 tensors of parts · groups elements, which elements may exceed. With
``bits`` of 2, 4 or 8, ``inv`` as above, and ``u`` ½ or (hash(i, seed) >> 16) · 2**-16 (``i`` counts the elements of the
tensor), all in float32 without fused multiply-add::

    code    = clamp(floor((x − low)·inv + u), 0, 2**bits − 1)           (0 where the sum is NaN)
    decoded = low + code·step

Sixteen bits make the sum of ``u`` and a whole number exact: what lies on a level stays there, whatever the seed.

What is quantized, and looked at for extremes, may also have gaps: a matrix of (parts · outer, groups · inner) whose
rows are contiguous, and any distance apart. Elements are counted without what is between them.

**Estimates** of such ranges are (2, groups): α = high − low and β = low. Taking the extremes of a batch in is, in
float32 without fused multiply-add, with μ and 1 − μ rounded to it::

    α ← μ·α + (1 − μ)·(high − low)          β ← μ·β + (1 − μ)·low

An end, β or β + α, then has moved by a share of the range's new width: |Δβ| / α or |Δβ + Δα| / α, the larger one; 0
where nothing has moved.

Each row is packed like a group, into ``stride = ceil(inner·bits / 8)`` bytes of its own: element j sits in byte
``j % stride`` at bit ``(j // stride)·bits``, and unused bits are zero. There is no header and no padding between rows.

**Masks** of n elements have one bit per element, in ``stride = ceil(n / 8)`` bytes: element i sits in byte
``i % stride`` at bit ``i // stride``; unused bits are zero.

**Places of maxima.** PyTorch's max pooling says of each result which element of its plane it was: the ``position``
row · W + column, int64. Its window begins at row r₀ and column c₀, which padding may make negative, and what is kept
is where in the window it was, one byte (see :class:`Windows`)::

    place    = (row − r₀) · kernel + (column − c₀)
    position = (r₀ + place // kernel) · W + c₀ + place % kernel

**Fixed point** of ``unit``, a power of two in [2**-126, 2**126], in int32, int16 or int8 codes of at most ``limit``::

    code     = clamp(rint(x / unit), −limit, limit)                     (rint: to nearest, ties to even; limit for NaN)
    checksum = Σ code_i · (2i + 1) mod 2**32
    decoded  = float32(float64(code) · factor)

Where float32 does not have ``limit``, codes are clamped at the largest number below that it has. Sums and differences
of codes are those of whole numbers modulo 2**bits, so a sum from which all terms but one are subtracted is that one, to
the bit. *Slices* are equally long parts of one tensor, each named by its first element.

**Selection** compares magnitudes by the bits of the float with the sign cleared, as integers: inf and NaN are the
largest of all. Ties go to the lower index.

**Elias–Fano** of k sorted indices below n: ``l`` = the smallest integer ≥ 0 with k·2**l ≥ n. First the upper part:
2k bits, little-endian within bytes, bit ``(index_i >> l) + i`` set for each i: ceil(2k / 8) bytes. Then the lower part:
the l low bits of each index one after the other, least significant first: ceil(k·l / 8) bytes. That is k·(2 + l) bits.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from torch import Tensor

__all__ = [
    "Rows",
    "Scale",
    "Windows",
    "all_finite",
    "all_zero",
    "apply_mask",
    "backend_for",
    "cheapest_within",
    "check_indices",
    "compensate",
    "compensate_project",
    "compensate_select_topk",
    "dequantize_groups",
    "dequantize_rows",
    "difference",
    "elias_fano_decode",
    "elias_fano_encode",
    "elias_fano_low_bits",
    "elias_fano_nbytes",
    "encode_topk",
    "fixed_decode",
    "fixed_dequantize",
    "fixed_quantize",
    "fixed_sum",
    "forget",
    "fuses",
    "group_minmax",
    "learn_ranges",
    "low_rank_product",
    "mask_positive",
    "momentum_topk",
    "orthonormalize",
    "packed_nbytes",
    "pool_places",
    "pool_positions",
    "quantize_groups",
    "quantize_rows",
    "quantize_rows_extremes",
    "randomk_indices",
    "row_extremes",
    "sample_rank",
    "sample_size",
    "select_threshold",
    "select_topk",
    "select_topk_rows",
    "sparse_accumulate",
    "sparse_sum",
    "sparse_sum_rows",
]

Scale = Literal["minmax", "absmax", "l2", "mean"]

#: How far the sampled threshold overshoots: it aims at this many survivors per element wanted (DGC's constant).
OVERSAMPLE = 1.3

#: A row that keeps less than this share of its squared norm beside the rows before it is a sum of them, as far as
#: float32 can tell.
DEPENDENT = 1e-12


def backend_for(device_type: str) -> ModuleType:
    """The module that runs the loops for tensors of this device type.

    ``NARROWBAND_KERNELS=reference`` forces plain torch everywhere, to find out whether a fast kernel is at fault.
    """
    if device_type == "cpu" and os.environ.get("NARROWBAND_KERNELS", "") != "reference":
        return import_module("narrowband.kernels.cpu")
    return import_module("narrowband.kernels.reference")


_backends: dict[str, Any] = {}


def _backend(tensor: Tensor) -> Any:
    device_type = tensor.device.type
    found = _backends.get(device_type)
    if found is None:
        found = _backends[device_type] = backend_for(device_type)
    return found


def fuses(x: Tensor) -> bool:
    """Whether the backend of this tensor gains from one pass that does several things; others gain from one call that
    does them for several tensors.
    """
    return bool(_backend(x).FUSES)


# ---- sizes: plain arithmetic, the same on every backend --------------------------------------------------------------


def plane_widths(bits: int) -> list[int]:
    """Widths of the bit planes of a code, largest first: ``plane_widths(7) == [4, 2, 1]``."""
    return [width for width in (8, 4, 2, 1) if bits & width]


def packed_nbytes(numel: int, bits: int, group: int) -> int:
    """Bytes of the packed codes of ``numel`` elements, without header and padding."""
    widths = plane_widths(bits)
    full, rest = divmod(numel, group)
    return full * sum(-(-group * w // 8) for w in widths) + sum(-(-rest * w // 8) for w in widths)


def elias_fano_low_bits(k: int, n: int) -> int:
    """Number of low bits stored per index: the smallest l ≥ 0 with k·2**l ≥ n (0 when there is nothing to store)."""
    return (-(-n // k) - 1).bit_length() if 0 < k < n else 0


def elias_fano_nbytes(k: int, n: int) -> int:
    """Bytes of k sorted indices below n: k·(2 + l) bits, each of the two parts rounded up to a byte."""
    if k == 0:
        return 0
    return -(-2 * k // 8) + -(-k * elias_fano_low_bits(k, n) // 8)


def sample_size(n: int, k: int) -> int:
    """How many elements the sampled threshold looks at: enough to see about 128 of the k wanted.

    The relative error of the count of survivors is then about 1/√(1.3·128) = 8 %, well inside the 30 % of slack.
    """
    return min(n, max(1024, -(-128 * n // max(k, 1))))


def sample_rank(n: int, k: int, oversample: float = OVERSAMPLE) -> int:
    """Which of the sample's s largest is the threshold: ceil(oversample·s·k / n), at most s."""
    size = sample_size(n, k)
    return min(size, math.ceil(oversample * size * k / n))


# ---- grouped quantization --------------------------------------------------------------------------------------------


def group_minmax(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each group: two float32 tensors of ceil(numel / group); NaN where not finite."""
    return cast("tuple[Tensor, Tensor]", _backend(x).group_minmax(x, group))


def quantize_groups(
    x: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, stochastic: bool, seed: int = 0
) -> None:
    """Quantize float32 ``x`` into ``out`` (uint8: header, codes, zero padding to its end)."""
    _backend(x).quantize_groups(x, out, bits=bits, group=group, scale=scale, stochastic=stochastic, seed=seed)


def dequantize_groups(
    payload: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, weight: float = 1.0, accumulate: bool = False
) -> None:
    """``out = weight · decoded`` or, accumulating, ``out += weight · decoded``. The payload's size is the caller's
    check.
    """
    _backend(out).dequantize_groups(
        payload, out, bits=bits, group=group, scale=scale, weight=weight, accumulate=accumulate
    )


# ---- saved activations -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """How a contiguous tensor is cut into rows, and which rows share a range: its elements, in memory order, are those
    of a tensor of shape (parts, outer, groups, inner), and row (p, o, g) has the range of (p, g).

    Attributes:
        parts: Slices of the tensor that share nothing.
        outer: Rows of a part that share a range.
        groups: Ranges of a part; neighbouring rows belong to different ones.
        inner: Elements of a row.

    Example:
        Three heads of 64 features each, a range per head, for any number of tokens:

        >>> rows = Rows(parts=1, outer=197, groups=3, inner=64)
        >>> rows.numel, rows.nbytes(4)
        (37824, 18912)
    """

    parts: int
    outer: int
    groups: int
    inner: int

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.parts * self.outer * self.groups

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.count * self.inner

    def nbytes(self, bits: int) -> int:
        """Bytes of the codes: each row ends with a whole byte."""
        return self.count * -(-self.inner * bits // 8)


def row_extremes(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Smallest and largest element of the rows that share a range: two float32 tensors of parts · groups; NaN where one
    is not finite or there is none.
    """
    return cast("tuple[Tensor, Tensor]", _backend(x).row_extremes(x, rows))


def quantize_rows(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> None:
    """Codes of ``x`` (float32 or bfloat16) written into ``out`` (uint8, exactly :meth:`Rows.nbytes` long).

    ``low`` and ``step`` (float32, parts · groups) are the ranges: codes stand for low, low + step, and so on up to
    low + (2**bits − 1)·step, and what is outside is clamped. ``bits`` is 2, 4 or 8.
    """
    _backend(x).quantize_rows(x, out, rows, low, step, bits=bits, stochastic=stochastic, seed=seed)


def quantize_rows_extremes(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """:func:`quantize_rows` and :func:`row_extremes` in one pass over ``x``: the codes of the one, returning the other.

    Where extremes are NaN, codes say nothing of what was not finite.
    """
    result = _backend(x).quantize_rows_extremes(x, out, rows, low, step, bits=bits, stochastic=stochastic, seed=seed)
    return cast("tuple[Tensor, Tensor]", result)


def learn_ranges(known: Tensor, low: Tensor, high: Tensor, decay: float) -> tuple[Tensor, bool, float]:
    """Take the extremes of a batch (float32, groups) into estimates of their ranges (float32, (2, groups)).

    Returns:
        The new estimates; whether all extremes are finite, and have a range in float32 on both sides of zero; and the
        largest share of its width by which an end has moved, which says nothing where they are not.
    """
    return cast("tuple[Tensor, bool, float]", _backend(known).learn_ranges(known, low, high, decay))


def dequantize_rows(codes: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int) -> None:
    """``out = low + code·step`` (float32 or bfloat16), from what :func:`quantize_rows` wrote."""
    _backend(codes).dequantize_rows(codes, out, rows, low, step, bits=bits)


def mask_positive(x: Tensor, out: Tensor) -> None:
    """The mask of where ``x`` (float32 or bfloat16) is not at or below zero: above it, or NaN, as ReLU's backward asks.

    ``out`` is uint8, exactly ceil(numel / 8) long.
    """
    _backend(x).mask_positive(x, out)


def apply_mask(mask: Tensor, x: Tensor, out: Tensor, factor: float = 1.0) -> None:
    """``out = factor · x`` where the mask says so, and +0 elsewhere, whatever is there.

    ``x`` and ``out`` (float32 or bfloat16, each) may be the same tensor; the product is taken in float32.
    """
    _backend(mask).apply_mask(mask, x, out, factor)


@dataclass(frozen=True)
class Windows:
    """Where the windows of max pooling over planes begin: its results are, in memory order, those of a tensor of shape
    (outer, rows, columns, inner), and the window of (…, r, c, …) begins at row r · stride[0] − padding[0] and column
    c · stride[1] − padding[1] of the input's plane.

    Attributes:
        outer: Planes, or samples where channels are the last in memory.
        rows: Rows of results.
        columns: Results of a row.
        inner: One, or channels where these are the last in memory.
        width: Columns of the input's plane, W.
        kernel: Columns of a window; with its rows, windows have at most 256 elements.
        stride: Of windows, (rows, columns).
        padding: Before the first row and column.

    Example:
        The pooling of a ResNet, of 56 × 56 results from planes of 112 × 112:

        >>> windows = Windows(32 * 64, 56, 56, 1, width=112, kernel=3, stride=(2, 2), padding=(1, 1))
        >>> windows.numel
        6422528
    """

    outer: int
    rows: int
    columns: int
    inner: int
    width: int
    kernel: int
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def numel(self) -> int:
        """Number of results."""
        return self.outer * self.rows * self.columns * self.inner


def pool_places(position: Tensor, out: Tensor, windows: Windows) -> None:
    """Where in its window each maximum is: ``out`` (uint8, as many) from positions in planes (int64)."""
    _backend(position).pool_places(position, out, windows)


def pool_positions(places: Tensor, out: Tensor, windows: Windows) -> None:
    """The inverse of :func:`pool_places`: ``out`` is int64."""
    _backend(places).pool_positions(places, out, windows)


# ---- fixed point -----------------------------------------------------------------------------------------------------


def fixed_quantize(x: Tensor, out: Tensor, unit: float, limit: int) -> tuple[float, int]:
    """Codes of float32 ``x`` in ``out`` (int32, int16 or int8): whole numbers of ``unit``, a power of two.

    Returns:
        The largest magnitude in ``x``, as it is: inf or NaN where there is one, and above ``unit · limit`` where codes
        were clamped; and the checksum of the codes.
    """
    return cast("tuple[float, int]", _backend(x).fixed_quantize(x, out, unit, limit))


def fixed_sum(source: Tensor, starts: Sequence[int], out: Tensor) -> None:
    """``out`` = the sum of slices of ``source``, one or more, modulo 2**bits of ``out``, whose codes may be wider."""
    _backend(source).fixed_sum(source, starts, out)


def fixed_decode(packet: Tensor, source: Tensor, starts: Sequence[int], total: Tensor) -> None:
    """``total`` (int32) ``+= packet −`` the slices of ``source`` that it holds beside one other. The difference is
    taken in the packet's own width, and widened then.
    """
    _backend(packet).fixed_decode(packet, source, starts, total)


def fixed_dequantize(total: Tensor, out: Tensor, factor: float) -> None:
    """``out = total · factor``: int32 codes as float32, rounded once."""
    _backend(total).fixed_dequantize(total, out, factor)


# ---- selection -------------------------------------------------------------------------------------------------------


def select_topk(x: Tensor, k: int, *, sampled: bool = False, seed: int = 0) -> Tensor:
    """Sorted int32 indices of the k elements of largest magnitude.

    ``sampled=True`` is DGC's hierarchical selection: a threshold from a sample (see :func:`sample_size`: position i of
    s is ``lo + (hash(i, seed)·(hi − lo) >> 32)`` with lo = i·n // s, hi = (i+1)·n // s) that about 1.3·k elements
    should pass (see :func:`sample_rank`), then the k largest among those that do. When fewer than k pass, only those
    are returned; the exact variant then looks again.
    """
    return cast("Tensor", _backend(x).select_topk(x, k, sampled=sampled, seed=seed))


def select_topk_rows(x: Tensor, k: int) -> Tensor:
    """The k elements of largest magnitude in each row of a contiguous matrix (R, W): R·k sorted int32 indices into the
    flat matrix. What :func:`select_topk` finds in every row, in one call.
    """
    return cast("Tensor", _backend(x).select_topk_rows(x, k))


def select_threshold(x: Tensor, value: float) -> Tensor:
    """Sorted int32 indices of all elements with |x| ≥ value > 0 (NaN counts as large)."""
    return cast("Tensor", _backend(x).select_threshold(x, value))


def randomk_indices(n: int, k: int, seed: int, device: Any = "cpu") -> Tensor:
    """k distinct sorted int32 indices below n, one from each of k equal strata: ``lo + (hash(i, seed)·(hi − lo) >>
    32)`` with lo = i·n // k, hi = (i+1)·n // k.
    """
    import torch

    device = torch.device(device)
    return cast("Tensor", backend_for(device.type).randomk_indices(n, k, seed, device))


def compensate(x: Tensor, residual: Tensor, *, below: float = math.inf) -> bool:
    """``(x, residual) ← (residual, residual + x)`` in one pass; True if every sum is of a magnitude below ``below``.

    ``x`` is left holding the old residual: copying it back undoes the call, to the bit.
    """
    return cast("bool", _backend(x).compensate(x, residual, below=below))


def compensate_select_topk(
    x: Tensor, residual: Tensor, k: int, *, sampled: bool = False, seed: int = 0
) -> tuple[bool, Tensor, Tensor]:
    """:func:`compensate` and :func:`select_topk` of the sum, fused: (whether it is finite, the indices, the sum there).

    When not finite, indices and values are meaningless.
    """
    result = _backend(x).compensate_select_topk(x, residual, k, sampled=sampled, seed=seed)
    return cast("tuple[bool, Tensor, Tensor]", result)


def encode_topk(
    x: Tensor,
    residual: Tensor,
    k: int,
    out: Tensor,
    *,
    sampled: bool = False,
    seed: int = 0,
    subtract: bool = False,
) -> bool:
    """:func:`compensate_select_topk`, and where all is finite, what it found written into ``out`` as
    :func:`sparse_sum_rows` reads it, with zeros behind.

    Where less than k are found, values of zero at the last index fill up. With ``subtract``, what is written leaves
    ``residual``: zeros remain. Returns whether all is finite; if not, ``out`` is left alone.
    """
    found = _backend(x).encode_topk(x, residual, k, out, sampled=sampled, seed=seed, subtract=subtract)
    return cast("bool", found)


def momentum_topk(
    x: Tensor,
    now: Tensor,
    before: Tensor,
    k: int,
    *,
    momentum: float,
    nesterov: bool = False,
    scale: float = 1.0,
    threshold: float = 0.0,
    seed: int = 0,
) -> tuple[bool, Tensor, Tensor, float]:
    """One step of momentum correction, and the k elements of largest magnitude in what is owed then, fused.

    A running sum y of velocities is kept as two of its states, ``now`` and the one ``before``; their difference is the
    velocity. So nothing is lost when the step is undone: ::

        (x, before) ← (before, now + (momentum · (now − before) + scale · x))

    makes ``before`` the newest sum, ``now`` the one before that, and leaves the oldest in ``x``. Owed is the newest
    sum; with ``nesterov``, it is that plus momentum · (newest − now), which is what the variant's own sum comes to.

    Args:
        threshold: a magnitude that a little more than k elements may reach, as the last call returned it, or 0. It says
            where to look first, and changes no result.

    Returns:
        (whether everything owed is finite, the k sorted indices, what is owed there, the threshold for the next call).
        When not finite, indices and values are empty.
    """
    result = _backend(x).momentum_topk(
        x, now, before, k, momentum=momentum, nesterov=nesterov, scale=scale, threshold=threshold, seed=seed
    )
    return cast("tuple[bool, Tensor, Tensor, float]", result)


def forget(
    now: Tensor, before: Tensor, indices: Tensor, *, momentum: float, nesterov: bool = False, masking: bool = True
) -> Tensor:
    """Owe nothing more at the indices, after :func:`momentum_topk`; with ``masking`` the velocity there is zero, too.

    Returns what ``now`` held there; written back, and ``before`` overwritten with ``x``, it undoes both calls to the
    bit.
    """
    old = _backend(now).forget(now, before, indices, momentum=momentum, nesterov=nesterov, masking=masking)
    return cast("Tensor", old)


def all_finite(x: Tensor, *, below: float = math.inf) -> bool:
    """True if no element is inf or NaN, or of a magnitude of at least ``below``."""
    return cast("bool", _backend(x).all_finite(x, below=below))


def difference(x: Tensor, base: Tensor, out: Tensor, *, below: float = math.inf) -> bool:
    """``out = x − base`` in one pass, where ``out`` may be either of them; True if every difference is of a magnitude
    below ``below``.
    """
    return cast("bool", _backend(x).difference(x, base, out, below=below))


def all_zero(x: Tensor) -> bool:
    """True if no element differs from zero (NaN does)."""
    return cast("bool", _backend(x).all_zero(x))


# ---- sparse vectors --------------------------------------------------------------------------------------------------


def check_indices(indices: Tensor, n: int) -> None:
    """Raise :class:`PayloadError` unless the int32 indices are in [0, n) and never descend."""
    _backend(indices).check_indices(indices, n)


def sparse_accumulate(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    """``out[indices] += weight · values``; indices sorted (equal neighbours add up) and already checked."""
    _backend(out).sparse_accumulate(out, indices, values, weight)


def sparse_sum(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], weight: float = 1.0) -> None:
    """``out = Σ weight · part``, each part as (indices, values) for :func:`sparse_accumulate`; to the bit what zeroing
    and accumulating part by part gives.
    """
    _backend(out).sparse_sum(out, parts, weight)


def sparse_sum_rows(out: Tensor, payloads: Tensor, k: int, weight: float = 1.0) -> None:
    """:func:`sparse_sum` of rows of bytes that hold k float32 values each, then k indices as :func:`elias_fano_encode`
    writes them.

    ``payloads`` is uint8 of shape (parts, bytes), each row contiguous and beginning at a multiple of four bytes.
    Raises :class:`PayloadError` as :func:`elias_fano_decode` does, before anything is written.
    """
    _backend(out).sparse_sum_rows(out, payloads, k, weight)


def elias_fano_encode(indices: Tensor, n: int, out: Tensor) -> None:
    """Write k sorted indices below n into ``out`` (uint8, exactly :func:`elias_fano_nbytes` long)."""
    _backend(indices).elias_fano_encode(indices, n, out)


def elias_fano_decode(payload: Tensor, k: int, n: int) -> Tensor:
    """The k indices (int32) in ``payload`` (uint8, exactly :func:`elias_fano_nbytes` long).

    Raises :class:`PayloadError` unless it holds exactly k indices, all below n, never descending.
    """
    return cast("Tensor", _backend(payload).elias_fano_decode(payload, k, n))


# ---- low rank --------------------------------------------------------------------------------------------------------


def low_rank_product(out: Tensor, p: Tensor, q: Tensor, *, weight: float = 1.0, accumulate: bool = False) -> None:
    """``out = weight · pᵀ·q`` or, accumulating, ``out += weight · pᵀ·q``.

    p is (r, n), q (r, m) with r ≥ 1, out flat of n·m elements, all float32 and contiguous. Every element's r terms are
    added in their order, without fused multiply-add, so that ranks on different machines come to the same bits.
    """
    _backend(out).low_rank_product(out, p, q, weight=weight, accumulate=accumulate)


def compensate_project(
    x: Tensor, owed: Tensor, q: Tensor, p: Tensor, *, said: tuple[Tensor, Tensor] | None = None, below: float = math.inf
) -> bool:
    """``(x, owed) ← (owed, (owed − said) + x)`` and ``p ← q·owedᵀ`` of the new one, in one pass.

    x and owed are flat, of n·m elements, q is (r, m), p (r, n); ``said`` are factors as :func:`low_rank_product` takes
    them, of any rank. ``x`` is left holding what was owed before: copying it back undoes the call, to the bit.

    Returns whether everything owed is of a magnitude below ``below``.
    """
    return cast("bool", _backend(x).compensate_project(x, owed, q, p, said=said, below=below))


def orthonormalize(p: Tensor) -> Tensor:
    """Rows that are orthonormal and span what those of p span: each row of p minus its share of those before, divided
    by its norm.

    p is (count, r, n), float32 and contiguous: count matrices. A row of zeros, and one that depends on those before it
    (it keeps less than :data:`DEPENDENT` of its squared norm), becomes a row of zeros. Sums are in float64 and in an
    order of the loop's own, so that ranks on different machines come to the same bits. NaN stays NaN.
    """
    return cast("Tensor", _backend(p).orthonormalize(p))


# ---- choice ----------------------------------------------------------------------------------------------------------


def cheapest_within(cost: Tensor, weight: Tensor, capacity: int) -> Tensor:
    """The item of every row, int32, that together cost least with a total weight of at most ``capacity``; all -1 if
    there are none.

    cost (float64, inf: not allowed) and weight (int32, ≥ 0) are (rows, items), contiguous, on CPU. Of rows' items that
    cost as much, the first.
    """
    return cast("Tensor", _backend(cost).cheapest_within(cost, weight, capacity))
