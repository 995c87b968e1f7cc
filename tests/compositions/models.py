"""Small models, each with something that averaging has to see through, and their inputs."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["MODELS", "inputs_of", "model_of"]


class Tied(nn.Module):
    """One matrix is the embedding and the output layer; between them a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(50, 37), nn.LSTM(37, 37, batch_first=True)
        self.out = nn.Linear(37, 50, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words):
        return self.out(self.recurrent(self.embedding(words))[0])


class Branches(nn.Module):
    """Every other batch leaves a branch out, on all ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(40, 60), nn.Linear(60, 33)
        self.branch, self.norm = nn.Linear(60, 60), nn.LayerNorm(60)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(self.norm(self.branch(h)) if len(x) % 2 else h)


class Reused(nn.Module):
    """A layer, and a vector, that forward uses three times."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(20, 64), nn.Linear(64, 64), nn.Linear(64, 9)
        self.shift = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        h = self.first(x)
        for _ in range(3):
            h = torch.tanh(self.middle(h) + self.shift)
        return self.last(h)


class Odd(nn.Module):
    """A matrix without a module of its own, a single number, and a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(64, 40)), nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x):
        return (x @ self.weight) * self.gain + self.nothing.sum()


class Words(nn.Module):
    """A table of which a batch uses a few rows; with ``sparse``, gradients have only those."""

    def __init__(self, sparse=False):
        super().__init__()
        self.table, self.out = nn.Embedding(200, 24, sparse=sparse), nn.Linear(24, 40)

    def forward(self, words):
        return self.out(self.table(words))


def mlp():
    return nn.Sequential(nn.Linear(30, 111), nn.ReLU(), nn.Linear(111, 71), nn.ReLU(), nn.Linear(71, 5))


def transformer():
    layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Linear(16, 48), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(48, 7)
    )


def convolutions():
    """Batch norm has buffers, and one of the convolutions has groups."""
    return nn.Sequential(
        nn.Conv2d(3, 18, 3), nn.BatchNorm2d(18), nn.ReLU(), nn.Conv2d(18, 20, 3, groups=2), nn.GELU(), nn.Flatten(),
        nn.Linear(320, 11),
    )  # fmt: skip


#: Name → the model, and the shape of one sample; or how many words there are.
_ALL = {
    "mlp": (mlp, (30,)),
    "transformer": (transformer, (5, 16)),
    "convolutions": (convolutions, (3, 8, 8)),
    "tied": (Tied, 50),
    "branches": (Branches, (40,)),
    "reused": (Reused, (20,)),
    "row": (lambda: nn.Linear(300, 1), (300,)),
    "odd": (Odd, (64,)),
    "words": (Words, 200),
    "sparse": (lambda: Words(sparse=True), 200),
}

MODELS = tuple(_ALL)


def model_of(name, dtype=torch.float32, *, seed=7, channels_last=False):
    torch.manual_seed(seed)
    model = _ALL[name][0]().to(dtype)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def inputs_of(name, generator, dtype=torch.float32, samples=4):
    """One micro-batch."""
    shape = _ALL[name][1]
    if isinstance(shape, int):
        return torch.randint(0, shape, (samples, 6), generator=generator)
    return torch.randn(samples, *shape, generator=generator).to(dtype)
