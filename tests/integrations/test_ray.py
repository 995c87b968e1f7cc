"""Ray Train: its workers' model is compressed as any, and a checkpoint holds every rank's residuals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'")

ROOT = Path(__file__).parent.parent.parent


def trained(folder, steps):
    """Run the example; the model of its last checkpoint, the names of the files there, and what was printed."""
    command = [sys.executable, str(ROOT / "examples" / "train_ray.py"), "--steps", str(steps), "--folder", str(folder)]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr
    last = max((folder / "narrowband").glob("checkpoint_*/model.pt")).parent
    said = re.search(rf"step {steps}: loss ([\d.]+), (\d+) times less sent", done.stdout)
    return torch.load(last / "model.pt")["model"], {file.name for file in last.glob("*.pt")}, said


def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(tmp_path):
    whole, files, said = trained(tmp_path / "whole", 40)
    assert files == {"model.pt", "narrowband-rank0-of-2.pt", "narrowband-rank1-of-2.pt"}
    assert float(said[1]) < 3.5  # guessing bytes evenly would be ln 256 = 5.5
    assert int(said[2]) >= 50
    stopped, _, _ = trained(tmp_path / "parts", 20)
    resumed, _, _ = trained(tmp_path / "parts", 40)
    assert not torch.equal(stopped["1.weight"], whole["1.weight"])
    assert all(torch.equal(resumed[name], each) for name, each in whole.items())
