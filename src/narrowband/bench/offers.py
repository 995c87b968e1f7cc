"""What a model's parts may be offered for their activations, and the fastest offers that fit into a room.

A model is cut into *units*: the blocks that it repeats, and what lies around them. Each unit has *offers*: to keep what
its backward needs as it is, in 8 or 4 bits, in 8 bits but for one operator, or to keep only its inputs, as they are or
in 8 bits, and to compute the rest again; for a whole block or for one of its parts.

A step holds more than what is kept. Backward goes through the units from the last to the first. When it is at unit i,
there is what units up to i keep, what unit i has just computed again, the gradients of the parameters from unit i on,
and what operators need for a moment:

    alive = max over i of (Σ_{j ≤ i} kept_j + again_i + moment_i + Σ_{j ≥ i} gradients_j)

And before that, at the loss, there is all that is kept, and what the loss needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn

__all__ = [
    "AGAIN", "AS_IT_IS", "EIGHT", "FOUR", "WORTH_A_LOOK", "Kind", "Offer", "Unit", "alive", "cheapest", "smallest",
    "units_of",
]  # fmt: skip

#: A unit is cut into its children where it keeps more than this share of all, and there are repeated blocks inside.
_LARGE = 1 / 16
#: And where it keeps more than this, whatever is inside.
_VERY_LARGE = 1 / 3
#: A block's part, or an operator, is looked at alone where it keeps this share of all.
WORTH_A_LOOK = 0.05
#: Into which the room is cut for the knapsack.
_GRAINS = 10_000


@dataclass(frozen=True)
class Unit:
    """A part of the model that has one offer.

    Attributes:
        name: of the module.
        whole: with the modules inside of it; else it is what the module saves itself.
        nested: whether there are any.
        parts: names of its children that have modules inside and keep much.
    """

    name: str
    whole: bool = True
    nested: bool = False
    parts: tuple[str, ...] = ()

    def has(self, module: str) -> bool:
        """Whether the module of that name belongs to it."""
        return module == self.name or (self.whole and (not self.name or module.startswith(f"{self.name}.")))

    def patterns(self) -> list[str]:
        """Of the modules that belong to it."""
        inside = f"{self.name}.*" if self.name else "*"
        return [self.name, inside] if self.whole and self.nested else [self.name]


@dataclass(frozen=True)
class Kind:
    """What a unit may be offered.

    Attributes:
        name: in words.
        bits: of what it keeps.
        without: an operator that is left as it is.
        again: the part that is computed again; "" is the whole unit, None nothing.
        inputs: bits of what that part is computed from.
    """

    name: str
    bits: Literal[8, 4] | None = None
    without: str | None = None
    again: str | None = None
    inputs: Literal[8] | None = None

    def fits(self, unit: Unit) -> bool:
        """Whether there is such an offer for a unit."""
        whole = unit.whole and unit.name != ""
        return self.again is None or (whole and (not self.again or self.again in unit.parts))

    def module(self, unit: Unit) -> str:
        """The module of a unit that is computed again, where it has such an offer."""
        return f"{unit.name}.{self.again}" if self.again else unit.name

    def rules(self, unit: Unit) -> dict[str, Any]:
        """The patterns of a policy that is off everywhere else."""
        rules: dict[str, Any] = {}
        for pattern in unit.patterns() if self.bits else ():
            rules[pattern] = self.bits
            if self.bits != 8:
                rules[f"{pattern}:layer_norm"] = 8
            if self.without is not None:
                rules[f"{pattern}:{self.without}"] = "off"
        if self.again is not None:
            rules[self.module(unit)] = "checkpoint" if self.inputs is None else f"checkpoint:bits={self.inputs}"
        return rules


AS_IT_IS = Kind("as it is")
EIGHT, FOUR = Kind("in 8 bits", 8), Kind("in 4 bits", 4)
AGAIN = (Kind("recomputed", again=""), Kind("recomputed from 8 bits", again="", inputs=8))


@dataclass(frozen=True)
class Offer:
    """What a kind costs one unit.

    Attributes:
        kind: of the offer.
        kept: bytes between forward and backward.
        again: bytes that are there while its backward runs, since they are computed again.
        moment: bytes that operators need meanwhile.
        error: norm of the difference from exact gradients over the norm of these, where all units have this kind.
        loss: bytes beside all that is kept until there is a gradient of the model's result; the last unit's counts.
        seconds: that it makes a step longer.
    """

    kind: Kind
    kept: int
    again: int = 0
    moment: int = 0
    seconds: float = 0.0
    error: float = 0.0
    loss: int = 0


def alive(offers: Sequence[Offer], gradients: Sequence[int] = ()) -> int:
    """Bytes that a step holds at its highest.

    Args:
        offers: of units in the order of forward.
        gradients: bytes of each unit's; none, if not given.

    Example:
        >>> alive([Offer(AS_IT_IS, 10), Offer(AS_IT_IS, 1, again=20), Offer(AS_IT_IS, 5)])
        31
    """
    kept, most, made = 0, 0, sum(gradients)
    for at, offer in enumerate(offers):
        kept += offer.kept
        most = max(most, kept + offer.again + offer.moment + made)
        made -= gradients[at] if gradients else 0
    return max(most, kept + offers[-1].loss)


def cheapest(units: Sequence[Sequence[Offer]], room: int, gradients: Sequence[int] = ()) -> list[Offer] | None:
    """The offers, one for each unit, that take the least time and with which a step holds no more than ``room`` bytes;
    None if there are none.

    A knapsack, by dynamic programming: for every unit, and every number of bytes that units up to it may keep, the
    least time. Bytes are rounded up to ten-thousandths of the room, so they are never more than that; choices that
    come closer to it than one of these for every unit may be missed.

    Args:
        units: offers of each, in the order of forward.
        room: bytes.
        gradients: bytes of each unit's; none, if not given.

    Example:
        >>> plain, small = Offer(AS_IT_IS, 10), Offer(Kind("in 8 bits", 8), 3, seconds=0.1)
        >>> slow = Offer(Kind("in 8 bits", 8), 3, seconds=0.3)
        >>> [offer.kept for offer in cheapest([[plain, small], [plain, slow]], 14)]
        [3, 10]
    """
    grain, made = max(room, 1) / _GRAINS, sum(gradients)
    best = np.full(_GRAINS + 1, np.inf)  # seconds, by grains that are kept
    best[0] = 0.0
    ways = []
    for at, offers in enumerate(units):
        found, way = np.full_like(best, np.inf), np.zeros(len(best), dtype=np.int64)
        for number, offer in enumerate(offers):
            grains = math.ceil(offer.kept / grain)
            beside = offer.again + offer.moment + made
            if at + 1 == len(units):
                beside = max(beside, offer.loss)
            last = min(math.floor((room - beside) / grain), _GRAINS)
            if grains > last:
                continue
            seconds = best[: last + 1 - grains] + offer.seconds
            better = seconds < found[grains : last + 1]
            found[grains : last + 1][better] = seconds[better]
            way[grains : last + 1][better] = number
        ways.append(way)
        best = found
        made -= gradients[at] if gradients else 0
    kept = int(best.argmin())
    if not math.isfinite(best[kept]):
        return None
    chosen: list[Offer] = []
    for offers, way in zip(reversed(units), reversed(ways), strict=True):
        chosen.append(offers[way[kept]])
        kept -= math.ceil(chosen[-1].kept / grain)
    return chosen[::-1]


def smallest(units: Sequence[Sequence[Offer]], gradients: Sequence[int]) -> list[Offer]:
    """The offers with which a step holds the fewest bytes. Whatever the bound, every unit may be as it is."""
    bounds = sorted({offer.again for offers in units for offer in offers})
    kept = [[min((o for o in own if o.again <= bound), key=lambda o: o.kept) for own in units] for bound in bounds]
    return min(kept, key=lambda offers: alive(offers, gradients))


def units_of(model: nn.Module, saved: Mapping[str, int]) -> list[Unit]:
    """Cut a model into units, in the order in which they save.

    Args:
        model: it.
        saved: module → bytes that it saves itself, in the order of forward.
    """
    total = sum(saved.values())

    def within(name: str) -> int:
        return sum(nbytes for module, nbytes in saved.items() if Unit(name).has(module))

    def cut(name: str, module: nn.Module) -> Iterator[Unit]:
        nbytes = within(name)
        if not nbytes:
            return
        repeats = any(map(_repeats, module.modules()))
        children = [(f"{name}.{child}" if name else child, inside) for child, inside in module.named_children()]
        if children and ((nbytes > total * _LARGE and repeats) or nbytes > total * _VERY_LARGE):
            if saved.get(name):
                yield Unit(name, whole=False)
            for inside in children:
                yield from cut(*inside)
            return
        # A single layer keeps its inputs whether or not it is computed again.
        parts = [inside for inside, of in children if [*of.children()] and within(inside) > WORTH_A_LOOK * nbytes]
        yield Unit(name, nested=bool(children), parts=tuple(x.rpartition(".")[2] for x in parts) if name else ())

    order = list(saved)
    found = list(cut("", model))
    return sorted(found, key=lambda unit: next(at for at, module in enumerate(order) if unit.has(module)))


def _repeats(module: nn.Module) -> bool:
    """Whether it is a list of blocks."""
    members = list(module.children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
    return len(members) > 1 and sum(any(True for _ in member.children()) for member in members) > 1
