from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from narrowband import lab
from narrowband.bench import ranks
from narrowband.bench.ddp import backend_of, run
from narrowband.bench.ddp_rows import NO_COMMUNICATION, Config
from narrowband.bench.models import MODELS
from narrowband.lab import LabConfig
from narrowband.planning import Option
from tests.forked import forking
from tests.gradients.training import FINGERPRINT

RAW = MODELS["gpt-tiny"].numel() * 4  # with two ranks a ring all-reduce sends 2·(2 − 1)/2 of it


def measured(**options):
    events = []
    config = Config(**{"nodes": 2, "model": "gpt-tiny", "rounds": 2, "steps": 2} | options)
    rows = run(config, events.append)
    assert [event["done"] for event in events] == list(range(1, events[-1]["of"] + 1))
    return {row["codec"]: row for row in rows}, rows


@pytest.fixture(scope="module")
def on_loopback():
    return measured(rate="none", codecs=("none", "qsgd:bits=4"), baselines=True)


def test_on_loopback_with_baselines(on_loopback):
    rows, ordered = on_loopback
    assert ordered[0]["codec"] == NO_COMMUNICATION
    assert rows[NO_COMMUNICATION]["ratio_to_compute"] == 1.0
    assert rows[NO_COMMUNICATION]["sent_bytes_per_step"] == 0
    assert rows["none"]["sent_bytes_per_step"] == RAW + FINGERPRINT
    assert rows["qsgd:bits=4"]["sent_bytes_per_step"] < RAW / 6
    for name in (NO_COMMUNICATION, "none", "qsgd:bits=4", "torch: DDP fp32", "torch: fp16 hook"):
        row = rows[name]
        assert (row["rate"], row["nodes"], row["step_s"]) == ("none", 2, statistics.median(row["round_step_s"]))
        assert row["link_bytes_per_step"] is None  # all ranks share one card
    assert rows["torch: DDP fp32"]["sent_bytes_per_step"] is None
    assert 0 < rows["qsgd:bits=4"]["relative_error"] < 0.1
    for name in (NO_COMMUNICATION, "none", "torch: DDP fp32"):
        assert rows[name]["relative_error"] is None
    every_compute = []
    for row in ordered[1:]:
        if "error" not in row:
            assert len(row["round_step_s"]) == len(row["round_compute_s"]) == 2
            ratios = [a / b for a, b in zip(row["round_step_s"], row["round_compute_s"], strict=True)]
            assert row["ratio_to_compute"] == pytest.approx(statistics.fmean(ratios))  # the median of two
            every_compute += row["round_compute_s"]
    assert sorted(every_compute) == sorted(rows[NO_COMMUNICATION]["round_step_s"])


def test_a_baseline_that_fails_is_a_row_and_not_the_end(on_loopback):
    rows, ordered = on_loopback
    bf16 = rows["torch: bf16 hook"]  # builds of PyTorch for CPUs alone have no such hook
    assert ("error" in bf16) == (bf16["step_s"] is None)
    if "error" not in bf16:
        pytest.skip(f"no baseline fails with PyTorch {torch.__version__}")
    assert ordered[-1]["codec"] == "torch: PowerSGD hook, rank 4"
    assert ordered[-1]["step_s"] > 0
    assert "one bucket" in ordered[-1]["note"]


AS_A_MODULE = """
import runpy, sys
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.lab
def test_the_kernel_counts_what_the_library_says_that_it_sent(monkeypatch):
    """With ranks that are forked: they import nothing anew."""
    with forking() as forked, monkeypatch.context() as patch:
        patch.setattr(ranks, "run", lambda place, words, **how: lab.run(place, forked(AS_A_MODULE, *words[2:]), **how))
        rows, _ = measured(rate="1gbit", codecs=("none", "fp16"), rounds=1)
    for name in ("none", "fp16"):
        assert rows[name]["link_bytes_per_step"] == pytest.approx(rows[name]["sent_bytes_per_step"], rel=0.05)
    assert rows[NO_COMMUNICATION]["link_bytes_per_step"] < 0.02 * RAW


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0}, "nodes=0"),
        ({"model": "gpt-5"}, "unknown model 'gpt-5'; there are: gpt-13m"),
        ({"codecs": ("topk:densty=1",)}, "did you mean 'density'"),
        ({"codecs": ()}, "nothing to measure"),
        ({"rate": "fast"}, "rate 'fast' cannot be read"),
        ({"rate": "none", "delay": "5ms"}, "need an emulated link"),
        ({"sharded": True}, "is not a pair GRADIENTS/PARAMETERS of specs"),
        ({"sharded": True, "per_node": 2}, "leave out per_node, baselines"),
        ({"sharded": True, "codecs": ("none/qsgd:bit=8",)}, "did you mean 'bits'"),
        ({"device": "gpu"}, "device='gpu' is none of cpu, cuda"),
        ({"device": "cuda", "rate": "1gbit"}, "links cannot be emulated between GPUs; leave out rate"),
        ({"device": "cuda", "delay": "5ms"}, "links cannot be emulated between GPUs"),
        (
            {"device": "cuda", "sharded": True, "codecs": ("none/none",)},
            "sharded and per_node can be measured on the CPU",
        ),
        ({"device": "cuda", "per_node": 2}, "sharded and per_node can be measured on the CPU only"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_rank_starts(arguments, message):
    with pytest.raises(ValueError, match=message):
        Config(**arguments)


BEHIND_LINKS = pytest.param("1gbit", marks=[pytest.mark.lab, pytest.mark.thorough])


@pytest.mark.parametrize("rate", ["none", BEHIND_LINKS])
def test_one_model_sharded_among_all_ranks_has_rows_of_pairs(rate):
    """What such a model sends, tests/sharding compares with the kernel's counts."""
    pair = "qsgd:bits=8/uniform:bits=8"
    config = Config(nodes=2, rate=rate, sharded=True, model="gpt-tiny", codecs=("none/none", pair), rounds=1, steps=2)
    rows = {row["codec"]: row for row in run(config)}
    assert list(rows) == [NO_COMMUNICATION, "torch: FSDP2", "none/none", pair]
    assert not any("error" in row for row in rows.values())
    assert 0 < rows[pair]["sent_bytes_per_step"] < rows["none/none"]["sent_bytes_per_step"] / 3.5
    if rate == "none":
        return
    assert rows[pair]["link_bytes_per_step"] == pytest.approx(rows[pair]["sent_bytes_per_step"], rel=0.1)
    assert rows[pair]["link_bytes_per_step"] < rows["torch: FSDP2"]["link_bytes_per_step"] / 4


