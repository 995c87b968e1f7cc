"""The rows of :mod:`reproduce.local`: what ranks send, when, and at which learning rate.

A row's name says what it sends: the same name means the same spec on both texts. Each kind of row has a learning rate
per text; the rows that serve to choose it are here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from reproduce.command import Recipe
from reproduce.groups import DENSE
from reproduce.row import Row

__all__ = [
    "ALONE",
    "BASES",
    "CHOOSING",
    "DILOCO",
    "GRADIENT_4",
    "GRADIENT_SIGN",
    "GRADIENT_TOP",
    "IN_PLACE",
    "OTHER_LENGTH",
    "OTHER_TASK",
    "OURS",
    "PLAIN",
    "RATE",
    "RATES",
    "RECIPES",
    "ROUNDS",
    "SEEDS",
    "SHARDED",
    "SHORT",
    "SIGN_IN_PLACE",
    "SIXTEENTH",
    "SPARSELOCO",
    "TASK",
    "TOP",
    "TOP_2",
    "TOP_6",
    "TWO_BITS",
    "TWO_BIT_ROUNDS",
    "UPDATES",
    "at_other_length",
    "candidate",
]

TASK, OTHER_TASK = "shakespeare", "gpt"

#: Text → kind of row → peak learning rate (``RATE``), and the rates that it is chosen from with a seed of its own
#: (``RATES``); half and twice the rate are among them.
RATE = {
    TASK: {
        "gradients": 1.6e-2, "compressed gradients": 4e-3, "updates": 3.2e-2, "compressed updates": 8e-3,
        "signs of updates": 3.2e-2, "short rounds": 1.6e-2, "rounds": 8e-3, "nothing": 3.2e-2,
    },
    OTHER_TASK: {
        "gradients": 1.6e-2, "compressed gradients": 4e-3, "updates": 3.2e-2, "compressed updates": 8e-3,
        "signs of updates": 8e-3, "short rounds": 1.6e-2, "rounds": 8e-3, "nothing": 3.2e-2,
    },
}  # fmt: skip
RATES: dict[str, dict[str, tuple[float, ...]]] = {
    TASK: {
        "gradients": (8e-3, 1.6e-2, 3.2e-2),
        "compressed gradients": (2e-3, 4e-3, 8e-3),
        "updates": (8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
        "compressed updates": (4e-3, 8e-3, 1.6e-2),
        "signs of updates": (8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
        "short rounds": (8e-3, 1.6e-2, 3.2e-2),
        "rounds": (4e-3, 8e-3, 1.6e-2),
        "nothing": (8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    },
    # Chosen in the shorter training. The kind "nothing" takes the first text's rate.
    OTHER_TASK: {
        "gradients": (8e-3, 1.6e-2, 3.2e-2),
        "compressed gradients": (2e-3, 4e-3, 8e-3),
        "updates": (1.6e-2, 3.2e-2, 6.4e-2),
        "compressed updates": (4e-3, 8e-3, 1.6e-2),
        "signs of updates": (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
        "rounds": (4e-3, 8e-3, 1.6e-2),
    },
}
CHOOSING = (1000,)

#: Seeds of all rows but ablations (``--ablation-seeds``) and the rows that learning rates are chosen by (``CHOOSING``).
SEEDS = (0, 1, 2)

#: Width of the GPT's blocks, such that its rows with three seeds each take an hour and a half.
_WIDTH = 64

#: Steps of a round; and of a short round, for which DiLoCo's outer step is too long.
ROUNDS, _SHORT_ROUND = (15, 30), 3

UPDATES, PLAIN, TWO_BITS = "updates", "updates, length 1", "updates, 2 bits"
TOP, TOP_2, TOP_6 = "updates, top 1%", "updates, top 2%, 2 bits, in place", "updates, top 6%, 2 bits, in place"
GRADIENT_SIGN, GRADIENT_TOP, GRADIENT_4 = "gradients, sign", "gradients, top 1%", "gradients, 4 bits"
#: Gradients that are rotated at random before they are rounded.
GRADIENT_1, GRADIENT_2 = "gradients, 1 bit, rotated", "gradients, 2 bits, rotated"
DILOCO, _STREAMING, SPARSELOCO, OURS = (
    f"every {{}}, {what}" for what in ("DiLoCo", "Streaming DiLoCo", "SparseLoCo", "top 1/64, 2 bits")
)
SHARDED = "updates, 2 bits, FSDP2"

#: Each rank trains by itself.
ALONE = "nothing is sent"

#: Rows with residuals in place have names that say so. Where elements are selected, each moves by the mean over the
#: ranks that sent it.
IN_PLACE, SIGN_IN_PLACE = f"{OURS}, in place", "updates, sign, in place"
SIXTEENTH, TWO_BIT_ROUNDS = "every {}, top 1/16, 2 bits, in place", "every {}, 2 bits, in place"
ONE_BIT_ROUNDS = "every {}, 1 bit, rotated, in place"

#: Rounds of a few steps.
SHORT, _SHORT_DILOCO = TWO_BIT_ROUNDS.format(_SHORT_ROUND), DILOCO.format(_SHORT_ROUND)

#: Text → name and number of epochs of a second length that some rows are also trained for. It is longer on the first
#: text, because slow links leave time for more steps. It is shorter on the other, 819 steps for 2,184, to see whether
#: short training has time for rounds.
OTHER_LENGTH = {TASK: ("longer", 10), OTHER_TASK: ("shorter", 3)}
_OTHER_EPOCHS = 8

#: SparseLoCo's published settings: a 64th of every tile of 64×64, in 2 bits, with a residual that decays.
_PUBLISHED = "topk:density=0.015625,values=int2,tile=64x64+ef:decay=0.95"
_UNTILED = "topk:density=0.015625,values=int2+ef"


def _of_senders(density: float) -> str:
    return f"topk:density={density},values=int2,mean=senders+ef"


_DENSE = Row(
    TASK, DENSE, "none", optimizer="adamw", epochs=7, lr=RATE[TASK]["gradients"], batch=48, momentum=0.9, beta2=0.95,
    weight_decay=0.1, clip=1.0, min_numel=1024, width=_WIDTH,
)  # fmt: skip


def _kind(row: Row) -> str:
    """Return the kind of a row, which decides its learning rate."""
    if row.isolated:
        return "nothing"
    if row.updates > 1:
        return "rounds" if row.updates in ROUNDS or row.outer == "nesterov" else "short rounds"
    sparse = row.spec.startswith("topk")
    few = row.spec.startswith("sign") or ("bits=2" in row.spec and not row.spec.startswith("eden"))
    if row.updates:
        return "compressed updates" if sparse else "signs of updates" if few else "updates"
    return "compressed gradients" if sparse or few else "gradients"


def _rated(row: Row) -> Row:
    return replace(row, lr=RATE[row.task][_kind(row)])


def _gradients(name: str, spec: str, small: str = "uncompressed") -> Row:
    return _rated(replace(_DENSE, name=name, spec=spec, small=small, collective=_collective(spec)))


def _collective(spec: str) -> Literal["scatter_reduce", "auto"]:
    """Return the collective of a spec.

    Among four ranks, ``auto`` averages signs by ``scatter_reduce`` from about 350,000 parameters on. This model has
    fewer, so rows with signs, uniform codes or rotations ask for ``scatter_reduce``.
    """
    return "scatter_reduce" if spec.startswith(("sign", "uniform", "eden")) else "auto"


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
        (DILOCO, "none", "nesterov"),
        (TWO_BIT_ROUNDS, "uniform:bits=2+ef", "nesterov"),
        (SIXTEENTH, _of_senders(1 / 16), "1"),
        (IN_PLACE, _of_senders(1 / 64), "1"),
        (SPARSELOCO, _PUBLISHED, "1"),
    ):
        yield Recipe(_updates(name.format(every), spec, every=every, outer=outer), turn=turn, long=turn > 1)


def _one_round() -> Iterator[Recipe]:
    """Yield the rows that only the shorter rounds have."""
    every = ROUNDS[0]
    yield Recipe(_updates(OURS.format(every), _UNTILED, every=every), turn=1)
    one_bit = _updates(ONE_BIT_ROUNDS.format(every), "eden:bits=1+ef", every=every, outer="nesterov")
    yield Recipe(one_bit, turn=2, long=True)
    streaming = _updates(_STREAMING.format(every), "qsgd:bits=4", every=every, outer="nesterov")
    yield Recipe(replace(streaming, fragments=3, overlap=2), turn=2, ablation=True, long=True)


def _others() -> Iterator[Recipe]:
    muon = replace(_DENSE, name=f"Muon, {DENSE}", optimizer="muon", lr=0.02, momentum=0.95)
    sgd = replace(_DENSE, name=f"SGD, {DENSE}", optimizer="sgd", lr=0.3, weight_decay=1e-4)
    for dense, outer in ((muon, "auto"), (sgd, "1")):
        name = dense.name.replace(DENSE, TWO_BITS)
        own = replace(dense, name=name, spec="qsgd:bits=2+ef", small="fused", updates=1, outer=outer)
        yield from (Recipe(row, turn=3, long=True) for row in (dense, own))
    sharded = replace(_updates(SHARDED, "qsgd:bits=2+ef"), shards=2)
    yield Recipe(sharded, turn=3, ablation=True, long=True)


def at_other_length(task: str, name: str) -> str:
    """Return the name of a row that is trained for another number of epochs."""
    return f"{name}, {OTHER_LENGTH[task][0]}"


def _at_other_length(row: Row) -> Row:
    return replace(row, name=at_other_length(row.task, row.name), epochs=OTHER_LENGTH[row.task][1])


def candidate(base: str, rate: float) -> str:
    """Return the name of a row that serves to choose a learning rate."""
    return f"{base}, rate {rate:g}"


_ALONE_ROW = _rated(replace(_DENSE, name=ALONE, isolated=True))
_AVERAGED = (
    Recipe(_DENSE),
    Recipe(_ALONE_ROW),
    Recipe(_updates(UPDATES)),
    Recipe(_updates(SIGN_IN_PLACE, "sign+ef")),
    Recipe(_updates(TOP, "topk:density=0.01+ef")),
    Recipe(_gradients(GRADIENT_TOP, "topk:density=0.01+ef", small="fused")),
    Recipe(_gradients(GRADIENT_4, "qsgd:bits=4")),
    *_rounds(ROUNDS[0], turn=1),
    *_one_round(),
    Recipe(_updates(SHORT, "uniform:bits=2+ef", every=_SHORT_ROUND), turn=2, long=True),
    *_rounds(ROUNDS[1], turn=2),
    Recipe(_gradients(GRADIENT_SIGN, "sign+ef", small="fused"), turn=2, long=True),
    Recipe(_gradients(GRADIENT_1, "eden:bits=1", small="fused"), turn=2, long=True),
    Recipe(_gradients(GRADIENT_2, "eden:bits=2", small="fused"), turn=2, long=True),
    *(
        Recipe(row, turn=3, ablation=True, long=True)
        for row in (
            _updates(TOP_2, _of_senders(0.02), outer="1"),
            _updates(TOP_6, _of_senders(0.06), outer="1"),
            _updates(_SHORT_DILOCO, every=_SHORT_ROUND, outer="nesterov"),
            _updates(TWO_BITS, "qsgd:bits=2+ef"),
            _updates(PLAIN, outer="1"),
            _gradients("gradients, rank 4", "powersgd:rank=4"),
        )
    ),
)

#: Kind of row → the row that its learning rate is chosen with.
BASES = {
    "gradients": _DENSE,
    "compressed gradients": _gradients(GRADIENT_TOP, "topk:density=0.01+ef", small="fused"),
    "updates": _updates(UPDATES),
    "compressed updates": _updates(TOP, "topk:density=0.01+ef"),
    "signs of updates": _updates(SIGN_IN_PLACE, "sign+ef"),
    "short rounds": _updates(SHORT, "uniform:bits=2+ef", every=_SHORT_ROUND),
    "rounds": _updates(DILOCO.format(ROUNDS[0]), every=ROUNDS[0], outer="nesterov"),
    "nothing": _ALONE_ROW,
}


def _choice(task: str) -> Iterator[Recipe]:
    for kind, rates in RATES[task].items():
        base = BASES[kind] if task == TASK else replace(_on_other_text(BASES[kind]), epochs=OTHER_LENGTH[task][1])
        for rate in rates:
            row = replace(base, name=candidate(base.name, rate), lr=rate)
            yield Recipe(row, turn=4 if task == TASK else 9, long=True, seeds=CHOOSING)


def _on_other_text(row: Row) -> Row:
    return _rated(replace(row, task=OTHER_TASK, epochs=_OTHER_EPOCHS, batch=32))


def _other_lengths() -> Iterator[Recipe]:
    rounds = [kind.format(ROUNDS[0]) for kind in (DILOCO, TWO_BIT_ROUNDS, SIXTEENTH)]
    for recipe in _AVERAGED:
        if recipe.row.name in rounds:
            yield Recipe(_at_other_length(recipe.row), turn=3, long=True)
    for recipe in _AVERAGED:
        if recipe.row.name in (DENSE, ALONE, GRADIENT_4, UPDATES, *rounds):
            yield Recipe(_at_other_length(_on_other_text(recipe.row)), turn=7, ablation=True, long=True)


def _other_text() -> Iterator[Recipe]:
    """Yield the other text's rows: rounds of 30 steps, rotated gradients in 1 bit, and the first text's rows without
    ``--long``.

    Rounds with residuals apart are left out.
    """
    rounds = [row.row.name for row in _rounds(ROUNDS[1], turn=2)]
    for recipe in _AVERAGED:
        name = recipe.row.name
        if name != OURS.format(ROUNDS[0]) and (not recipe.long or name in (GRADIENT_1, *rounds)):
            yield replace(recipe, row=_on_other_text(recipe.row), turn=recipe.turn + 5, long=True)


RECIPES = (
    *_AVERAGED,
    *_others(),
    *_choice(TASK),
    *_other_text(),
    *_other_lengths(),
    *_choice(OTHER_TASK),
)
