"""Rounds on real replicas: what is applied, what is not, and that replicas are equal after each."""

from __future__ import annotations

import copy
import io
import os
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import narrowband as nb
from tests.gradients.training import data, flat, heard, loss_of, mlp, refusal, sgd, train, wrap
from tests.ranks import RankError, run_ranks
from tests.thorough import thorough

SPECS = ["none", "qsgd:bits=2+ef", "sign+ef", "topk:density=0.05+ef", "powersgd:rank=2,min_ratio=1", "uniform:bits=4"]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def begin(spec, model=None, optimizer=None, **options):
    model = model or mlp()
    optimizer = (optimizer or adamw)(model)
    return model, optimizer, nb.compress_updates(model, optimizer, spec, **{"min_numel": 64, **options})


# ---- what a round does -----------------------------------------------------------------------------------------------


def beside_ddp(rank, world_size, lr):
    plain = wrap(mlp())
    train(plain, rank, range(10), sgd(plain, lr=lr))
    model, optimizer, handle = begin("none", optimizer=lambda m: sgd(m, lr=lr))
    train(model, rank, range(10), optimizer)
    return float((flat(model) - flat(plain)).abs().max()), float((flat(plain) - flat(mlp())).abs().max()), handle.step


@pytest.mark.parametrize("ranks", [2, *thorough(3)])
def test_after_every_step_of_sgd_it_is_data_parallel_training(ranks):
    """The mean of steps is the step along the mean."""
    for apart, moved, rounds in run_ranks(beside_ddp, ranks, 0.05):
        assert rounds == 10
        assert moved > 0.01
        assert apart < 1e-6


class Deriving:
    """The round in float64, for all replicas at once: top-k with error feedback, and an outer step."""

    def __init__(self, shape, ranks, kept, outer):
        self.residual = torch.zeros(ranks, *shape, dtype=torch.float64)
        self.velocity = torch.zeros(shape, dtype=torch.float64)
        self.kept, self.outer = kept, outer

    def step(self, theta, updates):
        total = updates + self.residual
        sent = torch.zeros_like(total)
        for each, out in zip(total.flatten(1), sent.flatten(1), strict=True):
            at = each.abs().topk(self.kept).indices
            out[at] = each[at]
        self.residual = total - sent
        mean = sent.mean(0)
        if self.outer == "nesterov":  # DiLoCo's: momentum of −mean, and one look ahead
            self.velocity = 0.9 * self.velocity - mean
            return theta - 0.7 * (0.9 * self.velocity - mean)
        return theta + self.outer * mean


def local_rounds(rank, world_size, spec, every, rounds, outer):
    """Parameters before and after each round, and of this replica right before it."""
    model, optimizer, handle = begin(spec, every=every, outer=outer)
    seen = []
    for at in range(rounds):
        before = copy.deepcopy(dict(model.named_parameters()))
        for step in range(every):
            optimizer.zero_grad()
            loss_of(model, every * at + step, rank).backward()
            if step == every - 1:
                lone, alone = copy.deepcopy(model), adamw(mlp())
                alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                lone_optimizer = adamw(lone)
                lone_optimizer.load_state_dict(alone.state_dict())
                for p, q in zip(lone.parameters(), model.parameters(), strict=True):
                    p.grad = q.grad.clone()
                lone_optimizer.step()
            optimizer.step()
        seen.append((before, dict(lone.named_parameters()), copy.deepcopy(dict(model.named_parameters()))))
    return seen, handle.step, handle.steps


@pytest.mark.parametrize("outer", [1.0, 1.5, "nesterov"])
def test_rounds_follow_the_paper(outer):
    """Each from what the library had before it, so that nothing adds up but the residual and the outer momentum."""
    spec, ranks, every, rounds = "topk:density=0.1+ef", 3, 2, 5
    results = run_ranks(local_rounds, ranks, spec, every, rounds, outer)
    codec, derived = nb.codec("topk:density=0.1"), {}
    for at in range(rounds):
        for name, theta in results[0][0][at][0].items():
            updates = torch.stack([(seen[at][1][name] - seen[at][0][name]).double() for seen, *_ in results])
            compressed = theta.dim() == 2 and theta.numel() >= 64
            kept = codec.kept(theta.shape) if compressed else theta.numel()
            own = derived.setdefault(name, Deriving(theta.shape, ranks, kept, outer))
            expected = own.step(theta.double(), updates.detach())
            for seen, *_ in results:
                torch.testing.assert_close(seen[at][2][name].double(), expected, rtol=1e-6, atol=2e-7)
    assert [(rounds, 0)] * ranks == [(step, steps) for _, step, steps in results]


def equal_and_apart(rank, world_size, specs, every):
    found = []
    for spec in specs:
        model, optimizer, handle = begin(spec, every=every, outer=nesterov)
        history = []
        for step in range(3 * every + 1):
            train(model, rank, [step], optimizer)
            history.append(flat(model))
        handle.average()
        history.append(flat(model))
        found.append((history, handle.step))
    return found


def test_replicas_are_equal_to_the_bit_after_each_round_and_differ_before():
    every = 3
    first, *others = run_ranks(equal_and_apart, 3, SPECS, every)
    for other in others:
        for (mine, rounds), (its, _), spec in zip(first, other, SPECS, strict=True):
            assert rounds == 4
            equal = [torch.equal(a, b) for a, b in zip(mine, its, strict=True)]
            assert equal == [False, False, True] * 3 + [False, True], spec
            assert (mine[-1] - mine[2]).abs().max() > 1e-3


