from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import narrowband as nb
from narrowband.bench.models import GPT, GPTConfig
from narrowband.report.record import machine
from reproduce import optimizers
from reproduce.optimizers import RATES, Options, chosen_rates, compared, main, tuning
from reproduce.optimizers_page import conclusion, lines, page, recommended, warning
from reproduce.optimizers_ranks import ABOUT, NAMES, SPECS, Row, _optimizers, _rate, adapt
from tests.reproduce.synthetic import write_all

TOP, BITS, SIGN = "topk:density=0.01+ef", "qsgd:bits=4", "sign+ef"
DGC = "dgc:density=0.01,clip=1,warmup_steps=30"
DOCS = Path(__file__).parents[2] / "docs" / "results"
RESULTS = Path(optimizers.__file__).parent / "results" / "optimizers"


def row(spec, loss, seed=0, optimizer="adamw", **more):
    told = {"optimizer": optimizer, "spec": spec, "seed": seed, "loss": loss, "lr": 0.003, "ratio": 8.0}
    told |= {"relative_error": None if spec == "none" else 0.1, "parameters": 1000, "nodes": 2, "steps": 300}
    return told | {"base_loss": None} | more


def one(found, spec, optimizer="adamw"):
    (line,) = [line for line in found if (line.spec, line.optimizer) == (spec, optimizer)]
    return line


def small():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=256, dim=16, blocks=2, heads=2, sequence=8, batch=2))


# ---- what is trained -------------------------------------------------------------------------------------------------


def test_adapters_change_nothing_at_first_and_alone_are_trained():
    model, x = small(), torch.arange(16).view(2, 8)
    before = model(x)
    adapt(model)
    assert torch.equal(model(x), before)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 4  # blocks, matrices of an adapter, linear layers of a block
    assert all(name.endswith(("down_RD", "up_ER")) and 8 in p.shape for name, p in trained.items())
    model(x).sum().backward()
    assert all(p.grad is not None for p in trained.values())


def test_muon_has_the_matrices_of_blocks_and_adamw_the_rest():
    model = small()
    muon, adamw = _optimizers(Row("muon", "none", 0.02), "none", model)
    own = [{id(p) for group in each.param_groups for p in group["params"]} for each in (muon, adamw)]
    assert own[0] == {id(p) for block in model.blocks for p in block.parameters() if p.dim() == 2}
    assert own[0] | own[1] == {id(p) for p in model.parameters()}
    assert not own[0] & own[1]


def test_dgc_has_momentum_before_the_wire_alone():
    (plain,) = _optimizers(Row("sgd", TOP, 0.1), TOP, small())
    (ours,) = _optimizers(Row("sgd", "dgc", 0.1), "dgc:density=0.01", small())
    assert type(plain) is torch.optim.SGD
    assert type(ours) is nb.DGCSGD
    assert plain.defaults["momentum"] == ours.defaults["momentum"] == nb.compression("dgc").feedback.momentum


def test_the_learning_rate_rises_and_then_falls_to_a_tenth():
    rates = [_rate(step, 100) for step in range(100)]
    assert max(rates) == rates[9] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 < rates[-1] < 0.11


def test_every_codec_has_the_rate_and_the_seeds_of_training_without_compression():
    rates = dict(zip(RATES, (0.001, 0.1, 0.02, 0.003), strict=True))
    rows = compared(Options(seeds=(0, 1)), rates)
    assert {(each.optimizer, each.lr) for each in rows} == set(rates.items())
    for optimizer in rates:
        seeds = {
            seed: {each.spec for each in rows if (each.optimizer, each.seed) == (optimizer, seed)} for seed in (0, 1)
        }
        assert seeds[0] == seeds[1] >= set(SPECS)
        assert any(spec.startswith("dgc") for spec in seeds[0]) == (optimizer == "sgd")
    assert [each.seed for each in rows] == sorted(each.seed for each in rows)
    own = {
        optimizer: {each.seed for each in compared(Options(), rates) if each.optimizer == optimizer}
        for optimizer in rates
    }
    assert own == {"adamw": set(range(8)), "sgd": {0, 1, 2}, "muon": {0, 1, 2}, "lora": {0, 1, 2}}
    assert not {each.seed for each in tuning(Options())} & set(range(10))
    for each in rows:
        nb.compression(each.spec.replace("{warmup}", "30"))


def test_the_rate_with_the_lowest_loss_is_chosen():
    tried = [row("none", loss, lr=lr) for lr, loss in ((0.1, 2.5), (0.3, 2.4), (1.0, None))]
    assert chosen_rates([*tried, row("none", 3.0, optimizer="sgd", lr=7.0)]) == {"adamw": 0.3, "sgd": 7.0}
    with pytest.raises(ValueError, match="adamw: training diverged with every learning rate"):
        chosen_rates(tried[2:])


# ---- what rows come to -----------------------------------------------------------------------------------------------


