"""Which elements to send at equal bytes: of every layer, by L-GreCo, of the whole model, or above a threshold.

Two papers disagree on the set in which the sent elements should be the largest. Rethink-GS (Sahu, Dutta, Abdelmoniem,
Banerjee, Canini, Kalnis 2021, arXiv 2108.00951) sends every element above a hard threshold, which is the same in all
steps, and finds this better than top-k with as many bytes over all of training. L-GreCo (Alimohammadi, Markov, Frantar,
Alistarh 2022, arXiv 2210.17357) chooses a density for every layer at the error of a uniform one. Its section 5.3
compares that with a hard threshold (71.7 % with L-GreCo and 71.4 % with 1.18 times its bytes, ResNet-18 on CIFAR-100)
and argues against the largest elements of the whole model: a layer that has none of these learns nothing in that step.

A ResNet-8 learns CIFAR-10, with error feedback in all rows but the first:

* *dense*: without compression;
* *top-k*: one density for all layers, 5 %. It is the reference for
* *lgreco*: densities from 0.5 to 50 %, chosen anew at every epoch, at the error that the reference has;
* *top-k, equal bytes*: one density for all layers, with which as much is sent as by L-GreCo;
* *global top-k, once an epoch*: each layer's density is its share of the largest elements of the whole model, in
  gradients added up over an epoch;
* *global top-k, every step*: the largest elements of the whole model in every step, as published. The whole gradient is
  one vector;
* *threshold*: every element with at least a fixed magnitude, in every layer.

L-GreCo's row sets the number of bytes, because L-GreCo budgets an error and not bytes. The settings with which the
other rows send as many bytes follow from runs with a seed of their own, one of which is L-GreCo's:

* The bytes of a density follow from the shapes of layers. Densities that differ by layer need fewer bytes, because
  indices of dense layers are short; a candidate run shows how many fewer.
* The bytes of a threshold are interpolated, in logarithms, between candidate runs.

Of all values with two digits, the one that comes closest to L-GreCo's bytes is taken. The page says whether the values
here are those, and for each row how many bytes it sent in the end, as a multiple of L-GreCo's.

Compression begins when the learning rate has risen, and bytes are counted from then on. Norms and biases travel
uncompressed, but for *global top-k, every step*, where they are part of the vector: that row spends on elements what
the others spend on norms and biases.

Run ``python -m reproduce.sparsity`` (three quarters of an hour on two cores), ``--long`` (with the runs that values
follow from, a quarter of an hour more), ``--quick`` (seconds), ``--help``. If the rule gives another value than the one
in this file, change it here: its row is then trained again.

Differences from the papers: a smaller network and fewer epochs, four ranks. The reference is 5 % instead of the 1 % of
L-GreCo's comparison, because norms and biases would otherwise be half of what L-GreCo sends. Residuals hold gradients
and not steps, so a threshold applies to gradients, whatever the learning rate.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import narrowband as nb
from narrowband.adapt import Traffic
from narrowband.collectives import all_reduce_nbytes
from narrowband.units import format_bytes
from reproduce.command import Experiment, Recipe, main
from reproduce.groups import DENSE, NOTHING, Claim, Group, claimed, compared, judged, named, needed
from reproduce.models import ResNet
from reproduce.pairs import Finding
from reproduce.pictures import Bar, Panel
from reproduce.report import COLUMNS, LESS, SCORE, Layout, Legend, Opening, score_panel
from reproduce.row import WARM_UP, Row

__all__ = ["EXPERIMENT"]

_TASK = "cifar"

_REFERENCE, _LGRECO, _EQUAL = "top-k", "lgreco", "top-k, equal bytes"
_GLOBAL, _EVERY_STEP, _THRESHOLD = "global top-k, once an epoch", "global top-k, every step", "threshold"
#: Rows that should send as many bytes as L-GreCo.
_SPARSE = (_EQUAL, _GLOBAL, _EVERY_STEP, _THRESHOLD)

#: The seed with which values are chosen, and the name of L-GreCo's row with that seed.
_CHOOSING = (100,)
_BUDGET = "budget: lgreco"

_TOPK, _ABOVE = "topk:density={!r}+ef", "threshold:value={!r}+ef"
_DENSITY = 0.05
#: Values chosen at L-GreCo's bytes: densities of every layer, of global top-k once an epoch and in every step, and the
#: threshold. Claims check whether the rule chooses these.
_DENSITY_OF_LAYERS = 0.011
_DENSITY_BY_EPOCH = 0.011
_DENSITY_OF_ALL = 0.013
_VALUE = 0.054
#: Candidates that are trained to choose values: a density of global top-k once an epoch, and thresholds.
_CANDIDATE = 0.01
_CANDIDATES = (0.02, 0.04, 0.08)

#: A min_numel that no tensor reaches: all tensors are small, and travel as one vector.
_ALL_SMALL = 1 << 30

_DENSE = Row(_TASK, DENSE, "none", epochs=5, lr=0.1, batch=128, weight_decay=1e-4)

#: Share by which equal bytes may differ; share within which the L-GreCo paper counts a metric as kept.
_CLOSE = 0.1
_KEPT = 0.01

#: Key of the table of candidates.
_CHOICE = "choice"


def _sparse(name: str, spec: str, policy: str = "uniform") -> Row:
    return replace(_DENSE, name=name, spec=spec, policy=policy, delay=WARM_UP)


_GLOBAL_CANDIDATE = f"candidate: global top-k, {_CANDIDATE:.0%}"


def _candidate(value: float) -> str:
    return f"candidate: threshold {value:g}"


_AS_LGRECO = _sparse(_LGRECO, _TOPK.format(_DENSITY), "lgreco")

#: Rows from which values are chosen.
_CHOOSE = (
    replace(_AS_LGRECO, name=_BUDGET),
    _sparse(_GLOBAL_CANDIDATE, _TOPK.format(_CANDIDATE), "global-topk"),
    *(_sparse(_candidate(value), _ABOVE.format(value)) for value in _CANDIDATES),
)

_RECIPES = (
    *(Recipe(row, seeds=_CHOOSING, long=True) for row in _CHOOSE),
    *(
        Recipe(row, turn=1)
        for row in (
            _DENSE,
            _sparse(_REFERENCE, _TOPK.format(_DENSITY)),
            _AS_LGRECO,
            _sparse(_EQUAL, _TOPK.format(_DENSITY_OF_LAYERS)),
            _sparse(_GLOBAL, _TOPK.format(_DENSITY_BY_EPOCH), "global-topk"),
            replace(_sparse(_EVERY_STEP, _TOPK.format(_DENSITY_OF_ALL)), min_numel=_ALL_SMALL, small="fused"),
            _sparse(_THRESHOLD, _ABOVE.format(_VALUE)),
        )
    ),
)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _sent(group: Group) -> float:
    """Return the bytes that a rank sends in a step, on average over all compressed steps."""
    if group.compressed_ratio is None:
        raise LookupError(f"needs bytes of {group.name}")
    return all_reduce_nbytes(4 * group.parameters, group.nodes) / group.compressed_ratio


def _times(own: Group, other: Group) -> float:
    """Return a row's bytes as a multiple of another's."""
    return _sent(own) / _sent(other)


@functools.cache
def _shapes() -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the model's parameters."""
    return tuple(tuple(p.shape) for p in ResNet(_DENSE.depth).parameters())


