from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from narrowband.report.record import provenance
from reproduce import dgc, lgreco, powersgd
from reproduce.claims import tables
from reproduce.command import took
from reproduce.groups import Claim, as_good_as, claimed, compared, groups, judged, summed
from reproduce.report import PER_TASK, covered, markdown, ran_on, score_panel, source, table


def row(name, score, seed=0, task="cifar", **more):
    fields = {
        "task": task,
        "name": name,
        "spec": "none" if name == "dense" else "topk:density=0.001+ef",
        "seed": seed,
        "metric": "held-out perplexity" if task == "lstm" else "test accuracy, %",
        "higher_is_better": task != "lstm",
        "epochs": 10,
        "nodes": 4,
        "parameters": 75_290,
        "score": score,
        "sent_bytes_per_step": 4000.0,
        "ratio": 100.0,
        "mean_ratio": 90.0,
        "payload_ratio": None if name == "dense" else 400.0,
        "matrix_ratio": None if name == "dense" else 700.0,
        "step_s": 0.08,
    }
    return fields | more


SEEDS = (0, 1)


def over_seeds(name, score, **more):
    """A row per seed, which differ by nothing: what is found of them is beyond noise."""
    return [row(name, score, seed, **more) for seed in SEEDS]


def of(module, rows, text):
    (found,) = [claim for claim in module.EXPERIMENT.claims(groups(rows)) if text in claim.text]
    return found


def claim(module, rows, text):
    return of(module, rows, text).held


def test_a_group_is_the_mean_and_the_spread_over_seeds():
    dense, sparse = groups([row("dense", 80.0), row("plain", 70.0), row("dense", 84.0, 1), row("plain", 74.0, 1)])
    assert (dense.seeds, dense.mean, dense.against_dense) == ((0, 1), 82.0, 0.0)
    assert dense.std == pytest.approx(math.sqrt(8))
    assert (sparse.mean, sparse.against_dense, sparse.margin) == (72.0, -10.0, 0.0)
    assert sparse.versus_dense() == "-10.00 ± 0.00"
    assert (dense.versus_dense(), sparse.dense_scores) == ("–", (80.0, 84.0))


def test_rows_are_compared_over_the_seeds_that_both_have():
    """A seed's luck is no loss: without pairs, plain would be two points better."""
    rows = [row("dense", score, seed) for seed, score in enumerate([80.0, 82.0, 84.0])]
    dense, plain, other = groups([*rows, row("plain", 84.0, 2), row("other", 60.0, 7)])
    assert plain.against_dense == 0.0
    assert plain.margin == pytest.approx(4.303 * math.sqrt(2) * 2.0)
    assert (other.against_dense, other.margin) == (None, None)
    assert compared(plain, dense).seeds == (2,)
    text = "kept"
    assert as_good_as([dense, other], "cifar", "other", text, within=1.0, relative=False).verdict() == "not tested"
    assert judged([dense, other], "cifar", text, ["other"], lambda d, o: compared(o, d).better()).held is None


def test_claims_of_setting_up_are_told_and_not_counted():
    said = [claimed("a is better", True, "2 and 1"), replace(claimed("bytes are equal", False, "3 and 4"), setup=True)]
    assert summed(said) == "1 of 1 claim held"
    head = ["| claimed | found | verdict |", "| --- | --- | --- |"]
    first = [*head, "| a is better | 2 and 1 | **held** |", ""]
    assert tables(said)[2:] == [
        *first, "### How rows were made comparable", "", "Not counted above.", "",
        *head, "| bytes are equal | 3 and 4 | **not held** |", "",
    ]  # fmt: skip
    assert tables(said[:1])[2:] == first


def test_what_all_claims_of_a_table_share_is_said_once_above_it():
    figures = "{}: +1.00 ± 0.50 (seeds 0, 1); test accuracy, %"
    said = [
        Claim("a is close to dense", True, figures.format("a, 1 1.00, dense 2.00") + ", 3 epochs"),
        Claim("b | c", False, figures.format("b 1.00, a 2.00").replace("seeds 0, 1", "seed 0")),
        Claim("d", None, figures.format("d diverged, a 2.00"), resolved=False),
        Claim("e", None, "needs the row e"),
    ]
    assert tables(said)[2:] == [
        "Test accuracy, %; seeds 0, 1 where nothing else is said.",
        "",
        "| claimed | found | verdict |",
        "| --- | --- | --- |",
        "| a is close to uncompressed training | +1.00 ± 0.50 (a, 1: 1.00, uncompressed: 2.00) | **held** |",
        r"| b \| c | +1.00 ± 0.50 (b: 1.00, a: 2.00; seed 0) | **not held** |",
        "| d | +1.00 ± 0.50 (d: diverged, a: 2.00) | not resolved |",
        "| e | needs the row e | not tested |",
        "",
    ]