def test_several_ranks_per_machine_have_rows_for_each_way_to_send():
    config = Config(
        nodes=2, per_node=2, rate="none", model="gpt-tiny", codecs=("topk:density=0.05+ef",), rounds=1, steps=1
    )
    rows = {row["codec"]: row for row in run(config)}
    flat, levels, sharded = (rows[f"topk:density=0.05+ef, {name}"] for name in ("flat", "levels", "fsdp2"))
    assert list(rows)[:4] == [
        NO_COMMUNICATION, "torch: DDP fp32, flat", "fsdp2, nothing between", "torch: HSDP",
    ]  # fmt: skip
    assert not any("error" in row for row in rows.values())
    assert all(row["per_node"] == 2 for row in rows.values())
    # A payload to each of three others; half a payload to one.
    for row in (levels, sharded):
        assert row["sent_bytes_per_step"] < 0.25 * flat["sent_bytes_per_step"] + 2000


def test_options_of_a_plan_are_rows_and_rounds_are_measured_whole():
    """Of the micro-batches of a step only the last one is averaged."""
    config = Config(nodes=2, rate="none", model="gpt-tiny", codecs=(), plain=True, rounds=1, steps=2)
    options = [Option(None), Option("none"), Option("none", every=3), Option("uniform:bits=2+ef", every=15)]
    rows = {row["codec"]: row for row in run(replace(config, optimizer="adamw", accumulate=3), options=options)}
    assert list(rows) == [NO_COMMUNICATION, *(option.name for option in options)]
    assert not any("error" in row for row in rows.values())
    gradients, updates = (rows[name]["sent_bytes_per_step"] for name in ("none", "updates every 3, none"))
    assert gradients == pytest.approx(4 * MODELS["gpt-tiny"].numel(), rel=0.01)
    assert updates == pytest.approx(gradients / 3, abs=8)


def test_links_are_emulated_unless_ranks_are_on_gpus(monkeypatch):
    assert Config().link == "200mbit"
    assert Config().place() == LabConfig(nodes=4, rate="200mbit")
    assert Config(rate="none").link == "none"
    assert Config(rate="200mbit/s").place() == LabConfig(nodes=4, rate="200mbit")
    assert Config(rate="20mbit/100mbit", per_node=2).place() == LabConfig(4, 2, rate="20mbit", down="100mbit")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert Config(device="cuda").link == "none"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match="device=cuda: PyTorch finds no CUDA device here"):
        Config(device="cuda")


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "has_nccl", "backend"),
    [("cpu", 1, 0, True, "gloo"), ("cpu", 1, 1, True, "gloo"), ("cuda", 2, 1, True, "gloo"),
     ("cuda", 1, 1, False, "gloo"), ("cuda", 1, 1, True, "nccl"), ("cuda", 8, 8, True, "nccl")],
)  # fmt: skip
def test_nccl_takes_ranks_that_have_a_gpu_of_their_own(device, ranks, gpus, has_nccl, backend):
    assert backend_of(device, ranks, gpus, has_nccl=has_nccl) == backend


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bfloat16"])
def test_one_rank_encodes_and_decodes_and_sends_nothing(amp):
    config = Config(
        nodes=1, rate="none", model="gpt-tiny", codecs=("none", "qsgd:bits=4", "dgc:density=0.01"), rounds=2, steps=2,
        amp=amp,
    )  # fmt: skip
    rows = {row["codec"]: row for row in run(config)}
    assert list(rows) == [NO_COMMUNICATION, *config.codecs]
    assert not any("error" in row for row in rows.values())
    assert "DDP without a hook" in rows[NO_COMMUNICATION]["note"]
    assert {row["sent_bytes_per_step"] for row in rows.values()} == {0}
    assert 0 < rows["qsgd:bits=4"]["relative_error"] < 0.1  # so it was encoded and decoded
    assert rows["qsgd:bits=4"]["encode_s"] > 0
    assert rows["qsgd:bits=4"]["decode_s"] > 0
    assert all(row["ratio_to_compute"] > 0 for row in rows.values())
