"""The claims of CSSGD, judged by rows that are made up, and the page that says what was found."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from narrowband.coded import Assignment
from reproduce import cssgd_page
from reproduce.cssgd_claims import claims
from reproduce.cssgd_found import counts_of, methods_of
from reproduce.cssgd_page import sheets
from reproduce.cssgd_ranks import stated_bytes
from tests.reproduce.test_cssgd import of_section

SECONDS = {
    "SSGD unicast": 30.0, "SSGD multicast": 30.0, "ASGD": 20.0, "CSSGD, r = 2": 40.0, "CSSGD, r = 3": 11.0,
    "CSSGD, chosen": 10.0, "all-reduce": 15.0, "alone": 5.0,
}  # fmt: skip
NBYTES = {"SSGD multicast": 400, "CSSGD, r = 2": 390, "CSSGD, r = 3": 130}


def trained(seconds=SECONDS, nbytes=NBYTES, task="dnn", steps=(40, 44, 48), asgd=(1.0, 1.1, 1.2), steady=True):
    """Rows that were trained behind links, and steps of other seeds: 40 of the first. A step takes as long in the first
    half of a run as in the second, unless it is not steady.
    """
    found = []
    for at, row in enumerate(of_section("train", task)):
        half_time = 0.5 if steady else (0.2, 0.8)[at % 2]
        if row.kind == "steps":
            found.append(asdict(row) | {"curve": [], "reached": steps[row.seed], "commit": "abc"})
            continue
        took = seconds[row.name]
        took = took and took * (asgd[row.seed] if row.method == "asgd" else 1.0)
        last = [40, took or 240.0, nbytes.get(row.name, 500), 95.0 if took else 50.0]
        half = [20, (took or 240.0) * half_time, nbytes.get(row.name, 500) // 2, 45.0]
        choice = {"redundancy": 3, "group": 4} if row.method == "chosen" else None
        told = {
            "parameters": 9,
            "curve": [half, last],
            "reached": last if took else None,
            "step_s": 0.1,
            "choice": choice,
        }
        found.append(asdict(row) | told | {"commit": "abc"})
    return found


def asked(redundancy_when_fast=1, compute_s=0.1, communicate_s=1.0):
    found = []
    for row in of_section("choice"):
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
    for row in of_section("batch"):
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
    for row in of_section("bytes", "bytes"):
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
    claim = verdict(results, "CSSGD at the r that the tool chooses is sooner at the target")
    assert claim.held is sooner
    assert "beside them, ± of steps: all-reduce" in claim.figures, "how it stands against an all-reduce is said"
    assert verdict(results, "CSSGD at that r takes at least").held is as_much


@pytest.mark.parametrize(("changed", "held"), [({}, True), ({"CSSGD, r = 2": 600}, False)])
def test_coded_rows_send_less_than_ssgd_by_multicast_or_not(changed, held):
    assert verdict(trained(nbytes=NBYTES | changed), "sends less until then").held is held


@pytest.mark.parametrize(("r", "held"), [(1, True), (2, False)])
def test_what_the_tool_says_of_a_fast_link_is_said_of_the_transport_that_it_predicts_to_be_faster(r, held):
    claim = verdict(asked(r), "on a fast link the tool itself says r = 1")
    assert claim.held is held
    assert claim.figures.startswith("10gbit")
    assert claim.figures.endswith(f"the tool chooses the faster, broadcast, and so r = {r}")


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
    assert len(undecided) == 11
    assert {claim.verdict() for claim in undecided} == {"not tested"}
    assert all("needs" in claim.figures for claim in undecided)


def test_times_of_other_seeds_are_their_steps_times_the_seconds_of_a_step_and_asgds_are_its_own():
    methods = methods_of(trained(), "dnn")
    assert methods["CSSGD, chosen"].times == pytest.approx({0: 10.0, 1: 11.0, 2: 12.0})  # 40, 44 and 48 steps of 0.25 s
    assert methods["SSGD multicast"].times == pytest.approx({0: 30.0, 1: 33.0, 2: 36.0})
    assert methods["ASGD"].times == pytest.approx({0: 20.0, 1: 22.0, 2: 24.0})
    assert methods["CSSGD, chosen"].time() == "11 s ± 1 s"


def test_luck_of_asgd_with_some_seeds_is_no_verdict():
    def found(asgd):
        return verdict(trained(SECONDS | {"CSSGD, chosen": 13.5}, asgd=asgd), "CSSGD at that r takes at least")

    assert found((1.0, 1.1, 1.2)).held  # 32.5 % with every seed
    unsure = found((1.0, 1.1, 0.9))
    assert unsure.verdict() == "not resolved"
    assert "(seeds 0, 1, 2; CSSGD, chosen by steps times one timing)" in unsure.figures


def test_two_synchronous_methods_are_told_apart_by_the_noise_of_their_timing_and_not_by_seeds():
    """They take the same steps with every seed, so seeds show no noise between them."""
    words = "CSSGD at the r that the tool chooses is sooner at the target"
    claim = verdict(trained(), words)
    assert "one run each, 2 stretches between tests" in claim.figures
    assert "CSSGD, chosen 10.00, SSGD multicast 30.00: -66.67 % ± 0.00 %" in claim.figures
    assert verdict(trained(steady=False), words).verdict() == "not resolved"
    one = verdict([row | {"curve": row["curve"][-1:]} for row in trained()], words)
    assert one.verdict() == "not resolved"
    assert "of unknown noise (one run each, 1 stretch between tests)" in one.figures


def test_two_synchronous_methods_on_many_nodes_are_told_apart_by_rounds_of_timing():
    steady = [row | {"round_step_s": [row["step_s"]] * 3} if "step_s" in row else row for row in counts()]
    (two, *_) = counts_of(steady, "dnn")
    assert two.less("SSGD multicast").of == "3 rounds of timing"
    assert two.less("ASGD").of == ""
    assert verdict(steady, "figure 14: with 3 nodes and more").held
    rough = [
        row
        | {
            "round_step_s": [
                row["step_s"] * r for r in ((0.2, 1.0, 4.0) if row["name"] == "CSSGD, chosen" else (1.0,) * 3)
            ]
        }
        if "step_s" in row
        else row
        for row in counts()
    ]
    assert verdict(rough, "figure 14: with 3 nodes and more").verdict() == "not resolved"


def test_the_page_says_of_its_sections_what_is_there():
    def covers(results):
        return dict(cssgd_page._covers(results))

    nothing = covers(counted())
    assert nothing["Figures 14 and 15, time on 2 to 10 nodes"] == "not measured yet"
    assert nothing["Equations 19 and 28 to 30, bytes"] == "here on 2 to 10 nodes"
    some = covers(trained() + counts())
    assert some["Figures 14 and 15, time on 2 to 10 nodes"] == (
        "here on 2 to 10 nodes, with steps that are counted in one process; not measured yet: CIFAR-10, CNN"
    )
    assert some["Figures 8 to 11, time and bytes to the target"].startswith("here on 4 nodes")


STEP_S = {"SSGD multicast": 1.0, "ASGD": 0.8, "CSSGD, chosen": 0.4, "all-reduce": 0.3}


def counts(step_s=STEP_S, steps=lambda _: 10):
    """Steps timed and counted on all numbers of nodes; seconds are per node."""
    found = []
    for row in (*of_section("nodes"), *of_section("steps")):
        if row.kind == "steps":
            told = {"curve": [], "reached": steps(row)}
        else:
            seconds = row.nodes * step_s[row.name]
            choice = {"redundancy": row.nodes - 1, "group": row.nodes} if row.method == "chosen" else None
            told = {"round_step_s": [seconds] * 2, "step_s": seconds, "sent_bytes": 1000 * row.nodes, "choice": choice}
        found.append(asdict(row) | told | {"commit": "abc"})
    return found


def test_time_on_many_nodes_is_steps_of_one_process_times_seconds_behind_links():
    def steps(row):
        return row.nodes + row.seed + 5 * (row.method == "asgd")

    two, *_, ten = counts_of(counts(steps=steps), "dnn")
    assert (two.nodes, ten.nodes) == (2, 10)
    assert two.times("SSGD multicast") == pytest.approx({0: 2 * 2.0, 1: 3 * 2.0, 2: 4 * 2.0})
    assert ten.times("ASGD") == pytest.approx({0: 15 * 8.0, 1: 16 * 8.0, 2: 17 * 8.0})
    assert ten.less("SSGD multicast").mean == pytest.approx(-0.6)


@pytest.mark.parametrize(
    ("step_s", "average", "everywhere"),
    [
        ({}, True, True),  # 60 % and 50 %
        ({"CSSGD, chosen": 0.5}, False, True),  # 50 % less than SSGD
        ({"ASGD": 0.5}, False, True),  # 20 % less than ASGD
        ({"ASGD": 0.3}, False, False),
    ],
)
def test_many_nodes_are_judged_on_average_and_each_by_itself(step_s, average, everywhere):
    results = counts(STEP_S | step_s)
    assert verdict(results, "figure 14: over all numbers of nodes").held is average
    assert verdict(results, "figure 14: with 3 nodes and more").held is everywhere
    assert verdict(results, "best redundancy grows").held


def test_steps_of_asgd_that_differ_by_seed_leave_the_average_open_or_not():
    def luck(row):
        return 10 if row.method == "alone" or row.seed else 3  # with one seed ASGD takes less than a third of its steps

    assert verdict(counts(steps=luck), "over all numbers of nodes").verdict() == "not resolved"
    never = counts(steps=lambda row: None if (row.method, row.nodes) == ("asgd", 10) else 10)
    assert verdict(never, "over all numbers of nodes").held, "a target out of ASGD's reach is no draw"
    missing = [row for row in counts() if (row["nodes"], row["name"], row["kind"]) != (7, "ASGD", "batch")]
    claim = verdict(missing, "over all numbers of nodes")
    assert claim.verdict() == "not tested"
    assert "needs timed steps of ASGD and CSSGD, chosen on 7 nodes" in claim.figures


def shared(sent=1.0, uneven_s=(0.5, 0.6, 0.5)):
    found = []
    for row in of_section("shares"):
        rounds = list(uneven_s) if row.shares else [0.7, 0.7, 0.8]
        told = {"round_step_s": rounds, "step_s": rounds[0], "sent_bytes": 1000 * (sent if row.shares else 1.0)}
        found.append(asdict(row) | told | {"commit": "abc"})
    return found


@pytest.mark.parametrize(
    ("changed", "held"), [({}, True), ({"sent": 1.02}, False), ({"uneven_s": (0.5, 0.71, 0.5)}, False)]
)
def test_uneven_shares_are_judged_by_bytes_and_by_every_step(changed, held):
    assert verdict(shared(**changed), "a node of half the speed").held is held
    (sheet,) = (sheet for sheet in sheets(shared()) if sheet.title.startswith("Uneven shares"))
    cells = {row[0]: row[1:3] for row in sheet.rows}
    assert cells["equal shares, r = 1"] == ("256, 256, 256, 256", "256 ms")
    assert cells["shares 2:2:2:1, r = 3"] == ("878, 878, 877, 439", "439 ms")


def test_kept_weights_are_compared_with_the_last_seed_by_seed():
    def kept(*gains):
        rows = zip(of_section("best"), gains, strict=True)
        told = {"step_s": 0.1, "whole_s": 3.0, "commit": "abc"}
        return [asdict(row) | told | {"curve": [[100, 0.1, 90.0 + seed, 90.0 + seed + gain]]}
                for seed, (row, gain) in enumerate(rows)]  # fmt: skip

    assert verdict(kept(0.5, 0.6, 0.5), "least loss").held
    assert verdict(kept(0.0, 0.0, 0.0), "least loss").held is False
    assert verdict(kept(0.5, -0.6, 0.5), "least loss").verdict() == "not resolved"
    (sheet,) = sheets(kept(0.5, 0.6, 0.5))
    assert sheet.rows == [
        ("MNIST, DNN", "0, 1, 2", "100", "90.00, 91.00, 92.00", "90.50, 91.60, 92.50", "30, 30, 30"),
    ]


def test_tables_have_all_rows_and_the_papers_figures():
    everything = trained() + counts() + asked() + timed(None) + counted() + shared()
    found = {sheet.title.partition(":")[0]: sheet for sheet in sheets(everything)}
    assert list(found) == [
        "Time and bytes to the target, figures 8 to 11", "Time on 2 to 10 nodes, figure 14",
        "A batch against r, figures 12 and 13", "Uneven shares, section 2.1",
        "What the tool measures and chooses", "Bytes of an exchange, equation 19",
    ]  # fmt: skip
    first = found["Time and bytes to the target, figures 8 to 11"]
    assert first.headings == ("row", "scheme", "MNIST, DNN: step", "time", "sent", "less")
    assert "seeds 0, 1, 2 with 40, 44, 48 steps; ASGD 40, 40, 40" in first.title
    table = {row[0]: row for row in first.rows}
    assert table["SSGD multicast"] == ("SSGD multicast", "–", "100 ms", "33 s ± 3 s", "400 B", "66.7 ± 0.0 %")
    assert table["CSSGD, chosen"][1] == "r = 3, g = 4"
    nodes = {row[0]: row for row in found["Time on 2 to 10 nodes, figure 14"].rows}
    assert nodes["5"] == ("5", "50 s", "40 s", "20 s", "15 s", "r = 4, g = 5")
    assert "MNIST, DNN, 40, 44, 48 and 40, 40, 40." in found["Time on 2 to 10 nodes, figure 14"].figures
    assert {row[0] for row in found["A batch against r, figures 12 and 13"].rows} >= {"r = 7, g = 8"}
    of_bytes = found["Bytes of an exchange, equation 19"].rows
    assert [row[:2] for row in of_bytes] == [
        ("r = 1", "2 to 10"),
        ("r = 2", "3 to 10"),
        ("r = 3", "4 to 10"),
        ("r = 4", "5 to 10"),
    ]
    page = "\n".join(line for sheet in sheets(trained()) for line in sheet.markdown())
    assert "| CSSGD, chosen | r = 3, g = 4 |" in page
