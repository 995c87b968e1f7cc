"""What the rows of :mod:`reproduce.optimizers` come to: gaps with margins, sentences about them, page and pictures.

A codec's *gap* is the relative increase of its held-out loss over the loss without compression with the same seed, in
per cent.

Gaps differ between seeds, so a mean gap has a *margin*: half of its 95 % interval, which is the standard error times
Student's t for the number of seeds (:mod:`reproduce.pairs`). The standard error comes from the variance of the codec's
own gaps over seeds or, where that is larger, from the variance of the median codec of the same optimizer, because two
or three seeds may be alike by chance. A gap within its margin is not resolved.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context
from pathlib import Path
from typing import Any

from narrowband.adapt import correlation
from narrowband.files import write_text
from reproduce.groups import NOTHING
from reproduce.optimizers_ranks import ABOUT, DENSE, MIN_NUMEL, NAMES, OF_SGD, SPECS
from reproduce.pairs import student
from reproduce.pictures import Bar, Panel, embedded, write
from reproduce.report import Column, Layout, Legend, pictures_of, source

__all__ = ["LAYOUT", "LEGEND", "Line", "conclusion", "draw", "lines", "page", "recommended", "warning"]

#: Largest gaps, in per cent, of the two recommendations.
_CLOSE, _NEAR = 1.0, 5.0

#: From this number of an optimizer's codecs on, a rank correlation means something; and the share by which two errors
#: that count as alike may differ.
_RANKED = 4
_ALIKE = 0.1

#: Up to so many seeds are listed one by one.
_FEW = 3


@dataclass(frozen=True)
class Line:
    """Results of one optimizer with one spec, over its seeds.

    Attributes:
        optimizer: the rows' optimizer.
        spec: the rows' spec.
        lr: the rows' learning rate.
        seeds: one per row; each seed also has a row without compression.
        loss: held-out loss in nats per byte; mean over seeds; None if a row diverged.
        gap: increase of the loss over that without compression, in per cent; mean over seeds; None if a row diverged.
        margin: a mean gap smaller than this, in per cent, cannot be told from zero; None if there is only one seed.
        ratio: bytes of a ring all-reduce without compression, over bytes that were sent.
        relative_error: the last relative error in the statistics; mean over seeds.
        parameters: number of trained parameters.
        nodes: number of ranks.
        steps: number of training steps.
        base_loss: held-out loss before the first step, of rows that adapt a base.
    """

    optimizer: str
    spec: str
    lr: float
    seeds: tuple[int, ...]
    loss: float | None
    gap: float | None
    margin: float | None
    ratio: float
    relative_error: float | None
    parameters: int
    nodes: int
    steps: int
    base_loss: float | None

    @property
    def compressed(self) -> bool:
        """Whether gradients were compressed. If so, the statistics have an error."""
        return self.relative_error is not None

    def verdict(self) -> str:
        """Say in words whether the gap is resolved, and in which direction."""
        if self.spec == DENSE:
            return NOTHING
        if not self.compressed:
            return "not compressed"
        if self.gap is None:
            return "diverged"
        if self.margin is None:
            return "one seed"
        if abs(self.gap) <= self.margin:
            return "not resolved"
        return "worse" if self.gap > 0 else "better"

    def within(self, most: float) -> bool:
        """Return whether the gap is at most this many per cent."""
        return self.gap is not None and self.gap <= most


def lines(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """Group rows by optimizer and spec, in order of appearance; leave out rows that have no row to compare with.

    Example:
        >>> [line.verdict() for line in lines(rows)]
        ['–', 'not resolved', 'worse']
    """
    dense = {(row["optimizer"], row["seed"]): row["loss"] for row in rows if row["spec"] == DENSE}
    together: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if dense.get((row["optimizer"], row["seed"])) is not None:
            together.setdefault((row["optimizer"], row["spec"]), []).append(row)
    gaps = {place: [_gap(row, dense) for row in own] for place, own in together.items()}
    found = []
    for optimizer in dict.fromkeys(optimizer for optimizer, _ in together):
        usual = statistics.median(
            [v for (kind, _), own in gaps.items() if kind == optimizer if (v := _variance(own))] or [0.0]
        )
        for (kind, spec), own in together.items():
            if kind != optimizer:
                continue
            found.append(
                Line(
                    optimizer=optimizer,
                    spec=spec,
                    lr=own[0]["lr"],
                    seeds=tuple(row["seed"] for row in own),
                    loss=_mean([row["loss"] for row in own]),
                    gap=_mean(gaps[optimizer, spec]),
                    margin=_margin(gaps[optimizer, spec], usual),
                    ratio=statistics.mean(row["ratio"] for row in own),
                    relative_error=_mean([row["relative_error"] for row in own]),
                    parameters=own[0]["parameters"],
                    nodes=own[0]["nodes"],
                    steps=own[0]["steps"],
                    base_loss=_mean([row["base_loss"] for row in own]),
                )
            )
    return found


def _gap(row: dict[str, Any], dense: dict[tuple[str, int], float | None]) -> float | None:
    """Return a row's gap: the increase of its loss over that without compression with the same seed, in per cent."""
    without = dense[row["optimizer"], row["seed"]]
    return None if row["loss"] is None or without is None else 100.0 * (row["loss"] / without - 1.0)


