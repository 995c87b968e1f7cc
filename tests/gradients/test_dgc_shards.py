"""DGC where the ranks of a node have parts of every gradient: a node is the paper's rank, on real ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowband as nb
from narrowband.gradients.levels import shards_of
from tests.gradients.shards import shard
from tests.gradients.test_dgc import Deriving, gradients_of
from tests.gradients.training import compress, loss_of, mlp, refusal, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

NODES, INSIDE, STEPS = 2, 2, 9


def rate(step, index):
    """Of a parameter of an even place in the model, and of an odd one."""
    return 0.1 + 0.05 * step if index % 2 else 0.3 / (1 + step)


def frozen_steps(rank, world_size, spec, where):
    """The averages of steps that leave the parameters where they are."""
    mesh = init_device_mesh("cpu", (NODES, INSIDE), mesh_dim_names=("nodes", "shards"))
    model = shard(mlp(), mesh["shards"]) if where == "fsdp" else wrap(mlp())
    parameters = list(model.parameters())
    groups = [{"params": parameters[index::2], "lr": rate(0, index)} for index in (0, 1)]
    optimizer = nb.DGCSGD(groups, lr=1.0)
    options = {"process_group": mesh["nodes"].get_group()} if where == "fsdp" else {"nodes": NODES}
    compress(model, spec, min_numel=64, optimizer=optimizer, **options)
    averages = []
    for step in range(STEPS):
        model.zero_grad()
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = rate(step, index)
        loss_of(model, step, rank).backward()
        grads = [p.grad.full_tensor() if where == "fsdp" else p.grad for p in model.parameters()]
        averages.append([grad.reshape(-1).clone() for grad in grads])
    return averages


def parts_of(shape, index, where):
    """The parts of a parameter that the ranks of a node have, and their shapes."""
    if where == "levels":
        return shards_of(shape, INSIDE, index)
    first = -(-shape[0] // INSIDE)
    width = math.prod(shape[1:])
    return [
        (slice(begin * width, end * width), (end - begin, *shape[1:])) for begin, end in ((0, first), (first, shape[0]))
    ]


@pytest.mark.parametrize(
    ("where", "keys"),
    [
        ("fsdp", ",accumulate=steps,clip=0.15"),
        ("levels", ",clip=0.15"),
        *thorough(("fsdp", ",clip=0.15"), ("levels", ",accumulate=steps,clip=0.15")),
    ],
)
def test_a_node_is_what_the_paper_calls_a_rank(where, keys):
    """It clips its mean at clip·√N, N nodes, by the norm of all its parts; each part sends its own largest."""
    spec = f"dgc:density=0.05,warmup_steps=6{keys}"
    results = run_ranks(frozen_steps, NODES * INSIDE, spec, where)
    method = nb.compression(spec).feedback
    derived, clipped = {}, 0
    for step in range(STEPS):
        gradients = [g.view(NODES, INSIDE, -1).mean(1) for g in gradients_of(NODES * INSIDE, step)]
        norms = torch.stack([(g**2).sum(1) for g in gradients]).sum(0).sqrt()
        limit = method.clip * math.sqrt(NODES)
        factors = torch.where(norms > limit, limit / norms, 1.0)
        clipped += int((factors < 1).sum())
        for index, (name, p) in enumerate(mlp().named_parameters()):
            expected = torch.empty(p.numel(), dtype=torch.float64)
            for span, shape in parts_of(p.shape, index, where):
                one = derived.setdefault((name, span.start), Deriving(NODES, span.stop - span.start, 0.9, False, True))
                k, unit = method.codec_at(step, None).kept(shape), 1.0
                if len(shape) < 2 or math.prod(shape) < 64:  # momentum SGD: of what everyone sends, everything
                    one.v.zero_()
                    one.masking, k = False, math.prod(shape)
                elif method.accumulate == "steps":
                    unit = rate(step, index)
                expected[span] = one.step(unit * gradients[index][:, span] * factors[:, None], k) / unit
            for result in results:
                torch.testing.assert_close(result[step][index].double(), expected, rtol=2e-4, atol=2e-6)
    assert STEPS < clipped <= NODES * STEPS


def refused(rank, world_size):
    mesh = init_device_mesh("cpu", (NODES, INSIDE), mesh_dim_names=("nodes", "shards"))
    model = mlp()
    fully_shard(model[0], mesh=mesh["shards"])
    group = mesh["nodes"].get_group()
    return refusal(lambda: compress(model, "dgc:density=0.1,clip=1.0", process_group=group))


def test_a_clip_needs_all_parameters_in_parts():
    for name, text in run_ranks(refused, NODES * INSIDE):
        assert name == "UnsupportedError"
        assert "shard all parameters among the same ranks, in one dimension; others are 1.weight" in text
