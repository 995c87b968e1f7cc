"""The file of ``--json``: what it has after Ctrl-C, who goes on from it, and that no measurement overwrites another."""

from __future__ import annotations

import errno
import io
import json
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from narrowband.bench import adapt, kernels, peers, tensors
from narrowband.cli import records
from narrowband.cli.exits import DONE, STOPPED, WRONG
from narrowband.cli.records import Record
from tests.cli.ctrl_c import stopped

KERNELS = "bench kernels --numel 5000 --repeats 1 --loops all-finite activation-mask activation-apply-mask"
TENSORS = "bench memory --tensors --rounds 1"
PEERS = "bench peers"
ADAPT = "bench adapt --model gpt-tiny --steps 2 --no-mixed --ranks 4 8 --references qsgd:bits=4+ef"


#: What a run of peers finds. Their rounds take as long as the machine lets them, and are not the subject here.
HELD = {
    "rounds": 200, "steps": 8000, "seconds": 400.0, "goodput": 20.0, "absent_s": 0.0, "slowest_s": 2.0, "equal": True,
    "back": {},
}  # fmt: skip


def counted(monkeypatch, owner, name, *, stop_at=None):
    """Count the calls of a function; the one of this number is Ctrl-C."""
    calls, plain = [], getattr(owner, name)

    def instead(*args, **kwargs):
        calls.append(args)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, instead)
    return calls


@pytest.mark.parametrize(
    ("line", "owner", "name", "rows"),
    [
        (KERNELS, kernels, "_row", 3),
        (TENSORS, tensors, "_way", 7),
        (PEERS, peers._Run, "result", 2),
        (ADAPT, adapt, "_decision", 3),
    ],
    ids=["kernels", "tensors", "peers", "adapt"],
)
def test_after_ctrl_c_finished_rows_are_kept_and_not_measured_again(
    narrow, tmp_path, monkeypatch, line, owner, name, rows
):
    path = tmp_path / "rows.json"
    words = (*line.split(), "--json", str(path))
    calls_of_a_row = 3 if owner is tensors else 1
    monkeypatch.setattr(peers._Run, "result", lambda _: dict(HELD))
    of_tensors = tensors.run
    monkeypatch.setattr(tensors, "run", lambda config, known: of_tensors(replace(config, layers=2), known))
    with monkeypatch.context() as patch:
        counted(patch, owner, name, stop_at=calls_of_a_row + 1)
        code, out, err = narrow(*words)
    assert code == STOPPED
    assert "Traceback" not in err
    assert f"What was measured so far is in {path}; the same command goes on from there." in " ".join(out.split())
    (kept,) = json.loads(path.read_text())["rows"]

    calls = counted(monkeypatch, owner, name)
    code, out, _ = narrow(*words)
    assert code == DONE
    assert "has 1 row; finished ones are not measured again" in " ".join(out.split())
    found = json.loads(path.read_text())["rows"]
    assert found[0] == kept
    assert len(found) == rows
    measured = rows - 1 - (owner is adapt)  # the last of these is the program alone
    assert len(calls) == calls_of_a_row * measured
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".json"] == ["rows.json"]


def test_a_decision_whose_plan_is_gone_is_made_again(narrow, tmp_path):
    plans = tmp_path / "plans"
    words = (*ADAPT.split(), "--plans", str(plans), "--json", str(tmp_path / "rows.json"))
    assert narrow(*words)[0] == DONE
    first, *_ = (tmp_path / "plans").iterdir()
    first.unlink()
    assert narrow(*words)[0] == DONE
    assert first.exists()


def test_after_sigterm_whole_rounds_of_bench_ddp_are_kept_and_another_run_overwrites_none(
    narrow, tmp_path, tmp_path_factory, monkeypatch
):
    path, temporary = tmp_path / "rows.json", tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(temporary))
    words = ["bench", "ddp", "--nodes", "2", "--rate", "none", "--model", "gpt-tiny", "--codecs", "none", "qsgd:bits=4"]
    words += ["--steps", "1", "--json", str(path), "--rounds"]
    said = stopped([*words, "100000"], tmp_path, path.name, signal.SIGTERM)
    assert f"What was measured so far is in {path}." in said
    assert not list(temporary.glob("narrowband-*"))
    kept = path.read_bytes()
    rows = json.loads(kept)["rows"]
    assert [row["codec"] for row in rows] == ["no-communication", "none", "qsgd:bits=4"]
    for row in rows[1:]:
        assert row["ratio_to_compute"] > 0
        assert row["sent_bytes_per_step"] > 0
        assert len(row["round_step_s"]) == len(row["round_compute_s"]) >= 1

    code, out, _ = narrow(*words, "1")
    assert code == DONE
    assert "was measured with other options: this run starts from the beginning" in " ".join(out.split())
    assert (tmp_path / "rows.old.json").read_bytes() == kept
    assert len(json.loads(path.read_text())["rows"][1]["round_step_s"]) == 1


# ---- the file itself -------------------------------------------------------------------------------------------------

CONFIG = {"seed": 0, "sizes": (1, 2)}


@pytest.fixture
def opened(tmp_path):
    """Open the record of a run; returns it, and a function that returns what it has said."""

    def open_one(config=CONFIG, path=tmp_path / "rows.json", **options):
        console = Console(record=True, width=300, file=io.StringIO())
        return Record(path, config, console, **options), console.export_text

    return open_one


