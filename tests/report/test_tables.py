"""Tables say what was measured, and a dash for what was not; records of earlier versions can still be drawn."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from narrowband.adapt import LayerPlan, Plan
from narrowband.cli.adapt import rows_of
from narrowband.report import tables
from narrowband.units import NOTHING

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
#: What records of the first version lack.
NEWER = ("relative_error", "reference_relative_error", "forward_relative_error", "backward_relative_error")


def drawn(table, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def cells(text, name):
    (line,) = (line for line in text.splitlines() if line.strip().startswith(name))
    return line.split()


DRAWN = [
    *((f"{name}.json", tables.ddp_table) for name in ("ddp-1gbit", "ddp-200mbit", "ddp-200mbit-plain-sgd")),
    *((f"{name}.json", tables.adapt_table) for name in ("adapt", "adapt-lowrank")),
    ("pipeline-100mbit.json", tables.pipeline_table),
    ("kernels.json", tables.kernels_table),
    ("demo/summary.json", tables.demo_table),
    *(
        (f"memory-{name}.json", lambda rows: tables.memory_table(rows, "title"))
        for name in ("deit-tiny", "gpt-jemalloc", "resnet18-jemalloc")
    ),
]


@pytest.mark.parametrize(("record", "table"), DRAWN, ids=[record for record, _ in DRAWN])
def test_what_was_recorded_can_be_drawn_with_and_without_newer_fields(record, table):
    rows = json.loads((RESULTS / record).read_text())["rows"]
    for known in (True, False):
        if not known:
            rows = [{key: value for key, value in row.items() if key not in NEWER} for row in rows]
        text = drawn(table(rows))
        assert "nan" not in text.lower()
        for row in rows:
            name = row.get("name") or row.get("codec") or row["loop"]
            assert name.partition("/")[0] in text
        assert "…" not in drawn(table(rows), width=80)  # names are folded before a number is cut


@pytest.mark.parametrize("width", [20, 40, 80])
def test_in_a_narrow_terminal_no_number_is_cut(width):
    rows = json.loads((RESULTS / "ddp-200mbit.json").read_text())["rows"]
    text = " ".join(drawn(tables.ddp_table(rows), width=width).split())
    assert "…" not in text
    for row in rows:
        assert row["link_bytes_per_step"] is None or tables.format_bytes(row["link_bytes_per_step"]) in text
    assert ("× compute 1.00, sent/step 0 B" in text) == (width < 80)  # a paragraph instead of a line


def test_steps_on_a_gpu_are_titled_by_the_card_and_how_ranks_reach_each_other():
    row = {"codec": "none", "nodes": 1, "rate": "none", "device": "Card 9", "backend": "nccl", "step_s": 1.0,
           "ratio_to_compute": 1.0, "sent_bytes_per_step": 0.0, "link_bytes_per_step": None}  # fmt: skip
    assert "1 rank, Card 9, nccl" in drawn(tables.ddp_table([row]))
    assert "2 ranks, Card 9, nccl" in drawn(tables.ddp_table([row | {"nodes": 2}]))


def test_relative_errors_stand_beside_the_bytes():
    rows = [
        {"codec": "none", "nodes": 2, "rate": "none", "step_s": 1.0, "ratio_to_compute": 1.0,
         "sent_bytes_per_step": 1e6, "link_bytes_per_step": None, "relative_error": None},
        {"codec": "qsgd:bits=4", "nodes": 2, "rate": "none", "step_s": 1.0, "ratio_to_compute": 1.0,
         "sent_bytes_per_step": 1e5, "link_bytes_per_step": None, "relative_error": 0.0261},
        {"codec": "fp16", "nodes": 2, "rate": "none", "step_s": 1.0, "ratio_to_compute": 1.0,
         "sent_bytes_per_step": 1e5, "link_bytes_per_step": None, "relative_error": 2.31e-8},
    ]  # fmt: skip
    text = drawn(tables.ddp_table(rows))
    assert cells(text, "codec")[-4:] == ["sent/step", "error", "on", "link"]
    assert cells(text, "none")[-2:] == [NOTHING, NOTHING]
    assert cells(text, "qsgd")[-2:] == ["0.026", NOTHING]
    assert cells(text, "fp16")[-2:] == ["2.3e-08", NOTHING]
    assert "‖p − C(p)‖² / ‖p‖²" in tables.RELATIVE_ERROR


def test_a_plan_shows_the_relative_error_of_each_layer_and_of_all():
    plan = Plan((LayerPlan("a", (8, 8), "qsgd:bits=4", 36, 3.0), LayerPlan("b", (8, 8), "none", 256, 0.0)), "mine", 2)
    text = drawn(tables.plan_table(*rows_of(plan, {"a": 6.0, "b": 8.0})))
    assert [cells(text, name)[-1] for name in ("a ", "b ", "all")] == ["0.25", "0", "0.09"]
    assert cells(text, "all")[-2] == "1.8"  # 512 bytes over 292
    looked_at_nothing = Plan((LayerPlan("a", (8, 8), "none", 0, None),), "mine", 2)
    text = drawn(tables.plan_table(*rows_of(looked_at_nothing, {"a": 0.0})))
    assert [cells(text, name)[-2:] for name in ("a ", "all")] == [[NOTHING, NOTHING]] * 2


def demo_row(codec, sent, loss=2.4):
    return {"codec": codec, "sent_bytes_per_step": sent, "times_less_traffic": 1e6 / sent if sent else None,
            "relative_error": None, "step_s": 0.1, "heldout_loss": loss}  # fmt: skip


def test_the_demo_says_plainly_that_one_rank_sends_nothing():
    text = drawn(tables.demo_table([demo_row("none", 0.0), demo_row("sign+ef", 0.0)]))
    assert "One rank: it sends nothing, with and without compression" in text
    assert cells(text, "sign+ef")[1:5] == ["0", "B", NOTHING, NOTHING]
    assert "nothing" not in drawn(tables.demo_table([demo_row("none", 1e6)]))


def test_what_diverged_is_said_to_have():
    text = drawn(tables.demo_table([demo_row("none", 1e6), demo_row("sign", 1e5, None), demo_row("x", 1e5, math.nan)]))
    assert text.count("diverged") == 2
    assert "nan" not in text


def test_predictions_beside_measurements_have_two_errors():
    row = {
        "codec": "qsgd:bits=4", "nodes": 2, "per_node": 1, "rate": "200mbit", "predicted_step_s": 0.15,
        "measured_step_s": 0.2, "error": -0.25, "predicted_compute_s": 0.05, "measured_compute_s": 0.1,
        "at_that_speed_step_s": 0.18, "at_that_speed_error": -0.1,
    }  # fmt: skip
    said = drawn(tables.foretold_table([row, row | dict.fromkeys(("measured_step_s", "error", "measured_compute_s"))]))
    assert re.search(r"150 ms +200 ms +-25.0% +-50.0% +-10.0%", said)
    assert re.search(r"150 ms +– +– +–", said)
    assert said.count("error") == 2
    assert "2 ranks, links of 200mbit" in said
    assert "2 machines of 4 ranks, links of 200mbit" in drawn(tables.foretold_table([row | {"per_node": 4}]))
    assert re.search(r"qsgd:bits=4 +150 ms .*-10.0%", drawn(tables.foretold_table([row]), width=80))


def test_verdicts_name_what_was_predicted_wrongly():
    sides = [
        {"codec": "none", "is_right": True},
        {"codec": "sign+ef", "is_right": False},
        {"codec": "x", "is_right": None},
    ]
    row = {
        "nodes": 2, "per_node": 1, "rate": "1gbit", "predicted_best": "sign+ef", "measured_best": "fp16",
        "slower_by": 0.25, "is_right": False, "sides": sides,
    }  # fmt: skip
    said = drawn(tables.verdicts_table([row, row | {"slower_by": 0.04, "is_right": True, "sides": sides[:1]}]))
    assert re.search(r"sign\+ef +fp16 +1 of 2 rightly; wrongly sign\+ef +2 +1gbit +25.0%, wrong", said)
    assert re.search(r"sign\+ef +fp16 +1 of 1 rightly +2 +1gbit +4.0%", said)
    assert re.search(r"rightly; wrongly sign\+ef +2 × 4 +1gbit", drawn(tables.verdicts_table([row | {"per_node": 4}])))


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_options_are_named_whole_however_narrow_the_terminal(width):
    name = "updates every 15, topk:density=0.0625,values=int2,mean=senders+ef"
    row = {
        "name": name, "collective": "all_gather", "step_s": 0.0424, "compute_s": 0.014, "codec_s": 0.002,
        "wire_s": 0.025, "latency_s": 0.0004, "sent_bytes_per_step": 1e6, "residual_bytes": 4e6,
        "loss": "+10.8% ± 5.8%",
    }  # fmt: skip
    said = drawn(tables.advice_table([row, row | {"name": "fp16"}], "predicted steps", width), width)
    assert "…" not in said
    head = next(line for line in said.splitlines() if " option " in line)
    names = "".join(line[: head.index("step") - 4] for line in said.splitlines())
    assert name.replace(" ", "") in names.replace(" ", "")
    assert all(figure in said for figure in ("42.4 ms", "1 MB", "+10.8% ± 5.8%"))
    wide = width >= 120
    assert ("25 ms" in said, "all_gather" in said) == (wide, wide)
    legend = tables.advice_legend(width)
    assert ("wire:" in legend, "--json" in legend) == (wide, not wide)


def test_where_there_is_a_gpu_the_table_of_memory_says_how_long_the_host_takes():
    rows = json.loads((RESULTS / "memory-deit-tiny.json").read_text())["rows"]
    assert "host" not in drawn(tables.memory_table(rows, "title"))
    rows = [{**row, "host_s": 0.0123} for row in rows]
    text = drawn(tables.memory_table(rows, "title"))
    assert "of the host" in text
    assert text.count("12.3 ms") == len(rows)
