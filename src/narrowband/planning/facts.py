"""A small table of how much compression raised the loss in measured runs; each line has the command that made it.

The table is ``facts.json``. ``python -m reproduce.facts`` makes it from the records in ``reproduce/results``, and a
test compares the two. All runs are short, with small models: they show what to be careful of, not what your model will
lose.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from narrowband.feedback import compression

__all__ = ["Fact", "akin", "facts", "known"]

_PATH = Path(__file__).with_name("facts.json")


@dataclass(frozen=True)
class Fact:
    """One measurement.

    Attributes:
        optimizer: adamw, sgd, muon or lora (AdamW on adapters).
        spec: what was sent, as :func:`~narrowband.feedback.compression` writes it.
        every: steps from one round of updates to the next; 0: gradients.
        gap: how far the held-out loss was above that without compression, as a share of the latter.
        margin: how much of the gap may be chance; None: there was one seed, so it is unknown.
        seeds: number of seeds.
        what: model, length and ranks.
        command: the command that made the record.
        outer: for updates, the outer step along their mean: ``auto``, a length, or ``nesterov`` for DiLoCo's step.
        residuals: for updates, where residuals were kept: ``apart`` or ``in-place``.
    """

    optimizer: str
    spec: str
    every: int
    gap: float
    margin: float | None
    seeds: int
    what: str
    command: str
    outer: str = "1"
    residuals: str = "apart"

    def within(self, tolerance: float) -> bool:
        """Return whether the gap is at most this share of the loss."""
        return self.gap <= tolerance

    def __str__(self) -> str:
        if not math.isfinite(self.gap):
            return "diverged"
        return f"{self.gap:+.1%}" + (f" ± {self.margin:.1%}" if self.margin is not None else " (one seed)")


@functools.lru_cache(maxsize=1)
def facts() -> tuple[Fact, ...]:
    """Return all facts."""
    found = (Fact(**fields) for fields in json.loads(_PATH.read_text(encoding="utf-8")))
    return tuple(replace(fact, spec=str(compression(fact.spec))) for fact in found)


def known(optimizer: str, spec: str | None, every: int) -> Fact | None:
    """Return the fact about a choice: the worst one if there are several, None if there is none.

    Example:
        >>> from narrowband.planning.facts import known
        >>> str(known("sgd", "powersgd:rank=4", every=0))
        '+0.5% ± 0.6%'
    """
    found = [fact for fact in facts() if (fact.optimizer, fact.spec, fact.every) == (optimizer, spec, every)]
    return max(found, key=lambda fact: fact.gap, default=None)


def akin(optimizer: str, spec: str | None, every: int) -> Fact | None:
    """Return the worst fact about the same codec with any settings, sent as often; None if there is none.

    Example:
        >>> from narrowband.planning.facts import akin
        >>> akin("adamw", "topk:density=0.001+ef", every=0).spec
        'topk:density=0.01+ef'
    """
    kind = (optimizer, every, _name(spec or ""))
    found = [fact for fact in facts() if (fact.optimizer, fact.every, _name(fact.spec)) == kind]
    return max(found, key=lambda fact: fact.gap, default=None)


def _name(spec: str) -> str:
    return spec.partition("+")[0].partition(":")[0]
