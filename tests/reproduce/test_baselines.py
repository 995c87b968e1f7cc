"""The baselines of CSSGD's paper are what they are called."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from narrowband.transport import Broadcast
from reproduce.baselines import SSGD, Flat, serve, work
from tests.ranks import RankError, run_ranks

LR = 0.3
STEPS = 6


def net(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batches(dtype=torch.float32, size=12):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(STEPS, size, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (STEPS, size), generator=generator)
    return list(zip(x.to(dtype), y, strict=True))


def large_batch_sgd(dtype=torch.float64):
    """W ← W − η ∇F over whole mini-batches (equations 2 to 4), with torch's own optimizer."""
    model = net(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for x, y in batches(dtype):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_model_and_its_vectors_share_memory():
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    flat = Flat(model)
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
    x, y = batches()[0]
    F.cross_entropy(model(x), y).backward()
    assert torch.equal(flat.gradient, torch.cat([p.grad.flatten() for p in model.parameters()]))
    expected = torch.cat([(p - LR * p.grad).flatten() for p in model.parameters()]).detach()
    flat.descend(LR)
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in model.parameters()]), expected)


# ---- SSGD ------------------------------------------------------------------------------------------------------------


def ssgd(rank, world_size):
    model = net()
    flat = Flat(model)
    rows = SSGD(flat, Broadcast(dist.group.WORLD), rank, world_size)
    for x, y in batches():
        flat.gradient.zero_()
        share = slice(rank * len(y) // world_size, (rank + 1) * len(y) // world_size)
        F.cross_entropy(model(x[share]), y[share]).backward()
        rows.average()
        flat.descend(LR)
    return flat.weights


@pytest.mark.parametrize("world_size", [2, 3])
def test_ssgd_is_sgd_with_the_whole_mini_batch(world_size):
    found = run_ranks(ssgd, world_size)
    for weights in found:
        assert torch.equal(weights, found[0]), "all nodes have the same bits"
    torch.testing.assert_close(found[0].double(), large_batch_sgd(), atol=1e-6, rtol=1e-5)


# ---- ASGD ------------------------------------------------------------------------------------------------------------


def asgd_of_one(rank, world_size):
    model = net()
    flat = Flat(model)
    if rank == 0:
        counts = []
        serve(flat.weights, [1], STEPS, LR, counts.append)
        assert counts == list(range(1, STEPS + 1))
        return flat.weights
    data = iter(batches())

    def compute():
        x, y = next(data)
        flat.gradient.zero_()
        F.cross_entropy(model(x), y).backward()

    return work(flat, 0, compute)


def test_asgd_with_one_worker_is_sgd():
    weights, sent = run_ranks(asgd_of_one, 2)
    assert sent == STEPS
    torch.testing.assert_close(weights, large_batch_sgd(torch.float32), atol=1e-6, rtol=1e-5)


def asgd_of_many(rank, world_size, updates):
    """Worker k's gradient is always the k-th unit vector, so the weights say how many of its were applied."""
    flat = Flat(nn.Linear(world_size, 1, bias=False))
    if rank == 0:
        flat.weights.zero_()
        for _ in range(2):  # stretches: workers wait in between
            serve(flat.weights, list(range(1, world_size)), updates, 1.0, lambda _: None)
        return flat.weights

    def compute():
        flat.gradient.copy_(F.one_hot(torch.tensor(rank), world_size))

    return sum(work(flat, 0, compute) for _ in range(2))


@pytest.mark.parametrize("updates", [2, 9])
def test_every_gradient_of_every_worker_is_applied_once(updates):
    weights, *sent = run_ranks(asgd_of_many, 4, updates)
    assert sum(sent) == 2 * updates
    assert (-weights).tolist() == [0, *sent]


def lost(rank, world_size):
    flat = Flat(net())
    if rank == 0:
        serve(flat.weights, [1, 2], 10, LR, lambda _: None)
    elif rank == 1:
        work(flat, 0, lambda: None)
    else:
        work(flat, 0, lambda: pytest.fail("out of memory"))


def test_a_worker_that_is_lost_is_an_error_and_no_wait_for_ever():
    with pytest.raises(RankError, match="out of memory"):
        run_ranks(lost, 3)
