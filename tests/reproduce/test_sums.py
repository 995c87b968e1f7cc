"""Sparse sums beside top-k that is gathered: the claim turns with losses, and rows travel as they say."""

from __future__ import annotations

import json
import math

import pytest

from reproduce import sums
from reproduce.command import main
from reproduce.groups import DENSE, groups
from tests.reproduce.synthetic import write_all

EXPERIMENT = sums.EXPERIMENT


def row(name, loss, sent, seed):
    return {
        "task": "shakespeare", "name": name, "spec": "none", "seed": seed, "metric": "held-out perplexity",
        "higher_is_better": False, "epochs": 1, "nodes": 8, "parameters": 1000, "score": math.exp(loss + 0.01 * seed),
        "sent_bytes_per_step": sent, "ratio": 1.0, "mean_ratio": 1.0, "payload_ratio": 1.0, "matrix_ratio": 1.0,
        "step_s": 0.1, "commit": "0123456789abcdef",
    }  # fmt: skip


@pytest.mark.parametrize(("summed", "held"), [(2.01, True), (2.05, False)])
def test_the_claim_turns_with_the_loss(summed, held):
    losses = {DENSE: (1.9, 100.0), "gathered": (2.0, 30.0), "summed": (summed, 10.0)}
    (claim,) = EXPERIMENT.claims(groups([row(n, *at, seed) for n, at in losses.items() for seed in range(3)]))
    assert claim.held is held
    assert "3.0 times fewer bytes among 8 ranks" in claim.figures
    (claim,) = EXPERIMENT.claims(groups([row(DENSE, 1.9, 100.0, seed) for seed in range(3)]))
    assert claim.held is None


def test_sums_send_less_than_what_is_gathered_among_four_ranks(tmp_path):
    folder = tmp_path / "data"
    write_all(folder, images=16, plays=25)
    arguments = ["--quick", "--nodes", "4", "--data-dir", str(folder), "--output", str(tmp_path / "out")]
    assert main(EXPERIMENT, [*arguments, "--rows", "gathered", "summed"]) == 0
    gathered, summed = json.loads((tmp_path / "out" / "summary.json").read_text())["groups"]
    assert 1.1 < gathered["sent_bytes_per_step"] / summed["sent_bytes_per_step"] < 2
    assert summed["mean"] == pytest.approx(gathered["mean"], rel=0.1)
