"""The loops of :mod:`narrowband.kernels` on CPU, in Numba.

What makes them fast: blocks that stay in L1 between two passes, integer loops that LLVM vectorizes (the magnitude of a
float is its bits without the sign), no temporaries as large as the tensor, and no calls inside of loops.
"""

from __future__ import annotations

FUSES = True
