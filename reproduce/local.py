"""Updates or gradients: how much loss it costs when ranks send what their optimizers changed, instead of gradients.

AdamW divides by the second moments of the gradients that arrive. Under strong compression these differ from the second
moments of the gradients that were computed, and models become worse. With ``nb.compress_updates`` every rank steps its
own optimizer, and what the optimizers changed is averaged: after every step, or after every n steps, as in DiLoCo
(Douillard et al. 2023, arXiv 2311.08105) and SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706). Rows of one table differ
in what is sent:

* *gradients*, averaged and then given to AdamW: without compression (*dense*, which all others are compared with), in 4
  bits, as signs, the largest hundredth of them, or as factors of rank 4;
* *updates* after every step: scaled by a measured length, or with length 1, or, where few elements are sent, with
  residuals in place and each element averaged over the ranks that sent it;
* *updates* after every three steps: in 2 bits scaled by the measured length, or uncompressed with DiLoCo's outer step;
* *updates* after every 15 or 30 steps:

  * by DiLoCo: no compression, an outer SGD with momentum;
  * by Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): 4 bits, three fragments in turn, each in transit for
    two steps; rounds of 15 only;
  * by SparseLoCo: a 64th of the elements, selected in tiles, 2 bits, a residual that decays, a plain outer step;
  * by this library's own settings with the same bytes: no tiles, a residual that does not decay, and the measured
    length; rounds of 15 only;
  * the same with residuals in place, and each element averaged over the ranks that sent it; and a 16th of the elements
    like that;
  * all elements in 2 bits with residuals in place and DiLoCo's outer step;

* *nothing*: each rank trains by itself on its share of the data. Sending is worthwhile only where the loss is below the
  loss of this row; claims ask whether it is, for rounds and for the largest hundredth;
* rounds for more steps than gradients have, since slow links leave time for them; and on the other text some rows for
  fewer steps, with which rounds cost more;
* other optimizers, Muon and SGD with momentum, each compared with its own run without compression; and replicas of two
  ranks each, sharded by FSDP2.

*Traffic*, in all claims, is the bytes that a rank sends, compared with DDP in float32: a ring all-reduce of the
gradients in every step, which takes 2·(N − 1)/N · 4 bytes per element among N ranks. Traffic shrinks less than payloads
do: a payload that is gathered is sent N − 1 times, so among four ranks the ratio of its traffic is half the payload's.

The learning rate of each kind of row should be the best of several, among them half and twice the rate, with a seed of
its own; a claim for each kind says whether it is. Kinds are gradients, updates, rounds of many steps, and nothing, each
tried without compression; compressed gradients and sparse updates of every step, each tried on the row of the largest
hundredth; updates of every step in 1 or 2 bits, tried on the row of signs; and rounds of three steps, tried on the row
in 2 bits.

Run ``python -m reproduce.local`` (an hour and a half on two cores), ``--long`` (with signs, rounds of 30 steps,
other optimizers, the choice of learning rates and another text: six hours more), ``--quick`` (seconds), ``--help``.

Differences from the papers: a GPT of 0.24 million parameters for 60 to 512 million, bytes of tiny shakespeare for C4
and DCLM, four ranks, and rounds of 15 and 30 steps in training of 2,282, where DiLoCo has 500 of 88,000.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reproduce.command import Experiment, main
from reproduce.groups import DENSE, MARGIN, NOTHING, Claim, Group, claimed, compared, named, needed
from reproduce.local_rows import (
    ALONE,
    BASES,
    CHOOSING,
    DILOCO,
    GRADIENT_1,
    GRADIENT_2,
    GRADIENT_4,
    GRADIENT_SIGN,
    GRADIENT_TOP,
    IN_PLACE,
    ONE_BIT_ROUNDS,
    OTHER_LENGTH,
    OTHER_TASK,
    OURS,
    PLAIN,
    RATE,
    RATES,
    RECIPES,
    ROUNDS,
    SEEDS,
    SHARDED,
    SHORT,
    SIGN_IN_PLACE,
    SIXTEENTH,
    SPARSELOCO,
    TASK,
    TOP,
    TOP_2,
    TOP_6,
    TWO_BIT_ROUNDS,
    TWO_BITS,
    UPDATES,
    at_other_length,
    candidate,
)
from reproduce.local_words import CALLED, LEGEND, shortly
from reproduce.pairs import Difference, Finding
from reproduce.pictures import Panel
from reproduce.report import COLUMNS, Column, Layout, Opening, score_panel, sent_panel

__all__ = ["EXPERIMENT"]

#: Thresholds of claims: by what share a loss may be above another, and how many times less traffic there must be.
_KEPT, _LESS = 0.01, 25
_KEPT_TOP, _LESS_TOP = 0.03, 70
_KEPT_ROUNDS = 0.005

#: Steps of a round → how many times less traffic claims ask for. A 64th of the elements has 1,400 and 2,700 times less.
_LESS_ROUNDS = {15: (150, 400, 1000), 30: (150, 400, 2000)}

#: What traffic is compared with, in the words of claims.
_THAN_DDP = "times less traffic than DDP in float32"

#: Bytes that differ by at most this share count as equal.
_CLOSE = 0.1

# ---- claims ----------------------------------------------------------------------------------------------------------

#: Headings of the page's tables of claims.
_NEAR = "How near compressed updates, and gradients in few bits, come to uncompressed gradients"
_SAME_BYTES = "Updates or gradients, at equal bytes"
_WORTH = "Worth sending: less loss than where each rank trains by itself"
_FAR = "How much rounds bear, beside DiLoCo's, which are not compressed"
_PARTS_OF = "Parts of the method"
_LEARNING_RATES = f"Learning rates: loss by the rates that were tried, with seed {CHOOSING[0]}"


def _claims(found: Sequence[Group]) -> list[Claim]:
    there = {group.task for group in found}
    return [
        *_of_task(found, TASK),
        *(_chosen(found, TASK, kind) for kind in RATES[TASK]),
        *(_of_task(found, OTHER_TASK) if OTHER_TASK in there else ()),
        *(_chosen(found, OTHER_TASK, kind) for kind in RATES[OTHER_TASK] if OTHER_TASK in there),
    ]


def _of_task(found: Sequence[Group], task: str) -> Iterator[Claim]:
    """Yield the claims about the rows of a text."""
    rows = {recipe.row.name for recipe in RECIPES if recipe.row.task == task}
    all_rounds = [every for every in ROUNDS if DILOCO.format(every) in rows]
    yield _near(found, task, less=_LESS, kept=_KEPT)
    yield _near(found, task, less=_LESS_TOP, kept=_KEPT_TOP)
    yield _near(found, task, less=_LESS, kept=_KEPT, rounds=True)
    yield _near(found, task, less=_LESS_TOP, kept=_KEPT_TOP, rounds=True)
    if GRADIENT_1 in rows:
        yield _near(found, task, less=_LESS, kept=_KEPT, gradients=True)
        yield _near(found, task, less=_LESS, kept=_KEPT_TOP, gradients=True)
    for own, other in (
        (TOP, GRADIENT_TOP),
        (SIGN_IN_PLACE, GRADIENT_SIGN),
        (GRADIENT_1, GRADIENT_SIGN),
        (GRADIENT_1, SIGN_IN_PLACE),
    ):
        if {own, other} <= rows:
            text = f"at equal bytes {own} is better than {other}"
            if own != GRADIENT_1:
                text = f"at equal bytes updates are better than gradients: {own} than {other}"
            said = f"{shortly(own)}: less loss than {shortly(other)}"
            yield _judged(found, task, text, (own, other), _better_at_equal_bytes, _SAME_BYTES, said)
    kinds = (DILOCO, TWO_BIT_ROUNDS, ONE_BIT_ROUNDS, SIXTEENTH, IN_PLACE, SPARSELOCO)
    rounds = (name.format(every) for every in all_rounds for name in kinds)
    for own in (name for name in (GRADIENT_TOP, GRADIENT_1, TOP, *rounds) if name in rows):
        text = f"what is sent is worth it: {own} is better than ranks that train by themselves"
        yield _judged(found, task, text, (own, ALONE), _better, _WORTH, shortly(own))
    for every in all_rounds:
        for less in _LESS_ROUNDS[every]:
            yield _far(found, task, every, less)
        own, other = IN_PLACE.format(every), OURS.format(every)
        if other in rows:
            text = f"residuals in place are better than apart: {own} than {other}"
            said = f"rounds of {every}, largest 64th in 2 bits: residuals in place are better than apart"
            yield _judged(found, task, text, (own, other), _better_at_equal_bytes, _PARTS_OF, said)
    if PLAIN in rows:
        text = "the measured length helps: updates are better with it than with length 1"
        said = "uncompressed updates are better with the measured length than with length 1"
        yield _judged(found, task, text, (UPDATES, PLAIN), _better, _PARTS_OF, said)


def _better(own: Group, other: Group) -> Finding:
    return _loss(own, other).better()


def _far(found: Sequence[Group], task: str, every: int, less: int) -> Claim:
    """Compare the best rounds with at least ``less`` times less traffic with DiLoCo's, which do not compress."""
    text = (
        f"{task}: every {every} steps with at least {less:,} {_THAN_DDP}: the loss of the best such row is at "
        f"most {_KEPT_ROUNDS:.1%} above that of DiLoCo, which does not compress"
    )
    said = f"rounds of {every}, at least {less:,} times less traffic: at most {_KEPT_ROUNDS:.1%} more loss"
    claim = Claim(text, None, "", topic=_FAR, case=_TEXTS[task], said=said)
    try:
        diloco = needed(found, task, DILOCO.format(every))
        kinds = (OURS, SPARSELOCO, IN_PLACE, SIXTEENTH, TWO_BIT_ROUNDS, ONE_BIT_ROUNDS)
        best = _best(found, task, [name.format(every) for name in kinds], diloco, less=less)
    except LookupError as error:
        return replace(claim, figures=str(error), found=str(error).partition(": ")[0])
    return _told(claim, _loss(best, diloco).no_worse(_KEPT_ROUNDS), [best, diloco])


