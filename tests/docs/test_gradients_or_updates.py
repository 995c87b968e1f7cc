"""The page that says which to send has the figures of the record."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

import narrowband as nb
from narrowband.adapt.traffic import Traffic

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/explanation/gradients-or-updates.md"


def test_losses_are_those_of_the_record():
    page = PAGE.read_text()
    record = json.loads((ROOT / "reproduce/results/local/summary.json").read_text())
    groups = {group["name"]: group for group in record["groups"] if group["task"] == "shakespeare"}
    names = [
        "dense", "gradients, 4 bits", "gradients, top 1%", "updates", "updates, top 1%", "every 15, DiLoCo",
        "every 15, 2 bits, in place", "every 15, top 1/16, 2 bits, in place", "every 15, top 1/64, 2 bits, in place",
        "every 15, SparseLoCo", "every 15, top 1/64, 2 bits", "nothing is sent",
    ]  # fmt: skip
    found = re.findall(
        r"^\| (?:gradients|updates|nothing)[^|]* \| ([\d,]+ ×|–) \| ([\d,]+ ×|–) \| ([\d.]+) \| ([^|]+) \|$",
        page,
        re.M,
    )
    assert len(found) == len(names)
    dense = math.log(groups["dense"]["mean"])
    for name, (traffic, payload, loss, above) in zip(names, found, strict=True):
        own = math.log(groups[name]["mean"])
        for told, ratio in ((traffic, groups[name]["ratio"]), (payload, groups[name]["payload_ratio"])):
            assert told == ("–" if ratio is None else f"{round(ratio):,} ×")
        assert float(loss) == pytest.approx(own, abs=5e-4)
        assert above.strip() == ("–" if name == "dense" else f"{100 * (own / dense - 1):+.1f} %")


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
