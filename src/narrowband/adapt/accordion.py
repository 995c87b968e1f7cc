"""Accordion: compress little while gradients change fast, and much otherwise (Agarwal et al., arXiv 2010.16248)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

from narrowband.adapt.policy import Policy, plan_of
from narrowband.codecs.base import squared_norms
from narrowband.feedback import Compression, compression

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.adapt.plan import Plan
    from narrowband.adapt.traffic import Traffic

__all__ = ["Accordion"]


@dataclass
class Accordion(Policy):
    """Switches each layer between two specs, by how much its gradient's norm changed from one window to the next.

    A layer whose norm changed by a share of at least ``eta`` is in a critical regime, and gets ``low``; others get
    ``high``. In the first window all layers are critical. A layer whose gradients stay zero is not.

    Args:
        low: the spec with little compression.
        high: the spec with much compression.
        eta: the relative change from which a regime is critical (0.5 in the paper).
        every: steps between decisions (10 epochs in the paper).
        warmup_steps: steps before the first decision, which are not compressed.

    Raises:
        ValueError: a spec or a number is not valid.

    Example:
        >>> handle = nb.compress_gradients(model, nb.Accordion("powersgd:rank=4", "powersgd:rank=1", every=100))
    """

    low: str
    high: str
    eta: float = 0.5
    every: int = 500
    warmup_steps: int = 0
    name: ClassVar[str] = "accordion"

    _norms: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_times()
        compression(self.low)
        compression(self.high)
        if not self.eta > 0:
            raise ValueError(f"accordion: eta={self.eta} must be above 0")

    @property
    def start(self) -> Compression:
        return compression(self.low)

    def specs(self) -> list[str]:
        return [self.low, self.high]

    def decide(self, gradients: Mapping[str, Tensor], *, step: int, traffic: Traffic) -> Plan:
        chosen = []
        for name, square in zip(gradients, squared_norms(gradients.values()), strict=True):
            norm = math.sqrt(square)
            before = self._norms.get(name)
            self._norms[name] = norm
            changed = before is None or not abs(before - norm) < self.eta * before  # NaN counts as a change
            critical = changed and norm != before  # zero before and now: a share of nothing
            chosen.append(compression(self.low if critical else self.high))
        return plan_of(chosen, gradients, self, step=step, traffic=traffic)

    def state_dict(self) -> dict[str, object]:
        return dict(self._norms)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        for name, norm in state.items():
            if not isinstance(norm, (int, float)):
                raise ValueError(f"accordion: the state holds {norm!r} as the norm of {name!r}, expected a number")
        self._norms = {name: float(cast("float", norm)) for name, norm in state.items()}
