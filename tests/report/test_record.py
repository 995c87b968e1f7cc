from __future__ import annotations

import json
import os
import socket

import pytest
import torch

from narrowband.report.record import commit, machine, provenance, versions, write_json


def test_a_result_says_where_it_comes_from():
    about = provenance(seed=7, command=["narrowband", "demo", "--out", "two words"])
    assert about["command"] == "narrowband demo --out 'two words'"
    assert about["seed"] == 7
    assert about["versions"]["torch"] == torch.__version__
    assert about["machine"]["cores"] == os.cpu_count()
    json.dumps(about, allow_nan=False)


def test_the_host_stays_anonymous():
    assert socket.gethostname() not in json.dumps(machine()).replace(json.dumps(machine()["release"]), "")


def test_versions_leave_out_what_is_not_installed():
    assert all(versions().values())


def test_a_commit_is_a_hash_or_nothing():
    found = commit()
    assert found is None or len(found.removesuffix("-dirty")) == 40


def test_files_are_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "result.json"
    write_json(target, {"rows": [1]})
    assert json.loads(target.read_text()) == {"rows": [1]}
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(target, {"rows": [float("nan")]})
    assert json.loads(target.read_text()) == {"rows": [1]}
    assert [path.name for path in target.parent.iterdir()] == ["result.json"]
