"""Compiled loops on disk: who compiles what, where it is kept, and who is told."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch
from numba.core import event

import narrowband
from narrowband.averaging.warmup import use_all
from narrowband.kernels.compiling import announced
from narrowband.kernels.cpu import cache
from tests.ranks import run_ranks
from tests.thorough import thorough

PACKAGE = Path(narrowband.__file__).parent

#: Uses three loops, which call others, and says how often Numba compiled one of the library's loops.
USE = """
import sys
from numba.core import event

class Compiled(event.Listener):
    loops = 0
    def on_start(self, event):
        self.loops += event.data["dispatcher"].py_func.__module__.startswith("narrowband")
    def on_end(self, event):
        pass

listener = Compiled()
event.register("numba:compile", listener)
import torch
from narrowband import kernels
from narrowband.kernels.compiling import announced
with announced("a test"):
    kernels.all_finite(torch.ones(100))
    kernels.randomk_indices(1000, 10, 0, torch.device("cpu"))
    kernels.group_minmax(torch.ones(100), 10)
print(listener.loops)
"""
#: The same with one loop, and that without a set-up.
ONE = re.sub(r"    kernels\.(randomk|group).*\n", "", USE)
UNFORESEEN = ONE.replace('with announced("a test"):', "if True:")


def start(caches: Path, *, use: str = USE, package: Path = PACKAGE, **environment: str) -> subprocess.Popen[str]:
    known = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    known |= {"XDG_CACHE_HOME": str(caches), "PYTHONPATH": str(package.parent), **environment}
    command = [sys.executable, "-c", use]
    return subprocess.Popen(command, env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(loops that were compiled, what was said)."""
    out, said = process.communicate(timeout=900)
    assert process.returncode == 0, said
    return int(out), said


def test_a_loop_is_compiled_once_for_all_processes_and_installations(tmp_path):
    count, said = outcome(start(tmp_path))
    assert count == 3
    line = f"narrowband: compiling loops for a test, once per machine (kept in {tmp_path}/narrowband) … 3 done, "
    assert said.startswith(line)
    assert said.count("\n") == 1
    files = sorted(tmp_path.glob("narrowband/loops-*/*.loop"))
    assert len(files) == 3

    files[0].write_bytes(files[0].read_bytes()[:100])  # which is compiled anew
    copy = tmp_path / "elsewhere" / "narrowband"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", copy.parent)
    assert outcome(start(tmp_path, package=Path(archive) / "narrowband"))[0] == 1
    assert sorted(tmp_path.glob("narrowband/loops-*/*.loop")) == files
    for file in files:
        pickle.loads(file.read_bytes())  # whole


def test_processes_that_begin_at_once_share_the_work_where_numbas_own_setting_says(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    together = [start(other, RANK=str(rank), NUMBA_CACHE_DIR=str(mine)) for rank in range(2)]
    counts, said = zip(*map(outcome, together), strict=True)
    assert sum(counts) == 3
    assert said[1] == ""  # rank 0 alone speaks
    assert len(list(mine.glob("narrowband/loops-*/*.loop"))) == 3
    assert not other.exists()


def test_who_made_no_set_up_is_told_once_where_loops_are_kept_and_why_there(tmp_path):
    here = {"use": UNFORESEEN, "NUMBA_CACHE_DIR": "/dev/null/no-folder"}
    count, said = outcome(start(tmp_path, **here))
    assert count == 1
    kept = f"kept in {tmp_path}/narrowband, as /dev/null/no-folder/narrowband cannot be written"
    assert said == f"narrowband: compiling loops as they are needed, once per machine ({kept}) …\n"
    assert len(list(tmp_path.glob("narrowband/loops-*/*.loop"))) == 1

    # Nothing is said of what is there; what set-up asks of a codec first is announced.
    here["use"] += "import narrowband as nb; nb.codec('qsgd:bits=4').lost_share"
    count, said = outcome(start(tmp_path, **here))
    assert count == 0
    assert said.startswith(f"narrowband: compiling loops for qsgd:bits=4, once per machine ({kept}) … ")
    assert said.count("\n") == 1


def test_where_no_cache_folder_is_writable_the_next_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.numba.config, "CACHE_DIR", "/dev/null/no-folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder.__wrapped__().parent == tmp_path / "narrowband"
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/no-folder")
    assert cache.folder.__wrapped__().parent == PACKAGE / "kernels" / "cpu" / "__pycache__" / "narrowband"
    monkeypatch.setattr(cache, "_parents", lambda: [Path("/dev/null/no-folder")])
    assert cache.folder.__wrapped__() is None


def test_loops_whose_sources_nobody_knows_are_not_kept(tmp_path, monkeypatch):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "loops.pyc").touch()
    monkeypatch.setattr(cache, "files", lambda _: tmp_path)
    assert cache.folder.__wrapped__() is None


def test_folders_of_former_sources_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_parents", lambda: [tmp_path])
    for age in range(20):
        folder = tmp_path / f"loops-{age}"
        folder.mkdir()
        (folder / "one.loop").touch()
        os.utime(folder, (age, age))
    mine = cache.folder.__wrapped__()
    assert {path.name for path in tmp_path.iterdir()} == {mine.name} | {f"loops-{age}" for age in range(5, 20)}


def test_without_a_folder_the_line_says_what_to_do(capsys):
    from narrowband.kernels import compiling

    with announced("a test", say=True):
        assert not compiling.begins(None)
        compiling.ends()
    assert "set NUMBA_CACHE_DIR" in capsys.readouterr().err


def said_by_a_rank(rank, world_size, caches):
    numba.config.CACHE_DIR = caches
    said, sys.stderr = sys.stderr, io.StringIO()
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 40))
        narrowband.compress_gradients(model, "fp16")
        return sys.stderr.getvalue()
    finally:
        sys.stderr = said


def test_rank_0_alone_says_that_set_up_takes_time_and_only_the_first_time(tmp_path):
    first, *others = run_ranks(said_by_a_rank, 2, str(tmp_path), fresh=True)
    assert first.startswith(
        f"narrowband: compiling loops for fp16, once per machine (kept in {tmp_path}/narrowband) … "
    )
    assert first.count("\n") == 1
    assert others == [""]
    assert run_ranks(said_by_a_rank, 1, str(tmp_path), fresh=True) == [""]


class Compiled(event.Listener):
    def __init__(self):
        self.names = []

    def on_start(self, event):
        self.names.append(event.data["dispatcher"].py_func.__qualname__)

    def on_end(self, event):
        pass


def compiled_for(rank, world_size, spec, caches):
    """What Numba compiles for a spec where nothing is kept."""
    numba.config.CACHE_DIR = caches
    listener = Compiled()
    event.register("numba:compile", listener)
    use_all([spec], torch.device("cpu"))
    return listener.names


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ("qsgd:bits=4", 8),
        *thorough(("powersgd:rank=4", 12), ("none", 4), ("sign+ef", 12), ("topk:density=0.01+ef", 24)),
    ],
)
def test_a_spec_compiles_few_functions(tmp_path, spec, most):
    """Each takes Numba a tenth of a second to a second. Overloads that only print an error were three in four once."""
    (names,) = run_ranks(compiled_for, 1, spec, str(tmp_path), fresh=True, group=False, timeout_s=900)
    assert 0 < len(names) <= most, names
