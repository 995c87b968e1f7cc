"""Small models and a training loop, the same on every rank but for the data."""

from __future__ import annotations

import contextlib
import logging

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb

#: One bucket for everything; a bucket for every parameter.
HUGE, TINY = 100.0, 1e-6

#: Bytes by which a rank tells every other one what it is about to do, once per step.
FINGERPRINT = 8

#: Keeps everything and travels the compressed way, so it must agree with plain DDP to the bit among two ranks: there a
#: mean is one addition and a division by two.
LOSSLESS = "topk:density=1.0+ef"


def mlp(dtype=torch.float32):
    """Four matrices to compress, a norm and biases that travel dense."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(24, 40),
        nn.LayerNorm(40),
        nn.Tanh(),
        nn.Linear(40, 32),
        nn.ReLU(),
        nn.Linear(32, 16),
        nn.Linear(16, 8),
    ).to(dtype)


def data(step, rank, dtype=torch.float32, inputs=24, outputs=8):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (
        torch.randn(6, inputs, generator=generator).to(dtype),
        torch.randn(6, outputs, generator=generator).to(dtype),
    )


def loss_of(model, step, rank, dtype=torch.float32):
    x, y = data(step, rank, dtype)
    return (model(x) - y).square().mean()


def train_in_two_passes(model, rank, steps, optimizer):
    """Every step has two backward passes, and FSDP2 is told which is the last."""
    for step in steps:
        optimizer.zero_grad()
        for last in (False, True):
            model.set_is_last_backward(last)
            loss_of(model, 100 * last + step, rank).backward()
        optimizer.step()


def wrap(model, cap=HUGE, **options):
    return DistributedDataParallel(model, bucket_cap_mb=cap, **options)


def compress(model, spec, *, coalesced=False, early=False, **options):
    """A handle. Payloads of small buckets travel one by one, so that much is on the wire at once, unless ``coalesced``;
    with ``early`` small parameters travel before backward ends, however few there are.
    """
    options |= {} if coalesced else {"message_nbytes": 0}
    options |= {"early_nbytes": 1} if early else {}
    return nb.compress_gradients(model, spec, **options)


def sgd(model, lr=0.05, momentum=0.0):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def adamw(model):
    """All parameters in one operator, since DTensor makes each of them slow."""
    return torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1, fused=True)


def train(model, rank, steps, optimizer=None, dtype=torch.float32):
    """The losses of these steps."""
    optimizer, losses = optimizer or sgd(model), []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, rank, dtype)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def flat(model):
    """All parameters, one after the other."""
    parts = [torch.view_as_real(p) if p.is_complex() else p for p in model.parameters()]
    return torch.cat([part.detach().double().reshape(-1) for part in parts])


def residuals(handle):
    """Copies of all that feedback holds."""
    state = handle.state_dict()
    held = [state["feedback"], *state["others"].values()]
    return {name: value.clone() for each in held for name, value in each.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def buckets(model):
    """Into how many buckets DDP has cut the gradients, after it did so anew."""
    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return len(sizes.split(","))


@contextlib.contextmanager
def heard(of=logging.LogRecord.getMessage):
    """What narrowband logs meanwhile: messages, or what a function makes of each record."""
    messages = []

    class Ear(logging.Handler):
        def emit(self, record):
            messages.append(of(record))

    ear, logger = Ear(), logging.getLogger("narrowband")
    logger.addHandler(ear)
    try:
        yield messages
    finally:
        logger.removeHandler(ear)


def refusal(what):
    """The error that calling ``what`` raises, as (type, text)."""
    try:
        what()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


class Fork(nn.Module):
    """Two layers of which a batch may use one."""

    def __init__(self, width=24):
        super().__init__()
        torch.manual_seed(3)
        self.always, self.sometimes = nn.Linear(24, width), nn.Linear(width, width)

    def forward(self, x, both):
        y = self.always(x)
        return self.sometimes(y) if both else y


class Branches(nn.Module):
    """A model of which some steps, or some ranks, leave one branch out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.trunk = nn.Linear(24, 24)
        self.left, self.right = nn.Linear(24, 8), nn.Linear(24, 8)

    def forward(self, x, right=True):
        h = torch.tanh(self.trunk(x))
        return self.left(h) + self.right(h) if right else self.left(h)
