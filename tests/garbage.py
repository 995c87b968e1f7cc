"""What the garbage collector looks at, and garbage that acts when it is collected, at a chosen allocation."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

__all__ = ["collected_after", "pass_by_what_came", "pass_by_what_is_here"]

#: Objects that take a collection some hundredths of a second, and many more than a test leaves.
_MANY = 50_000


def pass_by_what_is_here() -> None:
    """Take all objects out of what the garbage collector looks at: in a long run there are a million of them, and every
    full collection would take half a second, of which some tests need many.
    """
    gc.collect()
    gc.freeze()


def pass_by_what_came() -> None:
    """Do so again behind a test that has left many objects, or has put the others back. The first one that compiles
    imports a quarter of PyTorch.
    """
    if len(gc.get_objects()) > _MANY:
        pass_by_what_is_here()


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
