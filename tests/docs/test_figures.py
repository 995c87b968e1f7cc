"""Figures in README, guides and explanations are those of the records they come from.

Each row of :func:`figures` is a page and a sentence of it, or a line of a table, made from a record. Figures that need
more than a record and a format have tests of their own.
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from narrowband.planning.advice import WORTH_IT
from reproduce import groups
from tests.docs.pages import ROOT

README = "README.md"

_COUNTS = {2: "two", 3: "three"}


class Said(NamedTuple):
    """A page, and what it says of a record."""

    page: str
    words: str


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a benchmark's record."""
    rows: list[dict[str, Any]] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["rows"]
    return rows


def bench(name: str, key: str = "name") -> dict[Any, dict[str, Any]]:
    """The rows of a benchmark's record, by name."""
    return {row[key]: row for row in rows_of(name)}


@functools.cache
def trained(name: str) -> dict[str, Any]:
    """The record of a reproduction."""
    return json.loads((ROOT / f"reproduce/results/{name}/summary.json").read_text())


def group(of: str, task: str, name: str) -> groups.Group:
    """The rows of a reproduction that differ in the seed alone."""
    return groups.needed(groups.groups(trained(of)["rows"]), task, name)


def apart(of: str, task: str, name: str, *, relative: bool = False) -> str:
    """How far a group is from that without compression: the mean, without its sign, and its margin."""
    found = groups.compared(group(of, task, name), group(of, task, "dense"), relative=relative)
    assert found.margin is not None
    factor = 100.0 if relative else 1.0
    return f"{factor * abs(found.mean):.2f} ± {factor * found.margin:.2f}"


def said_of_claim(of: str, words: str) -> str:
    """The figures of the only claim with these words."""
    (claim,) = [claim for claim in trained(of)["claims"] if words in claim["text"]]
    return str(claim["figures"])


def of_optimizers() -> Iterator[Said]:
    lines = {(line["optimizer"], line["spec"]): line for line in trained("optimizers")["lines"]}

    def gap(optimizer: str, spec: str, digits: int = 1) -> str:
        return f"{lines[optimizer, spec]['gap']:.{digits}f}"

    def margin(optimizer: str, spec: str) -> str:
        return f"{lines[optimizer, spec]['gap']:+.1f} ± {lines[optimizer, spec]['margin']:.1f} %"

    top, low, four, signs = "topk:density=0.01+ef", "powersgd:rank=4", "qsgd:bits=4", "sign+ef"
    one, two = "eden:bits=1", "eden:bits=2"
    assert lines["sgd", low]["gap"] < lines["sgd", low]["margin"]
    assert lines["sgd", top]["gap"] > lines["sgd", top]["margin"]
    yield Said(
        README,
        f"Their loss is {gap('sgd', low)} (within that noise) and {gap('sgd', top)} % higher with SGD, "
        f"{gap('adamw', low)} and {gap('adamw', top)} % with AdamW",
    )
    lost = [float(gap("adamw", spec)) for spec in (low, signs, top, "topk:density=0.04,values=int8+ef")]
    steps = lines["adamw", top]["steps"]
    yield Said(README, f"sparse, low-rank and sign codecs lost {min(lost):.0f} to {max(lost):.0f} % in [{steps} steps]")
    within = (f"with {name} ({margin(name.lower(), one)})" for name in ("SGD", "AdamW"))
    yield Said(
        README,
        f"In {steps} steps the loss was that of uncompressed training within that noise, {' and '.join(within)}.",
    )
    faq = "docs/explanation/faq.md"
    yield Said(
        faq,
        f"| AdamW | `{one}` | {margin('adamw', one)}: not resolved | `{signs}` (+{gap('adamw', signs, 0)} %), "
        f"`{top}` (+{gap('adamw', top, 0)} %) |",
    )
    yield Said(
        faq,
        f"| SGD with momentum | `{one}` | {margin('sgd', one)}: not resolved | `{signs}` (+{gap('sgd', signs, 0)} %) |",
    )
    yield Said(
        faq,
        f"`uniform:bits=8`; `{four}` | {margin('muon', 'uniform:bits=8')}; {margin('muon', four)} | "
        f"`{top}` (+{gap('muon', top, 0)} %)",
    )
    yield Said(faq, f"| LoRA with AdamW | `{two}` | {margin('lora', two)} | – (`{top}`: +{gap('lora', top, 0)} %) |")
    yield Said(faq, f"with it one rotated bit cost {gap('muon', one)} %.")
    yield Said(faq, f"With SGD low rank and top-k cost {gap('sgd', low)} to {gap('sgd', top)} %.")
    choose = "docs/how-to/choose-a-codec.md"
    for optimizer, spec in (("sgd", low), ("sgd", one), ("lora", two)):
        yield Said(choose, margin(optimizer, spec))
    yield Said(choose, f"| AdamW | `{one}` | {margin('adamw', one)} in {steps} steps, and [")
    yield Said(choose, f"| Muon | `{four}` all the same | {margin('muon', four)} |")
    yield Said(
        choose,
        f"cost {gap('sgd', top)} % with SGD, {gap('adamw', top)} % with AdamW and {gap('muon', top)} % with Muon in "
        f"{steps} steps",
    )
    known = [line for line in lines.values() if line["relative_error"] is not None]
    bound = 0.031
    above = [line for line in known if line["relative_error"] >= bound]
    worse = [line for line in above if line["gap"] > 1.0]
    assert all(line["gap"] <= 1.0 for line in known if line not in above)
    yield Said(
        faq,
        f"In [{len(known)} pairs of optimizer and codec](../results/optimizers.md) nothing lost more than 1 % below a "
        f"relative error of {bound}; at or above it {len(worse)} of {len(above)} did.",
    )
    yield Said(
        faq,
        f"at {lines['sgd', low]['relative_error']:.2f} SGD lost {gap('sgd', low)} %, and at "
        f"{lines['muon', low]['relative_error']:.2f} Muon lost {gap('muon', low, 0)} %.",
    )
    yield Said(
        "docs/how-to/loss-got-worse.md",
        f"Of [{len(known)} pairs](../results/optimizers.md) of optimizer and codec none below {bound} lost more than "
        f"1 %, and {len(worse)} of {len(above)} above it did",
    )
    kept = [line["relative_error"] for line in known if re.search(r"\+ef|powersgd|dgc", line["spec"])]
    assert 0.5 < min(kept) < max(kept) < 0.955
    yield Said(faq, "an error of 0.5 to 0.95 is normal")
    yield Said("docs/how-to/loss-got-worse.md", "errors are 0.5 to 0.95.")


