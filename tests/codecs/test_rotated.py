"""What ``eden`` means, against float64 and its paper (Vargaftik et al. 2022, arXiv 2108.08842)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowband as nb
from narrowband.kernels.reference.common import hashes
from narrowband.kernels.rotated import SPACINGS
from tests.codecs.common import tensors
from tests.thorough import examples


def hadamard(n):
    """Sylvester's construction, in float64."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def rotation(n, seed):
    """``H·D / √n``, which is orthogonal."""
    signs = 1.0 - 2.0 * (hashes(0, n, seed, torch.device("cpu")) >> 31).double()
    return hadamard(n) * signs / math.sqrt(n)


def expected(x, bits, n, seed):
    """Rotate, round to the nearest of 2**bits even levels of a normal variable, scale by theorem 2.1, rotate back."""
    turn = rotation(n, seed)
    padded = torch.nn.functional.pad(x.double(), (0, -x.numel() % n)).view(-1, n)
    y = padded @ turn.T
    spread = padded.square().mean(1, keepdim=True).sqrt()
    middle = (2**bits - 1) / 2
    levels = ((y / (SPACINGS[bits] * spread) + middle).round().clamp(0, 2**bits - 1) - middle).nan_to_num(nan=0.5)
    scale = padded.square().sum(1, keepdim=True) / (y * levels).sum(1, keepdim=True)
    return ((levels * scale.nan_to_num(nan=0.0)) @ turn).view(-1)[: x.numel()]


@pytest.mark.parametrize(("bits", "group"), [(1, 64), (2, 512), (3, 32), (4, 512), (8, 256)])
def test_it_is_the_papers_equations(bits, group):
    x = torch.randn(3 * group + 5, generator=torch.Generator().manual_seed(1)) ** 3
    found = nb.codec(f"eden:bits={bits},group={group}").roundtrip(x, seed=7)
    torch.testing.assert_close(found.double(), expected(x, bits, group, 7), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", sorted(SPACINGS))
def test_levels_are_those_that_lose_least_of_a_normal_variable(bits):
    """Max 1960, table II: a little more or less loses more."""
    x = torch.linspace(-7, 7, 400_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    middle = (2**bits - 1) / 2

    def lost(spacing):
        levels = ((x / spacing + middle).round().clamp(0, 2**bits - 1) - middle) * spacing
        return float((density * (levels - x).square()).sum() / density.sum())

    least = lost(SPACINGS[bits])
    assert least < min(lost(SPACINGS[bits] * factor) for factor in (0.99, 1.01))


#: What is lost of a normal variable with these levels, and with the scale that makes them right on average.
_LOST = {1: 0.571, 2: 0.135, 3: 0.0389, 4: 0.0117, 5: 0.00351, 6: 0.00104, 7: 0.000304, 8: 0.000088}


@pytest.mark.parametrize("power", [1, 3, 7])
def test_the_error_is_that_of_a_normal_variable_whatever_the_values_are(power):
    """Powers of normal values have few large ones among many small ones: the larger the power, the fewer."""
    x = torch.randn(512 * 64, generator=torch.Generator().manual_seed(0)) ** power
    for bits, lost in _LOST.items():
        found = nb.codec(f"eden:bits={bits}").squared_error(x, seed=3) / float(x.double().square().sum())
        assert found < 1.05 * lost, bits
        assert power > 1 or found > 0.9 * lost


def test_where_few_values_are_large_three_bits_lose_less_than_stochastic_rounding_to_four():
    """Where values are normal, four bits of qsgd lose a little less."""
    normal = torch.randn(512 * 64, generator=torch.Generator().manual_seed(0))
    assert 1 < nb.codec("eden:bits=3").squared_error(normal) / nb.codec("qsgd:bits=4").squared_error(normal) < 1.6
    x = torch.randn(512 * 64, generator=torch.Generator().manual_seed(0)) ** 3
    three, four = (nb.codec(spec) for spec in ("eden:bits=3", "qsgd:bits=4"))
    assert three.payload_nbytes(x.shape) < 0.73 * four.payload_nbytes(x.shape)
    assert three.squared_error(x) < 0.5 * four.squared_error(x)


@pytest.mark.parametrize(("power", "bits", "most"), [(1, 1, 0.001), (1, 4, 0.001), (3, 1, 0.004), (3, 3, 0.002)])
def test_it_is_right_on_average_over_seeds(power, bits, most):
    """The squared error of the mean over seeds, less what is left of their noise, is a fraction of one seed's."""
    codec, times = nb.codec(f"eden:bits={bits}"), 1000
    x = torch.randn(2048, generator=torch.Generator().manual_seed(5)) ** power
    sent = torch.stack([codec.roundtrip(x, seed=seed) for seed in range(times)]).double()
    noise = float(sent.var(0).sum())
    assert noise > 0.9 * codec.squared_error(x, seed=1)
    assert float((sent.mean(0) - x).square().sum()) - noise / times < most * noise


def test_nobody_needs_the_seed_to_decode():
    """The owner of a chunk, the receiver of a parameter and an all-gather derive seeds in their own ways."""
    codec, x = nb.codec("eden:bits=2"), torch.randn(1000)
    payload = codec.encode(x, seed=11)
    assert torch.equal(codec.decode(payload, torch.empty_like(x)), codec.roundtrip(x, seed=11))
    assert not torch.equal(codec.roundtrip(x, seed=12), codec.roundtrip(x, seed=11))


def test_every_seed_is_another_rotation():
    x = torch.randn(1024)
    one, two = (nb.codec("eden:bits=1").roundtrip(x, seed=seed) - x for seed in (1, 2))
    assert abs(float(torch.nn.functional.cosine_similarity(one, two, dim=0))) < 0.2


@given(at=st.integers(0, 511), value=st.floats(-(2.0**99), 2.0**99, width=32).filter(lambda v: abs(v) > 2.0**-99))
def test_one_value_among_zeros_arrives(at, value):
    """All rotated values are then equally large, and codes need no level but one: the worst case of evenly spaced ones
    is the best one here.
    """
    x = torch.zeros(512)
    x[at] = value
    torch.testing.assert_close(nb.codec("eden:bits=1").roundtrip(x, seed=at), x, rtol=1e-5, atol=abs(value) * 1e-5)


@given(x=tensors(), bits=st.sampled_from([1, 3, 8]), power=st.integers(-60, 60))
@settings(max_examples=examples(200))
def test_a_power_of_two_changes_nothing_but_the_scale(x, bits, power):
    codec = nb.codec(f"eden:bits={bits},group=64")
    x = x.float()
    if not torch.isfinite(x).all() or ((x != 0).any() and float(x[x != 0].abs().min()) < 2.0**-40):
        return
    if float(x.abs().max() if x.numel() else 0) > 2.0**40:
        return
    factor = 2.0**power
    assert torch.equal(codec.roundtrip(x * factor, seed=1), codec.roundtrip(x, seed=1) * factor)


def test_sizes_are_those_of_the_formats():
    """A seed, a step per group, and the codes of whole groups."""
    assert nb.codec("eden:bits=3").payload_nbytes(512) == 4 + 4 + 192
    assert nb.codec("eden:bits=3").payload_nbytes(513) == 4 + 2 * (4 + 192)
    assert nb.codec("eden:bits=1").payload_nbytes((1024, 1024)) == 4 + 2048 * 68
    assert nb.codec("eden:bits=5,group=32").payload_nbytes(33) == 4 + 2 * (4 + 20)
