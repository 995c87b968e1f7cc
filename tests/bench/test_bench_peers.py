"""Goodput of peers that are killed, replaced and frozen: a short run, and that the guide says what the records say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from narrowband.bench import peers as bench
from narrowband.bench.peers import Config, run
from narrowband.updates import Rendezvous

ROOT = Path(__file__).parent.parent.parent


def test_a_short_run_survives_both_and_counts():
    config = Config(peers=3, rounds=50, every=2, step_s=0.01, kill=4, rejoin=8, freeze=12, freeze_s=1.0, grace_s=0.4)
    events = []
    plain, torn = run(config, events.append)
    for row in (plain, torn):
        assert row["equal"]
        assert row["rounds"] == config.rounds
        assert row["goodput"] == pytest.approx(row["steps"] / row["seconds"])
    all_steps = (config.rounds - 1) * 2 * 3  # the first round is the beginning, and nobody has taken a step
    assert 0.7 * all_steps < plain["steps"] <= all_steps  # rounds go on without a peer that a busy machine holds up
    assert plain["absent_s"] == 0
    assert torn["steps"] < all_steps
    assert torn["absent_s"] > 1.0
    assert torn["back"]["again"] >= 2
    assert torn["share"] == pytest.approx(torn["goodput"] / plain["goodput"])
    assert [event["round"] for event in events if event["name"] == "disturbed"][-1] == config.rounds


def test_a_peer_that_returns_when_all_rounds_are_done_is_no_failure(monkeypatch):
    own = bench._Run._start

    def start(self, name):
        if name == "again":
            self._peers["1"][0].join()  # the others are not held up, as a busy machine may hold up this one
        own(self, name)

    monkeypatch.setattr(bench._Run, "_start", start)
    config = Config(peers=2, rounds=4, every=1, step_s=0.0, kill=2, rejoin=3, freeze=0, grace_s=0.2)
    *_, torn = run(config, known=[{"name": "undisturbed", "goodput": 1.0}])
    assert torn["back"]["again"] == 0
    assert torn["rounds"] == config.rounds
    assert torn["equal"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": 1}, "peers=1"),
        ({"peers": 2}, "one has to be left"),
        ({"kill": 50, "rejoin": 40}, "kill=50, rejoin=40 and rounds=200 must ascend"),
        ({"kill": -1}, "kill=-1 must be at least 0"),
        ({"freeze": 500}, "freeze=500 must be 2 to 199, or 0 to freeze no peer"),
        ({"seed": -1}, "seed=-1 is not in"),
        ({"spec": "nope"}, "unknown codec 'nope'"),
        ({"step_s": -1.0}, "step_s=-1.0"),
        ({"freeze_s": float("inf")}, "freeze_s=inf must be a number of seconds"),
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


def test_the_guide_says_how_these_were_measured_and_what_of_them_is_noise():
    page = " ".join((ROOT / "docs/how-to/peers.md").read_text().split())
    records = [json.loads((ROOT / f"benchmarks/results/peers-{name}.json").read_text()) for name in ("4", "6", "1000")]
    configs = [record["config"] for record in records]
    assert [(own["step_s"], own["every"]) for own in configs] == [(0.1, 20), (0.1, 20), (0.0, 2)]
    assert {(own["grace_s"], own["exchange_s"]) for own in configs} == {(1.0, 5.0)}
    assert "a sleep of 0.1 s" in page
    assert "`grace_s=1` and `exchange_s=5`" in page
    rules = Rendezvous("here:1")
    assert f"the defaults, {rules.grace_s:g} and {rules.exchange_s:g}" in page
    assert f"**`grace_s`** ({rules.grace_s:g} s)" in page
    assert f"**`exchange_s`** ({rules.exchange_s:g} s)" in page
    there = [
        1.0 - torn["absent_s"] / (own["peers"] * torn["seconds"])
        for own, (_, torn) in zip(configs, (record["rows"] for record in records), strict=True)
    ]
    assert "had {:.0f}, {:.0f} and {:.0f} % of all peers' time".format(*(100 * share for share in there)) in page
    longest = [record["rows"][0]["slowest_s"] for record in records]
    assert "rounds took {:.1f}, {:.1f} and {:.1f} s".format(*longest) in page
    pace = [own["peers"] / own["step_s"] for own in configs[:2]]
    plain, torn = (
        [100 * record["rows"][at]["goodput"] / steps for record, steps in zip(records[:2], pace, strict=True)]
        for at in (0, 1)
    )
    assert "{:.0f} and {:.0f} steps per second, the first two runs had".format(*pace) in page
    assert "had {:.0f} and {:.0f} % undisturbed, and {:.0f} and {:.0f} % disturbed".format(*plain, *torn) in page


def test_the_guide_says_what_peers_at_two_sites_told():
    page = " ".join((ROOT / "docs/how-to/peers.md").read_text().split())
    record = json.loads((ROOT / "benchmarks/results/two-sites.json").read_text())
    told, sent = record["told"], [rank["sent_bytes"] / 1e6 for rank in record["ranks"]]
    assert record["exit_code"] == 0
    assert len({peer["parameters_sha256"] for peer in told}) == 1
    assert {peer["rounds"][-1]["round"] for peer in told} == {20}
    assert f"peers at home sent {sent[2]:.1f} and {sent[3]:.1f} MB" in page
    came = told[3]["joined_round"]
    usual = [own["s"] for peer in told for own in peer["rounds"] if own["round"] != came]
    assert f"A round took {min(usual):.1f} to {max(usual):.1f} s" in page
    waited = max(own["s"] for peer in told for own in peer["rounds"] if own["round"] == came)
    assert f"the others waited {waited:.1f} s" in page
    nbytes = told[0]["parameters_bytes"]
    assert f"the parameters ({nbytes / 1e6:.1f} MB)" in page
    assert (
        f"{1.5 * nbytes / 1e6:.1f} MB in every step, which takes {1.5 * nbytes * 8 / 10e6:.1f} s at 10 Mbit/s" in page
    )