def of_steps_behind_links() -> Iterator[Said]:
    slow, fast = (bench(f"ddp-{rate}", "codec") for rate in ("200mbit", "1gbit"))
    plain_sgd, sharded = bench("ddp-200mbit-plain-sgd", "codec"), bench("fsdp-200mbit", "codec")

    def ratio(rows: dict[Any, dict[str, Any]], codec: str, digits: int = 1) -> str:
        return f"{rows[codec]['ratio_to_compute']:.{digits}f}"

    four, top = "qsgd:bits=4", "topk:density=0.01+ef"
    yield Said(
        README,
        f"With 4 bits a step takes {ratio(slow, four)} times as long as one that sends nothing, instead of "
        f"{ratio(slow, 'none')} times",
    )
    yield Said(
        "docs/index.md",
        f"Send every number in 4 bits, or only the largest 1 % ({ratio(slow, top)}×;",
    )
    yield Said("docs/index.md", f"{ratio(slow, 'none')}× → {ratio(slow, four)}×")
    yield Said(
        "docs/explanation/faq.md",
        f"takes {ratio(slow, 'none')} times as long as computing alone, and {ratio(slow, four)} times in 4 bits. At "
        f"1 Gbit/s these are {ratio(fast, 'none')} and {ratio(fast, four)} times",
    )
    rotated = bench("ddp-200mbit-rotated", "codec")
    yield Said(
        "docs/how-to/choose-a-codec.md",
        f"took {ratio(rotated, 'none')} times as long uncompressed as one that sends nothing, "
        f"{ratio(rotated, four)} times with `{four}`, and {ratio(rotated, 'eden:bits=1')} times with `eden:bits=1`",
    )
    dgc, low = "dgc:density=0.001", "powersgd:rank=4"
    yield Said(
        "docs/explanation/faq.md",
        f"{ratio(slow, 'torch: fp16 hook')} times as long as one that sends nothing at 200 Mbit/s, and "
        f"{ratio(slow, 'fp16')} times with `fp16`. With PowerSGD of rank 4 it takes "
        f"{ratio(slow, 'torch: PowerSGD hook, rank 4')} times as long with PyTorch's hook, and "
        f"{ratio(slow, low)} times with `{low}`",
    )
    yield Said(
        "docs/how-to/dgc.md",
        f"a step takes {ratio(slow, dgc, 2)} times as long as one without any communication, and "
        f"{ratio(slow, 'none')} times uncompressed",
    )
    yield Said("docs/how-to/dgc.md", f"Against a step of SGD without momentum it is {ratio(plain_sgd, dgc, 2)} times")
    yield Said(
        "docs/how-to/powersgd.md",
        f"takes {ratio(slow, low, 2)} times as long as one without any communication, and "
        f"{ratio(slow, 'torch: PowerSGD hook, rank 4', 2)} times with PyTorch's own hook",
    )
    bits = [f"qsgd:bits={bits}/uniform:bits={bits}" for bits in (8, 4)]
    yield Said(
        "docs/how-to/fsdp.md",
        f"takes {ratio(sharded, 'torch: FSDP2', 0)} times as long as one of a whole model that sends nothing. In 8 "
        f"bits it takes {ratio(sharded, bits[0])} times as long, and in 4 bits {ratio(sharded, bits[1])} times",
    )
    names = "4 bits rotated", "8 bits, gradients 1 rotated"
    both, back = (apart("model_parallel", "gpt", name) for name in names)
    yield Said(
        "docs/how-to/pipeline.md",
        f"with `eden:bits=4` both ways perplexity rose by {both}, and with 8 bits forward and `eden:bits=1` back by "
        f"{back} (one seed)",
    )
    rotated = group("sharded", "shakespeare", "1 rotated and 4 bits")
    yield Said("docs/how-to/fsdp.md", f"sent {rotated.ratio:.1f} times less than FSDP2 alone over gloo")
    yield Said("docs/how-to/fsdp.md", f"{rotated.versus_dense()} from 8.00")
    less = group("sharded", "shakespeare", "8 and 8 bits").ratio
    yield Said(README, f"which sends [{less:.1f} times less](docs/results/sharded.md) over gloo in 8 bits")
    stages = {name: f"{row['tokens_per_s']:,.0f}" for name, row in bench("pipeline-100mbit").items()}
    yield Said(
        "docs/how-to/pipeline.md",
        f"trains {stages['torch: PipelineStage']} tokens/s with PyTorch's own `PipelineStage`, {stages['none']} with "
        f"an uncompressed `CompressedStage`, which sends while it computes, {stages['uniform:bits=8']} with 8 bits "
        f"both ways, and {stages['uniform:bits=8/qsgd:bits=4']} with 8 bits and gradients in `qsgd:bits=4`",
    )


