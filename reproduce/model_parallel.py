"""Compressed activations and gradients (Rudakov, Beznosikov, Kholodov, Gasnikov 2023, arXiv 2401.07788).

The paper cuts a model into four stages and compresses what crosses the three boundaries between them: activations in
forward, and their gradients in backward. Its experiments are:

* table 1: quantization;
* table 2: top-k, the largest elements of each sample;
* table 3: top-k with error feedback, whose buffer all batches share;
* table 4: top-k with one buffer per sample (AQ-SGD);
* table 5: fine-tuning a language model.

After training, the paper evaluates twice: with compression and without. It finds that gradients bear less compression
than activations; that a tenth of the elements is enough, and less is not; that a model which was trained with top-k
needs top-k in evaluation, too; that error feedback is no better, but makes models that do not need compression in
evaluation; that AQ-SGD needs three tenths of the elements; and that a language model needs gradients for exactly those
elements that were sent forward.

As in the paper, one process trains the whole model and compresses where machines would meet. ``--nodes`` rows run side
by side, with one thread each.

Run ``python -m reproduce.model_parallel`` (two hours and a quarter on two cores that had other work, too), ``--quick``
(seconds), ``--help``. With ``--long`` the rows near convergence are trained, too, two seeds of each: 30 epochs with the
paper's optimizer and schedule, half an hour to two hours of one core for each. ``--seeds 0 1`` gives all other rows a
second seed. The row without compression has three seeds; their spread is the noise against which differences between
rows of one seed are judged. Plots of training losses, one per table (the paper's figures 2 to 6), are drawn beside the
results.

Differences from the paper, beside those that the page lists (``_DEPARTS``):

* Warm-up near convergence is the paper's share of epochs (20 and 10 of 100); elsewhere it is one epoch of five.
* Batches have 100 samples, as in the paper; the authors' public notebook (github.com/Glemhel/
  ActivationsGradientsCompressionForMP, b61c1a5) has 128. The notebook uses WikiText-2 v1, and the paper raw-v1.
* EF-mixed is :mod:`narrowband.feedback.mixed`.
* AQ-SGD keeps its buffers in 16 bits: 2.3 GB per row.
* The GPT is pre-trained on tiny shakespeare, see :mod:`reproduce.pretrained`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from reproduce.claims import plain, under
from reproduce.command import Experiment, Recipe, main
from reproduce.groups import DENSE, MARGIN, Claim, Group, compared, judged, needed
from reproduce.pairs import Difference, Finding, difference, every
from reproduce.pictures import Bar, Panel
from reproduce.report import Column, Layout, Legend, Opening, score_panel
from reproduce.row import Row

__all__ = ["EXPERIMENT"]

_Of = TypeVar("_Of")

_CIFAR = Row(
    "cifar", DENSE, "none", epochs=5, lr=0.1, batch=100, weight_decay=5e-4, limit=40_000,
    forward="none", backward="none",
)  # fmt: skip
#: Rows near convergence: the paper's optimizer and schedule, and its shares of warm-up.
_LONG = replace(_CIFAR, epochs=30, lr=0.01, schedule="half-cosine", limit=None)
_GPT = Row(
    "gpt", DENSE, "none", optimizer="adamw", epochs=7, lr=2e-3, batch=32, weight_decay=0.01, clip=1.0, limit=500_000,
    warmup_epochs=3, forward="none", backward="none",
)  # fmt: skip
_TUNED = Row(
    "tuned", DENSE, "none", optimizer="adamw", epochs=4, lr=5e-4, batch=32, weight_decay=0.01, clip=1.0, limit=500_000,
    forward="none", backward="none",
)  # fmt: skip

#: Seeds of rows without compression, of rows near convergence, and of fine-tuning.
_SPREAD = (0, 1, 2)
_PAIRED = (0, 1)

#: Bounds in points of accuracy. _KEPT: a row is as good as another. _NEEDED: what evaluation without compression costs
#: at least, where it has a cost. _NOISE: noise between two rows. _LEARNED: the share of dense accuracy that counts as
#: learning.
_KEPT = 2.0
_NEEDED = 7.0
_NOISE = 0.5
_LEARNED = 0.5
_PERPLEXITY_KEPT = 0.07
#: Shares of the held-out loss in nats: within the first, a language model is as good as another; by the second, it is
#: clearly worse.
_LOSS_KEPT = 0.02
_LOSS_LOST = 0.1


@dataclass(frozen=True)
class _Said:
    """A row, with the paper's figures for it.

    Attributes:
        row: the row that is trained here.
        uncompressed: the paper's test accuracy, evaluated without compression; None for the language model.
        compressed: the same, evaluated with compression; for the language model the perplexity per word.
    """

    row: Row
    uncompressed: float | None
    compressed: float | None


def _top(density: float) -> str:
    return f"topk:density={density:g},scope=sample"


def _quantized(activations: int, gradients: int, *said: float, like: Row = _CIFAR, group: int = 0) -> _Said:
    """Return a row that quantizes between the minimum and maximum of a whole tensor or (``group``) of each group."""
    scope = f"group={group}" if group else "scope=tensor"
    forward, backward = (f"uniform:bits={bits},{scope}" for bits in (activations, gradients))
    name = f"fw{activations}-bw{gradients}{' in groups' if group else ''}"
    return _Said(replace(like, name=name, forward=forward, backward=backward), *(said or (None, None)))


def _sparse(
    density: float,
    *said: float,
    feedback: str = "",
    parts: bool = False,
    both: bool = True,
    warmup_epochs: int = 0,
    like: Row = _CIFAR,
) -> _Said:
    """Return a top-k row. Feedback, if any, applies in both directions (``both``) or to gradients alone.

    EF-mixed sends sums or, with ``parts``, parts.
    """
    called = f"{feedback}{' parts' if parts else ''}{'' if both else ' on gradients'} + " if feedback else ""
    name = f"{called}top {density:.0%}{', warm-up' if warmup_epochs else ''}"
    behind = f"+{feedback.lower()}{':sends=parts' if parts else ''}" if feedback else ""
    there, back = _top(density) + (behind if both else ""), _top(density) + behind
    row = replace(like, name=name, forward=there, backward=back, warmup_epochs=warmup_epochs)
    return _Said(row, *(said or (None, None)))


def _by_sample(density: float, *said: float, like: Row = _CIFAR, warmup_epochs: int = 1) -> _Said:
    """Return a row of AQ-SGD, which selects from one sample at a time, whatever the scope is."""
    forward = f"topk:density={density:g}+aq-sgd:store=fp16"
    name = f"AQ-SGD + top {density:.0%}"
    row = replace(like, name=name, forward=forward, backward=_top(density), warmup_epochs=warmup_epochs)
    return _Said(row, *said)


def _language(density: float, perplexity: float, *, reuse: bool = True) -> _Said:
    forward = _top(density)
    backward = f"topk:density={density:g},reuse=forward" if reuse else forward
    name = f"top {density:.0%}{'' if reuse else ' separate'}"
    return _Said(replace(_TUNED, name=name, forward=forward, backward=backward), None, perplexity)


def _on_a_link(name: str, forward: str, backward: str) -> _Said:
    """Return a row whose speed ``narrowband bench pipeline`` measures. It compresses from the first step on."""
    return _Said(replace(_GPT, name=name, forward=forward, backward=backward, warmup_epochs=0), None, None)


_NONE = _Said(_CIFAR, 93.00, 93.00)
#: The table of rows near convergence.
_NEAR = "near convergence"

#: Table → its rows, the uncompressed one first. The numbers are the paper's: evaluated without and with compression.
_TABLES: dict[str, tuple[_Said, ...]] = {
    _NEAR: (
        replace(_NONE, row=_LONG),
        _quantized(4, 8, 93.10, 92.95, like=_LONG),
        _sparse(0.1, 75.89, 91.87, like=_LONG),
        _sparse(0.05, 55.09, 90.01, like=_LONG),
        _sparse(0.1, 91.02, 89.85, feedback="EF", warmup_epochs=6, like=_LONG),
        _sparse(0.1, feedback="EF", both=False, warmup_epochs=6, like=_LONG),
        _sparse(0.1, 90.83, 91.19, feedback="EF21", like=_LONG),
        _by_sample(0.3, 91.86, 91.61, like=_LONG, warmup_epochs=3),
    ),
    "table 1": (
        _NONE,
        _quantized(4, 8, 93.10, 92.95),
        _quantized(4, 6, 91.93, 91.76),
        _quantized(4, 4, 83.39, 82.66),
        _quantized(4, 2, 65.11, 64.27),
        _quantized(2, 8, 77.09, 92.05),
        _quantized(2, 6, 84.87, 91.59),
        _quantized(2, 4, 81.32, 83.92),
        _quantized(4, 4, group=128),
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
        _sparse(0.1, feedback="EF", both=False, warmup_epochs=1),
        _sparse(0.1, 61.37, 90.97, feedback="EF-mixed", warmup_epochs=1),
        _sparse(0.1, 61.37, 90.97, feedback="EF-mixed", parts=True, warmup_epochs=1),
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
        _Said(_TUNED, None, 21.01),
        _language(0.5, 22.38),
        _language(0.3, 26.28),
        _language(0.2, 33.32),
        _language(0.1, 74.51),
        _language(0.1, 2990.16, reuse=False),
    ),
    "link": (
        _Said(_GPT, None, None),
        _on_a_link("8 bits", "uniform:bits=8", "uniform:bits=8"),
        _on_a_link("8 bits, gradients 4", "uniform:bits=8", "qsgd:bits=4"),
        _on_a_link("8 bits, gradients 2 rotated", "uniform:bits=8", "eden:bits=2"),
        _on_a_link("8 bits, gradients 1 rotated", "uniform:bits=8", "eden:bits=1"),
        _on_a_link("4 bits", "uniform:bits=4", "qsgd:bits=4"),
        _on_a_link("4 bits rotated", "eden:bits=4", "eden:bits=4"),
        _on_a_link("top 10% from the start", _top(0.1), "topk:density=0.1,reuse=forward"),
    ),
}
_SAID = {(said.row.task, said.row.name): said for rows in _TABLES.values() for said in rows}


def _recipes() -> Iterator[Recipe]:
    """Yield the rows that most claims are about first, and those near convergence last."""
    for key in ("table 1", "table 2", "table 3", "table 4", "table 5", "link", _NEAR):
        for said in _TABLES[key]:
            row, long = said.row, key == _NEAR
            seeds = _PAIRED if long or row.task == "tuned" else _SPREAD if row.name == DENSE else None
            yield Recipe(row, turn=int(long), long=long, seeds=seeds)


_LEGEND: Legend = (
    ("off", "the score of a model that is evaluated without compression"),
    ("on", "with it, as it was trained; mean ± standard deviation over seeds; without ±, of one seed"),
    ("− dense", f"how far that is from the uncompressed row, seed by seed, ± half of its 95 % interval ({MARGIN})"),
    ("paper", "off/on, and in table 5 the perplexity per word, of other models trained for longer"),
    (
        "fw, bw",
        (
            "how many times fewer bytes cross a boundary forward and backward in the last epoch, the least and the "
            "most of the three; in a row's name, bits forward and backward"
        ),
    ),
    (
        "EF, EF21, AQ-SGD",
        (
            "error feedback; changes against what receivers hold; the change of each sample since the epoch before. "
            "Warm-up: first epochs are uncompressed"
        ),
    ),
)


# ---- claims ----------------------------------------------------------------------------------------------------------

_WITH_FEEDBACK = (
    "EF + top 10%, warm-up",
    "EF-mixed + top 10%, warm-up",
    "EF-mixed parts + top 10%, warm-up",
    "EF21 + top 10%",
    "EF21 + top 10%, warm-up",
)


def _claims(found: Sequence[Group]) -> list[Claim]:
    """Return claims about rows near convergence, if there are any, and about all other rows."""
    lengths = {group.epochs for group in found if group.task == "cifar"}
    long = _of_images_near_convergence(found) if _LONG.epochs in lengths else []
    short = min(lengths, default=_CIFAR.epochs)
    shorter = [] if short == _LONG.epochs else _of_images(found, short)
    language = _of_language(found)
    return [
        *_images(f"Images, near convergence ({_LONG.epochs} epochs)", long, _LONG.epochs),
        *_images(f"Images, after {short} epochs", shorter, short),
        *under(
            "Language: fine-tuning",
            (claim for claim in language if claim.text.startswith(_FINE_TUNING)),
            cut=f"{_FINE_TUNING}: ",
        ),
        *under(
            "Language: compressed from the start",
            (claim for claim in language if not claim.text.startswith(_FINE_TUNING)),
            cut="a language model, ",
        ),
    ]


_FINE_TUNING = "fine-tuning"


def _images(topic: str, claims: Sequence[Claim], epochs: int) -> list[Claim]:
    """Put claims about images under a heading that names the epochs."""
    after = f", after {epochs} epochs"
    return under(topic, [replace(claim, said=claim.text.removesuffix(after)) for claim in claims])


def _of_images_near_convergence(found: Sequence[Group]) -> list[Claim]:
    judge = functools.partial(_judged, found, epochs=_LONG.epochs)
    return [
        judge(
            f"activations in 4 bits and gradients in 8: accuracy is within {_KEPT:g} points of dense",
            ("fw4-bw8",),
            lambda dense, own: _kept(own, dense),
        ),
        judge(
            f"top 10% is within {_KEPT:g} points of dense, top 5% is not",
            ("top 10%", "top 5%"),
            lambda dense, kept, lost: _kept(kept, dense) & ~_kept(lost, dense),
        ),
        judge(
            f"models trained with top 10% or less lose at least {_NEEDED:g} points when they are evaluated without it",
            ("top 10%", "top 5%"),
            lambda _, *rows: every(_costs(each).better(_NEEDED) for each in rows),
        ),
        judge(
            f"error feedback is not better than plain top-k by more than {_NOISE:g} points",
            ("top 10%", "EF + top 10%, warm-up", "EF21 + top 10%"),
            lambda _, plain, *rows: every(~compared(own, plain).better(_NOISE) for own in rows),
        ),
        judge(
            f"with EF and EF21 models learn, and evaluation without it is within {_KEPT:g} points of that with it",
            ("EF + top 10%, warm-up", "EF21 + top 10%"),
            lambda dense, *rows: every(_learned(each, dense) & _costs(each).within(_KEPT) for each in rows),
        ),
        judge(
            f"error feedback on gradients alone is not better than plain top-k by more than {_NOISE:g} points",
            ("top 10%", "EF on gradients + top 10%, warm-up"),
            lambda _, plain, own: ~compared(own, plain).better(_NOISE),
        ),
        judge(
            "error feedback on gradients alone, as in the authors' notebook, does not do that: such models lose at "
            f"least {_NEEDED:g} points when they are evaluated without it",
            ("EF on gradients + top 10%, warm-up",),
            lambda _, own: _costs(own).better(_NEEDED),
        ),
        judge(
            f"AQ-SGD: top 30% is within {_KEPT:g} points of dense",
            ("AQ-SGD + top 30%",),
            lambda dense, own: _kept(own, dense),
        ),
    ]


def _of_images(found: Sequence[Group], epochs: int) -> list[Claim]:
    judge = functools.partial(_judged, found, epochs=epochs)
    return [
        judge(
            f"activations in 4 bits: with gradients in 8 accuracy is within {_KEPT:g} points of dense, with gradients "
            "in 4 or 2 it is not",
            ("fw4-bw8", "fw4-bw4", "fw4-bw2"),
            lambda dense, kept, *lost: _kept(kept, dense) & every(~_kept(each, dense) for each in lost),
        ),
        judge(
            "of six bits, gradients need more than activations: fw2-bw4 is better than fw4-bw2",
            ("fw2-bw4", "fw4-bw2"),
            lambda _, few_forward, few_backward: compared(few_forward, few_backward).better(),
        ),
        judge(
            f"top 10% is within {_KEPT:g} points of dense, top 5% and top 2% are not",
            ("top 10%", "top 5%", "top 2%"),
            lambda dense, kept, *lost: _kept(kept, dense) & every(~_kept(each, dense) for each in lost),
        ),
        judge(
            f"models trained with top 10% or less lose at least {_NEEDED:g} points when they are evaluated without it",
            ("top 10%", "top 5%", "top 2%"),
            lambda _, *rows: every(_costs(each).better(_NEEDED) for each in rows),
        ),
        judge(
            f"error feedback is not better than plain top-k by more than {_NOISE:g} points",
            ("top 5%", "EF21 + top 5%", "top 10%", *_WITH_FEEDBACK),
            lambda _, plain5, own5, plain10, *own10: (
                ~compared(own5, plain5).better(_NOISE) & every(~compared(own, plain10).better(_NOISE) for own in own10)
            ),
        ),
        judge(
            f"error feedback on gradients alone is not better than plain top-k by more than {_NOISE:g} points",
            ("top 10%", "EF on gradients + top 10%, warm-up"),
            lambda _, plain, own: ~compared(own, plain).better(_NOISE),
        ),
        judge(
            f"with EF and EF21 models learn, and evaluation without it is within {_KEPT:g} points of that with it",
            ("EF21 + top 5%", *(name for name in _WITH_FEEDBACK if "mixed" not in name)),
            lambda dense, *rows: every(_learned(each, dense) & _costs(each).within(_KEPT) for each in rows),
        ),
        judge(
            f"AQ-SGD: top 50% and top 30% are within {_KEPT:g} points of dense, top 20% and top 10% are not",
            tuple(f"AQ-SGD + top {percent}%" for percent in (50, 30, 20, 10)),
            lambda dense, half, third, *lost: (
                _kept(half, dense) & _kept(third, dense) & every(~_kept(each, dense) for each in lost)
            ),
        ),
    ]


def _of_language(found: Sequence[Group]) -> list[Claim]:
    tuned, link = (functools.partial(_judged, found, task=task) for task in ("tuned", "gpt"))
    return [
        tuned(
            "fine-tuning, top 10%: gradients of the elements that went forward are better than the largest ones",
            ("top 10%", "top 10% separate"),
            lambda _, reused, separate: compared(reused, separate).better(),
        ),
        tuned(
            f"fine-tuning: top 50% is within {_PERPLEXITY_KEPT:.0%} of dense perplexity",
            ("top 50%",),
            lambda dense, own: compared(own, dense, relative=True).no_worse(_PERPLEXITY_KEPT),
        ),
        tuned(
            f"fine-tuning bears less than images: top 20% raises the held-out loss by more than {_LOSS_LOST:.0%}",
            ("top 20%",),
            lambda dense, own: compared(own, dense, relative=True, of=math.log).worse(_LOSS_LOST),
        ),
        *(
            link(
                f"a language model, {said.row.name}: held-out loss is within {_LOSS_KEPT:.0%} of dense",
                (said.row.name,),
                lambda dense, own: compared(own, dense, relative=True, of=math.log).no_worse(_LOSS_KEPT),
            )
            for said in _TABLES["link"][1:]
        ),
    ]


def _judged(
    found: Sequence[Group],
    text: str,
    names: Sequence[str],
    verdict: Callable[..., Finding],
    *,
    task: str = "cifar",
    epochs: int | None = None,
) -> Claim:
    """Judge a claim about these rows; ``verdict`` gets the dense group, and then the groups of ``names``."""
    length = "" if epochs is None else f", after {epochs} epochs"
    claim = judged(found, task, text + length, names, verdict, epochs=epochs)
    if claim.verdict() == "not tested":
        return claim
    said = "; ".join(f"{name} {_of_paper(task, name)}" for name in names if _SAID[task, name].compressed is not None)
    return replace(claim, figures=f"{claim.figures}; the paper: {said}") if said else claim


def _of_paper(task: str, name: str) -> str:
    said = _SAID[task, name]
    return f"{said.compressed:g}" + ("" if said.uncompressed is None else f", off {said.uncompressed:g}")


def _kept(group: Group, dense: Group) -> Finding:
    return compared(group, dense).no_worse(_KEPT)


def _learned(group: Group, dense: Group) -> Finding:
    return compared(group, dense, relative=True).no_worse(1.0 - _LEARNED)


def _costs(group: Group) -> Difference:
    """Return how much better evaluation with compression is than without it, for the same models."""
    on, off = (dict(zip(group.seeds, scores, strict=True)) for scores in (group.scores, group.uncompressed_scores))
    return difference(
        on, off, names=(group.name, f"{group.name} off"), higher_is_better=group.higher_is_better,
        dense=group.dense_scores,
    )  # fmt: skip


# ---- tables and pictures ---------------------------------------------------------------------------------------------


def _own(key: str, found: Sequence[_Of], what: Callable[[_Of], tuple[str, str, int]]) -> list[_Of]:
    """Return what belongs to a table, in the table's order; ``what`` returns task, name and epochs."""
    places = [(said.row.task, said.row.name) for said in _TABLES[key]]
    own = [each for each in found if what(each)[:2] in places and _is_long(what(each)) == (key == _NEAR)]
    return sorted(own, key=lambda each: places.index(what(each)[:2]))


