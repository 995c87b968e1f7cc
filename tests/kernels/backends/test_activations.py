"""Saved activations: each backend against the reference."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.kernels.cpu.rows import _learner
from narrowband.kernels.outliers import pieces_of
from tests.kernels.backends.common import BACKENDS, assert_all_same, on_all
from tests.kernels.tables import cpu, reference

if TYPE_CHECKING:
    from torch import Tensor

from tests.kernels.backends.common import (
    KINDS,
    SIZES,
    assert_same,
    back,
    dtypes,
    lean,
    make,
    make_as,
    place,
    seeds,
    some_rows,
    written,
)
from tests.thorough import examples


@given(rows=some_rows, kind=st.sampled_from(KINDS), dtype=dtypes, out_dtype=dtypes, bits=st.sampled_from([2, 4, 8]),
       stochastic=st.booleans(), ranges=st.sampled_from(["extremes", "narrow", "any-bits"]), seed=seeds)  # fmt: skip
@settings(max_examples=examples(250), deadline=None)
def test_rows_of_activations(
    rows: kernels.Rows, kind: str, dtype: Any, out_dtype: Any, bits: int, stochastic: bool, ranges: str, seed: int
) -> None:
    shape = rows.parts, rows.outer, rows.groups, rows.inner
    x = torch.nn.functional.pad(make_as(dtype, kind, rows.numel, seed % 2**32), (1, 0))[1:].view(shape)
    low, high = on_all("row_extremes", x, rows)
    step = (high - low) / (2**bits - 1)
    if ranges == "narrow":
        step *= 0.7
    elif ranges == "any-bits":
        low, step = make("any-bits", 2 * low.numel(), 1 + seed % 1000).view(2, -1).unbind()
    form: dict[str, Any] = {"bits": bits, "stochastic": stochastic, "seed": seed}
    packed, decoded = [], []
    for backend in BACKENDS:

        def encode(out: Tensor, backend: Any = backend) -> None:
            backend.quantize_rows(x, out, rows, low, step, **form)

        def decode(out: Tensor, backend: Any = backend) -> None:
            backend.dequantize_rows(packed[-1], out, rows, torch.stack((low, step)), bits=bits)

        packed.append(written(encode, (rows.nbytes(bits),), torch.uint8))
        decoded.append(written(decode, shape, out_dtype))
    assert_all_same(packed)
    assert_all_same(decoded)


@given(count=st.integers(0, 600), bits=st.sampled_from([2, 4, 8]), kind=st.sampled_from(KINDS),
       symmetric=st.booleans(), zeroed=st.booleans(), seed=seeds)  # fmt: skip
@settings(max_examples=examples(100), deadline=None)
def test_ranges_of_codes_contain_zero(
    count: int, bits: int, kind: str, symmetric: bool, zeroed: bool, seed: int
) -> None:
    """Where a range contains zero, zero comes back as zero, whatever the seed of rounding; and nothing is cut off."""
    ends = make(kind, 2 * count, seed % 2**32).view(2, count)
    estimates = torch.stack((ends[0].abs(), ends[1]))
    estimates[1, ::2] = estimates[0, ::2] * -torch.rand(count)[::2]  # half of the ranges contain zero
    form = {"bits": bits, "symmetric": symmetric, "zeroed": zeroed}
    found = [back([backend.code_ranges(place(backend, estimates), **form)]) for backend in BACKENDS]
    assert_all_same(found)
    (low, step), *_ = found[0]
    alpha, beta = estimates
    top, high = 2**bits - 1, alpha + beta
    usual = (alpha > 2.0**-60) & (alpha < 2.0**60) & (beta.abs() > 2.0**-60) & (beta.abs() < 2.0**60)
    inside = usual & (symmetric | zeroed & (beta < 0) & (high >= 0))
    zero = (-low / step).round()
    assert torch.equal((zero * step)[inside], -low[inside])
    for u in (0.0, 1 - 2.0**-16):
        assert torch.equal(((0 - low) * (1 / step) + u).floor()[inside], zero[inside])
    assert_same(low[~inside & usual], beta[~inside & usual])
    assert_same(step[~inside & usual], (alpha / torch.tensor(float(top)))[~inside & usual])
    slack, last = step * 1e-5, low + step * (top - symmetric)
    assert bool(((low <= beta + slack) & (last >= high - slack))[usual].all())
    width = 2 * torch.maximum(high, -beta) / (top - 1) if symmetric else alpha / (top - zeroed)
    assert bool((step <= width * 1.001)[inside].all())


@given(
    outer=st.integers(1, 40), groups=st.sampled_from([1, 2, 3, 7]), inner=st.sampled_from([1, 16, 40, 64, 192, 3000]),
    kind=st.sampled_from(KINDS), dtype=dtypes, bits=st.sampled_from([2, 4, 8]), stochastic=st.booleans(),
    known=st.sampled_from(["zeros", "a bit off", "far off", "normal"]), gap=st.sampled_from([0, 8]),
    symmetric=st.booleans(), seed=seeds,
)  # fmt: skip
@settings(max_examples=examples(40), deadline=None)
def test_ranges_adapt_and_nothing_is_told_to_the_host(
    outer: int, groups: int, inner: int, kind: str, dtype: Any, bits: int, stochastic: bool, known: str, gap: int,
    symmetric: bool, seed: int,
) -> None:  # fmt: skip
    """By each group, what :func:`quantize_rows_learning` and a second look would do."""
    rows = kernels.Rows(1, outer, groups, inner)
    x = make_as(dtype, kind, rows.numel + outer * gap, seed % 2**32).view(outer, -1)[:, : groups * inner]
    low, high = reference.row_extremes(x, rows)
    estimates = torch.stack((high - low, low)).nan_to_num(1.0, 1.0, 1.0).clamp(-1e30, 1e30)
    if known == "normal":
        estimates = make("normal", 2 * groups, 1 + seed % 1000).view(2, groups)
        estimates[0].abs_()
    elif known != "zeros":
        estimates[0] *= torch.where(torch.arange(groups) % 2 == 0, 1.0, 1.5 if known == "a bit off" else 0.1)
    else:
        estimates.zero_()
    note, form = torch.full((1,), 0.25), {"bits": bits, "stochastic": stochastic, "seed": seed}
    outcomes = []
    for backend in BACKENDS:
        codes, own = place(backend, torch.zeros(rows.nbytes(bits), dtype=torch.uint8)), place(backend, note)
        given = place(backend, x), codes, rows, place(backend, estimates), 0.9, own
        ranges, learned = backend.quantize_rows_adapting(*given, drift=0.02, jump=4.0, symmetric=symmetric, **form)
        ranges = ranges.view(-1)[: 2 * groups].view(2, groups)  # there may be more behind it
        outcomes.append(back([ranges, learned.contiguous(), codes, own]))
    assert_all_same(outcomes)
    ranges, learned, codes, own = outcomes[0]
    finite = torch.isfinite(2 * torch.maximum(high, -low))
    assert torch.isnan(ranges[:, ~finite]).all()
    assert torch.equal(learned[:, ~finite], estimates[:, ~finite])
    assert bool(torch.isinf(own).all()) >= bool((~finite).any())
    for g in finite.nonzero().view(-1).tolist():
        lines = x.view(outer, groups, inner)[:, g] if not gap else x.unflatten(1, (groups, inner))[:, g]
        line, column = kernels.Rows(1, outer, 1, inner), estimates[:, g : g + 1]
        again = torch.empty(line.nbytes(bits), dtype=torch.uint8)
        expected = column.clone()
        found, _, moved = reference.quantize_rows_learning(
            lines.contiguous(), again, line, expected, 0.9, bits=bits, stochastic=False
        )
        seen = found[2:]
        assert_same(learned[:, g : g + 1], expected)
        if moved > 0.02:
            width = (seen[1] - seen[0]).item()
            column = torch.stack((seen[1] - seen[0], seen[0])) if width > 4.0 * column[0].item() else expected
        of_column = reference.code_ranges(column, bits=bits, symmetric=symmetric, zeroed=bits > 2)
        assert_same(ranges[:, g : g + 1], of_column)


@given(
    outer=st.integers(1, 60), groups=st.sampled_from([1, 3]), inner=st.sampled_from([1, 40, 64, 300]),
    kind=st.sampled_from(["normal", "few-levels", "any-bits"]), dtype=dtypes, bits=st.sampled_from([2, 4, 8]),
    each=st.sampled_from(["line", "lines", "half"]), programs=st.sampled_from([1, 4, 4096]), seed=seeds,
)  # fmt: skip
@settings(max_examples=examples(20), deadline=None)
def test_rows_in_their_normalized_form_and_of_several_tiles_for_a_program(
    outer: int, groups: int, inner: int, kind: str, dtype: Any, bits: int, each: str, programs: int, seed: int
) -> None:
    """As if the normalized form had been made first, whatever the number of programs."""
    rows = kernels.Rows(1, outer, groups, inner)
    x = make_as(dtype, kind, rows.numel, seed % 2**32).view(outer, groups * inner)
    length = groups * inner * (2 if each == "lines" and outer % 2 == 0 else 1)
    length = length // 2 if each == "half" and length % 2 == 0 else length
    mean, deviation = make("normal", 2 * (rows.numel // length), 1 + seed % 1000).view(2, -1).unbind()
    n = (x.float().view(-1, length) - mean.view(-1, 1)) * deviation.view(-1, 1)
    estimates = torch.stack((torch.ones(groups), torch.zeros(groups)))
    form: dict[str, Any] = {"bits": bits, "stochastic": True, "seed": seed, "drift": 0.02, "jump": 4.0}
    outcomes = []
    for backend in BACKENDS:
        for y, standard in ((n, None), (x, kernels.Standard(mean, deviation, length))):
            codes, note = torch.zeros(rows.nbytes(bits), dtype=torch.uint8), torch.zeros(1)
            with pytest.MonkeyPatch.context() as patch:
                if backend.name == "cuda":
                    module = sys.modules["narrowband.kernels.cuda.rows"]
                    patch.setattr(module, "_PROGRAMS", programs)
                    module._adapting.cache_clear()  # type: ignore[attr-defined]
                given = [place(backend, each) for each in (y, codes, estimates, note)]
                own = None if standard is None else kernels.Standard(
                    place(backend, mean), place(backend, deviation), length
                )  # fmt: skip
                ranges, learned = backend.quantize_rows_adapting(
                    given[0], given[1], rows, given[2], 0.9, given[3], **form, standard=own
                )
                outcomes.append(back([ranges.view(-1)[: 2 * groups], learned.contiguous(), given[1], given[3]]))
    sys.modules["narrowband.kernels.cuda.rows"]._adapting.cache_clear()  # type: ignore[attr-defined]
    for found in outcomes[1:]:
        assert_same(found, outcomes[0])


@given(rows=some_rows, columns=st.integers(1, 4), by_row=st.booleans(), out_dtype=dtypes,
       bits=st.sampled_from([2, 4, 8]), parts=st.sampled_from(["both", "factor", "term", "neither"]),
       seed=seeds)  # fmt: skip
@settings(max_examples=examples(100), deadline=None)
def test_decoding_rows_applies_a_factor_and_a_term_and_rounds_once(
    rows: kernels.Rows, columns: int, by_row: bool, out_dtype: Any, bits: int, parts: str, seed: int
) -> None:
    length = rows.inner * columns if rows.total % columns == 0 else rows.inner
    if columns == 4 and rows.inner % 3 == 0:
        length = rows.inner // 3  # several in a row of codes
    if not length:
        return
    codes = torch.from_numpy(np.frombuffer(np.random.default_rng(seed).bytes(rows.nbytes(bits)), np.uint8).copy())
    ranges = make("normal", 2 * rows.parts * rows.groups, seed % 2**32).view(2, -1)
    count = rows.numel // length if by_row else length
    factor, term = make("normal", 2 * count, 1 + seed % 1000).view(2, -1).unbind()
    wide = torch.empty(rows.numel)
    reference.dequantize_rows(codes, wide, rows, ranges, bits=bits)
    shape, expected = (-1, 1) if by_row else (-1,), wide.view(-1, length)
    if parts in ("both", "factor"):
        expected = expected * factor.view(shape)
    if parts in ("both", "term"):
        expected = expected + term.view(shape)
    for backend in BACKENDS:
        affine = kernels.Affine(
            place(backend, factor) if parts in ("both", "factor") else None,
            place(backend, term) if parts in ("both", "term") else None,
            length,
            by_row,
        )

        def decode(out: Tensor, backend: Any = backend, affine: Any = affine) -> None:
            backend.dequantize_rows(place(backend, codes), out, rows, place(backend, ranges), bits=bits, affine=affine)

        assert_same(written(decode, (rows.numel,), out_dtype), expected.view(-1).to(out_dtype))


@given(
    groups=st.integers(0, 20),
    kinds=st.tuples(*[st.sampled_from(KINDS)] * 2),
    decay=st.sampled_from([0.0, 0.5, 0.9]),
    seed=seeds,
)
@settings(max_examples=examples(300), deadline=None)
def test_learning_ranges(groups: int, kinds: tuple[str, str], decay: float, seed: int) -> None:
    low, *others = (make(kind, 2 * groups, seed % 2**32).view(2, groups) for kind in kinds)
    low, high = torch.minimum(*low), torch.maximum(*low)
    known = others[0].abs()
    expected, whole, far = reference.learn_ranges(known, low, high, decay)
    assert whole == bool(torch.isfinite(2 * torch.maximum(high, -low)).all())
    for backend in BACKENDS[:-1]:
        learned, finite, moved = back(backend.learn_ranges(*(place(backend, x) for x in (known, low, high)), decay))
        assert finite == whole
        if finite and bool(torch.isfinite(known).all()):
            assert_same(learned, expected)
            assert moved == far or (math.isnan(moved) and math.isnan(far))
    if whole and bool(torch.isfinite(known).all()):
        wide = known.double() * decay + torch.stack((high.double() - low.double(), low.double())) * (1 - decay)
        scale = (known.abs() + torch.stack((high.abs() + low.abs(), low.abs()))).double() * 2.0**-22 + 2.0**-148
        assert bool(((expected.double() - wide).abs() <= scale).all())


def test_how_far_an_end_has_moved() -> None:
    known = torch.tensor([[4.0, 2.0, 0.0], [-2.0, 0.0, 1.0]])  # from −2 to 2, 0 to 2, 1 to 1
    for backend in BACKENDS:
        for low, high, share in (
            ([-2.0, 0, 1], [2.0, 2, 1], 0.0),
            ([-2.0, 0, 1], [2.0, 4, 1], 1 / 3),  # 0 to 3
            ([-6.0, 0, 1], [2.0, 2, 1], 2 / 6),  # −4 to 2
            ([-2.0, 0, 3], [2.0, 2, 3], math.inf),  # 2 to 2
        ):
            _, finite, moved = backend.learn_ranges(known, torch.tensor(low), torch.tensor(high), 0.5)
            assert finite
            assert moved == pytest.approx(share)
        assert not backend.learn_ranges(known, torch.zeros(3), torch.tensor([1.0, math.nan, 2.0]), 0.5)[1]


@given(
    rows=some_rows,
    kind=st.sampled_from(KINDS),
    dtype=dtypes,
    bits=st.sampled_from([2, 4, 8]),
    stochastic=st.booleans(),
    gap=st.sampled_from([None, 0, 5]),
    decay=st.sampled_from([0.0, 0.5, 0.9]),
    allowed=st.sampled_from(["any", "just", "less", "none"]),
    symmetric=st.booleans(),
    seed=seeds,
)
@settings(max_examples=examples(200), deadline=None)
def test_learning_along_is_quantizing_with_what_is_known_and_then_learning(
    rows: kernels.Rows, kind: str, dtype: Any, bits: int, stochastic: bool, gap: int | None, decay: float,
    allowed: str, symmetric: bool, seed: int,
) -> None:  # fmt: skip
    """Also of a tensor of any shape, where lines are so far apart in its memory; unless it moves estimates too far."""
    x = lines = make_as(dtype, kind, rows.numel, seed % 2**32)
    apart = None
    if gap is not None:
        apart = rows.groups * rows.inner + gap
        padded = torch.full((rows.parts * rows.outer, apart), math.nan, dtype=dtype)
        padded[:, : apart - gap] = x.view(-1, apart - gap) if rows.numel else 0
        lines = padded.view(apart, rows.parts * rows.outer)
    known = make("normal", 2 * rows.parts * rows.groups, 1 + seed % 1000).view(2, -1)
    known[0].abs_()
    ranges = reference.code_ranges(known, bits=bits, symmetric=symmetric, zeroed=bits > 2)
    form: dict[str, Any] = {"bits": bits, "stochastic": stochastic, "seed": seed}
    expected = torch.full((rows.nbytes(bits),), 5, dtype=torch.uint8)
    low, high = reference.quantize_rows_extremes(x, expected, rows, *ranges, **form)
    learned, finite, moved = reference.learn_ranges(known, low, high, decay)
    drift = {"any": math.inf, "just": moved, "less": np.nextafter(np.float32(moved), -1), "none": -1}[allowed]
    form["symmetric"] = symmetric
    for backend in BACKENDS:
        codes, estimates = place(backend, torch.full_like(expected, 7)), place(backend, known)
        given = place(backend, lines), codes, rows, estimates, decay
        found, whole, far = back(backend.quantize_rows_learning(*given, apart=apart, drift=float(drift), **form))
        assert_same(found, torch.cat((ranges, torch.stack((low, high)))))
        assert whole == finite
        if finite:  # or else codes of what is not finite mean nothing
            assert_same(back(codes), expected)
            assert far == moved or (math.isnan(far) and math.isnan(moved))
        assert_same(back(estimates), learned if finite and moved <= drift else known)


def test_whole_numbers_among_the_limits_have_no_loop_compiled_anew() -> None:
    """A step would wait for the compiler, the first time that a tensor is looked at by chance."""
    rows, x, codes = kernels.Rows(1, 1, 2, 32), make("normal", 64, 1), torch.empty(64, dtype=torch.uint8)
    found = {}
    for decay, drift in ((0.5, math.inf), (0.5, -1), (0, 1.0)):
        estimates = torch.ones(2, 2)
        cpu.quantize_rows_learning(x, codes, rows, estimates, decay, bits=8, stochastic=True, seed=1, drift=drift)
        found[decay, drift] = torch.equal(estimates, torch.ones(2, 2))
    assert found == {(0.5, math.inf): False, (0.5, -1): True, (0, 1.0): found[0, 1.0]}
    stochastic = [types for types in _learner(8, False).signatures if str(types[-4]) != "none"]
    assert len(stochastic) == 1


def test_estimates_may_lie_in_memory_as_they_like() -> None:
    rows, x = kernels.Rows(1, 40, 3, 20), make("normal", 2400, 1)
    known = torch.tensor([[6.0, 5.0, 4.0], [-3.0, -2.0, -1.5]])
    for backend in BACKENDS:
        outcomes = []
        for estimates in (known, known.T.contiguous().T):
            codes, own = place(backend, torch.zeros(rows.nbytes(8), dtype=torch.uint8)), place(backend, estimates)
            found, _, _ = backend.quantize_rows_learning(
                place(backend, x), codes, rows, own, 0.9, bits=8, stochastic=True, seed=3
            )
            again, note = torch.empty_like(codes), place(backend, torch.zeros(1))
            adapted = backend.quantize_rows_adapting(
                place(backend, x), again, rows, place(backend, estimates), 0.9, note, drift=0.02, jump=4.0, bits=8,
                stochastic=True, seed=3,
            )  # fmt: skip
            outcomes.append(back([codes, found, own.contiguous(), again, note, adapted[0].view(-1)[:6], adapted[1]]))
        assert_same(*outcomes)


@given(rows=some_rows, kind=st.sampled_from(KINDS), dtype=dtypes, bits=st.sampled_from([2, 4, 8]),
       stochastic=st.booleans(), gap=st.sampled_from([None, 0, 1, 64]), any_bits=st.booleans(), seed=seeds)  # fmt: skip
@settings(max_examples=examples(250), deadline=None)
def test_rows_in_one_pass_and_with_gaps_between_lines(
    rows: kernels.Rows, kind: str, dtype: Any, bits: int, stochastic: bool, gap: int | None, any_bits: bool, seed: int
) -> None:
    """Codes and extremes are those of two passes over the same elements without gaps, on both backends."""
    lines, width = rows.parts * rows.outer, rows.groups * rows.inner
    x = plain = make_as(dtype, kind, rows.numel, seed % 2**32)
    if gap is not None:
        x = torch.full((lines, gap + width), math.nan, dtype=dtype)[:, gap:]  # nothing may be seen of what is between
        x.copy_(plain.view(lines, width))
    low, high = reference.row_extremes(plain, rows)
    ranges = make("any-bits" if any_bits else "normal", 2 * low.numel(), 1 + seed % 1000).view(2, -1).unbind()
    form: dict[str, Any] = {"bits": bits, "stochastic": stochastic, "seed": seed}
    expected = torch.full((rows.nbytes(bits),), 5, dtype=torch.uint8)
    reference.quantize_rows(plain, expected, rows, *ranges, **form)
    for backend in BACKENDS:
        assert_same(backend.row_extremes(x, rows), (low, high))
        for name in ("quantize_rows", "quantize_rows_extremes"):
            seen: list[Any] = []

            def encode(out: Tensor, backend: Any = backend, name: str = name, seen: list[Any] = seen) -> None:
                seen.append(getattr(backend, name)(x, out, rows, *ranges, **form))

            assert_same(written(encode, (rows.nbytes(bits),), torch.uint8), expected)
            assert_same(seen[0], (low, high) if name == "quantize_rows_extremes" else None)


@given(values=st.lists(st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 2.0, -2.0, 3e38, -3e38]), min_size=1, max_size=70))
@lean
def test_extremes_know_both_zeros_and_all_signs(values: list[float]) -> None:
    x, rows = torch.tensor(values), kernels.Rows(1, 1, 1, len(values))
    ordered = sorted(values, key=lambda value: (value, math.copysign(1, value)))
    expected = torch.tensor([ordered[0]]), torch.tensor([ordered[-1]])
    assert_same(cpu.row_extremes(x, rows), expected)
    assert_same(reference.row_extremes(x, rows), expected)


@given(rows=some_rows, dtype=dtypes, bits=st.sampled_from([2, 4, 8]), seed=st.integers(0, 2**32 - 1))
@lean
def test_decoding_rows_of_any_bytes(rows: kernels.Rows, dtype: Any, bits: int, seed: int) -> None:
    codes = torch.from_numpy(np.frombuffer(np.random.default_rng(seed).bytes(rows.nbytes(bits)), np.uint8).copy())
    low, step = make("any-bits" if seed % 2 else "normal", 2 * rows.parts * rows.groups, seed).view(2, -1).unbind()
    on_all(
        "dequantize_rows", codes, torch.full((rows.numel,), 5, dtype=dtype), rows, torch.stack((low, step)), bits=bits
    )


@given(n=st.one_of(st.integers(0, 300), st.sampled_from(SIZES)), kind=st.sampled_from(KINDS), dtype=dtypes,
       out_dtype=dtypes, factor=st.sampled_from([1.0, 1 / 0.9, -3.0, 1e38]),
       bounds=st.sampled_from([(), (-0.5, 0.25), (0.0, math.inf), (math.nan, 1.0)]),
       seed=st.integers(0, 2**32 - 1))  # fmt: skip
@settings(max_examples=examples(200), deadline=None)
def test_masks(
    n: int, kind: str, dtype: Any, out_dtype: Any, factor: float, bounds: tuple[float, ...], seed: int
) -> None:
    x, y = (make_as(dtype, k, n, seed) for k in (kind, "any-bits"))
    y = torch.nn.functional.pad(y, (1, 0))[1:]
    masks, applied = [], []
    for backend in BACKENDS:

        def positive(out: Tensor, backend: Any = backend) -> None:
            backend.mask_between(x, out, *bounds)

        def apply(out: Tensor, backend: Any = backend) -> None:
            backend.apply_mask(masks[-1], y, out, factor)

        masks.append(written(positive, (-(-n // 8),), torch.uint8))
        applied.append(written(apply, (n,), out_dtype))
        own = y.clone()
        backend.apply_mask(masks[-1], own, own, factor)
        assert_same(own, written(apply, (n,), dtype))
    assert_all_same(masks)
    assert_all_same(applied)


@given(data=st.data(), last=st.booleans(), ceil_mode=st.booleans(), samples=st.sampled_from([None, 0, 1, 2]),
       channels=st.sampled_from([1, 3, 17]))  # fmt: skip
@settings(max_examples=examples(200), deadline=None)
def test_places_of_maxima(data: Any, last: bool, ceil_mode: bool, samples: int | None, channels: int) -> None:
    """The positions of PyTorch's max pooling, of one sample or several, in planes or with channels last."""
    kernel = data.draw(st.tuples(st.integers(1, 16), st.integers(1, 16)) | st.sampled_from([(256, 1), (1, 256)]))
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    stride = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    plane = tuple(data.draw(st.integers(max(1, k - 2 * p), k + 40)) for k, p in zip(kernel, padding, strict=True))
    shape = (channels, *plane) if samples is None else (samples, channels, *plane)
    x = make("few-levels", math.prod(shape), data.draw(st.integers(0, 2**32 - 1))).view(shape)
    _, position = torch.nn.functional.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode, return_indices=True)
    rows, columns = position.shape[-2:]
    if last:
        position = position.movedim(-3, -1).contiguous()
    inner = channels if last else 1
    outer = position.numel() // (rows * columns * inner)
    windows = kernels.Windows(outer, rows, columns, inner, plane[1], kernel[1], stride, padding)
    assert windows.numel == position.numel()
    places = []
    for backend in BACKENDS:

        def forward(out: Tensor, backend: Any = backend) -> None:
            backend.pool_places(position, out, windows)

        def back(out: Tensor, backend: Any = backend) -> None:
            backend.pool_positions(places[-1], out, windows)

        places.append(written(forward, position.shape, torch.uint8))
        assert_same(written(back, position.shape, torch.int64), position)
    assert_all_same(places)