def of_memory() -> Iterator[Said]:
    guide = "docs/how-to/activations.md"
    tiny = bench("memory-deit-tiny-jemalloc")
    shown = {name: name for name in tiny} | {
        "checkpoint": "checkpointing",
        "checkpoint, 8 bits": "checkpointing, its inputs in 8 bits",
        "bf16, checkpoint": "bf16, checkpointing",
        "bf16, checkpoint, 8 bits": "bf16, checkpointing, its inputs in 8 bits",
    }
    for name, row in tiny.items():
        time = "1" if name == "plain" else f"{row['ratio_to_plain']:.2f} ×"
        off = "–" if name == "bf16" else f"{100 * row['gradient_error']:.1f}%" if row["gradient_error"] else "0"
        kept, peak = (f"{row[key] / 1e6:,.0f} MB" for key in ("kept_bytes", "peak_bytes"))
        yield Said(guide, f"| {shown[name]} | {kept} | {peak} | {time} | {off} |")
    slower = f"{tiny['bf16, 8 bits']['ratio_to_same_precision']:.2f} times as long"
    less = f"{100 * (1 - tiny['bf16, 8 bits']['kept_bytes'] / tiny['bf16']['kept_bytes']):.0f} % less memory"
    yield Said(README, f"take {less}; forward stays exact. On two cores a step takes {slower}")
    yield Said("docs/index.md", f"of DeiT-Ti under bf16, in 8 bits; on two cores a step takes {slower}")
    glibc = bench("memory-deit-tiny")
    peaks = [f"{glibc[name]['peak_bytes'] / 1e6:,.0f} MB" for name in ("plain", "8 bits")]
    yield Said(guide, f"the training above takes {peaks[0]} plain and {peaks[1]} in 8 bits")
    card = bench("memory-deit-base-h200")

    def on_card(name: str) -> tuple[str, str]:
        kept = card[f"bf16, {name}"]["kept_bytes"] / card["bf16"]["kept_bytes"]
        return f"{100 * kept:.0f} %", f"{card[f'bf16, {name}']['ratio_to_same_precision']:.1f} times"

    (eight, times), four, whole = (on_card(name) for name in ("8 bits", "4 bits", "checkpoint"))
    yield Said(guide, f"keeps {eight} of the bytes in 8 bits, and a step takes {times} as long.")
    yield Said(README, f"On an H200 that of DeiT-B takes [{times}]")
    yield Said("docs/index.md", f"and on an H200 that of DeiT-B [{times}]")
    yield Said(guide, "4 bits keep {} at {}, and full checkpointing keeps {} at {}.".format(*four, *whole))
    plain, few = (
        json.loads((ROOT / f"benchmarks/results/memory-gpt-{name}.json").read_text())
        for name in ("adamw", "adamw-8bit")
    )
    for row, keys in {
        "parameters and gradients": ("parameters", "gradients"),
        "optimizer": ("optimizer",),
        "residuals": ("residuals",),
    }.items():
        totals = (sum(record["tensors"][key] for key in keys) / 1e6 for record in (plain, few))
        yield Said(guide, f"| {row} | " + " | ".join(f"{total:.3g} MB" for total in totals) + " |")
    alls = []
    for record in (plain, few):
        rest, saved = sum(record["tensors"].values()), record["8 bits"]
        alls.append(", ".join(f"{(rest + saved[key]) / 1e6:.0f} MB" for key in ("raw_bytes", "kept_bytes")))
    yield Said(guide, f"| all: as they are, 8 bits | {alls[0]} | {alls[1]} |")
    page = "docs/how-to/everything.md"
    for name in ("everything", "everything-sharded"):
        rows = bench(name)
        loss, seconds = ([rows[key][kind] for kind in ("plain", "plan")] for key in ("loss", "seconds"))
        yield Said(page, "| loss, mean of the last ten of 40 steps | {:.3f} | {:.3f} | |".format(*loss))
        yield Said(page, "| seconds | {:.2f} | {:.2f} | |".format(*seconds))
        for row in list(rows.values())[: 4 if name == "everything" else 1]:
            yield Said(
                page, f"{_mega(row['plain'])} | {_mega(row['plan'])} | {row['plain'] / row['plan']:.1f} times less |"
            )