@functools.cache
def _by_layers(density: float, nodes: int) -> float:
    """Return the bytes of a step if every layer has this density, with norms and biases uncompressed."""
    chosen = nb.compression(_TOPK.format(density))
    layers = [(chosen, shape) for shape in _shapes() if len(shape) > 1]
    small = sum(math.prod(shape) for shape in _shapes() if len(shape) < 2)
    return sum(Traffic(nodes).nbytes(layers)) + all_reduce_nbytes(4 * small, nodes)


@functools.cache
def _as_one(density: float, nodes: int) -> float:
    """Return the bytes of a step if all parameters are one vector with this density."""
    numel = sum(map(math.prod, _shapes()))
    return sum(Traffic(nodes).nbytes([(nb.compression(_TOPK.format(density)), (numel,))]))


def _by_epoch(density: float, nodes: int, found: Sequence[Group]) -> float:
    """Return the bytes of a step if layers have unequal shares of this density: those of :func:`_by_layers`, scaled by
    the ratio that the candidate run shows.
    """
    candidate = needed(found, _TASK, _GLOBAL_CANDIDATE)
    return _by_layers(density, nodes) * _sent(candidate) / _by_layers(_CANDIDATE, candidate.nodes)


def _above(value: float, found: Sequence[Group]) -> float:
    """Return the bytes that a threshold sends, interpolated in logarithms between the two candidates around it."""
    sent = [_sent(needed(found, _TASK, _candidate(candidate))) for candidate in _CANDIDATES]
    at = max(0, min(sum(candidate <= value for candidate in _CANDIDATES), len(_CANDIDATES) - 1) - 1)
    (low, high), (most, least) = _CANDIDATES[at : at + 2], sent[at : at + 2]
    return most * math.pow(least / most, math.log(value / low) / math.log(high / low))


