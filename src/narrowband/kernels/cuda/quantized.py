"""Grouped quantization in Triton. A program has some whole groups, a row each.

Groups whose length is a power of two are the usual case and have loops of their own (see
:mod:`narrowband.kernels.cuda.groups`). The general loops handle the rest at the end of a tensor, and groups of other
lengths.

A step has many small tensors, and launching a loop takes longer than running it. So there are loops for several tensors
at once, which include what error feedback does before and after quantization, and which decode the payloads of all
ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, fold_seed
from narrowband.kernels.cuda.groups import (
    MINMAX,
    PER_WARP,
    PIECES,
    SCALES,
    extremes,
    header,
    load_whole,
    not_finite,
    read_codes,
    read_whole_codes,
    rows_of_program,
    store_whole,
    value_of,
    write_codes,
    write_whole_codes,
)
from narrowband.kernels.cuda.launching import Segments, kernel, run, segment
from narrowband.kernels.findings import holds, open_place
from narrowband.kernels.quantized import levels_are_finite, packed_nbytes
from narrowband.kernels.reference import quantized as reference

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from narrowband.kernels.quantized import Scale

__all__ = ["dequantize_groups", "dequantize_means", "group_minmax", "quantize_all", "quantize_groups"]

#: Longer groups do not fit into a program's registers; planes of shorter groups do not fill a word.
_LONGEST, _SHORTEST = 8192, 32


@kernel
def _minmax(x, lows, highs, n, groups, group, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    g, begin, m = rows_of_program(n, group, ROWS)
    j = tl.arange(0, WIDTH)
    inside = j[None, :] < m[:, None]
    low, high = extremes(tl.load(x + begin[:, None] + j[None, :], mask=inside, other=0.0), inside)
    tl.store(lows + g, low, mask=g < groups)
    tl.store(highs + g, high, mask=g < groups)


@kernel
def _quantize(
    x, lows, steps, codes, n, groups, group, group_bytes, levels, shift, top, folded,
    BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    g, begin, m = rows_of_program(n, group, ROWS)
    j = tl.arange(0, WIDTH)
    inside = j[None, :] < m[:, None]
    low, step = header(tl.load(x + begin[:, None] + j[None, :], mask=inside, other=0.0), inside, m, levels, SCALE)
    if SCALE == MINMAX:
        tl.store(lows + g, low, mask=g < groups)
    tl.store(steps + g, step, mask=g < groups)
    write_codes(
        x, codes, g * group_bytes, begin, m, low, step, shift, top, folded, BITS, SCALE, STOCHASTIC, ROWS, WIDTH
    )  # fmt: skip


@kernel
def _quantize_whole(
    x, lows, steps, words, levels, shift, top, folded,
    BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    v = load_whole(x + part * (ROWS * WIDTH), ROWS, WIDTH)
    low, step = header(v, tl.full(v.shape, True, tl.int1), row * 0 + WIDTH, levels, SCALE)
    if SCALE == MINMAX:
        tl.store(lows + part * ROWS + row, low)
    tl.store(steps + part * ROWS + row, step)
    write_whole_codes(
        v, low, step, words, part, shift, top, folded, BITS, SCALE, STOCHASTIC, ROWS, WIDTH
    )  # fmt: skip


@kernel
def _dequantize_whole(
    lows, steps, words, out, offset, weight,
    BITS: tl.constexpr, HAS_LOW: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    step = tl.load(steps + part * ROWS + row)
    low = tl.zeros_like(step)
    if HAS_LOW:
        low = tl.load(lows + part * ROWS + row)
    source = words + part * (ROWS * WIDTH * BITS // 32) + row * (WIDTH * BITS // 32)
    code = read_whole_codes(source, BITS, ROWS, WIDTH)
    value = value_of(code, step[None, :, None], low[None, :, None], offset, HAS_LOW) * weight
    out += part * (ROWS * WIDTH)
    if ACCUMULATE:
        value = load_whole(out, ROWS, WIDTH) + value
    store_whole(out, value, ROWS, WIDTH)


@kernel
def _quantize_segments(
    table, count, place, levels, shift, top, offset, decay,
    BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, FEEDBACK: tl.constexpr, NOTES: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Run :func:`_quantize_whole` for several tensors. With FEEDBACK, quantize sums with residuals, and update x and
    residual.
    """
    own, part = segment(table, count, 7, SEGMENTS)
    x = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    residual = tl.load(own + 2).to(tl.pointer_type(tl.float32))
    lows = tl.load(own + 3).to(tl.pointer_type(tl.float32))
    steps = tl.load(own + 4).to(tl.pointer_type(tl.float32))
    words = tl.load(own + 5).to(tl.pointer_type(tl.int32))
    folded = tl.load(own + 6).to(tl.int32)
    row = tl.arange(0, ROWS)
    x += part * (ROWS * WIDTH)
    residual += part * (ROWS * WIDTH)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        residual = tl.multiple_of(residual, 16)
    v = load_whole(x, ROWS, WIDTH)
    old = v
    if FEEDBACK:
        old = load_whole(residual, ROWS, WIDTH)
        v = old * decay + v
    low, step = header(v, tl.full(v.shape, True, tl.int1), row * 0 + WIDTH, levels, SCALE)
    if SCALE == MINMAX:
        tl.store(lows + part * ROWS + row, low)
    tl.store(steps + part * ROWS + row, step)
    if NOTES:
        bad = not_finite(low, step, levels, SCALE, FEEDBACK)
        tl.atomic_or(place, 1, mask=tl.max(bad.to(tl.int32), 0) > 0)
    code = write_whole_codes(
        v, low, step, words, part, shift, top, folded, BITS, SCALE, STOCHASTIC, ROWS, WIDTH
    )  # fmt: skip
    if FEEDBACK:
        decoded = value_of(code, step[None, :, None], low[None, :, None], offset, SCALE == MINMAX)
        tl.debug_barrier()  # a thread may store what another has loaded
        store_whole(x, old, ROWS, WIDTH)
        store_whole(residual, v - decoded, ROWS, WIDTH)


