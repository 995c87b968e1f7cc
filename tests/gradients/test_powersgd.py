"""PowerSGD is the paper's, and PyTorch's own hook's, to rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

import narrowband as nb
from narrowband.codecs.lowrank import factors, start
from narrowband.collectives import all_reduce_nbytes
from tests.codecs.common import backend
from tests.gradients.matrices import SPEC, all_reduced, compressed, gradients_of, net, sent_and_kept, state_of
from tests.gradients.training import (
    FINGERPRINT,
    HUGE,
    TINY,
    flat,
    loss_of,
    same,
    train,
    wrap,
)
from tests.ranks import run_ranks
from tests.thorough import thorough


def beside_pytorchs_hook(rank, world_size, batched):
    other = wrap(net())
    options = {"start_powerSGD_iter": 2, "min_compression_rate": 2, "matrix_approximation_rank": 2}
    state = theirs.PowerSGDState(None, batch_tensors_with_same_shape=batched, random_seed=5, **options)
    order = []

    def hook(state, bucket):
        order[:] = bucket.parameters()
        return theirs.powerSGD_hook(state, bucket)

    other.register_comm_hook(state, hook)
    train(other, rank, range(2))
    ours, handle = compressed(cap=HUGE, warmup_steps=2)
    train(ours, rank, range(2))
    # What their first compressed step will draw, in their order: one shape after the other.
    names = {id(p): name for name, p in other.module.named_parameters()}
    shapes: dict[tuple[int, int], list[str]] = {}
    for p in order:
        n, m, r = factors(p.shape, 2, 2.0)
        if r:
            shapes.setdefault((n, m), []).append(names[id(p)])
    factor = handle.layers.state._factors
    generator = torch.Generator().manual_seed(int(type(state.rng)(5).randint(1_000_000_000)))
    for (_, m), alike in shapes.items():
        if batched:
            for name, q in zip(alike, torch.randn(len(alike), m, 2, generator=generator), strict=True):
                factor[name] = q.T.contiguous()
        else:
            for name in alike:
                factor[name] = torch.randn(1, m, 2, generator=generator)[0].T.contiguous()
    train(other, rank, range(2, 22))
    train(ours, rank, range(2, 22))
    moved = float((flat(ours) - flat(net())).abs().max())
    return float((flat(ours) - flat(other)).abs().max()), moved, len(shapes)


@pytest.mark.parametrize("batched", [False, True])
def test_twenty_steps_agree_with_pytorchs_own_hook(batched):
    for apart, moved, shapes in run_ranks(beside_pytorchs_hook, 2, batched):
        assert shapes == 2
        assert moved > 1e-2
        assert apart < 1e-5


class Deriving:
    """The paper's algorithm in float64 for one matrix on all ranks; Q is orthogonalized, as its code does."""

    def __init__(self, ranks, shape, q, method):
        self.residual = torch.zeros(ranks, *shape, dtype=torch.float64)
        self.q, self.method = q.double(), method

    def step(self, gradients, q=None):
        m = gradients + (self.residual if self.method.ef else 0.0)
        self.q = self.q if q is None else q.double()
        for _ in range(self.method.iterations):
            p = torch.linalg.qr((m @ torch.linalg.qr(self.q).Q).mean(0)).Q
            self.q = (m.mT @ p).mean(0)
        average = p @ self.q.T
        self.residual = m - average
        return average


def frozen_steps(rank, world_size, spec, cap, steps, kind="cpu"):
    averages = []
    with backend(kind):
        model, handle = compressed(spec, cap=cap)
        for step in range(steps):
            model.zero_grad()
            loss_of(model, step, rank).backward()
            averages.append({name: p.grad.clone() for name, p in model.module.named_parameters()})
    seeds = {p.name: p.index for p in handle.layers.parameters.by_name.values()}
    return averages, state_of(handle), seeds


@pytest.mark.parametrize(("cap", "kind"), [(TINY, "cpu"), *thorough((HUGE, "cpu"), (HUGE, "reference"))])
@pytest.mark.parametrize("keys", ["", ",iterations=2", ",warm_start=false", ",ef=false", ",rank=3,min_ratio=0"])
def test_steps_of_four_ranks_follow_the_paper(keys, cap, kind):
    spec = "powersgd:" + (keys[1:] if "rank" in keys else f"rank=2{keys}")
    ranks, steps = 4, 6
    results = run_ranks(frozen_steps, ranks, spec, cap, steps, kind)
    method = nb.compression(spec).feedback
    derived = {}
    for step in range(steps):
        for name, gradients in gradients_of(ranks, step).items():
            n, m, r = factors(gradients.shape[1:], method.rank, method.min_ratio)
            r *= gradients[0].numel() >= 16
            expected = gradients.mean(0)
            if r:
                seed = (step << 32) + (results[0][2][name] << 12)
                q = start(m, r, seed, torch.device("cpu")).T
                if name not in derived:
                    derived[name] = Deriving(ranks, (n, m), q, method)
                expected = derived[name].step(gradients, None if method.warm_start else q)
            for averages, _, _ in results:
                torch.testing.assert_close(averages[step][name].double(), expected, rtol=1e-3, atol=1e-5)
    for rank, (_, state, _) in enumerate(results):
        for name, one in derived.items():
            if method.ef:
                residual = state[f"residual/{name}"].view(one.residual.shape[1:]).double()
                torch.testing.assert_close(residual, one.residual[rank], rtol=1e-3, atol=1e-5)
    # Four of 40 × 24 or 40 × 40 pay off. With a rank as large as a matrix has, everything can be factored.
    assert len(derived) == (6 if "min_ratio=0" in keys else 4)


