"""What a byte costs, plans that take turns, and what the page says of them."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from rich.console import Console

import narrowband as nb
from narrowband.adapt import fit_times
from narrowband.report.record import machine
from reproduce.lgreco_times import main
from reproduce.lgreco_times_page import LAYOUT, TITLES, claims, families, lines, page
from reproduce.lgreco_times_ranks import DENSE, LEAST_SAMPLES, PLANS, Setting, _merged, choices, drawn
from reproduce.report import table

REFERENCE = "powersgd:rank=4"
BUCKETS = [["head"], ["body.2", "body.1"], ["stem"]]
LAYERS = [name for names in BUCKETS for name in names]

# ---- claims and tables -----------------------------------------------------------------------------------------------


def row(*, prices=(3e-8, 3e-8, 3e-8), noise=1e-4, samples=40, **changes):
    """With these numbers every claim holds. Changes: of a plan's step or exchange, or of its bytes."""
    rng = np.random.default_rng(0)
    nbytes = rng.uniform(1e5, 1e6, (samples, 3))
    times = fit_times(BUCKETS, nbytes, 0.02 + nbytes @ np.array(prices) + noise * rng.standard_normal(samples))
    told = {
        "uniform": (0.060, [2e5, 2e5, 2e5]),
        "bytes": (0.050, [1e5, 2e5, 2e5]),
        "seconds": (0.050, [1e5, 2e5, 2.1e5]),
        "priority": (0.052, [2e5, 2e5, 1.5e5]),
        "dense": (0.500, []),
    }
    plans = {}
    for name, (seconds, sent) in told.items():
        wobble = 1 + 0.002 * rng.standard_normal(12)
        plans[name] = {
            "specs": {} if name == "dense" else dict.fromkeys(LAYERS, "powersgd:rank=3"),
            "error_of_reference": 0.99,
            "bucket_nbytes": changes.get(f"{name}_nbytes", sent),
            "sent_bytes": 1e6,
            "step_s": list(changes.get(f"{name}_step_s", seconds) * wobble),
            "exchange_s": list(changes.get(f"{name}_exchange_s", 0.8 * seconds) * wobble),
        }
    return {
        "reference": REFERENCE, "parameters": 1000, "buckets": BUCKETS, "times": asdict(times), "plans": plans,
        "commit": "0" * 40,
    }  # fmt: skip


def test_numbers_as_the_paper_has_them_hold_every_claim():
    found = claims(families([row()]))
    assert [claim.held for claim in found] == [True] * 8
    assert all(claim.text.startswith(REFERENCE) for claim in found)
    assert "40 samples, 3 buckets" in found[0].figures
    assert "4 of 4 layers have the same" in found[2].figures
    assert "over 12 rounds" in found[3].figures
    assert "in bucket 1.91 of 3, with the plan for bytes in 2.20" in found[6].figures


@pytest.mark.parametrize(
    ("which", "change", "held"),
    [
        (0, {"noise": 0.02}, False),
        (0, {"noise": 3e-3, "samples": 14}, None),
        (1, {"prices": (0.0, 3e-8, 9e-8)}, False),
        (2, {"seconds_nbytes": [2e5, 2e5, 1e5]}, False),
        (3, {"seconds_exchange_s": 0.044}, False),
        (3, {"seconds_exchange_s": 0.0408}, None),  # two per cent longer, as far as noise lets one say
        (4, {"seconds_step_s": 0.055}, False),
        (5, {"priority_step_s": 0.048}, False),
        (5, {"priority_step_s": 0.050}, None),
        (6, {"priority_nbytes": [1e5, 2e5, 2e5]}, False),
        (7, {"bytes_step_s": 0.065}, False),
    ],
)
def test_other_numbers_do_not(which, change, held):
    assert claims(families([row(**change)]))[which].held is held


def test_few_samples_flatter_and_held_out_ones_do_not():
    """Of noise alone three prices explain something, and foretell nothing."""
    times = families([row(prices=(0.0, 0.0, 0.0), samples=LEAST_SAMPLES)])[0].times
    assert times.r2_held_out < 0 <= times.r2


def test_tables_fit_a_terminal():
    console = Console(width=80, record=True)
    for each in table(lines(families([row(), row() | {"reference": "topk:density=0.01+ef"}])), TITLES, LAYOUT):
        console.print(each)
    text = console.export_text()
    assert "…" not in text
    (priority,) = (line for line in text.splitlines() if line.startswith(f"{REFERENCE}, priority"))
    assert "+3.98 % ± 0.17 %" in priority  # longer than with the plan for bytes


