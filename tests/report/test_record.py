from __future__ import annotations

import json
import os
import socket
import subprocess
import zipfile

import pytest
import torch

import narrowband
from narrowband.report.record import (
    commit,
    commit_of,
    environment,
    machine,
    provenance,
    read_json,
    sources,
    sources_of,
    versions,
    write_json,
)


def test_a_result_says_where_it_comes_from():
    about = provenance(seed=7, command=["narrowband", "demo", "--out", "two words"])
    assert about["command"] == "narrowband demo --out 'two words'"
    assert about["seed"] == 7
    assert about["versions"]["torch"] == torch.__version__
    assert about["machine"]["cores"] == os.cpu_count()
    json.dumps(about, allow_nan=False)


def test_the_same_code_has_the_same_hash_and_other_code_another(tmp_path):
    assert provenance()["sources"] == sources()
    found = [sources_of(tmp_path)]
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "x = 2"), ("facts.json", "{}")):
        (tmp_path / name).write_text(text)
        found.append(sources_of(tmp_path))
    assert len(set(found)) == len(found)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.cpython-312.pyc").write_text("what Python makes of it")
    (tmp_path / ".#a.py").symlink_to("an editor's lock, which leads nowhere")
    assert sources_of(tmp_path) == found[-1]
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for name in ("a.py", "b.py", "facts.json"):
            archive.write(tmp_path / name, f"package/{name}")
    assert sources_of(zipfile.Path(archive.filename, "package/")) == found[-1]
    for text in ("compiled", "compiled from other code"):  # in a package without sources
        (tmp_path / "a.pyc").write_text(text)
        found.append(sources_of(tmp_path))
    assert len(set(found)) == len(found)


def test_the_host_stays_anonymous():
    assert socket.gethostname() not in json.dumps(machine()).replace(json.dumps(machine()["release"]), "")


def test_versions_leave_out_what_is_not_installed():
    assert all(versions().values())


def test_the_version_is_that_of_the_code_at_work_however_it_was_installed():
    assert versions()["narrowband"] == narrowband.__version__


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (b'{"rows": [1, 2', "incomplete or not a JSON file"),
        (bytes(range(128, 256)), "incomplete or not a JSON file"),
        (b"", "incomplete or not a JSON file"),
        (b"[1]", "is not a JSON object"),
        (b'{"rows": []}', "lacks seed, commit"),
    ],
)
def test_a_record_that_is_torn_or_of_another_version_is_refused_with_what_to_do(tmp_path, written, said):
    path = tmp_path / "record.json"
    path.write_bytes(written)
    with pytest.raises(ValueError, match=said) as caught:
        read_json(path, ("rows", "seed", "commit"))
    assert str(path) in str(caught.value)
    assert "delete it" in str(caught.value)
    write_json(path, {"rows": [], "seed": 0, "commit": None})
    assert read_json(path, ("rows", "seed", "commit"))["seed"] == 0


def test_a_commit_is_a_hash_or_nothing():
    found = commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40


def test_what_a_run_has_written_does_not_make_the_code_another(tmp_path):
    def git(*words):
        who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    code, result = tmp_path / "src" / "code.py", tmp_path / "reproduce" / "results" / "rows.json"
    for path in (code, result):
        path.parent.mkdir(parents=True)
        path.write_text("1")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    head = git("rev-parse", "HEAD").strip()
    assert commit_of(code.parent) == head
    result.write_text("2")
    assert commit_of(code.parent) == head
    code.write_text("2")
    assert commit_of(code.parent) == f"{head}-dirty"
    installed = tmp_path / ".venv" / "narrowband"
    installed.mkdir(parents=True)
    (installed / "code.py").touch()
    assert commit_of(installed) is None, "the commit is that of another project"


def test_a_folder_outside_of_a_checkout_has_no_commit(tmp_path):
    assert commit_of(tmp_path) is None


def test_files_are_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "result.json"
    write_json(target, {"rows": [1]})
    assert json.loads(target.read_text()) == {"rows": [1]}
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(target, {"rows": [float("nan")]})
    assert json.loads(target.read_text()) == {"rows": [1]}
    assert [path.name for path in target.parent.iterdir()] == ["result.json"]


def test_what_decides_about_memory_threads_and_links_is_recorded_without_where_it_lies(monkeypatch):
    for name in (
        "LD_PRELOAD", "MALLOC_CONF", "GLIBC_TUNABLES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "NARROWBAND_LAB",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    assert environment() == {}
    monkeypatch.setenv("LD_PRELOAD", "/opt/lib/libjemalloc.so.2:/else/where.so")
    monkeypatch.setenv("MALLOC_CONF", "narenas:1")
    monkeypatch.setenv("NARROWBAND_LAB", "rate=100mbit delay=5ms")  # of a rank in the lab
    found = {"LD_PRELOAD": "libjemalloc.so.2 where.so", "MALLOC_CONF": "narenas:1"}
    assert environment() == {**found, "NARROWBAND_LAB": "rate=100mbit delay=5ms"}
    assert provenance()["environment"] == environment()
