"""Error feedback on a residual that is stored in fewer bits, as a sequence of Triton loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from narrowband.kernels.cuda import compensation, stores
from narrowband.kernels.cuda.launching import Segments, kernel, segment
from narrowband.kernels.kept import GROUPS
from narrowband.kernels.reference.kept import Options, kept_by_parts
from narrowband.kernels.stores import STORE_GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["compensate_kept", "take_former_all_if"]

_GROUP, _GROUPS = tl.constexpr(STORE_GROUP), tl.constexpr(GROUPS)

#: Groups of a program, which takes them tile by tile, and of a tile.
_SHARE, _TILE = 256, 32


@kernel
def _take_former_segments(
    table, count, bad, TYPE: tl.constexpr, ROOM: tl.constexpr, POWERS: tl.constexpr, SHARE: tl.constexpr,
    TILE: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Copy codes, and the powers of two of their groups, from where a gradient's memory holds them.

    ROOM is the size of a group's memory, in codes.
    """
    if tl.load(bad) != 0:
        own, part = segment(table, count, 5, SEGMENTS)
        memory = tl.load(own + 1).to(tl.pointer_type(TYPE))
        codes = tl.load(own + 2).to(tl.pointer_type(TYPE))
        n = tl.load(own + 4)
        j = tl.arange(0, _GROUP)[None, :]
        for first in range(0, SHARE, TILE):
            g = (part * SHARE + first + tl.arange(0, TILE))[:, None]
            inside = g * _GROUP + j < n
            tl.store(codes + g * _GROUP + j, tl.load(memory + g * ROOM + j, mask=inside), mask=inside)
        if POWERS:
            behind = tl.load(own + 1).to(tl.pointer_type(tl.int8))
            powers = tl.load(own + 3).to(tl.pointer_type(tl.int8))
            g = part * SHARE + tl.arange(0, SHARE)
            block = g // _GROUPS
            codes_there = tl.minimum(n - block * (_GROUPS * _GROUP), _GROUP)  # of the first of these groups
            at = block * (4 * _GROUPS * _GROUP) + codes_there + g % _GROUPS
            tl.store(powers + g, tl.load(behind + at, mask=g * _GROUP < n), mask=g * _GROUP < n)


def take_former_all_if(
    bad: Tensor, xs: Sequence[Tensor], codes: Sequence[Tensor], exponents: Sequence[Tensor | None]
) -> None:
    segments, powers = Segments(xs[0]), exponents[0] is not None
    for x, own, scales in zip(xs, codes, exponents, strict=True):
        programs = -(-x.numel() // (STORE_GROUP * _SHARE))
        segments.add(programs, x.data_ptr(), own.data_ptr(), 0 if scales is None else scales.data_ptr(), x.numel())
    kind, room = (tl.int8, 4 * STORE_GROUP) if powers else (tl.int16, 2 * STORE_GROUP)
    segments.run(_take_former_segments, bad, TYPE=kind, ROOM=room, POWERS=powers, SHARE=_SHARE, TILE=_TILE)


def compensate_kept(
    x: Tensor,
    codes: Tensor,
    exponents: Tensor | None,
    k: int,
    *,
    decay: float = 1.0,
    sampled: bool = False,
    seed: int = 0,
    rounding: int = 0,
) -> tuple[bool, Tensor, Tensor]:
    options = Options(decay, sampled, seed, rounding)
    return kept_by_parts(stores, compensation, x, codes, exponents, k, options)
