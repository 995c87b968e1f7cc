"""Inf and NaN stay visible: what is decoded from them is not finite, and how far that reaches is fixed here.

``randomk`` is the exception: it cannot show what it does not send, so a collective must not rely on payloads alone.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import narrowband as nb
from narrowband import kernels
from tests.codecs.common import CODECS_AND_BACKENDS, QUANTIZED, backend, group_of

every_backend = pytest.mark.parametrize("name", ["cpu", "reference"])
every_codec_and_backend = pytest.mark.parametrize(("spec", "name"), CODECS_AND_BACKENDS)
BAD = (torch.nan, torch.inf, -torch.inf)
N = 1000


def break_at(place, bad):
    x = torch.randn(N, generator=torch.Generator().manual_seed(1))
    whole = x.clone()
    x[place] = bad
    return whole, x


@every_codec_and_backend
def test_a_broken_element_is_never_decoded_as_a_finite_tensor(name, spec):
    codec = nb.codec(spec)
    for place, bad in itertools.product((0, 517, N - 1), BAD):
        _, x = break_at(place, bad)
        with backend(name):
            after = codec.roundtrip(x, seed=3)
        sent = codec.name != "randomk" or place in kernels.randomk_indices(N, round(codec.density * N), 3)
        assert bool(after.isfinite().all()) != sent
        if codec.name in ("none", "fp16", "bf16", "threshold") or ("topk" in spec and "values=int" not in spec):
            assert after.isfinite().sum() == N - 1
            torch.testing.assert_close(after[place], torch.tensor(bad), equal_nan=True)


@every_backend
@pytest.mark.parametrize("spec", QUANTIZED)
def test_a_group_with_a_broken_element_is_nan_and_the_others_are_as_ever(name, spec):
    codec, place = nb.codec(spec), 517
    group = group_of(codec)
    begin = place // group * group
    for bad in BAD:
        whole, x = break_at(place, bad)
        with backend(name):
            expected, after = codec.roundtrip(whole, seed=3), codec.roundtrip(x, seed=3)
        expected[begin : begin + group] = torch.nan
        torch.testing.assert_close(after, expected, rtol=0, atol=0, equal_nan=True)


@every_backend
def test_more_broken_elements_than_are_kept(name):
    for spec in ("topk:density=0.01", "topk:density=0.01,select=sampled", "topk:density=0.01,values=int8"):
        with backend(name):
            after = nb.codec(spec).roundtrip(torch.full((N,), torch.nan))
        assert 1 <= (~after.isfinite()).sum() <= 10


@every_backend
@pytest.mark.parametrize("spec", ["fp16", "uniform:bits=4", "qsgd:bits=4,norm=l2", "sign"])
def test_finite_values_beyond_the_range_of_a_codec_are_not_finite_afterwards(name, spec):
    """max − min, ‖x‖₂ or twice the mean magnitude leave float32; a wrong number would be worse than none."""
    x = torch.full((128,), 3e38)
    x[::2] = -3e38
    with backend(name):
        assert not nb.codec(spec).roundtrip(x).isfinite().any()


@every_backend
@pytest.mark.parametrize(
    "spec",
    [
        "none",
        "bf16",
        "uniform:bits=4,symmetric=true",
        "qsgd:bits=4",
        "topk:density=0.5",
        "topk:density=0.5,values=int8",
        "topk:density=0.5,values=int2",
        "topk:density=0.5,values=fp16",
        "randomk",
    ],
)
def test_the_others_hold_the_largest_floats(name, spec):
    x = torch.full((128,), 3e38)
    x[::2] = -3e38
    with backend(name):
        assert nb.codec(spec).roundtrip(x).isfinite().all()


@every_codec_and_backend
def test_the_smallest_floats_stay_finite_and_small(name, spec):
    x = torch.randn(300) * 1e-39
    with backend(name):
        after = nb.codec(spec).roundtrip(x)
    assert after.isfinite().all()
    assert after.abs().max() < 1e-36


@every_codec_and_backend
def test_a_payload_says_itself_whether_it_is_finite(name, spec):
    codec = nb.codec(spec)
    x = torch.randn(N, generator=torch.Generator().manual_seed(1))
    alternating = torch.full((N,), 3e38)
    alternating[::2] *= -1
    all_broken = torch.full((N,), torch.nan)
    with backend(name):
        seen = set()
        for values in (x, torch.zeros(N), alternating, all_broken, *(break_at(7, bad)[1] for bad in BAD)):
            payload = codec.encode(values, seed=3)
            decoded = codec.decode(payload, torch.empty(N), seed=3)
            around = torch.zeros(payload.numel() + 1, dtype=torch.uint8)
            around[1:] = payload  # it may lie anywhere
            fine = codec.is_finite(around[1:], (N,))
            if "norm=l2" in spec:  # a norm may leave float32, which is the last level, and no element have that level
                assert not fine or decoded.isfinite().all()
            else:
                assert fine is bool(decoded.isfinite().all())
            seen.add(fine)
        assert seen == {True, False}
        assert codec.is_finite(x.new_empty(0, dtype=torch.uint8), (3, 0))
        if codec.fixed_size:
            with pytest.raises(nb.PayloadError, match="bytes"):
                codec.is_finite(payload[:-4], (N,))


MOST = torch.finfo(torch.float32).max


@every_codec_and_backend
def test_no_level_of_a_payload_that_is_finite_leaves_float32(name, spec):
    """Steps are rounded: 127 of them can be more than the largest float, which is what ``nan_to_num`` makes of inf."""
    codec = nb.codec(spec)
    for pattern in ([MOST], [MOST, 0.0], [MOST, -MOST], [MOST] + 63 * [1.0], [0.75 * MOST], [MOST, MOST / 2]):
        x = torch.tensor(pattern * (64 // len(pattern))).view(8, 8)
        with backend(name):
            payload = codec.encode(x, seed=5)
            if codec.is_finite(payload, x.shape):
                assert codec.decode(payload, torch.empty_like(x), seed=5).isfinite().all()
            given, residual = x.flatten().clone(), torch.zeros(64)
            finite, _ = codec.encode_compensated(given, residual, shape=x.shape, seed=5, subtract=True)
        assert not finite or residual.isfinite().all()
        assert not given.any(), "what there was to go back to"