def _mega(number: float) -> str:
    return f"{number:.0f} MB" if number >= 100 else f"{number:.1f} MB" if number >= 10 else f"{number:.2f} MB"


def of_training() -> Iterator[Said]:
    dgc = "docs/how-to/dgc.md"
    score = {name: group("dgc", "cifar", name).mean for name in ("dense", "plain", "dgc", "dgc, steps")}
    yield Said(
        dgc,
        f"{score['dense']:.1f} % uncompressed, {score['plain']:.1f} % with plain sparsification after the same "
        f"warm-up, {score['dgc']:.1f} % with DGC as published, {score['dgc, steps']:.1f} % with `accumulate=steps`",
    )
    fewer = {(row["task"], row["name"]): row["payload_ratio"] for row in trained("dgc")["groups"]}
    yield Said(dgc, f"in payloads {fewer['cifar', 'dgc, steps, small 5%']:.0f} times smaller than the gradient.")
    yield Said(
        dgc,
        f"So DGC as published loses {apart('dgc', 'cifar', 'dgc')} points, and {apart('dgc', 'cifar', 'dgc, steps')} "
        f"with `accumulate=steps`, where plain sparsification loses {apart('dgc', 'cifar', 'plain')}.",
    )
    lost = f"lost {score['dense'] - score['dgc']:.1f} of {score['dense']:.1f} points"
    yield Said("docs/how-to/loss-got-worse.md", f"{lost} in ten epochs")
    yield Said("docs/how-to/choose-a-codec.md", f"in ten epochs it [{lost}]")
    low = "docs/how-to/powersgd.md"
    for task, digits in (("cifar", " %"), ("gpt", "")):
        scores = [group("powersgd", task, name) for name in ("dense", "rank 4", "rank 2")]
        yield Said(low, " | ".join(f"{each.mean:.1f}{digits}" for each in scores) + " |")
        yield Said(low, "| times less sent | 1 | {:.1f} | {:.1f} |".format(*(each.ratio for each in scores[1:])))
    four, two = (apart("powersgd", "cifar", name) for name in ("rank 4", "rank 2"))
    yield Said(low, f"loses {four} points at rank 4, and {two} at rank 2, which three seeds do not resolve.")
    plain, eight = (group("mesa", "vit", name).mean for name in ("dense", "mesa"))
    yield Said(
        "docs/how-to/activations.md",
        f"ends at {plain:.2f} % on CIFAR-10 (of images that were encoded again as JPEG) after five epochs, and at "
        f"{eight:.2f} % with 8 bits. Seed by seed the difference is −{apart('mesa', 'vit', 'mesa')} points",
    )
    language = [
        group("mesa_language", "llama", name) for name in ("8 bits", "4 bits", "4 bits, norms and attention in 8")
    ]
    eight, four, both = language
    share = [100 * own.kept_bytes / group("mesa_language", "llama", "dense").kept_bytes for own in language]
    lost = [
        groups.compared(own, group("mesa_language", "llama", "dense"), relative=True, of=math.log).figure()
        for own in language
    ]
    yield Said(
        "docs/how-to/activations.md",
        f"keeps {share[0]:.0f} % of its bytes in 8 bits, and its held-out loss differs by {lost[0]} "
        f"({_COUNTS[len(eight.seeds)]} seeds; [all rows](../results/mesa_language.md)). In 4 bits it keeps "
        f"{share[1]:.0f} %, and the loss differs by {lost[1]} ({_COUNTS[len(four.seeds)]} seeds). With norms and "
        f"attention in 8 bits and all else in 4 it keeps {share[2]:.0f} %, and the loss differs by {lost[2]} "
        f"({_COUNTS[len(both.seeds)]} seeds: not resolved)",
    )
    adapt = "docs/how-to/adapt.md"
    found = {
        name: f"{100 * own.mean:.2f} ± {100 * own.margin:.2f} %"
        for name in ("powersgd", "top-k", "qsgd")
        for own in [
            groups.compared(
                group("lgreco", "gpt", f"{name}, lgreco"), group("lgreco", "gpt", f"{name}, uniform"), relative=True
            )
        ]
    }
    yield Said(
        adapt,
        f"above that of their references by {found['powersgd']} (low rank), by {found['top-k']} (top-k), and by "
        f"{found['qsgd']} (quantization)",
    )
    correlations = {}
    for family in ("qsgd", "top-k", "low rank"):
        for optimizer in ("SGD", "AdamW"):
            told = said_of_claim("sensitivity", f"{family}, short runs with {optimizer}: errors and changes")
            correlations[family, optimizer] = re.findall(r"([\d.]+) ± ", told)[-2]
    sgd, adamw = ([correlations[each, kind] for each in ("qsgd", "top-k", "low rank")] for kind in ("SGD", "AdamW"))
    yield Said(
        adapt,
        "with SGD the two orders correlate with {} for quantization, {} for top-k and {} for low rank. With AdamW it "
        "is {}, {} and {}.".format(*sgd, *adamw),
    )
    alone = bench("adapt")["program alone"]
    yield Said(
        adapt,
        f"For {alone['layers']} layers of {alone['choices']} choices the program takes {1e3 * alone['solve_s']:.0f} ms "
        f"on two cores, and its plan is within {100 * alone['over_bound']:.3f} % of a bound",
    )


