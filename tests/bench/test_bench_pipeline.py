from __future__ import annotations

import pytest
import torch

import narrowband as nb
from narrowband.bench.models import GPT, GPTConfig
from narrowband.bench.pipeline import BASELINE, Config, parts_of, run

TINY = {"nodes": 2, "epochs": 3, "batches": 2, "microbatches": 2, "batch": 4, "sequence": 16, "dim": 16}
NBYTES = 4 * 4 * 16 * 16
ROWS = ("none", "uniform:bits=4/qsgd:bits=8", "uniform:bits=4+aq-sgd/topk:density=0.1")


@pytest.fixture(scope="module")
def on_loopback():
    """All rows and the baseline, under the default schedule, what was told on the way, and the rows on the way."""
    events, kept = [], []
    return run(Config(rate="none", rows=ROWS, baselines=True, **TINY), events.append, kept.append), events, kept


def test_on_loopback_with_a_baseline(on_loopback):
    rows, events, _ = on_loopback
    assert [event["done"] for event in events] == list(range(1, events[-1]["of"] + 1))
    assert [row["name"] for row in rows] == [*ROWS, BASELINE]
    plain, quantized, by_sample, baseline = rows
    assert plain["times_none"] == plain["loss_ratio"] == 1.0
    assert baseline["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert plain["activation_nbytes"] == plain["forward_nbytes"] == plain["backward_nbytes"] == NBYTES
    assert quantized["forward_nbytes"] == nb.codec("uniform:bits=4").payload_nbytes((4, 16, 16))
    assert quantized["backward_nbytes"] == nb.codec("qsgd:bits=8").payload_nbytes((4, 16, 16))
    assert plain["forward_relative_error"] == plain["backward_relative_error"] == 0.0
    assert 0 < quantized["backward_relative_error"] < quantized["forward_relative_error"] < 0.1  # 8 bits, and 4
    assert baseline["forward_relative_error"] is None
    # In the epochs that are compared, every sample has been seen before. A message begins with a digest of ids.
    assert by_sample["forward_nbytes"] == 8 + 4 * nb.codec("uniform:bits=4").payload_nbytes((16, 16))
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(2 * 4 * 16 / row["step_s"])
        assert 0 < row["loss"] < 6
        assert row["share_of_allowed"] is None


def test_rows_are_kept_after_each_epoch_that_can_be_compared(on_loopback):
    rows, _, kept = on_loopback
    ((*before, _),) = kept  # after the second of three epochs
    assert [row["name"] for row in before] == list(ROWS)
    assert {row["epochs"] for row in before} == {2}
    assert {row["epochs"] for row in rows} == {3}
    for row, last in zip(before, rows, strict=False):
        assert row["forward_nbytes"] == last["forward_nbytes"]
        assert row["loss"] > last["loss"]  # of the second epoch, and of the second and the third
        assert row["step_s"] > 0


def test_a_schedule_changes_when_things_are_sent_and_not_what_is_learned(on_loopback):
    assert Config.schedule == "1F1B"
    rows = run(Config(rate="none", rows=ROWS[:2], schedule="GPipe", **TINY))
    for a, b in zip(on_loopback[0][:2], rows, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert (a["forward_nbytes"], a["backward_nbytes"]) == (b["forward_nbytes"], b["backward_nbytes"])


@pytest.mark.thorough
@pytest.mark.lab
def test_the_kernel_counts_what_the_library_says_that_it_sent():
    rows = run(Config(rate="1gbit", rows=("none", "fp16"), **TINY | {"batch": 64}))
    for row in rows:
        # Each of two ranks sends in one direction only.
        assert row["link_bytes_per_step"] == pytest.approx(2 * row["forward_nbytes"], rel=0.08)
        assert row["share_of_allowed"] > 0


def test_the_parts_are_the_model():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=30, dim=16, blocks=6, heads=2, sequence=8, batch=2))
    tokens = torch.randint(30, (2, 8))
    x = tokens
    for part in parts_of(model, 3):
        x = part(x)
    assert torch.equal(x, model(tokens))
    assert sum(p.numel() for part in parts_of(model, 3) for p in part.parameters()) == model.config.numel()
    with pytest.raises(ValueError, match="6 blocks cannot be divided evenly among 4 stages"):
        parts_of(model, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 1}, "nodes=1 must be at least 2"),
        ({"epochs": 2}, "epochs=2 must be at least 3"),
        ({"rows": ()}, "nothing to measure"),
        ({"schedule": "ZBV"}, "schedule='ZBV' is neither 1F1B nor GPipe"),
        ({"rows": ("none/topk:density=0.1,reuse=forward",)}, "use topk without aq-sgd there"),
        ({"rate": "none", "delay": "5ms"}, "delay needs an emulated link"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises((ValueError, nb.UnsupportedError), match=message):
        Config(**options)
