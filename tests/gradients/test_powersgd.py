"""PowerSGD on real ranks: the paper's algorithm, PyTorch's own hook, and what a hook of many buckets needs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

import narrowband as nb
from narrowband.codecs.lowrank import factors, start
from narrowband.collectives import all_reduce_nbytes
from tests.codecs.common import backend
from tests.gradients.training import (
    FINGERPRINT,
    HUGE,
    TINY,
    compress,
    data,
    flat,
    heard,
    loss_of,
    refusal,
    same,
    sgd,
    train,
    wrap,
)
from tests.ranks import run_ranks

SPEC = "powersgd:rank=2"


def net(dtype=torch.float32):
    """Three matrices of one shape, one of another, one that factors would not shorten, biases."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40),
        nn.Linear(40, 4), nn.Linear(4, 8),
    ).to(dtype)  # fmt: skip


def compressed(spec=SPEC, *, cap=TINY, module=None, coalesced=False, **options):
    """A model with a bucket for every parameter, each sent by itself; ``coalesced``: sent as users have it."""
    model = wrap(module if module is not None else net(), cap)
    return model, compress(model, spec, min_numel=16, coalesced=coalesced, **options)


def state_of(handle):
    return {key: value.clone() for key, value in handle.state_dict()["feedback"].items()}


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


def gradients_of(ranks, step):
    model = net(torch.float64)
    found = []
    for rank in range(ranks):
        model.zero_grad()
        loss_of(model, step, rank, torch.float64).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


@pytest.mark.parametrize(("cap", "kind"), [(TINY, "cpu"), (HUGE, "cpu"), (HUGE, "reference")])
@pytest.mark.parametrize("keys", ["", ",iterations=2", ",warm_start=false", ",ef=false", ",rank=3,min_ratio=0"])
def test_steps_of_four_ranks_follow_the_paper(keys, cap, kind):
    spec = "powersgd:" + (keys[1:] if "rank" in keys else f"rank=2{keys}")
    ranks, steps = 4, 12
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
    calls, original = [], dist.all_reduce

    def all_reduce(x, *arguments, **options):
        calls.append(x.numel())
        return original(x, *arguments, **options)

    dist.all_reduce = all_reduce
    try:
        train(model, rank, range(3, 4))
    finally:
        dist.all_reduce = original
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


class Fork(nn.Module):
    """Two layers of which a batch may use one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.always, self.sometimes = nn.Linear(24, 30), nn.Linear(30, 30)

    def forward(self, x, both):
        y = self.always(x)
        return self.sometimes(y) if both else y


def missing(rank, world_size):
    model = wrap(Fork(), find_unused_parameters=True)
    handle = compress(model, SPEC, min_numel=64)
    sent, residual = torch.zeros(30, 30), []
    local = torch.zeros(30, 30)
    plain = Fork()
    for step, both in enumerate(((True, True), (True, False), (False, False), (False, True), (True, True))):
        model.zero_grad()
        plain.zero_grad()
        x = data(step, rank)[0]
        model(x, both[rank]).square().mean().backward()
        plain(x, both[rank]).square().mean().backward()
        if model.module.sometimes.weight.grad is not None:
            sent += model.module.sometimes.weight.grad
        if plain.sometimes.weight.grad is not None:
            local += plain.sometimes.weight.grad
        residual.append(state_of(handle)["residual/sometimes.weight"].view(30, 30))
    return sent, local, residual


def test_a_layer_without_a_gradient_loses_nothing():
    """On one rank it takes what the others send; where no rank has one, nobody's state changes."""
    (sent, mine, residual), (_, yours, others_residual) = run_ranks(missing, 2)
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


def resumed(rank, world_size):
    whole, handle = compressed()
    train(whole, rank, range(5))
    handle.set_layers({"2.weight": "powersgd:rank=1"})
    train(whole, rank, range(5, 10))
    first, handle = compressed()
    train(first, rank, range(5))
    handle.set_layers({"2.weight": "powersgd:rank=1"})
    train(first, rank, range(5, 6))
    state = {**handle.state_dict(), "feedback": state_of(handle)}
    module = net()
    module.load_state_dict(first.module.state_dict())
    second, handle = compressed(module=module)
    handle.load_state_dict(state)
    train(second, rank, range(6, 10))
    bad = {
        "ef": {**state, "feedback": {"0.weight": torch.zeros(960)}},
        "size": {**state, "feedback": {"residual/0.weight": torch.zeros(7)}},
        "factor": {**state, "feedback": {"factor/0.weight": torch.zeros(2, 23)}},
    }
    said = {name: refusal(lambda wrong=wrong: handle.load_state_dict(wrong)) for name, wrong in bad.items()}
    return torch.equal(flat(whole), flat(second)), said


def test_a_resumed_run_is_the_same_to_the_bit():
    for equal, said in run_ranks(resumed, 2):
        assert equal
        assert all(error is not None and error[0] == "ValueError" for error in said.values()), said