def _told(claim: Claim, finding: Finding, own: Sequence[Group]) -> Claim:
    """Add verdict and figures to a claim; they name the first of the rows, which is the best."""
    judged = claimed(claim.text, finding, _figures(own))
    found = f"{_apart(finding)}: {shortly(own[0].name)} ({_traffic(own[0])})"
    return replace(claim, held=judged.held, figures=judged.figures, resolved=judged.resolved, found=found)


def _apart(finding: Finding) -> str:
    """Return a finding's difference and its seeds."""
    return finding.figures[0].rpartition(": ")[2]


def _best(found: Sequence[Group], task: str, names: Sequence[str], beside: Group, *, less: float) -> Group:
    """Return the row with the least loss among those with at least ``less`` times less traffic.

    Raises:
        LookupError: no such row was trained, or none sends so little.
    """
    there = [group for name in names if (group := named(found, task, name)) is not None]
    if not there:
        raise LookupError(f"needs one of the rows {'; '.join(names)} of task {task}")
    cheap = [group for group in there if (group.ratio or 0.0) >= less]
    if not cheap:
        said = (f"{_bytes(group)}, loss {_loss(group, beside).figure()} from {beside.name}" for group in there)
        raise LookupError(f"no row sends so little: {'; '.join(said)}")
    return min(cheap, key=lambda group: _loss(group, beside).mean)


