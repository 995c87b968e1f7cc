"""What a recorder writes, from real ranks, and what is read of it whatever happened to the file."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import resource
import signal
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from narrowband.report.recorder import read_run
from tests.gradients.training import refusal
from tests.ranks import run_ranks


def trained(rank, world_size, path, spec, steps, options):
    """Losses, and what the handle counted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model = nn.parallel.DistributedDataParallel(model)
    handle = nb.compress_gradients(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    with nb.Recorder(handle, path, **options) as recorder:
        for step in range(steps):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            loss = model(x).square().sum() * (math.inf if step == 3 and spec == "qsgd:bits=4+ef" else 1.0)
            loss.backward()
            optimizer.step()
            recorder.step(loss=loss, rate=0.01)
            losses.append(loss.item())
    return losses, handle.stats().total.to_dict(), {name: own.sent_bytes for name, own in handle.layer_stats().items()}


@pytest.mark.parametrize("every", [1, 4])
def test_one_rank_writes_all_that_the_handle_counts(tmp_path, every):
    path = tmp_path / "runs" / "run.jsonl"
    answers = run_ranks(trained, 2, str(path), "topk:density=0.05+ef", 12, {"every": every, "layers_every": 8})
    assert [each.name for each in path.parent.iterdir()] == ["run.jsonl"]
    losses, total, sent = answers[0]
    run = read_run(path)
    assert run.ended
    assert list(run.steps) == list(range(every, 13, every))
    assert [values["loss"] for values in run.steps.values()] == pytest.approx(losses[every - 1 :: every])
    assert {values["rate"] for values in run.steps.values()} == {0.01}
    assert (run.start["spec"], run.start["ranks"]) == ("topk:density=0.05+ef", 2)
    assert run.start["command"].split()[0] != "narrowband", "the script that has the recorder"
    for name in ("sent_bytes", "raw_bytes"):
        assert every * sum(values[name] for values in run.steps.values()) == pytest.approx(total[name])
    assert ["seconds" in values for values in run.steps.values()] == [False] + [True] * (12 // every - 1)
    assert {name for values in run.steps.values() for name in values} >= {"encode_s", "waiting_s", "relative_error"}
    assert list(run.layers) == ([1, 8] if every == 1 else [4, 8])
    assert {name: own.sent_bytes for name, own in run.layers[8].items()} == sent
    assert all(own.residual_norm > 0 for own in run.layers[8].values())


def test_a_skipped_step_and_a_loss_that_is_no_number_are_told(tmp_path):
    path = tmp_path / "run.jsonl"
    run_ranks(trained, 2, str(path), "qsgd:bits=4+ef", 6, {})
    run = read_run(path)
    assert math.isinf(run.steps[4]["loss"]) or math.isnan(run.steps[4]["loss"])
    assert sum(values["skipped"] for values in run.steps.values()) >= 1
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def of_many_numbers(rank, world_size, path):
    handle = nb.compress_gradients(nn.Linear(64, 64), "qsgd:bits=4")
    recorder = nb.Recorder(handle, path)
    refused = [
        refusal(lambda: recorder.step(loss=torch.ones(3))),
        refusal(lambda: recorder.step(rate=torch.ones(2, 1))),
    ]
    recorder.step(loss=torch.ones(1, 1))
    recorder.close()
    return refused


def test_a_loss_of_many_numbers_is_an_error_on_every_rank(tmp_path):
    path = tmp_path / "run.jsonl"
    first, second = run_ranks(of_many_numbers, 2, str(path))
    assert first == second
    assert first[0] == ("ValueError", "loss is a tensor of shape (3,); record one number, such as loss.mean()")
    assert "rate is a tensor of shape (2, 1)" in first[1][1]
    assert list(read_run(path).steps) == [1]


class Scalars:
    """As TensorBoard's."""

    def __init__(self):
        self.seen = {}

    def add_scalar(self, name, value, step):
        self.seen.setdefault(step, {})[name] = value


class Log:
    """As a run of Weights & Biases."""

    def __init__(self):
        self.seen = {}

    def log(self, values, step):
        self.seen[step] = values


def recorded(*writers):
    """Four steps, of which every second is told to each writer."""
    x = nn.Linear(64, 64)
    handle = nb.Averager(x.named_parameters(), "qsgd:bits=4")
    recorders = [nb.Recorder(handle, writer=writer, every=2) for writer in writers]
    for _ in range(4):
        x.zero_grad()
        x(torch.ones(1, 64)).sum().backward()
        handle.average()
        for recorder in recorders:
            recorder.step(loss=torch.tensor(0.5))


def told(rank, world_size):
    scalars, log = Scalars(), Log()
    recorded(scalars, log)
    return scalars.seen, log.seen


def test_loggers_get_the_same_numbers_on_one_rank():
    (scalars, log), (other, _) = run_ranks(told, 2)
    assert other == {}
    assert list(scalars) == list(log) == [2, 4]
    for seen in (scalars, log):
        assert seen[4]["narrowband/loss"] == 0.5
        assert seen[4]["narrowband/sent_bytes"] > 0
    with pytest.raises(TypeError, match="must have a method add_scalar"):
        nb.Recorder(mock.Mock(), writer=3)
    with pytest.raises(TypeError, match=r"handle is Linear; pass what nb.compress_gradients, "):
        nb.Recorder(nn.Linear(2, 2), "run.jsonl")


def with_tensorboard(rank, world_size, folder):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        recorded(writer)


@pytest.mark.filterwarnings("ignore")  # of its own imports
def test_the_writer_of_tensorboard_takes_them(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(with_tensorboard, 1, str(tmp_path))
    written = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in written.Scalars("narrowband/loss")] == [(2, 0.5), (4, 0.5)]
    assert "narrowband/sent_bytes" in written.Tags()["scalars"]


def with_wandb(rank, world_size, folder):
    import wandb

    run = wandb.init(mode="offline", dir=folder, project="narrowband")
    recorded(run)
    told = {name: run.summary[name] for name in ("_step", "narrowband/loss", "narrowband/skipped")}
    step = run.step
    run.finish()
    return told, step


@pytest.mark.filterwarnings("ignore")  # of its own imports
def test_a_run_of_weights_and_biases_takes_them(tmp_path):
    why = "Weights & Biases is not installed: it brings 20 packages, too many for the dev extra; pip install wandb"
    pytest.importorskip("wandb", reason=why)
    told = run_ranks(with_wandb, 1, str(tmp_path), timeout_s=180.0)  # it starts a process of its own
    # The last step, 4, is open until a later one or the end comes. The summary is of the one before.
    assert told == [({"_step": 2, "narrowband/loss": 0.5, "narrowband/skipped": 0}, 4)]


def lines(*steps, ended=True, start='{"kind": "start", "narrowband_run": 1, "spec": "none", "ranks": 2}'):
    own = [json.dumps({"kind": "step", "step": step, "steps": 1, "values": {"loss": loss}}) for step, loss in steps]
    return "\n".join([start, *own, *(['{"kind": "end", "step": 9}'] if ended else [])]) + "\n"


LAYERS = b'{"kind": "layers", "step": 1, "layers": {"a": ["none", 9, 9, "much", null, null]}}\n{"kind": "end"}\n'


def test_a_run_that_goes_on_from_a_checkpoint_takes_steps_back(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(lines((1, 0.9), (2, 0.8), (3, 0.7), ended=False) + lines((3, 0.75), (4, 0.6)))
    run = read_run(path)
    assert {step: values["loss"] for step, values in run.steps.items()} == {1: 0.9, 2: 0.8, 3: 0.75, 4: 0.6}
    assert run.ended


class Compared(int):
    """A number of a step that counts how often it is compared."""

    times = 0

    def __ge__(self, other):
        Compared.times += 1
        return int(self) >= other


def test_a_record_is_not_compared_with_all_before_it(tmp_path, monkeypatch):
    """The time to read a file grows with the length of the run, and not with its square."""
    path = tmp_path / "run.jsonl"
    path.write_text(lines(*((step, 0.5) for step in range(1, 301)), (250, 0.4), (251, 0.3)))
    monkeypatch.setattr("narrowband.report.recorder._whole", Compared)
    assert list(read_run(path).steps) == list(range(1, 252))
    assert Compared.times < 2 * 302


@pytest.mark.parametrize("cut", [1, 20, 40])
def test_a_line_that_was_cut_off_is_left_out_also_where_a_new_process_went_on(tmp_path, cut):
    path = tmp_path / "run.jsonl"
    whole = lines((1, 0.9), (2, 0.8), ended=False)
    path.write_text(whole[: -1 - cut])
    assert list(read_run(path).steps) == [1]
    assert read_run(path).torn
    recorder = nb.Recorder(Still(), path, every=1)
    recorder.step(loss=0.5, step=2)
    recorder.close()
    assert {step: values["loss"] for step, values in read_run(path).steps.items()} == {1: 0.9, 2: 0.5}


START = lines(ended=False)


@pytest.mark.parametrize("content", ["", START, START[:1], START[:30], START[:-3]])
def test_a_file_without_a_whole_record_has_no_earlier_part(tmp_path, content):
    """A process may have died as it began."""
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="no records yet"):
        read_run(path)
    with nb.Recorder(Still(), path) as recorder:
        recorder.step(loss=0.5)
    run = read_run(path)
    assert (list(run.steps), run.ended, run.torn) == ([1], True, False)


def test_whoever_goes_on_after_an_exception_is_recorded(tmp_path):
    path = tmp_path / "run.jsonl"
    recorder = nb.Recorder(Still(), path)
    with contextlib.suppress(RuntimeError), recorder:
        recorder.step(loss=1.0)
        raise RuntimeError("out of memory")
    assert not read_run(path).ended
    with recorder:
        recorder.step(loss=0.5)
    run = read_run(path)
    assert {step: values["loss"] for step, values in run.steps.items()} == {1: 1.0, 2: 0.5}
    assert run.ended


def test_a_full_disk_does_not_end_training_and_lines_wait_for_room(tmp_path, caplog, monkeypatch):
    path = tmp_path / "run.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing on then fails as on a full disk
    try:
        with nb.Recorder(Still(), path) as recorder:
            recorder.step(loss=1.0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))
            for _ in range(200):  # more than the buffer of a file holds
                recorder.step(loss=0.5)
            said = [record.getMessage() for record in caplog.records]
            assert len(said) == 1
            assert f"{path} cannot be written (File too large). Training continues" in said[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            recorder.step(loss=0.125)
        recorder = nb.Recorder(Still(), tmp_path / "lost.jsonl")
        recorder.step(loss=1.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "lost.jsonl").stat().st_size, hard))
        with pytest.raises(OSError, match="File too large"):
            recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    run = read_run(path)
    assert [values["loss"] for values in run.steps.values()] == [1.0, *[0.5] * 200, 0.125]
    assert (run.ended, run.torn) == (True, False)


