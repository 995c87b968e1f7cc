"""What every trainer is compared with: a loop of one's own around ``nb.compress_gradients``."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import runpy
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import narrowband as nb
from tests.gradients.training import flat, loss_of, mlp, residuals, sgd, wrap
from tests.ranks import RankError, run_ranks

SPEC = "topk:density=0.05+ef"
OPTIONS = {"min_numel": 64, "seed": 5}
#: Of rounds. Their number of steps divides nothing at which a trainer saves.
UPDATES = {**OPTIONS, "every": 3}
#: Batches per step, steps, and the norm at which averages are clipped: it is less than that of any average here.
ACCUMULATE, STEPS, CLIP = 2, 4, 0.05


def needs(*packages):
    """Skip where one of them is not installed. What is installed and cannot be imported is no reason to skip."""
    lacking = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"{' and '.join(lacking)} not installed: pip install '.[dev]'")


def on_two_ranks(fn, *args):
    """Run ``fn`` on two ranks, with time to import a trainer: thousands of files, from a busy disk."""
    return run_ranks(fn, 2, *args, timeout_s=240.0)


def growing_scaler():
    """A gradient scaler whose scale doubles with every step, so residuals have to follow."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)


def direct(rank, fp16=False, accumulate=ACCUMULATE, batches=range(ACCUMULATE * STEPS)):
    """Train by hand, with accumulation and clipping."""
    model = wrap(mlp())
    scaler = growing_scaler() if fp16 else torch.amp.GradScaler(enabled=False)
    handle = nb.compress_gradients(model, SPEC, grad_scaler=scaler if fp16 else None, **OPTIONS)
    optimizer = sgd(model, momentum=0.9)
    losses = []
    for batch in batches:
        last = (batch + 1) % accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", torch.float16, enabled=fp16):
                loss = loss_of(model, batch, rank)
            scaler.scale(loss / accumulate).backward()
        losses.append(loss.item())
        if last:
            scaler.unscale_(optimizer)
            assert clip_grad_norm_(model.parameters(), CLIP) > CLIP
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return outcome(model, losses, handle)


def direct_updates(rank, accumulate=ACCUMULATE, stops=(STEPS, 2 * STEPS), **options):
    """Train a replica by hand, in rounds, until the last of the steps at which all replicas are made equal."""
    model = mlp()
    optimizer = sgd(model, momentum=0.9)
    handle = nb.compress_updates(model, optimizer, SPEC, **{**UPDATES, **options})
    losses = []
    for step in range(1, stops[-1] + 1):
        for batch in range(accumulate * (step - 1), accumulate * step):
            loss = loss_of(model, batch, rank)
            (loss / accumulate).backward()
            losses.append(loss.item())
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step in stops:
            handle.average()
    return outcome(model, losses, handle)


def outcome(model, losses, handle):
    """What two runs are compared by."""
    kept = None if handle.removed else sorted(residuals(handle).items())
    return {
        "losses": losses,
        "parameters": flat(model),
        "bytes": handle.stats().total.sent_bytes,
        "steps": handle.step,
        "residuals": None if not kept else torch.cat([each.flatten() for _, each in kept]),
    }


def dies_at(optimizer, rank, step=STEPS // 2):
    """Let rank 1 die in a step, without a word: its gradients are averaged, and the optimizer has not stepped."""
    steps = itertools.count()

    def on_step(*_):
        if next(steps) == step and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.register_step_pre_hook(on_step)
    return optimizer


def check_killed_and_resumed(killed, resumed, folder):
    """A run whose rank 1 is killed goes on from the trainer's checkpoint with the bits of a loop of one's own.

    Args:
        killed: trains ``(rank, world_size, folder)``, and dies.
        resumed: returns the outcome of the loop, and that of the run that goes on from the folder.
        folder: of checkpoints.
    """
    with pytest.raises(RankError, match="SIGKILL"):
        on_two_ranks(killed, str(folder))
    answers = on_two_ranks(resumed, str(folder))
    for by_hand, after in answers:
        assert agree(by_hand, after, but=("losses", "bytes")) == []
        assert after["losses"] == by_hand["losses"][ACCUMULATE * STEPS // 2 :]
    (_, first), (_, second) = answers
    assert not torch.equal(first["residuals"], second["residuals"])


def agree(a, b, but=()):
    """Names of what is not equal, to the bit."""
    assert a.keys() == b.keys()
    return [
        name
        for name, value in a.items()
        if name not in but
        and not (torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name])
    ]


def example(rank, world_size, name, *words):
    """Run a script of examples/ as a rank of torchrun does; what it printed."""
    script = Path(__file__).parent.parent.parent / "examples" / name
    before, printed = sys.argv, io.StringIO()
    sys.argv = [str(script), *words]
    try:
        with launched(rank, world_size), contextlib.redirect_stdout(printed):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


def learned(printed):
    """The losses that a script printed, and the least number of times that it says to have sent less."""
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", printed)]
    return losses, min(int(ratio) for ratio in re.findall(r"(\d+) times less sent", printed))


@contextlib.contextmanager
def launched(rank, world_size):
    """What torchrun tells a process, whose group is there already."""
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "OMP_NUM_THREADS": 1,
    }
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