def _is_long(place: tuple[str, str, int]) -> bool:
    task, _, epochs = place
    return task == "cifar" and epochs == _LONG.epochs


def _tables(found: Sequence[Group]) -> Iterator[tuple[str, list[Group]]]:
    """Yield tables that have a row besides the dense one, which belongs to several tables."""
    for key in _TABLES:
        own = _own(key, found, lambda group: (group.task, group.name, group.epochs))
        if any(group.name != DENSE for group in own):
            yield key, own


def _two_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _paper(group: Group) -> str:
    said = _SAID[group.task, group.name]
    on = _two_digits(said.compressed)
    return f"{_two_digits(said.uncompressed)}/{on}" if group.task == "cifar" else on


def _range(ratios: Sequence[float]) -> str:
    least, most = (f"{ratio:.1f}" for ratio in (min(ratios), max(ratios)))
    return least if least == most else f"{least}–{most}"


_ROW: Column = ("row", lambda group: group.name)
_OFF: Column = ("off", lambda group: _two_digits(group.uncompressed))
_ON: tuple[Column, ...] = (("on", Group.score), ("− dense", Group.versus_dense))
_REST: tuple[Column, ...] = (
    ("paper", _paper),
    ("fw", lambda group: _range([forward for forward, _ in group.boundaries])),
    ("bw", lambda group: _range([backward for _, backward in group.boundaries])),
)
_COLUMNS = (_ROW, _OFF, *_ON, *_REST)


