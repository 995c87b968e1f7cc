"""Rotated quantization in Triton. A program has some groups, a row each, and rotates them in registers.

All loops are for several tensors at once, because launching a loop takes longer than running it on a small layer. The
rows of a tensor's last program that are behind its end are rows of zeros, which are not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, INFINITE, MAGNITUDE, TINY, code_of, fold_seed, mix
from narrowband.kernels.cuda.launching import Segments, kernel, segment
from narrowband.kernels.findings import holds, open_place
from narrowband.kernels.reference import rotated as reference
from narrowband.kernels.rotated import SPACINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["dequantize_rotated", "dequantize_rotated_means", "quantize_rotated", "quantize_rotated_all"]

#: The bits of the smallest exponent, and of the largest whose inverse is a normal number.
_LEAST, _MOST = tl.constexpr(1 << 23), tl.constexpr(253 << 23)


@kernel
def _stage(v, ROWS: tl.constexpr, WIDTH: tl.constexpr, APART: tl.constexpr):
    """Do the stage of a rotation whose pairs are ``APART`` elements apart."""
    pairs = tl.permute(tl.reshape(v, (ROWS * (WIDTH // (2 * APART)), 2, APART)), (0, 2, 1))
    first, second = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (ROWS, WIDTH))


@kernel
def _rotated(v, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """Return ``H·v`` of each row."""
    for stage in tl.static_range(STAGES):
        v = _stage(v, ROWS, WIDTH, 1 << stage)
    return v


@kernel
def _halved(v, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Add the second half of each row to the first."""
    first, second = tl.split(tl.permute(tl.reshape(v, (ROWS, 2, HALF)), (0, 2, 1)))
    return first + second


