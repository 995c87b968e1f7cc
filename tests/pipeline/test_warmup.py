"""What making a boundary has done already."""

from __future__ import annotations

import subprocess
import sys

import pytest

WARM = """
import sys, torch
from torch import nn
import narrowband as nb
from narrowband.kernels.cpu.cache import LoopCache
from narrowband.kernels.cpu.selection import look_again

asked, load = [], LoopCache.load_overload
LoopCache.load_overload = lambda self, *types: (asked.append(self.name), load(self, *types))[1]

boundary = nb.Boundary(*sys.argv[1:])
model = nn.Sequential(nn.Linear(32, 512), boundary, nn.Linear(512, 4))
before = len(asked)
for step in range(3):
    boundary.samples = torch.arange(64)
    model(torch.randn(64, 32)).square().mean().backward()
if sys.argv[2].startswith("topk") and "scope" not in sys.argv[2]:
    # What top-k does where a sample of neighbours misled it: in so few steps that hardly ever happens by itself.
    look_again(torch.randn(64 * 512).numpy().view("int32"), 3277, 0)
print(asked[before:], before > 0)
"""


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("qsgd:bits=4", "topk:density=0.1+ef21"),
        ("topk:density=0.1,scope=sample", "topk:density=0.1,scope=sample,reuse=forward"),
        ("uniform:bits=4+aq-sgd", "uniform:bits=8"),
    ],
)
def test_no_micro_batch_waits_for_a_compiler(forward, backward):
    done = subprocess.run(
        [sys.executable, "-c", WARM, forward, backward], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout == "[] True\n", done.stderr
