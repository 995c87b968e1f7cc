"""What ``topk``, ``threshold`` and ``randomk`` mean, against a float64 selection that sorts everything."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowband as nb
from narrowband import kernels
from narrowband.collectives import check, choose
from narrowband.errors import PayloadError, UnsupportedError
from tests.codecs.common import backend, bits_of, tensors, values

densities = st.floats(1e-4, 1.0)
every_backend = pytest.mark.parametrize("name", ["cpu", "reference"])


def count(density, n):
    """round(density · n), half up, at least one and at most all."""
    return min(n, max(1, math.floor(density * n + 0.5))) if n else 0


def largest(x, k):
    """``x`` in float64 with all but its k largest magnitudes set to zero; of equals, the first are kept."""
    flat = x.reshape(-1).double().numpy()
    order = np.lexsort((np.arange(flat.size), -np.abs(flat)))
    dense = np.zeros(flat.size)
    dense[order[:k]] = flat[order[:k]]
    return torch.from_numpy(dense).view(x.shape)


# ---- top-k -----------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("indices", ["elias-fano", "int32"])
@settings(max_examples=40)
@given(x=tensors(), density=densities)
def test_topk_keeps_exactly_the_largest(name, indices, x, density):
    codec = nb.codec(f"topk:density={density!r},indices={indices}")
    with backend(name):
        assert codec.kept(x.shape) == count(density, x.numel())
        assert torch.equal(codec.roundtrip(x.float()).double(), largest(x, count(density, x.numel())))


@settings(max_examples=40)
@given(x=tensors(), density=densities)
def test_topk_contracts_by_its_density(x, density):
    """``‖x − C(x)‖² ≤ (1 − k/n) ‖x‖²``, on which the convergence of error feedback rests."""
    codec = nb.codec(f"topk:density={density!r}")
    if x.numel():
        delta = codec.kept(x.shape) / x.numel()
        norm = float((x.double() ** 2).sum())
        assert codec.squared_error(x) <= (1 - delta) * norm * (1 + 1e-9)


@every_backend
@pytest.mark.parametrize(
    "rest",
    [
        "select=sampled",
        "scope=sample,values=fp16",
        "values=int8,indices=int32",
        "values=int2,tile=8x8",
        "mean=senders",
    ],
)
def test_what_a_payload_adds_can_be_read_and_added_later(name, rest):
    codec, x = nb.codec(f"topk:density=0.2,{rest}"), torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    with backend(name):
        payload, base = codec.encode(x, seed=3), x.sin().round().neg()  # which has zeros of both signs
        added = codec.added(payload, x.shape)
        later = base.clone()
        kernels.sparse_accumulate(later.view(-1), *added)
        assert bits_of(later) == bits_of(codec.decode(payload, base, accumulate=True))
        with pytest.raises(nb.PayloadError):
            codec.added(payload[:-1], x.shape)


@every_backend
@pytest.mark.parametrize("shape", [(4, 250), (7, 3, 11), (1, 100), (100, 1), (250,), ()])
def test_scope_sample_keeps_the_same_share_of_every_row(name, shape):
    x = torch.randn(shape) * 10.0 ** torch.arange(-3, 2).repeat(50)[: shape[0] if shape else 1].view(
        -1, *[1] * (len(shape) - 1)
    ).view(shape if len(shape) == 1 else (-1, *[1] * (len(shape) - 1)) if shape else ())
    codec = nb.codec("topk:density=0.1,scope=sample")
    with backend(name):
        after = codec.roundtrip(x)
    rows = x if x.dim() >= 2 else x.reshape(1, -1)
    expected = torch.stack([largest(row, count(0.1, row.numel())) for row in rows]).view(shape)
    assert torch.equal(after.double(), expected)
    assert codec.kept(shape) == int((expected != 0).sum())


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_of_nothing_nothing_is_kept(shape):
    for scope in ("tensor", "sample"):
        assert nb.codec(f"topk:density=0.1,scope={scope}").kept(shape) == 0


@every_backend
@pytest.mark.parametrize("kind", ["normal", "ties", "wide", "zeros", "constant"])
@pytest.mark.parametrize(("n", "density"), [(500, 0.1), (100_000, 0.01), (300_000, 0.001)])
def test_sampled_selection_keeps_at_most_k_and_none_smaller_than_one_it_leaves_out(name, kind, n, density):
    x, k = values(kind, n, 1), count(density, n)
    with backend(name):
        for seed in range(5):
            after = nb.codec(f"topk:density={density},select=sampled").roundtrip(x, seed=seed).double()
            found = int((after != 0).sum())
            if kind == "zeros":
                assert found == 0
                continue
            assert found <= k
            assert found >= 0.9 * k, "a sample of this size misses k by less"
            assert torch.equal(after, largest(x, found))


@every_backend
@pytest.mark.parametrize("scope", ["tensor", "sample"])
@pytest.mark.parametrize("values_", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("indices", ["elias-fano", "int32"])
def test_a_sample_that_misleads_costs_elements_but_adds_none(name, scope, values_, indices):
    """All large elements lie where the sample looks: fewer than k pass the threshold, in a payload as long as ever."""
    n, density, seed = 50_000, 0.01, 11
    k = count(density, n)
    small = torch.linspace(0.5, 1.0, n)  # the last element is not zero: it must not be sent in place of those missing
    x = torch.stack([small, small.flip(0)]) if scope == "sample" else small.clone()
    row = x[0] if scope == "sample" else x
    looked_at = kernels.randomk_indices(n, kernels.sample_size(n, k), seed)
    large = kernels.sample_rank(n, k)
    assert large < k
    row[looked_at[:large].long()] = 2.0 + torch.arange(large) / large
    codec = nb.codec(f"topk:density={density},select=sampled,scope={scope},values={values_},indices={indices}")
    with backend(name):
        payload = codec.encode(x, seed=seed)
        assert payload.numel() == codec.payload_nbytes(x.shape)
        after = codec.decode(payload, torch.empty(x.shape), seed=seed)
    kept = after != 0
    assert int(kept.view(-1, n)[0].sum()) == large
    torch.testing.assert_close(after[kept], x[kept], rtol={"fp32": 0, "fp16": 2**-11, "int8": 0.01}[values_], atol=0)


@settings(max_examples=30)
@given(x=tensors(), density=densities)
def test_fp16_values_are_rounded_and_saturate(x, density):
    exact = nb.codec(f"topk:density={density!r}").roundtrip(x.float() * 1e4)
    half = nb.codec(f"topk:density={density!r},values=fp16").roundtrip(x.float() * 1e4)
    assert torch.equal(half, exact.clamp(-65504, 65504).half().float())
    assert half.isfinite().all()


@settings(max_examples=30)
@given(x=tensors(), density=densities)
def test_int8_values_err_by_half_a_step_of_the_largest_of_256(x, density):
    x = x.float().reshape(-1)
    k = count(density, x.numel())
    kept = largest(x, k)
    after = nb.codec(f"topk:density={density!r},values=int8").roundtrip(x).double()
    assert ((after == 0) | (kept != 0)).all()
    at = kernels.select_topk(x.contiguous(), k).long()
    for part in at.split(256) if k else ():
        bound = float(kept[part].abs().max()) / 127 / 2
        assert float((after - kept)[part].abs().max()) <= bound * (1 + 1e-4) + 2.0**-118


@every_backend
@pytest.mark.parametrize("values_", ["int4", "int2"])
def test_values_in_few_bits_keep_places_and_signs(name, values_):
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    with backend(name):
        whole = nb.codec("topk:density=0.1").roundtrip(x)
        few = nb.codec(f"topk:density=0.1,values={values_}").roundtrip(x)
    assert torch.equal(few.sign(), whole.sign())
    assert len(few.abs().unique()) - 1 <= {"int4": 8, "int2": 2}[values_]  # 200 values are one group
    assert float((few - whole).norm() / whole.norm()) < {"int4": 0.05, "int2": 0.14}[values_]


def test_sixty_four_times_fewer_elements_in_two_bits_cost_ten_bits_each():
    codec = nb.codec("topk:density=0.015625,values=int2,tile=64x64")
    assert codec.kept((4096, 1024)) == 64 * 1024
    assert codec.payload_nbytes((4096, 1024)) * 8 / (64 * 1024) <= 10.2


# ---- the mean of those that kept an element --------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("values_", ["fp32", "fp16", "int8", "int4", "int2"])
@settings(max_examples=30)
@given(x=tensors(), others=st.integers(0, 4), density=densities)
def test_a_mean_is_over_those_that_kept_an_element(name, values_, x, others, density):
    """In float64: Σ Q(xᵢ) over the number of i whose Q(xᵢ) is not zero there."""
    codec = nb.codec(f"topk:density={density!r},values={values_},mean=senders")
    x = x.float()
    xs = [x, *(x * torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i in range(others))]
    with backend(name):
        payloads = [codec.encode(each) for each in xs]
        mean = codec.decode_mean(payloads, torch.full(x.shape, math.nan), seeds=range(len(xs)))
        decoded = torch.stack([codec.decode(payload, torch.empty(x.shape)) for payload in payloads]).double()
    senders = (decoded != 0).sum(0).clamp(min=1)
    torch.testing.assert_close(
        mean.double(),
        decoded.sum(0) / senders,
        rtol=1e-5,
        atol=1e-6 * float(decoded.abs().sum(0).max() if x.numel() else 0),
    )


def test_a_mean_of_senders_is_the_sum_where_none_is_sent_twice_and_the_mean_where_all_are():
    codec = nb.codec("topk:density=0.25,mean=senders")
    first, second, third = torch.tensor([[3.0, 1, 0, 0], [0, 0, 0, -2], [5, 0, 0, 1]])

    def mean(*xs):
        return codec.decode_mean([codec.encode(x) for x in xs], torch.empty(4), seeds=range(len(xs))).tolist()

    assert mean(first, second) == [3, 0, 0, -2]
    assert mean(first, third) == [4, 0, 0, 0]
    assert mean(first, second, third) == [4, 0, 0, -2]


def test_who_sent_an_element_is_known_only_where_all_payloads_arrive():
    """Among many ranks the largest sums would be sent, which do not say how many added to them."""
    feedback = nb.compression("topk:density=0.01+ef").feedback
    for mean, name in (("ranks", "sparse_reduce"), ("senders", "all_gather")):
        codec = nb.codec(f"topk:density=0.01,mean={mean}")
        assert choose(codec, 10**8, 16, feedback).name == name
    with pytest.raises(UnsupportedError, match=r"over all ranks; topk:density=0\.01,mean=senders does not"):
        check(codec, "sparse_reduce", feedback)


# ---- tiles -----------------------------------------------------------------------------------------------------------


def tiles(shape, height, width):
    """Masks of the tiles of a matrix, from left to right and from top to bottom."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape) // rows if rows else 0
    if len(shape) < 2:
        height, width = 1, height * width
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            mask = torch.zeros(rows, columns, dtype=torch.bool)
            mask[top : top + height, left : left + width] = True
            yield mask.view(shape)


