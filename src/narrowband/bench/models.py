"""The models that the benchmarks and the demo train, in the plainest form that is still representative.

* GPT: pre-norm blocks, learned positions, scaled dot-product attention, an untied output head (Radford et al. 2019,
  "Language Models are Unsupervised Multitask Learners").
* ViT: the same blocks over patches of an image and a class token (Dosovitskiy et al. 2021, arXiv 2010.11929); with the
  shapes of DeiT (Touvron et al. 2021, arXiv 2012.12877) where it is called so.
* ResNet18: of He et al. 2015 (arXiv 1512.03385, table 1).

No dropout, so that two runs with one seed see the same arithmetic.

Shapes: B batch, L sequence, D model dim, V vocabulary, H heads, C channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "MLP", "MODELS", "Block", "GPTConfig", "Product", "ResNet18", "ViT"]


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


#: Named shapes. ``gpt-13m`` is the benchmark's (13.3 M parameters), ``gpt-demo`` the demo's, ``gpt-tiny`` for tests;
#: ``gpt2-small``, for GPUs, is the smallest of Radford et al.'s with a head of its own, and a vocabulary of a multiple
#: of 64 (163.1 M parameters), with the batch that nanoGPT's script has for it.
MODELS: dict[str, GPTConfig] = {
    "gpt-13m": GPTConfig(vocab=8000, dim=384, blocks=4, heads=6, sequence=64, batch=4),
    "gpt-demo": GPTConfig(vocab=256, dim=256, blocks=4, heads=4, sequence=32, batch=2),
    "gpt-tiny": GPTConfig(vocab=256, dim=64, blocks=2, heads=2, sequence=32, batch=2),
    "gpt2-small": GPTConfig(vocab=50304, dim=768, blocks=12, heads=12, sequence=1024, batch=12),
}


class Product(nn.Module):
    """``a @ b`` as a module of its own: so a policy for saved activations can name it, and its ranges are its own."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class MLP(nn.Module):
    """``down(gelu(up(x)))`` as a module of its own, too; the layers are its caller's."""

    def forward(self, x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
        y: Tensor = down(F.gelu(up(x)))
        return y


class Block(nn.Module):
    """One pre-norm transformer block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        dim: of the model.
        heads: of attention.
        causal: whether a token sees only those before it.
        fused: attention in one call of PyTorch; otherwise step by step, with the products ``scores`` and ``mix`` and a
            softmax between them, each of which saves for backward what it needs.
    """

    def __init__(self, dim: int, heads: int, *, causal: bool = True, fused: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.fused = fused
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.mlp = MLP()
        if not fused:
            self.scores, self.mix = Product(), Product()

    def forward(self, x_BLD: Tensor) -> Tensor:
        B, L, D = x_BLD.shape
        q, k, v = self.qkv(self.norm1(x_BLD)).view(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            a_BHLd = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            s_BHLL = self.scores(q * (D // self.heads) ** -0.5, k.transpose(-2, -1))
            if self.causal:
                s_BHLL = s_BHLL.masked_fill(torch.ones(L, L, dtype=torch.bool, device=s_BHLL.device).triu(1), -math.inf)
            a_BHLd = self.mix(F.softmax(s_BHLL, -1), v)
        x_BLD = x_BLD + self.proj(a_BHLd.transpose(1, 2).reshape(B, L, D))
        h_BLD: Tensor = self.mlp(self.norm2(x_BLD), self.up, self.down)
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
        self.blocks = nn.Sequential(*(Block(config.dim, config.heads) for _ in range(config.blocks)))
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


class ViT(nn.Module):
    """A vision transformer; ``forward(x_B3hw) -> logits_BV``. The defaults are DeiT-Ti's: 5.7 million parameters.

    Args:
        dim: of the model.
        heads: of attention.
        blocks: how many.
        image: height and width of images.
        patch: of patches; divides ``image``.
        classes: how many.
        fused: whether attention is one call; see :class:`Block`.
    """

    def __init__(
        self,
        dim: int = 192,
        heads: int = 3,
        blocks: int = 12,
        image: int = 224,
        patch: int = 16,
        classes: int = 1000,
        *,
        fused: bool = True,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"image={image} must be a multiple of patch={patch}")
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, causal=False, fused=fused) for _ in range(blocks)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x_BLD = self.patches(x).flatten(2).transpose(1, 2)
        x_BLD = torch.cat((self.token.expand(len(x_BLD), -1, -1), x_BLD), 1) + self.positions
        logits_BV: Tensor = self.head(self.norm(self.blocks(x_BLD))[:, 0])
        return logits_BV


class _Residual(nn.Module):
    """Two 3 × 3 convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride > 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y: Tensor = self.relu(h + self.shortcut(x))
        return y


class ResNet18(nn.Module):
    """ResNet-18 for 1000 classes; ``forward(x_B3hw) -> logits_BV``. 11.7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks, inputs = [], 64
        for outputs in (64, 128, 256, 512):
            blocks += [_Residual(inputs, outputs, 1 if outputs == 64 else 2), _Residual(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        logits_BV: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits_BV
