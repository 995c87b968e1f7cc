"""Architectures of other packages: what is measured of them, and what is said where they are not there."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from narrowband.bench import architectures, zoo
from narrowband.bench.architectures import ZOO, Architecture
from narrowband.bench.subjects import subject
from narrowband.cli import main
from tests.thorough import thorough

QUICK = {"rounds": 1, "seconds": 0.0, "peaks": False}


def test_the_zoo_has_architectures_of_three_packages_and_four_families():
    assert len(ZOO) >= 24
    assert {each.package for each in ZOO.values()} == {"transformers", "timm", "torch"}
    assert len({each.family for each in ZOO.values()}) == 4


@pytest.mark.parametrize("name", ["gru-cells", *thorough("lstm")])
def test_recurrences_learn_from_codes(name, monkeypatch):
    monkeypatch.setattr(architectures, "_TOKENS", 64)
    row = zoo.compared(name, zoo.Config((name,), **QUICK))
    assert row["gradient_cosine"] > 0.99
    assert row["kept_share"] < 1


@pytest.mark.parametrize("name", ["gpt2", *thorough("convnext-atto")])
def test_the_command_writes_time_bytes_and_the_angle_to_the_exact_gradient_and_measures_no_row_again(
    name, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("transformers", reason="the architecture comes from it")
    run = zoo.run  # with a batch of one, however fast its step is
    monkeypatch.setattr(zoo, "run", lambda config, known: run(dataclasses.replace(config, seconds=0.0), known))
    path = tmp_path / "zoo.json"
    command = ["bench", "memory", "--zoo", name, "--rounds", "1", "--json", str(path)]
    assert main(command) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert 0.1 < row["peak_share"] < 0.9
    assert (row["name"], row["family"]) == (name, ZOO[name].family)
    assert row["batch"] == 1
    assert row["ratio_to_plain"] > 0
    assert 0.1 < row["kept_share"] < 0.4
    assert 0.99 < row["gradient_cosine"] <= 1 + 1e-9
    assert sum(kept["kept_bytes"] for kept in row["by_operator"].values()) == row["kept_bytes"]
    assert main(command) == 0
    assert json.loads(path.read_text())["rows"] == [row]
    said = " ".join(capsys.readouterr().out.split())
    assert f"Of 1 architectures the median step takes {row['ratio_to_plain']:.2f} times as long as plain" in said
    assert "has 1 row; finished ones are not measured again" in said


def test_what_is_not_installed_is_skipped_and_said_and_what_is_known_is_not_measured_again(monkeypatch):
    def never(batch):
        raise AssertionError

    monkeypatch.setitem(ZOO, "absent", Architecture("no_such_package", "images", never))
    rows = list(zoo.run(zoo.Config(("absent", "gpt2"), **QUICK), [{"name": "gpt2", "ratio_to_plain": 1.0}]))
    assert rows[0]["skipped"] == "no_such_package is not installed: pip install no_such_package"
    assert rows[1] == {"name": "gpt2", "ratio_to_plain": 1.0}
    assert "not installed" in zoo.sentence(rows[:1])
    with pytest.raises(ValueError, match="absent needs no_such_package: pip install no_such_package"):
        subject("absent", 1)


def blocks(batch):
    layers = [nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(3)]
    return nn.Sequential(*layers), (torch.randn(32 * batch, 32, 64),)


def test_budgets_are_met_or_not_and_predictions_stand_beside_measurements(monkeypatch):
    monkeypatch.setitem(ZOO, "blocks", Architecture("torch", "text", blocks))
    config = zoo.Config(("blocks",), seconds=0.0, shares=(1.0, 0.7, 0.01))
    row = zoo.fitted("blocks", config)
    assert [budget["reached"] for budget in row["budgets"]] == [True, True, False]
    plain, some, least = row["budgets"]
    assert plain["measured"] == row["plain_bytes"]
    assert plain["units"] == {"as it is": sum(plain["units"].values())}
    assert least["measured"] < some["measured"] < plain["measured"]
    assert all(abs(budget["error"]) < 0.1 for budget in row["budgets"])
    assert "Of 3 budgets 2 were met" in zoo.foretold([row])


@pytest.mark.thorough
def test_budgets_of_another_packages_architecture():
    pytest.importorskip("transformers", reason="the architecture comes from it")
    (row,) = zoo.run(zoo.Config(("albert",), seconds=0.0, shares=(0.8,)))
    assert row["budgets"][0]["reached"]
    assert abs(row["budgets"][0]["error"]) < 0.1


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="the zoo has no 'alexnet'; there are: resnet-26"):
        zoo.Config(("alexnet",))
    with pytest.raises(ValueError, match=r"1\.5 is not above 0 and at most 1"):
        zoo.Config(shares=(1.5,))


def test_a_summary_of_rows():
    rows = [
        {"name": name, "ratio_to_plain": ratio, "kept_share": 0.2, "gradient_cosine": 1 - ratio / 1000}
        for name, ratio in (("a", 1.0), ("b", 1.5), ("c", 1.1))
    ]
    found = zoo.summary([*rows, {"name": "d", "skipped": "absent"}])
    assert (found["measured"], found["median_ratio"], found["worst"]) == (3, 1.1, "b")
    assert math.isclose(found["least_cosine"], 0.9985)


def test_a_profile_of_families():
    rows = [
        {"family": "text", "plain_s": 2.0, "ratio_to_plain": 1.5, "by_operator": {"gelu": {"seconds": 0.4}}},
        {
            "family": "text", "plain_s": 1.0, "ratio_to_plain": 1.3,
            "by_operator": {"gelu": {"seconds": 0.1}, "matmul": {"seconds": 0.05}},
        },
        {"family": "images", "skipped": "absent"},
    ]  # fmt: skip
    (found,) = zoo.profile(rows)
    assert (found["family"], found["architectures"]) == ("text", 2)
    assert found["whole"] == pytest.approx(0.4)
    assert list(found["operators"]) == ["gelu", "matmul"]
    assert list(found["operators"].values()) == pytest.approx([0.15, 0.025])
    assert found["rest"] == pytest.approx(0.225)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
def test_a_measurement_ends_with_the_command_however_that_ended():
    program = (
        "import time\n"
        "import multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from narrowband.bench.loopback import end_with_parent\n"
        "if __name__ == '__main__':\n"
        "    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn'), end_with_parent) as alone:\n"
        "        import os\n"
        "        print(alone.submit(os.getpid).result(), flush=True)\n"
        "        alone.submit(time.sleep, 600).result()\n"
    )
    command = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    status = Path("/proc") / command.stdout.readline().strip() / "status"

    def is_alive():
        try:
            return "State:\tZ" not in status.read_text()
        except OSError:
            return False

    assert is_alive()
    command.kill()
    command.wait()
    command.stdout.close()
    deadline = time.monotonic() + 60
    while is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.05)