def test_claims_of_several_cases_stand_side_by_side():
    told = {"topic": "Bytes", "said": "fewer", "case": "text"}
    said = [
        Claim("text: fewer", True, "2; the paper: 3", **told),
        Claim("images: fewer", False, "1", **told | {"case": "images"}),
    ]
    assert tables([*said, Claim("text: none", None, "", **told | {"said": "none"})])[2:] == [
        "### Bytes",
        "",
        "| claimed | found: text | verdict | found: images | verdict |",
        "| --- | --- | --- | --- | --- |",
        "| fewer | 2 | **held** | 1 | **not held** |",
        "| none | – | not tested | – | – |",
        "",
    ]
    assert tables(said[:1])[4:] == [
        "| claimed | found | in the paper | verdict |", "| --- | --- | --- | --- |", "| fewer | 2 | 3 | **held** |", "",
    ]  # fmt: skip
    assert said[0].record() == {
        "text": "text: fewer", "held": True, "figures": "2; the paper: 3", "resolved": True, "setup": False,
    }  # fmt: skip


def test_claims_have_four_verdicts():
    def verdict(scores, within=0.5):
        dense = [row("dense", 80.0 + seed, seed) for seed in range(len(scores))]
        found = groups([*dense, *(row("dgc", score + seed, seed) for seed, score in enumerate(scores))])
        return as_good_as(found, "cifar", "dgc", "", within=within, relative=False)

    assert verdict([79.9, 80.0, 79.8]).verdict() == "held"
    assert verdict([79.1, 79.0, 78.9]).verdict() == "not held"
    assert verdict([79.9, 79.0, 79.5]).verdict() == "not resolved"
    assert verdict([79.9]).verdict() == "not resolved"  # one seed has no noise
    assert as_good_as([], "cifar", "dgc", "", within=0.5, relative=False).verdict() == "not tested"
    assert "dgc 80.90, dense 81.00: -0.10 ± 0.25 (seeds 0, 1, 2); test accuracy" in verdict([79.9, 80.0, 79.8]).figures


def test_a_claim_has_a_verdict_or_is_open():
    with pytest.raises(ValueError, match="give one"):
        Claim("", True, "", resolved=False)


def test_what_is_compared_may_be_made_of_scores():
    """Losses of perplexities, in nats."""
    found = groups([*over_seeds("dense", math.e**2, task="lstm"), *over_seeds("dgc", math.e**2.02, task="lstm")])
    own = compared(found[1], found[0], relative=True, of=math.log)
    assert own.mean == pytest.approx(0.01)
    assert own.no_worse(0.02).held


def test_claims_are_summed_up():
    said = [Claim("", True, ""), Claim("", False, ""), Claim("", None, ""), Claim("", None, "", resolved=False)]
    assert summed(said) == "1 of 3 claims held, 1 did not, 1 is not resolved"
    assert summed(said[:1]) == "1 of 1 claim held"


def test_runs_of_different_length_are_not_compared():
    rows = [*over_seeds("dense", 82.0, epochs=30), *over_seeds("dgc", 81.8, epochs=30)]
    found = groups([*rows, *over_seeds("dense", 78.0), *over_seeds("dgc", 77.0)])
    assert [group.against_dense for group in found] == pytest.approx([0.0, -0.2, 0.0, -1.0])
    kept = as_good_as(found, "cifar", "dgc", "kept", within=0.5, relative=False)
    assert kept.held
    assert "30 epochs" in kept.figures
    assert len(list(table(found, dgc.EXPERIMENT.titles))) == 2