def _loss(own: Group, other: Group) -> Difference:
    """Return how far a row's loss is from another's, as a share of the other's. Scores are perplexities."""
    return compared(own, other, relative=True, of=math.log)


def _judged(
    found: Sequence[Group],
    task: str,
    text: str,
    names: Sequence[str],
    says: Callable[[Group, Group], Finding],
    topic: str,
    said: str,
) -> Claim:
    claim = Claim(f"{task}: {text}", None, "", topic=topic, case=_TEXTS[task], said=said)
    try:
        own, other = (needed(found, task, name) for name in names)
        finding = says(own, other)
    except LookupError as error:
        return replace(claim, figures=str(error))
    return replace(_told(claim, finding, [own, other]), found=_apart(finding))


def _figures(own: Sequence[Group]) -> str:
    return "; ".join([*filter(None, map(_bytes, own)), "losses in nats per byte"])


def _bytes(group: Group) -> str:
    if group.name == DENSE or group.ratio is None or group.payload_ratio is None:
        return ""
    return (
        f"{group.name}: {group.ratio:,.0f} {_THAN_DDP} among {group.nodes} ranks, payloads {group.payload_ratio:,.0f} "
        "times smaller than the gradients"
    )


def _traffic(group: Group) -> str:
    """Say in few words how much less traffic a row has."""
    return NOTHING if group.ratio is None else f"{group.ratio:,.0f} times less traffic"


