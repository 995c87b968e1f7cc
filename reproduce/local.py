"""Updates or gradients: what is kept of the loss when ranks send what their optimizers changed.

AdamW divides by the second moments of the gradients that arrive. Behind strong compression these are not those of the
gradients that were computed, and models become worse. ``nb.compress_updates`` lets every rank step its own optimizer,
and averages what the optimizers changed: after every step, or after every n steps, as DiLoCo (Douillard et al. 2023,
arXiv 2311.08105) and SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706) do. Rows of one table differ in what is sent:

* *gradients*, averaged and then given to AdamW: without compression (*dense*, which all others are compared with), in 4
  bits, as signs, the largest hundredth of them, or as factors of rank 4;
* *updates* after every step, along a length that is measured, or with length 1;
* *updates* after every 15 or 30 steps: by DiLoCo (nothing compressed, an outer SGD with momentum), their mean alone,
  by Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512: 4 bits, three fragments in turn, each on its way for two
  steps), by SparseLoCo (a 64th in tiles, 2 bits, a residual that decays, a plain outer step), and with the same bytes
  by what this library has: no tiles, a residual that stays, and the length that is measured; the same with residuals
  in place, each element along the mean over those that sent it; a 16th like that, and as many elements as may be sent
  at 2,000 times less traffic; and all elements in 2 bits with residuals in place and DiLoCo's outer step;
* *nothing*: each rank trains by itself on its share of the data. What is sent is worth something only where the loss
  is below that of this row; claims ask it of rounds and of the largest hundredth;
* rounds for more steps than gradients have, as slow links have time for;
* other optimizers, each compared with its own run without compression: Muon and SGD with momentum; and replicas of two
  ranks each, sharded by FSDP2.

*Traffic* is what a rank sends, against DDP in float32: a ring all-reduce of the gradients in every step, which takes
2·(N − 1)/N · 4 bytes per element among N ranks. All claims mean that. It is not how much smaller payloads are: one that
is gathered is sent N − 1 times, so among four ranks its traffic has half that ratio.

The learning rate of each kind is to be the best of several, half and twice as much among them, by a seed of its own; a
claim of each says whether it is. Kinds are gradients, updates, rounds of many steps, and nothing, each without
compression; compressed gradients and sparse updates of every step, each by the row of the largest hundredth; and
updates of every step in 1 or 2 bits, by the row of signs.

Run ``python -m reproduce.local`` (an hour and a half on two cores), ``--long`` (with signs, rounds of 30 steps,
other optimizers, the choice of learning rates and another text: four hours more), ``--quick`` (seconds), ``--help``.

Differences from the papers: a GPT of 0.24 million parameters for 60 to 512 million, bytes of tiny shakespeare for C4
and DCLM, four ranks, and rounds of 15 and 30 steps in training of 2,282, where DiLoCo has 500 of 88,000.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from reproduce.command import Experiment, Recipe, main
from reproduce.pairs import Difference, Finding
from reproduce.pictures import Panel
from reproduce.report import (
    COLUMNS,
    DENSE,
    MARGIN,
    NOTHING,
    Claim,
    Column,
    Group,
    Layout,
    Opening,
    claimed,
    compared,
    named,
    needed,
    score_panel,
    sent_panel,
)
from reproduce.row import Row

__all__ = ["EXPERIMENT", "LONGER"]

_TASK, _OTHER_TASK = "shakespeare", "gpt"

#: Learning rates at their peak, by text and by what is averaged, and those that each is chosen of, with a seed of its
#: own: half of it and twice as much are among them.
_RATE = {
    _TASK: {
        "gradients": 1.6e-2, "compressed gradients": 1.6e-2, "updates": 3.2e-2, "compressed updates": 8e-3,
        "signs of updates": 1.6e-2, "rounds": 8e-3, "nothing": 3.2e-2,
    },
    _OTHER_TASK: {
        "gradients": 1.6e-2, "compressed gradients": 1.6e-2, "updates": 3.2e-2, "compressed updates": 8e-3,
        "signs of updates": 1.6e-2, "rounds": 8e-3, "nothing": 3.2e-2,
    },
}  # fmt: skip
_RATES: dict[str, dict[str, tuple[float, ...]]] = {
    _TASK: {
        "gradients": (8e-3, 1.6e-2, 3.2e-2),
        "compressed gradients": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
        "updates": (8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
        "compressed updates": (4e-3, 8e-3, 1.6e-2),
        "signs of updates": (4e-3, 8e-3, 1.6e-2, 3.2e-2),
        "rounds": (4e-3, 8e-3, 1.6e-2),
        "nothing": (8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    },
    # What is compressed there, or sends nothing, has the first text's.
    _OTHER_TASK: {
        "gradients": (8e-3, 1.6e-2, 3.2e-2),
        "updates": (1.6e-2, 3.2e-2, 6.4e-2),
        "rounds": (4e-3, 8e-3, 1.6e-2),
    },
}
_CHOOSING = (1000,)

#: Seeds of all rows but those of other optimizers and of sharded replicas, which have the first.
_SEEDS = (0, 1, 2)

#: Blocks of the GPT are that wide, so that its rows with three seeds each take an hour and a half.
_WIDTH = 64

#: Steps of a round.
_ROUNDS = (15, 30)

_UPDATES, _PLAIN, _TWO_BITS = "updates", "updates, length 1", "updates, 2 bits"
_SIGN, _TOP, _TOP_8 = "updates, sign", "updates, top 1%", "updates, top 4%, 8 bits"
_TOP_2, _TOP_6 = "updates, top 2%, 2 bits", "updates, top 6%, 2 bits"
_GRADIENT_SIGN, _GRADIENT_TOP, _GRADIENT_4 = "gradients, sign", "gradients, top 1%", "gradients, 4 bits"
_DILOCO, _MEAN, _STREAMING, _SPARSELOCO, _OURS = (
    f"every {{}}, {what}" for what in ("DiLoCo", "mean", "Streaming DiLoCo", "SparseLoCo", "top 1/64, 2 bits")
)
_SHARDED = "updates, 2 bits, FSDP2"

#: Each rank trains by itself.
_ALONE = "nothing is sent"

#: What has residuals in place is called so. Where elements are selected, each goes along the mean over its senders.
_IN_PLACE, _SIGN_IN_PLACE = f"{_OURS}, in place", f"{_SIGN}, in place"
_SIXTEENTH, _TWO_BIT_ROUNDS = "every {}, top 1/16, 2 bits, in place", "every {}, 2 bits, in place"

#: The same mean where residuals wait apart: which of the two it is that helps.
_SENDERS = f"{_OURS}, mean of senders"

#: Trained for more steps: on slow links there is time for them.
LONGER, _LONGER_EPOCHS = "{}, longer", 10

#: SparseLoCo's published settings: a 64th of every tile of 64×64, in 2 bits, behind a residual that decays.
_PUBLISHED = "topk:density=0.015625,values=int2,tile=64x64+ef:decay=0.95"
_UNTILED = "topk:density=0.015625,values=int2+ef"


def _of_senders(density: float) -> str:
    return f"topk:density={density},values=int2,mean=senders+ef"


#: Steps of a round → the density that has 2,000 times less traffic among four ranks.
_DENSITY = {15: 0.01, 30: 0.022}
_BUDGET = {every: f"every {every}, top {density:.2g}, 2 bits, in place" for every, density in _DENSITY.items()}

#: What claims ask for: losses as shares of another's, and how many times less traffic.
_KEPT, _LESS = 0.01, 25
_KEPT_TOP, _LESS_TOP = 0.03, 70
_KEPT_ROUNDS, _LESS_ROUNDS = 0.005, (150, 400, 2000)

#: What traffic is compared with, as claims say it.
_THAN_DDP = "times less traffic than DDP in float32"

#: Bytes that count as equal.
_CLOSE = 0.1

_DENSE = Row(
    _TASK, DENSE, "none", optimizer="adamw", epochs=7, lr=_RATE[_TASK]["gradients"], batch=48, momentum=0.9, beta2=0.95,
    weight_decay=0.1, clip=1.0, min_numel=1024, width=_WIDTH,
)  # fmt: skip


# ---- rows ------------------------------------------------------------------------------------------------------------


def _kind(row: Row) -> str:
    """Which learning rate a row has."""
    if row.isolated:
        return "nothing"
    if row.updates > 1:
        return "rounds"
    sparse, few = row.spec.startswith("topk"), row.spec.startswith("sign") or "bits=2" in row.spec
    if row.updates:
        return "compressed updates" if sparse else "signs of updates" if few else "updates"
    return "compressed gradients" if sparse or few else "gradients"


def _rated(row: Row) -> Row:
    return replace(row, lr=_RATE[row.task][_kind(row)])


def _gradients(name: str, spec: str, small: str = "uncompressed") -> Row:
    return _rated(replace(_DENSE, name=name, spec=spec, small=small, collective=_collective(spec)))


def _collective(spec: str) -> Literal["scatter_reduce", "auto"]:
    """Signs and the like are added up on their way in models from about a million parameters on, and here, too."""
    return "scatter_reduce" if spec.startswith(("sign", "uniform")) else "auto"


def _updates(name: str, spec: str = "none", *, every: int = 1, outer: str = "auto") -> Row:
    return _rated(
        replace(
            _DENSE,
            residuals="in-place" if name.endswith("in place") else "apart",
            name=name,
            spec=spec,
            updates=every,
            outer=outer,
            small="uncompressed" if spec == "none" else "fused",
            collective=_collective(spec),
        )
    )


def _rounds(every: int, turn: int) -> Iterator[Recipe]:
    for name, spec, outer in (
        (_DILOCO, "none", "nesterov"),
        (_TWO_BIT_ROUNDS, "uniform:bits=2+ef", "nesterov"),
        (_SIXTEENTH, _of_senders(1 / 16), "1"),
        (_IN_PLACE, _of_senders(1 / 64), "1"),
        (_SPARSELOCO, _PUBLISHED, "1"),
        (_OURS, _UNTILED, "auto"),
        (_BUDGET[every], _of_senders(_DENSITY[every]), "1"),
        (_MEAN, "none", "auto"),
    ):
        long = name in (_BUDGET[every], _MEAN) or turn > 1
        yield Recipe(_updates(name.format(every), spec, every=every, outer=outer), turn=turn, long=long)
    streaming = _updates(_STREAMING.format(every), "qsgd:bits=4", every=every, outer="nesterov")
    yield Recipe(replace(streaming, fragments=3, overlap=2), turn=turn + 1, long=True)


def _others() -> Iterator[Recipe]:
    muon = replace(_DENSE, name=f"Muon, {DENSE}", optimizer="muon", lr=0.02, momentum=0.95)
    sgd = replace(_DENSE, name=f"SGD, {DENSE}", optimizer="sgd", lr=0.3, weight_decay=1e-4)
    for dense, outer in ((muon, "auto"), (sgd, "1")):
        name = dense.name.replace(DENSE, _TWO_BITS)
        own = replace(dense, name=name, spec="qsgd:bits=2+ef", small="fused", updates=1, outer=outer)
        yield from (Recipe(row, turn=3, ablation=True, long=True) for row in (dense, own))
    sharded = replace(_updates(_SHARDED, "qsgd:bits=2+ef"), shards=2)
    yield Recipe(sharded, turn=3, ablation=True, long=True)


def _longer() -> Iterator[Recipe]:
    for recipe in _rounds(_ROUNDS[0], turn=2):
        if recipe.row.name in {kind.format(_ROUNDS[0]) for kind in (_DILOCO, _TWO_BIT_ROUNDS, _SIXTEENTH)}:
            row = replace(recipe.row, name=LONGER.format(recipe.row.name), epochs=_LONGER_EPOCHS)
            yield replace(recipe, row=row, long=True)


def _candidate(base: str, rate: float) -> str:
    """The name of a row that a learning rate is chosen by."""
    return f"{base}, rate {rate:g}"


_ALONE_ROW = _rated(replace(_DENSE, name=_ALONE, isolated=True))
_AVERAGED = (
    Recipe(_DENSE),
    Recipe(_ALONE_ROW),
    Recipe(_updates(_UPDATES)),
    Recipe(_updates(_SIGN_IN_PLACE, "sign+ef")),
    Recipe(_updates(_TOP, "topk:density=0.01+ef")),
    Recipe(_gradients(_GRADIENT_TOP, "topk:density=0.01+ef", small="fused")),
    Recipe(_gradients(_GRADIENT_4, "qsgd:bits=4")),
    *_rounds(_ROUNDS[0], turn=1),
    Recipe(_updates(_SIGN, "sign+ef"), turn=2, long=True),
    Recipe(_updates(_TWO_BITS, "qsgd:bits=2+ef"), turn=2, long=True),
    Recipe(_gradients(_GRADIENT_SIGN, "sign+ef", small="fused"), turn=2, long=True),
    *(
        Recipe(_updates(name, f"topk:density={density},values=int2+ef"), turn=2, long=True)
        for name, density in ((_TOP_2, 0.02), (_TOP_6, 0.06))
    ),
    Recipe(_updates(_PLAIN, outer="1"), turn=2, long=True),
    Recipe(_updates(_SENDERS.format(_ROUNDS[0]), _of_senders(1 / 64), every=_ROUNDS[0], outer="1"), turn=2, long=True),
    *_rounds(_ROUNDS[1], turn=2),
    Recipe(_updates(_TOP_8, "topk:density=0.04,values=int8+ef"), turn=3, long=True),
    Recipe(_gradients("gradients, rank 4", "powersgd:rank=4"), turn=3, long=True),
)

#: What is averaged → the row that its learning rate is chosen by.
_BASES = {
    "gradients": _DENSE,
    "compressed gradients": _gradients(_GRADIENT_TOP, "topk:density=0.01+ef", small="fused"),
    "updates": _updates(_UPDATES),
    "compressed updates": _updates(_TOP, "topk:density=0.01+ef"),
    "signs of updates": _updates(_SIGN_IN_PLACE, "sign+ef"),
    "nothing": _ALONE_ROW,
} | {"rounds": _updates(_DILOCO.format(_ROUNDS[0]), every=_ROUNDS[0], outer="nesterov")}


def _choice(task: str) -> Iterator[Recipe]:
    for kind, rates in _RATES[task].items():
        base = _BASES[kind] if task == _TASK else _on_other_text(_BASES[kind])
        for rate in rates:
            row = replace(base, name=_candidate(base.name, rate), lr=rate)
            yield Recipe(row, turn=4 if task == _TASK else 9, long=True, seeds=_CHOOSING)


def _on_other_text(row: Row) -> Row:
    return _rated(replace(row, task=_OTHER_TASK, epochs=3, batch=32))


_RECIPES = (
    *_AVERAGED,
    *_longer(),
    *_others(),
    *_choice(_TASK),
    *(
        replace(each, row=_on_other_text(each.row), turn=each.turn + 5, long=True)
        for each in _AVERAGED
        if not each.long
    ),
    *_choice(_OTHER_TASK),
)


# ---- claims ----------------------------------------------------------------------------------------------------------


def _claims(found: Sequence[Group]) -> list[Claim]:
    there = {group.task for group in found}
    return [
        *_of_task(found, _TASK),
        *(_chosen(found, _TASK, kind) for kind in _RATES[_TASK]),
        *(_of_task(found, _OTHER_TASK) if _OTHER_TASK in there else ()),
        *(_chosen(found, _OTHER_TASK, kind) for kind in _RATES[_OTHER_TASK] if _OTHER_TASK in there),
    ]


def _of_task(found: Sequence[Group], task: str) -> Iterator[Claim]:
    yield _near(found, task, less=_LESS, kept=_KEPT)
    yield _near(found, task, less=_LESS_TOP, kept=_KEPT_TOP)
    for own, other in ((_TOP, _GRADIENT_TOP), (_SIGN, _GRADIENT_SIGN)):
        text = f"at equal bytes updates are better than gradients: {own} than {other}"
        yield _judged(found, task, text, (own, other), _better_at_equal_bytes)
    kinds = (_DILOCO, _TWO_BIT_ROUNDS, _SIXTEENTH, _IN_PLACE, _SPARSELOCO)
    rounds = (name.format(every) for every in _ROUNDS for name in kinds)
    for own in (_GRADIENT_TOP, _TOP, *rounds):
        text = f"what is sent is worth it: {own} is better than ranks that train by themselves"
        yield _judged(found, task, text, (own, _ALONE), lambda own, alone: _loss(own, alone).better())
    for every in _ROUNDS:
        for less in _LESS_ROUNDS:
            yield _far(found, task, every, less)
        own, other = _IN_PLACE.format(every), _OURS.format(every)
        text = f"residuals in place are better than apart: {own} than {other}"
        yield _judged(found, task, text, (own, other), _better_at_equal_bytes)
    yield _judged(
        found, task, "the measured length helps: updates are better with it than with length 1",
        (_UPDATES, _PLAIN),
        lambda own, plain: _loss(own, plain).better(),
    )  # fmt: skip


def _far(found: Sequence[Group], task: str, every: int, less: int) -> Claim:
    """Of rounds that send so little, the best, beside those that do not compress."""
    text = (
        f"{task}: every {every} steps with at least {less:,} {_THAN_DDP}: the loss of the best such row is at "
        f"most {_KEPT_ROUNDS:.1%} above that of DiLoCo, which does not compress"
    )
    try:
        diloco = needed(found, task, _DILOCO.format(every))
        kinds = (_OURS, _SPARSELOCO, _IN_PLACE, _SIXTEENTH, _TWO_BIT_ROUNDS)
        names = (*(name.format(every) for name in kinds), _BUDGET[every])
        best = _best(found, task, names, diloco, less=less)
    except LookupError as error:
        return Claim(text, None, str(error))
    return claimed(text, _loss(best, diloco).no_worse(_KEPT_ROUNDS), _figures([best, diloco]))


def _best(found: Sequence[Group], task: str, names: Sequence[str], beside: Group, *, less: float) -> Group:
    """Of rows with so many times less traffic, the one of the least loss.

    Raises:
        LookupError: none is there, or none sends so little.
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
    """How far a row's loss is from another's, as a share of that. Scores are perplexities."""
    return compared(own, other, relative=True, of=math.log)


