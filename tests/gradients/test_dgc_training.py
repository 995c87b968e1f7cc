"""DGC in training: warm-up, accumulation, scaling, states, pauses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import narrowband as nb
from tests.gradients.momentum import SPARSE, compressed, nesterov, state_of
from tests.gradients.training import (
    TINY,
    Fork,
    compress,
    data,
    flat,
    heard,
    loss_of,
    mlp,
    refusal,
    same,
    sgd,
    train,
    wrap,
)
from tests.ranks import run_ranks


def warming_up(rank, world_size):
    kept = {}
    for length in ("warmup_steps=8", "warmup_epochs=4"):
        model, optimizer, handle = compressed(f"dgc:density=0.001,{length}", module=nn.Linear(100, 100, bias=False))
        kept[length] = []
        for step in range(10):
            if length == "warmup_epochs=4":
                handle.set_epoch(step // 2)
            optimizer.zero_grad()
            x = torch.randn(4, 100, generator=torch.Generator().manual_seed(step + 10 * rank))
            model(x).square().sum().backward()
            kept[length].append(int((model.module.weight.grad != 0).sum()))
    model, _, _ = compressed("dgc:density=0.001,warmup_epochs=4")
    kept["no epoch"] = refusal(loss_of(model, 0, rank).backward)
    return kept


def test_density_falls_by_steps_or_epochs():
    for kept in run_ranks(warming_up, 1):
        for length in ("warmup_steps=8", "warmup_epochs=4"):
            assert kept[length] == [2500, 2500, 625, 625, 156, 156, 39, 39, 10, 10]
        assert kept["no epoch"][0] == "ValueError"
        assert "set_epoch" in kept["no epoch"][1]


def with_others(model, **options):
    """SGD for a model, without momentum, and for a tensor that is not averaged, with these options."""
    groups = [{"params": list(model.parameters())}, {"params": [torch.zeros(3)], **options}]
    return torch.optim.SGD(groups, lr=0.05)


def momentum_twice(rank, world_size):
    said = {}
    for name, optimizer, spec in (
        ("sgd", lambda m: sgd(m, momentum=0.9), SPARSE),
        ("adam", lambda m: torch.optim.Adam(m.parameters()), SPARSE),
        ("another", lambda m: nb.DGCSGD(m.parameters(), momentum=0.8), SPARSE),
        ("variant", lambda m: nb.DGCSGD(m.parameters(), momentum=0.9, nesterov=True), SPARSE),
        ("other parameters", lambda m: with_others(m, momentum=0.9), SPARSE),
        ("adam without", lambda m: torch.optim.Adam(m.parameters(), betas=(0.0, 0.999)), SPARSE),
        ("left to sgd", lambda m: sgd(m, momentum=0.9), SPARSE + ",momentum=0"),
        ("not dgc", lambda m: sgd(m, momentum=0.9), "topk:density=0.05+ef"),
        ("left to nobody", lambda m: nb.DGCSGD(m.parameters()), SPARSE + ",momentum=0"),
        ("no dgc any more", lambda m: nb.DGCSGD(m.parameters()), "topk:density=0.05+ef"),
        ("no momentum", lambda m: nb.DGCSGD(m.parameters(), momentum=0.0), "topk:density=0.05+ef"),
    ):
        said[name] = refusal(lambda optimizer=optimizer, spec=spec: compressed(spec, optimizer=optimizer))
    with heard() as messages:
        compress(wrap(mlp()), SPARSE)
        said["unchecked"] = list(messages)
    return said


def test_momentum_in_both_places_or_in_none_is_refused():
    said, other = run_ranks(momentum_twice, 2)
    for name, word in (("sgd", "momentum=0.9"), ("adam", "betas[0]=0.9"), ("another", "0.8"), ("variant", "nesterov")):
        assert said[name][0] == "ValueError"
        assert word in said[name][1]
    assert "DGCSGD" in said["sgd"][1]
    for name in ("left to nobody", "no dgc any more"):
        assert said[name][0] == "ValueError"
        assert "use torch.optim.SGD" in said[name][1]
    for name in ("other parameters", "adam without", "left to sgd", "not dgc", "no momentum"):
        assert said[name] is None, name
    assert sum("optimizer=" in message for message in said["unchecked"]) == 1
    assert other["unchecked"] == []


def accumulating(rank, world_size):
    """Two micro-batches under no_sync are one step on their sum."""
    models = []
    for micro in (True, False):
        model, optimizer, handle = compressed(SPARSE)
        for step in range(6):
            optimizer.zero_grad()
            if micro:
                with model.no_sync():
                    loss_of(model, 2 * step, rank).backward()
                loss_of(model, 2 * step + 1, rank).backward()
            else:
                (loss_of(model, 2 * step, rank) + loss_of(model, 2 * step + 1, rank)).backward()
            optimizer.step()
        models.append((flat(model), handle.step))
    return models


def test_gradient_accumulation_is_one_step_on_the_sum():
    for (a, steps), (b, _) in run_ranks(accumulating, 2):
        assert steps == 6
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def not_finite(rank, world_size, dtype, clip):
    model, optimizer, handle = compressed(SPARSE + clip, module=mlp(dtype))
    train(model, rank, range(4), optimizer, dtype)
    before, parameters = state_of(handle), flat(model)
    optimizer.zero_grad()
    (loss_of(model, 4, rank, dtype) * (math.inf if rank == 1 else 1.0)).backward()
    broken = [bool(p.grad.isfinite().all()) for p in model.parameters()]
    kept = same(before, state_of(handle))
    train(model, rank, range(5, 8), optimizer, dtype)
    return kept, any(broken), bool((flat(model) != parameters).any()), bool(flat(model).isfinite().all())


@pytest.mark.parametrize("clip", ["", ",clip=1.0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_no_state(dtype, clip):
    for kept, finite, moved, good in run_ranks(not_finite, 2, dtype, clip):
        assert kept
        assert not finite
        assert moved
        assert good


def resumed(rank, world_size, cap):
    spec = "dgc:density=0.02,warmup_steps=8,nesterov=true"
    whole, optimizer, _ = compressed(spec, cap=cap, optimizer=nesterov)
    train(whole, rank, range(12), optimizer)

    first, optimizer, handle = compressed(spec, cap=cap, optimizer=nesterov)
    train(first, rank, range(5), optimizer)
    state = {key: value for key, value in handle.state_dict().items() if key != "feedback"} | {
        "feedback": state_of(handle)
    }
    second = mlp()
    second.load_state_dict(first.module.state_dict())
    second, optimizer, handle = compressed(spec, cap=cap, module=second, optimizer=nesterov)
    handle.load_state_dict(state)
    train(second, rank, range(5, 12), optimizer)
    wrong = {
        "saved with ef": {**state, "feedback": {"0.weight": torch.zeros(960)}},
        "half a state": {
            **state,
            "feedback": {k: v for k, v in state["feedback"].items() if not k.startswith("before/")},
        },
        "a norm compressed": {
            **state,
            "feedback": {"now/1.weight": torch.zeros(40), "before/1.weight": torch.zeros(40)},
        },
    }
    said = {name: refusal(lambda bad=bad: handle.load_state_dict(bad)) for name, bad in wrong.items()}
    return torch.equal(flat(whole), flat(second)), said


@pytest.mark.parametrize("cap", [TINY, 100.0])
def test_a_resumed_run_is_the_same_to_the_bit(cap):
    for equal, said in run_ranks(resumed, 2, cap):
        assert equal
        assert all(error is not None and error[0] == "ValueError" for error in said.values()), said


def fewer_ranks(rank, world_size, states):
    model, _, handle = compressed(SPARSE)
    if states is None:
        train(model, rank, range(5), sgd(model, lr=0.0))
        return {**handle.state_dict(), "feedback": state_of(handle)}
    handle.load_state_dict(states)
    return state_of(handle)


def test_another_number_of_ranks_shares_the_residual():
    states = run_ranks(fewer_ranks, 3, None)
    for residual in run_ranks(fewer_ranks, 2, states):
        for key, value in residual.items():
            mean = sum(state["feedback"][key] for state in states) / 3
            torch.testing.assert_close(value, mean)


def scaled(rank, world_size):
    """A loss scale that changes under way makes no difference: powers of two, so to the bit. The last is so large that
    no float32 holds the square of a gradient's norm.
    """
    ends = []
    for scales in ((1.0,) * 8, (8.0, 8.0, 8.0, 2.0, 2.0, 16.0, 16.0, 16.0), (2.0**70,) * 8):
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
        model, optimizer, _ = compressed(SPARSE + ",clip=0.5", grad_scaler=scaler)
        for step, then in enumerate((*scales[1:], 1.0)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step, rank)).backward()
            scaler.step(optimizer)
            scaler.update(then)
        ends.append(flat(model))
    return ends


def test_a_new_loss_scale_rescales_the_momentum():
    for once, twice, by_far in run_ranks(scaled, 2):
        torch.testing.assert_close(once, twice, rtol=0, atol=1e-7)
        torch.testing.assert_close(once, by_far, rtol=0, atol=1e-5)


def almost_too_large(rank, world_size):
    """Averages of a bias in float16 that are in its range, where its velocity is not."""
    bias, layer = (nn.Parameter(torch.zeros(shape, dtype=torch.float16)) for shape in ((3,), (40, 40)))
    averager = nb.Averager({"bias": bias, "weight": layer}, "dgc:density=0.1", min_numel=64)
    found = []
    for _ in range(3):
        bias.grad = torch.tensor([40_000.0, -60_000.0, rank], dtype=torch.float16)
        layer.grad = torch.ones_like(layer)
        averager.average()
        found.append(bias.grad.tolist())
    return found, averager.stats().total.skipped


def test_momentum_of_small_parameters_in_float16_does_not_overflow():
    for found, skipped in run_ranks(almost_too_large, 2):
        assert skipped == 0
        assert found == [
            [40_000, -60_000, 0.5],
            pytest.approx([65_504, -65_504, 0.95], rel=1e-3),
            pytest.approx([65_504, -65_504, 1.355], rel=1e-3),
        ]


def missing(rank, world_size):
    model = wrap(Fork(), find_unused_parameters=True)
    optimizer = nb.DGCSGD(model.parameters(), lr=0.05)
    handle = compress(model, "dgc:density=0.1", min_numel=64, optimizer=optimizer)
    kept = []
    for both in ((True, True), (rank == 0, False), (False, False), (True, True)):
        before, bias = state_of(handle), model.module.sometimes.bias.detach().clone()
        optimizer.zero_grad()
        model(data(len(kept), rank)[0], both[0]).square().mean().backward()
        optimizer.step()
        after = state_of(handle)
        keys = ("now/sometimes.weight", "before/sometimes.weight")
        still = all(key in before and torch.equal(before[key], after[key]) for key in keys)
        kept.append((still, torch.equal(bias, model.module.sometimes.bias)))
    return kept


def test_where_a_gradient_is_missing_momentum_waits():
    """On one rank: that rank keeps its state and sends nothing, the others go on. On all: nobody's changes."""
    for rank, kept in enumerate(run_ranks(missing, 2)):
        weight, bias = zip(*kept, strict=True)
        assert weight == (False, rank == 1, True, False)
        assert bias == (False, False, True, False)


