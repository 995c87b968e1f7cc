"""Make claims, tables and the page of results from the rows of :mod:`reproduce.candidates`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from reproduce.claims import under
from reproduce.groups import Claim, claimed
from reproduce.pairs import Difference, difference
from reproduce.pictures import Bar, Panel
from reproduce.report import Column, Layout, Opening, write_results

__all__ = ["LAYOUT", "TITLES", "Line", "claims", "lines", "page"]


@dataclass(frozen=True)
class Line:
    """A line of a table: one row over its seeds."""

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
    """Combine rows of the same group and name into lines."""
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
    """Return how far the first row's score is from the second's, as a share of the second's."""
    own = {line.name: line.scores for line in found if line.group == group}
    if one not in own or other not in own:
        raise LookupError(f"needs {one} and {other}")
    return difference(own[one], own[other], names=(one, other), higher_is_better=False, relative=True)


#: The share by which residuals in fewer bits may be worse than those in float32.
_WORSE = 0.02

#: Text of a claim, the table that it is about, and two rows of which the first should be better than the second.
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


#: Table → the heading under which the page has its claims.
_TOPICS = {
    "bits": "A few bits per element",
    "random": "Elements at random",
    "rank": "Low rank: rounds and half rounds of PowerSGD",
    "plans": "L-GreCo's plans",
    "dgc": "Deep Gradient Compression",
}
_DECAYS, _FEWER_BITS, _MOMENTUM = (
    "Residuals that decay",
    "Residuals in fewer bits",
    "Momentum in the place of updates, each at its best learning rate",
)


def claims(found: Sequence[Line]) -> list[Claim]:
    """Judge the claims about candidates by these lines."""
    said = []
    for text, group, one, other in _BETTER:
        trained = _DECAYS if "decay" in one else _TOPICS["rank" if "powersgd" in one else "bits"]
        topic = _TOPICS.get(group, trained)
        try:
            said += under(topic, [claimed(text, _beside(found, group, one, other).better())])
        except LookupError:
            said += under(topic, [Claim(text, None, "not measured")])
    return [
        *said,
        *under(_FEWER_BITS, [replace(claim, said=claim.text.replace(_NO_WORSE, _AT_MOST)) for claim in _stored(found)]),
        *under(_TOPICS["plans"], [_planned(found)]),
        *under(_MOMENTUM, [replace(claim, said=claim.text.removesuffix(_BEST)) for claim in _momentum(found)]),
    ]


_BEST = ", each at its best learning rate"
_NO_WORSE = f"no worse than in float32, by more than {_WORSE:.0%}"
_AT_MOST = f"at most {_WORSE:.0%} worse than in float32"

#: Text of a claim about rows that were trained with several learning rates, and two rows, the better one first.
_OF_OWN = (
    ("updates are better than DeMo at equal bytes", "updates, top 1 %", "DeMo"),
    ("signs of updates are better than 0/1 Adam, and are fewer bytes", "updates, signs", "0/1 Adam"),
    ("two bits of updates are better than 0/1 Adam at equal bytes", "updates, 2 bits", "0/1 Adam, rarer"),
    ("moments that are averaged make whole updates better", MOMENTS, "updates"),
    ("whole updates are better than whole gradients", "updates", "gradients"),
)


def _momentum(found: Sequence[Line]) -> Iterator[Claim]:
    """Judge the claims about ranks with optimizers of their own, each row at its best learning rate."""
    for what, one, other in _OF_OWN:
        text = f"{what}{_BEST}"
        try:
            own = [_at_best(found, name) for name in (one, other)]
        except LookupError:
            yield Claim(text, None, "not measured")
            continue
        yield claimed(text, _beside(found, "own", *(line.name for line in own)).better())


def _at_best(found: Sequence[Line], name: str) -> Line:
    """Return the line with the least loss among those of one name with different learning rates.

    Raises:
        LookupError: the line of a learning rate is missing.
    """
    there = {line.name: line for line in found if line.group == "own"}
    return min((there[at_rate(name, rate)] for rate in rates(name)), key=lambda line: line.mean)


def _stored(found: Sequence[Line]) -> Iterator[Claim]:
    """Judge the claims about residuals in fewer bits, compared with residuals in float32."""
    trained = [("training", f"{STORED[0]}+ef"), ("stores, trained", f"{STORED[1]}+ef")]
    for group, spec in [*(("stores", f"{codec}+ef") for codec in STORED), *trained, ("dgc", DGC)]:
        what = "loses" if group == "stores" else "trains a model"
        for store in DGC_STORES if group == "dgc" else STORES:
            text = f"{spec}{store} {what} {_NO_WORSE}"
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


#: Rows with a setting of authors' code that the library does not have.
_OF_AUTHORS = ("clipped by layers", "five rounds for new ranks", *(at_rate(MOMENTS, rate) for rate in rates(MOMENTS)))


