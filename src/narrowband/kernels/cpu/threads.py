"""How the loops on CPU are spread over threads.

:func:`spread` cuts the work into one contiguous range per thread. The thread count is ``torch.get_num_threads()``, and
results do not depend on it. Loops release the GIL and have no threads of their own, so several Python threads may call
them at once; not all of Numba's own threading layers allow that.

The ranges run on the threads of PyTorch's own operators, if these are OpenMP threads. After an operator they spin for
about a millisecond before they sleep, and threads of our own would compete with them for the cores that long. A small
thread pool is used instead without OpenMP; in a forked child, which has no OpenMP threads left; and for work that is
worth only some of the threads, because OpenMP would then end the others.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")

#: Work on fewer elements stays on the calling thread: handing it over costs 30 to 60 µs.
MIN_ELEMENTS_PER_THREAD = 1 << 16


def threads_for(elements: int, least: int = MIN_ELEMENTS_PER_THREAD) -> int:
    """Return how many threads this much work is worth, if each gets at least ``least`` elements."""
    return 1 if elements < 2 * least else min(torch.get_num_threads(), elements // least)


def spread(
    units: int, elements: int, work: Callable[[int, int], R], *, least: int = MIN_ELEMENTS_PER_THREAD
) -> list[R]:
    """Run ``work(start, stop)`` over [0, units), one contiguous range per thread; return the results in order.

    ``elements`` is the size of the whole work. It decides how many threads are woken: each gets at least ``least``.
    """
    threads = min(threads_for(elements, least), units)
    if threads <= 1:
        return [work(0, units)]
    cuts = [units * t // threads for t in range(threads + 1)]

    def part(thread: int) -> R:
        return work(cuts[thread], cuts[thread + 1])

    return _by_team(threads, part) if _is_team(threads) else _by_pool(threads, part)


# ---- PyTorch's threads -----------------------------------------------------------------------------------------------

_Member = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_parts: dict[int, Callable[[], None]] = {}
_keys = itertools.count(1)
_forked = False


@functools.cache
def _openmp() -> tuple[Callable[..., None], Callable[[], int]] | None:
    """Return (function that runs a callback on all threads of PyTorch's operators, function that returns the thread's
    number).
    """
    if not sys.platform.startswith("linux") or "backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    path = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    try:  # looks for symbols in the library's dependencies, too
        parallel = ctypes.CDLL(path).GOMP_parallel
        number = ctypes.PyDLL(path).omp_get_thread_num  # keeps the GIL
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = (_Member, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return parallel, number


def _is_team(threads: int) -> bool:
    return threads == torch.get_num_threads() and not _forked and _openmp() is not None


@_Member
def _member(key: int) -> None:
    """The callback that each thread of a team runs."""
    _parts[key]()


def _by_team(threads: int, part: Callable[[int], R]) -> list[R]:
    openmp = _openmp()
    assert openmp is not None
    parallel, number = openmp
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def run() -> None:
        try:
            thread = number()
            results[thread] = part(thread)
        except BaseException as error:
            errors.append(error)

    key = next(_keys)
    _parts[key] = run
    try:
        parallel(_member, key, threads, 0)
    finally:
        del _parts[key]
    if errors:
        raise errors[0]
    if 0 not in results:
        raise KeyboardInterrupt  # it came before the calling thread began, and was printed
    for thread in range(threads):
        if thread not in results:  # smaller team: OMP_THREAD_LIMIT, or nested in another one
            results[thread] = part(thread)
    return [results[thread] for thread in range(threads)]


# ---- threads of our own ----------------------------------------------------------------------------------------------

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _by_pool(threads: int, part: Callable[[int], R]) -> list[R]:
    global _pool, _pool_size  # noqa: PLW0603
    pool = _pool
    if pool is None or _pool_size < threads:
        # If another thread still uses the old pool, that finishes its work and is then collected.
        pool = _pool = ThreadPoolExecutor(threads, thread_name_prefix="narrowband-kernel")
        _pool_size = threads
    rest: list[Future[R]] = [pool.submit(part, thread) for thread in range(1, threads)]
    try:
        first = part(0)
    finally:
        wait(rest)  # an interrupted caller may free the memory that they write to
    return [first] + [future.result() for future in rest]


def _forget_threads() -> None:
    """Forget the pool in a forked child, which has none of its parent's threads."""
    global _pool, _pool_size, _forked
    _pool, _pool_size, _forked = None, 0, True


os.register_at_fork(after_in_child=_forget_threads)
