"""What making a boundary has done already."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowband as nb
from narrowband.kernels.cpu.selection import look_again
from tests.loops import asked_for_from_now
from tests.ranks import run_ranks


def loops(rank, world_size, forward, backward):
    """Those that were asked for when the boundary was made, and later."""
    asked = asked_for_from_now()
    boundary = nb.Boundary(forward, backward)
    model = nn.Sequential(nn.Linear(32, 512), boundary, nn.Linear(512, 4))
    before = len(asked)
    for _ in range(3):
        boundary.samples = torch.arange(64)
        model(torch.randn(64, 32)).square().mean().backward()
    if backward.startswith("topk") and "scope" not in backward:
        # What top-k does where a sample of neighbours misled it: in so few steps that hardly ever happens by itself.
        look_again(torch.randn(64 * 512).numpy().view("int32"), 3277, 0)
    return asked[:before], asked[before:]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("qsgd:bits=4", "topk:density=0.1+ef21"),
        ("topk:density=0.1,scope=sample", "topk:density=0.1,scope=sample,reuse=forward"),
        ("uniform:bits=4+aq-sgd", "uniform:bits=8"),
    ],
)
def test_no_micro_batch_waits_for_a_compiler(forward, backward):
    ((before, later),) = run_ranks(loops, 1, forward, backward, fresh=True, group=False, timeout_s=600)
    assert before
    assert later == []
