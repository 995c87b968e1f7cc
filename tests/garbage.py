"""Garbage that acts when it is collected, at a chosen allocation."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

__all__ = ["collected_after"]


class _Cycle:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.own = self


@contextlib.contextmanager
def collected_after(allocations: int, act: Callable[[], object]) -> Iterator[None]:
    """Let the garbage collector run ``act`` in the block, after so many allocations of objects or a few less, if there
    are as many. Up to Python 3.11 it runs within an allocation, which may be in the middle of what is one operation
    otherwise.
    """
    before = gc.get_threshold()
    gc.disable()
    gc.freeze()  # so that collections are short
    finalizer = weakref.finalize(_Cycle(), act)
    gc.set_threshold(allocations)
    gc.enable()
    try:
        yield
    finally:
        finalizer.detach()
        gc.set_threshold(*before)
        gc.unfreeze()
