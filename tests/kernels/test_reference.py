"""The definitions of ``narrowband.kernels``, derived a second time with loops over Python ints and numpy scalars.

Everything named ``naive_*`` is written from the text of the package's docstring, bit by bit, and shares no code with
the backend under test. ``test_backends.py`` then holds the fast backend to this one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.errors import PayloadError
from narrowband.kernels import reference
from narrowband.kernels.reference import common

SIZES = [0, 1, 7, 8, 127, 128, 129, 1000]
GROUPS = [1, 8, 100, 128]
KINDS = ["normal", "equal", "zeros", "signed-zeros", "denormal", "tiny", "huge", "one-large", "non-finite"]
#: (scale, bits) of every quantizer there is; the symmetric scales need a code on each side of zero.
QUANTIZERS = {
    "minmax": range(1, 9),
    "absmax": range(2, 9),
    "l2": range(2, 9),
    "mean": range(1, 2),
}

f32 = np.float32


def make(kind: str, n: int, seed: int) -> np.ndarray:
    """Values of one kind: float32 (n,)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(f32)
    if kind == "equal":
        x[:] = f32(0.3)
    elif kind == "zeros":
        x[:] = 0
    elif kind == "signed-zeros":
        x = np.copysign(f32(0), x)
    elif kind == "denormal":
        x = (x * 1e-20).astype(f32) * f32(1e-20)
    elif kind == "tiny":
        x *= f32(2.0**-124)
    elif kind == "huge":
        x = np.clip(x, -3, 3) * f32(5e36)  # the norm of a group is still finite
    elif kind == "one-large" and n:
        x[rng.integers(n)] = 1e6
    elif kind == "non-finite" and n:
        x[rng.integers(n, size=1 + n // 300)] = rng.choice(np.array([np.nan, np.inf, -np.inf], f32))
    return x


def some_values(max_kind: int = len(KINDS)) -> st.SearchStrategy[np.ndarray]:
    return st.builds(make, st.sampled_from(KINDS[:max_kind]), st.sampled_from(SIZES), st.integers(0, 2**32 - 1))


def some_quantizer(*scales: str) -> st.SearchStrategy[tuple[str, int]]:
    return st.one_of([st.tuples(st.just(s), st.sampled_from(QUANTIZERS[s])) for s in scales or QUANTIZERS])


seeds = st.integers(0, 2**64 - 1)
lean = settings(max_examples=60, deadline=None)


# ---- the definitions, again ------------------------------------------------------------------------------------------


def naive_mix(h: int) -> int:
    h ^= h >> 16
    h = (h * 0x7FEB352D) % 2**32
    h ^= h >> 15
    h = (h * 0x846CA68B) % 2**32
    h ^= h >> 16
    return h


def naive_hash(i: int, seed: int) -> int:
    fold = (naive_mix(seed % 2**32) + 0x9E3779B9 * naive_mix(seed // 2**32) + 0x85EBCA6B) % 2**32
    return naive_mix((i + fold) % 2**32)


def naive_uniform(i: int, seed: int, bits: int = 24) -> np.float32:
    return f32(naive_hash(i, seed) // 2 ** (32 - bits) / 2**bits)


def naive_header(values: np.ndarray, bits: int, scale: str) -> tuple[np.float32, np.float32]:
    """(lo, step) of one group; lo is 0 where the scale has none."""
    if not np.isfinite(values).all():
        return f32(np.nan), f32(np.nan)
    s = 2 ** (bits - 1) - 1
    exact = [float(v) for v in values]
    if scale == "minmax":
        return f32(min(exact)), f32(f32(max(exact)) - f32(min(exact))) / f32(2**bits - 1)
    if scale == "absmax":
        return f32(0), f32(max(abs(v) for v in exact)) / f32(s)
    if scale == "l2":
        return f32(0), f32(math.sqrt(math.fsum(v * v for v in exact)) / s)
    return f32(0), f32(2 * math.fsum(abs(v) for v in exact) / len(exact))


def naive_code(
    value: np.float32,
    i: int,
    lo: np.float32,
    step: np.float32,
    bits: int,
    scale: str,
    stochastic: bool,
    seed: int,
    random_bits: int = 24,
) -> int:
    if np.isnan(step):
        return 0
    if scale == "mean":
        return 1 if value >= 0 else 0
    s = 2 ** (bits - 1) - 1
    inv = f32(1) / step if step >= 2.0**-126 else f32(0)
    u = naive_uniform(i, seed, random_bits) if stochastic else f32(0.5)
    scaled = f32(value - lo) * inv + u if scale == "minmax" else f32(value * inv) + f32(f32(s) + u)
    return int(np.clip(np.floor(scaled), 0, 2**bits - 1 if scale == "minmax" else 2 * s))


def naive_value(code: int, lo: np.float32, step: np.float32, bits: int, scale: str) -> np.float32:
    if scale == "minmax":
        return lo + f32(code) * step
    return f32(code - (0.5 if scale == "mean" else 2 ** (bits - 1) - 1)) * step


def naive_places(m: int, bits: int) -> list[list[tuple[int, int]]]:
    """Where each bit of each code of a group of m goes: ``places[j][b] = (byte, bit)``."""
    places: list[list[tuple[int, int]]] = [[] for _ in range(m)]
    start = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            stride = math.ceil(m * width / 8)
            for j in range(m):
                places[j] += [(start + j % stride, (j // stride) * width + b) for b in range(width)]
            start += stride
    return places


def naive_group_nbytes(m: int, bits: int) -> int:
    return sum(math.ceil(m * width / 8) for width in (8, 4, 2, 1) if bits & width)


def naive_pack(codes: list[int], bits: int) -> bytes:
    packed = bytearray(naive_group_nbytes(len(codes), bits))
    for code, places in zip(codes, naive_places(len(codes), bits), strict=True):
        for b, (byte, bit) in enumerate(places):
            packed[byte] |= (code >> b & 1) << bit
    return bytes(packed)


def naive_unpack(packed: bytes, m: int, bits: int) -> list[int]:
    return [
        sum((packed[byte] >> bit & 1) << b for b, (byte, bit) in enumerate(places)) for places in naive_places(m, bits)
    ]


def naive_bfloat16(value: np.float32) -> float:
    """The nearest multiple of the spacing of bfloat16 at this value, of two as near the even one."""
    exact = float(value)
    if not math.isfinite(exact):
        return exact
    _, exponent = math.frexp(exact)
    spacing = 2.0 ** max(exponent - 8, -133)  # eight significant bits; below 2**-126 the spacing stays
    rounded = round(exact / spacing) * spacing
    return rounded if abs(rounded) < 2.0**128 else math.copysign(math.inf, exact)


def naive_cut(n: int, group: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + group, n)) for begin in range(0, n, group)]


def naive_magnitude(value: Any) -> int:
    return int(f32(value).view(np.uint32)) & 0x7FFFFFFF


def naive_topk(x: np.ndarray, k: int) -> list[int]:
    return sorted(sorted(range(x.size), key=lambda i: (-naive_magnitude(x[i]), i))[:k])


def naive_strata(n: int, size: int, seed: int) -> list[int]:
    edges = [i * n // size for i in range(size + 1)] if size else []
    return [edges[i] + (naive_hash(i, seed) * (edges[i + 1] - edges[i]) >> 32) for i in range(size)]


def naive_elias_fano(indices: list[int], n: int) -> bytes:
    k = len(indices)
    low = 0
    while k * 2**low < n:
        low += 1
    upper, lower = [0] * (2 * k), []
    for i, index in enumerate(indices):
        upper[(index >> low) + i] = 1
        lower += [index >> b & 1 for b in range(low)]
    whole = b""
    for bits in (upper, lower):
        part = bits + [0] * (-len(bits) % 8)
        whole += bytes(sum(part[8 * byte + b] << b for b in range(8)) for byte in range(len(part) // 8))
    return whole


# ---- helpers ---------------------------------------------------------------------------------------------------------


def header_floats(n: int, group: int, scale: str) -> int:
    return -(-n // group) * (2 if scale == "minmax" else 1)


def encode(
    x: np.ndarray, bits: int, group: int, scale: Any, stochastic: bool, seed: int = 0, padding: int = 0
) -> bytes:
    nbytes = 4 * header_floats(x.size, group, scale) + kernels.packed_nbytes(x.size, bits, group)
    out = torch.full((nbytes + padding,), 0xAA, dtype=torch.uint8)
    reference.quantize_groups(
        torch.from_numpy(x), out, bits=bits, group=group, scale=scale, stochastic=stochastic, seed=seed
    )
    return out.numpy().tobytes()


def decode(payload: bytes, n: int, bits: int, group: int, scale: Any) -> np.ndarray:
    out = torch.full((n,), 7.0)
    reference.dequantize_groups(
        torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)],
        out,
        bits=bits,
        group=group,
        scale=scale,
    )
    return out.numpy()


def split(payload: bytes, n: int, group: int, scale: str) -> tuple[np.ndarray, np.ndarray, bytes]:
    """(lo or zeros, step, codes) of a payload."""
    groups = -(-n // group)
    floats = np.frombuffer(payload[: 4 * header_floats(n, group, scale)], f32)
    lows = floats[:groups] if scale == "minmax" else np.zeros(groups, f32)
    return lows, floats[floats.size - groups :], payload[4 * floats.size :]


def ints(indices: torch.Tensor) -> list[int]:
    assert indices.dtype == torch.int32
    return indices.tolist()


def pick(n: int, k: int, seed: int) -> list[int]:
    """k distinct sorted indices below n."""
    return sorted(np.random.default_rng(seed).choice(n, k, replace=False).tolist())


def elias_fano(indices: list[int], n: int) -> torch.Tensor:
    out = torch.full((kernels.elias_fano_nbytes(len(indices), n),), 0xAA, dtype=torch.uint8)
    reference.elias_fano_encode(torch.tensor(indices, dtype=torch.int32), n, out)
    return out


# ---- random numbers --------------------------------------------------------------------------------------------------


@given(seed=seeds, begin=st.integers(0, 2**31 - 1))
@lean
def test_uniform_is_the_documented_hash(seed: int, begin: int) -> None:
    got = common.uniform(begin, begin + 5, seed, torch.device("cpu"))
    assert got.tolist() == [float(naive_uniform(i, seed)) for i in range(begin, begin + 5)]


def test_uniform_is_uniform() -> None:
    u = common.uniform(0, 1 << 20, 3, torch.device("cpu")).double()
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / u.numel())
    counts = torch.histc(u, 256, 0, 1)
    assert ((counts - 4096) ** 2 / 4096).sum() < 255 + 5 * math.sqrt(2 * 255)  # chi-squared, 255 degrees of freedom


# ---- grouped quantization --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(x=some_values(), group=st.sampled_from(GROUPS), quantizer=some_quantizer(), stochastic=st.booleans(),
       seed=seeds, padding=st.integers(0, 5))  # fmt: skip
@settings(max_examples=200, deadline=None)
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
@settings(max_examples=150, deadline=None)
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
@settings(max_examples=150, deadline=None)
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


# ---- saved activations -----------------------------------------------------------------------------------------------


def cut_rows(rows: kernels.Rows) -> list[tuple[int, int, int]]:
    """(begin, end, the range) of every row."""
    cuts = []
    for p in range(rows.parts):
        for o in range(rows.outer):
            for g in range(rows.groups):
                begin = ((p * rows.outer + o) * rows.groups + g) * rows.inner
                cuts.append((begin, begin + rows.inner, p * rows.groups + g))
    assert len(cuts) == rows.count
    return cuts


def element_ranges(rows: kernels.Rows, per_range: torch.Tensor) -> torch.Tensor:
    """What every element of the tensor gets from its range, float64."""
    shape = rows.parts, rows.outer, rows.groups, rows.inner
    return per_range.double().view(rows.parts, 1, rows.groups, 1).expand(shape).reshape(-1)


def codes_of(
    x: torch.Tensor, rows: kernels.Rows, low: torch.Tensor, step: torch.Tensor, bits: int, **options: Any
) -> torch.Tensor:
    out = torch.full((rows.nbytes(bits),), 0xAA, dtype=torch.uint8)
    reference.quantize_rows(x, out, rows, low, step, bits=bits, **options)
    return out


def decoded(
    codes: torch.Tensor,
    rows: kernels.Rows,
    low: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    dtype: Any = torch.float32,
) -> torch.Tensor:
    out = torch.full((rows.numel,), 7.0, dtype=dtype)
    reference.dequantize_rows(codes, out, rows, low, step, bits=bits)
    return out


some_rows = st.builds(
    kernels.Rows, parts=st.integers(1, 3), outer=st.integers(1, 4), groups=st.integers(1, 3), inner=st.integers(1, 40)
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(rows=some_rows, kind=st.sampled_from(KINDS), bits=st.sampled_from([2, 4, 8]), stochastic=st.booleans(),
       narrow=st.booleans(), half=st.booleans(), seed=seeds)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_rows_bit_by_bit(
    rows: kernels.Rows, kind: str, bits: int, stochastic: bool, narrow: bool, half: bool, seed: int
) -> None:
    x = torch.from_numpy(make(kind, rows.numel, seed % 2**32))
    if half:
        x = x.bfloat16()
    values = x.float().numpy()
    members: dict[int, list[np.float32]] = {}
    for begin, end, r in cut_rows(rows):
        members.setdefault(r, []).extend(values[begin:end])
    headers = [naive_header(np.array(members[r]), bits, "minmax") for r in range(rows.parts * rows.groups)]
    lows, steps = (np.array(column, f32) for column in zip(*headers, strict=True))
    low, high = reference.row_extremes(x, rows)
    assert low.dtype == high.dtype == torch.float32
    np.testing.assert_array_equal(low.numpy(), lows)
    np.testing.assert_array_equal((high.numpy() - lows) / f32(2**bits - 1), steps)
    if narrow:
        steps = steps * f32(0.6)

    codes = codes_of(x, rows, low, torch.from_numpy(steps), bits, stochastic=stochastic, seed=seed)
    out = decoded(codes, rows, low, torch.from_numpy(steps), bits)
    short = decoded(codes, rows, low, torch.from_numpy(steps), bits, torch.bfloat16)
    expected, packed = [], b""
    for begin, end, r in cut_rows(rows):
        form = lows[r], steps[r], bits, "minmax", stochastic, seed, 16
        row = [naive_code(values[i], i, *form) for i in range(begin, end)]
        expected += [naive_value(code, lows[r], steps[r], bits, "minmax") for code in row]
        packed += naive_pack(row, bits)
    assert codes.numpy().tobytes() == packed
    np.testing.assert_array_equal(out.numpy(), np.array(expected))
    np.testing.assert_array_equal(short.float().numpy(), np.array([naive_bfloat16(v) for v in expected]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [1.0, 0.6])  # ranges are learned in Mesa: elements may exceed them
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_to_nearest_is_equations_3_to_5_of_mesa(bits: int, share: float, dtype: Any) -> None:
    """Pan et al., Mesa (arXiv:2111.11124): x~ = clip(round((x − β)·255/α), 0, 255), x^ = x~·α/255 + β, in float64."""
    rows = kernels.Rows(2, 50, 3, 64)
    x = torch.from_numpy(make("normal", rows.numel, bits)).to(dtype)
    least, most = reference.row_extremes(x, rows)
    shaped = x.double().view(2, 50, 3, 64)
    assert torch.equal(least.double().view(2, 3), shaped.amin((1, 3)))
    assert torch.equal(most.double().view(2, 3), shaped.amax((1, 3)))
    levels = 2**bits - 1
    step = share * (most - least) / levels
    beta, alpha = element_ranges(rows, least), element_ranges(rows, step) * levels
    exact = (x.double() - beta) * levels / alpha
    x_tilde = exact.round().clamp(0, levels)
    x_hat = x_tilde * alpha / levels + beta
    codes = codes_of(x, rows, least, step, bits, stochastic=False)
    found = ((decoded(codes, rows, least, step, bits).double() - beta) * levels / alpha).round()
    sure = ((exact - exact.floor()) - 0.5).abs() > 1e-4  # float32 may decide otherwise only at a tie
    assert sure.double().mean() > 0.99
    assert torch.equal(found[sure], x_tilde[sure])
    assert (found - x_tilde).abs().max() <= 1
    torch.testing.assert_close(decoded(codes, rows, least, step, bits).double()[sure], x_hat[sure], rtol=0, atol=2e-6)
    if share < 1:
        assert (x_tilde == levels).double().mean() > 0.01


@given(rows=some_rows, kind=st.sampled_from(KINDS[:-1]), bits=st.sampled_from([2, 4, 8]), stochastic=st.booleans(),
       seed=seeds)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_rows_err_by_less_than_a_step_and_stay_in_their_range(
    rows: kernels.Rows, kind: str, bits: int, stochastic: bool, seed: int
) -> None:
    x = torch.from_numpy(make(kind, rows.numel, seed % 2**32))
    low, high = reference.row_extremes(x, rows)
    step = (high - low) / (2**bits - 1)
    out = decoded(codes_of(x, rows, low, step, bits, stochastic=stochastic, seed=seed), rows, low, step, bits).double()
    steps = element_ranges(rows, step)
    # A handful of float32 roundings of numbers as large as the range's largest, and denormal steps that count as zero.
    rounding = 2.0**-21 * torch.maximum(element_ranges(rows, low).abs(), element_ranges(rows, high).abs()) + 2.0**-149
    denormal = torch.where(steps < 2.0**-126, 2**bits * steps, 0.0)
    assert ((out - x.double()).abs() <= (1.0 if stochastic else 0.5) * steps + rounding + denormal).all()
    assert (out >= element_ranges(rows, low)).all()
    assert (out <= element_ranges(rows, high) + rounding).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stochastic_rounding_of_rows_is_unbiased(bits: int) -> None:
    rows = kernels.Rows(2, 5, 3, 16)
    x = torch.from_numpy(make("normal", rows.numel, bits))
    low, high = kernels.row_extremes(x, rows)
    step = (high - low) / (2**bits - 1)
    trials = 600
    total = torch.zeros(rows.numel, dtype=torch.float64)
    codes, out = torch.empty(rows.nbytes(bits), dtype=torch.uint8), torch.empty(rows.numel)
    seen = set()
    for seed in range(trials):
        kernels.quantize_rows(x, codes, rows, low, step, bits=bits, stochastic=True, seed=seed << 7)
        kernels.dequantize_rows(codes, out, rows, low, step, bits=bits)
        seen.add(codes.numpy().tobytes())
        total += out
    assert len(seen) == trials
    bias = total / trials - x.double()
    sigma = element_ranges(rows, step) / 2 / math.sqrt(trials)  # at most the variance of a fair coin
    assert (bias.abs() <= 5 * sigma + 1e-6).all()
    assert bias.mean().abs() <= 5 * sigma.mean() / math.sqrt(rows.numel)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_what_lies_on_a_level_stays_there_whatever_the_seed(bits: int) -> None:
    rows = kernels.Rows(1, 1 << 12, 1, 1 << bits)
    levels = torch.arange(1 << bits, dtype=torch.float32).repeat(rows.outer)
    low, step = torch.tensor([-3.0]), torch.tensor([0.25])
    for seed in range(8):
        for backend in (reference, kernels):
            codes, out = torch.empty(rows.nbytes(bits), dtype=torch.uint8), torch.empty(rows.numel)
            backend.quantize_rows(levels * 0.25 - 3.0, codes, rows, low, step, bits=bits, stochastic=True, seed=seed)
            backend.dequantize_rows(codes, out, rows, low, step, bits=bits)
            assert torch.equal(out, levels * 0.25 - 3.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_range_decodes_to_nan_and_no_other_does(bad: float) -> None:
    rows = kernels.Rows(2, 5, 3, 16)
    x = torch.from_numpy(make("normal", rows.numel, 1))
    x.view(2, 5, 3, 16)[1, 3, 2, 7] = bad
    low, high = reference.row_extremes(x, rows)
    step = (high - low) / 255
    for stochastic in (False, True):
        codes = codes_of(x, rows, low, step, 8, stochastic=stochastic)
        broken = decoded(codes, rows, low, step, 8).isnan().view(2, 5, 3, 16)
        assert broken[1, :, 2].all()
        assert broken.sum() == 5 * 16


@given(n=st.integers(0, 200), kind=st.sampled_from(KINDS), half=st.booleans(), seed=st.integers(0, 2**32 - 1),
       factor=st.sampled_from([1.0, 1 / 0.9, -2.0]))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_masks_say_what_is_not_at_or_below_zero_and_apply_exactly(
    n: int, kind: str, half: bool, seed: int, factor: float
) -> None:
    x, y = (torch.from_numpy(make(k, n, seed)) for k in (kind, "non-finite"))
    if half:
        x, y = x.bfloat16(), y.bfloat16()
    nbytes = math.ceil(n / 8)
    mask = torch.full((nbytes,), 0xAA, dtype=torch.uint8)
    reference.mask_positive(x, mask)
    bits = [mask[i % nbytes].item() >> i // nbytes & 1 for i in range(8 * nbytes)]
    assert bits == [*(int(v > 0 or math.isnan(v)) for v in x.tolist()), *[0] * (8 * nbytes - n)]
    out = torch.full_like(y, 7.0)
    reference.apply_mask(mask, y, out, factor)
    expected = [f32(v) * f32(factor) if bit else f32(0) for v, bit in zip(y.tolist(), bits, strict=False)]
    if half:
        expected = [f32(naive_bfloat16(v)) for v in expected]
    np.testing.assert_array_equal(out.float().numpy(), np.array(expected, f32))
    assert not out[x <= 0].signbit().any()


largest_bfloat16 = st.integers(0x7F7E0000, 0x7F810000)
#: NaN whose rounding up would carry into the sign, or out of the number.
last_nans = st.sampled_from([0x7FFF8000, 0x7FFFFFFF, 0xFFFF8000, 0xFFFFFFFF])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(bits=st.lists(st.one_of(st.integers(0, 2**32 - 1), largest_bfloat16, last_nans), min_size=1, max_size=40))
@settings(max_examples=150, deadline=None)
def test_bfloat16_is_rounded_to_nearest_even(bits: list[int]) -> None:
    x = torch.from_numpy(np.resize(np.array(bits, np.uint32), 333).view(f32))  # each in vectors and behind them
    expected = np.array([naive_bfloat16(v) for v in x.numpy()])
    for write in (reference.apply_mask, kernels.apply_mask):
        out = torch.zeros(333, dtype=torch.bfloat16)
        write(torch.full((42,), 0xFF, dtype=torch.uint8), x, out)
        np.testing.assert_array_equal(out.double().numpy(), expected)


@given(outer=st.integers(0, 3), rows=st.integers(1, 4), columns=st.integers(1, 9), inner=st.integers(1, 3),
       spare=st.integers(1, 40), kernel=st.sampled_from([(1, 1), (3, 3), (2, 5), (16, 16), (256, 1), (1, 256)]),
       stride=st.tuples(st.integers(1, 5), st.integers(1, 5)), padding=st.tuples(st.integers(0, 9), st.integers(0, 9)),
       seed=st.integers(0, 2**32 - 1))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_places_are_where_in_the_window_a_position_is(
    outer: int, rows: int, columns: int, inner: int, spare: int, kernel: tuple[int, int], stride: tuple[int, int],
    padding: tuple[int, int], seed: int,
) -> None:  # fmt: skip
    """Any element of each window that is in the plane."""
    padding = padding[0] % kernel[0], padding[1] % kernel[1]  # each window has one
    width = max(0, (columns - 1) * stride[1] - padding[1]) + spare
    rng = np.random.default_rng(seed)
    positions, places = [], []
    for _, r, c, _ in np.ndindex(outer, rows, columns, inner):
        top, left = r * stride[0] - padding[0], c * stride[1] - padding[1]
        inside = range(max(0, -left), min(kernel[1], width - left))
        down, right = int(rng.integers(max(0, -top), kernel[0])), int(rng.choice(inside))
        positions.append((top + down) * width + left + right)
        places.append(down * kernel[1] + right)
    windows = kernels.Windows(outer, rows, columns, inner, width, kernel[1], stride, padding)
    position, place = torch.tensor(positions, dtype=torch.int64), torch.tensor(places, dtype=torch.uint8)
    for backend in (reference, kernels):
        found, again = torch.full_like(place, 0xAA), torch.full_like(position, -1)
        backend.pool_places(position, found, windows)
        backend.pool_positions(place, again, windows)
        assert torch.equal(found, place)
        assert torch.equal(again, position)


@given(rows=some_rows, bits=st.sampled_from([2, 4, 8]))
@lean
def test_sizes_of_rows_are_those_of_the_format(rows: kernels.Rows, bits: int) -> None:
    assert rows.numel == rows.parts * rows.outer * rows.groups * rows.inner
    assert rows.nbytes(bits) == sum(naive_group_nbytes(end - begin, bits) for begin, end, _ in cut_rows(rows))


# ---- selection -------------------------------------------------------------------------------------------------------


@given(x=some_values(), share=st.floats(0, 1), levels=st.sampled_from([0, 3]))
@lean
def test_topk_is_a_stable_sort_by_magnitude(x: np.ndarray, share: float, levels: int) -> None:
    if levels:
        x = np.round(np.clip(np.nan_to_num(x), -4, 4) * levels).astype(f32)  # many ties
    k = round(share * x.size)
    assert ints(reference.select_topk(torch.from_numpy(x), k)) == naive_topk(x, k)


@pytest.mark.parametrize(("n", "k"), [(1000, 1), (5000, 50), (5000, 2500), (5000, 4999), (20_000, 30), (3000, 3000)])
@pytest.mark.parametrize("kind", ["normal", "equal", "non-finite"])
def test_sampled_topk_is_topk_of_what_passes_the_sampled_threshold(n: int, k: int, kind: str) -> None:
    x = make(kind, n, n + k)
    few = enough = 0
    for seed in (0, 1, 2**40 + 3):
        got = ints(reference.select_topk(torch.from_numpy(x), k, sampled=True, seed=seed))
        if k == n:
            assert got == list(range(n))
            continue
        size = min(n, max(1024, math.ceil(128 * n / k)))
        rank = min(size, math.ceil(1.3 * size * k / n))
        sample = sorted((naive_magnitude(x[i]) for i in naive_strata(n, size, seed)), reverse=True)
        survivors = [i for i in range(n) if naive_magnitude(x[i]) >= sample[rank - 1]]
        if len(survivors) < k:
            few += 1
            assert got == survivors
        else:
            enough += 1
            assert got == naive_topk(x, k)
    assert few + enough == 3 or k == n


@given(x=some_values(), value=st.floats(2.0**-10, 1024, width=32))
@lean
def test_threshold(x: np.ndarray, value: float) -> None:
    expected = [i for i, v in enumerate(x.tolist()) if math.isnan(v) or abs(v) >= value]
    assert ints(reference.select_threshold(torch.from_numpy(x), value)) == expected


def test_threshold_itself_passes() -> None:
    x = torch.tensor([0.5, -0.5, 0.49999997, float("nan"), float("-inf"), 0.0])
    assert ints(reference.select_threshold(x, 0.5)) == [0, 1, 3, 4]


@given(n=st.integers(1, 2**31 - 1), k=st.integers(1, 40), seed=seeds)
@lean
def test_randomk_takes_one_of_each_stratum(n: int, k: int, seed: int) -> None:
    k = min(k, n)
    got = ints(reference.randomk_indices(n, k, seed, torch.device("cpu")))
    assert got == naive_strata(n, k, seed)
    assert len(set(got)) == k
    assert got[0] >= 0
    assert got[-1] < n


def test_randomk_of_nothing_and_of_everything() -> None:
    assert ints(reference.randomk_indices(0, 0, 1, torch.device("cpu"))) == []
    assert ints(reference.randomk_indices(9, 9, 1, torch.device("cpu"))) == list(range(9))


@given(x=some_values(), seed=st.integers(0, 99))
@lean
def test_compensate_adds_swaps_and_can_be_undone(x: np.ndarray, seed: int) -> None:
    owed = make("normal", x.size, seed)
    t, r = torch.from_numpy(x.copy()), torch.from_numpy(owed.copy())
    finite = reference.compensate(t, r)
    np.testing.assert_array_equal(r.numpy(), owed + x)
    assert finite == bool(np.isfinite(owed + x).all())
    assert t.numpy().tobytes() == owed.tobytes()
    r.copy_(t)
    assert r.numpy().tobytes() == owed.tobytes()


def test_compensate_notices_a_sum_that_overflows() -> None:
    x, residual = torch.full((3,), 3e38), torch.tensor([0.0, 3e38, 0.0])
    assert not reference.compensate(x, residual)
    assert reference.all_finite(x)
    assert not reference.all_finite(residual)


@given(x=some_values(8), share=st.floats(0, 1), sampled=st.booleans(), seed=seeds)
@lean
def test_fused_compensation_is_its_two_parts(x: np.ndarray, share: float, sampled: bool, seed: int) -> None:
    k = round(share * x.size)
    owed = make("normal", x.size, 3)
    t, r = torch.from_numpy(x.copy()), torch.from_numpy(owed.copy())
    finite, indices, values = reference.compensate_select_topk(t, r, k, sampled=sampled, seed=seed)
    assert finite
    assert t.numpy().tobytes() == owed.tobytes()
    np.testing.assert_array_equal(r.numpy(), owed + x)
    assert ints(indices) == ints(reference.select_topk(torch.from_numpy(owed + x), k, sampled=sampled, seed=seed))
    np.testing.assert_array_equal(values.numpy(), (owed + x)[ints(indices)])


@given(x=some_values())
@lean
def test_all_finite(x: np.ndarray) -> None:
    assert reference.all_finite(torch.from_numpy(x)) == bool(np.isfinite(x).all())


@given(x=some_values(), below=st.sampled_from([math.inf, 1.0]), seed=st.integers(0, 99))
@lean
def test_difference(x: np.ndarray, below: float, seed: int) -> None:
    base = make("normal", x.size, seed)
    out = torch.empty(x.size)
    fine = reference.difference(torch.from_numpy(x), torch.from_numpy(base), out, below=below)
    np.testing.assert_array_equal(out.numpy(), x - base)
    assert fine == bool((np.abs(x - base) < below).all())


# ---- sparse vectors --------------------------------------------------------------------------------------------------


def test_check_indices() -> None:
    for good in ([], [0], [4], [0, 0, 4, 4], [0, 1, 2, 3, 4]):
        reference.check_indices(torch.tensor(good, dtype=torch.int32), 5)
    for bad in ([-1], [5], [1, 0], [0, 5, 1], [-(2**31), 0], [0, 2**31 - 1], [3, 4, 2, 4]):
        with pytest.raises(PayloadError, match=r"sorted and in \[0, 5\)"):
            reference.check_indices(torch.tensor(bad, dtype=torch.int32), 5)


@given(n=st.sampled_from(SIZES[1:]), seed=st.integers(0, 999), weight=st.sampled_from([1.0, 0.25, -1 / 3]))
@lean
def test_sparse_accumulate_adds_every_neighbour(n: int, seed: int, weight: float) -> None:
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.integers(0, n, 200)).astype(np.int32)  # with repetitions
    values, out = rng.standard_normal(200).astype(f32), rng.standard_normal(n).astype(f32)
    expected = out.copy()
    for index, value in zip(indices, values, strict=True):
        expected[index] += f32(weight) * value
    got = torch.from_numpy(out)
    reference.sparse_accumulate(got, torch.from_numpy(indices), torch.from_numpy(values), weight)
    np.testing.assert_array_equal(got.numpy(), expected)


@given(n=st.one_of(st.sampled_from(SIZES[1:]), st.integers(1, 2**31 - 1)), share=st.floats(0, 1), seed=seeds)
@lean
def test_elias_fano_bit_by_bit(n: int, share: float, seed: int) -> None:
    k = max(1, round(share * min(n, 300)))
    indices = pick(n, k, seed) if n <= 5000 else naive_strata(n, k, seed)
    payload = elias_fano(indices, n)
    assert payload.numpy().tobytes() == naive_elias_fano(indices, n)
    assert ints(reference.elias_fano_decode(payload, k, n)) == indices


@given(n=st.integers(1, 2**31 - 1), k=st.integers(1, 2**31 - 1))
@lean
def test_elias_fano_takes_two_bits_and_the_low_ones(n: int, k: int) -> None:
    k = min(n, k)
    low = kernels.elias_fano_low_bits(k, n)
    assert k * 2**low >= n
    assert low == 0 or k * 2 ** (low - 1) < n
    assert kernels.elias_fano_nbytes(k, n) == math.ceil(2 * k / 8) + math.ceil(k * low / 8)


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_elias_fano_of_nothing_takes_nothing(n: int) -> None:
    assert elias_fano([], n).numel() == 0
    assert ints(reference.elias_fano_decode(torch.empty(0, dtype=torch.uint8), 0, n)) == []


@given(n=st.sampled_from([1, 5, 8, 9, 127, 1000, 10**6, 2**31 - 1]), k=st.integers(1, 60), seed=seeds)
@settings(max_examples=150, deadline=None)
def test_elias_fano_decoding_of_any_bytes_is_valid_or_refused(n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    payload = np.frombuffer(rng.bytes(kernels.elias_fano_nbytes(k, n)), np.uint8).copy()
    if seed % 2:  # exactly k ones in the upper part, so that the later checks are reached
        upper = np.zeros(8 * -(-2 * k // 8), np.uint8)
        upper[rng.choice(2 * k, k, replace=False)] = 1
        payload[: upper.size // 8] = np.packbits(upper, bitorder="little")
    try:
        indices = ints(reference.elias_fano_decode(torch.from_numpy(payload), k, n))
    except PayloadError:
        return
    assert len(indices) == k
    assert indices == sorted(indices)
    assert indices[0] >= 0
    assert indices[-1] < n


@given(n=st.sampled_from([10, 1000, 10**6]), k=st.integers(1, 40), where=st.integers(0, 10**6), seed=seeds)
@lean
def test_elias_fano_refuses_one_bit_more_or_less(n: int, k: int, where: int, seed: int) -> None:
    k = min(k, n)
    payload = elias_fano(naive_strata(n, k, seed), n)
    bit = where % (8 * -(-2 * k // 8))
    payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PayloadError, match=f"does not hold {k} sorted indices below {n}"):
        reference.elias_fano_decode(payload, k, n)


@given(n=st.sampled_from([9, 100, 1000]), k=st.integers(2, 7), where=st.integers(0, 999))
@lean
def test_elias_fano_refuses_an_index_that_is_too_large_or_descends(n: int, k: int, where: int) -> None:
    low = kernels.elias_fano_low_bits(k, n)
    assume(low > 0)
    cell = where % n >> low << low
    for wrong in ([cell + 1] + [cell] * (k - 1), [0] * (k - 1) + [n]):
        payload = torch.tensor(list(naive_elias_fano(wrong, n)), dtype=torch.uint8)
        with pytest.raises(PayloadError):
            reference.elias_fano_decode(payload, k, n)


# ---- any chunk, any device -------------------------------------------------------------------------------------------


def everything(x: torch.Tensor) -> list[torch.Tensor | bool]:
    """What each function of the backend makes of x, on x's device."""
    n, k = x.numel(), 40
    results: list[torch.Tensor | bool] = [*reference.group_minmax(x, 100), reference.all_finite(x)]
    scale: Any
    for scale, bits in (("minmax", 7), ("absmax", 4), ("mean", 1)):
        size = 4 * header_floats(n, 100, scale) + kernels.packed_nbytes(n, bits, 100) + 2
        payload = torch.empty(size, dtype=torch.uint8, device=x.device)
        reference.quantize_groups(x, payload, bits=bits, group=100, scale=scale, stochastic=True, seed=9)
        out = x.clone()
        reference.dequantize_groups(payload, out, bits=bits, group=100, scale=scale, weight=0.5, accumulate=True)
        results += [payload, out]
    for rows, bits, dtype in (
        (kernels.Rows(5, 6, 3, 50), 4, torch.float32),
        (kernels.Rows(2, 9, 7, 33), 2, torch.bfloat16),
    ):
        y = x[: rows.numel].to(dtype)
        low, high = reference.row_extremes(y, rows)
        step = (high - low) * (1 / (2**bits - 1))
        codes = torch.empty(rows.nbytes(bits), dtype=torch.uint8, device=x.device)
        reference.quantize_rows(y, codes, rows, low, step, bits=bits, stochastic=True, seed=9)
        gaps = torch.nn.functional.pad(y.view(-1, rows.groups * rows.inner), (1, 8))[:, 1:-8]
        again = torch.empty_like(codes)
        seen = reference.quantize_rows_extremes(gaps, again, rows, low, step, bits=bits, stochastic=True, seed=9)
        results += [*seen, again]
        out, applied = torch.empty_like(y), torch.empty_like(y)
        reference.dequantize_rows(codes, out, rows, low, step, bits=bits)
        mask = torch.empty(-(-y.numel() // 8), dtype=torch.uint8, device=x.device)
        reference.mask_positive(y, mask)
        reference.apply_mask(mask, y, applied, 0.7)
        results += [low, high, codes, out.float(), mask, applied.float()]
    planes = x[:1800].view(2, 3, 15, 20)
    _, position = torch.nn.functional.max_pool2d(planes, 3, 2, 1, return_indices=True)
    windows = kernels.Windows(6, 8, 10, 1, 20, 3, (2, 2), (1, 1))
    places, again = torch.empty_like(position, dtype=torch.uint8), torch.empty_like(position)
    reference.pool_places(position, places, windows)
    reference.pool_positions(places, again, windows)
    results += [places, again]
    codes, total = (
        torch.empty(n, dtype=torch.int16, device=x.device),
        torch.zeros(n // 2, dtype=torch.int32).to(x.device),
    )
    largest, checksum = reference.fixed_quantize(x, codes, 2.0**-12, 32767)
    packet, out = torch.empty_like(codes[: n // 2]), torch.empty_like(x[: n // 2])
    reference.fixed_sum(codes, [0, n // 2], packet)
    reference.fixed_decode(packet, codes, [0], total)
    reference.fixed_dequantize(total, out, 0.3)
    results += [torch.tensor([largest, checksum], dtype=torch.float64), codes, packet, total, out]
    residual, gradient = x.flip(0), x.clone()
    results += [*reference.compensate_select_topk(gradient, residual, k, sampled=True, seed=4), gradient, residual]
    indices = reference.select_topk(x, k)
    coded = torch.empty(kernels.elias_fano_nbytes(k, n), dtype=torch.uint8, device=x.device)
    reference.elias_fano_encode(indices, n, coded)
    decoded = reference.elias_fano_decode(coded, k, n)
    reference.check_indices(decoded, n)
    sparse = torch.zeros_like(x)
    reference.sparse_accumulate(sparse, decoded, x[decoded.long()], 0.3)
    results += [indices, coded, decoded, sparse, reference.select_threshold(x, 1.0)]
    return [*results, reference.randomk_indices(n, k, 5, x.device)]


def assert_same(got: list[torch.Tensor | bool], expected: list[torch.Tensor | bool]) -> None:
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, bool):
            assert a is b
        else:
            assert isinstance(a, torch.Tensor)
            assert a.dtype == b.dtype
            assert a.cpu().numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_results_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    x = torch.from_numpy(make("normal", 5050, 2))
    expected = everything(x)
    monkeypatch.setattr(common, "CHUNK", chunk)
    assert_same(everything(x), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_bytes_of_the_cpu() -> None:
    x = torch.from_numpy(make("normal", 200_001, 2))
    assert_same(everything(x.cuda()), everything(x))