def _closest(nbytes: Callable[[float], float], budget: float, low: float, high: float) -> float:
    """Return the number with two digits whose bytes are closest to a budget, as a ratio."""
    numbers = (float(f"{digits}e-{places}") for places in range(6) for digits in range(10, 100))
    return min((n for n in numbers if low <= n <= high), key=lambda n: abs(math.log(nbytes(n) / budget)))


# ---- claims ----------------------------------------------------------------------------------------------------------


def _claims(found: Sequence[Group]) -> list[Claim]:
    return [
        _chosen(
            found, "top-k of every layer has as many bytes as L-GreCo at density", _DENSITY_OF_LAYERS,
            _by_layers, low=1e-4, high=0.1,
        ),
        _chosen(
            found, "global top-k, once an epoch, has as many at density", _DENSITY_BY_EPOCH,
            lambda density, nodes: _by_epoch(density, nodes, found), low=1e-4, high=0.1,
        ),
        _chosen(
            found, "global top-k, every step, has as many at density", _DENSITY_OF_ALL,
            _as_one, low=1e-4, high=0.1,
        ),
        _chosen(
            found, "the threshold has as many at", _VALUE,
            lambda value, _: _above(value, found), low=_CANDIDATES[0], high=_CANDIDATES[-1],
        ),
        judged(
            found, _TASK, f"L-GreCo: its reference is no worse than no compression by more than {_KEPT:.0%}",
            (_REFERENCE,),
            lambda dense, own: compared(own, dense, relative=True).no_worse(_KEPT),
        ),
        _pair(
            found, f"L-GreCo: is no worse than its reference by more than {_KEPT:.0%}, with fewer bytes",
            _LGRECO, _REFERENCE,
            lambda own, reference: compared(own, reference, relative=True).no_worse(_KEPT)
            & (_times(own, reference) < 1),
        ),
        *(
            replace(
                judged(
                    found, _TASK, f"{name} sends what L-GreCo does, within {_CLOSE:.0%}", (name, _LGRECO),
                    lambda _, own, lgreco: _is_close(own, lgreco),
                    functools.partial(_said, found),
                ),
                setup=True,
            )
            for name in _SPARSE
        ),
        _at_equal_bytes(found, "Rethink-GS: a hard threshold is better than top-k of every layer", _THRESHOLD, _EQUAL),
        _at_equal_bytes(found, "L-GreCo: is better than top-k of every layer", _LGRECO, _EQUAL),
        _at_equal_bytes(found, "L-GreCo: is better than a hard threshold", _LGRECO, _THRESHOLD),
        _at_equal_bytes(found, "L-GreCo: is better than global top-k in every step", _LGRECO, _EVERY_STEP),
        _at_equal_bytes(
            found, "beyond the papers: global top-k in every step is better than once an epoch", _EVERY_STEP, _GLOBAL
        ),
    ]  # fmt: skip


