"""L-GreCo: choose the compression of every layer such that the error of the whole model stays within a budget.

Source: Alimohammadi et al., arXiv 2210.17357.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

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
    from narrowband.adapt.traffic import Traffic

__all__ = ["LGreCo", "lower_bound", "solve"]

log = logging.getLogger(__name__)

#: The least price of a layer's byte, as a share of the highest price. Because of noise, a regression finds bytes that
#: cost nothing, and without this limit such a layer would be sent in full, whether or not that improves anything.
_LEAST_PRICE = 0.01


@dataclass
class LGreCo(Policy):
    """Chooses a spec for every layer: fewest bytes, or seconds, at no more error than a spec that is known to be safe.

    A decision has three steps. It computes the error of every choice for every layer, on the gradients since the last
    decision. It sets the budget to the sum of the reference's errors over all layers. Then :func:`solve` chooses.

    Args:
        reference: the spec that is known to be safe for all layers; or a policy, such as
            :class:`~narrowband.adapt.Accordion`, whose plan sets the budget anew at every decision.
        choices: specs that a layer may get, of one family or several, ``none`` among them if that is allowed; by
            default those around the reference that the paper searches (:func:`~narrowband.adapt.search_space`).
        every: steps between decisions; the steps of an epoch are usual.
        warmup_steps: steps before the first decision, which are not compressed.
        last: number of steps before a decision whose gradients are used, such as the 10 of the authors' code; 0: all
            steps since the decision before, as in the paper. Ten of a hundred lost 7.6 % ± 3.2 % less with low rank
            (``python -m reproduce.candidates``).
        alpha: the budget, as a multiple of the reference's error.
        metric: what is added up over layers: L2 norms of errors, as in the paper, or their squares.
        objective: what is minimized: ``bytes``, or ``time``.
        seconds_per_byte: for ``time``, layer → seconds that a byte of it takes. :func:`~narrowband.measure_times`
            measures them; :func:`~narrowband.adapt.bucket_priority` returns the paper's heuristic (appendix A). A byte
            counts at least a hundredth of the most expensive one; if all are zero, all count the same.
        discretization: number of steps that the budget is divided into.

    Raises:
        ValueError: a spec or a number is not valid, or ``objective`` and ``seconds_per_byte`` do not fit together.
        TypeError: ``choices`` is a single spec.

    Example:
        >>> policy = LGreCo(reference="powersgd:rank=4", every=500)
        >>> handle = nb.compress_gradients(model, policy)
    """

    reference: str | Policy
    choices: Sequence[str] | None = None
    every: int = 500
    warmup_steps: int = 0
    last: int = 0
    alpha: float = 1.0
    metric: Literal["l2", "l2_squared"] = "l2"
    objective: Literal["bytes", "time"] = "bytes"
    seconds_per_byte: Mapping[str, float] | None = field(default=None, repr=False)
    discretization: int = 10_000
    name: ClassVar[str] = "lgreco"

    def __post_init__(self) -> None:
        self._check_times()
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lgreco: alpha={self.alpha} must be a finite number above 0")
        if self.metric not in ("l2", "l2_squared"):
            raise ValueError(f"lgreco: metric={self.metric!r} is neither l2 nor l2_squared")
        if self.objective not in ("bytes", "time"):
            raise ValueError(f"lgreco: objective={self.objective!r} is neither bytes nor time")
        if (self.objective == "time") != (self.seconds_per_byte is not None):
            raise ValueError(
                "lgreco: give objective='time' and seconds_per_byte=… together, or neither; nb.measure_times(…) "
                "measures seconds_per_byte"
            )
        if self.discretization < 1:
            raise ValueError(f"lgreco: discretization={self.discretization} must be at least 1")
        if isinstance(self.choices, str):
            raise TypeError(f"lgreco: choices must be a list of specs, such as [{self.choices!r}], not a single one")
        if self.choices is not None and not self.choices:
            raise ValueError("lgreco: choices is empty; leave it out for the choices around the reference")
        self.specs()

    def specs(self) -> list[str]:
        """Return the specs that a layer may get, which always include the reference."""
        found = search_space(self.start) if self.choices is None else [str(compression(c)) for c in self.choices]
        aims = self.reference.specs() if isinstance(self.reference, Policy) else [str(self._default)]
        return list(dict.fromkeys([*found, *map(str, map(compression, aims))]))

    @property
    def _default(self) -> Compression:
        return as_choice(self.start)

    @property
    def start(self) -> Compression:
        return self.reference.start if isinstance(self.reference, Policy) else compression(self.reference)

    def decide(self, gradients: Mapping[str, Tensor], *, step: int, traffic: Traffic) -> Plan:
        self.check(gradients)
        choices = self.specs()
        aim: list[str] | None = None
        if isinstance(self.reference, Policy):
            specs = self.reference.decide(gradients, step=step, traffic=traffic).specs()
            aim = [str(compression(specs[name])) for name in gradients]
            choices = list(dict.fromkeys([*choices, *aim]))
        table = error_table(gradients, choices, traffic=traffic)
        aims = [table.column(c) for c in aim or [str(self._default)] * len(gradients)]
        chosen, budget = self._solved(table, aims, traffic)
        reference = None if aim is not None else self._default
        return planned(table, chosen, self, step=step, traffic=traffic, reference=reference, budget=budget)

    def check(self, layers: Collection[str]) -> None:
        if isinstance(self.reference, Policy):
            self.reference.check(layers)
        times = self.seconds_per_byte
        missing = [] if times is None else [name for name in layers if name not in times]
        if missing:
            raise ValueError(
                f"lgreco: seconds_per_byte has no time for {len(missing)} of {len(layers)} layers: "
                f"{', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}; nb.measure_times(…) with this model and "
                "the same min_numel measures all of them"
            )

    def warm_up(self) -> None:
        cost = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        weight = torch.ones(1, 1, dtype=torch.int32, device="cpu")
        kernels.cheapest_within(cost, weight, 1)

    def state_dict(self) -> dict[str, object]:
        return self.reference.state_dict() if isinstance(self.reference, Policy) else {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        if isinstance(self.reference, Policy):
            self.reference.load_state_dict(state)
        else:
            super().load_state_dict(state)

    def _solved(self, table: ErrorTable, reference: Sequence[int], traffic: Traffic) -> tuple[Sequence[int], float]:
        errors = table.errors if self.metric == "l2" else table.errors**2
        price = self._price(table.layers)
        rows = np.arange(len(errors))
        budget = self.alpha * math.fsum(errors[rows, reference])
        lowest = math.fsum(errors.min(axis=1))
        if lowest > budget:
            log.warning(
                "lgreco: no plan with these choices has an error of at most %g times the reference's; taking the plan "
                "with the least error, %g times the reference's",
                self.alpha, lowest / (budget / self.alpha) if budget else math.inf,
            )  # fmt: skip
            budget = lowest
        known = reference if self.alpha >= 1 else None

        def chosen_by(sizes: NDArray[np.float64]) -> list[int]:
            found = solve(sizes * price[:, None], errors, budget, self.discretization, known=known)
            return [int(at) for at in found]

        def total(columns: Sequence[int]) -> float:
            layers = [(table.choices[at], shape) for at, shape in zip(columns, table.shapes, strict=True)]
            return math.fsum(price * traffic.nbytes(layers))

        # A codec's collective depends on how many bytes all its layers have together, so a plan's sizes are known only
        # once it is made. ``least`` is a lower bound: all choices of all layers together, so that every codec has many
        # bytes. Sizes of each layer alone are an upper bound.
        pairs = [(choice, shape) for shape in table.shapes for choice in table.choices]
        least = np.array(traffic.nbytes(pairs), dtype=np.float64).reshape(errors.shape)
        chosen = chosen_by(least)
        if total(chosen) > math.fsum(price * least[rows, chosen]):
            alone = [traffic.nbytes([pair])[0] for pair in pairs]
            plans = [chosen, chosen_by(np.array(alone, dtype=np.float64).reshape(errors.shape))]
            chosen = min(plans if known is None else [*plans, list(known)], key=total)
        return chosen, budget

    def _price(self, layers: Sequence[str]) -> NDArray[np.float64]:
        """Return the price of a byte of each layer."""
        if self.seconds_per_byte is None:
            return np.ones(len(layers))
        price = np.array([self.seconds_per_byte[name] for name in layers])
        return np.maximum(price, _LEAST_PRICE * price.max()) if price.any() else np.ones(len(layers))


def solve(
    sizes: ArrayLike,
    errors: ArrayLike,
    budget: float,
    discretization: int = 10_000,
    *,
    known: Sequence[int] | None = None,
) -> NDArray[np.intp]:
    """Choose for every layer, such that the total size is smallest while the total error stays within the budget.

    This is a knapsack problem. It is solved in two ways, and the smaller result is taken:

    * Algorithm 1 of the paper, a dynamic program: O(layers · choices · discretization) time, O(layers · discretization)
      memory. The paper divides the whole budget into steps. Here the steps divide only the part of the budget above the
      sum of all layers' least errors. Errors above the least are rounded up to whole steps, so that their true sum
      never exceeds the budget.
    * Lagrangian relaxation: start with every layer's least error. Then take savings in order of error per byte,
      smallest first, which is optimal if layers may mix choices, and skip those that do not fit.

    The rest of the budget is then spent, largest saving first. The total size is at most the best possible for a budget
    whose part above the least errors is smaller by a share of (layers + 1) / discretization. It is also at most the
    Lagrangian bound, which is a lower bound for all choices, plus the largest difference in size between two choices of
    one layer.

    Args:
        sizes: (layers, choices), the cost of each choice, in bytes or seconds. inf: not allowed.
        errors: (layers, choices), the error of each choice, which adds up over layers. inf: not allowed.
        budget: limit of the sum of errors.
        discretization: number of steps that the budget above the least errors is divided into.
        known: a choice for every layer; the result is not larger than it, if it is within the budget.

    Returns:
        (layers,): the index of each layer's choice. Of results of equal size, the one with the smaller error.

    Raises:
        ValueError: there are no choices, shapes differ, a number is NaN or negative, or the budget is below the least
            possible error.

    Example:
        >>> solve(sizes=[[8, 4, 2], [80, 40, 20]], errors=[[0, 1, 2], [0, 1, 2]], budget=3)
        array([1, 2])
    """
    size, error, order = _prepared(sizes, errors, budget, discretization)
    layers = np.arange(len(size))
    first = order[:, 0]

    def fits(chosen: NDArray[np.intp]) -> bool:
        return math.fsum(error[layers, chosen]) <= budget

    def result(chosen: NDArray[np.intp]) -> tuple[float, float]:
        return math.fsum(size[layers, chosen]), math.fsum(error[layers, chosen])

    room = _left(budget, error[layers, first])
    program = next(filter(fits, _programs(size, error, room, order, discretization)), first)
    relaxed = next(filter(fits, [_relaxed(size, error, room, first)]), first)
    ended = [_spend(size, error, budget, chosen) for chosen in (program, relaxed)]
    if known is not None and fits(np.asarray(known)):
        ended.append(np.asarray(known, dtype=np.intp))
    return min(ended, key=result)


def lower_bound(sizes: ArrayLike, errors: ArrayLike, budget: float) -> float:
    """Return the Lagrangian bound: no choice within the budget has a smaller total size, and the best is close to it.

    It is the smallest size if one layer could mix two choices.

    Args:
        sizes, errors, budget: as :func:`solve`, which raises the same errors.

    Example:
        >>> lower_bound(sizes=[[8, 4, 2], [80, 40, 20]], errors=[[0, 1, 2], [0, 1, 2]], budget=2.5)
        26.0
    """
    size, error, order = _prepared(sizes, errors, budget, 1)
    layers = np.arange(len(size))
    first = order[:, 0]
    room = _left(budget, error[layers, first])
    total = math.fsum(size[layers, first])
    for edge in _hull(size, error, first):
        share = min(1.0, room / edge.error)
        total -= share * edge.saved
        room -= share * edge.error
        if share < 1.0:
            break
    return total


def _prepared(
    sizes: ArrayLike, errors: ArrayLike, budget: float, discretization: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.intp]]:
    """Check sizes and errors, and set both to inf where a choice is not allowed.

    Returns:
        Sizes, errors, and the indices that sort each layer's choices by error, then size.
    """
    size, error = np.asarray(sizes, dtype=np.float64), np.asarray(errors, dtype=np.float64)
    _check(size, error, budget, discretization)
    allowed = np.isfinite(size) & np.isfinite(error)
    size, error = np.where(allowed, size, np.inf), np.where(allowed, error, np.inf)
    least = math.fsum(error.min(axis=1))
    if not least <= budget:
        raise ValueError(
            f"no combination of choices keeps the error within {budget:g}: the least possible error is {least:g}"
            if math.isfinite(least)
            else f"no choice is allowed for layers {np.flatnonzero(~allowed.any(axis=1)).tolist()}"
        )
    return size, error, np.lexsort((size, error), axis=1)


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


class _Edge(NamedTuple):
    """A step from one choice of a layer to a smaller one with more error."""

    rate: float  # ``saved`` / ``error``
    saved: float  # reduction of the size
    error: float  # increase of the error
    layer: int
    start: int
    end: int


def _hull(size: NDArray[np.float64], error: NDArray[np.float64], first: NDArray[np.intp]) -> list[_Edge]:
    """Return the edges of all layers' lower convex hulls of (error, size) from ``first`` on, by descending rate.

    The rate falls from each edge of a layer to its next.
    """
    layers = np.arange(len(size))
    here = first.copy()
    found: list[_Edge] = []
    while len(size):
        saved = size[layers, here][:, None] - size
        added = error - error[layers, here][:, None]
        with np.errstate(over="ignore"):
            rate = np.divide(saved, added, out=np.zeros_like(saved), where=(saved > 0) & (added > 0))
        there = rate.argmax(axis=1)
        goes = np.flatnonzero(rate[layers, there] > 0)
        if not goes.size:
            break
        ways = goes, there[goes]
        columns = rate[ways], saved[ways], added[ways], goes, here[goes], there[goes]
        found += map(_Edge._make, zip(*(column.tolist() for column in columns), strict=True))
        here[goes] = there[goes]
    return sorted(found, key=lambda edge: -edge.rate)  # stable: keeps the order of a layer's edges


def _relaxed(
    size: NDArray[np.float64], error: NDArray[np.float64], room: float, first: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Choose by Lagrangian relaxation, with at most ``room`` more error than ``first``."""
    chosen = first.copy()
    room *= 1 - 2.0**-40  # a margin for rounding of sums
    for edge in _hull(size, error, first):
        if edge.error <= room and chosen[edge.layer] == edge.start:
            chosen[edge.layer] = edge.end
            room -= edge.error
    return chosen