def test_decisions_are_a_share_of_training_and_stand_beside_the_papers():
    told = {"task": "gpt", "plans": [[1, 2.0, {}]], "wall_s": 100.0}
    rows = [
        row("dense", 7.0, task="gpt", plans=[], decide_s=0.1, wall_s=100.0),
        row("powersgd, lgreco", 7.0, decide_s=1.0, **told),
        row("powersgd, lgreco", 7.0, 1, decide_s=3.0, **told),
    ]
    dense, chosen = groups(rows)
    assert dense.decide_share is None
    assert chosen.decide_share == pytest.approx(0.02)
    said = [cell(chosen) for _, cell in lgreco.EXPERIMENT.layout.columns("gpt")]
    assert [word for word in said if word in ("2.00%", "23.5", "0.56%")] == ["23.5", "2.00%", "0.56%"]
    assert [cell(dense) for name, cell in lgreco.EXPERIMENT.layout.columns("gpt") if name == "theirs"] == ["–", "–"]


def test_what_backward_keeps_is_put_together_over_seeds():
    told = {"plain_bytes": 400, "kept_bytes": 100}
    (group,) = groups(
        [
            row("mesa", 60.0, seed, gradient_error=error, samples_per_s=speed, **told)
            for seed, (error, speed) in enumerate([(0.01, 300.0), (0.03, 200.0), (0.02, 100.0)])
        ]
    )
    assert (group.plain_bytes, group.kept_bytes, group.samples_per_s) == (400, 100, 200.0)
    assert group.gradient_error == pytest.approx(0.02)
    (group,) = groups([row("dense", 60.0)])
    assert (group.plain_bytes, group.kept_bytes, group.samples_per_s, group.gradient_error) == (None,) * 4


def test_one_seed_has_no_spread_and_a_diverged_one_no_mean():
    single, broken = groups([row("dense", 80.0), row("plain", None), row("plain", 70.0, 1)])
    assert (single.std, single.score()) == (None, "80.00")
    assert (broken.mean, broken.std, broken.against_dense, broken.score()) == (None, None, None, "diverged")


@pytest.mark.parametrize(("score", "held"), [(79.5, True), (79.4, False), (81.0, True), (None, False)])
def test_accuracy_may_be_a_little_lower(score, held):
    assert (
        claim(dgc, [*over_seeds("dense", 80.0), *over_seeds("dgc", score)], "DGC as published is within 0.5 points")
        is held
    )


@pytest.mark.parametrize(("score", "held"), [(5.05, True), (5.06, False), (4.0, True)])
def test_perplexity_may_be_a_little_higher(score, held):
    rows = [*over_seeds("dense", 5.0, task="lstm"), *over_seeds("dgc", score, task="lstm")]
    assert claim(dgc, rows, "DGC's perplexity is within 1%") is held


@pytest.mark.parametrize(("score", "verdict"), [(78.9, "held"), (79.1, "not held"), (None, "held")])
def test_plain_sparsification_has_to_be_visibly_worse(score, verdict):
    rows = [*over_seeds("dense", 80.0), *over_seeds("plain", score)]
    assert of(dgc, rows, "plain sparsification loses").verdict() == verdict


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("the full method is better", ("dgc", "plain")),
        ("momentum correction helps", ("correction", "plain")),
        ("masking helps", ("dgc", "correction")),
        ("the warm-up helps", ("dgc", "dgc, no warm-up")),
        ("steps that wait", ("dgc, steps", "dgc")),
    ],
)
def test_a_part_of_dgc_helps_where_rows_with_it_are_better_beyond_noise(text, names):
    def verdict(first, second):
        rows = [
            row(name, score, seed)
            for name, scores in (("dense", (80.0, 80.5)), (names[0], first), (names[1], second))
            for seed, score in enumerate(scores)
        ]
        return of(dgc, rows, text).verdict()

    assert verdict((79.0, 79.5), (78.0, 78.5)) == "held"
    assert verdict((79.0, 79.5), (79.0, 79.5)) == "not held"
    assert verdict((79.0, 79.5), (78.9, 79.0)) == "not resolved"


@pytest.mark.parametrize(("ratio", "held"), [(270.0, True), (269.0, False)])
def test_bytes_are_counted_over_the_whole_gradient(ratio, held):
    assert claim(dgc, [row("dgc", 80.0, payload_ratio=ratio)], "cifar, dgc: a payload") is held


@pytest.mark.parametrize("module", [dgc, powersgd])
def test_claims_without_their_rows_are_not_tested(module):
    claims = module.EXPERIMENT.claims(groups([row("dense", 80.0)]))
    assert [claim.held for claim in claims] == [None] * len(claims)
    assert {claim.verdict() for claim in claims} == {"not tested"}


