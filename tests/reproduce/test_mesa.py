from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

import narrowband as nb
from reproduce import mesa
from reproduce.activations import Activations, read_policy
from reproduce.command import Options, chosen, main
from reproduce.report import groups, markdown, table
from reproduce.tasks import Patches
from reproduce.training import Row, run
from tests.reproduce.synthetic import write_all

EXPERIMENT = mesa.EXPERIMENT
BATCH, EPOCHS = 32, 2
BLOCKS, HEADS, TOKENS, DIM = 5, 3, 65, 48

PLAIN = Row("vit", "plain", "none", optimizer="adamw", epochs=EPOCHS, batch=BATCH, lr=2e-3, limit=160)
ROWS = {
    "plain": PLAIN,
    "off": replace(PLAIN, name="off", activations='{"bits": "off"}'),
    "mesa": replace(PLAIN, name="mesa", activations='{"bits": 8}', trace=True),
    "2 bits": replace(PLAIN, name="2 bits", activations='{"bits": 2}'),
    "broken": replace(PLAIN, name="broken", activations='{"bits": 8}', lr=1e30, epochs=1),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    there = tmp_path_factory.mktemp("data")
    write_all(there)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(there / "cache"))
        yield there


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """Their directory, what rows came to, and what was told: the plain row by one rank, the others by two processes."""
    directory, events = tmp_path_factory.mktemp("results"), []
    (plain,) = run([ROWS["plain"]], directory, nodes=1, data_dir=folder)
    rows = run(
        [ROWS[name] for name in ROWS if name != "plain"], directory, nodes=2, data_dir=folder, on_event=events.append
    )
    return directory, {row["name"]: row for row in (plain, *rows)}, events


def vit():
    return Patches(BATCH, 0, 0, 1, images=None).model()


# ---- training --------------------------------------------------------------------------------------------------------


def test_a_policy_that_is_off_changes_nothing_and_counts(finished):
    _, rows, _ = finished
    assert rows["off"]["curve"] == rows["plain"]["curve"]
    assert rows["off"]["score"] == rows["plain"]["score"] > 20  # ten classes
    assert rows["off"]["kept_bytes"] == rows["off"]["plain_bytes"] == rows["mesa"]["plain_bytes"]
    assert rows["off"]["gradient_error"] == 0
    assert "plain_bytes" not in rows["plain"]


def test_the_first_forward_is_exact_and_the_second_step_is_not(finished):
    """Quantization is in backward alone."""
    _, rows, _ = finished
    assert rows["mesa"]["curve"][0] == rows["off"]["curve"][0]
    assert rows["mesa"]["curve"][1] != rows["off"]["curve"][1]


