"""What compression leaves in a model: whether the model is used, copies of it, errors in it, and how to take it off."""

from __future__ import annotations

import copy
import gc
import io
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn

import narrowband as nb
from narrowband.averaging.listening import Listener, listen
from narrowband.gradients.hook import _Watch, _watches
from tests.garbage import collected_after
from tests.gradients.training import HUGE, TINY, compress, data, flat, heard, loss_of, mlp, refusal, sgd, train, wrap
from tests.ranks import run_ranks

SPEC = "topk:density=0.05+ef"


# ---- a model that is wrapped, and not used ---------------------------------------------------------------------------


def steps_with(call, rank, optimizers, steps, handle=None):
    """Train by calling ``call``; the error, and in which step it came."""
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = data(step, rank)
        (call(x) - y).square().mean().backward()
        for optimizer in optimizers:
            error = refusal(optimizer.step)
            if error is not None:
                return error, step
    return None


def the_module_is_called_and_not_the_wrapper(rank, world_size, kept):
    net = mlp()
    if kept == "both":
        model = DistributedDataParallel(net)
        handle = compress(model, SPEC, min_numel=64)
    elif kept == "the handle":  # the wrapper is garbage at once
        handle = compress(DistributedDataParallel(net), SPEC, min_numel=64)
    else:
        compress(DistributedDataParallel(net), SPEC, min_numel=64)
    gc.collect()
    found = steps_with(net, rank, [sgd(net)], 6)
    return found, kept == "nothing" or handle.step == 0


@pytest.mark.parametrize("kept", ["both", "the handle", "nothing"])
def test_training_the_module_inside_is_an_error_that_says_what_to_do(kept):
    for (error, step), nothing_averaged in run_ranks(the_module_is_called_and_not_the_wrapper, 2, kept):
        assert error[0] == "RuntimeError"
        assert "gradients are not averaged: SGD is about to make step 3 in a row" in error[1]
        assert "model = DistributedDataParallel(model)" in error[1]
        assert step == 2
        assert nothing_averaged


def a_model_that_is_gone(rank, world_size):
    net = mlp()
    model = wrap(net)
    handle = compress(model, SPEC, min_numel=64)
    train(model, rank, range(1))
    del model, handle
    gc.collect()
    return steps_with(net, rank, [sgd(net)], 5), len(_watches)


def test_a_module_may_be_trained_alone_when_its_wrapper_has_done_its_work():
    assert run_ranks(a_model_that_is_gone, 2, fresh=True) == [(None, 0)] * 2


def test_a_model_may_be_collected_while_an_optimizer_begins_to_step():
    net = nn.Linear(1, 1)
    net(torch.ones(1, 1)).sum().backward()
    optimizer = sgd(net)
    optimizer.step()  # the first step imports much
    there = []
    for allocations in range(1, 60):
        there += [Listener() for _ in range(30 - len(there))]
        list(map(listen, there))
        with collected_after(allocations, there.pop):
            optimizer.step()


def uses_that_are_none_of_that(rank, world_size):
    found = {}
    net = mlp()
    model = wrap(net)
    handle = compress(model, SPEC, min_numel=64)
    parts = [sgd(net[at]) for at in (0, 3, 5, 6)]  # four optimizers of one model
    found["through the model"] = steps_with(model, rank, parts, 4)
    with model.no_sync():
        found["local steps through the model"] = steps_with(model, rank, [sgd(net)], 5)
    other = mlp()
    found["another model"] = steps_with(other, rank, [sgd(other)], 5)
    optimizer = sgd(net)  # has no state, so PyTorch steps it to make one
    optimizer.zero_grad()
    found["for a checkpoint"] = refusal(lambda: [get_optimizer_state_dict(model, optimizer) for _ in range(5)])
    handle.pause()
    found["paused"] = steps_with(net, rank, [sgd(net)], 5)
    handle.resume()
    found["again without the model"] = steps_with(net, rank, [sgd(net)], 5)
    handle.remove()
    found["removed"] = steps_with(net, rank, [sgd(net)], 5)
    return found


def test_local_steps_other_models_and_several_optimizers_are_no_error():
    for found in run_ranks(uses_that_are_none_of_that, 2):
        assert found.pop("again without the model") is not None
        assert set(found.values()) == {None}, found


