"""What making the context has done already."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowband as nb
from tests.loops import asked_for_from_now
from tests.ranks import run_ranks


def loops(rank, world_size, bits, dtype, cast):
    """Those that were asked for by the first forward pass under the context, and later."""
    asked = asked_for_from_now()
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(784, 64),
        nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Softmax(1), nn.Dropout(0.1),
    ).to(dtype)  # fmt: skip
    context = nb.compress_activations(model, bits=bits, min_numel=256)
    before = len(asked)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast), context:
            if cast:  # entering under autocast finds out about it
                before = len(asked)
            loss = model(torch.randn(8, 3, 16, 16, dtype=dtype)).float().square().mean()
        loss.backward()
    return asked[:before], asked[before:]


@pytest.mark.parametrize(
    ("bits", "dtype", "cast"), [(8, torch.float32, False), (4, torch.bfloat16, False), (8, torch.float32, True)]
)
def test_no_forward_pass_waits_for_a_compiler(bits, dtype, cast):
    ((before, later),) = run_ranks(loops, 1, bits, dtype, cast, fresh=True, group=False, timeout_s=600)
    assert before
    assert later == []
