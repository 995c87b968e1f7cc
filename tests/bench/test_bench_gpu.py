"""Parts of a measurement, as real commands: what is kept of those that go well, fail, hang, or are not there."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from narrowband.bench import gpu
from narrowband.cli import main
from narrowband.cli.exits import WRONG
from narrowband.report.tables import gpu_table

KERNELS = (sys.executable, "-m", "narrowband.cli", "bench", "kernels", "--numel", "5000", "--repeats", "1")

TESTS = """
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="not here")
def test_away(): pass
"""

#: Writes what it has, and then does not end; told to, it writes what it has by then.
HANGS = """
import signal, sys, time
path = sys.argv[sys.argv.index("--json") + 1]
def write(*rows): open(path, "w").write('{"config": {}, "rows": [%s]}' % ", ".join(rows))
def stop(*_):
    write("1", "2")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
write("1")
time.sleep(600)
"""


def measured(*parts):
    found = list(gpu.run(parts))
    json.dumps(found, allow_nan=False)
    gpu_table(found)
    return found


def test_a_part_is_what_its_command_wrote_down_and_one_that_fails_does_not_stop_the_next():
    failed, absent, silent, done = measured(
        gpu.Part("failed", ("sh", "-c", "echo first >&2; echo 'the reason' >&2; exit 3"), 60.0),
        gpu.Part("absent", ("no-such-program-anywhere",), 60.0),
        gpu.Part("silent", ("true",), 60.0),
        gpu.Part("done", (*KERNELS, "--loops", "all-finite"), 120.0),
    )
    assert failed["error"] == "exit code 3: first; the reason"
    assert absent["error"] == "no-such-program-anywhere: No such file or directory"
    assert silent["error"] == "the command wrote nothing down"
    assert [part["rows"] for part in (failed, absent, silent)] == [[], [], []]
    assert done["error"] is None
    assert [row["loop"] for row in done["rows"]] == ["all-finite"]
    assert done["config"]["numel"] == 5000
    assert done["command"].endswith("--loops all-finite --json FILE")
    assert done["seconds"] > 0


def test_a_part_that_takes_too_long_is_ended_and_what_it_had_is_kept():
    (part,) = measured(gpu.Part("hangs", (sys.executable, "-c", HANGS, "hangs"), 2.0))
    assert part["error"] == "ended after 2 s, its limit"
    assert part["rows"] == [1, 2]


def test_of_tests_it_is_counted_how_they_went(tmp_path):
    (tmp_path / "test_three.py").write_text(TESTS)
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path))
    (part,) = measured(gpu.Part("battery", words, 60.0, "junit"))
    assert part["error"] == "exit code 1"
    assert part["rows"] == [{"tests": 3, "failures": 1, "errors": 0, "skipped": 1}]
    assert part["failed"] == ["test_three::test_bad"]


def test_the_battery_is_the_callers_and_the_others_are_commands_of_narrowband():
    assert [part.name for part in gpu.parts(gpu.Config())] == ["kernels", "memory", "ddp"]
    battery, *others = gpu.parts(gpu.Config(patience=2.0), ["pytest", "tests"])
    assert (battery.words, battery.writes, battery.limit_s) == (("pytest", "tests"), "junit", 400.0)
    assert {part.writes for part in others} == {"json"}
    assert sum(part.limit_s for part in gpu.parts(gpu.Config(), ["pytest"])) <= 8 * 60
    with pytest.raises(ValueError, match="the part battery needs a pytest command"):
        gpu.parts(gpu.Config(parts=("battery",)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the commands would run")
@pytest.mark.parametrize("name", ["kernels", "memory", "ddp"])
def test_the_commands_of_parts_are_ones_that_narrowband_reads(name, capsys):
    """Up to the look for a GPU."""
    assert main(["bench", *gpu.PARTS[name][1]]) == WRONG
    said = capsys.readouterr().err
    assert (
        "this build of torch finds no GPU" if name == "kernels" else "device=cuda: PyTorch finds no CUDA device here"
    ) in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"parts": ("kernls",)}, "no part is called kernls; there are: battery, kernels, memory, ddp"),
     ({"patience": 0.0}, "patience=0.0 must be a number above 0"),
     ({"patience": float("nan")}, "patience=nan")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        gpu.Config(**arguments)
