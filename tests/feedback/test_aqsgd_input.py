"""AQ-SGD: its specs, and what it refuses."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

import narrowband as nb
from narrowband.codecs import sparse
from narrowband.feedback import AQSGD
from tests.codecs.common import bits_of
from tests.feedback.samples import KEY, SHAPE, Pair, every_codec, one_sample

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
    with pytest.raises(TypeError, match="cannot be moved"):
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
        ({"folder": " a"}, ValueError, "no spaces at the beginning or the end"),
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
        with pytest.raises(nb.UnsupportedError, match="needs payloads of a fixed size"):
            make()
    for text in ("dgc+aq-sgd", "powersgd+aq-sgd"):
        with pytest.raises(ValueError, match="has a feedback of its own"):
            nb.compression(text)


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "error", "match"),
    [
        (None, ValueError, "pass samples="),
        (torch.tensor([1, 2]), ValueError, r"3 samples, but samples=… has shape \(2,\); give one id per sample"),
        (torch.tensor([[1, 2, 3]]), ValueError, "give one id per sample"),
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
            f"the samples held under {KEY!r} have 4 elements, got samples of 5 elements",
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
            "batch, torch.float32, not torch.float16",
        ),
        (
            lambda: sender.pack(KEY, x, codec, samples=ids, seed=0, arrived=torch.empty(2, 5)),
            ValueError,
            r"arrived must have the shape of the batch, .*, not \(2, 5\)",
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


def test_a_damaged_part_is_refused_and_no_sample_is_taken_in():
    ends, ids = Pair("topk:density=0.1,indices=int32"), torch.tensor([2, 1])
    ends.send(torch.stack([one_sample(2, 0), one_sample(1, 0)]), ids)
    payload = ends.sender.pack(KEY, torch.ones(2, *SHAPE), ends.codec, samples=ids, seed=0)
    payload[-1] = 127  # the part of the second sample
    before = [bits_of(ends.receiver._stores[KEY].row(sample)) for sample in (1, 2)]
    with pytest.raises(nb.PayloadError):
        ends.receiver.unpack(KEY, payload, torch.empty(2, *SHAPE), ends.codec, samples=ids, seed=0)
    assert [bits_of(ends.receiver._stores[KEY].row(sample)) for sample in (1, 2)] == before


@pytest.mark.parametrize("indices", ["elias-fano", "int32"])
def test_the_receiver_reads_the_indices_of_each_sample_once(indices, monkeypatch):
    ends, ids = Pair(f"topk:density=0.1,indices={indices}"), torch.tensor([2, 1])
    ends.send(torch.stack([one_sample(2, 0), one_sample(1, 0)]), ids)
    x = torch.stack([one_sample(2, 1), one_sample(1, 1)])
    payload = ends.sender.pack(KEY, x, ends.codec, samples=ids, seed=0, arrived=x)
    read, reads = sparse.read_indices, []
    monkeypatch.setattr(sparse, "read_indices", lambda *given: reads.append(given) or read(*given))
    out = ends.receiver.unpack(KEY, payload, torch.empty_like(x), ends.codec, samples=ids, seed=0)
    assert len(reads) == 2
    assert bits_of(out) == bits_of(x)
