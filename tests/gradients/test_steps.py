"""Averages and optimizers' steps take turns; what breaks that is an error, or said once."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import narrowband as nb
from tests.gradients.training import compress, data, flat, heard, loss_of, mlp, refusal, sgd, train, wrap
from tests.ranks import run_ranks

KINDS = pytest.mark.parametrize("kind", ["ddp", "module"])
SPEC = "topk:density=0.05+ef"


def model_of(kind):
    return wrap(mlp()) if kind == "ddp" else mlp()


def in_two_passes(kind, spec, rank, *, waits=False, gradients="used"):
    """Every step has two backward passes; what was said of it."""
    model = model_of(kind)
    handle = compress(model, spec, min_numel=64)
    optimizer = nb.DGCSGD(model.parameters(), lr=0.05) if spec.startswith("dgc") else sgd(model)
    with heard() as messages:
        for step in range(3):
            with handle.no_sync() if waits else contextlib.nullcontext():
                loss_of(model, 100 + step, rank).backward()
            if gradients == "thrown away":
                optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [message for message in messages if "averaged twice" in message]


def said_of_two_passes(rank, world_size, kind):
    found = {
        (waits, gradients): in_two_passes(kind, SPEC, rank, waits=waits, gradients=gradients)
        for waits in (False, True)
        for gradients in ("used", "thrown away")
    }
    found["nothing is kept"] = in_two_passes(kind, "qsgd:bits=4", rank)
    found["momentum"] = in_two_passes(kind, "dgc:density=0.1", rank)
    return found


@KINDS
def test_averages_that_no_optimizer_uses_are_a_warning_of_one_rank(kind):
    first, second = run_ranks(said_of_two_passes, 2, kind)
    assert set(map(tuple, second.values())) == {()}
    for case in ("used", "thrown away"):
        assert first[True, case] == []
        (message,) = first[False, case]
        assert "run all but the last in handle.no_sync(): otherwise averaged gradients are compressed again" in message
    assert first["nothing is kept"] == []
    assert "compressed again, and dgc applies momentum to them once more" in first["momentum"][0]


def passes_that_are_meant(rank, world_size, kind):
    """SAM, which takes a step up by the averages of one pass and down by those of a second; and a loop that leaves some
    steps out.
    """
    with heard() as said:
        model = model_of(kind)
        handle = compress(model, SPEC, min_numel=64)
        optimizer = sgd(model)
        for step in range(3):
            loss_of(model, step, rank).backward()
            before = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=0.05)
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            with torch.no_grad():
                for p, was in zip(model.parameters(), before, strict=True):
                    p.copy_(was)
            optimizer.step()
            optimizer.zero_grad()
        sam, said[:] = list(said), []

        model = model_of(kind)
        compress(model, SPEC, min_numel=64)
        optimizer = sgd(model)
        for step in range(5):
            loss_of(model, step, rank).backward()
            if step != 2:
                optimizer.step()
            optimizer.zero_grad()
    return sam, said, handle.step


@KINDS
def test_loops_that_use_both_averages_or_leave_steps_out_are_told_what_becomes_of_the_rest_once(kind):
    for rank, (sam, left_out, steps) in enumerate(run_ranks(passes_that_are_meant, 2, kind)):
        assert steps == 6
        for said in (sam, left_out):
            assert len(said) == (rank == 0)
            for message in said:
                assert "The residual of the first average is added to the second." in message
                assert message.endswith("or a step is skipped on purpose, ignore this warning")


def what_takes_no_turns_by_right(rank, world_size, kind):
    """A step that is skipped, those that run backward themselves, once or often, a loop without an optimizer, steps
    that are local on purpose, of which only backward is in no_sync, and those of an optimizer of two models, of which
    one does not learn.
    """
    with heard() as messages:
        model, scaler = model_of(kind), torch.amp.GradScaler("cpu", init_scale=4.0)
        compress(model, SPEC, min_numel=64, grad_scaler=scaler)
        optimizer = sgd(model)
        for step in range(4):
            loss = loss_of(model, step, rank)
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        for search in (torch.optim.SGD, partial(torch.optim.LBFGS, max_iter=3)):
            model = model_of(kind)
            handle = compress(model, SPEC, min_numel=64)
            optimizer = search(model.parameters(), lr=0.1)
            for step in range(5):

                def closure(model=model, optimizer=optimizer, step=step):
                    optimizer.zero_grad()
                    loss = loss_of(model, step, rank)
                    loss.backward()
                    return loss

                optimizer.step(closure)
                if step == 3:  # as Lightning does before it validates
                    optimizer.zero_grad()
        passes = handle.step

        model = model_of(kind)
        compress(model, SPEC, min_numel=64)
        for step in range(3):
            loss_of(model, step, rank).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.05)
                    p.grad = None

        if kind == "module":  # DDP averages whatever was called outside of no_sync
            model = mlp()
            handle = compress(model, SPEC, min_numel=64)
            optimizer = sgd(model)
            for step in range(5):
                loss = loss_of(model, step, rank)
                with handle.no_sync():
                    loss.backward()
                optimizer.step()

            first, second = mlp(), mlp()
            for each in (first, second):
                compress(each, SPEC, min_numel=64)
            optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05)
            for step in range(8):
                optimizer.zero_grad(set_to_none=False)
                told = loss_of(second, step, rank)
                (loss_of(first, step, rank) + (told if step == 0 else told.detach())).backward()
                optimizer.step()
    return messages, passes > 5


@KINDS
def test_skipped_steps_line_searches_and_loops_without_an_optimizer_are_nothing_to_warn_of(kind):
    assert run_ranks(what_takes_no_turns_by_right, 2, kind) == [([], True)] * 2


def momentum_in_both_places(rank, world_size, kind):
    """What is said of momentum that nobody has looked at, and of momentum that a schedule cycles."""
    found = []
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: nb.DGCSGD(p, lr=0.05, weight_decay=0.1),
    ):
        for cycles in (False, True):
            model = model_of(kind)
            optimizer = make(model.parameters())
            own = optimizer if isinstance(optimizer, nb.DGCSGD) else None
            compress(model, "dgc:density=0.1", min_numel=64, optimizer=own)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=cycles)
            with heard() as said:
                for step in range(3):
                    train(model, rank, [step], optimizer)
                    schedule.step()
            found.append(said)
    model = model_of(kind)
    compress(model, SPEC, min_numel=64)
    with heard() as said:
        train(model, rank, [0, 1], nb.DGCSGD(model.parameters(), lr=0.05))
    return [*found, said]


@KINDS
def test_momentum_that_is_not_what_dgc_supposes_is_said_once(kind):
    (twice, also_twice, right, cycled, (nobody,)), others = run_ranks(momentum_in_both_places, 2, kind)
    assert others == [[]] * 5
    assert right == []
    assert nobody.startswith("nobody applies momentum")
    assert nobody.endswith("momentum=0")
    for said, words in (
        (twice, "SGD has momentum=0.9, and dgc"),
        (also_twice, "SGD has momentum="),
        (cycled, "DGCSGD has"),
    ):
        (message,) = said
        assert words in message
        assert "cycle_momentum=False" in message


def steps_inside_backward(rank, world_size, kind):
    model = model_of(kind)
    compress(model, SPEC, min_numel=64)
    own = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}
    hooks = [p.register_post_accumulate_grad_hook(lambda p: own[p].step()) for p in own]
    before = flat(model)
    error = refusal(lambda: loss_of(model, 0, rank).backward())
    for hook in hooks:
        hook.remove()
    return error, torch.equal(flat(model), before)


@KINDS
def test_an_optimizer_that_steps_inside_backward_is_an_error(kind):
    for error, unchanged in run_ranks(steps_inside_backward, 2, kind, fresh=True):
        assert error[0] == "UnsupportedError"
        assert "SGD steps inside backward (in a hook of a parameter), before gradients are averaged" in error[1]
        assert unchanged


def gradients_that_nobody_averages(rank, world_size, kind):
    model = model_of(kind)
    handle = compress(model, SPEC, min_numel=64)
    optimizer = sgd(model)

    def step_with(number):
        x, y = data(number, rank)
        gradients = torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters()))
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        return refusal(optimizer.step)

    errors = [step_with(number) for number in range(3)]
    handle.pause()
    paused = [step_with(number) for number in range(4)]
    handle.resume()
    if kind == "module":  # DDP is in the middle of the passes that it prepared
        train(model, rank, range(2), optimizer)
    with handle.no_sync():
        local = [step_with(number) for number in range(4)]
    handle.remove()
    removed = [step_with(number) for number in range(4)]
    return errors, {*paused, *local, *removed}


@KINDS
def test_a_model_whose_gradients_come_another_way_than_averages_do_is_an_error(kind):
    for errors, others in run_ranks(gradients_that_nobody_averages, 2, kind):
        assert errors[:2] == [None, None]
        assert errors[2][0] == "RuntimeError"
        assert "gradients are not averaged: SGD is about to make step 3 in a row" in errors[2][1]
        assert others == {None}


def converted(rank, world_size, kind):
    """A model in another dtype than at set-up; and in the dtype that it then had, set up anew."""
    model = model_of(kind)
    handle = compress(model, SPEC, min_numel=64)
    train(model, rank, range(1))
    model.to(torch.bfloat16)
    error = refusal(lambda: train(model, rank, range(3), dtype=torch.bfloat16))
    handle.remove()
    model = wrap(model.module) if kind == "ddp" else model
    handle = compress(model, SPEC, min_numel=64)
    train(model, rank, range(2), dtype=torch.bfloat16)
    return error, handle.step


@KINDS
def test_a_model_that_is_converted_after_set_up_is_an_error(kind):
    for error, steps in run_ranks(converted, 2, kind):
        if kind == "ddp":
            assert "gradients are not averaged: SGD is about to make step 3 in a row" in error[1]
            assert "Convert a model (half(), to()) before it is wrapped" in error[1]
        else:
            assert error[0] == "UnsupportedError"
            assert (
                "gradient of 6.bias has dtype torch.bfloat16, but torch.float32 when compression was set up" in error[1]
            )
        assert steps == 2


# ---- what was forgotten at set-up ------------------------------------------------------------------------------------


def said_of(kind, rank, *, spec=SPEC, scaler=None, told=True, trained=0, loaded=False, created=False):
    """What is said of a run that steps by a scaler, or goes on after ``trained`` steps of another run."""
    model = model_of(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps optimizer.step

    def train_for(steps):
        for step in steps:
            scaler.scale(loss_of(model, step, rank)).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()

    state = None
    if trained:
        before = compress(model, spec, min_numel=64, grad_scaler=scaler)
        train_for(range(trained))
        state = before.state_dict()
        before.remove()
    if created:
        get_optimizer_state_dict(model, optimizer)
    handle = compress(model, spec, min_numel=64, grad_scaler=scaler if told else None)
    if loaded:
        handle.load_state_dict(state)
    with heard() as messages:
        train_for(range(trained, trained + 3))
    return messages


def said_of_set_ups(rank, world_size, kind):
    def on():
        return torch.amp.GradScaler("cpu", init_scale=4.0)

    cases = {
        "scaler": {"scaler": on(), "told": False},
        "scaler given": {"scaler": on()},
        "scaler off": {"told": False},
        "scaler, nothing kept": {"scaler": on(), "told": False, "spec": "qsgd:bits=4"},
        "resumed": {"trained": 3},
        "resumed, loaded": {"trained": 3, "loaded": True},
        "resumed, nothing kept": {"trained": 3, "spec": "qsgd:bits=4"},
        "state created": {"created": True},
    }
    return {name: said_of(kind, rank, **case) for name, case in cases.items()}


@KINDS
def test_a_scaler_or_a_state_that_was_forgotten_is_said_once_by_one_rank(kind):
    first, second = run_ranks(said_of_set_ups, 2, kind)
    assert not any(second.values())
    (scaler,) = first.pop("scaler")
    assert scaler.startswith("a GradScaler steps the optimizer, and compress_gradients was not given it.")
    (resumed,) = first.pop("resumed")
    assert resumed.startswith("Adam has stepped before, but residuals begin empty.")
    assert not any(first.values())
