"""What compression cost in loss, as far as it was measured: a small table, each line with the command that made it.

The table is ``facts.json``. ``python -m reproduce.facts`` makes it of the records in ``reproduce/results``, and a test
compares them. All of it is of small models and short runs: it says what to be careful of, and not what yours will lose.
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
        gap: how far the held-out loss was above that without compression, as a share of it.
        margin: what of that may be chance; None: of one seed, so nobody knows.
        seeds: how many.
        what: model, length and ranks.
        command: that made the record.
        outer: of updates: how parameters went along their mean; ``auto``, a length, or ``nesterov`` for DiLoCo's step.
        residuals: of updates: where they waited, ``apart`` or ``in-place``.
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
        """Whether no more was lost than a share of the loss."""
        return self.gap <= tolerance

    def __str__(self) -> str:
        if not math.isfinite(self.gap):
            return "diverged"
        return f"{self.gap:+.1%}" + (f" ± {self.margin:.1%}" if self.margin is not None else " (one seed)")


@functools.lru_cache(maxsize=1)
def facts() -> tuple[Fact, ...]:
    """All."""
    found = (Fact(**fields) for fields in json.loads(_PATH.read_text(encoding="utf-8")))
    return tuple(replace(fact, spec=str(compression(fact.spec))) for fact in found)


def known(optimizer: str, spec: str | None, every: int) -> Fact | None:
    """What is known of a choice: of several measurements the worst. None: nothing.

    Example:
        >>> from narrowband.planning.facts import known
        >>> str(known("sgd", "powersgd:rank=4", every=0))
        '+0.5% ± 0.7%'
    """
    found = [fact for fact in facts() if (fact.optimizer, fact.spec, fact.every) == (optimizer, spec, every)]
    return max(found, key=lambda fact: fact.gap, default=None)


def akin(optimizer: str, spec: str | None, every: int) -> Fact | None:
    """What is known of the same codec with other settings, sent as often: the worst of it. None: nothing.

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
