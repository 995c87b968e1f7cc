"""Tensors that lie in memory in any order."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.activations import ActivationPolicy
from narrowband.activations.arena import Arena
from narrowband.activations.packed import Payload, quantized


@st.composite
def some_tensor(draw, min_dim=1):
    """Numbers in any order of dimensions, sliced or whole."""
    shape = draw(st.lists(st.integers(1, 6), min_size=min_dim, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    x = torch.arange(math.prod(shape), dtype=torch.float32).view([shape[dim] for dim in order])
    x = x.permute([order.index(dim) for dim in range(len(shape))])
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        begin = draw(st.integers(0, shape[dim] - 1))
        x = x.narrow(dim, begin, draw(st.integers(1, shape[dim] - begin)))
    return x


def taken(x, estimates, policy=None):
    """The codes of a batch."""
    made = quantized(
        x, kernels.Rows(1, 50, 3, 1), 8, x.dtype, Arena(), policy or ActivationPolicy(), estimates, "a"
    )  # fmt: skip
    assert isinstance(made, Payload)
    return made
