"""How long what is packed lives, and ranks of their own."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.activations.drawing import kept
from tests.activations.helpers import Heads, compress, linears, payloads
from tests.activations.models import ViT, mlp, same
from tests.ranks import run_ranks

# ---- lifetimes -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_held_longer_than_backward_needs_it(backward):
    assert payloads() == 0
    model, hidden = mlp(), []

    def remember(_, args, result):
        hidden.append(StorageWeakRef(result.untyped_storage()))

    for layer in model:
        layer.register_forward_hook(remember)
    handle = compress(model)
    with handle as saved:
        y = model(torch.randn(16, 32))
        assert [memory.expired() for memory in hidden[:-1]] == [True] * 6  # all but the result
    assert payloads() > 0
    if backward:
        y.sum().backward()
    del y
    assert payloads() == 0
    alive = weakref.ref(model), weakref.ref(handle)
    del model, handle, layer
    assert [reference() for reference in alive] == [None, None]
    assert saved.raw_bytes


@pytest.mark.usefixtures("no_collector")
def test_a_graph_does_not_hold_the_model():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    handle = compress(model)
    with handle:
        y = model(torch.randn(20, 16))
    alive = weakref.ref(model)
    del model, handle
    assert alive() is None
    y.sum().backward()
    del y
    assert payloads() == 0


@pytest.mark.usefixtures("no_collector")
def test_a_model_may_hold_what_it_computed():
    """No collector sees through a graph: a model that it held would never be freed."""
    model = Heads()
    with compress(model):
        model(torch.randn(3, 10, 32))
    assert model.output.grad_fn is not None
    alive = weakref.ref(model)
    del model
    assert alive() is None
    assert payloads() == 0


class Fails(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(_ctx, x):
        return x * 1

    @staticmethod
    def backward(_ctx, _gradient):
        raise ZeroDivisionError


class Failing(nn.Module):
    """Fails in forward, in backward, or not at all."""

    where = None

    def forward(self, x):
        if self.where == "forward":
            raise ZeroDivisionError
        return Fails.apply(x) if self.where == "backward" else x


def computes(model, handle, x):
    with handle:
        return model(x).square().mean()


def retains(model, handle, x):
    y = computes(model, handle, x)
    y.backward(retain_graph=True)
    assert payloads()
    y.backward(retain_graph=True)


def runs_backward_inside(model, handle, x):
    with handle:
        model(x)
        model(x).square().mean().backward()


def fails_in_forward(model, handle, x):
    model[2].where = "forward"
    with pytest.raises(ZeroDivisionError):
        computes(model, handle, x)


def fails_behind_the_model(model, handle, x):
    with pytest.raises(ZeroDivisionError), handle:
        _ = model(x).sum() / 0 + 1 // 0


def fails_in_backward(model, handle, x):
    model[2].where = "backward"
    y = computes(model, handle, x)
    with pytest.raises(ZeroDivisionError):
        y.backward()


def asks_for_one_gradient(model, handle, x):
    torch.autograd.grad(computes(model, handle, x), model[-1].weight)


def drops_a_checkpoint(model, handle, x):
    with handle:
        model[3:](checkpoint(model[:3], model[0](x), use_reentrant=False)).sum()
    gc.collect()  # PyTorch's checkpoint holds its inputs in a cycle


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "step",
    [
        computes, retains, runs_backward_inside, fails_in_forward, fails_behind_the_model, fails_in_backward,
        asks_for_one_gradient, drops_a_checkpoint,
    ],
)  # fmt: skip
def test_whatever_becomes_of_a_step_nothing_is_held_after_it(step):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(32, 32), layer, Failing(), nn.Flatten(0, 1), *mlp())
    x = torch.randn(4, 16, 32)
    handle = compress(model)
    before = {*map(id, kept())}
    for _ in range(3):
        step(model, handle, x)
        model[2].where = None
        assert not {*map(id, kept())} - before
        assert handle._pieces.idle_nbytes == handle._pieces.nbytes > 0
    one = handle._pieces.nbytes
    for _ in range(3):
        step(model, handle, x)
        model[2].where = None
    assert handle._pieces.nbytes == one


# ---- ranks -----------------------------------------------------------------------------------------------------------


def train_ddp(rank, world_size, bits):
    torch.manual_seed(0)
    model = DistributedDataParallel(ViT())
    handle = compress(model, bits=bits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for at in range(3):
        torch.manual_seed(10 * at + rank)
        with handle as saved:
            loss = model(torch.randn(4, 3, 16, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    names = sorted(handle.state_dict()["estimates"])
    return torch.cat([p.detach().flatten() for p in model.parameters()]), names, losses, saved.ratio


def test_ddp():
    (plain, _, losses, _), _ = run_ranks(train_ddp, 2, "off")
    (a, names, found, ratio), (b, *_) = run_ranks(train_ddp, 2, 8)
    assert same(a, b)
    assert not same(a, plain)
    torch.testing.assert_close(a, plain, rtol=0, atol=1e-3)
    assert found[0] == losses[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-2, atol=0)
    assert ratio > 2.5
    assert names
    assert not any(name.startswith("module.") for name in names)
    assert any(name.startswith("blocks.0.attn:attention:") for name in names)


def own_seed(_rank, _size, seed):
    model = linears(4, 4)  # sets the seed itself
    torch.manual_seed(seed)
    return compress(model).state_dict()["seed"]


def test_ranks_round_each_in_its_own_way():
    first, second = run_ranks(own_seed, 2, 3)
    assert first != second
    assert run_ranks(own_seed, 2, 3) == [first, second]
