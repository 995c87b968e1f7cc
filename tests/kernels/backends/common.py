"""What the tests of backends share: inputs of every kind, and the comparison of each backend with the reference."""

from __future__ import annotations

import functools
import math
import signal
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.kernels.backends import Backend
from tests.interpreter import hasten
from tests.kernels.tables import cpu, reference
from tests.thorough import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


#: Every backend; the reference is the last. A new one joins here. Triton's loops run on a GPU if there is one, and
#: otherwise one operation after the other in its interpreter (``tests/conftest.py`` asks for that).
NAMES = ["cpu", *(["cuda"] if find_spec("triton") else []), "reference"]
_GPU = "cuda" if torch.cuda.is_available() else "cpu"
if _GPU == "cpu":
    hasten()


class OnGpu:
    """A GPU's backend for tensors on the CPU: they go there, and come back as the loop has left them."""

    def __init__(self, backend: Backend) -> None:
        self.name, self._backend = backend.name, backend

    def __getattr__(self, loop: str) -> Any:
        function = getattr(self._backend, loop)

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            moved: dict[int, tuple[Tensor, Tensor]] = {}  # one that is given twice is one there

            def there(value: Any) -> Any:
                if isinstance(value, (tuple, list)):
                    return each(there, value)
                if isinstance(value, torch.device):
                    return torch.device(_GPU)
                if not isinstance(value, torch.Tensor) or value.is_cuda:
                    return value
                return moved.setdefault(id(value), (value, value.to(_GPU, copy=True)))[1]

            result = function(*map(there, arguments), **{name: there(value) for name, value in options.items()})
            for here, own in moved.values():
                here.copy_(own)
            made = any(isinstance(value, torch.device) for value in (*arguments, *options.values()))
            return back(result) if moved or made else result

        return call


BACKENDS: list[Any] = [Backend(f"narrowband.kernels.{name}") for name in NAMES]
if _GPU == "cuda":
    BACKENDS = [OnGpu(backend) if backend.name == "cuda" else backend for backend in BACKENDS]
#: Those that are given a million elements: in its interpreter Triton would take its time.
FAST_BACKENDS = [backend for backend in BACKENDS if backend.name != "cuda" or _GPU == "cuda"]


def backends_for(numel: int) -> list[Any]:
    """The backends that are given so many elements in many examples."""
    return BACKENDS if numel <= 5000 else FAST_BACKENDS


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


def each(function: Any, values: Any) -> Any:
    """A function of all in a list or a tuple, which may have names."""
    return getattr(type(values), "_make", type(values))(map(function, values))


