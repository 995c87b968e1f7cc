from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from rich.console import Console

import narrowband as nb
from reproduce import model_parallel
from reproduce.command import Options, chosen, main
from reproduce.groups import groups
from reproduce.report import markdown, table
from reproduce.row import Row
from reproduce.tasks import load
from reproduce.training import run, train
from tests.ranks import run_ranks

EXPERIMENT = model_parallel.EXPERIMENT
BATCH = 16
EPOCHS = 3
#: What crosses the boundaries of a ResNet-8.
SHAPES = [(BATCH, 16, 32, 32), (BATCH, 32, 16, 16), (BATCH, 64, 8, 8)]

DENSE = Row("cifar", "dense", "none", epochs=EPOCHS, batch=BATCH, lr=0.05, limit=80, forward="none", backward="none")
TOP = "topk:density=0.1,scope=sample"
ROWS = {
    "uncut": replace(DENSE, name="uncut", forward="", backward=""),
    "dense": DENSE,
    "top-k": replace(DENSE, name="top-k", forward=TOP, backward=TOP, warmup_epochs=1),
    "ef21": replace(DENSE, name="ef21", forward=f"{TOP}+ef21", backward=f"{TOP}+ef21"),
    "by sample": replace(DENSE, name="by sample", forward="topk:density=0.1+aq-sgd:store=fp16", backward=TOP),
    "reuse": replace(
        DENSE, task="gpt", name="reuse", optimizer="adamw", lr=1e-3, epochs=4, batch=2, limit=400,
        forward="topk:density=0.1", backward="topk:density=0.1,reuse=forward", width=32,
    ),
    "tuned": replace(
        DENSE, task="tuned", name="tuned", optimizer="adamw", lr=1e-3, epochs=1, batch=2, limit=4500,
        schedule="half-cosine", forward="none", backward="topk:density=0.1,scope=sample+ef",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """Their directory, what rows came to, and what was told; two processes, the row that is not cut by one."""
    directory, events = tmp_path_factory.mktemp("results"), []
    (uncut,) = run([ROWS["uncut"]], directory, nodes=1, data_dir=folder)
    cut = [row for row in ROWS.values() if row.forward]
    rows = run(cut, directory, nodes=2, data_dir=folder, on_event=events.append)
    return directory, {row["name"]: row for row in (uncut, *rows)}, events


# ---- training --------------------------------------------------------------------------------------------------------


def test_boundaries_that_let_everything_through_change_nothing(finished):
    _, rows, _ = finished
    assert rows["dense"]["curve"] == rows["uncut"]["curve"]
    assert rows["dense"]["score"] == rows["uncut"]["score"] == rows["dense"]["uncompressed_score"]
    assert rows["dense"]["boundaries"] == [[1.0, 1.0]] * 3
    assert rows["dense"]["spec"] == "none forward, none backward"
    assert "boundaries" not in rows["uncut"]


def test_compression_begins_after_warm_up(finished):
    _, rows, _ = finished
    of_epoch = rows["dense"]["steps"] // EPOCHS
    first = [[point for point in rows[name]["curve"] if point[0] <= of_epoch] for name in ("dense", "top-k")]
    assert first[0] == first[1]
    assert rows["top-k"]["scores"][0] == rows["dense"]["scores"][0]
    assert rows["top-k"]["curve"] != rows["dense"]["curve"]
    assert rows["ef21"]["curve"][0] != rows["dense"]["curve"][0]


def test_both_evaluations_are_of_one_model(finished):
    _, rows, _ = finished
    reuse = rows["reuse"]
    assert reuse["metric"] == "held-out perplexity"
    assert reuse["score"] == reuse["scores"][-1] < 256
    assert reuse["uncompressed_score"] < 256
    assert reuse["uncompressed_score"] != reuse["score"]


def test_a_model_that_is_tuned_was_pretrained_and_judged_before(finished):
    _, rows, _ = finished
    assert rows["tuned"]["score"] < rows["tuned"]["score_before"] < 256
    assert not any("score_before" in row for name, row in rows.items() if name != "tuned")
    assert "tiny shakespeare" in rows["tuned"]["data"]


def evaluations(rank, world_size, row, folder):
    """How many samples go through at once, evaluation by evaluation."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    task = load("cifar", batch=row.batch, seed=0, rank=rank, world_size=world_size, directory=folder, limit=row.limit)
    seen, tally = [], task.tally
    task.tally = lambda model, at_once=None: seen.append(at_once) or tally(model, at_once)
    train(row, task, lambda **_: None)
    return seen


def test_evaluation_has_the_shape_of_training_and_so_its_buffers(folder):
    for name, at_once in (("ef21", BATCH), ("uncut", None)):
        row = replace(ROWS[name], epochs=1, limit=BATCH)
        assert set(run_ranks(evaluations, 1, row, folder)[0]) == {at_once}


def test_bytes_are_those_of_training_steps_of_the_last_epoch(finished):
    """Neither warm-up nor evaluation counts."""
    _, rows, _ = finished
    payloads = [nb.codec(TOP).payload_nbytes(shape) for shape in SHAPES]
    raw = [4 * BATCH * shape[1] * shape[2] * shape[3] for shape in SHAPES]
    ratios = [[r / p, r / p] for r, p in zip(raw, payloads, strict=True)]
    for name in ("top-k", "ef21"):
        assert rows[name]["boundaries"] == pytest.approx([pytest.approx(pair) for pair in ratios])
        assert rows[name]["raw_bytes_per_step"] == 2 * sum(raw)
        assert rows[name]["sent_bytes_per_step"] == 2 * sum(payloads)
        assert rows[name]["ratio"] == pytest.approx(sum(raw) / sum(payloads))
    steps = rows["top-k"]["steps"]
    mean = 3 * sum(raw) / (sum(raw) + 2 * sum(payloads))  # an epoch of warm-up and two others
    assert steps % 3 == 0
    assert rows["top-k"]["mean_ratio"] == pytest.approx(mean)


def test_samples_are_told_and_come_again_in_every_epoch(finished):
    """From the second epoch on no image travels in full. A message begins with eight bytes that tell its samples."""
    _, rows, _ = finished
    for (forward, _), (samples, *one) in zip(rows["by sample"]["boundaries"], SHAPES, strict=True):
        sent = samples * nb.codec("topk:density=0.1").payload_nbytes(one) + 8
        assert forward == pytest.approx(samples * 4 * one[0] * one[1] * one[2] / sent)


def test_places_that_went_forward_do_not_come_back(finished):
    _, rows, _ = finished
    for forward, backward in rows["reuse"]["boundaries"]:
        assert backward == pytest.approx(10.0, rel=1e-3)
        assert forward < 9.0


def test_every_row_is_trained_once_and_told_whole(finished):
    _, rows, events = finished
    cut = [name for name, row in ROWS.items() if row.forward]
    assert sorted(event["row"] for event in events if event["event"] == "row") == list(range(len(cut)))
    for number, name in enumerate(cut):
        told = [event for event in events if event["row"] == number]
        assert [event["metric"] for event in told if event["event"] == "epoch"] == rows[name]["scores"]
        assert told[-1]["result"] | {"data": rows[name]["data"]} == rows[name]
        assert rows[name]["nodes"] == 1


def test_finished_rows_are_taken_and_missing_ones_trained_to_the_same_bits(finished, folder):
    """However many processes there are."""
    directory, rows, _ = finished
    (missing,) = (directory / "rows").glob("cifar-by-sample-*.json")
    missing.unlink()
    events = []
    again = run(
        [ROWS["ef21"], ROWS["by sample"]], directory, nodes=1, data_dir=folder, on_event=events.append
    )  # fmt: skip
    assert {event["row"] for event in events if event["event"] == "step"} == {1}
    assert again[0] == rows["ef21"]
    for what in ("scores", "curve", "boundaries", "uncompressed_score"):
        assert again[1][what] == rows["by sample"][what]
    assert missing.exists()


def test_a_model_that_has_no_stages_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="no stages of the model of task lstm"):
        run([replace(DENSE, task="lstm")], tmp_path, nodes=2, data_dir=folder)


@pytest.mark.thorough
def test_a_whole_quick_run(folder, tmp_path, capsys):
    arguments = ["--quick", "--rows", "dense", "top 10%", "--tasks", "cifar", "--nodes", "1", "--data-dir", str(folder)]
    arguments += ["--output", str(tmp_path / "out"), "--markdown", str(tmp_path / "page.md")]
    assert main(EXPERIMENT, arguments) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [group["name"] for group in summary["groups"]] == ["dense", "top 10%"]
    page = (tmp_path / "page.md").read_text()
    assert "| top 10% |" in page
    assert "(pictures/page/table-2.png)" in page
    assert (tmp_path / "pictures" / "page" / "table-2.png").read_bytes().startswith(b"\x89PNG")
    assert "cifar top 10%, seed 0" in capsys.readouterr().out


# ---- claims, tables, pictures ----------------------------------------------------------------------------------------


LONG = model_parallel._LONG.epochs


def made_up(*, long=False, **changes):
    """Every row with the paper's numbers, or with others: name=(with compression, without). Of one length of images."""
    rows = []
    for said in (
        said for key, own in model_parallel._TABLES.items() for said in own if (key == "near convergence") == long
    ):
        row = said.row
        on, off = said.compressed, said.uncompressed
        if on is None:  # of a row that the paper does not have
            on, off = (21.0, None) if row.task == "gpt" else (90.0, 80.0 if "on gradients" in row.name else 90.0)
        on, off = changes.get(f"{row.task} {row.name}", (on, off))
        if any((row.task, row.name) == (other["task"], other["name"]) for other in rows):
            continue  # the dense row belongs to several tables
        rows.append(
            {
                "task": row.task,
                "name": row.name,
                "spec": f"{row.forward} forward, {row.backward} backward",
                "seed": 0,
                "metric": "test accuracy, %" if row.task == "cifar" else "held-out perplexity",
                "higher_is_better": row.task == "cifar",
                "epochs": row.epochs,
                "nodes": 1,
                "parameters": 75_290,
                "score": on,
                "uncompressed_score": off,
                "boundaries": [[7.1, 8.0], [7.1, 8.0], [7.0, 8.0]],
                "sent_bytes_per_step": 4000.0,
                "ratio": 7.0,
                "payload_ratio": None,
                "matrix_ratio": None,
                "step_s": 0.1,
                "steps": 10 * row.epochs,
                "curve": [[step, 2.0 - step / 100] for step in range(1, 10 * row.epochs)],
            }
        )  # fmt: skip
    return rows


def both_seeds(rows, *, apart=0.0):
    """The second seed's scores are higher by ``apart``."""
    return rows + [
        row | {"seed": 1} | {key: row[key] and row[key] + apart for key in ("score", "uncompressed_score")}
        for row in rows
    ]


CLAIMS = (
    "activations in 4 bits",
    "of six bits",
    "top 10% is within",
    "are evaluated without it",
    "error feedback is not better",
    "error feedback on gradients alone is not better",
    "with EF and EF21",
    "AQ-SGD",
    "gradients of the elements that went forward",
    "within 7% of dense perplexity",
    "raises the held-out loss",
    "language model, 8 bits:",
    "language model, 8 bits, gradients 4:",
    "language model, 8 bits, gradients 2 rotated:",
    "language model, 8 bits, gradients 1 rotated:",
    "language model, 4 bits:",
    "language model, 4 bits rotated:",
    "language model, top 10% from the start:",
)
LONG_CLAIMS = (
    "activations in 4 bits",
    "top 10% is within",
    "models trained with top 10% or less",
    "error feedback is not better",
    "error feedback on gradients alone is not better",
    "with EF and EF21",
    "error feedback on gradients alone, as in",
    "AQ-SGD",
)


def verdicts(rows, texts=CLAIMS):
    claims = EXPERIMENT.claims(groups(both_seeds(rows)))
    return {text: claim.held for text in texts for claim in claims if text in claim.text}


def test_the_papers_numbers_are_what_the_paper_claims():
    claims = EXPERIMENT.claims(groups(both_seeds(made_up())))
    assert verdicts(made_up()) == dict.fromkeys(CLAIMS, True)
    assert len(claims) == len(CLAIMS)
    (claim,) = [claim for claim in claims if "AQ-SGD" in claim.text]
    assert "AQ-SGD + top 20% 87.80, dense 93.00: -5.20 ± 0.00 (seeds 0, 1)" in claim.figures
    assert "the paper: AQ-SGD + top 50% 92.54, off 92.44" in claim.figures


def test_rows_near_convergence_have_claims_of_their_own():
    long = both_seeds(made_up(long=True))
    claims = EXPERIMENT.claims(groups(long))
    assert [claim.held for claim in claims] == [True] * 8 + [None] * 10
    assert all(claim.text.endswith(f", after {LONG} epochs") for claim in claims[:8])
    both = EXPERIMENT.claims(groups(long + both_seeds(made_up())))
    assert [claim.held for claim in both] == [True] * 26
    assert sum(", after 5 epochs" in claim.text for claim in both) == 8


@pytest.mark.parametrize(
    ("claim", "row", "scores"),
    [
        ("activations in 4 bits", "cifar fw4-bw8", (90.9, 91.0)),
        ("top 10% is within", "cifar top 5%", (91.1, 70.0)),
        ("models trained with top 10% or less", "cifar top 5%", (90.0, 83.5)),
        ("error feedback is not better", "cifar EF21 + top 10%", (92.4, 92.4)),
        ("with EF and EF21", "cifar EF + top 10%, warm-up", (91.0, 88.9)),
        ("error feedback on gradients alone, as in", "cifar EF on gradients + top 10%, warm-up", (90.0, 89.0)),
        ("error feedback on gradients alone is not better", "cifar EF on gradients + top 10%, warm-up", (92.5, 80.0)),
        ("AQ-SGD", "cifar AQ-SGD + top 30%", (90.9, 90.9)),
    ],
)
def test_other_numbers_near_convergence_are_not(claim, row, scores):
    found = verdicts(made_up(long=True, **{row: scores}), LONG_CLAIMS)
    assert found[claim] is False
    assert sum(held is False for held in found.values()) == 1


def test_noise_between_seeds_leaves_a_claim_open():
    """Top 10 % is 1.13 points below dense: within 2 points if both seeds say so, and open if they do not."""
    rows = made_up(long=True)
    second = [row | {"seed": 1, "score": row["score"] + (3.0 if row["name"] == "top 10%" else 0.0)} for row in rows]
    claims = EXPERIMENT.claims(groups(rows + second))
    (claim,) = [claim for claim in claims if "top 10% is within" in claim.text]
    assert claim.verdict() == "not resolved"
    (claim,) = [claim for claim in EXPERIMENT.claims(groups(rows)) if "top 10% is within" in claim.text]
    assert claim.verdict() == "not resolved", "of one seed"
    spread = [
        row | {"seed": seed, "score": row["score"] + 0.01 * seed}
        for row in rows
        if row["name"] == "dense"
        for seed in (1, 2)
    ]
    (claim,) = [claim for claim in EXPERIMENT.claims(groups(rows + spread)) if "top 10% is within" in claim.text]
    assert claim.verdict() == "held", "of one seed, and three without compression"


@pytest.mark.parametrize(
    ("claim", "row", "scores"),
    [
        ("activations in 4 bits", "cifar fw4-bw8", (90.9, 91.0)),
        ("activations in 4 bits", "cifar fw4-bw8", (None, None)),
        ("activations in 4 bits", "cifar fw4-bw4", (91.1, 91.0)),
        ("activations in 4 bits", "cifar fw4-bw2", (93.5, 91.0)),
        ("of six bits", "cifar fw4-bw2", (84.0, 84.0)),
        ("of six bits", "cifar fw2-bw4", (None, None)),
        ("top 10% is within", "cifar top 10%", (90.9, 70.0)),
        ("top 10% is within", "cifar top 5%", (91.1, 70.0)),
        ("are evaluated without it", "cifar top 10%", (91.87, 85.0)),
        ("are evaluated without it", "cifar top 2%", (85.0, 79.0)),
        ("error feedback is not better", "cifar EF-mixed + top 10%, warm-up", (92.4, 61.0)),
        ("error feedback is not better", "cifar EF21 + top 5%", (90.6, 89.0)),
        ("with EF and EF21", "cifar EF21 + top 10%", (91.0, 88.9)),
        ("with EF and EF21", "cifar EF + top 10%, warm-up", (88.9, 91.0)),
        ("with EF and EF21", "cifar EF21 + top 5%", (10.0, 10.0)),
        ("with EF and EF21", "cifar EF21 + top 5%", (None, None)),
        ("AQ-SGD", "cifar AQ-SGD + top 30%", (90.9, 90.9)),
        ("AQ-SGD", "cifar AQ-SGD + top 20%", (91.1, 90.9)),
        ("gradients of the elements that went forward", "tuned top 10% separate", (74.0, None)),
        ("gradients of the elements that went forward", "tuned top 10%", (None, None)),
        ("within 7% of dense perplexity", "tuned top 50%", (22.5, None)),
        ("within 7% of dense perplexity", "tuned top 50%", (None, None)),
        ("raises the held-out loss", "tuned top 20%", (28.0, None)),
        ("language model, 8 bits:", "gpt 8 bits", (22.5, None)),
        ("language model, 8 bits, gradients 4:", "gpt 8 bits, gradients 4", (22.5, None)),
        ("language model, 4 bits:", "gpt 4 bits", (None, None)),
    ],
)
def test_other_numbers_are_not(claim, row, scores):
    assert verdicts(made_up(**{row: scores}))[claim] is False


def test_a_separate_choice_that_diverges_is_worse():
    assert verdicts(made_up(**{"tuned top 10% separate": (None, None)}))["gradients of the elements that went forward"]


def test_error_feedback_that_wants_compression_may_be_mixed():
    assert verdicts(made_up(**{"cifar EF-mixed + top 10%, warm-up": (90.0, 20.0)}))["with EF and EF21"]


def test_claims_without_their_rows_are_not_tested():
    dense = [row for row in made_up() if row["name"] == "dense"]
    assert verdicts(dense) == dict.fromkeys(CLAIMS)


def test_every_row_is_in_its_table_beside_the_paper():
    found = groups(made_up() + made_up(long=True))
    tables = dict(EXPERIMENT.layout.tables(found))
    assert set(tables) == set(EXPERIMENT.titles)
    places = {key: [(group.task, group.name, group.epochs) for group in own] for key, own in tables.items()}
    assert {place for own in places.values() for place in own} == {
        (group.task, group.name, group.epochs) for group in found
    }
    assert {epochs for _, _, epochs in places["near convergence"]} == {LONG}
    assert all(epochs < LONG for key in places for _, _, epochs in places[key] if key != "near convergence")
    assert all(own[0].name == "dense" for own in tables.values())
    page = markdown(
        found, EXPERIMENT.titles, EXPERIMENT.claims(found), EXPERIMENT.layout,
        opening=EXPERIMENT.opening, paper=EXPERIMENT.paper, page="page",
        record={"machine": {"cores": 2, "cpu": "x"}, "versions": {"torch": "2"}, "command": "c"}, commits=["0"],
    )  # fmt: skip
    assert "| EF21 + top 5% | 89.37 | 89.29 | -3.71 | 89.37/89.29 | 7.0–7.1 | 8.0 |" in page
    assert "| fw4-bw4 in groups | 90.00 | 90.00 | -3.00 | –/– |" in page
    assert "| top 50% | – | 22.38 | +1.37 | 22.38 | 7.0–7.1 | 8.0 |" in page
    assert f"`{TOP} forward, topk:density=0.1,reuse=forward backward`: *top 10%*" in page
    assert f"`{TOP} forward, {TOP}+ef backward`" in page
    assert f"`{TOP}+ef-mixed:sends=parts forward, {TOP}+ef-mixed:sends=parts backward`" in page
    assert "`uniform:bits=4,scope=tensor forward, uniform:bits=8,scope=tensor backward`: *fw4-bw8*" in page
    assert page.count("| --- | ---: |") == 7
    assert "## The paper's tables and figures" in page


def test_the_page_says_which_rows_are_near_convergence():
    def covers(rows):
        return dict(EXPERIMENT.opening.covers(groups(rows)))["table 3 and figure 4, error feedback"]

    long = made_up(long=True)
    assert covers(made_up() + long).endswith(
        "; near convergence, too: EF with top 10%, EF on gradients with top 10%, EF21 with top 10%"
    )
    some = [row for row in long if row["name"] in ("dense", "EF + top 10%, warm-up")]
    assert covers(made_up() + some).endswith(
        "; near convergence, too: EF with top 10%; not near convergence yet: EF on gradients with top 10%, EF21 with "
        "top 10%"
    )


def test_what_came_out_is_told_beside_the_uncompressed_row_of_the_same_seeds():
    found = groups(made_up())
    said = EXPERIMENT.opening.found(found)
    few, eight = (
        next(group for group in found if (group.task, group.name) == place)
        for place in (("cifar", "fw4-bw8"), ("gpt", "8 bits"))
    )
    assert f"differs from that by {few.versus_dense()} with 4 bits forward and 8 back." in said
    assert f"{eight.score()} with 8 bits both ways ({eight.versus_dense()})" in said
    near = EXPERIMENT.opening.found(groups(made_up() + made_up(long=True)))
    assert near.startswith("Near convergence accuracy is ")


def test_tables_that_have_only_the_dense_row_are_left_out():
    rows = [row for row in made_up() if row["name"] in ("dense", "top 10%") and row["task"] == "cifar"]
    assert [key for key, _ in EXPERIMENT.layout.tables(groups(rows))] == ["table 2"]


def test_tables_fit_a_terminal():
    console = Console(width=80, record=True)
    rows = both_seeds(made_up(), apart=0.5) + both_seeds(made_up(long=True), apart=0.5)
    for drawn in table(groups(rows), EXPERIMENT.titles, EXPERIMENT.layout):
        console.print(drawn)
    text = console.export_text()
    assert "EF-mixed parts" in text
    assert "…" not in text


def test_a_picture_per_table(tmp_path):
    rows = both_seeds(made_up() + made_up(long=True))
    names = {path.name for path in model_parallel._draw(rows, tmp_path)}
    assert names == {"link.png", "near-convergence.png", *(f"table-{number}.png" for number in range(1, 6))}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_near_convergence_are_the_papers_but_for_their_length_and_come_on_request():
    rows = chosen(EXPERIMENT, Options(long=True))
    short = chosen(EXPERIMENT, Options())
    long = [row for row in rows if row not in short]
    assert rows[: len(short)] == short, "they come last"
    names = ["dense", "fw4-bw8", "top 10%", "top 5%", "EF + top 10%, warm-up", "EF on gradients + top 10%, warm-up"]
    names += ["EF21 + top 10%", "AQ-SGD + top 30%"]
    assert [(row.name, row.seed) for row in long] == [(name, seed) for seed in (0, 1) for name in names]
    for row in long:
        assert (row.optimizer, row.lr, row.momentum, row.weight_decay, row.batch) == ("sgd", 0.01, 0.9, 5e-4, 100)
        assert (row.epochs, row.schedule, row.limit) == (30, "half-cosine", None)
    warm_up = {row.name: row.warmup_epochs for row in long}
    assert warm_up["EF + top 10%, warm-up"] == warm_up["EF on gradients + top 10%, warm-up"] == 30 * 20 // 100
    assert warm_up["AQ-SGD + top 30%"] == 30 * 10 // 100
    assert warm_up["EF21 + top 10%"] == 0


def test_fine_tuning_is_paired_and_rows_without_compression_have_a_spread():
    rows = chosen(EXPERIMENT, Options())
    seeds = {task: {} for task in ("cifar", "tuned", "gpt")}
    for row in rows:
        seeds[row.task].setdefault(row.name, []).append(row.seed)
    assert all(own == [0, 1] for own in seeds["tuned"].values())
    assert seeds["cifar"].pop("dense") == seeds["gpt"].pop("dense") == [0, 1, 2]
    assert all(own == [0] for own in (*seeds["cifar"].values(), *seeds["gpt"].values()))
    assert len(rows) == len(set(rows))


def test_error_feedback_on_gradients_alone_leaves_activations_to_plain_top_k():
    rows = {row.name: row for row in chosen(EXPERIMENT, Options()) if row.task == "cifar"}
    own, both, plain = (rows[name] for name in (
        "EF on gradients + top 10%, warm-up", "EF + top 10%, warm-up", "top 10%"
    ))  # fmt: skip
    assert (own.forward, own.backward) == (plain.forward, both.backward)
    assert own.backward == f"{plain.backward}+ef"