def _draw(rows: Sequence[dict[str, Any]], directory: Path) -> list[Path]:
    """Draw the training loss over epochs, one picture per table."""
    from matplotlib.figure import Figure

    drawn = []
    for key in _TABLES:
        own = _own(key, rows, lambda row: (row["task"], row["name"], row["epochs"]))
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
                label=None if name in labelled else plain(name),
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
    _NEAR: f"Near convergence (rows of tables 1 to 4): {_IMAGES}",
    "table 1": f"Quantization (table 1): {_IMAGES}",
    "table 2": f"Top-k (table 2): {_IMAGES}",
    "table 3": f"Top-k with error feedback (table 3): {_IMAGES}",
    "table 4": f"AQ-SGD with top-k, after warm-up (table 4): {_IMAGES}",
    "table 5": "Fine-tuning, gradients at the places of activations (table 5): WikiText-2 as bytes, GPT that has read "
    "tiny shakespeare, in four stages",
    "link": "What `narrowband bench pipeline` measures, from the first step on: WikiText-2 as bytes, GPT",
}

#: Task → the bars of its picture, and their rows.
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
    """Return the bars of a task. Of several lengths of training, take the shortest, which has more rows."""
    epochs = min((group.epochs for group in found if group.task == task), default=None)
    return [(label, needed(found, task, name, epochs), name != DENSE) for label, name in _SHOWN[task]]


