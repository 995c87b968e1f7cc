from __future__ import annotations

import copy
import functools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from narrowband.adapt import error_table
from reproduce import sensitivity, sensitivity_runs
from reproduce.report import table
from reproduce.sensitivity import Options, main, units_of
from reproduce.sensitivity_page import LAYOUT, TITLES, Interval, claims, lines_of
from reproduce.sensitivity_runs import FAMILIES, ShortRun
from tests.reproduce.synthetic import write_all

LR = 0.5
VOCABULARY = 7


def small():
    """A model of tokens in float64, batches of a short run, and held-out ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)).double()
    batches = [tuple(torch.randint(VOCABULARY, (2, 5, 9))) for _ in range(5)]
    return model, batches[1:], batches[0]


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def short(model, batches, heldout, **options):
    return ShortRun(model, functools.partial(sensitivity_runs._sgd, lr=LR), batches, heldout, seed=0, **options)


# ---- a short run -----------------------------------------------------------------------------------------------------


def test_a_short_run_compresses_one_layer_and_leaves_the_checkpoint():
    model, batches, heldout = small()
    before = copy.deepcopy(model.state_dict())
    found = short(model, batches, heldout)({"1.weight": "topk:density=0.25"})
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])

    for x, y in batches:  # the 12 largest of 48 elements in float32, and all of the others
        model.zero_grad()
        loss_of(model, x, y).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = p.grad
                if name == "1.weight":
                    g = torch.where(g.abs() >= g.abs().flatten().topk(12).values[-1], g.float().double(), 0.0)
                p.sub_(LR * g)
    assert found == pytest.approx(loss_of(model, *heldout).item(), rel=1e-14)


def test_losses_differ_by_compression_and_by_nothing_else():
    """And where a codec loses nothing, by the gradient's rounding to float32: far less, and more than nothing."""
    model, batches, heldout = small()
    run = short(model, batches, heldout)
    assert run({}) == run({})
    floor = abs(run({"1.weight": "none"}) - run({}))
    assert 0 < floor < 1e-7
    assert abs(run({"1.weight": "topk:density=0.05"}) - run({})) > 1e3 * floor