def _judged(
    found: Sequence[Group], task: str, text: str, names: Sequence[str], says: Callable[..., Finding | bool]
) -> Claim:
    text = f"{task}: {text}"
    try:
        own = [needed(found, task, name) for name in names]
        finding = says(*own)
    except LookupError as error:
        return Claim(text, None, str(error))
    return claimed(text, finding, _figures(own))


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
    """In few words."""
    return NOTHING if group.ratio is None else f"{group.ratio:,.0f} times less traffic"


def _near(found: Sequence[Group], task: str, *, less: float, kept: float) -> Claim:
    """Of rows of every step that send so little, the best."""
    text = (
        f"{task}: updates in every step with at least {less:g} {_THAN_DDP}: the loss of the best such row is at most "
        f"{kept:.0%} above dense"
    )
    try:
        dense = needed(found, task, DENSE)
        best = _best(found, task, (_SIGN, _SIGN_IN_PLACE, _TWO_BITS, _TOP_8, _TOP, _TOP_6, _TOP_2), dense, less=less)
        finding = _loss(best, dense).no_worse(kept)
    except LookupError as error:
        return Claim(text, None, str(error))
    return claimed(text, finding, _figures([best]))


def _better_at_equal_bytes(own: Group, other: Group) -> Finding:
    """Where bytes are not equal, losses say nothing."""
    times = own.sent_bytes_per_step / other.sent_bytes_per_step
    if abs(math.log(times)) > math.log1p(_CLOSE):
        raise LookupError(f"{own.name} sent {times:.2f} times what {other.name} did")
    return _loss(own, other).better()