def _by_spec(own: Sequence[Line]) -> list[str]:
    """Explain the rows whose name is not their spec: list the specs."""
    called: dict[str, list[str]] = {}
    for line in own:
        if line.name != line.spec:
            called.setdefault(line.spec, []).append(line.name)
    return [f"`{spec}`: {'; '.join(names)}" for spec, names in called.items()]


LAYOUT = Layout(
    tables=lambda found: [(group, [line for line in found if line.group == group]) for group in _of_groups(found)],
    columns=_columns,
    legend=(
        ("in the library", "whether this codec or setting can be had"),
        ("sent", "bytes of one rank's payloads of all compressed matrices in a step, a mean over steps"),
        ("ratio", "how many times less that is than in 32 bits"),
        (
            "cumulated error",
            (
                "how far the parameters of uncompressed training by SGD (rate 0.3) would be led astray, as a multiple "
                "of the mean length of a step; less is better"
            ),
        ),
        (
            "perplexity",
            (
                "of held-out text, of models trained by AdamW (rate 0.004, β₁ 0.9, β₂ 0.999, weight decay 0.01) or by "
                "SGD (rate 0.05, momentum 0.9; DGC's own); less is better"
            ),
        ),
        ("seeds apart", "how far the least and the most of its seeds are"),
        ("rarer", "with the second moment brought up to date less often"),
        (
            "all rows",
            (
                "rates rise over a tenth of 600 steps of 16 windows of 64 bytes and fall along a cosine to zero; "
                "nothing is clipped but where DGC's rows say so; the text is WikiText-2's validation split"
            ),
        ),
    ),
    caption=lambda title, own: f"{title}; {len(own[0].scores)} seeds",
    notes=_by_spec,
)


def _of_groups(found: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.group for line in found))


def _found(found: Sequence[Line]) -> str:
    halves = _beside(found, "rank", "powersgd:rank=4,halves=2", "powersgd:rank=4")
    natural = _beside(found, "bits", "natural compression+ef", "qsgd:bits=4+ef")
    last = _beside(found, "plans", "plans of the last steps", "plans of all steps")
    demo = _beside(found, "own", *(_at_best(found, name).name for name in ("DeMo", "updates, top 1 %")))
    return (
        f"Two half rounds of PowerSGD have an error {halves.figure()} from that of a whole one at rank 4, and plans of "
        f"L-GreCo from the last ten steps alone one {last.figure()} from that of plans from all, so both are in the "
        f"library. Natural compression errs {natural.figure()} from qsgd with half of its bits, and models with DeMo "
        f"are {demo.figure()} from those with updates, so neither is; nor are TernGrad, random blocks, the authors' "
        "warm-up and clipping by layers, which gained nothing that is resolved."
    )


def _panels(found: Sequence[Line]) -> list[Panel]:
    own = {(line.group, line.name): line.mean for line in found}

    def bars(group: str, called: Mapping[str, str]) -> list[Bar]:
        return [
            Bar(said, own[group, name], f"{own[group, name]:.2f}", "halves=2" in name) for name, said in called.items()
        ]

    ranks = {
        "powersgd:rank=4": "PowerSGD, rank 4",
        "powersgd:rank=8,halves=1": "rank 8, half a round",
        "powersgd:rank=4,halves=2": "rank 4, two half rounds",
    }
    two = {
        "qsgd:bits=2": "qsgd, 2 bits",
        "TernGrad": "TernGrad",
        "uniform:bits=2,symmetric=true+ef": "uniform, 2 bits, feedback",
    }
    return [
        Panel("Low rank", "cumulated error, in mean steps", bars("rank", ranks)),
        Panel("Two bits", "cumulated error, in mean steps", bars("bits", two)),
    ]


_OPENING = Opening(
    title="What is not here, and why",
    says="Authors' code and other papers have codecs and settings that the library might have, too. Which of them "
    "bring something at equal bytes?",
    ran="A GPT of 137 thousand parameters (2 blocks of width 64, 4 heads) read bytes of WikiText-2 in 600 steps, on "
    "four ranks that one process plays. Measured were the error that each codec would have cumulated in uncompressed "
    "training, and how good models became that were trained with it.",
    found=_found,
    panels=_panels,
)
_PAPER = (
    "Horváth et al. 2019, natural compression (arXiv 1905.10988); Wen et al. 2017, TernGrad (arXiv 1705.07878); the "
    "code of PowerSGD (github.com/epfml/powersgd) and of DGC (github.com/synxlin/deep-gradient-compression)"
)


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of results from a record, the content of ``summary.json``."""
    found = lines(record["rows"])
    write_results(
        path,
        found,
        TITLES,
        claims(found),
        LAYOUT,
        opening=_OPENING,
        paper=_PAPER,
        record=record,
        commits=sorted({str(row["commit"]) for row in record["rows"]}),
    )