def _near(
    found: Sequence[Group], task: str, *, less: float, kept: float, rounds: bool = False, gradients: bool = False
) -> Claim:
    """Compare the best updates with at least ``less`` times less traffic with dense; with ``rounds``, rounds count.
    With ``gradients``, compare the best gradients.
    """
    names = [SIGN_IN_PLACE, TWO_BITS, TOP, TOP_6, TOP_2]
    if rounds:
        kinds = (TWO_BIT_ROUNDS, ONE_BIT_ROUNDS, SIXTEENTH, IN_PLACE)
        names += [SHORT, *(kind.format(every) for every in ROUNDS for kind in kinds)]
    when = "in every step or in rounds" if rounds else "in every step"
    if gradients:
        names, when = [GRADIENT_1, GRADIENT_2, GRADIENT_4, GRADIENT_SIGN, GRADIENT_TOP], "in every step, gradients"
    what = "gradients of every step" if gradients else f"updates {when}"
    text = (
        f"{task}: {what} with at least {less:g} {_THAN_DDP}: the loss of the best such row is at most "
        f"{kept:.0%} above dense"
    )
    said = f"{when}, at least {less:g} times less traffic: at most {kept:.0%} more loss"
    claim = Claim(text, None, "", topic=_NEAR, case=_TEXTS[task], said=said)
    try:
        dense = needed(found, task, DENSE)
        best = _best(found, task, names, dense, less=less)
        finding = _loss(best, dense).no_worse(kept)
    except LookupError as error:
        return replace(claim, figures=str(error), found=str(error).partition(": ")[0])
    return _told(claim, finding, [best])


def _better_at_equal_bytes(own: Group, other: Group) -> Finding:
    """Judge whether the loss is less at equal bytes; raise LookupError where bytes are not equal."""
    times = own.sent_bytes_per_step / other.sent_bytes_per_step
    if abs(math.log(times)) > math.log1p(_CLOSE):
        raise LookupError(f"{own.name} sent {times:.2f} times what {other.name} did")
    return _better(own, other)


def _chosen(found: Sequence[Group], task: str, kind: str) -> Claim:
    """Judge whether the learning rate of a kind is the best of those that were tried."""
    base, own = BASES[kind], RATE[task][kind]
    text = f"{task}: the learning rate of {kind}, {own:g}, is the best for {base.name} of those that were tried"
    claim = Claim(text, None, "", setup=True, topic=_LEARNING_RATES, case=_TEXTS[task], said=kind)
    try:
        tried = {rate: needed(found, task, candidate(base.name, rate)) for rate in RATES[task][kind]}
    except LookupError as error:
        return replace(claim, figures=str(error))
    losses = {rate: math.inf if group.mean is None else math.log(group.mean) for rate, group in tried.items()}
    said = {
        rate: f"{rate:g}: {loss:.4f}" if loss < math.inf else f"{rate:g}: diverged" for rate, loss in losses.items()
    }
    best = min(losses, key=losses.__getitem__)
    return replace(
        claim,
        held=math.isclose(best, own),
        figures=f"seed {CHOOSING[0]}, loss in nats per byte: {'; '.join(said.values())}",
        found=", ".join(f"**{told}**" if math.isclose(rate, own) else told for rate, told in said.items())
        + "; in bold: the rate that was taken, and is to be the best",
    )


# ---- tables and pictures ---------------------------------------------------------------------------------------------

