"""torch.compile: the same bits as without, averages in every step, and an error where nobody would average."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowband as nb
from tests.gradients.training import refusal, sgd, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough
from tests.torches import since_2_12

STEPS = 3
#: Parameters of a layer; DDPOptimizer has buckets of a MiB at least.
WIDTH = 512


class Layer(nn.Module):
    """Dynamo passes by the forward methods of PyTorch's own modules, such as ``nn.Sequential``."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self, widths=(16, WIDTH, WIDTH, WIDTH, 4)):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Layer(*pair) for pair in itertools.pairwise(widths)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Backend:
    """Counts graphs, and has forward and backward traced as every compiler of PyTorch has."""

    def __init__(self):
        torch.compiler.reset()
        self.graphs = 0

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


def sharded(model):
    """Nodes of two ranks; the group of those that have the same shard."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("nodes", "shards"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    return mesh["nodes"].get_group()


def step_of(model, x):
    loss = model(x).square().mean()
    loss.backward()


def trained(kind, how, spec, rank, backend):
    """Parameters after some steps, whether all ranks have the same, and how many were averaged."""
    model, group, step = Net(), None, step_of
    if how == "the module" and kind == "ddp":
        model = torch.compile(model, backend=backend)
    if kind == "ddp":
        model = wrap(model, cap=1.0)
    elif kind == "sharded":
        group = sharded(model)
    handle = nb.compress_gradients(model, spec, process_group=group)
    called = model
    if how == "the layers":
        for layer in model.layers:
            layer.compile(backend=backend)
    elif how == "the wrapper":
        called = torch.compile(model, backend=backend)
    elif how == "the step":
        step = torch.compile(step_of, backend=backend)
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        step(called, torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * number + rank)))
        optimizer.step()
    whole = [p.full_tensor() if kind == "sharded" else p for p in model.parameters()]
    mine = torch.cat([p.detach().flatten() for p in whole])
    of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, mine)
    return mine, all(torch.equal(each, mine) for each in of_all), handle.step


def compiled(rank, world_size, kind, how, spec):
    eager, _, _ = trained(kind, "eager", spec, rank, None)
    backend = Backend()
    ours, same, steps = trained(kind, how, spec, rank, backend)
    torch.compiler.reset()
    return torch.equal(ours, eager), same, steps, backend.graphs


@pytest.mark.parametrize(
    ("kind", "how", "graphs"),
    [
        ("ddp", "the wrapper", 3),  # DDPOptimizer cuts the model's graph into one per bucket
        pytest.param(
            "sharded", "the step", 4, marks=since_2_12("FSDP2 in a compiled step fails, also without this library")
        ),
        *thorough(("ddp", "the module", 1), ("ddp", "the step", 3), ("plain", "the wrapper", 1)),
        *thorough(("plain", "the step", 1), ("sharded", "the layers", 1), ("sharded", "the wrapper", 1)),
    ],
)
@pytest.mark.parametrize("spec", ["topk:density=0.05+ef", *thorough("qsgd:bits=4", "powersgd:rank=2")])
def test_compiled_models_train_with_the_bits_of_eager_ones(kind, how, graphs, spec):
    for equal, same, steps, counted in run_ranks(compiled, 4 if kind == "sharded" else 2, kind, how, spec):
        assert counted >= graphs
        assert equal
        assert same
        assert steps == STEPS


def by_compiled_autograd(rank, world_size):
    """What a first step says, of each kind of model, and whether it has changed anything."""
    from torch._dynamo import compiled_autograd, config

    found = {}
    for kind in ("plain", "sharded", "ddp"):
        torch.compiler.reset()
        model = Net((16, 64, 4))
        group = sharded(model) if kind == "sharded" else None
        model = wrap(model) if kind == "ddp" else model
        handle = nb.compress_gradients(model, "topk:density=0.05+ef", process_group=group)
        loss = model(torch.randn(8, 16)).square().mean()
        # Compiling what autograd has traced takes seconds, and once is enough: else it is run as it is.
        with compiled_autograd._enable(torch.compile(backend="eager") if kind == "plain" else lambda graph: graph):
            found[kind] = (*refusal(loss.backward), handle.step)
    with config.patch(optimize_ddp="python_reducer"):
        reducer = wrap(Net((16, 4)))
    found["reducer"] = (*refusal(lambda: nb.compress_gradients(reducer, "none")), 0)
    return found


@since_2_12("it refuses by itself")
def test_compiled_autograd_is_refused_by_the_first_backward():
    expected = {
        "plain": ("UnsupportedError", "run by compiled autograd, which does not tell when it ends"),
        "sharded": ("UnsupportedError", "run by compiled autograd, which does not tell when it ends"),
        "ddp": ("RuntimeError", "Compiled autograd is not compatible with C++ DDP Reducer"),  # PyTorch's own
        "reducer": ("UnsupportedError", 'optimize_ddp="python_reducer"'),
    }
    for found in run_ranks(by_compiled_autograd, 2, fresh=True):
        assert found.keys() == expected.keys()
        for kind, (error, words) in expected.items():
            assert found[kind][0] == error, found[kind]
            assert words in found[kind][1]
            assert found[kind][2] == 0
