"""A codec and a feedback that live outside of narrowband: ``ternary+decayed`` in a spec string.

Install it (``pip install examples/own_codec``), and ``narrowband codecs`` lists both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import narrowband as nb
from narrowband.codecs import Shape, aligned, numel_of
from narrowband.feedback import ErrorFeedback


@dataclass(frozen=True)
class Ternary(nb.Codec):
    """Every element becomes −s, 0 or s, at random and right on average (TernGrad, Wen et al., arXiv 1705.07878).

    s is the largest magnitude. The payload: s as a float32, then four elements to a byte.
    """

    name: ClassVar[str] = "ternary"

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return 4 + aligned(-(-numel_of(shape) // 4))

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        scale = x.abs().max()
        out[:4].view(torch.float32).copy_(scale)
        generator = torch.Generator(x.device).manual_seed(seed % 2**63)
        sent = torch.rand(x.shape, generator=generator, device=x.device) * scale < x.abs()
        codes = torch.zeros(4 * (len(out) - 4), dtype=torch.uint8, device=x.device)
        codes[: len(x)] = sent * torch.where(x < 0, 2, 1)
        a, b, c, d = codes.view(4, -1)
        out[4:].copy_(a | b << 2 | c << 4 | d << 6)

    def _decode(
        self, payload: Tensor, out: Tensor, shape: Shape, dtype: torch.dtype, seed: int, weight: float, accumulate: bool
    ) -> None:
        scale = payload[:4].view(torch.float32)
        codes = torch.cat([payload[4:] >> shift & 3 for shift in (0, 2, 4, 6)])[: len(out)]
        values = torch.tensor([0.0, 1.0, -1.0, 0.0], device=out.device)[codes.long()] * scale
        if accumulate:
            out.add_(values, alpha=weight)
        else:
            torch.mul(values, weight, out=out)

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        return bool(payload[:4].view(torch.float32).isfinite())


@dataclass(unsafe_hash=True)
class DecayedFeedback(ErrorFeedback):
    """As ``ef``, with a residual that fades: each step keeps a share of it."""

    name: ClassVar[str] = "decayed"

    keep: float = 0.9

    def can_roll_back(self, x: Tensor) -> bool:
        return False  # commit multiplies, which cannot be undone to the bit: it waits until the step is decided

    def commit(self, key: str, x: Tensor, codec: nb.Codec, payload: Tensor, **options: Any) -> Any:
        norms = super().commit(key, x, codec, payload, **options)
        self.add_residual(key, self.residual(key).mul_(self.keep))  # which may be a copy
        return norms
