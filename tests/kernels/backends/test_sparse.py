"""Sparse vectors: each backend against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.errors import PayloadError
from narrowband.kernels.cpu.sparse import CACHED
from tests.kernels.backends.common import (
    BACKENDS,
    NAMES,
    assert_all_same,
    assert_same,
    back,
    backends_for,
    on_all,
    place,
)
from tests.kernels.tables import cpu, reference

if TYPE_CHECKING:
    from torch import Tensor

from tests.kernels.backends.common import (
    SIZES,
    deadline,
    lean,
    make,
    seeds,
)
from tests.thorough import examples

#: How many indices there are: few, or those of one program of Triton's, or of two.
numbers = st.integers(1, 200) | st.sampled_from([1024, 1025, 1300])


@given(indices=st.lists(st.integers(-3, 12), max_size=12), tidy=st.booleans(), n=st.integers(1, 12))
@settings(max_examples=examples(200), deadline=None)
def test_check_indices(indices: list[int], tidy: bool, n: int) -> None:
    if tidy:
        indices = sorted(max(i, 0) for i in indices)
    given_indices = torch.tensor(indices, dtype=torch.int32)
    valid = indices == sorted(indices) and all(0 <= i < n for i in indices)
    for backend in BACKENDS:
        if valid:
            backend.check_indices(given_indices, n)
        else:
            with pytest.raises(PayloadError):
                backend.check_indices(given_indices, n)


@given(n=st.sampled_from(SIZES[1:]), k=st.just(0) | numbers, seed=st.integers(0, 999),
       weight=st.sampled_from([1.0, 0.25, -1 / 3]), kind=st.sampled_from(["normal", "any-bits"]))  # fmt: skip
@example(n=5000, k=1300, seed=1, weight=0.25, kind="normal")
@settings(lean, max_examples=examples(80))
def test_sparse_accumulate(n: int, k: int, seed: int, weight: float, kind: str) -> None:
    indices = torch.from_numpy(np.sort(np.random.default_rng(seed).integers(0, n, k)).astype(np.int32))
    on_all("sparse_accumulate", make("normal", n, seed), indices, make(kind, k, seed), weight)


@given(n=st.sampled_from([1, 1000, 5000, CACHED, CACHED + 1, 3 * CACHED + 7]), seed=st.integers(0, 99),
       ks=st.lists(st.integers(0, 3000), min_size=1, max_size=5), weight=st.sampled_from([1.0, -1 / 3]))  # fmt: skip
@settings(lean, max_examples=examples(80))
def test_sparse_sum(n: int, ks: list[int], seed: int, weight: float) -> None:
    """To the bit what zeroing and accumulating part by part gives, on both backends, whatever was there before."""
    rng = np.random.default_rng(seed)
    parts = [(torch.from_numpy(np.sort(rng.integers(0, n, k)).astype(np.int32)), make("normal", k, seed)) for k in ks]
    expected = torch.zeros(n)
    for indices, values in parts:
        cpu.sparse_accumulate(expected, indices, values, weight)
    for backend in backends_for(n):
        out = torch.full((n,), torch.nan)
        backend.sparse_sum(out, parts, weight)
        assert torch.equal(out, expected)


@given(n=st.sampled_from([1, 1000, 5000, CACHED + 1, 3 * CACHED + 7]), seed=st.integers(0, 99),
       k=numbers, count=st.integers(1, 3), spare=st.sampled_from([0, 8, 96]),
       weight=st.sampled_from([1.0, -1 / 3]))  # fmt: skip
@example(n=5000, seed=1, k=1300, count=3, spare=8, weight=1.0)
@settings(lean, max_examples=examples(80))
def test_sparse_sum_rows(n: int, seed: int, k: int, count: int, spare: int, weight: float) -> None:
    """The sum of the parts that the rows hold, wherever in memory they are; nothing when one is damaged."""
    k = min(k, n)
    rng = np.random.default_rng(seed)
    width = 4 * k + -(-kernels.elias_fano_nbytes(k, n) // 4) * 4
    payloads = torch.full((count, width + spare), 0xAA, dtype=torch.uint8)[:, spare // 2 : spare // 2 + width]
    parts = []
    for row in payloads:
        indices = torch.from_numpy(np.sort(rng.integers(0, n, k)).astype(np.int32))
        parts.append((indices, make("normal", k, seed + len(parts))))
        row[: 4 * k].view(torch.float32).copy_(parts[-1][1])
        cpu.elias_fano_encode(indices, n, row[4 * k : 4 * k + kernels.elias_fano_nbytes(k, n)])
    expected = torch.empty(n)
    cpu.sparse_sum(expected, parts, weight)
    broken = payloads.clone()
    broken[-1, 4 * k] ^= 1  # one index more, or one less
    for backend in backends_for(n):
        out = torch.full((n,), torch.nan)
        with pytest.raises(PayloadError):
            backend.sparse_sum_rows(out, broken, k, weight)
        assert out.isnan().all()
        backend.sparse_sum_rows(out, payloads, k, weight)
        assert torch.equal(out, expected)


@given(sizes=st.lists(st.tuples(st.sampled_from([1, 100, 5000, CACHED + 1]), numbers), min_size=1,
       max_size=3), rows=st.integers(1, 3), damaged=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
@example(sizes=[(100, 30), (5000, 1300)], rows=3, damaged=True, seed=1)
@settings(lean, max_examples=examples(40))
def test_sparse_sums_of_several_tensors(sizes: list[tuple[int, int]], rows: int, damaged: bool, seed: int) -> None:
    """As one after the other, and nothing when a part of any of them is damaged."""
    rng, begins, at = np.random.default_rng(seed), [], 0
    ks, ns = [min(k, n) for n, k in sizes], [n for n, _ in sizes]
    for k, n in zip(ks, ns, strict=True):
        begins.append(at)
        at += 4 * k + -(-kernels.elias_fano_nbytes(k, n) // 4) * 4
    payloads = torch.zeros((rows, at), dtype=torch.uint8)
    for number, row in enumerate(payloads):
        for begin, k, n in zip(begins, ks, ns, strict=True):
            row[begin : begin + 4 * k].view(torch.float32).copy_(make("normal", k, seed + number))
            indices = torch.from_numpy(np.sort(rng.integers(0, n, k)).astype(np.int32))
            part = row[begin + 4 * k : begin + 4 * k + kernels.elias_fano_nbytes(k, n)]
            cpu.elias_fano_encode(indices, n, part)
    expected = [torch.empty(n) for n in ns]
    for out, begin, k in zip(expected, begins, ks, strict=True):
        reference.sparse_sum_rows(out, payloads[:, begin:], k, 0.5)
    broken = payloads.clone()
    broken[-1, begins[-1] + 4 * ks[-1]] ^= 1
    for backend in backends_for(max(ns)):
        outs = [torch.full((n,), torch.nan) for n in ns]
        if backend.name == "cuda" and damaged:
            with pytest.raises(PayloadError):
                backend.sparse_sum_all(outs, broken, begins, ks, 0.5)
            assert all(out.isnan().all() for out in outs)
        backend.sparse_sum_all(outs, payloads, begins, ks, 0.5)
        assert_same(outs, expected)
        wide, apart = torch.zeros(rows, sum(ks) + 3), []  # the same values, apart from their indices
        for number, (begin, k) in enumerate(zip(begins, ks, strict=True)):
            apart.append(wide[:, sum(ks[:number]) : sum(ks[: number + 1])])
            apart[-1].copy_(payloads[:, begin : begin + 4 * k].view(torch.float32))
        heads = [begin + 4 * k for begin, k in zip(begins, ks, strict=True)]
        outs = [torch.full((n,), torch.nan) for n in ns]
        backend.sparse_sum_all(outs, payloads, heads, ks, 0.5, values=apart)
        assert_same(outs, expected)
        backend.sparse_sum_all(outs, payloads[:1], begins, ks, 1.0, accumulate=True)
        for out, own, begin, k in zip(outs, expected, begins, ks, strict=True):
            total, n = own.clone(), own.numel()
            part = payloads[0, begin : begin + 4 * k + kernels.elias_fano_nbytes(k, n)]
            at = reference.elias_fano_decode(part[4 * k :], k, n)
            reference.sparse_accumulate(total, at, part[: 4 * k].view(torch.float32))
            assert_same(out, total)


@given(n=st.one_of(st.sampled_from(SIZES[1:]), st.integers(1, 2**31 - 1)), k=numbers | st.just(3000), seed=seeds)
@example(n=5000, k=1300, seed=1)
@settings(lean, max_examples=examples(80))
def test_elias_fano(n: int, k: int, seed: int) -> None:
    k = min(n, k)
    indices = reference.randomk_indices(n, k, seed, torch.device("cpu"))
    payload = torch.full((kernels.elias_fano_nbytes(k, n),), 0xAA, dtype=torch.uint8)
    on_all("elias_fano_encode", indices, n, payload)
    cpu.elias_fano_encode(indices, n, payload)
    assert torch.equal(on_all("elias_fano_decode", payload, k, n), indices)


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_elias_fano_of_nothing(n: int) -> None:
    with deadline(5):
        on_all("elias_fano_encode", torch.empty(0, dtype=torch.int32), n, torch.empty(0, dtype=torch.uint8))
        on_all("elias_fano_decode", torch.empty(0, dtype=torch.uint8), 0, n)


@given(n=st.sampled_from([1, 5, 8, 9, 127, 1000, 10**6, 2**31 - 1]), k=st.integers(1, 300), seed=seeds)
@settings(max_examples=examples(200), deadline=None)
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
    for backend in BACKENDS:
        try:
            results.append(backend.elias_fano_decode(payload.clone(), k, n))
        except PayloadError:
            results.append(None)
    assert_all_same(results)
    if results[0] is not None:
        reference.check_indices(results[0], n)
        assert results[0].numel() == k


@pytest.mark.skipif("cuda" not in NAMES, reason="Triton is not installed")
@given(n=st.sampled_from([1, 9, 1000, 2**31 - 1]), k=st.integers(1, 300), seed=seeds)
@settings(max_examples=examples(60), deadline=None)
def test_what_is_damaged_keeps_to_the_tensor_before_anyone_is_told(n: int, k: int, seed: int) -> None:
    """The loops of GPUs may find damage long before the host hears of it."""
    from narrowband.kernels.cuda import sparse

    rng = np.random.default_rng(seed)
    payload = torch.from_numpy(np.frombuffer(rng.bytes(kernels.elias_fano_nbytes(k, n)), np.uint8).copy())
    around = torch.full((n + 200 if n <= 1000 else 0,), 5.0)
    anything = torch.from_numpy(rng.integers(-(2**31), 2**31, k).astype(np.int32))
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "raise_if", lambda damaged, message: told.append((bool(damaged.any()), message)))
        indices = BACKENDS[1].elias_fano_decode(payload, k, n)
        BACKENDS[1].check_indices(anything, n)
        if around.numel():
            BACKENDS[1].sparse_accumulate(around[100:-100], anything, torch.ones(k))
            BACKENDS[1].sparse_accumulate(around[100:-100], indices, torch.ones(k))
    assert indices.numel() == k
    assert 0 <= indices.amin() <= indices.amax() < n
    assert (around[:100] == 5.0).all()
    assert (around[-100:] == 5.0).all()
    expected = (False, told[0][1])
    try:
        reference.elias_fano_decode(payload, k, n)
    except PayloadError as error:
        expected = (True, str(error))
    assert told[0] == expected


@pytest.mark.parametrize("rows", [1, 3])
def test_indices_of_several_lists(rows: int) -> None:
    """Of one list there are none."""
    ks, ns = [100, 0, 1300, 7], [5000, 30, 1300, 2**31 - 1]
    sizes = [kernels.elias_fano_nbytes(k, n) for k, n in zip(ks, ns, strict=True)]
    begins = np.cumsum([3, *sizes])[:-1].tolist()
    results = []
    for backend in BACKENDS:
        payloads = place(backend, torch.full((rows, 3 + sum(sizes)), 7, dtype=torch.uint8))
        for row in range(rows):
            lists = [reference.randomk_indices(n, k, row, torch.device("cpu")) for k, n in zip(ks, ns, strict=True)]
            outs = [payloads[row, begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
            backend.elias_fano_encode_all(place(backend, lists), ns, outs)
        results.append(back((payloads, *backend.elias_fano_decode_all(payloads, begins, ks, ns))))
    for part in zip(*results, strict=True):
        assert_all_same(list(part))
    for found, k, n in zip(results[0][1:], ks, ns, strict=True):
        assert found.shape == (rows, k)
        for row in range(rows):
            assert torch.equal(found[row], reference.randomk_indices(n, k, row, torch.device("cpu")))


@pytest.mark.parametrize("finite", [True, False])
def test_payloads_of_several_sums_that_stay_whole(finite: bool) -> None:
    ns, ks = [900, 17_000], [30, 200]
    results = []
    for backend in BACKENDS:
        xs, residuals = ([make("normal", n, n + at) for n in ns] for at in (0, 1))
        if not finite:
            xs[1][5] = torch.inf
        sizes = [4 * k + -(-kernels.elias_fano_nbytes(k, n) // 4) * 4 for k, n in zip(ks, ns, strict=True)]
        outs = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        given_tensors = [place(backend, part) for part in (xs, outs, residuals)]
        well = backend.encode_topk_all(
            given_tensors[0], ks, given_tensors[1], residuals=given_tensors[2], decay=0.9, subtract=False
        )
        assert well == finite
        results.append(back(given_tensors))
    for held, x, old in zip(results[0][2], xs, residuals, strict=True):  # with what was selected
        torch.testing.assert_close(held, 0.9 * old + x)
    for part in zip(*results, strict=True):
        for same in zip(*part, strict=True):
            assert_all_same(list(same))
