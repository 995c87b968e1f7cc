"""Follow, parameter by parameter, whether an optimizer has used its average.

An average *waits* from the end of its backward pass until an optimizer has stepped with it. It is *thrown away* if the
user clears it before. Feedback then takes it back (:mod:`narrowband.averaging.unused`), in the next step in which
the parameter is averaged. A waiting average that is still in ``.grad`` when the next backward pass begins becomes a
part of the next average, and goes on waiting.

Whether a gradient was cleared must be seen before backward adds to it. So hooks on the parameters run when their
gradients are computed; the first of them looks at all. Loops of their own may also assign gradients, as those of
``torch.func``, of which no hook tells. There a gradient that no hook has announced is a new one if it is
another tensor than the one that the average was written into.

All this takes time and memory, so it is only done while it may be of use: in the first steps, until every parameter was
stepped with; and after an average was thrown away, until a hundred in a row were used, and twice as many as there ever
were before one that was thrown away. If one is thrown away after that, it is lost, since nothing was kept. But then at
least twice as many in a row have to be used, so few can be lost in this way: one each time that the number doubles.

At other times averages wait after a step of an optimizer that has only a part of the parameters, or none of them, as
that of a GAN's other network. Nothing is done where a single optimizer steps with everything.

Averages of parameters that no optimizer of PyTorch's has count as used: the training loop may apply them itself.

A step that is not finite fills all averages with NaN, and a gradient scaler skips it. Where another optimizer's turn
comes next, this NaN may still be in gradients that are not cleared yet. It must not make that step skipped, too. So
such gradients are sent as zeros (:meth:`Waiting.is_spoilt`), and are NaN again afterwards.
"""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from narrowband.averaging.flat import local
from narrowband.averaging.listening import Listener, ignore
from narrowband.averaging.step import fill_with_nan
from narrowband.compiler import unseen

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from narrowband.averaging.layers import Layers
    from narrowband.averaging.stats import StepStats
    from narrowband.stats import Stats

__all__ = ["Averages", "Rest", "Waiting"]

#: How many averages in a row have to be used, at the least, before nothing is kept any more.
_FEWEST = 100


class Averages(Protocol):
    """What this module needs of a handle."""

    @property
    def layers(self) -> Layers:
        """The layers that are averaged."""

    @property
    def paused(self) -> bool:
        """Whether averages are uncompressed for now."""

    @property
    def removed(self) -> bool:
        """Whether the handle was removed and averages nothing any more."""

    @property
    def step(self) -> int:
        """How many steps were averaged, also before a resume whose state was loaded."""

    def stats(self) -> Stats[StepStats]:
        """Statistics of the steps so far."""