def tokens_learnt(rank, world_size, specs):
    """The loss on all replicas' data before and after training on one batch each."""
    found = []
    for spec in specs:
        model, optimizer, handle = begin(spec, every=2)

        def loss(model=model):
            return sum(loss_of(model, 0, r).item() for r in range(world_size))

        before = loss()
        for _ in range(20):
            train(model, rank, [0], optimizer)
        found.append((before, loss(), handle.stats().total))
    return found


def test_every_codec_learns_and_counts_its_bytes():
    for answer in run_ranks(tokens_learnt, 2, SPECS):
        for spec, (before, after, total) in zip(SPECS, answer, strict=True):
            assert after < 0.8 * before, spec
            assert total.steps == 10, spec
            if spec != "none":
                assert total.ratio > 1.2, spec  # a third of this model travels as it is


# ---- models and optimizers -------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A frozen layer, a matrix that is used twice, batch norm, a table of whole numbers, and a strided parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = nn.Linear(24, 24, bias=False), nn.BatchNorm1d(24)
        self.second = nn.Linear(24, 24)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.head = nn.Parameter(torch.randn(8, 24).T)
        self.register_buffer("table", torch.arange(5))

    def forward(self, x):
        return self.frozen(self.second(torch.relu(self.norm(self.first(x))))) @ self.head


def odd_model(rank, world_size, buffers):
    torch.manual_seed(rank)
    model = Tied()
    with torch.no_grad():
        for x in (*model.parameters(), model.table):
            x.add_(rank)  # replicas begin with those of the first
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    handle = nb.compress_updates(model, optimizer, "topk:density=0.3+ef", every=2, buffers=buffers, min_numel=64)
    began = torch.equal(flat(model), flat(Tied()))
    for step in range(4):
        optimizer.zero_grad()
        x, y = data(step, rank)
        (model(x) - y).square().mean().backward()
        optimizer.step()
    moved = float((model.first.weight - Tied().first.weight).abs().max())
    tied = model.first.weight is model.second.weight
    assert model.head.stride() == (1, 24)
    return flat(model), model.norm.running_mean.clone(), model.table.tolist(), began, moved, tied, handle.step


@pytest.mark.parametrize("buffers", ["average", "keep"])
def test_tied_frozen_and_strided_parameters_and_buffers(buffers):
    (mine, mean, *same), (its, other_mean, *also) = run_ranks(odd_model, 2, buffers)
    assert torch.equal(mine, its)
    assert torch.equal(mean, other_mean) == (buffers == "average")
    assert mean.any()
    assert same == also
    table, began, moved, tied, rounds = same
    assert (table, began, tied, rounds) == (list(range(5)), True, True, 2)
    assert moved > 1e-3


def several_optimizers(rank, world_size):
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
    alone = refusal(lambda: nb.compress_updates(model, optimizers[0], "none"))
    handle = nb.compress_updates(model, optimizers, "qsgd:bits=4+ef", every=2, min_numel=64)
    for step in range(4):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        for optimizer in optimizers:
            optimizer.step()
    return flat(model), handle.step, alone


def test_several_optimizers_step_one_model():
    (mine, rounds, alone), (its, *_) = run_ranks(several_optimizers, 2)
    assert torch.equal(mine, its)
    assert rounds == 2
    assert alone[0] == "ValueError"
    assert "pass all optimizers" in alone[1]


#: All of torch.optim that take dense gradients.
KINDS = {
    "ASGD": {}, "Adadelta": {"lr": 1.0}, "Adafactor": {}, "Adagrad": {}, "Adam": {}, "AdamW": {"amsgrad": True},
    "Adamax": {}, "LBFGS": {"max_iter": 3}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9}, "Rprop": {},
    "SGD": {"nesterov": True, "momentum": 0.9},
}  # fmt: skip


def of_a_kind(rank, world_size, kinds):
    """How far a replica goes by itself from the same parameters, and where a round leaves it."""
    found = {}
    for kind, options in kinds.items():
        models = [mlp(), mlp()]
        lone, model = (getattr(torch.optim, kind)(each.parameters(), **({"lr": 0.01} | options)) for each in models)
        handle = nb.compress_updates(models[1], model, "none", min_numel=64)
        for each, optimizer in zip(models, (lone, model), strict=True):

            def closure(each=each, optimizer=optimizer):
                optimizer.zero_grad()
                loss = loss_of(each, 0, rank)
                loss.backward()
                return loss

            optimizer.step(closure)
        found[kind] = flat(models[0]) - flat(mlp()), flat(models[1]) - flat(mlp()), handle.step
    return found


def test_any_optimizer_steps_by_itself_and_replicas_take_the_mean():
    answers = run_ranks(of_a_kind, 2, KINDS)
    for kind in KINDS:
        alone = torch.stack([answer[kind][0] for answer in answers])
        assert not torch.equal(alone[0], alone[1])
        for answer in answers:
            _, moved, rounds = answer[kind]
            assert rounds == 1
            assert moved.abs().max() > 1e-4, kind
            torch.testing.assert_close(moved, alone.mean(0), rtol=1e-4, atol=1e-6, msg=kind)


