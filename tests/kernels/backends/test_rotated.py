"""Rotated quantization: each backend against the reference."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband import kernels
from tests.kernels.backends.common import (
    BACKENDS,
    FAST_BACKENDS,
    KINDS,
    MILLION,
    assert_all_same,
    assert_same,
    back,
    make,
    on_all,
    place,
    seeds,
)
from tests.kernels.tables import reference
from tests.thorough import examples

GROUPS = st.sampled_from([32, 64, 256, 1024])
BITS = st.integers(1, 8)
#: Of one group or several, the last of which is whole or not.
LENGTHS = st.sampled_from([1, 31, 32, 100, 1024, 1025, 2500])


def nbytes_of(n: int, bits: int, group: int) -> int:
    return 4 + -(-n // group) * (4 + group * bits // 8)


@given(kind=st.sampled_from(KINDS), n=LENGTHS, bits=BITS, group=GROUPS, seed=seeds)
@settings(max_examples=examples(300), deadline=None)
def test_quantize_rotated(kind: str, n: int, bits: int, group: int, seed: int) -> None:
    nbytes = nbytes_of(n, bits, group)
    around = torch.full((nbytes + 16,), 0xAA, dtype=torch.uint8)
    payloads = []
    for backend in BACKENDS:
        own = place(backend, around)
        backend.quantize_rotated(place(backend, make(kind, n, seed % 99)), own[8:-8], bits=bits, group=group, seed=seed)
        assert (own[:8] == 0xAA).all()
        assert (own[-8:] == 0xAA).all()
        payloads.append(back(own))
    assert_all_same(payloads)


@given(n=LENGTHS, bits=BITS, group=GROUPS, weight=st.sampled_from([1.0, 0.25, -1 / 3]),
       accumulate=st.booleans(), wild=st.booleans(), shift=st.sampled_from([0, 1]))  # fmt: skip
@settings(max_examples=examples(200), deadline=None)
def test_dequantize_rotated_of_any_bytes(
    n: int, bits: int, group: int, weight: float, accumulate: bool, wild: bool, shift: int
) -> None:
    nbytes = nbytes_of(n, bits, group)
    payload = make("any-bits", -(-(nbytes + 4) // 4), n).view(torch.uint8)[shift : shift + nbytes]
    if not wild:
        payload = payload.clone()
        payload[4 : 4 + 4 * -(-n // group)] = torch.linspace(-2, 2, -(-n // group)).view(torch.uint8)
    form: dict[str, Any] = {"bits": bits, "group": group, "weight": weight, "accumulate": accumulate}
    on_all("dequantize_rotated", payload, torch.full((n,), 5.0), **form)


@pytest.mark.parametrize("bits", [1, 3, 4])
def test_a_million(bits: int) -> None:
    """In several threads, and more groups than the reference looks at at once."""
    x = make("normal", MILLION)
    payload = torch.zeros(nbytes_of(MILLION, bits, 512), dtype=torch.uint8)
    on_all("quantize_rotated", x, payload, bits=bits, group=512, seed=3, backends=FAST_BACKENDS)
    reference.quantize_rotated(x, payload, bits=bits, group=512, seed=3)
    on_all("dequantize_rotated", payload, x, bits=bits, group=512, backends=FAST_BACKENDS)


@given(lengths=st.lists(LENGTHS, min_size=1, max_size=4), kind=st.sampled_from(KINDS), bits=BITS, group=GROUPS,
       feedback=st.booleans(), seed=seeds, shift=st.sampled_from([0, 1]), decay=st.sampled_from([1.0, 0.9])
)  # fmt: skip
@settings(max_examples=examples(150), deadline=None)
def test_several_tensors(
    lengths: list[int], kind: str, bits: int, group: int, feedback: bool, seed: int, shift: int, decay: float
) -> None:
    """With and without error feedback; in memory that begins at multiples of 4 bytes, and elsewhere."""
    xs = [make(kind, n, seed % 99 + at) for at, n in enumerate(lengths)]
    residuals = [make("normal", n, at) for at, n in enumerate(lengths)]
    sizes = [nbytes_of(n, bits, group) for n in lengths]
    begins = [shift + sum(sizes[:at]) for at in range(len(sizes))]
    places = [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
    form: dict[str, Any] = {"bits": bits, "group": group}
    draws = [[seed + at, seed + at + 7] for at in range(len(xs))]
    outcomes = []
    for backend in BACKENDS:
        payloads = place(backend, torch.zeros((2, begins[-1] + sizes[-1] + 3), dtype=torch.uint8))
        finite, held, kept = [], [], []
        for rank in range(2):
            own, lacks = place(backend, xs), place(backend, residuals) if feedback else []
            outs, own_seeds = [payloads[rank, span] for span in places], [draw[rank] for draw in draws]
            finite.append(
                backend.quantize_rotated_all(own, outs, **form, seeds=own_seeds, residuals=lacks, decay=decay)
            )
            held, kept = held + own, kept + lacks
        means = [place(backend, torch.full((n,), 5.0)) for n in lengths]
        backend.dequantize_rotated_means(payloads, places, means, **form)
        sums = [mean.clone() for mean in means]
        backend.dequantize_rotated_means(payloads[:1], places, sums, **form, accumulate=True)
        outcomes.append(back([finite, held, kept, payloads, means, sums]))
    assert_all_same(outcomes)
    finite, held, kept, payloads, means, sums = outcomes[-1]
    whole = True
    for at, x in enumerate(xs):  # and that is what one loop after the other does
        total, before = x.clone(), residuals[at].clone()
        if feedback:
            reference.compensate(total, before, decay=decay)
            total = before
        out = torch.empty(sizes[at], dtype=torch.uint8)
        reference.quantize_rotated(total, out, **form, seed=draws[at][0])
        assert torch.equal(payloads[0, places[at]], out)
        steps = out[4 : 4 + 4 * -(-x.numel() // group)].clone().view(torch.float32)
        whole &= bool(kernels.rotated_steps_are_finite(steps, **form))
        expected = torch.empty_like(x)
        for rank in range(2):
            reference.dequantize_rotated(payloads[rank, places[at]], expected, **form, weight=0.5, accumulate=rank > 0)
        assert_same(means[at], expected)
        if feedback:
            assert_same(held[at], residuals[at])
    assert finite[0] is whole


@pytest.mark.parametrize("noting", [False, True])
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).max, torch.inf, torch.nan, 1.0])
def test_what_leaves_float32_is_not_finite(value: float, noting: bool) -> None:
    x = torch.ones(1000)
    x[:600] = value
    for backend in BACKENDS:
        own, residual = place(backend, x), place(backend, torch.zeros(1000))
        out = place(backend, torch.zeros(nbytes_of(1000, 8, 512), dtype=torch.uint8))
        findings = kernels.Findings(out.device)
        with findings.noting(findings.OWN) if noting else nullcontext():
            finite = backend.quantize_rotated_all([own], [out], bits=8, group=512, seeds=[1], residuals=[residual])
        assert finite is (noting or value == 1.0)
        assert findings.places.tolist() == [int(noting and value != 1.0), 0, 0]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_many_tensors_take_as_many_launches_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowband.kernels.cuda import launching

    (backend,) = [backend for backend in BACKENDS if backend.name == "cuda"]
    launches = []
    before = launching.run
    monkeypatch.setattr(launching, "run", lambda loop, *a, **k: (launches.append(loop), before(loop, *a, **k)))
    nbytes = nbytes_of(1024, 3, 256)
    for count in (1, 5):
        launches.clear()
        xs, residuals = ([place(backend, make("normal", 1024, at)) for at in range(count)] for _ in range(2))
        payloads = place(backend, torch.zeros((2, count * nbytes), dtype=torch.uint8))
        places = [slice(at * nbytes, (at + 1) * nbytes) for at in range(count)]
        findings = kernels.Findings(payloads.device)
        with findings.noting(kernels.Findings.OWN):
            backend.quantize_rotated_all(
                xs, [payloads[0, span] for span in places], bits=3, group=256, seeds=range(count), residuals=residuals
            )
        backend.dequantize_rotated_means(payloads, places, xs, bits=3, group=256)
        assert len(launches) == 2
