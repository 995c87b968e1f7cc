"""What takes seconds to import, and every rank on loopback needs. The fork server imports this module once.

No thread may run in the server, and nothing that starts one: a forked process has no threads for it.
"""

from __future__ import annotations

import gc

import numba  # noqa: F401
import torch._dynamo
import torch.distributed
import torch.nn.parallel  # noqa: F401

import narrowband  # noqa: F401

# ``torch._dynamo`` because the first optimizer of a process imports it.
gc.freeze()  # what is here is nobody's garbage: collections in ranks pass it by, and its pages stay shared