def test_bytes_are_those_of_the_operators_shapes(finished):
    _, rows, _ = finished
    heads, scores = BLOCKS * BATCH * HEADS, TOKENS * TOKENS
    hidden = BLOCKS * BATCH * TOKENS * 4 * DIM
    norms = (2 * BLOCKS + 1) * BATCH * TOKENS
    for bits, row in ((8, rows["mesa"]), (2, rows["2 bits"])):
        assert row["by_operator"]["softmax"] == [4 * heads * scores, heads * math.ceil(scores * bits / 8)]
        assert row["by_operator"]["gelu"] == [4 * hidden, hidden * bits // 8]
        # The residual stream in 8 bits; mean and deviation as they are.
        assert row["by_operator"]["layer_norm"] == [4 * norms * (DIM + 2), norms * DIM + 4 * norms * 2]
        for at, name in enumerate(("plain_bytes", "kept_bytes")):
            assert row[name] == sum(both[at] for both in row["by_operator"].values())
    assert rows["off"]["by_operator"]["softmax"] == [4 * heads * scores, 4 * heads * scores]


def test_fewer_bits_are_further_from_the_exact_gradient(finished):
    _, rows, _ = finished
    assert 0 < rows["mesa"]["gradient_error"] < 0.05 < rows["2 bits"]["gradient_error"]


def test_a_row_that_diverges_is_a_row_too(finished):
    _, rows, _ = finished
    assert rows["broken"]["gradient_error"] is None
    assert rows["broken"]["curve"][-1][1] is None
    json.dumps(rows, allow_nan=False)


def test_ranges_are_noted_of_three_blocks_where_that_is_asked_for(finished):
    _, rows, _ = finished
    assert [name for name, row in rows.items() if "ranges" in row] == ["mesa"]
    ranges = rows["mesa"]["ranges"]
    assert ranges["blocks"] == ["blocks.0", "blocks.2", "blocks.4"]
    assert ranges["steps"] == list(range(1, rows["mesa"]["steps"] + 1))  # no more than 50
    assert ranges["alpha"].keys() == ranges["beta"].keys()
    assert {
        block + tensor for block in ranges["blocks"] for names in mesa._PICTURES.values() for tensor in names.values()
    } <= (ranges["alpha"].keys())
    for part in ("alpha", "beta"):
        for values in ranges[part].values():
            assert [len(groups_of) for groups_of in values] == [3] * len(ranges["steps"])
            assert values[0] != values[-1]
    for block in ranges["blocks"]:
        for queries, keys in zip(*(ranges["alpha"][f"{block}.scores:matmul:{s}"] for s in (1, 0)), strict=True):
            assert queries != keys
        assert all(low >= 0 for values in ranges["beta"][f"{block}:softmax:0"] for low in values)
        assert all(low > -0.1701 for values in ranges["beta"][f"{block}.down:matmul:0"] for low in values)


def test_a_long_run_is_noted_at_fifty_points():
    watched = Activations(nb.ActivationPolicy(), vit(), 1500, trace=True)
    for step in range(1, 1501):
        watched.note(step)
    assert [step for step, _ in watched._noted] == list(range(30, 1501, 30))


def test_every_row_is_trained_once_by_one_process(finished):
    _, rows, events = finished
    names = [name for name in ROWS if name != "plain"]
    assert sorted(event["row"] for event in events if event["event"] == "row") == list(range(len(names)))
    for number, name in enumerate(names):
        told = [event for event in events if event["row"] == number]
        assert [event["metric"] for event in told if event["event"] == "epoch"] == rows[name]["scores"]
        assert told[-1]["result"] == rows[name]
        assert rows[name]["nodes"] == 1
        assert rows[name]["samples_per_s"] == pytest.approx(BATCH / rows[name]["step_s"])


def test_finished_rows_are_taken_and_missing_ones_trained_to_the_same_bits(finished, folder):
    directory, rows, _ = finished
    (missing,) = (directory / "rows").glob("vit-mesa-*.json")
    missing.unlink()
    events = []
    again = run([ROWS["2 bits"], ROWS["mesa"]], directory, nodes=1, data_dir=folder, on_event=events.append)
    assert {event["row"] for event in events if event["event"] == "step"} == {1}
    assert again[0] == rows["2 bits"]
    for what in ("scores", "curve", "ranges", "by_operator", "gradient_error"):
        assert again[1][what] == rows["mesa"][what]
    assert missing.exists()


def test_a_whole_quick_run(folder, tmp_path, capsys):
    arguments = ["--quick", "--nodes", "1", "--data-dir", str(folder)]
    arguments += ["--output", str(tmp_path / "out"), "--markdown", str(tmp_path / "page.md")]
    assert main(EXPERIMENT, arguments) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [group["name"] for group in summary["groups"]] == ["dense", "mesa"]
    assert all("ranges" not in row for row in summary["rows"])  # which are long, and in the rows' files
    page = (tmp_path / "page.md").read_text()
    assert page.count("| --- |") == 1
    assert '- mesa: `{"bits": 8}`' in page
    for name in ("figure-7", "figure-8"):
        assert (tmp_path / "pictures" / "page" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "vit mesa, seed 0" in capsys.readouterr().out


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_policies_fit_the_model_and_are_what_the_paper_varies():
    model = vit()
    names = [name for name, _ in model.named_modules()]
    policies = {}
    for row in chosen(EXPERIMENT, Options()):
        policies[row.name] = read_policy(row.activations)
        policies[row.name].check(names)
    assert policies["mesa"] == nb.ActivationPolicy(derive=False)
    assert policies["dense"].is_off
    for name, field in {
        "per sample": "statistics", "nearest": "rounding", "symmetric": "symmetric", "per layer": "granularity",
        "decay 0.999": "decay", "4 bits": "bits",
    }.items():  # fmt: skip
        assert set(policies[name].to_dict()) == {field, "derive"}
    assert policies["8 bits, derived"] == nb.ActivationPolicy()
    assert policies["softmax + gelu"].operators == {"softmax": 8, "gelu": 8}


def test_modules_are_all_of_a_block_but_its_norms():
    """Where a block saves what, and who takes it."""
    parts = {
        "attention": [*(("matmul", f".{part}") for part in ("qkv", "scores", "mix", "proj")), ("softmax", "")],
        "feed-forward": [("matmul", ".up"), ("gelu", ""), ("matmul", ".down")],
        "neither": [("layer_norm", ".norm1"), ("layer_norm", ".norm2")],
    }
    places = {
        name: {(operator, f"blocks.{at}{part}") for operator, part in own for at in range(BLOCKS)}
        for name, own in parts.items()
    }
    everywhere = set().union(*places.values()) | {("layer_norm", "norm"), ("matmul", "head"), ("conv", "patches")}
    taken = {}
    for said in mesa._MODULES:
        policy = read_policy(said.row.activations)
        taken[said.row.name] = {place for place in everywhere if policy.bits_for(*place) == 8}
    assert taken["attention"] == places["attention"]
    assert taken["feed-forward"] == places["feed-forward"]
    assert taken["both modules"] == places["attention"] | places["feed-forward"]


def test_only_what_claims_compare_most_has_several_seeds():
    rows = chosen(EXPERIMENT, Options(seeds=(0, 1, 2)))
    assert [(row.name, row.seed) for row in rows[:6]] == [
        (name, seed) for seed in (0, 1, 2) for name in ("dense", "mesa")
    ]
    assert {row.seed for row in rows[6:]} == {0}
    assert len({row.name for row in rows}) == len(rows) - 4 == len(mesa._SAID)


# ---- claims, tables, pictures ----------------------------------------------------------------------------------------

PLAIN_BYTES = 128_000_000
#: Accuracy, share of bytes, images in a second: numbers with which every claim holds.
NUMBERS = {
    "dense": (60.0, 1.0, 500.0),
    "mesa": (60.2, 0.25, 350.0),
    "4 bits": (59.0, 0.13, 350.0),
    "4 bits, norms too": (57.0, 0.12, 350.0),
    "2 bits": (50.0, 0.06, 350.0),
    "8 bits, derived": (60.1, 0.16, 340.0),
    "4 bits, derived": (59.2, 0.09, 340.0),
    "per sample": (60.1, 0.27, 340.0),
    "nearest": (60.0, 0.25, 360.0),
    "symmetric": (59.9, 0.25, 360.0),
    "per layer": (59.8, 0.25, 360.0),
    "decay 0": (60.0, 0.25, 350.0),
    "decay 0.5": (60.1, 0.25, 350.0),
    "decay 0.99": (60.0, 0.25, 350.0),
    "decay 0.999": (40.0, 0.25, 350.0),
    "matmul": (60.0, 0.67, 400.0),
    "gelu": (60.0, 0.85, 450.0),
    "layer norm": (60.0, 0.92, 450.0),
    "softmax": (60.0, 1.05, 450.0),
    "softmax + gelu": (60.0, 0.9, 420.0),
    "gelu + layer norm": (60.0, 0.77, 420.0),
    "attention": (60.0, 0.66, 400.0),
    "feed-forward": (60.0, 0.67, 420.0),
    "both modules": (60.0, 0.33, 370.0),
}

CLAIMS = (
    "within 0.5 points of dense",
    "at most 50% of the bytes",
    "results computed again",
    "at least 50% as fast",
    "running estimates",
    "rounding to the nearest",
    "symmetric ranges",
    "one range per layer",
    "no other decay",
    "a large decay hurts",
    "operators one by one",
    "attention and feed-forward",
)


def made_up(**changes):
    rows = []
    for name, numbers in NUMBERS.items():
        score, share, speed = changes.get(name, numbers)
        row = mesa._SAID[name].row
        rows.append(
            {
                "task": "vit",
                "name": name,
                "spec": row.activations,
                "seed": 0,
                "metric": "test accuracy, %",
                "higher_is_better": True,
                "epochs": row.epochs,
                "nodes": 1,
                "parameters": 147_466,
                "score": score,
                "sent_bytes_per_step": 0.0,
                "ratio": None,
                "payload_ratio": None,
                "matrix_ratio": None,
                "step_s": 100 / speed,
                "samples_per_s": speed,
                "plain_bytes": PLAIN_BYTES,
                "kept_bytes": int(share * PLAIN_BYTES),
                "gradient_error": 0.0 if name == "dense" else 0.0123,
            }
        )
    return rows


def verdicts(rows):
    claims = EXPERIMENT.claims(groups([row | {"seed": seed} for seed in (0, 1) for row in rows]))
    assert len(claims) == len(CLAIMS)
    return {text: claim.held for text, claim in zip(CLAIMS, claims, strict=True) if text in claim.text}


def test_numbers_as_the_paper_describes_them_hold_every_claim():
    assert verdicts(made_up()) == dict.fromkeys(CLAIMS, True)
    assert set(NUMBERS) == set(mesa._SAID)
    (claim,) = [claim for claim in EXPERIMENT.claims(groups(made_up())) if "running estimates" in claim.text]
    assert "mesa 60.20, 25.0% of bytes, gradient off by 1.2%, 350 images/s" in claim.figures


@pytest.mark.parametrize(
    ("claim", "row", "numbers"),
    [
        ("within 0.5 points of dense", "mesa", (59.4, 0.25, 350.0)),
        ("within 0.5 points of dense", "mesa", (None, 0.25, 350.0)),
        ("at most 50% of the bytes", "mesa", (60.2, 0.51, 350.0)),
        ("results computed again", "8 bits, derived", (58.4, 0.16, 340.0)),
        ("results computed again", "8 bits, derived", (60.1, 0.25, 340.0)),
        ("at least 50% as fast", "mesa", (60.2, 0.25, 249.0)),
        ("running estimates", "per sample", (60.8, 0.27, 340.0)),
        ("running estimates", "per sample", (60.0, 0.25, 340.0)),
        ("rounding to the nearest", "nearest", (58.4, 0.25, 360.0)),
        ("rounding to the nearest", "nearest", (None, 0.25, 360.0)),
        ("symmetric ranges", "symmetric", (60.3, 0.25, 360.0)),
        ("symmetric ranges", "mesa", (59.9, 0.25, 350.0)),
        ("symmetric ranges", "dense", (59.3, 1.0, 500.0)),
        ("one range per layer", "per layer", (60.2, 0.25, 360.0)),
        ("one range per layer", "per layer", (59.8, 0.26, 360.0)),
        ("one range per layer", "dense", (59.2, 1.0, 500.0)),
        ("no other decay", "decay 0.5", (60.8, 0.25, 350.0)),
        ("no other decay", "mesa", (None, 0.25, 350.0)),
        ("a large decay hurts", "decay 0.999", (58.3, 0.25, 350.0)),
        ("operators one by one", "layer norm", (58.4, 0.92, 450.0)),
        ("operators one by one", "matmul", (60.0, 0.25, 400.0)),
        ("attention and feed-forward", "attention", (60.0, 0.68, 400.0)),
        ("attention and feed-forward", "both modules", (60.0, 0.7, 370.0)),
        ("attention and feed-forward", "both modules", (58.4, 0.33, 370.0)),
    ],
)
def test_other_numbers_do_not(claim, row, numbers):
    assert verdicts(made_up(**{row: numbers}))[claim] is False


def test_a_large_decay_that_diverges_hurts():
    assert verdicts(made_up(**{"decay 0.999": (None, 0.25, 350.0)}))["a large decay hurts"]


def test_claims_without_their_rows_are_not_tested():
    dense = [row for row in made_up() if row["name"] == "dense"]
    assert verdicts(dense) == dict.fromkeys(CLAIMS)


def test_every_row_is_in_its_table_beside_the_paper():
    found = groups(made_up())
    tables = dict(EXPERIMENT.layout.tables(found))
    assert set(tables) == set(EXPERIMENT.titles)
    assert {group.name for own in tables.values() for group in own} == set(NUMBERS)
    assert all([group.name for group in own[:2]] == ["dense", "mesa"] for own in tables.values())
    page = markdown(
        found, EXPERIMENT.titles, EXPERIMENT.claims(found), EXPERIMENT.layout,
        opening=EXPERIMENT.opening, paper=EXPERIMENT.paper, page="page",
        record={"machine": {"cores": 2, "cpu": "x"}, "versions": {"torch": "2"}, "command": "c"}, commits=["0"],
    )  # fmt: skip
    assert "| dense | 60.00 | 0.0% | 128 MB | 100% | 500 | 71.9/–/– |" in page
    assert "| mesa | 60.20 | 1.2% | 32 MB | 25% | 350 | 72.1/45/50 |" in page
    assert "| attention | 60.00 | 1.2% | 84.5 MB | 66% | 400 | –/73/– |" in page
    assert "| nearest | 60.00 | 1.2% | 32 MB | 25% | 360 | –/–/– |" in page
    assert page.count("| --- |") == len(EXPERIMENT.titles)


def test_tables_without_a_row_of_their_own_are_left_out():
    rows = [row for row in made_up() if row["name"] in ("dense", "mesa", "gelu")]
    assert [key for key, _ in EXPERIMENT.layout.tables(groups(rows))] == ["table 1", "table 7"]


def test_tables_fit_a_terminal():
    rows = made_up() + [row | {"seed": 1, "score": row["score"] - 1.5} for row in made_up()]
    console = Console(width=80, record=True)
    for drawn in table(groups(rows), EXPERIMENT.titles, EXPERIMENT.layout):
        console.print(drawn)
    text = console.export_text()
    assert "gelu + layer norm  59.25 ± 1.06" in text
    assert "…" not in text


def test_without_ranges_nothing_is_drawn(tmp_path):
    assert mesa._draw(made_up(), tmp_path) == []
