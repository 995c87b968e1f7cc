"""Running estimates of ranges: equations 6 and 7, and how far codes may lag behind them."""

from __future__ import annotations

import contextlib
import math
import threading
from unittest.mock import patch

import pytest
import torch

from narrowband import kernels
from narrowband.activations import ActivationPolicy
from narrowband.activations.arena import Arena
from narrowband.activations.outliers import Outliers
from narrowband.activations.packed import quantized
from narrowband.activations.ranges import DRIFT, WIDE, Estimates
from tests.activations.helpers import with_zero
from tests.activations.tensors import taken


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_estimates_are_equations_6_and_7(decay):
    generator = torch.Generator().manual_seed(1)
    estimates, alpha, beta = Estimates(decay), None, None
    for _ in range(12):
        x = torch.randn(3, 50, generator=generator) * torch.tensor([[0.1], [1.0], [30.0]]) + 5
        low, high = x.amin(1), x.amax(1)
        found = estimates.observe("a", low, high)
        width, least = (high - low).double(), low.double()
        alpha = width if alpha is None else decay * alpha + (1 - decay) * width
        beta = least if beta is None else decay * beta + (1 - decay) * least
        torch.testing.assert_close(found[0].double(), alpha, rtol=1e-6, atol=0)
        torch.testing.assert_close(found[1].double(), beta, rtol=1e-6, atol=0)
    assert torch.equal(estimates.state_dict()["a"], found)


def test_estimates_that_are_grouped_in_another_way_begin_anew():
    estimates = Estimates()
    estimates.observe("a", torch.zeros(2), torch.ones(2))
    alpha, beta = estimates.observe("a", torch.full((3,), -1.0), torch.full((3,), 4.0))
    assert alpha.tolist() == [5, 5, 5]
    assert beta.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("symmetric", [False, True])
def test_sample_statistics_leave_the_estimates_alone(symmetric):
    estimates, policy = Estimates(), ActivationPolicy(statistics="sample", symmetric=symmetric)
    (x,) = batches([1.0])
    made = taken(x, estimates, policy)
    assert estimates.state_dict() == {}
    assert ((made.decode().view(50, 3) - x).abs() <= made.ranges[1] * 1.001).all()


def test_a_state_is_taken_as_it_was_given_and_what_is_none_is_refused():
    estimates, other = Estimates(), Estimates()
    estimates.observe("a", torch.rand(4) - 1, torch.rand(4))
    other.load_state_dict(estimates.state_dict())
    given = other.state_dict()["a"].clone()
    estimates.observe("a", torch.rand(4) - 1, torch.rand(4))
    assert torch.equal(other.state_dict()["a"], given)
    with pytest.raises(ValueError, match=r"a: expected a float tensor of shape \(2, groups\), got \(3, 4\)"):
        other.load_state_dict({"a": torch.zeros(3, 4)})
    assert torch.equal(other.state_dict()["a"], given)


def test_no_two_draws_of_many_threads_are_the_same():
    estimates, drawn = Estimates(), []

    def draw():
        drawn.extend([estimates.draw() for _ in range(500)])

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == list(range(1, 2001))


