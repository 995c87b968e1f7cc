"""AQ-SGD against a float64 derivation of Wang et al., algorithm 1; both ends equal to the bit, whatever happens."""

from __future__ import annotations

import itertools
import logging
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import narrowband as nb
from narrowband.codecs import Identity
from narrowband.feedback import AQSGD
from tests.codecs.common import DTYPES, backend, bits_of

FIXED_SIZE = [
    "none",
    "fp16",
    "bf16",
    "uniform:bits=4",
    "uniform:bits=8,symmetric=true,rounding=stochastic",
    "qsgd:bits=4",
    "qsgd:bits=2,norm=l2",
    "sign:bucket=64",
    "topk:density=0.1",
    "topk:density=0.1,select=sampled,values=fp16",
    "topk:density=0.1,values=int8,indices=int32",
    "topk:density=0.1,scope=sample,indices=runs",
    "randomk:density=0.1",
    "lowrank:rank=1",
]
every_codec = pytest.mark.parametrize("spec", FIXED_SIZE)
some_codecs = pytest.mark.parametrize("spec", ["none", "topk:density=0.1", "qsgd:bits=4", "uniform:bits=4"])
every_keep = pytest.mark.parametrize("keep", ["fp32", "fp16", "int8"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
SHAPE = (6, 50)
KEY = "boundary 1"


def one_sample(sample, epoch):
    """An activation that changes less and less."""
    first, then = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(s)) for s in (sample, 999 + sample))
    return first + then * 0.5**epoch


def batches(epochs=3, size=3):
    """(step, ids, x): random batches, each epoch of more samples than the one before."""
    step = 0
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(4 + 3 * epoch, generator=generator)
        for ids in order.split(size):
            yield step, ids * 7 - 5, torch.stack([one_sample(int(sample), epoch) for sample in ids])
            step += 1


class Pair:
    """Two ends, each with its own buffers, and what they made of each batch."""

    def __init__(self, spec, tmp_path=None, **settings):
        self.codec = nb.codec(spec)
        folders = [{} if tmp_path is None else {"folder": str(tmp_path / end)} for end in ("sender", "receiver")]
        self.sender, self.receiver = (AQSGD(**settings, **folder) for folder in folders)

    def send(self, x, ids, seed=0, key=KEY):
        """(the payload, what arrived)."""
        before = x.clone()
        told = torch.full_like(x, 7)
        announced = self.receiver.payload_nbytes(key, self.codec, x.shape, x.dtype, ids)
        assert announced == self.sender.payload_nbytes(key, self.codec, x.shape, x.dtype, ids)
        payload = self.sender.pack(key, x, self.codec, samples=ids, seed=seed, arrived=told)
        assert payload.dtype == torch.uint8
        assert payload.shape == (announced,)
        assert bits_of(x) == bits_of(before)
        out = torch.full_like(x, 3)
        assert self.receiver.unpack(key, payload, out, self.codec, samples=ids, seed=seed) is out
        assert bits_of(told) == bits_of(out)
        return payload, out

    def buffers(self, key=KEY):
        """Sample → its buffer's bits, which must be the same on both ends."""
        ends = [
            {sample: bits_of(end._stores[key].row(sample)) for sample in end.reference_ids(key).tolist()}
            for end in (self.sender, self.receiver)
        ]
        assert ends[0] == ends[1]
        return ends[0]


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


# ---- what is not finite ----------------------------------------------------------------------------------------------