def page_of(rows, claims, **more):
    return markdown(
        groups(rows),
        dgc.EXPERIMENT.titles,
        claims,
        opening=dgc.EXPERIMENT.opening,
        paper="Somebody 2018 (arXiv 1801.00001)",
        page="own",
        record=provenance(0, ["python", "-m", "reproduce.dgc"]),
        commits=["0123456789abcdef"],
        **more,
    )


def of_both_tasks():
    return [
        row(name, score, task=task, epochs=epochs)
        for task, epochs, scores in (
            ("cifar", 10, {"dense": 80.0, "plain": 78.0, "dgc": 79.5, "dgc, steps, small 5%": 79.9}),
            ("lstm", 12, {"dense": 5.0, "dgc": 5.1}),
        )
        for name, score in scores.items()
    ]


def test_a_page_has_every_row_and_every_verdict():
    text = "plain is | worse"
    rows = [row("dense", 80.0), row("plain", 70.0), row("dense", 5.0, task="lstm")]
    page = page_of(rows, [Claim(text, True, "70")])
    assert "| plain | 70.00 | -10.00 |" in page
    assert r"| plain is \| worse | 70 | **held** |" in page
    assert "`python -m reproduce.dgc`" in page
    assert page.startswith("# Deep Gradient Compression (DGC)\n")
    assert "Somebody 2018 ([arXiv 1801.00001](https://arxiv.org/abs/1801.00001))." in page
    assert "commit 0123456789ab." in page
    assert page.count("| --- | ---: |") == 2
    assert "dense" not in page
    for line in page[page.index("## Tables") :].splitlines():
        if line.startswith("| "):
            assert line.count("|") == 10


def test_a_page_begins_with_a_conclusion_of_its_own_figures_and_a_picture():
    page = page_of(of_both_tasks(), [Claim("a", True, ""), Claim("b", False, ""), Claim("c", None, "")])
    beginning = page[: page.index("| --- |")]
    said = [beginning.index(f"**{part}.**") for part in ("What was asked", "What was run", "What came out")]
    assert said == sorted(said)
    assert "**What came out.** On CIFAR-10 accuracy is 80.00 % uncompressed." in beginning
    assert "DGC as published -0.50 (payloads 400 times smaller)" in beginning
    assert " 1 of 2 claims held, 1 did not ([each, with its figures](#claims)).\n" in beginning
    assert "](pictures/own/opening-light.svg#only-light) ![" in beginning
    assert "](pictures/own/opening-dark.svg#only-dark)" in beginning


def test_a_page_names_every_setting_of_its_rows():
    told = {
        "lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 1e-4, "batch": 128, "clip": None,
        "schedule": "steps", "small": "uncompressed", "min_numel": 1, "policy": "", "high": "", "limit": None,
        "forward": "", "activations": "", "data": "CIFAR-10, images encoded again as JPEG",
    }  # fmt: skip
    rows = [
        row("dense", 80.0, optimizer="sgd", warmup_epochs=0, **told),
        row("dgc", 79.0, optimizer="dgc", warmup_epochs=1, **told | {"small": "topk:density=0.05", "min_numel": 1000}),
    ]
    page = page_of(rows, [])
    shared = (
        "- All rows: learning rate: rises to 0.1 over the first 5% of steps; 0.1 times that from 50% on, 0.01 times "
        "that from 80% on; weight decay: 0.0001; global batch: 128; clipping of averaged gradients: none; length: 10 "
        "epochs; data: CIFAR-10, images encoded again as JPEG; seeds: 0."
    )
    assert shared in page.splitlines()
    assert (
        "- **optimizer**: SGD, momentum 0.9: *uncompressed* · SGD, momentum 0.9 on each rank, before compression: *dgc*"
    ) in page.splitlines()
    assert "- **compression's warm-up**: none: *uncompressed* · 1 epoch: *dgc*" in page.splitlines()
    assert "- **spec**: `none`: *uncompressed* · `topk:density=0.001+ef`: *dgc*" in page.splitlines()
    language = {"optimizer": "adamw", "momentum": 0.9, "nesterov": False, "lr": 2e-3, "schedule": "cosine", "clip": 1.0}
    page = page_of([row("dense", 5.0, task="lstm", **language)], [])
    for words in (
        "optimizer: AdamW, β₁ 0.9, β₂ 0.999",
        "along a cosine to zero",
        "clipping of averaged gradients: at norm 1",
    ):
        assert words in page
    tuned = {"lr": 0.01, "schedule": "half-cosine", "score_before": 31.5}
    page = page_of([row("dense", 5.0, task="lstm", **tuned)], [])
    assert "learning rate: 0.01 at first, falls along a cosine to half of it" in page
    assert (
        "pre-training: on the second of these, 4 epochs of AdamW, β₁ 0.9, β₂ 0.999, whose learning rate rises to 0.002"
        in page
    )
    assert "before fine-tuning 31.50 (seed 0)" in page