def _variance(gaps: Sequence[float | None]) -> float:
    """Return the variance of a codec's gaps over seeds; 0 if there is only one seed, or if a row diverged."""
    there = [gap for gap in gaps if gap is not None]
    return statistics.variance(there) if len(there) == len(gaps) > 1 else 0.0


def _margin(gaps: Sequence[float | None], usual: float) -> float | None:
    """Return the margin of the mean gap over two seeds or more; ``usual`` is the variance of the median codec."""
    if len(gaps) < 2:
        return None
    return student(len(gaps) - 1) * math.sqrt(max(_variance(gaps), usual) / len(gaps))


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.mean(there) if len(there) == len(values) else None


# ---- what it says ----------------------------------------------------------------------------------------------------


def conclusion(found: Sequence[Line]) -> tuple[str, str, str]:
    """Return three paragraphs: the question, what was run, and what came out."""
    compressed = [line for line in found if line.compressed]
    optimizers = list(dict.fromkeys(line.optimizer for line in found))
    first = found[0]
    asked = (
        f"With {_listed([NAMES[each] for each in optimizers])}, which codecs train as well as no compression? And "
        "which number of the statistics warns when one does not?"
    )
    ran = (
        f"A small GPT learned bytes of tiny shakespeare on {first.nodes} ranks, for {first.steps} steps, with "
        f"{_seeds_of_all(found)}. Every optimizer had the learning rate that is best for it uncompressed, and every "
        "codec the same."
    )
    if not compressed:
        return asked, ran, "Nothing was compressed."
    own = {line.spec: [each for each in compressed if each.spec == line.spec] for line in compressed}
    kept = {spec: [NAMES[line.optimizer] for line in rows if line.within(_CLOSE)] for spec, rows in own.items()}
    whole = [spec for spec, names in kept.items() if len(names) == len(optimizers)]
    parts = [f"{_codes(whole)} with every optimizer"] if whole else []
    parts += [
        f"{_code(_short(spec))} with {_listed(names)}" for spec, names in kept.items() if names and spec not in whole
    ]
    worst = max(compressed, key=lambda line: math.inf if line.gap is None else line.gap)
    lost = "diverged" if worst.gap is None else f"lost {worst.gap:.1f} %"
    rough = []
    for optimizer in optimizers:
        margins = [line.margin for line in compressed if line.optimizer == optimizer and line.margin is not None]
        if margins and min(margins) > _CLOSE:
            rough.append(f"with {NAMES[optimizer]} gaps below {min(margins):.1f} % are not resolved")
    held = (
        f"The mean loss was at most {_CLOSE:g} % above the uncompressed one for "
        f"{_listed(parts) if parts else 'no codec'}. "
        + "".join(f"{said[0].upper()}{said[1:]}. " for said in rough)
        + f"{_code(_short(worst.spec))} with {NAMES[worst.optimizer]} {lost}, more than any other."
    )
    return asked, ran, held