def _chosen(found: Sequence[Group], task: str, kind: str) -> Claim:
    """Whether the learning rate of a kind is the best of those that were tried."""
    base, own = _BASES[kind], _RATE[task][kind]
    text = f"{task}: the learning rate of {kind}, {own:g}, is the best for {base.name} of those that were tried"
    try:
        tried = {rate: needed(found, task, _candidate(base.name, rate)) for rate in _RATES[task][kind]}
    except LookupError as error:
        return Claim(text, None, str(error))
    losses = {rate: math.inf if group.mean is None else math.log(group.mean) for rate, group in tried.items()}
    said = "; ".join(
        f"{rate:g}: {loss:.4f}" if loss < math.inf else f"{rate:g}: diverged" for rate, loss in losses.items()
    )
    best = min(losses, key=losses.__getitem__)
    return claimed(text, math.isclose(best, own), f"seed {_CHOOSING[0]}, loss in nats per byte: {said}")


# ---- tables and pictures ---------------------------------------------------------------------------------------------

_PARTS = {
    "gradients": "gradients are averaged, or nothing is",
    "updates": "updates are averaged after every step",
    "rounds": "updates are averaged after every 15 or 30 steps",
    "longer": f"rounds for {_LONGER_EPOCHS} epochs, and gradients for fewer",
    "optimizers": "other optimizers",
    "sharded": "two replicas of two ranks each, by FSDP2",
    "rates": "how learning rates were chosen, by a seed of its own",
}
_TITLES = {_TASK: "tiny shakespeare as bytes, GPT", _OTHER_TASK: "WikiText-2 as bytes, GPT"}


