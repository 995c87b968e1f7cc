"""``narrowband plan``: the table, the sentence, the files, and what is said of bad input."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket

import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowband as nb
from narrowband.bench import foretold, plan
from narrowband.bench.architectures import ZOO, Architecture
from narrowband.bench.ranks import RankError
from narrowband.cli import main
from narrowband.lab import LabConfig
from narrowband.planning import DDP, Host, Link, Option, known
from tests.ranks import run_ranks

MODEL = """
from pathlib import Path
import torch
from torch import nn

def build(batch):
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), (torch.randn(batch, 64),)

def wider(batch):
    return nn.Sequential(nn.Linear(64, 192), nn.ReLU(), nn.Linear(192, 64)), (torch.randn(batch, 64),)

def fails(batch):
    raise RuntimeError("no data here")

def without_inputs(batch):
    return nn.Linear(4, 4)

def ends(batch):
    raise SystemExit(3)

class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no way back")

class NoBackward(nn.Linear):
    def forward(self, x):
        return Raises.apply(super().forward(x))

def takes_the_pictures_place(batch):
    Path(__file__).with_name("late.png").mkdir()
    return build(batch)

def works_forward(batch):
    return nn.Linear(4, 4), (torch.randn(batch, 4),)

def no_backward(batch):
    return NoBackward(4, 4), (torch.randn(batch, 4),)

class NoTraining(nn.Linear):
    def forward(self, x):
        if torch.is_grad_enabled():
            raise KeyError("only without gradients")
        return super().forward(x)

def no_training(batch):
    return NoTraining(4, 4), (torch.randn(batch, 4),)
