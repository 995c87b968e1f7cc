"""A file is whole, or what was there before stays."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from narrowband.adapt import Plan
from narrowband.files import whole, write_text

PLANS = Path(__file__).parent.parent / "benchmarks" / "results" / "plans"


def test_what_fails_on_its_way_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "before ü")
    with pytest.raises(TypeError), whole(path) as file:
        file.writelines([b"half of ", None])
    assert path.read_text(encoding="utf-8") == "before ü"
    assert [each.name for each in path.parent.iterdir()] == ["file.txt"]
    with whole(path) as file:
        file.write(b"after")
        assert path.read_text(encoding="utf-8") == "before ü", "not yet"
    assert path.read_bytes() == b"after"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permissions_of_the_umask_and_an_old_one_keeps_its_own(tmp_path, umask):
    new, old = tmp_path / "new", tmp_path / "old"
    old.touch()
    before = os.umask(umask)
    try:
        write_text(new, "x")
        for mode in (0o600, 0o664):
            old.chmod(mode)
            with whole(old) as file:
                (temporary,) = tmp_path.glob(".old.*")
                assert temporary.stat().st_mode & 0o777 & ~mode == 0, "nobody may read it who may not read the old one"
                file.write(b"x")
            assert old.stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)
    assert new.stat().st_mode & 0o777 == 0o666 & ~umask


def test_no_file_takes_the_place_of_a_pipe_or_of_a_link(tmp_path):
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "elsewhere" / "file.txt"
    os.mkfifo(pipe)
    with pytest.raises(FileExistsError, match="is not a regular file"):
        write_text(pipe, "x")
    assert pipe.is_fifo()
    link.symlink_to(target)
    for content in ("first", "second"):
        write_text(link, content)
        assert link.is_symlink()
        assert target.read_text() == content


def test_a_plan_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    plan = Plan.load(PLANS / "qsgd-bits-4-ef-among-4.json")
    plan.save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left") as refused:
        replace(plan, step=plan.step + 1).save(path)
    assert refused.value.filename == str(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_an_error_that_comes_from_elsewhere_names_no_file(tmp_path):
    with pytest.raises(ConnectionResetError) as refused, whole(tmp_path / "file.txt"):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
    assert refused.value.filename is None
    assert not [*tmp_path.iterdir()]
