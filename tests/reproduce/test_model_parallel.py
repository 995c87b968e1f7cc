from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from rich.console import Console

import narrowband as nb
from reproduce import model_parallel
from reproduce.command import main
from reproduce.report import groups, markdown, table
from reproduce.tasks import load
from reproduce.training import Row, run, train
from tests.ranks import run_ranks
from tests.reproduce.synthetic import write_all

EXPERIMENT = model_parallel.EXPERIMENT
BATCH = 32
EPOCHS = 3
#: What crosses the boundaries of a ResNet-8.
SHAPES = [(BATCH, 16, 32, 32), (BATCH, 32, 16, 16), (BATCH, 64, 8, 8)]

DENSE = Row("cifar", "dense", "none", epochs=EPOCHS, batch=BATCH, lr=0.05, limit=160, forward="none", backward="none")
TOP = "topk:density=0.1,scope=sample"
ROWS = {
    "uncut": replace(DENSE, name="uncut", forward="", backward=""),
    "dense": DENSE,
    "top-k": replace(DENSE, name="top-k", forward=TOP, backward=TOP, warmup_epochs=1),
    "ef21": replace(DENSE, name="ef21", forward=f"{TOP}+ef21", backward=f"{TOP}+ef21"),
    "by sample": replace(DENSE, name="by sample", forward="topk:density=0.1+aq-sgd:store=fp16", backward=TOP),
    "reuse": replace(
        DENSE, task="gpt", name="reuse", optimizer="adamw", lr=1e-3, epochs=4, batch=2, limit=400,
        forward="topk:density=0.1", backward="topk:density=0.1,reuse=forward",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    there = tmp_path_factory.mktemp("data")
    write_all(there)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(there / "cache"))
        yield there


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
    """From the second epoch on no image travels in full."""
    _, rows, _ = finished
    for (forward, _), shape in zip(rows["by sample"]["boundaries"], SHAPES, strict=True):
        one = shape[1:]
        assert forward == pytest.approx(4 * one[0] * one[1] * one[2] / nb.codec("topk:density=0.1").payload_nbytes(one))


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
        assert told[-1]["result"] == rows[name]
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


def made_up(**changes):
    """Every row with the paper's numbers, or with others: name=(with compression, without)."""
    rows = []
    for said in model_parallel._SAID.values():
        row = said.row
        on, off = said.compressed, said.uncompressed
        if on is None:  # of a row that the paper does not have
            on, off = (21.0, None) if row.task == "gpt" else (90.0, 90.0)
        on, off = changes.get(f"{row.task} {row.name}", (on, off))
        rows.append(
            {
                "task": row.task,
                "name": row.name,
                "spec": f"{row.forward} forward, {row.backward} backward",
                "seed": 0,
                "metric": "held-out perplexity" if row.task == "gpt" else "test accuracy, %",
                "higher_is_better": row.task != "gpt",
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
        )
    return rows


CLAIMS = (
    "activations in 4 bits",
    "of six bits",
    "top 10% is within",
    "are evaluated without it",
    "error feedback is not better",
    "with EF and EF21",
    "AQ-SGD",
    "gradients of the elements that went forward",
    "within 7% of dense perplexity",
    "language model, 8 bits:",
    "language model, 8 bits, gradients 4:",
    "language model, 4 bits:",
    "language model, top 10% from the start:",
)


def verdicts(rows):
    claims = EXPERIMENT.claims(groups([row | {"seed": seed} for seed in (0, 1) for row in rows]))
    return {text: claim.held for text in CLAIMS for claim in claims if text in claim.text}


def test_the_papers_numbers_are_what_the_paper_claims():
    claims = EXPERIMENT.claims(groups(made_up()))
    assert verdicts(made_up()) == dict.fromkeys(CLAIMS, True)
    (claim,) = [claim for claim in claims if "AQ-SGD" in claim.text]
    assert "AQ-SGD + top 20% 87.80, off 90.82" in claim.figures
    assert "the paper: AQ-SGD + top 50% 92.54, off 92.44" in claim.figures


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
        ("gradients of the elements that went forward", "gpt top 10% separate", (74.0, None)),
        ("gradients of the elements that went forward", "gpt top 10%", (None, None)),
        ("within 7% of dense perplexity", "gpt top 50%", (22.5, None)),
        ("within 7% of dense perplexity", "gpt top 50%", (None, None)),
        ("language model, 8 bits:", "gpt 8 bits", (22.5, None)),
        ("language model, 8 bits, gradients 4:", "gpt 8 bits, gradients 4", (22.5, None)),
        ("language model, 4 bits:", "gpt 4 bits", (None, None)),
    ],
)
def test_other_numbers_are_not(claim, row, scores):
    assert verdicts(made_up(**{row: scores}))[claim] is False


def test_a_separate_choice_that_diverges_is_worse():
    assert verdicts(made_up(**{"gpt top 10% separate": (None, None)}))["gradients of the elements that went forward"]


def test_error_feedback_that_wants_compression_may_be_mixed():
    assert verdicts(made_up(**{"cifar EF-mixed + top 10%, warm-up": (90.0, 20.0)}))["with EF and EF21"]


def test_claims_without_their_rows_are_not_tested():
    dense = [row for row in made_up() if row["name"] == "dense"]
    assert verdicts(dense) == dict.fromkeys(CLAIMS)


def test_every_row_is_in_its_table_beside_the_paper():
    found = groups(made_up())
    tables = dict(EXPERIMENT.layout.tables(found))
    assert set(tables) == set(EXPERIMENT.titles)
    assert {(group.task, group.name) for own in tables.values() for group in own} == {
        (group.task, group.name) for group in found
    }
    assert all(own[0].name == "dense" for own in tables.values())
    page = markdown(
        found, EXPERIMENT.titles, EXPERIMENT.claims(found), EXPERIMENT.layout,
        opening=EXPERIMENT.opening, paper=EXPERIMENT.paper, page="page",
        record={"machine": {"cores": 2, "cpu": "x"}, "versions": {"torch": "2"}, "command": "c"}, commits=["0"],
    )  # fmt: skip
    assert "| EF21 + top 5% | 89.37 | 89.29 | 89.37/89.29 | 7.0–7.1 | 8.0 | 100 ms |" in page
    assert "| fw4-bw4 in groups | 90.00 | 90.00 | –/– |" in page
    assert "| top 50% | – | 22.38 | 3.11 | 3.11/22.38 | 7.0–7.1 | 8.0 | 100 ms |" in page
    assert f"- top 10%: `{TOP} forward, topk:density=0.1,reuse=forward backward`" in page
    assert page.count("| --- |") == 6


def test_tables_that_have_only_the_dense_row_are_left_out():
    rows = [row for row in made_up() if row["name"] in ("dense", "top 10%") and row["task"] == "cifar"]
    assert [key for key, _ in EXPERIMENT.layout.tables(groups(rows))] == ["table 2"]


def test_tables_fit_a_terminal():
    console = Console(width=80, record=True)
    for drawn in table(groups(made_up()), EXPERIMENT.titles, EXPERIMENT.layout):
        console.print(drawn)
    text = console.export_text()
    assert "EF-mixed + top 10%, warm-up" in text
    assert "…" not in text


def test_a_picture_per_table(tmp_path):
    rows = made_up() + [row | {"seed": 1} for row in made_up()]
    names = {path.name for path in model_parallel._draw(rows, tmp_path)}
    assert names == {"link.png", *(f"table-{number}.png" for number in range(1, 6))}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