@every_codec
@every_dtype
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_sample_that_is_not_finite_is_seen_and_changes_no_buffer(spec, dtype, name):
    with backend(name):
        ends, clean = Pair(spec), Pair(spec)
        ids = torch.tensor([1, 2, 3])
        x = torch.stack([one_sample(i, 0) for i in range(3)]).to(dtype)
        for place, bad in itertools.product((0, 177, 299), (torch.inf, -torch.inf, torch.nan)):
            broken = x.clone()
            broken[1].view(-1)[place] = bad
            _, arrived = ends.send(broken, ids)
            assert torch.equal(arrived[::2], x[::2])
            torch.testing.assert_close(arrived[1], broken[1], rtol=0, atol=0, equal_nan=True)
            assert ends.buffers().keys() == {1, 3}
            ends.sender.keep_only(KEY, [])
            ends.receiver.keep_only(KEY, [])
        for one in (ends, clean):
            one.send(x, ids)
        before = ends.buffers()
        later = torch.stack([one_sample(i, 1) for i in range(3)]).to(dtype)
        _, expected = clean.send(later, ids, seed=5)
        after = clean.buffers()
        seed = 5
        for place, bad in itertools.product((0, 177, 299), (torch.inf, -torch.inf, torch.nan)):
            broken = later.clone()
            broken[1].view(-1)[place] = bad
            payload, arrived = ends.send(broken, ids, seed=seed)
            assert not arrived[1].isfinite().any()
            part = payload[ends.codec.payload_nbytes(SHAPE) :][: ends.codec.payload_nbytes(SHAPE)]
            decoded = ends.codec.decode(part, torch.empty(SHAPE), seed=seed + 1)
            assert not decoded.isfinite().all(), "the receiver sees it in the payload"
            assert ends.buffers()[2] == before[2]
            assert bits_of(arrived[0]) == bits_of(expected[0]), "the others do not hear of it"
            assert bits_of(arrived[2]) == bits_of(expected[2])
            assert ends.buffers() == after | {2: before[2]}
            for end in (ends.sender, ends.receiver):
                end.fill(KEY, x[::2], ids[::2])
        assert bits_of(ends.send(later, ids, seed=seed)[1]) == bits_of(expected)


@pytest.mark.parametrize(
    ("spec", "jump"),
    [("fp16", 1e5), ("qsgd:bits=4", 2.0**101), ("topk:density=0.5", 3e38), ("none", 2.0**100), ("bf16", 3e38)],
)
def test_a_finite_sample_that_the_codec_cannot_say_arrives_as_nan(spec, jump):
    ends, ids = Pair(spec), torch.tensor([5])
    ends.send(torch.zeros(1, *SHAPE), ids)
    before = ends.buffers()
    _, arrived = ends.send(torch.full((1, *SHAPE), jump), ids)
    assert arrived.isnan().all()
    assert ends.buffers() == before
    x = torch.ones(1, *SHAPE)
    assert torch.equal(ends.send(x, ids)[1][0], ends.codec.roundtrip(x[0])), "and the next time all is well"


def test_no_buffer_is_made_of_what_could_leave_float32():
    ends, ids = Pair("none"), torch.tensor([5])
    for value, held in ((3e38, False), (2.0**100, False), (2.0**99, True)):
        x = torch.full((1, 4), value)
        assert torch.equal(ends.send(x, ids)[1], x)
        assert ends.sender.reference_ids(KEY).tolist() == ([5] if held else [])


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["memory", "disk"])
@every_keep
@every_codec
def test_a_run_that_is_stopped_and_resumed_goes_on_bit_by_bit(spec, keep, place, tmp_path):
    folder = tmp_path if place == "disk" else None
    whole = Pair(spec, store=keep)
    ends = Pair(spec, folder, store=keep)
    for step, ids, x in batches():
        expected = whole.send(x, ids, seed=step)
        if step == 5:
            for name in ("sender", "receiver"):
                torch.save(getattr(ends, name).state_dict(), tmp_path / f"{name}.pt")
            ends = Pair(spec, folder, store=keep)
            for name in ("sender", "receiver"):
                getattr(ends, name).load_state_dict(torch.load(tmp_path / f"{name}.pt"))
        got = ends.send(x, ids, seed=step)
        assert torch.equal(got[0], expected[0])
        assert bits_of(got[1]) == bits_of(expected[1])
    assert ends.buffers() == whole.buffers()


