"""Masks and places of maxima, in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference import common

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from narrowband.kernels.masks import Windows

__all__ = [
    "apply_mask",
    "mask_between",
    "pool_places",
    "pool_positions",
]


def _planes(x: Tensor, nbytes: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (bit, bytes, elements) of a mask of x: the elements that have this bit of these bytes, at most CHUNK."""
    for begin in range(0, nbytes, common.CHUNK):
        for bit in range(8):
            at = bit * nbytes + begin
            count = min(common.CHUNK, nbytes - begin, x.numel() - at)
            if count > 0:
                yield bit, slice(begin, begin + count), slice(at, at + count)


def mask_between(x: Tensor, out: Tensor, low: float = 0.0, high: float = math.nan) -> None:
    out.zero_()
    for bit, bytes_, elements in _planes(x, out.numel()):
        own = x.view(-1)[elements].float()
        out[bytes_] |= (~((own <= low) | (own >= high))).to(torch.uint8) << bit  # NaN sets its bit


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
    """Return where windows begin, in planes with rows of ``columns``: int32, (rows, columns, 1)."""
    (down, across), (above, before) = windows.stride, windows.padding
    row = torch.arange(windows.rows, dtype=torch.int32, device=device) * down - above
    column = torch.arange(windows.columns, dtype=torch.int32, device=device) * across - before
    return (row[:, None] * columns + column)[:, :, None]
