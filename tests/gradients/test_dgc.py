"""DGC is the paper's, step by step, on real ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import narrowband as nb
from tests.gradients.momentum import SPARSE, compressed, state_of
from tests.gradients.training import TINY, compress, flat, loss_of, mlp, refusal, same, sgd, train, wrap
from tests.ranks import run_ranks
from tests.thorough import thorough

WHOLE = "dgc:density=1.0,masking=false"


def like_momentum_sgd(rank, world_size, nesterov):
    plain = wrap(mlp())
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": nesterov}
    train(plain, rank, range(20), torch.optim.SGD(plain.parameters(), **options))
    apart = {}
    key = f",nesterov={nesterov}"
    for name, spec, start in (("everything", WHOLE + key, 0), ("not yet", SPARSE + key, 20), ("later", WHOLE + key, 7)):
        model, optimizer, _ = compressed(
            spec, optimizer=lambda m: nb.DGCSGD(m.parameters(), **options), warmup_steps=start
        )
        train(model, rank, range(20), optimizer)
        apart[name] = float((flat(model) - flat(plain)).abs().max())
    return apart


@pytest.mark.parametrize("nesterov", [False, True])
def test_sending_everything_is_momentum_sgd(nesterov):
    """Weights, biases, norms and weight decay; also while nothing is compressed yet, and across that change."""
    for apart in run_ranks(like_momentum_sgd, 2, nesterov):
        assert max(apart.values()) < 2e-6, apart


class Deriving:
    """The paper's equations in float64, for one parameter on all ranks at once: rows are ranks."""

    def __init__(self, ranks, numel, momentum, nesterov, masking):
        self.u = torch.zeros(ranks, numel, dtype=torch.float64)
        self.v = torch.zeros(ranks, numel, dtype=torch.float64)
        self.momentum, self.nesterov, self.masking = momentum, nesterov, masking

    def step(self, gradients, k):
        if self.nesterov:
            self.u = self.momentum * (self.u + gradients)
            self.v = self.v + self.u + gradients
        else:
            self.u = self.momentum * self.u + gradients
            self.v = self.v + self.u
        largest = torch.zeros_like(self.v, dtype=torch.bool)
        largest.scatter_(1, self.v.abs().topk(k, dim=1).indices, True)
        sent = torch.where(largest, self.v, 0.0)
        self.v = torch.where(largest, 0.0, self.v)
        if self.masking:
            self.u = torch.where(largest, 0.0, self.u)
        return sent.mean(0)


def gradients_of(ranks, step):
    """What every rank's gradients are, computed here: the model's parameters are equal on all."""
    model = mlp(torch.float64)
    found = []
    for rank in range(ranks):
        model.zero_grad()
        loss_of(model, step, rank, torch.float64).backward()
        found.append([p.grad.reshape(-1).clone() for p in model.parameters()])
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def frozen_steps(rank, world_size, spec, steps, rates=None, **options):
    """The averages of steps that leave the parameters where they are."""
    optimizer = None

    def made(model):
        nonlocal optimizer
        optimizer = sgd(model, lr=0.0)
        return optimizer

    model, _, _ = compressed(spec, optimizer=made, **options)
    averages = []
    for step in range(steps):
        model.zero_grad()
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[step]
        loss_of(model, step, rank).backward()
        averages.append([p.grad.reshape(-1).clone() for p in model.parameters()])
    return averages


@pytest.mark.parametrize(
    "keys", ["", ",nesterov=true,masking=false,momentum=0.8", *thorough(",nesterov=true", ",masking=false")]
)
@pytest.mark.parametrize("clip", ["", ",clip=0.15"])
def test_steps_of_four_ranks_follow_the_paper(keys, clip):
    spec = f"dgc:density=0.03,warmup_steps=6{keys}{clip}"
    ranks, steps = 4, 9
    results = run_ranks(frozen_steps, ranks, spec, steps)
    method = nb.compression(spec).feedback
    shapes = [p.shape for p in mlp().parameters()]
    derived = [Deriving(ranks, shape.numel(), method.momentum, method.nesterov, method.masking) for shape in shapes]
    clipped = 0
    for step in range(steps):
        gradients = gradients_of(ranks, step)
        norms = torch.stack([(g**2).sum(1) for g in gradients]).sum(0).sqrt()
        added, limit = norms / ranks, method.clip / math.sqrt(ranks)  # the paper's gradients have 1/N in them
        factors = torch.where(added > limit, limit / added, 1.0) if clip else torch.ones(ranks, dtype=torch.float64)
        clipped += int((factors < 1).sum())
        for i, shape in enumerate(shapes):
            whole = len(shape) < 2 or shape.numel() < 64
            k = method.codec_at(step, None).kept(shape)
            if whole:  # momentum SGD: of what everyone sends, everything
                derived[i].v.zero_()
                derived[i].masking, k = False, shape.numel()
            expected = derived[i].step(gradients[i] * factors[:, None], k)
            for result in results:
                torch.testing.assert_close(result[step][i].double(), expected, rtol=2e-4, atol=2e-6)
    assert clipped > 0.8 * ranks * steps if clip else not clipped


