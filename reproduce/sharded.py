"""Inside FSDP2: gradients reduced in few bits, and parameters gathered as differences (Jia et al. 2024, SDP4Bit).

FSDP2 shards a model, its gradients and the optimizer's state among ranks. In every step it reduce-scatters gradients,
and gathers parameters before forward and again before backward: three times a model's bytes. SDP4Bit (arXiv 2410.15526)
sends gradients in 4 bits and differences of parameters in 4 bits, and finds no loss in GPT models of up to 6.7 billion
parameters. ``nb.compress_shards`` does both, and sends no parameters before backward, since no rank has new ones then.

Run ``python -m reproduce.sharded`` (half an hour on two cores), ``--long`` (with two rows over seven epochs),
``--quick`` (seconds), ``--help``.

Differences from the paper: The model is a GPT of 0.9 million parameters on bytes of tiny shakespeare. The paper rotates
gradients before it quantizes them; here rows *rotated* do so, in 2 bits and in 1 (``eden``). The others round
stochastically, in groups of 128 with a scale each; rows *nearest* round to the nearest level, as the paper does. There
is no hierarchy of fast and slow links between differences and gradients.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reproduce.command import Experiment, Recipe, main
from reproduce.groups import DENSE, Claim, Group, claimed, compared, named, needed
from reproduce.pairs import Difference
from reproduce.pictures import Panel
from reproduce.report import COLUMNS, LESS, SCORE, Column, Layout, Legend, Opening, score_panel, sent_panel
from reproduce.row import Row

__all__ = ["EXPERIMENT"]

_TASK = "shakespeare"

_8, _4, _4_8, _8_4 = "8 and 8 bits", "4 and 4 bits", "4 and 8 bits", "8 and 4 bits"
_NEAREST, _NO_REFERENCES, _HALF = "4 and 4 bits, nearest", "8 and 8 bits, no references", "16 and 16 bits"
_COARSE = "2 and 4 bits"

#: Bounds of claims: how far the loss may be from the dense one, as a share; and how many times fewer bytes are sent.
_KEPT, _FEWER = 0.003, 3.5

_EPOCHS, _LONG_EPOCHS = 1, 7

_DENSE = Row(
    _TASK, DENSE, "none", optimizer="adamw", epochs=_EPOCHS, lr=4e-3, batch=48, momentum=0.9, beta2=0.95,
    weight_decay=0.1, clip=1.0, min_numel=1024, shards=4, gathered="none",
)  # fmt: skip


@dataclass(frozen=True)
class _Sent:
    """How a row sends gradients and parameters."""

    name: str
    gradients: str
    parameters: str
    references: bool = True


_SENT = (
    _Sent(_8, "qsgd:bits=8", "uniform:bits=8"),
    _Sent(_4, "qsgd:bits=4", "uniform:bits=4"),
    _Sent(_NO_REFERENCES, "qsgd:bits=8", "uniform:bits=8", references=False),
    _Sent(_4_8, "qsgd:bits=4", "uniform:bits=8"),
    _Sent(_8_4, "qsgd:bits=8", "uniform:bits=4"),
    _Sent(_NEAREST, "uniform:bits=4", "uniform:bits=4"),
    _Sent(_HALF, "bf16", "bf16", references=False),
    _Sent(_COARSE, "uniform:bits=2,rounding=stochastic", "uniform:bits=4"),
    _Sent("2 rotated and 4 bits", "eden:bits=2", "uniform:bits=4"),
    _Sent("1 rotated and 4 bits", "eden:bits=1", "uniform:bits=4"),
)


def _row(sent: _Sent, epochs: int) -> Row:
    return replace(
        _DENSE,
        name=sent.name,
        spec=sent.gradients,
        gathered=sent.parameters,
        references=sent.references,
        epochs=epochs,
    )


_RECIPES = (
    Recipe(_DENSE),
    *(Recipe(_row(sent, _EPOCHS), turn=at // 3) for at, sent in enumerate(_SENT)),
    *(
        Recipe(row, turn=4, long=True, seeds=(0,))
        for row in (replace(_DENSE, epochs=_LONG_EPOCHS), *(_row(sent, _LONG_EPOCHS) for sent in _SENT[:2]))
    ),
)


def _loss(own: Group, other: Group) -> Difference:
    """Return the difference of a row's loss to another's, as a share of the latter. Scores are perplexities."""
    return compared(own, other, relative=True, of=math.log)


def _ratio(group: Group) -> str:
    return f"{group.ratio or 1:.1f} times fewer bytes"


def _claims(found: Sequence[Group]) -> list[Claim]:
    claims = []
    for name in (_8, _4):
        text = (
            f"{name}: the loss is at most {_KEPT:.1%} above that of FSDP2 in float32, with at least {_FEWER} times "
            "fewer bytes"
        )
        own, dense = named(found, _TASK, name, _EPOCHS), named(found, _TASK, DENSE, _EPOCHS)
        if own is None or dense is None:
            claims.append(Claim(text, None, f"needs the rows {DENSE} and {name}"))
            continue
        finding = _loss(own, dense).no_worse(_KEPT) & ((own.ratio or 0.0) >= _FEWER)
        claims.append(claimed(text, finding, f"{_ratio(own)}; losses in nats per byte"))
    text = "differences are better than parameters themselves, in as many bits and with fewer bytes"
    first, other = named(found, _TASK, _8, _EPOCHS), named(found, _TASK, _NO_REFERENCES, _EPOCHS)
    if first is None or other is None:
        claims.append(Claim(text, None, f"needs the rows {_8} and {_NO_REFERENCES}"))
    else:
        figures = f"{_ratio(first)} and {_ratio(other)}"
        claims.append(claimed(text, _loss(first, other).better() & ((first.ratio or 0) > (other.ratio or 0)), figures))
    return claims


def _found(found: Sequence[Group]) -> str:
    dense, eight, four = (needed(found, _TASK, name, _EPOCHS) for name in (DENSE, _8, _4))
    return (
        "With 8 bits for gradients and for differences of parameters, the loss differs from that of FSDP2 in float32 "
        f"by {_loss(eight, dense).figure()}, with {eight.ratio:.1f} times fewer bytes. With 4 bits it differs by "
        f"{_loss(four, dense).figure()}, with {four.ratio:.1f} times fewer."
    )


def _panels(found: Sequence[Group]) -> list[Panel]:
    own = [(name, named(found, _TASK, name, _EPOCHS)) for name in (_HALF, _NO_REFERENCES, _8, _4)]
    shown = [
        ("float32", needed(found, _TASK, DENSE, _EPOCHS), False),
        *((name, group, name in (_8, _4)) for name, group in own if group is not None),
    ]
    return [sent_panel("FSDP2, tiny shakespeare, GPT", shown), score_panel("Held-out perplexity", shown)]


_LEGEND: Legend = (
    ("row", "bits of gradients first, and then those of parameters"),
    (SCORE[0], f"held-out perplexity, {SCORE[1]}; the loss is its logarithm"),
    LESS,
    ("sent", "by one rank in a step of the last epoch"),
    (
        "ratio",
        (
            "how many times less that is than what FSDP2 sends in float32: parameters twice, and gradients twice, "
            "since the reduce-scatter of gloo is an all-reduce (over NCCL it is not)"
        ),
    ),
    ("step", "the median of the last epoch on rank 0, without a slow link, however busy the machine was"),
)


def _columns(_: str) -> tuple[Column, ...]:
    as_usual = dict(COLUMNS)
    return tuple((name, as_usual[name]) for name in ("row", "score", "− dense", "sent", "ratio", "step"))


EXPERIMENT = Experiment(
    module="sharded",
    paper="Jia et al. 2024, SDP4Bit (arXiv 2410.15526)",
    titles={_TASK: "tiny shakespeare as bytes, GPT, one model sharded among four ranks"},
    recipes=_RECIPES,
    claims=_claims,
    seeds=(0, 1, 2),
    opening=Opening(
        title="Inside FSDP2",
        says="How few bits are enough between ranks that share one model? The paper says that gradients can be sent "
        "in 4 bits, and parameters as differences in 4 bits, without loss.",
        ran="A small GPT learned bytes of tiny shakespeare, sharded by FSDP2 among four real ranks, in 326 steps of "
        "AdamW. Gradients and parameters were sent in 16, 8, 4 and 2 bits.",
        found=_found,
        panels=_panels,
    ),
    layout=Layout(columns=_columns, legend=_LEGEND),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