def of_dtype(rank, world_size, dtype):
    model = mlp(dtype)
    optimizer = sgd(model, lr=0.1)
    nb.compress_updates(model, optimizer, "qsgd:bits=8+ef", every=2, min_numel=64)
    train(model, rank, range(6), optimizer, dtype)
    return flat(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    mine, its = run_ranks(of_dtype, 2, dtype)
    assert torch.equal(mine, its)
    assert (mine - flat(mlp(dtype))).abs().max() > 1e-2


def replicas_of_two(rank, world_size):
    """Two replicas of two ranks each: DDP averages gradients inside, narrowband updates between."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = DistributedDataParallel(mlp(), process_group=inside)
    optimizer = adamw(model)
    nb.compress_updates(model, optimizer, "topk:density=0.2+ef", every=3, process_group=between, min_numel=64)
    history = []
    for step in range(6):
        train(model, rank, [step], optimizer)
        history.append(flat(model))
    return history


def test_ddp_inside_a_replica_and_updates_between_replicas():
    a, b, c, d = run_ranks(replicas_of_two, 4)
    for step in range(6):
        assert torch.equal(a[step], b[step])
        assert torch.equal(c[step], d[step])
        assert torch.equal(a[step], c[step]) == (step % 3 == 2)


# ---- what is not finite ----------------------------------------------------------------------------------------------


def broken_update(rank, world_size, broken):
    """In the second of three rounds, replicas in ``broken`` have a NaN; what is kept and applied then."""
    model, optimizer, handle = begin("topk:density=0.1+ef", optimizer=lambda m: sgd(m, lr=0.1), every=2)
    history = []
    with heard() as said:
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            if step == 2 and rank in broken:
                model[0].weight.grad[0, 0] = torch.nan
            optimizer.step()
            history.append(flat(model))
    return history, handle.skipped_updates, handle.stats().total.skipped, said


@pytest.mark.parametrize("broken", [(1,), (0, 1, 2)])
def test_an_update_that_is_not_finite_is_left_out_and_the_replica_goes_on(broken):
    answers = run_ranks(broken_update, 3, broken)
    for rank, (history, left_out, skipped, said) in enumerate(answers):
        assert left_out == (rank in broken)
        assert skipped == 0
        assert [("is not finite in 0.weight, 0.bias, " in line) for line in said] == [True] * (rank in broken)
        assert all(torch.isfinite(history[step]).all() for step in (1, 3, 4, 5))
        for step in (1, 3, 5):
            assert torch.equal(history[step], answers[0][0][step])
        assert not torch.equal(history[5], history[3])


class Masked(nn.Module):
    """A causal mask, and the least and largest value that were seen, which are none at first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 8)
        self.register_buffer("mask", torch.triu(torch.full((4, 4), -torch.inf), 1))
        self.register_buffer("seen", torch.tensor([torch.inf, -torch.inf]))

    def forward(self, x):
        self.seen = torch.stack([torch.minimum(self.seen[0], x.min()), torch.maximum(self.seen[1], x.max())])
        return self.last(torch.relu(self.norm(self.first(x))))


def masked(rank, world_size, overlap):
    model = Masked()
    if rank and overlap is None:
        model.seen.fill_(1.0)
        return refusal(lambda: begin("none", model))
    if overlap is None:
        return refusal(lambda: begin("none", model))
    model, optimizer, handle = begin("topk:density=0.1+ef", model, every=2, overlap=overlap)
    train(model, rank, range(4), optimizer)
    handle.average()
    return flat(model), model.norm.running_mean, model.mask, model.seen, handle.skipped_updates


@pytest.mark.parametrize("overlap", [0, 1])
def test_buffers_that_are_not_finite_at_set_up_are_left_alone(overlap):
    (mine, mean, mask, seen, skipped), (its, other_mean, other_mask, others, _) = run_ranks(masked, 2, overlap)
    assert skipped == 0
    assert torch.equal(mine, its)
    assert torch.equal(mean, other_mean)
    assert (mine - flat(Masked())).abs().max() > 1e-3
    assert torch.equal(mask, Masked().mask)
    assert torch.equal(other_mask, mask)
    assert seen.isfinite().all()
    assert not torch.equal(seen, others)


def test_replicas_leave_the_same_buffers_alone():
    for kind, text in run_ranks(masked, 2, None):
        assert kind == "DisagreementError"
        assert "buffers that are not finite (mask, seen on rank 0; mask on rank 1)" in text


def in_one_vector(rank, world_size, small):
    """Batch norm's statistics before a round, and after it."""
    model = Masked()
    model, optimizer, handle = begin(
        "topk:density=0.05+ef", model, lambda m: sgd(m, lr=0.0), every=2, small=small, residuals="in-place"
    )
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        before = model.norm.running_var.clone(), model.norm.running_mean.clone()
        optimizer.step()
    return before, (model.norm.running_var, model.norm.running_mean), handle.layers.parameters.vectors


@pytest.mark.parametrize("small", ["fused", "topk:density=0.5"])
def test_buffers_are_never_compressed(small):
    results = run_ranks(in_one_vector, 2, small)
    for at in range(2):
        mean = sum(before[at] for before, *_ in results) / 2
        assert not torch.equal(results[0][0][at], results[1][0][at])
        for _, after, vectors in results:
            torch.testing.assert_close(after[at], mean, rtol=1e-5, atol=1e-6)
            assert {vector.compressed: n for vector, n in vectors.items()} == {True: 24 + 48 + 8, False: 48}


