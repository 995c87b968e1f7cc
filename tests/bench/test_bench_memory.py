"""What backward keeps, measured: the comparison, and one model by operator and module."""

from __future__ import annotations

import functools
import gc
import json
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from narrowband.activations import ActivationPolicy, SavedBytes
from narrowband.bench import memory, peaks, ways
from narrowband.bench.subjects import subject
from narrowband.cli import main
from narrowband.cli.exits import STOPPED

MODEL = """
from collections import OrderedDict

import torch
from torch import nn

from beside import WIDTH

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def build(batch):
    return nn.Sequential(Block(), Block(), Block()), (torch.randn(batch, 32, WIDTH),)

def one(batch):
    return nn.Sequential(Block()), (torch.randn(batch, 32, WIDTH),)

def halves(batch):
    model, x = build(batch)
    return nn.Sequential(*(nn.Sequential(OrderedDict(mlp=block)) for block in model)), x

def bare(batch):
    return nn.Linear(64, 64), torch.randn(batch, 64)

def wrong(batch):
    return nn.Linear(4, 4)

class Silent(nn.Linear):
    def forward(self, x):
        return 0.0 * super().forward(x)

def empty(batch):
    return nn.Linear(4, 4, device="meta"), (torch.zeros(batch, 4),)

def silent(batch):
    return Silent(4, 4), (torch.zeros(batch, 4),)
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "beside.py").write_text("WIDTH = 64\n")
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:build"


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deit-tiny", "deit-small", "gpt", "resnet18"])
def test_named_models_run(name):
    built, inputs = subject(name, 1)
    assert inputs[0].shape[0] == 1
    with torch.no_grad():
        assert built(*inputs).isfinite().all()


def test_a_model_of_ones_own_may_import_what_lies_beside_it_and_give_one_input_bare(model):
    built, inputs = subject(model, 3)
    assert built(*inputs).shape == (3, 32, 64)
    built, inputs = subject(model.replace(":build", ":bare"), 3)
    assert built(*inputs).shape == (3, 64)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deit-huge", "unknown model 'deit-huge'; write file.py:function for yours, or one of: deit-tiny"),
        ("nowhere.py:build", "there is no file nowhere.py"),
        ("{}:biuld", "has no function 'biuld'"),
        ("{}:wrong", r"wrong\(2\) must return a module and the tuple of its inputs"),
        ("{}:empty", r"weight of the model has no values \(meta device\)"),
    ],
)
def test_what_is_no_model_is_refused(model, name, message):
    with pytest.raises(ValueError, match=message):
        subject(name.format(model.removesuffix(":build")), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0"),
        ({"rounds": 0}, "rounds=0"),
        ({"bits": (3,)}, "bits=3"),
        ({"model": "gtp"}, "'gtp'"),
        ({"bits": ()}, "nothing to measure"),
        ({"device": "gpu"}, "device='gpu' is none of cpu, cuda"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        memory.Config(**options)


# ---- the comparison --------------------------------------------------------------------------------------------------


def test_rows_tell_bytes_time_and_fidelity(model):
    config = memory.Config(model=model, batch=8, bits=(8, 4), baselines=True, rounds=2, peaks=False)
    events = []
    rows = {row["name"]: row for row in memory.run(config, events.append)}
    assert len(events) == memory.count(config)
    assert list(rows) == [
        "plain", "8 bits", "4 bits", "checkpoint", "checkpoint, 8 bits", "bf16", "bf16, 8 bits", "bf16, 4 bits",
        "bf16, checkpoint", "bf16, checkpoint, 8 bits",
    ]  # fmt: skip
    elements = 8 * 32 * 64
    # Per block: the norm's input and result, up's result, and GELU's; and two statistics per token.
    plain = 3 * (4 * (1 + 1 + 4 + 4) * elements + 2 * 4 * 8 * 32) - 4 * elements  # the first input is the caller's
    assert rows["plain"]["kept_bytes"] == plain
    assert rows["plain"]["gradient_error"] == 0
    assert rows["plain"]["ratio_to_plain"] == 1
    assert rows["8 bits"]["kept_ratio"] > 3.5
    assert rows["4 bits"]["kept_ratio"] > 6
    assert rows["checkpoint"]["kept_bytes"] == 2 * 4 * elements
    assert rows["checkpoint"]["gradient_error"] < 1e-6
    assert rows["checkpoint, 8 bits"]["kept_bytes"] == 2 * (elements + 8 * elements // 64)  # ranges of rows of 64
    assert 0 < rows["8 bits"]["gradient_error"] < rows["4 bits"]["gradient_error"] < 0.3
    assert rows["bf16"]["kept_bytes"] < plain
    assert all(row["step_s"] > 0 and row["compress_s"] >= 0 for row in rows.values())
    assert rows["8 bits"]["compress_s"] > 0
    assert {row["host_s"] for row in rows.values()} == {None}  # the CPU is the host
    assert {row["peak_bytes"] for row in rows.values()} == {None}  # not asked for


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody tells a process's peak")
def test_the_peak_is_that_of_a_process_in_which_nothing_else_ran(model):
    """So it does not matter what this one holds."""
    config = memory.Config(model=model, batch=512, rounds=1, bits=(8,))
    held = torch.ones(1 << 26)
    events = []
    rows = {row["name"]: row for row in memory.run(config, events.append)}
    assert len(events) == memory.count(config) == 6
    kept = rows["plain"]["kept_bytes"]
    assert kept < rows["plain"]["peak_bytes"] < 3 * kept
    assert rows["plain"]["peak_ratio"] == 1
    assert rows["8 bits"]["peak_ratio"] == rows["plain"]["peak_bytes"] / rows["8 bits"]["peak_bytes"]
    assert rows["8 bits"]["peak_to_same_precision"] == rows["8 bits"]["peak_bytes"] / rows["plain"]["peak_bytes"]
    del held


WIDE, DEEP = 512, 4


def tower(batch):
    """Enough parameters that they count."""
    layers = [module for _ in range(DEEP) for module in (nn.Linear(WIDE, WIDE), nn.Tanh())]
    return nn.Sequential(*layers), (torch.randn(batch, WIDE),)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nobody tells a process's memory")
def test_a_footprint_is_all_that_training_takes():
    """Parameters, gradients and AdamW's two moments, and of samples what is kept of each between layers."""
    taken = peaks.footprint(ways.Way("plain"), functools.partial(tower, batch=2048))
    states, between = 4 * 4 * DEEP * (WIDE + 1) * WIDE, DEEP * 4 * 2048 * WIDE
    # Backward needs as much again for a moment, and malloc does not use all of that anew: 4 to 6.4 times in 12 runs.
    assert states + between < taken < states + 10 * between