def _near_convergence(found: Sequence[Group]) -> str:
    """Say how far rows near convergence are from the dense one, if there are any."""
    own = dict(_tables(found)).get(_NEAR, [])
    dense = next((group for group in own if group.name == DENSE), None)
    if dense is None:
        return ""
    told = "; ".join(
        f"{compared(group, dense).figure()} with {_IN_WORDS[group.name]}" for group in own if group.name in _IN_WORDS
    )
    said = f"Near convergence accuracy is {dense.score()} % uncompressed, and differs from that by {told}. "
    return said if told else ""


#: What sentences call rows.
_IN_WORDS = {
    "fw4-bw8": "4 bits forward and 8 back",
    "top 10%": "a tenth of the elements",
    "EF + top 10%, warm-up": "a tenth and error feedback",
}


def _found(found: Sequence[Group]) -> str:
    dense, eight, _, four, *_ = (group for _, group, _ in _shown(found, "gpt"))
    images, few, *_ = (group for _, group, _ in _shown(found, "cifar"))
    near = _near_convergence(found) or (
        f"After {images.epochs} epochs accuracy is {images.score()} % uncompressed, and differs from that by "
        f"{compared(few, images).figure()} with 4 bits forward and 8 back. "
    )
    return (
        f"{near}A language model's perplexity is {dense.score()} uncompressed, {eight.score()} with 8 bits both ways "
        f"({compared(eight, dense).figure()}), and {four.score()} with 4 ({compared(four, dense).figure()})."
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


_FEEDBACK_HERE = (
    "table 3 here, with both readings of EF-mixed and with EF on gradients alone, which is what the authors' public "
    "notebook does"
)
_LANGUAGE_HERE = (
    "table 5 here, of a GPT of 0.9 million parameters that reads bytes: tiny shakespeare first, then WikiText-2"
)
_CURVES = "not reproduced: pictures here are of training losses, over at most 30 epochs, which take two cores hours"


def _covers(found: Sequence[Group]) -> list[tuple[str, str]]:
    """Return the paper's tables and figures, each with where it is, according to the rows that are present."""
    near = {group.name for group in found if group.task == "cifar" and group.epochs == _LONG.epochs}

    def too(rows: Mapping[str, str]) -> str:
        there = [said for said, name in rows.items() if name in near]
        missing = [said for said, name in rows.items() if name not in near]
        told = f"; near convergence, too: {', '.join(there)}" if there else ""
        return told + (f"; not near convergence yet: {', '.join(missing)}" if missing else "")

    quantized, plain, by_sample = (
        too({name.rpartition("+ ")[2]: name for name in names})
        for names in (("fw4-bw8",), ("top 10%", "top 5%"), ("AQ-SGD + top 30%",))
    )
    fed = too(
        {
            "EF with top 10%": "EF + top 10%, warm-up",
            "EF on gradients with top 10%": "EF on gradients + top 10%, warm-up",
            "EF21 with top 10%": "EF21 + top 10%",
        }
    )
    return [
        ("figure 1, the setting", "[pipeline parallelism](../how-to/pipeline.md)"),
        ("table 1 and figure 2, quantization", f"table 1 here, of a ResNet-8{quantized}"),
        ("table 2 and figure 3, top-k", f"table 2 here{plain}"),
        ("table 3 and figure 4, error feedback", f"{_FEEDBACK_HERE}{fed}"),
        ("table 4 and figure 5, AQ-SGD", f"table 4 here{by_sample}"),
        ("table 5 and figure 6, fine-tuning GPT-2", _LANGUAGE_HERE),
        (
            "the authors' notebooks (github.com/Glemhel/ActivationsGradientsCompressionForMP)",
            (
                "selection, error feedback, EF21 and index reuse give the same to the bit: "
                "`tests/published/test_model_parallel.py` says at which commits"
            ),
        ),
        ("curves of test accuracy in figures 2 to 5, over 100 epochs and five runs", _CURVES),
    ]


_DEPARTS = (
    (
        "A ResNet-8 stands for a ResNet-18. Most rows have 5 epochs over 40,000 of the images and a peak learning "
        "rate of 0.1. Those near convergence have 30 epochs over all images, from 0.01 along a cosine that would take"
        " twice as long; the paper has 100 epochs of that schedule."
    ),
    (
        "Scores here are those after the last epoch, as means over seeds. The paper's are the best epoch of the best "
        "of five runs."
    ),
    (
        "The paper's EF-mixed is C(x) + C(e), each with half of the elements, for activations x and the residual e. "
        "Two readings were run. *EF-mixed* sends x + e at places of which x chooses half and e half. *EF-mixed parts*"
        " sends x where x chose, and e where e chose; its first step, which has no residual, sends all of x's places,"
        " and an odd number of places favours x."
    ),
    (
        "The authors' public notebook has error feedback on gradients alone: for activations it is commented out. *EF"
        " on gradients* is that."
    ),
    (
        "Buffers of error feedback and of AQ-SGD stay as they are during evaluation; the authors' code lets test "
        "batches change them. AQ-SGD has a buffer per image, so an image of the test set, which has none, is "
        "compressed without."
    ),
    (
        "*In groups* quantizes between the smallest and the largest of 128 elements, this library's default, and not "
        "of a whole tensor. The paper has no such row; it shows how much is due to outliers."
    ),
    ("AQ-SGD is not tried on language models: their windows begin elsewhere in every epoch, so no sample comes twice."),
    (
        "The language model is a GPT of 0.9 million parameters over bytes, where the paper fine-tunes GPT-2 over "
        "words. It reads tiny shakespeare first, without compression, and is then fine-tuned on WikiText-2 with it, "
        "for four epochs, as in the paper."
    ),
)

EXPERIMENT = Experiment(
    module="model_parallel",
    paper="Rudakov et al. 2023, Activations and gradients compression for model-parallel training (arXiv 2401.07788)",
    titles=_TITLES,
    recipes=tuple(dict.fromkeys(_recipes())),
    claims=_claims,
    opening=Opening(
        title="Activations between stages",
        says="How much may be lost of what crosses the boundaries of a model that is cut into stages? The paper says "
        "that gradients bear less than activations, and that a tenth of the elements is enough. Error feedback is no "
        "better than plain top-k there, but makes models that do not need compression when they are evaluated.",
        ran="A ResNet-8 on CIFAR-10 and a small GPT on bytes of WikiText-2 were cut into four stages in one process, "
        "as in the paper. All three boundaries had quantization, top-k, error feedback or AQ-SGD.",
        found=_found,
        panels=_panels,
        covers=_covers,
        departs=_DEPARTS,
    ),
    draw=_draw,
    nodes=2,
    layout=Layout(
        tables=_tables,
        columns=lambda _: _COLUMNS,
        legend=_LEGEND,
        pictures=lambda key: [
            (f"{key.replace(' ', '-')}.png", "Training loss over epochs, a curve for each row of the table")
        ],
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
