"""Starting ranks: results and events arrive, errors are told, and nobody outlives the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from narrowband.bench.ranks import Loopback, RankError, run_ranks
from tests.thorough import thorough

LIMIT_S = 180.0  # only a failure takes this long


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a worker module that ``python -m`` finds, and return its name."""

    def write(code):
        (tmp_path / "bench_worker_under_test.py").write_text(
            "import os, sys, time\nfrom narrowband.bench.ranks import RankProcess\nworker = RankProcess(sys.argv[1])\n"
            + textwrap.dedent(code)
        )
        monkeypatch.syspath_prepend(tmp_path)  # of ranks on loopback
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        return "bench_worker_under_test"

    return write


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_results_come_in_rank_order_and_events_from_rank_0(module):
    name = module(
        """
        for i in range(3):
            worker.tell(i=i, rank=worker.rank)
        worker.finish([worker.rank, worker.world_size, worker.config["text"], os.environ["MASTER_ADDR"]])
        """
    )
    events = []
    results = run_ranks(name, {"text": "é"}, Loopback(3), events.append)
    assert results == [[rank, 3, "é", "127.0.0.1"] for rank in range(3)]
    assert events == [{"i": i, "rank": 0} for i in range(3)]


def test_any_rank_may_speak_and_claim_work_that_is_then_its_own(module):
    """Events are longer than what is written at once by default."""
    name = module(
        """
        own = [i for i in range(200) if worker.claim(f"piece-{i}")]
        for i in own:
            worker.say(i=i, rank=worker.rank, text="x" * 20_000)
        worker.finish(own)
        """
    )
    events = []
    results = run_ranks(name, {}, Loopback(3), events.append)
    assert sorted(i for own in results for i in own) == list(range(200))
    assert [[event["i"] for event in events if event["rank"] == rank] for rank in range(3)] == results
    assert {event["text"] for event in events} == {"x" * 20_000}


def test_what_all_ranks_have_so_far_comes_once_for_each_turn_in_their_order(module):
    name = module(
        """
        for turn in range(3):
            worker.so_far([worker.rank, turn])
            worker.tell(event="step", turn=turn)
        worker.finish(None)
        """
    )
    events, gathered = [], []
    run_ranks(name, {}, Loopback(3), events.append, gathered.append)
    assert gathered == [[[rank, turn] for rank in range(3)] for turn in range(3)]
    assert events == [{"event": "step", "turn": turn} for turn in range(3)]


def test_a_rank_that_fails_ends_the_others_and_is_quoted(module, tmp_path):
    name = module(
        """
        open(os.path.join(worker.config["pids"], str(worker.rank)), "w").write(str(os.getpid()))
        if worker.rank == 1:
            while len(os.listdir(worker.config["pids"])) < 2:
                time.sleep(0.01)
            raise ValueError("the second rank is unwell")
        time.sleep(3600)
        """
    )
    pids = tmp_path / "pids"
    pids.mkdir()
    with pytest.raises(RankError, match="the second rank is unwell"):
        run_ranks(name, {"pids": str(pids)}, Loopback(2))
    assert not any(alive(int(path.read_text())) for path in pids.iterdir())


def test_an_error_in_the_callers_callback_is_the_callers(module):
    def refuse(event):
        raise KeyError(event["i"])

    with pytest.raises(KeyError, match="7"):
        run_ranks(module("worker.tell(i=7)\nworker.finish(None)"), {}, Loopback(1), refuse)


def test_a_rank_without_a_result_is_an_error(module):
    with pytest.raises(RankError, match="said nothing"):
        run_ranks(module("pass"), {}, Loopback(1))


@pytest.mark.parametrize("how", [signal.SIGKILL, *thorough(signal.SIGINT)])
def test_ranks_end_with_their_parent(module, tmp_path, how):
    name = module(
        """
        open(os.path.join(worker.config["pids"], str(worker.rank)), "w").write(str(os.getpid()))
        time.sleep(3600)
        """
    )
    pids = tmp_path / "pids"
    pids.mkdir()
    code = (
        "from narrowband.bench import loopback; from narrowband.bench.ranks import *; "
        "loopback.IMPORTS = 'platform'; "  # not PyTorch, which takes seconds
        f"run_ranks({name!r}, {{'pids': {str(pids)!r}}}, Loopback(2))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: sum(bool(path.read_text()) for path in pids.iterdir()) == 2)
        parent.send_signal(how)
        parent.wait(LIMIT_S)
        wait_until(lambda: not any(alive(int(path.read_text())) for path in pids.iterdir()))
    finally:
        parent.kill()
        parent.wait()


def test_where_a_fork_is_not_safe_each_rank_is_a_new_interpreter(module, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    name = module("worker.finish([worker.rank, 'torch._dynamo' in sys.modules])")
    assert run_ranks(name, {}, Loopback(2)) == [[rank, False] for rank in range(2)]


def test_ranks_are_forked_with_what_takes_seconds_to_import(module):
    name = module("worker.finish(['torch._dynamo' in sys.modules, os.getppid()])")
    runs = [run_ranks(name, {}, Loopback(2)) for _ in range(2)]
    server = runs[0][0][1]
    assert runs == [[[True, server]] * 2] * 2
    assert server != os.getpid()
