"""``cpu/`` against ``reference.py``: the same bytes from the same input and seed, however many threads there are."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.errors import PayloadError
from narrowband.kernels import cpu, reference
from narrowband.kernels.cpu import momentum, selection
from narrowband.kernels.cpu.lowrank import COLUMNS
from narrowband.kernels.cpu.sparse import CACHED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

MILLION = 1_000_003  # ends in a short group, a short block and uneven ranges per thread
SIZES = [0, 1, 7, 8, 63, 64, 65, 127, 128, 129, 1000, 5000]
KINDS = [
    "normal", "equal", "zeros", "signed-zeros", "denormal", "around-tiny", "largest-floats", "ascending", "descending",
    "few-levels", "nan", "inf", "any-bits",
]  # fmt: skip


def make(kind: str, n: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(np.float32)
    if kind == "equal":
        x[:] = np.float32(-0.7)
    elif kind == "zeros":
        x[:] = 0
    elif kind == "signed-zeros":
        x = np.copysign(np.float32(0), x)
    elif kind == "denormal":
        x = (x * 1e-20).astype(np.float32) * np.float32(1e-20)
    elif kind == "around-tiny":  # steps on both sides of 2**-126
        x *= np.exp2(-rng.uniform(118, 130, n)).astype(np.float32)
    elif kind == "largest-floats":  # max − min overflows
        x = np.copysign(np.float32(3.4e38), x)
    elif kind == "ascending":
        x.sort()
    elif kind == "descending":
        x[::-1].sort()
    elif kind == "few-levels":
        x = np.round(x)
    elif kind in ("nan", "inf") and n:
        x[rng.integers(n, size=1 + n // 500)] = np.nan if kind == "nan" else -np.inf
    elif kind == "any-bits":
        x = np.frombuffer(rng.bytes(4 * n), np.float32).copy()
    return torch.from_numpy(x)


def header_nbytes(n: int, group: int, scale: str) -> int:
    return 4 * -(-n // group) * (2 if scale == "minmax" else 1)


def quantize(backend: Any, x: Tensor, bits: int, group: int, scale: Any, *, offset: int = 0, **options: Any) -> Tensor:
    """The payload with 3 bytes of padding, after checking that the bytes around it were left alone."""
    nbytes = header_nbytes(x.numel(), group, scale) + kernels.packed_nbytes(x.numel(), bits, group) + 3
    around = torch.full((nbytes + offset + 16,), 0xAA, dtype=torch.uint8)
    payload = around[offset : offset + nbytes]
    backend.quantize_groups(x, payload, bits=bits, group=group, scale=scale, **options)
    assert (around[:offset] == 0xAA).all()
    assert (around[offset + nbytes :] == 0xAA).all()
    return payload


def dequantize(
    backend: Any, payload: Tensor, into: Tensor, bits: int, group: int, scale: Any, **options: Any
) -> Tensor:
    around = torch.cat([torch.full((16,), 5.0), into, torch.full((16,), 5.0)])
    backend.dequantize_groups(payload, around[16:-16], bits=bits, group=group, scale=scale, **options)
    assert (around[:16] == 5).all()
    assert (around[-16:] == 5).all()
    return around[16:-16]


def assert_same(got: Any, expected: Any) -> None:
    """Equal to the bit, except that one NaN is as good as another."""
    assert type(got) is type(expected)
    if isinstance(got, (tuple, list)):
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)
    elif isinstance(got, torch.Tensor):
        assert got.dtype == expected.dtype
        if got.is_floating_point():
            bits = torch.int32 if got.dtype == torch.float32 else torch.int16
            a, b = (torch.where(t.isnan(), torch.nan, t).view(bits) for t in (got, expected))
        else:
            a, b = got, expected
        assert torch.equal(a, b), f"first difference at {(a != b).nonzero()[:3].tolist()}" if a.shape == b.shape else ""
    else:
        assert got == expected


def both(name: str, *arguments: Any, **options: Any) -> Any:
    """One function on both backends, each with its own copy of the tensors; they must leave the same. The result."""
    outcomes = []
    for backend in (cpu, reference):
        own = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        outcomes.append([getattr(backend, name)(*own, **options), *own])
    assert_same(outcomes[0], outcomes[1])
    return outcomes[0][0]


def codes(payload: Tensor, n: int, bits: int, group: int, scale: Any) -> Tensor:
    """The codes alone: what decodes with the header lo = −offset, step = 1."""
    header = header_nbytes(n, group, scale)
    plain = payload.clone()
    plain[:header] = torch.ones(header // 4).view(torch.uint8)
    return dequantize(reference, plain, torch.zeros(n), bits, group, scale)


def assert_same_payload(x: Tensor, bits: int, group: int, scale: Any, **options: Any) -> None:
    got, expected = (quantize(backend, x, bits, group, scale, **options) for backend in (cpu, reference))
    if torch.equal(got, expected):
        return
    # Sums in float64 may be ordered differently: the step by its last bit, and a code by one.
    assert scale in ("l2", "mean"), f"first different byte: {(got != expected).nonzero()[0].item()}"
    header = header_nbytes(x.numel(), group, scale)
    steps = [p[:header].clone().view(torch.float32).numpy() for p in (got, expected)]
    np.testing.assert_array_max_ulp(steps[0], steps[1], 1)
    difference = codes(got, x.numel(), bits, group, scale) - codes(expected, x.numel(), bits, group, scale)
    assert difference.abs().max() <= (0 if scale == "mean" else 1)
    assert torch.equal(got[-3:], expected[-3:])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Turn an endless loop into a failure."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


inputs = st.builds(make, st.sampled_from(KINDS), st.sampled_from(SIZES), st.integers(0, 2**32 - 1))
#: (scale, bits) of every quantizer there is; the symmetric scales need a code on each side of zero.
quantizers = st.one_of(
    st.tuples(st.just("minmax"), st.integers(1, 8)),
    st.tuples(st.just("absmax"), st.integers(2, 8)),
    st.tuples(st.just("l2"), st.integers(2, 8)),
    st.just(("mean", 1)),
)
groups = st.sampled_from([1, 3, 8, 100, 128, 512, 8192])
seeds = st.integers(0, 2**64 - 1)
lean = settings(max_examples=80, deadline=None)


# ---- function by function --------------------------------------------------------------------------------------------


@given(x=inputs, group=groups)
@lean
def test_group_minmax(x: Tensor, group: int) -> None:
    both("group_minmax", x, group)


@given(x=inputs, group=groups, quantizer=quantizers, stochastic=st.booleans(), seed=seeds)
@settings(max_examples=300, deadline=None)
def test_quantize_groups(x: Tensor, group: int, quantizer: tuple[str, int], stochastic: bool, seed: int) -> None:
    scale, bits = quantizer
    assert_same_payload(x, bits, group, scale, stochastic=stochastic, seed=seed)


@given(n=st.sampled_from(SIZES), group=groups, quantizer=quantizers, seed=seeds,
       weight=st.sampled_from([1.0, 0.25, -1 / 3]), accumulate=st.booleans(), wild=st.booleans())  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_dequantize_groups_of_any_bytes(
    n: int, group: int, quantizer: tuple[str, int], seed: int, weight: float, accumulate: bool, wild: bool
) -> None:
    scale, bits = quantizer
    header = header_nbytes(n, group, scale)
    raw = np.random.default_rng(seed).bytes(header + kernels.packed_nbytes(n, bits, group) + 3)
    if not wild:
        raw = make("few-levels", header // 4, seed).numpy().tobytes() + raw[header:]
    payload = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    into = make("normal", n, seed)
    options: dict[str, Any] = {"weight": weight, "accumulate": accumulate}
    got, expected = (dequantize(b, payload, into, bits, group, scale, **options) for b in (cpu, reference))
    assert_same(got, expected)


#: Rows shorter and longer than a vector, and of any remainder at any number of bits; none, and empty ones; and lines of
#: rows of one element.
some_rows = st.builds(
    kernels.Rows, parts=st.sampled_from([1, 2, 3]), outer=st.sampled_from([0, 1, 2, 7]), groups=st.sampled_from([1, 3]),
    inner=st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 128, 1000])),
) | st.builds(
    kernels.Rows, parts=st.sampled_from([1, 2, 3]), outer=st.sampled_from([0, 1, 2, 7]), groups=st.integers(1, 140),
    inner=st.just(1),
)  # fmt: skip
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def make_as(dtype: torch.dtype, kind: str, n: int, seed: int) -> Tensor:
    """Like :func:`make`; of bfloat16, the upper halves of the same bits, so that no value is rounded away."""
    x = make(kind, n, seed)
    if dtype == torch.float32:
        return x
    return torch.from_numpy(x.numpy().view(np.int16)[1::2].copy()).view(torch.bfloat16)


def written(call: Any, shape: Any, dtype: torch.dtype) -> Tensor:
    """What ``call`` writes into a tensor of this shape where no vector begins, and nothing around it."""
    n = int(np.prod(shape))
    around = torch.full((n + 33,), 5, dtype=dtype)
    out = around[17 : 17 + n].view(shape)
    call(out)
    assert (around[:17] == 5).all()
    assert (around[17 + n :] == 5).all()
    return out.clone()


@given(rows=some_rows, kind=st.sampled_from(KINDS), dtype=dtypes, out_dtype=dtypes, bits=st.sampled_from([2, 4, 8]),
       stochastic=st.booleans(), ranges=st.sampled_from(["extremes", "narrow", "any-bits"]), seed=seeds)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_rows_of_activations(
    rows: kernels.Rows, kind: str, dtype: Any, out_dtype: Any, bits: int, stochastic: bool, ranges: str, seed: int
) -> None:
    shape = rows.parts, rows.outer, rows.groups, rows.inner
    x = torch.nn.functional.pad(make_as(dtype, kind, rows.numel, seed % 2**32), (1, 0))[1:].view(shape)
    low, high = both("row_extremes", x, rows)
    step = (high - low) / (2**bits - 1)
    if ranges == "narrow":
        step *= 0.7
    elif ranges == "any-bits":
        low, step = make("any-bits", 2 * low.numel(), 1 + seed % 1000).view(2, -1).unbind()
    form: dict[str, Any] = {"bits": bits, "stochastic": stochastic, "seed": seed}
    packed, decoded = [], []
    for backend in (cpu, reference):

        def encode(out: Tensor, backend: Any = backend) -> None:
            backend.quantize_rows(x, out, rows, low, step, **form)

        def decode(out: Tensor, backend: Any = backend) -> None:
            backend.dequantize_rows(packed[-1], out, rows, low, step, bits=bits)

        packed.append(written(encode, (rows.nbytes(bits),), torch.uint8))
        decoded.append(written(decode, shape, out_dtype))
    assert_same(packed[0], packed[1])
    assert_same(decoded[0], decoded[1])


@given(
    groups=st.integers(0, 20),
    kinds=st.tuples(*[st.sampled_from(KINDS)] * 2),
    decay=st.sampled_from([0.0, 0.5, 0.9]),
    seed=seeds,
)
@settings(max_examples=300, deadline=None)
def test_learning_ranges(groups: int, kinds: tuple[str, str], decay: float, seed: int) -> None:
    low, *others = (make(kind, 2 * groups, seed % 2**32).view(2, groups) for kind in kinds)
    low, high = torch.minimum(*low), torch.maximum(*low)
    known = others[0].abs()
    expected, whole, far = reference.learn_ranges(known, low, high, decay)
    learned, finite, moved = cpu.learn_ranges(known, low, high, decay)
    assert finite == whole == bool(torch.isfinite(2 * torch.maximum(high, -low)).all())
    if finite and bool(torch.isfinite(known).all()):
        assert_same(learned, expected)
        assert moved == far or (math.isnan(moved) and math.isnan(far))
        wide = known.double() * decay + torch.stack((high.double() - low.double(), low.double())) * (1 - decay)
        scale = (known.abs() + torch.stack((high.abs() + low.abs(), low.abs()))).double() * 2.0**-22 + 2.0**-148
        assert bool(((learned.double() - wide).abs() <= scale).all())


def test_how_far_an_end_has_moved() -> None:
    known = torch.tensor([[4.0, 2.0, 0.0], [-2.0, 0.0, 1.0]])  # from −2 to 2, 0 to 2, 1 to 1
    for backend in (cpu, reference):
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


@given(rows=some_rows, kind=st.sampled_from(KINDS), dtype=dtypes, bits=st.sampled_from([2, 4, 8]),
       stochastic=st.booleans(), gap=st.sampled_from([None, 0, 1, 64]), any_bits=st.booleans(), seed=seeds)  # fmt: skip
@settings(max_examples=400, deadline=None)
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
    for backend in (cpu, reference):
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
    both("dequantize_rows", codes, torch.full((rows.numel,), 5, dtype=dtype), rows, low, step, bits=bits)


@given(n=st.one_of(st.integers(0, 300), st.sampled_from(SIZES)), kind=st.sampled_from(KINDS), dtype=dtypes,
       out_dtype=dtypes, factor=st.sampled_from([1.0, 1 / 0.9, -3.0, 1e38]),
       seed=st.integers(0, 2**32 - 1))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_masks(n: int, kind: str, dtype: Any, out_dtype: Any, factor: float, seed: int) -> None:
    x, y = (make_as(dtype, k, n, seed) for k in (kind, "any-bits"))
    y = torch.nn.functional.pad(y, (1, 0))[1:]
    masks, applied = [], []
    for backend in (cpu, reference):

        def positive(out: Tensor, backend: Any = backend) -> None:
            backend.mask_positive(x, out)

        def apply(out: Tensor, backend: Any = backend) -> None:
            backend.apply_mask(masks[-1], y, out, factor)

        masks.append(written(positive, (-(-n // 8),), torch.uint8))
        applied.append(written(apply, (n,), out_dtype))
        own = y.clone()
        backend.apply_mask(masks[-1], own, own, factor)
        assert_same(own, written(apply, (n,), dtype))
    assert_same(masks[0], masks[1])
    assert_same(applied[0], applied[1])


@given(data=st.data(), last=st.booleans(), ceil_mode=st.booleans(), samples=st.sampled_from([None, 0, 1, 2]),
       channels=st.sampled_from([1, 3, 17]))  # fmt: skip
@settings(max_examples=200, deadline=None)
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
    for backend in (cpu, reference):

        def forward(out: Tensor, backend: Any = backend) -> None:
            backend.pool_places(position, out, windows)

        def back(out: Tensor, backend: Any = backend) -> None:
            backend.pool_positions(places[-1], out, windows)

        places.append(written(forward, position.shape, torch.uint8))
        assert_same(written(back, position.shape, torch.int64), position)
    assert_same(places[0], places[1])


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize(("scale", "bits"), [("minmax", 4), ("absmax", 7), ("mean", 1)])
def test_a_payload_may_start_at_any_address(scale: str, bits: int, offset: int) -> None:
    x = make("normal", 1000)
    aligned = quantize(cpu, x, bits, 128, scale, stochastic=True)
    payload = quantize(cpu, x, bits, 128, scale, stochastic=True, offset=offset)
    assert torch.equal(payload, aligned)
    assert_same(
        dequantize(cpu, payload, x, bits, 128, scale, accumulate=True),
        dequantize(cpu, aligned, x, bits, 128, scale, accumulate=True),
    )


@given(
    x=inputs, share=st.floats(0, 1), momentum=st.sampled_from([0.0, 0.9]), nesterov=st.booleans(),
    masking=st.booleans(), scale=st.sampled_from([1.0, 0.0, 0.1, 3e-30]),
    threshold=st.sampled_from([0.0, 1e-30, 0.5, 2.0, 1e30]), seed=seeds,
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_momentum_topk_and_forget(
    x: Tensor, share: float, momentum: float, nesterov: bool, masking: bool, scale: float, threshold: float, seed: int
) -> None:
    n = x.numel()
    k = min(n, max(1, round(share * n)))
    form = {"momentum": momentum, "nesterov": nesterov}
    outcomes = []
    for backend in (cpu, reference):
        gradient, now, before = x.clone(), make("normal", n, 1), make("few-levels", n, 2)
        held = now.clone(), before.clone()
        finite, indices, values, _ = backend.momentum_topk(
            gradient, now, before, k, **form, scale=scale, threshold=threshold, seed=seed
        )
        assert torch.equal(gradient, held[1])
        outcomes.append([finite, gradient, now.clone(), before.clone(), indices, values])
        if finite:
            old = backend.forget(now, before, indices, **form, masking=masking)
            owed = before + (before - now) * momentum if nesterov else before
            parts = values.abs() + before[indices].abs() + now[indices].abs()  # which may cancel out
            assert (owed[indices].abs() <= 1e-6 * parts).all()
            outcomes[-1] += [old, now.clone(), before.clone()]
            now[indices] = old
        before.copy_(gradient)
        assert torch.equal(now, held[0])
        assert torch.equal(before, held[1])
    assert_same(outcomes[0], outcomes[1])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_threshold_from_the_step_before_saves_looks_and_changes_nothing(count, nesterov, monkeypatch):
    looks = 0
    again = momentum.look_again

    def look_again(*arguments):
        nonlocal looks
        looks += 1
        return again(*arguments)

    monkeypatch.setattr(momentum, "look_again", look_again)
    n, k = 300_000, 3000
    form = {"momentum": 0.9, "nesterov": nesterov}
    states, hint = [torch.zeros(n) for _ in range(4)], 0.0
    with threads(count):
        for step in range(60):
            x = make("normal", n, step)
            _, at, values, hint = cpu.momentum_topk(x.clone(), *states[:2], k, **form, threshold=hint, seed=step)
            _, expected, theirs, _ = reference.momentum_topk(x.clone(), *states[2:], k, **form)
            assert_same([at, values], [expected, theirs])
            for now, before in (states[:2], states[2:]):
                cpu.forget(now, before, at, **form)
            states = [states[1], states[0], states[3], states[2]]
    assert 1 <= looks < 30, looks


@given(x=inputs, share=st.floats(0, 1), sampled=st.booleans(), seed=seeds)
@settings(max_examples=200, deadline=None)
def test_select_topk(x: Tensor, share: float, sampled: bool, seed: int) -> None:
    if x.numel():
        both("select_topk", x, max(1, round(share * x.numel())), sampled=sampled, seed=seed)
    else:
        assert both("select_topk", x, 0, sampled=sampled, seed=seed).numel() == 0


@given(x=inputs, rows=st.integers(1, 7), share=st.floats(0, 1))
@lean
def test_select_topk_rows(x: Tensor, rows: int, share: float) -> None:
    width = x.numel() // rows
    if width:
        both("select_topk_rows", x[: rows * width].view(rows, width), max(1, round(share * width)))


@pytest.mark.parametrize("k", [1, 500, 5_000])
@pytest.mark.parametrize("kind", ["normal", "few", "equal", "outliers at one end"])
def test_rows_long_enough_for_a_sample(kind: str, k: int) -> None:
    x = torch.randn(5, 20_000, generator=torch.Generator().manual_seed(k))
    if kind == "few":
        x[:, 37:] = 0.0
    elif kind == "equal":
        x = torch.ones_like(x)
    elif kind == "outliers at one end":
        x[:, :300] *= 1e6
    indices = both("select_topk_rows", x, k)
    assert torch.equal(indices.view(5, k), torch.stack([kernels.select_topk(x[r], k) + r * 20_000 for r in range(5)]))


@given(x=inputs, value=st.one_of(st.floats(1e-6, 10), st.sampled_from([1e-45, 1.0, 2.0, 3.4e38, float("inf")])))
@lean
def test_select_threshold(x: Tensor, value: float) -> None:
    both("select_threshold", x, value)


@given(n=st.one_of(st.sampled_from(SIZES[1:]), st.integers(1, 2**31 - 1)), k=st.integers(1, 3000), seed=seeds)
@lean
def test_randomk_indices(n: int, k: int, seed: int) -> None:
    indices = both("randomk_indices", n, min(n, k), seed, torch.device("cpu"))
    assert (indices[1:] > indices[:-1]).all()


def test_randomk_of_nothing() -> None:
    both("randomk_indices", 0, 0, 1, torch.device("cpu"))


@given(x=inputs, seed=seeds)
@lean
def test_compensate_and_its_undoing(x: Tensor, seed: int) -> None:
    owed = make("any-bits" if seed % 2 else "normal", x.numel(), seed % 1000)
    both("compensate", x, owed)
    gradient, residual = x.clone(), owed.clone()
    cpu.compensate(gradient, residual)
    residual.copy_(gradient)
    assert torch.equal(residual.view(torch.int32), owed.view(torch.int32))


@pytest.mark.parametrize("subtract", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (900, 900), (5000, 500), (60_000, 60), (MILLION, 1000)])
@pytest.mark.parametrize("kind", ["normal", "few-levels", "zeros"])
def test_encode_topk(kind: str, n: int, k: int, sampled: bool, subtract: bool) -> None:
    """Its three parts one after the other; the same bytes on both backends and with any number of threads."""
    owed = make("normal", n, 3) if kind != "zeros" else torch.zeros(n)
    nbytes = 4 * k + kernels.elias_fano_nbytes(k, n)
    outcomes = []
    for backend, count in [(cpu, 1), (cpu, 2), (reference, 2)]:
        x, residual = make(kind, n, 5), owed.clone()
        out = torch.full((-(-nbytes // 4) * 4,), 0xAA, dtype=torch.uint8)
        with threads(count):
            assert backend.encode_topk(x, residual, k, out, sampled=sampled, seed=7, subtract=subtract)
        outcomes.append([x, residual, out])
    assert_same(outcomes[0], outcomes[1])
    assert_same(outcomes[0], outcomes[2])
    x, total, out = make(kind, n, 5), owed.clone(), outcomes[0][2]
    _, at, values = reference.compensate_select_topk(x, total, k, sampled=sampled, seed=7)
    found = at.numel()
    assert torch.equal(outcomes[0][0], owed)
    assert torch.equal(out[: 4 * k].view(torch.float32), torch.nn.functional.pad(values, (0, k - found)))
    indices = reference.elias_fano_decode(out[4 * k : nbytes], k, n)
    assert torch.equal(indices[:found], at)
    assert (indices[found:] == n - 1).all()
    assert not out[nbytes:].any()
    if subtract:
        total[at] = 0.0
    assert torch.equal(outcomes[0][1], total)


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("count", [1, 2])
def test_encode_topk_of_what_is_not_finite_writes_nothing(backend: Any, count: int) -> None:
    x, residual = make("normal", MILLION, 0), make("normal", MILLION, 1)
    x[777_777] = torch.inf
    owed, gradient = residual.clone(), x.clone()
    out = torch.full((10_000,), 0xAA, dtype=torch.uint8)
    with threads(count):
        assert not backend.encode_topk(x, residual, 1000, out, subtract=True)
    assert (out == 0xAA).all()
    assert torch.equal(x, owed)
    assert torch.equal(residual, owed + gradient)


def test_a_sample_that_misleads_costs_a_second_look_and_no_more(monkeypatch):
    """Large elements in few stretches: the exact selection is exact, and seldom has to look at everything."""
    looks = {"second": 0, "everything": 0}
    above, everything = selection._select_above, selection._exact_topk

    def look_again(*arguments):
        looks["second"] += 1
        return above(*arguments)

    def look_at_everything(*arguments):
        looks["everything"] += 1
        return everything(*arguments)

    monkeypatch.setattr(selection, "_select_above", look_again)
    monkeypatch.setattr(selection, "_exact_topk", look_at_everything)
    x = make("normal", MILLION, 0)
    x[: MILLION - 3].view(-1, 100)[::33] *= 10
    expected = x.abs().topk(10_000).indices.sort().values
    with threads(2):  # which part of a sample comes from where, and so whether it misleads, depends on their number
        for seed in range(200):
            finite, indices, _ = cpu.compensate_select_topk(x.clone(), torch.zeros(MILLION), 10_000, seed=seed)
            assert finite
            assert torch.equal(indices.long(), expected)
    assert 4 <= looks["second"] < 200, looks
    assert looks["everything"] <= looks["second"] / 4, looks


@given(x=inputs, share=st.floats(0, 1), sampled=st.booleans(), seed=seeds)
@settings(max_examples=200, deadline=None)
def test_compensate_select_topk(x: Tensor, share: float, sampled: bool, seed: int) -> None:
    n = x.numel()
    k = min(n, max(1, round(share * n)))
    outcomes = []
    for backend in (cpu, reference):
        gradient, residual = x.clone(), make("few-levels", n, 1)
        finite, indices, values = backend.compensate_select_topk(gradient, residual, k, sampled=sampled, seed=seed)
        assert indices.dtype == torch.int32
        outcomes.append([finite, gradient, residual, indices if finite else None, values if finite else None])
    assert_same(outcomes[0], outcomes[1])
    assert outcomes[0][0] is bool(outcomes[0][2].isfinite().all())


@given(x=inputs)
@lean
def test_all_finite(x: Tensor) -> None:
    both("all_finite", x)


@given(x=inputs, seed=seeds, below=st.sampled_from([float("inf"), 1.0, 2.0**100]))
@lean
def test_difference(x: Tensor, seed: int, below: float) -> None:
    base = make("any-bits" if seed % 2 else "normal", x.numel(), seed % 1000)
    fine = both("difference", x, base, torch.empty_like(x), below=below)
    expected = x - base
    assert fine is bool((expected.abs() < below).all())
    for backend in (cpu, reference):
        for place in range(2):
            own = [x.clone(), base.clone()]
            assert backend.difference(*own, own[place], below=below) is fine
            assert_same(own[place], expected)


@pytest.mark.parametrize("where", [0, 63, 4095, 4096, MILLION - 1])
@pytest.mark.parametrize("value", [1e-45, -1.0, float("nan")])
def test_one_element_that_is_not_zero_is_found(where: int, value: float) -> None:
    x = torch.zeros(MILLION)
    x[7] = -0.0
    assert both("all_zero", x) is True
    x[where] = value
    assert both("all_zero", x) is False


@pytest.mark.parametrize("where", [0, 1, 63, 64, 4095, 4096, 500_000, MILLION - 1])
def test_one_nan_anywhere_is_found(where: int) -> None:
    x = torch.zeros(MILLION)
    assert cpu.all_finite(x)
    x[where] = float("nan")
    assert not cpu.all_finite(x)
    assert not cpu.difference(x, torch.zeros(MILLION), torch.empty(MILLION))
    assert not cpu.compensate(x, torch.zeros(MILLION))


@given(indices=st.lists(st.integers(-3, 12), max_size=12), tidy=st.booleans(), n=st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_check_indices(indices: list[int], tidy: bool, n: int) -> None:
    if tidy:
        indices = sorted(max(i, 0) for i in indices)
    given_indices = torch.tensor(indices, dtype=torch.int32)
    valid = indices == sorted(indices) and all(0 <= i < n for i in indices)
    for backend in (cpu, reference):
        if valid:
            backend.check_indices(given_indices, n)
        else:
            with pytest.raises(PayloadError):
                backend.check_indices(given_indices, n)


@given(n=st.sampled_from(SIZES[1:]), k=st.integers(0, 3000), seed=st.integers(0, 999),
       weight=st.sampled_from([1.0, 0.25, -1 / 3]), kind=st.sampled_from(["normal", "any-bits"]))  # fmt: skip
@lean
def test_sparse_accumulate(n: int, k: int, seed: int, weight: float, kind: str) -> None:
    indices = torch.from_numpy(np.sort(np.random.default_rng(seed).integers(0, n, k)).astype(np.int32))
    both("sparse_accumulate", make("normal", n, seed), indices, make(kind, k, seed), weight)


@given(n=st.sampled_from([1, 1000, CACHED, CACHED + 1, 3 * CACHED + 7]), seed=st.integers(0, 99),
       ks=st.lists(st.integers(0, 3000), min_size=1, max_size=5), weight=st.sampled_from([1.0, -1 / 3]))  # fmt: skip
@lean
def test_sparse_sum(n: int, ks: list[int], seed: int, weight: float) -> None:
    """To the bit what zeroing and accumulating part by part gives, on both backends, whatever was there before."""
    rng = np.random.default_rng(seed)
    parts = [(torch.from_numpy(np.sort(rng.integers(0, n, k)).astype(np.int32)), make("normal", k, seed)) for k in ks]
    expected = torch.zeros(n)
    for indices, values in parts:
        cpu.sparse_accumulate(expected, indices, values, weight)
    for backend in (cpu, reference):
        out = torch.full((n,), torch.nan)
        backend.sparse_sum(out, parts, weight)
        assert torch.equal(out, expected)


@given(n=st.sampled_from([1, 1000, CACHED + 1, 3 * CACHED + 7]), seed=st.integers(0, 99),
       k=st.integers(1, 3000), count=st.integers(1, 5), spare=st.sampled_from([0, 8, 96]),
       weight=st.sampled_from([1.0, -1 / 3]))  # fmt: skip
@lean
def test_sparse_sum_rows(n: int, seed: int, k: int, count: int, spare: int, weight: float) -> None:
    """The sum of the parts that the rows hold, wherever in memory they are; nothing when one is damaged."""
    k = min(k, n)
    rng = np.random.default_rng(seed)
    width = 4 * k + -(-kernels.elias_fano_nbytes(k, n) // 4) * 4
    payloads = torch.full((count, width + spare), 0xAA, dtype=torch.uint8)[:, spare // 2 : spare // 2 + width]
    parts = []
    for row in payloads:
        indices = torch.from_numpy(np.sort(rng.integers(0, n, k)).astype(np.int32))
        parts.append((indices, make("normal", k, seed)))
        row[: 4 * k].view(torch.float32).copy_(parts[-1][1])
        cpu.elias_fano_encode(indices, n, row[4 * k : 4 * k + kernels.elias_fano_nbytes(k, n)])
    expected = torch.empty(n)
    cpu.sparse_sum(expected, parts, weight)
    broken = payloads.clone()
    broken[-1, 4 * k] ^= 1  # one index more, or one less
    for backend in (cpu, reference):
        out = torch.full((n,), torch.nan)
        with pytest.raises(PayloadError):
            backend.sparse_sum_rows(out, broken, k, weight)
        assert out.isnan().all()
        backend.sparse_sum_rows(out, payloads, k, weight)
        assert torch.equal(out, expected)


@given(n=st.sampled_from([1, 7, 300]), m=st.sampled_from([1, 33, COLUMNS, 2 * COLUMNS + 5]), seed=seeds,
       r=st.integers(1, 10), weight=st.sampled_from([1.0, -1 / 3]), accumulate=st.booleans())  # fmt: skip
@lean
def test_low_rank_product(n: int, m: int, r: int, seed: int, weight: float, accumulate: bool) -> None:
    p, q = make("normal", n * r, seed % 1000).view(r, n), make("normal", m * r, 1).view(r, m)
    before = make("normal" if accumulate else "nan", n * m, 2)
    exact = weight * (p.double().T @ q.double()).view(-1) + (before.double() if accumulate else 0.0)
    results = []
    for backend, count in [(cpu, 1), (cpu, 2), (reference, 2)]:
        out = torch.nn.functional.pad(before, (1, 0))[1:]  # where no vector begins
        with threads(count):
            backend.low_rank_product(out, p, q, weight=weight, accumulate=accumulate)
        results.append(out)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
    torch.testing.assert_close(results[0].double(), exact, rtol=0, atol=1e-4)


@given(n=st.sampled_from([1, 7, 300]), m=st.sampled_from([1, 33, 64, 65, 1000]), seed=seeds, r=st.integers(1, 10),
       said=st.integers(0, 6), broken=st.sampled_from([0.0, 5e5, 2e6, torch.inf, torch.nan]))  # fmt: skip
@lean
def test_compensate_project(n: int, m: int, r: int, said: int, broken: float, seed: int) -> None:
    x, owed = make("normal", n * m, seed % 1000), make("normal", n * m, 1)
    x[seed % (n * m)] += broken
    p0, q0 = make("normal", n * said, 2).view(said, n), make("normal", m * said, 3).view(said, m)
    q = make("normal", r * m, 4).view(r, m)
    expected = owed.clone()
    if said:
        reference.low_rank_product(expected, p0, q0, weight=-1.0, accumulate=True)
    expected += x
    product = (q.double() @ expected.view(n, m).double().T).float()
    for backend, count in [(cpu, 1), (cpu, 2), (reference, 2)]:
        gradient, debt = torch.nn.functional.pad(x, (1, 0))[1:], owed.clone()
        p = torch.empty(r, n)
        with threads(count):
            below = backend.compensate_project(gradient, debt, q, p, said=(p0, q0) if said else None, below=1e6)
        assert below == (abs(broken) < 1e6)
        assert_same(gradient, owed)
        assert_same(debt, expected)
        if below:
            torch.testing.assert_close(p, product, rtol=1e-4, atol=1e-3 + 1e-6 * abs(broken))


@given(n=st.sampled_from([1, 7, 64, 65, 300, 1000]), r=st.integers(1, 13), count=st.integers(1, 3), seed=seeds)
@lean
def test_orthonormalize(n: int, r: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = make("normal", count * r * n, seed % 1000).view(count, r, n) * 10.0 ** rng.integers(-18, 18)
    for matrix in p:  # rows of zeros, rows that are sums of others, rows that hardly differ, rows of any length
        for kind, (a, b, c) in zip(rng.integers(5, size=r), rng.integers(r, size=(r, 3)), strict=True):
            matrix[a] = {0: 0 * matrix[a], 1: matrix[b], 2: matrix[b] - 3 * matrix[c], 3: matrix[a] * 1e-3}.get(
                int(kind), matrix[b] * (1 + 1e-4 * matrix[a].sign())
            )
    before = p.clone()
    for backend in (cpu, reference):
        rows = backend.orthonormalize(p).double()
        assert torch.equal(p, before)
        assert rows.shape == p.shape
        for q, matrix in zip(rows, p.double(), strict=True):
            alive = (q != 0).any(1)
            torch.testing.assert_close(q @ q.T, torch.diag(alive.double()), rtol=0, atol=2e-6)
            assert not alive[(matrix == 0).all(1)].any()
            rest = matrix - (matrix @ q.T) @ q
            assert (rest.norm(dim=1) <= 1e-5 * matrix.norm(dim=1)).all()


def test_orthonormalize_goes_in_the_order_of_rows_and_leaves_nan() -> None:
    p = make("normal", 6 * 500).view(1, 6, 500)
    q, r = torch.linalg.qr(p[0].double().T)
    expected = (q * r.diagonal().sign()).T.float()
    for backend in (cpu, reference):
        torch.testing.assert_close(backend.orthonormalize(p)[0], expected, rtol=0, atol=1e-6)
        broken = p.clone()
        broken[0, 2, 7] = torch.nan
        assert backend.orthonormalize(broken)[0, 2:].isnan().any(1).all()


@given(n=st.one_of(st.sampled_from(SIZES[1:]), st.integers(1, 2**31 - 1)), k=st.integers(1, 5000), seed=seeds)
@lean
def test_elias_fano(n: int, k: int, seed: int) -> None:
    k = min(n, k)
    indices = reference.randomk_indices(n, k, seed, torch.device("cpu"))
    payload = torch.full((kernels.elias_fano_nbytes(k, n),), 0xAA, dtype=torch.uint8)
    both("elias_fano_encode", indices, n, payload)
    cpu.elias_fano_encode(indices, n, payload)
    assert torch.equal(both("elias_fano_decode", payload, k, n), indices)


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_elias_fano_of_nothing(n: int) -> None:
    with deadline(5):
        both("elias_fano_encode", torch.empty(0, dtype=torch.int32), n, torch.empty(0, dtype=torch.uint8))
        both("elias_fano_decode", torch.empty(0, dtype=torch.uint8), 0, n)


@given(n=st.sampled_from([1, 5, 8, 9, 127, 1000, 10**6, 2**31 - 1]), k=st.integers(1, 300), seed=seeds)
@settings(max_examples=300, deadline=None)
def test_elias_fano_decoding_of_any_bytes(n: int, k: int, seed: int) -> None:
    """Both refuse, or both give the same valid indices."""
    rng = np.random.default_rng(seed)
    payload = torch.from_numpy(np.frombuffer(rng.bytes(kernels.elias_fano_nbytes(k, n)), np.uint8).copy())
    kind = seed % 4
    if kind:  # k ones in the upper part, so that the later checks are reached; or one bit away from a valid payload
        upper = np.zeros(8 * -(-2 * k // 8), np.uint8)
        upper[rng.choice(2 * k, k, replace=False)] = 1
        payload[: upper.size // 8] = torch.from_numpy(np.packbits(upper, bitorder="little"))
    if kind >= 2 and k <= n:
        reference.elias_fano_encode(reference.randomk_indices(n, k, seed, torch.device("cpu")), n, payload)
        if kind == 3:
            payload[rng.integers(payload.numel())] ^= 1 << int(rng.integers(8))
    results: list[Tensor | None] = []
    for backend in (cpu, reference):
        try:
            results.append(backend.elias_fano_decode(payload.clone(), k, n))
        except PayloadError:
            results.append(None)
    assert_same(results[0], results[1])
    if results[0] is not None:
        reference.check_indices(results[0], n)
        assert results[0].numel() == k


# ---- large, adversarial ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["normal", "equal", "zeros", "ascending", "descending", "few-levels", "nan"])
def test_topk_of_a_million(kind: str, sampled: bool) -> None:
    x = make(kind, MILLION)
    for k in (1, 1000, 100_000):
        indices = both("select_topk", x, k, sampled=sampled, seed=k)
        assert indices.numel() == k or sampled


@pytest.mark.parametrize("k", [MILLION * 9 // 10, MILLION - 1, MILLION])
def test_topk_of_nearly_everything(k: int) -> None:
    x = make("normal", MILLION)
    assert both("select_topk", x, k).numel() == k
    both("select_topk", x, k, sampled=True)


@pytest.mark.parametrize(("n", "k"), [(5000, 2000), (MILLION, 10_000)])
@pytest.mark.parametrize("large", ["where the sample looks", "where it does not look", "at its first positions"])
def test_topk_when_the_sample_misleads(n: int, k: int, large: str) -> None:
    seed = 3
    looks = reference.randomk_indices(n, kernels.sample_size(n, k), seed, torch.device("cpu")).long()
    x = make("normal", n).clamp_(-1, 1)
    if large == "where it does not look":  # every element passes a threshold this low
        aside = torch.ones(n, dtype=torch.bool)
        aside[looks] = False
        x[aside] += 1e6
    else:  # the threshold is so high that few pass
        x[looks[: kernels.sample_rank(n, k)] if large == "at its first positions" else looks] += 1e6
    assert both("select_topk", x, k, seed=seed).numel() == k
    sampled = both("select_topk", x, k, sampled=True, seed=seed)
    assert sampled.numel() == k if large == "where it does not look" else 0 < sampled.numel() < k
    for sampled_ in (False, True):
        both("compensate_select_topk", x, torch.zeros(n), k, sampled=sampled_, seed=seed)


# ---- threads, processes ----------------------------------------------------------------------------------------------


def everything(seed: int, n: int = MILLION) -> list[Any]:
    """Every function of the fast backend on one input, with shapes that make several threads worth while."""
    x, y = make("normal", n, seed), make("normal", n, seed + 1)
    k = n // 50
    results: list[Any] = [cpu.group_minmax(x, 128), cpu.all_finite(x), cpu.select_topk(x, k)]
    for scale, bits, stochastic in (("minmax", 4, True), ("minmax", 8, False), ("absmax", 4, True), ("l2", 3, True)):
        payload = quantize(cpu, x, bits, 128, scale, stochastic=stochastic, seed=seed)
        results += [payload, dequantize(cpu, payload, y, bits, 128, scale, weight=0.25, accumulate=True)]
    results += [quantize(cpu, x, 1, 512, "mean", stochastic=False)]
    indices = cpu.select_topk(x, k, sampled=True, seed=seed)
    payload = torch.empty(kernels.elias_fano_nbytes(indices.numel(), n), dtype=torch.uint8)
    cpu.elias_fano_encode(indices, n, payload)
    decoded = cpu.elias_fano_decode(payload, indices.numel(), n)
    cpu.check_indices(decoded, n)
    repeated = torch.sort(torch.cat([decoded] * 12)).values
    total = y.clone()
    cpu.sparse_accumulate(total, repeated, x[repeated.long()], 0.3)
    results += [indices, payload, decoded, total, cpu.select_threshold(x, 0.01), cpu.select_threshold(x, 3.0)]
    gradient, residual = x.clone(), y.clone()
    results += [cpu.compensate_select_topk(gradient, residual, k, sampled=True, seed=seed), gradient, residual]
    results += activations(cpu, x, seed)
    gradient, residual = x.clone(), y.clone()
    return [*results, cpu.compensate(gradient, residual), gradient, residual, cpu.randomk_indices(n, k, seed, "cpu")]


def activations(backend: Any, x: Tensor, seed: int) -> list[Any]:
    """What the loops of saved activations make of x: ranges end within threads' shares."""
    results = []
    for dtype, bits, groups, inner in (
        (torch.float32, 8, 3, 64), (torch.bfloat16, 4, 3, 65), (torch.float32, 2, 1, 7),
        (torch.float32, 4, 70, 1), (torch.bfloat16, 8, 129, 1),
    ):  # fmt: skip
        rows = kernels.Rows(5, x.numel() // (5 * groups * inner), groups, inner)
        y = x[: rows.numel].to(dtype)
        low, high = backend.row_extremes(y, rows)
        step = (high - low) / (2**bits - 1)
        codes = torch.full((rows.nbytes(bits),), 0xAA, dtype=torch.uint8)
        backend.quantize_rows(y, codes, rows, low, step, bits=bits, stochastic=True, seed=seed)
        gaps = torch.nn.functional.pad(y.view(-1, groups * inner), (0, 9))[:, : groups * inner]
        again = torch.full_like(codes, 0xAA)
        seen = backend.quantize_rows_extremes(gaps, again, rows, low, step, bits=bits, stochastic=True, seed=seed)
        results += [*seen, again]
        decoded, applied = torch.empty_like(y), torch.empty_like(y)
        backend.dequantize_rows(codes, decoded, rows, low, step, bits=bits)
        mask = torch.full((-(-y.numel() // 8),), 0xAA, dtype=torch.uint8)
        backend.mask_positive(y, mask)
        backend.apply_mask(mask, y, applied, 1 / 0.9)
        results += [low, high, codes, decoded, mask, applied]
    planes = x[: x.numel() // 600 * 600].view(-1, 20, 30)
    _, position = torch.nn.functional.max_pool2d(planes, 3, (2, 1), 1, return_indices=True)
    windows = kernels.Windows(planes.shape[0], *position.shape[1:], 1, 30, 3, (2, 1), (1, 1))
    places, again = torch.empty(position.shape, dtype=torch.uint8), torch.empty_like(position)
    backend.pool_places(position, places, windows)
    backend.pool_positions(places, again, windows)
    return [*results, places, again]


def test_a_million_elements_on_any_number_of_threads() -> None:
    with threads(1):
        expected = everything(1)
    for count in (2, 3, 7):
        with threads(count):
            assert_same(everything(1), expected)


@pytest.mark.parametrize(("scale", "bits", "stochastic"), [
    ("minmax", 4, True), ("minmax", 8, False), ("minmax", 3, True), ("absmax", 4, True), ("l2", 4, True),
    ("mean", 1, False),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["normal", "around-tiny", "any-bits"])
def test_quantizing_a_million(kind: str, scale: str, bits: int, stochastic: bool) -> None:
    x = make(kind, MILLION)
    assert_same_payload(x, bits, 128, scale, stochastic=stochastic, seed=2**33 + 1)
    payload = quantize(cpu, x, bits, 128, scale, stochastic=stochastic)
    into = make("normal", MILLION, 1)
    options: dict[str, Any] = {"weight": 0.25, "accumulate": True}
    got, expected = (dequantize(b, payload, into, bits, 128, scale, **options) for b in (cpu, reference))
    assert_same(got, expected)


@pytest.mark.parametrize("kind", ["normal", "around-tiny", "nan"])
def test_activations_of_a_million(kind: str) -> None:
    x = make(kind, MILLION)
    assert_same(activations(cpu, x, 2**33 + 1), activations(reference, x, 2**33 + 1))


def test_sparse_vectors_of_a_million() -> None:
    x = make("normal", MILLION)
    both("compensate_select_topk", x, make("normal", MILLION, 1), 10_000, sampled=True, seed=2)
    both("select_threshold", x, 1e-3)
    both("compensate", x, make("normal", MILLION, 1))
    indices = both("randomk_indices", MILLION, 200_000, 7, torch.device("cpu"))
    both("sparse_accumulate", x, torch.sort(torch.cat([indices, indices])).values, x[:400_000].clone(), 0.3)


def test_equal_indices_across_a_cut_between_threads() -> None:
    """Runs of one index longer than a thread's share: no thread may add to an element that another one adds to."""
    indices = torch.arange(3, dtype=torch.int32).repeat_interleave(100_000)
    with threads(4):
        both("sparse_accumulate", torch.zeros(3), indices, make("normal", 300_000))


@pytest.mark.parametrize("count", [1, 2])
def test_several_python_threads_at_once(count: int) -> None:
    n = 300_001
    with threads(count):
        expected = [everything(seed, n) for seed in range(4)]

        def repeat(seed: int) -> list[Any]:
            torch.set_num_threads(count)  # as every thread of a program may have its own
            return [everything(seed, n) for _ in range(3)]

        with ThreadPoolExecutor(4) as pool:
            for seed, results in enumerate(pool.map(repeat, range(4))):
                for result in results:
                    assert_same(result, expected[seed])


def test_a_forked_child_computes_the_same() -> None:
    script = """
        import hashlib, os, sys
        import numpy as np
        import torch
        from narrowband import kernels

        torch.set_num_threads(2)
        x = torch.from_numpy(np.random.default_rng(0).standard_normal(1_000_003).astype(np.float32))
        payload = torch.empty(8 * 7813 + kernels.packed_nbytes(x.numel(), 4, 128), dtype=torch.uint8)

        def digest():
            kernels.quantize_groups(x, payload, bits=4, group=128, scale="minmax", stochastic=True, seed=1)
            indices = kernels.select_topk(x, 1000, seed=2)
            return hashlib.sha256(payload.numpy().tobytes() + indices.numpy().tobytes()).hexdigest().encode()

        expected = digest()  # the parent's threads exist now
        for _ in range(2):
            read, write = os.pipe()
            child = os.fork()
            if not child:
                os.write(write, digest())
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert status == 0, status
            assert os.read(read, 64) == expected
            assert digest() == expected
        print("same")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same"


# ---- dispatch --------------------------------------------------------------------------------------------------------


def test_the_backend_is_chosen_by_device_and_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NARROWBAND_KERNELS", raising=False)
    assert kernels.backend_for("cpu").name == "cpu"
    assert kernels.backend_for("cuda").name == "reference"
    monkeypatch.setenv("NARROWBAND_KERNELS", "reference")
    assert kernels.backend_for("cpu").name == "reference"


def test_importing_the_package_does_not_import_numba() -> None:
    code = "import sys, narrowband.kernels; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@settings(max_examples=60)
@given(rows=st.integers(0, 6), items=st.integers(1, 5), capacity=st.integers(0, 40), seed=st.integers(0, 1000))
def test_the_cheapest_within_is_the_same(rows, items, capacity, seed):
    rng = np.random.default_rng(seed)
    cost = torch.from_numpy(rng.choice([0.0, 1.0, 2.5, 7.0, np.inf], (rows, items)))
    weight = torch.from_numpy(rng.integers(0, 20, (rows, items)).astype(np.int32))
    found = cpu.cheapest_within(cost, weight, capacity)
    assert torch.equal(found, reference.cheapest_within(cost, weight, capacity))
    if rows and (found >= 0).all():
        assert int(weight[torch.arange(rows), found.long()].sum()) <= capacity