def test_loading_replaces_all_and_is_all_or_nothing():
    ends, x = Pair("sign"), torch.randn(2, 8)
    ends.send(x, torch.tensor([1, 2]), key="a")
    state = ends.sender.state_dict()
    other = AQSGD()
    other.fill("b", torch.ones(1, 4), torch.tensor([0]))
    with pytest.raises(ValueError, match="use the settings"):
        other.load_state_dict({**state, "z": {**state["a"], "keep": "int8"}})
    assert other.reference_ids("b").tolist() == [0]
    assert other.reference_ids("a").tolist() == []
    other.load_state_dict(state)
    assert other.reference_ids("b").tolist() == []
    assert other.reference_ids("a").tolist() == [1, 2]
    with pytest.raises(ValueError, match="this store has rows of 8 in fp16"):
        AQSGD(store="fp16").load_state_dict(state)


def test_an_end_whose_file_went_on_loses_its_buffers_and_both_agree_on_what_is_left(tmp_path, caplog):
    steps = list(batches(2))
    ends = Pair("topk:density=0.1", tmp_path)
    for step, ids, x in steps[:3]:
        ends.send(x, ids, seed=step)
    states = ends.sender.state_dict(), ends.receiver.state_dict()
    ids, x = steps[0][1:]
    ends.sender.pack(KEY, x, ends.codec, samples=ids, seed=9)  # and then the power failed
    ends = Pair("topk:density=0.1", tmp_path)
    ends.sender.load_state_dict(states[0])
    ends.receiver.load_state_dict(states[1])
    assert ends.sender.reference_ids(KEY).tolist() == []
    assert "has gone on" in caplog.text
    held = ends.receiver.reference_ids(KEY)
    assert held.numel() == 5
    payload = ends.sender.pack(KEY, x, ends.codec, samples=ids, seed=9)
    out = torch.full_like(x, 3)
    before = {sample: bits_of(ends.receiver._stores[KEY].row(sample)) for sample in held.tolist()}
    with pytest.raises(nb.PayloadError, match=r"keep_only\(\) what both have"):
        ends.receiver.unpack(KEY, payload, out, ends.codec, samples=ids, seed=9)
    assert (out == 3).all()
    assert before == {sample: bits_of(ends.receiver._stores[KEY].row(sample)) for sample in held.tolist()}
    ends.receiver.keep_only(KEY, [])
    ends.sender.keep_only(KEY, [])
    for step, ids, x in steps:
        ends.send(x, ids, seed=step)
    assert len(ends.buffers()) == 7


def test_a_folder_of_another_run_is_refused(tmp_path):
    first = AQSGD(folder=str(tmp_path / "new" / "folder"))
    first.fill("2 → 3/a", torch.ones(1, 4), torch.tensor([0]))
    state = first.state_dict()
    assert [file.name for file in (tmp_path / "new" / "folder").iterdir()] == ["aq-sgd-2%20%E2%86%92%203%2Fa.rows"]
    second = AQSGD(folder=str(tmp_path / "new" / "folder"))
    with pytest.raises(ValueError, match="belongs to another run, or to the other end of a boundary"):
        second.fill("2 → 3/a", torch.ones(1, 4), torch.tensor([0]))
    second.fill("2 → 3/b", torch.ones(1, 4), torch.tensor([0]))
    second.load_state_dict(state)
    assert second.reference_ids("2 → 3/a").tolist() == [0]


def test_a_buffer_takes_the_bytes_that_were_announced(tmp_path):
    x = torch.randn(5, 64, 128)
    for keep, nbytes in (("fp32", 4.0), ("fp16", 2.0), ("int8", 1.015625)):
        memory = AQSGD(store=keep)
        disk = AQSGD(store=keep, folder=str(tmp_path / keep), budget_gb=5 * nbytes * 8192 / 1e9)
        for one in (memory, disk):
            one.fill(KEY, x, torch.arange(5))
        rows = memory.state_dict()[KEY]["rows"]
        assert sum(chunk[0].nbytes * len(chunk) for chunk in rows) == 8 * nbytes * 8192, "chunks of 1, 1, 2 and 4"
        (file,) = (tmp_path / keep).iterdir()
        assert file.stat().st_size == 4096 + 5 * nbytes * 8192