def _chosen(
    found: Sequence[Group], text: str, value: float, nbytes: Callable[[float, int], float], *, low: float, high: float
) -> Claim:
    """Judge whether the rule chooses this value."""
    text = f"{text} {value:g}, by the rule"
    try:
        row = needed(found, _TASK, _BUDGET)
        budget = _sent(row)
        by_rule = _closest(lambda number: nbytes(number, row.nodes), budget, low, high)
        sent = nbytes(value, row.nodes)
    except LookupError as error:
        return Claim(text, None, str(error), setup=True)
    figures = (
        f"seed {_CHOOSING[0]}: {format_bytes(sent)} per step and rank, L-GreCo {format_bytes(budget)}; the rule: "
        f"{by_rule:g}"
    )
    return replace(claimed(text, by_rule == value, figures), setup=True)


def _pair(
    found: Sequence[Group], text: str, first: str, second: str, says: Callable[[Group, Group], Finding | bool]
) -> Claim:
    return judged(
        found, _TASK, text, (first, second), lambda _, own, other: says(own, other), functools.partial(_said, found)
    )


def _at_equal_bytes(found: Sequence[Group], text: str, first: str, second: str) -> Claim:
    """Judge a claim at equal bytes; it is open if bytes are not equal, because scores then mean nothing."""

    def says(own: Group, other: Group) -> Finding:
        if not _is_close(own, other):
            raise LookupError(f"{own.name} sent {_times(own, other):.2f} times what {other.name} did")
        return compared(own, other).better()

    return _pair(found, f"{text} at equal bytes", first, second, says)


def _is_close(own: Group, other: Group) -> bool:
    return abs(math.log(_times(own, other))) <= math.log1p(_CLOSE)


def _said(found: Sequence[Group], group: Group) -> str:
    lgreco = named(found, _TASK, _LGRECO)
    if lgreco is None or group.name in (DENSE, _LGRECO):
        return ""
    return f"bytes of {group.name}: {_times(group, lgreco):.2f} times L-GreCo's"


# ---- tables and pictures ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line(Group):
    """A line of a table.

    Attributes:
        times: its bytes, as a multiple of those of L-GreCo's line in the same table; None without that line, or for a
            line without compression.
    """

    times: float | None = None


def _lines(own: Iterable[Group], lgreco: Group | None) -> list[_Line]:
    return [
        _Line(**vars(group), times=None if lgreco is None or group.compressed_ratio is None else _times(group, lgreco))
        for group in own
    ]


def _tables(found: Sequence[Group]) -> Iterable[tuple[str, list[_Line]]]:
    names = [row.name for row in _CHOOSE]
    choosing = [group for group in found if group.name in names]
    own = [group for group in found if group not in choosing]
    if own:
        yield _TASK, _lines(own, named(own, _TASK, _LGRECO))
    if choosing:
        yield _CHOICE, _lines(choosing, named(choosing, _TASK, _BUDGET))


_LEGEND: Legend = (
    SCORE,
    LESS,
    ("sent", ("by one rank in a step of the last epoch. Norms and biases travel uncompressed and count, 2.9 kB of it "
     "among four ranks; in *global top-k, every step* they are part of the vector")),
    ("ratio", ("how many times less a rank sends than an uncompressed ring all-reduce, over the steps that are "
     "compressed; with first: over all steps, also the first that are not")),
    ("bytes", "over the steps that are compressed, as a multiple of L-GreCo's in the same table"),
    ("step", "the median of the last epoch on rank 0, on loopback, however busy the machine was"),
)  # fmt: skip
_TAKEN = ("row", "score", "− dense", "sent")