def warning(found: Sequence[Line]) -> list[str]:
    """Say how the statistics' relative error relates to gaps; return no sentences if few rows have both."""
    known = [
        (line, line.relative_error, line.gap)
        for line in found
        if line.gap is not None and line.relative_error is not None
    ]
    said = []
    for optimizer in dict.fromkeys(line.optimizer for line, _, _ in known):
        errors, gaps = zip(*((error, gap) for line, error, gap in known if line.optimizer == optimizer), strict=True)
        if len(errors) >= _RANKED:
            said.append(f"{NAMES[optimizer]} {correlation(errors, gaps)[1]:.2f}")
    sentences = []
    if said:
        sentences.append(
            "Rank correlation of the gap with `handle.stats().total.relative_error`, over codecs: "
            f"{', '.join(said)}. 1 would mean that of two codecs the one with the larger error always lost more; 0, "
            "that error and gap are unrelated."
        )
    lost = [error for line, error, _ in known if not line.within(_CLOSE)]
    if lost:
        least = _rounded_down(min(lost))
        above = [line for line, error, _ in known if error >= least]
        spared = [f"{_code(_short(line.spec))} with {NAMES[line.optimizer]}" for line in above if line.within(_CLOSE)]
        sentences.append(
            f"Below a relative error of {least:g} nothing lost more than {_CLOSE:g} %. At or above it "
            f"{len(above) - len(spared)} of {len(above)} did{f'; these did not: {_listed(spared)}' if spared else ''}."
        )
    alike = [
        (much - little, one, other)
        for one, error, little in known
        for other, theirs, much in known
        if one.spec == other.spec and abs(error - theirs) <= _ALIKE * max(error, theirs)
        if little <= _CLOSE < much
    ]
    if alike:
        _, one, other = max(alike, key=lambda pair: pair[0])
        sentences.append(
            f"The same error costs one optimizer more than another: {_code(_short(one.spec))} had "
            f"{one.relative_error:.2g} with {NAMES[one.optimizer]} and {other.relative_error:.2g} with "
            f"{NAMES[other.optimizer]}, and its gaps were {one.gap:+.1f} % and {other.gap:+.1f} %."
        )
    return sentences


def recommended(found: Sequence[Line], optimizer: str) -> tuple[Line | None, Line | None, Line | None]:
    """Return three of an optimizer's codecs: the one that sends least with a gap of at most one per cent, the same for
    five per cent, and the one with the largest gap.
    """
    own = [line for line in found if line.optimizer == optimizer and line.compressed]

    def least(most: float) -> Line | None:
        return max((line for line in own if line.within(most)), key=lambda line: line.ratio, default=None)

    furthest = max(own, key=lambda line: math.inf if line.gap is None else line.gap, default=None)
    return least(_CLOSE), least(_NEAR), furthest


def _listed(words: Iterable[Any]) -> str:
    *most, last = map(str, words)
    return f"{', '.join(most)} and {last}" if most else last


def _seeds(seeds: Sequence[int]) -> str:
    first, last = seeds[0], seeds[-1]
    all_between = len(seeds) > _FEW and tuple(seeds) == tuple(range(first, last + 1))
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {f'{first} to {last}' if all_between else _listed(seeds)}"


def _seeds_of_all(found: Sequence[Line]) -> str:
    """Name the seeds, and the optimizers that have them where these differ."""
    of: dict[str, tuple[int, ...]] = {}
    for line in found:
        of[line.optimizer] = max(of.get(line.optimizer, ()), line.seeds, key=len)
    with_these: dict[tuple[int, ...], list[str]] = {}
    for optimizer, seeds in of.items():
        with_these.setdefault(seeds, []).append(NAMES[optimizer])
    if len(with_these) == 1:
        return _seeds(*with_these)
    return _listed(f"{_seeds(seeds)} for {_listed(names)}" for seeds, names in with_these.items())


def _code(spec: str) -> str:
    return f"`{spec}`"


def _codes(specs: Iterable[str]) -> str:
    return _listed(_code(_short(spec)) for spec in specs)


def _said(line: Line | None) -> str:
    if line is None:
        return NOTHING
    margin = "" if line.margin is None else f" ± {line.margin:.1f}"
    gap = "diverged" if line.gap is None else f"{line.gap:+.1f}{margin} %"
    return f"{_code(_short(line.spec))}: {line.ratio:.1f} times less, {gap}"