def test_training_without_compression_says_nothing_of_a_context_that_is_never_used(caplog):
    plain = ways.Training(ways.Way("plain"), functools.partial(tower, batch=8), "cpu", seed=0)
    assert plain.step() is None
    del plain
    gc.collect()
    assert caplog.messages == []


def test_ways_of_any_model_are_compared_in_turn(model):
    chosen = [ways.Way("plain"), ways.Way("few", ActivationPolicy(bits=4, rounding="nearest"))]
    events = []
    build = functools.partial(subject, model, 8)
    rows = memory.compare(chosen, build, rounds=3, peaks=False, on_event=events.append)
    assert events == ["plain", "few", "plain", "few", "few", "plain", "plain", "few"]
    assert [row["name"] for row in rows] == ["plain", "few"]
    assert rows[0]["ratios"] == [1.0] * 3
    assert sorted(rows[1]["ratios"])[1] == rows[1]["ratio_to_plain"] > 0
    assert rows[1]["kept_bytes"] < rows[0]["kept_bytes"] / 6


def test_rows_are_chosen_by_name_and_compared_with_their_own_precision(model):
    names = ("4 bits", "bf16, 8 bits")
    config = memory.Config(model=model, batch=8, only=names, rounds=3, peaks=False, device="cpu")
    known = []
    rows = {row["name"]: row for row in memory.run(config, None, known.append)}
    assert list(rows) == ["plain", "4 bits", "bf16", "bf16, 8 bits"]  # these two are what they are compared with
    assert memory.count(config) == 4 * (1 + 3)
    for name, same in (("4 bits", "plain"), ("bf16, 8 bits", "bf16")):
        row, its = rows[name], rows[same]
        ratios = [a / b for a, b in zip(row["ratios"], its["ratios"], strict=True)]
        assert row["ratio_to_same_precision"] == sorted(ratios)[1] > 0
        assert its["ratio_to_same_precision"] == 1
    assert rows["4 bits"]["ratio_to_same_precision"] == rows["4 bits"]["ratio_to_plain"]
    assert [[len(row["ratios"]) for row in after] for after in known] == [[1] * 4, [2] * 4, [3] * 4]


def test_where_all_rows_are_bf16_they_are_compared_with_bf16(model):
    config = memory.Config(model=model, batch=8, only=("bf16, checkpoint", "bf16, 8 bits"), rounds=1, peaks=False)
    rows = {row["name"]: row for row in memory.run(config)}
    assert list(rows) == ["bf16", "bf16, 8 bits", "bf16, checkpoint"]
    for row in rows.values():
        assert row["ratio_to_plain"] is None
        assert row["ratio_to_same_precision"] == row["ratios"][0] > 0
    assert rows["bf16, 8 bits"]["kept_ratio"] > 1.5
    assert rows["bf16, checkpoint"]["gradient_error"] < 1e-6


