"""Names of the rows of :mod:`reproduce.local` on pages: full names where there is room, short names elsewhere.

Rows without a name here keep the record's, with "dense" replaced by "uncompressed".
"""

from __future__ import annotations

from collections.abc import Iterator

from reproduce.claims import plain
from reproduce.groups import DENSE
from reproduce.local_rows import (
    ALONE,
    DILOCO,
    GRADIENT_1,
    GRADIENT_2,
    GRADIENT_4,
    GRADIENT_SIGN,
    GRADIENT_TOP,
    IN_PLACE,
    ONE_BIT_ROUNDS,
    OURS,
    ROUNDS,
    SHORT,
    SIGN_IN_PLACE,
    SIXTEENTH,
    SPARSELOCO,
    TOP,
    TOP_2,
    TOP_6,
    TWO_BIT_ROUNDS,
    TWO_BITS,
    UPDATES,
)

__all__ = ["CALLED", "LEGEND", "shortly"]

#: Row of rounds → its full name and its short name.
_ROUNDS = {
    DILOCO: ("uncompressed, with DiLoCo's outer step", "uncompressed (DiLoCo)"),
    TWO_BIT_ROUNDS: ("2 bits, residuals in place, with DiLoCo's outer step", "2 bits"),
    ONE_BIT_ROUNDS: ("1 bit, rotated, residuals in place, with DiLoCo's outer step", "1 bit, rotated"),
    SIXTEENTH: ("largest 16th in 2 bits, residuals in place, mean of senders", "largest 16th in 2 bits"),
    IN_PLACE: ("largest 64th in 2 bits, residuals in place, mean of senders", "largest 64th in 2 bits"),
    SPARSELOCO: ("largest 64th in 2 bits, as SparseLoCo has it", "largest 64th in 2 bits as in SparseLoCo"),
    OURS: ("largest 64th in 2 bits, residuals apart, length measured", "largest 64th in 2 bits, residuals apart"),
}


def _rounds(at: int) -> Iterator[tuple[str, str]]:
    for every in ROUNDS:
        begins = (f"updates after every {every} steps", f"rounds of {every}")[at]
        for name, called in _ROUNDS.items():
            yield name.format(every), f"{begins}, {called[at]}"


#: Row of ``reproduce.local`` → its full name.
CALLED = {
    DENSE: "gradients, uncompressed",
    GRADIENT_4: "gradients, 4 bits",
    GRADIENT_2: "gradients, 2 bits, rotated",
    GRADIENT_1: "gradients, 1 bit, rotated",
    "gradients, rank 4": "gradients, rank 4",
    GRADIENT_SIGN: "gradients, signs",
    GRADIENT_TOP: "gradients, largest 1 %",
    UPDATES: "updates after every step, uncompressed",
    TWO_BITS: "updates after every step, 2 bits",
    SIGN_IN_PLACE: "updates after every step, signs, residuals in place",
    TOP: "updates after every step, largest 1 %",
    TOP_6: "updates after every step, largest 6 % in 2 bits, residuals in place, mean of senders",
    TOP_2: "updates after every step, largest 2 % in 2 bits, residuals in place, mean of senders",
    SHORT: "updates after every 3 steps, 2 bits, residuals in place, length measured",
    **dict(_rounds(0)),
    ALONE: "nothing: each rank trains by itself",
}

_SHORT = {
    GRADIENT_SIGN: "gradients, signs",
    SIGN_IN_PLACE: "updates, signs",
    TOP: "updates, largest 1 %",
    TOP_6: "updates, largest 6 % in 2 bits",
    TOP_2: "updates, largest 2 % in 2 bits",
    SHORT: "rounds of 3, 2 bits",
    f"every {ROUNDS[0]}, Streaming DiLoCo": f"rounds of {ROUNDS[0]}, Streaming DiLoCo",
    **dict(_rounds(1)),
}


def shortly(name: str) -> str:
    """Return a row's name in claims.

    Example:
        >>> shortly("every 15, top 1/16, 2 bits, in place")
        'rounds of 15, largest 16th in 2 bits'
    """
    return _SHORT.get(name) or plain(CALLED.get(name, name))


#: Words in the names of rows, explained.
LEGEND = (
    ("gradients, updates, every n", "what is averaged, in every step, or after every n steps, which is a round of n"),
    ("rotated", "at random, before values are rounded (`eden`)"),
    ("top", "the elements of largest magnitude, a share of each layer"),
    ("in place", "residuals are in place: replicas train on from parameters that contain what was not sent"),
    ("DiLoCo, SparseLoCo", "as in these papers; *2 bits, in place* has DiLoCo's outer step, too"),
    ("nothing is sent", "each rank trains by itself on its share of the data"),
)  # fmt: skip
