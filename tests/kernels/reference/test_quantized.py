"""Grouped quantization, bit by bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband import kernels
from tests.kernels.reference.naive import (
    GROUPS,
    SIZES,
    decode,
    encode,
    f32,
    header_floats,
    lean,
    make,
    naive_code,
    naive_cut,
    naive_group_nbytes,
    naive_header,
    naive_pack,
    naive_unpack,
    naive_value,
    seeds,
    some_quantizer,
    some_values,
    split,
)
from tests.kernels.tables import reference


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(x=some_values(), group=st.sampled_from(GROUPS), quantizer=some_quantizer(), stochastic=st.booleans(),
       seed=seeds, padding=st.integers(0, 5))  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_payload_bit_by_bit(
    x: np.ndarray, group: int, quantizer: tuple[str, int], stochastic: bool, seed: int, padding: int
) -> None:
    scale, bits = quantizer
    payload = encode(x, bits, group, scale, stochastic, seed, padding)
    lows, steps, codes = split(payload, x.size, group, scale)
    at = 0
    for g, (begin, end) in enumerate(naive_cut(x.size, group)):
        lo, step = naive_header(x[begin:end], bits, scale)
        np.testing.assert_array_equal(lows[g], lo if scale == "minmax" else 0)
        if scale in ("l2", "mean"):  # the order of a float64 sum is free: the last bit may differ
            np.testing.assert_array_max_ulp(steps[g : g + 1], np.array([step]), 1)
        else:
            np.testing.assert_array_equal(steps[g], step)
        expected = [naive_code(x[i], i, lows[g], steps[g], bits, scale, stochastic, seed) for i in range(begin, end)]
        nbytes = naive_group_nbytes(end - begin, bits)
        assert codes[at : at + nbytes] == naive_pack(expected, bits)
        at += nbytes
    assert codes[at:] == bytes(padding)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(n=st.sampled_from(SIZES), group=st.sampled_from(GROUPS), quantizer=some_quantizer(), seed=seeds,
       weight=st.sampled_from([1.0, 0.25, -1 / 3]), accumulate=st.booleans(), offset=st.integers(0, 3))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_decoding_of_any_bytes_follows_the_table(
    n: int, group: int, quantizer: tuple[str, int], seed: int, weight: float, accumulate: bool, offset: int
) -> None:
    """Random codes and header bits, NaN and inf among them, at any address; nothing beyond the output changes."""
    scale: Any
    scale, bits = quantizer
    floats = header_floats(n, group, scale)
    rng = np.random.default_rng(seed)
    payload = rng.bytes(4 * floats + kernels.packed_nbytes(n, bits, group))
    if seed % 2:  # ordinary headers, so that most values are finite
        payload = rng.standard_normal(floats).astype(f32).tobytes() + payload[4 * floats :]
    lows, steps, codes = split(payload, n, group, scale)
    before = rng.standard_normal(n + 16).astype(f32)
    expected = before.copy()
    at = 0
    for g, (begin, end) in enumerate(naive_cut(n, group)):
        nbytes = naive_group_nbytes(end - begin, bits)
        for i, code in enumerate(naive_unpack(codes[at : at + nbytes], end - begin, bits), begin + 8):
            value = f32(weight) * naive_value(code, lows[g], steps[g], bits, scale)
            expected[i] = expected[i] + value if accumulate else value
        at += nbytes
    out = torch.from_numpy(before.copy())
    reference.dequantize_groups(
        torch.frombuffer(bytearray(offset) + bytearray(payload) + bytearray(1), dtype=torch.uint8)[offset:-1],
        out[8 : n + 8],
        bits=bits,
        group=group,
        scale=scale,
        weight=weight,
        accumulate=accumulate,
    )
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(x=some_values(8), group=st.sampled_from(GROUPS), quantizer=some_quantizer("minmax", "absmax", "l2"),
       stochastic=st.booleans(), seed=seeds)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_error_is_below_half_a_step_or_a_step(
    x: np.ndarray, group: int, quantizer: tuple[str, int], stochastic: bool, seed: int
) -> None:
    scale, bits = quantizer
    payload = encode(x, bits, group, scale, stochastic, seed)
    steps = np.repeat(split(payload, x.size, group, scale)[1].astype(np.float64), group)[: x.size]
    error = np.abs(decode(payload, x.size, bits, group, scale).astype(np.float64) - x)
    # A handful of float32 roundings of numbers as large as the group's largest, and denormal steps that count as zero.
    largest = max((float(np.abs(x).max()) if x.size else 0.0), 2.0**-126)
    rounding = 2.0**-21 * largest + np.where(steps < 2.0**-126, 2**bits * 2.0**-126, 0.0)
    assert (error <= (1.0 if stochastic else 0.5) * steps + rounding).all()


@pytest.mark.parametrize(("scale", "bits"), [("minmax", 1), ("minmax", 4), ("absmax", 3), ("l2", 2), ("l2", 8)])
def test_stochastic_rounding_is_unbiased(scale: str, bits: int) -> None:
    x = make("normal", 256, 5)
    trials = 600
    total = np.zeros(256)
    for seed in range(trials):
        payload = encode(x, bits, 128, scale, stochastic=True, seed=seed << 7)
        total += decode(payload, 256, bits, 128, scale)
    steps = np.repeat(split(payload, 256, 128, scale)[1].astype(np.float64), 128)
    bias = total / trials - x
    sigma = steps / 2 / math.sqrt(trials)  # rounding up or down has at most the variance of a fair coin
    assert (np.abs(bias) <= 5 * sigma + 1e-6).all()
    assert abs(bias.mean()) <= 5 * sigma.mean() / math.sqrt(256)


@pytest.mark.parametrize(("scale", "bits"), [("minmax", 7), ("absmax", 4), ("absmax", 8)])
def test_the_extremes_never_round_beyond_the_last_code(scale: str, bits: int) -> None:
    """s + u rounds up to s + 1 where u is nearly 1: once in 2**18 elements at 8 bits."""
    n = 1 << 20
    x = np.resize(np.array([-1, 1], f32), n)
    step = 2 / (127 if scale == "minmax" else 2 ** (bits - 1) - 1) / (1 if scale == "minmax" else 2)
    out = decode(encode(x, bits, n, scale, stochastic=True, seed=1), n, bits, n, scale)
    assert np.abs(out).max() <= 1 + 1e-6
    assert np.abs(out - x).max() <= step + 1e-6


@pytest.mark.parametrize(("scale", "bits"), [("absmax", 4), ("absmax", 7), ("absmax", 8), ("l2", 8)])
def test_zero_is_kept_as_zero_whatever_the_seed(scale: str, bits: int) -> None:
    """Where u is nearly 1: s + u must not be rounded to s + 1."""
    n, group = 1 << 20, 1 << 12
    x = np.zeros(n, f32)
    x[::group] = 1
    for seed in range(4):
        out = decode(encode(x, bits, group, scale, stochastic=True, seed=seed), n, bits, group, scale)
        assert not out[x == 0].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("scale", "bits"), [("minmax", 4), ("absmax", 5), ("l2", 3), ("mean", 1)])
def test_a_broken_group_decodes_to_nan_and_no_other_does(scale: str, bits: int, bad: float) -> None:
    x = make("normal", 1000, 1)
    x[300] = bad
    for stochastic in (False, True):
        out = decode(encode(x, bits, 128, scale, stochastic), 1000, bits, 128, scale)
        assert np.flatnonzero(np.isnan(out)).tolist() == list(range(256, 384))


@given(x=some_values(), group=st.sampled_from(GROUPS))
@lean
def test_group_minmax(x: np.ndarray, group: int) -> None:
    low, high = reference.group_minmax(torch.from_numpy(x), group)
    assert low.dtype == high.dtype == torch.float32
    cuts = naive_cut(x.size, group)
    good = [bool(np.isfinite(x[a:b]).all()) for a, b in cuts]
    assert [v for v, ok in zip(low.tolist(), good, strict=True) if ok] == [
        min(x[a:b].tolist()) for (a, b), ok in zip(cuts, good, strict=True) if ok
    ]
    assert [v for v, ok in zip(high.tolist(), good, strict=True) if ok] == [
        max(x[a:b].tolist()) for (a, b), ok in zip(cuts, good, strict=True) if ok
    ]
    assert [math.isnan(v) for v in low.tolist()] == [math.isnan(v) for v in high.tolist()] == [not ok for ok in good]


@pytest.mark.parametrize("bits", range(1, 9))
def test_sizes_are_those_of_the_format(bits: int) -> None:
    for n in SIZES:
        for group in GROUPS:
            expected = sum(naive_group_nbytes(end - begin, bits) for begin, end in naive_cut(n, group))
            assert kernels.packed_nbytes(n, bits, group) == expected