def of_stages() -> Iterator[Said]:
    guide = "docs/how-to/pipeline.md"
    short = {row["name"]: row for row in trained("model_parallel")["groups"] if row["epochs"] == 5}
    plain = short["dense"]["scores"][0]  # of the seed that all others have
    yield Said(guide, f"| uncompressed | {plain:.1f} % |")
    noise = short["top 50%"]["margin"]
    assert all(row["margin"] == noise for name, row in short.items() if name != "dense")
    yield Said(guide, f"The images had one seed, so differences below {noise:.2f} points are within the noise")
    for called, name, digits in (
        ("4 bits both ways, groups of 128 (the default)", "fw4-bw4 in groups", 1),
        ("4 bits both ways, one range per tensor", "fw4-bw4", 1),
        ("half of the elements", "top 50%", 1),
        ("a tenth of the elements", "top 10%", 0),
        ("the same with `ef21`", "EF21 + top 10%", 0),
    ):
        yield Said(guide, f"| {called} | {short[name]['mean']:.{digits}f} % |")
    largest = apart("model_parallel", "gpt", "top 10% from the start")
    yield Said(guide, f"| largest tenth both ways | {largest} |")


def of_updates() -> Iterator[Said]:
    few, most = "every 15, 2 bits, in place", "every 15, top 1/16, 2 bits, in place"

    def lost(name: str, task: str) -> str:
        own = groups.compared(*(group("local", task, each) for each in (name, "dense")), relative=True, of=math.log)
        assert len(own.seeds) == 3
        return f"{100 * own.mean:.1f} ± {100 * own.margin:.1f} %"

    guide = "docs/how-to/updates.md"
    sent = {name: group("local", "shakespeare", name).ratio for name in (few, most, "every 15, DiLoCo")}
    one, other = lost(few, "shakespeare"), lost(few, "gpt")
    yield Said(
        guide,
        f"These settings lost {one} on one text and {other} on another (three seeds), at {sent[few]:.0f} times less "
        "traffic",
    )
    yield Said("docs/how-to/choose-a-codec.md", f"+{one} on one text, +{other} on another")
    yield Said(
        guide,
        f"the largest 16th lost {lost(most, 'shakespeare')} on one text and {lost(most, 'gpt')} on another (three "
        f"seeds), at {sent[most]:.0f} times less traffic.",
    )
    for called, name in {
        "uncompressed, as above": "every 15, DiLoCo",
        "2 bits, in place": few,
        "largest 16th in 2 bits, in place": most,
    }.items():
        both = " | ".join(f"+{lost(name, task)}" for task in ("shakespeare", "gpt"))
        yield Said("docs/how-to/peers.md", f"| {called} | {sent[name]:.0f} × | {both} |")
    means = " and ".join(each.split(" ")[0] for each in (one, other))
    yield Said("docs/how-to/plan.md", f"on two texts they lost {means} %, more than the default tolerance")
    page = "docs/explanation/gradients-or-updates.md"
    whole = sent["every 15, DiLoCo"]
    yield Said(
        page, f"(the difference is 0.0 ± 1.5 % over three seeds), at {sent[few] / whole:.0f} times less traffic."
    )
    yield Said(page, f"% more, at {sent[most] / whole:.0f} times less traffic, if each element")


