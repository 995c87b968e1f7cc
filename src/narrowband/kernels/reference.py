"""The loops of :mod:`narrowband.kernels` in plain torch: what they mean, and how they run on any device.

The formats are defined in :mod:`narrowband.kernels`; this file writes them down as whole-tensor operations that can be
checked line by line. Arithmetic on floats is one float32 operation per step and never fused, so that a faster backend
can reproduce every byte. Unsigned 32-bit arithmetic is done in int64 and masked. Wide temporaries are made ``CHUNK``
elements at a time, so the fallback needs little more memory than the tensor it works on.

Shapes: G groups, M elements of a group, B bytes of a group or of a plane of it, K indices, L low bits of an index;
R rows, I elements of a row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from narrowband.errors import PayloadError
from narrowband.kernels import DEPENDENT, elias_fano_low_bits, elias_fano_nbytes, plane_widths, sample_rank, sample_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from narrowband.kernels import Rows, Scale, Windows

#: Elements per temporary: large enough to keep a GPU busy, 32 MiB as int64.
CHUNK = 1 << 22
FUSES = False

UINT32 = 0xFFFFFFFF
#: All bits of a float but the sign. Finite floats without it, read as integers, order as their magnitudes do.
MAGNITUDE = 0x7FFFFFFF
#: Magnitude bits of infinity; anything at or above it is inf or NaN.
NON_FINITE = 0x7F800000
#: The smallest normal float: 1 / step is infinite or imprecise below it.
TINY = 2.0**-126


# ---- random numbers --------------------------------------------------------------------------------------------------


def _mix(h: int) -> int:
    h ^= h >> 16
    h = h * 0x7FEB352D & UINT32
    h ^= h >> 15
    h = h * 0x846CA68B & UINT32
    return h ^ h >> 16


def _fold(seed: int) -> int:
    low, high = seed & UINT32, seed >> 32 & UINT32
    return (_mix(low) + 0x9E3779B9 * _mix(high) + 0x85EBCA6B) & UINT32


def _hash(begin: int, end: int, seed: int, device: torch.device) -> Tensor:
    """``hash(i, seed)`` for i in [begin, end), as int64 in [0, 2**32)."""
    h = torch.arange(begin, end, dtype=torch.int64, device=device).add_(_fold(seed)).bitwise_and_(UINT32)
    h ^= h >> 16
    h.mul_(0x7FEB352D).bitwise_and_(UINT32)
    h ^= h >> 15
    h.mul_(0x846CA68B - (1 << 32)).bitwise_and_(UINT32)  # the same modulo 2**32, and the product stays inside int64
    h ^= h >> 16
    return h


def _uniform(begin: int, end: int, seed: int, device: torch.device, bits: int = 24) -> Tensor:
    """``uniform(i)`` for i in [begin, end): float32 in [0, 1), of so many bits."""
    return (_hash(begin, end, seed, device) >> 32 - bits).to(torch.float32).mul_(2.0**-bits)


def _strata(n: int, size: int, seed: int, device: torch.device) -> Tensor:
    """One position, int64, from each of ``size`` equal strata of [0, n)."""
    if size == 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    # lo of every stratum and, last, hi of the last one
    edges = torch.arange(size + 1, dtype=torch.int64, device=device).mul_(n).div_(size, rounding_mode="floor")
    width = edges[1:] - edges[:-1]
    return width.mul_(_hash(0, size, seed, device)).bitwise_right_shift_(32).add_(edges[:-1])


# ---- grouped quantization --------------------------------------------------------------------------------------------


def _pieces(numel: int, group: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, elements per group): runs of whole groups, about CHUNK elements each, then a shorter last one."""
    whole = numel - numel % group
    run = max(CHUNK // group, 1) * group
    for begin in range(0, whole, run):
        yield begin, min(begin + run, whole), group
    if whole < numel:
        yield whole, numel, numel - whole


def _magnitudes(x: Tensor) -> Tensor:
    """Magnitudes as int32 that order as |x| does, inf and NaN last."""
    return x.view(torch.int32) & MAGNITUDE


def _ordered(bits: Tensor) -> Tensor:
    """Bits of floats ↔ int32 that order as the floats do, −0 below +0. Its own inverse."""
    return bits ^ ((bits >> 31) & MAGNITUDE)


def _extremes(x_GM: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each group; NaN where the group is not finite."""
    ordered_GM = _ordered(x_GM.view(torch.int32))
    return _where_finite(ordered_GM.amin(1), ordered_GM.amax(1))


def _where_finite(least_G: Tensor, most_G: Tensor) -> tuple[Tensor, Tensor]:
    """The floats that order like this, or NaN where one is not finite."""
    low_G, high_G = (_ordered(extreme).view(torch.float32) for extreme in (least_G, most_G))
    finite_G = torch.isfinite(low_G) & torch.isfinite(high_G)
    return torch.where(finite_G, low_G, torch.nan), torch.where(finite_G, high_G, torch.nan)


def _centre(bits: int) -> int:
    """s: the code of zero in the symmetric scales."""
    return (1 << (bits - 1)) - 1


def _header(x_GM: Tensor, bits: int, scale: Scale) -> tuple[Tensor, Tensor]:
    """(lo, step) of each group; lo is zero in the symmetric scales."""
    # A divisor that lives on the device: CUDA would turn a division by a Python number into a product.
    levels = torch.tensor((1 << bits) - 1 if scale == "minmax" else _centre(bits), device=x_GM.device)
    if scale == "minmax":
        low_G, high_G = _extremes(x_GM)
        return low_G, (high_G - low_G) / levels
    top_G = _magnitudes(x_GM).amax(1)
    if scale == "absmax":
        step_G = top_G.view(torch.float32) / levels
    elif scale == "l2":
        step_G = (x_GM.double().square_().sum(1).sqrt_() / levels).float()
    else:
        step_G = (2.0 * x_GM.double().abs_().sum(1) / torch.tensor(x_GM.shape[1], device=x_GM.device)).float()
    return torch.zeros_like(step_G), torch.where(top_G < NON_FINITE, step_G, torch.nan)


def _pack(codes_GM: Tensor, bits: int) -> Tensor:
    """The bytes of each group, plane after plane: uint8 (G, B)."""
    groups, m = codes_GM.shape
    planes = []
    shift = 0
    for width in plane_widths(bits):
        stride, parts = -(-m * width // 8), 8 // width
        plane_GM = (codes_GM >> shift) & ((1 << width) - 1)
        padded = torch.nn.functional.pad(plane_GM, (0, stride * parts - m)).view(groups, parts, stride)
        plane_GB = padded[:, 0].clone()
        for part in range(1, parts):
            plane_GB |= padded[:, part] << (part * width)
        planes.append(plane_GB)
        shift += width
    return torch.cat(planes, 1)


def _unpack(packed_GB: Tensor, bits: int, m: int) -> Tensor:
    """The inverse of :func:`_pack`: uint8 codes (G, M)."""
    codes_GM = torch.zeros(packed_GB.shape[0], m, dtype=torch.uint8, device=packed_GB.device)
    at = shift = 0
    for width in plane_widths(bits):
        stride, parts = -(-m * width // 8), 8 // width
        plane_GB = packed_GB[:, at : at + stride]
        padded = torch.cat([(plane_GB >> (part * width)) & ((1 << width) - 1) for part in range(parts)], 1)
        codes_GM |= padded[:, :m] << shift
        at += stride
        shift += width
    return codes_GM


def group_minmax(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    pieces = [_extremes(x[begin:end].view(-1, m)) for begin, end, m in _pieces(x.numel(), group)]
    if not pieces:
        return x.new_empty(0), x.new_empty(0)
    return torch.cat([low for low, _ in pieces]), torch.cat([high for _, high in pieces])


def quantize_groups(
    x: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, stochastic: bool, seed: int = 0
) -> None:
    groups = -(-x.numel() // group)
    header = []
    at = 4 * groups * (2 if scale == "minmax" else 1)
    for begin, end, m in _pieces(x.numel(), group):
        x_GM = x[begin:end].view(-1, m)
        low_G, step_G = _header(x_GM, bits, scale)
        header.append((low_G, step_G))
        if scale == "mean":
            codes_GM = ((x_GM >= 0) & ~step_G.isnan()[:, None]).to(torch.uint8)
        else:
            inverse_G = torch.where(step_G < TINY, 0.0, 1.0 / step_G)
            centre, top = (0, (1 << bits) - 1) if scale == "minmax" else (_centre(bits), 2 * _centre(bits))
            value_GM = (x_GM - low_G[:, None]).mul_(inverse_G[:, None])
            if stochastic:
                value_GM.add_(_uniform(begin, end, seed, x.device).add_(centre).view(-1, m))
            else:
                value_GM.add_(centre + 0.5)
            # NaN becomes code 0: all of a group whose header is NaN, or lo + inf · 0 where max − min overflows
            codes_GM = value_GM.nan_to_num_(nan=0.0).floor_().clamp_(0, top).to(torch.uint8)
        packed = _pack(codes_GM, bits).view(-1)
        out[at : at + packed.numel()] = packed
        at += packed.numel()
    out[at:] = 0
    if header:
        # As bytes, because a payload may start at any address.
        floats = [low_G for low_G, _ in header] if scale == "minmax" else []
        floats += [step_G for _, step_G in header]
        bytes_ = torch.cat(floats).view(torch.uint8)
        out[: bytes_.numel()] = bytes_


def dequantize_groups(
    payload: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, weight: float = 1.0, accumulate: bool = False
) -> None:
    groups = -(-out.numel() // group)
    at = 4 * groups * (2 if scale == "minmax" else 1)
    floats = payload[:at].clone().view(torch.float32)  # the copy is aligned, whatever the payload's address
    steps = floats[-groups:] if groups else floats
    lows = floats[:groups] if scale == "minmax" else torch.zeros_like(steps)
    offset = {"minmax": 0.0, "mean": 0.5}.get(scale, float(_centre(bits)))
    first = 0
    for begin, end, m in _pieces(out.numel(), group):
        last = first + (end - begin) // m
        nbytes = (last - first) * sum(-(-m * width // 8) for width in plane_widths(bits))
        codes_GM = _unpack(payload[at : at + nbytes].view(last - first, -1), bits, m)
        value_GM = codes_GM.to(torch.float32).sub_(offset).mul_(steps[first:last, None]).add_(lows[first:last, None])
        value = value_GM.mul_(weight).view(-1)
        if accumulate:
            out[begin:end] += value
        else:
            out[begin:end] = value
        at += nbytes
        first = last


# ---- saved activations -----------------------------------------------------------------------------------------------


def _runs(rows: Rows, device: torch.device) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, last row, the range of each): runs of rows, about CHUNK elements each."""
    run = max(CHUNK // max(rows.inner, 1), 1)
    for first in range(0, rows.count, run):
        last = min(first + run, rows.count)
        row_R = torch.arange(first, last, device=device)
        part_R = row_R.div(rows.outer * rows.groups, rounding_mode="floor")
        yield first, last, part_R * rows.groups + row_R % rows.groups


def _rows_of(x: Tensor, rows: Rows, first: int, last: int) -> Tensor:
    """Rows [first, last) as they are in memory, (R, I)."""
    return x.view(-1)[first * rows.inner : last * rows.inner].view(last - first, rows.inner)


def row_extremes(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    size, device = rows.parts * rows.groups, x.device
    x = x.contiguous()
    if rows.numel == 0:
        return torch.full((size,), torch.nan, device=device), torch.full((size,), torch.nan, device=device)
    least = torch.empty(rows.count, dtype=torch.int32, device=device)
    most = torch.empty_like(least)
    for first, last, _ in _runs(rows, device):
        ordered_RI = _ordered(_rows_of(x, rows, first, last).float().view(torch.int32))
        least[first:last], most[first:last] = ordered_RI.amin(1), ordered_RI.amax(1)
    shape = rows.parts, rows.outer, rows.groups
    return _where_finite(least.view(shape).amin(1).view(-1), most.view(shape).amax(1).view(-1))


def quantize_rows(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> None:
    x, inverse = x.contiguous(), torch.where(step < TINY, 0.0, 1.0 / step)
    stride = -(-rows.inner * bits // 8)
    for first, last, range_R in _runs(rows, x.device):
        value_RI = _rows_of(x, rows, first, last).float() - low[range_R, None]
        value_RI.mul_(inverse[range_R, None])
        if stochastic:
            u = _uniform(first * rows.inner, last * rows.inner, seed, x.device, 16)
            value_RI.add_(u.view(value_RI.shape))
        else:
            value_RI.add_(0.5)
        codes_RI = value_RI.nan_to_num_(nan=0.0).floor_().clamp_(0, (1 << bits) - 1).to(torch.uint8)
        out[first * stride : last * stride] = _pack(codes_RI, bits).view(-1)


def quantize_rows_extremes(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    quantize_rows(x, out, rows, low, step, bits=bits, stochastic=stochastic, seed=seed)
    return row_extremes(x, rows)


def learn_ranges(known: Tensor, low: Tensor, high: Tensor, decay: float) -> tuple[Tensor, bool, float]:
    learned = known * decay + torch.stack((high - low, low)) * (1 - decay)
    width, beta = learned - known
    moved = torch.maximum(beta.abs(), (beta + width).abs())
    share = torch.where(moved == 0, 0.0, moved / learned[0])
    whole = torch.isfinite(2 * torch.maximum(high, -low)).all()
    largest = share.amax() if share.numel() else whole.new_zeros((), dtype=torch.float32)
    finite, far = torch.stack((whole.float(), largest)).tolist()
    return learned, bool(finite), far


def dequantize_rows(codes: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int) -> None:
    stride = -(-rows.inner * bits // 8)
    for first, last, range_R in _runs(rows, out.device):
        packed = codes[first * stride : last * stride].view(last - first, stride)
        value_RI = _unpack(packed, bits, rows.inner).to(torch.float32)
        _rows_of(out, rows, first, last).copy_(value_RI.mul_(step[range_R, None]).add_(low[range_R, None]))


def _planes(x: Tensor, nbytes: int) -> Iterator[tuple[int, slice, slice]]:
    """(bit, bytes, elements) of a mask of x: which elements have this bit of these bytes, at most CHUNK at a time."""
    for begin in range(0, nbytes, CHUNK):
        for bit in range(8):
            at = bit * nbytes + begin
            count = min(CHUNK, nbytes - begin, x.numel() - at)
            if count > 0:
                yield bit, slice(begin, begin + count), slice(at, at + count)


def mask_positive(x: Tensor, out: Tensor) -> None:
    out.zero_()
    for bit, bytes_, elements in _planes(x, out.numel()):
        out[bytes_] |= (~(x.view(-1)[elements] <= 0)).to(torch.uint8) << bit  # NaN is kept


def apply_mask(mask: Tensor, x: Tensor, out: Tensor, factor: float = 1.0) -> None:
    for bit, bytes_, elements in _planes(x, mask.numel()):
        kept = (mask[bytes_] >> bit) & 1 != 0
        out.view(-1)[elements] = torch.where(kept, x.view(-1)[elements].float() * factor, 0.0).to(out.dtype)


def pool_places(position: Tensor, out: Tensor, windows: Windows) -> None:
    position = position.int().view(_shape_of(windows))
    row = position.div(windows.width, rounding_mode="floor")
    position.add_(row, alpha=windows.kernel - windows.width).sub_(_begins(windows, windows.kernel, position.device))
    out.view(position.shape).copy_(position)


def pool_positions(places: Tensor, out: Tensor, windows: Windows) -> None:
    place = places.int().view(_shape_of(windows))
    row = place.div(windows.kernel, rounding_mode="floor")
    place.add_(row, alpha=windows.width - windows.kernel).add_(_begins(windows, windows.width, place.device))
    out.view(place.shape).copy_(place)


def _shape_of(windows: Windows) -> tuple[int, int, int, int]:
    return windows.outer, windows.rows, windows.columns, windows.inner


def _begins(windows: Windows, columns: int, device: torch.device) -> Tensor:
    """Where windows begin, in rows of so many columns: int32, (rows, columns, 1)."""
    (down, across), (above, before) = windows.stride, windows.padding
    row = torch.arange(windows.rows, dtype=torch.int32, device=device) * down - above
    column = torch.arange(windows.columns, dtype=torch.int32, device=device) * across - before
    return (row[:, None] * columns + column)[:, :, None]


# ---- fixed point -----------------------------------------------------------------------------------------------------


def fixed_quantize(x: Tensor, out: Tensor, unit: float, limit: int) -> tuple[float, int]:
    top = torch.tensor(float(limit), dtype=torch.float32)
    top = (top if int(top) <= limit else torch.nextafter(top, torch.zeros(()))).to(x.device)
    largest = torch.zeros((), dtype=torch.int32, device=x.device)
    checksum = torch.zeros((), dtype=torch.int64, device=x.device)
    for begin in range(0, x.numel(), CHUNK):
        part = x[begin : begin + CHUNK]
        largest = torch.maximum(largest, (part.view(torch.int32) & MAGNITUDE).max())
        scaled = (part * (1.0 / unit)).round_()
        scaled = torch.where(scaled < top, scaled, top)
        codes = torch.where(scaled > -top, scaled, -top).to(torch.int32)
        out[begin : begin + CHUNK] = codes
        odd = torch.arange(begin, begin + part.numel(), device=x.device).mul_(2).add_(1)
        checksum += (codes * odd).sum()
    return float(largest.view(torch.float32)), int(checksum) & UINT32


def fixed_sum(source: Tensor, starts: Sequence[int], out: Tensor) -> None:
    out.copy_(source[starts[0] :][: out.numel()])
    for start in starts[1:]:
        out += source[start:][: out.numel()]


def fixed_decode(packet: Tensor, source: Tensor, starts: Sequence[int], total: Tensor) -> None:
    rest = packet.clone()
    for start in starts:
        rest -= source[start:][: packet.numel()]
    total += rest


def fixed_dequantize(total: Tensor, out: Tensor, factor: float) -> None:
    for begin in range(0, total.numel(), CHUNK):
        out[begin : begin + CHUNK] = total[begin : begin + CHUNK].double() * factor


# ---- selection -------------------------------------------------------------------------------------------------------


def _kth_largest(magnitudes: Tensor, k: int) -> Tensor:
    return torch.topk(magnitudes, k, sorted=False).values.amin()


def _indices(chosen: Tensor) -> Tensor:
    """Where a mask is set: sorted int32."""
    return chosen.nonzero().view(-1).to(torch.int32)


def _largest(magnitudes: Tensor, k: int) -> Tensor:
    """Sorted int32 indices of the k largest, ties to the lower index."""
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=magnitudes.device)
    threshold = _kth_largest(magnitudes, k)
    above = _indices(magnitudes > threshold)
    ties = _indices(magnitudes == threshold)
    return torch.cat([above, ties[: k - above.numel()]]).sort().values


def select_topk(x: Tensor, k: int, *, sampled: bool = False, seed: int = 0) -> Tensor:
    n = x.numel()
    magnitudes = _magnitudes(x)
    if sampled and 0 < k < n:
        sample = magnitudes[_strata(n, sample_size(n, k), seed, x.device)]
        survivors = _indices(magnitudes >= _kth_largest(sample, sample_rank(n, k)))
        if survivors.numel() <= k:
            return survivors
        return survivors[_largest(magnitudes[survivors], k)]
    return _largest(magnitudes, k)


def select_topk_rows(x: Tensor, k: int) -> Tensor:
    rows, width = x.shape
    parts = [select_topk(x[r], k) + r * width for r in range(rows)]
    return torch.cat(parts).to(torch.int32) if parts else torch.empty(0, dtype=torch.int32, device=x.device)


def select_threshold(x: Tensor, value: float) -> Tensor:
    return _indices(_magnitudes(x) >= torch.tensor(value, dtype=torch.float32).view(torch.int32).item())


def randomk_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    return _strata(n, k, seed, device).to(torch.int32)


def compensate(x: Tensor, residual: Tensor, *, below: float = math.inf) -> bool:
    for begin, end, _ in _pieces(x.numel(), CHUNK):
        old = residual[begin:end].clone()
        residual[begin:end] += x[begin:end]
        x[begin:end] = old
    return all_finite(residual, below=below)


def compensate_select_topk(
    x: Tensor, residual: Tensor, k: int, *, sampled: bool = False, seed: int = 0
) -> tuple[bool, Tensor, Tensor]:
    finite = compensate(x, residual)
    at = select_topk(residual, k, sampled=sampled, seed=seed)
    return finite, at, residual[at]


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
    finite, at, values = compensate_select_topk(x, residual, k, sampled=sampled, seed=seed)
    if finite:
        n, number, cut = x.numel(), at.numel(), 4 * k
        end = cut + elias_fano_nbytes(k, n)
        out[4 * number :] = 0
        out[: 4 * number].view(torch.float32).copy_(values)
        elias_fano_encode(torch.cat([at, at.new_full((k - number,), n - 1)]), n, out[cut:end])
        if subtract:
            residual[at] = 0.0
    return finite


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
    oldest = before.clone()
    before.copy_(now + ((now - oldest) * momentum + x * scale))
    x.copy_(oldest)
    owed = before + (before - now) * momentum if nesterov else before
    if not all_finite(owed):
        return False, torch.empty(0, dtype=torch.int32, device=x.device), x.new_empty(0), threshold
    at = select_topk(owed, k, seed=seed)
    return True, at, owed[at], 0.0


def forget(
    now: Tensor, before: Tensor, indices: Tensor, *, momentum: float, nesterov: bool = False, masking: bool = True
) -> Tensor:
    old = now[indices]
    velocity = torch.zeros_like(old) if masking else before[indices] - old
    held = velocity * -momentum if nesterov else torch.zeros_like(old)
    before[indices] = held
    now[indices] = held - velocity
    return old


def difference(x: Tensor, base: Tensor, out: Tensor, *, below: float = math.inf) -> bool:
    torch.sub(x, base, out=out)
    return all_finite(out, below=below)


def all_zero(x: Tensor) -> bool:
    return not bool(x.any())


def all_finite(x: Tensor, *, below: float = math.inf) -> bool:
    limit = torch.tensor(min(below, math.inf), dtype=torch.float32).view(torch.int32)
    tops = [_magnitudes(x[begin:end]).amax() for begin, end, _ in _pieces(x.numel(), CHUNK)]
    return not tops or bool(torch.stack(tops).amax().cpu() < limit)


# ---- sparse vectors --------------------------------------------------------------------------------------------------


def check_indices(indices: Tensor, n: int) -> None:
    if indices.numel() and (indices[0] < 0 or indices[-1] >= n or bool((indices[1:] < indices[:-1]).any())):
        raise PayloadError(f"indices must be sorted and in [0, {n}): the payload is damaged, or not for this tensor")


def sparse_accumulate(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    out.index_add_(0, indices, values * weight)


def sparse_sum(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], weight: float = 1.0) -> None:
    out.zero_()
    for indices, values in parts:
        sparse_accumulate(out, indices, values, weight)


def _bits_to_bytes(bits: Tensor) -> Tensor:
    """Zeros and ones (uint8) to bytes, eight at a time, the first in the lowest bit; zeros fill the last byte."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _bytes_to_bits(packed: Tensor) -> Tensor:
    """The inverse of :func:`_bits_to_bytes`: eight zeros and ones (uint8) per byte."""
    return ((packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1).view(-1)


def _low_bits_pieces(k: int, low_bits: int) -> Iterator[tuple[int, int, int, int]]:
    """(first index, last index, first byte, last byte) of runs whose low bits are about CHUNK and start at a byte."""
    run = max(CHUNK // (8 * max(low_bits, 1)), 1) * 8
    for first in range(0, k, run):
        last = min(first + run, k)
        yield first, last, first * low_bits // 8, -(-last * low_bits // 8)


def elias_fano_encode(indices: Tensor, n: int, out: Tensor) -> None:
    k = indices.numel()
    if k == 0:
        return
    low_bits = elias_fano_low_bits(k, n)
    cut = -(-2 * k // 8)
    upper = torch.zeros(2 * k, dtype=torch.uint8, device=indices.device)
    upper[(indices >> low_bits).long() + torch.arange(k, device=indices.device)] = 1
    out[:cut] = _bits_to_bytes(upper)
    shifts_L = torch.arange(low_bits, dtype=torch.int32, device=indices.device)
    for first, last, begin, end in _low_bits_pieces(k, low_bits):
        bits_KL = (indices[first:last, None] >> shifts_L) & 1
        out[cut + begin : cut + end] = _bits_to_bytes(bits_KL.to(torch.uint8).view(-1))


def elias_fano_decode(payload: Tensor, k: int, n: int) -> Tensor:
    indices = torch.empty(k, dtype=torch.int32, device=payload.device)
    if k == 0:
        return indices
    damaged = PayloadError(f"the Elias–Fano part does not hold {k} sorted indices below {n}: the payload is damaged")
    low_bits = elias_fano_low_bits(k, n)
    cut = -(-2 * k // 8)
    positions = _bytes_to_bits(payload[:cut]).nonzero().view(-1)
    if positions.numel() != k:
        raise damaged
    upper = positions.sub_(torch.arange(k, device=payload.device))
    if upper[-1] << low_bits >= n:
        raise damaged
    shifts_L = torch.arange(low_bits, dtype=torch.int32, device=payload.device)
    for first, last, begin, end in _low_bits_pieces(k, low_bits):
        bits = _bytes_to_bits(payload[cut + begin : cut + end])[: (last - first) * low_bits].to(torch.int32)
        lower = (bits.view(last - first, low_bits) << shifts_L).sum(1, dtype=torch.int64)
        indices[first:last] = (upper[first:last] << low_bits) | lower
    if indices[-1] >= n or bool((indices[1:] < indices[:-1]).any()):
        raise damaged
    return indices


def sparse_sum_rows(out: Tensor, payloads: Tensor, k: int, weight: float = 1.0) -> None:
    n, cut = out.numel(), 4 * k
    end = cut + elias_fano_nbytes(k, n)
    parts = [(elias_fano_decode(row[cut:end], k, n), row[:cut].view(torch.float32)) for row in payloads]
    sparse_sum(out, parts, weight)


# ---- low rank --------------------------------------------------------------------------------------------------------


def low_rank_product(out: Tensor, p: Tensor, q: Tensor, *, weight: float = 1.0, accumulate: bool = False) -> None:
    rows, some = out.view(p.shape[1], q.shape[1]), max(1, CHUNK // q.shape[1])
    for begin in range(0, p.shape[1], some):
        part = rows[begin : begin + some]
        total = _sum_up(p[:, begin : begin + some], q) * weight
        if accumulate:
            part.add_(total)
        else:
            part.copy_(total)


def compensate_project(
    x: Tensor, owed: Tensor, q: Tensor, p: Tensor, *, said: tuple[Tensor, Tensor] | None = None, below: float = math.inf
) -> bool:
    old = owed.clone()
    if said is not None:
        low_rank_product(owed, *said, weight=-1.0, accumulate=True)
    owed.add_(x)
    x.copy_(old)
    torch.mm(q, owed.view(p.shape[1], -1).T, out=p)
    return all_finite(owed, below=below)


def _sum_up(p: Tensor, q: Tensor) -> Tensor:
    """pᵀ·q, term by term."""
    total = p[0, :, None] * q[0]
    for k in range(1, p.shape[0]):
        total += p[k, :, None] * q[k]
    return total


def orthonormalize(p: Tensor) -> Tensor:
    rows, out = p.double(), torch.zeros(p.shape, dtype=torch.float64, device=p.device)
    for j in range(p.shape[1]):
        row = rows[:, j : j + 1]
        before = row.square().sum(-1, keepdim=True)
        for _ in range(2):  # Gram and Schmidt, once more for what rounding left
            row = row - (row @ out[:, :j].mT) @ out[:, :j]
        rest = row.square().sum(-1, keepdim=True)
        dependent = rest <= DEPENDENT * before
        out[:, j : j + 1] = torch.where(dependent, 0.0, row / torch.where(dependent, 1.0, rest).sqrt())
    return out.float()


# ---- choice ----------------------------------------------------------------------------------------------------------


def cheapest_within(cost: Tensor, weight: Tensor, capacity: int) -> Tensor:
    rows = cost.shape[0]
    least = torch.zeros(capacity + 1, dtype=torch.float64)  # for each weight, of the rows so far
    chosen = torch.full((rows, capacity + 1), -1, dtype=torch.int32)
    for row in range(rows):
        now = torch.full_like(least, math.inf)
        for item, (own, w) in enumerate(zip(cost[row].tolist(), weight[row].tolist(), strict=True)):
            if w <= capacity and own < math.inf:
                total = least[: capacity + 1 - w] + own
                better = total < now[w:]
                now[w:][better] = total[better]
                chosen[row, w:][better] = item
        least = now
    out = torch.full((rows,), -1, dtype=torch.int32)
    left = capacity
    for row in reversed(range(rows)):
        item = int(chosen[row, left])
        if item < 0:
            return torch.full_like(out, -1)
        out[row] = item
        left -= int(weight[row, item])
    return out
