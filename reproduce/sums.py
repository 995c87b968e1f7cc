"""Sparse sums: top-k delivered by the owners of elements, beside top-k gathered (Li & Hoefler 2022, Ok-Topk).

If top-k is gathered, every rank receives what all others selected, so bytes grow with the number of ranks. Ok-Topk
(arXiv 2201.07598) sends each element to its owner. The owner adds up and delivers only the largest sums: at most six
times k numbers per rank, whatever the number of ranks. What is not delivered stays in residuals. The paper reports
accuracy near that of dense gradients for VGG, an LSTM and BERT on up to 256 GPUs. Here both ways are trained with the
same seeds.

Run ``python -m reproduce.sums`` (a quarter of an hour on two cores), ``--quick`` (seconds), ``--help``.

Differences from the paper: a GPT of 0.9 million parameters on bytes of tiny shakespeare, and eight ranks. Owners have
blocks that are dealt out by a hash, where the paper moves the bounds of ranges. Twice k sums are delivered, where the
paper delivers k.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from narrowband.collectives import Collective
from reproduce.command import Experiment, Recipe, main
from reproduce.groups import DENSE, Claim, Group, claimed, compared, named, needed
from reproduce.pairs import Difference
from reproduce.pictures import Panel
from reproduce.report import Opening, score_panel, sent_panel
from reproduce.row import Row

__all__ = ["EXPERIMENT"]

_TASK, _NODES = "shakespeare", 8

_GATHERED, _SUMMED = "gathered", "summed"
#: Losses that differ by at most this share count as the same.
_KEPT = 0.01

_HOW: dict[str, Collective] = {_GATHERED: "all_gather", _SUMMED: "sparse_reduce"}

_DENSE = Row(
    _TASK, DENSE, "none", epochs=1, lr=0.3, batch=48, momentum=0.9, weight_decay=1e-4, clip=1.0, min_numel=1024
)  # fmt: skip
_ROWS = (
    _DENSE,
    *(replace(_DENSE, name=name, spec="topk:density=0.01+ef", collective=how) for name, how in _HOW.items()),
)


def _loss(own: Group, other: Group) -> Difference:
    """Return the difference of a row's loss to another's, as a share of the latter. Scores are perplexities."""
    return compared(own, other, relative=True, of=math.log)


def _claims(found: Sequence[Group]) -> list[Claim]:
    text = f"where sums are delivered the loss is at most {_KEPT:.0%} above that where all is gathered"
    summed, gathered = (named(found, _TASK, name) for name in (_SUMMED, _GATHERED))
    if summed is None or gathered is None:
        return [Claim(text, None, f"needs the rows {_SUMMED} and {_GATHERED}")]
    times = gathered.sent_bytes_per_step / summed.sent_bytes_per_step
    figures = f"{times:.1f} times fewer bytes among {summed.nodes} ranks; losses in nats per byte"
    return [claimed(text, _loss(summed, gathered).no_worse(_KEPT), figures)]


def _found(found: Sequence[Group]) -> str:
    summed, gathered = (needed(found, _TASK, name) for name in (_SUMMED, _GATHERED))
    times = gathered.sent_bytes_per_step / summed.sent_bytes_per_step
    return (
        f"With sums a rank sends {times:.1f} times less than where everything is gathered. The loss differs by "
        f"{_loss(summed, gathered).figure()}."
    )


def _panels(found: Sequence[Group]) -> list[Panel]:
    shown = [
        ("uncompressed", needed(found, _TASK, DENSE), False),
        ("top 1 %, gathered", needed(found, _TASK, _GATHERED), False),
        ("top 1 %, summed", needed(found, _TASK, _SUMMED), True),
    ]
    return [sent_panel("Tiny shakespeare, GPT, eight ranks", shown), score_panel("Held-out perplexity", shown)]


EXPERIMENT = Experiment(
    module="sums",
    paper="Li & Hoefler 2022, Ok-Topk (arXiv 2201.07598)",
    titles={_TASK: "tiny shakespeare as bytes, GPT, eight ranks"},
    recipes=tuple(Recipe(row) for row in _ROWS),
    claims=_claims,
    seeds=(0, 1, 2),
    nodes=_NODES,
    opening=Opening(
        title="Sparse sums",
        says="Do the largest elements have to be gathered from all ranks? The paper says no: owners add them up and "
        "deliver the largest sums, in a volume that does not grow with the ranks, at nearly the accuracy of "
        "uncompressed gradients.",
        ran="A small GPT learned bytes of tiny shakespeare on eight real ranks, in 326 steps of SGD with momentum. The "
        "largest 1 % of every layer traveled with error feedback, gathered and summed.",
        found=_found,
        panels=_panels,
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