def nothing_left(rank, world_size, options):
    """Parameters after the last round, and after rounds in which nobody has done anything."""
    model, optimizer, handle = begin("topk:density=0.1+ef", outer=nesterov, every=4, **options)
    handle.average()
    began, rounds = torch.equal(flat(model), flat(mlp())), handle.step
    train(model, rank, range(6), optimizer)
    handle.average()
    after, step = flat(model), handle.step
    handle.average()
    unmoved = torch.equal(flat(model), after)
    train(model, rank, range(6, 7), optimizer)
    handle.average()
    return began, rounds, unmoved, handle.step - step, flat(model)


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"fragments": 2, "overlap": 1}])
def test_where_no_step_was_taken_there_is_no_round(options):
    """The outer momentum would move the parameters, and residuals would be sent."""
    (*mine, parameters), (*its, others) = run_ranks(nothing_left, 2, options)
    assert mine == its == [True, 0, True, 1]
    assert torch.equal(parameters, others)


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(24, 8)
        self.register_buffer("cache", torch.ones(50), persistent=False)

    def forward(self, x):
        return self.last(x)


def resized(rank, world_size, sizes, overlap):
    found = []
    for size in sizes:
        model, optimizer, _ = begin(
            "topk:density=0.05+ef", Caching(), lambda m: sgd(m, lr=0.0), every=2, overlap=overlap
        )
        before = flat(model)
        train(model, rank, [0], optimizer)
        model.cache = torch.ones(size)
        error = refusal(lambda m=model, o=optimizer: train(m, rank, [1], o))
        found.append((error, torch.equal(flat(model), before)))
    return found


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_buffer_of_another_size_is_an_error_before_anything_is_touched(overlap):
    (found,) = run_ranks(resized, 1, (10, 80), overlap)
    for size, ((kind, text), kept) in zip((10, 80), found, strict=True):
        assert kept
        assert kind == "ValueError"
        assert f"cache is of shape ({size},) and torch.float32 now, and was of shape (50,)" in text
        assert "buffers='keep'" in text


def resized_for_a_while(rank, world_size, overlap):
    """A buffer has another size when a round is asked for and when one is due, and its own again at the step after."""
    model, optimizer, handle = begin("none", Caching(), every=4, overlap=overlap)
    train(model, rank, range(3), optimizer)
    model.cache = torch.ones(10)
    errors = [refusal(handle.average)]
    steps = [handle.steps]
    errors.append(refusal(lambda: train(model, rank, [3], optimizer)))
    steps.append(handle.steps)
    model.cache = torch.ones(50)
    own = flat(model)
    train(model, rank, [4], optimizer)
    steps.append(handle.steps)
    handle.average()
    return [kind for kind, _ in errors], steps, handle.step, own, flat(model)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_round_that_could_not_begin_is_held_when_it_can(overlap):
    (_, _, _, own, mine), (_, _, _, others, its) = results = run_ranks(resized_for_a_while, 2, overlap)
    for errors, steps, rounds, *_ in results:
        assert errors == ["ValueError"] * 2
        assert steps == [3, 4, 0]
        assert rounds == 1 + overlap  # average() has waited for what was under way, and held another one
    assert torch.equal(mine, its)
    assert not torch.equal(own, others)


def thawed(rank, world_size):
    model = mlp()
    model[0].requires_grad_(False)
    model, optimizer, handle = begin("none", model, every=2)
    train(model, rank, range(2), optimizer)
    model[0].requires_grad_(True)
    errors = [refusal(lambda: train(model, rank, range(2, 4), optimizer)), refusal(handle.average)]
    handle.remove()
    handle = nb.compress_updates(model, optimizer, "none", every=2, min_numel=64)
    train(model, rank, range(4, 6), optimizer)
    return errors, flat(model)


def test_a_parameter_that_is_trained_later_is_an_error():
    (errors, mine), (others, its) = run_ranks(thawed, 2)
    assert errors[0][1].startswith("step: ") or errors[0][1].startswith("average: ")
    for kind, text in (*errors, *others):
        assert kind == "UnsupportedError"
        assert "nothing averages 0.weight, 0.bias, which" in text
        assert "remove() on all ranks, and compress_updates again" in text
    assert torch.equal(mine, its)


