"""One tensor that is kept: its order in memory, its groups, its ranges by equations 6 and 7, its codes by 3 to 5."""

from __future__ import annotations

import itertools
import math
import threading
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import narrowband as nb
from narrowband import kernels
from narrowband.activations import ActivationPolicy, Kept
from narrowband.activations.kept import (
    DRIFT,
    JUMP,
    Arena,
    Arrangement,
    Estimates,
    Exact,
    Grouping,
    Outliers,
    Packed,
    Payload,
    quantized,
    ranges,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def some_tensor(draw, min_dim=1):
    """Numbers in any order of dimensions, sliced or whole."""
    shape = draw(st.lists(st.integers(1, 6), min_size=min_dim, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    x = torch.arange(math.prod(shape), dtype=torch.float32).view([shape[dim] for dim in order])
    x = x.permute([order.index(dim) for dim in range(len(shape))])
    if draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        begin = draw(st.integers(0, shape[dim] - 1))
        x = x.narrow(dim, begin, draw(st.integers(1, shape[dim] - begin)))
    return x


# ---- order in memory -------------------------------------------------------------------------------------------------


@given(x=some_tensor())
def test_flat_is_the_order_of_memory_and_unflat_its_inverse(x):
    arrangement = Arrangement.of(x)
    flat = arrangement.flat(x)
    assert flat.tolist() == sorted(x.flatten().tolist())  # they were numbered in memory order
    back = arrangement.unflat(flat)
    assert torch.equal(back, x)
    assert flat.is_contiguous()
    assert arrangement.dense == (flat.data_ptr() == x.data_ptr())
    if arrangement.dense:
        assert all(a == b for a, b, size in zip(back.stride(), x.stride(), x.shape, strict=True) if size > 1)


@given(x=some_tensor(), data=st.data())
def test_every_element_is_in_the_row_of_its_group(x, data):
    """Rows name for every element of memory the group that its place in the dimension says."""
    dim = data.draw(st.integers(0, x.dim() - 1))
    size = x.shape[dim]
    groups = data.draw(st.sampled_from([g for g in range(1, size + 1) if size % g == 0]))
    major = data.draw(st.sampled_from([m for m in range(1, size // groups + 1) if size // groups % m == 0]))
    arrangement = Arrangement.of(x)
    rows = arrangement.rows(Grouping(dim, groups, major))
    assert rows.numel == x.numel()
    assert (rows.parts, rows.groups) == (1, groups)
    group = (torch.arange(size) // (size // groups // major)) % groups
    shape = [1] * x.dim()
    shape[dim] = size
    expected = group.view(shape).expand(x.shape)
    found = torch.arange(groups).view(1, 1, groups, 1).expand(rows.parts, rows.outer, groups, rows.inner)
    assert torch.equal(arrangement.unflat(found.reshape(-1)), expected)


@given(x=some_tensor(min_dim=2), data=st.data())
def test_samples_are_parts_where_they_lie_outermost(x, data):
    dim = data.draw(st.integers(1, x.dim() - 1))
    samples = data.draw(st.sampled_from([s for s in range(1, x.shape[0] + 1) if x.shape[0] % s == 0]))
    arrangement = Arrangement.of(x)
    rows = arrangement.rows(Grouping(dim, x.shape[dim]), samples=samples)
    assume(arrangement.order[0] == 0)
    assert (rows.parts, rows.groups, rows.numel) == (samples, x.shape[dim], x.numel())
    found = torch.arange(samples).view(-1, 1).expand(samples, x.numel() // samples).reshape(-1)
    of_first = torch.arange(x.shape[0]) // (x.shape[0] // samples)
    assert torch.equal(arrangement.unflat(found), of_first.view(-1, *[1] * (x.dim() - 1)).expand(x.shape))


def test_samples_that_lie_further_in_share_their_ranges():
    x = torch.zeros(5, 4, 6).transpose(0, 1)  # (B, N, C), and N is outermost
    assert Arrangement.of(x).rows(Grouping(2, 3), samples=4) == kernels.Rows(1, 20, 3, 2)
    assert Arrangement.of(x.contiguous()).rows(Grouping(2, 3), samples=4) == kernels.Rows(4, 5, 3, 2)


@given(x=some_tensor(), data=st.data())
def test_lines_are_the_order_of_memory_with_gaps_at_most_between_them(x, data):
    dim = data.draw(st.integers(0, x.dim() - 1))
    groups = data.draw(st.sampled_from([g for g in range(1, x.shape[dim] + 1) if x.shape[dim] % g == 0]))
    arrangement = Arrangement.of(x)
    rows = arrangement.rows(Grouping(dim, groups))
    lines = arrangement.lines(x, rows)
    assert torch.equal(lines.reshape(-1), arrangement.flat(x))
    assert lines.is_contiguous() or (lines.shape == (rows.parts * rows.outer, rows.groups * rows.inner))
    assert lines.is_contiguous() or lines.stride(1) == 1


def test_queries_keys_and_values_of_one_product_are_read_where_they_are():
    product = torch.randn(4, 7, 3, 2, 8)  # (B, N, 3, H, D)
    for x in product.permute(2, 0, 3, 1, 4).unbind():  # (B, H, N, D)
        arrangement = Arrangement.of(x)
        for samples in (1, 4):
            rows = arrangement.rows(Grouping(1, 2), samples=samples)
            lines = arrangement.lines(x, rows)
            assert (lines.data_ptr(), lines.shape, lines.stride()) == (x.data_ptr(), (28, 16), (48, 1))


# ---- ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_estimates_are_equations_6_and_7(decay):
    generator = torch.Generator().manual_seed(1)
    estimates, alpha, beta = Estimates(decay), None, None
    for _ in range(12):
        x = torch.randn(3, 50, generator=generator) * torch.tensor([[0.1], [1.0], [30.0]]) + 5
        low, high = x.amin(1), x.amax(1)
        found = ranges(low, high, ActivationPolicy(), estimates, "a")
        width, least = (high - low).double(), low.double()
        alpha = width if alpha is None else decay * alpha + (1 - decay) * width
        beta = least if beta is None else decay * beta + (1 - decay) * least
        torch.testing.assert_close(found[0].double(), alpha, rtol=1e-6, atol=0)
        torch.testing.assert_close(found[1].double(), beta, rtol=1e-6, atol=0)
    assert torch.equal(estimates.state_dict()["a"], torch.stack(found))


def test_estimates_that_are_grouped_in_another_way_begin_anew():
    estimates = Estimates()
    estimates.observe("a", torch.zeros(2), torch.ones(2))
    alpha, beta = estimates.observe("a", torch.full((3,), -1.0), torch.full((3,), 4.0))
    assert alpha.tolist() == [5, 5, 5]
    assert beta.tolist() == [-1, -1, -1]


def test_sample_statistics_leave_the_estimates_alone():
    estimates = Estimates()
    policy = ActivationPolicy(statistics="sample")
    alpha, beta = ranges(torch.tensor([-1.0]), torch.tensor([3.0]), policy, estimates, "a")
    assert (alpha.item(), beta.item(), estimates.state_dict()) == (4, -1, {})


@pytest.mark.parametrize(
    ("low", "high", "most"), [(-1.0, 3.0, 3.0), (-4.0, 3.0, 4.0), (1.0, 2.0, 2.0), (-2.0, -1.0, 2.0)]
)
def test_symmetric_ranges_are_made_of_estimates_that_serve_any_policy(low, high, most):
    estimates = Estimates()
    policy = ActivationPolicy(symmetric=True)
    alpha, beta = ranges(torch.tensor([low]), torch.tensor([high]), policy, estimates, "a")
    assert (alpha.item(), beta.item()) == (2 * most, -most)
    assert estimates.state_dict()["a"].tolist() == [[high - low], [low]]


def test_a_state_is_taken_as_it_was_given_and_what_is_none_is_refused():
    estimates, other = Estimates(), Estimates()
    estimates.observe("a", torch.rand(4) - 1, torch.rand(4))
    other.load_state_dict(estimates.state_dict())
    given = other.state_dict()["a"].clone()
    estimates.observe("a", torch.rand(4) - 1, torch.rand(4))
    assert torch.equal(other.state_dict()["a"], given)
    with pytest.raises(ValueError, match=r"a: a range is \(2, groups\) of floats, and this is \(3, 4\)"):
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


def taken(x, estimates, policy=None):
    """The codes of a batch."""
    made = quantized(
        x, kernels.Rows(1, 50, 3, 1), 8, x.dtype, Arena(), policy or ActivationPolicy(), estimates, "a"
    )  # fmt: skip
    assert isinstance(made, Payload)
    return made


@pytest.mark.parametrize("symmetric", [False, True])
def test_ranges_are_those_before_the_batch_unless_it_moves_them_far(symmetric):
    """Equations 6 and 7 in float64; an end that they move by more than the share DRIFT of the width is not let pass. A
    batch that is more than JUMP times as wide is not clipped.
    """
    estimates, policy = Estimates(), ActivationPolicy(symmetric=symmetric)
    held, outcomes, jumps = None, [], []
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
            jumps.append(bool((own[0] > JUMP * held[0]).any()))
            alpha, beta = own if jumps[-1] else learned
        if symmetric:
            top = torch.maximum(alpha + beta, -beta)
            alpha, beta = 2 * top, -top
        made = taken(x, estimates, policy)
        exact = 1e-4 if symmetric else 2e-6  # steps are widened a little, so that zero has a code
        torch.testing.assert_close(made.step.double(), alpha / (254 if symmetric else 255), rtol=exact, atol=0)
        torch.testing.assert_close(made.low.double(), beta, rtol=exact, atol=0)
        held = learned
        torch.testing.assert_close(estimates.state_dict()["a"].double(), torch.stack(held), rtol=2e-6, atol=0)
    assert {*outcomes} == {False, True}
    assert sum(jumps) == 2


def test_while_ranges_grow_and_shrink_they_are_the_papers_within_a_share():
    """Ends stay within DRIFT of the width of equations 6 and 7, and what exceeds them most loses 1/μ times as much."""
    for growth in (1.15, 1.1, 0.9, 0.75):
        estimates, held = Estimates(), None
        for x in batches([growth**n for n in range(20)], seed=1):
            made = taken(x, estimates)
            low, high = x.double().amin(0), x.double().amax(0)
            held = (low, high) if held is None else (0.9 * held[0] + 0.1 * low, 0.9 * held[1] + 0.1 * high)
            begin, end = made.low.double(), made.low.double() + 255 * made.step.double()
            allowed = DRIFT * (held[1] - held[0]) * (1 + 1e-4)
            assert ((begin - held[0]).abs() <= allowed).all()
            assert ((end - held[1]).abs() <= allowed).all()
            found = made.decode().view(50, 3).double()
            clipped = (x.double() - x.double().clamp(held[0], held[1])).abs().amax(0)
            step = made.step.double() + 1e-5 * (held[1] - held[0])
            assert ((found - x.double()).abs().amax(0) <= clipped / 0.9 + step).all()


def test_a_batch_is_read_twice_only_where_it_moves_ranges_far():
    passes = []

    def counting(name):
        kernel = getattr(kernels, name)
        return patch.object(kernels, name, lambda *args, **options: passes.append(name) or kernel(*args, **options))

    with counting("row_extremes"), counting("quantize_rows"), counting("quantize_rows_extremes"):
        estimates, x = Estimates(), batches([1.0])[0]
        for scale in (1.0, 1.1, 3.0):
            taken(scale * x, estimates)
        one = ["quantize_rows_extremes"]
        looked = ["row_extremes"]  # at how large rows are
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


# ---- where codes lie -------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=60))
def test_parts_of_an_arena_do_not_overlap(sizes):
    arena = Arena()
    arena.PIECE_NBYTES = 1 << 12
    parts = [arena.take(nbytes, CPU) for nbytes in [*sizes, 10_000]]
    for value, part in enumerate(parts):
        part.fill_(value)
    for value, (nbytes, part) in enumerate(zip([*sizes, 10_000], parts, strict=True)):
        assert part.shape == (nbytes,)
        assert bool((part == value).all())
        assert not nbytes or part.data_ptr() % 64 == 0
    assert len({part.untyped_storage().data_ptr() for part in parts if part.numel()}) <= 2 + sum(sizes) // 1000


def test_a_piece_of_an_arena_is_freed_with_the_last_of_its_parts():
    arena = Arena()
    first = [arena.take(Arena.PIECE_NBYTES // 2, CPU) for _ in range(2)]
    piece = StorageWeakRef(first[0].untyped_storage())
    assert first[1].untyped_storage().data_ptr() == first[0].untyped_storage().data_ptr()
    arena.take(1, CPU)  # of the next piece
    del first[1]
    assert not piece.expired()
    first.clear()
    assert piece.expired()


def test_codes_of_a_model_lie_by_themselves_until_backward():
    pieces = []

    def taking(arena, nbytes, device, take=Arena.take):
        taken = take(arena, nbytes, device)
        pieces.append(StorageWeakRef(taken.untyped_storage()))
        return taken

    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 8))
    with patch.object(Arena, "take", taking), nb.compress_activations(model, min_numel=1):
        loss = model(torch.randn(32, 64)).sum()
    assert len(pieces) == 4  # of a linear layer, GELU, ReLU and dropout
    assert len({piece.cdata for piece in pieces}) == 1
    assert not any(piece.expired() for piece in pieces)
    loss.backward()
    assert all(piece.expired() for piece in pieces)


# ---- codes -----------------------------------------------------------------------------------------------------------


def payload(x, bits, grouping=None, *, samples=1, symmetric=False, stochastic=True, seed=1, share=1.0):
    """Of a tensor by its own range, or by a share of that."""
    arrangement = Arrangement.of(x)
    rows = arrangement.rows(grouping or Grouping(x.dim() - 1, 1), samples=samples)
    flat = arrangement.flat(x)
    flat = flat.float() if x.dtype == torch.float16 else flat
    low, high = kernels.row_extremes(flat, rows)
    policy = ActivationPolicy(symmetric=symmetric)
    alpha, beta = ranges(low, high, policy, Estimates(), "")
    made = Payload(rows, bits, x.dtype, Arena().take(rows.nbytes(bits), CPU))
    made.encode(flat, share * alpha, beta, symmetric=symmetric, stochastic=stochastic, seed=seed)
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
    exact = (x.double() - beta) * top / alpha
    expected = exact.round().clamp(0, top) * alpha / top + beta
    sure = (exact - exact.floor() - 0.5).abs() > 1e-3  # at a tie, float32 may decide otherwise
    assert sure.double().mean() > 0.98
    rounding = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype] * (alpha + beta.abs())
    assert ((found.double() - expected).abs() <= rounding)[sure].all()
    assert ((found.double() - expected).abs() <= alpha / top + rounding).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(bits, symmetric):
    torch.manual_seed(3)
    x, seeds = torch.randn(6, 2, 20), 800
    total = torch.zeros(6, 2, 20, dtype=torch.float64)
    for seed in range(seeds):
        kept, arrangement = payload(x, bits, Grouping(1, 2), symmetric=symmetric, seed=seed)
        found = arrangement.unflat(kept.decode()).double()
        step = kept.step.double().view(1, 2, 1)
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
    assert ((found.double() - x.double()).abs() <= kept.step.double().item() + rounding).all()


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_symmetric_keeps_zero_exactly(bits, dtype, stochastic):
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
            x, bits, Grouping(1, 64), symmetric=True, stochastic=stochastic, seed=seed, share=0.9
        )
        found = arrangement.unflat(kept.decode())
        assert (found[x == 0] == 0).all()
        assert not (found[x.abs() > sizes.to(dtype)] == 0).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("value", [0.0, -0.7, 1e-42, 3e37])
def test_a_tensor_of_one_value_is_kept_exactly(value, symmetric):
    x = torch.full((4, 8), value)
    kept, arrangement = payload(x, 8, symmetric=symmetric)
    torch.testing.assert_close(arrangement.unflat(kept.decode()), x, rtol=1e-5 if symmetric else 2e-7, atol=1e-36)


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
    return Exact(x, "relu in head"), Packed(x, arrangement, made, "relu in head", Kept())


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
