"""Values on levels of their group: each backend against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowband import kernels
from tests.kernels.backends.common import (
    BACKENDS,
    FAST_BACKENDS,
    KINDS,
    MILLION,
    SIZES,
    assert_all_same,
    back,
    lean,
    make,
    place,
)


def both(kind: str, n: int, bits: int, group: int, seed: int = 0, backends: list[Any] = BACKENDS) -> None:
    x = make(kind, n, seed)
    payloads, decoded = [], []
    for backend in backends:
        around = torch.full((kernels.levels_nbytes(n, bits, group) + 3 + 16,), 0xAA, dtype=torch.uint8)
        around = place(backend, around)
        backend.levels_encode(place(backend, x), around[8:-8], bits=bits, group=group)
        assert (around[:8] == 0xAA).all()
        assert (around[-8:] == 0xAA).all()
        payloads.append(back(around[8:-8]))
        decoded.append(back(backend.levels_decode(place(backend, payloads[0]), n, bits=bits, group=group)))
    assert_all_same(payloads, backends)
    assert_all_same(decoded, backends)


@given(kind=st.sampled_from(KINDS), n=st.sampled_from(SIZES), bits=st.sampled_from([2, 4]),
       group=st.sampled_from([8, 64, 256]), seed=st.integers(0, 999))  # fmt: skip
@lean
def test_levels(kind: str, n: int, bits: int, group: int, seed: int) -> None:
    both(kind, n, bits, group, seed)


@pytest.mark.parametrize("bits", [2, 4])
def test_many_levels(bits: int) -> None:
    both("normal", MILLION, bits, 256, backends=FAST_BACKENDS)


@given(payload=st.binary(min_size=16, max_size=16), bits=st.sampled_from([2, 4]))
@lean
def test_any_bytes_decode_to_the_same(payload: bytes, bits: int) -> None:
    raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    k = 8 * 12 // bits
    results = [backend.levels_decode(place(backend, raw), k, bits=bits, group=256) for backend in BACKENDS]
    assert_all_same(back(results))
