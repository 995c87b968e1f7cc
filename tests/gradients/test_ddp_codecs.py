"""Every codec under DDP: ranks stay together, whatever the buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.gradients.training import (
    HUGE,
    TINY,
    Branches,
    buckets,
    compress,
    data,
    flat,
    loss_of,
    mlp,
    residuals,
    same,
    sgd,
    train,
    wrap,
)
from tests.ranks import run_ranks
from tests.thorough import thorough

SPECS = [
    ("none", "auto"),
    ("none+ef", "auto"),
    ("fp16", "auto"),
    ("bf16", "all_gather"),
    ("fp16", "scatter_reduce"),
    ("uniform:bits=8", "auto"),
    ("uniform:bits=4,rounding=stochastic+ef", "scatter_reduce"),
    ("qsgd:bits=8", "all_gather"),
    ("qsgd:bits=8,bucket=64,norm=max", "scatter_reduce"),
    ("sign:bucket=64+ef", "all_gather"),
    ("topk:density=0.1+ef", "auto"),
    ("topk:density=0.1,select=sampled,values=fp16+ef", "all_gather"),
    ("topk:density=0.2,scope=sample,values=int8,indices=int32+ef", "auto"),
    ("threshold:value=0.01+ef", "auto"),
    ("randomk:density=0.2+ef", "auto"),
    ("lowrank:rank=2+ef", "auto"),
    ("topk:density=0.2+ef-mixed", "auto"),
    ("topk:density=0.2+ef21", "auto"),
    ("qsgd:bits=8+ef21", "auto"),
]


# ---- every codec -----------------------------------------------------------------------------------------------------


STEPS = 6


def train_with_each(rank, world_size, specs):
    answers = []
    for spec, collective in specs:
        model = wrap(mlp(), cap=TINY)
        handle = compress(model, spec, min_numel=64, collective=collective)
        before = sum(loss_of(model, 0, r).item() for r in range(world_size))
        optimizer = sgd(model, lr=0.2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, 0, rank).backward()
            optimizer.step()
        after = sum(loss_of(model, 0, r).item() for r in range(world_size))
        answers.append((flat(model), before, after, handle.stats().total))
    return answers


@pytest.mark.parametrize("world_size", [3, *thorough(1, 2, 4)])
def test_every_codec_trains_and_keeps_the_ranks_together(world_size):
    answers = run_ranks(train_with_each, world_size, SPECS)
    for index, (spec, collective) in enumerate(SPECS):
        for rank in range(world_size):
            parameters, before, after, total = answers[rank][index]
            assert torch.equal(parameters, answers[0][index][0]), f"{spec} {collective}: rank {rank} has drifted away"
            assert after < 0.95 * before, f"{spec} {collective}: loss {before} → {after}"
            assert total.steps == STEPS
            if spec == "none":
                assert total.relative_error is None
            else:
                assert 0.0 <= total.relative_error < 1.0, f"{spec}: {total.relative_error}"


def train_in_buckets(rank, world_size, specs, caps):
    answers = []
    for spec, collective in specs:
        for cap, coalesced in caps:
            model = wrap(mlp(), cap=cap)
            handle = compress(model, spec, min_numel=64, collective=collective, seed=3, coalesced=coalesced)
            train(model, rank, range(3))  # in the first buckets are others
            answers.append((flat(model), residuals(handle), buckets(model)))
    return answers


@pytest.mark.parametrize("world_size", [3, *thorough(2, 4)])
def test_the_result_does_not_depend_on_the_buckets(world_size):
    specs = [(spec, way) for spec, way in SPECS if way in ("all_gather", "scatter_reduce")]
    specs += [("topk:density=0.1+ef", "auto"), ("threshold:value=0.01+ef", "auto"), ("qsgd:bits=4", "auto")]
    specs += [("lowrank:rank=2+ef", "auto"), ("lowrank:rank=2", "auto")]
    caps = ((HUGE, False), (TINY, False), (TINY, True), (0.004, False))
    for answers in run_ranks(train_in_buckets, world_size, specs, caps):
        for index, (spec, way) in enumerate(specs):
            huge, *others = answers[index * len(caps) : (index + 1) * len(caps)]
            assert huge[2] == 1
            for other in others:
                assert other[2] > 1
                assert torch.equal(other[0], huge[0]), f"{spec} {way}: other parameters"
                assert same(other[1], huge[1]), f"{spec} {way}: has another residual"


def large_layers_in_buckets(rank, world_size, cap):
    """Large enough that, one by one, layers would be gathered, and together be reduced in chunks."""
    torch.manual_seed(1)
    model = wrap(nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), cap=cap)
    compress(model, "qsgd:bits=4")
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 256, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        optimizer.step()
    return flat(model), buckets(model)


def test_the_collective_that_is_chosen_does_not_depend_on_the_buckets():
    huge, tiny = (run_ranks(large_layers_in_buckets, 4, cap)[0] for cap in (HUGE, TINY))
    assert huge[1] < tiny[1]
    assert torch.equal(huge[0], tiny[0])


def runs_with_seeds(rank, world_size, seeds):
    results = []
    for seed in seeds:
        model = wrap(mlp())
        compress(model, "qsgd:bits=4", min_numel=64, seed=seed)
        train(model, rank, range(2))
        results.append(flat(model))
    return results


def test_equal_seeds_are_equal_runs():
    first, second, other = run_ranks(runs_with_seeds, 2, (7, 7, 8))[0]
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


# ---- layers that are left out ----------------------------------------------------------------------------------------


def leave_out(rank, world_size, options):
    model = wrap(Branches(), find_unused_parameters=True, **options)
    handle = compress(model, "topk:density=0.05+ef", min_numel=64)
    history = []
    for step in range(6):
        model.zero_grad(set_to_none=True)
        x, y = data(step, rank)
        right = not ((step == 2 and rank == 1) or step in (3, 4))
        (model(x, right=right) - y).square().mean().backward()
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.module.named_parameters()}
        history.append((grads, residuals(handle)))
    return history


@pytest.mark.parametrize("options", [{}, {"cap": TINY, "gradient_as_bucket_view": True}], ids=["one bucket", "views"])
def test_a_layer_that_is_left_out_keeps_the_residual(options):
    by_rank = run_ranks(leave_out, 2, options)
    name = "right.weight"
    for history in by_rank:
        assert all(history[step][1][name].any() for step in range(6))
        for step in (3, 4):  # used by nobody
            assert torch.equal(history[step][1][name], history[2][1][name])
            assert not torch.equal(history[step][1]["left.weight"], history[step - 1][1]["left.weight"])
            grad = history[step][0][name]
            assert grad is None or not grad.any()
    # Used by rank 0 only: rank 1 keeps its residual, and both get the average of one.
    assert torch.equal(by_rank[1][2][1][name], by_rank[1][1][1][name])
    assert not torch.equal(by_rank[0][2][1][name], by_rank[0][1][1][name])
    for step in range(6):
        for a, b in zip(by_rank[0][step][0].values(), by_rank[1][step][0].values(), strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
