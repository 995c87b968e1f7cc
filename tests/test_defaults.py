"""``torch.set_default_device``, ``with torch.device(…)`` and ``torch.set_default_dtype`` change nothing: each tensor
says where it is made and what its elements are.

The default device is "meta" here, which every machine has, and where no tensor has numbers: what is made there by
mistake raises at once, or makes NaN of a loss. The default dtype is another one than float32 at the same time, which
changes the bits of losses. Models and data are float32, and made before the defaults change, as those of users are who
load them.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._device import _device_constructors
from torch.utils.data import TensorDataset

import narrowband as nb
from tests.coded.training import batch as coded_batch
from tests.coded.training import loss_of as coded_loss
from tests.coded.training import mlp as coded_mlp
from tests.gradients.training import compress, data, mlp, sgd, wrap
from tests.pipeline import stages
from tests.ranks import run_ranks
from tests.thorough import thorough

STEPS = 4


@contextlib.contextmanager
def defaults(device, dtype):
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(former)


def by_both(dtype, run, *args):
    """What ``run`` returns where the defaults are "meta" and this dtype, and where none is set. In this order, so that
    what is done once in a process is done under the former.

    ``run`` makes models and data, which are the user's, before it enters the context that it is given.
    """
    found = []
    for context in (lambda: defaults("meta", dtype), contextlib.nullcontext):
        torch.manual_seed(0)
        found.append(run(context, *args))
        assert (torch.get_default_device().type, torch.get_default_dtype()) == ("cpu", torch.float32)
    return found


def assert_equal(ranks):
    """Losses are the same to the bit, and so are none of them NaN."""
    for of_rank in ranks:
        for case, (under_others, expected) in of_rank.items():
            assert under_others == expected, case
            assert expected, case


def losses_of(model, batches, optimizer, before_step=lambda: None):
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        before_step()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- gradients -------------------------------------------------------------------------------------------------------

GRADIENTS = [
    "none",
    "fp16",
    "qsgd:bits=4",
    "uniform:bits=4+ef",
    "uniform:bits=4,rounding=stochastic+ef21",
    "sign+ef",
    "topk:density=0.1,values=int8+ef:store=int8",
    "topk:density=0.1,select=sampled+ef:store=cpu",
    "topk:density=0.1+ef-mixed",
    "randomk:density=0.1+ef",
    "lowrank:rank=2+ef",
    "powersgd:rank=2,min_ratio=1",
    "dgc:density=0.1",
    "threshold:value=0.01+ef",
    nb.LGreCo("topk:density=0.1+ef", ["topk:density=0.05+ef", "topk:density=0.3+ef"], every=2, discretization=100),
    nb.Accordion(low="powersgd:rank=4,min_ratio=1", high="powersgd:rank=1,min_ratio=1", every=2),
    nb.GlobalTopK(density=0.1, every=2),
    nb.KMeans("topk:density=0.05+ef", ["topk:density=0.02+ef", "topk:density=0.1+ef"], clusters=2, every=2),
]

WITH_OPTIONS = [
    ("topk:density=0.1+ef", {"collective": "sparse_reduce"}),
    ("uniform:bits=4,rounding=stochastic+ef", {"collective": "scatter_reduce"}),
    ("qsgd:bits=4", {"nodes": 1}),
]

CASES = [*((spec, {}) for spec in GRADIENTS), *WITH_OPTIONS]


def under_ddp(context, spec, rank, options):
    """Saved and loaded after half of the steps."""
    net, batches = mlp(), [data(step, rank) for step in range(STEPS)]
    with context():
        optimizer, losses, saved = sgd(net), [], io.BytesIO()
        for half in (batches[: STEPS // 2], batches[STEPS // 2 :]):
            model = wrap(net, cap=0.004)
            handle = compress(model, copy.deepcopy(spec), min_numel=64, **options)  # policies remember
            if losses:
                saved.seek(0)
                handle.load_state_dict(torch.load(saved))
                assert handle.step == STEPS // 2
            losses += losses_of(model, half, optimizer)
            torch.save(handle.state_dict(), saved)
            handle.remove()
    return losses


#: What runs, together, every line of the reference's loops that any case runs.
ALL_LOOPS = (
    "uniform:bits=4,rounding=stochastic+ef21", "sign", "topk:density=0.1,values=int8",
    "topk:density=0.1,select=sampled", "randomk", "powersgd", "dgc", "threshold", "LGreCo",
    "topk:density=0.1+ef {'collective': 'sparse_reduce'}",
)  # fmt: skip


def gradients(rank, world_size, kernels, dtype, begin):
    os.environ["NARROWBAND_KERNELS"] = kernels
    named = {f"{spec} {options}": (spec, options) for spec, options in CASES}
    return {
        name: by_both(dtype, under_ddp, spec, rank, options)
        for name, (spec, options) in named.items()
        if name.startswith(begin)
    }


@pytest.mark.parametrize(
    ("kernels", "dtype", "begin"),
    [
        ("", torch.float64, ""),
        ("reference", torch.bfloat16, ALL_LOOPS),
        *thorough(("reference", torch.bfloat16, "")),
    ],
)
def test_gradients_under_ddp(kernels, dtype, begin):
    ranks = run_ranks(gradients, 2, kernels, dtype, begin, timeout_s=120.0, fresh=True)
    assert len(ranks[0]) == (len(begin) if begin else len(CASES))
    assert_equal(ranks)


def by_averager(context, rank):
    net, batches = mlp(), [data(step, rank) for step in range(STEPS)]
    with context():
        averager = nb.Averager(net, "qsgd:bits=4", min_numel=64)
        losses = losses_of(net, batches, sgd(net), averager.average)
        averager.remove()
    return losses


def times_of_buckets(context, rank):
    """That they can be measured. How long they are is no loss, and another time another one."""
    net, (x, y) = mlp(), data(0, rank)
    with context():
        model = wrap(net, cap=0.004)
        handle = compress(model, "qsgd:bits=8", min_numel=64)

        def step():
            (model(x) - y).square().mean().backward()

        times = nb.measure_times(handle, step, ["qsgd:bits=8", "qsgd:bits=2"], samples=4, steps=1, warmup_steps=1)
        handle.remove()
    return [len(times.seconds_per_byte)]


# ---- updates, shards -------------------------------------------------------------------------------------------------


def updates(context, rank, spec, options):
    net, batches = mlp(), [data(step, rank) for step in range(2 * STEPS)]
    with context():
        optimizer = sgd(net, momentum=0.9)
        handle = nb.compress_updates(net, optimizer, spec, min_numel=64, **options)
        losses = losses_of(net, batches, optimizer)
        handle.remove()
    return losses


UPDATES = [
    ("topk:density=0.1+ef", {}),
    ("qsgd:bits=4+ef", {"every": 2, "outer": "auto"}),
    ("topk:density=0.1+ef", {"every": 4, "fragments": 2, "overlap": 1, "offload": True}),
]


def shards(context, rank):
    net, batches = mlp(), [data(step, rank) for step in range(STEPS)]
    with context():
        model = fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        nb.compress_shards(model, gradients="qsgd:bits=8", parameters="uniform:bits=8", min_numel=64)
        return losses_of(model, batches, sgd(model))


def averages(rank, world_size):
    found = {
        "averager": by_both(torch.bfloat16, by_averager, rank),
        "times": by_both(torch.bfloat16, times_of_buckets, rank),
    }
    for spec, options in UPDATES:
        found[f"updates {spec} {options}"] = by_both(torch.bfloat16, updates, rank, spec, options)
    return found | {"shards": by_both(torch.bfloat16, shards, rank)}


def test_averages_updates_and_shards():
    assert_equal(run_ranks(averages, 2, fresh=True))


# ---- activations -----------------------------------------------------------------------------------------------------


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.GELU(), nn.Dropout(0.1), nn.Flatten(),
        nn.Linear(72, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 8),
    )  # fmt: skip


def activations(context, options):
    net = convolutions()
    batches = [(torch.randn(6, 3, 10, 10), torch.randn(6, 8)) for _ in range(STEPS)]
    with context():
        compression = nb.compress_activations(net, **options)
        return losses_of(compression(net), batches, sgd(net))


def saved(rank, world_size, cases):
    return {str(options): by_both(torch.float64, activations, options) for options in cases}


def test_activations():
    cases = [{"bits": 8}, {"bits": 4, "rounding": "stochastic"}, {"bits": 2}]
    assert_equal(run_ranks(saved, 1, cases, fresh=True))


# ---- pipelines, coded work -------------------------------------------------------------------------------------------


def in_stages(context, rank, forward):
    cut = stages.parts(2)[rank]
    steps = [(*stages.batch(step), stages.ids(step)) for step in range(STEPS)]
    losses, state = [], None
    with context():
        optimizer = sgd(cut)
        for half in (steps[: STEPS // 2], steps[STEPS // 2 :]):
            stage = nb.CompressedStage(cut, rank, 2, stages.CPU, forward=forward, backward="qsgd:bits=4+ef")
            if state is not None:
                stage.load_state_dict(state)
            schedule = stages.schedule_of("1F1B", [stage])
            for x, y, ids in half:
                optimizer.zero_grad()
                stage.samples = ids
                losses += stages.run_step(schedule, [stage], x, y)
                optimizer.step()
            state = stage.state_dict()
    return [*losses, *(p.detach().norm().item() for p in cut.parameters())]  # only the last stage has losses


def in_one_place(context, forward):
    cut = stages.parts(2)
    steps = [(*stages.batch(step), stages.ids(step)) for step in range(STEPS)]
    with context():
        boundary = nb.Boundary(forward, "topk:density=0.2")
        model = nn.Sequential(cut[0], boundary, cut[1])
        optimizer, losses = sgd(model), []
        for x, y, ids in steps:
            boundary.samples = ids
            losses += losses_of(model, [(x, y)], optimizer)
    return losses


def pipelines(rank, world_size):
    found = {}
    for spec in ("topk:density=0.2+ef21", "qsgd:bits=6+aq-sgd", "topk:density=0.2,scope=sample"):
        found[f"boundary {spec}"] = by_both(torch.bfloat16, in_one_place, spec)
        found[f"stages {spec}"] = by_both(torch.bfloat16, in_stages, rank, spec)
    return found


def coded(context, shuffle, options):
    net, samples = coded_mlp(dropout=0.1), TensorDataset(*coded_batch(7, 70))
    losses = []
    with context():
        model = nb.CodedDataParallel(net, **options)
        optimizer = sgd(model)
        sampler = model.sampler(samples, 25, shuffle=shuffle, seed=5)
        for rows in sampler:  # a DataLoader makes tensors on the default device, whose numbers it reads
            x, y = samples[rows]
            optimizer.zero_grad()
            loss = coded_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def coded_ranks(rank, world_size):
    return {
        "shuffled": by_both(torch.float64, coded, True, {}),
        "in order": by_both(torch.float64, coded, False, {"bits": 16}),
    }


def test_pipelines():
    assert_equal(run_ranks(pipelines, 2, fresh=True))


def test_coded_data_parallelism():
    assert_equal(run_ranks(coded_ranks, 3, fresh=True))


# ---- in the source ---------------------------------------------------------------------------------------------------

SOURCE = Path(nb.__file__).parent

#: Rooms of programs of their own: nobody else's default device is set there.
PROGRAMS = {"bench", "cli", "lab", "report"}

#: What a default device acts on, as PyTorch has it, in names that are looked up in ``torch``.
CONSTRUCTORS = {f.__name__ for f in _device_constructors()}

#: Those whose integers are int64 whatever the default is.
OF_INTEGERS = {"randint", "randperm", "tril_indices", "triu_indices"}


def incomplete(source):
    """(line, what is missing) where a tensor is made of which nothing says where, or what its elements are."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name), keywords=keywords):
                needed = {"device"} if name in OF_INTEGERS else {"device", "dtype"}
                if name in CONSTRUCTORS:
                    found += [(node.lineno, what) for what in needed - {keyword.arg for keyword in keywords}]
            case ast.ImportFrom(module="torch", names=names) if CONSTRUCTORS & {alias.name for alias in names}:
                found.append((node.lineno, "torch"))  # would hide its calls from this test
    return found


def test_what_has_no_device_or_dtype_is_found():
    source = """
import torch
from torch import zeros

x = torch.empty(3, dtype=torch.int32)
y = torch.tensor([1], dtype=torch.int32, device=x.device), torch.randperm(3, device=x.device)
z = torch.zeros_like(torch.full((2,), 1.0)), x.new_empty(3), torch.frombuffer(b"123", dtype=torch.uint8)
w = torch.empty(3, device="cpu"), torch.randperm(3)
"""
    lines = [(3, "torch"), (5, "device"), (7, "device"), (7, "dtype"), (8, "device"), (8, "dtype")]
    assert sorted(incomplete(source)) == lines
    assert {"empty", "tensor", "zeros", "arange", "randn", "asarray"} <= CONSTRUCTORS


def test_every_tensor_says_its_device_and_dtype():
    files = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in PROGRAMS]
    assert len(files) > 100
    found = {f"{path}:{line} has no {what}" for path in files for line, what in incomplete(path.read_text())}
    assert not found