#: As the page says it → the names of rows of the record, without their learning rates.
_MOMENTUM = {
    "gradients, uncompressed": "gradients",
    "updates, uncompressed": "updates",
    "updates, uncompressed, optimizers' moments averaged every 10 steps": "updates, moments averaged every 10 steps",
    "updates, 2 bits": "updates, 2 bits",
    "momentum, 0/1 Adam with few second moments": "0/1 Adam, rarer",
    "updates, signs": "updates, signs",
    "momentum, 0/1 Adam as published": "0/1 Adam",
    "updates, largest 1 %": "updates, top 1 %",
    "momentum, DeMo": "DeMo",
}


def of_candidates() -> Iterator[Said]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in trained("candidates")["rows"]:
        if row["perplexity"] is not None:
            found.setdefault(row["name"], []).append((row["perplexity"], row["dense_nbytes"] / row["nbytes"]))
    for called, name in _MOMENTUM.items():
        rates = [rows for own, rows in found.items() if re.fullmatch(rf"{re.escape(name)}, rate [\d.]+", own)]
        assert len(rates) == 3, name
        loss, less = min([statistics.mean(each) for each in zip(*rows, strict=True)] for rows in rates)
        times = f"{less:.1f}" if less < 9.5 and round(less, 1) != 1.0 else f"{less:.0f}"
        yield Said("docs/explanation/gradients-or-updates.md", f"| {called} | {times} × | {loss:.2f} |")
    claims = dict(
        re.findall(
            r"^\| ([^|]+) \| ([+-][\d.]+ % ± [\d.]+) %",
            (ROOT / "docs/results/candidates.md").read_text(),  # which a test holds to the record
            re.MULTILINE,
        )
    )

    def told(claim: str, digits: int = 0) -> str:
        mean, margin = claims[claim].split(" % ± ")
        return f"{float(mean):+.{digits}f} ± {float(margin):.{digits}f} %"

    two, four = (told(f"two half rounds lose less than one round, rank {rank}")[1:] for rank in (2, 4))
    low = "docs/how-to/powersgd.md"
    yield Said(low, f"by {two} at rank 2 and {four} at rank 4.")
    half, once = (
        told(claim)
        for claim in (
            "two half rounds train a better model than one round, rank 4",
            "half a round of twice the rank trains a better model than one round",
        )
    )
    yield Said(low, f"which is {half} with two half rounds and {once} with a half round of twice the rank")
    choose = "docs/how-to/choose-a-codec.md"
    kept = "uniform:bits=2,symmetric=true+ef:store=int8 {} at most 2% worse than in float32"
    model = told(kept.format("trains a model"), 2).lstrip("+")
    error = told(kept.format("loses"), 1).lstrip("+")
    yield Said(
        choose, f"With `int8` the difference is {model}, and the error that adds up over training is {error} larger"
    )
    faded = told("a residual that decays by 10 % a step trains a better model")[1:]
    yield Said(choose, f"ended at a perplexity {faded} lower with this decay than without, over three seeds")
    dgc = [
        statistics.mean(loss for loss, _ in found[spec])
        for spec in ("dgc:density=0.0164,values=fp16", "dgc:density=0.0245,values=int8", "dgc:density=0.01")
    ]
    yield Said("docs/how-to/dgc.md", "perplexity {:.2f} and {:.2f} beside {:.2f}, which".format(*dgc))


