"""Rows by sample: what is kept to the bit and to the byte, in memory and in files, and whose file it is."""

from __future__ import annotations

import copy
import logging
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowband.codecs import Uniform
from narrowband.feedback import SampleStore
from tests.codecs.common import DTYPES, bits_of, values
from tests.ranks import RankError, run_ranks

KEEPS = ["fp32", "fp16", "int8"]
HEADER = 4096
every_keep = pytest.mark.parametrize("keep", KEEPS)
every_place = pytest.mark.parametrize("place", ["memory", "disk"])


@pytest.fixture
def make(tmp_path):
    """``make(place, numel, …)``: a store in memory, or in a file of ``tmp_path``."""

    def make(place, numel, **arguments):
        return SampleStore(numel, folder=tmp_path if place == "disk" else None, **arguments)

    return make


def numbers(numel, seed, kind="wide"):
    return values(kind, numel, seed)


def rounded(x, keep):
    """What must come back, float32."""
    x = x.float().reshape(-1)
    if keep == "fp16":
        return x.clamp(-65504, 65504).half().float()
    return Uniform(bits=8, group=256, symmetric=True).roundtrip(x) if keep == "int8" else x


def content(kept):
    return {sample: bits_of(kept.row(sample)) for sample in kept.ids().tolist()}


