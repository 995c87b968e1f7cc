"""Optimizers: settings that replicas compare, scalers that may skip a step, and steps that no round would count.

Replicas compare the types of their optimizers, and the settings that never differ on purpose. If the decay of moments
differed, or only some replicas decayed weights, replicas would take different kinds of steps, and the mean of their
updates would be that of no optimizer. Learning rates are not compared: they may differ by schedule or batch size. Nor
are ``foreach`` and ``fused``, which depend on the machine, nor momentum where a schedule cycles it.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from narrowband.averaging.listening import Listener, ignore, listen, only_makes_state
from narrowband.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

__all__ = ["Steps", "facts_of", "taken"]

#: Optimizers that already have a handle. Two handles on one optimizer would both take the same update.
taken: weakref.WeakSet[Optimizer] = weakref.WeakSet()

#: Settings that are compared, by their names in torch.optim and similar libraries. Other entries of a parameter group
#: are not compared, since some third-party optimizers keep running estimates there.
_COMPARED = (
    "betas", "momentum", "dampening", "nesterov", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "alpha",
    "centered", "rho", "lambd", "t0", "beta2_decay", "lr_decay", "initial_accumulator_value", "momentum_decay", "etas",
    "step_sizes", "ns_steps", "ns_coefficients", "maximize",
)  # fmt: skip

#: The step in a row of another optimizer at which it raises an error. An optimizer may call another one in its step.
STEPS_OF_STRANGERS = 3

#: Settings that schedules such as OneCycleLR change, and the entry of a group that shows that it has such a schedule.
_CYCLED, _TELLS = ("betas", "momentum"), "max_momentum"


def facts_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return name → value of the optimizer settings that must be the same on all replicas.

    A setting that is equal for all parameters is given as its value. Otherwise each value is given with the number of
    its parameters and a fingerprint of their names, so it does not matter how parameters are divided into groups.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD([{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias]}])
        >>> facts = facts_of(model, [optimizer])
        >>> facts["optimizer"], facts["optimizer's momentum"], facts["optimizer's weight_decay"]
        ('SGD', '0.0', '0.0 for 1 parameter (fa4824); 0.1 for 1 parameter (0844df)')
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, dict[str, list[str]]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            own = [names[id(p)] for p in group["params"] if id(p) in names]
            for setting in _COMPARED:
                if setting in group and own and not (setting in _CYCLED and _TELLS in group):
                    found.setdefault(setting, {}).setdefault(_plain(group[setting]), []).extend(own)
    kinds = ", ".join(type(each).__name__ for each in optimizers)
    return {"optimizer": kinds} | {f"optimizer's {setting}": _said(found[setting]) for setting in sorted(found)}


def _said(by_value: dict[str, list[str]]) -> str:
    if len(by_value) == 1:
        return next(iter(by_value))
    return "; ".join(
        f"{value} for {counted(len(names), 'parameter')} ({_fingerprint(names)})"
        for value, names in sorted(by_value.items())
    )


def _fingerprint(names: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:6]


def _plain(value: Any) -> str:
    """Return a value as text, such that equal numbers give equal texts."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(float(value))
    return repr(value)


class Steps:
    """The steps of a model's optimizers: calls back before and after each, also if a gradient scaler skips it.

    Calls of ``step`` that do not train are ignored (see :func:`~narrowband.averaging.optim.only_makes_state`).

    Args:
        model: the model.
        optimizers: those that step it, in this order. They are :data:`taken` from now on.
        grad_scaler: the scaler that may skip their steps, if there is one.
        before: called before each step.
        after: called after each step of the last optimizer. Both are methods of one object, which the optimizers keep
            alive until :meth:`end`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        grad_scaler: torch.amp.GradScaler | None,
        *,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._before, self._after = weakref.WeakMethod(before), weakref.WeakMethod(after)
        self._asked = _asked_of(grad_scaler, optimizers)
        self._counted = False  # whether a step was that the next update of the scaler will tell of
        self._strangers = _Strangers(model, optimizers)
        self._hooks = [each.register_step_pre_hook(_in_training(before)) for each in optimizers]
        self._hooks.append(optimizers[-1].register_step_post_hook(_in_training(self._count)))
        self._unwatch = _watch(grad_scaler, self._asked, self._after_update)
        taken.update(optimizers)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, as far as they live."""
        return [each for reference in self._optimizers if (each := reference()) is not None]

    def before_first(self, call: Callable[[], None]) -> None:
        """Also call this before each step of the first optimizer."""
        self._hooks.append(self.optimizers[0].register_step_pre_hook(_in_training(call)))

    def _count(self) -> None:
        # Of a step without the scaler no update tells, and the next one may be of a step that the scaler has skipped.
        self._counted = any(self._asked())
        _call(self._after)

    def _after_update(self, asked: bool, last: bool) -> None:
        """Do what the hooks would have done if the scaler had not skipped the steps that it was asked for.

        Args:
            asked: whether the scaler was asked to step any of the optimizers.
            last: whether it was asked to step the last one, whose steps are counted.
        """
        if asked and not self._counted:
            _call(self._before)
            if last:
                self._count()
        self._counted = False

    def end(self) -> None:
        """Release the optimizers and the scaler."""
        self._strangers.end()
        for hook in self._hooks:
            hook.remove()
        self._unwatch()
        taken.difference_update(self.optimizers)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (alive := method()) is not None:
        alive()


