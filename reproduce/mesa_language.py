"""Saved activations of a language model in few bits (Mesa): does a small Llama learn as well?

Pan et al. 2021 (Mesa, arXiv 2111.11124) train vision transformers, and :mod:`reproduce.mesa` repeats that. Language
models have other operators: RMS norms, gated feed-forward layers, rotary positions and causal attention. The library
keeps less of them than Mesa does, because it computes products and norms again from what is kept anyway. Forward is
exact in all rows, so only the gradients of training differ.

Rows of one seed begin with the same parameters and see the same batches, and are compared only with each other
(:mod:`reproduce.pairs`). Scores are perplexities; their logarithm is the loss, which claims are about. One process
trains each row with one thread; ``--nodes`` rows run side by side.

Run ``python -m reproduce.mesa_language`` (an hour on two cores), ``--quick`` (seconds), ``--help``.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from narrowband.units import format_bytes
from reproduce.command import Experiment, Recipe, main
from reproduce.groups import DENSE, NOTHING, Claim, Group, compared, judged, named, needed
from reproduce.pairs import Difference
from reproduce.pictures import Bar, Panel
from reproduce.report import LESS, SCORE, Column, Layout, Legend, Opening, score_panel
from reproduce.row import Row

__all__ = ["EXPERIMENT"]

_TASK = "llama"

_EIGHT, _FOUR, _MIXED, _AGAIN = "8 bits", "4 bits", "4 bits, norms and attention in 8", "checkpointing"

_PLAIN = Row(
    _TASK, DENSE, "none", optimizer="adamw", epochs=1, lr=1e-3, beta2=0.95, batch=16, weight_decay=0.1, clip=1.0,
    activations='{"bits": "off"}',
)  # fmt: skip


def _row(name: str, **policy: Any) -> Row:
    return replace(_PLAIN, name=name, activations=json.dumps({"derive": True, **policy}))


#: A norm that is written out, as Transformers has it, is ``layer_norm`` to a policy, and has 8 bits beside 4 unless the
#: policy says otherwise. Here it says the same, of modules.
_NORMS = {"norm": 8, "blocks.*.norm[12]": 8}

_RECIPES = (
    Recipe(_PLAIN),
    Recipe(_row(_EIGHT, bits=8)),
    Recipe(_row(_FOUR, bits=4)),
    # Exact, so one seed shows it: this row is here for its bytes.
    Recipe(_row(_AGAIN, bits="off", modules={"blocks.[0-9]": "checkpoint"}), seeds=(0,), turn=1),
    Recipe(_row(_MIXED, bits=4, operators={"attention": 8}, modules=_NORMS), turn=2),
)

#: Losses that differ by at most this share count as the same.
_KEPT = 0.01

#: What 8 bits keep at most, as a share of what is kept plain.
_MOST = 0.18


# ---- claims ----------------------------------------------------------------------------------------------------------


def _claims(found: Sequence[Group]) -> list[Claim]:
    claim: Callable[..., Claim] = functools.partial(judged, _beside(found), _TASK, describe=_figures)
    return [
        *(
            claim(
                f"{name}: the loss is at most {_KEPT:.0%} above that of dense",
                (name,),
                lambda dense, own: _loss(own, dense).no_worse(_KEPT),
            )
            for name in (_EIGHT, _FOUR, _MIXED)
        ),
        claim(
            f"{_EIGHT}: backward keeps at most {_MOST:.0%} of the bytes", (_EIGHT,), lambda _, own: _share(own) <= _MOST
        ),
        claim("where blocks are computed again, the loss is the same to the bit", (_AGAIN,), _equal),
    ]


def _beside(found: Sequence[Group]) -> list[Group]:
    """Return the groups with the plain bytes of the uncompressed row: with checkpoints, a row's own are fewer."""
    dense = named(found, _TASK, DENSE)
    return [group if dense is None else replace(group, plain_bytes=dense.kept_bytes) for group in found]


def _figures(group: Group) -> str:
    error = "" if not group.gradient_error else f", gradient off by {group.gradient_error:.1%}"
    return f"{group.name}: {_share(group):.1%} of bytes{error}"