@kernel
def _total(v, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """Return the sum of each row, taken in pairs."""
    for stage in tl.static_range(STAGES):
        v = _halved(v, ROWS, WIDTH >> (stage + 1))
    return tl.reshape(v, (ROWS,))


@kernel
def _signed(v, j, folded):
    """Multiply rows by the diagonal of D."""
    signs = (mix((j + folded).to(tl.uint32)) >> 31) << 31
    return (v.to(tl.int32, bitcast=True) ^ signs.to(tl.int32, bitcast=True)[None, :]).to(tl.float32, bitcast=True)


@kernel
def _parts(payload, n, WIDTH: tl.constexpr):
    """Return where the steps and the codes of a payload of n elements begin."""
    groups = (n + WIDTH - 1) // WIDTH
    steps = (payload + 4).to(tl.pointer_type(tl.float32))
    return steps, (payload + 4 + 4 * groups).to(tl.pointer_type(tl.uint8))


@kernel
def _write_plane(
    code, out, there, BITS: tl.constexpr, PLANE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Write the bytes of a plane of this width; ``out`` has the addresses where the codes of rows begin."""
    down: tl.constexpr = BITS // (2 * PLANE) * (2 * PLANE)  # wider planes hold lower bits, and come first
    parts: tl.constexpr = 8 // PLANE
    stride: tl.constexpr = WIDTH // parts
    bits = tl.reshape((code >> down) & ((1 << PLANE) - 1), (ROWS, parts, stride))
    byte = tl.sum(bits << (tl.arange(0, parts) * PLANE)[None, :, None], 1)
    place = out[:, None] + (WIDTH * down // 8 + tl.arange(0, stride))[None, :]
    tl.store(place, byte.to(tl.uint8), mask=there[:, None])


@kernel
def _read_plane(
    codes, there, BITS: tl.constexpr, PLANE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Return the bits of codes that a plane of this width holds, shifted into their place."""
    down: tl.constexpr = BITS // (2 * PLANE) * (2 * PLANE)
    parts: tl.constexpr = 8 // PLANE
    stride: tl.constexpr = WIDTH // parts
    place = codes[:, None] + (WIDTH * down // 8 + tl.arange(0, stride))[None, :]
    byte = tl.load(place, mask=there[:, None], other=0).to(tl.int32)
    bits = (byte[:, None, :] >> (tl.arange(0, parts) * PLANE)[None, :, None]) & ((1 << PLANE) - 1)
    return tl.reshape(bits, (ROWS, WIDTH)) << down


@kernel
def _quantize(
    table, count, place, spacing, shift, top, middle, limit, decay,
    BITS: tl.constexpr, FEEDBACK: tl.constexpr, NOTES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Quantize several tensors. With FEEDBACK, quantize sums with residuals, and update x and residual."""
    own, part = segment(table, count, 6, SEGMENTS)
    x = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    residual = tl.load(own + 2).to(tl.pointer_type(tl.float32))
    payload = tl.load(own + 3)
    folded, n = tl.load(own + 4).to(tl.int32), tl.load(own + 5)
    steps, codes = _parts(payload, n, WIDTH)
    tl.store(payload.to(tl.pointer_type(tl.int32)), folded, mask=part == 0)
    g = part * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDTH)
    element = (g * WIDTH)[:, None] + j[None, :]
    inside, there = element < n, g * WIDTH < n
    v = tl.load(x + element, mask=inside, other=0.0)
    old = v
    if FEEDBACK:
        old = tl.load(residual + element, mask=inside, other=0.0)
        v = old * decay + v
    most = tl.max(v.to(tl.int32, bitcast=True) & MAGNITUDE, 1)
    finite = most < INFINITE
    large = most.to(tl.float32, bitcast=True) >= TINY
    exponent = tl.minimum(tl.maximum(most & INFINITE, _LEAST), _MOST)
    scaled = v * (-(exponent - (_MOST + _LEAST))).to(tl.float32, bitcast=True)[:, None]
    square = _total(scaled * scaled, ROWS, WIDTH, STAGES)
    y = _rotated(_signed(scaled, j, folded), ROWS, WIDTH, STAGES)
    inverse = tl.where(large, tl.div_rn(tl.zeros_like(square) + 1.0, tl.sqrt_rn(square) * spacing), 0.0)
    code = tl.where(finite[:, None], code_of(y, 0.0, inverse[:, None], shift, top), 0)
    level = code.to(tl.float32) - middle
    step = tl.div_rn(square, _total(y * level, ROWS, WIDTH, STAGES)) * exponent.to(tl.float32, bitcast=True)
    step = tl.where(large & (step >= TINY), step, 0.0)
    step = tl.where(finite & (step * limit < float("inf")), step, float("nan"))
    tl.store(steps + g, step, mask=there)
    if NOTES:
        bad = (step != step) & there  # noqa: PLR0124 - NaN
        tl.atomic_or(place, 1, mask=tl.max(bad.to(tl.int32), 0) > 0)
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            _write_plane(code, codes + g * (WIDTH * BITS // 8), there, BITS, 8 >> plane, ROWS, WIDTH)
    if FEEDBACK:
        decoded = _signed(_rotated(level * step[:, None], ROWS, WIDTH, STAGES), j, folded)
        tl.debug_barrier()  # a thread may store what another has loaded
        tl.store(x + element, old, mask=inside)
        tl.store(residual + element, v - decoded, mask=inside)


@kernel
def _means(
    table, count, ranks, apart, middle, weight,
    BITS: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Decode weighted sums over ranks for several tensors; a tensor's payloads are a fixed number of bytes apart."""
    own, part = segment(table, count, 4, SEGMENTS)
    out = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    payload, n = tl.load(own + 2), tl.load(own + 3)
    g = part * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDTH)
    element = (g * WIDTH)[:, None] + j[None, :]
    inside, there = element < n, g * WIDTH < n
    nothing = -0.0  # changes no number that is added to it, not even +0
    total = tl.full((ROWS, WIDTH), nothing, tl.float32)
    if ACCUMULATE:
        total = tl.load(out + element, mask=inside, other=0.0)
    for _rank in range(ranks):
        steps, codes = _parts(payload, n, WIDTH)
        step = tl.load(steps + g, mask=there, other=0.0)
        source = codes + g * (WIDTH * BITS // 8)
        code = tl.zeros((ROWS, WIDTH), tl.int32)
        for plane in tl.static_range(4):
            if BITS & (8 >> plane):
                code |= _read_plane(source, there, BITS, 8 >> plane, ROWS, WIDTH)
        value = _rotated((code.to(tl.float32) - middle) * step[:, None], ROWS, WIDTH, STAGES)
        total += _signed(value, j, tl.load(payload.to(tl.pointer_type(tl.int32)))) * weight
        payload += apart
    tl.store(out + element, total, mask=inside)


def _tile(group: int) -> dict[str, Any]:
    """Return the constants of the loops that depend on the length of a group."""
    return {"ROWS": max(1, BLOCK // group), "WIDTH": group, "STAGES": group.bit_length() - 1}


def _aligned(payloads: Sequence[Tensor]) -> bool:
    """Whether steps can be read and written as floats."""
    return all(own.data_ptr() % 4 == 0 for own in payloads)


def quantize_rotated(x: Tensor, out: Tensor, *, bits: int, group: int, seed: int = 0) -> None:
    if not _aligned([out]):
        reference.quantize_rotated(x, out, bits=bits, group=group, seed=seed)
        return
    _quantize_all([x], [out], [x], [seed], x, bits=bits, group=group, FEEDBACK=False, NOTES=False)


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
    if not _aligned(outs):
        return reference.quantize_rotated_all(
            xs, outs, bits=bits, group=group, seeds=seeds, residuals=residuals, decay=decay
        )
    place, finite = open_place(xs[0].device), True
    note = xs[0] if place is None else place
    notes = {"FEEDBACK": bool(residuals), "NOTES": place is not None}
    _quantize_all(xs, outs, residuals or xs, seeds, note, bits=bits, group=group, decay=decay, **notes)
    for x, out in zip(xs, outs, strict=True) if place is None else ():
        steps = out[4 : 4 + 4 * -(-x.numel() // group)].view(torch.float32)
        finite &= holds(~steps.isnan().any())
    return finite


def _quantize_all(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    seeds: Sequence[int],
    note: Tensor,
    *,
    bits: int,
    group: int,
    decay: float = 1.0,
    **constants: bool,
) -> None:
    tile, segments = _tile(group), Segments(xs[0])
    for x, residual, out, seed in zip(xs, residuals, outs, seeds, strict=True):
        programs = -(-x.numel() // (tile["ROWS"] * group))
        segments.add(programs, x.data_ptr(), residual.data_ptr(), out.data_ptr(), fold_seed(seed), x.numel())
    top = (1 << bits) - 1
    numbers = SPACINGS[bits], float(1 << (bits - 1)), float(top), top / 2, group * top / 2, float(decay)
    segments.run(_quantize, note, *numbers, BITS=bits, **constants, **tile)


def dequantize_rotated(
    payload: Tensor,
    out: Tensor,
    *,
    bits: int,
    group: int,
    weight: float = 1.0,
    accumulate: bool = False,
) -> None:
    if not _aligned([payload]):
        reference.dequantize_rotated(payload, out, bits=bits, group=group, weight=weight, accumulate=accumulate)
        return
    whole = [slice(0, payload.numel())]
    _add_up(payload[None], whole, [out], weight, bits=bits, group=group, accumulate=accumulate)


def dequantize_rotated_means(
    payloads: Tensor,
    places: Sequence[slice],
    outs: Sequence[Tensor],
    *,
    bits: int,
    group: int,
    accumulate: bool = False,
) -> None:
    form: dict[str, Any] = {"bits": bits, "group": group, "accumulate": accumulate}
    if payloads.stride(0) % 4 or not _aligned([payloads[0, place] for place in places]):
        reference.dequantize_rotated_means(payloads, places, outs, **form)
        return
    _add_up(payloads, places, outs, 1.0 / payloads.shape[0], **form)


def _add_up(
    payloads: Tensor,
    places: Sequence[slice],
    outs: Sequence[Tensor],
    weight: float,
    *,
    bits: int,
    group: int,
    accumulate: bool,
) -> None:
    tile, segments = _tile(group), Segments(outs[0])
    for place, out in zip(places, outs, strict=True):
        programs = -(-out.numel() // (tile["ROWS"] * group))
        segments.add(programs, out.data_ptr(), payloads[0, place].data_ptr(), out.numel())
    constants = {"BITS": bits, "ACCUMULATE": accumulate, **tile}
    segments.run(_means, payloads.shape[0], payloads.stride(0), ((1 << bits) - 1) / 2, float(weight), **constants)
