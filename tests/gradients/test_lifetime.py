"""How it ends: with the model, with the process, or with a peer that dies."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from narrowband.averaging import flat as flat_module
from tests.gradients.training import TINY, compress, flat, heard, loss_of, mlp, refusal, residuals, same, train, wrap
from tests.ranks import RankError, run_ranks

REPOSITORY = Path(__file__).parents[2]


def engines():
    return [thread for thread in threading.enumerate() if thread.name == "narrowband-engine"]


def let_go(rank, world_size):
    gc.collect()
    before = set(engines())
    model = wrap(mlp(), cap=TINY)
    handle = compress(model, "topk:density=0.05+ef", min_numel=64)
    train(model, rank, range(3))
    mine = [thread for thread in engines() if thread not in before]
    residual = weakref.ref(handle.state_dict()["feedback"]["0.weight"])
    layers = handle.layers  # as the thread may hold them until it ends: only then are residuals freed, at once
    del handle
    gc.collect()
    kept = [thread.is_alive() for thread in mine]  # the model needs it
    train(model, rank, range(3, 4))
    del model
    gc.collect()
    for thread in mine:
        thread.join(180)
    del layers
    return kept, [thread.is_alive() for thread in mine], residual() is None


def test_a_handle_ends_with_its_model():
    assert run_ranks(let_go, 2) == [([True], [False], True)] * 2


PROGRAM = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from tests.gradients.test_lifetime import after_a_death, trained

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60))
"""


def run_program(tmp_path, body):
    """Exit code, standard output and error of both ranks of a program that a user could have written."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM + body, str(rank), str(tmp_path / "store")],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [(p.returncode, out, err) for p, (out, err) in [(p, p.communicate(timeout=240)) for p in ranks]]
    finally:
        for p in ranks:
            p.kill()


def trained(rank, spec="topk:density=0.05+ef", collective="auto"):
    model = wrap(mlp(), cap=TINY)
    handle = compress(model, spec, collective=collective, min_numel=64)
    train(model, rank, range(2))
    return model, handle


def test_the_process_exits_cleanly(tmp_path):
    """Whether its group was destroyed, as on rank 1, or left as it is."""
    body = "model, handle = trained(rank)\nif rank: dist.destroy_process_group()\nprint('trained')"
    for code, out, err in run_program(tmp_path, body):
        assert (code, out) == (0, "trained\n"), err
        assert "terminate called" not in err
        assert "Traceback" not in err


def after_a_death(rank, world_size, spec, collective):
    """Rank 1 dies in a step; what is left of it on the other."""
    model, handle = trained(rank, spec, collective)
    before, parameters = residuals(handle), flat(model)
    loss = loss_of(model, 2, rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with heard() as said:
        error = refusal(loss.backward)[0]
    assert any("another rank has failed or ended" in each for each in said)
    left = same(residuals(handle), before), handle.step, torch.equal(flat(model), parameters)
    alone = refusal(lambda: loss_of(model.module, 3, rank).backward())
    model.require_forward_param_sync = False
    return error, left, alone, refusal(lambda: loss_of(model, 3, rank).backward())[0]


#: The step is an error and undone, the model alone goes on, and the wrapped one does not.
SURVIVED = ("RuntimeError", (True, 2, True), None, "RuntimeError")


@pytest.mark.parametrize(("spec", "collective"), [("qsgd:bits=4+ef", "scatter_reduce"), ("fp16+ef", "all_reduce")])
def test_a_peer_that_dies_is_an_error_and_the_residual_is_as_before(spec, collective):
    with pytest.raises(RankError) as caught:
        run_ranks(after_a_death, 2, spec, collective, fresh=True, grace_s=60)
    assert list(caught.value.reports) == [1]
    assert "SIGKILL" in caught.value.reports[1]
    assert caught.value.results == {0: SURVIVED}


@pytest.mark.thorough
def test_a_program_whose_peer_died_goes_on_and_exits_cleanly(tmp_path):
    body = "print(after_a_death(rank, 2, 'topk:density=0.05+ef', 'all_gather'))"
    survivor, dead = run_program(tmp_path, body)
    assert dead[0] == -9
    assert (survivor[0], survivor[1].strip()) == (0, str(SURVIVED)), survivor[2]
    assert "terminate called" not in survivor[2]


class OutOfMemory(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(*_):
        raise MemoryError("no memory is left")


class Large(torch.nn.Module):
    """A model that has too little memory for one of its backward passes, when some gradients are there."""

    def __init__(self):
        super().__init__()
        self.layers, self.fits = mlp(), True

    def forward(self, x):
        x = self.layers[:5](x)
        return self.layers[5:](x if self.fits else OutOfMemory.apply(x))


def out_of_memory(rank, world_size, kind):
    """What every call says after a backward pass broke off; parameters of that run, set up anew, and of another."""
    spec, options = "topk:density=0.05+ef", {"nodes": 2} if kind == "nodes" else {}

    def begin(net):
        model = net if kind == "plain" else wrap(net, cap=TINY)
        return model, compress(model, spec, min_numel=32, **options)

    before, flat_module.GROUP_NBYTES = flat_module.GROUP_NBYTES, 1
    try:
        whole, _ = begin(Large())
        train(whole, rank, range(6))
        net = Large()
        model, handle = begin(net)
        train(model, rank, range(3))
        saved = copy.deepcopy((net.state_dict(), handle.state_dict()))
        net.fits = False
        said = {"this": refusal(lambda: loss_of(model, 3, rank).backward())}
        net.fits = True
        said["state"] = refusal(handle.state_dict)
        said["load"] = refusal(lambda: handle.load_state_dict(saved[1]))
        said["next"] = refusal(lambda: loss_of(model, 3, rank).backward())
        said["again"] = refusal(lambda: compress(model, spec))
        handle.remove()
        said["removed"] = refusal(handle.state_dict)
        net.zero_grad()
        model, handle = begin(net)
        net.load_state_dict(saved[0])
        handle.load_state_dict(saved[1])
        train(model, rank, range(3, 6))
        return said, torch.equal(flat(net), flat(whole)), handle.step
    finally:
        flat_module.GROUP_NBYTES = before


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 2), ("ddp", 2), ("nodes", 4)])
def test_after_a_backward_pass_that_broke_off_a_model_goes_on_from_its_checkpoint(kind, ranks):
    for said, same_bits, step in run_ranks(out_of_memory, ranks, kind):
        assert said["this"] == ("MemoryError", "no memory is left")
        for call in ("state", "load", "next"):
            assert "a step ended early while gradients were being exchanged" in said[call][1], call
            assert "On all ranks call remove(), set up compression again, and load a checkpoint" in said[call][1]
        assert said["next"][0] == "RuntimeError"
        assert "call its remove() first" in said["again"][1]
        assert "was removed" in said["removed"][1]
        assert same_bits
        assert step == 6


class Skipping(nn.Module):
    """A model whose first layer may have no part in the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.next, self.last = nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 8)
        self.skips = False

    def forward(self, x):
        return self.last(self.next(x if self.skips else self.first(x)))


