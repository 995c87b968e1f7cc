"""The models that the benchmarks and the demo train: GPTs in the plainest form that is still representative.

Pre-norm blocks, learned positions, scaled dot-product attention, an untied output head: Radford et al. 2019, "Language
Models are Unsupervised Multitask Learners". No dropout, so that two runs with one seed see the same arithmetic.

Shapes: B batch, L sequence, D model dim, V vocabulary, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "MODELS", "GPTConfig"]


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT and of the batch that one rank feeds it.

    Example: ``GPTConfig(vocab=256, dim=64, blocks=2, heads=4, sequence=32, batch=2).numel()``
    """

    vocab: int
    dim: int
    blocks: int
    heads: int
    sequence: int
    batch: int

    def __post_init__(self) -> None:
        for name in ("vocab", "dim", "blocks", "heads", "sequence", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} must be a multiple of heads={self.heads}")

    def numel(self) -> int:
        """Number of parameters."""
        block = 12 * self.dim**2 + 13 * self.dim
        return 2 * self.vocab * self.dim + self.sequence * self.dim + self.blocks * block + 2 * self.dim


#: Named shapes. ``gpt-13m`` is the benchmark's (13.3 M parameters), ``gpt-demo`` the demo's, ``gpt-tiny`` for tests.
MODELS: dict[str, GPTConfig] = {
    "gpt-13m": GPTConfig(vocab=8000, dim=384, blocks=4, heads=6, sequence=64, batch=4),
    "gpt-demo": GPTConfig(vocab=256, dim=256, blocks=4, heads=4, sequence=32, batch=2),
    "gpt-tiny": GPTConfig(vocab=256, dim=64, blocks=2, heads=2, sequence=32, batch=2),
}


class Block(nn.Module):
    """One pre-norm transformer block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)
        self.norm2 = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        B, L, D = x_BLD.shape
        q, k, v = self.qkv(self.norm1(x_BLD)).view(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        a_BHLd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.proj(a_BHLd.transpose(1, 2).reshape(B, L, D))
        h_BLD: Tensor = self.down(F.gelu(self.up(self.norm2(x_BLD))))
        return x_BLD + h_BLD


class GPT(nn.Module):
    """A GPT of the given shape; ``forward(tokens_BL) -> logits_BLV``.

    Initialised from torch's global generator, residual projections scaled by 1/√(2·blocks) as in GPT-2.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.sequence, config.dim)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.blocks)))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.blocks) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        positions_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        x_BLD = self.tokens(tokens_BL) + self.positions(positions_L)
        logits_BLV: Tensor = self.head(self.norm(self.blocks(x_BLD)))
        return logits_BLV
