"""Goodput of peers that are killed, replaced and frozen: a short run, and that the guide says what the records say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from narrowband.bench.peers import Config, run

ROOT = Path(__file__).parent.parent.parent


def test_a_short_run_survives_both_and_counts():
    config = Config(peers=3, rounds=24, every=2, step_s=0.01, kill=4, rejoin=8, freeze=12, freeze_s=1.0, grace_s=0.4)
    events = []
    plain, torn = run(config, events.append)
    for row in (plain, torn):
        assert row["equal"]
        assert row["rounds"] == 24
        assert row["goodput"] == pytest.approx(row["steps"] / row["seconds"])
    assert plain["steps"] == (24 - 1) * 2 * 3  # the first round is the beginning, and nobody has taken a step
    assert plain["absent_s"] == 0
    assert torn["steps"] < plain["steps"]
    assert torn["absent_s"] > 1.0
    assert torn["back"]["again"] >= 2
    assert torn["share"] == pytest.approx(torn["goodput"] / plain["goodput"])
    assert [event["round"] for event in events if event["name"] == "disturbed"][-1] == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": 1}, "peers=1"),
        ({"peers": 2}, "one has to be left"),
        ({"kill": 50, "rejoin": 40}, "have to follow in order"),
        ({"freeze": 500}, "freeze=500 is no round of 200"),
        ({"step_s": -1.0}, "step_s=-1.0"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_the_guide_says_what_the_records_say():
    page = (ROOT / "docs/how-to/peers.md").read_text()
    found = re.findall(
        r"^\| (\d+) \| ([\d,]+) \| (\d+) s \| (\d+) % \| ([\d.]+) s \| after every round \|$", page, re.M
    )
    assert len(found) == 3
    for name, (peers, rounds, frozen, share, slowest) in zip(("4", "6", "1000"), found, strict=True):
        record = json.loads((ROOT / f"benchmarks/results/peers-{name}.json").read_text())
        config, (_, torn) = record["config"], record["rows"]
        assert (config["peers"], config["rounds"]) == (int(peers), int(rounds.replace(",", "")))
        assert config["freeze_s"] == int(frozen)
        assert round(100 * torn["share"]) == int(share)
        assert round(torn["slowest_s"], 1) == float(slowest)
        assert torn["equal"]
        assert record["rows"][0]["equal"]