def _rounded_down(error: float) -> float:
    """Round to two digits, never up: what lies below the result lies below ``error``."""
    return float(Context(prec=2, rounding=ROUND_FLOOR).create_decimal_from_float(error))


def _short(spec: str) -> str:
    """Return a spec without the settings that all specs of its kind have here."""
    return re.sub(r",clip=1,warmup_steps=[^,]*", "", spec)


def _figure(form: str, value: float | None) -> str:
    return NOTHING if value is None else format(value, form)


#: Columns: a heading, and a function from a line to the text of its cell.
_COLUMNS: tuple[Column, ...] = (
    ("spec", lambda line: _short(line.spec)),
    ("loss", lambda line: "diverged" if line.loss is None else f"{line.loss:.3f}"),
    ("gap, %", lambda line: NOTHING if line.spec == DENSE else _figure("+.2f", line.gap)),
    ("margin", lambda line: NOTHING if line.spec == DENSE else _figure(".2f", line.margin)),
    ("verdict", Line.verdict),
    ("ratio", lambda line: f"{line.ratio:.1f}"),
    ("error", lambda line: _figure(".2g", line.relative_error)),
)

LEGEND: Legend = (
    ("loss", "held out, nats per byte, after the last step; the mean over seeds"),
    ("gap", "how far the loss is above that of the uncompressed row of the same seed; the mean over seeds"),
    (
        "margin",
        (
            "half of the 95 % interval of that mean (Student's t), from the spread over seeds of the codec's gaps, or "
            "of the median codec's where that is larger; a gap within the margin is not resolved"
        ),
    ),
    (
        "ratio",
        (
            "how many times less a rank sends than an uncompressed ring all-reduce does, over all of training. "
            "Payloads that all ranks gather (top-k, sign, dgc) have this ratio with two ranks, and 2/N of it with N"
        ),
    ),
    (
        "error",
        (
            "`handle.stats().total.relative_error` at the end of training: ‖p − C(p)‖²/‖p‖² for a gradient p and what "
            "arrives of it, C(p). With error feedback p includes the residual"
        ),
    ),
)


def _caption(title: str, own: Sequence[Line]) -> str:
    base = "" if own[0].base_loss is None else f"; the base without adapters has a loss of {own[0].base_loss:.3f}"
    return (
        f"{title}; learning rate {own[0].lr:g}, {own[0].parameters:,} parameters that are trained, {own[0].steps} "
        f"steps, {own[0].nodes} ranks, {_seeds(own[0].seeds)}{base}"
    )


def _whole(own: Sequence[Line]) -> list[str]:
    """Return the full specs of those that a table shows without some of their settings."""
    return [f"{_short(line.spec)}: `{line.spec}`" for line in own if line.spec != _short(line.spec)]


