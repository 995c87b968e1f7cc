"""Rounds: replicas train by themselves for some steps, and then take the mean of their updates together.

An *update* is what a replica's optimizer changed since the last round. With parameters θ that all replicas had then, a
round is (Douillard et al. 2023, DiLoCo, arXiv 2311.08105, algorithm 1; an update is minus its outer gradient)::

    Δᵢ = θᵢ − θ                  on each replica, compressed with feedback
    θ ← outer(θ, mean of Δᵢ)     by default θ + mean

Adam divides by the second moment of the gradients that it sees. Here these are its own, whole and on time; behind a
compressed mean of gradients they would be sparse and late.

A replica keeps one copy of its parameters. Until the round it holds θ; in the round the copy and the parameters change
places, so that the parameters are θ again and the copy is the update, whose mean is then added. So an exchange that
breaks off leaves θ behind, on all replicas the same.

Buffers go the same way. They are copied right after a round, since forward passes change them before the first step;
whatever the copy is, as long as all replicas have the same, copy + mean of (buffer − copy) is the mean of the buffers.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowband import kernels
from narrowband.averaging.flat import empty_like, groups_of, in_memory_order, parts_of, real
from narrowband.averaging.handle import Handle
from narrowband.averaging.parameters import norms_of
from narrowband.averaging.settings import Settings
from narrowband.collectives import all_reduce_nbytes
from narrowband.kernels.compiling import announced
from narrowband.updates.length import MeasuredLength

if TYPE_CHECKING:
    from narrowband.averaging.agreement import Facts

__all__ = ["UpdateCompression", "said_of", "taken"]

log = logging.getLogger(__name__)

#: Optimizers that have a handle: two handles would both take the same update away.
taken: weakref.WeakSet[Optimizer] = weakref.WeakSet()

#: Whether replicas are equal is looked at once in so many optimizer steps: it takes a pass over the parameters.
CHECK_EVERY = 50


@dataclass(frozen=True, eq=False)
class _Group:
    """Tensors of one dtype that travel together.

    Attributes:
        names: of them.
        flat: end to end, the parameters of the last round; and in a round their updates, and then the means of these.
    """

    names: list[str]
    flat: Tensor


class UpdateCompression(Handle):
    """The handle of :func:`compress_updates`. ``repr(handle)`` says what it does and what it has saved.

    Its ``step`` and its statistics count rounds; ``stats().total.ratio`` is against an all-reduce in each round, and
    training sends ``every`` times less again.

    Attributes:
        every: optimizer steps from one round to the next.
        outer: the optimizer that goes along the mean of the updates, for schedules of its learning rate; None where a
            number was given.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        settings: Settings,
        group: dist.ProcessGroup,
        *,
        every: int,
        outer: float | Literal["auto"] | Callable[[list[nn.Parameter]], Optimizer],
        buffers: Literal["average", "keep"],
    ) -> None:
        self.every, self._buffers = every, buffers
        self._model, self._optimizers = model, [weakref.ref(each) for each in optimizers]
        self._stepped_by = ", ".join(type(each).__name__ for each in optimizers)
        self._steps = 0
        self._skipped = 0
        self._check_next = False
        self._anchored = False
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        moved: list[tuple[str, Tensor]] = [*parameters]
        if buffers == "average":
            # The core averages what requires gradients: these are stand-ins in the same memory.
            floating = [(name, b) for name, b in model.named_buffers() if b.is_floating_point()]
            moved += [(name, b.detach().requires_grad_()) for name, b in floating]
        self._measures = outer == "auto"
        self._length: float | MeasuredLength = outer if isinstance(outer, (int, float)) else 1.0
        self.outer: Optimizer | None = None
        self._outer_parameters: dict[str, nn.Parameter] = {}
        if callable(outer):
            self._outer_parameters = {name: nn.Parameter(p.detach()) for name, p in parameters}
            self.outer = outer(list(self._outer_parameters.values()))
        small = [*norms_of(model), *(x for _, x in moved[len(parameters) :])]
        super().__init__(moved, small, settings, group, set_up="compress_updates", step="round")
        with announced("updates", say=self._topology.everyone.rank == 0):
            _take_difference(*(torch.zeros(1, device=parameters[0][1].device) for _ in range(2)))

        tensors = self._tensors()
        named = {id(x): name for name, x in tensors.items()}
        self._groups = [
            _Group([named[id(x)] for x in together], empty_like(together)) for together in groups_of(tensors.values())
        ]
        if self._measures:
            self._length = MeasuredLength(self._parameter_parts(tensors), settings.seed, self.device)
        self._begin_with_the_first()
        self._anchor(parameters=False)
        self._hooks = [each.register_step_pre_hook(lambda *_: self._before_step()) for each in optimizers]
        self._hooks.append(optimizers[-1].register_step_post_hook(lambda *_: self._after_step()))
        self._stepped = False
        self._scaler: torch.amp.GradScaler | None = None
        taken.update(optimizers)

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _set_up_facts(self, call: str) -> Facts:
        outer = "auto" if self._measures else repr(self._length)
        if self.outer is not None:
            outer = said_of(self.outer)
        own = {"every": str(self.every), "outer": outer, "buffers": self._buffers, "optimizer": self._stepped_by}
        return {**super()._set_up_facts(call), **own}

    def _tensors(self) -> dict[str, Tensor]:
        """What is averaged, by name: parameters and buffers as they are now."""
        here = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        return {name: here[name] for name in self.layers.parameters.by_name}

    def _parameter_parts(self, tensors: Mapping[str, Tensor]) -> list[list[tuple[int, int]]]:
        """Where parameters lie in each group: (first element, number of elements)."""
        found = []
        for group in self._groups:
            numels = [real(tensors[name]).numel() for name in group.names]
            begins = itertools.accumulate(numels, initial=0)
            places = zip(group.names, begins, numels, strict=False)  # behind the last one begins nothing
            found.append([(begin, numel) for name, begin, numel in places if tensors[name].requires_grad])
        return found

    @torch.no_grad()
    def _begin_with_the_first(self) -> None:
        """All replicas get the parameters and buffers of the first, those that are not trained, too."""
        group = self.process_group
        if self.size == 1:
            return
        first = dist.get_global_rank(cast("dist.ProcessGroup", group), 0)
        everything: dict[int, Tensor] = {}
        for x in (*self._model.parameters(), *self._model.buffers()):
            everything.setdefault(id(x), x)
        for together in groups_of(everything.values()):
            flat = empty_like(together)
            for x, part in zip(together, parts_of(flat, together), strict=True):
                part.copy_(real(x.detach()))
            dist.broadcast(flat, first, group=group)
            for x, part in zip(together, parts_of(flat, together), strict=True):
                real(x.detach()).copy_(part)

    # ---- rounds ------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Optimizer steps since the last round."""
        return self._steps

    @property
    def skipped_updates(self) -> int:
        """How often this replica's update was not finite, so that it brought none."""
        return self._skipped

    @property
    def length(self) -> float:
        """How far the parameters go along the mean of the updates; 1 where an outer optimizer goes."""
        return self._length.value if isinstance(self._length, MeasuredLength) else self._length

    def _before_step(self) -> None:
        """Parameters are copied as late as can be, since a state may be loaded into the model until then."""
        if not self._anchored:
            self._anchor(parameters=True)

    def watch(self, grad_scaler: torch.amp.GradScaler) -> None:
        """Count the steps that it skips, too; see ``grad_scaler`` of :func:`compress_updates`.

        Raises:
            ValueError: there is one already.
        """
        if self._scaler is not None:
            raise ValueError("this handle watches a gradient scaler already")
        self._scaler, handle, update = grad_scaler, weakref.ref(self), grad_scaler.update

        @functools.wraps(update)
        def updated(*given: Any, **options: Any) -> None:
            update(*given, **options)
            if (own := handle()) is not None and own._scaler is not None:  # noqa: SLF001 - its own
                own._after_update()  # noqa: SLF001

        grad_scaler.update = updated  # type: ignore[method-assign]

    def _after_update(self) -> None:
        if not self._stepped:
            self._before_step()
            self._after_step()
        self._stepped = False

    def _after_step(self) -> None:
        self._stepped = True
        self._steps += 1
        if self._is_due():
            self.average()

    def _is_due(self) -> bool:
        """Whether it is time for a round."""
        return self._steps >= self.every

    @torch.no_grad()
    def _anchor(self, *, parameters: bool) -> None:
        """Keep a copy of what all replicas have: of parameters, or of buffers."""
        tensors = self._tensors()
        for group in self._groups:
            own = [tensors[name] for name in group.names]
            for x, part in zip(own, parts_of(group.flat, own), strict=True):
                if x.requires_grad == parameters:
                    part.copy_(real(x.detach()))
        self._anchored |= parameters

    @torch.no_grad()
    def average(self) -> None:
        """A round now, and wait for it: replicas are equal afterwards. Call on all ranks, between steps.

        It comes by itself after every ``every``-th step; call it after the last one where that leaves steps over, and
        before a replica is saved or judged.

        A replica whose update is not finite says so in the log, brings nothing in this round, and has the others' mean
        afterwards. Where the mean itself is not finite, the parameters stay what they were after the last round.

        Raises:
            DisagreementError: ranks that are about to do different things, or replicas that differ.
            RuntimeError: the exchange broke off, or had done so at an earlier round. Parameters are then as after the
                last round.
        """
        self._check_between_steps("average")
        if self._engine.error is not None:
            raise RuntimeError(f"average: the exchange stopped at an earlier round: {self._engine.error}")
        if not self._anchored:
            self._anchor(parameters=True)
        tensors = self._tensors()
        brings = self._take_updates(tensors)
        self._anchored, self._steps = False, 0
        try:
            self._exchange(share=float(brings))
            self._apply(tensors)
        finally:
            self._anchor(parameters=False)

    def _exchange(self, *, share: float) -> None:
        """From updates to their means, in the same memory.

        Args:
            share: what this replica's update was scaled by; 0 where it brings none.
        """
        length = self._length if isinstance(self._length, MeasuredLength) and self._length.is_due(self.step) else None
        sample = None if length is None else length.sample([group.flat for group in self._groups], share=share)
        futures = []
        for at, group in enumerate(self._groups):
            futures.append(self.feed(group.flat, group.names, last=at == len(self._groups) - 1))
        for future in futures:
            future.wait()
        if length is not None and sample is not None:  # all ranks are in the same round, and nothing is on its way
            length.take(sample, self.process_group, self.size)
            self._count_sent(all_reduce_nbytes(length.nbytes, self.size))

    def _apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Go along the means, if they are finite."""
        if all(_all_finite(group.flat) for group in self._groups):
            self._go_along(tensors)
        else:
            log.warning("round %d: the mean is not finite; parameters stay as they were", self.step - 1)

    def _take_updates(self, tensors: Mapping[str, Tensor]) -> bool:
        """Parameters and copies change places: the parameters are those of the last round, the copies the updates.

        Returns:
            Whether these are finite; otherwise they are zeros now.
        """
        finite = True
        for group in self._groups:
            own = [tensors[name] for name in group.names]
            for x, part in zip(own, parts_of(group.flat, own), strict=True):
                finite &= _take_difference(real(x.detach()), part)
        if finite:
            return True
        self._skipped += 1
        log.warning(
            "round %d: what rank %d changed is not finite, so it brings nothing in this round; its optimizer may keep "
            "what is not finite, too",
            self.step,
            self._topology.everyone.rank,
        )
        for group in self._groups:
            group.flat.zero_()
        return False

    def _go_along(self, tensors: Mapping[str, Tensor]) -> None:
        """From the parameters of the last round along the mean of the updates."""
        along = self.length
        for group in self._groups:
            own = [tensors[name] for name in group.names]
            for name, x, mean in zip(group.names, own, parts_of(group.flat, own), strict=True):
                outer = self._outer_parameters.get(name)
                if outer is not None:
                    gradient = mean.neg_()
                    outer.data = x.detach()  # which the model may have moved elsewhere
                    outer.grad = torch.view_as_complex(gradient) if x.is_complex() else gradient
                else:
                    real(x.detach()).add_(mean, alpha=along if x.requires_grad else 1.0)
        if self.outer is not None:
            self.outer.step()
            for outer in self._outer_parameters.values():
                outer.grad = None

    def _step_facts(self) -> Facts:
        """Replicas that differ would train different models and never know."""
        if not self._check_next and self.step % max(1, CHECK_EVERY // self.every):
            return {}
        self._check_next = False
        parameters = (x for x in self._tensors().values() if x.requires_grad)  # forward passes change buffers
        flat = (real(x.detach()).contiguous().view(-1) for x in parameters)
        sums = [x.view(_INTEGERS[x.element_size()]).sum(dtype=torch.int64) for x in flat]
        digest = hashlib.sha256(repr(torch.stack(sums).tolist()).encode())
        return {"parameters of the last round": digest.hexdigest()[:16]}

    # ---- ends and checkpoints ----------------------------------------------------------------------------------------

    def remove(self) -> None:
        """End it: the optimizer steps alone from now on, and may get another handle. Call on all ranks, between steps.

        Steps since the last round stay this replica's own; call :meth:`average` before, if replicas are to be equal.

        Raises:
            DisagreementError: some rank does something else.
        """
        super().remove()
        self._let_go()

    def _let_go(self) -> None:
        """Of the optimizers and the copies."""
        for hook in self._hooks:
            hook.remove()
        self._scaler = None
        taken.difference_update(each for ref in self._optimizers if (each := ref()) is not None)
        self._groups.clear()

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on to the bit, but for model and optimizer. Every rank has its own.

        Between rounds it holds the parameters of the last round, too; save after a round to keep it small, and where
        the number of replicas may change.
        """
        anchor: dict[str, Tensor] = {}
        if self._steps:
            tensors = self._tensors()
            for group in self._groups:
                parts = parts_of(group.flat, [tensors[name] for name in group.names])
                anchor |= {name: part.clone() for name, part in zip(group.names, parts, strict=True)}
        return super().state_dict() | {
            "updates": {
                "every": self.every,
                "steps": self._steps,
                "anchor": anchor,
                "outer": None if self.outer is None else self.outer.state_dict(),
                "length": self._length.state_dict() if isinstance(self._length, MeasuredLength) else self._length,
                "skipped": self._skipped,
            }
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where :meth:`state_dict` was taken. Call on all ranks, with the model's and the optimizer's states.

        Load them into model and optimizer first. Where the number of replicas has changed, states have to be
        of a moment right after a round.

        Raises:
            ValueError: a state that does not fit, on any rank. Nothing has changed then.
            RuntimeError: called inside a round, or after an exchange broke off.
        """
        super().load_state_dict(state)
        if isinstance(state, Mapping):
            mine = state["updates"]
        else:
            by_rank = {each["rank"]: each["updates"] for each in state}
            mine = by_rank[self._topology.everyone.rank if len(by_rank) == self.size else 0]
        self._steps, self._skipped, self._anchored = mine["steps"], mine["skipped"], bool(mine["anchor"])
        if self.outer is not None:
            self.outer.load_state_dict(mine["outer"])
        if isinstance(self._length, MeasuredLength):
            self._length.load_state_dict(mine["length"])
        if not self._anchored:
            self._anchor(parameters=False)
            return
        tensors = self._tensors()
        for group in self._groups:
            own = [tensors[name] for name in group.names]
            for name, part in zip(group.names, parts_of(group.flat, own), strict=True):
                part.copy_(mine["anchor"][name])

    def _loadable(self, state: object) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]:
        found = super()._loadable(state)
        self._check_updates(found[0])
        return found

    def _loadable_of_all(
        self, states: Sequence[Mapping[str, Any]]
    ) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Tensor]]]:
        found = super()._loadable_of_all(states)
        for state in states:
            self._check_updates(state)
            if len(states) != self.size and state["updates"]["steps"]:
                raise ValueError(
                    f"the states were saved {state['updates']['steps']} steps after a round, where each replica has "
                    "parameters of its own; another number of replicas can go on from a moment right after a round"
                )
        return found

    def _check_updates(self, state: Mapping[str, Any]) -> None:
        own = state.get("updates")
        keys = {"every", "steps", "anchor", "outer", "length", "skipped"}
        if not isinstance(own, Mapping) or not keys <= own.keys():
            raise ValueError("the state is not of updates; pass what compress_updates' handle.state_dict() returned")
        if own["every"] != self.every:
            raise ValueError(f"the state was saved with every={own['every']}, and here it is {self.every}")
        if (own["outer"] is None) != (self.outer is None):
            raise ValueError("the state is of another outer step: one of the two is an optimizer")
        if self.outer is not None and _sizes(own["outer"]) != _sizes(self.outer.state_dict()):
            raise ValueError("the state is of an outer optimizer with other parameter groups")
        if isinstance(self._length, MeasuredLength) != isinstance(own["length"], Mapping):
            raise ValueError("the state is of another outer step: one of the two is outer='auto'")
        if not 0 <= own["steps"] < max(2, self.every):
            raise ValueError(f"the state is of {own['steps']} steps after a round, and every={self.every}")
        if bool(own["steps"]) != bool(own["anchor"]):
            raise ValueError("the state lacks the parameters of the last round, or has some where it needs none")
        if own["anchor"]:
            tensors = self._tensors()
            for name, x in tensors.items():
                there = own["anchor"].get(name)
                if there is None or there.shape != real(x).shape:
                    raise ValueError(f"the state's parameters of the last round do not fit the model: {name}")


def said_of(optimizer: Optimizer) -> str:
    """Its kind and settings, for ranks to compare."""
    return f"{type(optimizer).__name__} {sorted((k, repr(v)) for k, v in optimizer.defaults.items())}"


def _sizes(state: object) -> list[int] | None:
    """How many parameters each group of an optimizer's state has; None where it is no such state."""
    try:
        return [len(group["params"]) for group in cast("Mapping[str, Any]", state)["param_groups"]]
    except (KeyError, TypeError):
        return None


def _take_difference(x: Tensor, base: Tensor) -> bool:
    """``(x, base) ← (base, x − base)``; whether all of the difference is finite."""
    flat, other = in_memory_order(x), in_memory_order(base)
    if x.dtype == torch.float32 and flat is not None and other is not None and x.stride() == base.stride():
        return kernels.take_difference(flat, other)
    difference = x - base
    x.copy_(base)
    base.copy_(difference)
    return bool(difference.isfinite().all())


def _all_finite(x: Tensor) -> bool:
    return kernels.all_finite(x) if x.dtype == torch.float32 else bool(x.isfinite().all())


#: Of as many bytes.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
