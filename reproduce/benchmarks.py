"""Write the page of benchmarks and the picture of the front page from records.

Times, bytes and memory come from ``benchmarks/results``; the loss that compression costs comes from the record of
:mod:`reproduce.optimizers`. Nothing is measured here: ``narrowband bench`` and ``narrowband demo`` do that, and
``benchmarks/README.md`` has the commands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowband.bench.architectures import ZOO
from narrowband.bench.zoo import foretold, profile, sentence
from narrowband.units import format_bytes, format_seconds
from reproduce.groups import NOTHING
from reproduce.pictures import Bar, Panel
from reproduce.report import Opening, beginning, source, write_page

__all__ = ["front", "page", "records"]

_RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

#: Numbers of ranks for which the bytes of sparse sums were counted.
_SUMS = (4, 8, 16, 32)

#: Topic of a record → its file.
_FILES = {
    "slow": "ddp-200mbit.json",
    "fast": "ddp-1gbit.json",
    "machines": "ddp-2x2-200mbit.json",
    "more machines": "ddp-4x2-200mbit.json",
    "sharded": "fsdp-200mbit.json",
    **{f"sums-{ranks}": f"sparse-sums-{ranks}.json" for ranks in _SUMS},
    "stages": "pipeline-100mbit.json",
    "memory": "memory-deit-tiny-jemalloc.json",
    "zoo": "memory-zoo.json",
    "tensors": "memory-tensors.json",
    "budgets": "memory-budgets.json",
    "demo": "demo/summary.json",
    "loops": "kernels.json",
}

#: The record with the losses of codecs under common optimizers.
_LOSSES = Path(__file__).parent / "results" / "optimizers" / "summary.json"

#: Codec that the front page shows → its label there.
_FRONT = {
    "none": "uncompressed",
    "fp16": "16 bits",
    "qsgd:bits=4": "4 bits",
    "powersgd:rank=4": "PowerSGD, rank 4",
    "topk:density=0.01+ef": "largest 1 %",
}
#: The codec that the first lines of the front page name.
_NAMED = "qsgd:bits=4"

#: Loop of the kernels' benchmark → what it does.
_LOOPS = {
    "uniform-4bit-stochastic-encode": "4-bit stochastic quantize and pack",
    "uniform-4bit-decode-accumulate": "its decode, accumulating",
    "uniform-8bit-nearest-encode": "8-bit nearest encode",
    "topk-sampled-select": "top-k by sampled threshold, 0.1 %",
    "topk-exact-select": "top-k exact, 0.1 %",
    "ef-topk-encode": "error feedback, select, write",
    "dgc-momentum-select-mask": "`dgc`: momentum, accumulation, selection, masking",
    "lowrank-4-decode-accumulate": "two factors of rank 4, decoded and accumulated",
    "aq-sgd-send": "AQ-SGD: look a sample up, encode its change, update",
    "activation-quantize-8": "activations in 8 bits, quantized",
    "activation-dequantize-8": "activations in 8 bits, restored",
    "torch.topk": "`torch.topk`",
    "torch 4-bit stochastic quantize": "4-bit stochastic quantize in plain torch",
}

Records = Mapping[str, Mapping[str, Any]]


def records() -> dict[str, dict[str, Any]]:
    """Read the records, by topic."""
    found = {about: json.loads((_RESULTS / name).read_text()) for about, name in _FILES.items()}
    return {**found, "losses": json.loads(_LOSSES.read_text())}


def _rows(found: Records, about: str, key: str = "codec") -> dict[str, dict[str, Any]]:
    """Return the rows of a record by name, without the rows that could not run."""
    return {row[key]: row for row in found[about]["rows"] if not row.get("error")}


def front(found: Records) -> list[Panel]:
    """Return the front page's panels: the time of a step on a slow link, and the loss under common optimizers.

    The two panels come from different runs: the benchmark takes too few steps to judge a loss by.
    """
    steps = _rows(found, "slow")
    gaps = {(line["optimizer"], line["spec"]): float(line["gap"]) for line in found["losses"]["lines"]}
    return [
        Panel(
            "Step time at 200 Mbit/s",
            "over a step that sends nothing",
            [
                Bar(label, steps[spec]["ratio_to_compute"], _times(steps[spec]), spec == _NAMED)
                for spec, label in _FRONT.items()
            ],
        ),
        Panel(
            "Loss that it adds",
            "in %, with AdamW / with SGD",
            [
                Bar(
                    label,
                    max(0.0, gaps["adamw", spec]),
                    f"{_gap(gaps['adamw', spec])} / {_gap(gaps['sgd', spec])}",
                    spec == _NAMED,
                )
                for spec, label in _FRONT.items()
            ],
        ),
    ]


def _gap(per_cent: float) -> str:
    return f"{per_cent:.1f}".replace("-0.0", "0.0").replace("-", "−")


def _times(row: Mapping[str, Any], digits: int = 1) -> str:
    return f"{row['ratio_to_compute']:.{digits}f}×"


# ---- the page --------------------------------------------------------------------------------------------------------


def _conclusion(found: Records) -> str:
    slow, fast, demo = (_rows(found, about) for about in ("slow", "fast", "demo"))
    own, half, whole = "topk:density=0.01+ef", "fp16", "none"
    stages, memory = _rows(found, "stages", "name"), _rows(found, "memory", "name")
    kept = 1 - memory["bf16, 8 bits"]["kept_bytes"] / memory["bf16"]["kept_bytes"]
    longer = memory["bf16, 8 bits"]["ratio_to_same_precision"]
    loss, four, one, sparse = (
        f"{demo[spec]['heldout_loss']:.2f}" for spec in (whole, "qsgd:bits=4", "eden:bits=1", own)
    )
    return (
        f"At 200 Mbit/s a step takes {_times(slow[whole])} as long as one that sends nothing, in 16 bits "
        f"{_times(slow[half])}, and with the largest 1 % of the gradient {_times(slow[own])}; at 1 Gbit/s "
        f"{_times(fast[whole])}, {_times(fast[half])} and {_times(fast[own])}. The demo's held-out loss is "
        f"{loss} uncompressed, {four} in 4 bits, {one} in one rotated bit, and {sparse} with the largest 1 %. "
        "Between stages, 8 bits forward and 4 back train "
        f"{stages['uniform:bits=8/qsgd:bits=4']['times_none']:.1f} times as many tokens per second. In 8 bits a "
        f"vision transformer under bf16 keeps {kept:.0%} less for backward, in steps {longer:.2f} times as long."
    )


def _panels(found: Records) -> list[Panel]:
    stages, memory = _rows(found, "stages", "name"), _rows(found, "memory", "name")
    between = {
        "32 bits both ways": "none",
        "16 bits": "fp16",
        "8 bits": "uniform:bits=8",
        "8 bits, gradients 4": "uniform:bits=8/qsgd:bits=4",
    }
    kept = {
        "plain": "bf16",
        "8 bits": "bf16, 8 bits",
        "4 bits": "bf16, 4 bits",
        "checkpointing": "bf16, checkpoint",
        "checkpointing, 8 bits": "bf16, checkpoint, 8 bits",
    }
    return [
        *front(found),
        Panel(
            "Between four stages",
            "tokens/s at 100 Mbit/s",
            [
                Bar(label, stages[name]["tokens_per_s"], f"{stages[name]['tokens_per_s']:,.0f}", "bits=" in name)
                for label, name in between.items()
            ],
        ),
        Panel(
            "Kept for backward",
            "DeiT-Ti under bf16, 32 images",
            [
                Bar(label, memory[name]["kept_bytes"], format_bytes(memory[name]["kept_bytes"]), "bits" in name)
                for label, name in kept.items()
                if name in memory
            ],
        ),
    ]


_OPENING = Opening(
    title="Speed and memory",
    says="What does compression save in time and memory, and what does it cost? It ought to take a step on a slow link "
    "near to one that sends nothing, to let stages of a model work where they would wait, and to train in a part of "
    "the memory.",
    ran="`narrowband bench` timed data parallelism and a pipeline, each on four real ranks behind links that the "
    "kernel shapes, and a vision transformer's training step, on one machine with two cores. `narrowband demo` "
    "trained a small GPT on four ranks.",
    found=_conclusion,
    panels=_panels,
)


def _table(
    title: str, text: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *told: Mapping[str, Any]
) -> list[str]:
    """Return the lines of a section: its text, its table, and the records that the figures come from."""
    return [
        *(f"## {title}", "", text, "", "| " + " | ".join(headings) + " |", "| --- |" + " ---: |" * (len(headings) - 1)),
        *("| " + " | ".join(row) + " |" for row in rows),
        *(line for record in told for line in ("", source(dict(record), [str(record["commit"])]))),
        "",
    ]


def page(found: Records, path: Path) -> None:
    """Write the page."""
    slow, fast, more = (_rows(found, about) for about in ("slow", "fast", "more machines"))
    stages, memory = _rows(found, "stages", "name"), _rows(found, "memory", "name")
    demo, loops = _rows(found, "demo"), _rows(found, "loops", "loop")
    lines = [
        *beginning(found, (), _OPENING, paper="Records of `narrowband bench` and `narrowband demo`", page=path.stem),
        *_table(
            "Data parallelism behind slow links",
            "A GPT of 13.3 million parameters on four ranks, each behind its own link. Step: over the same step with "
            "no communication at all. Sent: by one rank in a step, as the kernel counted it at 200 Mbit/s. Ranks share "
            "two cores, so encoding competes with computing as it would not on machines of their own. All rows train "
            "by SGD with momentum, which `dgc` has before the wire.",
            ("codec", "sent", "step at 200 Mbit/s", "step at 1 Gbit/s"),
            [
                (_code(name), format_bytes(row["link_bytes_per_step"]), _times(row, 2), _times(fast[name], 2))
                for name, row in slow.items()
                if row["sent_bytes_per_step"] != 0 and name in fast
            ],
            found["slow"],
            found["fast"],
        ),
        *_table(
            "Machines of several ranks",
            "The same GPT on two and on four machines of two ranks each, which share their machine's link of 200 "
            "Mbit/s. Flat: all ranks are alike. Levels: ranks sum exactly inside their machine, and each sends half of "
            "the model to its counterparts on the others. FSDP2: the model is sharded inside each machine. Sent: by a "
            "machine in a step, as the kernel counted it. Step: over one that sends nothing. Here the ranks of a "
            "machine reach each other by loopback, and all of them share two cores, so what they do inside costs more "
            "than over NVLink or PCIe. With two levels a *rank* sends less than half. A *machine* saves less, because "
            "a ring enters and leaves it once, however many ranks it has: with L ranks on each of N machines it sends "
            "2·(N−1)/N instead of 2·(L·N−1)/(L·N) times the model. Payloads that are gathered all go to every machine, "
            "and there two levels save as much for a machine as for a rank; eight ranks add top-k up by owners "
            "instead, which leaves little to save.",
            ("row", "sent, two machines", "step", "sent, four machines", "step"),
            [
                (
                    _code(name),
                    *(
                        x
                        for each in (row, more[name])
                        for x in (format_bytes(each["link_bytes_per_step"]), _times(each, 2))
                    ),
                )
                for name, row in _rows(found, "machines").items()
            ],
            found["machines"],
            found["more machines"],
        ),
        *_table(
            "Top-k among more ranks",
            "A GPT of 3.3 million parameters; the largest 1 % of every layer is added up by owners, and the largest "
            "sums are sent to all ([how](sums.md)). Sent: by one rank in a step, as the library says, and as the "
            "kernel counted it, with the headers of many small messages. A rank sends about three payloads times "
            "(N−1)/N; gathered, it would send N−1.",
            ("ranks", "sent", "counted"),
            [
                (str(ranks), format_bytes(row["sent_bytes_per_step"]), format_bytes(row["link_bytes_per_step"]))
                for ranks in _SUMS
                for name, row in _rows(found, f"sums-{ranks}").items()
                if name.startswith("topk")
            ],
            *(found[f"sums-{ranks}"] for ranks in _SUMS),
        ),
        *_table(
            "One model on all machines",
            "A GPT of 13.3 million parameters, sharded by FSDP2 among four ranks, each behind its own link of 200 "
            "Mbit/s. Rows say what gradients and parameters are compressed with. Sent: by one rank in a step, as the "
            "kernel counted it; gloo's own reduce-scatter sends more than a ring would. Step: over the same step of a "
            "whole model with no communication at all. [Inside FSDP2](sharded.md) says what each does to the loss.",
            ("gradients / parameters", "sent", "step", "over a step that sends nothing"),
            [
                (_code(name), format_bytes(row["link_bytes_per_step"]), format_seconds(row["step_s"]), _times(row, 2))
                for name, row in _rows(found, "sharded").items()
            ],
            found["sharded"],
        ),
        *_table(
            "Between the stages of a model",
            "A GPT in four stages, each behind a link of 100 Mbit/s, under 1F1B. Bytes are those of one micro-batch "
            "over one boundary. It took too few steps to judge accuracy by: [Activations between "
            "stages](model_parallel.md) says what each costs.",
            ("forward / backward", "bytes forward", "bytes backward", "tokens/s", "times uncompressed"),
            [
                (
                    _code(name),
                    *(
                        NOTHING if row[way] is None else format_bytes(row[way])
                        for way in ("forward_nbytes", "backward_nbytes")
                    ),
                    f"{row['tokens_per_s']:,.0f}",
                    f"{row['times_none']:.1f}",
                )
                for name, row in stages.items()
            ],
            found["stages"],
        ),
        *_table(
            "What backward keeps",
            "DeiT-Ti, 32 images of 224 × 224. Kept: between forward and backward. Peak: above the model and its "
            "inputs, with an allocator that uses freed memory again ([how](../how-to/activations.md)). Step: over the "
            "plain one in float32. Gradient: how far it is from the exact one.",
            ("row", "kept", "peak", "step", "gradient off by"),
            [
                (
                    name,
                    format_bytes(row["kept_bytes"]),
                    format_bytes(row["peak_bytes"]),
                    f"{row['ratio_to_plain']:.2f}×",
                    f"{row['gradient_error']:.1%}" if row["gradient_error"] else NOTHING,
                )
                for name, row in memory.items()
            ],
            found["memory"],
        ),
        *_table(
            "What 8 bits cost in other architectures",
            f"Architectures of {_packages(found)} with random parameters, of which narrowband knows nothing, each "
            "with the smallest batch, a power of two, whose plain step takes 0.3 s. Step: over the plain step right "
            "before it, median of the rounds. Kept: for backward, of what the plain step keeps. Peak: bytes of tensors "
            "alive at once beside parameters and inputs, of the plain step's. Cosine: of the angle "
            f"between a batch's gradient and the exact one. {sentence(found['zoo']['rows'])}",
            ("architecture", "family", "batch", "plain step", "step", "kept", "peak", "cosine"),
            [
                (
                    row["name"],
                    row["family"],
                    str(row["batch"]),
                    format_seconds(row["plain_s"]),
                    f"{row['ratio_to_plain']:.2f}×",
                    f"{row['kept_share']:.0%}",
                    f"{row['peak_share']:.0%}" if row["peak_share"] else NOTHING,
                    f"{row['gradient_cosine']:.4f}",
                )
                for row in sorted(found["zoo"]["rows"], key=lambda row: -row.get("ratio_to_plain", 0.0))
                if "skipped" not in row
            ],
            found["zoo"],
        ),
        *_table(
            "Where the time goes",
            "Of these architectures, by family: shares of the plain step in which tensors that an operator saves are "
            "packed and restored, means over the family, of one step. Whole: by how much the step is longer, the "
            "median over rounds. Rest: the difference of both, which holds hooks, memory that is cold or new, and the "
            "noise between steps; so it may be negative.",
            ("family", "architectures", "whole", "by operator", "rest"),
            [
                (
                    row["family"],
                    str(row["architectures"]),
                    f"{row['whole']:+.1%}",
                    ", ".join(f"{name} {share:.1%}" for name, share in row["operators"].items() if share >= 0.005),
                    f"{row['rest']:+.1%}",
                )
                for row in profile(found["zoo"]["rows"])
            ],
            found["zoo"],
        ),
        *_table(
            "What one saved tensor costs",
            "A chain of layers that compute next to nothing and save a tensor each, rows of 64. Layer: its forward and "
            "backward in plain training. Kept: what comes to it where the tensor is left as it is. Packed: where it is "
            "packed in 8 bits and restored. Tensors of fewer than 4,096 elements are left as they are (`min_numel`).",
            ("elements", "layer", "+ kept", "+ packed", "saves"),
            [
                (
                    f"{row['numel']:,}",
                    *(f"{row[name]:,.0f} µs" for name in ("plain_us", "kept_us", "packed_us")),
                    format_bytes(row["saved_nbytes"]),
                )
                for row in found["tensors"]["rows"]
            ],
            found["tensors"],
        ),
        *_table(
            "Training in a budget",
            "The same architectures with AdamW and small batches, whose plain step takes 0.05 s. All: bytes of tensors "
            "that are alive at once in training as it is. Budgets have room for four fifths and for half of what that "
            "is beside parameters, the optimizer's state and inputs, and `narrowband memory gpt --budget 1GB` "
            "([how](../how-to/activations.md)) looks for the fastest way to train within them. Off: how far the bytes "
            "that it predicts are from those that are measured then. Step: over the plain one, of the choice. "
            "Not met: the least that was found is above the budget. "
            f"{foretold(found['budgets']['rows'])}",
            ("architecture", "all", "four fifths", "off", "step", "half", "off", "step"),
            [
                (row["name"], format_bytes(row["plain_bytes"]), *(x for each in row["budgets"] for x in _budget(each)))
                for row in found["budgets"]["rows"]
                if "skipped" not in row
            ],
            found["budgets"],
        ),
        *_table(
            "The demo",
            "A GPT of 3.3 million parameters on the source text of Python's standard library, four ranks, one seed. "
            f"Each rank has two windows of 32 bytes in a step; {found['demo']['config']['steps']} steps of AdamW, "
            "betas 0.9 and 0.95, weight decay 0.1, gradients clipped at norm 1; the learning rate rises to 0.001 over "
            "30 % of the steps and falls along a cosine to a tenth of that.",
            ("codec", "times less traffic", "held-out loss"),
            [
                (_code(name), f"{row['times_less_traffic']:.1f}", f"{row['heldout_loss']:.3f}")
                for name, row in demo.items()
            ],
            found["demo"],
        ),
        *_table(
            "How fast the loops are",
            "Time of a loop over that of `y.copy_(x)`, 25 million float32 elements, on two cores. Copies on a shared "
            "machine vary by a factor of two from minute to minute, and ratios with them.",
            ("loop", "× copy"),
            [
                (text, f"{ratio:.1f}" if (ratio := loops[name]["ratio_to_copy"]) < 10 else f"{ratio:.0f}")
                for name, text in _LOOPS.items()
            ],
            found["loops"],
        ),
    ]
    write_page(path, lambda _: "\n".join(lines).rstrip() + "\n", found, _OPENING)


def _packages(found: Records) -> str:
    """Name the packages that the measured architectures come from."""
    names = dict.fromkeys(ZOO[row["name"]].package for row in found["zoo"]["rows"] if "skipped" not in row)
    called = {"torch": "PyTorch"}
    return " and ".join(called.get(name, name) for name in names)


def _budget(found: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the cells of a budget: measured bytes, their difference from the prediction, and the step's time."""
    held = format_bytes(found["measured"])
    return held if found["reached"] else f"{held}, not met", f"{found['error']:+.1%}", f"{found['ratio_to_plain']:.2f}×"


def _code(name: str) -> str:
    """Format a spec, or two, as code; names of torch's own methods stay as they are."""
    return name if name.startswith("torch") else " / ".join(f"`{spec}`" for spec in name.split("/"))
