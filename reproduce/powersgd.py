"""PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727), on CIFAR-10 and on bytes of English.

The paper sends two thin factors of every gradient matrix, with error feedback. The factors come from one round of power
iteration per step, which starts from the factors of the step before. Accuracy is on par with SGD from rank 2 on for a
residual network, and from rank 4 on for a language model.

Run ``python -m reproduce.powersgd`` (an hour and a half on two cores), ``--long`` (with rank 1, half an hour more),
``--quick`` (seconds), ``--help``.

Differences from the paper: smaller networks (ResNet-8, a GPT of 0.9 million parameters instead of an LSTM), four ranks,
few epochs. The GPT is trained with AdamW, where the paper's LSTM has SGD: with error feedback a gradient arrives late
and in one piece, which AdamW's running sizes of gradients do not expect. It reads bytes of WikiText-2's validation
split and is evaluated on its test split.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from reproduce.command import Experiment, Recipe, main
from reproduce.groups import DENSE, Claim, Group, as_good_as, compared, named, needed
from reproduce.pictures import Panel
from reproduce.report import Opening, score_panel, sent_panel
from reproduce.row import Row

__all__ = ["EXPERIMENT"]

_RANKS = (2, 4)
_LONG_RANKS = (1,)

_CIFAR = Row("cifar", DENSE, "none", epochs=10, lr=0.1, batch=128, weight_decay=1e-4, schedule="steps")
_GPT = Row("gpt", DENSE, "none", optimizer="adamw", epochs=3, lr=2e-3, batch=32, weight_decay=0.01, clip=1.0)

#: Largest loss of quality that counts as none: of accuracy in points, and of perplexity.
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
    dense, two, four = (needed(found, "cifar", name) for name in (DENSE, "rank 2", "rank 4"))
    language, own = (needed(found, "gpt", name) for name in (DENSE, "rank 4"))
    return (
        f"On CIFAR-10 accuracy differs from uncompressed by {compared(four, dense).figure()} points with rank 4, at "
        f"{four.ratio:.0f} times fewer bytes, and by {compared(two, dense).figure()} with rank 2, at {two.ratio:.0f} "
        f"times fewer. The language model's perplexity differs by {compared(own, language, relative=True).figure()} "
        "with rank 4."
    )


def _panels(found: Sequence[Group]) -> list[Panel]:
    panels = []
    for task, what, score in (
        ("cifar", "CIFAR-10, ResNet-8", "Test accuracy, %"),
        ("gpt", "WikiText-2, GPT", "Held-out perplexity"),
    ):
        own = [(rank, named(found, task, f"rank {rank}")) for rank in sorted((*_RANKS, *_LONG_RANKS), reverse=True)]
        shown = [
            ("uncompressed", needed(found, task, DENSE), False),
            *((f"PowerSGD, rank {rank}", group, True) for rank, group in own if group is not None),
        ]
        panels += [sent_panel(what, shown), score_panel(score, shown)]
    return panels


def _ran(found: Sequence[Group]) -> str:
    """Say what was run, according to the rows that are present."""
    ranks = [str(rank) for rank in sorted((*_RANKS, *_LONG_RANKS)) if named(found, "cifar", f"rank {rank}")]
    listed = " and ".join(part for part in (", ".join(ranks[:-1]), *ranks[-1:]) if part)
    return (
        "A ResNet-8 learned CIFAR-10 and a small GPT bytes of WikiText-2, each on four real ranks, with "
        f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}, for fewer epochs than in the paper."
    )


EXPERIMENT = Experiment(
    module="powersgd",
    paper="Vogels et al. 2019, PowerSGD (arXiv 1905.13727)",
    titles={"cifar": "CIFAR-10, ResNet-8", "gpt": "WikiText-2 as bytes (validation split, judged on test), GPT"},
    recipes=tuple(
        Recipe(
            row if rank is None else replace(row, name=f"rank {rank}", spec=f"powersgd:rank={rank}"),
            turn=int(rank in _LONG_RANKS),
            long=rank in _LONG_RANKS,
        )
        for row in (_CIFAR, _GPT)
        for rank in (None, *_RANKS, *_LONG_RANKS)
    ),
    claims=_claims,
    seeds=(0, 1, 2),
    opening=Opening(
        title="PowerSGD",
        says="Are two thin factors of every gradient matrix enough? The paper finds them by one round of power "
        "iteration that goes on from step to step. With error feedback, it says, a residual network is as good as "
        "with SGD from rank 2 on, and a language model from rank 4 on.",
        ran=_ran,
        found=_found,
        panels=_panels,
    ),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
