"""Compiles the loops that channels need, once at set-up, so that no micro-batch waits for a compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband import kernels
from narrowband.kernels.compiling import announced
from narrowband.pipeline.channel import At, Channel

if TYPE_CHECKING:
    from narrowband.codecs import Codec
    from narrowband.feedback import Compression

__all__ = ["warm_up"]

#: Shapes that together need all loops. Small tensors take one thread, large ones several. Top-k samples runs of
#: neighbouring elements where there are enough, and single elements elsewhere, or where runs misled it.
_SHAPES = ((4, 256), (4, 4096), (4, 65536))

#: Pairs of specs whose loops are compiled.
_done: set[str] = set()


def warm_up(forward: str | Codec | Compression, backward: str | Codec | Compression) -> None:
    """Compile or load every loop that a boundary needs on the CPU; announce it if that takes time."""
    what = f"{forward} forward and {backward} backward"
    if what in _done:
        return
    with announced(what):
        for shape in _SHAPES:
            there = Channel(forward)
            back = Channel(backward, forward=there)
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
            for channel in (there, back):
                _use_once(channel, x)
    _done.add(what)


def _use_once(channel: Channel, x: torch.Tensor) -> None:
    kernels.all_finite(x.view(-1))
    if channel.by_sample:  # its buffers may be in files: call only the loops that packing uses
        flat = x.view(-1)
        kernels.difference(flat, flat, torch.empty_like(flat))
        channel.codec.decode(channel.codec.encode(x), torch.empty_like(x))
        return
    steps = 1 if channel.reuses or channel.keeps_places else 2  # a gradient takes the indices of one message
    for step in range(steps):
        channel.pack(x, At(step, 0), arrived=torch.empty_like(x))
