"""Find the fastest way to train a model within a memory budget, for ``narrowband memory --budget``.

Every kind of offer (:mod:`.offers`) is measured once (:mod:`.trials`), in steps in which all units of the model use it:
bytes and seconds by unit, and the memory that such a step needs temporarily and at the loss, beyond what is kept. A
knapsack then finds the fastest offers with which a step stays within the room for it. Parameters, the optimizer's
state, residuals of gradient compression and inputs are added to that (:mod:`.held`). The choice is measured, too. If it
takes more than the budget, the next choice has that much less room.

The budget counts bytes of tensors, as :func:`torch.cuda.max_memory_allocated` does. A process on the CPU takes more
memory, because of malloc; that number is reported, too.

Gradients are exact if every unit is kept as it is, or recomputed from exact inputs. Kinds whose gradients are much less
exact than with 8 bits, as often with 4 bits, are offered only if a budget cannot be met otherwise.

Before recomputation is measured, one step tests whether all units can be recomputed. If it fails, halves of the units
are tested, and halves of these, until every unit at fault is found. Recomputation is offered to all others.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowband.activations import OPERATORS, ActivationPolicy, Saved
from narrowband.bench.held import tensors_of
from narrowband.bench.offers import (
    AGAIN,
    AS_IT_IS,
    EIGHT,
    FOUR,
    WORTH_A_LOOK,
    Kind,
    Offer,
    Unit,
    alive,
    cheapest,
    smallest,
    units_of,
)
from narrowband.bench.patterns import compact, globbed, numberless
from narrowband.bench.peaks import footprint
from narrowband.bench.trials import SAME, Bench, Job, Objection, Step, first_line, gradient_error
from narrowband.bench.ways import PLAIN, Way

__all__ = ["Fit", "fit", "fit_shares"]

#: The units' times are scaled to the measured step by a factor that is clamped to this range.
_SCALES = (0.3, 3.0)
#: Largest gradient error of a kind that is always offered: this share, or this many times the error with 8 bits.
_EXACT, _NEAR = 0.05, 1.5
#: How often a choice is made again with less room, after it took more memory than predicted.
_TRIES = 4


# ---- the offers ------------------------------------------------------------------------------------------------------


class _Survey:
    """Measure all offers for a model.

    Args:
        job: the job to train.
        say: called with what is being measured, in words.

    Attributes:
        bench: the model on which offers were measured.
        plain: measurements of the plain step.
        units: units of the model.
        offers: the offers of each unit.
        gradients: bytes of each unit's gradients.
        notes: sentences about what cannot be offered, to which units, and why.
    """

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self.bench = Bench(job)
        self.notes: list[str] = []
        say("a step as it is")
        self.plain = self.bench.step(PLAIN)
        kept = {name: saved.raw_bytes for name, saved in self.plain.saved.by_module.items() if saved.raw_bytes}
        kept.pop("(outside)", None)  # no policy changes what is saved outside of modules
        self.units = units_of(self.bench.model, kept)
        if not self.units:
            raise ValueError(
                "no module of this model keeps a tensor for backward, so there is nothing to compress, and no policy "
                "changes what training takes; narrowband memory without --budget says how much that is"
            )
        self.gradients = [0] * len(self.units)
        for name, parameter in self.bench.model.named_parameters():
            if parameter.requires_grad:
                of = name.rpartition(".")[0]
                # Modules that save nothing, such as an embedding, belong to the first unit, whose gradients come last.
                at = next((at for at, unit in enumerate(self.units) if unit.has(of)), 0)
                self.gradients[at] += parameter.nbytes
        #: Modules that cannot be recomputed, with the bits of the inputs; None: exact inputs, or any.
        self._refused: set[tuple[str, int | None]] = set()
        #: Exact gradients, if another step reproduces them.
        self._repeats: Tensor | None = self.plain.gradients
        if not (off := gradient_error(self.bench.gradients(), self.plain.gradients)) <= SAME:
            self._repeats = None
            self.notes.append(
                f"A second step of this model has other gradients than the first, off by {off:.1%}: how far they are "
                "off with a policy says little."
            )
        self.offers: list[list[Offer]] = [[] for _ in self.units]
        kinds = [AS_IT_IS] * len(self.units)
        self._take(AS_IT_IS, [Offer(AS_IT_IS, self._raw(unit)) for unit in self.units], kinds, self.plain)
        self._forward_s = self.bench.forward_seconds(
            dict.fromkeys(name for unit in self.units if unit.whole and unit.name for name in _recomputable(unit))
        )
        for kind in self._kinds():
            say(f"steps with everything {kind.name}")
            self._measure(kind)

    def _raw(self, unit: Unit) -> int:
        return sum(kept.raw_bytes for name, kept in self.plain.saved.by_module.items() if unit.has(name))

    def _kinds(self) -> Iterator[Kind]:
        yield from (EIGHT, FOUR)
        total = self.plain.saved.raw_bytes
        for name, kept in self.plain.saved.by_operator.items():
            if kept.raw_bytes > WORTH_A_LOOK * total and name in OPERATORS and name != "custom":
                yield Kind(f"in 8 bits but for {name}", 8, without=name)
        if self._forward_s:
            yield from AGAIN
        for part in dict.fromkeys(part for unit in self.units for part in unit.parts):
            yield Kind(f"in 8 bits with {part} recomputed", 8, again=part, inputs=8)

    def policy(self, kinds: Sequence[Kind]) -> ActivationPolicy:
        """Return the policy in which units have these kinds of offers."""
        rules: dict[str, Any] = {}
        for unit, kind in zip(self.units, kinds, strict=True):
            rules |= kind.rules(unit)
        return ActivationPolicy(bits="off", modules=rules)

    def _measure(self, kind: Kind) -> None:
        """Measure a kind of offer, and add it to the offers of all units that it fits."""
        if kind.again is not None:
            if kind != AGAIN[1]:  # for AGAIN[1], AGAIN[0] has found these units
                self._refuse(replace(kind, bits=None, inputs=None))
            if kind.inputs is not None:
                self._refuse(kind)
        kinds = self._where(kind, [self._offered(kind, unit) for unit in self.units])
        if kind not in kinds:
            return
        try:
            step = self.bench.step(self.policy(kinds))
        except Exception as error:
            if kind.again is None or isinstance(error, torch.OutOfMemoryError):
                raise
            self.bench.model.zero_grad()
            self.notes.append(f"Not every time can units be {kind.name}, which is not offered: {first_line(error)}")
            return
        costs = [self._cost(*each, step.saved) for each in zip(self.units, kinds, strict=True)]
        self._take(kind, costs, kinds, step)

    @staticmethod
    def _where(kind: Kind, has: Sequence[bool]) -> list[Kind]:
        """Return this kind for units that have it, and for the others the kind that is usual beside it."""
        usual = AS_IT_IS if kind.bits is None else EIGHT
        return [kind if own else usual for own in has]

    def _offered(self, kind: Kind, unit: Unit) -> bool:
        if not kind.fits(unit) or kind.again is None:
            return kind.fits(unit)
        module = kind.module(unit)
        return (module, None) not in self._refused and (module, kind.inputs) not in self._refused

    def _refuse(self, kind: Kind) -> None:
        """Find the units that cannot be recomputed with this kind, and note why."""
        objections: dict[Objection, list[str]] = {}
        while there := [at for at, unit in enumerate(self.units) if self._offered(kind, unit)]:
            found = self._at_fault(kind, there)
            if not found:
                break
            for at, objection in found.items():
                module = kind.module(self.units[at])
                self._refused.add((module, kind.inputs))
                first = next((other for other in objections if other.kind == objection.kind), objection)
                objections.setdefault(first, []).append(module)
        inputs = "" if kind.inputs is None else f" from inputs in {kind.inputs} bits"
        for objection, modules in objections.items():
            self.notes.append(
                f"Not offered recomputation{inputs}: {', '.join(globbed(modules))}, since {objection.text}"
                f"{'' if objection.text.endswith(('.', '!', '?')) else '.'}"
            )

    def _at_fault(self, kind: Kind, those: Sequence[int]) -> dict[int, Objection]:
        """Return which of these units cannot be recomputed, and why."""
        policy = self.policy(self._where(kind, [at in those for at in range(len(self.units))]))
        names = [kind.module(self.units[at]) for at in those]
        objection = self.bench.objection(policy, names, exact=kind.inputs is None, wanted=self._repeats)
        if objection is None:
            return {}
        half = len(those) // 2
        found = self._at_fault(kind, those[:half]) | self._at_fault(kind, those[half:]) if half else {}
        return found or dict.fromkeys(those, objection)  # each half can be recomputed, but not both together

    def _take(self, kind: Kind, costs: Sequence[Offer], kinds: Sequence[Kind], step: Step) -> None:
        total, extra = math.fsum(cost.seconds for cost in costs), step.seconds - self.plain.seconds
        scale = min(max(extra / total, _SCALES[0]), _SCALES[1]) if total > 0 else 1.0
        moment = step.alive[1] - alive(costs, self.gradients)
        loss = step.alive[0] - sum(cost.kept for cost in costs)
        alike: dict[tuple[str, int], list[float]] = {}  # blocks of the same shape take the same time, apart from noise
        for unit, cost in zip(self.units, costs, strict=True):
            alike.setdefault((numberless(unit.name), cost.kept), []).append(cost.seconds * scale)
        for unit, own, cost, has in zip(self.units, self.offers, costs, kinds, strict=True):
            if has == kind:
                seconds = alike[numberless(unit.name), cost.kept]
                mean = math.fsum(seconds) / len(seconds)
                own.append(replace(cost, moment=moment, seconds=mean, error=self.off(step), loss=loss))

    def off(self, step: Step) -> float:
        """Return how far a step's gradients are from exact ones, relative to the norm of these."""
        return gradient_error(step.gradients, self.plain.gradients)

    def _cost(self, unit: Unit, kind: Kind, saved: Saved) -> Offer:
        own = [kept for name, kept in saved.by_module.items() if unit.has(name)]
        kept, seconds, again = sum(each.kept_bytes for each in own), math.fsum(each.seconds for each in own), 0
        if kind.again is not None:
            module = kind.module(unit)
            seconds += self._forward_s[module]
            again = self._raw(Unit(module))
        return Offer(kind, kept, again, seconds=seconds)

    def named(self, offers: Sequence[Offer]) -> ActivationPolicy:
        """Return the policy of these offers. Units of one kind whose names differ only in numbers share a pattern."""
        modules = (name for name, _ in self.bench.model.named_modules())
        return compact(self.policy([offer.kind for offer in offers]), modules)


