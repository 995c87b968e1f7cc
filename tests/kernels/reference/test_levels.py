"""Values on levels of their group, bit by bit, from the text of the docstring."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowband import kernels
from tests.kernels.reference.naive import f32, lean, some_values
from tests.kernels.tables import reference


def bfloat16(x: float) -> bytes:
    """The two bytes of the nearest bfloat16, ties to even, at most the largest: by comparing with both neighbours."""
    if math.isnan(x):
        return b"\xc0\x7f"
    below = int.from_bytes(struct.pack("<f", x), "little") >> 16
    if below >= 0x7F7F:
        return b"\x7f\x7f"
    low, high = (Fraction(struct.unpack("<f", (b << 16).to_bytes(4, "little"))[0]) for b in (below, below + 1))
    up = Fraction(x) - low, high - Fraction(x), below % 2
    nearest = below + 1 if up[0] > up[1] or (up[0] == up[1] and up[2]) else below
    return nearest.to_bytes(2, "little")


def naive(values: np.ndarray, bits: int, group: int) -> bytes:
    head, codes = b"", []
    levels = 2 ** (bits - 1)
    for begin in range(0, values.size, group):
        own = values[begin : begin + group]
        sizes = [abs(float(v)) for v in own]
        if not all(map(math.isfinite, sizes)):
            low = high = math.nan
        elif bits == 4:
            low, high = min(sizes), max(sizes)
        else:
            mean = math.fsum(sizes) / len(sizes)
            above = [s for s in sizes if s >= mean]
            below = [s for s in sizes if s < mean]
            high = float(f32(math.fsum(above) / len(above)))
            low = float(f32(math.fsum(below) / len(below))) if below else high
        ends = bfloat16(low), bfloat16(high)
        head += ends[0] + ends[1]
        low, high = (f32(struct.unpack("<f", b"\0\0" + end)[0]) for end in ends)
        step = f32(f32(high - low) / f32(levels - 1))
        for v, s in zip(own, sizes, strict=True):
            code = 0
            if step > 0:
                with np.errstate(over="ignore"):
                    place = f32(f32(f32(s) - low) / step + f32(0.5))
                code = min(max(math.floor(place) if math.isfinite(place) else levels, 0), levels - 1)
            codes.append(code | int(np.signbit(v)) << (bits - 1))
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    return head + number.to_bytes(-(-len(codes) * bits // 8), "little")


@given(x=some_values(), bits=st.sampled_from([2, 4]), group=st.sampled_from([8, 64, 256]))
@lean
def test_the_payload_byte_by_byte(x: np.ndarray, bits: int, group: int) -> None:
    nbytes = kernels.levels_nbytes(x.size, bits, group)
    out = torch.full((nbytes + 3,), 0xAA, dtype=torch.uint8)
    reference.levels_encode(torch.from_numpy(x), out, bits=bits, group=group)
    expected = naive(x, bits, group) + b"\0\0\0"
    assert out.numpy().tobytes() == expected


@given(x=some_values(-1), bits=st.sampled_from([2, 4]), group=st.sampled_from([8, 256]))
@lean
def test_no_group_is_further_away_than_zero_is(x: np.ndarray, bits: int, group: int) -> None:
    """What error feedback needs: decoding leaves no more than there was, but for magnitudes rounded to bfloat16."""
    out = torch.empty(kernels.levels_nbytes(x.size, bits, group), dtype=torch.uint8)
    reference.levels_encode(torch.from_numpy(x), out, bits=bits, group=group)
    decoded = reference.levels_decode(out, x.size, bits=bits, group=group).double().numpy()
    for begin in range(0, x.size, group):
        own = x[begin : begin + group].astype(np.float64)
        lost = own - decoded[begin : begin + group]
        rounding = 2.0**-8 * np.abs(own).max() * math.sqrt(own.size) + 1e-38
        assert math.sqrt((lost**2).sum()) <= math.sqrt((own**2).sum()) + rounding


@pytest.mark.parametrize(("bits", "share"), [(4, 0.001), (2, 0.006)])
def test_what_selection_keeps_loses_little(bits: int, share: float) -> None:
    """The largest 1/64 of normal values: magnitudes from 2.4 on, of which a quantizer from zero on would waste half."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    kept = x[x.abs() > 2.4]
    out = torch.empty(kernels.levels_nbytes(kept.numel(), bits, 256), dtype=torch.uint8)
    reference.levels_encode(kept, out, bits=bits, group=256)
    lost = kept - reference.levels_decode(out, kept.numel(), bits=bits, group=256)
    assert float((lost**2).sum() / (kept**2).sum()) < share
