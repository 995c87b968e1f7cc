"""AQ-SGD: samples that are not finite, states, and buffers on disk."""

from __future__ import annotations

import itertools

import pytest
import torch

import narrowband as nb
from narrowband.feedback import AQSGD
from tests.codecs.common import backend, bits_of
from tests.feedback.samples import KEY, SHAPE, Pair, batches, every_codec, every_dtype, every_keep, one_sample
from tests.thorough import thorough

# ---- what is not finite ----------------------------------------------------------------------------------------------


@every_codec
@every_dtype
@pytest.mark.parametrize("name", ["cpu", *thorough("reference")])
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
    with pytest.raises(ValueError, match="this store holds rows of 8 in fp16"):
        AQSGD(store="fp16").load_state_dict(state)


@pytest.mark.parametrize("broken", [7, {}, {"numel": "x"}, {"numel": True}, {"numel": 0}])
def test_what_is_no_state_is_refused_and_changes_nothing(broken):
    end = AQSGD()
    end.fill("b", torch.ones(1, 4), torch.tensor([0]))
    for refuses in (end.check_state, end.load_state_dict):
        with pytest.raises(ValueError, match=r"no rows by sample for 'a'|numel=0"):
            refuses(end.state_dict() | {"a": broken})
    assert end.reference_ids("b").tolist() == [0]


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
    assert "has changed since" in caplog.text
    held = ends.receiver.reference_ids(KEY)
    assert held.numel() == 5
    payload = ends.sender.pack(KEY, x, ends.codec, samples=ids, seed=9)
    out = torch.full_like(x, 3)
    before = {sample: bits_of(ends.receiver._stores[KEY].row(sample)) for sample in held.tolist()}
    with pytest.raises(nb.PayloadError, match=r"keep_only\(\) on both"):
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