@dataclass(frozen=True)
class Rest:
    """What is known of a run's averages when none waits: a run that resumes begins with it.

    Attributes:
        in_turns: whether averages are thrown away; None if that is not known yet.
        since: how many averages there were since one was thrown away, or since the beginning; and how many there were
            at the most before one was.
        stepped: names of parameters that an optimizer has stepped with, as long as ``in_turns`` is not known.
        by_own: whether an optimizer of the handle's parameters has stepped.
        by_any: whether any optimizer was seen to step, so that it matters which parameters have one.
        used: names of parameters whose averages wait at this time, and count as used. All others that wait count as
            thrown away. (This is not saved.)
    """

    in_turns: bool | None = None
    since: tuple[int, int] = (0, 0)
    stepped: frozenset[str] = frozenset()
    by_own: bool = False
    by_any: bool = False
    used: frozenset[str] = field(default=frozenset(), compare=False)

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved of it."""
        seen = {"parameters": sorted(self.stepped), "own": self.by_own, "any": self.by_any}
        return {"in turns": self.in_turns, "since thrown": self.since, "stepped": seen}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Rest:
        """Return what :meth:`state_dict` returned; states of earlier releases lack some or all of it."""
        in_turns, seen = state.get("in turns"), state.get("stepped", {})
        own = seen.get("own", in_turns is not None)
        return cls(
            in_turns=in_turns,
            since=tuple(state.get("since thrown", (0, 0))),
            stepped=frozenset(seen.get("parameters", ())),
            by_own=own,
            by_any=seen.get("any", own),
        )


class Waiting(Listener):
    """The averages of one handle that wait for an optimizer.

    Args:
        handle: the handle that averages.
        named: name and tensor of each parameter whose gradient it averages, as optimizers know them.
        old: how a gradient with which an optimizer has stepped already is told from a new one. By ``versions``, which
            tell of every write to it; by ``hooks`` if gradients are views of DDP's buckets, whose versions change
            whenever anything is sent; ``never`` if every pass averages all gradients anew; ``assigned`` if, besides,
            the training loop may assign them.
        scaled: whether a gradient scaler may skip steps, where nobody says that the model is called (:meth:`called`):
            then all backward passes are watched, too.
        instead: what the warning about averages that are thrown away advises to do.
    """

    def __init__(
        self,
        handle: Averages,
        named: Iterable[tuple[str, Tensor]],
        *,
        old: Literal["versions", "hooks", "never", "assigned"],
        scaled: bool = False,
        instead: str = "freeze such parameters (requires_grad_(False)) in a pass that is not theirs, or run it in "
        "no_sync()",
    ) -> None:
        self._handle = weakref.ref(handle)
        self._instead = instead
        self._names = {id(p): name for name, p in named if p.requires_grad}
        self._ours = {id(p): weakref.ref(p) for _, p in named if p.requires_grad}
        self._old = old
        self._watches = old == "hooks" or scaled  # whether hooks stay for good
        #: Whether a step without a residual cannot go wrong: nothing is followed.
        self._off = not handle.layers.stateful
        self._beginning = not self._off
        self._in_turns = False
        self._since = 0  # averages since one was thrown away last, or since the beginning
        self._longest = 0  # the most of these before one was thrown away
        self._arrived = False  # whether averages have arrived
        self._asked = True  # whether it was found out if the last step was skipped
        self._fresh = False  # whether they have, and no optimizer has stepped since
        self._waiting: set[int] = set()
        self._thrown: set[int] = set()
        self._spoilt: set[int] = set()  # parameters whose gradients were NaN before this step
        self._owned: set[int] = set()  # parameters that an optimizer has
        #: Whether an optimizer of other parameters has stepped while averages waited, or any in a run that was resumed.
        self._others_step = False
        #: Whether an optimizer of these parameters has stepped, also before a resume whose state was loaded.
        self.by_own = False
        self._stepped: set[int] = set()  # those that one has stepped with, in the beginning
        self._searched = False
        self._steps_now: weakref.ref[torch.optim.Optimizer] | None = None
        self._before: set[int] = set()  # what waited when it began to step
        #: The id of a parameter → the gradient into which its average was written, if gradients may be assigned.
        self._written: dict[int, weakref.ref[Tensor]] = {}
        #: The id of a parameter → the gradient with which an optimizer stepped last, and its version.
        self._used_up: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._reached: set[int] = set()  # parameters that a backward pass has reached since; if there are hooks
        self._hooks: list[RemovableHandle] = []
        self._looked: int | None = None  # the last backward pass that has begun
        self._has_looked = False  # whether one has begun since the last average
        if self._watches and not self._off:
            self._hook()

    @property
    def keeps(self) -> bool:
        """Whether averages may be thrown away, so that what feedback holds before them has to be kept."""
        return self._beginning or self._in_turns

    @property
    def any(self) -> bool:
        """Whether averages wait, as far as they are followed."""
        return bool(self._waiting)

    def rest(self) -> Rest:
        """Return what a run that resumes from here has to find. It has no gradients, so averages that wait count as
        thrown away, unless they would count as used when the next backward pass begins. Nothing changes here.
        """
        beginning, in_turns, since, longest = self._beginning, self._in_turns, self._since, self._longest
        used: set[int] = set()
        if self._waiting:
            skipped = self._was_skipped() if not in_turns else False
            used = self._without_optimizer()
            if not self._owned:
                beginning &= skipped
            elif self._waiting - used and not skipped:
                in_turns, since, longest = True, 0, max(longest, since)
        known = in_turns or not beginning
        return Rest(
            in_turns=in_turns if known else None,
            since=(since, longest),
            stepped=frozenset() if known else frozenset(self._names[key] for key in self._stepped & self._names.keys()),
            by_own=self.by_own,
            by_any=bool(self._owned) or self._others_step,
            used=frozenset(self._names[key] for key in used),
        )

    def restart(self, rest: Rest) -> None:
        """Forget everything: a state was loaded, and no average waits.

        Args:
            rest: what :meth:`rest` returned.
        """
        self._since, self._longest = rest.since
        self._beginning = rest.in_turns is None and not self._off
        self._in_turns = bool(rest.in_turns) and not self._off
        self._arrived = self._fresh = self._searched = False
        self._others_step, self.by_own = rest.by_any, rest.by_own
        self._written.clear()
        for some in (self._waiting, self._thrown, self._spoilt, self._owned, self._stepped):
            some.clear()
        self._stepped.update(key for key, name in self._names.items() if name in rest.stepped)

    def is_ours(self, p: Tensor) -> bool:
        """Whether the handle averages this tensor's gradient."""
        reference = self._ours.get(id(p))
        return reference is not None and reference() is p

    def is_used_up(self, p: Tensor) -> bool:
        """Whether a parameter's gradient is still the one with which an optimizer has stepped. Then no backward pass
        has added to it since.
        """
        gradient, found = p.grad, self._used_up.get(id(p))
        if found is None or gradient is None or found[0]() is not gradient:
            return False
        return id(p) not in self._reached if self._old == "hooks" else found[1] == _version(gradient)

    @property
    def spoilt(self) -> bool:
        """Whether any gradient was not finite before the backward pass that runs."""
        return bool(self._spoilt)

    def is_spoilt(self, p: Tensor) -> bool:
        """Whether a parameter's gradient was not finite before the backward pass that runs."""
        return id(p) in self._spoilt

    def begin_between_steps(self) -> None:
        """Note that an optimizer has stepped with the gradients that there are at set-up."""
        if not self._off and self._old != "never":
            self._use_up([p for _, p in self._present()])

    # ---- what happens ------------------------------------------------------------------------------------------------

    def called(self, *, stepped: bool) -> None:
        """Note that the model was called, so that a backward pass may follow.

        Args:
            stepped: whether an optimizer has stepped since the last average.
        """
        self._wait_if_skipped(stepped=stepped)
        if self._waiting and not self._hooks:
            self._hook()
        elif self._hooks and not (self._waiting or self.keeps or self._watches):
            self._unhook()

    def averaged(self, besides: Collection[Tensor] | None = None) -> None:
        """Note that averages were written into the gradients.

        Args:
            besides: parameters whose gradients kept what they held; None: versions tell of what was written.
        """
        if besides is not None and self._used_up:
            kept = set(map(id, besides))
            self._used_up = {key: found for key, found in self._used_up.items() if key in kept}
        self._arrived = self._fresh = True
        self._asked = self._has_looked = False
        if self._old == "assigned":
            self._reached.clear()
            if self._hooks and not (self.keeps or self._watches):
                self._unhook()
        if self._spoilt:
            for key, p in self._present():
                if key in self._spoilt and p.grad is not None:
                    fill_with_nan(local(p.grad))
            self._spoilt.clear()
        self._since += 1
        if self.keeps and self._since > max(_FEWEST, 2 * self._longest):
            self._keep_nothing()
        if self.keeps:
            self._wait()

    def before_step(self, optimizer: torch.optim.Optimizer, *, trains: bool) -> None:
        """Note that an optimizer is about to step. If it runs backward itself, it uses every average of that time."""
        if next(self.of(optimizer), None) is not None:
            self._steps_now, self._before = weakref.ref(optimizer), set(self._waiting)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped."""
        parameters = list(self.of(optimizer))
        if parameters:
            self._steps_now, self.by_own = None, True
        if self._old != "never":
            self._use_up(parameters)
        fresh, self._fresh = self._fresh, False
        if self._off or not (self.keeps or self._waiting or (fresh and len(parameters) < len(self._ours))):
            if self._searched:  # a new optimizer, which the search did not find
                self._owned.update(map(id, parameters))
            return
        own = set(map(id, parameters))
        self._owned |= own
        self._others_step |= not own
        if fresh and not self.keeps:
            self._wait(besides=own)
        self._use({id(p) for p in parameters if p.grad is not None})
        if self._beginning and self._arrived and own:
            self._stepped |= own
            if len(self._stepped) < len(self._ours):
                self._use(self._in_none(set(self._ours)))
            if not self._waiting and self._owned <= self._stepped:
                self._end_beginning()

    def begins(self) -> None:
        """Note that a backward pass is about to add to gradients, or that gradients are about to be averaged: find out
        which of the waiting averages were thrown away.
        """
        running = torch._C._current_graph_task_id()  # noqa: SLF001 - as torch.autograd.graph does
        if running != -1 and self._looked == running:
            return
        self._looked = running
        first, self._has_looked = running != -1 and not self._has_looked, True
        if running != -1 and self._old == "assigned":
            self._wait_if_skipped(stepped=False)
        if not (self._waiting or self._spoilt):
            return
        optimizer = None if self._steps_now is None else self._steps_now()
        if optimizer is not None:
            own = set(map(id, self.of(optimizer)))
            self._owned |= own
            self._use(own - self._before)
        skipped = self._was_skipped() if not self._in_turns else False
        cleared = self._cleared(first=first)
        self._use(self._without_optimizer())
        if not self._owned:
            if self._beginning and not skipped:
                self._end_beginning()
            return
        thrown = cleared & self._waiting
        self._thrown |= thrown
        self._waiting -= thrown
        if thrown and not skipped:
            self._longest, self._since = max(self._longest, self._since), 0
            if not self._in_turns:
                self._begin_turns(thrown)

    def thrown(self) -> list[str]:
        """Return the names of parameters whose last average was thrown away, each such average once."""
        found, self._thrown = self._thrown, set()
        return [self._names[key] for key in self._names if key in found] if found else []

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _wait(self, besides: Collection[int] = ()) -> None:
        """Let averages wait that have just arrived, besides those of these parameters. All others count as used."""
        for key, p in self._present():
            if key in besides or (self._searched and key not in self._owned):
                continue
            if p.grad is not None and local(p.grad).numel() and not self.is_used_up(p):
                self._waiting.add(key)
                if self._old == "assigned":
                    self._written[key] = weakref.ref(p.grad)
                self._before.discard(key)
                self._thrown.discard(key)
        handle = self._handle()
        if handle is not None:
            handle.layers.unused.forget(name for key, name in self._names.items() if key not in self._waiting)
        if self.keeps and not self._hooks:
            self._hook()

    def _wait_if_skipped(self, *, stepped: bool) -> None:
        """Let the last averages wait if a scaler skips their step. They can be told from new gradients only before the
        first backward pass that follows.
        """
        if self._asked:
            return
        self._asked = True
        if not (stepped or self._off or self.keeps or self._waiting) and self._was_skipped():
            self._wait()

    def _without_optimizer(self) -> set[int]:
        """Return the waiting averages that count as used because their parameters are in no optimizer.

        All do where no optimizer has stepped yet: training may do without, or a scaler skips its first steps. In a run
        that resumes, optimizers that have not stepped since count if any had stepped before.
        """
        found: set[int] = set()
        if self._owned or self._others_step or self._in_turns:
            found = self._in_none(self._waiting)
        return found if self._owned else set(self._waiting)

    def _in_none(self, keys: set[int]) -> set[int]:
        """Return those of these parameters that are in no optimizer."""
        if not keys <= self._owned and not self._searched:
            self._searched = True
            self._owned.update(id(p) for p in _all_parameters_of_optimizers() if self.is_ours(p))
        return keys - self._owned

    def _use(self, keys: set[int]) -> None:
        """Note that averages were used."""
        handle = self._handle()
        if handle is not None and keys:
            handle.layers.unused.forget(self._names[key] for key in keys & self._waiting)
        self._waiting -= keys

    def _use_up(self, parameters: Sequence[Tensor]) -> None:
        """Note the gradients with which an optimizer has stepped. :func:`_version` is written out here, because this
        runs in every step.

        The shards that FSDP2 reduces in one message are parts of one tensor, and so is what backward computes for
        tensors that were concatenated. A write to any part would change the versions of all. So each gets a version of
        its own.
        """
        apart = self._old != "hooks"  # gradients that are views of DDP's buckets have to stay so
        for p in parameters:
            if (gradient := p.grad) is not None:
                shard: Tensor = getattr(gradient, "_local_tensor", gradient)
                if apart and shard.layout is torch.strided and shard.untyped_storage().nbytes() > shard.nbytes:
                    if shard is gradient:
                        p.grad = gradient = shard = shard.data
                    else:
                        gradient._local_tensor = shard = shard.data  # type: ignore[attr-defined]  # noqa: SLF001 - its shard
                self._used_up[id(p)] = weakref.ref(gradient), shard._version
        if self._reached:
            self._reached.difference_update(map(id, parameters))

    def _cleared(self, *, first: bool) -> set[int]:
        """Return which of the waiting averages are gone, and note which are not finite. Waits for the parameters'
        device, unless all are gone.

        Args:
            first: whether no backward pass has added to them yet. What is not finite only later may be a new gradient.
        """
        cleared, there = set(), []
        looked_at, before, self._spoilt = self._waiting | self._spoilt, self._spoilt, set()
        for key, p in self._present():
            if key in looked_at:
                gradient = None if p.grad is None else local(p.grad)
                if gradient is None or self._is_assigned(p, key):
                    cleared.add(key)
                elif gradient.is_sparse:
                    there.append((key, gradient.coalesce().values()))
                else:
                    there.append((key, gradient))
        some = [(key, x) for key, x in there if x.numel()]
        if some:
            norms = torch.stack([norm.float() for norm in torch._foreach_norm([x for _, x in some], math.inf)]).tolist()
            cleared.update(key for (key, _), norm in zip(some, norms, strict=True) if norm == 0)
            self._spoilt.update(key for (key, _), norm in zip(some, norms, strict=True) if not math.isfinite(norm))
            if not first:
                self._spoilt &= before
        return cleared

    def _is_assigned(self, p: Tensor, key: int) -> bool:
        """Whether the training loop has assigned a new gradient, where the average was."""
        written = self._written.get(key)
        return written is not None and written() is not p.grad and key not in self._reached

    def _was_skipped(self) -> bool:
        """Whether the last step was not finite, so that a gradient scaler skips it, and nothing of it was kept."""
        handle = self._handle()
        return handle is not None and bool(handle.stats().last.skipped)

    def _end_beginning(self) -> None:
        self._beginning = False
        if not self._in_turns:
            self._keep_nothing()

    def _keep_nothing(self) -> None:
        self._beginning = self._in_turns = False
        handle = self._handle()
        if handle is not None:
            handle.layers.unused.clear()
        if not (self._waiting or self._watches):
            self._unhook()

    def _begin_turns(self, thrown: set[int]) -> None:
        self._in_turns = True
        handle = self._handle()
        if handle is None:
            return
        names = [name for key, name in self._names.items() if key in thrown]
        lost = sorted({state.name for state in handle.layers.states.values() if not state.puts_back})
        lost += ["the vector of small parameters"] if handle.layers.fuses_small else []
        some = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        becomes = (
            f"{' and '.join(lost)} cannot take that back, so it has an effect on later averages: {self._instead}"
            if lost
            else "From now on, residuals get back what such averages took or left, for which a copy of them is kept. "
            f"To save that memory and the traffic, {self._instead}"
        )
        handle.layers.warn_once(
            f"averages of {len(names)} of {len(self._names)} parameters ({some}) were sent for nothing: they were "
            "cleared before an optimizer stepped with them, such as those of a GAN's discriminator after a pass of its "
            f"generator. {becomes}"
        )

    def _present(self) -> Iterable[tuple[int, Tensor]]:
        for key, reference in self._ours.items():
            if (p := reference()) is not None:
                yield key, p

    def _hook(self) -> None:
        own = weakref.ref(self)
        self._hooks = [_hook(p, key, own) for key, p in self._present()]

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def stop(self) -> None:
        """Remove all hooks: the handle averages nothing any more."""
        self._off = True
        self._beginning = self._in_turns = False
        self._waiting.clear()
        self._unhook()
        ignore(self)

    def reaches(self, key: int) -> None:
        """Note that a backward pass is about to add to a parameter's gradient."""
        self.begins()
        self._reached.add(key)

    def of(self, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        """Yield the parameters that both an optimizer and the handle have."""
        return (p for group in optimizer.param_groups for p in group["params"] if self.is_ours(p))


def _version(x: Tensor) -> int:
    """Return the number of writes to a tensor; of a DTensor, to this rank's shard."""
    shard: Tensor = getattr(x, "_local_tensor", x)
    return shard._version


def _hook(p: Tensor, key: int, own: weakref.ref[Waiting]) -> RemovableHandle:
    """Hook a parameter, also while it is frozen. Hooks of a tensor run before its gradient is added to ``.grad``."""

    @unseen
    def reached(_: Tensor) -> None:
        if (waiting := own()) is not None:
            waiting.reaches(key)

    reached.__torch_unserializable__ = True  # type: ignore[attr-defined]
    trained = p.requires_grad
    p.requires_grad_(True)  # otherwise PyTorch accepts no hook
    try:
        hooked: RemovableHandle = p.register_hook(reached)  # type: ignore[no-untyped-call]
    finally:
        p.requires_grad_(trained)
    return hooked


def _all_parameters_of_optimizers() -> Iterable[Tensor]:
    """Yield the parameters of all optimizers in the process. They are known from their steps, but for the first."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer):
            for group in getattr(each, "param_groups", ()):
                yield from group["params"]