def test_a_row_that_there_is_not_is_refused_with_those_there_are(model):
    with pytest.raises(ValueError, match=r"no row is called 'bf16, 3 bits'; there are: 'plain', '8 bits'"):
        memory.count(memory.Config(model=model, batch=8, only=("bf16, 3 bits",)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match="device=cuda: PyTorch finds no CUDA device here"):
        memory.Config(device="cuda")


def test_gradients_are_compared_in_float64_whatever_they_are_in():
    """Against the definition, of all parameters end to end."""
    generator = torch.Generator().manual_seed(0)
    reference = [torch.randn(shape, generator=generator) for shape in ((300, 20), (7,), (2, 3, 4))]
    own = [x + 1e-4 * torch.randn(x.shape, generator=generator) for x in reference]
    a, b = (torch.cat([x.flatten() for x in xs]).double() for xs in (own, reference))
    error, cosine = memory._beside(own, reference)
    assert error == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-12)
    assert cosine == pytest.approx(float(a @ b / (a.norm() * b.norm())), rel=1e-12)
    assert memory._beside(own, [torch.zeros_like(x) for x in own]) == (None, None)
    assert memory._beside([own[0] * float("nan")], reference[:1]) == (None, None)


def test_rows_in_which_mlps_are_computed_again_are_there_where_mlps_are(model):
    config = memory.Config(
        model=model.replace(":build", ":halves"), batch=8, bits=(8, 4), baselines=True, rounds=1, peaks=False
    )
    rows = {row["name"]: row for row in memory.run(config)}
    assert len(rows) == 14
    assert memory.count(config) == 28
    elements = 8 * 32 * 64
    ranges = 8 * elements // 64  # of rows
    assert rows["8 bits, MLPs recomputed"]["kept_bytes"] == 2 * (elements + ranges)  # the first input is the caller's
    assert rows["4 bits, MLPs recomputed"]["kept_bytes"] == elements + 2 * ranges
    assert rows["8 bits, MLPs recomputed"]["gradient_error"] < rows["4 bits, MLPs recomputed"]["gradient_error"] < 0.3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor imports what PyTorch has deprecated
def test_compiled_rows_tell_what_graphs_keep(model, monkeypatch):
    """Of graphs that are divided as for Inductor, and run as they are: C++ takes long to compile. With Inductor, see
    tests/activations/test_compiled.py.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager_decomp_partition")
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=counter))
    config = memory.Config(
        model=model.replace(":build", ":one"), batch=8, bits=(4,), compiled=True, rounds=1, peaks=False
    )
    rows = {row["name"]: row for row in memory.run(config)}
    assert list(rows) == ["plain", "4 bits", "compiled", "compiled, 4 bits"]
    assert counter.frame_count == 2
    assert rows["compiled, 4 bits"]["kept_bytes"] < rows["compiled"]["kept_bytes"] / 4
    assert rows["compiled"]["gradient_error"] < 1e-5
    assert 0 < rows["compiled, 4 bits"]["gradient_error"] < 0.2


def test_a_model_without_blocks_cannot_be_checkpointed(model):
    with pytest.raises(ValueError, match="checkpointing needs a model with blocks"):
        memory.run(memory.Config(model=model.replace(":build", ":bare"), batch=8, baselines=True, rounds=1))


def test_the_command_says_what_it_is_at_and_has_the_rows_of_finished_rounds_when_it_is_ended(
    model, tmp_path, capsys, monkeypatch
):
    path, plain = tmp_path / "rows.json", memory.run

    def ended(config, on_event, on_round):
        def last(known):
            on_round(known)
            raise KeyboardInterrupt

        return plain(config, on_event, last)

    monkeypatch.setattr(memory, "run", ended)
    words = ("--model", model, "--batch", "8", "--only", "bf16, 8 bits", "--rounds", "2", "--no-peaks")
    assert main(["bench", "memory", *words, "--device", "cpu", "--json", str(path)]) == STOPPED
    out = capsys.readouterr().out
    for said in ("first steps of bf16, 8 bits", "round 1 of 2, steps × bf16: bf16 1.00; bf16, 8 bits "):
        assert said in " ".join(out.split())
    found = json.loads(path.read_text())
    assert found["config"]["device"] == "cpu"
    assert [(row["name"], len(row["ratios"])) for row in found["rows"]] == [("bf16", 1), ("bf16, 8 bits", 1)]


# ---- one model -------------------------------------------------------------------------------------------------------


def test_a_model_whose_output_needs_no_gradient_is_refused():
    with pytest.raises(ValueError, match="in which no tensor requires gradients"):
        ways.survey(nn.Flatten(), (torch.randn(2, 3),), ActivationPolicy())


def test_ratio():
    assert SavedBytes(8, 2).ratio == 4
    assert SavedBytes(0, 0).ratio == 1
    assert SavedBytes(8, 0).ratio == float("inf")


def test_what_cannot_be_divided_is_left_open_and_not_nan(model):
    """A gradient of zero has no relative error."""
    rows = memory.run(
        memory.Config(model=model.replace(":build", ":silent"), batch=2, bits=(8,), rounds=1, peaks=False)
    )
    assert [row["gradient_error"] for row in rows] == [None, None]
    json.dumps(rows, allow_nan=False)
