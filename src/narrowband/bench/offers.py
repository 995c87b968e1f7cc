"""Ways to keep the activations of a model's parts (offers), and the search for the fastest ones that fit into memory.

A model is cut into *units*: the blocks that it repeats, and the modules around them. Each unit has *offers*: keep what
its backward needs as it is, in 8 or 4 bits, or in 8 bits except for one operator; or keep only its inputs, as they are
or in 8 bits, and recompute the rest, for a whole block or for one of its parts.

A step holds more than what is kept. Backward goes through the units from the last to the first. When it is at unit i,
memory holds what units up to i keep, what unit i has just recomputed, the gradients of the parameters from unit i on,
and temporary memory of operators:

    alive = max over i of (Σ_{j ≤ i} kept_j + again_i + moment_i + Σ_{j ≥ i} gradients_j)

Before that, at the loss, memory holds all that is kept, and what the loss needs.
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

#: A unit is cut into its children if it keeps more than this share of all bytes, and has repeated blocks inside,
_LARGE = 1 / 16
#: or if it keeps more than this share, whatever is inside.
_VERY_LARGE = 1 / 3
#: A part of a block, or an operator, gets offers of its own if it keeps this share of all bytes.
WORTH_A_LOOK = 0.05
#: Number of equal grains that the knapsack divides the room into.
_GRAINS = 10_000


@dataclass(frozen=True)
class Unit:
    """A part of the model that has one offer.

    Attributes:
        name: of the module.
        whole: whether it includes the modules inside; else it is only what the module saves itself.
        nested: whether there are modules inside.
        parts: names of its children that have modules inside and keep much.
    """

    name: str
    whole: bool = True
    nested: bool = False
    parts: tuple[str, ...] = ()

    def has(self, module: str) -> bool:
        """Return whether the module of that name belongs to the unit."""
        return module == self.name or (self.whole and (not self.name or module.startswith(f"{self.name}.")))

    def patterns(self) -> list[str]:
        """Return patterns of the modules that belong to the unit."""
        inside = f"{self.name}.*" if self.name else "*"
        return [self.name, inside] if self.whole and self.nested else [self.name]


@dataclass(frozen=True)
class Kind:
    """A kind of offer: one way to keep a unit's activations.

    Attributes:
        name: in words.
        bits: of what it keeps.
        without: an operator whose tensors are kept as they are.
        again: the part that is recomputed; "" is the whole unit, None nothing.
        inputs: bits of the inputs that the part is recomputed from.
    """

    name: str
    bits: Literal[8, 4] | None = None
    without: str | None = None
    again: str | None = None
    inputs: Literal[8] | None = None

    def fits(self, unit: Unit) -> bool:
        """Return whether a unit can have an offer of this kind."""
        whole = unit.whole and unit.name != ""
        return self.again is None or (whole and (not self.again or self.again in unit.parts))

    def module(self, unit: Unit) -> str:
        """Return the module of a unit that is recomputed with this kind."""
        return f"{unit.name}.{self.again}" if self.again else unit.name

    def rules(self, unit: Unit) -> dict[str, Any]:
        """Return this kind's patterns for a policy that is off everywhere else."""
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
    """The measured cost of a kind for one unit.

    Attributes:
        kind: of the offer.
        kept: bytes between forward and backward.
        again: recomputed bytes, which exist while the unit's backward runs.
        moment: temporary bytes of operators meanwhile.
        error: norm of the difference from exact gradients over the norm of these, if all units have this kind.
        loss: bytes besides all that is kept, until the gradient of the model's result exists; only the last unit's
            value counts.
        seconds: by which it makes a step longer.
    """

    kind: Kind
    kept: int
    again: int = 0
    moment: int = 0
    seconds: float = 0.0
    error: float = 0.0
    loss: int = 0


def alive(offers: Sequence[Offer], gradients: Sequence[int] = ()) -> int:
    """Return the largest number of bytes that a step holds.

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
    """Find the fastest offers, one for each unit, with which a step holds at most ``room`` bytes; None if none fit.

    This is a knapsack, solved by dynamic programming over units and the bytes that units so far may keep. Bytes are
    rounded up to ten-thousandths of the room (grains), so a choice never exceeds the room. Choices that leave less than
    a grain per unit free may be missed.

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
    """Find the offers with which a step holds the fewest bytes.

    There is a choice for every bound, because every unit may be kept as it is.
    """
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
