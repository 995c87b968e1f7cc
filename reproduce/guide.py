"""Write the tables of the page "Which do I send, gradients or updates?" from the records of local and local_times.

The page's sentences are written by hand, and a test compares their figures with the records; this module writes the two
tables. ``python -m reproduce.pages`` runs it, and writes the pages of results, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reproduce.groups import DENSE, NOTHING, Group, compared, groups, named
from reproduce.local_rows import (
    ALONE,
    DILOCO,
    GRADIENT_1,
    GRADIENT_2,
    GRADIENT_4,
    GRADIENT_SIGN,
    GRADIENT_TOP,
    ONE_BIT_ROUNDS,
    OTHER_TASK,
    ROUNDS,
    SIGN_IN_PLACE,
    SIXTEENTH,
    SPARSELOCO,
    TASK,
    TOP,
    TWO_BIT_ROUNDS,
    UPDATES,
)
from reproduce.local_words import CALLED

__all__ = ["LOSSES", "TIMES", "rewritten"]

#: Rows of ``reproduce.local`` that the page shows, in its order.
LOSSES = {
    name: CALLED[name]
    for name in (
        DENSE,
        GRADIENT_4,
        GRADIENT_2,
        GRADIENT_1,
        GRADIENT_SIGN,
        GRADIENT_TOP,
        UPDATES,
        SIGN_IN_PLACE,
        TOP,
        *(each.format(ROUNDS[0]) for each in (DILOCO, TWO_BIT_ROUNDS, ONE_BIT_ROUNDS, SIXTEENTH, SPARSELOCO)),
        ALONE,
    )
}

#: Method of ``reproduce.local_times`` → what the page calls it.
TIMES = {
    "gradients, 32 bits": "gradients, 32 bits (DDP)",
    "gradients, 16 bits": "gradients, 16 bits",
    GRADIENT_4: LOSSES[GRADIENT_4],
    **{name: LOSSES[name] for name in (each.format(ROUNDS[0]) for each in (DILOCO, TWO_BIT_ROUNDS, SIXTEENTH))},
}


def rewritten(page: str, losses: Mapping[str, Any], times: Mapping[str, Any]) -> str:
    """Return the page with both tables rewritten from the records.

    Args:
        page: the page in Markdown, with both tables.
        losses: the record of ``reproduce.local``.
        times: the record of ``reproduce.local_times``.

    Raises:
        ValueError: a table is not on the page exactly once.
    """
    page = _with_table(page, "| sent | less traffic |", [*_losses(groups(losses["rows"]))])
    rates = list(dict.fromkeys(line["rate"] for line in times["lines"]))
    head = " | ".join(("sent", *(f"{rate.removesuffix('mbit')} Mbit/s" for rate in rates)))
    return _with_table(page, f"| {head} |", [*_times(times["lines"], rates)])


def _with_table(page: str, head: str, lines: Sequence[str]) -> str:
    """Replace the lines below the head of the table that begins with ``head``."""
    table = re.compile(rf"^({re.escape(head)}.*\n\|[ :|-]+\n)(?:\|.*\n)+", re.M)
    found = len(table.findall(page))
    if found != 1:
        raise ValueError(f"the page has {found} tables that begin with {head!r}, where one is written anew")
    return table.sub(lambda match: match[1] + "".join(f"{line}\n" for line in lines), page)


def _losses(found: Sequence[Group]) -> Iterator[str]:
    for name, called in LOSSES.items():
        own = named(found, TASK, name)
        if own is not None and own.mean is not None:
            traffic = NOTHING if own.ratio is None else f"{round(own.ratio):,} ×"
            above = " | ".join(_above(found, task, name) for task in (TASK, OTHER_TASK))
            yield f"| {called} | {traffic} | {math.log(own.mean):.3f} | {above} |"


def _above(found: Sequence[Group], task: str, name: str) -> str:
    """Say how far a row's loss is above that of uncompressed gradients, over the seeds that both have."""
    own, dense = named(found, task, name), named(found, task, DENSE)
    if name == DENSE or own is None or dense is None or not {*own.seeds} & {*dense.seeds}:
        return NOTHING
    apart = compared(own, dense, relative=True, of=math.log)
    margin = "" if apart.margin is None else f" ± {100 * apart.margin:.1f}"
    return f"{100 * apart.mean:+.1f}{margin} % ({len(apart.seeds)})"


def _times(lines: Sequence[Mapping[str, Any]], rates: Sequence[str]) -> Iterator[str]:
    seconds = {(line["method"], line["rate"]): line["seconds"] for line in lines}
    for method, called in TIMES.items():
        yield " | ".join((f"| {called}", *(f"{seconds[method, rate] / 60:.1f} min" for rate in rates))) + " |"
