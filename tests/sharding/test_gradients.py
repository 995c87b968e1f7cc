"""Gradients inside FSDP2, on their way to their shard: unbiased, as fine as the codec, and the mean of all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import narrowband as nb
from tests.gradients.shards import shard, whole
from tests.gradients.training import loss_of, mlp, refusal
from tests.ranks import run_ranks
from tests.sharding.training import FINE, adamw, compress, mesh_of, train

DRAWS = 30


def reduced(rank, world_size, spec, *numbers):
    """Gradients as FSDP2 reduces them, and as they arrive compressed: the same several times, drawn anew each time."""
    found = []
    for draws in (0, *numbers):
        model = shard(mlp(), mesh_of(world_size))
        if draws:
            compress(model, gradients=spec, parameters="none")
        for _ in range(max(draws, 1)):
            model.zero_grad()
            loss_of(model, 0, rank).backward()
            found.append({name: p.grad.full_tensor().double() for name, p in model.named_parameters()})
    return found


def test_gradients_are_unbiased_and_as_fine_as_the_codec():
    """QSGD's level is ‖group‖∞ / (2**(bits − 1) − 1), and a mean of N ranks is off by at most (N − 1)/N of one."""
    exact, *drawn = run_ranks(reduced, 4, "qsgd:bits=4", DRAWS)[0]
    for name, g in exact.items():
        errors = torch.stack([each[name] - g for each in drawn])
        if g.numel() < 64 or g.dim() < 2:
            assert errors.abs().max() < 1e-6 * g.abs().max()
            continue
        assert errors.abs().max() > 1e-3 * g.abs().max()
        # A rank's own gradients are up to about twice as large as their mean here.
        assert errors.abs().max() <= 4 * g.abs().max() / 7
        assert errors.mean(0).square().mean() < 3 * errors.square().mean() / len(drawn)


def one_by_one(rank, world_size):
    """What arrives at this rank's shard of one matrix, beside what the codec says of each rank's part, in float64."""
    torch.manual_seed(3)
    layer = nn.Linear(32, 16 * world_size, bias=False)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(rank))
    layer(x).square().sum().backward()
    gathered = [torch.empty_like(layer.weight.grad) for _ in range(world_size)]
    dist.all_gather(gathered, layer.weight.grad)
    own = [g.chunk(world_size)[rank].reshape(-1) for g in gathered]
    codec = nb.codec("uniform:bits=4")
    expected = sum(g.double() if at == rank else codec.roundtrip(g).double() for at, g in enumerate(own)) / world_size
    layer.zero_grad()
    model = fully_shard(layer, mesh=mesh_of(world_size))
    compress(model, gradients="uniform:bits=4", parameters="none")
    model(x).square().sum().backward()
    return (model.weight.grad.to_local().reshape(-1).double() - expected).abs().max() / expected.abs().max()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_rank_adds_up_what_others_say_and_its_own(ranks):
    assert max(run_ranks(one_by_one, ranks)) < 1e-6


def not_finite(rank, world_size):
    model = shard(mlp(), mesh_of(world_size))
    compress(model, **FINE)
    loss = loss_of(model, 0, rank)
    (loss * (float("nan") if rank == 1 else 1.0)).backward()
    return [bool(p.grad.to_local().isfinite().all()) for p in model.parameters()]


def test_what_is_not_finite_on_one_rank_is_seen_in_every_shard():
    assert not any(any(each) for each in run_ranks(not_finite, 3))


def with_a_factor(rank, world_size, forced):
    model = shard(mlp(), mesh_of(world_size))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if forced:
                module.set_force_sum_reduction_for_comms(True)
    compress(model, gradients="uniform:bits=8", parameters="none")
    refused = refusal(lambda: loss_of(model, 0, rank).backward())
    return refused, [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]


def test_gradients_may_be_divided_by_another_number():
    (refused, _), *_ = run_ranks(with_a_factor, 2, False)
    assert refused[0] == "UnsupportedError"
    assert "set_force_sum_reduction_for_comms" in refused[1]
    (refused, summed), *_ = run_ranks(with_a_factor, 2, True)
    assert refused is None
    (exact, *_), *_ = run_ranks(reduced, 2, "none")
    for total, mean in zip(summed, exact.values(), strict=True):
        assert (total.double() - 2 * mean).norm() < 0.02 * mean.norm()


def of_two_dtypes(rank, world_size):
    """By name: what a gradient is off by when compressed to 2 bits, where one bias has a gradient of another dtype."""
    found = []
    for ours in (True, False):
        model = mlp()
        model[0].bias.grad_dtype = torch.bfloat16
        model = fully_shard(model, mesh=mesh_of(world_size))
        if ours:
            compress(model, gradients="uniform:bits=2", parameters="none")
        if (refused := refusal(lambda: loss_of(model, 0, rank).backward())) is not None:  # noqa: B023 - called at once
            return refused
        found.append([p.grad.full_tensor().double() for p in model.parameters()])
    names = [name for name, _ in model.named_parameters()]
    return {name: float((x - y).norm() / y.norm()) for name, x, y in zip(names, *found, strict=True)}


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no gradients of another dtype")
def test_biases_are_exact_where_gradients_have_two_dtypes():
    """PyTorch 2.15 sends gradients of one dtype after those of another, and not in the order of the parameters."""
    errors, *_ = run_ranks(of_two_dtypes, 2)
    if isinstance(errors, tuple):
        pytest.skip(f"FSDP2 of PyTorch {torch.__version__} does not reduce gradients of two dtypes: {errors[1]}")
    for name, error in errors.items():
        matrix = name.endswith("weight") and name != "1.weight"
        assert 0.05 < error < 0.8 if matrix else error < 1e-2, name


class Sometimes(nn.Module):
    """One of its layers is used in some steps only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.extra, self.last = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 8)
        self.use = True

    def forward(self, x):
        h = self.first(x).relu()
        return self.last(self.extra(h) if self.use else h)


def partly_used(rank, world_size):
    found = []
    for ours in (True, False):
        model = fully_shard(Sometimes(), mesh=mesh_of(world_size))
        if ours:
            compress(model, gradients="qsgd:bits=8", parameters="none")
        optimizer = adamw(model)
        for step in range(6):
            model.use = step % 2 == 0
            train(model, rank, [step], optimizer)
        found.append(whole(model))
    return (found[0] - found[1]).norm() / found[1].norm()


def test_parameters_without_a_gradient_in_some_steps():
    assert max(run_ranks(partly_used, 2)) < 0.02


def frozen_in_turn(rank, world_size, spec):
    """Gradients where another matrix of the same size is frozen in each pass, and where they are not compressed."""
    found = []
    for gradients in ("none", spec):
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 8), nn.Linear(8, 24), nn.Linear(24, 24)))
        compress(model, gradients=gradients, parameters="none")
        for at in (0, 3):
            model.zero_grad()
            for number, layer in enumerate(model):
                layer.requires_grad_(number != at)
            model(torch.ones(5, 24) + rank).square().mean().backward()
            found.append({n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None})
    return found


def test_layers_that_are_frozen_in_turn_do_not_change_places():
    """Biases went into groups of four bits, as did parts of two matrices together."""
    *exact, first, second = run_ranks(frozen_in_turn, 2, "uniform:bits=4")[0]
    for whole_gradients, compressed in zip(exact, (first, second), strict=True):
        assert len(compressed) == 6
        for name, g in whole_gradients.items():
            if name.endswith("bias"):
                assert torch.equal(compressed[name], g)
            else:
                assert (compressed[name] - g).abs().max() < 0.1 * g.abs().max()
