"""Import the modules that take seconds and that every rank on loopback needs. The fork server imports this module once.

The server must not start threads, because a forked process does not inherit them.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

import torch._dynamo
import torch.distributed
import torch.nn.parallel  # noqa: F401
from numba.core.registry import cpu_target

import narrowband.activations
import narrowband.adapt
import narrowband.coded
import narrowband.gradients
import narrowband.pipeline
import narrowband.sharding
import narrowband.updates  # noqa: F401
from narrowband.kernels.backends import Backend

# ``torch._dynamo``, because the first optimizer of a process imports it, and Numba's types, because its first loop
# loads them.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
Backend("narrowband.kernels.cpu")
gc.freeze()  # collections in ranks skip all objects so far, so that their pages stay shared

# The server exits without shutting Python down: at shutdown, libraries that count leaked objects (nanobind, behind
# Triton) would print pages of them to the terminal, after the command's last output. Ranks exit in this way, too.
if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    atexit.register(os._exit, 0)
