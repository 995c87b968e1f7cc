"""``narrowband memory``: the tables, a budget, and the policy it writes."""

from __future__ import annotations

import json
import re
import sys

import pytest

import narrowband as nb
from narrowband.bench import budget, ways
from narrowband.bench.subjects import subject
from narrowband.cli import main
from narrowband.cli.memory import parse_bytes

MODEL = """
import torch
from torch import nn

def build(batch):
    model = nn.Sequential()
    for name in ("first", "second"):
        model.add_module(name, nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    return model, (torch.randn(batch, 16, 64),)
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:build"


@pytest.fixture
def narrow(capsys, monkeypatch):
    """Run a command line; returns (exit code, stdout and stderr)."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words):
        try:
            code = main(("memory", *words))
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_tables_by_operator_and_by_module_and_json_beside_them(narrow, model, tmp_path):
    path = tmp_path / "found.json"
    code, said = narrow(model, "--batch", "8", "--depth", "1", "--json", str(path))
    assert code == 0
    for word in ("layer_norm", "gelu", "matmul", "first", "second", "8 bits", "4 bits"):
        assert word in said
    assert "first.1" not in said
    told = json.loads(path.read_text())
    assert told["batch"] == 8
    for bits, times in (("8 bits", 3), ("4 bits", 5)):
        kept = told[bits]
        assert kept["raw_bytes"] > times * kept["kept_bytes"]
        for table in ("by_operator", "by_module"):
            assert sum(entry["kept_bytes"] for entry in kept[table].values()) == kept["kept_bytes"]
            assert sum(entry["raw_bytes"] for entry in kept[table].values()) == kept["raw_bytes"]
    assert {"commit", "machine", "command"} <= set(told)


SHARED = """
import torch
from torch import nn


def build(batch):
    torch.manual_seed(0)
    layers = nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8)
    x = torch.randn(batch, 64)
    x[0, 0] = {outlier}
    return nn.Sequential(*layers), (x,)
"""


def test_the_table_says_why_an_operator_keeps_more_in_4_bits_than_in_8_and_what_outliers_did(narrow, tmp_path):
    path = tmp_path / "shared.py"
    path.write_text(SHARED.format(outlier=0.0))
    code, said = narrow(f"{path}:build", "--batch", "64", "--json", str(tmp_path / "found.json"))
    told = json.loads((tmp_path / "found.json").read_text())
    eight, four = (told[bits]["by_operator"]["layer_norm"]["kept_bytes"] for bits in ("8 bits", "4 bits"))
    assert (eight, four) == (2 * 4 * 64, 2 * 4 * 64 + 64 * 256)  # statistics, and beside them codes of its own
    said = " ".join(said.split())
    assert code == 0
    assert "An operator is counted with the tensors that it is the first to keep" in said
    assert "Layer norms have 8 bits in the column of 4, too" in said
    assert "outliers" not in said
    path.write_text(SHARED.format(outlier=1e12))
    _, said = narrow(f"{path}:build", "--batch", "64")
    kept = "inf, NaN or outliers are in them, or were in one before them: 3 with 8 bits, 3 with 4 bits."
    assert kept in " ".join(said.split())


@pytest.fixture
def one_survey(monkeypatch):
    """Commands of a test share what they measure of every unit, which is the same with every budget."""
    survey, made = budget._Survey, []

    def shared(*args):
        made[:] = made or [survey(*args)]
        return made[0]

    monkeypatch.setattr(budget, "_Survey", shared)


def no_process(*_, **__):
    """In place of the process that trains with a choice, which takes seconds to start."""


def test_a_budget_gives_a_policy_that_training_keeps_within(narrow, model, tmp_path, monkeypatch, one_survey):
    path, told = tmp_path / "policy.toml", tmp_path / "found.json"
    with monkeypatch.context() as patch:
        patch.setattr(budget, "footprint", no_process)
        code, said = narrow(model, "--batch", "128", "--budget", "1GB", "--json", str(told))
    assert code == 0
    assert "Nothing to do: as it is, training takes" in said
    plain = json.loads(told.read_text())["fit"]["measured"]
    words = (
        "--budget",
        f"{plain * 7 // 10}B",
        "--output",
        str(path),
        "--json",
        str(told),
        "--codec",
        "topk:density=0.01+ef",
    )
    code, said = narrow(model, "--batch", "128", *words)
    assert code == 0
    assert f"Within {plain * 7 // 10}B" in said
    found = json.loads(told.read_text())
    assert found["fit"]["measured"] <= plain * 7 // 10
    if sys.platform.startswith("linux"):
        assert found["fit"]["process"] > found["tensors"]["parameters"]
    assert found["tensors"]["residuals"] == 4 * 4 * 64 * 256
    policy = nb.ActivationPolicy.load(path)
    assert policy.to_dict() == found["fit"]["policy"]
    built, inputs = subject(model, 128)
    assert ways.survey(built, inputs, policy).kept_bytes == pytest.approx(found["fit"]["kept"], rel=0.01)


def test_a_budget_below_the_least_possible_says_so_and_what_takes_it(narrow, model, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "footprint", no_process)
    path = tmp_path / "policy.toml"
    code, said = narrow(model, "--budget", "1kB", "--output", str(path))
    said = " ".join(said.split())
    assert code == 1
    assert "Not within 1kB: the least that training takes is" in said
    assert re.search(r"optimizer \d+ kB, parameters \d+ kB, gradients \d+ kB, ", said)
    assert not path.exists()


def test_a_budget_for_a_model_whose_modules_keep_nothing_is_refused(narrow, tmp_path):
    (tmp_path / "one.py").write_text(
        "import torch\ndef build(batch): return torch.nn.Linear(8, 8), (torch.randn(batch, 8),)\n"
    )
    code, said = narrow(f"{tmp_path / 'one.py'}:build", "--batch", "4", "--budget", "1GB")
    assert code == 2
    assert "no module of this model keeps a tensor for backward" in said
    assert "please report" not in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("deit-huge",), "unknown model 'deit-huge'"),
        (("gpt-2",), "unknown model 'gpt-2' (did you mean 'gpt2'?)"),
        (("{}", "--batch", "0"), "batch=0"),
        (("{}", "--budget", "8 apples"), "is not an amount of memory"),
        (("{}", "--budget", "0GB"), "is not an amount of memory"),
        (("{}", "--output", "policy.toml"), "give --budget, too"),
        (("{}", "--codec", "topp"), "unknown codec 'topp'"),
    ],
)
def test_bad_input_is_a_sentence(narrow, model, words, message):
    code, said = narrow(*(word.format(model) for word in words))
    assert code == 2
    assert message in said
    assert "Traceback" not in said


def test_an_optimizer_that_is_not_installed_is_a_sentence_before_anything_is_measured(
    narrow, model, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes.optim", raising=False)
    told = tmp_path / "told.json"
    code, said = narrow(model, "--optimizer", "adamw-8bit", "--json", str(told))
    assert code == 2
    assert said == "optimizer='adamw-8bit' needs bitsandbytes: pip install bitsandbytes\n"
    assert not told.exists()


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1B", 1), ("8GB", 8 * 10**9), ("600 MB", 6 * 10**8), ("1.5GiB", 3 * 2**29), ("2kB", 2000)]
)
def test_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes
