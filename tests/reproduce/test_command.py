from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

import narrowband as nb
from narrowband.report.record import machine
from reproduce import dgc, lgreco, local, mesa, model_parallel, powersgd, sparsity
from reproduce.command import Options, Recipe, chosen, main
from reproduce.groups import DENSE
from reproduce.report import PER_TASK
from reproduce.row import resolved
from reproduce.training import _places
from tests.reproduce.synthetic import write_all

EXPERIMENTS = [module.EXPERIMENT for module in (dgc, lgreco, local, mesa, model_parallel, powersgd, sparsity)]


def names(rows):
    return [(row.task, row.name, row.seed) for row in rows]


def test_a_seed_of_every_row_is_trained_before_the_next():
    rows = names(chosen(dgc.EXPERIMENT, Options(seeds=(0, 1))))
    assert [seed for *_, seed in rows] == [0] * 6 + [1] * 6
    assert [name for _, name, _ in rows[:2]] == ["dense", "plain"]


def test_ablations_and_rows_with_seeds_of_their_own_keep_them():
    row = dgc.EXPERIMENT.recipes[0].row
    recipes = (
        Recipe(row),
        Recipe(replace(row, name="own"), seeds=(7,)),
        Recipe(replace(row, name="part"), ablation=True),
    )
    rows = names(chosen(replace(dgc.EXPERIMENT, recipes=recipes), Options(seeds=(0, 1), ablation_seeds=(1,))))
    told = [("dense", 0), ("dense", 1), ("part", 1), ("own", 7)]
    assert [(name, seed) for _, name, seed in rows] == told
    twice = replace(dgc.EXPERIMENT, recipes=(Recipe(row, seeds=(7,)), Recipe(row, turn=1)))
    assert [seed for *_, seed in names(chosen(twice, Options(seeds=(0, 7))))] == [7, 0]


def test_long_rows_are_trained_on_request():
    long = ("cifar", "dgc, no warm-up", 0)
    for options, there in (
        (Options(), False),
        (Options(long=True), True),
        (Options(rows=("dgc, no warm-up",)), True),
        (Options(recorded=True), True),
    ):
        assert (long in names(chosen(dgc.EXPERIMENT, options))) == there


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.module)
def test_every_row_can_be_set_up(experiment):
    rows = chosen(experiment, Options(long=True))
    assert len({(*name, row.epochs) for name, row in zip(names(rows), rows, strict=True)}) == len(rows)
    for row in rows:
        nb.compression(resolved(row, steps=100))
        assert row.epochs > 1
    assert {row.task for row in rows} == {row.task for row in rows if row.name == DENSE}
    if experiment.layout.tables is PER_TASK.tables:
        assert {row.task for row in rows} == set(experiment.titles)


def test_options_select_rows_and_set_epochs():
    rows = chosen(dgc.EXPERIMENT, Options(tasks=("lstm",), rows=("dgc",), seeds=(4,), epochs=1))
    assert names(rows) == [("lstm", "dgc", 4)]
    assert (rows[0].epochs, rows[0].warmup_epochs) == (1, 0)  # bytes are those after warm-up
    rows = chosen(dgc.EXPERIMENT, Options(tasks=("cifar",), seeds=(0,), epochs=2))
    assert [row.epochs for row in rows] == [2] * 6


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.module)
def test_a_quick_run_is_two_short_rows(experiment):
    rows = chosen(experiment, Options(quick=True))
    assert len(rows) == 2
    assert all(row.epochs == 1 and row.limit is not None and row.limit <= 20_000 for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(tasks=("mnist",)), "dgc has no 'mnist'; there are: cifar, lstm"),
        (Options(rows=("rank 1",)), "dgc has no 'rank 1'; there are: dense, plain"),
        (Options(seeds=()), "no seed"),
    ],
)
def test_what_is_not_there_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        chosen(dgc.EXPERIMENT, options)


