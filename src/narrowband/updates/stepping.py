"""What steps a model: settings of optimizers, for replicas to compare, and scalers that may skip a step.

Compared are kinds of optimizers, and the settings that cannot differ on purpose. Replicas whose moments decay
otherwise, or of which one decays weights and another does not, take different steps, and their mean is nobody's.
Learning rates may differ, by a schedule or by the size of batches, so they are left out; so is how a step is computed
(``foreach``, ``fused``), which depends on the machine, and momentum where a schedule cycles it.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from narrowband.averaging.optim import only_makes_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.optim import Optimizer

__all__ = ["facts_of", "in_training", "watch"]

#: What is compared, by the names that torch.optim and its kin have for it. Not all that a group has: optimizers of
#: others keep there what they estimate as they go.
_COMPARED = (
    "betas", "momentum", "dampening", "nesterov", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "alpha",
    "centered", "rho", "lambd", "t0", "beta2_decay", "lr_decay", "initial_accumulator_value", "momentum_decay", "etas",
    "step_sizes", "ns_steps", "ns_coefficients", "maximize",
)  # fmt: skip

#: What schedules such as OneCycleLR change, and the entry of a group that tells of such a schedule.
_CYCLED, _TELLS = ("betas", "momentum"), "max_momentum"


def facts_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Name → value, of what has to be the same on all replicas.

    A setting that all parameters share is said as it is; one that groups have each their own, with the number of
    parameters and a fingerprint of their names, so that it does not matter how they are put in groups.

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
        f"{value} for {len(names)} parameter{'s' if len(names) > 1 else ''} ({_fingerprint(names)})"
        for value, names in sorted(by_value.items())
    )


def _fingerprint(names: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:6]


def _plain(value: Any) -> str:
    """The same text for what is the same number."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(float(value))
    return repr(value)


def in_training(hook: Callable[[], None]) -> Callable[[Optimizer, Any, Any], None]:
    """A hook of an optimizer's steps, but for those that are none of training."""

    def called(optimizer: Optimizer, _: Any, options: dict[str, Any]) -> None:
        if not only_makes_state(optimizer, options):
            hook()

    return called


def watch(
    grad_scaler: torch.amp.GradScaler | None, optimizer: Optimizer, after: Callable[[bool], None]
) -> Callable[[], None]:
    """Call a function after each of a scaler's updates, so that steps which it skips are counted, too.

    Args:
        grad_scaler: this one; without it nothing is called.
        optimizer: whose steps these are. The scaler may serve others, and updates for them, too.
        after: a bound method, which is told whether the scaler was asked to step the optimizer since its last update,
            or to unscale its gradients. Its object is not kept alive by the scaler, nor is the optimizer.

    Returns:
        What ends it. The scaler is then as it was, unless somebody else has come to watch it.
    """
    if grad_scaler is None:
        return lambda: None
    method, stepped, update = weakref.WeakMethod(after), weakref.ref(optimizer), grad_scaler.update
    watched_before, ended = "update" in vars(grad_scaler), False

    @functools.wraps(update)
    def updated(*given: Any, **options: Any) -> None:
        # The update forgets it, and there is no public name for it.
        asked = grad_scaler.is_enabled() and id(stepped()) in grad_scaler._per_optimizer_states
        update(*given, **options)
        if not ended and (own := method()) is not None:
            own(asked)

    def end() -> None:
        nonlocal ended
        ended = True
        if vars(grad_scaler).get("update") is not updated:
            return  # somebody else looks at it, too
        if watched_before:
            grad_scaler.update = update  # type: ignore[method-assign]
        else:
            del grad_scaler.update

    grad_scaler.update = updated  # type: ignore[method-assign]
    return end
