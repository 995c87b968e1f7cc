"""Measure what a message costs in this machine's software, with gloo between two threads of a process, over loopback.

On a fast link, and for small messages on any link, this is most of the time that a message takes.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # what dist.HashStore is, for type checkers

from narrowband.errors import UnsupportedError
from narrowband.planning.links import Host

__all__ = ["PAUSE_S", "measure_host"]

_TIMEOUT = timedelta(seconds=60)
_SMALL, _LARGE = 2, 1 << 20  # elements of float32: 8 bytes, and more than caches hold
_TIMES_SMALL, _TIMES_LARGE = 21, 4

#: Pause before each message: in training, messages reach threads that sleep and have to be woken.
PAUSE_S = 0.01


def measure_host() -> Host:
    """Measure the cost of messages on this machine, in a fraction of a second.

    Raises:
        UnsupportedError: this PyTorch has no gloo.

    Example:
        >>> measure_host().hop_s < 1.0
        True
    """
    if not dist.is_gloo_available():
        raise UnsupportedError("measuring messages needs the gloo backend, and this build of PyTorch does not have it")
    store = HashStore()
    groups: list[Any] = [None, None]

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT)

    _both(make)

    def gather(rank: int) -> float:
        x, out = (torch.zeros(n, dtype=torch.float32, device="cpu") for n in (_SMALL, 2 * _SMALL))
        taken = []
        for _ in range(_TIMES_SMALL):
            time.sleep(PAUSE_S)
            begin = time.perf_counter()
            groups[rank].allgather([[*out.view(2, -1)]], [x]).wait()
            taken.append(time.perf_counter() - begin)
        return statistics.fmean(taken)

    hop_s = max(_both(gather))
    x = [torch.zeros(_LARGE, dtype=torch.float32, device="cpu") for _ in groups]

    def reduce(rank: int) -> None:
        for _ in range(_TIMES_LARGE):
            groups[rank].allreduce([x[rank]]).wait()

    _both(reduce)
    begin = time.process_time()
    _both(reduce)
    spent = time.process_time() - begin
    # In an all-reduce of two ranks, each rank sends as many bytes as the tensor has. Both ranks are in this process.
    return Host(hop_s, spent / (_TIMES_LARGE * 2 * x[0].nbytes))


def _both(work: Callable[[int], Any]) -> Sequence[Any]:
    """Run ``work`` in two threads, one per rank, and return both results."""
    found: list[Any] = [None, None]
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:  # raised in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found