def test_a_row_of_another_task_is_refused_and_so_is_a_task_of_long_rows_alone():
    recipe = replace(dgc.EXPERIMENT.recipes[0], long=True)
    two = tuple(replace(recipe, row=replace(recipe.row, task=task, name=task)) for task in ("cifar", "lstm"))
    own = replace(dgc.EXPERIMENT, recipes=two)
    with pytest.raises(ValueError, match="lstm: of dgc's rows there are lstm; not cifar"):
        chosen(own, Options(tasks=("lstm",), rows=("cifar",), long=True))
    with pytest.raises(ValueError, match="lstm: dgc has rows of --long alone"):
        chosen(own, Options(tasks=("lstm",)))


def test_a_whole_quick_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_all(tmp_path / "data", images=64)
    arguments = ["--quick", "--tasks", "cifar", "--rows", "dense", "plain", "--nodes", "2"]
    arguments += ["--data-dir", str(tmp_path / "data"), "--output", str(tmp_path / "out")]
    assert main(dgc.EXPERIMENT, [*arguments, "--markdown", str(tmp_path / "page.md")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {"command", "commit", "machine", "versions", "seed", "groups", "claims", "rows"} <= summary.keys()
    assert [group["name"] for group in summary["groups"]] == ["dense", "plain"]
    assert "reproduce.dgc --quick" in summary["command"]
    assert "| plain |" in (tmp_path / "page.md").read_text()
    assert "cifar plain, seed 0" in capsys.readouterr().out
    shown = (tmp_path / "out" / "summary.html").read_text()
    assert "Training loss: cifar" in shown
    assert "sent bytes per step" in shown

    # Of what is recorded, tables and claims can be had again, of rows that are not nothing.
    (row,) = (tmp_path / "out" / "rows").glob("cifar-plain-*")
    row.unlink()
    assert main(dgc.EXPERIMENT, [*arguments, "--recorded"]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [group["name"] for group in summary["groups"]] == ["dense"]
    assert not row.exists()

    # Elsewhere they are still of the machine that trained them.
    (row,) = (tmp_path / "out" / "rows").glob("cifar-dense-*")
    assert json.loads(row.read_text())["cpu"] == machine()["cpu"]
    row.write_text(json.dumps(json.loads(row.read_text()) | {"cpu": "Another"}))
    assert main(dgc.EXPERIMENT, [*arguments, "--recorded", "--markdown", str(tmp_path / "page.md")]) == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["cpus"] == ["Another"]
    assert re.search(r" cores \(Another\), PyTorch", (tmp_path / "page.md").read_text())
    assert main(dgc.EXPERIMENT, [*arguments, "--recorded", "--seeds", "5"]) == 2
    assert "none of these rows is finished" in capsys.readouterr().err


def test_missing_data_is_one_line(tmp_path, capsys):
    arguments = ["--quick", "--data-dir", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main(dgc.EXPERIMENT, arguments) == 2
    said = capsys.readouterr().err
    assert "--data-dir" in said
    assert "Traceback" not in said


def test_a_wrong_choice_is_one_line(tmp_path, capsys):
    assert main(dgc.EXPERIMENT, ["--tasks", "mnist", "--output", str(tmp_path / "out")]) == 2
    assert "there are: cifar, lstm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(nodes=0), "nodes=0 must be at least 1"),
        (Options(seeds=(-1,)), "seed=-1 is not in"),
        (Options(ablation_seeds=(-2,)), "seed=-2 is not in"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chosen(dgc.EXPERIMENT, options)


def test_a_torn_row_is_named_and_not_taken(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_all(tmp_path / "data", images=64)
    options = Options(quick=True, tasks=("cifar",), rows=("dense",))
    (row,) = _places(chosen(dgc.EXPERIMENT, options), tmp_path / "out", 2, tmp_path / "data")
    row.parent.mkdir(parents=True)
    row.write_text('{"task": ')
    arguments = ["--quick", "--tasks", "cifar", "--rows", "dense", "--nodes", "2", "--data-dir", str(tmp_path / "data")]
    assert main(dgc.EXPERIMENT, [*arguments, "--output", str(tmp_path / "out")]) == 2
    assert f"{row} is incomplete or not a JSON file" in capsys.readouterr().err
