"""A DistributedDataParallel among all replicas: what it averages is switched off while updates are averaged."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from tests.gradients.training import adamw, flat, loss_of, mlp, refusal, sgd, train
from tests.ranks import run_ranks

SPEC, STEPS = "topk:density=0.1+ef", 7


class WithBuffers(nn.Module):
    """Batch norm has statistics, which DDP sends before each forward pass, and which rounds average."""

    def __init__(self):
        super().__init__()
        self.net, self.norm = mlp(), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.net(x))


def wrappers():
    return {
        "plain": lambda net: net,
        "ddp": DistributedDataParallel,
        "views": lambda net: DistributedDataParallel(net, gradient_as_bucket_view=True),
        "unused": lambda net: DistributedDataParallel(net, find_unused_parameters=True),
        "compiled": lambda net: torch.compile(DistributedDataParallel(net), backend="eager"),
    }


def begun(kind, **options):
    torch.manual_seed(3)
    net = WithBuffers()
    model, optimizer = wrappers()[kind](net), adamw(net)
    return net, model, optimizer, nb.compress_updates(model, optimizer, SPEC, min_numel=64, every=3, **options)


def accumulate(model, rank, steps, optimizer):
    """Two backward passes for each step, as trainers do it: the first one in ``no_sync``."""
    for step in steps:
        optimizer.zero_grad()
        for last in (False, True):
            with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                loss_of(model, 100 * last + step, rank).backward()
        optimizer.step()


def trained(rank, world_size, options):
    found = {}
    for kind in wrappers():
        net, model, optimizer, handle = begun(kind, **options)
        accumulate(model, rank, range(STEPS), optimizer)
        model.eval()(torch.ones(2, 24))
        found[kind] = flat(net), torch.cat([b.double().flatten() for b in net.buffers()]), handle.step
    return found


@pytest.mark.parametrize("options", [{}, {"residuals": "in-place", "outer": "nesterov", "buffers": "keep"}])
def test_a_model_in_ddp_trains_as_the_module_itself_does(options):
    """To the bit, between two rounds, when replicas differ: neither gradients nor buffers were averaged."""
    first, second = run_ranks(trained, 2, options)
    assert not torch.equal(first["plain"][0], second["plain"][0])
    for found in (first, second):
        for kind, (parameters, buffers, rounds) in found.items():
            assert torch.equal(parameters, found["plain"][0]), kind
            assert torch.equal(buffers, found["plain"][1]), kind
            assert rounds == STEPS // 3


def removed(rank, world_size):
    """Rounds, and then DDP's own averages from the same parameters; and what these would be without rounds before."""
    net = mlp()
    model = DistributedDataParallel(net)
    optimizer = sgd(net)
    handle = nb.compress_updates(model, optimizer, SPEC, min_numel=64, every=3)
    train(model, rank, range(4), optimizer)
    handle.average()
    handle.remove()
    begun = {name: x.clone() for name, x in net.state_dict().items()}
    train(model, rank, range(4, 7), optimizer)
    other = mlp()
    other.load_state_dict(begun)
    around = DistributedDataParallel(other)
    train(around, rank, range(4, 7), sgd(other))
    return flat(net), flat(other)


def test_after_remove_gradients_are_averaged_again():
    (first, plain), (second, _) = run_ranks(removed, 2)
    assert torch.equal(first, second)
    assert torch.equal(first, plain)


def refused(rank, world_size):
    def step(model):
        loss_of(model, 0, rank).backward()
        optimizer.step()

    _, model, optimizer, handle = begun("ddp")
    model.require_backward_grad_sync = True
    again = refusal(lambda: step(model))
    handle.remove()

    net = mlp()
    model = DistributedDataParallel(net)
    optimizer = adamw(net)
    with model.no_sync():
        nb.compress_updates(model, optimizer, SPEC, min_numel=64)
    inside = refusal(lambda: step(model))

    net = mlp()
    still = DistributedDataParallel(net, static_graph=True)
    static = refusal(lambda: nb.compress_updates(still, adamw(net), SPEC))

    net = mlp()
    model = DistributedDataParallel(net)
    nb.compress_gradients(model, SPEC, min_numel=64)
    both = refusal(lambda: nb.compress_updates(model, adamw(net), SPEC))
    return again, inside, static, both, model.require_backward_grad_sync, still.require_backward_grad_sync


def test_what_would_average_both_is_refused():
    for again, inside, static, both, *averages in run_ranks(refused, 2):
        assert [each[0] for each in (again, inside, static, both)] == [*["RuntimeError"] * 2, *["UnsupportedError"] * 2]
        assert "DistributedDataParallel averages gradients again, uncompressed" in again[1]
        assert inside == again
        assert "static_graph=True) has to average gradients in its first backward" in static[1]
        assert "has a handle of compress_gradients already" in both[1]
        assert averages == [True, True]  # what was refused has changed nothing