def test_a_short_run_with_adamw_goes_on_as_training_would():
    """From the same state of the optimizer, clipped in the same way, in float64."""
    model, batches, heldout = small()
    trained = copy.deepcopy(model).float()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=sensitivity_runs.LR, **sensitivity_runs.ADAMW)

    def step(model, optimizer, x, y):
        model.zero_grad()
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    for x, y in batches:
        step(trained, optimizer, x, y)
    state = copy.deepcopy(optimizer.state_dict())
    checkpoint = copy.deepcopy(trained).double()
    make = functools.partial(sensitivity_runs._adamw, state=state)
    found = ShortRun(checkpoint, make, batches, heldout, seed=0, clip=0.01)({})
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(
        state["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ))  # fmt: skip
    for x, y in batches:
        step(trained, optimizer, x, y)
    assert found == pytest.approx(loss_of(trained, *heldout).item(), abs=1e-6)
    assert found != pytest.approx(loss_of(checkpoint, *heldout).item(), abs=1e-4)


# ---- what tables have to do with each other --------------------------------------------------------------------------


def made_up(signs=1.0):
    """Errors of four layers, and differences that are ten times as large, of two repeats."""
    gradients = {name: torch.randn(32, 32, generator=torch.Generator().manual_seed(at)) * 3.0**at
                 for at, name in enumerate(("a", "b", "c", "head.weight"))}  # fmt: skip
    table = error_table(gradients, FAMILIES["top-k"][1])
    differences = np.stack([10 * table.errors * signs, 10 * table.errors * 1.1])
    return table, differences


def compared(table, differences, floor=0.0):
    return sensitivity_runs._compared(table, differences, np.full(4, floor), FAMILIES["top-k"][0])


def test_a_loss_that_falls_is_a_change_like_any_other():
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (4, 5))
    found = {key: compared(*made_up(by)) for key, by in (("rising", 1.0), ("mixed", signs))}
    assert found["mixed"].pop("falls") == pytest.approx((signs < 0).mean() / 2)
    assert found["rising"].pop("falls") == 0.0
    assert found["mixed"] == pytest.approx(found["rising"])
    for name in ("pearson", "pearson_rest", "spearman", "spearman_rest", "itself", "same", "resolved"):
        assert found["mixed"][name] == pytest.approx(1.0), name
    assert found["mixed"]["loss_bytes"] == found["mixed"]["error_bytes"] <= found["mixed"]["reference_bytes"]


def test_the_head_can_make_a_correlation_by_itself():
    table, differences = made_up()
    differences[:, :3] = differences[:, :3].max() + differences[:, :3].min() - differences[:, :3]
    found = compared(table, differences)
    assert found["pearson_rest"] == pytest.approx(-1.0)
    assert found["spearman_rest"] == pytest.approx(-1.0)
    assert found["pearson"] > 0.5


def test_what_is_no_more_than_its_floor_is_left_out():
    table, differences = made_up()
    small = differences.mean(0) <= np.quantile(differences.mean(0), 0.4)
    differences[:, small] = np.random.default_rng(0).random((2, int(small.sum()))) * 1e-9
    assert compared(table, differences)["spearman"] < 0.99
    found = compared(table, differences, floor=1e-9)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["resolved"] == pytest.approx(1 - small.mean())
    assert found["floor"] == 1e-9


def test_every_family_has_its_reference_among_its_choices():
    for reference, choices in FAMILIES.values():
        assert reference in choices


# ---- seeds -----------------------------------------------------------------------------------------------------------


def test_an_interval_is_students():
    """Of 0.8, 0.9, 1.0: s = 0.1, and t is 4.303 with two degrees of freedom."""
    found = Interval.of([0.8, 0.9, 1.0])
    assert (found.mean, found.margin) == (pytest.approx(0.9), pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3))
    assert found.text() == "0.90 ± 0.25"
    assert [found.at_least(bound) for bound in (0.6, 0.7, 1.2)] == [True, None, False]
    assert [found.within(bound) for bound in (1.2, 1.0, 0.6)] == [True, None, False]
    alone = Interval.of([0.9])
    assert (alone.margin, alone.at_least(0.1), alone.within(9.0), alone.text()) == (None, None, None, "0.90")


def row(**other):
    return {
        "family": "top-k", "checkpoint": 9, "optimizer": "sgd", "seed": 0, "spearman": 0.8, "spearman_rest": 0.9,
        "error_bytes": 100.0, "loss_bytes": 90.0, "reference_bytes": 150.0,
    } | other  # fmt: skip


def over_seeds(*each, **same):
    return [row(seed=seed, **own, **same) for seed, own in enumerate(each or ({}, {}))]


@pytest.mark.parametrize(
    ("rows", "verdicts"),
    [
        (over_seeds(), ["held", "held"]),
        (over_seeds({}), ["not resolved", "not resolved"]),
        (over_seeds() + over_seeds(spearman=0.5, checkpoint=20), ["not held", "held"]),
        (over_seeds(spearman_rest=0.5), ["not held", "held"]),
        (over_seeds({"spearman": 0.9}, {"spearman": 0.7}), ["not resolved", "held"]),
        (over_seeds(loss_bytes=130.0), ["held", "not held"]),
        (over_seeds(loss_bytes=79.0), ["held", "not held"]),
        (over_seeds({"loss_bytes": 79.0}, {"loss_bytes": 90.0}), ["held", "not resolved"]),
        (over_seeds() + over_seeds(optimizer="adamw", spearman=0.1), ["held", "held", "not held", "held"]),
    ],
)
def test_claims(rows, verdicts):
    said = claims(rows)
    assert [claim.verdict() for claim in said] == verdicts
    assert "short runs with SGD" in said[0].text