def _loss(own: Group, other: Group) -> Difference:
    """Return the difference of a row's loss to another's, as a share of the latter."""
    return compared(own, other, relative=True, of=math.log)


def _equal(dense: Group, own: Group) -> bool:
    scores = dict(zip(dense.seeds, dense.scores, strict=True))
    return all(scores.get(seed) == score for seed, score in zip(own.seeds, own.scores, strict=True))


def _share(group: Group) -> float:
    return (group.kept_bytes or 0) / (group.plain_bytes or 1)


# ---- table and picture -----------------------------------------------------------------------------------------------


def _tables(found: Sequence[Group]) -> Iterator[tuple[str, list[Group]]]:
    if found:
        yield _TASK, _beside(found)


def _error(group: Group) -> str:
    return NOTHING if group.gradient_error is None else f"{group.gradient_error:.1%}"


_COLUMNS: tuple[Column, ...] = (
    ("row", lambda group: group.name),
    ("score", Group.score),
    ("− dense", Group.versus_dense),
    ("error", _error),
    ("kept", lambda group: format_bytes(group.kept_bytes or 0)),
    ("share", lambda group: f"{_share(group):.0%}"),
)

_LEGEND: Legend = (
    SCORE,
    LESS,
    ("error", "how far the gradient of a batch is from the exact one after training, as a share of its norm"),
    ("kept", "of a step's activations, for backward; share: of what the uncompressed row keeps"),
    (_MIXED, f"as {_FOUR}, where norms are in 8 bits, too, but what attention saves is in 8 bits"),
    (_AGAIN, "every block is computed again in backward, from its exact input (`torch.utils.checkpoint`)"),
)


def _found(found: Sequence[Group]) -> str:
    own = _beside(found)
    dense, eight = (needed(own, _TASK, name) for name in (DENSE, _EIGHT))
    four = named(own, _TASK, _FOUR)
    fewer = f" 4 bits keep {_share(four):.0%}, and the loss differs by {_loss(four, dense).figure()}." if four else ""
    again = named(own, _TASK, _AGAIN)
    exact = f" Checkpointing keeps {_share(again):.0%} and is exact." if again else ""
    return (
        f"In 8 bits backward keeps {_share(eight):.0%} of the bytes, and seed by seed the held-out loss differs by "
        f"{_loss(eight, dense).figure()}.{fewer}{exact}"
    )


def _panels(found: Sequence[Group]) -> list[Panel]:
    own = _beside(found)
    needed(own, _TASK, _EIGHT)
    there = (
        ("plain", named(own, _TASK, DENSE), False),
        *((name, named(own, _TASK, name), True) for name in (_EIGHT, _FOUR, _MIXED)),
        (_AGAIN, named(own, _TASK, _AGAIN), False),
    )
    shown = [(label, group, strong) for label, group, strong in there if group is not None]
    bars = [Bar(label, group.kept_bytes, format_bytes(group.kept_bytes or 0), strong) for label, group, strong in shown]
    trained = [each for each in shown if each[0] != _AGAIN]
    return [
        Panel("Kept for backward", "of a step's activations", bars),
        score_panel("Held-out perplexity", trained),
    ]


EXPERIMENT = Experiment(
    module="mesa_language",
    paper="Pan et al. 2021, Mesa (arXiv 2111.11124), applied to a language model, which the paper does not do",
    titles={_TASK: "Tiny shakespeare as characters, Llama"},
    recipes=_RECIPES,
    claims=_claims,
    opening=Opening(
        title="Activations of a language model in few bits",
        says="Does a language model learn as well if what it keeps for backward is kept in few bits, while the forward "
        "pass stays exact? Bytes and errors of single gradients do not tell.",
        ran="A small Llama learned characters of tiny shakespeare, plain and with activations kept in 8 and 4 bits. "
        "What can be computed again from what is kept is not kept, as is the library's default.",
        found=_found,
        panels=_panels,
    ),
    seeds=(0, 1, 2),
    nodes=2,
    layout=Layout(tables=_tables, columns=lambda _: _COLUMNS, legend=_LEGEND),
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
