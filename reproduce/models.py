"""Models that the experiments train: a ResNet for small images, an LSTM and a Llama over characters, and two plain
networks.

The residual network is that of He et al. 2015 (arXiv 1512.03385, section 4.2): depth 6n + 2, three stages of n blocks
with 16, 32 and 64 channels, and shortcuts without parameters ("option A": every second pixel, new channels zero).

The Llama is the decoder of Touvron et al. 2023 (arXiv 2302.13971), with the operations that Transformers writes it in:
what a layer saves for backward depends on them.

Shapes: B batch, L sequence, D embedding, V vocabulary, H heads, d numbers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["WIDTHS", "CharLSTM", "Llama", "LlamaConfig", "ResNet", "convolutional", "perceptron"]

#: Channels of the ResNet's stages.
WIDTHS = (16, 32, 64)
_SIDE = 32


class _Block(nn.Module):
    """Two 3 × 3 convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.new_channels = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)), inplace=True)))
        if self.stride > 1:
            # x[:, :, ::2, ::2], but with a backward that keeps the channels-last layout; a step takes a quarter less.
            x = F.avg_pool2d(x, 1, self.stride)
        if self.new_channels:
            x = F.pad(x, (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(h.add_(x), inplace=True)


class ResNet(nn.Module):
    """A residual network for 32 × 32 images of 10 classes; ``forward(x_B3HW) -> logits_BV``. Fastest with channels-last
    input.

    Args:
        depth: 6n + 2: 8, 14, 20, … He et al. begin at 20.
    """

    def __init__(self, depth: int = 20) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"depth={depth} is not 6n + 2 with n ≥ 1: 8, 14, 20, …")
        self.conv = nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTHS[0])
        blocks = []
        inputs = WIDTHS[0]
        for width in WIDTHS:
            for _ in range(depth // 6):
                blocks.append(_Block(inputs, width, 1 if width == inputs else 2))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTHS[-1], 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(F.relu(self.norm(self.conv(x)), inplace=True))
        logits: Tensor = self.head(F.avg_pool2d(h, _SIDE // 4).flatten(1))
        return logits


class CharLSTM(nn.Module):
    """Embedding, LSTM, linear head; ``forward(tokens_BL) -> logits_BLV``, from a state of zeros.

    PyTorch's LSTM has two biases per gate that only ever occur as their sum; the second is kept at zero.
    """

    def __init__(self, vocabulary: int, dim: int = 128, hidden: int = 320, layers: int = 1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.lstm = nn.LSTM(dim, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("bias_hh"):
                nn.init.zeros_(parameter)
                parameter.requires_grad_(False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        h_BLD, _ = self.lstm(self.tokens(tokens_BL))
        logits_BLV: Tensor = self.head(h_BLD)
        return logits_BLV


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a :class:`Llama`.

    Attributes:
        dim: width of its blocks.
        blocks: number of blocks.
        heads: of attention; each has ``dim / heads`` numbers.
        hidden: width inside of the feed-forward layers.
        sequence: tokens of a window.
    """

    dim: int = 128
    blocks: int = 5
    heads: int = 4
    hidden: int = 384
    sequence: int = 64


class _RMSNorm(nn.Module):
    """RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467), in the operations of Transformers' ``LlamaRMSNorm``."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


def _turned(x: Tensor) -> Tensor:
    """Turn each pair of numbers, one of the first half and one of the second, by a quarter."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class _Decoder(nn.Module):
    """One block of a Llama: ``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        dim, self.heads = shape.dim, shape.heads
        self.norm1, self.norm2 = _RMSNorm(dim), _RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(dim, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, dim, bias=False)

    def forward(self, x_BLD: Tensor, cos_Ld: Tensor, sin_Ld: Tensor) -> Tensor:
        h_BLD = self.norm1(x_BLD)
        q, k, v = (
            part(h_BLD).view(*h_BLD.shape[:2], self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = (part * cos_Ld + _turned(part) * sin_Ld for part in (q, k))
        a_BHLd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.o(a_BHLd.transpose(1, 2).reshape(x_BLD.shape))
        h_BLD = self.norm2(x_BLD)
        out: Tensor = x_BLD + self.down(F.silu(self.gate(h_BLD)) * self.up(h_BLD))
        return out


class Llama(nn.Module):
    """A decoder with RMS norms, rotary positions (Su et al. 2021, arXiv 2104.09864), causal attention and SwiGLU
    (Shazeer 2020, arXiv 2002.05202); ``forward(tokens_BL) -> logits_BLV``. The head has parameters of its own.

    Args:
        vocabulary: number of different tokens.
        shape: of its blocks.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, vocabulary: int, shape: LlamaConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.dim)
        self.blocks = nn.ModuleList(_Decoder(shape) for _ in range(shape.blocks))
        self.norm = _RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        own = shape.dim // shape.heads
        speeds = 10_000.0 ** -(torch.arange(0, own, 2, dtype=torch.float32, device="cpu") / own)
        angles = torch.arange(shape.sequence, dtype=torch.float32, device="cpu")[:, None] * speeds.repeat(2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        length = tokens_BL.shape[1]
        x_BLD = self.tokens(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD, self.cos[:length], self.sin[:length])
        logits_BLV: Tensor = self.head(self.norm(x_BLD))
        return logits_BLV


def perceptron() -> nn.Sequential:
    """A DNN for digits, ``x_B1HW -> logits_BV``: 235,146 parameters, nearly all of them in its first layer."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def convolutional() -> nn.Sequential:
    """A CNN for 32 × 32 images, ``x_B3HW -> logits_BV``: 90,058 parameters, and five times the perceptron's work.

    Group norm (Wu and He 2018, arXiv 1803.08494), since batch norm would look at several samples at once.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))
