"""Find the fastest way to train a model within a memory budget, for ``narrowband memory --budget``.

Every kind of offer (:mod:`.offers`) is measured once, in steps in which all units of the model use it: bytes and
seconds by unit, and the memory that such a step needs temporarily and at the loss, beyond what is kept. A knapsack then
finds the fastest offers with which a step stays within the room for it. Parameters, the optimizer's state, residuals of
gradient compression and inputs are added to that. The choice is measured, too. If it takes more than the budget, the
next choice has that much less room.

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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowband.activations import OPERATORS, ActivationPolicy, Saved, compress_activations
from narrowband.bench.devices import default_device, moved, wait_for
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
from narrowband.bench.peaks import footprint, most_alive
from narrowband.bench.reruns import Reruns
from narrowband.bench.subjects import Subject
from narrowband.bench.ways import PLAIN, Way, gradients_of, optimizer_of, result_of, scalar_of
from narrowband.feedback import Feedback, Layout, compression

__all__ = ["Fit", "Job", "fit", "fit_shares", "residual_nbytes", "tensors_of"]

#: Steps of every kind of offer: untimed ones, and timed ones, of which the shortest counts.
_WARM_UP, _TIMED = 2, 3
#: The units' times are scaled to the measured step by a factor that is clamped to this range.
_SCALES = (0.3, 3.0)
#: If recomputation changes gradients by more than this share, it does not compute the same as the first run.
_SAME = 1e-3
#: Largest gradient error of a kind that is always offered: this share, or this many times the error with 8 bits.
_EXACT, _NEAR = 0.05, 1.5
#: How often a choice is made again with less room, after it took more memory than predicted.
_TRIES = 4
#: Number of elements from which compress_gradients compresses a parameter's gradient.
_COMPRESSED = 1024


# ---- measurements ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A training job to find a policy for.

    Attributes:
        build: makes the model and its inputs. It must be a function of a module, or a partial of one, because other
            processes call it, too.
        amp: whether forward runs under bfloat16 autocast.
        optimizer: adamw, sgd, adafactor or adamw-8bit.
        codec: spec of the gradient compression, whose residuals take memory; None: gradients are not compressed.
        device: cpu or cuda; CUDA where there is any, if not given.
        seed: of parameters and data.
        alone: whether to measure the memory of a process that only trains with the choice.
    """

    build: Callable[[], Subject]
    amp: bool = False
    optimizer: str = "adamw"
    codec: str | None = None
    device: str | None = None
    seed: int = 0
    alone: bool = True


@dataclass(frozen=True)
class _Step:
    """The measurements of a step under a policy.

    Attributes:
        saved: what the step's forward saved.
        seconds: time of the shortest step.
        alive: two peaks of bytes of tensors, above those that exist throughout: until the gradient of the model's
            result exists, and from then on.
        gradients: gradients of all parameters, flat.
    """

    saved: Saved
    seconds: float
    alive: tuple[int, int]
    gradients: Tensor


@dataclass(frozen=True)
class _Objection:
    """The reason why modules cannot be recomputed.

    Attributes:
        kind: of the reason. Modules with the same kind share a sentence.
        text: the reason, as the end of a sentence.
    """

    kind: str
    text: str


