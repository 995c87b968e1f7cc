"""How it ends: with the model, with the process, or with a peer that dies."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import pytest
import torch

from tests.gradients.training import TINY, compress, mlp, train, wrap
from tests.ranks import run_ranks

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
    del handle
    gc.collect()
    kept = [thread.is_alive() for thread in mine]  # the model needs it
    train(model, rank, range(3, 4))
    del model
    gc.collect()
    for thread in mine:
        thread.join(10)
    return kept, [thread.is_alive() for thread in mine], residual() is None


def test_a_handle_ends_with_its_model():
    assert run_ranks(let_go, 2) == [([True], [False], True)] * 2


PROLOGUE = """
import os, signal, sys, torch, torch.distributed as dist
from datetime import timedelta
import narrowband as nb
from tests.gradients.training import TINY, compress, flat, loss_of, mlp, residuals, refusal, same, train, wrap

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60))
model = wrap(mlp(), cap=TINY)
handle = compress(model, SPEC, collective=COLLECTIVE, min_numel=64)
train(model, rank, range(2))
"""


def run_script(tmp_path, body, spec="topk:density=0.05+ef", collective="auto"):
    """Exit code, standard output and error of both ranks of a program that a user could have written."""
    script = f"SPEC, COLLECTIVE = {spec!r}, {collective!r}" + PROLOGUE + textwrap.dedent(body)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(tmp_path / "store")],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [(p.returncode, out, err) for p, (out, err) in [(p, p.communicate(timeout=90)) for p in ranks]]
    finally:
        for p in ranks:
            p.kill()


@pytest.mark.parametrize("ending", ["", "dist.destroy_process_group()"], ids=["group left as it is", "group destroyed"])
def test_the_process_exits_cleanly(tmp_path, ending):
    for code, out, err in run_script(tmp_path, ending + "\nprint('trained')"):
        assert (code, out) == (0, "trained\n"), err
        assert "terminate called" not in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("spec", "collective"),
    [("topk:density=0.05+ef", "all_gather"), ("qsgd:bits=4+ef", "scatter_reduce"), ("fp16+ef", "all_reduce")],
)
def test_a_peer_that_dies_is_an_error_and_the_residual_is_as_before(tmp_path, spec, collective):
    survivor, dead = run_script(
        tmp_path,
        """
        before, parameters = residuals(handle), flat(model)
        loss = loss_of(model, 2, rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        error = refusal(loss.backward)
        print(error[0])
        print(same(residuals(handle), before), handle.step, bool(torch.equal(flat(model), parameters)))
        print(refusal(lambda: loss_of(model.module, 3, rank).backward()))  # the model alone goes on
        model.require_forward_param_sync = False
        print(refusal(lambda: loss_of(model, 3, rank).backward())[0])
        """,
        spec,
        collective,
    )
    assert dead[0] == -9
    assert survivor[0] == 0, survivor[2]
    assert survivor[1].splitlines() == ["RuntimeError", "True 2 True", "None", "RuntimeError"], survivor[2]
    assert "terminate called" not in survivor[2]


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