@pytest.mark.parametrize("keys", [",nesterov=true", *thorough("", ",masking=false")])
def test_steps_are_accumulated_at_the_rates_of_their_gradients(keys):
    """A rate that rises from nothing, falls, and is zero in between: the residual are steps of the parameters."""
    spec = f"dgc:density=0.03,accumulate=steps{keys}"
    ranks, steps = 4, 30
    rates = [0.0, 0.05, 0.1, *(0.1 * 0.8**step for step in range(steps - 3))]
    rates[11] = 0.0
    results = run_ranks(frozen_steps, ranks, spec, steps, rates)
    method = nb.compression(spec).feedback
    shapes = [p.shape for p in mlp().parameters()]
    derived = [Deriving(ranks, shape.numel(), method.momentum, method.nesterov, method.masking) for shape in shapes]
    unit = 1.0
    for step in range(steps):
        unit = rates[step] or unit
        for i, (shape, gradients) in enumerate(zip(shapes, gradients_of(ranks, step), strict=True)):
            if len(shape) < 2 or shape.numel() < 64:
                continue
            expected = derived[i].step(gradients * rates[step], method.codec.kept(shape)) / unit
            for result in results:
                torch.testing.assert_close(result[step][i].double(), expected, rtol=2e-4, atol=2e-5)


def follows(rank, world_size, cap):
    """What a changing rate applies and what is left of it, where nothing is masked and there is no momentum."""
    spec = "dgc:density=0.1,momentum=0,masking=false,accumulate=steps"
    without = refusal(lambda: compress(wrap(mlp()), spec, min_numel=64))
    model, optimizer, handle = compressed(spec, optimizer=sgd, cap=cap, small="fused")
    begin = flat(model)
    wanted = torch.zeros_like(begin)
    for step in range(12):
        optimizer.param_groups[0]["lr"] = rate = 0.1 * 0.7**step
        own = mlp()
        own.load_state_dict(model.module.state_dict())
        loss_of(own, step, rank).backward()
        wanted -= rate * torch.cat([p.grad.reshape(-1) for p in own.parameters()]).double()
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    residual = handle.state_dict()["feedback"]
    names = [name for name, p in model.module.named_parameters() if p.dim() > 1]
    left = {name: residual[f"now/{name}"] for name in names}
    vector = residual["now/(torch.float32)"]
    at, parts = 0, []
    for name, p in model.module.named_parameters():
        parts.append(left[name] if name in left else vector[at : at + p.numel()])
        at += 0 if name in left else p.numel()
    return without, begin - flat(model), -wanted, torch.cat(parts).double()


@pytest.mark.parametrize("cap", [100.0, TINY], ids=["one bucket", "many"])
def test_where_the_rate_falls_no_step_is_lost(cap):
    answers = run_ranks(follows, 2, cap)
    assert all("pass optimizer=" in without[1] for without, *_ in answers)
    taken = answers[0][1]
    wanted = sum(wanted for _, _, wanted, _ in answers) / 2
    residual = sum(residual for *_, residual in answers) / 2
    torch.testing.assert_close(taken + residual, wanted, rtol=1e-4, atol=1e-6)
    assert float(residual.abs().max()) > 100 * float((taken + residual - wanted).abs().max())


def together(rank, world_size, spec, steps, cap, small):
    return frozen_steps(rank, world_size, spec, steps, cap=cap, small=small)


@pytest.mark.parametrize("cap", [TINY, *thorough(100.0)])
@pytest.mark.parametrize("small", ["fused", "topk:density=0.1"])
def test_small_parameters_together_are_a_layer_of_the_model(cap, small):
    spec, ranks, steps = "dgc:density=0.03,warmup_steps=12,clip=0.15", 3, 30
    results = run_ranks(together, ranks, spec, steps, cap, small)
    method = nb.compression(spec).feedback
    least = 0.0 if small == "fused" else nb.codec(small).density  # also while the rest warms up
    is_small = [len(p.shape) < 2 or p.numel() < 64 for p in mlp().parameters()]
    numel = sum(p.numel() for p, here in zip(mlp().parameters(), is_small, strict=True) if here)
    derived = Deriving(ranks, numel, 0.9, False, True)
    for step in range(steps):
        gradients = gradients_of(ranks, step)
        norms = torch.stack([(g**2).sum(1) for g in gradients]).sum(0).sqrt()
        factors = torch.clamp(0.15 / math.sqrt(ranks) / (norms / ranks), max=1.0)
        vector = torch.cat([g for g, here in zip(gradients, is_small, strict=True) if here], 1)
        kept = replace(method.codec_at(step, None), density=max(method.codec_at(step, None).density, least)).kept(
            (numel,)
        )
        expected = derived.step(vector * factors[:, None], kept)
        for result in results:
            got = torch.cat([x for x, here in zip(result[step], is_small, strict=True) if here])
            torch.testing.assert_close(got.double(), expected, rtol=2e-4, atol=2e-6)