def of_loops() -> Iterator[Said]:
    older, newer = (bench(f"kernels-h100{ending}", "loop") for ending in ("", "-topk"))

    def share(*loops: str, of: dict[Any, dict[str, Any]] = older, between: str = " / ") -> str:
        return between.join(f"{100 * of[loop]['bandwidth_share']:.0f}" for loop in loops)

    page = "docs/reference/kernels.md"
    encoded = share("uniform-8bit-nearest-encode", "uniform-4bit-stochastic-encode", "uniform-2bit-stochastic-encode")
    others = f"{share('qsgd-4bit-encode')} %; {share('sign-encode')} %"
    yield Said(page, f"| quantize, 8 / 4 / 2 bits; qsgd; sign | {encoded} %; {others} |")
    decoded = share(*(f"uniform-{bits}bit-decode-accumulate" for bits in (8, 4, 2)))
    yield Said(page, f"| decode and add, 8 / 4 / 2 bits | {decoded} % |")
    kept = share("residual-keep-16", "residual-keep-8", "residual-read-8", between=", ")
    yield Said(page, f"| residuals kept in 16 and 8 bits, read from 8 | {kept} % |")
    ways = [share(*(f"activation-{way}-{bits}" for bits in (8, 4))) for way in ("quantize", "dequantize")]
    masks = share("activation-mask", "activation-apply-mask", between=" to ")
    yield Said(page, f"| {ways[0]} %, {ways[1]} %, {masks} % |")
    compensate = (share(loop, of=newer) for loop in ("compensate", "all-finite"))
    yield Said(page, "| compensate; all-finite, whose answer the host waits for | {} %; {} % |".format(*compensate))
    top = share("ef-topk-encode", "ef-topk-1%-encode", of=newer, between=", ")
    yield Said(page, f"| {top} %; {share('dgc-momentum-select-mask', of=newer)} % |")
    select = share("topk-exact-select", "topk-sampled-select", "threshold-select", of=newer, between=" %; ")
    yield Said(page, f"| exact top-k alone; from a sample; threshold | {select} % |")

    def names(row: dict[str, Any]) -> tuple[str, str]:
        return row["loop"], row["launch"]

    decoded = "decode saved activations in bfloat16 from 8 bits: of heads; of an MLP; of a normalization"
    quantize, decode = "_quantize_whole", "_dequantize"
    uniform = [(f"uniform-{bits}bit-stochastic-encode", quantize) for bits in (4, 2)]
    for what, form, launches in (
        ("quantize, 4 / 2 bits; sign", "{} / {}; {}", [*uniform, ("sign-encode", quantize)]),
        ("exact top-k alone: the pass over all elements", "{}", [("topk-exact-select", "_gather")]),
        (decoded, "{}; {}; {}", [(f"saved-{of}-bf16-8-dequantize", decode) for of in ("heads", "mlp", "norm")]),
    ):
        then, now = (
            form.format(*(f"{row['per_byte']:.1f}" for launch in launches for row in counted if launch == names(row)))
            for counted in (rows_of("kernels-instructions-before"), rows_of("kernels-instructions"))
        )
        yield Said(page, f"| {what} | {then} | {now} |")


