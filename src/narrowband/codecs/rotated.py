"""A codec that rotates a tensor at random before it keeps a few bits of every element: EDEN.

The loops, the equations and the payload format are in :mod:`narrowband.kernels.rotated`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband import kernels
from narrowband.codecs.base import Codec, Shape, around, numel_of
from narrowband.codecs.spec import check_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["EDEN"]

#: Lengths of groups. A shorter one does not make values normal, and a longer one does not fit into a core's cache.
_GROUPS = tuple(1 << power for power in range(5, 13))


@dataclass(frozen=True)
class EDEN(Codec):
    """A random rotation, and a few bits per element: unbiased, and the same error whatever the values are.

    Rotated values are nearly normal, so that few evenly spaced levels fit all groups. ``qsgd`` with 4 bits errs a
    little less than this with 3 where values are normal, and twice as much where they are cubes of normal ones. The
    rotation is Hadamard's with random signs. Source: Vargaftik et al. 2022, EDEN (arXiv 2108.08842); with 1 bit it is
    DRIVE (arXiv 2105.08339). Their levels are Lloyd's and Max's; evenly spaced ones err 1 % more with 2 bits and 22 %
    with 4, and decode faster.

    Args:
        bits: 1–8 per element.
        group: elements that are rotated together: a power of two, 32–4096. Each group costs 4 bytes, and the last is
            filled up with zeros. A tensor costs 4 bytes more, for the rotation's seed.

    Example:
        >>> nb.codec("eden:bits=3").payload_nbytes((1024, 1024))  # 3 bits each, and 4 bytes per group of 512
        401412
    """

    name: ClassVar[str] = "eden"
    requantizes: ClassVar[bool] = True

    bits: int = field(default=3, metadata={"always": True})
    group: int = 512

    def __post_init__(self) -> None:
        check_keys(self)
        if not 1 <= self.bits <= 8:
            raise ValueError(f"eden: bits={self.bits} is not in [1, 8]")
        if self.group not in _GROUPS:
            raise ValueError(f"eden: group={self.group} is not a power of two from {_GROUPS[0]} to {_GROUPS[-1]}")

    def variations(self) -> tuple[str, list[float]]:
        return "bits", around(self.bits)

    @property
    def granularity(self) -> int:
        return self.group

    @property
    def widens(self) -> bool:
        return True

    @property
    def encodes_several(self) -> bool:
        return True

    @property
    def decodes_several(self) -> bool:
        return True

    def _groups(self, numel: int) -> int:
        return -(-numel // self.group)

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return 4 + self._groups(numel_of(shape)) * (4 + self.group * self.bits // 8)

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        steps = payload[4 : 4 + 4 * self._groups(numel_of(shape))].view(torch.float32)
        return kernels.holds(kernels.rotated_steps_are_finite(steps, bits=self.bits, group=self.group))

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        kernels.quantize_rotated(x, out, bits=self.bits, group=self.group, seed=seed)

    def _decode(
        self, payload: Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seed: int, weight: float, accumulate: bool
    ) -> None:
        kernels.dequantize_rotated(payload, out, bits=self.bits, group=self.group, weight=weight, accumulate=accumulate)

    def encode_all(
        self,
        xs: Sequence[Tensor],
        outs: Sequence[Tensor],
        *,
        seeds: Sequence[int],
        residuals: Sequence[Tensor] = (),
        decay: float = 1.0,
    ) -> bool:
        return kernels.quantize_rotated_all(
            xs, outs, bits=self.bits, group=self.group, seeds=seeds, residuals=residuals, decay=decay
        )

    def _decode_means(
        self,
        payloads: Tensor,
        places: Sequence[slice],
        outs: Sequence[Tensor],
        shapes: Sequence[Shape],
        accumulate: bool,
    ) -> None:
        kernels.dequantize_rotated_means(
            payloads, places, outs, bits=self.bits, group=self.group, accumulate=accumulate
        )
