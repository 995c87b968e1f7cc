"""Compressed activations and gradients (Rudakov, Beznosikov, Kholodov, Gasnikov 2023, arXiv 2401.07788).

The paper cuts a model into four stages and compresses what crosses the three boundaries between them: activations on
their way forward, and their gradients on their way back. It quantizes (its table 1), keeps the largest elements of each
sample (table 2), adds error feedback with a buffer that all batches share (table 3) or one per sample (AQ-SGD, table
4), and fine-tunes a language model (table 5). After training it evaluates twice: with compression and without. It finds
that gradients bear less than activations; that a tenth of the elements is enough, and less is not; that a model which
was trained with top-k needs it when it is evaluated, too; that error feedback is no better, but makes models that do
not need it; that AQ-SGD wants three tenths; and that a language model has to get gradients for the elements that were
sent forward.

As in the paper, one process trains the whole model and compresses where machines would meet; here as many rows run side
by side as ``--nodes`` says, with one thread each.

Run ``python -m reproduce.model_parallel`` (about an hour and a half on two cores), ``--quick`` (seconds), ``--help``.
Pictures of training losses, one per table (the paper's figures 2 to 6), are drawn beside the results.

Differences from the paper:

* ResNet-8 instead of ResNet-18, 5 epochs over 40,000 of the images instead of 100 over all, peak learning rate 0.1
  instead of 0.01. Warm-up is one epoch of these five, and 20 of 100 (table 3) or 10 of 100 (table 4) there. Scores are
  one run's after its last epoch; the paper's are the best of five runs.
* Buffers stay as they are during evaluation; the authors' code lets test batches change them.
* The paper quantizes between the smallest and the largest value of a whole tensor, and so do rows here, in parts of 2²⁰
  elements. One row, *in groups*, does it by 128, this library's default: it is not the paper's, and shows how much of a
  finding is due to outliers.
* AQ-SGD has a buffer per image, as Wang et al. (arXiv 2206.01299) describe it, and keeps it in 16 bits: 2.3 GB per row.
* AQ-SGD is not tried on the language model: its windows begin elsewhere in every epoch, so no sample comes twice.
* A GPT of 0.9 million parameters over bytes of WikiText-2 instead of GPT-2 over its words. What stands for pre-training
  are the first three epochs of every row, without compression; four follow with it, as in the paper.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowband.units import format_seconds
from reproduce.command import Experiment, Recipe, main
from reproduce.pictures import Bar, Panel
from reproduce.report import DENSE, Claim, Column, Group, Layout, Opening, as_good_as, judged, needed, score_panel
from reproduce.training import Row

__all__ = ["EXPERIMENT"]

_CIFAR = Row(
    "cifar", DENSE, "none", epochs=5, lr=0.1, batch=100, weight_decay=5e-4, limit=40_000,
    forward="none", backward="none",
)  # fmt: skip
_GPT = Row(
    "gpt", DENSE, "none", optimizer="adamw", epochs=7, lr=2e-3, batch=32, weight_decay=0.01, clip=1.0, limit=500_000,
    warmup_epochs=3, forward="none", backward="none",
)  # fmt: skip

#: Elements that share a smallest and a largest value: as many as can.
_WHOLE = 1 << 20

#: Points of accuracy within which a row is as good as another; that evaluation without compression costs at least,
#: where it costs something; and that are noise, where two are compared. Share of dense accuracy that is learning.
_KEPT = 2.0
_NEEDED = 7.0
_NOISE = 0.5
_LEARNED = 0.5
_PERPLEXITY_KEPT = 0.07
#: Share of the held-out loss, in nats, within which a language model is as good.
_LOSS_KEPT = 0.02


@dataclass(frozen=True)
class _Said:
    """What the paper says of a row.

    Attributes:
        row: ours.
        uncompressed: test accuracy of a model that is evaluated without compression; None for the language model.
        compressed: the same with it; of the language model the perplexity.
        loss: of the language model, as the paper has it.
    """

    row: Row
    uncompressed: float | None
    compressed: float | None
    loss: float | None = None


def _top(density: float) -> str:
    return f"topk:density={density:g},scope=sample"


def _quantized(activations: int, gradients: int, *said: float, group: int = _WHOLE, note: str = "") -> _Said:
    forward, backward = (f"uniform:bits={bits},group={group}" for bits in (activations, gradients))
    name = f"fw{activations}-bw{gradients}{note}"
    return _Said(replace(_CIFAR, name=name, forward=forward, backward=backward), *(said or (None, None)))


def _sparse(density: float, *said: float, feedback: str = "", warmup_epochs: int = 0) -> _Said:
    name = f"{f'{feedback} + ' if feedback else ''}top {density:.0%}{', warm-up' if warmup_epochs else ''}"
    spec = _top(density) + (f"+{feedback.lower()}" if feedback else "")
    return _Said(replace(_CIFAR, name=name, forward=spec, backward=spec, warmup_epochs=warmup_epochs), *said)


def _by_sample(density: float, *said: float) -> _Said:
    """AQ-SGD selects from one sample at a time whatever the scope is."""
    forward = f"topk:density={density:g}+aq-sgd:store=fp16"
    name = f"AQ-SGD + top {density:.0%}"
    return _Said(replace(_CIFAR, name=name, forward=forward, backward=_top(density), warmup_epochs=1), *said)


def _language(density: float, loss: float, perplexity: float, *, reuse: bool = True) -> _Said:
    forward = _top(density)
    backward = f"topk:density={density:g},reuse=forward" if reuse else forward
    name = f"top {density:.0%}{'' if reuse else ' separate'}"
    return _Said(replace(_GPT, name=name, forward=forward, backward=backward), None, perplexity, loss)


def _on_a_link(name: str, forward: str, backward: str) -> _Said:
    """What ``narrowband bench pipeline`` measures the speed of, compressed from the first step on."""
    return _Said(replace(_GPT, name=name, forward=forward, backward=backward, warmup_epochs=0), None, None)


_NONE = _Said(_CIFAR, 93.00, 93.00)

#: Table → its rows, the uncompressed one first. Numbers are the paper's: evaluated without compression, and with it.
_TABLES: dict[str, tuple[_Said, ...]] = {
    "table 1": (
        _NONE,
        _quantized(4, 8, 93.10, 92.95),
        _quantized(4, 6, 91.93, 91.76),
        _quantized(4, 4, 83.39, 82.66),
        _quantized(4, 2, 65.11, 64.27),
        _quantized(2, 8, 77.09, 92.05),
        _quantized(2, 6, 84.87, 91.59),
        _quantized(2, 4, 81.32, 83.92),
        _quantized(4, 4, group=128, note=" in groups"),
    ),
    "table 2": (
        _NONE,
        _sparse(0.5, 93.16, 93.38),
        _sparse(0.3, 91.26, 93.06),
        _sparse(0.2, 86.74, 92.73),
        _sparse(0.1, 75.89, 91.87),
        _sparse(0.05, 55.09, 90.01),
        _sparse(0.02, 49.95, 85.52),
    ),
    "table 3": (
        _NONE,
        _sparse(0.1, 91.02, 89.85, feedback="EF", warmup_epochs=1),
        _sparse(0.1, 61.37, 90.97, feedback="EF-mixed", warmup_epochs=1),
        _sparse(0.05, 89.37, 89.29, feedback="EF21"),
        _sparse(0.1, 90.83, 91.19, feedback="EF21"),
        _sparse(0.1, 90.71, 91.77, feedback="EF21", warmup_epochs=1),
    ),
    "table 4": (
        _NONE,
        _by_sample(0.5, 92.44, 92.54),
        _by_sample(0.3, 91.86, 91.61),
        _by_sample(0.2, 90.82, 87.80),
        _by_sample(0.1, 85.91, 84.16),
    ),
    "table 5": (
        _Said(_GPT, None, 21.01, 3.05),
        _language(0.5, 3.11, 22.38),
        _language(0.3, 3.27, 26.28),
        _language(0.2, 3.51, 33.32),
        _language(0.1, 4.31, 74.51),
        _language(0.1, 8.0, 2990.16, reuse=False),
    ),
    "link": (
        _Said(_GPT, None, 21.01, 3.05),
        _on_a_link("8 bits", "uniform:bits=8", "uniform:bits=8"),
        _on_a_link("8 bits, gradients 4", "uniform:bits=8", "qsgd:bits=4"),
        _on_a_link("4 bits", "uniform:bits=4", "qsgd:bits=4"),
        _on_a_link("top 10% from the start", _top(0.1), "topk:density=0.1,reuse=forward"),
    ),
}
_SAID = {(said.row.task, said.row.name): said for rows in _TABLES.values() for said in rows}

_LEGEND = (
    "Off: the score of a model that is evaluated without compression; on: with it, as it was trained; loss: with it, "
    "per token, which is a byte. Paper: off/on, and in table 5 loss/perplexity, of other models that were trained for "
    "longer. Fw, bw: how many times fewer bytes cross a boundary forward and backward in the last epoch, the least and "
    "the most of the three."
)


# ---- claims ----------------------------------------------------------------------------------------------------------

_WITH_FEEDBACK = (
    "EF + top 10%, warm-up",
    "EF-mixed + top 10%, warm-up",
    "EF21 + top 10%",
    "EF21 + top 10%, warm-up",
)


def _claims(found: Sequence[Group]) -> list[Claim]:
    return [
        _judged(
            found,
            f"activations in 4 bits: with gradients in 8 accuracy is within {_KEPT:g} points of dense, with gradients "
            "in 4 or 2 it is not",
            ("fw4-bw8", "fw4-bw4", "fw4-bw2"),
            lambda dense, kept, *lost: _kept(kept, dense) and not any(_kept(each, dense) for each in lost),
        ),
        _judged(
            found,
            "of six bits, gradients need more than activations: fw2-bw4 is better than fw4-bw2",
            ("fw2-bw4", "fw4-bw2"),
            lambda _, few_forward, few_backward: _on(few_forward) > _on(few_backward),
        ),
        _judged(
            found,
            f"top 10% is within {_KEPT:g} points of dense, top 5% and top 2% are not",
            ("top 10%", "top 5%", "top 2%"),
            lambda dense, kept, *lost: _kept(kept, dense) and not any(_kept(each, dense) for each in lost),
        ),
        _judged(
            found,
            f"models trained with top 10% or less lose at least {_NEEDED:g} points when they are evaluated without it",
            ("top 10%", "top 5%", "top 2%"),
            lambda _, *rows: all(_on(each) - _off(each) >= _NEEDED for each in rows),
        ),
        _judged(
            found,
            f"error feedback is not better than plain top-k by more than {_NOISE:g} points",
            ("top 5%", "EF21 + top 5%", "top 10%", *_WITH_FEEDBACK),
            lambda _, plain5, own5, plain10, *own10: (
                all(_on(own) <= _on(plain10) + _NOISE for own in own10) and _on(own5) <= _on(plain5) + _NOISE
            ),
        ),
        _judged(
            found,
            f"with EF and EF21 models learn, and evaluation without it is within {_KEPT:g} points of that with it",
            tuple(name for name in ("EF21 + top 5%", *_WITH_FEEDBACK) if "mixed" not in name),
            lambda dense, *rows: all(
                abs(_on(each) - _off(each)) <= _KEPT and _on(each) >= _LEARNED * _on(dense) for each in rows
            ),
        ),
        _judged(
            found,
            f"AQ-SGD: top 50% and top 30% are within {_KEPT:g} points of dense, top 20% and top 10% are not",
            tuple(f"AQ-SGD + top {percent}%" for percent in (50, 30, 20, 10)),
            lambda dense, half, third, *lost: (
                _kept(half, dense) and _kept(third, dense) and not any(_kept(each, dense) for each in lost)
            ),
        ),
        _judged(
            found,
            "a language model, top 10%: gradients of the elements that went forward are better than the largest ones",
            ("top 10%", "top 10% separate"),
            lambda _, reused, separate: (
                reused.mean is not None and (separate.mean is None or reused.mean < separate.mean)
            ),
            task="gpt",
        ),
        as_good_as(
            found, "gpt", "top 50%", f"a language model: top 50% is within {_PERPLEXITY_KEPT:.0%} of dense perplexity",
            within=_PERPLEXITY_KEPT, relative=True,
        ),
        *(
            _judged(
                found,
                f"a language model, {said.row.name}: held-out loss is within {_LOSS_KEPT:.0%} of dense",
                (said.row.name,),
                lambda dense, group: _loss(group) <= _loss(dense) * (1 + _LOSS_KEPT),
                task="gpt",
            )
            for said in _TABLES["link"][1:]
        ),
    ]  # fmt: skip


def _judged(
    found: Sequence[Group], text: str, names: Sequence[str], verdict: Callable[..., bool], *, task: str = "cifar"
) -> Claim:
    """The claim of these rows; ``verdict`` gets the dense group, and then theirs."""
    claim = judged(found, task, text, names, verdict, _figures)
    if claim.held is None:
        return claim
    said = "; ".join(f"{name} {_of_paper(task, name)}" for name in names if _SAID[task, name].compressed is not None)
    return replace(claim, figures=f"{claim.figures}; the paper: {said}") if said else claim


def _figures(group: Group) -> str:
    return f"{group.name} {group.score()}" + ("" if group.uncompressed is None else f", off {group.uncompressed:.2f}")


def _of_paper(task: str, name: str) -> str:
    said = _SAID[task, name]
    return f"{said.compressed:g}" + ("" if said.uncompressed is None else f", off {said.uncompressed:g}")


def _on(group: Group) -> float:
    """Accuracy with compression; a row that diverged is worse than any other."""
    return -math.inf if group.mean is None else group.mean


def _off(group: Group) -> float:
    return -math.inf if group.uncompressed is None else group.uncompressed


def _loss(group: Group) -> float:
    """Of a language model, in nats per token."""
    return math.inf if group.mean is None else math.log(group.mean)


def _kept(group: Group, dense: Group) -> bool:
    return _on(group) >= _on(dense) - _KEPT


# ---- tables and pictures ---------------------------------------------------------------------------------------------


def _tables(found: Sequence[Group]) -> Iterator[tuple[str, list[Group]]]:
    """Those that have a row beside the dense one, which belongs to several."""
    for key, rows in _TABLES.items():
        places = [(said.row.task, said.row.name) for said in rows]
        own = sorted(
            (group for group in found if (group.task, group.name) in places),
            key=lambda group: places.index((group.task, group.name)),
        )
        if any(group.name != DENSE for group in own):
            yield key, own


def _two_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _paper(group: Group) -> str:
    said = _SAID[group.task, group.name]
    return f"{_two_digits(said.uncompressed if said.loss is None else said.loss)}/{_two_digits(said.compressed)}"


def _range(ratios: Sequence[float]) -> str:
    least, most = (f"{ratio:.1f}" for ratio in (min(ratios), max(ratios)))
    return least if least == most else f"{least}–{most}"


_ROW: Column = ("row", lambda group: group.name)
_OFF: Column = ("off", lambda group: _two_digits(group.uncompressed))
_REST: tuple[Column, ...] = (
    ("paper", _paper),
    ("fw", lambda group: _range([forward for forward, _ in group.boundaries])),
    ("bw", lambda group: _range([backward for _, backward in group.boundaries])),
    ("step", lambda group: format_seconds(group.step_s)),
)
_OF_IMAGES = (_ROW, _OFF, ("on", Group.score), *_REST)
_OF_LANGUAGE = (
    _ROW,
    _OFF,
    ("on", Group.score),
    ("loss", lambda group: _two_digits(None if group.mean is None else math.log(group.mean))),
    *_REST,
)


def _draw(rows: Sequence[dict[str, Any]], directory: Path) -> list[Path]:
    """Per table: training loss over epochs."""
    from matplotlib.figure import Figure

    drawn = []
    for key, all_said in _TABLES.items():
        own = [row for said in all_said for row in rows if (row["task"], row["name"]) == (said.row.task, said.row.name)]
        if all(row["name"] == DENSE for row in own):
            continue
        directory.mkdir(parents=True, exist_ok=True)
        figure = Figure(figsize=(8.0, 5.0), layout="constrained")
        axes = figure.subplots()
        colours = {name: f"C{at}" for at, name in enumerate(dict.fromkeys(row["name"] for row in own))}
        labelled = set()
        for row in own:
            name, of_epoch = row["name"], row["steps"] / row["epochs"]
            axes.plot(
                [step / of_epoch for step, _ in row["curve"]],
                [math.nan if loss is None else loss for _, loss in row["curve"]],
                color=colours[name],
                label=None if name in labelled else name,
            )
            labelled.add(name)
        axes.set(title=_TITLES[key], xlabel="epoch", ylabel="training loss")
        axes.grid(alpha=0.3)
        axes.legend()
        drawn.append(directory / f"{key.replace(' ', '-')}.png")
        figure.savefig(drawn[-1], dpi=120)
    return drawn


_IMAGES = "CIFAR-10, ResNet-8 in four stages"
_TITLES = {
    "table 1": f"Quantization (table 1): {_IMAGES}",
    "table 2": f"Top-k (table 2): {_IMAGES}",
    "table 3": f"Top-k with error feedback (table 3): {_IMAGES}",
    "table 4": f"AQ-SGD with top-k, after warm-up (table 4): {_IMAGES}",
    "table 5": "Top-k of gradients at the places of activations (table 5): WikiText-2 as bytes, GPT in four stages",
    "link": "What `narrowband bench pipeline` measures, from the first step on: WikiText-2 as bytes, GPT",
}

#: Task → what a picture shows: of bars and their rows.
_SHOWN = {
    "cifar": (
        ("uncompressed", DENSE),
        ("4 bits, gradients 8", "fw4-bw8"),
        ("4 bits in groups", "fw4-bw4 in groups"),
        ("largest 50 %", "top 50%"),
        ("largest 10 %", "top 10%"),
        ("largest 10 %, EF21", "EF21 + top 10%"),
    ),
    "gpt": (
        ("uncompressed", DENSE),
        ("8 bits", "8 bits"),
        ("8 bits, gradients 4", "8 bits, gradients 4"),
        ("4 bits", "4 bits"),
        ("largest 10 %", "top 10% from the start"),
    ),
}


def _shown(found: Sequence[Group], task: str) -> list[tuple[str, Group, bool]]:
    return [(label, needed(found, task, name), name != DENSE) for label, name in _SHOWN[task]]


def _found(found: Sequence[Group]) -> str:
    dense, eight, mixed, four, *_ = (group for _, group, _ in _shown(found, "gpt"))
    images, few, grouped, *_, top, _ = (group for _, group, _ in _shown(found, "cifar"))
    return (
        f"A language model's perplexity is {eight.score()} with 8 bits both ways, {mixed.score()} with gradients in 4 "
        f"bits and {four.score()} with activations in 4 bits too, after {dense.score()} uncompressed. On images 4 bits "
        f"per group of 128 lose little ({grouped.score()} % after {images.score()} %), and so do 4 bits forward with 8 "
        f"back ({few.score()} %). A tenth of the elements is not enough in training as short as this ({top.score()} %)."
    )


def _panels(found: Sequence[Group]) -> list[Panel]:
    panels = []
    for task, what, score in (
        ("gpt", "WikiText-2, GPT", "Held-out perplexity"),
        ("cifar", "CIFAR-10, ResNet-8", "Test accuracy, %"),
    ):
        shown = _shown(found, task)
        times = [
            (label, sum(forward for forward, _ in group.boundaries) / len(group.boundaries), strong)
            for label, group, strong in shown
        ]
        bars = [Bar(label, ratio, f"{ratio:.1f}×", strong) for label, ratio, strong in times]
        panels += [Panel(what, "times fewer bytes forward", bars), score_panel(score, shown)]
    return panels


EXPERIMENT = Experiment(
    module="model_parallel",
    paper="Rudakov et al. 2023, Activations and gradients compression for model-parallel training (arXiv 2401.07788)",
    titles=_TITLES,
    recipes=tuple(Recipe(said.row) for said in _SAID.values()),
    claims=_claims,
    opening=Opening(
        title="Activations between stages",
        says="What crosses the boundaries of a model that is cut into stages may be compressed: gradients bear less "
        "than activations; a tenth of the elements is enough, and less is not; error feedback is no better than plain "
        "top-k.",
        ran="A ResNet-8 on CIFAR-10 and a small GPT on bytes of WikiText-2, each in four stages in one process, as the "
        "paper has it, with quantization, top-k, error feedback and AQ-SGD at all three boundaries.",
        found=_found,
        panels=_panels,
    ),
    draw=_draw,
    nodes=2,
    layout=Layout(
        tables=_tables,
        columns=lambda key: _OF_LANGUAGE if key in ("table 5", "link") else _OF_IMAGES,
        legend=_LEGEND,
        pictures=lambda key: [
            (f"{key.replace(' ', '-')}.png", "Training loss over epochs, a curve for each row of the table")
        ],
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