def new_parameters(rank, world_size):
    """What a step says after parameters were replaced, a layer was added or thawed; and how it goes on, set up anew."""
    found = {}
    for kind in ("replaced", "added", "thawed", "none"):
        net = mlp()
        net[0].requires_grad_(False)
        model = wrap(net)
        handle = compress(model, SPEC, min_numel=64)
        train(model, rank, range(1))
        if kind == "replaced":
            net.load_state_dict({name: x.clone() for name, x in net.state_dict().items()}, assign=True)
        elif kind == "added":
            net.append(nn.Linear(8, 8))
        elif kind == "thawed":
            net[0].requires_grad_(True)
        found[kind] = refusal(lambda model=model: train(model, rank, range(1, 3)))
        if found[kind] is not None:
            handle.remove()
            model = wrap(net)
            handle = compress(model, SPEC, min_numel=64)
            train(model, rank, range(1, 3))
        found[kind, "step"] = handle.step
        found[kind, "parameters"] = flat(net)
    return found


def test_new_parameters_are_an_error_before_an_optimizer_steps():
    mine, its = run_ranks(new_parameters, 2)
    for kind, first in (("replaced", "1.weight"), ("added", "7.weight"), ("thawed", "0.weight")):
        for found in (mine, its):
            assert found[kind][0] == "UnsupportedError", (kind, found[kind])
            assert found[kind][1].startswith(f"gradients of {first} and ")
            assert "wrap the module in DistributedDataParallel again" in found[kind][1]
            assert found[kind, "step"] == 2
        assert torch.equal(mine[kind, "parameters"], its[kind, "parameters"])
    assert mine["none"] is its["none"] is None
    assert mine["none", "step"] == 3


# ---- copies ----------------------------------------------------------------------------------------------------------


def copies(rank, world_size):
    model = wrap(mlp())
    handle = compress(model, SPEC, min_numel=64)
    train(model, rank, range(2))
    with heard() as silence:
        twin, third, teacher = (copy.deepcopy(model) for _ in range(3))
        average = AveragedModel(model)
        average.update_parameters(model)
        update_bn([data(0, rank)], average)
        average.eval()(data(0, rank)[0]).sum().backward()  # evaluated without no_grad
        teacher.requires_grad_(False)(data(0, rank)[0])
        own = compress(third, SPEC, min_numel=64)  # a copy may have a handle of its own
        train(third, rank, range(2, 4))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        read = torch.load(file, weights_only=False)
        same = torch.equal(flat(twin), flat(model)) and torch.equal(flat(read), flat(model))
        plain = wrap(copy.deepcopy(model.module))
        train(plain, rank, range(2, 4))
    with heard() as said:
        for net in (copy.deepcopy(twin), read):  # of a copy, too
            train(net, rank, range(2, 4))
            same = same and torch.equal(flat(net), flat(plain))
    again = compress(twin, SPEC, min_numel=64)
    train(twin, rank, range(4, 5))
    train(model, rank, range(2, 5))
    return silence, said, same, (own.step, again.step, handle.step)


def test_a_copy_averages_as_plain_ddp_does_and_says_so_once_if_it_is_trained():
    for silence, said, same, steps in run_ranks(copies, 2):
        assert silence == []
        assert len(said) == 2
        assert all("has no compression: its gradients are averaged uncompressed, unless" in each for each in said)
        assert same
        assert steps == (2, 1, 5)


# ---- taking it off ---------------------------------------------------------------------------------------------------