def _part(group: Group) -> str:
    """Which table a row is in."""
    name = group.name
    if ", rate " in name:
        return "rates"
    if name == _SHARDED:
        return "sharded"
    if name.endswith(", longer"):
        return "longer"
    starts = {"updates": "updates", "every": "rounds", "Muon": "optimizers", "SGD": "optimizers"}
    return next((part for start, part in starts.items() if name.startswith(start)), "gradients")


@dataclass(frozen=True)
class _Line(Group):
    """A line of a table.

    Attributes:
        loss: how far its loss is from that of the row without compression and with the same optimizer, in words.
    """

    loss: str = NOTHING


def _line(found: Sequence[Group], group: Group) -> _Line:
    part = _part(group)
    base = f"{group.name.partition(',')[0]}, {DENSE}" if part == "optimizers" else DENSE
    dense = named(found, group.task, base, None if part == "longer" else group.epochs)
    comparable = part != "rates" and dense is not None and group.name != base and {*group.seeds} & {*dense.seeds}
    return _Line(**vars(group), loss=_loss(group, dense).figure() if comparable and dense is not None else NOTHING)


def _tables(found: Sequence[Group]) -> Iterator[tuple[str, list[_Line]]]:
    usual = [group for group in found if _part(group) != "longer"] or list(found)
    for task, epochs in dict.fromkeys((group.task, group.epochs) for group in usual):
        rows = [group for group in found if group.task == task and (group.epochs == epochs or _part(group) == "longer")]
        for part in _PARTS:
            own = [group for group in rows if _part(group) == part]
            with_dense = ("updates", "rounds", "longer", "sharded")
            beside = [group for group in rows if group.name in (DENSE, _ALONE) and part in with_dense]
            if own:
                yield f"{task}, {part}", [_line(found, group) for group in (*beside, *own)]


