"""Elias–Fano parts whose indices descend are damaged on every backend, wherever in the part two of them stand."""

from __future__ import annotations

import pytest
import torch

from narrowband.errors import PayloadError
from narrowband.kernels import elias_fano_low_bits
from tests.kernels.backends.common import BACKENDS

#: How many indices there are, and the number that all are below.
K, N = 8, 128


def part_of(indices):
    """The payload that names these indices, whether or not they ascend among those of one upper part."""
    low_bits = elias_fano_low_bits(K, N)
    upper = sum(1 << (index >> low_bits) + at for at, index in enumerate(indices))
    lower = sum((index & (1 << low_bits) - 1) << at * low_bits for at, index in enumerate(indices))
    written = upper.to_bytes(-(-2 * K // 8), "little") + lower.to_bytes(-(-K * low_bits // 8), "little")
    return torch.tensor(list(written), dtype=torch.uint8)


#: All of one upper part: bits 4 to 11 of the upper part are set, of which the first byte has those of four indices.
ASCENDING = [64, 65, 66, 67, 68, 69, 70, 71]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("place", range(1, K))
def test_two_indices_of_one_upper_part_may_not_descend(backend, place):
    assert backend.elias_fano_decode(part_of(ASCENDING), K, N).tolist() == ASCENDING
    swapped = [*ASCENDING]
    swapped[place - 1], swapped[place] = swapped[place], swapped[place - 1]
    with pytest.raises(PayloadError, match="does not hold 8 sorted indices below 128"):
        backend.elias_fano_decode(part_of(swapped), K, N)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_the_low_bits_of_indices_of_other_upper_parts_say_nothing_about_their_order(backend):
    indices = [15, 16, 31, 32, 47, 64, 79, 96]
    assert backend.elias_fano_decode(part_of(indices), K, N).tolist() == indices
