"""What takes seconds to import, and every rank on loopback needs. The fork server imports this module once.

No thread may run in the server, and nothing that starts one: a forked process has no threads for it.
"""

from __future__ import annotations

import gc

import torch._dynamo
import torch.distributed
import torch.nn.parallel  # noqa: F401
from numba.core.registry import cpu_target

import narrowband.kernels.cpu
import narrowband.kernels.reference  # noqa: F401

# ``torch._dynamo`` because the first optimizer of a process imports it, and Numba's types because its first loop would
# load them.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
gc.freeze()  # what is here is nobody's garbage: collections in ranks pass it by, and its pages stay shared
