"""What making the context has done already."""

from __future__ import annotations

import subprocess
import sys

import pytest

WARM = """
import contextlib, sys, torch
from torch import nn
import narrowband as nb
from narrowband.kernels.cpu.cache import LoopCache

asked, load = [], LoopCache.load_overload
LoopCache.load_overload = lambda self, *types: (asked.append(self.name), load(self, *types))[1]

bits, dtype, cast = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3] == "autocast"
model = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(784, 64), nn.GELU(),
    nn.LayerNorm(64), nn.Linear(64, 64), nn.Softmax(1), nn.Dropout(0.1),
).to(dtype)
context = nb.compress_activations(model, bits=bits, min_numel=256)
before = len(asked)
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16) if cast else contextlib.nullcontext():
        with context:
            if not before or cast:
                before = len(asked)
            loss = model(torch.randn(8, 3, 16, 16, dtype=dtype)).float().square().mean()
    loss.backward()
print(asked[before:], before > 0)
"""


@pytest.mark.parametrize("words", [("8", "float32", "plain"), ("4", "bfloat16", "plain"), ("8", "float32", "autocast")])
def test_no_forward_pass_waits_for_a_compiler(words):
    done = subprocess.run(
        [sys.executable, "-c", WARM, *words], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout == "[] True\n", done.stderr
