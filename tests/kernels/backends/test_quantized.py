"""Grouped quantization: each backend against the reference."""

from __future__ import annotations

import math
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband import kernels
from narrowband.kernels.reference.common import uniform
from tests.kernels.backends.common import BACKENDS, KINDS, assert_all_same, back, on_all, place
from tests.kernels.tables import cpu, reference

if TYPE_CHECKING:
    from torch import Tensor

from tests.kernels.backends.common import (
    SIZES,
    assert_same,
    assert_same_payload,
    codes,
    dequantize,
    groups,
    header_nbytes,
    inputs,
    lean,
    make,
    quantize,
    quantizers,
    seeds,
)
from tests.thorough import examples

MOST = torch.finfo(torch.float32).max


@given(x=inputs, group=groups)
@lean
def test_group_minmax(x: Tensor, group: int) -> None:
    on_all("group_minmax", x, group)


@given(x=inputs, group=groups, quantizer=quantizers, stochastic=st.booleans(), seed=seeds)
@settings(max_examples=examples(300), deadline=None)
def test_quantize_groups(x: Tensor, group: int, quantizer: tuple[str, int], stochastic: bool, seed: int) -> None:
    scale, bits = quantizer
    assert_same_payload(x, bits, group, scale, stochastic=stochastic, seed=seed)


@pytest.mark.parametrize("group", [128, 100])
@pytest.mark.parametrize(("scale", "bits"), [("absmax", 8), ("absmax", 7), ("l2", 8)])
def test_zero_is_kept_as_zero_where_the_random_number_is_nearly_one(scale: str, bits: int, group: int) -> None:
    """On every backend: in whole vectors, and in what is left of a group."""
    x = torch.zeros(4096)
    x[::group] = 1.0
    highest = torch.stack([uniform(0, x.numel(), seed, x.device) for seed in range(512)]).mul_(x == 0).max(1)
    seeds = (highest.values > 1 - 2.0**-18).nonzero().view(-1).tolist()
    assert len(seeds) > 3
    for seed in seeds[:4]:
        assert_same_payload(x, bits, group, scale, stochastic=True, seed=seed)
        payload = quantize(reference, x, bits, group, scale, stochastic=True, seed=seed)
        assert not codes(payload, x.numel(), bits, group, scale)[x == 0].any()


@given(n=st.sampled_from(SIZES), group=groups, quantizer=quantizers, seed=seeds,
       weight=st.sampled_from([1.0, 0.25, -1 / 3]), accumulate=st.booleans(), wild=st.booleans())  # fmt: skip
@settings(max_examples=examples(300), deadline=None)
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
    assert_all_same([dequantize(b, payload, into, bits, group, scale, **options) for b in BACKENDS])


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


#: Tiles of whole groups alone, with a rest, and nothing but a rest; a short last group; nothing.
_LENGTHS = st.lists(st.sampled_from([0, 5, 64, 2048, 2100, 4096, 5000]), min_size=1, max_size=4)