def taken_off(rank, world_size):
    plain, model = wrap(mlp(), cap=TINY), wrap(mlp(), cap=TINY)
    handle = compress(model, SPEC, min_numel=64)
    for net in (plain, model):
        train(net, rank, range(2))  # DDP makes its buckets anew after the first
    before = repr(handle)
    plain.module.load_state_dict(model.module.state_dict())
    held = handle.residual_nbytes
    handle.remove()
    handle.remove()  # twice is once
    train(plain, rank, range(2, 5))
    train(model, rank, range(2, 5))
    equal = torch.equal(flat(plain), flat(model))
    refused = [refusal(what) for what in (handle.state_dict, lambda: handle.load_state_dict({}))]
    left = (handle.step, handle.stats().total.steps, handle.residual_nbytes, "removed" in repr(handle))
    second = compress(model, "qsgd:bits=8", min_numel=64)
    twice = refusal(lambda: compress(model, "qsgd:bits=8"))
    train(model, rank, range(5, 7))
    return equal, refused, left, held, before, second.step, twice, flat(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_its_handle_a_model_averages_as_plain_ddp_to_the_bit_and_can_have_another(world_size):
    answers = run_ranks(taken_off, world_size)
    for equal, refused, left, held, before, second, twice, parameters in answers:
        assert equal
        assert all(error[0] == "RuntimeError" and "was removed" in error[1] for error in refused)
        assert left == (2, 2, 0, True)
        assert held == 4 * sum(rows * columns for rows, columns in [(40, 24), (32, 40), (16, 32), (8, 16)])
        assert f"'topk:density=0.05+ef', {world_size} ranks, 4 layers with" in before
        assert second == 2
        assert "handle" in twice[1]
        assert torch.equal(parameters, answers[0][7])


def held_by_the_process():
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled(counts):
    """What the process holds once it is no more than counts, or after five seconds: threads take a moment to end."""
    end = time.monotonic() + 5
    while any(now > before for now, before in zip(held_by_the_process(), counts, strict=True)):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return held_by_the_process()


def twelve_rounds(rank, world_size, remove):
    counts = []
    for at in range(13):
        model = wrap(mlp())
        handle = compress(model, "qsgd:bits=4+ef" if at % 2 else SPEC, min_numel=64)
        train(model, rank, range(1))
        if remove:
            handle.remove()
        del handle, model
        if rank == at % world_size:
            gc.collect()  # ranks collect at different times
        if at in (1, 12):
            counts.append(settled(counts[0]) if counts else held_by_the_process())
            dist.barrier()
    return counts


@pytest.mark.parametrize("remove", [True, False], ids=["removed", "garbage"])
def test_a_dozen_handles_leave_no_thread_and_no_descriptor_behind(remove):
    for after_two, after_twelve in run_ranks(twelve_rounds, 2, remove):
        assert all(late <= early for late, early in zip(after_twelve, after_two, strict=True))


# ---- errors ----------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(50, 24, sparse=True), mlp()

    def forward(self, x):
        return self.body(self.table((x * 10).long().remainder(50)).mean(1))


def an_exchange_raises(rank, world_size, cap):
    model = wrap(Words(), cap=cap)
    compress(model, "dgc:density=0.1", min_numel=64)
    parameters = flat(model)
    first = refusal(loss_of(model, 0, rank).backward)
    poisoned = [p.grad is not None and bool((p.grad.to_dense()).isnan().any()) for p in model.parameters()]
    model.zero_grad()
    later = []
    for step in (1, 2):
        loss = loss_of(model, step, rank)  # forward works
        try:
            loss.backward()
        except Exception as error:
            later.append((type(error).__name__, str(error), type(error.__cause__).__name__))
    return first, any(poisoned), later, torch.equal(flat(model), parameters)


@pytest.mark.parametrize("cap", [HUGE, TINY], ids=["one bucket", "many"])
def test_what_an_exchange_raises_reaches_the_user_with_type_and_message(cap):
    for first, poisoned, later, unchanged in run_ranks(an_exchange_raises, 2, cap):
        assert first[0] == "UnsupportedError"
        assert first[1].startswith("dgc keeps momentum for every element, but the gradient of ")
        assert poisoned  # nobody trains on what was not averaged
        assert len(later) == 2
        for kind, text, cause in later:
            assert (kind, cause) == ("RuntimeError", "UnsupportedError")
            assert text.startswith("gradient exchange stopped at an earlier step: dgc keeps momentum")
        assert unchanged


# ---- what averages by itself, and no model ---------------------------------------------------------------------------


def others(rank, world_size):
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    given = {
        "compiled": torch.compile(wrap(mlp())),
        "fsdp1": FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")),
        "replicated": replicate(mlp()),
        "coded": nb.CodedDataParallel(mlp(), 1),
        "class": nn.Linear,
        "number": 42,
        "data parallel": nn.DataParallel(mlp()),
    }
    sharded = fully_shard(mlp(), mesh=mesh)
    assert refusal(lambda: compress(sharded, "none"))[0] == "UnsupportedError"  # see test_modules.py
    return {name: refusal(lambda m=model: compress(m, "none")) for name, model in given.items()}


def test_what_averages_by_itself_is_named_with_what_to_do():
    expected = {
        "compiled": "compress_gradients(model._orig_mod, …)",
        "fsdp1": "Shard with fully_shard (FSDP2) instead",
        "replicated": "Leave replicate() out: compress_gradients(model, …) averages a plain module",
        "coded": "leaves nothing to compress. Its bits=16 and bits=8",
        "class": "not Linear, a class",
        "number": "not int",
        "data parallel": "Start one process per device with torchrun",
    }
    for errors in run_ranks(others, 2):
        assert errors.keys() == expected.keys()
        for name, words in expected.items():
            assert errors[name][0] == "TypeError", (name, errors[name])
            assert words in errors[name][1], (name, errors[name])


def watches_of_handles(rank, world_size):
    """How many watches are left of three handles that a model had in turn."""

    def watches():
        gc.collect()
        return sum(type(x) is _Watch for x in gc.get_objects())

    model, before = wrap(mlp()), watches()
    for _ in range(3):
        handle = compress(model, "qsgd:bits=4")
        train(model, rank, range(1))
        handle.remove()
    train(model, rank, range(1))
    return watches() - before


def test_nothing_watches_for_a_handle_that_was_removed():
    assert run_ranks(watches_of_handles, 2) == [0, 0]