_LEGEND = (
    "Score: mean ± standard deviation over the row's seeds; without ± it is one seed's; its logarithm is the loss. "
    "Loss: how far a row's loss is above that of the row that averages gradients in every step without compression, "
    "with the same optimizer, in per cent, paired by seed, ± half of its 95 % interval "
    f"({MARGIN}; without ±: of unknown noise). Sent: by one rank in the last epoch, per optimizer "
    "step, whether or not there is a round in it. Less traffic: how many times less that is than DDP sends in float32, "
    "by a ring all-reduce in every step (2(N − 1)/N · 4 bytes per element among N ranks); claims mean this column. "
    "Payload: how many times smaller the payloads of one rank are than its dense gradients of the same steps, norms "
    "and biases included; where payloads are gathered by N ranks, each is sent N − 1 times, so traffic has 2/N of this "
    "ratio. Step: the median of the last epoch on rank 0, however busy the machine was."
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
        ("step", as_usual["step"]),
    )


#: Names of rows in the picture, and whether the page is about them.
_LABELS = {
    DENSE: ("uncompressed", False),
    _GRADIENT_4: ("gradients, 4 bits", False),
    _GRADIENT_SIGN: ("gradients, signs", False),
    _GRADIENT_TOP: ("gradients, top 1 %", False),
    _ALONE: ("nothing is sent", False),
    _SIGN_IN_PLACE: ("updates, signs", True),
    _TOP: ("updates, top 1 %", True),
    _DILOCO.format(_ROUNDS[0]): (f"DiLoCo, every {_ROUNDS[0]} steps", False),
    _SPARSELOCO.format(_ROUNDS[0]): (f"SparseLoCo, every {_ROUNDS[0]} steps", False),
    _TWO_BIT_ROUNDS.format(_ROUNDS[0]): (f"every {_ROUNDS[0]}, 2 bits, in place", True),
    _SIXTEENTH.format(_ROUNDS[0]): (f"every {_ROUNDS[0]}, 1/16, in place", True),
    _IN_PLACE.format(_ROUNDS[0]): (f"every {_ROUNDS[0]}, 1/64, in place", True),
}