"""

QUICK = ("--steps", "2", "--codecs", "fp16", "qsgd:bits=4", "topk:density=0.05+ef")


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:build"


def test_a_table_a_sentence_and_files_that_training_can_follow(narrow, model, tmp_path):
    apply, told = tmp_path / "plan.json", tmp_path / "rows.json"
    words = (*QUICK, "--link", "1mbit", "--nodes", "4", "--apply", str(apply), "--json", str(told))
    code, out, err = narrow("plan", model, *words)
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert "Compress: among 4 ranks behind 1 Mbit/s, qsgd:bits=4 would take" in said
    assert f'nb.compress_gradients(model, nb.Plan.load("{apply}"))' in out.replace("\n", "")
    plan = nb.Plan.load(apply)
    assert plan.specs() == {"0.weight": "qsgd:bits=4", "2.weight": "qsgd:bits=4"}
    assert plan.world_size == 4
    written = json.loads(told.read_text())
    assert written.keys() >= {"command", "commit", "machine", "versions", "seed", "config", "profile", "host", "rows"}
    assert written["advice"]["compress"] is True
    for row in written["rows"]:
        parts = [row[key] for key in ("compute_s", "codec_s", "wire_s", "latency_s")]
        assert row["step_s"] == pytest.approx(sum(parts))
    assert [row["step_s"] for row in written["rows"]] == sorted(row["step_s"] for row in written["rows"])


def test_do_not_compress_is_an_answer_and_a_plan(narrow, model, tmp_path):
    apply = tmp_path / "plan.json"
    # Nothing sends less than half of 16 bits, so only the wire could pay for it, and here is none to speak of.
    words = ("--steps", "2", "--codecs", "none", "--link", "400gbit", "--optimizer", "sgd", "--apply", str(apply))
    code, out, err = narrow("plan", model, *words)
    assert (code, err) == (0, "")
    assert "Do not compress: among 2 ranks behind 400 Gbit/s, DDP, float32 would take" in " ".join(out.split())
    assert set(nb.Plan.load(apply).specs().values()) == {"none"}


def test_on_two_levels_the_line_for_a_script_says_how_many_machines(narrow, model, tmp_path):
    apply = tmp_path / "plan.json"
    words = (*QUICK, "--link", "1mbit", "--nodes", "2", "--per-node", "2", "--apply", str(apply))
    code, out, err = narrow("plan", model, *words)
    assert (code, err) == (0, "")
    assert "Compress: among 2 machines of 2 ranks behind 1 Mbit/s, qsgd:bits=4, two levels" in " ".join(out.split())
    assert ", nodes=2)" in out
    assert nb.Plan.load(apply).world_size == 2


def test_micro_batches_that_are_accumulated_are_compute(narrow, model, tmp_path):
    told = tmp_path / "rows.json"
    words = ("--steps", "2", "--codecs", "none", "--accumulate", "1000", "--optimizer", "sgd", "--json", str(told))
    code, _, err = narrow("plan", model, *words)
    assert (code, err) == (0, "")
    written = json.loads(told.read_text())
    profile = written["profile"]
    assert profile["forward_s"] > 900 * profile["backward_s"]
    compute_s = profile["forward_s"] + profile["backward_s"] + profile["optimizer_s"]
    assert all(row["compute_s"] == pytest.approx(compute_s) for row in written["rows"])


def small(batch):
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), (torch.randn(batch, 64),)


def test_a_name_that_a_published_model_has_too_is_said_to_be_a_small_one(narrow, tmp_path, monkeypatch):
    monkeypatch.setitem(ZOO, "gpt2", Architecture("torch", "text", small))
    told, remark = tmp_path / "rows.json", "gpt2 is that architecture of torch in a small size, with 16.6 k parameters"
    words = ("--steps", "1", "--codecs", "none", "--optimizer", "sgd")
    code, out, err = narrow("plan", "gpt2", *words, "--json", str(told))
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert "gpt2 (16.6 k parameters), 2 ranks behind 1 Gbit/s: predicted steps" in said
    assert f"{remark} of random values. For the size that you train, give yours: file.py:function." in said
    assert json.loads(told.read_text())["parameters"] == 16_576
    _, out, _ = narrow("plan", "gpt2", *words, "--nodes", "1..2")
    assert "gpt2 (16.6 k parameters): what to do among how many machines" in " ".join(out.split())
    code, out, err = narrow("memory", "gpt2", "--batch", "2")
    assert (code, err) == (0, "")
    assert remark in " ".join(out.split())


def test_a_model_of_ones_own_is_named_with_its_parameters_and_without_a_remark(narrow, model):
    code, out, err = narrow("plan", model, "--steps", "1", "--codecs", "none", "--optimizer", "sgd")
    assert (code, err) == (0, "")
    assert "(16.6 k parameters), 2 ranks" in " ".join(out.split())
    assert "small size" not in out
    assert "small size" not in narrow("memory", model, "--batch", "2")[1]


def test_what_is_known_of_muon_is_told(narrow, model):
    code, out, err = narrow("plan", model, "--steps", "1", "--codecs", "fp16", "--link", "1mbit", "--optimizer", "muon")
    assert (code, err) == (0, "")
    assert f"{known('muon', 'fp16', 0)}" in out


def test_feedback_of_what_loses_nothing_is_an_option_like_others(narrow, model, tmp_path):
    told = tmp_path / "rows.json"
    words = ("--steps", "1", "--codecs", "none+ef", "--optimizer", "sgd", "--json", str(told))
    code, _, err = narrow("plan", model, *words)
    assert (code, err) == (0, "")
    assert {row["spec"] for row in json.loads(told.read_text())["rows"]} == {None, "fp16", "none+ef"}


def test_memory_of_rounds_is_the_copy_of_the_parameters_and_the_momentum_of_diloco(narrow, model, tmp_path):
    told = tmp_path / "rows.json"
    code, _, err = narrow("plan", model, "--steps", "1", "--codecs", "none", "--every", "7", "--json", str(told))
    assert (code, err) == (0, "")
    rows = {(row["spec"], row["every"]): row for row in json.loads(told.read_text())["rows"]}
    parameters = rows[None, 0]["sent_bytes_per_step"]  # among two, a rank sends as many bytes as a model has
    assert {rows["none", every]["residual_bytes"] for every in (7, 15, 30)} == {2 * parameters}
    sparse = rows["topk:density=0.01+ef", 1]  # goes by a length
    assert parameters < sparse["residual_bytes"] < 2 * parameters


def test_a_range_of_machines_is_a_table_and_a_picture(narrow, model, tmp_path):
    told, picture = tmp_path / "rows.json", tmp_path / "range.png"
    words = ("--steps", "2", "--codecs", "fp16", "sign+ef", "--nodes", "1..10000")
    code, out, err = narrow("plan", model, *words, "--json", str(told), "--plot", str(picture))
    assert (code, err) == (0, "")
    assert "10,000" in out
    rows = json.loads(told.read_text())["rows"]
    numbers = [2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]
    assert list(dict.fromkeys(row["nodes"] for row in rows)) == numbers
    assert len({row["rate_bits_per_s"] for row in rows}) == 9
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_range_of_machines_is_behind_the_link_that_is_said(narrow, model, tmp_path):
    told, picture = tmp_path / "rows.json", tmp_path / "range.png"
    words = ("--steps", "1", "--codecs", "none", "--optimizer", "sgd", "--nodes", "2..4", "--link", "20mbit/100mbit")
    code, out, err = narrow("plan", model, *words, "--json", str(told), "--plot", str(picture))
    assert (code, err) == (0, "")
    assert "Mbit/s" in out
    rows = json.loads(told.read_text())["rows"]
    assert [(row["nodes"], row["rate_bits_per_s"]) for row in rows] == [(2, 20e6), (4, 20e6)]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--link", "0mbit"), "carries nothing; expected a rate such as 200mbit"),
        (("--link", "10parsec"), "rate '10parsec' cannot be read"),
        (("--delay", "5"), "delay '5' cannot be read"),
        (("--nodes", "1"), "one rank sends nothing"),
        (("--nodes", "4..2"), "give a number such as 4, or a range such as 1..10000"),
        (("--codecs", "topk:densty=1"), "did you mean 'density'?"),
        (("--codecs", "threshold:value=0.1+ef"), "depends on the gradients and cannot be predicted"),
        (("--codecs", "qsgd:bits=4+aq-sgd"), "compresses activations between pipeline stages"),
        (("--every", "10", "--per-node", "2"), "one rank each: remove every or per_node"),
        (("--optimizer", "lora"), "every parameter of this model requires gradients: freeze all but the adapters"),
        (("--every", "0"), "every=0: expected at least 1 optimizer step"),
        (("--accumulate", "0"), "accumulate=0 must be at least 1"),
        (("--tolerance", "-1"), "must be a share of the loss"),
        (("--tolerance", "inf"), "must be a share of the loss"),
        (("--bucket-cap-mb", "inf"), "bucket_cap_mb=inf must be a number above 0"),
        (("--plot", "x.png"), "--plot draws a range of machines"),
        (("--measure",), "must be started by torchrun"),
        (("--measure", "--link", "1gbit"), "--measure finds link by itself"),
        (("--nodes", "2..4", "--plot", "x.txt"), "--apply writes the plan for one cluster"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(narrow, model, tmp_path, words, says):
    code, out, err = narrow("plan", model, "--apply", str(tmp_path / "plan.json"), *words)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"model.py", "__pycache__"}  # importing it writes the latter


@pytest.mark.parametrize("name", ["x.txt", "x"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_model_is_built(narrow, model, tmp_path, name):
    pytest.importorskip("matplotlib")
    picture = tmp_path / name
    words = ("--nodes", "1..10", "--plot", str(picture), "--json", str(tmp_path / "rows.json"))
    code, out, err = narrow("plan", model.replace(":build", ":fails"), *words)
    assert (code, out) == (2, "")
    assert f"{picture} cannot be drawn: give a name that ends in .png" in err
    assert not (tmp_path / "rows.json").exists()


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (
            None,
            "pictures need matplotlib: install the extra 'plots' of narrowband: pip install '.[plots]' in the clone",
        ),
        (
            "4.0.0",
            "matplotlib 4.0.0 is installed, and narrowband works with 3.8 and later, up to version 3: pip install",
        ),
    ],
)
def test_without_a_matplotlib_that_will_do_nothing_is_measured(narrow, model, tmp_path, monkeypatch, version, says):
    monkeypatch.setattr("narrowband.report.plots.can_plot", lambda: version is not None)
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    words = ("--nodes", "1..10", "--plot", str(tmp_path / "x.png"), "--json", str(tmp_path / "rows.json"))
    code, out, err = narrow("plan", model.replace(":build", ":fails"), *words)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]


def test_measurements_are_written_before_anything_else_can_fail(narrow, model, tmp_path):
    pytest.importorskip("matplotlib")
    rows = tmp_path / "rows.json"
    words = ("--steps", "1", "--codecs", "none", "--nodes", "1..2", "--plot", str(tmp_path / "late.png"))
    code, _, err = narrow("plan", model.replace(":build", ":takes_the_pictures_place"), *words, "--json", str(rows))
    assert code == 2
    assert "late.png: Is a directory; check the path" in err
    assert json.loads(rows.read_text())["rows"]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("fails", "raised RuntimeError: no data here"),
        ("without_inputs", "must return a module and the tuple of its inputs"),
        ("ends", "raised SystemExit"),
        ("missing", "has no function 'missing'; there are: build"),
        ("no_backward", "backward raised RuntimeError: no way back"),
        ("no_training", "forward raised KeyError: 'only without gradients'"),
    ],
)
def test_a_script_that_cannot_be_measured_is_one_line(narrow, model, tmp_path, function, says):
    target = tmp_path / "plan.json"
    code, _, err = narrow("plan", model.replace(":build", f":{function}"), "--apply", str(target))
    assert code == 2
    assert says in err
    assert err.count("\n") == 1
    assert not target.exists()


def planned_together(rank, world_size, model, port):
    """What each of two ranks says that measure together, each a machine of its own, behind a link that takes 20 ms."""
    plan.measure_host = lambda: Host(hop_s=0.001)
    plan.link_of = lambda *_: (Link.of("30mbit"), 0.021)
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1", "COLUMNS": "160"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(["plan", model, "--measure", "--steps", "2", "--codecs", "qsgd:bits=4"])
    return code, said.getvalue(), dist.is_initialized()


def test_ranks_measure_their_links_together_and_one_speaks(model):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (code, out, left), (other_code, silence, other_left) = run_ranks(planned_together, 2, model, port, fresh=True)
    assert (code, other_code, silence) == (0, 0, "")
    assert not left
    assert not other_left
    assert re.search(r"0 +1 +[\d.]+ [MG]bit/s", out)
    assert re.search(r"1 +0 +[\d.]+ [MG]bit/s", out)
    assert "2 ranks behind 30 Mbit/s, 20 ms one way" in " ".join(out.split()), "what the host takes is no part of it"
    assert "qsgd:bits=4" in out


def refused_together(rank, world_size, model, words, port):
    """How it ends on each of two ranks that torchrun has given different things."""
    own = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1"}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "COLUMNS": "160"}
    before = dict(os.environ)
    os.environ |= own
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            code = main(["plan", model[rank], "--measure", "--steps", "2", *words[rank]])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return code, said.getvalue(), dist.is_initialized()


@pytest.mark.parametrize(
    ("functions", "words", "says"),
    [
        (("build", "build"), (("--codecs", "fp16"), ("--codecs", "sign+ef", "fp16")),
         "ranks disagree on options: codecs is sign+ef fp16 on rank 1 and fp16 on rank 0; start all ranks with"),
        (("build", "fails"), ((), ()), "rank 1: {model}:fails: fails(8) raised RuntimeError: no data here"),
        (("fails", "build"), ((), ()), "rank 0: {model}:fails: fails(8) raised RuntimeError: no data here"),
        (("build", "wider"), ((), ()), "the number of elements is 24832 on rank 1 and 16576 on rank 0"),
        (("build", "no_backward"), ((), ()), "the number of parameters is 2 on rank 1 and 4 on rank 0"),
        (("works_forward", "no_backward"), ((), ()), "rank 1: the model's backward raised RuntimeError: no way back"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_measure_together_all_say_why(model, functions, words, says):
    models = [model.replace(":build", f":{function}") for function in functions]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [own or ("--codecs", "qsgd:bits=4") for own in words]
    answers = run_ranks(refused_together, 2, models, words, port, group=False)
    for code, said, left in answers:
        assert code == 2
        assert says.format(model=model.removesuffix(":build")) in said
        assert said.count("\n") == 1
        assert not left


@pytest.mark.root
@pytest.mark.thorough
@pytest.mark.lab
def test_predictions_stand_beside_measurements(tmp_path, narrow):
    told = tmp_path / "plan.json"
    words = ("--model", "gpt-tiny", "--rates", "100mbit", "--nodes", "2", "--codecs", "none", "qsgd:bits=4")
    words = (*words, "--accumulate", "3")
    code, out, err = narrow("bench", "plan", *words, "--rounds", "1", "--steps", "2", "--json", str(told))
    assert (code, err) == (0, "")
    assert "Predictions are off: " in out
    assert "At the speed of the measurement: " in out
    assert "in 1 of 1 cases" in out or "in 0 of 1 cases" in out
    written = json.loads(told.read_text())
    rows = written["rows"]
    assert sorted(row["codec"] for row in rows) == [DDP, "none", "qsgd:bits=4"]
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted_step_s"] / row["measured_step_s"] - 1)
        if row["codec"] != DDP:  # whose bytes nobody counts
            assert row["predicted_sent_bytes"] == pytest.approx(row["measured_sent_bytes"], abs=64)
    assert written["verdicts"] == foretold.verdicts(rows)
    assert [side["codec"] for side in written["verdicts"][0]["sides"]] == ["none", "qsgd:bits=4"]


@pytest.mark.root
@pytest.mark.thorough
@pytest.mark.lab
@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--every", "0", "3", "--optimizer", "adamw", "--rates", "50mbit/100mbit"),
         {"none", "qsgd:bits=4", "dgc:density=0.01", "updates every 3, none", "updates every 3, qsgd:bits=4"}),
        (("--per-node", "2", "--rates", "100mbit"),
         {spec + where for spec in ("none", "qsgd:bits=4", "dgc:density=0.01") for where in ("", ", two levels")}),
    ],
)  # fmt: skip
def test_predicted_bytes_are_those_that_are_sent_in_rounds_and_on_two_levels(tmp_path, narrow, words, names):
    told = tmp_path / "plan.json"
    words = ("--model", "gpt-tiny", "--nodes", "2", "--rounds", "1", "--steps", "2", "--json", str(told), *words)
    code, _, err = narrow("bench", "plan", "--codecs", "none", "qsgd:bits=4", "dgc:density=0.01", *words)
    assert (code, err) == (0, "")
    written = json.loads(told.read_text())
    rows = {row["codec"]: row for row in written["rows"]}
    assert rows.keys() == {DDP, *names}
    for name, row in rows.items():
        measured = row["measured_sent_bytes"]
        if name == "updates every 3, qsgd:bits=4":
            measured -= 4 * (1024 + 2) / 3  # outer="auto" measures its length in each of the first rounds
        if name != DDP:
            assert row["predicted_sent_bytes"] == pytest.approx(measured, abs=64)
        assert row["predicted_link_bytes"] <= row["measured_link_bytes"]
        if "dgc" not in name:  # whose messages are so small that most of them is headers
            assert row["predicted_link_bytes"] > 0.75 * row["measured_link_bytes"]
    assert written["verdicts"] == foretold.verdicts(written["rows"])


def a_row(codec, session):
    return {"codec": codec, "rate": session.rate, "nodes": session.nodes, "per_node": session.per_node}


def test_a_comparison_that_was_stopped_goes_on_with_the_links_that_are_left(tmp_path, narrow, monkeypatch):
    measured, fails = [], {"1gbit"}

    def one_link(config, rate, nodes):
        measured.append((nodes, rate))
        if rate in fails:
            raise RankError("rank 1 ended")
        return None, None

    def trained(session, options):
        return [a_row(codec, session) for codec in ("no-communication", *(option.name for option in options))]

    def compared(row, *_):
        step_s = {"predicted_step_s": 0.1, "measured_step_s": 0.125, "error": -0.2}
        compute_s = {"predicted_compute_s": 0.1, "measured_compute_s": 0.1, "at_that_speed_error": -0.2}
        return {**row, **step_s, **compute_s}

    monkeypatch.setattr(foretold, "_measured", one_link)
    monkeypatch.setattr(foretold.ddp, "run", trained)
    monkeypatch.setattr(foretold, "_beside", compared)
    told = tmp_path / "plan.json"
    words = ("bench", "plan", "--rates", "200mbit", "1gbit", "--nodes", "2", "--codecs", "none", "--json", str(told))
    code, _, err = narrow(*words)
    assert code == 1
    assert "rank 1 ended" in err
    assert {(row["rate"], row["codec"]) for row in json.loads(told.read_text())["rows"]} == {
        ("200mbit", DDP), ("200mbit", "none"),
    }  # fmt: skip
    fails.clear()
    code, out, err = narrow(*words)
    assert (code, err) == (0, "")
    assert measured == [(2, "200mbit"), (2, "1gbit"), (2, "1gbit")]
    assert "2 ranks, links of 200mbit" in out
    assert [row["rate"] for row in json.loads(told.read_text())["rows"]] == ["200mbit"] * 2 + ["1gbit"] * 2
    narrow(*words[:-2], "--rounds", "1", *words[-2:])
    assert len(measured) == 5, "another configuration is measured anew"
    monkeypatch.setattr("narrowband.report.record.sources", lambda: "other code")
    narrow(*words[:-2], "--rounds", "1", *words[-2:])
    assert len(measured) == 7, "and so is other code, whose commit may be the same"


def test_a_link_that_is_measured_again_takes_no_other_out_of_the_record(tmp_path, narrow, monkeypatch):
    def one_link(config, rate, nodes):
        if rate == "10gbit":
            raise RankError("rank 1 ended")
        return None, None

    monkeypatch.setattr(foretold, "_measured", one_link)
    monkeypatch.setattr(foretold.ddp, "run", lambda own, options: [a_row("none", own)] * (1 + len(options)))
    monkeypatch.setattr(foretold, "_beside", lambda row, *_: row | {"measured_step_s": 0.1})
    known = [{"rate": rate, "nodes": 2, "measured_step_s": was} for rate, was in (("200mbit", None), ("1gbit", 1))]
    kept, config = [], foretold.Config(rates=("200mbit", "1gbit", "10gbit"), nodes=(2,), codecs=("none",))
    with pytest.raises(RankError):
        foretold.run(config, known=known, keep=lambda rows: kept.append([*rows]))
    assert [(row["rate"], row["measured_step_s"]) for row in kept[-1]] == [*[("200mbit", 0.1)] * 2, ("1gbit", 1)]


def beside(codec, said, was, rate="1gbit"):
    step_s = {"predicted_step_s": said, "measured_step_s": was}
    return {"codec": codec, "rate": rate, "nodes": 2, "per_node": 1, **step_s}


def test_a_verdict_is_wrong_where_the_choice_costs_more_than_a_tenth():
    rows = [beside(DDP, 1.0, 1.0), beside("fp16", 1.02, 0.92), beside("none", 1.2, 1.3), beside("sign+ef", 0.9, None)]
    rows += [beside(DDP, 2.0, 1.0, "10mbit"), beside("fp16", 1.0, 2.0, "10mbit")]
    slow, fast = foretold.verdicts(rows[::-1])
    # DDP is said to be best, which is to not compress; fp16 is faster, by less than anybody should care about.
    assert (fast["predicted_best"], fast["measured_best"], fast["is_right"]) == (DDP, "fp16", True)
    assert fast["slower_by"] == pytest.approx(1 / 0.92 - 1)
    assert {side["codec"]: side["is_right"] for side in fast["sides"]} == {"fp16": None, "none": True}
    assert (slow["predicted_best"], slow["measured_best"], slow["is_right"]) == ("fp16", DDP, False)
    assert slow["slower_by"] == pytest.approx(1.0)
    assert [side["is_right"] for side in slow["sides"]] == [False]


def test_a_link_where_nothing_was_measured_has_no_verdict_and_without_ddp_there_are_no_sides():
    assert foretold.verdicts([beside("fp16", 1.0, None)]) == []
    assert foretold.verdicts([beside("fp16", 1.0, 2.0)])[0]["sides"] == []


def test_gradients_and_rounds_have_a_row_for_each_codec_that_can_be_sent_so():
    config = foretold.Config(codecs=("none", "dgc:density=0.01"), every=(0, 15))
    assert config.options == [Option(None), Option("none"), Option("dgc:density=0.01"), Option("none", every=15)]
    levels = foretold.Config(codecs=("none", "dgc:density=0.01"), per_node=2)
    assert [option.name for option in levels.options] == [
        DDP, "none", "none, two levels", "dgc:density=0.01", "dgc:density=0.01, two levels",
    ]  # fmt: skip
    assert config.session("20mbit/100mbit", 2).place() == LabConfig(2, rate="20mbit", down="100mbit")


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": (1,)},
        {"rates": ()},
        {"rates": ("0mbit",)},
        {"codecs": ("foo",)},
        {"codecs": ("threshold:value=0.1+ef",)},
        {"every": ()},
        {"every": (0, -1)},
        {"every": (15,), "per_node": 2},
        {"rates": ("20mbit/fast",)},
        {"per_node": 0},
        {"accumulate": 0},
        {"accumulate": 2, "per_node": 2},
    ],
)
def test_a_comparison_that_cannot_be_is_refused_before_ranks_start(wrong):
    said = "a single machine", "nothing to measure", "carries nothing", "unknown codec", "cannot be predicted"
    said = (*said, "one rank each", "have a whole model", "must be at least 1", "expected at least 1", "cannot be read")
    with pytest.raises(ValueError, match="|".join(said)):
        foretold.Config(**wrong)