def another_rank(rank, world_size):
    model, handle = compressed("powersgd:rank=3", module=nn.Linear(60, 50, bias=False))
    factor = handle.layers.state._factors
    seen = []

    def step(at):
        x = torch.randn(8, 60, generator=torch.Generator().manual_seed(at + 100 * rank))
        model.zero_grad()
        model(x).square().sum().backward()
        rank_of = int(torch.linalg.matrix_rank(model.module.weight.grad, rtol=1e-4))
        seen.append((tuple(factor["weight"].shape), rank_of, handle.stats().last.sent_bytes))

    step(0)
    before, residual = factor["weight"].clone(), state_of(handle)["residual/weight"]
    handle.set_layers({"weight": "powersgd:rank=5"})
    grown = handle.layers.state.factor("weight", 5, 60, 9, torch.device("cpu"))
    kept = torch.equal(grown[:3], before), torch.equal(residual, state_of(handle)["residual/weight"])
    step(1)
    handle.set_layers({"weight": "powersgd:rank=1"})
    step(2)
    handle.set_layers({"weight": "powersgd:rank=40"})  # no longer worth factoring: all residuals goes
    step(3)
    return seen, kept, float(state_of(handle)["residual/weight"].abs().max())


def test_the_rank_of_a_layer_can_change_while_training():
    for seen, kept, residual in run_ranks(another_rank, 2):
        assert [shape for shape, _, _ in seen] == [(3, 60), (5, 60), (1, 60), (1, 60)]
        assert [rank for _, rank, _ in seen][:3] == [3, 5, 1]
        assert [sent - 4 - FINGERPRINT for _, _, sent in seen] == [4 * 110 * 3, 4 * 110 * 5, 4 * 110, 4 * 3000]
        assert kept == (True, True)
        assert residual == 0


def bad_layers(rank, world_size):
    _, handle = compressed()
    return [
        refusal(lambda name=name, spec=spec: handle.set_layers({name: spec}))
        for name, spec in (
            ("nowhere", SPEC),
            ("0.bias", SPEC),
            ("0.weight", "powersgd:rank=2,min_ratio=5"),
            ("0.weight", "dgc"),
        )
    ] + [refusal(lambda: compressed(collective="all_gather")), refusal(lambda: compressed("powersgd:rank=0"))]


def test_what_a_layer_cannot_have_is_refused():
    (said,) = run_ranks(bad_layers, 1)
    assert [error[0] for error in said] == ["ValueError"] * 4 + ["UnsupportedError", "ValueError"]
    assert "2.weight" in said[0][1]
    assert "rank=0 must be at least 1" in said[-1][1]


def too_large_a_rank(rank, world_size):
    with heard() as messages:
        model, _ = compressed("powersgd:rank=30,min_ratio=0")
        train(model, rank, range(2))
    return messages, bool(flat(model).isfinite().all())


def test_a_rank_that_matrices_do_not_have_is_cut_and_said_once():
    (messages, finite), (of_rank_1, also_finite) = run_ranks(too_large_a_rank, 2)
    said = [message for message in messages if "rank 30" in message]
    assert len(said) == 1
    assert "0.weight (40 × 24: rank 24)" in said[0]
    assert "2.weight" not in said[0]
    assert of_rank_1 == []
    assert finite
    assert also_finite


def too_narrow(rank, world_size):
    said = []
    for module in (nn.Linear(300, 8, bias=False), nn.Linear(300, 80, bias=False)):
        with heard() as messages:
            model, handle = compressed("powersgd:rank=4", module=module)
        model(torch.randn(4, 300)).sum().backward()
        said.append((messages, handle.stats().last.ratio))
    return said


def test_matrices_that_are_too_narrow_to_be_factored_are_said_to_travel_uncompressed():
    (narrow, ratio), (wide, much) = run_ranks(too_narrow, 2)[0]
    assert len(narrow) == 1
    assert "factors none of this model's matrices" in narrow[0]
    assert ratio == pytest.approx(1.0, abs=0.01)
    assert wide == []
    assert much > 10


def scaled(rank, world_size):
    ends = []
    for scales in ((1.0,) * 6, (8.0, 8.0, 2.0, 2.0, 16.0, 16.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
        model, _ = compressed(grad_scaler=scaler)
        optimizer = sgd(model)
        for step, then in enumerate((*scales[1:], 1.0)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, rank)).backward()
            scaler.step(optimizer)
            scaler.update(then)
        ends.append(flat(model))
    return ends


def test_a_new_loss_scale_rescales_the_residual():
    for once, twice in run_ranks(scaled, 2):
        torch.testing.assert_close(once, twice, rtol=0, atol=1e-6)


def fewer_ranks(rank, world_size, states):
    model, handle = compressed()
    if states is None:
        train(model, rank, range(5))
        return {**handle.state_dict(), "feedback": state_of(handle)}
    handle.load_state_dict(states)
    return state_of(handle)


def test_another_number_of_ranks_shares_the_residual():
    states = run_ranks(fewer_ranks, 3, None)
    for residual in run_ranks(fewer_ranks, 2, states):
        assert any(key.startswith("factor/") for key in residual)
        for key, value in residual.items():
            torch.testing.assert_close(value, sum(state["feedback"][key] for state in states) / 3)


def test_a_spec_is_its_canonical_form():
    for text in (
        "powersgd:rank=4",
        "powersgd:rank=2,iterations=2,warm_start=false,min_ratio=1.5,ef=false",
    ):
        whole = nb.compression(text)
        assert str(whole) == text
        assert nb.compression(str(whole)) == whole
    assert nb.compression("powersgd:rank=4+ef") == nb.compression("powersgd") == nb.compression(nb.PowerSGD())
    for text, word in (
        ("powersgd:rank=4,ef=false+ef", "own way"),
        ("powersgd:iterations=0", "iterations=0"),
        ("powersgd:min_ratio=-1", "min_ratio=-1.0"),
        ("powersgd:min_ratio=nan", "min_ratio=nan"),
        ("powersdg", "did you mean 'powersgd'"),
    ):
        with pytest.raises(ValueError, match=word):
            nb.compression(text)
