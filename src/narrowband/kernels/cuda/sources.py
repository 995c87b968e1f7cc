"""Where the elements of a selection come from, in Triton.

The sums of a step (:mod:`~narrowband.kernels.cuda.compensation`, :mod:`~narrowband.kernels.cuda.momentum`) are computed
in the pass that reads them first. A :class:`Source` is up to three arrays, and the formula of an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton.language as tl

from narrowband.kernels.cuda.common import MAGNITUDE
from narrowband.kernels.cuda.launching import kernel

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AHEAD", "COMPENSATE", "MOMENTUM", "NESTEROV", "Source", "forget_at", "look"]

#: The formula by which an element is computed from arrays a, b, c and numbers f, g; see :class:`Source`. The last three
#: also write: the new value into the last array, and that array's old value into the first.
PLAIN, AHEAD, COMPENSATE, MOMENTUM, NESTEROV = range(5)
_AHEAD, _COMPENSATE, _NESTEROV = tl.constexpr(AHEAD), tl.constexpr(COMPENSATE), tl.constexpr(NESTEROV)


@dataclass(frozen=True)
class Source:
    """Where elements come from.

    Attributes:
        kind: PLAIN: a. AHEAD: a + f·(a − b). COMPENSATE: f·b + a, which becomes b. MOMENTUM: b + (f·(b − c) + g·a),
            which becomes c. NESTEROV: the same new c, and the element is c + f·(c − b).
    """

    kind: int
    a: Tensor
    b: Tensor
    c: Tensor
    f: float = 0.0
    g: float = 0.0

    @classmethod
    def plain(cls, x: Tensor) -> Source:
        """Return the source whose elements are those of a tensor."""
        return cls(PLAIN, x, x, x)

    @property
    def total(self) -> Tensor:
        """The array that holds the elements, or what they are computed from, once they have been written."""
        return self.b if self.kind == COMPENSATE else self.c if self.kind in (MOMENTUM, NESTEROV) else self.a

    @property
    def kind_after(self) -> int:
        """The formula of the same elements once they have been written: of :attr:`total`, b and f."""
        return AHEAD if self.kind in (NESTEROV, AHEAD) else PLAIN

    def after(self) -> Source:
        """Return the source of the same elements once they have been written."""
        return Source(self.kind_after, self.total, self.b, self.b, self.f)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.a, self.b, self.c, self.f, self.g


@kernel
def look(a, b, c, f, g, i, there, KIND: tl.constexpr, WRITE: tl.constexpr):
    """Return elements of a source, and their magnitudes as integers: −1 where there is no element.

    In a small tile, several threads have the same element, so all have to have read before one writes.
    """
    value = tl.load(a + i, mask=there, other=0.0)
    if KIND > 0:
        gradient, old = value, tl.load(b + i, mask=there, other=0.0)
        if KIND == _AHEAD:
            value = gradient + (gradient - old) * f
        elif KIND == _COMPENSATE:
            value = old * f + gradient
            if WRITE:
                tl.debug_barrier()
                tl.store(a + i, old, mask=there)
                tl.store(b + i, value, mask=there)
        else:
            oldest = tl.load(c + i, mask=there, other=0.0)
            value = old + ((old - oldest) * f + gradient * g)
            if WRITE:
                tl.debug_barrier()
                tl.store(a + i, oldest, mask=there)
                tl.store(c + i, value, mask=there)
            if KIND == _NESTEROV:
                value = value + (value - old) * f
    return value, tl.where(there, value.to(tl.int32, bitcast=True) & MAGNITUDE, -1)


@kernel
def forget_at(now, before, i, there, momentum, NESTEROV: tl.constexpr, MASKING: tl.constexpr):
    """Change both sums at elements that are sent, as :func:`narrowband.kernels.forget`; return the old ``now`` there.

    One thread may store to a scattered place that another has loaded, so all have to have read before one writes.
    """
    was = tl.load(now + i, mask=there, other=0.0)
    velocity = tl.zeros_like(was)
    if not MASKING:
        velocity = tl.load(before + i, mask=there, other=0.0) - was
    tl.debug_barrier()
    left = tl.zeros_like(was)
    if NESTEROV:
        left = velocity * momentum * -1.0  # not −momentum: Triton may lose the sign of −0 on the way here
    tl.store(before + i, left, mask=there)
    tl.store(now + i, left - velocity, mask=there)
    return was