def _ratio(of: Callable[[Group], float | None]) -> Callable[[Group], str]:
    def said(group: Group) -> str:
        ratio = of(group)
        return NOTHING if ratio is None else f"{ratio:.1f}"

    return said


_LAYOUT = Layout(
    tables=_tables,
    columns=lambda _: (
        *(column for column in COLUMNS if column[0] in _TAKEN),
        ("ratio", _ratio(lambda group: group.compressed_ratio)),
        ("with first", _ratio(lambda group: group.mean_ratio)),
        ("bytes", lambda line: NOTHING if line.times is None else f"{line.times:.2f}×"),
        *(column for column in COLUMNS if column[0] == "step"),
    ),
    legend=_LEGEND,
)


#: Row → its name in sentences and pictures.
_LABELS = {
    DENSE: "uncompressed",
    _REFERENCE: "top-k, 5 %",
    _LGRECO: "L-GreCo",
    _EQUAL: "top-k of every layer",
    _GLOBAL: "global top-k, once an epoch",
    _EVERY_STEP: "global top-k, every step",
    _THRESHOLD: "hard threshold",
}


def _found(found: Sequence[Group]) -> str:
    dense, lgreco = (needed(found, _TASK, name) for name in (DENSE, _LGRECO))
    said = [
        f"{compared(needed(found, _TASK, name), dense).figure()} with {_LABELS[name]}"
        for name in (_LGRECO, _EQUAL, _EVERY_STEP, _THRESHOLD)
    ]
    times = all_reduce_nbytes(4 * lgreco.parameters, lgreco.nodes) / _sent(lgreco)
    return f"At {times:.0f} times fewer bytes than uncompressed, accuracy differs from that by {', '.join(said)}."


def _panels(found: Sequence[Group]) -> list[Panel]:
    shown = [(label, needed(found, _TASK, name), name == _LGRECO) for name, label in _LABELS.items()]
    sent = [Bar(label, _sent(group), format_bytes(_sent(group)), strong) for label, group, strong in shown]
    return [
        Panel("CIFAR-10, ResNet-8", "sent per compressed step and rank", sent),
        score_panel("Test accuracy, %", shown),
    ]


EXPERIMENT = Experiment(
    module="sparsity",
    paper="Sahu et al. 2021, Rethinking gradient sparsification as total error minimization (arXiv 2108.00951); "
    "Alimohammadi et al. 2022, L-GreCo (arXiv 2210.17357)",
    titles={
        _TASK: "CIFAR-10, ResNet-8",
        _CHOICE: "What values were chosen by: CIFAR-10, ResNet-8, a seed of its own",
    },
    recipes=_RECIPES,
    claims=_claims,
    opening=Opening(
        title="Which elements to send",
        says="Which elements make the best models, at equal bytes? Those above a hard threshold, one paper says "
        "(Rethink-GS), rather than the largest of every layer. Densities that are chosen layer by layer, says the "
        "other (L-GreCo).",
        ran="A ResNet-8 learned CIFAR-10 on four real ranks, uncompressed and with error feedback. Four rows send as "
        "many bytes as L-GreCo: top-k of every layer, global top-k chosen once an epoch, the same chosen in every "
        "step, and a hard threshold.",
        found=_found,
        panels=_panels,
        covers=(
            ("L-GreCo, section 5.3: Rethink-GS, ResNet-18 on CIFAR-100", "here, with a ResNet-8 on CIFAR-10"),
            (
                "L-GreCo, section 5.3 and figure 10: global top-k, 10 % slower as it waits for the whole gradient",
                "its accuracy is here; its time is not, as nothing here is sent over a link",
            ),
            ("Rethink-GS: accuracy by bytes, image models", "one network and one number of bytes"),
            ("Rethink-GS: language and recommendation models, logistic regression, rates of convergence", "not here"),
        ),
    ),
    seeds=(0, 1),
    layout=_LAYOUT,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
