"""Rows, figures and claims of CSSGD; and, where links can be emulated, a quick run of all of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from fractions import Fraction

import pytest
import torch

from narrowband.coded import Assignment
from narrowband.lab import LabConfig, requirements
from reproduce import cssgd
from reproduce.cssgd import Options, claims, main, measure, rows_of, sheets
from reproduce.cssgd_ranks import Problem, Row, equation_19, images_of, stated_bytes
from tests.coded.simulation import averages_of
from tests.reproduce.synthetic import write_all

MISSING = requirements(LabConfig(nodes=1))

CODED = [(n, r) for n in range(4, 9) for r in range(1, 5) if r < n]


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "r"), CODED)
def test_equation_19_is_what_groups_exchange_over_what_nodes_send_without_coding(n, r):
    coded = Fraction(math.comb(n, r + 1) * (r + 1), r)  # equation 28
    normal = (n - 1) * math.comb(n, r)  # equation 30
    assert equation_19(n, r) == pytest.approx(float(coded / normal), rel=1e-12)


@pytest.mark.parametrize(("n", "r"), CODED)
def test_stated_bytes_are_those_that_the_library_hands_over_and_headers_of_datagrams(n, r):
    numel = 2_520
    nbytes = averages_of(Assignment(n, r), [numel])[1][0].nbytes
    datagrams = math.ceil(nbytes / (1500 - 20 - 8 - 32))
    assert stated_bytes(n, r, numel) == n * (nbytes + datagrams * (14 + 20 + 8 + 32))


def test_mini_batches_are_all_of_an_epoch_and_the_next_has_another_order(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_all(tmp_path, images=60)
    problem = Problem("dnn", images_of("dnn", tmp_path), batch=20, seed=3)
    epochs = [[problem.samples(step) for step in range(first, first + 3)] for first in (0, 3)]
    for epoch in epochs:
        assert torch.cat(epoch).sort().values.tolist() == list(range(60))
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))
    assert torch.equal(problem.samples(1), epochs[0][1]), "a step's samples do not depend on those before"
    model = problem.make()
    right = [problem.right(model, part) for part in problem.tested.split(4)]
    assert sum(right) == problem.right(model, problem.tested)


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_are_what_the_paper_compares_and_what_it_leaves_out():
    rows = rows_of(Options())
    for task in ("dnn", "cnn"):
        trained = [row for row in rows if (row.kind, row.task) == ("train", task)]
        methods = [(row.method, row.redundancy) for row in trained if row.method == "coded"]
        assert methods == [("coded", 2), ("coded", 3)]
        others = [row.method for row in trained if row.method != "coded"]
        assert others == ["unicast", "multicast", "asgd", "chosen", "all-reduce", "alone"]
        figure = [(row.redundancy, row.group) for row in rows if (row.kind, row.task) == ("batch", task)]
        assert figure == [(1, 1), *((r, 8) for r in range(2, 8)), (2, 2), (4, 4)]
    assert [(row.nodes, row.redundancy) for row in rows if row.kind == "bytes"] == CODED
    assert len({json.dumps(asdict(row)) for row in rows}) == len(rows)
    assert {row.ranks - row.nodes for row in rows if row.method == "asgd"} == {1}, "a server beside the workers"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tasks": ("rnn",)}, "no 'rnn'; there are: dnn, cnn"),
        ({"kinds": ("time",)}, "no 'time'; there are: bytes, choice, train, batch"),
        ({"nodes": 2}, "nodes=2 must be at least 3"),
        ({"slow": "fast"}, "rate 'fast' cannot be read"),
        ({"limit_s": 0.0}, "limit_s=0.0 must be above 0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Options(**given)


def test_a_mini_batch_that_nodes_cannot_share_is_refused():
    with pytest.raises(ValueError, match="1024 samples cannot be shared evenly by 5 nodes"):
        rows_of(Options(nodes=5))


# ---- claims ----------------------------------------------------------------------------------------------------------

SECONDS = {
    "SSGD unicast": 30.0, "SSGD multicast": 30.0, "ASGD": 20.0, "CSSGD, r = 2": 40.0, "CSSGD, r = 3": 11.0,
    "CSSGD, chosen": 10.0, "all-reduce": 15.0, "alone": 5.0,
}  # fmt: skip
NBYTES = {"SSGD multicast": 400, "CSSGD, r = 2": 390, "CSSGD, r = 3": 130}


def trained(seconds=SECONDS, nbytes=NBYTES, task="dnn"):
    rows = [row for row in rows_of(Options()) if (row.kind, row.task) == ("train", task)]
    found = []
    for row in rows:
        took = seconds[row.name]
        last = [40, took or 240.0, nbytes.get(row.name, 500), 95.0 if took else 50.0]
        choice = {"redundancy": 3, "group": 4} if row.method == "chosen" else None
        told = {"parameters": 9, "curve": [last], "reached": last if took else None, "step_s": 0.1, "choice": choice}
        found.append(asdict(row) | told | {"commit": "abc"})
    return found


def asked(redundancy_when_fast=1, compute_s=0.1, communicate_s=1.0):
    found = []
    for row in rows_of(Options(tasks=("dnn",), kinds=("choice",))):
        r = redundancy_when_fast if row.rate == "10gbit" else 3
        said = {
            "redundancy": r, "group": r, "compute_s": compute_s, "communicate_s": communicate_s, "all_reduce_s": 1.5,
            "candidates": [{"redundancy": r, "group": r, "load": 1.0, "seconds": 0.5}], "verdict": "…",
        }  # fmt: skip
        other = said | {"redundancy": 2, "group": 2, "candidates": [{"redundancy": 2, "group": 2, "seconds": 0.6}]}
        found.append(asdict(row) | {"choices": {"multicast": other, "broadcast": said}, "commit": "abc"})
    return found


def timed(best=3, off=1.0, compute_s=0.1, communicate_s=1.0):
    """Batches that take what T(r) says, but for the best; ``off``: what one scheme takes over that."""
    found = []
    for row in rows_of(Options(tasks=("dnn",), kinds=("batch",))):
        load = Assignment(8, row.redundancy, row.group).load()
        seconds = row.redundancy * compute_s + communicate_s * load
        if (row.redundancy, row.group) == (2, 2):
            seconds *= off
        if (row.redundancy, row.group) == (best, 8):
            seconds = 0.01
        found.append(asdict(row) | {"round_step_s": [seconds], "step_s": seconds, "sent_bytes": 1000, "commit": "abc"})
    return found


def counted(off=0.01):
    found = []
    for row in rows_of(Options(kinds=("bytes",))):
        stated = stated_bytes(row.nodes, row.redundancy)
        share = off if (row.nodes, row.redundancy) == (6, 2) else 0.0
        told = {
            "link_bytes": stated * (1 + share),
            "stated_bytes": stated,
            "normal_bytes": 9e6,
            "repair_datagrams": 0.0,
        }
        found.append(asdict(row) | told | {"commit": "abc"})
    return found


def verdict(results, words):
    (claim,) = [claim for claim in claims(results) if words in claim.text]
    return claim


@pytest.mark.parametrize(
    ("changed", "sooner", "as_much"),
    [
        ({}, True, True),
        ({"CSSGD, chosen": 16.0}, True, False),  # 46.7 % less than SSGD
        ({"CSSGD, chosen": 14.0, "SSGD multicast": 31.0}, True, True),  # 54.8 % and 30 %
        ({"CSSGD, chosen": 21.0}, False, False),
        ({"CSSGD, chosen": None}, False, False),
        ({"SSGD multicast": None, "ASGD": None}, True, True),
        ({"all-reduce": 1.0}, True, True),
    ],
)
def test_the_chosen_r_is_compared_with_every_baseline_of_the_paper(changed, sooner, as_much):
    results = trained(SECONDS | changed)
    claim = verdict(results, "sooner at the target")
    assert claim.held is sooner
    assert "beside them: all-reduce" in claim.figures, "how it stands against an all-reduce is said"
    assert verdict(results, "less time than SSGD by multicast").held is as_much


@pytest.mark.parametrize(("changed", "held"), [({}, True), ({"CSSGD, r = 2": 600}, False)])
def test_coded_rows_send_less_than_ssgd_by_multicast_or_not(changed, held):
    assert verdict(trained(nbytes=NBYTES | changed), "sends less until then").held is held


@pytest.mark.parametrize(("r", "held"), [(1, True), (2, False)])
def test_what_the_tool_says_of_a_fast_link_is_said_of_the_transport_that_it_predicts_to_be_faster(r, held):
    claim = verdict(asked(r), "on a fast link the tool itself says r = 1")
    assert claim.held is held
    assert claim.figures.startswith("10gbit")


@pytest.mark.parametrize(("best", "held"), [(3, True), (2, False)])
def test_the_shortest_batch_is_looked_for_among_the_papers_schemes(best, held):
    assert verdict(timed(best), "that with r = 3 is shortest").held is held


@pytest.mark.parametrize(("off", "held"), [(1.2, True), (1.3, False), (0.7, False)])
def test_batches_take_what_is_predicted_or_not(off, held):
    claim = verdict(timed(best=None, off=off) + asked(), "T(r) =")
    assert claim.held is held
    assert "r = 2, g = 2" in claim.figures


@pytest.mark.parametrize(("off", "held"), [(0.049, True), (0.051, False), (-0.051, False)])
def test_bytes_are_judged_by_the_worst(off, held):
    claim = verdict(counted(off), "equation 19")
    assert claim.held is held
    assert "n = 6, r = 2" in claim.figures


def test_what_was_not_measured_is_not_judged():
    some = [row for row in trained() if row["name"] != "ASGD"]
    undecided = [claim for claim in claims(some + counted()[1:]) if claim.held is None]
    assert len(undecided) == 6
    assert all("needs" in claim.figures for claim in undecided)


def test_tables_have_all_rows_and_the_papers_figures():
    found = {sheet.title.partition(",")[0]: sheet for sheet in sheets(trained() + asked() + timed(None) + counted())}
    table = {row[0]: row for row in found["MNIST"].rows}
    assert list(found) == ["MNIST", "What the tool measures and chooses", "Bytes of an exchange"]
    assert set(table) >= {"r = 7, g = 8"}, "the later of two tables of one task"
    everything = [cell for sheet in sheets(trained()) for row in sheet.rows for cell in row]
    assert {"53.97 %", "26.89 %", "r = 3, g = 4", "67 %"} <= set(everything)
    page = "\n".join(line for sheet in sheets(trained()) for line in sheet.markdown())
    assert "| CSSGD, chosen | r = 3, g = 4 | 40 |" in page


# ---- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_where_links_cannot_be_emulated_it_says_what_is_missing_and_what_works_without(cached, monkeypatch, capsys):
    monkeypatch.setattr(cssgd, "requirements", lambda _: ["The kernel has no veth."])
    assert main(["--quick", "--kinds", "bytes", "--output", str(cached)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "The kernel has no veth." in said
    assert "--recorded" in said


def test_nothing_recorded_is_said(cached, capsys):
    assert main(["--quick", "--kinds", "bytes", "--recorded", "--output", str(cached)]) == 2
    assert "leave --recorded out" in capsys.readouterr().err


def test_rows_that_are_there_are_taken_and_each_is_kept_when_it_is_done(tmp_path, monkeypatch):
    rows = [
        Row("bytes", "bytes", f"r = {r}", nodes, "1gbit", batch=nodes, redundancy=r) for nodes, r in ((4, 2), (5, 2))
    ]
    places = [tmp_path / f"{at}.json" for at in range(2)]
    named = {"kind": "bytes", "task": "bytes", "name": "r = 2"}
    places[0].write_text(json.dumps({**named, "kept": True}))
    started = []

    def interrupted(module, config, where, note):
        started.append((where.nodes, where.rate, [number for number, _ in config["rows"]]))
        note({"event": "row", "row": 1, "result": {**named, "kept": False}})
        raise KeyboardInterrupt

    monkeypatch.setattr(cssgd, "run_ranks", interrupted)
    monkeypatch.setattr(cssgd, "requirements", lambda _: [])
    with pytest.raises(KeyboardInterrupt):
        measure(rows, places, on_event=lambda _: None)
    assert started == [(5, "1gbit", [1])]
    assert [place["kept"] for place in measure(rows, places, on_event=lambda _: None)] == [True, False]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A quick run, of one task."""
    if MISSING:
        pytest.skip(" ".join(MISSING))
    folder = tmp_path_factory.mktemp("cssgd")
    write_all(folder / "data")
    words = ["--quick", "--tasks", "dnn", "--data-dir", str(folder / "data"), "--output", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert main(words) == 0
        yield folder, words


def test_a_quick_run_has_all_rows_and_synchronous_methods_take_the_same_steps(finished):
    folder, _ = finished
    results = json.loads((folder / "out/summary.json").read_text())["rows"]
    curves = {row["name"]: row["curve"] for row in results if row["kind"] == "train"}
    # A batch of 48, a step at a time, to five; four of 120 images may fall on another side by rounding.
    for name, curve in curves.items():
        assert [mark[0] for mark in curve] == [1, 2, 3, 4, 5]
        assert [mark[1] for mark in curve] == sorted(mark[1] for mark in curve)
        if name != "ASGD":
            assert [mark[3] for mark in curve] == pytest.approx([mark[3] for mark in curves["alone"]], abs=3.4)
    gradient = 4 * 235_146
    sent = {name: curve[-1][2] / 5 / gradient for name, curve in curves.items()}
    # All ranks' bytes of a step in gradients: 3 ranks, headers, and what the protocols say to each other.
    for name, times in {
        "SSGD unicast": 6,
        "SSGD multicast": 3,
        "ASGD": 6,
        "CSSGD, r = 2": 1.5,
        "all-reduce": 4,
    }.items():
        assert times * 0.97 < sent[name] < times * 1.3, name
    assert sent["alone"] < 0.1
    for row in results:
        if row["kind"] == "bytes":
            assert row["link_bytes"] >= 0.99 * row["stated_bytes"]


def test_a_finished_run_is_taken_as_it_is_and_makes_a_page(finished, monkeypatch):
    folder, words = finished
    with monkeypatch.context() as patched:
        patched.setattr(cssgd, "run_ranks", lambda *_: pytest.fail("measured again"))
        assert main([*words, "--recorded", "--markdown", str(folder / "page.md")]) == 0
    page = (folder / "page.md").read_text()
    assert "Li, Xie, Mao et al. 2021, CSSGD" in page
    for words in ("| SSGD multicast |", "| r = 2, g = 3 |", "| n = 4, r = 3 |", "reproduce.cssgd --quick"):
        assert words in page