@every_backend
@settings(max_examples=40)
@given(
    x=tensors(), density=densities, height=st.integers(1, 9), width=st.integers(1, 40),
)  # fmt: skip
def test_each_tile_keeps_its_own_largest(name, x, density, height, width):
    codec = nb.codec(f"topk:density={density!r},tile={height}x{width}")
    expected, number = torch.zeros(x.shape, dtype=torch.float64), 0
    for mask in tiles(tuple(x.shape), height, width):
        own = x.float()[mask]
        expected[mask] = largest(own, count(density, own.numel()))
        number += count(density, own.numel())
    with backend(name):
        assert codec.kept(x.shape) == number
        got = codec.roundtrip(x.float()).double()
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk:tile=64", "tile='64' is not the size of a tile; write rows x columns, such as 64x64"),
        ("topk:tile=0x8", "tile='0x8' is not the size"),
        ("topk:tile=8x8,scope=sample", "cannot be combined with scope or select"),
        ("topk:tile=8x8,select=sampled", "cannot be combined with scope or select"),
        ("topk:values=int2,select=sampled", "values=int2 cannot represent zero"),
        ("topk:values=int4,indices=runs", "values=int4 cannot represent zero"),
        ("topk:values=int2+ef-mixed", "'topk:density=0.01,values=int2' cannot send fewer elements"),
        ("topk:tile=8x8+ef-mixed", "leave out tile"),
    ],
)
def test_what_cannot_be_combined_says_what_to_leave_out(spec, message):
    with pytest.raises((ValueError, nb.UnsupportedError), match=re.escape(message)):
        nb.compression(spec)


