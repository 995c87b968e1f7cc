"""Saved activations, bit by bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.kernels.reference import rows as reference_rows
from tests.kernels.reference.naive import (
    KINDS,
    f32,
    lean,
    make,
    naive_bfloat16,
    naive_code,
    naive_group_nbytes,
    naive_header,
    naive_pack,
    naive_value,
    seeds,
)
from tests.kernels.tables import reference
from tests.thorough import examples


def cut_rows(rows: kernels.Rows) -> list[tuple[int, int, int]]:
    """(begin, end, the range) of every row."""
    cuts = []
    for p in range(rows.parts):
        for o in range(rows.outer):
            for g in range(rows.groups):
                begin = ((p * rows.outer + o) * rows.groups + g) * rows.inner
                cuts.append((begin, begin + rows.inner, p * rows.groups + g))
    assert len(cuts) == rows.total
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
    reference.dequantize_rows(codes, out, rows, torch.stack((low, step)), bits=bits)
    return out


some_rows = st.builds(
    kernels.Rows, parts=st.integers(1, 3), outer=st.integers(1, 4), groups=st.integers(1, 3), inner=st.integers(1, 40)
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(rows=some_rows, kind=st.sampled_from(KINDS), bits=st.sampled_from([2, 4, 8]), stochastic=st.booleans(),
       narrow=st.booleans(), half=st.booleans(), seed=seeds)  # fmt: skip
@settings(max_examples=80, deadline=None)
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
@settings(max_examples=examples(150), deadline=None)
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
        kernels.dequantize_rows(codes, out, rows, torch.stack((low, step)), bits=bits)
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
            backend.dequantize_rows(codes, out, rows, torch.stack((low, step)), bits=bits)
            assert torch.equal(out, levels * 0.25 - 3.0)


def test_every_step_and_every_code_for_zero_have_a_step_close_by_with_which_the_code_is_exactly_zero() -> None:
    """All mantissas of steps, rounded up to 16 bits: what inv misses a code by does not depend on the exponent."""
    step = 1 + torch.arange(1 << 15, dtype=torch.float32) * 2.0**-15
    for code in range(1, 256):
        zero = torch.full_like(step, code)
        found = reference_rows._centred(step, zero)
        assert torch.equal((zero * found) * (1 / found), zero)
        assert torch.equal((zero * found).double(), zero.double() * found.double())
        assert bool(((found >= step) & (found < step * 1.001)).all())
    between = torch.tensor([1 + 2.0**-23, 1.5 + 2.0**-16, 2 - 2.0**-23])
    assert bool((reference_rows._centred(between, torch.tensor([3.0, 77.0, 255.0])) >= between).all())


@pytest.mark.parametrize(("bits", "most"), [(4, 15 / 14), (8, 255 / 254)])
def test_zero_gets_a_level_by_the_smallest_step_that_cuts_nothing_off(bits: int, most: float) -> None:
    """All levels are tried in float64; see the equations in :mod:`narrowband.kernels.rows`."""
    top = 2**bits - 1
    low, high = -torch.rand(4000, dtype=torch.float64), torch.rand(4000, dtype=torch.float64) ** 4 + 1e-4
    estimates = torch.stack((high - low, low)).float()
    low, high = estimates[1].double(), estimates.sum(0).double()
    steps = [torch.maximum(-low / k, high / (top - k)) for k in range(1, top)]
    found_low, found = reference.code_ranges(estimates, bits=bits, symmetric=False, zeroed=True).double()
    best = torch.stack(steps).amin(0)
    assert bool(((found >= best * (1 - 1e-6)) & (found <= best * 1.001)).all())
    assert bool((best <= (high - low) / top * (most + 1e-6)).all())
    assert bool(((found_low <= low + 1e-6) & (found_low + top * found >= high - 1e-6)).all())


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
@settings(max_examples=examples(150), deadline=None)
def test_masks_say_what_is_beyond_neither_bound_and_apply_exactly(
    n: int, kind: str, half: bool, seed: int, factor: float
) -> None:
    x, y = (torch.from_numpy(make(k, n, seed)) for k in (kind, "non-finite"))
    if half:
        x, y = x.bfloat16(), y.bfloat16()
    nbytes = math.ceil(n / 8)
    mask = torch.full((nbytes,), 0xAA, dtype=torch.uint8)
    for low, high in ((-0.5, 0.25), (0.0, math.nan)):
        reference.mask_between(x, mask, low, high)
        bits = [mask[i % nbytes].item() >> i // nbytes & 1 for i in range(8 * nbytes)]
        assert bits == [*(int(not v <= low and not v >= high) for v in x.tolist()), *[0] * (8 * nbytes - n)]
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
@settings(max_examples=examples(150), deadline=None)
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
@settings(max_examples=examples(150), deadline=None)
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