def a_mean_that_is_not_finite(rank, world_size):
    """The updates are finite, and too large for what they travel in."""
    model = nn.Linear(40, 40, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = nb.compress_updates(model, optimizer, "fp16")
    before = flat(model)
    with heard() as said:
        model.weight.grad = torch.full_like(model.weight, 1e5)
        optimizer.step()
        stayed = torch.equal(flat(model), before)
        model.weight.grad = torch.full_like(model.weight, 1.0)
        optimizer.step()
    return stayed, float((flat(model) - before).mean()), said, handle.step


def test_a_mean_that_is_not_finite_is_not_applied():
    for stayed, moved, said, rounds in run_ranks(a_mean_that_is_not_finite, 2):
        assert stayed
        assert moved == pytest.approx(-1.0, rel=1e-3)
        assert ["not finite" in line for line in said] == [True]
        assert rounds == 2


def scaled(rank, world_size, fused):
    """Replica 1 has a loss that is not finite at its third step, and its scaler skips that step."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    handle = nb.compress_updates(model, optimizer, "qsgd:bits=4", every=2, min_numel=64, grad_scaler=scaler)
    rounds, equal = [], []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank) * (float("inf") if rank == 1 and step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        rounds.append(handle.step)
        if step % 2:
            equal.append(flat(model))
    handle.remove()
    scaler.update(1.0)  # no longer watched
    assert "update" not in vars(scaler)
    return rounds, equal, handle.skipped_updates, scaler.get_scale()


@pytest.mark.parametrize("fused", [False, *thorough(True)])
def test_a_step_that_a_scaler_skips_counts_so_that_all_come_to_the_round(fused):
    (rounds, equal, _, _), (others, its, skipped, scale) = run_ranks(scaled, 2, fused)
    assert rounds == others == [0, 1, 1, 2, 2, 3]
    assert all(map(torch.equal, equal, its))
    assert all(x.isfinite().all() for x in equal)
    assert skipped == 0  # nothing that is not finite reached the parameters
    assert scale == 1.0


def two_scaled(rank, world_size):
    """Of two optimizers the first skips a step, and the second does not."""
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD([p for part in model[1:] for p in part.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    handle = nb.compress_updates(model, [first, second], "none", min_numel=64, grad_scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(loss_of(model, 0, rank)).backward()
    for p in model[0].parameters():
        p.grad.fill_(float("inf"))
    for optimizer in (first, second):
        scaler.step(optimizer)
    scaler.update()
    moved = [not torch.equal(p.detach(), kept) for p, kept in zip(model.parameters(), before, strict=True)]
    return handle.step, moved, flat(model)


def test_where_one_of_two_optimizers_skips_the_other_one_steps():
    (step, moved, mine), (others, its, same) = run_ranks(two_scaled, 2)
    own = len(list(mlp()[0].parameters()))
    assert step == others == 1
    assert moved == its == [False] * own + [True] * (len(moved) - own)
    assert torch.equal(mine, same)


def sharing(rank, world_size):
    """Two models share a scaler, which updates for each. One steps every time, and the other once in three times; of
    each, replica 1 leaves one step out: its scaler does, and the loop, which has seen the gradients.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    models = often, seldom = mlp(), mlp()
    optimizers = [adamw(model) for model in models]
    handles = [
        nb.compress_updates(model, optimizer, "none", every=2, min_numel=64, grad_scaler=scaler)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    seen = []
    for step in range(12):
        for model, optimizer in zip(models, optimizers, strict=True):
            if model is often or step % 3 == 2:
                optimizer.zero_grad()
                broken = rank == 1 and step == (4 if model is often else 5)
                scaler.scale(loss_of(model, step, rank) * (float("inf") if broken else 1.0)).backward()
                scaler.unscale_(optimizer)
                if model is often or not broken:
                    scaler.step(optimizer)
                scaler.update()
        seen.append([(handle.step, handle.steps) for handle in handles])
    found = seen, flat(often), flat(seldom)
    for handle in reversed(handles):
        handle.remove()
    return *found, "update" in vars(scaler)


def test_a_scaler_that_models_share_counts_the_steps_of_each_for_itself():
    results = run_ranks(sharing, 2)
    for seen, often, seldom, watched in results:
        for step, counts in enumerate(seen):
            assert counts == [divmod(steps, 2) for steps in (step + 1, (step + 1) // 3)]
        assert torch.equal(often, results[0][1])
        assert torch.equal(seldom, results[0][2])
        assert often.isfinite().all()
        assert seldom.isfinite().all()
        assert not watched


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def resumed(rank, world_size, stop, outer):
    """Parameters of a run of eight steps, and of one that is stopped after ``stop`` and goes on elsewhere."""
    outer = nesterov if outer == "nesterov" else outer
    options = {"every": 3, "outer": outer}
    whole, optimizer, _ = begin("topk:density=0.1+ef", **options)
    train(whole, rank, range(8), optimizer)
    model, optimizer, handle = begin("topk:density=0.1+ef", **options)
    train(model, rank, range(stop), optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    train(model, rank, range(50, 54), optimizer)  # what comes after does not matter
    again, optimizer, handle = begin("topk:density=0.1+ef", **options)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    train(again, rank, range(stop, 8), optimizer)
    return torch.equal(flat(whole), flat(again)), bool(saved[2]["updates"]["anchor"]), handle.step


@pytest.mark.parametrize("outer", [*thorough(1.0), "nesterov", "auto"])
@pytest.mark.parametrize("stop", [4, 6])
def test_a_run_that_was_stopped_goes_on_to_the_bit(stop, outer):
    assert run_ranks(resumed, 2, stop, outer) == [(True, stop % 3 != 0, 2)] * 2


def resumed_by_dcp(rank, world_size, folder, spec, with_handle):
    """SGD keeps no state, so DCP steps it to make one, before it saves, and before and after it loads the model."""
    model, optimizer, handle = begin(spec, optimizer=sgd, every=3)
    train(model, rank, range(6), optimizer)
    optimizer.zero_grad()
    own, steps = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optimizer": steps, "handle": handle.stateful}, checkpoint_id=folder)
    train(model, rank, range(6, 12), optimizer)
    again, optimizer, handle = begin(spec, optimizer=sgd, every=3)
    own, steps = get_state_dict(again, optimizer)
    saved = {"model": own, "optimizer": steps, **({"handle": handle.stateful} if with_handle else {})}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(again, optimizer, model_state_dict=own, optim_state_dict=steps)
    left = handle.steps
    train(again, rank, range(6, 12), optimizer)
    return torch.equal(flat(model), flat(again)), left


@pytest.mark.parametrize(("spec", "with_handle"), [("topk:density=0.1+ef", True), ("none", False)])
def test_the_steps_by_which_dcp_makes_states_are_no_steps_of_a_round(spec, with_handle, tmp_path):
    """They made a round of the parameters before loading and after."""
    assert run_ranks(resumed_by_dcp, 2, tmp_path, spec, with_handle) == [(True, 0)] * 2


def saved_by(rank, world_size, steps):
    model, optimizer, handle = begin("topk:density=0.1+ef", every=2)
    train(model, rank, range(steps), optimizer)
    return model.state_dict(), handle.state_dict()


def loaded_by(rank, world_size, states):
    model, _, handle = begin("topk:density=0.1+ef", every=2)
    model.load_state_dict(states[0][0])
    error = refusal(lambda: handle.load_state_dict([state for _, state in states]))
    kept = {name: x.clone() for name, x in handle.state_dict()["feedback"].items()}
    return error, kept, handle.step


@pytest.mark.parametrize("ranks", [2, 4])
def test_another_number_of_replicas_keeps_the_sum_of_the_residuals(ranks):
    states = run_ranks(saved_by, 3, 4)
    answers = run_ranks(loaded_by, ranks, states)
    assert [(error, step) for error, _, step in answers] == [(None, 2)] * ranks
    for name in states[0][1]["feedback"]:
        before = sum(state["feedback"][name].double() for _, state in states) / 3
        after = sum(kept[name].double() for _, kept, _ in answers) / ranks
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)


def test_between_rounds_another_number_of_replicas_is_refused():
    states = run_ranks(saved_by, 3, 3)
    for error, _, step in run_ranks(loaded_by, 2, states):
        assert error[0] == "ValueError"
        assert "right after average()" in error[1]
        assert step == 0


def wrong_states(rank, world_size):
    model, optimizer, handle = begin("topk:density=0.1+ef", every=2)
    train(model, rank, range(3), optimizer)
    good = handle.state_dict()
    changed = [
        {key: value for key, value in good.items() if key != "updates"},
        good | {"updates": good["updates"] | {"every": 3}},
        good | {"updates": good["updates"] | {"anchor": {}}},
        good | {"updates": good["updates"] | {"steps": 7}},
        good | {"updates": good["updates"] | {"outer": {}}},
        good | {"updates": good["updates"] | {"length": [{"own": 1.0}]}},
        good | {"updates": good["updates"] | {"anchor": dict.fromkeys(good["updates"]["anchor"], torch.zeros(3))}},
    ]
    errors = [refusal(lambda state=state: handle.load_state_dict(state)) for state in changed]
    # On one replica alone it is an error on all, and nothing has changed.
    errors.append(refusal(lambda: handle.load_state_dict(changed[0] if rank else good)))
    train(model, rank, range(3, 4), optimizer)
    return errors, flat(model), handle.step


def test_states_that_do_not_fit_change_nothing():
    (errors, mine, rounds), (others, its, _) = run_ranks(wrong_states, 2)
    words = ["not of updates", "every=3", "lacks the parameters", "7 steps after", "outer step", "outer='auto'"]
    words += ["do not fit the model"]
    for found in (errors, others):
        assert all(kind == "ValueError" and word in text for (kind, text), word in zip(found, words, strict=False)), (
            found
        )
        assert found[-1][0] in ("ValueError", "DisagreementError")
        assert "not of updates" in found[-1][1]
    assert rounds == 2
    assert torch.equal(mine, its)


def at_two_moments(rank, world_size, options, moments):
    """States after so many steps each; and what is said where each rank loads that of a moment of its own."""
    model, optimizer, handle = begin("qsgd:bits=4+ef", **options)
    saved, done = [], 0
    for moment in moments:
        train(model, rank, range(done, moment), optimizer)
        saved.append(copy.deepcopy(handle.state_dict()))
        done = moment
    before = handle.steps
    error = refusal(lambda: handle.load_state_dict(saved[rank]))
    assert handle.steps == before
    handle.load_state_dict(saved[1])
    handle.average()
    return error, saved


def from_a_list(rank, world_size, options, states):
    _, _, handle = begin("qsgd:bits=4+ef", **options)
    return refusal(lambda: handle.load_state_dict(states))


@pytest.mark.parametrize(
    ("options", "moments", "said"),
    [
        ({"every": 6}, (7, 9), "steps since the last round (1 on {0} 0; 3 on {0} 1)"),
        ({"every": 6}, (6, 9), "steps since the last round (0 on {0} 0; 3 on {0} 1)"),
        ({"every": 8, "fragments": 2, "overlap": 3}, (5, 6), "way (0, for 1 steps on {0} 0; 0, for 2 steps on {0} 1)"),
    ],
)
def test_states_of_different_steps_since_one_round_are_refused_on_all(options, moments, said):
    answers = run_ranks(at_two_moments, 2, options, moments)
    assert len({saved["step"] for _, states in answers for saved in states}) == 1
    for kind, text in (error for error, _ in answers):
        assert kind == "DisagreementError"
        assert said.format("rank") in text
    torn = [states[rank] for rank, (_, states) in enumerate(answers)]
    for kind, text in run_ranks(from_a_list, 2, options, torn):
        assert kind == "ValueError"
        assert "not of one moment" in text
        if "fragments" not in options:
            assert said.format("rank(s)") in text


def short_rounds(rank, world_size):
    found = []
    for every, outer in ((3, "nesterov"), (10, "nesterov"), (3, "auto")):
        with heard() as said:
            begin("none", every=every, outer=outer)
        found.append([text for text in said if "outer" in text])
    return found


def test_a_warning_says_where_rounds_are_short_for_the_outer_momentum():
    ((warning,), *others), *_ = run_ranks(short_rounds, 2)
    assert warning.startswith("every=3 is few for outer='nesterov'")
    assert others == [[], []]


def other_outer_states(rank, world_size):
    _, _, handle = begin("none", outer=nesterov)
    good = handle.state_dict()
    outers = ({}, {"param_groups": [{"params": [0]}]})
    states = [good | {"updates": good["updates"] | {"outer": outer}} for outer in outers]
    errors = [refusal(lambda state=state: handle.load_state_dict(state)) for state in states]
    handle.load_state_dict(good)
    return errors


def test_an_outer_optimizer_of_other_groups_is_refused_before_anything_is_loaded():
    for errors in run_ranks(other_outer_states, 2):
        assert [kind for kind, _ in errors] == ["ValueError"] * 2
        assert all("other parameter groups" in text for _, text in errors)


# ---- errors and ends -------------------------------------------------------------------------------------------------


def with_an_expanded_buffer():
    model = mlp()
    model.register_buffer("scales", torch.ones(1).expand(8))
    return model, adamw(model)


def keeps_an_expanded_buffer(rank, world_size):
    model, optimizer = with_an_expanded_buffer()
    model.register_buffer("row", torch.ones(8).expand(1, 8))  # of one row, which lies apart
    handle = nb.compress_updates(model, optimizer, "none", min_numel=64, buffers="keep")
    train(model, rank, [0], optimizer)
    handle.remove()
    del model.scales
    nb.compress_updates(model, optimizer, "none", min_numel=64)
    train(model, rank, [1], optimizer)
    return flat(model)


def test_a_buffer_to_which_nothing_can_be_written_may_be_kept():
    mine, its = run_ranks(keeps_an_expanded_buffer, 2)
    assert torch.equal(mine, its)


def refused(rank, world_size):
    model = mlp()
    optimizer = adamw(model)

    def asked(*given, **options):
        return refusal(lambda: nb.compress_updates(*given, **options))

    return [
        asked([model], optimizer, "none"),
        asked(model, "adamw", "none"),
        asked(model, optimizer, "none", every=0),
        asked(model, optimizer, "none", every="20min"),
        asked(model, optimizer, "none", outer=-1.0),
        asked(model, optimizer, "none", outer="far"),
        asked(model, optimizer, "none", buffers="drop"),
        asked(model, optimizer, "none", split="columns"),
        asked(model, optimizer, "none", check_every=0),
        asked(model, optimizer, "none", weigh=""),
        asked(model, optimizer, "none", weigh="tokens"),
        asked(model, optimizer, "none", every=4, fragments=0),
        asked(model, optimizer, "none", every=4, fragments=2.5),
        asked(model, optimizer, "none", every=2, fragments=3),
        asked(model, optimizer, "none", every=20, fragments=9),
        asked(model, optimizer, "none", every=4, overlap=-1),
        asked(model, optimizer, "none", every=4, fragments=2, overlap=3),
        asked(model, optimizer, "none", every=4, alpha=1.5),
        asked(model, optimizer, nb.LGreCo("topk:density=0.1+ef", every=4), every=4, fragments=2),
        asked(model, optimizer, "dgc:density=0.01"),
        asked(model, optimizer, "topk:density=0.1+aq-sgd"),
        asked(model, adamw(mlp()), "none"),
        asked(mlp().requires_grad_(False), optimizer, "none"),
        asked(model, optimizer, "nonsense"),
        asked(*with_an_expanded_buffer(), "none"),
    ]


def test_what_cannot_be_is_said_at_set_up():
    (errors,) = run_ranks(refused, 1)
    assert [kind for kind, _ in errors] == [
        "TypeError", "TypeError", *["ValueError"] * 16, *["UnsupportedError"] * 3,
        "ValueError", "ValueError", "ValueError", "ValueError",
    ]  # fmt: skip
    words = [
        "takes a module",
        "optimizers",
        "every=0",
        "which rounds with peers",
        "outer=-1.0",
        "outer='far'",
        "'drop'",
        "split='columns'",
        "check_every=0",
        "weigh=''",
        "weigh='tokens' is for peers",
        "fragments=0",
        "fragments=2.5",
        "fragments=3 need as many steps",
        "fragments=9 are more than the",
        "overlap=-1",
        "overlap=3",
        "alpha=1.5",
        "use a plan",
        "momentum",
        "aq-sgd",
    ]
    words += ["pass all optimizers", "nothing to average", "nonsense", "elements of scales lie in the same memory"]
    for (_, text), word in zip(errors, words, strict=True):
        assert word in text


def different(rank, world_size, what):
    options = {"every": 2}
    model = mlp()
    if what == "every":
        options["every"] += rank
    elif what == "outer":
        options["outer"] = nesterov if rank else 1.0
    elif what == "model" and rank:
        model = nn.Sequential(nn.Linear(24, 8))
    elif what == "grad_scaler":
        options |= {"grad_scaler": torch.amp.GradScaler("cpu")} if rank else {}
    elif what == "optimizer" and rank:
        options["optimizer"] = sgd
    elif what == "betas" and rank:
        options["optimizer"] = lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    elif what == "weight_decay" and rank:
        options["optimizer"] = lambda model: torch.optim.AdamW(
            [{"params": p, "weight_decay": 0.1 * (p.dim() > 1)} for p in model.parameters()]
        )
    elif what == "check_every":
        options["check_every"] = rank + 1
    elif what == "spec":
        return refusal(lambda: begin("sign+ef" if rank else "none"))
    return refusal(lambda: begin("none", model, **options))


@pytest.mark.parametrize(
    "what", ["every", "outer", "model", "optimizer", "grad_scaler", "spec", "betas", "weight_decay", "check_every"]
)
def test_replicas_that_were_set_up_differently_are_told(what):
    for kind, text in run_ranks(different, 2, what):
        assert kind == "DisagreementError"
        assert {"model": "parameter"}.get(what, what) in text
        if what == "betas":
            assert "optimizer's betas ((0.9, 0.999) on rank 0; (0.9, 0.95) on rank 1)" in text
        if what == "weight_decay":
            assert "0.0 for 6 parameters" in text
            assert "0.1 for 4 parameters" in text


def stepping_otherwise(rank, world_size):
    """Groups put together otherwise, a schedule that cycles momentum, and other rates."""
    seen = []
    for cycled in (False, True):
        model = mlp()
        groups = [list(model.parameters())] if rank else [[p] for p in model.parameters()]
        optimizer = torch.optim.SGD([{"params": own} for own in groups], lr=0.05 + 0.01 * rank, momentum=0.9)
        if cycled:
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
            for _ in range(3 * rank):
                optimizer.step()
                schedule.step()
        handle = nb.compress_updates(model, optimizer, "none", every=2, min_numel=64)
        train(model, rank, range(2), optimizer)
        handle.remove()
        seen.append(flat(model))
    return seen


def test_replicas_may_step_at_rates_of_their_own():
    mine, its = run_ranks(stepping_otherwise, 2)
    assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


def changed_behind_its_back(rank, world_size, every, check_every, change):
    """A parameter changes after three rounds; how many more were held before somebody saw it."""
    model, optimizer, handle = begin("none", every=every, check_every=check_every)
    train(model, rank, range(3 * every), optimizer)
    with torch.no_grad():
        if rank and change == "order":
            model[0].weight.copy_(model[0].weight.t().reshape(model[0].weight.shape))
        elif rank:
            model[0].weight.view(torch.int32)[0, 0] ^= 1
    error, step = None, 3 * every
    while error is None and handle.step < 40:
        error = refusal(lambda step=step: train(model, rank, [step], optimizer))
        step += 1
    return error, handle.step - 3


@pytest.mark.parametrize(
    ("every", "check_every", "unseen"), [(1, None, 7), (4, None, 0), (10, None, 0), (1, 1, 0), (1, 4, 1)]
)
def test_replicas_that_differ_by_a_bit_are_an_error(every, check_every, unseen):
    """Rounds of every step are looked at once in ten, those of ten steps and more each; of four, every third."""
    for error, rounds in run_ranks(changed_behind_its_back, 2, every, check_every, "bit"):
        assert error[0] == "DisagreementError"
        assert "parameters of the last round" in error[1]
        assert rounds == unseen


def test_replicas_with_the_same_elements_in_another_order_are_an_error():
    for error, rounds in run_ranks(changed_behind_its_back, 2, 1, 1, "order"):
        assert error[0] == "DisagreementError"
        assert rounds == 0


def left(rank, world_size):
    """A replica that dies in a round; what the other is left with."""
    model, optimizer, _ = begin("topk:density=0.1+ef", every=2)
    train(model, rank, range(2), optimizer)
    before = flat(model)
    train(model, rank, range(2, 3), optimizer)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    error = refusal(lambda: train(model, rank, range(3, 4), optimizer))
    kept = torch.equal(flat(model), before)
    return error[0], kept, refusal(lambda: train(model, rank, range(4, 6), optimizer))


def test_a_replica_that_goes_away_is_an_error_and_parameters_are_those_of_the_last_round():
    with pytest.raises(RankError) as caught:
        run_ranks(left, 2, fresh=True, timeout_s=20.0, grace_s=30.0)
    error, kept, later = caught.value.results[0]
    assert (error, kept) == ("RuntimeError", True)
    assert later[0] == "RuntimeError"
    assert "stopped at an earlier" in later[1]  # round, or step where the thread that exchanges says so first


def removed(rank, world_size):
    model, optimizer, handle = begin("qsgd:bits=4+ef", every=2, outer=1.5)
    train(model, rank, range(2), optimizer)
    twice = refusal(lambda: nb.compress_updates(model, optimizer, "none"))
    handle.remove()
    before = flat(model)
    train(model, rank, range(2, 6), optimizer)
    error = refusal(handle.average)
    assert handle.length == 1.5
    again = nb.compress_updates(model, optimizer, "none", min_numel=64)
    train(model, rank, range(6, 8), optimizer)
    return before, flat(model), handle.step, again.step, error, twice


def test_without_its_handle_an_optimizer_steps_alone_and_can_have_another():
    (before, mine, rounds, later, error, twice), (its_before, its, *_) = run_ranks(removed, 2)
    assert twice[0] == "ValueError"
    assert "already" in twice[1]
    assert torch.equal(before, its_before)
    assert torch.equal(mine, its)
    assert (rounds, later) == (1, 2)
    assert "removed" in error[1]


def in_numpys_numbers(rank, world_size, kind):
    model, optimizer, handle = begin("qsgd:bits=4+ef", every=kind(2), seed=kind(3))
    train(model, rank, range(4), optimizer)
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    handle.load_state_dict(torch.load(file))
    return flat(model)


def test_steps_and_seeds_in_numpys_numbers_are_those_of_python_and_states_can_be_read():
    (own, _), (expected, _) = (run_ranks(in_numpys_numbers, 2, kind) for kind in (np.int64, int))
    assert torch.equal(own, expected)
