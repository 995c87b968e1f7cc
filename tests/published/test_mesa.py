"""Mesa's published kernel, in other words: the same codes where a value is in its range, and a clip where it is not.

Derived from github.com/ziplab/Mesa at commit 8b7a0db0461d: ``pack_single_precision_kernel`` and
``unpack_single_precision_kernel`` of ``mesa/cpp_extension/quantization_cuda_kernel.cu``. They were read and not run, as
they take a GPU. The kernel cuts what is below the range, and not what is above: of its code the low eight bits remain,
as if the value were small. The paper's equation clips on both sides, and so does this library.
"""

from __future__ import annotations

import numpy as np
import torch

from narrowband import kernels


def published(x, low, span, noise):
    """(the code before it is stored, what is restored), with a scale of (256 − 1) / span."""
    scale = np.float32(255.0) / span
    code = np.rint(np.maximum((x - low) * scale + noise - np.float32(0.5), np.float32(0.0))).astype(np.int64)
    return code, (code & 255).astype(np.float32) / scale + low


def found(x, low, span, stochastic=False, seed=0):
    """The codes and what is restored, by the loops of this library; one range for all."""
    rows, out = kernels.Rows(1, 1, 1, x.size), torch.empty(x.size)
    ranges = torch.tensor([float(low)]), torch.tensor([float(span / np.float32(255))])
    codes = torch.empty(rows.nbytes(8), dtype=torch.uint8)
    kernels.quantize_rows(torch.from_numpy(x), codes, rows, *ranges, bits=8, stochastic=stochastic, seed=seed)
    kernels.dequantize_rows(codes, out, rows, torch.stack(ranges), bits=8)
    return codes.numpy().astype(np.int64), out.numpy()


def test_inside_its_range_a_value_has_the_same_code_and_comes_back_alike():
    x = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    low, span = x.min(), x.max() - x.min()
    codes, restored = found(x, low, span)
    theirs, back = published(x, low, span, np.float32(0.5))  # noise of a half: the nearest
    assert (codes != theirs).mean() < 1e-3, "but for ties"
    assert np.abs(codes - theirs).max() <= 1
    same = codes == theirs
    np.testing.assert_allclose(restored[same], back[same], rtol=0, atol=1e-6 * span)
    for noise in np.float32([0.0, 0.25, 0.75, 1.0]):  # rounding at random: one of the two levels around a value
        drawn, _ = published(x, low, span, noise)
        mine, _ = found(x, low, span, stochastic=True, seed=int(noise * 4))
        assert np.abs(drawn - mine).max() <= 1


def test_outside_of_it_the_published_kernel_wraps_and_this_one_clips():
    low, span = np.float32(-1.0), np.float32(2.0)  # a range that was learned before
    x = np.linspace(-1.5, 1.5, 601, dtype=np.float32)
    codes, restored = found(x, low, span)
    theirs, back = published(x, low, span, np.float32(0.5))
    above, below = x > 1.01, x < -1.01
    assert (theirs[above] > 255).all()
    assert (back[above] < 0).all(), "as if it were the smallest"
    assert (codes[above] == 255).all()
    np.testing.assert_allclose(restored[above], 1.0, atol=1e-6)
    assert (theirs[below] == 0).all()
    assert (codes[below] == 0).all()