def another_density(rank, world_size):
    """How much of each compressed layer is sent, step by step; a resumed handle goes on so."""
    model, optimizer, handle = compressed("dgc:density=0.03,warmup_steps=4")
    handle.set_layers({"0.weight": "topk:density=0.1", "3.weight": "topk:density=0.01"})
    names = [name for name, p in model.module.named_parameters() if p.numel() >= 64 and p.dim() > 1]
    sent = []
    for step in range(6):
        if step == 5:
            state, end = handle.state_dict(), model.module.state_dict()
            model, optimizer, handle = compressed("dgc:density=0.03,warmup_steps=4")
            model.module.load_state_dict(end)
            handle.load_state_dict(state)
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        sent.append([int(model.module.get_parameter(name).grad.count_nonzero()) for name in names])
    kept = {name: model.module.get_parameter(name).shape for name in names}
    return sent, kept, refusal(lambda: handle.set_layers({"0.weight": "dgc:density=0.1"}))


def test_a_layer_can_send_more_or_less_but_no_less_than_warm_up():
    ((sent, shapes, refused),) = run_ranks(another_density, 1)
    own = {"0.weight": 0.1, "3.weight": 0.01}
    for step, counts in enumerate(sent):
        usual = nb.compression("dgc:density=0.03,warmup_steps=4").codec_at(step)
        for (name, shape), count in zip(shapes.items(), counts, strict=True):
            density = own.get(name, 0.03) if step >= 4 else max(own.get(name, 0.0), usual.density)
            assert count == nb.codecs.TopK(density=density).kept(shape), (step, name)
    assert refused[0] == "ValueError"


def everything_together(rank, world_size, spec, broken):
    model, handle = mlp(), None
    model = wrap(model, TINY)
    handle = compress(model, spec, min_numel=64, small="fused", optimizer=sgd(model))
    train(model, rank, range(3))
    before, sent = state_of(handle), handle.stats().last
    model.zero_grad()
    loss = loss_of(model, 3, rank)
    if rank == 1 and broken is not None:
        list(model.parameters())[broken].register_hook(lambda g: g * math.nan)
    loss.backward()
    finite = [bool(p.grad.isfinite().all()) for p in model.parameters()]
    return same(before, state_of(handle)), finite, sent.ratio


@pytest.mark.parametrize("spec", ["dgc:density=0.01", "topk:density=0.01+ef", "threshold:value=0.1+ef"])
@pytest.mark.parametrize("broken", [None, 0, 1, -1])
def test_together_a_broken_gradient_anywhere_changes_no_state(spec, broken):
    for kept, finite, ratio in run_ranks(everything_together, 2, spec, broken):
        assert kept == (broken is not None)
        assert finite[broken if broken is not None else 0] == (broken is None)
        assert ratio > 20 or spec.startswith("threshold")


def alike(rank, world_size, spec):
    """A codec that loses nothing to speak of: small parameters may go either way."""
    ends = []
    for small in ("uncompressed", "fused"):
        model = wrap(mlp(), TINY)
        compress(model, spec, min_numel=64, small=small)
        train(model, rank, range(5))
        ends.append(flat(model))
    refused = refusal(lambda: compress(wrap(mlp()), "powersgd", small="fused"))
    unused = refusal(lambda: compress(wrap(mlp(), find_unused_parameters=True), spec, small="fused"))
    neither = [
        refusal(lambda small=small: compress(wrap(mlp()), "dgc", small=small))
        for small in ("both", "dgc:density=0.1", "topk:density=0.1+ef", "qsgd:bits=4")
    ]
    return ends, refused, unused, neither


@pytest.mark.parametrize("spec", ["topk:density=1.0+ef", "fp16", "uniform:bits=8,rounding=stochastic", "none"])
def test_together_or_dense(spec):
    for (dense, together_), refused, unused, neither in run_ranks(alike, 4, spec):
        torch.testing.assert_close(dense, together_, rtol=0, atol=2e-3 if spec != "topk:density=1.0+ef" else 1e-6)
        assert (refused[0], unused[0]) == ("UnsupportedError", "UnsupportedError")
        assert [kind for kind, _ in neither] == ["ValueError"] * 4
        assert "'topk:density=0.1'" in neither[1][1]
