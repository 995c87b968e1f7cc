"""What channels need of compiled loops, done once at set-up: no micro-batch then waits for a compiler."""

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

#: Small tensors take one thread and large ones several, and top-k looks at a sample of those of enough elements.
_SHAPES = ((4, 4096), (4, 65536))

#: Specs for which it is done.
_done: set[str] = set()


def warm_up(forward: str | Codec | Compression, backward: str | Codec | Compression) -> None:
    """Have every loop compiled or loaded that a boundary needs on CPU, and say so if that takes time."""
    what = f"{forward} forward and {backward} backward"
    if what in _done:
        return
    with announced(what):
        for shape in _SHAPES:
            there = Channel(forward)
            back = Channel(backward, forward=there)
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            for channel in (there, back):
                _use_once(channel, x)
    _done.add(what)


def _use_once(channel: Channel, x: torch.Tensor) -> None:
    kernels.all_finite(x.view(-1))
    if channel.by_sample:  # whose buffers may be in files: only what it calls
        flat = x.view(-1)
        kernels.difference(flat, flat, torch.empty_like(flat))
        channel.codec.decode(channel.codec.encode(x), torch.empty_like(x))
        return
    for step in range(2):
        channel.pack(x, At(step, 0), arrived=torch.empty_like(x))
        if channel.keeps_places or channel.reuses:
            return  # the gradient takes the indices of the one message that went forward