_PARTS = {
    "sent": "what ranks send",
    "length": "trained for another number of epochs",
    "others": "other optimizers, and two replicas of two ranks each, by FSDP2",
}
_TITLES = {TASK: "tiny shakespeare as bytes, GPT", OTHER_TASK: "WikiText-2 as bytes, GPT"}
_TEXTS = {TASK: "tiny shakespeare", OTHER_TASK: "WikiText-2"}

#: The order of rows, by the beginning of their names. Within a kind, rows are in the order of ``_ORDER``.
_KINDS = (DENSE, "gradients", "updates", *(f"every {every}," for every in (3, *ROUNDS)), ALONE)
_ORDER = [*CALLED, *(recipe.row.name for recipe in RECIPES)]


def _place(group: Group) -> tuple[int, int]:
    """Return a row's sort key in its table."""
    kinds = (at for at, kind in enumerate(_KINDS) if group.name.startswith(kind))
    return next(kinds, len(_KINDS)), _ORDER.index(group.name)


def _title(task: str, part: str) -> str:
    said = _PARTS[part]
    if part == "length":
        said = f"trained for {OTHER_LENGTH[task][1]} epochs" + (", and gradients for fewer" if task == TASK else "")
    return f"{_TITLES[task]}: {said}"


def _part(group: Group) -> str:
    """Return the key of a row's table; empty for rows that only serve to choose a learning rate."""
    name = group.name
    if ", rate " in name:
        return ""
    if name == SHARDED or name.startswith(("Muon", "SGD")):
        return "others"
    return "length" if name.endswith(tuple(f", {length}" for length, _ in OTHER_LENGTH.values())) else "sent"


@dataclass(frozen=True)
class _Line(Group):
    """A line of a table.

    Attributes:
        loss: how far the loss is from that of the uncompressed row with the same optimizer, in words.
    """

    loss: str = NOTHING


def _line(found: Sequence[Group], group: Group) -> _Line:
    part, name = _part(group), group.name
    base = f"{name.partition(',')[0]}, {DENSE}" if name.startswith(("Muon", "SGD")) else DENSE
    if part == "length" and named(found, group.task, at_other_length(group.task, DENSE)):
        base = at_other_length(group.task, DENSE)
    dense = named(found, group.task, base)
    comparable = dense is not None and name != base and {*group.seeds} & {*dense.seeds}
    return _Line(**vars(group), loss=_loss(group, dense).figure() if comparable and dense is not None else NOTHING)


def _tables(found: Sequence[Group]) -> Iterator[tuple[str, list[_Line]]]:
    for task in dict.fromkeys(group.task for group in found):
        rows = sorted((group for group in found if group.task == task), key=_place)
        for part in _PARTS:
            own = [group for group in rows if _part(group) == part]
            has_dense = any(group.name in (DENSE, at_other_length(task, DENSE)) for group in own)
            others = (DENSE,) if part == "others" else (DENSE, ALONE)
            beside = [group for group in rows if group.name in others and not has_dense]
            if own:
                yield f"{task}, {part}", [_line(found, group) for group in (*beside, *own)]


_LEGEND = (
    *LEGEND,
    (
        "score",
        "held-out perplexity, mean ± standard deviation over seeds; without ±, of one seed. The loss is its logarithm",
    ),
    (
        "loss",
        (
            "how far it is above that of uncompressed gradients with the same optimizer, seed by seed: the mean, ± "
            f"half of its 95 % interval ({MARGIN}); without ±, the noise is unknown"
        ),
    ),
    ("sent", "by one rank in the last epoch, per step, whether or not a round is in it"),
    (
        "less traffic",
        (
            "how many times less that is than DDP sends in float32 by a ring all-reduce in every step: 2(N − 1)/N · 4 "
            "bytes per element among N ranks. Claims mean this"
        ),
    ),
    (
        "payload",
        (
            "how many times smaller one rank's payloads are than its gradients of the same steps. A payload that is "
            "gathered is sent N − 1 times, so that traffic then has 2/N of this ratio"
        ),
    ),
)


