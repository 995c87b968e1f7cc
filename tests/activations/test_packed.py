"""One packed tensor: where its codes lie, what they are, and what changes are noticed."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from narrowband import kernels
from narrowband.activations import SavedBytes
from narrowband.activations.arena import Arena
from narrowband.activations.layout import Arrangement, Grouping
from narrowband.activations.packed import Exact, Packed, Payload
from tests.activations.helpers import with_zero
from tests.activations.tensors import some_tensor
from tests.thorough import thorough

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


CPU = torch.device("cpu")


# ---- codes -----------------------------------------------------------------------------------------------------------


def payload(x, bits, grouping=None, *, samples=1, symmetric=False, stochastic=True, seed=1, share=1.0):
    """Of a tensor by its own range, or by a share of that."""
    arrangement = Arrangement.of(x)
    rows = arrangement.rows(grouping or Grouping(x.dim() - 1, 1), samples=samples)
    flat = arrangement.flat(x)
    flat = flat.float() if x.dtype == torch.float16 else flat
    low, high = kernels.row_extremes(flat, rows)
    estimate = torch.stack((share * (high - low), low))
    made = Payload(rows, bits, x.dtype, Arena().take(rows.nbytes(bits), CPU))
    made.encode(flat, estimate, symmetric=symmetric, stochastic=stochastic, seed=seed)
    return made, arrangement


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("share", [1.0, 0.6])  # elements may exceed what was estimated
@pytest.mark.parametrize("dtype", DTYPES)
def test_nearest_is_equations_3_and_5_in_float64(bits, share, dtype):
    torch.manual_seed(bits)
    x = (torch.randn(20, 4, 30) * torch.tensor([0.1, 1.0, 7.0, 50.0]).view(1, 4, 1)).to(dtype)
    kept, arrangement = payload(x, bits, Grouping(1, 4), stochastic=False, share=share)
    found = arrangement.unflat(kept.decode())
    assert found.dtype == dtype
    top = 2**bits - 1
    beta = x.double().amin((0, 2), keepdim=True)
    alpha = share * (x.double().amax((0, 2), keepdim=True) - beta)
    low, step = kept.ranges.double().view(2, 1, 4, 1)
    for found_, wanted in zip((step, low), with_zero(alpha, beta, bits), strict=True):
        torch.testing.assert_close(found_, wanted, rtol=1e-3 if bits > 2 else 1e-6, atol=0)
    exact = (x.double() - low) / step
    expected = exact.round().clamp(0, top) * step + low
    sure = (exact - exact.floor() - 0.5).abs() > 1e-3  # at a tie, float32 may decide otherwise
    assert sure.double().mean() > 0.98
    rounding = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype] * (alpha + beta.abs())
    assert ((found.double() - expected).abs() <= rounding)[sure].all()
    assert ((found.double() - expected).abs() <= alpha / top + rounding).all()


@pytest.mark.parametrize(
    ("bits", "symmetric"), [(8, False), (4, True), (2, False), *thorough((8, True), (4, False), (2, True))]
)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(bits, symmetric):
    torch.manual_seed(3)
    x, seeds = torch.randn(6, 2, 20), 800
    total = torch.zeros(6, 2, 20, dtype=torch.float64)
    for seed in range(seeds):
        kept, arrangement = payload(x, bits, Grouping(1, 2), symmetric=symmetric, seed=seed)
        found = arrangement.unflat(kept.decode()).double()
        step = kept.ranges[1].double().view(1, 2, 1)
        assert ((found - x.double()).abs() < step * (1 + 1e-4)).all()
        total += found
    # The mean of as many coins as there are seeds, each with a variance of at most step² / 4.
    assert ((total / seeds - x.double()).abs() <= 5 * step / 2 / math.sqrt(seeds) + 1e-5).all()


@given(x=some_tensor(), bits=st.sampled_from([8, 4, 2]), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 10**6))
def test_whatever_lies_how_comes_back_within_a_step(x, bits, dtype, seed):
    x = x.to(dtype)
    kept, arrangement = payload(x, bits, seed=seed)
    found = arrangement.unflat(kept.decode())
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    rounding = 1e-4 if dtype == torch.float32 else 2.0**-8 * float(x.abs().max())
    assert ((found.double() - x.double()).abs() <= kept.ranges[1].double().item() + rounding).all()


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "symmetric"), [(8, False), (4, False), (8, True), (4, True), (2, True)])
def test_zeros_stay_zeros(bits, symmetric, dtype, stochastic):
    """In every one of many draws, for ranges of all sizes, also where others exceed the range."""
    torch.manual_seed(4)
    sizes = (
        torch.logspace(-12, 3, 64).view(1, 64, 1)
        if dtype != torch.float16
        else torch.logspace(-2, 2, 64).view(1, 64, 1)
    )
    for seed in range(8):
        x = ((torch.randn(96, 64, 20) * (torch.rand(96, 64, 20) < 0.5)) * sizes).to(dtype)
        kept, arrangement = payload(
            x, bits, Grouping(1, 64), symmetric=symmetric, stochastic=stochastic, seed=seed, share=0.9
        )
        found = arrangement.unflat(kept.decode())
        assert (found[x == 0] == 0).all()
        assert not (found[x.abs() > sizes.to(dtype)] == 0).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("value", [0.0, -0.7, 1e-42, 3e37])
def test_a_tensor_of_one_value_is_kept_exactly_or_within_a_step_of_symmetric_ranges(value, symmetric):
    x = torch.full((4, 8), value)
    kept, arrangement = payload(x, 8, symmetric=symmetric)
    torch.testing.assert_close(arrangement.unflat(kept.decode()), x, rtol=1 / 126 if symmetric else 2e-7, atol=1e-36)


def test_bytes_are_those_of_codes_and_of_ranges_that_each_sample_has():
    x = torch.randn(6, 10, 12)
    for bits in (8, 4, 2):
        shared, _ = payload(x, bits, Grouping(2, 3))
        assert shared.nbytes == 6 * 10 * 12 * bits // 8
        own, _ = payload(x, bits, Grouping(2, 3), samples=6)
        assert own.nbytes == shared.nbytes + 6 * 3 * 8


def test_parts_have_ranges_of_their_own():
    x = torch.randn(3, 5, 8) * torch.tensor([1.0, 100.0, 1e4]).view(3, 1, 1)
    kept, arrangement = payload(x, 8, Grouping(2, 2), samples=3)
    found = arrangement.unflat(kept.decode())
    by_group = (x - found).view(3, 5, 2, 4).abs().amax((1, 3))
    width = x.view(3, 5, 2, 4).amax((1, 3)) - x.view(3, 5, 2, 4).amin((1, 3))
    assert (by_group <= width / 255 * 1.001).all()


# ---- watched for changes ---------------------------------------------------------------------------------------------


def kept_both_ways(x):
    made, arrangement = payload(x.detach(), 8)
    return Exact(x, ("relu", "head")), Packed(x, arrangement, made, ("relu", "head"), (SavedBytes(),))


@pytest.mark.parametrize(
    "change", [lambda x: x.add_(1), lambda x: x.view(-1)[:2].zero_(), lambda x: x.detach().mul_(2)]
)
@pytest.mark.parametrize("which", [0, 1])
def test_what_was_modified_in_place_is_an_error(change, which):
    x = torch.randn(3, 4)
    x.add_(1)
    kept = kept_both_ways(x)[which]
    kept.restore()
    change(x)
    message = (
        r"one of the variables needed for gradient computation has been modified by an inplace operation: "
        r"float32 \[3, 4\], which relu in head saved for backward, is at version 2; expected version 1 instead"
    )
    with pytest.raises(RuntimeError, match=message):
        kept.restore()


def test_codes_hold_neither_the_tensor_nor_its_memory():
    x = torch.randn(64, 64)
    exact, packed = kept_both_ways(x)
    storage = StorageWeakRef(x.untyped_storage())
    del x
    assert not storage.expired()
    del exact
    assert storage.expired()
    assert packed.restore().shape == (64, 64)


def test_restoring_again_gives_the_same_each_time():
    exact, packed = kept_both_ways(torch.randn(3, 4))
    for a, b in itertools.pairwise([packed.restore() for _ in range(3)]):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()
    assert exact.restore().data_ptr() == exact.restore().data_ptr()