def sparse_gradients(rank, world_size):
    model = nn.Embedding(10, 8, sparse=True)
    model, _, _ = compressed(SPARSE, module=model, optimizer=sgd)
    return refusal(lambda: model(torch.tensor([1, 2])).sum().backward())


def complex_parameters(rank, world_size):
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("odd", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    return refusal(lambda: compressed(SPARSE, module=model, optimizer=sgd))


def test_what_has_no_momentum_here_is_refused():
    (error,) = run_ranks(sparse_gradients, 1)
    assert "sparse" in error[1]
    (error,) = run_ranks(complex_parameters, 1)
    assert error[0] == "UnsupportedError"
    assert "odd" in error[1]


def paused(rank, world_size):
    model, optimizer, handle = compressed(SPARSE)
    train(model, rank, range(5), optimizer)
    before = state_of(handle)
    handle.pause()
    train(model, rank, range(5, 8), optimizer)
    after = state_of(handle)
    handle.resume()
    train(model, rank, range(8, 10), optimizer)
    key = "now/0.weight"
    return torch.equal(before[key], after[key]), torch.equal(before["before/0.weight"], after["before/0.weight"])


def test_a_pause_keeps_the_residual_and_moves_the_velocity():
    assert run_ranks(paused, 2) == [(True, False)] * 2
