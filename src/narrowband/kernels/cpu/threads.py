"""How the loops on CPU are spread over threads.

:func:`spread` cuts the work into one contiguous range per thread. The thread count is ``torch.get_num_threads()``, and
results do not depend on it. Loops release the GIL and have no threads of their own, so several Python threads may call
at once, which Numba's own threading layers do not allow everywhere.

The ranges run on the threads of PyTorch's own operators, where these are OpenMP's: after an operator its threads look
for more work for about a millisecond before they sleep. Threads of ours would share the cores with them for as long.
Elsewhere, in a forked child, where OpenMP has no threads left, and for work that is worth only some of the threads,
which OpenMP would end the others for, there is a small thread pool.
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

#: Work below this many elements stays on the calling thread: handing it over costs 30 to 60 µs.
MIN_ELEMENTS_PER_THREAD = 1 << 16


def threads_for(elements: int, least: int = MIN_ELEMENTS_PER_THREAD) -> int:
    """How many threads this much work is worth, of which each has so many elements at least."""
    return 1 if elements < 2 * least else min(torch.get_num_threads(), elements // least)


def spread(
    units: int, elements: int, work: Callable[[int, int], R], *, least: int = MIN_ELEMENTS_PER_THREAD
) -> list[R]:
    """``work(start, stop)`` over [0, units), one contiguous range per thread; the results in order.

    ``elements`` is how much the units amount to, and decides how many threads are worth waking: each has ``least`` or
    more.
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
    """To call a function on all threads of PyTorch's operators, and which of them one is."""
    if not sys.platform.startswith("linux") or "backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    path = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    try:  # a symbol is looked for in what the library was linked with, too
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
    """What each thread of a team calls."""
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
        raise KeyboardInterrupt  # which came before the calling thread had begun, and was printed
    for thread in range(threads):
        if thread not in results:  # the team was smaller: OMP_THREAD_LIMIT, or we are inside of another one
            results[thread] = part(thread)
    return [results[thread] for thread in range(threads)]


# ---- threads of our own ----------------------------------------------------------------------------------------------

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _by_pool(threads: int, part: Callable[[int], R]) -> list[R]:
    global _pool, _pool_size  # noqa: PLW0603
    pool = _pool
    if pool is None or _pool_size < threads:
        # A pool that another thread still uses finishes its work and is then collected.
        pool = _pool = ThreadPoolExecutor(threads, thread_name_prefix="narrowband-kernel")
        _pool_size = threads
    rest: list[Future[R]] = [pool.submit(part, thread) for thread in range(1, threads)]
    try:
        first = part(0)
    finally:
        wait(rest)  # whoever is interrupted may let go of what they write to
    return [first] + [future.result() for future in rest]


def _forget_threads() -> None:
    """A forked child has none of its parent's."""
    global _pool, _pool_size, _forked
    _pool, _pool_size, _forked = None, 0, True


os.register_at_fork(after_in_child=_forget_threads)
