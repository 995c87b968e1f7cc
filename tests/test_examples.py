"""The scripts in examples/ run as their first lines say."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_train_ddp_learns_and_sends_less():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "train_ddp.py"), "--steps", "40"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    ratios = [int(ratio) for ratio in re.findall(r"(\d+) times less sent", done.stdout)]
    assert len(losses) == 2
    assert losses[-1] < 4.0  # guessing bytes evenly would be ln 256 = 5.5
    assert ratios[-1] >= 50


def test_examples_are_short_enough_to_copy():
    for script in EXAMPLES.glob("*.py"):
        assert len(script.read_text().splitlines()) < 60, script.name
