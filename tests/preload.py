"""What the fork server of :mod:`tests.ranks` does once, so that no rank has to: imports that take seconds, and Numba's
first function. No thread may run in the server, and no loop of narrowband's: a forked process has no threads for them.
"""

from __future__ import annotations

import gc

import hypothesis  # noqa: F401
import numba
import numpy as np
import pytest  # noqa: F401
import torch.distributed.pipelining  # noqa: F401

import narrowband.bench.imports  # noqa: F401


@numba.njit
def _first(x):  # type: ignore[no-untyped-def]
    return x[0] + x.shape[0]


_first(np.zeros(1, np.float32))
gc.freeze()  # what is here already is nobody's garbage: collections in ranks pass it by, and its pages stay shared
