"""Seconds to a loss: what they are computed from, and a whole quick run."""

from __future__ import annotations

import json
import math
import re

import pytest

from reproduce import local, local_times
from reproduce.groups import DENSE
from reproduce.local_times import COMPUTING, METHODS, Line, lines, main, page, steps_to, timed
from tests.reproduce.synthetic import write_all


def perplexities(*losses):
    return [None if loss is None else math.exp(loss) for loss in losses]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((3.0, 1.0), 150.0),  # half-way through the second epoch
        ((2.0, 1.5), 100.0),
        ((1.0, 0.5), 100.0),  # somewhere in the first epoch: its end is what is known
        ((3.0, 2.5), None),
        ((None, 1.0), 200.0),
        ((3.0, 2.1, 1.9, 2.5), 125.0),  # 200 steps in four epochs: half-way through the third
    ],
)
def test_steps_are_interpolated_between_epochs(losses, expected):
    assert steps_to(2.0, perplexities(*losses), 200) == (None if expected is None else pytest.approx(expected))


def test_what_is_timed_is_what_losses_are_of():
    rows = {row.name: row for row in timed()}
    assert rows.keys() == {*METHODS, COMPUTING}
    there = {r.row.name: r.row for r in local.EXPERIMENT.recipes if r.row.task == "shakespeare"}
    for name, of in METHODS.items():
        own, told = rows[name], there[of]
        assert (own.updates, own.outer, own.lr, own.small) == (told.updates, told.outer, told.lr, told.small)
        assert own.spec == ("fp16" if name == "gradients, 16 bits" else told.spec)
    assert rows[COMPUTING].isolated
    assert len({row.limit for row in rows.values()}) == 1
    assert local_times._FIRST % 30 == local_times._STEPS % 30 == 0  # whole rounds


def recorded():
    """Rows of a rate, and losses, made up."""
    taken = {COMPUTING: 0.1, DENSE: 1.0}
    rows = [
        {
            "name": name,
            "step_seconds": [9.0] * local_times._FIRST + [taken.get(name, 0.2)] * local_times._STEPS,
            "sent_bytes_per_step": 1000.0,
            "commit": "a" * 40,
        }
        for name in (*METHODS, COMPUTING)
    ]
    rows[0]["step_seconds"] = [9.0] * local_times._FIRST + [1.0] * local_times._STEPS
    return {"20mbit": rows}, [
        told(DENSE, 2.0),
        told("updates, sign, in place", 2.01),
        told("updates, top 1%", 2.5),
    ]


def written(rows, losses, folder):
    """The page of a record."""
    record = {
        "rows": rows, "losses": losses, "commits": ["a" * 40], "command": "python -m reproduce.local_times",
        "machine": {"cores": 2, "cpu": "some"}, "versions": {"torch": "2"},
    }  # fmt: skip
    page(record, folder / "local_times.md")
    return (folder / "local_times.md").read_text()


def told(name, loss, seed=0, before=3.0, steps=200):
    """A row of the record of losses."""
    return {
        "task": "shakespeare", "name": name, "seed": seed, "scores": perplexities(before, loss), "steps": steps,
        "score": math.exp(loss), "commit": "a" * 40,
    }  # fmt: skip


def test_time_is_steps_times_seconds():
    found = {line.method: line for line in lines(*recorded())}
    first, sixteen, sign, top = (
        found[name]
        for name in ("gradients, 32 bits", "gradients, 16 bits", "updates, sign, in place", "updates, top 1%")
    )
    target = 1.01 * 2.0
    assert first.step_s == pytest.approx(1.0)
    assert first.computing == pytest.approx(0.1)
    assert first.steps == {0: pytest.approx(100 * (1 + (3.0 - target) / 1.0))}
    assert first.seconds == pytest.approx(first.steps[0])
    assert sixteen.steps == first.steps
    assert sixteen.seconds == pytest.approx(0.2 * first.steps[0])
    assert sign.steps == {0: pytest.approx(100 * (1 + (3.0 - target) / 0.99))}
    assert not top.steps
    assert top.seconds is None  # its loss is too high
    assert found["every 15, DiLoCo"].seconds is None  # the record lacks the row
    assert found[COMPUTING].computing == pytest.approx(1.0)


