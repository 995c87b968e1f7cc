"""A checksum of a tensor's bits, in Triton. Each program notes the sum of its words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, fold_seed, mix, unspecific
from narrowband.kernels.cuda.launching import run
from narrowband.kernels.reference.checksums import words_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["checksum"]


@unspecific
def _sums(words, sums, n, folded, WIDTH: tl.constexpr):
    own = tl.program_id(0)
    i = own.to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    word = tl.load(words + i, mask=i < n, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    factor = (mix(i.to(tl.uint32) + folded.to(tl.uint32)) | 1).to(tl.uint64)
    tl.store(sums + own, tl.sum((word * factor).to(tl.int64, bitcast=True), 0))


def checksum(x: Tensor) -> Tensor:
    totals = []
    for first, words in words_of(x):
        programs = -(-words.numel() // BLOCK)
        sums = torch.empty(programs, dtype=torch.int64, device=x.device)
        run(_sums, programs, words, sums, words.numel(), fold_seed(0, first), on=x, WIDTH=BLOCK)
        totals.append(sums.sum())
    return totals[0] if len(totals) == 1 else totals[0] + totals[1]
