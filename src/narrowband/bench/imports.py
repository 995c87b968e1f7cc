"""What takes seconds to import, and every rank on loopback needs. The fork server imports this module once.

No thread may run in the server, and nothing that starts one: a forked process has no threads for it.
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

from narrowband.kernels.backends import Backend

# ``torch._dynamo`` because the first optimizer of a process imports it, and Numba's types because its first loop would
# load them.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
Backend("narrowband.kernels.cpu")
gc.freeze()  # what is here is nobody's garbage: collections in ranks pass it by, and its pages stay shared

# The server ends without shutting Python down: libraries that count what is left then (nanobind, behind Triton) would
# print pages of it to the terminal, after the command has said its last word. Ranks end in this way, too.
if "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    atexit.register(os._exit, 0)
