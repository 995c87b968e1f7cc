"""Float32 kept in fewer bits, on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from narrowband.kernels.cpu.loops import F32, I32, MAGNITUDE, U32, At, fold_seed, inlined, loop, mix
from narrowband.kernels.cpu.threads import spread
from narrowband.kernels.stores import STORE_GROUP

if TYPE_CHECKING:
    from torch import Tensor

_GROUP = STORE_GROUP
_LEAST = -126


@loop
def _in_16(bits, out, folded, first, last):
    for i in range(first, last):
        noise = U32(mix(U32(U32(i) + folded)) >> U32(16))
        out[At(i)] = np.int16(U32(U32(bits[At(i)]) + noise) >> U32(16))


@inlined
def _power(top):
    """The exponent with which a magnitude, as bits, fits into 127."""
    if top == 0:
        return _LEAST
    exponent = I32(top >> I32(23)) - I32(126)  # of a fraction from 1/2 to 1
    fraction = I32(top & I32(0x007FFFFF))
    if I32(top >> I32(23)) == 0:  # subnormal: less than the least power takes
        return _LEAST
    exponent -= I32(7) if fraction <= I32(0x007E0000) else I32(6)
    return min(max(exponent, I32(_LEAST)), I32(127))


@loop
def _in_8(x, bits, codes, exponents, stochastic, folded, first, last):
    """Groups [first, last)."""
    for g in range(first, last):
        begin, end = g * _GROUP, min((g + 1) * _GROUP, x.size)
        top = I32(0)
        for i in range(begin, end):
            top = max(top, I32(bits[At(i)] & MAGNITUDE))
        exponent = _power(top)
        exponents[At(g)] = np.int8(exponent)
        inverse = F32(np.float64(2.0) ** np.float64(-exponent))  # exact, as is what is multiplied by it
        if stochastic:
            for j in range(end - begin):
                scaled = F32(x[At(begin + j)] * inverse)
                below = F32(np.floor(scaled))
                chance = F32(F32(I32(mix(U32(U32(begin + j) + folded)) >> U32(8))) * F32(2.0**-24))
                up = I32(1) if chance < F32(scaled - below) else I32(0)
                codes[At(begin + j)] = np.int8(I32(I32(below) + up))
        else:
            for j in range(end - begin):
                codes[At(begin + j)] = np.int8(I32(np.rint(F32(x[At(begin + j)] * inverse))))


@loop
def _from_8(codes, exponents, out, first, last):
    for g in range(first, last):
        scale = F32(np.float64(2.0) ** np.float64(exponents[At(g)]))
        for i in range(g * _GROUP, min((g + 1) * _GROUP, out.size)):
            out[At(i)] = F32(F32(codes[At(i)]) * scale)


def keep_in_16(x: Tensor, out: Tensor, *, seed: int | None) -> None:
    if seed is None:
        out.copy_(x)
        return
    arrays = x.numpy().view(np.uint32), out.view(torch.int16).numpy(), fold_seed(seed)
    spread(x.numel(), x.numel(), lambda a, b: _in_16(*arrays, a, b))


def keep_in_8(x: Tensor, codes: Tensor, exponents: Tensor, *, seed: int | None) -> None:
    values = x.numpy()
    arrays = values, values.view(np.int32), codes.numpy(), exponents.numpy(), seed is not None, fold_seed(seed or 0)
    spread(exponents.numel(), x.numel(), lambda a, b: _in_8(*arrays, a, b))


def read_from_8(codes: Tensor, exponents: Tensor, out: Tensor) -> None:
    arrays = codes.numpy(), exponents.numpy(), out.numpy()
    spread(exponents.numel(), out.numel(), lambda a, b: _from_8(*arrays, a, b))