#: Of which columns are looked at, or several rows together.
tall_rows = st.builds(
    kernels.Rows, parts=st.sampled_from([1, 2]), outer=st.sampled_from([15, 16, 17, 40, 64]),
    groups=st.sampled_from([1, 3]), inner=st.sampled_from([1, 2, 3, 8, 16, 50, 64, 1024, 1026]),
)  # fmt: skip


@given(rows=some_rows | tall_rows, kind=st.sampled_from(KINDS), large=st.integers(0, 5), dtype=dtypes,
       gap=st.sampled_from([0, 8]), seed=seeds)  # fmt: skip
@settings(max_examples=examples(300), deadline=None)
def test_what_dwarfs_all_others(
    rows: kernels.Rows, kind: str, large: int, dtype: Any, gap: int, seed: int
) -> None:  # fmt: skip
    if not rows.numel:
        return
    lines, width = rows.parts * rows.outer, rows.groups * rows.inner
    x = make_as(dtype, kind, lines * (width + gap), seed % 2**32).view(lines, -1)[:, :width]
    rng = np.random.default_rng(seed % 2**32)
    for line in rng.choice(lines, min(large, lines), replace=False):
        x[line] *= 1e4
    some = x[rng.integers(lines), rng.integers(width)].float().abs()
    low, high = reference.row_extremes(x, rows)
    # Some just reach a magnitude, some just do not.
    widths = torch.stack([high - low, 1e6 * (high - low), *(torch.full_like(low, some * n) for n in (127, 128, 512))])
    found = on_all("dwarfed_rows", x, rows, widths)
    assert found.tolist() == [_is_dwarfed(x, rows, width) for width in widths]


def _is_dwarfed(x: Tensor, rows: kernels.Rows, widths: Tensor) -> bool:
    """The rule as it is written, magnitude by magnitude."""
    joined, pieces = pieces_of(rows)
    x_POGI = x.double().abs().reshape(rows.parts, rows.outer, rows.groups, rows.inner)
    for (part, group), width in np.ndenumerate(widths.view(rows.parts, rows.groups).numpy()):
        x_OI = x_POGI[part, :, group]
        cut = [x_OI.reshape(rows.outer // joined, joined, pieces, -1).amax((1, 3)).flatten()]
        if rows.outer >= 16 and 1 < rows.inner <= 1024:
            cut.append(x_OI.amax(0))
        for magnitudes, reach in zip(cut, (128, 512), strict=False):
            finite = [m for m in magnitudes.tolist() if math.isfinite(m)]
            n = sum(m > 0 for m in finite)
            if sum(m >= float(np.float32(width) / np.float32(reach)) for m in finite) <= min(math.ceil(n / 16), n - 1):
                return True
    return False
