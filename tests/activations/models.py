"""Models as people write them, none prepared for compression; a step of one; and what it keeps, counted."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import narrowband as nb

#: Small enough for small models, above the sizes of norms' statistics.
SMALL = 64


class Attention(nn.Module):
    """As in timm: one projection for queries, keys and values; attention in one call, or step by step."""

    def __init__(self, dim=32, num_heads=4, fused=True, drop=0.1):
        super().__init__()
        self.num_heads, self.fused = num_heads, fused
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            attention = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
            y = self.drop(attention) @ v
        return self.proj(y.transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    def __init__(self, dim=32, fused=True):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, fused=fused)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, fused=True):
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.Sequential(Block(fused=fused), Block(fused=fused))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class Residual(nn.Module):
    """As in torchvision: one ReLU, in place, for all."""

    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = Residual(16, 16), Residual(16, 32, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class SelfAttention(nn.Module):
    """nn.MultiheadAttention, between layers."""

    def __init__(self, need_weights=False, batch_first=True, dropout=0.0):
        super().__init__()
        self.need_weights = need_weights
        self.first = nn.Linear(32, 32)
        self.attn = nn.MultiheadAttention(32, 4, dropout=dropout, batch_first=batch_first)
        self.last = nn.Linear(32, 10)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.attn(x, x, x, need_weights=self.need_weights)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(32, 32), nn.LSTM(32, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x):
        return self.last(self.lstm(self.first(x))[0]).mean(1)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(32, 10))


def mlp():
    return nn.Sequential(
        nn.Linear(32, 48),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(48, 48),
        nn.GELU(),
        nn.GroupNorm(4, 48),
        nn.Linear(48, 10),
    )


def images(batch=4):
    return torch.randn(batch, 3, 16, 16)


def tokens(batch=4):
    return torch.randn(batch, 12, 32)


#: How to build each, and its inputs.
MODELS = {
    "mlp": (mlp, lambda: torch.randn(16, 32)),
    "vit": (ViT, images),
    "vit step by step": (lambda: ViT(fused=False), images),
    "resnet": (ResNet, images),
    "encoder": (encoder, tokens),
    "attention": (SelfAttention, tokens),
    "attention with weights": (lambda: SelfAttention(need_weights=True, dropout=0.1), tokens),
    "attention, sequence first": (lambda: SelfAttention(batch_first=False), tokens),
    "recurrent": (Recurrent, tokens),
}


@dataclass
class Run:
    out: torch.Tensor
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    saved: nb.activations.Saved | None
    state: dict | None


def step(name, options=None, *, seed=0, autocast=None, channels_last=False, scale=1.0):
    """One step of a new model; plain without options."""
    build, inputs = MODELS[name]
    torch.manual_seed(seed)
    model, x = build(), inputs()
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    handle = saved = None
    with contextlib.ExitStack() as stack:
        if options is not None:
            handle = nb.compress_activations(model, **{"min_numel": SMALL, **options})
            saved = stack.enter_context(handle)
        if autocast is not None:
            stack.enter_context(torch.autocast("cpu", dtype=autocast))
        out = model(x)
        loss = (out.float().square().mean() + out.float().mean()) * scale
    loss.backward()
    return Run(
        out.detach(),
        loss.detach(),
        {name: p.grad for name, p in model.named_parameters()},
        {name: b.clone() for name, b in model.named_buffers()},
        saved,
        handle and handle.state_dict(),
    )


@functools.cache
def plain_step(name, **how):
    """The same step of the same model, without compression."""
    return step(name, **how)


def bits_of(x):
    """Of a tensor, to be compared: −0 is not 0, and NaN is NaN."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def same(a, b):
    """To the bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits_of(a), bits_of(b))


class Gated(nn.Module):
    """A residual block of a language model, with RMS norm of PyTorch or of its own."""

    def __init__(self, *, written: bool) -> None:
        super().__init__()
        self.norm, self.written = nn.RMSNorm(64, eps=1e-6), written
        self.up, self.down = nn.Linear(64, 256), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.written:
            n = self.norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        else:
            n = self.norm(x)
        gate, up = self.up(n).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def error(found, expected):
    """‖found − expected‖ / ‖expected‖, of two dictionaries of gradients."""
    a = torch.cat([found[name].double().flatten() for name in expected])
    b = torch.cat([expected[name].double().flatten() for name in expected])
    return ((a - b).norm() / b.norm()).item()


@contextlib.contextmanager
def counting(model, *inputs):
    """Counts what autograd keeps: every strided storage once, but for parameters, buffers and inputs. Yields a list
    that holds the number of bytes afterwards.
    """
    alive = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers(), *inputs)}
    held, total = {}, []

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in alive:
            held[storage.data_ptr()] = storage  # held: its address is not used again
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield total
    total.append(sum(storage.nbytes() for storage in held.values()))