def _in_training(hook: Callable[[], None]) -> Callable[[Optimizer, Any, Any], None]:
    """Wrap ``hook`` as a step hook of optimizers that ignores calls of ``step`` that do not train (see
    :func:`~narrowband.averaging.optim.only_makes_state`).
    """

    def called(optimizer: Optimizer, _: Any, options: dict[str, Any]) -> None:
        if not only_makes_state(optimizer, options):
            hook()

    return called


class _Strangers(Listener):
    """Raises an error if another optimizer steps a model in the place of those whose steps its handle counts, since the
    replicas would never be averaged.

    Args:
        model: the model.
        optimizers: those that the handle knows.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._known = weakref.WeakSet(optimizers)
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        listen(self)

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        """Note that an optimizer is about to step.

        Raises:
            RuntimeError: it is none of ours, and has stepped the model several times while none of ours did.
        """
        if not trains:
            return
        if optimizer in self._known:
            self._steps.clear()
            return
        ours = {id(p) for p in self._model.parameters()}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            return
        self._steps[optimizer] = steps = self._steps.get(optimizer, 0) + 1
        if steps >= STEPS_OF_STRANGERS:
            raise RuntimeError(
                f"updates are not averaged: another {type(optimizer).__name__} than compress_updates was given is "
                f"about to make step {steps} in a row with the model's parameters. Call compress_updates after the "
                "optimizer was made for the last time (fully_shard needs a new one), and pass the one whose step() is "
                "called; or call remove() on all ranks first"
            )

    def end(self) -> None:
        """End the watch."""
        ignore(self)


def _asked_of(grad_scaler: torch.amp.GradScaler | None, optimizers: Sequence[Optimizer]) -> Callable[[], list[bool]]:
    """Return a function that says, for each optimizer, whether the scaler was asked since its last update to step it,
    or to unscale its gradients. It does not keep the optimizers alive.
    """
    refs = [weakref.ref(each) for each in optimizers]

    def asked() -> list[bool]:
        # There is no public name for it.
        known = grad_scaler._per_optimizer_states if grad_scaler is not None and grad_scaler.is_enabled() else {}
        return [id(ref()) in known for ref in refs]

    return asked


def _watch(
    grad_scaler: torch.amp.GradScaler | None, asked: Callable[[], list[bool]], after: Callable[[bool, bool], None]
) -> Callable[[], None]:
    """Call ``after`` after each ``grad_scaler.update()``, so that steps which the scaler skips can be counted, too.

    Args:
        grad_scaler: the scaler to watch; if None, nothing is ever called. It may serve, and be updated for, other
            optimizers than those that step the model.
        asked: see :func:`_asked_of`.
        after: a bound method. Its arguments say whether, since the last update, the scaler was asked to step any of
            the optimizers, and the last one, whose steps are counted. The scaler does not keep its object alive.

    Returns:
        A function that ends the watch. It restores the scaler, unless somebody else has wrapped ``update`` since.
    """
    if grad_scaler is None:
        return lambda: None
    method, update = weakref.WeakMethod(after), grad_scaler.update
    watched_before, ended = "update" in vars(grad_scaler), False

    @functools.wraps(update)
    def updated(*given: Any, **options: Any) -> None:
        before = asked()  # the update clears it
        update(*given, **options)
        if not ended and (own := method()) is not None:
            own(any(before), before[-1])

    def end() -> None:
        nonlocal ended
        ended = True
        if vars(grad_scaler).get("update") is not updated:
            return  # somebody else has wrapped update() since
        if watched_before:
            grad_scaler.update = update  # type: ignore[method-assign]
        else:
            del grad_scaler.update

    grad_scaler.update = updated  # type: ignore[method-assign]
    return end