class _Bench:
    """A model on which policies are tried."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        model, inputs = job.build()
        self.device = job.device or default_device()
        self.model = model.to(self.device).train()
        self.inputs = tuple(moved(x, self.device) for x in inputs)
        self._job = job

    def step(self, policy: ActivationPolicy) -> _Step:
        """Train under a policy for some steps."""
        counting = compress_activations(self.model, policy=policy)
        context = contextlib.nullcontext() if policy.is_off else counting
        for _ in range(_WARM_UP):
            self._step(context)
        seconds = min(self._step(context) for _ in range(_TIMED))
        loss, backward = most_alive(lambda mark: self._step(context, mark), self.device)
        with counting as saved:
            output = self._forward()
        torch.autograd.backward(scalar_of(output))
        found = gradients_of(self.model)
        self.model.zero_grad()
        return _Step(saved, seconds, (loss, backward), found)

    def gradients(self) -> Tensor:
        """Return the gradients of all parameters, flat, in a plain step."""
        torch.autograd.backward(scalar_of(self._forward()))
        found = gradients_of(self.model)
        self.model.zero_grad()
        return found

    def objection(
        self, policy: ActivationPolicy, names: Iterable[str], *, exact: bool, wanted: Tensor | None
    ) -> _Objection | None:
        """Try in one step whether modules can be recomputed under a policy; return why not, or None if they can.

        Args:
            policy: a policy that recomputes the modules.
            names: names of the modules.
            exact: whether inputs are exact, so that the second run should give the same results as the first.
            wanted: exact gradients to compare with; None: gradients are not compared.
        """
        reruns = Reruns(self.model, names, most=_SAME)
        try:
            with reruns.watched():
                with compress_activations(self.model, policy=policy):
                    output = self._forward()
                reruns.forward_is_done()
                torch.autograd.backward(scalar_of(output))
            found = gradients_of(self.model)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model that is called twice may raise anything
            return _Objection(type(error).__name__, _first_line(error))
        finally:
            self.model.zero_grad()
        if not exact:
            return None
        text = reruns.objection
        if text is None and wanted is not None and not _off(found, wanted) <= _SAME:  # NaN, too
            text = "gradients are others than without it"
        return None if text is None else _Objection(text, text)

    def forward_seconds(self, names: Iterable[str]) -> dict[str, float]:
        """Return the seconds that the forward of each of these modules takes."""
        found = dict.fromkeys(names, 0.0)
        begun: dict[str, float] = {}

        def watch(name: str, *, ends: bool) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                wait_for(self.device)
                now = time.perf_counter()
                if ends:
                    found[name] += now - begun[name]
                begun[name] = now

            return hook

        with contextlib.ExitStack() as stack:
            for name in found:
                module = self.model.get_submodule(name)
                stack.callback(module.register_forward_pre_hook(watch(name, ends=False)).remove)
                stack.callback(module.register_forward_hook(watch(name, ends=True)).remove)
            self._forward()
        return found

    def _step(self, context: contextlib.AbstractContextManager[Any], mark: Callable[[], None] | None = None) -> float:
        begin = time.perf_counter()
        with context:
            output = self._forward()
        if mark is not None:
            result_of(output).register_hook(lambda _: mark())  # type: ignore[no-untyped-call]
        torch.autograd.backward(scalar_of(output))
        wait_for(self.device)
        taken = time.perf_counter() - begin
        self.model.zero_grad()
        return taken

    def _forward(self) -> Any:
        torch.manual_seed(self._job.seed)  # dropout leaves out the same elements with every policy
        with torch.autocast(self.device, torch.bfloat16, enabled=self._job.amp):
            return self.model(*self.inputs)


def _first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _off(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the gradients' error relative to the norm of exact ones."""
    difference = (found - exact).norm()
    return float(difference / exact.norm()) if difference else 0.0  # of zeros, too


def tensors_of(model: nn.Module, inputs: Iterable[Any], optimizer: str, codec: str | None = None) -> dict[str, int]:
    """Return the bytes that training holds throughout: parameters, buffers, gradients, optimizer, residuals, inputs.

    Args:
        model: the model.
        inputs: inputs of its forward; tensors inside containers count, too.
        optimizer: adamw, sgd, adafactor or adamw-8bit.
        codec: spec of the gradient compression; None: gradients are not compressed.

    Raises:
        ValueError: there is no such optimizer or codec.

    Example:
        >>> tensors_of(nn.Linear(100, 100), (torch.zeros(8, 100),), "adamw", "topk:density=0.01+ef")
        {'parameters': 40400, 'buffers': 0, 'gradients': 40400, 'optimizer': 80808, 'residuals': 40000, 'inputs': 3200}
    """
    own = list(model.parameters())
    return {
        "parameters": sum(x.nbytes for x in own),
        "buffers": sum(x.nbytes for x in model.buffers()),
        "gradients": sum(x.nbytes for x in own if x.requires_grad),
        "optimizer": _state_nbytes(own, optimizer),
        "residuals": residual_nbytes(model, codec),
        "inputs": sum(x.nbytes for x in tree_leaves(list(inputs)) if isinstance(x, Tensor)),
    }


