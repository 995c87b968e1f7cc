"""Fixed point: every backend against whole numbers of Python, and what sums modulo 2**bits promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.backends.common import BACKENDS, FAST_BACKENDS, back, place
from tests.kernels.tables import cpu, reference
from tests.thorough import thorough

DTYPES = [torch.int32, torch.int16, torch.int8]
SPECIAL = [0.0, -0.0, 1e-45, -1e-30, 0.5, 1.5, -2.5, 126.5, 127.5, -32767.5, 3e38, -3e38, math.inf, -math.inf, math.nan]

dtypes = st.sampled_from(DTYPES)
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def widest(dtype):
    return torch.iinfo(dtype).max


def naive_code(value, unit, limit):
    """Python rounds a fraction to the nearest whole number, ties to even, and its numbers never wrap."""
    top = np.float32(limit)
    top = int(top) if int(top) <= limit else int(np.nextafter(top, np.float32(0)))
    if math.isnan(value):
        return top
    if math.isinf(value):
        return int(math.copysign(top, value))
    return max(-top, min(top, round(value / unit)))


def wrapped(value, bits):
    """A whole number modulo 2**bits, as a signed one."""
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


values = st.lists(st.one_of(st.floats(width=32), st.sampled_from(SPECIAL), st.floats(-9, 9, width=32)), max_size=60)


@every_backend
@given(values=values, dtype=dtypes, exponent=st.integers(-40, 20), share=st.integers(1, 300))
def test_codes_are_the_nearest_whole_numbers(backend, values, dtype, exponent, share):
    unit, limit = 2.0**exponent, max(1, widest(dtype) // share)
    x = torch.tensor(values, dtype=torch.float32)
    out = place(backend, torch.full((len(values) + 2,), 5, dtype=dtype))
    largest, checksum = backend.fixed_quantize(place(backend, x), out[1:-1], unit, limit)
    expected = [naive_code(v, unit, limit) for v in x.tolist()]
    assert out.tolist() == [5, *expected, 5]
    assert checksum == sum(code * (2 * i + 1) for i, code in enumerate(expected)) % 2**32
    if any(math.isnan(v) for v in values):
        assert math.isnan(largest)
    else:
        assert largest == max((abs(v) for v in x.tolist()), default=0.0)


@every_backend
@given(data=st.data(), dtype=dtypes, n=st.integers(0, 40), terms=st.integers(1, 10), wide=st.booleans())
def test_sums_are_those_of_whole_numbers(backend, data, dtype, n, terms, wide):
    info = torch.iinfo(dtype)
    source = torch.tensor(data.draw(st.lists(st.integers(info.min, info.max), min_size=50 + n, max_size=50 + n)))
    source, starts = source.to(dtype), data.draw(st.lists(st.integers(0, 50), min_size=terms, max_size=terms))
    out = place(backend, torch.full((n + 2,), 5, dtype=torch.int32 if wide else dtype))
    backend.fixed_sum(place(backend, source), starts, out[1:-1])
    bits = torch.iinfo(out.dtype).bits
    exact = [sum(int(source[start + i]) for start in starts) for i in range(n)]
    assert out.tolist() == [5, *(wrapped(value, bits) for value in exact), 5]


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [1, 2, 7, *thorough(3, 4, 11)])
@pytest.mark.parametrize("n", [0, 1, 2047, 2048, 5000])
def test_what_is_left_of_a_packet_is_the_one_slice_that_was_not_known(backend, dtype, terms, n):
    info = torch.iinfo(dtype)
    source = torch.randint(info.min, info.max + 1, (terms * n,), dtype=dtype)
    starts = [k * n for k in range(terms)]
    own, packet = place(backend, source), place(backend, torch.empty(n, dtype=dtype))
    total = place(backend, torch.full((n,), 7, dtype=torch.int32))
    backend.fixed_sum(own, starts, packet)
    backend.fixed_decode(packet, own, starts[:-1], total)
    assert torch.equal(total.cpu(), source[starts[-1] :][:n].to(torch.int32) + 7)


@every_backend
def test_what_is_decoded_is_rounded_once(backend):
    total = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 16_777_217, 123_456_789], dtype=torch.int32)
    out = place(backend, torch.empty(total.numel()))
    for factor in (1.0, 2.0**-27, 0.1, -0.1, 0.0, 3.0**-30):
        backend.fixed_dequantize(place(backend, total), out, factor)
        assert out.tolist() == [float(np.float32(value * factor)) for value in total.tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_million_elements_are_the_same_on_all_backends_and_any_number_of_threads(dtype):
    n = 1_000_003
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    before, outcomes = torch.get_num_threads(), []
    try:
        for backend, threads in ((reference, 1), (cpu, 1), *((backend, 3) for backend in FAST_BACKENDS[:-1])):
            torch.set_num_threads(threads)
            codes, packet = (place(backend, torch.empty(size, dtype=dtype)) for size in (n, n // 4))
            total, out = place(backend, torch.arange(n // 4, dtype=torch.int32)), place(backend, torch.empty(n // 4))
            told = backend.fixed_quantize(place(backend, x), codes, 2.0**-6, widest(dtype) // 3)
            starts = [0, n // 4, n // 2]
            backend.fixed_sum(codes, starts, packet)
            backend.fixed_decode(packet, codes, starts[1:], total)
            backend.fixed_dequantize(total, out, 0.3)
            outcomes.append(back((told, codes, packet, total, out)))
    finally:
        torch.set_num_threads(before)
    for other in outcomes[1:]:
        assert other[0] == outcomes[0][0]
        for got, expected in zip(other[1:], outcomes[0][1:], strict=True):
            assert torch.equal(got, expected)