# ---- what is measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", [REFERENCE, "topk:density=0.01+ef", "qsgd:bits=4+ef"])
def test_samples_draw_from_few_choices_around_the_reference(reference):
    there, found = choices(reference), drawn(reference)
    assert len(found) <= 8
    assert set(found) <= set(there)
    assert (found[0], found[-1]) == (there[0], there[-1])
    assert set(nb.adapt.search_space(reference)) <= set(there)
    assert (there == [f"powersgd:rank={rank}" for rank in range(1, 17)]) == (reference == REFERENCE)


def test_the_slowest_rank_counts_round_by_round():
    def of_rank(sent, *seconds):
        return {"plans": {"bytes": {"sent_bytes": sent, "step_s": list(seconds), "exchange_s": list(seconds)}}}

    (merged,) = _merged([of_rank(100, 1.0, 5.0), of_rank(200, 2.0, 4.0)])["plans"].values()
    assert merged == {"sent_bytes": 150, "step_s": [2.0, 5.0], "exchange_s": [2.0, 5.0]}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run on two ranks."""
    folder = tmp_path_factory.mktemp("times")
    words = ["--quick", "--references", REFERENCE, "--rate", "none", "--nodes", "2", "--output", str(folder / "out")]
    assert main([*words, "--markdown", str(folder / "page.md")]) == 0
    return folder, words


def test_a_quick_run_writes_what_it_measured(quick):
    folder, _ = quick
    record = json.loads((folder / "out/summary.json").read_text())
    (own,) = record["rows"]
    (family,) = families(record["rows"])
    assert own["reference"] == REFERENCE
    names = [name for names in family.buckets for name in names]
    assert len(family.buckets) > 3
    assert len(family.times.seconds) == len(family.times.foretold_s) == LEAST_SAMPLES
    assert np.array(family.times.nbytes).shape == (LEAST_SAMPLES, len(family.buckets))
    assert family.times.seconds_per_byte.keys() == set(names)
    assert min(family.times.seconds) > 0
    assert family.plans.keys() == {*PLANS, DENSE}
    for name in PLANS:
        plan = family.plans[name]
        assert plan.specs.keys() == set(names)
        assert len(plan.step_s) == len(plan.exchange_s) == 2
        assert all(step > exchange > 0 for step, exchange in zip(plan.step_s, plan.exchange_s, strict=True))
        assert plan.error_of_reference <= 1 + 1e-9
        assert plan.sent_bytes > sum(plan.bucket_nbytes) > 0
    assert set(family.plans["uniform"].specs.values()) == {REFERENCE}
    assert sum(family.plans["bytes"].bucket_nbytes) <= sum(family.plans["uniform"].bucket_nbytes)
    assert family.plans[DENSE].sent_bytes > family.plans["uniform"].sent_bytes
    assert len(family.plans[DENSE].step_s) == 1
    assert record["claims"] == []


def test_the_page_comes_from_the_record(quick, tmp_path):
    folder, _ = quick
    record = json.loads((folder / "out/summary.json").read_text())
    written = (folder / "page.md").read_text()
    page(record, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == written
    assert "on 2 ranks on loopback" in written
    assert "## Claims" not in written  # two rounds judge nothing
    page(record | {"quick": False, "rows": [row()]}, tmp_path / "page.md")
    assert "8 of 8 claims held" in (tmp_path / "page.md").read_text()


def test_finished_references_are_taken(quick, monkeypatch):
    folder, words = quick
    written = folder / "out/summary.json"
    before = json.loads(written.read_text())
    assert before["cpus"] == [machine()["cpu"]]
    for row in before["rows"]:
        row["cpu"] = "Another"
    written.write_text(json.dumps(before))

    def run(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr("reproduce.lgreco_times.run", run)
    assert main(words) == 0
    after = json.loads(written.read_text())
    assert after["rows"] == before["rows"]
    assert after["cpus"] == ["Another"]
    assert main([*words, "--seed", "1"]) == 1  # another setting has to be measured


def test_a_bar_goes_as_far_as_there_are_steps():
    """Counted by hand: training, samples, and turns."""
    setting = Setting(train_steps=4, samples=12, steps=1, rounds=2)
    assert setting.count() == 4 + 12 * (2 + 1) + 2 * 4 * (2 + 1) + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "1"], "nodes=1"),
        (["--samples", "11"], "samples=11"),
        (["--rounds", "1"], "rounds=1"),
        (["--steps", "0"], "steps=0"),
        (["--message-nbytes", "-1"], "message_nbytes=-1"),
        (["--seed", "-1"], "seed"),
        (["--rate", "fast"], "rate"),
        (["--references"], "at least one reference"),
        (["--references", "fp16"], "neither bits nor rank"),
        (["--references", "dgc:density=0.01"], "momentum"),
    ],
)
def test_a_wrong_option_is_one_line(arguments, message, tmp_path, capsys):
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
