"""The page that says which to send has the figures of the record."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

import narrowband as nb
from narrowband.adapt.traffic import Traffic
from reproduce import report

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/explanation/gradients-or-updates.md"


def test_losses_are_those_of_the_record():
    page = PAGE.read_text()
    record = json.loads((ROOT / "reproduce/results/local/summary.json").read_text())
    groups = {group["name"]: group for group in record["groups"] if group["task"] == "shakespeare"}
    names = [
        "dense", "gradients, 4 bits", "gradients, top 1%", "updates", "updates, sign, in place", "updates, top 1%",
        "every 3, 2 bits, in place", "every 15, DiLoCo",
        "every 15, 2 bits, in place", "every 15, top 1/16, 2 bits, in place", "every 15, top 1/64, 2 bits, in place",
        "every 15, SparseLoCo", "every 15, top 1/64, 2 bits", "nothing is sent",
    ]  # fmt: skip
    found = re.findall(
        r"^\| (?:gradients|updates|nothing)[^|]* \| ([\d,]+ ×|–) \| ([\d,]+ ×|–) \| ([\d.]+) \| ([^|]+) \|$",
        page,
        re.M,
    )
    assert len(found) == len(names)
    paired = report.groups(record["rows"])

    def above_gradients(name):
        """Of the seeds that both have."""
        own, dense = (report.needed(paired, "shakespeare", each) for each in (name, "dense"))
        return report.compared(own, dense, relative=True, of=math.log).mean

    for name, (traffic, payload, loss, above) in zip(names, found, strict=True):
        own = math.log(groups[name]["mean"])
        for told, ratio in ((traffic, groups[name]["ratio"]), (payload, groups[name]["payload_ratio"])):
            assert told == ("–" if ratio is None else f"{round(ratio):,} ×")
        assert float(loss) == pytest.approx(own, abs=5e-4)
        assert above.strip() == ("–" if name == "dense" else f"{100 * above_gradients(name):+.1f} %")
    gradients, updates = (f"{100 * above_gradients(name):.0f} %" for name in ("gradients, top 1%", "updates, top 1%"))
    said = f"the largest 1 % of gradients cost {gradients}, of updates {updates}"
    assert said in (ROOT / "docs/how-to/loss-got-worse.md").read_text()
    assert f"[cost {gradients}]" in (ROOT / "docs/how-to/choose-a-codec.md").read_text()
    flowing = page.replace("\n", " ")
    assert f"of gradients costs {gradients}" in flowing
    assert f"with DiLoCo's outer step they cost {100 * above_gradients('every 3, DiLoCo'):.0f} %" in flowing

    def between(name, other):
        own, beside = (report.needed(paired, "shakespeare", each) for each in (name, other))
        found = report.compared(own, beside, relative=True, of=math.log)
        return f"{abs(100 * found.mean):.1f} ± {100 * found.margin:.1f} %"

    rounds, alone = "every 15, {}".format, "nothing is sent"
    assert f"they differ from it by {between(rounds('SparseLoCo'), alone)}" in flowing
    assert f"residuals apart end {between(rounds('top 1/64, 2 bits'), alone)} above it" in flowing
    diloco = rounds("DiLoCo")
    assert f"the difference is {between(rounds('2 bits, in place'), diloco)} over three seeds" in flowing
    assert f"The largest 16th costs {between(rounds('top 1/16, 2 bits, in place'), diloco)} more" in flowing


def sent(spec, ranks):
    """Bytes of a rank for one matrix of 24."""
    return Traffic(ranks).nbytes([(nb.compression(spec), (1024, 512))] * 24)[0]


def test_bytes_by_number_of_ranks_are_what_collectives_take():
    ranks, _, *lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.search(r"^\| ranks \|.*?\n\n", PAGE.read_text(), re.M | re.S)[0].split("\n")[:-2]
    ]
    assert len(lines) == 4
    for name, *told in lines:
        spec = name.strip("`")
        assert told == [f"{sent(spec, int(number)) / 1e3:,.0f} kB" for number in ranks[1:]], spec


def test_signs_send_less_than_the_largest_hundredth_where_the_page_says_so():
    less = [n for n in range(2, 129) if sent("sign+ef", n) < sent("topk:density=0.01+ef", n)]
    assert less == [6]
    signs, largest = (f"{sent(spec, 6) / 1e3:.0f} kB" for spec in ("sign+ef", "topk:density=0.01+ef"))
    said = f"Among exactly six ranks signs send less than the largest 1 %: {signs} against {largest}."
    assert said in PAGE.read_text()


def test_the_table_to_choose_by_has_optimizers_links_and_ranks():
    table = re.search(r"^\| optimizer \| link between ranks \| ranks \|.*?\n\n", PAGE.read_text(), re.M | re.S)[0]
    assert {line.split("|")[1].strip() for line in table.strip().splitlines()[2:]} == {
        "any", "SGD with momentum", "Muon", "AdamW",
    }  # fmt: skip
    gaps = json.loads((ROOT / "reproduce/results/optimizers/summary.json").read_text())["lines"]
    (muon,) = [line["gap"] for line in gaps if (line["optimizer"], line["spec"]) == ("muon", "qsgd:bits=4")]
    assert f"gradients in 4 bits: [{muon:+.1f} % of loss]" in table


def test_times_to_a_loss_are_those_of_the_record():
    page = PAGE.read_text()
    lines = json.loads((ROOT / "reproduce/results/local_times/summary.json").read_text())["lines"]
    seconds = {(line["rate"], line["method"]): line["seconds"] for line in lines}
    found = re.findall(r"^\| (?:gradients|updates)[^|]*(?: \| [\d.]+ min){3} \|$", page, re.M)
    methods = [
        "gradients, 32 bits", "gradients, 16 bits", "gradients, 4 bits", "every 15, DiLoCo",
        "every 15, 2 bits, in place", "every 15, top 1/16, 2 bits, in place",
    ]  # fmt: skip
    assert [line.split(" | ")[1:] for line in (each.strip("| ") for each in found)] == [
        [f"{seconds[rate, method] / 60:.1f} min" for rate in ("20mbit", "100mbit", "500mbit")] for method in methods
    ]
    record = json.loads((ROOT / "reproduce/results/local/summary.json").read_text())
    paired = report.groups(record["rows"])
    dense = report.needed(paired, "shakespeare", "dense")
    longer = report.needed(paired, "shakespeare", "every 15, 2 bits, in place, longer")
    below = -100 * report.compared(longer, dense, relative=True, of=math.log).mean
    assert f"ended {below:.1f} % below" in page
    two_bits = "every 15, 2 bits, in place"
    faster, than_half = (seconds["20mbit", methods[at]] / seconds["20mbit", two_bits] for at in (0, 1))
    readme = (ROOT / "README.md").read_text()
    assert f"[{faster:.1f} times as fast]" in readme
    assert f"as DDP in 32 bits and {than_half:.1f} times as fast as in 16 (one seed)" in readme
    computing = {line["method"]: line["computing"] for line in lines if line["rate"] == "20mbit"}
    shares = [f"{computing[name]:.0%}".replace("%", " %") for name in (two_bits, methods[0])]
    assert f"compute for {shares[0]} of the time, and DDP in float32 for {shares[1]}" in page.replace("\n", " ")