def test_lines_are_in_one_order_whatever_that_of_rows_is():
    rows = [
        row(family=family, checkpoint=checkpoint, optimizer=optimizer, seed=seed)
        for seed in (1, 0)
        for optimizer, checkpoint in (("adamw", 600), ("sgd", 600), ("sgd", 200))
        for family in ("low rank", "qsgd")
    ]
    lines = lines_of(rows)
    assert [(line.run, line.family) for line in lines] == [
        (run, family) for run in ("200, SGD", "600, SGD", "600, AdamW") for family in ("qsgd", "low rank")
    ]
    assert all([row["seed"] for row in line.rows] == [0, 1] for line in lines)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_adamw_takes_short_runs_from_the_last_checkpoint():
    found = [(unit.seed, unit.checkpoint, unit.optimizer) for unit in units_of(Options(seeds=(0, 4)))]
    assert sorted(found) == [(s, c, o) for s in (0, 4) for c, o in ((200, "sgd"), (600, "adamw"), (600, "sgd"))]
    assert {unit.optimizer for unit in units_of(Options(adamw=False))} == {"sgd"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A quick run of one family."""
    folder = tmp_path_factory.mktemp("sensitivity")
    write_all(folder / "data")
    words = ["--quick", "--families", "top-k", "--batch", "2"]
    words += ["--data-dir", str(folder / "data"), "--output", str(folder / "out")]
    assert main(words) == 0
    return folder, words


def test_a_quick_run_writes_both_tables(finished):
    summary = json.loads((finished[0] / "out/summary.json").read_text())
    (row,) = summary["rows"]
    assert (row["family"], row["checkpoint"], row["optimizer"], row["seed"]) == ("top-k", 4, "sgd", 0)
    errors, differences = (torch.tensor(row[key], dtype=torch.float64) for key in ("errors", "differences"))
    assert errors.shape == (len(row["layers"]), len(row["choices"])) == (4, 5)
    assert differences.shape == (2, 4, 5)
    assert (errors.diff(dim=1) < 0).all(), "more density, less error"
    assert not torch.equal(differences[0], differences[1])
    assert row["layers"][-1] == "head.weight"
    assert all(floor > 0 for floor in row["floors"])
    assert row["floor"] < 1e-3 * row["middle"]
    for name in ("pearson", "pearson_rest", "spearman", "spearman_rest", "itself"):
        assert -1 <= row[name] <= 1
    for key in ("error_bytes", "loss_bytes"):
        assert 0 < row[key] <= row["reference_bytes"]
    assert "reproduce.sensitivity --quick" in summary["command"]


def test_tables_fit_a_terminal(finished):
    summary = json.loads((finished[0] / "out/summary.json").read_text())
    rows = [row | {"seed": seed, "spearman": 0.1 * seed} for seed in (0, 1) for row in summary["rows"]]
    console = Console(width=80, record=True)
    for drawn in table(lines_of(rows), TITLES, LAYOUT):
        console.print(drawn)
    text = console.export_text()
    assert text.count("top-k") == 3
    assert "…" not in text


def test_what_is_finished_is_taken_and_a_page_is_written(finished, monkeypatch):
    folder, words = finished
    with monkeypatch.context() as patched:
        patched.setattr(sensitivity, "measure", lambda *_: pytest.fail("measured again"))
        assert main([*words, "--markdown", str(folder / "page.md")]) == 0
    page = (folder / "page.md").read_text()
    assert page.count("| top-k | 4, SGD |") == 3
    assert page.count("AdamW, β₁ 0.9, β₂ 0.999, learning rate 0.002, which it rises to over 50 steps") == 1
    assert page.count("- top-k: `topk:density=0.001`") == 1
    assert "reproduce.sensitivity" in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": ("lowrank",)}, "no family 'lowrank'; there are: qsgd, top-k, low rank"),
        ({"steps": 0}, "steps=0"),
        ({"repeats": 1}, "compared with itself"),
        ({"checkpoints": (5, 2)}, "ascending"),
        ({"seeds": (1, 1)}, "none twice"),
        ({"lr": 0.0}, "above 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Options(**options)