def _programs(
    size: NDArray[np.float64],
    error: NDArray[np.float64],
    room: float,
    order: NDArray[np.intp],
    discretization: int,
) -> Iterator[NDArray[np.intp]]:
    """Yield the choice of the dynamic program, and then that with one step less; stop where nothing fits.

    The second is needed because of rounding in sums: the program's rounded errors may fit where the true ones do not.
    """
    layers = np.arange(len(size))
    cost, by_error = (np.take_along_axis(x, order, axis=1) for x in (size, error))
    pays = np.ones_like(cost, dtype=bool)  # choices that are smaller than all with less error
    pays[:, 1:] = cost[:, 1:] < np.minimum.accumulate(cost, axis=1)[:, :-1]
    cost[~pays] = np.inf
    weight = torch.from_numpy(_weights(by_error - by_error[:, :1], room, discretization))
    for steps in (discretization, discretization - 1):
        found = kernels.cheapest_within(torch.from_numpy(cost), weight, steps).numpy()
        if (found < 0).any():
            return
        yield order[layers, found]


def _weights(above: NDArray[np.float64], room: float, discretization: int) -> NDArray[np.int32]:
    """Convert errors above the least to steps of ``room``, rounded up; beyond ``room`` it is discretization + 1."""
    steps = np.full(above.shape, float(discretization + 1))
    if math.isinf(room):
        steps[np.isfinite(above)] = 0.0
    elif room > 0:
        fits = above <= room
        steps[fits] = np.ceil(above[fits] / room * discretization)
    else:
        steps[above == 0] = 0.0
    return steps.astype(np.int32)


def _left(budget: float, errors: NDArray[np.float64]) -> float:
    """Return what errors leave of the budget, as an exact sum that is rounded once."""
    return math.fsum([budget, *-errors]) if math.isfinite(budget) else budget


def _spend(
    size: NDArray[np.float64], error: NDArray[np.float64], budget: float, chosen: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Repeatedly take the largest saving that the rest of the budget allows, until there is none."""
    chosen = chosen.copy()
    layers = np.arange(len(size))
    while len(size):
        left = _left(budget, error[layers, chosen])
        saving = size[layers, chosen][:, None] - size
        saving[~(error - error[layers, chosen][:, None] <= left)] = 0.0
        layer, choice = np.unravel_index(saving.argmax(), saving.shape)
        if saving[layer, choice] <= 0:
            break
        taken = chosen.copy()
        taken[layer] = choice
        if math.fsum(error[layers, taken]) > budget:  # rounding of a difference
            break
        chosen = taken
    return chosen
