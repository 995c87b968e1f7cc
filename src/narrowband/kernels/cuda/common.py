"""What the families share: how loops are started, and random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from narrowband.kernels.reference.common import fold

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BLOCK", "INFINITE", "MAGNITUDE", "fold_seed", "kernel", "mix", "run", "uniform"]

#: Elements that one program works on.
BLOCK = 2048

#: Numbers that happen to be 1 are not made constants of the program, since those have no dtype.
kernel: Any = triton.jit(do_not_specialize=["folded"])

#: All bits of a float but the sign, and those of infinity.
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)


def run(loop: Any, programs: int, *arguments: Any, on: Tensor, **constants: Any) -> None:
    """Start so many programs of a loop, on the device of a tensor and on the stream that is current there."""
    if programs:
        # The interpreter computes in NumPy, which would speak of every NaN.
        with torch.cuda.device_of(on) if on.is_cuda else np.errstate(all="ignore"):
            loop[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def fold_seed(seed: int) -> int:
    """A seed in the 32 bits that :func:`mix` is given, as a signed number: Triton then takes one type for all."""
    folded = fold(seed)
    return folded - (1 << 32) if folded >> 31 else folded


@kernel
def mix(h):
    """32 bits of another 32; see :mod:`narrowband.kernels`."""
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@kernel
def uniform(i, folded):
    """In [0, 1), of 24 bits, for an element with this index."""
    h = mix(i.to(tl.uint32) + folded.to(tl.uint32))
    return (h >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)