def test_a_page_of_some_of_the_rows_says_nothing_of_the_others():
    page = page_of([row("dense", 80.0), row("plain", 70.0)], [])
    assert "**What was run.**" in page
    for part in ("What came out", "opening", "## Claims"):
        assert part not in page


def test_a_page_shows_pictures_that_are_there():
    layout = replace(PER_TASK, pictures=lambda task: [(f"{task}.png", "curves")])
    page = page_of(of_both_tasks(), [], layout=layout, pictures={"cifar.png"})
    assert "[![curves](pictures/own/cifar.png)](pictures/own/cifar.png)" in page
    assert "lstm.png" not in page


def test_a_page_says_what_became_of_the_papers_tables():
    opening = replace(dgc.EXPERIMENT.opening, covers=[("table 1", "here"), ("table 2", "not reproduced: why")])
    assert covered([], opening)[2:4] == ["- table 1: here", "- table 2: not reproduced: why"]
    assert covered([], replace(opening, covers=())) == []
    assert covered(["row"], replace(opening, covers=lambda found: [(found[0], "here")]))[2] == "- row: here"
    page = page_of([row("dense", 80.0)], [])
    assert page.index("## The paper's tables and figures") > page.index("| --- |")


def test_a_page_says_what_was_run_of_the_rows_that_are_there():
    ran = dgc.EXPERIMENT.opening.ran
    images = [row(name, 80.0, seed) for name in ("dense", "plain", "dgc") for seed in (0, 1)]
    assert ran(groups(images)).startswith("A ResNet-8 on CIFAR-10 (seeds 0, 1) learned on four real ranks")
    characters = [row("dense", 5.0, task="lstm"), row("dgc", 5.1, task="lstm")]
    assert "and an LSTM over characters of tiny shakespeare (seed 0) learned" in ran(groups(images + characters))
    table_4 = "table 4, an LSTM over words of Penn Treebank"
    covers = dgc.EXPERIMENT.opening.covers
    assert dict(covers(groups(images)))[table_4].startswith("not here yet")
    assert dict(covers(groups(images + characters)))[table_4].startswith("here")
    ranks = powersgd.EXPERIMENT.opening.ran
    assert "with rank 2, for" in ranks(groups([row("dense", 80.0), row("rank 2", 80.0)]))
    assert "with ranks 1 and 4, for" in ranks(groups([row("rank 4", 80.0), row("rank 1", 80.0)]))


def test_bars_side_by_side_are_of_the_same_seeds():
    dense, own = groups([row("dense", 80.0), row("dense", 90.0, 1), row("dense", 70.0, 2), row("dgc", 89.0, 1)])
    panel = score_panel("Accuracy", [("uncompressed", dense, False), ("DGC", own, True)])
    assert [bar.said for bar in panel.bars] == ["90.00", "89.00"]
    assert "seed 1" in panel.note
    alone = score_panel("Accuracy", [("uncompressed", dense, False)])
    assert [bar.said for bar in alone.bars] == ["80.00 ± 10.00"]
    assert "seed" not in alone.note


def test_a_group_of_some_seeds_has_their_scores_alone():
    (group,) = groups([row("dense", 80.0), row("dense", 90.0, 1), row("dense", 70.0, 2)])
    some = group.of_seeds((0, 1))
    assert (some.seeds, some.scores, some.mean, some.settings["seeds"]) == ((0, 1), (80.0, 90.0), 85.0, "0, 1")
    assert group.of_seeds((2,)).std is None


GPT_SCORES = {"dense": 5.0, "candidate topk:density=0.05+ef": 7.0, "candidate topk:density=0.1+ef": 6.0}


@pytest.mark.parametrize(
    ("closest", "verdict", "says"),
    [
        (5.4, "not held", "topk:density=0.2+ef is the closest to dense, and so is the reference"),
        (5.04, "held", "topk:density=0.2+ef sends least of those, and is the reference"),
    ],
)
def test_a_reference_that_is_not_within_the_bound_is_named_as_such(closest, verdict, says):
    scores = GPT_SCORES | {"candidate topk:density=0.2+ef": closest}
    found = of(lgreco, [row(name, score, 100, task="gpt") for name, score in scores.items()], "gpt, top-k: of the cand")
    assert found.verdict() == verdict
    assert says in found.figures


