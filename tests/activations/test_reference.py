"""With the reference's loops, ``NARROWBAND_KERNELS=reference``, saved activations are those of the fast loops."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from narrowband.kernels import backends
from narrowband.kernels.backends import Backend
from tests.activations.models import MODELS, SMALL, same, step
from tests.thorough import thorough

GRANULARITIES = ["group", "layer", SMALL]
USUAL = [("mlp", 8), ("vit", 4), ("resnet", 8)]
OTHERS = [(name, bits) for name in MODELS for bits in (8, 4, 2) if (name, bits) not in USUAL]


@pytest.mark.parametrize(("name", "bits"), [*USUAL, *thorough(*OTHERS)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_gradients_are_those_of_the_fast_loops_to_the_bit(name, bits, granularity, monkeypatch):
    options = {"bits": bits, "granularity": granularity}
    fast = step(name, options)
    monkeypatch.setitem(backends._chosen, "cpu", Backend("narrowband.kernels.reference"))
    plain = step(name, options)
    assert plain.saved.kept_bytes == fast.saved.kept_bytes < fast.saved.raw_bytes
    assert all(same(plain.grads[key], fast.grads[key]) for key in fast.grads)


PROGRAM = """
import torch
from torch import nn
import narrowband as nb
from narrowband.kernels.backends import backend_for

assert backend_for("cpu").name == "reference"
model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 8))
for granularity in ("group", "layer", 64):
    with nb.compress_activations(model, bits=8, granularity=granularity) as saved:
        y = model(torch.randn(32, 64))
    y.square().mean().backward()
    print(saved.kept_bytes < saved.raw_bytes)
"""


def test_the_variable_that_forces_the_reference_forces_it():
    environment = {**os.environ, "NARROWBAND_KERNELS": "reference"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True"] * 3, "")