@kernel
def _quantize_rests(
    table, count, place, group, group_bytes, levels, shift, top, offset, decay,
    BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, FEEDBACK: tl.constexpr, NOTES: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Do for the rests of several tensors what :func:`_quantize_segments` does for whole tiles.

    Threads share bytes of codes otherwise than elements: all have to have written before one reads.
    """
    own, part = segment(table, count, 10, SEGMENTS)
    x = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    residual = tl.load(own + 2).to(tl.pointer_type(tl.float32))
    lows = tl.load(own + 3).to(tl.pointer_type(tl.float32))
    steps = tl.load(own + 4).to(tl.pointer_type(tl.float32))
    codes = tl.load(own + 5).to(tl.pointer_type(tl.uint8))
    folded, n = tl.load(own + 6).to(tl.int32), tl.load(own + 7)
    end, padding = tl.load(own + 8), tl.load(own + 9)
    g = part * ROWS + tl.arange(0, ROWS)
    begin = g * group
    m = tl.minimum(n - begin, group)
    j = tl.arange(0, WIDTH)
    inside = j[None, :] < m[:, None]
    element = begin[:, None] + j[None, :]
    v = tl.load(x + element, mask=inside, other=0.0)
    if FEEDBACK:
        old = tl.load(residual + element, mask=inside, other=0.0)
        v = old * decay + v
        tl.debug_barrier()
        tl.store(x + element, old, mask=inside)
        tl.store(residual + element, v, mask=inside)
        tl.debug_barrier()
    low, step = header(v, inside, m, levels, SCALE)
    if SCALE == MINMAX:
        tl.store(lows + g, low, mask=m > 0)
    tl.store(steps + g, step, mask=m > 0)
    if NOTES:
        tl.atomic_or(
            place, 1, mask=tl.max((not_finite(low, step, levels, SCALE, FEEDBACK) & (m > 0)).to(tl.int32), 0) > 0
        )
    write_codes(
        residual, codes, g * group_bytes, begin, m, low, step, shift, top, folded, BITS, SCALE, STOCHASTIC, ROWS, WIDTH
    )  # fmt: skip
    tl.store(codes + end + j, (j * 0).to(tl.uint8), mask=part * WIDTH + j < padding)  # by the first program
    if FEEDBACK:
        tl.debug_barrier()
        code = read_codes(codes, g * group_bytes, j, m, inside, BITS, ROWS, WIDTH)
        decoded = value_of(code, step[:, None], low[:, None], offset, SCALE == MINMAX)
        tl.store(residual + element, v - decoded, mask=inside)


@kernel
def _mean_segments(
    table, count, ranks, apart, offset, weight,
    BITS: tl.constexpr, HAS_LOW: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Decode the means over ranks for several tensors; the payloads of one tensor are a fixed number of words apart."""
    own, part = segment(table, count, 5, SEGMENTS)
    out = tl.load(own + 1).to(tl.pointer_type(tl.float32)) + part * (ROWS * WIDTH)
    lows = tl.load(own + 2).to(tl.pointer_type(tl.float32)) + part * ROWS
    steps = tl.load(own + 3).to(tl.pointer_type(tl.float32)) + part * ROWS
    words = tl.load(own + 4).to(tl.pointer_type(tl.int32)) + part * (ROWS * WIDTH * BITS // 32)
    row = tl.arange(0, ROWS)
    if ALIGNED:
        out = tl.multiple_of(out, 16)
    nothing = -0.0  # changes no number that is added to it, not even +0
    total = tl.full((PIECES, ROWS, WIDTH // PIECES), nothing, tl.float32)
    if ACCUMULATE:
        total = load_whole(out, ROWS, WIDTH)
    there = part * 0
    for _rank in range(ranks):
        step = tl.load(steps + there + row)
        low = tl.zeros_like(step)
        if HAS_LOW:
            low = tl.load(lows + there + row)
        source = words + there + row * (WIDTH * BITS // 32)
        code = read_whole_codes(source, BITS, ROWS, WIDTH)
        total += value_of(code, step[None, :, None], low[None, :, None], offset, HAS_LOW) * weight
        there += apart
    store_whole(out, total, ROWS, WIDTH)


@kernel
def _mean_rests(
    table, count, ranks, apart, group, group_bytes, offset, weight,
    BITS: tl.constexpr, HAS_LOW: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Do for the rests of several tensors what :func:`_mean_segments` does for whole tiles."""
    own, part = segment(table, count, 6, SEGMENTS)
    out = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    lows = tl.load(own + 2).to(tl.pointer_type(tl.float32))
    steps = tl.load(own + 3).to(tl.pointer_type(tl.float32))
    codes = tl.load(own + 4).to(tl.pointer_type(tl.uint8))
    n = tl.load(own + 5)
    g = part * ROWS + tl.arange(0, ROWS)
    begin = g * group
    m = tl.minimum(n - begin, group)
    j = tl.arange(0, WIDTH)
    inside = j[None, :] < m[:, None]
    nothing = -0.0
    total = tl.full((ROWS, WIDTH), nothing, tl.float32)
    element = begin[:, None] + j[None, :]
    if ACCUMULATE:
        total = tl.load(out + element, mask=inside, other=0.0)
    there = part * 0
    for _rank in range(ranks):
        step = tl.load(steps + there + g, mask=m > 0, other=0.0)
        low = tl.zeros_like(step)
        if HAS_LOW:
            low = tl.load(lows + there + g, mask=m > 0, other=0.0)
        code = read_codes(codes + 4 * there, g * group_bytes, j, m, inside, BITS, ROWS, WIDTH)
        total += value_of(code, step[:, None], low[:, None], offset, HAS_LOW) * weight
        there += apart
    tl.store(out + element, total, mask=inside)


@kernel
def _dequantize(
    lows, steps, codes, out, n, group, group_bytes, offset, weight,
    BITS: tl.constexpr, HAS_LOW: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    g, begin, m = rows_of_program(n, group, ROWS)
    j = tl.arange(0, WIDTH)
    inside = j[None, :] < m[:, None]
    step = tl.load(steps + g, mask=m > 0, other=0.0)
    low = tl.zeros_like(step)
    if HAS_LOW:
        low = tl.load(lows + g, mask=m > 0, other=0.0)
    code = read_codes(codes, g * group_bytes, j, m, inside, BITS, ROWS, WIDTH)
    value = value_of(code, step[:, None], low[:, None], offset, HAS_LOW) * weight
    element = begin[:, None] + j[None, :]
    if ACCUMULATE:
        value = tl.load(out + element, mask=inside, other=0.0) + value
    tl.store(out + element, value, mask=inside)


def group_minmax(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    if group > _LONGEST:
        return reference.group_minmax(x, group)
    groups = -(-x.numel() // group)
    low, high = x.new_empty(groups), x.new_empty(groups)
    tile = _Form(8, group, "minmax").tile
    run(_minmax, -(-groups // tile["ROWS"]), x, low, high, x.numel(), groups, group, on=x, **tile)
    return low, high


class _Form:
    """Arguments of a quantizer's loops that do not depend on the tensor.

    Attributes:
        tile: rows and columns of a program's tile.
        levels: the divisor of a span, or of a magnitude.
        shift: is added before rounding down.
        top: the largest code.
        offset: the code of zero, in the symmetric scales.
        warps: of a program that has whole groups only.
    """

    def __init__(self, bits: int, group: int, scale: Scale, *, stochastic: bool = False) -> None:
        self.bits, self.group, self.scale, self.stochastic = bits, group, scale, stochastic
        centre = (1 << (bits - 1)) - 1
        ranged = scale == "minmax"
        self.levels, self.top = (
            float((1 << bits) - 1 if ranged else centre),
            float((1 << bits) - 1 if ranged else 2 * centre),
        )
        self.shift = (0.0 if ranged else float(centre)) + (0.0 if stochastic else 0.5)
        self.offset = {"minmax": 0.0, "mean": 0.5}.get(scale, float(centre))
        width = max(8, int(triton.next_power_of_2(group)))
        self.tile: dict[str, int] = {"ROWS": max(1, BLOCK // width), "WIDTH": width}
        self.warps = max(BLOCK, width) // PER_WARP

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of loops that quantize."""
        return {"BITS": self.bits, "SCALE": SCALES[self.scale], "STOCHASTIC": self.stochastic, **self.tile}

    def parts(self, payload: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (header, steps, codes) of a payload of n elements. The header is in memory aligned for floats: the
        payload's own if possible. The steps are a part of the header.
        """
        groups = -(-n // self.group)
        header = groups * (2 if self.scale == "minmax" else 1)
        own = payload[: 4 * header]
        there = own.data_ptr() % 4 == 0 and own.storage_offset() % 4 == 0
        floats = (own if there else own.clone()).view(torch.float32)
        return floats, floats[header - groups :], payload[4 * header :]

    def whole(self, n: int, codes: Tensor) -> int:
        """Return how many program tiles of whole groups the loops without masks can take."""
        if (
            self.tile["WIDTH"] != self.group
            or self.group < _SHORTEST
            or codes.data_ptr() % 4
            or codes.storage_offset() % 4
        ):
            return 0
        return n // (self.tile["ROWS"] * self.group)

    def programs(self, n: int) -> int:
        """Return how many programs of the general loops n elements take."""
        return -(-n // (self.tile["ROWS"] * self.group))

    def quantize_rest(self, x: Tensor, floats: Tensor, steps: Tensor, codes: Tensor, seed: int, done: int) -> None:
        """Quantize the groups from ``done`` on by the general loop."""
        n, groups = x.numel(), -(-x.numel() // self.group)
        if done < groups:
            first, each = done * self.group, packed_nbytes(self.group, self.bits, self.group)
            arrays = x[first:], floats[done:], steps[done:], codes[done * each :]
            numbers = n - first, groups - done, self.group, each, self.levels, self.shift, self.top
            programs = -(-(groups - done) // self.tile["ROWS"])
            run(_quantize, programs, *arrays, *numbers, fold_seed(seed, first), on=x, **self.constants)

    def dequantize_rest(
        self, floats: Tensor, steps: Tensor, codes: Tensor, out: Tensor, done: int, weight: float, *, accumulate: bool
    ) -> None:
        """Decode the groups from ``done`` on by the general loop."""
        n, groups = out.numel(), -(-out.numel() // self.group)
        if done < groups:
            first, each = done * self.group, packed_nbytes(self.group, self.bits, self.group)
            arrays = floats[done:], steps[done:], codes[done * each :], out[first:]
            numbers = n - first, self.group, each, self.offset, float(weight)
            form = {"BITS": self.bits, "HAS_LOW": self.scale == "minmax", "ACCUMULATE": accumulate, **self.tile}
            run(_dequantize, -(-(groups - done) // self.tile["ROWS"]), *arrays, *numbers, on=out, **form)


def quantize_groups(
    x: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, stochastic: bool, seed: int = 0
) -> None:
    if group > _LONGEST:
        reference.quantize_groups(x, out, bits=bits, group=group, scale=scale, stochastic=stochastic, seed=seed)
        return
    form = _Form(bits, group, scale, stochastic=stochastic)
    floats, steps, codes = form.parts(out, x.numel())
    codes[packed_nbytes(x.numel(), bits, group) :] = 0
    programs = form.whole(x.numel(), codes)
    done = programs * form.tile["ROWS"]
    if programs:
        words = codes[: done * group * bits // 8].view(torch.int32)
        numbers = form.levels, form.shift, form.top, fold_seed(seed)
        run(_quantize_whole, programs, x, floats, steps, words, *numbers, on=x, **form.constants, num_warps=form.warps)
    form.quantize_rest(x, floats, steps, codes, seed, done)
    if floats.data_ptr() != out.data_ptr():
        out[: floats.nbytes] = floats.view(torch.uint8)


def dequantize_groups(
    payload: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, weight: float = 1.0, accumulate: bool = False
) -> None:
    if group > _LONGEST:
        reference.dequantize_groups(
            payload, out, bits=bits, group=group, scale=scale, weight=weight, accumulate=accumulate
        )
        return
    form = _Form(bits, group, scale)
    floats, steps, codes = form.parts(payload, out.numel())
    programs = form.whole(out.numel(), codes)
    done = programs * form.tile["ROWS"]
    if programs:
        words = codes[: done * group * bits // 8].view(torch.int32)
        constants = {"BITS": bits, "HAS_LOW": scale == "minmax", "ACCUMULATE": accumulate, "num_warps": form.warps}
        arrays = floats, steps, words, out
        run(_dequantize_whole, programs, *arrays, form.offset, float(weight), on=out, **constants, **form.tile)
    form.dequantize_rest(floats, steps, codes, out, done, weight, accumulate=accumulate)


# ---- several tensors -------------------------------------------------------------------------------------------------


def _aligned(tensors: Iterable[Tensor]) -> bool:
    """Whether 16 bytes can be read at a time."""
    return all(x.data_ptr() % 16 == 0 for x in tensors)


def quantize_all(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor],
    *,
    bits: int,
    group: int,
    scale: Scale,
    stochastic: bool,
    seeds: Sequence[int],
    residuals: Sequence[Tensor] = (),
    decay: float = 1.0,
) -> bool:
    if group > _LONGEST or any(out.data_ptr() % 4 or out.storage_offset() % 4 for out in outs):
        return reference.quantize_all(
            xs, outs, bits=bits, group=group, scale=scale, stochastic=stochastic, seeds=seeds, residuals=residuals,
            decay=decay,
        )  # fmt: skip
    form = _Form(bits, group, scale, stochastic=stochastic)
    segments, rests = Segments(xs[0]), Segments(xs[0])
    place, headers, each = open_place(xs[0].device), [], packed_nbytes(group, bits, group)
    for x, residual, out, seed in zip(xs, residuals or xs, outs, seeds, strict=True):
        floats, steps, codes = form.parts(out, x.numel())
        end = packed_nbytes(x.numel(), bits, group)
        programs = form.whole(x.numel(), codes)
        pointers = [own.data_ptr() for own in (x, residual, floats, steps, codes)]
        segments.add(programs, *pointers, fold_seed(seed))
        done = programs * form.tile["ROWS"]
        first, padding = done * group, codes.numel() - end
        if padding and not (first < x.numel() and padding <= form.tile["WIDTH"]):
            codes[end:], padding = 0, 0
        behind = (4 * first, 4 * first, 4 * done, 4 * done, each * done)
        begins = [pointer + nbytes for pointer, nbytes in zip(pointers, behind, strict=True)]
        rest = fold_seed(seed, first), x.numel() - first, end - each * done, padding
        rests.add(form.programs(x.numel() - first), *begins, *rest)
        headers.append(floats)
    note = xs[0] if place is None else place
    numbers = form.levels, form.shift, form.top, form.offset, float(decay)
    several = {**form.constants, "FEEDBACK": bool(residuals), "NOTES": place is not None}
    aligned = _aligned((*xs, *residuals))
    segments.run(_quantize_segments, note, *numbers, ALIGNED=aligned, **several, num_warps=form.warps)
    rests.run(_quantize_rests, note, group, each, *numbers, **several)
    finite = True
    for floats in headers if place is None else ():
        finite &= holds(levels_are_finite(floats, bits=bits, scale=scale) if residuals else ~floats.isnan().any())
    return finite


def dequantize_means(
    payloads: Tensor,
    places: Sequence[slice],
    outs: Sequence[Tensor],
    *,
    bits: int,
    group: int,
    scale: Scale,
    accumulate: bool = False,
) -> None:
    ranks, apart = payloads.shape[0], payloads.stride(0)
    if group > _LONGEST or apart % 4 or payloads.data_ptr() % 4 or any(place.start % 4 for place in places):
        reference.dequantize_means(
            payloads, places, outs, bits=bits, group=group, scale=scale, accumulate=accumulate
        )  # fmt: skip
        return
    form, weight, each = _Form(bits, group, scale), 1.0 / ranks, packed_nbytes(group, bits, group)
    segments, rests = Segments(outs[0]), Segments(outs[0])
    for place, out in zip(places, outs, strict=True):
        floats, steps, codes = form.parts(payloads[0, place], out.numel())
        programs = form.whole(out.numel(), codes)
        pointers = [own.data_ptr() for own in (out, floats, steps, codes)]
        segments.add(programs, *pointers)
        done = programs * form.tile["ROWS"]
        first = done * group
        behind = (4 * first, 4 * done, 4 * done, each * done)
        begins = [pointer + nbytes for pointer, nbytes in zip(pointers, behind, strict=True)]
        rests.add(form.programs(out.numel() - first), *begins, out.numel() - first)
    constants = {"BITS": bits, "HAS_LOW": scale == "minmax", "ACCUMULATE": accumulate, **form.tile}
    numbers = ranks, apart // 4
    aligned = _aligned(outs)
    segments.run(
        _mean_segments, *numbers, form.offset, weight, ALIGNED=aligned, **constants, num_warps=form.warps
    )  # fmt: skip
    rests.run(_mean_rests, *numbers, group, each, form.offset, weight, **constants)
