"""Rows and figures of CSSGD; and, where links can be emulated, a quick run of all of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from fractions import Fraction

import pytest
import torch

from narrowband.coded import Assignment
from narrowband.report.record import machine
from reproduce import cssgd
from reproduce.baselines import Flat
from reproduce.cssgd import Options, main, measure, rows_of
from reproduce.cssgd_problem import Problem, Row
from reproduce.cssgd_ranks import equation_19, stated_bytes
from reproduce.cssgd_serial import best, steps_to_target
from reproduce.data import mnist
from tests.coded.simulation import averages_of
from tests.lab.processes import lacking
from tests.reproduce.synthetic import write_all

CODED = [(n, r) for n in range(2, 11) for r in range(1, 5) if r < n]
SEEDS = (0, 1, 2)


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
    problem = Problem(Row("steps", "dnn", "", 4, "", seed=3, batch=20), tmp_path)
    epochs = [[problem.samples(step) for step in range(first, first + 3)] for first in (0, 3)]
    for epoch in epochs:
        assert torch.cat(epoch).sort().values.tolist() == list(range(60))
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))
    assert torch.equal(problem.samples(1), epochs[0][1]), "a step's samples do not depend on those before"
    model = problem.make()
    right = [problem.right(model, part) for part in problem.tested.split(4)]
    assert sum(right) == problem.right(model, problem.tested)


def test_fewer_classes_are_the_first_ones_in_training_and_in_tests(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_all(tmp_path, images=240)
    row = Row("steps", "dnn", "", 3, "", batch=6, classes=3)
    problem, everything = Problem(row, tmp_path), Problem(Row("steps", "dnn", "", 3, "", batch=6), tmp_path)
    digits = mnist(tmp_path)
    assert set(digits.train_y[problem.trained].tolist()) == {0, 1, 2}
    assert problem.trained.numel() == int((digits.train_y < 3).sum()) < everything.trained.numel() == 240
    assert problem.tested.tolist() == (digits.test_y < 3).nonzero().flatten().tolist()
    seen = torch.cat([problem.samples(step) for step in range(problem.trained.numel() // 6)])
    assert set(seen.tolist()) <= set(problem.trained.tolist())


# ---- rows ------------------------------------------------------------------------------------------------------------


def of_section(section, task="dnn", **options):
    return [row for row in rows_of(Options(**options)) if (row.section or row.kind, row.task) == (section, task)]


def test_rows_are_what_the_paper_compares_and_what_it_leaves_out():
    rows = rows_of(Options())
    for task in ("dnn", "cnn"):
        trained = [row for row in of_section("train", task) if row.kind == "train"]
        methods = [(row.method, row.redundancy) for row in trained if row.method == "coded"]
        assert methods == [("coded", 2), ("coded", 3)]
        others = [row.method for row in trained if row.method != "coded"]
        assert others == ["unicast", "multicast", "asgd", "asgd", "asgd", "chosen", "all-reduce", "alone"]
        assert [row.seed for row in trained if row.method == "asgd"] == list(SEEDS)
        figure = [(row.redundancy, row.group) for row in of_section("batch", task)]
        assert figure == [(1, 1), *((r, 8) for r in range(2, 8)), (2, 2), (4, 4)]
    assert [(row.nodes, row.redundancy) for row in rows[: len(CODED)]] == CODED, "bytes come first"
    assert len({json.dumps(asdict(row)) for row in rows}) == len(rows)
    assert {row.ranks - row.nodes for row in rows if row.method == "asgd" and row.rate} == {1}, "a server beside"
    assert {row.ranks for row in rows if not row.rate} == {1}


def test_n_nodes_train_n_classes_with_as_many_samples_per_node():
    for task, share, of_ten in (("dnn", 256, 90.0), ("cnn", 32, 35.0)):
        timed = of_section("nodes", task)
        assert list(dict.fromkeys(row.nodes for row in timed)) == list(range(2, 11))
        assert {(row.batch / row.nodes, row.classes - row.nodes) for row in timed} == {(share, 0)}
        stepped = of_section("steps", task)
        assert {(row.nodes, row.method, row.seed) for row in stepped} == {
            (n, method, seed) for n in range(2, 11) for method in ("alone", "asgd") for seed in SEEDS
        }
        targets = {row.nodes: row.target for row in stepped}
        assert targets[10] == of_ten
        for n, target in targets.items():
            above = (target / 100 - 1 / n) / (1 - 1 / n)  # of what is above chance
            assert above == pytest.approx((of_ten / 100 - 0.1) / 0.9, abs=1e-4)
        rates = {row.nodes: row.lr for row in stepped if row.method == "asgd"}
        assert rates == {n: pytest.approx(rates[4] * min(1, 4 / n)) for n in range(2, 11)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tasks": ("rnn",)}, "no 'rnn'; there are: dnn, cnn"),
        ({"sections": ("time",)}, "no 'time'; there are: bytes, nodes, steps, shares, best, choice, train, batch"),
        ({"node_counts": (4, 11)}, r"node_counts=11 is not in \[2, 10\]"),
        ({"seeds": ()}, "seeds are empty"),
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


# ---- in one process --------------------------------------------------------------------------------------------------


@pytest.fixture
def digits(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_all(tmp_path, images=96)
    return tmp_path


def gradient_at(problem, weights, samples):
    model = problem.make()
    flat = Flat(model)
    flat.weights.copy_(weights)
    problem.backward(model, samples)
    return flat.gradient


@pytest.mark.parametrize(("method", "nodes"), [("alone", 3), ("asgd", 3), ("asgd", 1)])
def test_workers_in_turn_compute_with_parameters_as_old_as_there_are_others(digits, method, nodes):
    row = Row("steps", "dnn", "", nodes, "", seed=1, batch=24, method=method, lr=0.2, target=101.0, steps=4)
    problem, seen = Problem(row, digits), []
    right = problem.right

    def looked_at(model, tested):
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return right(model, tested)

    problem.right = looked_at
    found = steps_to_target(row, problem, lambda **_: None)
    assert [mark[0] for mark in found["curve"]] == [1, 2, 3, 4]
    assert found["reached"] is None
    torch.manual_seed(1)
    history, again = [Flat(problem.make()).weights], Problem(row, digits)
    for step in range(4):
        for worker, share in enumerate(again.samples(step).view(nodes if method == "asgd" else 1, -1)):
            update = step * nodes + worker if method == "asgd" else step
            used = history[max(0, update + 1 - nodes)] if method == "asgd" else history[-1]
            history.append(history[-1] - 0.2 * gradient_at(again, used, share))
        torch.testing.assert_close(seen[step], history[-1])


def test_training_ends_at_the_target(digits):
    row = Row("steps", "dnn", "", 2, "", batch=24, method="alone", lr=0.1, target=20.0, every=2, steps=100)
    found = steps_to_target(row, Problem(row, digits), lambda **_: None)
    *before, last = found["curve"]
    assert found["reached"] == last[0] < 100
    assert last[1] >= 20.0
    assert all(accuracy < 20.0 for _, accuracy in before)


def test_the_kept_weights_are_those_with_the_least_loss(digits):
    row = Row("best", "dnn", "", 1, "", batch=24, method="alone", lr=1.0, every=2, steps=24)
    found = best(row, Problem(row, digits), lambda **_: None)
    losses, accuracies = [mark[1] for mark in found["curve"]], [mark[2] for mark in found["curve"]]
    assert sorted(losses, reverse=True) != losses, "or there is nothing to be learnt here"
    for at, mark in enumerate(found["curve"]):
        assert mark[0] == 2 * (at + 1)
        assert mark[3] == accuracies[losses.index(min(losses[: at + 1]))]
    assert found["step_s"] > 0
    assert found["whole_s"] > 0


# ---- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_where_links_cannot_be_emulated_it_says_what_is_missing_and_what_works_without(cached, monkeypatch, capsys):
    monkeypatch.setattr(cssgd, "requirements", lambda _: ["The kernel has no veth."])
    assert main(["--quick", "--sections", "bytes", "--output", str(cached)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "The kernel has no veth." in said
    assert "--recorded" in said


def test_nothing_recorded_is_said(cached, capsys):
    assert main(["--quick", "--sections", "bytes", "--recorded", "--output", str(cached)]) == 2
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
    if missing := lacking():
        pytest.skip(" ".join(missing))
    folder = tmp_path_factory.mktemp("cssgd")
    write_all(folder / "data")
    words = ["--quick", "--tasks", "dnn", "--data-dir", str(folder / "data"), "--output", str(folder / "out")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert main(words) == 0
        yield folder, words


@pytest.mark.thorough
def test_a_quick_run_has_all_rows_and_synchronous_methods_take_the_same_steps(finished):
    folder, _ = finished
    summary = json.loads((folder / "out/summary.json").read_text())
    assert summary["cpus"] == [machine()["cpu"]]
    results = summary["rows"]
    curves = {row["name"]: row["curve"] for row in results if row["kind"] == "train"}
    in_process = {row["name"]: row["curve"] for row in results if row["kind"] == "steps" and row["section"] == "train"}
    assert [mark[1] for mark in in_process["alone"]] == pytest.approx([m[3] for m in curves["alone"]], abs=3.4)
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
    nodes = {row["name"]: row["sent_bytes"] / gradient for row in results if row["section"] == "nodes"}
    for name, times in {"SSGD multicast": 3, "ASGD": 6, "all-reduce": 4}.items():
        assert times * 0.97 < nodes[name] < times * 1.3, name
    shares = [row["sent_bytes"] for row in results if row["section"] == "shares"]
    assert shares[1::2] == pytest.approx(shares[::2], rel=0.1), "uneven shares send as much as equal ones"
    for row in results:
        if row["kind"] == "bytes":
            assert row["link_bytes"] >= 0.99 * row["stated_bytes"]


@pytest.mark.thorough
def test_a_finished_run_is_taken_as_it_is_and_makes_a_page(finished, monkeypatch):
    folder, words = finished
    with monkeypatch.context() as patched:
        patched.setattr(cssgd, "run_ranks", lambda *_: pytest.fail("measured again"))
        assert main([*words, "--recorded", "--markdown", str(folder / "page.md")]) == 0
    page = (folder / "page.md").read_text()
    assert "Li, Xie, Mao et al. 2021, CSSGD" in page
    for words in ("| SSGD multicast |", "| r = 2, g = 3 |", "| r = 2 |", "reproduce.cssgd --quick"):
        assert words in page
