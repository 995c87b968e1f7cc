"""Tell of the steps of all optimizers in the process, those that were made before and those that come later.

PyTorch's global hooks are registered once per process and never removed. PyTorch iterates over its table of hooks,
which must not change meanwhile, and garbage collection could remove a hook at any time.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from narrowband.compiler import unseen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

__all__ = ["STEPS_WITHOUT_AVERAGE", "Listener", "ignore", "listen", "living", "only_makes_state"]

T = TypeVar("T")

#: The step of an optimizer in a row with gradients that were not averaged at which users are told. A single one may be
#: the user's own warm-up; three in a row are a training loop.
STEPS_WITHOUT_AVERAGE = 3


class Listener:
    """What is told of every step of every optimizer. Does nothing: derived classes do."""

    def before_step(self, optimizer: Optimizer, *, trains: bool) -> None:
        """Note that an optimizer is about to step.

        Args:
            optimizer: any optimizer.
            trains: whether the step does more than :func:`only_makes_state`.
        """

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""


def living(keys: weakref.WeakKeyDictionary[T, Any]) -> list[T]:
    """Return the keys of a dictionary that other threads may change meanwhile, in the order in which they came.

    A loop over the dictionary itself is Python code, during which another thread may add a key, and then it fails. The
    references are copied in one operation.

    Example:
        >>> handles = weakref.WeakKeyDictionary({(key := Listener()): None})
        >>> living(handles) == [key]
        True
    """
    return [key for reference in keys.keyrefs() if (key := reference()) is not None]


#: Who is told, in the order in which they came.
_listeners: weakref.WeakKeyDictionary[Listener, None] = weakref.WeakKeyDictionary()


def listen(listener: Listener) -> None:
    """Tell this object of all steps, as long as something else keeps it alive."""
    _register()
    _listeners[listener] = None


def ignore(listener: Listener) -> None:
    """Tell this object of no more steps."""
    _listeners.pop(listener, None)


@functools.cache
def _register() -> None:
    @unseen
    def before_step(optimizer: Optimizer, _: Any, options: dict[str, Any]) -> None:
        if listeners := living(_listeners):
            trains = not only_makes_state(optimizer, options)
            for each in listeners:
                each.before_step(optimizer, trains=trains)

    @unseen
    def after_step(optimizer: Optimizer, *_: Any) -> None:
        for each in living(_listeners):
            each.after_step(optimizer)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def only_makes_state(optimizer: Optimizer, options: Mapping[str, Any]) -> bool:
    """Whether a step only initializes the optimizer's state: ``torch.distributed.checkpoint.state_dict`` calls
    ``step(closure=None)`` at a learning rate of 0 for an optimizer without state, before it saves or loads that.

    Args:
        optimizer: the optimizer that steps.
        options: keyword arguments of its ``step``, as optimizer hooks get them.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.0)
        >>> only_makes_state(optimizer, {"closure": None}), only_makes_state(optimizer, {})
        (True, False)
    """
    asked = "closure" in options and options["closure"] is None
    return asked and all("lr" not in group or float(group["lr"]) == 0 for group in optimizer.param_groups)
