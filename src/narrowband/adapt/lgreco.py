"""L-GreCo: the compression of every layer, chosen so that the whole model's error stays below a bound (Alimohammadi et
al., arXiv 2210.17357).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from narrowband import kernels
from narrowband.adapt.policy import Policy, as_choice, planned, search_space
from narrowband.adapt.tables import ErrorTable, error_table
from narrowband.feedback import Compression, compression

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.adapt.plan import Plan

__all__ = ["LGreCo", "solve"]

log = logging.getLogger(__name__)


@dataclass
class LGreCo(Policy):
    """The fewest bytes, or seconds, at the error of a compression that is known to be safe.

    At every decision the gradients since the last one are looked at: an error for every layer and choice, a budget that
    is what the reference would lose in all layers together, and :func:`solve`.

    Args:
        reference: the spec that is known to be safe for all layers; or a policy, such as
            :class:`~narrowband.adapt.Accordion`, whose plan sets the budget anew at every decision.
        choices: specs that a layer may get, of one family or several, ``none`` among them if that is allowed; by
            default those around the reference that the paper searches (:func:`~narrowband.adapt.search_space`).
        every: steps between decisions; an epoch's is usual.
        warmup_steps: steps before the first decision, which are not compressed.
        alpha: the budget, as a multiple of the reference's error.
        metric: what adds up over layers: L2 norms of errors, as in the paper, or their squares.
        objective: what is smallest in the end: ``bytes``, or ``time``.
        seconds_per_byte: for ``time``, layer → seconds that a byte of it takes: :func:`~narrowband.measure_times`
            finds out; :func:`~narrowband.adapt.bucket_priority` has the paper's guess (appendix A).
        discretization: steps that the budget is cut into.

    Example:
        >>> policy = LGreCo(reference="powersgd:rank=4", every=500)
        >>> handle = nb.compress_gradients(model, policy)
    """

    reference: str | Policy
    choices: Sequence[str] | None = None
    every: int = 500
    warmup_steps: int = 0
    alpha: float = 1.0
    metric: Literal["l2", "l2_squared"] = "l2"
    objective: Literal["bytes", "time"] = "bytes"
    seconds_per_byte: Mapping[str, float] | None = field(default=None, repr=False)
    discretization: int = 10_000
    name: ClassVar[str] = "lgreco"

    def __post_init__(self) -> None:
        self._check_times()
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lgreco: alpha={self.alpha} must be above 0")
        if self.metric not in ("l2", "l2_squared"):
            raise ValueError(f"lgreco: metric={self.metric!r} is neither l2 nor l2_squared")
        if self.objective not in ("bytes", "time"):
            raise ValueError(f"lgreco: objective={self.objective!r} is neither bytes nor time")
        if (self.objective == "time") != (self.seconds_per_byte is not None):
            raise ValueError(
                "lgreco: objective='time' and seconds_per_byte=… belong together; nb.measure_times(…) measures them"
            )
        if self.discretization < 1:
            raise ValueError(f"lgreco: discretization={self.discretization} must be at least 1")
        if self.choices is not None and not self.choices:
            raise ValueError("lgreco: there are no choices; leave choices out for those around the reference")
        self.specs()

    def specs(self) -> list[str]:
        """What a layer may get; the reference is always among it."""
        found = search_space(self.start) if self.choices is None else [str(compression(c)) for c in self.choices]
        aims = self.reference.specs() if isinstance(self.reference, Policy) else [str(self._default)]
        return list(dict.fromkeys([*found, *map(str, map(compression, aims))]))

    @property
    def _default(self) -> Compression:
        return as_choice(self.start)

    @property
    def start(self) -> Compression:
        return self.reference.start if isinstance(self.reference, Policy) else compression(self.reference)

    def decide(self, gradients: Mapping[str, Tensor], *, step: int) -> Plan:
        choices = self.specs()
        aim: list[str] | None = None
        if isinstance(self.reference, Policy):
            specs = self.reference.decide(gradients, step=step).specs()
            aim = [str(compression(specs[name])) for name in gradients]
            choices = list(dict.fromkeys([*choices, *aim]))
        table = error_table(gradients, choices)
        chosen, budget = self._solved(table, [table.column(c) for c in aim or [str(self._default)] * len(gradients)])
        reference = None if aim is not None else self._default
        return planned(table, chosen, self, step=step, reference=reference, budget=budget)

    def warm_up(self) -> None:
        cost, weight = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.int32)
        kernels.cheapest_within(cost, weight, 1)

    def state_dict(self) -> dict[str, object]:
        return self.reference.state_dict() if isinstance(self.reference, Policy) else {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        if isinstance(self.reference, Policy):
            self.reference.load_state_dict(state)
        else:
            super().load_state_dict(state)

    def _solved(self, table: ErrorTable, reference: Sequence[int]) -> tuple[Sequence[int], float]:
        errors = table.errors if self.metric == "l2" else table.errors**2
        sizes = table.sizes
        if self.seconds_per_byte is not None:
            missing = [name for name in table.layers if name not in self.seconds_per_byte]
            if missing:
                raise ValueError(f"seconds_per_byte lacks {', '.join(missing[:3])}")
            sizes = sizes * np.array([self.seconds_per_byte[name] for name in table.layers])[:, None]
        rows = np.arange(len(errors))
        budget = self.alpha * math.fsum(errors[rows, reference])
        least = math.fsum(errors.min(axis=1))
        if least > budget:
            log.warning(
                "lgreco: %g times the reference's error cannot be reached with these choices; taking the least, %g "
                "times",
                self.alpha, least / (budget / self.alpha) if budget else math.inf,
            )  # fmt: skip
            budget = least
        chosen = solve(sizes, errors, budget, self.discretization)
        # What rounding lost must not make it worse than what is known.
        if self.alpha >= 1 and math.fsum(sizes[rows, chosen]) > math.fsum(sizes[rows, reference]):
            return list(reference), budget
        return chosen.tolist(), budget


def solve(sizes: ArrayLike, errors: ArrayLike, budget: float, discretization: int = 10_000) -> NDArray[np.intp]:
    """The choice for every layer that makes the total size smallest while the total error stays within the budget.

    Algorithm 1 of the paper, a knapsack by dynamic programming: O(layers · choices · discretization) time,
    O(layers · discretization) memory. Errors are rounded up to multiples of budget / discretization, so that their true
    sum never exceeds the budget; what rounding left over is then spent, largest saving first. The total size is no
    more than the best possible for a budget smaller by layers / discretization of it.

    Args:
        sizes: (layers, choices), what each choice costs: bytes, or seconds. inf: not allowed.
        errors: (layers, choices), what each does to a layer; adds up over layers. inf: not allowed.
        budget: what the errors may add up to.
        discretization: steps that the budget is cut into.

    Returns:
        (layers,): the index of each layer's choice. Of choices that are as small, the one with the smaller error.

    Raises:
        ValueError: no choices, shapes that differ, NaN or negative numbers; or a budget below the least possible error.

    Example:
        >>> solve(sizes=[[8, 4, 2], [80, 40, 20]], errors=[[0, 1, 2], [0, 1, 2]], budget=3)
        array([1, 2])
    """
    size, error = np.asarray(sizes, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    _check(size, error, budget, discretization)
    allowed = np.isfinite(size) & np.isfinite(error)
    size, error = np.where(allowed, size, np.inf), np.where(allowed, error, np.inf)
    chosen = error.argmin(axis=1)
    layers = np.arange(len(size))
    least = math.fsum(error[layers, chosen])
    if not least <= budget:
        raise ValueError(
            f"no choice of every layer keeps the error within {budget:g}: the least possible is {least:g}"
            if math.isfinite(least)
            else f"nothing is allowed for layers {np.flatnonzero(~allowed.any(axis=1)).tolist()}"
        )
    order = np.lexsort((size, error), axis=1)
    by_error = np.take_along_axis(error, order, axis=1)
    cost = np.take_along_axis(size, order, axis=1)
    pays = np.ones_like(cost, dtype=bool)  # smaller than all that have less error
    pays[:, 1:] = cost[:, 1:] < np.minimum.accumulate(cost, axis=1)[:, :-1]
    cost[~pays] = np.inf
    found = kernels.cheapest_within(
        torch.from_numpy(cost), torch.from_numpy(_weights(by_error, budget, discretization)), discretization
    ).numpy()
    if (found >= 0).all():
        # Rounded up, the errors may not fit where they do as they are: then go on from the least.
        dynamic = order[layers, found]
        if math.fsum(error[layers, dynamic]) <= budget:
            chosen = dynamic
    return _spend(size, error, budget, chosen)


def _check(size: NDArray[np.float64], error: NDArray[np.float64], budget: float, discretization: int) -> None:
    if size.ndim != 2 or size.shape != error.shape:
        raise ValueError(f"sizes {size.shape} and errors {error.shape} must have one shape, (layers, choices)")
    if not size.shape[1]:
        raise ValueError("there are no choices")
    for name, values in (("sizes", size), ("errors", error)):
        if not (values >= 0).all():
            raise ValueError(f"{name} must not be negative or NaN")
    if not budget >= 0:
        raise ValueError(f"budget={budget} must not be negative")
    if discretization < 1:
        raise ValueError(f"discretization={discretization} must be at least 1")


def _weights(error: NDArray[np.float64], budget: float, discretization: int) -> NDArray[np.int32]:
    """Errors in steps of the budget, rounded up; more than the budget is one step more than there are."""
    steps = np.full(error.shape, float(discretization + 1))
    if math.isinf(budget):
        steps[np.isfinite(error)] = 0.0
    elif budget > 0:
        fits = error <= budget
        steps[fits] = np.ceil(error[fits] / budget * discretization)
    else:
        steps[error == 0] = 0.0
    return steps.astype(np.int32)


def _spend(
    size: NDArray[np.float64], error: NDArray[np.float64], budget: float, chosen: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Take the largest saving that what is left of the budget allows, until there is none."""
    chosen = chosen.copy()
    layers = np.arange(len(size))
    while len(size):
        left = budget - math.fsum(error[layers, chosen])
        saving = size[layers, chosen][:, None] - size
        saving[~(error - error[layers, chosen][:, None] <= left)] = 0.0
        layer, choice = np.unravel_index(saving.argmax(), saving.shape)
        if saving[layer, choice] <= 0:
            break
        taken = chosen.copy()
        taken[layer] = choice
        if math.fsum(error[layers, taken]) > budget:  # by the last bit of a difference
            break
        chosen = taken
    return chosen
