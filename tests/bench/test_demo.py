from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from narrowband.bench.demo import BASELINES, Config, run

CONFIG = Config(codecs=("topk:density=0.05+ef", "updates topk:density=0.05+ef"), nodes=2, steps=12, model="gpt-tiny")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole demo: its directory, its summary and what it told on the way."""
    directory, events = tmp_path_factory.mktemp("demo"), []
    return directory, run(CONFIG, directory, on_event=events.append), events


def test_rows_are_the_baselines_then_the_codecs(finished):
    _, summary, _ = finished
    assert [row["codec"] for row in summary["rows"]] == [*BASELINES, *CONFIG.codecs]
    for row in summary["rows"]:
        assert {"sent_bytes_per_step", "times_less_traffic", "step_s", "heldout_loss"} <= row.keys()
        assert row["curve"][-1] == [CONFIG.steps, row["heldout_loss"]]
    assert isinstance(summary["verdict"], str)
    json.dumps(summary, allow_nan=False)


def test_training_learns_and_traffic_is_counted(finished):
    _, summary, _ = finished
    dense, half, sparse, updates = summary["rows"]
    assert dense["times_less_traffic"] == 1.0
    assert half["times_less_traffic"] == pytest.approx(2.0, rel=0.05)
    assert sparse["times_less_traffic"] > 5
    assert updates["times_less_traffic"] > 5
    for row in summary["rows"]:
        assert row["heldout_loss"] < row["curve"][0][1]
    assert half["heldout_loss"] == pytest.approx(dense["heldout_loss"], rel=0.01)


def test_bytes_have_their_relative_error_beside_them(finished):
    _, summary, _ = finished
    dense, half, sparse, updates = (row["relative_error"] for row in summary["rows"])
    assert dense is None
    assert 0 < half < 1e-5
    assert 0.1 < sparse < 1
    assert 0.1 < updates < 1


def test_a_torn_row_is_not_resumed_but_named(finished, tmp_path):
    directory, _, _ = finished
    shutil.copytree(directory / "rows", tmp_path / "rows")
    (torn,) = (tmp_path / "rows").glob("fp16-*.json")
    torn.write_text(torn.read_text()[:100])
    with pytest.raises(ValueError, match="incomplete or not a JSON file") as caught:
        run(CONFIG, tmp_path, resume=True)
    assert str(torn) in str(caught.value)


def test_every_step_is_told(finished):
    _, summary, events = finished
    for row in summary["rows"]:
        told = [event for event in events if event.get("codec") == row["codec"]]
        assert [event["step"] for event in told if event["event"] == "step"] == list(range(1, CONFIG.steps + 1))
        assert told[-1]["event"] == "row"
    begun = [event["event"] for event in events].index("step")
    assert [event["what"] for event in events[:begun]] == ["starting 2 ranks", "measuring a step that sends nothing"]


def test_resuming_takes_what_is_finished_and_trains_what_is_not(finished):
    directory, summary, _ = finished
    (missing,) = (directory / "rows").glob("fp16-*.json")
    missing.unlink()
    events = []
    again = run(CONFIG, directory, resume=True, on_event=events.append)
    assert {event["codec"] for event in events if event["event"] == "step"} == {"fp16"}
    assert again["rows"][0] == summary["rows"][0]
    assert again["rows"][1]["heldout_loss"] == summary["rows"][1]["heldout_loss"]  # same seed, same bits
    assert missing.exists()


def test_a_run_that_diverges_is_a_row_too_and_other_configurations_share_none(finished):
    directory, _, _ = finished
    summary = run(replace(CONFIG, learning_rate=1e30, codecs=CONFIG.codecs[:1], steps=4), directory, resume=True)
    assert [row["heldout_loss"] for row in summary["rows"]] == [None] * 3
    assert "lower learning rate" in summary["verdict"]
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"model": "gpt-13m"}, "does not read bytes; models that do: gpt-demo"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"codecs": ("topk+eff",)}, "did you mean 'ef'"),
    ],
)
def test_what_cannot_be_trained_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Config(**arguments)
