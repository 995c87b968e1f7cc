"""The scripts in examples/ run as their first lines say."""

import re
import subprocess
import sys
from pathlib import Path

from narrowband.lab import LabConfig, run
from tests.lab.processes import needs_lab

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


@needs_lab
def test_peers_at_two_sites_end_with_one_model(capfd):
    """The fourth comes when the others have begun, and gets their parameters over the slow link."""
    script = [sys.executable, str(EXAMPLES / "two_sites.py"), "--rounds", "8", "--every", "5", "--late", "2"]
    links = LabConfig(nodes=4, up="1gbit,1gbit,50mbit,50mbit", down="1gbit,1gbit,100mbit,100mbit", timeout_s=120)
    report = run(links, script)
    said = capfd.readouterr().out
    assert report.exit_code == 0, said
    assert len(re.findall(r"in round \d+ after", said)) == 4
    assert len(re.findall(r"round 5 of . peers took", said)) >= 3
    sums = re.findall(r"parameters (\S+)", said)
    assert len(sums) == 4
    assert len(set(sums)) == 1
    parameters = 4 * (256 * 64 + 2048 * 512 + 512 + 512 * 256 + 256)
    for rank in report.ranks:  # of rounds a tenth at most, where a ring all-reduce would be one and a half each
        assert rank.sent_bytes < 8 * 0.1 * parameters + 2 * parameters  # and to the one that came


def test_examples_are_short_enough_to_copy():
    for script in EXAMPLES.glob("*.py"):
        assert len(script.read_text().splitlines()) < 60, script.name
