"""The loops of :mod:`narrowband.kernels` in plain torch: the definition of each loop, for any device.

The formats are documented beside the public functions, in the file of the same name one folder up. Here the loops are
whole-tensor operations that can be checked line by line. Float arithmetic is one float32 operation per step and never
fused, so that a faster backend can reproduce every byte. Unsigned 32-bit arithmetic is done in int64 and masked. Wide
temporaries are made ``CHUNK`` elements at a time, so the reference needs little more memory than the tensor it works
on.
"""

from __future__ import annotations

FUSES = False