class Still:
    """A handle that has nothing to tell."""

    def stats(self):
        return nb.Stats(nb.StepStats(), nb.StepStats())


def test_numbers_of_steps_may_be_numpys(tmp_path):
    with nb.Recorder(Still(), tmp_path / "run.jsonl", every=np.int64(2), layers_every=np.int64(4)) as recorder:
        for step in np.arange(1, 5):
            recorder.step(loss=np.float32(0.5), step=step)
        with pytest.raises(TypeError, match=r"step=4.5 is not a whole number"):
            recorder.step(step=4.5)
    run = read_run(tmp_path / "run.jsonl")
    assert [values["loss"] for values in run.steps.values()] == [0.5, 0.5]
    assert list(run.steps) == [2, 4]
    with pytest.raises(TypeError, match=r"every=1.5 is not a whole number"):
        nb.Recorder(Still(), every=1.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no records yet"),
        (b"\x80\x04\x95", "was not written by nb.Recorder"),
        (b'{"rows": []}\n{}\n', "its first line does not start a run; nb.Recorder.* writes such a file"),
        (b"[]\n", "its first line does not start a run"),
        (
            lines((1, 0.9)).encode().replace(b'"narrowband_run": 1', b'"narrowband_run": 99'),
            (
                r"was written by a newer version of narrowband "
                r"\(its format is 99; this version reads 1\): install that version"
            ),
        ),
        (lines((1, 0.9)).encode().replace(b'"ranks": 2', b'"machine": 3'), "its first line does not start"),
        (
            lines((1, 0.9), (2, 0.8), (3, 0.7)).encode().replace(b'"step": 2', b'"stop": 2'),
            "damaged: line 3 is not a record .'step' is missing.; delete that line",
        ),
        (lines((1, 0.9), (2, 0.8), (3, 0.7)).encode().replace(b'"step": 2', b'"step": "b"'), "damaged: line 3"),
        (
            lines().encode() + LAYERS + lines((1, 0.9)).encode(),
            "damaged: line 3 is not a record .'much' is not a whole number",
        ),
        (lines((1, 0.9), (2, 0.8)).encode().replace(b"0.9", b"[]"), "damaged: line 2"),
        (lines((1, 0.9), (2, 0.8)).encode().replace(b'"step": 1', b'"step": 1e999'), "damaged: line 2"),
        (lines((1, 0.9), (2, 0.8)).encode().replace(b"0.9", b"1" + b"0" * 400), "damaged: line 2"),
    ],
)
def test_what_is_no_run_is_not_read_and_never_written_to(tmp_path, content, message):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_run(path)
    if content:
        with pytest.raises(ValueError, match=message):
            nb.Recorder(Still(), path)
        assert path.read_bytes() == content


