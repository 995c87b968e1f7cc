"""What the fork server of :mod:`tests.ranks` does once, so that no rank has to: imports that take seconds. No thread
may run in the server, and no loop of narrowband's: a forked process has no threads for them.
"""

from __future__ import annotations

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._inductor.compile_fx
import torch.distributed.pipelining  # noqa: F401

import narrowband.bench.imports  # noqa: F401
from tests import guards

guards.measure_none()
gc.freeze()  # what is here already is nobody's garbage: collections in ranks pass it by, and its pages stay shared
