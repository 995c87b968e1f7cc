"""The page that says which to send has the figures of the record."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest

import narrowband as nb
from narrowband.adapt.traffic import Traffic
from reproduce import groups, guide
from reproduce.pairs import student

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/explanation/gradients-or-updates.md"

#: As the page says it → the row of the record.
_CALLED = {called: name for name, called in guide.LOSSES.items()}
_ADVISED = {
    "gradients, 4 bits", "every 15, 2 bits, in place", "every 15, top 1/16, 2 bits, in place", "nothing is sent",
}  # fmt: skip


def test_losses_are_those_of_the_record():
    page = PAGE.read_text()
    record = json.loads((ROOT / "reproduce/results/local/summary.json").read_text())
    paired = groups.groups(record["rows"])

    def compared(name, other="dense", task="shakespeare"):
        """Of the seeds that both have."""
        own, beside = (groups.needed(paired, task, each) for each in (name, other))
        return groups.compared(own, beside, relative=True, of=math.log)

    def above_gradients(name):
        return compared(name).mean

    def told_above(name, task):
        if name == "dense" or groups.named(paired, task, name) is None:
            return "–"
        own = compared(name, task=task)
        margin = "" if own.margin is None else f" ± {100 * own.margin:.1f}"
        return f"{100 * own.mean:+.1f}{margin} % ({len(own.seeds)})"

    found = re.findall(
        r"^\| ((?:gradients|updates|nothing)[^|]*) \| ([\d,]+ ×|–) \| ([\d.]+) \| ([^|]+) \| ([^|]+) \|$", page, re.M
    )
    names = {_CALLED[called] for called, *_ in found}
    assert len(names) == len(found)
    assert names > _ADVISED
    for called, traffic, loss, *above in found:
        own = groups.needed(paired, "shakespeare", _CALLED[called])
        assert traffic == ("–" if own.ratio is None else f"{round(own.ratio):,} ×")
        assert float(loss) == pytest.approx(math.log(own.mean), abs=5e-4)
        assert above == [told_above(own.name, "shakespeare"), told_above(own.name, "gpt")], called
    gradients, updates = (f"{100 * above_gradients(name):.0f} %" for name in ("gradients, top 1%", "updates, top 1%"))
    rounds_of_two_bits = f"{100 * above_gradients('every 15, 2 bits, in place'):.0f} %"
    first, second, third = (
        f"{100 * compared(name, task='gpt').mean:.0f}"
        for name in ("gradients, top 1%", "updates, top 1%", "every 15, 2 bits, in place")
    )
    on_another = f"on another text by {first}, {second} and {third} % ([figures]"
    said = f"the largest 1 % of gradients raised the loss by {gradients}, the largest 1 % of updates by {updates}, and "
    said += f"rounds of updates in 2 bits by {rounds_of_two_bits}; {on_another}"
    assert said in " ".join((ROOT / "docs/how-to/loss-got-worse.md").read_text().split())
    choose = (ROOT / "docs/how-to/choose-a-codec.md").read_text()
    elsewhere = compared("gradients, 1 bit, rotated", task="gpt")
    other = f"{100 * elsewhere.mean:.1f} ± {100 * elsewhere.margin:.1f} %"
    rotated = compared("gradients, 1 bit, rotated")
    figure = f"{100 * rotated.mean:.1f} ± {100 * rotated.margin:.1f} %"
    both = [f"{100 * above_gradients(name):.0f} %" for name in ("gradients, sign", "updates, sign, in place")]
    beyond = f"{100 * compared('updates, sign, in place', task='gpt').mean:.0f} %"
    said = (
        f"cost {figure}, and {other} on the other text, at 30 times less traffic. At the same bytes signs of gradients "
    )
    said += f"cost {both[0]}, and signs of updates {both[1]} (on the other text {beyond})."
    assert said in page.replace("\n", " ")
    assert f"[+{figure} of loss](#what-was-measured) on one text, +{other} on the other" in page
    assert f"[+{figure}](../explanation/gradients-or-updates.md#what-was-measured) in 2,282" in choose
    assert (
        f"In 2,282 steps with AdamW it was {figure} above, where signs cost {both[0]}."
        in (ROOT / "README.md").read_text()
    )
    assert (
        f"[cost {gradients}](../explanation/gradients-or-updates.md#what-was-measured) (on another text {first} %)"
        in choose
    )
    said = (
        f"the largest 1 % of gradients lost {gradients}, the largest 1 % of updates [{updates}](docs/results/local.md)"
    )
    said += f", and rounds of updates in 2 bits {rounds_of_two_bits} (on another text {first}, {second} and {third} %)."
    assert said in (ROOT / "README.md").read_text()
    flowing = page.replace("\n", " ")
    signs = f"{100 * above_gradients('gradients, sign'):.0f} %"
    assert f"where those of gradients cost {signs} and {gradients}" in flowing
    assert f"with DiLoCo's outer step they cost {100 * above_gradients('every 3, DiLoCo'):.0f} %" in flowing

    def between(name, other):
        found = compared(name, other)
        return f"{abs(100 * found.mean):.1f} ± {100 * found.margin:.1f} %"

    rounds, alone = "every 15, {}".format, "nothing is sent"
    assert f"they differ from it by {between(rounds('SparseLoCo'), alone)}" in flowing
    assert f"residuals apart end {between(rounds('top 1/64, 2 bits'), alone)} above it" in flowing
    diloco = rounds("DiLoCo")
    assert f"the difference is {between(rounds('2 bits, in place'), diloco)} over three seeds" in flowing
    (others,) = re.findall(r"^\*\*Other optimizers\*\*.*?\n\n", page, re.M | re.S)
    for said, name, beside in (
        ("with Muon", "Muon, updates, 2 bits", "Muon, dense"),
        ("with SGD", "SGD, updates, 2 bits", "SGD, dense"),
        ("with AdamW", "updates, 2 bits, FSDP2", "dense"),
    ):
        assert f"{between(name, beside)} {said}" in others.replace("\n", " ")
    for title, length, digits in (("Another text", "", 1), ("Short training", ", shorter", 0)):
        (told,) = re.findall(rf"^\*\*{title}\*\*.*?\n\n", page, re.M | re.S)
        assert re.findall(r"([\d.]+) %", told)[:2] == [
            f"{100 * compared(name + length, 'dense' + length, 'gpt').mean:.{digits}f}"
            for name in ("every 15, 2 bits, in place", "updates")
        ]
    most, less = (compared(f"every 15, {name}2 bits, in place", task="gpt") for name in ("top 1/16, ", ""))
    assert most.mean / less.mean == pytest.approx(2, abs=0.3)
    nothing, theirs = (f"{100 * compared(x, task='gpt').mean:.0f} %" for x in (alone, rounds("SparseLoCo")))
    assert nothing == theirs
    assert f"Sending nothing costs {nothing}, and so do SparseLoCo's settings in rounds of 15" in flowing
    of_thirty = [
        100 * compared(f"every 30, {kind}", task="gpt").mean
        for kind in ("DiLoCo", "2 bits, in place", "top 1/16, 2 bits, in place")
    ]
    assert f"Rounds of 30 steps cost {min(of_thirty):.0f} to {max(of_thirty):.0f} %" in flowing
    for name, said in (
        ("every 15, 2 bits, in place", "{} % of loss on one text, {} % on the other"),
        ("every 15, top 1/16, 2 bits, in place", "{} % of loss on one text, {} % on the other"),
    ):
        losses = compared(name), compared(name, task="gpt")
        assert said.format(*(f"{100 * loss.mean:+.1f}" for loss in losses)) in page
    signs = f"{100 * above_gradients('updates, sign, in place'):.0f} %"
    assert f"Signs cost {signs} and the largest hundredth {updates}" in flowing
    kinds = ("DiLoCo", "2 bits, in place", "top 1/16, 2 bits, in place")
    whole, two_bits, sixteenth = (f"{100 * above_gradients(f'every 30, {kind}'):.1f} %" for kind in kinds)
    assert f"cost {whole} uncompressed and {two_bits} in 2 bits" in flowing
    traffic = groups.needed(paired, "shakespeare", f"every 30, {kinds[2]}").ratio
    assert f"costs {sixteenth}, at {traffic:.0f} times less traffic" in flowing
    beside = compared(f"every 30, {kinds[2]}", f"every 30, {kinds[0]}")
    assert beside.no_worse(0.005).held
    assert f"the difference is {100 * beside.mean:.1f} ± {100 * beside.margin:.1f} %" in flowing
    own, other = between("updates", "dense"), compared("updates", task="gpt")
    on_another = f"{100 * other.mean:.1f} ± {100 * other.margin:.1f} %"
    assert f"updates lose {own} (on the other text {on_another})" in flowing
    assert "a 64th is not shown to be better than sending nothing, and SparseLoCo's settings are worse" in flowing
    theirs = compared("every 30, SparseLoCo", alone)
    assert compared("every 30, top 1/64, 2 bits, in place", alone).better().held is not True
    assert theirs.mean > theirs.margin
    assert compared("every 3, 2 bits, in place", rounds("2 bits, in place")).better().held is not True
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
    methods = list(guide.TIMES)
    assert [line.split(" | ")[1:] for line in (each.strip("| ") for each in found)] == [
        [f"{seconds[rate, method] / 60:.1f} min" for rate in ("20mbit", "100mbit", "500mbit")] for method in methods
    ]
    record = json.loads((ROOT / "reproduce/results/local/summary.json").read_text())
    paired = groups.groups(record["rows"])
    dense = groups.needed(paired, "shakespeare", "dense")
    said = {}
    for name in ("DiLoCo", "2 bits, in place"):
        longer = groups.needed(paired, "shakespeare", f"every 15, {name}, longer")
        apart = groups.compared(longer, dense, relative=True, of=math.log)
        assert len(apart.seeds) == 3
        said[name] = f"{-100 * apart.mean:.1f} ± {100 * apart.margin:.1f} % below"
    without, in_two_bits = said.values()
    flowing = page.replace("\n", " ")
    assert (
        f"rounds without compression ended {without} the loss of gradients, and rounds in 2 bits {in_two_bits} it"
        in flowing
    )
    two_bits, sixteenth = "every 15, 2 bits, in place", "every 15, top 1/16, 2 bits, in place"
    faster = {line["method"]: list(line["faster"].values()) for line in lines if line["rate"] == "20mbit"}
    means = {
        name: f"{statistics.mean(faster[name]):.1f} ± {student(2) * statistics.stdev(faster[name]) / math.sqrt(3):.1f}"
        for name in (two_bits, sixteenth)
    }
    assert f"rounds in 2 bits were {means[two_bits]} times as fast as DDP in float32" in flowing
    assert f"Those of the largest 16th were {means[sixteenth]} times as fast, which three seeds do not tell" in flowing
    readme = (ROOT / "README.md").read_text()
    than_half = seconds["20mbit", methods[1]] / seconds["20mbit", two_bits]
    assert f"[{means[two_bits]} times as fast]" in readme
    assert f"as DDP in 32 bits and {than_half:.1f} times as fast as in 16 (three seeds)" in readme
    computing = {line["method"]: line["computing"] for line in lines if line["rate"] == "20mbit"}
    shares = [f"{computing[name]:.0%}".replace("%", " %") for name in (two_bits, methods[0])]
    assert f"compute for {shares[0]} of the time, and DDP in float32 for {shares[1]}" in page.replace("\n", " ")