def test_a_reference_is_not_held_where_the_rule_would_have_chosen_another():
    scores = GPT_SCORES | {"candidate topk:density=0.1+ef": 5.01, "candidate topk:density=0.2+ef": 5.0}
    found = of(lgreco, [row(name, score, 100, task="gpt") for name, score in scores.items()], "gpt, top-k: of the cand")
    assert found.verdict() == "not held"
    assert "would be the reference, but rows were trained around topk:density=0.2+ef" in found.figures


def test_lgrecos_rows_stand_beside_the_dense_row_of_their_seeds():
    rows = [row("dense", 5.0 + seed / 10, seed, task="gpt") for seed in (0, 1, 100)]
    rows += [row("qsgd, uniform", 5.1, seed, task="gpt") for seed in (0, 1)]
    rows += [row("candidate qsgd:bits=4", 15.0, 100, task="gpt")]
    tables = dict(lgreco.EXPERIMENT.layout.tables(groups(rows)))
    assert [tables[key][0].seeds for key in ("gpt", "choice")] == [(0, 1), (100,)]


def test_a_record_names_its_data():
    record = provenance(0, ["python", "-m", "reproduce.dgc"])
    assert source(record | {"data": "CIFAR-10"}, ["0123"]).endswith("commit 0123. Data: CIFAR-10.")
    assert source(record, ["0123"]).endswith("commit 0123.")
    spent = took([{"wall_s": 3600.0, "forward": "none"}, {"wall_s": 5400.0, "forward": "none"}])
    assert source(record | {"took": spent}, ["0123"]).endswith(
        "Training 2 rows took 2.5 h of one process each, added up, however busy the machine was."
    )
    assert took([{"score": 1.0}]) == ""


def test_rows_are_of_the_processors_that_they_say_or_else_of_those_that_a_summary_tells_of(tmp_path):
    summary = tmp_path / "summary.json"
    assert ran_on([{}, {"cpu": "A"}], summary) == ["A"]
    summary.write_text(json.dumps({"machine": {"cpu": "B"}}))
    assert ran_on([{}, {"cpu": "A"}], summary) == ["A", "B"]
    assert ran_on([{"cpu": "A"}], summary) == ["A"]
    summary.write_text(json.dumps({"machine": {"cpu": "C"}, "cpus": ["B", "D"]}))
    assert ran_on([{}], summary) == ["B", "D"]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "left-out.json").write_text("{}")  # a run of some rows does not lose what others ran on
    assert ran_on([{"cpu": "A"}], summary) == ["A", "B", "D"]


def test_tables_fit_a_terminal():
    found = groups([row("no correction", 70.123, seed, payload_ratio=1234.0) for seed in range(3)])
    console = Console(width=80, record=True)
    for drawn in table(found, dgc.EXPERIMENT.titles):
        console.print(drawn)
    assert "no correction  70.12 ± 0.00" in console.export_text()
    assert "…" not in console.export_text()


def test_groups_and_claims_are_json():
    found = groups([row("dense", None), row("dgc", 70.0)])
    json.dumps([asdict(group) for group in found], allow_nan=False)
    json.dumps([asdict(claim) for claim in dgc.EXPERIMENT.claims(found)], allow_nan=False)


def test_a_bound_is_kept_in_the_direction_of_the_metric():
    better = groups([*over_seeds("dense", 5.0, task="lstm"), *over_seeds("dgc", 1.0, task="lstm")])
    assert as_good_as(better, "lstm", "dgc", "", within=0.0, relative=True).held


def test_dgcs_curves_are_drawn_per_task_also_where_a_row_diverged(tmp_path):
    curves = {"scores": [50.0, 60.0], "curve": [[1, 2.0], [2, 1.0]], "steps": 4, "epochs": 2}
    lost = curves | {"scores": [50.0, None], "curve": [[1, 2.0], [2, None]]}
    rows = [row("dense", 60.0) | curves, row("dgc", None) | lost, row("dense", 5.0, task="lstm") | curves]
    drawn = dgc._draw(rows, tmp_path / "pictures")
    assert [path.name for path in drawn] == ["cifar-curves.png", "lstm-curves.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