@given(
    lengths=_LENGTHS, kind=st.sampled_from(KINDS), quantizer=quantizers, group=st.sampled_from([7, 32, 128, 512, 4096]),
    stochastic=st.booleans(), feedback=st.booleans(), decay=st.sampled_from([1.0, 0.95]), shift=st.sampled_from([0, 1]),
    seed=seeds,
)  # fmt: skip
@settings(max_examples=examples(40), deadline=None)
def test_several_tensors_at_once_are_one_after_the_other(
    lengths: list[int], kind: str, quantizer: tuple[Any, int], group: int, stochastic: bool, feedback: bool,
    decay: float, shift: int, seed: int,
) -> None:  # fmt: skip
    scale, bits = quantizer
    form: dict[str, Any] = {"bits": bits, "group": group, "scale": scale}
    sizes = [header_nbytes(n, group, scale) + -(-kernels.packed_nbytes(n, bits, group) // 4) * 4 for n in lengths]
    ends = np.cumsum([0, *sizes]).tolist()
    places = [slice(a, b) for a, b in pairwise(ends)]
    wider = [make(kind, n + shift, seed % 1000 + at) for at, n in enumerate(lengths)]
    lacking = [make("normal", n + shift, 7 + at) for at, n in enumerate(lengths)]
    xs, residuals = ([x[shift:] for x in own] for own in (wider, lacking))
    outcomes = []
    for backend in BACKENDS:
        payloads = place(backend, torch.full((2, ends[-1]), 0xAA, dtype=torch.uint8))
        finite, held, kept = [], [], []
        for rank in range(2):
            own = [place(backend, x * (1 + rank) if rank else x)[shift:] for x in wider]
            lacks = [place(backend, x)[shift:] for x in lacking] if feedback else []
            outs = [payloads[rank, span] for span in places]
            options = {**form, "stochastic": stochastic, "seeds": [seed + at for at in range(len(xs))]}
            finite.append(backend.quantize_all(own, outs, **options, residuals=lacks, decay=decay))
            held += own
            kept += lacks
        means = [place(backend, torch.full((n,), 5.0)) for n in lengths]
        backend.dequantize_means(payloads, places, means, **form)
        sums = [mean.clone() for mean in means]
        backend.dequantize_means(payloads[:1], places, sums, **form, accumulate=True)
        for total, mean, span in zip(sums, means, places, strict=True):
            expected = mean.clone()
            backend.dequantize_groups(payloads[0, span], expected, **form, accumulate=True)
            assert_same(total, expected)
        outcomes.append(back([finite, held, kept, payloads, means]))
    if scale in ("l2", "mean"):  # whose sums may be ordered in other ways
        for own, expected in zip(outcomes[:-1], outcomes[-1:] * 2, strict=True):
            assert own[0] == expected[0]
            for got, wanted, n in zip(own[4], expected[4], lengths, strict=True):
                near = torch.isclose(got, wanted, rtol=1e-4, atol=0.0, equal_nan=True)
                assert (~near).sum() <= (0 if scale == "mean" else 2) + n // 1000 or not math.isfinite(
                    float(wanted.sum())
                )
    else:
        assert_all_same(outcomes)
    finite, held, kept, payloads, means = outcomes[-1]
    for at, x in enumerate(xs):  # and that is what one loop after the other does
        total, before = x.clone(), residuals[at].clone()
        if feedback:
            reference.compensate(total, before, decay=decay)
            total = before
        out = torch.empty(sizes[at], dtype=torch.uint8)
        reference.quantize_groups(total, out, **form, stochastic=stochastic, seed=seed + at)
        assert torch.equal(payloads[0, places[at]], out)
        if feedback:
            assert_same(held[at], residuals[at])


@pytest.mark.parametrize("noting", [False, True])
@pytest.mark.parametrize("n", [4096, 100])  # whole tiles; and rests
@pytest.mark.parametrize(
    ("scale", "bits", "value"),
    [("minmax", 5, MOST), ("absmax", 8, MOST), ("l2", 7, MOST), ("minmax", 8, 1.0), ("mean", 1, 1.0)],
)
def test_levels_that_leave_float32_are_not_finite(scale: str, bits: int, value: float, n: int, noting: bool) -> None:
    """Every step is finite here."""
    x = torch.zeros(n)
    x[0] = value
    if scale == "l2":
        x[:] = value
    options: dict[str, Any] = {"bits": bits, "group": 128, "scale": scale, "stochastic": False, "seeds": [1]}
    nbytes = header_nbytes(n, 128, scale) + kernels.packed_nbytes(n, bits, 128)
    for backend in BACKENDS:
        own, residual = place(backend, x), place(backend, torch.zeros(n))
        out = place(backend, torch.zeros(nbytes, dtype=torch.uint8))
        findings = kernels.Findings(out.device)
        with findings.noting(findings.OWN) if noting else nullcontext():
            finite = backend.quantize_all([own], [out], **options, residuals=[residual])
        assert finite is (noting or value == 1.0)
        assert findings.places.tolist() == [int(noting and value != 1.0), 0, 0]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("feedback", [False, True])
def test_many_tensors_take_as_many_launches_as_one(feedback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowband.kernels.cuda import launching

    (backend,) = [backend for backend in BACKENDS if backend.name == "cuda"]
    launches = []
    before = launching.run
    monkeypatch.setattr(launching, "run", lambda loop, *a, **k: (launches.append(loop), before(loop, *a, **k)))
    for count in (1, 12):
        launches.clear()
        xs, residuals = ([place(backend, make("normal", 4096, at)) for at in range(count)] for _ in range(2))
        form: dict[str, Any] = {"bits": 4, "group": 128, "scale": "absmax"}
        nbytes = header_nbytes(4096, 128, "absmax") + kernels.packed_nbytes(4096, 4, 128)
        payloads = place(backend, torch.zeros((2, count * nbytes), dtype=torch.uint8))
        places = [slice(at * nbytes, (at + 1) * nbytes) for at in range(count)]
        findings = kernels.Findings(payloads.device)
        with findings.noting(kernels.Findings.OWN):
            backend.quantize_all(
                xs, [payloads[0, span] for span in places], **form, stochastic=True, seeds=range(count),
                residuals=residuals if feedback else (),
            )  # fmt: skip
        backend.dequantize_means(payloads, places, xs, **form)
        backend.restore_all_if(findings.place(kernels.Findings.ANY), xs, residuals)
        assert len(launches) == 3