def of_claims() -> Iterator[Said]:
    """Figures that a record has in the words of its claims, or on a page that a test holds to its record."""
    adapt = "docs/how-to/adapt.md"
    times = []
    for reference in ("powersgd:rank=4", "topk:density=0.01+ef"):
        plans = said_of_claim("lgreco_times", f"{reference}: at the same error, steps with the plan for bytes")
        seconds = said_of_claim("lgreco_times", f"{reference}: section 5.5: steps with the plan for seconds")
        (by_bytes, uniform), (by_seconds, _) = (re.findall(r"(\d+) ms", said) for said in (plans, seconds))
        times.append((uniform, by_bytes, by_seconds))
    low, top = times
    yield Said(
        adapt,
        "took {} ms with `powersgd:rank=4` for all layers, {} ms with a plan for bytes, and {} ms with one for "
        "seconds.".format(*low),
    )
    yield Said(adapt, "With `topk:density=0.01+ef` these were {}, {} and {} ms".format(*top))
    errors = {}
    for task in ("gpt", "vit"):
        told = said_of_claim("fidelity", f"{task}: a range per head errs no more than one per 256 neighbours")
        errors[task] = [float(error) for error in re.findall(r"8 bits, stochastic: ([\d.]+)% and ([\d.]+)%", told)[0]]
    yield Said(
        "docs/explanation/activations.md",
        "in 8 bits a small GPT's are off by {1:.1f} % instead of {0:.1f} %, and a vision transformer's by {3:.1f} % "
        "instead of {2:.1f} %".format(*errors["gpt"], *errors["vit"]),
    )
    kept = {row["name"]: row["kept_bytes"] for row in trained("mesa")["groups"]}
    more = kept["neighbours"] / kept["mesa"] - 1
    yield Said("docs/explanation/activations.md", f"smaller errors, for {100 * more:.0f} % more bytes")
    rows = re.findall(r"^\| ([\w ,=-]+) \|(.+) \|$", (ROOT / "docs/results/cssgd.md").read_text(), re.MULTILINE)
    cells = {name: rest.split(" | ") for name, rest in rows if rest.count(" | ") == 8}
    for called, name in {
        "synchronous SGD, unicast": "SSGD unicast",
        "synchronous SGD, multicast": "SSGD multicast",
        "asynchronous SGD, parameter server": "ASGD",
        "all-reduce": "all-reduce",
        "coded, `redundancy=2`": "CSSGD, r = 2",
        "coded, `redundancy=3`, as `choose_redundancy` chooses": "CSSGD, chosen",
        "one rank alone": "alone",
    }.items():
        dnn, cnn = (_seconds(cells[name][at].split(" ± ")[0]) for at in (2, 6))
        yield Said("docs/how-to/coded.md", f"| {called} | {dnn:.3g} | {cnn:.3g} |")


def _seconds(text: str) -> float:
    """Read ``4 min 28 s``."""
    units = {"min": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+) (min|s)\b", text))


def figures() -> Iterator[Said]:
    """All that is compared."""
    for source in (
        of_optimizers,
        of_steps_behind_links,
        of_memory,
        of_training,
        of_stages,
        of_updates,
        of_candidates,
        of_loops,
        of_claims,
    ):
        yield from source()


def test_pages_say_what_their_records_say():
    every = list(figures())
    pages = {page: " ".join((ROOT / page).read_text().split()) for page, _ in every}
    assert [said for said in every if said.words not in pages[said.page]] == []


def test_the_guide_to_plan_says_what_is_worth_it():
    assert f"It saves {WORTH_IT:.0%}".replace("%", " %") in (ROOT / "docs/how-to/plan.md").read_text()
