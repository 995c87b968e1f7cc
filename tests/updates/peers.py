"""Peers of tests: how they join, and how others see them late, lost or new."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import narrowband as nb
from tests.gradients.training import adamw, flat, mlp, train
from tests.ranks import RankError, run_ranks

SPECS = ["none", "topk:density=0.1+ef", "qsgd:bits=2+ef", "powersgd:rank=2,min_ratio=1"]


#: Long enough never to be over where nobody is missing, so that a test that waited for it would time out.
LONG_S = 300.0


class Normed(nn.Module):
    """With buffers, an embedding that is frozen, and a matrix that lies otherwise."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(24, 40)
        self.norm = nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 8)
        self.kept = nn.Parameter(torch.randn(3), requires_grad=False)
        self.last.weight = nn.Parameter(self.last.weight.detach().t().contiguous().t())

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def everything(model):
    return torch.cat([x.detach().flatten().float() for x in model.state_dict().values() if x.is_floating_point()])


def join(
    address,
    rank,
    spec="topk:density=0.1+ef",
    model=None,
    optimizer=adamw,
    *,
    every=2,
    outer=1.0,
    weigh="steps",
    buffers="average",
    **rules,
):
    """A peer: its model, optimizer and handle. In views, peers are in the order of their ranks here."""
    model = model or mlp()
    optimizer = optimizer(model)
    rules = {"least": 1, "grace_s": LONG_S, "exchange_s": 20.0, "name": str(rank), **rules}
    peers = nb.Rendezvous(address, **rules)
    options = {"every": every, "outer": outer, "min_numel": 64, "weigh": weigh, "buffers": buffers}
    return model, optimizer, nb.compress_updates(model, optimizer, spec, peers=peers, **options)


def left_over(fn, ranks, *args, lost=1):
    """Results by rank of those that are left when some were killed."""
    with pytest.raises(RankError) as caught:
        run_ranks(fn, ranks, *args, group=False, grace_s=40.0)
    assert len(caught.value.reports) == lost, caught.value
    return caught.value.results


def wait_for(handle, name):
    """Wait until a peer has arrived at the next round."""
    meeting = handle._meeting
    while not any(entry.peer.startswith(f"{name}-") for entry in meeting._records(meeting._turn() + 1).values()):
        time.sleep(0.005)


@contextlib.contextmanager
def left_out(handle, *, there):
    """Hold a round without a peer that is late: the grace window of this peer is over as soon as ``there`` is there."""
    wait_for(handle, there)
    rules = handle._meeting._rules
    handle._meeting._rules = replace(rules, grace_s=0.01)
    yield
    handle._meeting._rules = rules


def die(handle):
    handle._meeting.leave()
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_the_newcomer_has_seen_enough(model, rank, optimizer, handle, side):
    """Parameters after each round, by its number; rank 2, which comes later, ends it after its third."""
    seen = {}
    for step in itertools.count():
        if side.check(["enough"]):
            break
        train(model, rank, [step], optimizer)
        if not handle.steps:
            seen[handle.rounds] = flat(model)
        side.set("going", "1")
        if rank == 2 and len(seen) > 2:
            side.set("enough", "1")
        time.sleep(0.01)  # let it have a core
    return seen