LAYOUT = Layout(
    tables=lambda found: [
        (optimizer, [line for line in found if line.optimizer == optimizer])
        for optimizer in dict.fromkeys(line.optimizer for line in found)
    ],
    columns=lambda _: [column for column in _COLUMNS if column[0] != "loss"],  # a terminal is narrow
    legend=LEGEND,
    caption=_caption,
    notes=_whole,
)


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of a record and its opening's picture, with those of :func:`draw` that are in the same folder.

    Args:
        record: content of ``summary.json``.
        path: where to write the page.
    """
    found = lines(record["rows"])
    folder, panels = pictures_of(path), _panels(found)
    write(panels, folder / "opening")
    opening = [embedded(panels, f"pictures/{path.stem}/opening"), ""]
    there = {name: (folder / name).exists() for name in _ALT}
    gaps, errors = ([f"![{alt}](pictures/{path.stem}/{name})", ""] if there[name] else [] for name, alt in _ALT.items())
    asked, ran, held = conclusion(found)
    out = ["# Optimizers and codecs", "", f"**What was asked.** {asked}", "", f"**What was run.** {ran}", ""]
    out += [f"**What came out.** {held}", "", *opening, "## What to take", "", _ADVICE, ""]
    out += [f"| optimizer | gap of at most {_CLOSE:g} % | gap of at most {_NEAR:g} % | lost most |"]
    out += ["| --- | --- | --- | --- |"]
    for optimizer, _ in LAYOUT.tables(found):
        out.append(f"| {' | '.join((NAMES[optimizer], *map(_said, recommended(found, optimizer))))} |")
    out += ["", "## Which number warns", "", *(f"{said}\n" for said in warning(found)), *errors]
    out += ["## All codecs", "", *gaps, *(f"- **{word}**: {meaning}" for word, meaning in LEGEND), ""]
    for optimizer, own in LAYOUT.tables(found):
        out += [f"### {NAMES[optimizer]}", "", f"{_caption(ABOUT[optimizer], own)}.", ""]
        out += [f"| {' | '.join(heading for heading, _ in _COLUMNS)} |"]
        out += ["| --- |" + " ---: |" * (len(_COLUMNS) - 1)]
        for line in own:
            first, *rest = (cell(line) for _, cell in _COLUMNS)
            out.append(f"| {' | '.join((_code(first), *rest))} |")
        notes = [f"- {note}" for note in _whole(own)]
        out += ["", *notes, ""] if notes else [""]
        out += [f"{_code(line.spec)}: {_AS_IT_IS}\n" for line in own if line.verdict() == "not compressed"]
    out += ["## How it was done", "", *(f"- {said}" for said in _how(record["tuning"])), ""]
    out += ["## Source", "", source(dict(record), record["commits"])]
    write_text(path, "\n".join(out) + "\n")


_AS_IT_IS = (
    "every gradient was sent as it is. PowerSGD does so where its two factors are not less than half of a matrix; for "
    "thin matrices such as these adapters that begins at a low rank."
)

_ADVICE = (
    f"Of the codecs that were tried with an optimizer: the one that sends least with a gap of at most {_CLOSE:g} %, "
    f"the one that sends least with at most {_NEAR:g} %, and the one that lost most; the gap with its margin."
)


def _how(tuned: Sequence[dict[str, Any]]) -> list[str]:
    """Return the settings that all optimizers share, and the learning rates that were tried."""
    first = tuned[0]
    tried: dict[str, list[str]] = {}
    for row in tuned:
        loss = "diverged" if row["loss"] is None else f"{row['loss']:.3f}"
        tried.setdefault(NAMES[row["optimizer"]], []).append(f"{row['lr']:g} ({loss})")
    rates = "; ".join(f"{name} {', '.join(own)}" for name, own in tried.items())
    said = [
        (
            f"Model: a GPT with {first['blocks']} blocks of width {first['dim']} and {first['heads']} heads over "
            f"{first['sequence']} bytes; {first['batch']} samples in a step, shared by the ranks."
        ),
        (
            "The learning rate rises over the first tenth of the steps, and then falls along a cosine to a tenth of "
            "its peak. Averaged gradients are clipped at a norm of 1; with `dgc` each rank clips, before its gradient "
            "enters the velocity (`clip=1`)."
        ),
        f"Learning rates that were tried without compression, and the held-out loss (seed {first['seed']}): {rates}.",
        "A codec might lose less at a learning rate of its own, or in longer training; neither was tried.",
        (
            f"Tensors of fewer than {MIN_NUMEL} elements, biases and norms travel uncompressed; in a model this small "
            "they are much of what is sent where the rest is compressed most."
        ),
    ]
    if any(row["optimizer"] == "lora" for row in tuned):
        said.append(f"The base that LoRA adapts had {first['base_steps']} steps of AdamW on bytes of WikiText-2.")
    return said


# ---- pictures --------------------------------------------------------------------------------------------------------

_GAPS, _ERRORS = "gaps.png", "errors.png"
_ALT = {
    _GAPS: "Bars: the gap of every codec in per cent, a panel per optimizer",
    _ERRORS: "Points: the gap of every codec over its relative error, a colour per optimizer",
}


def _panels(found: Sequence[Line]) -> list[Panel]:
    """Return the panels of the opening: what each optimizer's codecs save, and what one codec costs each of them."""
    saved, cost = [], []
    for optimizer, own in LAYOUT.tables(found):
        close, _, _ = recommended(found, optimizer)
        called = "" if close is None else f", {_CALLED.get(close.spec, close.spec)}"
        saved.append(
            Bar(
                f"{NAMES[optimizer]}{called}",
                None if close is None else close.ratio,
                NOTHING if close is None else f"{close.ratio:.1f}×",
                strong=True,
            )
        )
        cost += [
            Bar(NAMES[optimizer], line.gap and max(0.0, line.gap), _figure("+.1f", line.gap) + " %")
            for line in own
            if line.spec == _SPARSE
        ]
    return [
        Panel(f"Mean gap at most {_CLOSE:g} %", "times less sent; higher is better", saved),
        Panel("Cost of the largest 1 %", "loss above uncompressed", cost),
    ]


