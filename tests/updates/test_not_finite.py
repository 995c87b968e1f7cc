"""Rounds in which something is not finite, has another size, or was skipped: what is applied then, and what is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowband as nb
from tests.gradients.training import adamw, flat, heard, loss_of, mlp, refusal, sgd, train
from tests.ranks import run_ranks
from tests.thorough import thorough
from tests.updates.training import begin, nesterov


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
    *_, resumed = begin("topk:density=0.1+ef", optimizer=lambda m: sgd(m, lr=0.1), every=2)
    resumed.load_state_dict(handle.state_dict())
    assert resumed.skipped_updates == handle.skipped_updates
    return history, handle.skipped_updates, handle.stats().total.skipped, said


@pytest.mark.parametrize("broken", [(1,), (0, 1, 2)])
def test_an_update_that_is_not_finite_is_left_out_and_the_replica_goes_on(broken):
    answers = run_ranks(broken_update, 3, broken)
    for rank, (history, left_out, skipped, said) in enumerate(answers):
        assert left_out == (rank in broken)
        assert skipped == 0
        assert [("holds inf or NaN in 0.weight, 0.bias, " in line) for line in said] == [True] * (rank in broken)
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
        assert f"cache has shape ({size},) and torch.float32 now, and had shape (50,)" in text
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
        assert "are not averaged: 0.weight, 0.bias;" in text
        assert "remove() on all ranks, and compress_updates again" in text
    assert torch.equal(mine, its)


def a_mean_that_is_not_finite(rank, world_size):
    """The updates are finite, and too large for what they travel in."""
    model = nn.Linear(40, 40, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handle = nb.compress_updates(model, optimizer, "fp16")
    before = flat(model)
    with heard() as said:
        model.weight.grad = torch.full_like(model.weight, 1e5 + rank)
        optimizer.step()
        stayed = torch.equal(flat(model), before)
        model.weight.grad = torch.full_like(model.weight, 1.0)
        optimizer.step()
    return stayed, float((flat(model) - before).mean()), said, handle.step


def test_a_mean_that_is_not_finite_is_not_applied():
    for stayed, moved, said, rounds in run_ranks(a_mean_that_is_not_finite, 2):
        assert stayed
        assert moved == pytest.approx(-1.0, rel=1e-3)
        assert ["the mean of the updates holds inf or NaN" in line for line in said] == [True]
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


def first_of_two(rank, world_size):
    """Of two optimizers in turns the first has its turn, and on replica 1 the scaler skips it. Then all average."""
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD([p for part in model[1:] for p in part.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    handle = nb.compress_updates(model, [first, second], "none", every=4, min_numel=64, grad_scaler=scaler)
    scaler.scale(loss_of(model, 0, rank) * (float("inf") if rank else 1.0)).backward()
    scaler.step(first)
    scaler.update()
    handle.average()
    return flat(model), handle.step, handle.steps


def test_where_one_replica_skips_the_step_of_an_optimizer_that_is_not_counted_all_average():
    results = run_ranks(first_of_two, 2)
    for parameters, rounds, steps in results:
        assert (rounds, steps) == (1, 0)
        assert torch.equal(parameters, results[0][0])
        assert not torch.equal(parameters, flat(mlp()))


def in_turns_with_a_scaler(rank, world_size):
    """The loop makes every other step without the scaler. The other ones it leaves to the scaler, which skips the first
    of these on replica 1.
    """
    model = mlp()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=16.0)
    handle = nb.compress_updates(model, optimizer, "none", every=8, min_numel=64, grad_scaler=scaler)
    counts = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        if step % 2:
            scaler.scale(loss * (float("inf") if (rank, step) == (1, 1) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        counts.append(handle.steps)
    handle.average()
    return counts, flat(model), scaler.get_scale()


def test_a_step_that_a_scaler_skips_counts_behind_one_that_it_was_not_asked_for():
    (counts, mine, _), (others, its, scale) = run_ranks(in_turns_with_a_scaler, 2)
    assert counts == others == [1, 2, 3, 4, 5, 6]
    assert scale == 8.0  # it did skip one
    assert torch.equal(mine, its)


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