def without_the_first_layer(rank, world_size):
    """Whether a step is open where backward returned without a layer's gradients, and what the next forward says."""
    model = wrap(Skipping(), cap=TINY)
    handle = compress(model, "topk:density=0.05+ef", min_numel=32)
    for model.module.skips in (False, False, True):
        model(torch.ones(2, 8)).sum().backward()
    return handle.in_step, refusal(lambda: model(torch.ones(2, 8)))


def test_of_parameters_without_a_gradient_pytorch_tells():
    for in_step, (kind, text) in run_ranks(without_the_first_layer, 2):
        assert in_step
        assert kind == "RuntimeError"
        assert "find_unused_parameters=True" in text


def stop_in_an_encoding(rank, world_size):
    """Something breaks on this rank's engine, in the middle of a step: shapes that its codec cannot take."""
    model = wrap(mlp(), cap=TINY)
    handle = compress(model, "topk:density=0.05+ef", min_numel=64)
    train(model, rank, range(2))
    before = {name: value.clone() for name, value in handle.state_dict()["feedback"].items()}
    handle.layers.state.state_dict()["3.weight"].resize_(7)  # a broken program: the residual has another size
    errors = []
    for _ in range(3):
        try:
            train(model, rank, range(2, 3))
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    after = handle.state_dict()["feedback"]
    return errors, [name for name in before if name != "3.weight" and not torch.equal(before[name], after[name])]


def test_a_step_that_breaks_is_undone_and_the_next_says_why():
    errors, changed = run_ranks(stop_in_an_encoding, 1)[0]
    assert len(errors) == 3
    assert all("elements" in error for error in errors), errors
    assert "at an earlier step" in errors[-1], errors
    assert changed == []