#: Names of codecs in the opening's picture, and the codec whose costs it compares.
_CALLED = {
    "fp16": "16 bits",
    "uniform:bits=8": "8 bits",
    "qsgd:bits=4": "4 bits",
    "eden:bits=2": "2 bits, rotated",
    "eden:bits=1": "1 bit, rotated",
    "powersgd:rank=4": "PowerSGD 4",
}
_SPARSE = "topk:density=0.01+ef"


def draw(found: Sequence[Line], directory: Path) -> list[Path]:
    """Draw gaps as bars, and gaps over relative errors. Needs matplotlib."""
    from matplotlib.figure import Figure

    compressed = [line for line in found if line.compressed]
    if not compressed:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    tables = [(NAMES[optimizer], own) for optimizer, own in LAYOUT.tables(compressed)]
    specs = sorted({line.spec for line in compressed}, key=_place)
    gaps = [line.gap for line in compressed if line.gap is not None]
    left, right = min([0.0, *gaps]), max([_CLOSE, *gaps])
    high = math.ceil(len(tables) / 2)
    figure = Figure(figsize=(8.0, high * (0.26 * len(specs) + 0.8) + 0.4), layout="constrained")
    panels = figure.subplots(high, min(2, len(tables)), sharey=True, sharex=True, squeeze=False).flatten().tolist()
    for axes in panels[len(tables) :]:
        axes.remove()
    for axes, (name, own) in zip(panels, tables, strict=False):
        for line in own:
            at, gap = specs.index(line.spec), 0.0 if line.gap is None else line.gap
            axes.barh(at, gap, color="C0" if line.gap is not None and line.within(_CLOSE) else "C1")
            said = "diverged" if line.gap is None else f"{round(gap, 1) + 0.0:+.1f} %, {line.ratio:.0f} × less"
            axes.annotate(said, (max(gap, 0.0), at), (4, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set(title=name, xlim=(left - 0.02 * right, 2.1 * right))
        axes.axvline(0.0, color="0.3", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(specs)), [_short(spec) for spec in specs])
    panels[0].invert_yaxis()
    figure.supxlabel(f"held-out loss above that without compression, % (blue: at most {_CLOSE:g})", fontsize=10)
    paths = [directory / _GAPS]
    figure.savefig(paths[0], dpi=120)

    known = [line for line in compressed if line.relative_error and line.gap is not None]
    if known:
        figure = Figure(figsize=(8.0, 4.2), layout="constrained")
        axes = figure.subplots()
        for optimizer, own in LAYOUT.tables(known):
            axes.plot(
                [line.relative_error for line in own],
                [line.gap for line in own],
                "o",
                label=NAMES[optimizer],
                alpha=0.8,
            )
        axes.axhline(_CLOSE, color="0.5", linewidth=0.8, linestyle="--")
        axes.set(xlabel="relative error, as the statistics say it", ylabel="gap, %")
        axes.set_yscale("symlog", linthresh=_CLOSE)
        ticks = [
            tick for tick in (-1, 0, 1, 3, 10, 30, 100) if tick <= max(_CLOSE, *(line.gap or 0.0 for line in known))
        ]
        axes.set_yticks(ticks, map(str, ticks))
        axes.margins(y=0.1)
        axes.grid(alpha=0.3)
        axes.legend()
        paths.append(directory / _ERRORS)
        figure.savefig(paths[1], dpi=120)
    return paths


def _place(spec: str) -> int:
    """Return a spec's position among all specs."""
    return [_short(each) for each in (*SPECS, *OF_SGD)].index(_short(spec))