def _found(found: Sequence[Group]) -> str:
    every = _ROUNDS[0]
    dense, top, gradients = (needed(found, _TASK, name) for name in (DENSE, _TOP, _GRADIENT_TOP))
    said = (
        f"with the top 1 % the loss differs from that without compression by {_loss(top, dense).figure()} where "
        f"updates are sent ({_traffic(top)}) and by {_loss(gradients, dense).figure()} where gradients are"
    )
    rounds = []
    for name, called in (
        (_DILOCO, "DiLoCo"),
        (_SPARSELOCO, "SparseLoCo"),
        (_OURS, "a 64th in 2 bits and this library's measured length"),
        (_IN_PLACE, "a 64th with residuals in place and the mean over senders"),
        (_SIXTEENTH, "a 16th like that"),
        (_TWO_BIT_ROUNDS, "all elements in 2 bits, residuals in place and DiLoCo's outer step"),
    ):
        own = named(found, _TASK, name.format(every))
        if own is not None:
            rounds.append(f"by {_loss(own, dense).figure()} with {called} ({_traffic(own)})")
    return f"{said}, and with a round after every {every} steps {', '.join(rounds)}." if rounds else f"{said}."


def _panels(found: Sequence[Group]) -> list[Panel]:
    needed(found, _TASK, DENSE)
    own = [(label, named(found, _TASK, name), strong) for name, (label, strong) in _LABELS.items()]
    shown = [(label, group, strong) for label, group, strong in own if group is not None]
    return [sent_panel("Tiny shakespeare, GPT", shown), score_panel("Held-out perplexity", shown)]


EXPERIMENT = Experiment(
    module="local",
    paper="Douillard et al. 2023, DiLoCo (arXiv 2311.08105); Sarfi et al. 2025, SparseLoCo (arXiv 2508.15706)",
    titles={f"{task}, {part}": f"{title}: {what}" for task, title in _TITLES.items() for part, what in _PARTS.items()},
    recipes=_RECIPES,
    claims=_claims,
    opening=Opening(
        title="Updates or gradients?",
        says="Workers that take hundreds of AdamW steps by themselves, and then average what these changed with an "
        "outer momentum, train language models as well as workers that average every gradient, and communicate 500 "
        "times less (DiLoCo); of these updates 1 to 3 % in 2 bits are enough, and with error feedback in the place of "
        "the outer momentum the loss is even lower than DiLoCo's (SparseLoCo).",
        ran="A small GPT learned bytes of tiny shakespeare with AdamW on four real ranks, which sent gradients, "
        "updates after every step, or updates after rounds of many steps; tables have the rows that were run so far.",
        found=_found,
        panels=_panels,
    ),
    seeds=_SEEDS,
    layout=Layout(tables=_tables, columns=_columns, legend=_LEGEND),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
