"""What the rows of :mod:`reproduce.candidates` come to: verdicts, tables, the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowband.units import format_bytes
from reproduce.candidates_senders import (
    CANDIDATES,
    DGC,
    DGC_8,
    DGC_16,
    DGC_STORES,
    MOMENTS,
    MOMENTUM,
    STORED,
    STORES,
    at_rate,
    rates,
)
from reproduce.groups import Claim, claimed
from reproduce.pairs import Difference, difference
from reproduce.pictures import Bar, Panel
from reproduce.report import Column, Layout, Opening, markdown, write_page

__all__ = ["LAYOUT", "TITLES", "Line", "claims", "lines", "page"]


@dataclass(frozen=True)
class Line:
    """A row over its seeds."""

    group: str
    name: str
    spec: str
    kind: str
    nbytes: float
    ratio: float
    scores: dict[int, float]

    @property
    def mean(self) -> float:
        return math.fsum(self.scores.values()) / len(self.scores)


def lines(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Rows put together by group and name."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["group"], row["name"]), []).append(row)
    return [
        Line(
            group, name, own[0]["spec"], own[0]["kind"], own[0]["nbytes"], own[0]["dense_nbytes"] / own[0]["nbytes"],
            {row["seed"]: row["perplexity" if row["cumulated"] is None else "cumulated"] for row in own},
        )
        for (group, name), own in found.items()
    ]  # fmt: skip


def _beside(found: Sequence[Line], group: str, one: str, other: str) -> Difference:
    """How far the first row's score is from the second's, as a share of it."""
    own = {line.name: line.scores for line in found if line.group == group}
    if one not in own or other not in own:
        raise LookupError(f"needs {one} and {other}")
    return difference(own[one], own[other], names=(one, other), higher_is_better=False, relative=True)


#: How much worse residuals in fewer bits may be.
_WORSE = 0.02

#: What is said, the table that it is about, and the rows of which the first is better than the second.
_BETTER = (
    ("natural compression loses more than qsgd with half of its bits and feedback", "bits", "qsgd:bits=4+ef",
     "natural compression+ef"),
    ("natural dithering loses less than qsgd:bits=3 without feedback", "bits", "natural dithering, 3 bits",
     "qsgd:bits=3"),
    ("natural dithering loses more than uniform:bits=3 where both have feedback", "bits",
     "uniform:bits=3,symmetric=true+ef",
     "natural dithering, 3 bits+ef"),
    ("TernGrad loses less than qsgd:bits=2 without feedback", "bits", "TernGrad", "qsgd:bits=2"),
    ("TernGrad loses more than uniform:bits=2 where both have feedback", "bits", "uniform:bits=2,symmetric=true+ef",
     "TernGrad+ef"),
    ("models trained with TernGrad are better than those with qsgd:bits=2", "training", "TernGrad", "qsgd:bits=2"),
    ("models trained with TernGrad are worse than those with uniform:bits=2 and feedback", "training",
     "uniform:bits=2,symmetric=true+ef", "TernGrad"),
    ("random elements lose less than a random block", "random", "randomk:density=0.1+ef", "random block, 10 %+ef"),
    ("two half rounds lose less than one round, rank 2", "rank", "powersgd:rank=2,halves=2", "powersgd:rank=2"),
    ("two half rounds lose less than one round, rank 4", "rank", "powersgd:rank=4,halves=2", "powersgd:rank=4"),
    ("half a round of twice the rank loses less than one round, rank 2", "rank", "powersgd:rank=4,halves=1",
     "powersgd:rank=2"),
    ("half a round of twice the rank loses less than one round, rank 4", "rank", "powersgd:rank=8,halves=1",
     "powersgd:rank=4"),
    ("plans of the last steps lose less than plans of all", "plans", "plans of the last steps", "plans of all steps"),
    ("five rounds for new ranks lose less than one", "plans", "five rounds for new ranks", "plans of all steps"),
    ("two half rounds train a better model than one round, rank 4", "training", "powersgd:rank=4,halves=2",
     "powersgd:rank=4"),
    ("half a round of twice the rank trains a better model than one round", "training", "powersgd:rank=8,halves=1",
     "powersgd:rank=4"),
    ("a residual that decays by 5 % a step trains a better model", "training", "topk:density=0.01+ef:decay=0.95",
     "topk:density=0.01+ef"),
    ("a residual that decays by 10 % a step trains a better model", "training", "topk:density=0.01+ef:decay=0.9",
     "topk:density=0.01+ef"),
    ("at equal bytes, DGC with more values of 16 bits trains a better model", "dgc", DGC_16, DGC),
    ("at equal bytes, DGC with more values of 8 bits trains a better model", "dgc", DGC_8, DGC),
    ("the authors' warm-up is better than the paper's", "dgc", "warm-up of the authors' code", "warm-up of the paper"),
    ("clipping by layers is better than clipping as a whole", "dgc", "clipped by layers", "clipped as a whole"),
)  # fmt: skip


def claims(found: Sequence[Line]) -> list[Claim]:
    """What may be said of candidates, by these rows."""
    said = []
    for text, group, one, other in _BETTER:
        try:
            said.append(claimed(text, _beside(found, group, one, other).better()))
        except LookupError:
            said.append(Claim(text, None, "not measured"))
    return [*said, *_stored(found), _planned(found), *_momentum(found)]


#: What is said of rows that were trained with several learning rates, and the rows of which the first is better.
_OF_OWN = (
    ("updates are better than DeMo at equal bytes", "updates, top 1 %", "DeMo"),
    ("signs of updates are better than 0/1 Adam, and are fewer bytes", "updates, signs", "0/1 Adam"),
    ("two bits of updates are better than 0/1 Adam at equal bytes", "updates, 2 bits", "0/1 Adam, rarer"),
    ("moments that are averaged make whole updates better", MOMENTS, "updates"),
    ("whole updates are better than whole gradients", "updates", "gradients"),
)


def _momentum(found: Sequence[Line]) -> Iterator[Claim]:
    """Each at its best learning rate."""
    for what, one, other in _OF_OWN:
        text = f"{what}, each at its best learning rate"
        try:
            own = [_at_best(found, name) for name in (one, other)]
        except LookupError:
            yield Claim(text, None, "not measured")
            continue
        yield claimed(text, _beside(found, "own", *(line.name for line in own)).better())


def _at_best(found: Sequence[Line], name: str) -> Line:
    """Of the rows of one name with different learning rates that of the least loss.

    Raises:
        LookupError: one of them is not there.
    """
    there = {line.name: line for line in found if line.group == "own"}
    return min((there[at_rate(name, rate)] for rate in rates(name)), key=lambda line: line.mean)


def _stored(found: Sequence[Line]) -> Iterator[Claim]:
    """Residuals in fewer bits, beside those in float32."""
    trained = [("training", f"{STORED[0]}+ef"), ("stores, trained", f"{STORED[1]}+ef")]
    for group, spec in [*(("stores", f"{codec}+ef") for codec in STORED), *trained, ("dgc", DGC)]:
        what = "loses" if group == "stores" else "trains a model"
        for store in DGC_STORES if group == "dgc" else STORES:
            text = f"{spec}{store} {what} no worse than in float32, by more than {_WORSE:.0%}"
            try:
                yield claimed(text, _beside(found, group, f"{spec}{store}", spec).no_worse(_WORSE))
            except LookupError:
                yield Claim(text, None, "not measured")


def _planned(found: Sequence[Line]) -> Claim:
    text = "L-GreCo's plans lose at most 5 % more than their reference"
    try:
        return claimed(text, _beside(found, "plans", "plans of all steps", "powersgd:rank=4").no_worse(0.05))
    except LookupError:
        return Claim(text, None, "not measured")


TITLES = {
    "bits": "A few bits per element",
    "random": "Elements at random",
    "rank": "Low rank: rounds and half rounds",
    "plans": "Low rank: L-GreCo's plans, every 100 steps",
    "training": "Training with AdamW",
    "stores": "Residuals in fewer bits",
    "stores, trained": "Residuals in fewer bits: training with AdamW",
    "dgc": "Deep Gradient Compression",
    "own": "An optimizer on every rank: updates, and momentum as in DeMo and 0/1 Adam",
}


def _score(line: Line) -> str:
    own = list(line.scores.values())
    spread = max(own) - min(own)
    return f"{line.mean:.3f}" + (f" (seeds {spread:.3f} apart)" if len(own) > 1 else "")


def _columns(group: str) -> Sequence[Column]:
    trained = group in ("training", "stores, trained", "dgc", "own")
    return (
        ("row", lambda line: line.name),
        ("in the library", lambda line: "no" if _is_candidate(line) else "yes"),
        ("sent", lambda line: format_bytes(line.nbytes)),
        ("ratio", lambda line: f"{line.ratio:.1f}"),
        ("perplexity" if trained else "cumulated error", _score),
    )


def _is_candidate(line: Line) -> bool:
    return (
        line.spec.removesuffix("+ef") in {*CANDIDATES, *MOMENTUM.values()}
        or "authors" in line.name
        or line.name in _OF_AUTHORS
    )


#: Rows that have a setting of authors' code which the library has not.
_OF_AUTHORS = ("clipped by layers", "five rounds for new ranks", *(at_rate(MOMENTS, rate) for rate in rates(MOMENTS)))

LAYOUT = Layout(
    tables=lambda found: [(group, [line for line in found if line.group == group]) for group in _of_groups(found)],
    columns=_columns,
    legend=(
        "Sent: bytes of one rank's payloads of all compressed matrices in a step, a mean over steps; ratio: how many "
        "times less that is than in 32 bits. Cumulated error: how far the parameters of plain SGD would be led astray, "
        "as a multiple of the mean length of a step. After a mean: how far the least and the most of its seeds are "
        "apart. *Rarer*: with the second moment brought up to date less often. Perplexity: of held-out "
        "text. Less is better in both. Compared are pairs of one seed."
    ),
    caption=lambda title, own: f"{title}; {len(own[0].scores)} seeds",
    notes=lambda own: [f"{line.name}: `{line.spec}`" for line in own if line.name != line.spec],
)


def _of_groups(found: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.group for line in found))


def _found(found: Sequence[Line]) -> str:
    own = {(line.group, line.name): line.mean for line in found}
    try:
        rank, trained = (
            _beside(found, group, "powersgd:rank=4,halves=2", "powersgd:rank=4") for group in ("rank", "training")
        )
        listed = _beside(found, "dgc", "warm-up of the authors' code", "warm-up of the paper")
        clipped = _beside(found, "dgc", "clipped by layers", "clipped as a whole")
        natural = _beside(found, "bits", "natural compression+ef", "qsgd:bits=4+ef")
        dithered = _beside(found, "bits", "natural dithering, 3 bits+ef", "uniform:bits=3,symmetric=true+ef")
        block, elements = own["random", "random block, 10 %+ef"], own["random", "randomk:density=0.1+ef"]
        fp16, dgc = own["dgc", DGC_16], own["dgc", DGC]
        terngrad, qsgd, uniform = (
            own["bits", name] for name in ("TernGrad", "qsgd:bits=2", "uniform:bits=2,symmetric=true+ef")
        )
        plans, last, five = (
            own["plans", name]
            for name in ("plans of all steps", "plans of the last steps", "five rounds for new ranks")
        )
    except KeyError as missing:
        raise LookupError(f"needs {missing}") from None
    return (
        f"the error of two half rounds of PowerSGD differs from that of a whole one at rank 4 by {rank.figure()}, seed "
        f"by seed, so they are here, though a model trained with them has a perplexity that differs by "
        f"{trained.figure()}; natural compression has an error {natural.figure()} from that of qsgd with half of its "
        f"bits, and natural dithering one {dithered.figure()} from that of uniform with as many, both with feedback, "
        f"so neither is here; a warm-up as a list ({listed.figure()} of perplexity) and clipping by layers "
        f"({clipped.figure()}) change nothing that is resolved, so these are not here either; DGC's "
        f"perplexity is {fp16:.2f} with values in 16 bits and {dgc:.2f} with fewer of them in 32, which neither gains "
        f"nor loses and is here since the authors' code has it; a random block loses {block:.2f} mean steps and random "
        f"elements {elements:.2f}, within the noise, and TernGrad {terngrad:.1f} where qsgd:bits=2 loses {qsgd:.1f} "
        f"and two bits with feedback {uniform:.2f}, so neither is here; L-GreCo's plans lose {plans:.2f}, and with "
        f"five rounds of power iteration for new ranks {five:.2f}, within the noise, so these are not here; from the "
        f"last ten steps of a window alone they lose {last:.2f}, which is less, so that nb.LGreCo(last=10) is here."
    )


def _panels(found: Sequence[Line]) -> list[Panel]:
    own = {(line.group, line.name): line.mean for line in found}

    def bars(group: str, *names: str) -> list[Bar]:
        return [Bar(name, own[group, name], f"{own[group, name]:.2f}", "halves" in name) for name in names]

    ranks = ("powersgd:rank=4", "powersgd:rank=8,halves=1", "powersgd:rank=4,halves=2")
    two = ("qsgd:bits=2", "TernGrad", "uniform:bits=2,symmetric=true+ef")
    return [
        Panel("Low rank", "cumulated error, in mean steps", bars("rank", *ranks)),
        Panel("Two bits", "cumulated error, in mean steps", bars("bits", *two)),
    ]


_OPENING = Opening(
    title="What is not here, and why",
    says="Authors' code and other papers have codecs and settings that might be here, too, and each has to bring "
    "something at equal bytes.",
    ran="A GPT of 137 thousand parameters (2 blocks of width 64, 4 heads) read bytes of WikiText-2 (validation split) "
    "on four ranks that one process plays, 600 steps of 16 windows of 64 bytes: either without compression, by SGD "
    "(rate 0.3), for the error that every codec would have cumulated, or with it, by AdamW (rate 0.004, β₁ 0.9, β₂ "
    "0.999, weight decay 0.01) or SGD (rate 0.05, momentum 0.9; DGC's own); rates rise over a tenth of the steps and "
    "fall along a cosine to zero, and nothing is clipped but where DGC's rows say so.",
    found=_found,
    panels=_panels,
)
_PAPER = (
    "Horváth et al. 2019, natural compression (arXiv 1905.10988); Wen et al. 2017, TernGrad (arXiv 1705.07878); the "
    "code of PowerSGD (github.com/epfml/powersgd) and of DGC (github.com/synxlin/deep-gradient-compression)"
)


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of a record: what is in ``summary.json``."""
    found = lines(record["rows"])
    write_page(
        path,
        lambda pictures: markdown(
            found,
            TITLES,
            claims(found),
            LAYOUT,
            opening=_OPENING,
            paper=_PAPER,
            page=path.stem,
            pictures=pictures,
            record=dict(record),
            commits=sorted({str(row["commit"]) for row in record["rows"]}),
        ),
        found,
        _OPENING,
    )