@every_place
@every_keep
@pytest.mark.parametrize("numel", [1, 3, 255, 256, 257, 5000])
def test_a_sample_takes_the_bytes_that_were_announced(make, tmp_path, place, keep, numel):
    nbytes = {"fp32": 4 * numel, "fp16": 2 * numel, "int8": -(-(numel + 4 * -(-numel // 256)) // 4) * 4}[keep]
    kept = make(place, numel, keep=keep, budget_nbytes=11 * nbytes + nbytes - 1)
    assert kept.nbytes_per_sample == nbytes
    for sample in range(12):
        assert kept.put(sample, numbers(numel, sample)) is (sample < 11)
    if place == "disk":
        assert (tmp_path / "samples.rows").stat().st_size == HEADER + 11 * nbytes
    else:
        assert sum(rows.nbytes for rows in kept.state_dict()["rows"]) == 11 * nbytes
    if numel == 5000:
        assert nbytes / numel == pytest.approx({"fp32": 4, "fp16": 2, "int8": 1.016}[keep], abs=1e-3)


@every_place
@every_keep
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_put_comes_back_rounded_and_the_same_everywhere(make, tmp_path, place, keep, dtype):
    x = (numbers(700, 1) * 1000).to(dtype).view(7, 100)
    kept, other = make(place, 700, keep=keep), SampleStore(700, keep=keep)
    for one in (kept, other):
        assert one.put(-5, x.t().contiguous().t())
        assert one.row(-5).dtype == torch.float32
        assert one.row(-5).shape == (700,)
        assert bits_of(one.row(-5)) == bits_of(rounded(x, keep))
    kept.put(-5, numbers(700, 2))
    assert bits_of(kept.row(-5)) == bits_of(rounded(numbers(700, 2), keep)), "a new one takes its place"
    assert len(kept) == 1


@every_place
def test_fp16_clamps_what_it_cannot_hold(make, place):
    kept = make(place, 6, keep="fp16")
    kept.put(0, torch.tensor([7e4, -1e38, torch.inf, 65504.0, 1.0, torch.nan]))
    assert kept.row(0)[:5].tolist() == [65504.0, -65504.0, 65504.0, 65504.0, 1.0]
    assert kept.row(0)[5].isnan()


@every_place
def test_a_float32_row_is_the_stored_one_and_stays_where_it_is(make, place):
    kept = make(place, 10)
    kept.put(3, torch.zeros(10))
    first = kept.row(3)
    for sample in range(100, 400):
        kept.put(sample, torch.full((10,), float(sample)))
    kept.row(3, write=True).add_(2.0)
    assert kept.row(3).data_ptr() == first.data_ptr(), "growing moved it"
    assert (first == 2).all()
    assert all((kept.row(sample) == sample).all() for sample in range(100, 400))
    kept.put(3, first)  # itself: nothing to copy
    assert (kept.row(3) == 2).all()
    lent = kept.row(100, write=True).fill_(5)
    kept.put(101, lent)
    assert (kept.row(101) == 5).all()
    kept.put(100, lent)
    assert (kept.row(100) == 5).all()
    kept.row(100, write=True)
    kept.keep_only([3])
    kept.put(100, lent)
    assert kept.ids().tolist() == [3, 100]
    assert (kept.row(100) == 5).all()


@every_place
@every_keep
def test_growth_is_by_chunks_of_limited_size(make, place, keep):
    nbytes_per_sample = make("memory", 50, keep=keep).nbytes_per_sample
    kept = make(place, 50, keep=keep, chunk_nbytes=9 * nbytes_per_sample)
    for sample in range(40):
        kept.put(sample, numbers(50, sample))
    assert [len(chunk) for chunk in kept._chunks] == [1, 1, 2, 4, 8, 9, 9, 9]
    for sample in range(40):
        assert bits_of(kept.row(sample)) == bits_of(rounded(numbers(50, sample), keep))


def test_a_file_takes_room_only_for_what_was_put(make, tmp_path):
    kept = make("disk", 1 << 16)
    for sample in range(5):
        kept.put(sample, torch.ones(1 << 16))
    said = (tmp_path / "samples.rows").stat()
    assert said.st_size == HEADER + 8 * kept.nbytes_per_sample
    assert 5 * kept.nbytes_per_sample <= said.st_blocks * 512 < 6 * kept.nbytes_per_sample


@every_place
def test_a_full_store_keeps_what_it_has_and_says_so_once(make, place, caplog):
    kept = make(place, 100, keep="fp16", budget_nbytes=3 * 200)
    assert not kept.full
    assert [kept.put(sample, numbers(100, sample)) for sample in range(5)] == [True, True, True, False, False]
    assert kept.full
    assert kept.has([4, 2, 0]) == [False, True, True]
    assert kept.has(torch.tensor([1, 3])) == [True, False]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["the store is full: it holds 3 samples of 200 bytes each, and further samples are not stored"]
    assert kept.put(1, numbers(100, 9)), "one that is there can change"
    kept.keep_only([0, 1, 77])
    assert not kept.full
    assert kept.put(4, numbers(100, 4))
    assert kept.ids().tolist() == [0, 1, 4]
    assert kept.ids().dtype == torch.int64
    for sample, seed in ((0, 0), (1, 9), (4, 4)):
        assert bits_of(kept.row(sample)) == bits_of(rounded(numbers(100, seed), "fp16"))


@every_place
def test_a_row_that_was_lent_before_its_sample_was_let_go_is_put_as_any_other(make, place):
    kept = make(place, 4)
    kept.put(5, torch.ones(4))
    row = kept.row(5, write=True).add_(1.0)
    kept.keep_only([])
    assert kept.put(5, row)
    assert kept.has([5]) == [True]
    assert torch.equal(kept.row(5), torch.full((4,), 2.0))


@pytest.mark.parametrize("loaded", [False, True])
def test_room_of_what_was_let_go_is_used_again(make, tmp_path, loaded):
    kept = make("disk", 100)
    for sample in range(8):
        kept.put(sample, numbers(100, sample))
    size = (tmp_path / "samples.rows").stat().st_size
    kept.keep_only([6, 1])
    if loaded:
        state, kept = kept.state_dict(), make("disk", 100)
        kept.load_state_dict(state)
    for sample in reversed(range(10, 16)):
        kept.put(sample, numbers(100, sample))
    assert (tmp_path / "samples.rows").stat().st_size == size
    assert kept.ids().tolist() == [1, 6, *range(10, 16)]
    for sample in kept.ids().tolist():
        assert bits_of(kept.row(sample)) == bits_of(numbers(100, sample))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(-3, 9), st.integers(0, 99)),
        st.tuples(st.just("add"), st.integers(-3, 9), st.integers(0, 99)),
        st.tuples(st.just("keep"), st.sets(st.integers(-3, 9)), st.just(0)),
        st.tuples(st.just("resume"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@every_place
@every_keep
@settings(max_examples=30)
@given(actions=actions, room=st.integers(1, 12))
def test_a_store_is_a_dictionary_of_rounded_rows(place, keep, actions, room):
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"keep": keep, "folder": Path(folder) if place == "disk" else None}
        budget = room * SampleStore(33, keep=keep).nbytes_per_sample
        kept, model = SampleStore(33, budget_nbytes=budget, **arguments), {}
        for name, sample, seed in actions:
            if name == "put":
                fits = sample in model or len(model) < room
                assert kept.put(sample, numbers(33, seed)) is fits
                if fits:
                    model[sample] = rounded(numbers(33, seed), keep)
            elif name == "add" and sample in model:
                kept.put(sample, kept.row(sample, write=True).add_(numbers(33, seed)))
                model[sample] = rounded(model[sample] + numbers(33, seed), keep)
            elif name == "keep":
                kept.keep_only(sample)
                model = {one: row for one, row in model.items() if one in sample}
            elif name == "resume":
                state = kept.state_dict()
                kept = SampleStore(33, budget_nbytes=budget, **arguments)
                kept.load_state_dict(state)
            assert kept.full is (len(model) == room)
            assert content(kept) == {one: bits_of(model[one]) for one in sorted(model)}
        del kept


# ---- state -----------------------------------------------------------------------------------------------------------


@every_place
@every_keep
def test_a_state_brings_back_every_bit(make, tmp_path, place, keep):
    kept = make(place, 300, keep=keep)
    for sample in (5, -(2**63), 2**63 - 1, 0):
        kept.put(sample, numbers(300, abs(sample) % 100))
    kept.keep_only([-(2**63), 0, 5])
    before = content(kept)
    torch.save(kept.state_dict(), tmp_path / "state.pt")
    del kept
    resumed = make(place, 300, keep=keep)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))  # weights_only: nothing but plain values is in there
    assert content(resumed) == before
    resumed.put(8, numbers(300, 8))
    again = make(place, 300, keep=keep)
    again.load_state_dict(resumed.state_dict())
    assert content(again) == before | {8: bits_of(rounded(numbers(300, 8), keep))}


def test_a_loaded_state_is_a_copy():
    kept, other = SampleStore(4), SampleStore(4)
    kept.put(0, torch.ones(4))
    other.load_state_dict(kept.state_dict())
    kept.row(0, write=True).zero_()
    assert (other.row(0) == 1).all()


def test_a_state_from_before_the_first_sample(make, caplog):
    kept = make("disk", 4)
    state = kept.state_dict()
    kept.put(0, torch.ones(4))
    again = make("disk", 4)
    again.load_state_dict(state)
    assert len(again) == 0
    assert again.put(0, torch.zeros(4)), "the file is this run's own"
    assert not caplog.records


@pytest.mark.parametrize("change", ["put", "in place", "late", "new sample"])
def test_a_file_that_went_on_is_not_that_of_the_state(make, caplog, change):
    kept = make("disk", 4)
    kept.put(0, torch.zeros(4))
    kept.put(1, torch.ones(4))
    lent = kept.row(0, write=True)
    state = kept.state_dict()
    _ = kept.row(0) + kept.row(1)
    same = make("disk", 4)
    same.load_state_dict(state)
    assert len(same) == 2, "reading changes nothing"
    if change == "in place":
        kept.row(0, write=True).add_(1)
    elif change == "late":
        kept.put(0, lent.add_(1))
    else:
        kept.put(0 if change == "put" else 2, torch.full((4,), 7.0))
    newer = kept.state_dict()
    resumed = make("disk", 4)
    resumed.load_state_dict(state)
    assert len(resumed) == 0
    assert not resumed.full
    assert "has changed since the state was saved, or was truncated: 2 samples are dropped" in caplog.text
    resumed.put(5, torch.full((4,), 5.0))
    later = make("disk", 4)
    later.load_state_dict(resumed.state_dict())
    assert later.ids().tolist() == [5]
    for earlier in (newer, state):
        caplog.clear()
        later.load_state_dict(earlier)
        assert len(later) == 0
        assert "has changed since" in caplog.text, "and so it does for every state before"


def test_a_file_that_was_cut(make, tmp_path, caplog):
    kept = make("disk", 1000)
    for sample in range(3):
        kept.put(sample, torch.ones(1000))
    state = kept.state_dict()
    del kept
    with (tmp_path / "samples.rows").open("r+b") as file:
        file.truncate(HEADER + 2 * 4000 + 100)
    resumed = make("disk", 1000)
    resumed.load_state_dict(state)
    assert len(resumed) == 0
    assert "or was truncated: 3 samples are dropped" in caplog.text
    for sample in range(3):
        resumed.put(sample, torch.full((1000,), float(sample)))
    assert all((resumed.row(sample) == sample).all() for sample in range(3))


def test_a_file_that_is_missing(make, tmp_path, caplog):
    kept = make("disk", 4)
    kept.put(0, torch.ones(4))
    state = kept.state_dict()
    (tmp_path / "samples.rows").unlink()
    resumed = make("disk", 4)
    resumed.load_state_dict(state)
    assert len(resumed) == 0
    assert "is missing: 1 sample is dropped" in caplog.text
    resumed.put(3, torch.full((4,), 3.0))
    assert (resumed.row(3) == 3).all()


def killed(rank, world_size, folder, what):
    kept = SampleStore(100_000, folder=folder)
    for sample in range(3):
        kept.put(sample, torch.full((100_000,), float(sample)))
    torch.save(kept.state_dict(), folder / "state.pt")
    if what == "changes":
        kept.row(1, write=True)[:5] = 9  # and no further
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("what", ["rests", "changes"])
def test_a_process_that_is_killed_leaves_rows_that_are_right_or_refused(make, tmp_path, what):
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(killed, 1, tmp_path, what, fresh=True, group=False)
    resumed = make("disk", 100_000)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert resumed.ids().tolist() == ([0, 1, 2] if what == "rests" else [])
    assert all((resumed.row(sample) == sample).all() for sample in resumed.ids().tolist())


class Disk(mmap.mmap):
    """A mapping that writes down the count of changes in the header, and the rows, whenever they go to the disk."""

    flushed: ClassVar[list[object]] = []

    def flush(self, *part):
        self.flushed.append(int.from_bytes(self[64:72], "little") if len(self) == HEADER else "rows")
        return super().flush(*part)


@pytest.mark.parametrize("written", ["put", "row"])
def test_the_first_change_after_each_state_is_counted_on_the_disk_before_it_is_made(make, monkeypatch, written):
    """Where a machine loses its power, a state has no rows that are newer than it says."""
    monkeypatch.setattr(mmap, "mmap", Disk)
    kept = make("disk", 100)
    kept.put(0, torch.zeros(100))
    for _ in range(2):
        Disk.flushed.clear()
        count = kept.state_dict()["updates"]
        assert Disk.flushed == ["rows", count]
        for _ in range(3):
            if written == "put":
                kept.put(0, torch.ones(100))
            else:
                kept.row(0, write=True).add_(1.0)
        assert Disk.flushed == ["rows", count, count + 1]


FULL = """
import sys, torch
from pathlib import Path
from narrowband.feedback import SampleStore
kept = SampleStore(10_000, folder=Path(sys.argv[1]))
for sample in range(100):
    try:
        kept.put(sample, torch.full((10_000,), float(sample)))
    except OSError as error:
        said = error.strerror
        break
assert (kept.row(0) == 0).all() and (kept.row(sample - 1) == sample - 1).all()
print(len(kept), kept.has([sample]), said)
"""


@pytest.mark.root
def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(tmp_path):
    """A mapping that the disk has no room for can be made, and writing to it is then fatal."""
    inside = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec {sys.executable} -c '{FULL}' {tmp_path}"
    ended = subprocess.run(["unshare", "--mount", "sh", "-c", inside], check=True, capture_output=True, text=True)
    assert ended.stdout == "26 [False] No space left on device\n"


def test_a_file_of_another_run_is_left_alone(make, tmp_path):
    first = make("disk", 4)
    first.put(0, torch.ones(4))
    state, before = first.state_dict(), (tmp_path / "samples.rows").read_bytes()
    with pytest.raises(ValueError, match=r"samples\.rows exists already and belongs to another run.*load its state"):
        make("disk", 4).put(0, torch.zeros(4))
    beside = make("disk", 4, name="beside")
    beside.put(0, torch.zeros(4))
    with pytest.raises(ValueError, match="belongs to another run"):
        make("disk", 4).load_state_dict(beside.state_dict())
    for numel, keep in ((5, "fp32"), (4, "fp16")):
        other = make("disk", numel, keep=keep)
        with pytest.raises(ValueError, match="belongs to another run"):
            other.load_state_dict(state | {"numel": numel, "keep": keep})
    assert (tmp_path / "samples.rows").read_bytes() == before
    assert (first.row(0) == 1).all()
    for garbage in (b"", b"narrowband", b"x" * 10_000):
        (tmp_path / "samples.rows").write_bytes(garbage)
        with pytest.raises(ValueError, match="belongs to another run"):
            make("disk", 4).load_state_dict(state)


@every_place
def test_states_of_another_store_are_refused_before_anything_changes(make, place, tmp_path):
    kept = make(place, 4, budget_nbytes=32)
    kept.put(0, torch.ones(4))
    state = kept.state_dict()
    elsewhere = SampleStore(4, folder=tmp_path / "x") if place == "memory" else SampleStore(4)
    for other, match in (
        (SampleStore(5), "rows of 4 elements in fp32, but this store holds rows of 5 in fp32"),
        (SampleStore(4, keep="int8"), "this store holds rows of 4 in int8"),
        (elsewhere, "this store keeps them in"),
    ):
        with pytest.raises(ValueError, match=match):
            other.load_state_dict(state)
        assert len(other) == 0
    kept.put(1, torch.ones(4))
    small = make(place, 4, budget_nbytes=31)
    with pytest.raises(ValueError, match="the state holds 2 samples, but the budget has room for 1; allow 32 bytes"):
        small.load_state_dict(kept.state_dict())
    assert len(small) == 0


def damaged(rows):
    """The same tensor with one number that is none."""
    rows = rows.clone()
    rows.view(torch.uint8)[-1, :4] = 0xFF
    return rows


#: What is done to a good state of three samples, and words of the sentence that refuses it.
BROKEN = {
    "no state": (len, "got int"),
    "a key is missing": (lambda state: {"numel": state["numel"]}, "got a dict without ids, keep, places"),
    "a list for ids": (lambda state: state | {"ids": [0, 1, 2]}, "list for ids, expected a vector of int64"),
    "floats for places": (lambda state: state | {"places": state["places"].float()}, r"of shape \(3,\) for places"),
    "a sample twice": (lambda state: state | {"ids": torch.tensor([0, 1, 1])}, "missing or repeated"),
    "two samples in a row": (lambda state: state | {"places": torch.tensor([0, 1, 1])}, "missing or repeated"),
    "fewer places": (lambda state: state | {"places": state["places"][:2]}, "missing or repeated"),
    "a place below 0": (lambda state: state | {"places": torch.tensor([0, 1, -1])}, "missing or repeated"),
}
IN_MEMORY = {
    "a place without a row": (
        lambda state: state | {"places": torch.tensor([0, 1, 4])},
        "holds 4 rows, but says that a sample is in row 4",
    ),
    "no rows": (lambda state: state | {"rows": []}, "holds 0 rows, but says that a sample is in row 2"),
    "a number for rows": (lambda state: state | {"rows": 3}, "int for rows, expected a list of tensors"),
    "numbers for rows": (lambda state: state | {"rows": [3]}, "int in the list of rows, expected a tensor"),
    "rows of another length": (lambda state: state | {"rows": [x[:, 1:] for x in state["rows"]]}, "holds rows of"),
    "rows of another dtype": (lambda state: state | {"rows": [x.double() for x in state["rows"]]}, "holds rows of"),
    "flat rows": (lambda state: state | {"rows": [x.view(-1) for x in state["rows"]]}, "holds rows of"),
    "NaN": (lambda state: state | {"rows": list(map(damaged, state["rows"]))}, "inf or NaN in its rows"),
}
IN_FILES = {
    "no token": (lambda state: {key: x for key, x in state.items() if key != "token"}, "which file holds its rows"),
    "a word for updates": (lambda state: state | {"updates": "x"}, "which file holds its rows"),
}


@every_place
@every_keep
@pytest.mark.parametrize("numel", [4, 300])
def test_a_state_that_is_broken_is_refused_before_anything_changes(make, place, keep, numel):
    kept = make(place, numel, keep=keep)
    for sample in range(3):
        kept.put(sample, numbers(numel, sample))
    good, before = kept.state_dict(), content(kept)
    for name, (breaking, words) in (BROKEN | (IN_MEMORY if place == "memory" else IN_FILES)).items():
        for refuses in (kept.check_state, kept.load_state_dict):
            with pytest.raises(ValueError, match=words):
                refuses(breaking(dict(good)))
        assert content(kept) == before, name
    kept.load_state_dict(good)
    assert content(kept) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_store_in_memory_may_be_copied_and_one_in_a_file_says_why_not(make, copied):
    for place in ("memory", "disk"):
        kept = make(place, 4)
        copied(kept)  # before there is a file
        kept.put(0, torch.ones(4))
        if place == "memory":
            copied(kept)
            continue
        with pytest.raises(TypeError, match=r"samples\.rows cannot be copied or pickled"):
            copied(kept)


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"numel": 0}, "numel=0"),
        ({"numel": 4, "keep": "fp8"}, "keep='fp8' is none of fp32, fp16, int8"),
        ({"numel": 4, "budget_nbytes": 15}, "budget_nbytes=15 is too small for one sample.*16 bytes"),
        ({"numel": 4, "name": "a/b"}, "name='a/b' is not the name of a file"),
        ({"numel": 4, "name": ""}, "name=''"),
    ],
)
def test_what_cannot_be_a_store(arguments, match):
    with pytest.raises(ValueError, match=match):
        SampleStore(**arguments)


def test_what_cannot_be_a_row():
    kept = SampleStore(4)
    for bad in (torch.ones(4, dtype=torch.int32), torch.ones(4, dtype=torch.float64)):
        with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
            kept.put(0, bad)
    with pytest.raises(ValueError, match="a row must have 4 elements, not 5"):
        kept.put(0, torch.ones(5))
    for bad in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match="64-bit"):
            kept.put(bad, torch.ones(4))
    with pytest.raises(TypeError, match="integer"):
        kept.put(0.5, torch.ones(4))
    with pytest.raises(ValueError, match="sample 3 is not held"):
        kept.row(3)
    assert len(kept) == 0