def _ratio(of: Callable[[Group], float | None]) -> Callable[[Group], str]:
    def said(group: Group) -> str:
        ratio = of(group)
        return NOTHING if ratio is None else f"{ratio:,.1f}" if ratio < 100 else f"{ratio:,.0f}"

    return said


def _columns(_: str) -> tuple[Column, ...]:
    as_usual = dict(COLUMNS)

    def loss(line: Any) -> str:
        return str(line.loss)

    return (
        *((name, as_usual[name]) for name in ("row", "score")),
        ("loss", loss),
        ("sent", as_usual["sent"]),
        ("less traffic", _ratio(lambda group: group.ratio)),
        ("payload", _ratio(lambda group: group.payload_ratio)),
    )


#: Row → its label in the picture, and whether the page is about this row.
_LABELS = {
    DENSE: ("uncompressed", False),
    GRADIENT_4: ("gradients, 4 bits", False),
    GRADIENT_1: ("gradients, 1 bit, rotated", False),
    GRADIENT_SIGN: ("gradients, signs", False),
    GRADIENT_TOP: ("gradients, top 1 %", False),
    ALONE: ("nothing is sent", False),
    SIGN_IN_PLACE: ("updates, signs", True),
    TOP: ("updates, top 1 %", True),
    DILOCO.format(ROUNDS[0]): ("DiLoCo", False),
    SPARSELOCO.format(ROUNDS[0]): ("SparseLoCo", False),
    TWO_BIT_ROUNDS.format(ROUNDS[0]): (f"{ROUNDS[0]} steps, 2 bits", True),
    SIXTEENTH.format(ROUNDS[0]): (f"{ROUNDS[0]} steps, 1/16", True),
    IN_PLACE.format(ROUNDS[0]): (f"{ROUNDS[0]} steps, 1/64", True),
}


def _found(found: Sequence[Group]) -> str:
    every = ROUNDS[0]
    dense, top, gradients = (needed(found, TASK, name) for name in (DENSE, TOP, GRADIENT_TOP))
    said = (
        f"On tiny shakespeare the largest 1 % of gradients cost {_loss(gradients, dense).figure()} of the uncompressed "
        f"loss, and the largest 1 % of updates {_loss(top, dense).figure()}."
    )
    rounds = []
    for name, called in (
        (TWO_BIT_ROUNDS, "in 2 bits"),
        (DILOCO, "uncompressed, as in DiLoCo"),
        (SPARSELOCO, "as in SparseLoCo"),
    ):
        own = named(found, TASK, name.format(every))
        if own is not None:
            rounds.append(f"{_loss(own, dense).figure()} {called} ({_traffic(own)})")
    return f"{said} Rounds of {every} steps cost {'; '.join(rounds)}." if rounds else said


def _panels(found: Sequence[Group]) -> list[Panel]:
    needed(found, TASK, DENSE)
    own = [(label, named(found, TASK, name), strong) for name, (label, strong) in _LABELS.items()]
    shown = [(label, group, strong) for label, group, strong in own if group is not None]
    return [sent_panel("Tiny shakespeare, GPT", shown), score_panel("Held-out perplexity", shown)]


EXPERIMENT = Experiment(
    module="local",
    paper="Douillard et al. 2023, DiLoCo (arXiv 2311.08105); Sarfi et al. 2025, SparseLoCo (arXiv 2508.15706)",
    titles={f"{task}, {part}": _title(task, part) for task in _TITLES for part in _PARTS},
    recipes=RECIPES,
    claims=_claims,
    opening=Opening(
        title="Updates or gradients?",
        says="Where little can be sent, should ranks send gradients, or what their optimizers changed? DiLoCo's "
        "authors found that ranks which average such updates after hundreds of steps learn as well as with every "
        "gradient, and send 500 times less. SparseLoCo's found that 1 to 3 % of these updates, in 2 bits, are enough.",
        ran="A small GPT learned bytes of tiny shakespeare, and then of WikiText-2, with AdamW on four ranks. Rows "
        "differ in what ranks sent: gradients, updates after every step, updates after many steps, or nothing.",
        found=_found,
        panels=_panels,
    ),
    seeds=SEEDS,
    layout=Layout(tables=_tables, columns=_columns, legend=_LEGEND),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
