"""PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727), on CIFAR-10 and on bytes of English.

The paper sends two thin factors of every gradient matrix, found by one round of power iteration that goes on from step
to step, with error feedback, and finds accuracy on par with SGD from rank 2 on for a residual network, and from rank 4
on for a language model.

Run ``python -m reproduce.powersgd`` (longer than an hour on two cores), ``--quick`` (seconds), ``--help``.

Differences from the paper: smaller networks (ResNet-8, a GPT of 0.9 million parameters instead of an LSTM), four ranks,
few epochs. The GPT has AdamW, without Adam's momentum but for two rows, because with error feedback a gradient arrives
late and in one piece, and momentum stretches it further. It reads bytes of WikiText-2's validation split and is judged
on its test split.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from reproduce.command import Experiment, Recipe, main
from reproduce.pictures import Panel
from reproduce.report import DENSE, Claim, Group, Opening, as_good_as, needed, score_panel, sent_panel
from reproduce.training import Row

__all__ = ["EXPERIMENT"]

_RANKS = (1, 2, 4)

_CIFAR = Row("cifar", DENSE, "none", epochs=10, lr=0.4, batch=128, weight_decay=1e-4)
_GPT = Row(
    "gpt", DENSE, "none", optimizer="adamw", epochs=3, lr=2e-3, batch=32, momentum=0.0, weight_decay=0.01, clip=1.0
)

#: Accuracy that counts as kept, in points, and perplexity.
_POINTS_KEPT = 0.5
_PERPLEXITY_KEPT = 0.02


def _claims(found: Sequence[Group]) -> list[Claim]:
    return [
        as_good_as(
            found, "cifar", "rank 2", f"rank 2 is within {_POINTS_KEPT} points of dense on CIFAR-10",
            within=_POINTS_KEPT, relative=False,
        ),
        as_good_as(
            found, "gpt", "rank 4", f"rank 4's perplexity is within {_PERPLEXITY_KEPT:.0%} of dense",
            within=_PERPLEXITY_KEPT, relative=True,
        ),
    ]  # fmt: skip


def _found(found: Sequence[Group]) -> str:
    two, four = (needed(found, "cifar", f"rank {rank}") for rank in (2, 4))
    dense, own = (needed(found, "gpt", name) for name in (DENSE, "rank 4"))
    return (
        f"On CIFAR-10 rank 4 is {abs(four.against_dense or 0.0):.2f} points behind with {four.ratio:.0f} times fewer "
        f"bytes, and rank 2 {abs(two.against_dense or 0.0):.2f} points with {two.ratio:.0f} times fewer. The language "
        f"model's perplexity is {own.score()} with rank 4 and {dense.score()} without compression."
    )


def _panels(found: Sequence[Group]) -> list[Panel]:
    panels = []
    for task, what, score in (
        ("cifar", "CIFAR-10, ResNet-8", "Test accuracy, %"),
        ("gpt", "WikiText-2, GPT", "Held-out perplexity"),
    ):
        shown = [
            ("uncompressed", needed(found, task, DENSE), False),
            *((f"PowerSGD, rank {rank}", needed(found, task, f"rank {rank}"), True) for rank in reversed(_RANKS)),
        ]
        panels += [sent_panel(what, shown), score_panel(score, shown)]
    return panels


EXPERIMENT = Experiment(
    module="powersgd",
    paper="Vogels et al. 2019, PowerSGD (arXiv 1905.13727)",
    titles={"cifar": "CIFAR-10, ResNet-8", "gpt": "WikiText-2 as bytes (validation split, judged on test), GPT"},
    recipes=(
        *(
            Recipe(row if rank is None else replace(row, name=f"rank {rank}", spec=f"powersgd:rank={rank}"))
            for row in (_CIFAR, _GPT)
            for rank in (None, *_RANKS)
        ),
        Recipe(replace(_GPT, name="dense, momentum", momentum=0.9), ablation=True),
        Recipe(replace(_GPT, name="rank 4, momentum", spec="powersgd:rank=4", momentum=0.9), ablation=True),
    ),
    claims=_claims,
    opening=Opening(
        title="PowerSGD",
        says="Every gradient matrix is sent as two thin factors, found by one round of power iteration that goes on "
        "from step to step. With error feedback a residual network is as good as with SGD from rank 2 on, a language "
        "model from rank 4 on.",
        ran="A ResNet-8 on CIFAR-10 and a small GPT on bytes of WikiText-2, each on four real ranks, with ranks 1, 2 "
        "and 4, for fewer epochs than in the paper.",
        found=_found,
        panels=_panels,
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