def _recomputable(unit: Unit) -> list[str]:
    return [unit.name, *(f"{unit.name}.{part}" for part in unit.parts)]


# ---- the search ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The fastest way to train within a budget.

    Attributes:
        policy: policy for activations that are kept.
        reached: whether training is within the budget; if not, the policy is the one that takes the least memory.
        tensors: bytes of parameters, buffers, gradients, optimizer, residuals and inputs.
        kept: bytes of activations between forward and backward.
        predicted: bytes of all tensors that are alive at once.
        measured: the same, measured.
        plain: the same for training without the policy, measured.
        process: bytes of a process that trains with the policy; None on CUDA, if the job does not ask for it, or if the
            system does not report it.
        predicted_ratio: the predicted step over the plain one.
        ratio: the measured step over the plain one.
        gradient_error: norm of the difference from exact gradients over the norm of these.
        choices: unit → kind of offer, in words.
        notes: sentences about what could not be offered, to which units, and why.
    """

    policy: ActivationPolicy
    reached: bool
    tensors: dict[str, int]
    kept: int
    predicted: int
    measured: int
    plain: int
    process: int | None
    predicted_ratio: float
    ratio: float
    gradient_error: float
    choices: dict[str, str]
    notes: list[str]


class _Search:
    """Choose offers for a budget, measure the choice, and correct it."""

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._survey = survey = _Survey(job, say)
        bench = survey.bench
        self._tensors = tensors_of(bench.model, bench.inputs, job.optimizer, job.codec)
        #: Bytes held throughout, without gradients, which exist only during a step.
        self.throughout = sum(self._tensors.values()) - self._tensors["gradients"]
        self.plain = self.throughout + max(survey.plain.alive)

    def within(self, budget: int) -> Fit:
        survey, room = self._survey, budget - self.throughout
        as_it_is = [offers[0] for offers in survey.offers]
        if self.plain <= budget:
            return self._fit(as_it_is, survey.plain, budget)
        for _ in range(_TRIES):
            chosen = self._chosen(room)
            if chosen is None:
                break
            self._say("the choice")
            step = survey.bench.step(survey.named(chosen))
            over = self.throughout + max(step.alive) - budget
            if over <= 0:
                return self._fit(chosen, step, budget)
            room -= over
        chosen = smallest(survey.offers, survey.gradients)
        self._say("the least")
        return self._fit(chosen, survey.bench.step(survey.named(chosen)), budget)

    def _chosen(self, room: int) -> list[Offer] | None:
        """Choose among kinds with gradients about as exact as with 8 bits or, if none fit, among all kinds."""
        offers = self._survey.offers
        eight = max(offer.error for own in offers for offer in own if offer.kind == EIGHT)
        for most in (max(_EXACT, _NEAR * eight), math.inf):
            there = [[offer for offer in own if offer.error <= most] for own in offers]
            found = cheapest(there, room, self._survey.gradients)
            if found is not None:
                return found
        return None

    def _fit(self, chosen: Sequence[Offer], step: Step, budget: int) -> Fit:
        survey, measured = self._survey, self.throughout + max(step.alive)
        policy = survey.named(chosen)
        self._say("a step as it is, again")
        plain_s = survey.bench.step(PLAIN).seconds  # right after the choice's step, since other load may vary
        return Fit(
            policy=policy,
            reached=measured <= budget,
            tensors=self._tensors,
            kept=step.saved.kept_bytes,
            predicted=self.throughout + alive(chosen, survey.gradients),
            measured=measured,
            plain=self.plain,
            process=self._process(policy),
            predicted_ratio=1.0 + math.fsum(offer.seconds for offer in chosen) / survey.plain.seconds,
            ratio=step.seconds / plain_s,
            gradient_error=survey.off(step),
            choices={unit.name: offer.kind.name for unit, offer in zip(survey.units, chosen, strict=True)},
            notes=survey.notes,
        )

    def _process(self, policy: ActivationPolicy) -> int | None:
        job = self._job
        if self._survey.bench.device != "cpu" or not job.alone:
            return None
        self._say("a process that trains so")
        with contextlib.suppress(BrokenProcessPool):  # killed, because memory ran out
            return footprint(Way("", policy, amp=job.amp), job.build, seed=job.seed, optimizer=job.optimizer)
        return None


def fit(job: Job, budget: int, on_event: Callable[[str], None] | None = None) -> Fit:
    """Find the policy with which training holds at most ``budget`` bytes of tensors and takes the least time.

    Args:
        job: the job to train.
        budget: bytes of parameters, gradients, the optimizer's state, residuals, inputs, activations, and temporary
            memory of operators.
        on_event: called with what is being measured, in words.

    Raises:
        ValueError: there is no such optimizer or codec, or the model returns nothing that needs gradients.
    """
    return _Search(job, on_event or (lambda _: None)).within(budget)


def fit_shares(job: Job, shares: Sequence[float]) -> list[Fit]:
    """Find policies (see :func:`fit`) for several budgets.

    Each budget has room for a share of what plain training holds beside parameters, the optimizer's state and inputs.
    """
    search = _Search(job, lambda _: None)
    return [
        search.within(search.throughout + math.floor(share * (search.plain - search.throughout))) for share in shares
    ]
