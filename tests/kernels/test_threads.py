"""How work is cut and spread, on PyTorch's threads and on those of the library's own pool."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from narrowband.kernels.cpu import threads
from narrowband.kernels.cpu.threads import MIN_ELEMENTS_PER_THREAD, spread

if TYPE_CHECKING:
    from collections.abc import Iterator

THREADS = 3
ENOUGH = THREADS * MIN_ELEMENTS_PER_THREAD


@pytest.fixture(params=["team", "pool"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """On whose threads."""
    if request.param == "pool":
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    elif threads._openmp() is None:
        pytest.skip("PyTorch's operators do not run on OpenMP's threads here")
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield request.param
    torch.set_num_threads(before)


def whose(_start: int, _stop: int) -> int:
    return threading.get_native_id()


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("units", [0, 1, 2, 3, 4, 1000])
def test_ranges_are_contiguous_and_results_in_order(units: int) -> None:
    ranges = spread(units, ENOUGH, lambda start, stop: (start, stop))
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == units
    assert len(ranges) == max(1, min(units, THREADS))


@pytest.mark.usefixtures("kind")
def test_each_range_has_a_thread_of_its_own_and_little_work_none() -> None:
    meeting = threading.Barrier(THREADS)
    assert len(set(spread(THREADS, ENOUGH, lambda *_: (meeting.wait(180), whose(*_))[1]))) == THREADS
    assert spread(THREADS, ENOUGH // THREADS, whose) == [threading.get_native_id()]


def test_pytorchs_own_threads_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no others are made: there would be more threads than cores."""
    monkeypatch.setattr(threads, "_pool", None)  # with threads of earlier tests
    if threads._openmp() is None:
        pytest.skip("PyTorch's operators do not run on OpenMP's threads here")
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        torch.ones(1 << 22).add_(1)
        there = set(os.listdir("/proc/self/task"))
        assert {str(thread) for thread in spread(THREADS, ENOUGH, whose)} <= there
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("broken", range(THREADS))
def test_an_error_in_any_thread_is_raised(broken: int) -> None:
    def work(start: int, _stop: int) -> None:
        if start == broken:
            raise ZeroDivisionError(start)

    with pytest.raises(ZeroDivisionError, match=str(broken)):
        spread(THREADS, ENOUGH, work)
    assert spread(THREADS, ENOUGH, lambda start, _: start) == list(range(THREADS))


@pytest.mark.usefixtures("kind")
def test_ctrl_c_is_raised_when_all_threads_are_done() -> None:
    done = []

    def work(start: int, _stop: int) -> None:
        if start == 0:
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)  # it is raised long before the others are done
        done.append(start)

    with pytest.raises(KeyboardInterrupt):
        spread(THREADS, ENOUGH, work)
    assert sorted(done) == list(range(1, THREADS))


def test_a_smaller_team_than_asked_for_does_all_of_it() -> None:
    """As there is inside of another one."""
    if threads._openmp() is None:
        pytest.skip("PyTorch's operators do not run on OpenMP's threads here")

    def inside(_: int) -> list[tuple[int, int]]:
        return threads._by_team(THREADS, lambda thread: (thread, threading.get_native_id()))

    for found in threads._by_team(THREADS, inside):
        assert [thread for thread, _ in found] == list(range(THREADS))
        assert len({at for _, at in found}) == 1


@pytest.mark.usefixtures("kind")
def test_several_threads_may_spread_work_at_once() -> None:
    def repeat(begin: int) -> list[list[int]]:
        torch.set_num_threads(THREADS)
        return [spread(THREADS, ENOUGH, lambda start, _: begin + start) for _ in range(200)]

    with ThreadPoolExecutor(4) as pool:
        for begin, results in enumerate(pool.map(repeat, range(4))):
            assert results == [[begin, begin + 1, begin + 2]] * 200
