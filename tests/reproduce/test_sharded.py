"""Inside FSDP2: rows are what the page says, and claims turn with losses and bytes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from reproduce import sharded
from reproduce.command import main
from reproduce.groups import DENSE, groups
from reproduce.row import Row
from reproduce.settings import settings
from reproduce.tasks import load
from reproduce.training import train
from tests.ranks import run_ranks
from tests.reproduce.synthetic import write_all

EXPERIMENT = sharded.EXPERIMENT
ROWS = {recipe.row.name: recipe.row for recipe in EXPERIMENT.recipes if not recipe.long}
LOSSES = {DENSE: 2.0, "8 and 8 bits": 2.001, "4 and 4 bits": 2.004, "8 and 8 bits, no references": 2.02}
RATIOS = {DENSE: 1.0, "8 and 8 bits": 6.0, "4 and 4 bits": 11.0, "8 and 8 bits, no references": 3.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    there = tmp_path_factory.mktemp("data")
    write_all(there, images=16)
    return there


def row(name, loss, seed):
    return {
        "task": "shakespeare", "name": name, "spec": ROWS[name].spec, "seed": seed, "metric": "held-out perplexity",
        "higher_is_better": False, "epochs": 1, "nodes": 4, "parameters": 1000, "score": math.exp(loss + 0.01 * seed),
        "sent_bytes_per_step": 100.0, "ratio": RATIOS[name], "mean_ratio": RATIOS[name], "payload_ratio": None,
        "matrix_ratio": None, "step_s": 0.1, "commit": "0123456789abcdef",
    }  # fmt: skip


def held(losses, ratios=None):
    rows = [row(name, loss, seed) | (ratios or {}) for name, loss in losses.items() for seed in range(3)]
    return [claim.held for claim in EXPERIMENT.claims(groups(rows))]


def test_claims_turn_with_losses_and_bytes():
    assert held(LOSSES) == [True, True, True]
    assert held(LOSSES | {"8 and 8 bits": 2.01}) == [False, True, True]
    assert held(LOSSES | {"4 and 4 bits": 2.01}) == [True, False, True]
    assert held(LOSSES, {"ratio": 3.0}) == [False, False, False]
    assert held(LOSSES | {"8 and 8 bits, no references": 2.0}) == [True, True, False]
    assert held({DENSE: 2.0}) == [None] * 3


def test_bytes_are_compared_with_those_that_uncompressed_rows_have_sent():
    """How often gradients count among these depends on the backend, and older rows have counted them once."""
    rows = [
        row(DENSE, 2.0, 0) | {"gathered": "none", "sent_bytes_per_step": 900.0},
        row("8 and 8 bits", 2.0, 0) | {"gathered": "uniform:bits=8"},
    ]
    assert [group.ratio for group in groups(rows)] == [1.0, 9.0]
    assert [group.ratio for group in groups(rows[1:])] == [RATIOS["8 and 8 bits"]]


def test_every_row_says_what_is_sent():
    for name, own in ROWS.items():
        bits = re.match(r"(\d+)(?: rotated)? and (\d+) bits", name)
        if bits is None:
            assert (own.spec, own.gathered) == ("none", "none")
            continue
        for spec, said in ((own.spec, bits[1]), (own.gathered, bits[2])):
            assert said in re.findall(r"\d+", spec)
        assert own.spec.startswith("eden:") == ("rotated" in name)
        assert own.references is not (name.endswith("no references") or said == "16")


def trained(rank, world_size, own, directory):
    task = load(
        own.task, batch=own.batch, seed=own.seed, rank=rank, world_size=world_size, directory=directory, limit=own.limit
    )
    return train(own, task, lambda **_: None)


def test_rows_are_trained_by_ranks_that_share_one_model(folder):
    short = Row(
        "shakespeare", DENSE, "none", optimizer="adamw", epochs=1, lr=1e-3, batch=4, clip=1.0, limit=64 * 25 + 64,
        min_numel=1024, shards=4, gathered="none",
    )  # fmt: skip
    found = {}
    for name, own in {
        DENSE: short,
        "ours": replace(short, spec="qsgd:bits=8", gathered="uniform:bits=8"),
        "kept": replace(short, spec="qsgd:bits=8", gathered="uniform:bits=8", references=False),
    }.items():
        first, second = run_ranks(trained, 2, own, folder)
        assert first["score"] == second["score"] < 256
        found[name] = first
    assert found[DENSE]["ratio"] == pytest.approx(1.0, abs=0.01)
    assert found["ours"]["ratio"] > found["kept"]["ratio"] > 3
    assert found["ours"]["score"] == pytest.approx(found[DENSE]["score"], rel=0.01)
    assert settings(found["ours"])["replicas"] == "one, of 2 ranks, sharded by FSDP2"
    assert settings(found["ours"])["parameters gathered"] == "differences, uniform:bits=8"
    assert settings(found["kept"])["parameters gathered"] == "parameters themselves, uniform:bits=8"


@pytest.mark.parametrize(
    "wrong",
    [{"shards": 2}, {"gathered": "none"}, {"shards": 2, "gathered": "none", "updates": 2}, {"fragments": 2}],
)
def test_rows_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=r"gathered=|fragments"):
        Row("shakespeare", DENSE, "none", **wrong)


@pytest.mark.thorough
def test_a_whole_quick_run(folder, tmp_path, capsys):
    arguments = ["--quick", "--nodes", "2", "--data-dir", str(folder), "--output", str(tmp_path / "out")]
    assert main(EXPERIMENT, [*arguments, "--markdown", str(tmp_path / "page.md")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [group["name"] for group in summary["groups"]] == [DENSE, "8 and 8 bits"]
    gathered = re.search(r"^- \*\*parameters gathered\*\*: (.*)$", (tmp_path / "page.md").read_text(), re.M)
    assert gathered is not None
    assert "differences, uniform:bits=8: *8 and 8 bits*" in gathered[1]
    assert "shakespeare 8 and 8 bits, seed 0" in capsys.readouterr().out