def test_seeds_are_paired_and_all_of_them_have_to_reach_the_loss():
    rows, _losses = recorded()
    rounds = "every 15, DiLoCo"
    losses = [
        *(told(DENSE, loss, seed, before=4.0) for seed, loss in ((0, 2.0), (1, 2.2))),
        *(told(rounds, loss, seed) for seed, loss in ((0, 1.9), (1, 2.5))),  # one of two is not enough
        *(told(f"{rounds}, longer", loss, seed, steps=300) for seed, loss in ((0, 1.8), (1, 2.0), (2, 2.0))),
        *(told("updates, top 1%", loss, seed) for seed, loss in ((0, 1.9), (1, 2.5))),
    ]
    found = {line.method: line for line in lines(rows, losses)}
    first, own, top = (found[name] for name in ("gradients, 32 bits", rounds, "updates, top 1%"))
    targets = {0: 1.01 * 2.0, 1: 1.01 * 2.2}  # each by the seed's own
    assert first.steps == {
        0: pytest.approx(100 * (1 + (4.0 - targets[0]) / 2.0)),
        1: pytest.approx(100 * (1 + (4.0 - targets[1]) / 1.8)),
    }
    assert own.steps == {
        0: pytest.approx(150 * (1 + (3.0 - targets[0]) / 1.2)),
        1: pytest.approx(150 * (1 + (3.0 - targets[1]) / 1.0)),
    }  # a third seed has no partner
    assert own.seconds == pytest.approx(0.2 * (own.steps[0] + own.steps[1]) / 2)
    ratios = [first.steps[seed] / (0.2 * own.steps[seed]) for seed in (0, 1)]
    assert own.faster == {seed: pytest.approx(ratio) for seed, ratio in enumerate(ratios)}
    half = 12.706 * abs(ratios[0] - ratios[1]) / 2  # t · s / √2, where s = |a − b| / √2
    assert own.factor == f"{sum(ratios) / 2:.1f} ± {half:.1f}"
    assert not top.steps
    assert top.trained == 200


def test_the_page_says_who_is_first(tmp_path):
    rows, losses = recorded()
    text = written(rows, losses, tmp_path)
    first = next(line for line in lines(rows, losses) if line.method == "gradients, 32 bits")
    assert isinstance(first, Line)
    assert "Behind links of 20 Mbit/s gradients, 16 bits were first, in" in text
    assert "5.0 times as fast as DDP in 32 bits (of one seed)" in text
    assert "| updates, largest 1 % | 200 ms | 50% | 1 kB | not in 200 | – | – |" in text
    assert (tmp_path / "pictures/local_times/opening-dark.svg").exists()


def test_the_page_names_those_that_seeds_do_not_tell_from_the_first(tmp_path):
    rows, _losses = recorded()
    own = {
        DENSE: (2.0, 2.0, 2.0),
        "every 15, DiLoCo": (1.50, 1.52, 1.48),
        "every 15, 2 bits, in place": (1.51, 1.49, 1.50),
    }
    losses = [told(name, loss, seed) for name, each in own.items() for seed, loss in enumerate(each)]
    text = written(rows, losses, tmp_path)
    said = re.search(r"Mbit/s (.*) were first, .*\(not resolved from these: (.*?)\)\.\n", text)
    assert said is not None
    assert said[1] == "rounds of 15, 2 bits"
    assert said[2] == "rounds of 15, uncompressed (DiLoCo)"  # and not gradients, slower with every seed


def test_a_whole_quick_run(tmp_path, capsys):
    write_all(tmp_path / "data")
    options = ["--rates", "none", "--quick", "--nodes", "2", "--data-dir", str(tmp_path / "data")]
    command = [*options, "--output", str(tmp_path / "out"), "--losses", str(tmp_path / "none.json")]
    assert main(command) == 0
    assert "Loopback" in capsys.readouterr().out
    written = json.loads((tmp_path / "out/summary.json").read_text())
    assert [row["name"] for row in written["rows"]["none"]] == ["gradients, 32 bits", COMPUTING]
    assert all(row["step_seconds"] for row in written["rows"]["none"])
    assert main([*command[:1], "none", "--losses", str(tmp_path / "none.json")]) == 2  # no record of losses
