"""Optimizers that keep their state in 8 bits, of other packages, beside everything that is compressed here."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from narrowband.bench.held import tensors_of
from narrowband.bench.models import GPT, GPTConfig
from tests.ranks import run_ranks

#: Package → its optimizer.
PACKAGES = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}
SHAPE = GPTConfig(vocab=256, dim=64, blocks=2, heads=2, sequence=32, batch=8)


def installed(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed: pip install {package}")


def optimizer(package: str, parameters):
    return importlib.import_module(PACKAGES[package]).AdamW8bit(parameters, lr=3e-3)


def tokens(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    start = torch.randint(SHAPE.vocab, (SHAPE.batch, 1), generator=generator)
    return (start + torch.arange(SHAPE.sequence + 1)) % SHAPE.vocab  # what comes next can be learned


def trained(rank: int, world_size: int, package: str, updates: bool) -> tuple[list[float], torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    own = optimizer(package, model.parameters())
    if updates:
        layers, handle = model, nb.compress_updates(model, own, "topk:density=0.05+ef:store=int8", every=2)
    else:
        layers = DistributedDataParallel(model)
        handle = nb.compress_gradients(layers, "qsgd:bits=4+ef:store=int8")
    saving, losses = nb.compress_activations(layers, bits=8), []
    for step in range(30):
        x = tokens(rank, step)
        own.zero_grad()
        with saving:
            logits = layers(x[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        own.step()
        losses.append(loss.item())
    assert handle.stats().total.ratio > 3
    assert saving.stats().total.ratio > 2
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("package", [pytest.param(name, marks=installed(name)) for name in PACKAGES])
@pytest.mark.parametrize("updates", [False, True])
def test_gradients_updates_activations_and_optimizer_in_few_bits_together(package: str, updates: bool) -> None:
    (losses, parameters), (_, others) = run_ranks(trained, 2, package, updates, timeout_s=180)
    assert torch.equal(parameters, others)
    assert parameters.isfinite().all()
    assert losses[-1] < 0.7 * losses[0]


@installed("bitsandbytes")
def test_its_state_takes_a_quarter() -> None:
    model, inputs = GPT(GPTConfig(256, 256, 2, 4, 32, 2)), ()
    whole, few = (tensors_of(model, inputs, name)["optimizer"] for name in ("adamw", "adamw-8bit"))
    assert 3.5 < whole / few < 4.0


def test_where_it_is_missing_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match="pip install bitsandbytes"):
        tensors_of(torch.nn.Linear(8, 8), (), "adamw-8bit")