def test_a_file_that_cannot_be_written_is_an_error_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        nb.Recorder(Still(), tmp_path / "file" / "run.jsonl")
    nb.Recorder(Still(), tmp_path / "new" / "run.jsonl")
    with pytest.raises(IsADirectoryError):
        nb.Recorder(Still(), tmp_path / "new")


def test_numbers_that_make_no_sense_are_refused():
    for options in ({"every": 0}, {"layers_every": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            nb.Recorder(Still(), **options)


def test_what_can_be_a_number_is_recorded_as_one(tmp_path):
    path = tmp_path / "run.jsonl"
    with nb.Recorder(Still(), path) as recorder:
        recorder.step(loss=np.float32(0.5), rate=np.float64(0.25), norm=torch.tensor([2.0], requires_grad=True), hits=3)
    values = read_run(path).steps[1]
    assert [values[name] for name in ("loss", "rate", "norm", "hits")] == [0.5, 0.25, 2.0, 3.0]


def test_steps_of_a_handle_that_does_not_count_them_go_on_behind_those_of_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    for first, last in ((1, 5), (6, 8)):
        with nb.Recorder(Still(), path, every=2) as recorder:
            for step in range(first, last + 1):
                recorder.step(loss=float(step))
    assert {step: values["loss"] for step, values in read_run(path).steps.items()} == {2: 2.0, 4: 4.0, 7: 7.0}
    assert read_run(path).last == 8


class ByTime(Still):
    """A handle with rounds every ten seconds, of which this peer has heard of five."""

    step, steps, every = 5, 3, 1 << 40


def test_steps_of_rounds_by_time_are_counted_from_one_and_go_on_behind_those_of_the_file(tmp_path):
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        with nb.Recorder(ByTime(), path) as recorder:
            recorder.step()
            recorder.step()
    assert list(read_run(path).steps) == [1, 2, 3, 4]


def resumed(rank, world_size, path, fragments, overlap, saved_at, last, average):
    """What the file has in the end, of a run that a checkpoint interrupted; losses are the true numbers."""

    def part(first, last, state):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = nb.compress_updates(model, optimizer, "sign+ef", every=4, fragments=fragments, overlap=overlap)
        if state is not None:
            model.load_state_dict(state[0])
            handle.load_state_dict(state[1])
        saved = None
        with nb.Recorder(handle, path) as recorder:
            for step in range(first, last + 1):
                optimizer.zero_grad()
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
                recorder.step(loss=float(step))
                if step == saved_at:
                    if average:
                        handle.average()
                    saved = copy.deepcopy((model.state_dict(), handle.state_dict()))
        handle.remove()
        return saved

    part(saved_at + 1, saved_at + 4, part(1, last, None))
    return {step: values["loss"] for step, values in read_run(path).steps.items()}


@pytest.mark.parametrize(
    ("fragments", "overlap", "saved_at", "last", "average"),
    [
        (1, 0, 10, 10, False),
        (1, 0, 8, 10, False),  # two steps are taken again
        (1, 1, 7, 7, False),
        (1, 0, 10, 10, True),
        (2, 0, 8, 8, False),
    ],
)
def test_steps_of_a_resumed_run_are_those_of_the_optimizer(tmp_path, fragments, overlap, saved_at, last, average):
    (found,) = run_ranks(resumed, 1, str(tmp_path / "run.jsonl"), fragments, overlap, saved_at, last, average)
    assert found == {step: float(step) for step in range(1, saved_at + 5)}


def several(rank, world_size, path):
    """Updates, whose handle counts rounds: steps are those of the optimizer."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = nb.compress_updates(model, optimizer, "sign+ef", every=3)
    with nb.Recorder(handle, path) as recorder:
        for _ in range(7):
            optimizer.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            recorder.step()
    dist.barrier()


def test_steps_of_rounds_are_those_of_the_optimizer(tmp_path):
    path = tmp_path / "run.jsonl"
    run_ranks(several, 2, str(path))
    run = read_run(path)
    assert list(run.steps) == list(range(1, 8))
    assert [step for step, values in run.steps.items() if values["sent_bytes"]] == [3, 6]