def place(backend: Any, value: Any) -> Any:
    """Where a backend works: a tensor of its own there, or several."""
    if isinstance(value, list):
        return [place(backend, one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(_GPU if getattr(backend, "name", "") == "cuda" else "cpu", copy=True)


def back(value: Any) -> Any:
    """What a backend gave, on the CPU."""
    if isinstance(value, (tuple, list)):
        return each(back, value)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def header_nbytes(n: int, group: int, scale: str) -> int:
    return 4 * -(-n // group) * (2 if scale == "minmax" else 1)


def quantize(backend: Any, x: Tensor, bits: int, group: int, scale: Any, *, offset: int = 0, **options: Any) -> Tensor:
    """The payload with 3 bytes of padding, after checking that the bytes around it were left alone."""
    nbytes = header_nbytes(x.numel(), group, scale) + kernels.packed_nbytes(x.numel(), bits, group) + 3
    around = place(backend, torch.full((nbytes + offset + 16,), 0xAA, dtype=torch.uint8))
    payload = around[offset : offset + nbytes]
    backend.quantize_groups(place(backend, x), payload, bits=bits, group=group, scale=scale, **options)
    assert (around[:offset] == 0xAA).all()
    assert (around[offset + nbytes :] == 0xAA).all()
    return payload.cpu()


def dequantize(
    backend: Any, payload: Tensor, into: Tensor, bits: int, group: int, scale: Any, **options: Any
) -> Tensor:
    around = place(backend, torch.cat([torch.full((16,), 5.0), into, torch.full((16,), 5.0)]))
    backend.dequantize_groups(place(backend, payload), around[16:-16], bits=bits, group=group, scale=scale, **options)
    assert (around[:16] == 5).all()
    assert (around[-16:] == 5).all()
    return around[16:-16].cpu()


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


def assert_all_same(outcomes: list[Any], backends: list[Any] = BACKENDS) -> None:
    """What each backend gave, in the order of ``BACKENDS``: equal to what the reference gave, which is the last."""
    assert len(outcomes) == len(backends)
    for outcome in outcomes[:-1]:
        assert_same(outcome, outcomes[-1])


def on_all(name: str, *arguments: Any, backends: list[Any] = BACKENDS, **options: Any) -> Any:
    """One function on all backends, each with its own copy of the tensors; they must leave the same. The result."""
    outcomes = []
    for backend in backends:
        own = [place(backend, a) for a in arguments]
        outcomes.append(back([getattr(backend, name)(*own, **options), *own]))
    assert_all_same(outcomes, backends)
    return outcomes[0][0]


def codes(payload: Tensor, n: int, bits: int, group: int, scale: Any) -> Tensor:
    """The codes alone: what decodes with the header lo = −offset, step = 1."""
    header = header_nbytes(n, group, scale)
    plain = payload.clone()
    plain[:header] = torch.ones(header // 4).view(torch.uint8)
    return dequantize(reference, plain, torch.zeros(n), bits, group, scale)


def assert_same_payload(x: Tensor, bits: int, group: int, scale: Any, **options: Any) -> None:
    *payloads, expected = (quantize(backend, x, bits, group, scale, **options) for backend in BACKENDS)
    for got in payloads:
        assert_close_payload(got, expected, x.numel(), bits, group, scale)


def assert_close_payload(got: Tensor, expected: Tensor, n: int, bits: int, group: int, scale: Any) -> None:
    if torch.equal(got, expected):
        return
    # Sums in float64 may be ordered differently: the step by its last bit, and a code by one.
    assert scale in ("l2", "mean"), f"first different byte: {(got != expected).nonzero()[0].item()}"
    header = header_nbytes(n, group, scale)
    steps = [p[:header].clone().view(torch.float32).numpy() for p in (got, expected)]
    np.testing.assert_array_max_ulp(steps[0], steps[1], 1)
    difference = codes(got, n, bits, group, scale) - codes(expected, n, bits, group, scale)
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
lean = settings(max_examples=max(30, examples(80)), deadline=None)
#: Rows shorter and longer than a vector, and of any remainder at any number of bits; none, and empty ones; and lines of
#: rows of one element.
some_rows = st.builds(
    kernels.Rows, parts=st.sampled_from([1, 2, 3]), outer=st.sampled_from([0, 1, 2, 7]), groups=st.sampled_from([1, 3]),
    inner=st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 128, 192, 1000])),
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
        estimates = torch.stack((high - low, low))
        learned = torch.full_like(codes, 0xAA)
        found, finite, moved = backend.quantize_rows_learning(
            y, learned, rows, estimates, 0.9, bits=bits, stochastic=True, seed=seed
        )
        moved = moved if finite else math.nan  # which says nothing then
        results += [*seen, again, learned, found, estimates, torch.tensor([finite, moved])]
        decoded, applied = torch.empty_like(y), torch.empty_like(y)
        backend.dequantize_rows(codes, decoded, rows, torch.stack((low, step)), bits=bits)
        mask = torch.full((-(-y.numel() // 8),), 0xAA, dtype=torch.uint8)
        backend.mask_between(y, mask)
        backend.apply_mask(mask, y, applied, 1 / 0.9)
        results += [low, high, codes, decoded, mask, applied]
    planes = x[: x.numel() // 600 * 600].view(-1, 20, 30)
    _, position = torch.nn.functional.max_pool2d(planes, 3, (2, 1), 1, return_indices=True)
    windows = kernels.Windows(planes.shape[0], *position.shape[1:], 1, 30, 3, (2, 1), (1, 1))
    places, again = torch.empty(position.shape, dtype=torch.uint8), torch.empty_like(position)
    backend.pool_places(position, places, windows)
    backend.pool_positions(places, again, windows)
    return [*results, places, again]
