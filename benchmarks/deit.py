"""DeiT-S and DeiT-B as timm has them, with a batch of images: what ``narrowband bench memory --model`` takes.

narrowband bench memory --device cuda --model benchmarks/deit.py:small --batch 128 --only "bf16, 8 bits"
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def small(batch: int) -> tuple[nn.Module, tuple[Tensor]]:
    """DeiT-S: 22 M parameters, 224²."""
    return _made("deit_small_patch16_224", batch)


def base(batch: int) -> tuple[nn.Module, tuple[Tensor]]:
    """DeiT-B: 86 M parameters, 224²."""
    return _made("deit_base_patch16_224", batch)


def _made(name: str, batch: int) -> tuple[nn.Module, tuple[Tensor]]:
    import timm  # an extra of these benchmarks alone

    return timm.create_model(name), (torch.randn(batch, 3, 224, 224),)