# ---- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "canonical", "made"),
    [
        ("qsgd:bits=4+aq-sgd", "qsgd:bits=4+aq-sgd", AQSGD()),
        ("qsgd:bits=4+aq-sgd:store=fp16", "qsgd:bits=4+aq-sgd:store=fp16", AQSGD(store="fp16")),
        ("topk+aq-sgd:budget_gb=2", "topk:density=0.01+aq-sgd:budget_gb=2.0", AQSGD(budget_gb=2)),
        (
            "sign+aq-sgd:folder=/a+b/c=d:e,store=int8",
            "sign+aq-sgd:store=int8,folder=/a+b/c=d:e",
            AQSGD(store="int8", folder="/a+b/c=d:e"),
        ),
        ("sign+aq-sgd:budget_gb=1e30", "sign+aq-sgd:budget_gb=1e30", AQSGD(budget_gb=1e30)),
    ],
)
def test_a_compression_is_its_string(text, canonical, made):
    chosen = nb.compression(text)
    assert str(chosen) == canonical
    assert chosen.feedback == made
    assert nb.compression(canonical) == chosen
    assert hash(nb.compression(canonical)) == hash(chosen)
    assert pickle.loads(pickle.dumps(chosen)) == chosen


def test_new_feedback_has_no_state():
    chosen = nb.compression("qsgd:bits=4+aq-sgd:store=fp16")
    first, second = chosen.new_feedback(), chosen.new_feedback()
    first.fill(KEY, torch.ones(1, 4), torch.tensor([0]))
    assert second.reference_ids(KEY).numel() == chosen.feedback.reference_ids(KEY).numel() == 0
    assert first == second, "configuration is identity, state is not"
    assert first.residual(KEY) is None
    with pytest.raises(TypeError, match="no loss scale"):
        first.scale(2.0)
    with pytest.raises(TypeError, match="no meaning elsewhere"):
        first.take_residual(KEY)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"store": "fp8"}, ValueError, "store='fp8' is none of fp32, fp16, int8"),
        ({"budget_gb": 0}, ValueError, "budget_gb=0.0 must be above 0"),
        ({"budget_gb": math.nan}, ValueError, "budget_gb=nan"),
        ({"budget_gb": "1"}, TypeError, "budget_gb='1' is not a number"),
        ({"folder": 5}, TypeError, "folder=5 is not a string"),
        ({"folder": "a,b"}, ValueError, "no commas"),
        ({"folder": " a"}, ValueError, "no space at its ends"),
    ],
)
def test_what_cannot_be_configured(arguments, error, match):
    with pytest.raises(error, match=match):
        AQSGD(**arguments)


def test_a_codec_without_a_fixed_size_is_refused_at_once():
    for make in (
        lambda: nb.compression("threshold:value=0.5+aq-sgd"),
        lambda: nb.Compression(nb.codec("threshold:value=0.5"), AQSGD()),
        lambda: AQSGD().pack(KEY, torch.ones(1, 4), nb.codec("threshold:value=0.5"), samples=torch.tensor([0]), seed=0),
    ):
        with pytest.raises(nb.UnsupportedError, match="no fixed size"):
            make()
    for text in ("dgc+aq-sgd", "powersgd+aq-sgd"):
        with pytest.raises(ValueError, match="in its own way"):
            nb.compression(text)


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "error", "match"),
    [
        (None, ValueError, "pass samples="),
        (torch.tensor([1, 2]), ValueError, r"3 samples, and samples is of shape \(2,\); give one id for each"),
        (torch.tensor([[1, 2, 3]]), ValueError, "give one id for each"),
        (torch.tensor([4, 9, 4]), ValueError, "sample 4 is in this batch twice"),
        (torch.tensor([1, 2, 3], dtype=torch.int32), TypeError, "int64"),
        (torch.tensor([1.0, 2.0, 3.0]), TypeError, "int64"),
    ],
)
def test_what_cannot_be_samples(samples, error, match):
    one, codec, x = AQSGD(), nb.codec("sign"), torch.ones(3, 4)
    for call in (
        lambda: one.pack(KEY, x, codec, samples=samples, seed=0),
        lambda: one.unpack(KEY, torch.empty(48, dtype=torch.uint8), x, codec, samples=samples, seed=0),
        lambda: one.payload_nbytes(KEY, codec, x.shape, x.dtype, samples),
        lambda: one.fill(KEY, x, samples),
    ):
        with pytest.raises(error, match=match):
            call()
    assert one.state_dict() == {}