def counted(rank, world_size, cap, coalesced=False):
    """Collectives and bytes of one step, once buckets have settled."""
    model, handle = compressed(cap=cap, coalesced=coalesced)
    train(model, rank, range(3))
    with all_reduced() as calls:
        train(model, rank, range(3, 4))
    return calls, handle.stats().last


def test_a_bucket_takes_two_all_reduces_and_what_is_not_worth_it_rides_along():
    small = sum(p.numel() for p in net().parameters() if p.dim() < 2) + 1  # and a flag
    pairs = [(40, 24), (40, 40), (40, 40), (40, 40)]
    whole = 4 * 40 + 8 * 4
    for calls, last in run_ranks(counted, 4, HUGE):
        assert calls == [small, 2 * sum(n for n, _ in pairs) + whole, 2 * sum(m for _, m in pairs)]
        assert last.sent_bytes == sum(all_reduce_nbytes(4 * numel, 4) for numel in calls) + 3 * FINGERPRINT
        assert last.raw_bytes == all_reduce_nbytes(4 * sum(p.numel() for p in net().parameters()), 4)
        assert 0 < last.relative_error < 1 if last.relative_error is not None else True
    for calls, _ in run_ranks(counted, 2, TINY):
        assert len(calls) == 1 + 2 * 4 + 2  # a bucket for every parameter: two of them have no Q
        assert calls.count(small) == 1
    for calls, _ in run_ranks(counted, 4, TINY, True):  # buckets of a few bytes travel together
        assert calls == [small, 2 * sum(n for n, _ in pairs) + whole, 2 * sum(m for _, m in pairs)]


def however_bucketed(rank, world_size, cap, steps, coalesced=False):
    model, handle = compressed(cap=cap, coalesced=coalesced)
    train(model, rank, range(steps))
    return flat(model), state_of(handle)


def test_the_result_does_not_depend_on_the_buckets():
    (one, residual), *others = (
        run_ranks(however_bucketed, 2, cap, 10, coalesced)[0]
        for cap, coalesced in ((HUGE, False), (TINY, False), (TINY, True))
    )
    for many, others_residual in others:
        torch.testing.assert_close(one, many, rtol=0, atol=1e-7)
        for key, value in residual.items():
            torch.testing.assert_close(value, others_residual[key], rtol=1e-4, atol=1e-6)


def test_ranks_end_with_the_same_parameters():
    ends = [parameters for parameters, _ in run_ranks(however_bucketed, 4, TINY, 8)]
    assert all(torch.equal(ends[0], end) for end in ends)


def conserved(rank, world_size):
    """The sum of all averages, and the residual, against the sum of all gradients."""
    averages, residual, _ = frozen_steps(rank, world_size, SPEC, TINY, 15)
    return {name: sum(step[name].double() for step in averages) for name in averages[0]}, residual


def test_nothing_is_lost():
    results = run_ranks(conserved, 3)
    total = {}
    for step in range(15):
        for name, gradients in gradients_of(3, step).items():
            total[name] = total.get(name, 0) + gradients.mean(0)
    for name, gradients in total.items():
        sent = results[0][0][name]
        others_residual = [
            residual[f"residual/{name}"].double() for _, residual in results if f"residual/{name}" in residual
        ]
        late = sum(others_residual).view_as(sent) / 3 if others_residual else 0.0
        torch.testing.assert_close(sent + late, gradients, rtol=0, atol=1e-5)


def test_a_layer_without_a_gradient_loses_nothing():
    """On one rank it takes what the others send; where no rank has one, nobody's state changes."""
    (sent, mine, residual), (_, yours, others_residual) = run_ranks(sent_and_kept, 2, SPEC)
    torch.testing.assert_close(sent + (residual[-1] + others_residual[-1]) / 2, (mine + yours) / 2, rtol=0, atol=1e-6)
    assert torch.equal(residual[1], residual[2])
    assert not torch.equal(others_residual[0], others_residual[1])


def not_finite(rank, world_size, dtype, value):
    model, handle = compressed(module=net(dtype))
    train(model, rank, range(3), dtype=dtype)
    before = state_of(handle)
    model.zero_grad()
    (loss_of(model, 4, rank, dtype) * (value if rank == 1 else 1.0)).backward()
    broken = [not bool(p.grad.isfinite().all()) for p in model.parameters()]
    kept = same(before, state_of(handle))
    train(model, rank, range(5, 7), dtype=dtype)
    return kept, broken, bool(flat(model).isfinite().all()), same(before, state_of(handle))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e20])
def test_a_broken_gradient_changes_no_state(dtype, value):
    """One that products of a step might carry out of float32 counts as broken."""
    for kept, broken, finite, unchanged in run_ranks(not_finite, 2, dtype, value):
        assert kept
        assert finite
        assert not unchanged
        assert all(broken) if not math.isfinite(value) else True