#: Prefix of the names of an 8-bit optimizer's tables of code values, which all parameters share.
_SHARED = "qmap"


def _state_nbytes(parameters: Sequence[Tensor], optimizer: str) -> int:
    """Return the bytes that an optimizer keeps for the parameters, without the parameters themselves."""
    total = 0
    for shape, dtype in ((p.shape, p.dtype) for p in parameters if p.requires_grad):
        p = nn.Parameter(torch.zeros(shape, dtype=dtype))
        p.grad = torch.zeros_like(p)
        made = optimizer_of(optimizer, [p])
        made.step()
        kept = ((name, x) for state in made.state.values() for name, x in state.items() if isinstance(x, Tensor))
        total += sum(x.nbytes for name, x in kept if not name.startswith(_SHARED))
    return total


def residual_nbytes(model: nn.Module, codec: str | None) -> int:
    """Return the bytes of residuals that :func:`~narrowband.gradients.compress_gradients` keeps with a spec.

    It compresses tensors of two or more dimensions with 1,024 elements or more.

    Raises:
        ValueError: there is no such spec.
    """
    chosen = None if codec is None else compression(codec)
    state = None if chosen is None else chosen.new_feedback()
    if chosen is None or state is None:
        return 0
    there = {name: p for name, p in model.named_parameters() if p.dim() > 1 and p.numel() >= _COMPRESSED}
    cpu = torch.device("cpu")
    state.reserve([Layout(name, chosen.codec, p.shape, cpu) for name, p in there.items()])
    if state.needs_learning_rates:
        state.set_learning_rates(dict.fromkeys(there, 1.0))
    if isinstance(state, Feedback):
        for name, p in there.items():
            x = torch.linspace(-1.0, 1.0, p.numel())
            _, payload = state.encode(name, x, chosen.codec, shape=p.shape, seed=0)
            state.commit(name, x, chosen.codec, payload, shape=p.shape, seed=0)
    return int(state.nbytes)


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
        self.bench = _Bench(job)
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
        if not (off := _off(self.bench.gradients(), self.plain.gradients)) <= _SAME:
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
            self.notes.append(f"Not every time can units be {kind.name}, which is not offered: {_first_line(error)}")
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
        objections: dict[_Objection, list[str]] = {}
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

    def _at_fault(self, kind: Kind, those: Sequence[int]) -> dict[int, _Objection]:
        """Return which of these units cannot be recomputed, and why."""
        policy = self.policy(self._where(kind, [at in those for at in range(len(self.units))]))
        names = [kind.module(self.units[at]) for at in those]
        objection = self.bench.objection(policy, names, exact=kind.inputs is None, wanted=self._repeats)
        if objection is None:
            return {}
        half = len(those) // 2
        found = self._at_fault(kind, those[:half]) | self._at_fault(kind, those[half:]) if half else {}
        return found or dict.fromkeys(those, objection)  # each half can be recomputed, but not both together

    def _take(self, kind: Kind, costs: Sequence[Offer], kinds: Sequence[Kind], step: _Step) -> None:
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

    def off(self, step: _Step) -> float:
        """Return how far a step's gradients are from exact ones, relative to the norm of these."""
        return _off(step.gradients, self.plain.gradients)

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

    def _fit(self, chosen: Sequence[Offer], step: _Step, budget: int) -> Fit:
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