# ---- indices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1_000, 25_000, 1_000_000, 25_000_000, 2**31 - 1])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.37, 1.0])
def test_an_index_costs_two_bits_and_the_logarithm_of_the_gap(n, density):
    codec = nb.codec(f"topk:density={density}")
    k = codec.kept(n)
    low = max(-(-n // k) - 1, 0).bit_length()  # ⌈log₂(n/k)⌉ in whole numbers
    assert 2**low * k >= n > 2**low * k // 2
    bits = (2 * k, k * low)  # k · (2 + low) in two parts, each ending with a byte
    nbytes = sum(-(-part // 8) for part in bits)
    assert kernels.elias_fano_nbytes(k, n) == nbytes
    index_nbytes = codec.payload_nbytes(n) - 4 * k
    assert index_nbytes == -(-nbytes // 4) * 4
    if density == 0.001 and k >= 1000:
        assert index_nbytes * 8 / k <= 12.1
    assert nb.codec(f"topk:density={density},indices=int32").payload_nbytes(n) == 8 * k
    assert codec.payload_nbytes(n) - nb.codec(f"topk:density={density},values=fp16").payload_nbytes(n) in (
        2 * k,
        2 * k - 2,
    )


def test_a_payload_holds_that_many_index_bytes():
    x = torch.randn(1_000_000)
    assert nb.codec("topk:density=0.001").encode(x).numel() - 4 * 1000 == 1500


@every_backend
@settings(max_examples=40)
@given(
    x=tensors(dtypes=[torch.float32]),
    density=densities,
    select=st.sampled_from(["exact", "sampled"]),
    scope=st.sampled_from(["tensor", "sample"]),
    offset=st.integers(0, 3),
)
def test_the_fused_encoding_of_error_feedback_is_the_plain_one_of_the_sum(name, x, density, select, scope, offset):
    codec = nb.codec(f"topk:density={density!r},select={select},scope={scope}")
    gradient = x.contiguous().view(-1).clone()
    residual = gradient.flip(0) * 0.3
    old, total = residual.clone(), residual + gradient
    with backend(name):
        expected = codec.encode(total.view(x.shape), seed=3)
        memory = torch.zeros(offset + expected.numel(), dtype=torch.uint8)
        finite, payload = codec.encode_compensated(gradient, residual, shape=x.shape, seed=3, out=memory[offset:])
    assert finite
    assert torch.equal(payload, expected)
    assert torch.equal(memory[offset:], expected)
    assert torch.equal(gradient, old)
    assert torch.equal(residual, total)


def test_the_fused_encoding_refuses_a_wrong_out_before_it_changes_anything():
    codec = nb.codec("topk:density=0.1")
    x, residual = torch.randn(100), torch.randn(100)
    before = x.clone(), residual.clone()
    with pytest.raises(ValueError, match="out has 1 bytes"):
        codec.encode_compensated(x, residual, shape=(5, 20), out=torch.empty(1, dtype=torch.uint8))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


# ---- threshold -------------------------------------------------------------------------------------------------------


@every_backend
@settings(max_examples=40)
@given(x=tensors(), value=st.floats(2.0**-20, 10.0, width=32))
def test_threshold_keeps_all_that_reach_it_and_nothing_else(name, x, value):
    codec = nb.codec(f"threshold:value={value!r}")
    with backend(name):
        payload = codec.encode(x)
        after = codec.decode(payload, torch.empty(x.shape))
    kept = x.double().abs() >= value
    assert torch.equal(after.double(), torch.where(kept, x.double(), 0.0))
    k, n = int(kept.sum()), x.numel()
    if n:
        assert payload.numel() == 4 + 4 * k + -(-kernels.elias_fano_nbytes(k, n) // 4) * 4
        assert payload.numel() <= codec.payload_nbytes(x.shape)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 31, 64, 300])
def test_the_capacity_of_threshold_is_the_longest_payload_there_is(n):
    codec, sizes = nb.codec("threshold:value=1.0"), []
    out = torch.empty(codec.payload_nbytes(n), dtype=torch.uint8)
    for k in range(n + 1):
        x = torch.zeros(n)
        x[n - k :] = 2.0
        sizes.append(codec.encode(x, out=out).numel())
        assert torch.equal(codec.decode(out[: sizes[-1]], torch.empty(n)), x)
    assert max(sizes) == codec.payload_nbytes(n)


@pytest.mark.parametrize("value", [0.1, 0.3, 2.0**-126, 1.5e10])
def test_a_value_that_equals_the_threshold_in_float32_is_kept(value):
    codec = nb.codec(f"threshold:value={value!r}")
    x = torch.tensor([value, -value, 0.0])
    assert torch.equal(codec.roundtrip(x), x)


# ---- random-k --------------------------------------------------------------------------------------------------------


@every_backend
@settings(max_examples=60)
@given(x=tensors(), density=densities, seed=st.integers(0, 2**64 - 1))
def test_randomk_sends_values_only_from_places_both_sides_know(name, x, density, seed):
    codec = nb.codec(f"randomk:density={density!r}")
    flat, k = x.float().reshape(-1), count(density, x.numel())
    with backend(name):
        payload = codec.encode(x, seed=seed)
        places = kernels.randomk_indices(flat.numel(), k, seed).long()
        after = codec.decode(payload, torch.empty(x.shape), seed=seed).view(-1)
    assert payload.numel() == 4 * k
    assert torch.equal(payload.view(torch.float32), flat[places])
    assert (places[1:] > places[:-1]).all(), "sorted, and none twice"
    assert ((places >= 0) & (places < flat.numel())).all()
    expected = torch.zeros(flat.numel())
    expected[places] = flat[places]
    assert torch.equal(after, expected)


def test_randomk_reaches_every_place_as_often_as_its_share():
    """One of each of k equal stretches, so with k = 7 of n = 50, 1/7 or 1/8."""
    n, k, times = 50, 7, 4000
    codec, hits = nb.codec(f"randomk:density={k / n}"), torch.zeros(n)
    for seed in range(times):
        hits += codec.roundtrip(torch.ones(n), seed=seed)
    edges = [i * n // k for i in range(k + 1)]
    for low, high in itertools.pairwise(edges):
        share = 1 / (high - low)
        assert float(hits[low:high].sum()) == times
        deviation = math.sqrt(times * share * (1 - share))
        assert ((hits[low:high] - times * share).abs() < 4.5 * deviation).all()


def test_places_of_neighbouring_stretches_and_seeds_are_independent():
    """A pair of places is hit as often as the product of its shares."""
    codec = nb.codec("randomk:density=0.5")  # one of each two
    first = torch.stack([codec.roundtrip(torch.ones(64), seed=seed)[::2] for seed in range(4000)])
    correlation = torch.corrcoef(first.t()) - torch.eye(32)
    assert float(correlation.abs().max()) < 5 / math.sqrt(4000)
    after_each_other = (first[1:] - 0.5) * (first[:-1] - 0.5)
    assert float(after_each_other.mean().abs()) < 5 * 0.25 / math.sqrt(after_each_other.numel())


def test_the_wrong_seed_puts_values_elsewhere():
    """Nothing in the payload says where: that is what ``shared_seed`` tells the collectives."""
    codec, x = nb.codec("randomk:density=0.1"), torch.randn(1000)
    assert codec.shared_seed
    assert not torch.equal(codec.decode(codec.encode(x, seed=1), torch.empty(1000), seed=2), codec.roundtrip(x, seed=1))


@pytest.mark.parametrize("values", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(
    ("n", "places"),
    [
        (65_536, [65_535]),  # the longest run there is
        (65_537, [65_536]),  # one zero more: a stop
        (200_000, [0, 65_536, 131_072, 196_607, 199_999]),
        (400_000, [131_071, 131_072, 393_215]),
        (400_000, [399_999]),
        (70_000, [0]),
    ],
)
def test_runs_that_16_bits_cannot_say(n, places, values):
    x = torch.zeros(n)
    x[places] = torch.arange(1.0, len(places) + 1)
    density = len(places) / n
    codec, plain = (nb.codec(f"topk:density={density},values={values}{form}") for form in (",indices=runs", ""))
    assert torch.equal(codec.roundtrip(x), plain.roundtrip(x))
    assert codec.places(codec.encode(x), x.shape).tolist() == places, "stops are no elements"
    assert all(map(torch.equal, codec.elements(codec.encode(x), x.shape), plain.elements(plain.encode(x), x.shape)))


@pytest.mark.parametrize("values", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("large", [{}, {0: 1.0}, {399_999: 1.0}, {5: torch.inf, 300_000: 1.0}])
def test_runs_name_as_many_places_as_are_kept(large, values):
    """Also where elements that are chosen are zero, as stops are, and where nothing is finite."""
    x = torch.zeros(400_000)
    for place, value in large.items():
        x[place] = value
    x[200_000:200_010] = 1e-9  # zero in 8 bits beside 1
    codec, plain = (nb.codec(f"topk:density=3e-5,values={values}{form}") for form in (",indices=runs", ""))
    assert torch.equal(codec.places(codec.encode(x), x.shape), plain.places(plain.encode(x), x.shape))


def test_runs_of_less_than_k_elements_name_places_that_another_tensor_can_be_taken_at():
    """Sampling may find less than k: the last place fills up, as in the other forms."""
    codec, plain = (nb.codec(f"topk:density=2e-5,select=sampled{form}") for form in (",indices=runs", ""))
    x, y = torch.zeros(300_000), torch.rand(300_000) + 1
    found = torch.tensor([3, 100_000, 200_000], dtype=torch.int32)
    x[found] = 1.0
    payload = codec.pack(found, x[found], shape=x.shape)
    places = codec.places(payload, x.shape)
    assert places.tolist() == [3, 100_000, 200_000, 299_999, 299_999, 299_999]
    same = plain.elements(plain.pack(found, x[found], shape=x.shape), x.shape)
    assert all(map(torch.equal, codec.elements(payload, x.shape), same))
    arrived = codec.decode_at(codec.encode_at(y, places), places, torch.empty_like(y))
    assert torch.equal(arrived[places], y[places])
    assert int(arrived.count_nonzero()) == 4


def test_runs_of_more_elements_than_are_kept_are_damaged():
    codec, x = nb.codec("topk:density=1.5e-5,indices=runs"), torch.zeros(200_000)
    payload = codec.encode(x)
    payload[:24].view(torch.float32).fill_(1.0)
    payload[24:28].view(torch.int32)[0] = 5
    with pytest.raises(PayloadError, match="names 5 elements, but"):
        codec.places(payload, x.shape)


def test_runs_are_the_papers_format():
    """32-bit values, then how many there are and 16-bit lengths of the zeros before each."""
    x = torch.zeros(200_000)
    x[torch.tensor([3, 4, 70_004])] = torch.tensor([1.0, -2.0, 3.0])
    payload = nb.codec("topk:density=1.5e-5,indices=runs").encode(x)
    entries = 3 + 200_000 // 65_536
    assert payload.numel() == 4 * entries + 4 + 2 * entries
    assert payload[: 4 * entries].view(torch.float32).tolist() == [1.0, -2.0, 0.0, 3.0, 0.0, 0.0]
    assert payload[4 * entries :].view(torch.int32)[0] == 4
    assert payload[4 * entries + 4 :].view(torch.uint16).tolist() == [3, 0, 65_535, 70_004 - 65_540 - 1, 0, 0]
    elias_fano = nb.codec("topk:density=0.001").payload_nbytes(25_000_000)
    assert elias_fano < 0.905 * nb.codec("topk:density=0.001,indices=runs").payload_nbytes(25_000_000)