def test_gaps_are_paired_by_seed_and_judged_by_their_spread():
    rows = [row("none", 2.0), row("none", 4.0, 1), row("fp16", 2.0), row("fp16", 4.0004, 1)]
    rows += [row(BITS, 2.002), row(BITS, 3.996, 1), row(TOP, 2.38), row(TOP, 4.84, 1)]
    dense, half, bits, top = lines(rows)
    assert (bits.gap, top.gap) == pytest.approx((0.0, 20.0))
    # Gaps of 0.1 and -0.1 have a variance of 0.02. They are the median codec's; those of 19 and 21 have a larger one.
    assert half.margin == bits.margin == pytest.approx(12.706 * math.sqrt(0.02 / 2))
    assert top.margin == pytest.approx(12.706 * math.sqrt(2 / 2))
    assert [line.verdict() for line in (dense, half, bits, top)] == ["–", "not resolved", "not resolved", "worse"]
    assert one(lines([*rows, row(SIGN, 1.8), row(SIGN, 3.6, 1)]), SIGN).verdict() == "better"


def test_a_row_without_one_to_compare_it_with_is_left_out():
    found = lines([row("none", 2.0), row(TOP, 2.2), row(TOP, 9.0, 1), row(BITS, 3.0, optimizer="sgd")])
    assert [(line.optimizer, line.spec, line.seeds) for line in found] == [
        ("adamw", "none", (0,)),
        ("adamw", TOP, (0,)),
    ]
    assert one(found, TOP).gap == pytest.approx(10.0)
    assert (one(found, TOP).margin, one(found, TOP).verdict()) == (None, "one seed")


def test_a_row_that_diverged_has_no_gap_and_does_not_widen_margins():
    rows = [
        row("none", 2.0),
        row("none", 2.0, 1),
        row(BITS, 2.002),
        row(BITS, 1.998, 1),
        row(TOP, None),
        row(TOP, 2.1, 1),
    ]
    found = lines(rows)
    assert (one(found, TOP).gap, one(found, TOP).verdict()) == (None, "diverged")
    assert one(found, BITS).margin == pytest.approx(12.706 * 0.1)


def test_what_was_sent_as_it_is_is_no_recommendation():
    whole = "powersgd:rank=4"
    found = lines([row("none", 2.0), row(whole, 2.0, relative_error=None, ratio=1.0), row(SIGN, 2.5)])
    assert one(found, whole).verdict() == "not compressed"
    assert [line and line.spec for line in recommended(found, "adamw")] == [None, None, SIGN]
    assert "powersgd" not in conclusion(found)[2]


def test_what_is_recommended_sends_least_within_a_gap():
    rows = [row("none", 2.0), row("fp16", 2.0, ratio=2.0), row(BITS, 2.01, ratio=7.0), row(TOP, 2.08, ratio=39.0)]
    found = lines([*rows, row(SIGN, 2.5, ratio=20.0)])
    assert [line.spec for line in recommended(found, "adamw")] == [BITS, TOP, SIGN]
    assert recommended(lines([rows[0], row(SIGN, 2.5)]), "adamw")[:2] == (None, None)
    assert recommended(lines([*rows, row(SIGN, None)]), "adamw")[2].spec == SIGN


def test_where_the_same_error_costs_one_optimizer_more_that_is_said():
    rows = [row("none", 2.0, optimizer=each) for each in ("adamw", "sgd", "muon")]
    rows += [row(TOP, 2.01, optimizer="sgd", relative_error=0.9), row(TOP, 2.2, relative_error=0.95)]
    said = "`topk:density=0.01+ef` had 0.9 with SGD and 0.95 with AdamW, and its gaps were +0.5 % and +10.0 %."
    assert said in warning(lines(rows))[-1]
    assert said in warning(lines([*rows, row(TOP, 2.9, optimizer="muon", relative_error=0.5)]))[-1]


def test_the_conclusion_names_what_was_kept_with_which_optimizer_and_what_lost_most():
    rows = [row("none", 2.0, optimizer=each) for each in ("adamw", "sgd")]
    rows += [row("fp16", 2.0, optimizer=each) for each in ("adamw", "sgd")]
    rows += [row(TOP, 2.01), row(TOP, 2.3, optimizer="sgd"), row(DGC, 2.01, optimizer="sgd")]
    assert conclusion(lines(rows))[2] == (
        "The mean loss was at most 1 % above the uncompressed one for `fp16` with every optimizer, "
        "`topk:density=0.01+ef` with AdamW and `dgc:density=0.01` with SGD. `topk:density=0.01+ef` with SGD lost "
        "15.0 %, more than any other."
    )


def test_the_conclusion_says_where_seeds_differ_too_much_to_tell():
    rows = [row("none", 2.0), row("none", 2.0, 1), row(BITS, 2.04), row(BITS, 1.97, 1)]
    assert ". With AdamW gaps below 22.2 % are not resolved. " in conclusion(lines(rows))[2]
    assert "resolved" not in conclusion(lines([*rows[:2], row(BITS, 2.0002), row(BITS, 1.9998, 1)]))[2]


