"""What ``none``, ``fp16``, ``bf16``, ``uniform``, ``qsgd`` and ``sign`` mean, against float64 and their papers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowband as nb
from tests.codecs.common import QUANTIZED, group_of, tensors

TINY = 2.0**-126


def groups(x, group):
    return [part.double() for part in x.reshape(-1).split(group)]


def step(codec, part):
    """Distance of neighbouring levels in a group (float64 values), from the definitions."""
    if codec.name == "uniform" and not codec.symmetric:
        return float(part.max() - part.min()) / (2**codec.bits - 1)
    s = 2 ** (codec.bits - 1) - 1
    norm = part.norm() if getattr(codec, "norm", "max") == "l2" else part.abs().max()
    return float(norm) / s


@pytest.mark.parametrize("spec", [spec for spec in QUANTIZED if not spec.startswith("sign")])
@settings(max_examples=15)
@given(x=tensors(), seed=st.integers(0, 2**64 - 1))
def test_every_element_moves_to_a_neighbouring_level(spec, x, seed):
    """At most half a step when rounding to the nearest, at most one when stochastic."""
    codec = nb.codec(spec)
    x = x.float()
    nearest = getattr(codec, "rounding", "stochastic") == "nearest"
    for part, after in zip(
        groups(x, group_of(codec)), groups(codec.roundtrip(x, seed=seed), group_of(codec)), strict=True
    ):
        if not part.numel():
            continue
        rounding = 2.0**-22 * float(part.abs().max()) + 255 * TINY  # in float32; and steps below TINY are none
        bound = step(codec, part) * (0.5 if nearest else 1.0) * (1 + 1e-4) + rounding
        assert float((part - after).abs().max()) <= bound


@pytest.mark.parametrize("spec", ["uniform:bits=2,group=16", "uniform:bits=8,group=5", "uniform:bits=1,group=128"])
def test_uniform_keeps_the_smallest_and_the_largest_of_a_group(spec):
    codec, x = nb.codec(spec), torch.randn(1000)
    for part, after in zip(groups(x, codec.group), groups(codec.roundtrip(x), codec.group), strict=True):
        assert after.min() == part.min()
        assert float(after.max()) == pytest.approx(float(part.max()), rel=1e-6, abs=1e-6)
        assert after.unique().numel() <= 2**codec.bits


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_one_range_for_a_whole_tensor_is_that_of_all_its_elements(bits):
    """Of more than 2²⁰ elements. In float64: scale to [0, 1], round to the nearest of 2**bits − 1 steps, scale back."""
    x = torch.randn((1 << 20) + 12_345, generator=torch.Generator().manual_seed(0))
    x[7], x[-3] = -9.0, 11.0  # in what would be different groups
    y, steps = x.double(), 2**bits - 1
    expected = ((y + 9.0) / 20.0 * steps).round() / steps * 20.0 - 9.0
    found = nb.codec(f"uniform:bits={bits},scope=tensor").roundtrip(x).double()
    assert found.unique().numel() <= 2**bits
    assert ((found - expected).abs() > 1e-4).double().mean() < 1e-5, (
        "but for ties, which float32 may round the other way"
    )
    assert float((found - expected).abs().max()) < 20.0 / steps + 1e-4
    grouped = nb.codec(f"uniform:bits={bits},group={1 << 20}").roundtrip(x).double()
    assert ((grouped - expected).abs() > 1e-4).double().mean() > 0.5


@pytest.mark.parametrize("spec", ["uniform:bits=3,symmetric=true", "uniform:bits=8,symmetric=true", "qsgd:bits=5"])
def test_symmetric_levels_keep_zero_and_the_largest_magnitude(spec):
    codec = nb.codec(spec)
    x = torch.randn(1000)
    x[::3] = 0
    after = codec.roundtrip(x)
    assert (after[::3] == 0).all()
    torch.testing.assert_close(codec.roundtrip(-x, seed=9).abs().amax(), x.abs().amax())
    assert after.unique().numel() <= 8 * (2**codec.bits - 1)  # of 8 groups
    assert torch.equal(codec.roundtrip(torch.zeros(50)), torch.zeros(50))


def test_qsgd_l2_is_the_paper():
    """Section 3.1: ``‖v‖ · sgn(v_i) · ξ_i`` with ξ_i one of the two multiples of 1/s around ``|v_i| / ‖v‖``."""
    codec, v = nb.codec("qsgd:bits=4,bucket=256,norm=l2"), torch.randn(256)
    s, norm = 7, v.double().norm()
    for seed in range(20):
        levels = codec.roundtrip(v, seed=seed).double() / norm * s
        torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-5)
        assert ((levels.round() - v.double() / norm * s).abs() < 1 + 1e-5).all()
        assert ((levels.round() == 0) | (levels.sign() == v.sign())).all()


@pytest.mark.parametrize(
    "spec",
    [
        "uniform:bits=1,group=50,rounding=stochastic",
        "uniform:bits=4,group=128,rounding=stochastic",
        "uniform:bits=8,group=30,rounding=stochastic",
        "uniform:bits=3,group=50,rounding=stochastic,symmetric=true",
        "qsgd:bits=2,bucket=64",
        "qsgd:bits=4,bucket=100",
        "qsgd:bits=4,bucket=100,norm=l2",
        "qsgd:bits=8,bucket=33,norm=l2",
    ],
)
def test_stochastic_rounding_is_unbiased(spec):
    """The mean over seeds comes as close as the central limit theorem says, for every element."""
    codec, times = nb.codec(spec), 2000
    x = torch.randn(100, generator=torch.Generator().manual_seed(5))
    deviation = torch.cat([two_levels(codec, part) for part in groups(x, group_of(codec))])
    error = sum(codec.roundtrip(x, seed=seed).double() - x.double() for seed in range(times)) / times
    assert (deviation > 0).double().mean() > 0.8, "there was nothing to round"
    z = (error.abs() - 1e-6).clamp(min=0) / (deviation / math.sqrt(times)).clamp(min=1e-9)  # 1e-6: float32
    assert float(z.max()) < 5
    assert float((z**2).mean()) < 1.6
    # Elements are rounded independently: the errors of one tensor do not add up.
    assert abs(float(error.sum())) < 4 * float(deviation.norm()) / math.sqrt(times)


def two_levels(codec, part):
    """Standard deviation of rounding each element to one of the two levels around it without bias."""
    low = part.min() if codec.name == "uniform" and not codec.symmetric else 0.0
    share = ((part - low) / step(codec, part)) % 1.0
    return step(codec, part) * (share * (1 - share)).sqrt()


@pytest.mark.parametrize("spec", ["qsgd:bits=2", "uniform:bits=2,rounding=stochastic"])
def test_stochastic_rounding_is_unbiased_across_a_tensor(spec):
    """One seed, many elements: the random numbers of neighbours and groups are not the same ones."""
    x = torch.full((128 * 2000,), 0.3)
    x[::128], x[1::128] = 1.0, -1.0
    inner = nb.codec(spec).roundtrip(x, seed=3).double().view(-1, 128)[:, 2:]
    deviation = float(inner.std())
    assert deviation > 0.1
    assert abs(float(inner.mean()) - 0.3) < 4.5 * deviation / math.sqrt(inner.numel())
    assert float((inner.mean(0) - 0.3).abs().max()) < 5 * deviation / math.sqrt(inner.shape[0])
    assert float((inner.mean(1) - 0.3).abs().max()) < 7 * deviation / math.sqrt(inner.shape[1])


@settings(max_examples=40)
@given(x=tensors(), bucket=st.integers(1, 600))
def test_sign_is_the_mean_magnitude_with_the_sign_of_each(x, bucket):
    """Karimireddy et al.: ``‖v‖₁ / d · sign(v)``, of each bucket; zero counts as positive."""
    codec = nb.codec(f"sign:bucket={bucket}")
    x = x.float()
    for part, after in zip(groups(x, bucket), groups(codec.roundtrip(x), bucket), strict=True):
        expected = torch.where(part >= 0, 1.0, -1.0).double() * part.abs().mean() if part.numel() else part
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=TINY)


@pytest.mark.parametrize(("spec", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_16_bits_are_a_cast(spec, dtype):
    x = torch.cat([torch.randn(999), torch.tensor([1e5, -1e5, 1e-9, 65504.0, 3e38, 0.0, -0.0])])
    codec = nb.codec(spec)
    assert torch.equal(codec.roundtrip(x), x.to(dtype).float())
    assert torch.equal(codec.encode(x), x.to(dtype).view(torch.uint8))
    assert codec.payload_nbytes(999) == 2000
    assert codec.payload_nbytes(999, torch.bfloat16) == 2000


def test_sizes_are_those_of_the_formats():
    """Codes, a header per group, rounded up to 4 bytes."""
    assert nb.codec("none").payload_nbytes(7) == 28
    assert nb.codec("none").payload_nbytes(7, torch.float16) == 16
    assert nb.codec("uniform:bits=8,group=128").payload_nbytes(1280) == 1280 + 10 * 8
    assert nb.codec("uniform:bits=8,group=128,symmetric=true").payload_nbytes(1280) == 1280 + 10 * 4
    assert nb.codec("uniform:bits=3,group=64").payload_nbytes(128) == 2 * (16 + 8) + 2 * 8
    assert nb.codec("uniform:bits=4,scope=tensor").payload_nbytes((3, 1_000_000)) == 1_500_000 + 8
    assert nb.codec("uniform:bits=4,scope=tensor,symmetric=true").payload_nbytes((3, 1_000_000)) == 1_500_000 + 4
    assert nb.codec("qsgd:bits=4").payload_nbytes(1_000_000) == 531_252
    assert nb.codec("sign:bucket=512").payload_nbytes(1024 + 9) == 128 + 2 + 3 * 4 + 2
