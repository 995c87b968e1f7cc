"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally 2018, arXiv 1712.01887), on CIFAR-10 and on characters.

The paper sends one element in a thousand, 270 to 600 times fewer bytes, and loses no accuracy. Plain sparsification,
which only accumulates what it does not send, loses more than a point on CIFAR-10 (the paper's figure 3a). Rows add the
parts of the method one by one, as published, and accumulate gradients:

* *plain*: elements that are not sent are accumulated and sent later; the optimizer applies momentum after averaging;
  the warm-up is that of the other rows;
* *correction*: each rank applies momentum before elements that are not sent are accumulated;
* *dgc*: the full method: correction, and masking, which stops the momentum of elements that were just sent. The row
  *dgc, no warm-up* leaves its warm-up out. On characters the method has Nesterov's momentum and clips on each rank, as
  in the paper.

In these rows, norms and biases are sent uncompressed, as in the authors' code. This library recommends two things
beyond the paper; each adds a row:

* *dgc, steps*: accumulate steps, gradients times the learning rate (``accumulate=steps``). Accumulated gradients are
  applied at the learning rate of the step that sends them, so where the rate falls, little remains of them;
* *dgc, steps, small 5%*: also compress norms, biases and the smallest layers, as one vector, of which five percent are
  sent. In networks this small they would otherwise be most of the bytes sent.

Run ``python -m reproduce.dgc`` (three hours and a quarter on two cores that had other work, too), ``--long`` (with
characters, and *dgc, no warm-up*: hours more), ``--quick`` (seconds), ``--help``.

Differences from the paper: smaller networks (ResNet-8 for ResNet-110, an LSTM over characters for one over words), and
10 epochs for 164 (12 for 40), of which one is warm-up (the paper: 4, and 1). An element waits for about a thousand
steps, a quarter of such a run, so the delay costs more than it would in a long run.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reproduce.claims import plain, under
from reproduce.command import Experiment, Recipe, main
from reproduce.groups import DENSE, Claim, Group, as_good_as, claimed, compared, judged, named, needed
from reproduce.pairs import Difference, Finding
from reproduce.pictures import Panel
from reproduce.report import PER_TASK, Layout, Opening, score_panel, seeded, sent_panel
from reproduce.row import Row

__all__ = ["EXPERIMENT"]

_PLAIN, _CORRECTION, _DGC, _NO_WARM_UP = "plain", "correction", "dgc", "dgc, no warm-up"
_STEPS, _OURS = "dgc, steps", "dgc, steps, small 5%"

_WARM_UP = "warmup_steps={warmup}"
_PUBLISHED = f"dgc:density=0.001,{_WARM_UP}"
_SMALL = "topk:density=0.05"
_MIN_NUMEL = 1000

_CIFAR = Row("cifar", DENSE, "none", epochs=10, lr=0.1, batch=128, weight_decay=1e-4, schedule="steps")
_CIFAR_DGC = replace(_CIFAR, name=_DGC, spec=_PUBLISHED, optimizer="dgc", warmup_epochs=1)

_CLIP = 0.25
_LSTM = Row(
    "lstm", DENSE, "none", epochs=12, lr=2.0, batch=16, weight_decay=0.0, clip=_CLIP, nesterov=True, schedule="steps"
)
_LSTM_DGC = replace(
    _LSTM,
    name=_DGC,
    spec=f"{_PUBLISHED},nesterov=true,clip={_CLIP}",
    optimizer="dgc",
    clip=None,  # each rank clips its own gradient, before it enters the velocity
    warmup_epochs=1,
)

#: Thresholds of claims: accuracy counts as kept if it is lower by at most this many points; plain sparsification should
#: lose more than this many; perplexity counts as kept if it is higher by at most this share; and the least of the
#: paper's ratios of bytes.
_POINTS_KEPT = 0.5
_POINTS_LOST = 1.0
_PERPLEXITY_KEPT = 0.01
_FEWER_BYTES = 270


def _steps(row: Row) -> Row:
    return replace(row, name=_STEPS, spec=f"{row.spec},accumulate=steps")


def _ours(row: Row) -> Row:
    return replace(_steps(row), name=_OURS, small=_SMALL, min_numel=_MIN_NUMEL)


_RECIPES = (
    Recipe(_CIFAR),
    Recipe(replace(_CIFAR, name=_PLAIN, spec=f"{_PUBLISHED},momentum=0", warmup_epochs=1)),
    Recipe(replace(_CIFAR_DGC, name=_CORRECTION, spec=f"{_PUBLISHED},masking=false")),
    Recipe(_CIFAR_DGC),
    Recipe(_steps(_CIFAR_DGC)),
    Recipe(_ours(_CIFAR_DGC)),
    Recipe(_LSTM, turn=1, long=True),
    Recipe(_LSTM_DGC, turn=1, long=True),
    Recipe(_ours(_LSTM_DGC), turn=1, long=True),
    Recipe(replace(_CIFAR_DGC, name=_NO_WARM_UP, warmup_epochs=0), turn=2, long=True),
)


def _claims(found: Sequence[Group]) -> list[Claim]:
    published = [
        as_good_as(
            found, "cifar", _DGC, f"DGC as published is within {_POINTS_KEPT:g} points of dense on CIFAR-10",
            within=_POINTS_KEPT, relative=False,
        ),
        _pair(
            found, f"plain sparsification loses more than {_POINTS_LOST:g} point on CIFAR-10, with the same warm-up",
            _PLAIN, DENSE, lambda apart: apart.worse(_POINTS_LOST),
        ),
        _pair(found, "the full method is better than plain sparsification", _DGC, _PLAIN, _better),
        _pair(found, "momentum correction helps: correction is better than plain", _CORRECTION, _PLAIN, _better),
        _pair(found, "masking helps: dgc is better than correction alone", _DGC, _CORRECTION, _better),
        _pair(found, "the warm-up helps: dgc is better than without it", _DGC, _NO_WARM_UP, _better),
    ]  # fmt: skip
    of_text = as_good_as(
        found, "lstm", _DGC,
        f"with Nesterov's momentum and clipping, DGC's perplexity is within {_PERPLEXITY_KEPT:.0%} of dense",
        within=_PERPLEXITY_KEPT, relative=True,
    )  # fmt: skip
    beyond = [
        _pair(found, "beyond the paper: steps that wait are better than gradients that wait", _STEPS, _DGC, _better),
        as_good_as(
            found, "cifar", _OURS, f"beyond the paper: {_OURS} is within {_POINTS_KEPT:g} points of dense on CIFAR-10",
            within=_POINTS_KEPT, relative=False,
        ),
        as_good_as(
            found, "lstm", _OURS, f"beyond the paper: {_OURS}: perplexity is within {_PERPLEXITY_KEPT:.0%} of dense",
            within=_PERPLEXITY_KEPT, relative=True,
        ),
        *(_few_bytes(found, task, _OURS, "beyond the paper: ") for task in ("cifar", "lstm")),
    ]  # fmt: skip
    return [
        *under("The method as published: images", published),
        *under(
            "The method as published: text, and bytes", [*(_few_bytes(found, task, _DGC) for task in _MODELS), of_text]
        ),
        *under("Beyond the paper: what this library adds", beyond, cut="beyond the paper: "),
    ]


def _better(apart: Difference) -> Finding:
    return apart.better()


def _pair(found: Sequence[Group], text: str, first: str, second: str, says: Callable[[Difference], Finding]) -> Claim:
    names = [name for name in (first, second) if name != DENSE]
    return judged(found, "cifar", text, names, lambda dense, own, other=None: says(compared(own, other or dense)))


def _few_bytes(found: Sequence[Group], task: str, name: str, note: str = "") -> Claim:
    text = f"{note}{task}, {name}: a payload at least {_FEWER_BYTES} times smaller than the gradient, after warm-up"
    said = f"{_CALLED[task]}: a payload at least {_FEWER_BYTES} times smaller than the gradient, after warm-up"
    group = named(found, task, name)
    if group is None or group.payload_ratio is None or group.matrix_ratio is None:
        return Claim(text, None, f"needs the row {name} of task {task}", said=said)
    claim = claimed(
        text,
        group.payload_ratio >= _FEWER_BYTES,
        f"{group.payload_ratio:.0f} times for the whole gradient, {group.matrix_ratio:.0f} for its matrices alone; "
        f"{group.ratio:.0f} times fewer bytes on the wire than a ring all-reduce among {group.nodes} ranks",
    )
    return replace(claim, said=said)


_CALLED = {"cifar": "images", "lstm": "text"}


def _found(found: Sequence[Group]) -> str:
    dense, plain, dgc, ours = (needed(found, "cifar", name) for name in (DENSE, _PLAIN, _DGC, _OURS))
    text, of_text = named(found, "lstm", DENSE), named(found, "lstm", _DGC)
    beside = ""
    if text is not None and of_text is not None:
        beside = f" On text the perplexity is {text.score()} uncompressed, and {of_text.score()} with DGC as published."
    return (
        f"On CIFAR-10 accuracy is {dense.score()} % uncompressed. Plain sparsification takes it "
        f"{compared(plain, dense).figure()} points from there, DGC as published {compared(dgc, dense).figure()} "
        f"(payloads {dgc.payload_ratio:.0f} times smaller), and this library's additions "
        f"{compared(ours, dense).figure()} ({ours.payload_ratio:.0f} times smaller).{beside}"
    )


def _panels(found: Sequence[Group]) -> list[Panel]:
    panels = []
    for task, what, score in (
        ("cifar", "CIFAR-10, ResNet-8", "Test accuracy, %"),
        ("lstm", "Characters, LSTM", "Held-out perplexity"),
    ):
        labels = {DENSE: "uncompressed", _PLAIN: "plain, 0.1 %", _DGC: "DGC, 0.1 %", _OURS: "DGC, steps, small 5 %"}
        own = [(label, named(found, task, name), name in (_DGC, _OURS)) for name, label in labels.items()]
        shown = [(label, group, strong) for label, group, strong in own if group is not None]
        panels += [sent_panel(what, shown), score_panel(score, shown)] if len(shown) > 1 else []
    return panels


def _draw(rows: Sequence[dict[str, Any]], directory: Path) -> list[Path]:
    """Draw, per task, the score after each epoch and the training loss, as means over seeds (figures 3a and 3b; 4)."""
    from matplotlib.figure import Figure

    drawn = []
    for task in dict.fromkeys(row["task"] for row in rows):
        directory.mkdir(parents=True, exist_ok=True)
        figure = Figure(figsize=(10.0, 4.5), layout="constrained")
        scores, losses = figure.subplots(1, 2)
        own = [row for row in rows if row["task"] == task]
        for name in dict.fromkeys(row["name"] for row in own):
            seeds = [row for row in own if row["name"] == name]
            after = [_mean(each) for each in zip(*(row["scores"] for row in seeds), strict=False)]
            scores.plot(range(1, len(after) + 1), after, label=plain(name))
            curves = list(zip(*(row["curve"] for row in seeds), strict=False))
            of_epoch = seeds[0]["steps"] / seeds[0]["epochs"]
            losses.plot(
                [marks[0][0] / of_epoch for marks in curves],
                [_mean([loss for _, loss in marks]) for marks in curves],
            )
        scores.set(xlabel="epoch", ylabel=own[0]["metric"])
        losses.set(xlabel="epoch", ylabel="training loss")
        for axes in (scores, losses):
            axes.grid(alpha=0.3)
        scores.legend()
        drawn.append(directory / f"{task}-curves.png")
        figure.savefig(drawn[-1], dpi=120)
    return drawn


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean, or NaN (which is not drawn) where a seed has diverged."""
    there = [value for value in values if value is not None]
    return statistics.mean(there) if len(there) == len(values) else math.nan


def _ran(found: Sequence[Group]) -> str:
    """Say what was run, by the recorded rows."""
    seeds = {task: sorted({seed for group in found if group.task == task for seed in group.seeds}) for task in _MODELS}
    models = " and ".join(f"{_MODELS[task]} ({seeded(own)})" for task, own in seeds.items() if own)
    return (
        f"{models[:1].upper()}{models[1:]} learned on four real ranks. Rows are uncompressed, plainly sparsified, with "
        "DGC's parts added one by one as published, and with what this library adds."
    )


#: Task → its model and data, in words.
_MODELS = {"cifar": "a ResNet-8 on CIFAR-10", "lstm": "an LSTM over characters of tiny shakespeare"}


def _covers(found: Sequence[Group]) -> list[tuple[str, str]]:
    """List the paper's tables and figures, and how the recorded rows cover them."""
    characters = (
        "here, with an LSTM over characters of tiny shakespeare"
        if named(found, "lstm", _DGC)
        else "not here yet: rows with characters of tiny shakespeare come with --long"
    )
    no_warm_up = "" if named(found, "cifar", _NO_WARM_UP) else "; DGC without its warm-up is not here yet"
    return [
        ("table 1, techniques of DGC and others", f"rows add them one by one{no_warm_up}; clipping is in the LSTM's"),
        ("table 2, ResNet-110 on CIFAR-10 with 4 workers", "here, with a ResNet-8"),
        ("table 2, with 8, 16 and 32 workers", "not reproduced: more ranks than two cores carry"),
        ("table 3, AlexNet and ResNet-50 on ImageNet", "not reproduced: days of GPU time"),
        ("table 4, an LSTM over words of Penn Treebank", characters),
        ("table 4, DeepSpeech on LibriSpeech", "not reproduced: no speech data here"),
        ("figure 1, the setting, and figure 2, momentum correction", "drawings of the method"),
        ("figure 3a, accuracy on CIFAR-10", "here, below the table, with a ResNet-8"),
        ("figure 3b, training loss on CIFAR-10", "here, below the table, with a ResNet-8"),
        ("figures 3c and 3d, ResNet-50 on ImageNet", "not reproduced: days of GPU time"),
        ("figure 4, perplexity and loss on Penn Treebank", characters),
        ("figure 5, DeepSpeech on AN4", "not reproduced: no speech data here"),
        (
            "the authors' code (github.com/synxlin/deep-gradient-compression, 24673d45d11b)",
            "its memory of momentum and residuals gives the same to the bit: `tests/published/test_dgc.py`",
        ),
        ("figure 6, speedup by network", "steps behind emulated links are on [another page](benchmarks.md)"),
    ]


EXPERIMENT = Experiment(
    module="dgc",
    paper="Lin et al. 2018, Deep Gradient Compression (arXiv 1712.01887)",
    titles={"cifar": "CIFAR-10, ResNet-8", "lstm": "tiny shakespeare, LSTM over characters"},
    recipes=_RECIPES,
    claims=_claims,
    draw=_draw,
    layout=Layout(
        legend=(
            (
                "row",
                (
                    "plain: plain sparsification; correction: with momentum correction alone; dgc: as published, with "
                    "masking, too; steps: steps of the optimizer wait, and not gradients; small 5%: norms, biases and "
                    "tensors below 1,000 elements travel as one vector, of which 5 % are sent"
                ),
            ),
            *PER_TASK.legend,
        ),
        pictures=lambda task: [(f"{task}-curves.png", "The score after each epoch, and training's loss")],
    ),
    seeds=(0, 1, 2),
    opening=Opening(
        title="Deep Gradient Compression (DGC)",
        says="Is one element in a thousand of every gradient enough? The paper says so: with momentum correction, "
        "masking, clipping and a warm-up, models become as good as uncompressed, with 270 to 600 times fewer bytes. "
        "Plain sparsification loses more than a point on CIFAR-10.",
        ran=_ran,
        found=_found,
        panels=_panels,
        covers=_covers,
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