def batches(scales, seed=0):
    """Batches of (50, 3) whose groups, the columns, have these scales, and lie a bit off zero."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(50, 3, generator=generator) + torch.tensor([0.0, 1.0, -3.0])) * scale for scale in scales]


@pytest.mark.parametrize("symmetric", [False, True])
def test_ranges_are_those_before_the_batch_unless_it_moves_them_far(symmetric):
    """Equations 6 and 7 in float64; an end that they move by more than the share DRIFT of the width is not let pass. A
    batch that needs more than WIDE times the width is not clipped.
    """
    estimates, policy = Estimates(), ActivationPolicy(symmetric=symmetric)
    held, outcomes, wide = None, [], []
    for x in batches([1.0, 1.1, 1.0, 0.9, 4.0, 4.0, 0.1, 1.0, 1.0, 1.0, 1.3, 40.0, 0.0, 1.0]):
        low, high = x.double().amin(0), x.double().amax(0)
        learned = own = (high - low, low)
        if held is not None:
            learned = tuple(0.9 * a + 0.1 * b for a, b in zip(held, learned, strict=True))
            ends = [(beta, alpha + beta) for alpha, beta in (held, learned)]
            moved = torch.stack([abs(a - b) for a, b in zip(*ends, strict=True)]).amax(0) / learned[0]
            assert ((moved / DRIFT - 1).abs() > 1e-3).all(), "too close for float32 to decide alike"
            outcomes.append(bool((moved > DRIFT).any()))
        alpha, beta = held if held is not None and not outcomes[-1] else learned
        if held is not None and outcomes[-1]:
            both = torch.maximum(high, sum(held)) - torch.minimum(low, held[1])
            wide.append(both > WIDE * held[0])
            alpha, beta = (torch.where(wide[-1], a, b) for a, b in zip(own, learned, strict=True))
        step, least = with_zero(alpha, beta, 8)
        if symmetric:
            top = torch.maximum(alpha + beta, -beta)
            step, least = 2 * top / 254, -top
        made = taken(x, estimates, policy)
        # Steps are widened a little more, so that zero has exactly one code.
        torch.testing.assert_close(made.ranges[1].double(), step, rtol=1e-3, atol=0)
        torch.testing.assert_close(made.ranges[0].double(), least, rtol=1e-3, atol=0)
        held = learned
        torch.testing.assert_close(estimates.state_dict()["a"].double(), torch.stack(held), rtol=2e-6, atol=0)
    assert {*outcomes} == {False, True}
    assert {*torch.stack(wide).flatten().tolist()} == {False, True}


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("change", ["wider", "aside", "at one end"])
def test_a_batch_that_is_wider_or_lies_aside_is_not_clipped(change, decay):
    """Whatever was learned, and how slowly; the next one of the usual width has about the steps that it had."""
    estimates, (x,) = Estimates(decay=decay), batches([1.0])
    for _ in range(3):
        usual = taken(x, estimates).ranges[1]
    for size in (1.6, 3.5):
        beyond = x.amax(0, keepdim=True) + (size - 1) * (x.amax(0) - x.amin(0))
        other = {"wider": x * size, "aside": x + 3 * size, "at one end": torch.cat((x[:-1], beyond))}[change]
        found = taken(other, estimates)
        assert ((found.decode().view(50, 3) - other).abs() <= found.ranges[1] * 1.001 + 1e-5).all()
        assert (found.ranges[1] <= size * 1.1 * usual).all()


def test_while_ranges_grow_and_shrink_they_are_the_papers_within_a_share():
    """Ends stay within DRIFT of the width of equations 6 and 7, or are the batch's own. What exceeds them most loses
    1/μ times as much.
    """
    papers = 0
    for growth in (1.15, 1.1, 0.9, 0.75):
        estimates, held = Estimates(), None
        for x in batches([growth**n for n in range(20)], seed=1):
            made = taken(x, estimates)
            low, high = x.double().amin(0), x.double().amax(0)
            held = (low, high) if held is None else (0.9 * held[0] + 0.1 * low, 0.9 * held[1] + 0.1 * high)
            begin, end = made.ranges[0].double(), made.ranges[0].double() + 255 * made.ranges[1].double()
            allowed = (DRIFT + LEVEL) * (held[1] - held[0]) * (1 + 1e-4)
            near = ((begin - held[0]).abs() <= allowed) & ((end - held[1]).abs() <= allowed)
            assert (near | ((begin - low).abs() + (end - high).abs() <= LEVEL * (high - low))).all()
            papers += int(near.sum())
            found = made.decode().view(50, 3).double()
            clipped = (x.double() - x.double().clamp(held[0], held[1])).abs().amax(0)
            step = made.ranges[1].double() + 1e-5 * (held[1] - held[0])
            assert ((found - x.double()).abs().amax(0) <= clipped / 0.9 + step).all()
    assert papers > 100


#: The share of its width by which a range in 8 bits is widened at most, so that one of its levels is zero.
LEVEL = 0.005


def test_a_batch_is_read_twice_only_where_it_moves_ranges_far():
    passes = []

    def counting(name):
        kernel = getattr(kernels, name)
        return patch.object(kernels, name, lambda *args, **options: passes.append(name) or kernel(*args, **options))

    loops = "row_extremes", "dwarfed_rows", "quantize_rows", "quantize_rows_learning"
    with contextlib.ExitStack() as stack:
        for loop in loops:
            stack.enter_context(counting(loop))
        estimates, x = Estimates(), batches([1.0])[0]
        for scale in (1.0, 1.1, 3.0):
            taken(scale * x, estimates)
        one, looked = ["quantize_rows_learning"], ["dwarfed_rows"]
        assert passes == ["row_extremes", *looked, "quantize_rows", *one, *one, *looked, "quantize_rows"]
        passes.clear()
        for _ in range(2):
            taken(x, Estimates())  # nothing is known
            taken(x, estimates, ActivationPolicy(statistics="sample"))
        estimates.decay = 0.0
        taken(x, estimates)
        assert passes == ["row_extremes", *looked, "quantize_rows"] * 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_finite_has_no_codes_and_moves_no_range(bad):
    estimates, rows = Estimates(), kernels.Rows(1, 50, 3, 1)
    x = batches([1.0])[0]
    for known in (False, True):
        broken = x.clone()
        broken[20, 1] = bad
        before = estimates.state_dict()
        found = quantized(broken, rows, 4, x.dtype, Arena(), ActivationPolicy(), estimates, "a")
        assert found == Outliers(extreme=True)
        assert estimates.state_dict().keys() == before.keys() == ({"a"} if known else set())
        assert all(torch.equal(value, before[name]) for name, value in estimates.state_dict().items())
        taken(x, estimates)


def test_from_a_state_the_same_codes_follow():
    scales = [1.0, 1.0, 5.0, 1.0, 1.0, 2.0]
    estimates, codes = Estimates(seed=7), []
    for at, x in enumerate(batches(scales)):
        if at == 2:
            state, draws = estimates.state_dict(), estimates.draws
        codes.append(taken(x, estimates).codes)
    resumed = Estimates(seed=7)
    resumed.load_state_dict(state)
    resumed.draws = draws
    for x, expected in zip(batches(scales)[2:], codes[2:], strict=True):
        assert torch.equal(taken(x, resumed).codes, expected)
    assert torch.equal(resumed.state_dict()["a"], estimates.state_dict()["a"])