def test_what_was_run_names_the_seeds_of_each_optimizer_where_these_differ():
    rows = [row("none", 2.0 + seed, seed) for seed in range(4)]
    assert ", with seeds 0 to 3. " in conclusion(lines(rows))[1]
    assert ", with seeds 0 and 2. " in conclusion(lines([rows[0], rows[2]]))[1]
    others = [row("none", 2.0, seed, kind) for kind in ("sgd", "muon") for seed in (0, 1, 2)]
    said = ", with seeds 0 to 3 for AdamW and seeds 0, 1 and 2 for SGD and Muon. "
    assert said in conclusion(lines([*rows, *others]))[1]


def test_the_error_below_which_nothing_was_lost_is_named():
    rows = [row("none", 2.0), row(BITS, 2.0, relative_error=0.01), row(TOP, 2.5, relative_error=0.9)]
    (said,) = warning(lines([*rows, row(SIGN, 2.01, relative_error=0.95)]))
    assert said == (
        "Below a relative error of 0.9 nothing lost more than 1 %. At or above it 1 of 2 did; these did not: "
        "`sign+ef` with AdamW."
    )
    ranked = [*rows, row(SIGN, 2.4, relative_error=0.5), row("fp16", 1.99, relative_error=1e-8)]
    assert warning(lines(ranked))[0].startswith(
        "Rank correlation of the gap with `handle.stats().total.relative_error`, over codecs: AdamW 1.00."
    )
    (said,) = warning(lines([rows[0], row(TOP, 2.3, relative_error=0.03184)]))
    assert said.startswith("Below a relative error of 0.031 nothing lost more than 1 %. At or above it 1 of 1 did")
    assert warning(lines(rows[:1])) == []


# ---- the whole -------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_quick_run_trains_all_optimizers_on_real_ranks_and_goes_on_from_what_is_finished(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_all(tmp_path / "data", images=16)
    dgc = "dgc:density=0.01,clip=1,warmup_steps={warmup},accumulate=steps"
    arguments = ["--quick", "--seeds", "0", "--specs", TOP, dgc]
    arguments += ["--data-dir", str(tmp_path / "data"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--markdown", str(tmp_path / "page.md")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {"command", "commit", "machine", "versions", "seed", "tuning", "lines", "rows"} <= summary.keys()
    found = {(line["optimizer"], line["spec"]): line for line in summary["lines"]}
    ran = dgc.format(warmup=1)
    assert set(found) == {*((each, spec) for each in NAMES for spec in ("none", TOP)), ("sgd", ran)}
    assert all(line["loss"] < math.log(256) + 0.5 for line in found.values())
    assert all((line["ratio"] > 1.5) == (spec != "none") for (_, spec), line in found.items())
    assert all(0 < line["relative_error"] < 1 for (_, spec), line in found.items() if spec != "none")
    assert found["lora", TOP]["parameters"] < found["adamw", TOP]["parameters"] / 4
    assert found["lora", "none"]["base_loss"] > found["lora", "none"]["loss"]
    text = (tmp_path / "page.md").read_text()
    assert all(f"### {name}" in text for name in NAMES.values())
    assert "`sign+ef`" not in text
    for picture in ("pictures/page/gaps.png", "pictures/page/errors.png"):
        assert f"]({picture})" in text
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")

    # The same again trains nothing: what a row holds is what the file says.
    (kept,) = (tmp_path / "out" / "rows").glob("lora-topk*")
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"told": 1, "cpu": "Another"}))
    assert main(arguments) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [row for row in summary["rows"] if row.get("told")]
    assert summary["cpus"] == sorted(("Another", machine()["cpu"]))
    kept.unlink()
    assert main([*arguments, "--recorded"]) == 0
    assert not kept.exists()
    assert len(json.loads((tmp_path / "out" / "summary.json").read_text())["lines"]) == len(found) - 1
    capsys.readouterr()
    assert main([*arguments, "--recorded", "--seeds", "5"]) == 2
    assert "no row is finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--specs", "zip"], "optimizers has no spec 'zip'; there are: none; fp16"),
        (["--optimizers"], "give at least one optimizer"),
    ],
)
def test_a_wrong_choice_is_one_line(tmp_path, capsys, arguments, message):
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_page_of_the_documentation_is_what_the_recorded_rows_say(tmp_path):
    """Run ``python -m reproduce.pages`` where this fails."""
    summary = json.loads((RESULTS / "summary.json").read_text())
    pictures = Path("pictures") / "optimizers"
    (tmp_path / pictures).mkdir(parents=True)
    for name in ("gaps.png", "errors.png"):
        assert (DOCS / pictures / name).exists()
        (tmp_path / pictures / name).touch()
    page(summary, tmp_path / "optimizers.md")
    assert (tmp_path / "optimizers.md").read_text() == (DOCS / "optimizers.md").read_text()
    kept = [json.loads(path.read_text()) for path in (RESULTS / "rows").glob("*.json")]
    assert all(row in kept for row in (*summary["tuning"], *summary["rows"]))
    assert {row["commit"] for row in (*summary["tuning"], *summary["rows"])} == set(summary["commits"])
    assert set(NAMES) == set(ABOUT) == {line["optimizer"] for line in summary["lines"]}