def rows_of(path):
    return json.loads(path.read_text())["rows"]


def test_the_same_run_goes_on_from_its_rows(opened, tmp_path):
    opened()[0].keep([{"name": "a"}])
    again, said = opened()
    assert again.known == [{"name": "a"}]
    assert "rows.json has 1 row; finished ones are not measured again" in said()
    assert list(again.follow(iter([{"name": "b"}]), ("name",))) == [{"name": "b"}]
    assert rows_of(tmp_path / "rows.json") == [{"name": "b"}, {"name": "a"}], "a's turn may come later"
    again.finish([{"name": "b"}])
    assert [each.name for each in tmp_path.glob("*.json")] == ["rows.json"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sources", "was measured with other code:"),
        ("machine", "was measured with another machine:"),
        ("versions", "was measured with other versions of Python or of packages:"),
        ("environment", "was measured with other environment variables:"),
        ("config", "was measured with other options:"),
    ],
)
def test_what_something_else_measured_is_renamed_before_the_first_row_is_written(opened, tmp_path, name, words):
    path = tmp_path / "rows.json"
    opened()[0].keep([{"name": "a"}])
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: {"seed": 1}}))
    before = path.read_bytes()
    for number in ("", "1"):
        run, said = opened()
        assert run.known == []
        assert f"{words} this run starts from the beginning, and renames that file to rows.old{number}.json" in said()
        assert path.read_bytes() == before, "a run that measures nothing changes nothing"
        run.keep([{"name": "b"}])
        run.finish([{"name": "b"}, {"name": "c"}])
        assert (tmp_path / f"rows.old{number}.json").read_bytes() == before
        assert rows_of(path) == [{"name": "b"}, {"name": "c"}]
        path.write_bytes(before)


def test_a_run_that_cannot_go_on_renames_its_own_earlier_rows(opened, tmp_path):
    opened(goes_on=False)[0].finish([{"name": "a"}])
    run, said = opened(goes_on=False)
    assert run.known == []
    assert "rows.json is of an earlier run: this run starts from the beginning" in said()
    run.keep([{"name": "b"}])
    assert rows_of(tmp_path / "rows.old.json") == [{"name": "a"}]


def test_what_a_link_points_to_is_renamed_and_the_link_stays(opened, tmp_path):
    (tmp_path / "kept").mkdir()
    path, target = tmp_path / "rows.json", tmp_path / "kept" / "target.json"
    path.symlink_to(target)
    opened()[0].keep([{"name": "a"}])
    opened(CONFIG | {"seed": 1})[0].keep([{"name": "b"}])
    assert path.is_symlink()
    assert rows_of(target) == [{"name": "b"}]
    assert rows_of(tmp_path / "kept" / "target.old.json") == [{"name": "a"}]


def test_a_file_that_cannot_be_renamed_is_not_overwritten(opened, tmp_path, monkeypatch):
    opened()[0].keep([{"name": "a"}])
    run, _ = opened(CONFIG | {"seed": 1})

    def refused(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(records.Path, "rename", refused)
    run.keep([{"name": "b"}])
    run.finish([{"name": "b"}])
    with pytest.raises(OSError, match="busy"):
        run.say()
    assert rows_of(tmp_path / "rows.json") == [{"name": "a"}]


def test_a_file_that_is_deleted_while_a_run_measures_is_no_reason_to_lose_its_rows(opened, tmp_path):
    opened()[0].keep([{"name": "a"}])
    run, _ = opened(CONFIG | {"seed": 1})
    (tmp_path / "rows.json").unlink()
    run.finish([{"name": "b"}])
    run.say()
    assert rows_of(tmp_path / "rows.json") == [{"name": "b"}]


def test_a_name_that_is_taken_while_a_run_measures_is_not_overwritten(opened, tmp_path):
    opened()[0].keep([{"name": "a"}])
    run, _ = opened(CONFIG | {"seed": 1})
    (tmp_path / "rows.old.json").write_text("{}")
    run.finish([{"name": "b"}])
    assert (tmp_path / "rows.old.json").read_text() == "{}"
    assert rows_of(tmp_path / "rows.old1.json") == [{"name": "a"}]


@pytest.mark.parametrize("content", ["my notes", '{"a": 1}', "[1, 2]"])
@pytest.mark.parametrize("line", [KERNELS, "bench ddp --rate none --codecs none", "bench pipeline --rate none"])
def test_a_file_that_is_no_record_is_refused(narrow, tmp_path, line, content):
    path = tmp_path / "notes.json"
    path.write_text(content)
    code, _, err = narrow(*line.split(), "--json", str(path))
    assert code == WRONG
    assert "give another name, or delete the file" in err
    assert path.read_text() == content


def test_an_empty_file_is_taken(opened, tmp_path):
    (tmp_path / "rows.json").touch()
    run, said = opened()
    run.finish([{"name": "a"}])
    assert said() == ""
    assert rows_of(tmp_path / "rows.json") == [{"name": "a"}]


def test_without_a_file_nothing_is_said(opened):
    run, said = opened(path=None)
    run.keep([{"name": "a"}])
    run.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    run.finish([])
    run.say()
    assert said() == ""