def test_what_cannot_be_a_batch():
    ends, ids = Pair("sign"), torch.tensor([1, 2])
    sender, codec, x = ends.sender, ends.codec, torch.ones(2, 4)
    ends.send(x, ids)
    before = ends.buffers()
    for call, error, match in (
        (lambda: sender.pack(KEY, x.double(), codec, samples=ids, seed=0), TypeError, "not torch.float64"),
        (lambda: sender.pack(KEY, torch.tensor(1.0), codec, samples=ids, seed=0), ValueError, "first dimension"),
        (
            lambda: sender.pack(KEY, torch.ones(2, 5), codec, samples=ids, seed=0),
            ValueError,
            f"samples of 4 elements are held under {KEY!r}, so those of 5 cannot be",
        ),
        (
            lambda: sender.pack(KEY, x, codec, samples=ids, seed=0, out=torch.empty(17, dtype=torch.uint8)),
            ValueError,
            "out has 17 bytes; this batch needs 16",
        ),
        (
            lambda: sender.pack(KEY, x, codec, samples=ids, seed=0, out=torch.empty(16, dtype=torch.int8)),
            TypeError,
            "uint8",
        ),
        (
            lambda: sender.pack(KEY, x, codec, samples=ids, seed=0, arrived=torch.empty(2, 4).half()),
            TypeError,
            "arrived is torch.float16",
        ),
        (
            lambda: sender.pack(KEY, x, codec, samples=ids, seed=0, arrived=torch.empty(2, 5)),
            ValueError,
            r"arrived has the shape \(2, 5\)",
        ),
    ):
        with pytest.raises(error, match=match):
            call()
    assert ends.buffers() == before


@every_codec
def test_payloads_of_another_length_change_nothing(spec):
    ends, ids = Pair(spec), torch.tensor([1, 2])
    ends.send(torch.stack([one_sample(1, 0), one_sample(2, 0)]), ids)
    payload = ends.sender.pack(KEY, torch.ones(2, *SHAPE), ends.codec, samples=ids, seed=0)
    before = [bits_of(ends.receiver._stores[KEY].row(i)) for i in (1, 2)]
    out = torch.full((2, *SHAPE), 3.0)
    for bad in (
        payload[:-4],
        torch.cat([payload, payload[:4]]),
        payload[:0],
        payload.view(torch.int8),
        payload.view(2, -1),
    ):
        with pytest.raises(nb.PayloadError):
            ends.receiver.unpack(KEY, bad, out, ends.codec, samples=ids, seed=0)
    assert (out == 3).all()
    assert [bits_of(ends.receiver._stores[KEY].row(i)) for i in (1, 2)] == before


def test_a_damaged_part_is_refused():
    ends, ids = Pair("topk:density=0.1,indices=int32"), torch.tensor([1])
    ends.send(one_sample(1, 0)[None], ids)
    payload = ends.sender.pack(KEY, torch.ones(1, *SHAPE), ends.codec, samples=ids, seed=0)
    payload[-1] = 127
    before = bits_of(ends.receiver._stores[KEY].row(1))
    with pytest.raises(nb.PayloadError):
        ends.receiver.unpack(KEY, payload, torch.empty(1, *SHAPE), ends.codec, samples=ids, seed=0)
    assert bits_of(ends.receiver._stores[KEY].row(1)) == before
