"""The loops of :mod:`narrowband.kernels` in plain torch: what they mean, and how they run on any device.

The formats are defined beside the public functions, in the file of the same name one folder up; here they are written
down as whole-tensor operations that can be checked line by line. Arithmetic on floats is one float32 operation per step
and never fused, so that a faster backend can reproduce every byte. Unsigned 32-bit arithmetic is done in int64 and
masked. Wide temporaries are made ``CHUNK`` elements at a time, so the reference needs little more memory than the
tensor it works on.
"""

from __future__ import annotations

FUSES = False
