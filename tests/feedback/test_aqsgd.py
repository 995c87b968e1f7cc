"""AQ-SGD: the algorithm, both ends, and what a payload is."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowband as nb
from narrowband.codecs import Identity
from narrowband.feedback import AQSGD, aqsgd
from tests.codecs.common import backend, bits_of
from tests.feedback.samples import (
    FIXED_SIZE,
    KEY,
    SHAPE,
    Pair,
    batches,
    every_codec,
    every_dtype,
    every_keep,
    one_sample,
)

some_codecs = pytest.mark.parametrize("spec", ["none", "topk:density=0.1", "qsgd:bits=4", "uniform:bits=4"])


# ---- the algorithm ---------------------------------------------------------------------------------------------------


@every_codec
@every_dtype
def test_each_visit_is_the_algorithm(spec, dtype):
    """First m = x, then m = m + C(x − m), followed in float64 with the payloads that were sent."""
    ends, m = Pair(spec), {}
    for step, ids, x in batches():
        x = x.to(dtype)  # noqa: PLW2901
        sizes = [ends.codec.payload_nbytes(SHAPE) if i in m else 300 * dtype.itemsize for i in ids.tolist()]
        payload, arrived = ends.send(x, ids, seed=step)
        for at, (i, part) in enumerate(zip(ids.tolist(), payload.split(sizes), strict=True)):
            if i not in m:
                assert torch.equal(part.view(dtype).view(SHAPE), x[at])
                assert torch.equal(arrived[at], x[at])
                m[i] = x[at].double()
                continue
            said = ends.codec.decode(part.clone(), torch.empty(SHAPE), seed=step + at).double()
            # C is applied to x − m: what rounding m otherwise decides may differ
            again = ends.codec.roundtrip((x[at].double() - m[i]).float(), seed=step + at).double()
            assert ((said - again).abs() > 1e-5).float().mean() <= 0.02
            m[i] += said
            torch.testing.assert_close(
                arrived[at], m[i].to(dtype), rtol=2e-2 if dtype != torch.float32 else 0, atol=1e-5
            )
            row = ends.sender._stores[KEY].row(i).double().view(SHAPE)
            torch.testing.assert_close(row, m[i], rtol=0, atol=1e-5)
    assert ends.buffers().keys() == m.keys()
    assert ends.sender.reference_ids(KEY).tolist() == sorted(m)


@pytest.mark.parametrize(
    ("spec", "keep", "error"),
    [
        ("qsgd:bits=4", "fp32", 1e-5),
        ("uniform:bits=4", "fp32", 1e-5),
        ("topk:density=0.1", "fp32", 1e-5),
        ("sign:bucket=8", "fp32", 1e-3),
        ("qsgd:bits=4", "fp16", 1e-3),
        ("qsgd:bits=4", "int8", 2e-3),
    ],
)
def test_a_sample_that_stays_as_it_is_arrives_more_exactly_every_time(spec, keep, error):
    """What the codec alone would lose each time is lost once; a rounded buffer adds no error of its own size."""
    ends, x, ids = Pair(spec, store=keep), one_sample(1, 0)[None], torch.tensor([1])
    ends.send(one_sample(2, 0)[None], ids)
    errors = [float((ends.send(x, ids, seed=step)[1] - x).norm() / x.norm()) for step in range(25)]
    assert errors[0] > 0.04
    assert errors[-1] < error
    alone = ends.codec.roundtrip(x[0], seed=0)
    assert errors[-1] < 0.05 * float((alone - x[0]).norm() / x.norm())


# ---- both ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["memory", "disk"])
@every_keep
@some_codecs
@every_dtype
def test_both_ends_stay_equal_to_the_bit(spec, keep, place, dtype, tmp_path):
    ends = Pair(spec, tmp_path if place == "disk" else None, store=keep)
    for step, ids, x in batches():
        ends.send(x.to(dtype), ids, seed=step)
        ends.buffers()
    assert len(ends.buffers()) == 10


@every_codec
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_payload_is_its_samples_end_to_end(spec, name):
    codec, sender = nb.codec(spec), AQSGD()
    ids, first = torch.tensor([3, 9, -4]), torch.randn(3, *SHAPE).bfloat16()
    seed = 2**64 - 2  # the third sample's is 0
    with backend(name):
        sender.pack(KEY, first[:2], codec, samples=ids[:2], seed=seed)
        x = torch.randn(3, *SHAPE).bfloat16()
        expected = [codec.encode(x[at].float() - first[at].float(), seed=(seed + at) % 2**64) for at in range(2)]
        expected.append(Identity().encode(x[2]))
        state = pickle.dumps(sender.state_dict())
        for offset in (0, 1, 4):
            again = AQSGD()
            again.load_state_dict(pickle.loads(state))
            room = torch.zeros(sum(map(len, expected)) + offset, dtype=torch.uint8)
            payload = again.pack(KEY, x, codec, samples=ids, seed=seed, out=room[offset:])
            assert payload.data_ptr() == room[offset:].data_ptr()
            assert torch.equal(payload, torch.cat(expected))
            receiver = AQSGD()
            receiver.load_state_dict(pickle.loads(state))
            out = receiver.unpack(KEY, payload, torch.empty_like(x), codec, samples=ids, seed=seed)
            assert torch.equal(out[2], x[2])
            assert bits_of(receiver._stores[KEY].row(3)) == bits_of(again._stores[KEY].row(3))


def test_a_payload_has_the_bytes_that_arithmetic_says():
    ends, ids = Pair("qsgd:bits=4"), torch.arange(4)
    x = torch.randn(4, 3, 5)
    for dtype, whole in ((torch.float32, 60), (torch.float16, 32), (torch.bfloat16, 32)):
        key = str(dtype)
        assert ends.send(x.to(dtype), ids, key=key)[0].numel() == 4 * whole
        assert ends.send(x.to(dtype), ids, key=key)[0].numel() == 4 * 12  # 15 codes of 4 bits and a step
        assert ends.send(x.to(dtype), ids + 3, key=key)[0].numel() == 12 + 3 * whole


@some_codecs
@every_dtype
def test_one_process_may_play_both_ends_in_place(spec, dtype):
    ends, alone = Pair(spec), AQSGD()
    for step, ids, x in batches(2):
        _, expected = ends.send(x.to(dtype), ids, seed=step)
        own = x.to(dtype, copy=True)
        alone.pack(KEY, own, ends.codec, samples=ids, seed=step, arrived=own)
        assert bits_of(own) == bits_of(expected)


@settings(max_examples=30)
@given(
    shape=st.sampled_from([(), (1,), (7,), (0,), (3, 0), (2, 3, 5)]),
    count=st.integers(0, 4),
    spec=st.sampled_from(FIXED_SIZE),
    form=st.sampled_from(["plain", "transposed", "strided"]),
)
def test_batches_of_every_form(shape, count, spec, form):
    ends = Pair(spec)
    for step in range(3):
        x = torch.randn(count, *shape)
        if form == "transposed" and shape:
            x = torch.randn(*reversed(x.shape)).permute(*reversed(range(x.dim())))
        elif form == "strided":
            x = torch.randn(2 * count, *shape)[::2]
        _, arrived = ends.send(x, torch.arange(count), seed=step)
        assert arrived.shape == x.shape
        assert step or torch.equal(arrived, x)


def test_an_output_of_any_strides_and_a_leaf_that_wants_a_gradient():
    ends, x, ids = Pair("qsgd:bits=4"), torch.randn(2, 4, 6), torch.tensor([1, 2])
    for step in range(2):
        leaf = x.clone().requires_grad_()
        told = torch.empty(6, 4, 2).permute(2, 1, 0)
        payload = ends.sender.pack(KEY, leaf * 1, ends.codec, samples=ids, seed=step, arrived=told)
        arrived = ends.receiver.unpack(
            KEY, payload, torch.empty(2, 8, 6)[:, ::2].requires_grad_(), ends.codec, samples=ids, seed=step
        )
        assert torch.equal(arrived, told)
        assert not payload.requires_grad


def test_keys_have_buffers_of_their_own():
    ends, alone, x, ids = Pair("topk:density=0.1"), Pair("topk:density=0.1"), one_sample(0, 0)[None], torch.tensor([0])
    for step in range(3):
        ends.send(x * step, ids, key="a")
        ends.send(torch.randn(1, 9), ids, key="b")
        alone.send(x * step, ids, key="a")
    assert ends.buffers("a") == alone.buffers("a")
    assert ends.sender.reference_ids("a").tolist() == [0]
    assert ends.sender.reference_ids("c").tolist() == []
    ends.sender.keep_only("c", [])


@pytest.mark.parametrize("place", ["memory", "disk"])
@every_keep
def test_samples_beyond_the_budget_travel_in_full(keep, place, caplog, tmp_path):
    nbytes = {"fp32": 1200, "fp16": 600, "int8": 308}[keep]
    ends = Pair("qsgd:bits=4", tmp_path if place == "disk" else None, store=keep, budget_gb=2.5 * nbytes / 1e9)
    ids = torch.tensor([4, 8, 6])
    for step in range(3):
        x = torch.stack([one_sample(int(i), step) for i in ids])
        payload, arrived = ends.send(x, ids, seed=step)
        said = 1200 if step == 0 else ends.codec.payload_nbytes(SHAPE)
        assert payload.numel() == 2 * said + 1200
        assert torch.equal(arrived[2], x[2])
        assert ends.buffers().keys() == {4, 8}
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 2, "once by each end"
    ends.sender.keep_only(KEY, [8])
    ends.receiver.keep_only(KEY, torch.tensor([8]))
    ends.send(x, ids.flip(0), seed=3)
    assert ends.buffers().keys() == {8, 6}, "first come"


def test_a_visit_that_was_not_compressed_counts():
    packed, filled = Pair("topk:density=0.1"), Pair("topk:density=0.1")
    for step, (_, ids, x) in enumerate(batches(1)):
        packed.send(x, ids, seed=step)
        for end in (filled.sender, filled.receiver):
            end.fill(KEY, one_sample(50, 0).expand(len(x), *SHAPE), ids)
            end.fill(KEY, x, ids)
    assert filled.buffers() == packed.buffers()
    x[0, 0, 0] = torch.nan
    before = filled.buffers()
    for end in (filled.sender, filled.receiver):
        end.fill(KEY, x[:1], ids[:1])
    assert filled.buffers() == before


# ---- how fast buffers follow -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["qsgd:bits=2", "topk:density=0.05", "uniform:bits=1", "sign", "qsgd:bits=4"])
def test_what_is_missing_at_the_ninth_visit(spec):
    """By the recursion m ← m + C(x − m) alone, in float64, of the same numbers and seeds."""
    codec = nb.codec(spec)
    first, x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).double()
    m = first.clone()
    for visit in range(1, 9):
        m += codec.roundtrip((x - m).float(), seed=visit).double()
    expected = float((x - m).norm() / (x - first).norm())
    assert AQSGD.missing(codec) == pytest.approx(expected, rel=0.02, abs=1e-6)


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        ("qsgd:bits=4", 0.0), ("qsgd:bits=3", 0.0), ("qsgd:bits=2", 0.61), ("uniform:bits=2", 0.0),
        ("uniform:bits=1", 0.95), ("topk:density=0.3", 0.0), ("topk:density=0.1", 0.06), ("topk:density=0.05", 0.36),
        ("topk:density=0.01", 0.79), ("sign", 0.10),
    ],
)  # fmt: skip
def test_what_the_documentation_says_is_missing(spec, missing):
    """The table of the module's docstring; 0.00 there may be up to half a hundredth."""
    assert AQSGD.missing(nb.codec(spec)) == pytest.approx(missing, abs=0.006)
    assert f"``{spec}``" in (aqsgd.__doc__ or "")


@pytest.mark.parametrize(
    ("spec", "warning"),
    [
        ("qsgd:bits=4", None),
        ("topk:density=0.1", None),
        ("qsgd:bits=2", "hardly follows a sample that has changed: 61% of the change was still missing after 9 visits"),
        ("qsgd:bits=2,norm=l2", "does not follow a sample that has changed: its buffer was 8"),
    ],
)  # fmt: skip
def test_a_codec_that_does_not_bring_buffers_along_is_told_of(spec, warning):
    said = AQSGD().warning(nb.codec(spec))
    assert (said is None) == (warning is None)
    assert warning is None or warning in said
