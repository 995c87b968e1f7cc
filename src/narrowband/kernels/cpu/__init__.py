"""The loops of :mod:`narrowband.kernels` on CPU, in Numba.

They are fast because blocks stay in L1 between two passes, integer loops are vectorized by LLVM (the magnitude of a
float is its bits without the sign), no temporary is as large as the tensor, and loops contain no calls.
"""

from __future__ import annotations

FUSES = True
