"""The scripts in examples/ run as their first lines say."""

import contextlib
import io
import json
import os
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest

from narrowband.lab import LabConfig, run
from tests.forked import forking
from tests.ranks import run_ranks
from tests.thorough import thorough

EXAMPLES = Path(__file__).parent.parent / "examples"

#: Lines of a script that is short enough to copy; of one that is about several places, and compares two runs.
SHORT, LONGEST = 69, 100


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_train_ddp_learns_and_sends_less():
    printed, nothing = run_ranks(
        as_torchrun_does, 2, free_port(), "train_ddp.py", ["--steps", "20"], group=False, fresh=True
    )
    assert nothing == ""
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    ratios = [int(ratio) for ratio in re.findall(r"(\d+) times less sent", printed)]
    assert len(losses) == 1
    assert losses[-1] < 4.0  # guessing bytes evenly would be ln 256 = 5.5
    assert ratios[-1] >= 50


def as_torchrun_does(rank, world_size, port, script, arguments):
    """Run a script as one of its ranks, in a process that has imported PyTorch; what it printed."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()})
    sys.argv, printed = [script, *arguments], io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("options", [[], *thorough(["--sharded"])])
def test_everything_learns_alike_plain_and_compressed(tmp_path, options):
    arguments = ["--steps", "5", "--json", str(tmp_path / "found.json"), *options]
    printed, *nothing = run_ranks(
        as_torchrun_does, 4, free_port(), "everything.py", arguments, timeout_s=180.0, group=False, fresh=True
    )
    assert not any(nothing)
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["name"]: (row["plain"], row["plan"]) for row in found["rows"]}
    for name, times in (
        ("between replicas", 7),
        ("activations", 3.7),
        ("their gradients", 3.8),
        ("saved for backward", 4.5),
    ):
        plain, compressed = rows[f"{name}, MB"]
        assert plain > times * compressed > 0
    for loss in rows["loss"]:
        assert loss < 4.5  # guessing bytes evenly would be ln 256 = 5.5
    assert abs(rows["loss"][0] - rows["loss"][1]) < 0.05
    assert all(name in printed for name in rows)
    assert found["command"].startswith("python ")


AS_A_SCRIPT = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.lab
def test_peers_at_two_sites_end_with_one_model(capfd, tmp_path):
    """The third comes when the others have begun, and gets their parameters over the slow link.

    They go on until it has come, for up to 12 rounds, 0.8 s apart. So it has time on a busy machine, too.
    """
    script, options = str(EXAMPLES / "two_sites.py"), ["--rounds", "4", "--every", "0.8s", "--late", "2"]
    links = LabConfig(nodes=3, up="1gbit,50mbit,50mbit", down="1gbit,100mbit,100mbit", timeout_s=120)
    with forking() as forked:
        report = run(links, forked(AS_A_SCRIPT, script, *options), {"NARROWBAND_TOLD": str(tmp_path)})
    said = capfd.readouterr().out
    assert report.exit_code == 0, said
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert sorted(line[9:] for line in said.splitlines() if '"joined_s"' in line) == sorted(map(json.dumps, told))
    assert len({peer["parameters_sha256"] for peer in told}) == 1
    (last,) = {peer["rounds"][-1]["round"] for peer in told}
    assert last >= 4
    assert told[2]["joined_round"] > 2 > min(peer["joined_round"] for peer in told)
    parameters = 4 * (256 * 64 + 2048 * 512 + 512 + 512 * 256 + 256)
    assert {peer["parameters_bytes"] for peer in told} == {parameters}
    for rank in report.ranks:  # 0.06 of the model a round, where a ring all-reduce sends one and a half
        assert rank.sent_bytes < last * 0.06 * parameters + 1.5 * parameters  # and to the one that came


def test_examples_are_short_enough_to_copy():
    for script in EXAMPLES.glob("*.py"):
        longest = LONGEST if script.name == "everything.py" else SHORT
        assert len(script.read_text().splitlines()) < longest, script.name
