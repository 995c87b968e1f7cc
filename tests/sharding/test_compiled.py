"""torch.compile inside FSDP2: the same bits as without, and an error where FSDP2 would reduce nothing."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import narrowband as nb
from tests.gradients.shards import whole
from tests.gradients.test_compiled import Backend, Net, step_of
from tests.gradients.training import refusal, sgd
from tests.ranks import run_ranks
from tests.sharding.training import FINE, mesh_of
from tests.thorough import thorough
from tests.torches import since_2_12


def sharded(world_size, model, **options):
    mesh = mesh_of(world_size)
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def batch(rank, step):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(rank, world_size, how, backend):
    """Parameters and bytes after some steps."""
    model, step = sharded(world_size, Net((16, 128, 4))), step_of
    handle = nb.compress_shards(model, **FINE)
    called = model
    if how == "the layers":
        for layer in model.layers:
            layer.compile(backend=backend)
    elif how == "the wrapper":
        called = torch.compile(model, backend=backend)
    elif how == "the step":
        step = torch.compile(step_of, backend=backend)
    optimizer = sgd(model)
    for number in range(3):
        optimizer.zero_grad()
        step(called, batch(rank, number))
        optimizer.step()
    return whole(model), handle.stats().total


def compiled(rank, world_size, how):
    eager, said = trained(rank, world_size, "eager", None)
    backend = Backend()
    ours, ours_said = trained(rank, world_size, how, backend)
    torch.compiler.reset()
    return torch.equal(ours, eager), ours_said == said, said.steps, said.ratio, backend.graphs


@since_2_12("FSDP2 in a compiled step fails, also without this library")
@pytest.mark.parametrize("how", ["the step", *thorough("the layers", "the wrapper")])
def test_compiled_models_train_with_the_bits_of_eager_ones(how):
    for equal, same_bytes, steps, ratio, graphs in run_ranks(compiled, 2, how):
        assert graphs
        assert equal
        assert same_bytes
        assert steps == 3
        assert ratio > 2


def by_compiled_autograd(rank, world_size):
    """What a first backward says, and whether another model, which autograd itself runs, goes well."""
    from torch._dynamo import compiled_autograd

    found = {}
    for kept in (True, False):
        torch.compiler.reset()
        model = sharded(world_size, Net((16, 64)), reshard_after_forward=not kept)
        handle = nb.compress_shards(model, **FINE)
        loss = model(batch(rank, 0)).square().mean()
        # Compiling what autograd has traced takes seconds, and once is enough: else it is run as it is.
        with compiled_autograd._enable(torch.compile(backend="eager") if kept else lambda graph: graph):
            said = refusal(loss.backward)
        handle.remove()
        found[kept] = said
    other = sharded(world_size, Net((16, 64)))
    nb.compress_shards(other, **FINE)
    step_of(other, batch(rank, 0))
    return found, all(p.grad is not None for p in other.parameters())


@since_2_12("it refuses by itself")
def test_compiled_autograd_is_refused_by_the_first_backward():
    for found, goes_well in run_ranks(by_compiled_autograd, 2, fresh=True):
        for kind, words in found.values():
            assert kind == "UnsupportedError", words
            assert "run by compiled autograd, which does not tell when it ends" in words
        assert goes_well
