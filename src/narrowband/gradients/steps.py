"""Check that an optimizer's steps and a handle's averages alternate, as feedback assumes.

Feedback assumes that every average is used exactly once. Some training loops break this without any failure:

1. The optimizer steps inside backward, parameter by parameter, before the averages have arrived.
2. Gradients accumulate over several backward passes that are all averaged. Averages then enter the next average as if
   they were new gradients, and ``dgc`` applies momentum to them once more.
3. Averages are thrown away, such as those of a GAN's discriminator while its generator learns
   (:mod:`narrowband.averaging.waiting`).
4. The model is called, but its gradients bypass the hooks: they come from ``torch.autograd.grad``, or the module was
   converted (``.half()``, ``.to()``) inside DistributedDataParallel, which then gets none of them.

The check uses PyTorch's global hooks, which run at every step of every optimizer in the process. Cases 1 and 4 raise an
error; cases 2 and 3 may be intended, and log a warning.

The first step that uses an average also shows what was forgotten at set-up, and a warning says so: a gradient scaler
(:func:`_scaler_of_this_step`), and the state of a run that resumes (:func:`_has_trained`).
"""

from __future__ import annotations

import enum
import sys
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch

from narrowband.averaging.core import is_in_backward
from narrowband.averaging.flat import local
from narrowband.averaging.gradient_group import says_something
from narrowband.averaging.listening import STEPS_WITHOUT_AVERAGE, Listener, ignore, listen
from narrowband.averaging.optim import check_momentum
from narrowband.averaging.waiting import Averages, Waiting
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from narrowband.feedback import State

__all__ = ["Steps", "Turn"]

#: How many callers of an optimizer's step are searched for a gradient scaler. PyTorch, schedules of the learning rate
#: and trainers wrap the method, each in a frame or two.
_CALLERS = 24


class Turn(enum.Enum):
    """Whose turn it is: the state of the alternation of averages and optimizer steps."""

    #: All averages have been used, and the model was not called since.
    USED = enum.auto()
    #: The model was called, and its gradients still have to be averaged.
    CALLED = enum.auto()
    #: There is an average that no optimizer has used yet.
    AVERAGED = enum.auto()


class Steps(Listener):
    """Follows the steps that optimizers make with the gradients of one handle.

    The next state (:class:`Turn`), by event and present state:

    ================  ==========  ================================================  =====================
    what happens      ``USED``    ``CALLED``                                        ``AVERAGED``
    ================  ==========  ================================================  =====================
    model called      CALLED      CALLED                                            AVERAGED
    pass stays local  USED        USED                                              AVERAGED
    pass is averaged  AVERAGED    AVERAGED                                          AVERAGED, and a warning
    optimizer steps   USED        USED; the third of one optimizer in a row raises  USED
    ================  ==========  ================================================  =====================

    An optimizer may run backward itself, in a closure. So no warning is logged while it steps, and averages of that
    time count as used when it returns. Nor is one logged before any optimizer has stepped, since training may do
    without one.

    Args:
        handle: the handle that averages. It keeps this object alive, not the other way round.
        named: name and tensor of each parameter whose gradient the handle averages, as optimizers know them.
        scaler: the gradient scaler that the handle was given.
        old: how old gradients are told from new ones, see :class:`Waiting`.
    """

    def __init__(
        self,
        handle: Averages,
        named: Iterable[tuple[str, Tensor]],
        scaler: torch.amp.GradScaler | None = None,
        *,
        old: Literal["versions", "hooks", "never"] = "versions",
    ) -> None:
        self._handle = weakref.ref(handle)
        self._scaler = scaler
        #: Which averages wait for an optimizer.
        self.waiting = Waiting(handle, list(named), old=old)
        self._state = Turn.USED
        #: The id of the optimizer that is stepping now; None between two steps.
        self._stepping: int | None = None
        self._momentum_said = False
        self._set_up_checked = False
        #: How many steps in a row each optimizer has made with gradients that were not averaged.
        self._local: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        for listener in (self, self.waiting):
            listen(listener)

    def called(self, *, averaged: bool) -> None:
        """Note that the model was called, and whether the gradients of this call will be averaged."""
        self.waiting.called(stepped=self._state is not Turn.AVERAGED or not self._lies_unused)
        if averaged and self._state is Turn.USED:
            self._state = Turn.CALLED

    def stays_local(self) -> None:
        """Note that they will not be: the model was called outside of ``no_sync``, but its backward runs inside."""
        if self._state is Turn.CALLED:
            self._state = Turn.USED

    def averaging(self) -> None:
        """Note that a step's gradients are about to be averaged. Warn if the last average was not used."""
        self.waiting.begins()
        taken_back = self.waiting.keeps and not self.waiting.any
        if self._state is Turn.AVERAGED and self._lies_unused and not taken_back:
            self._warn()
        self._state = Turn.AVERAGED
        self._local.clear()

    @property
    def _lies_unused(self) -> bool:
        """Whether an average has lain unused, if there is one: no optimizer steps, and one has stepped before."""
        return self._stepping is None and self.waiting.by_own

    def _warn(self) -> None:
        handle = self._handle()
        if handle is None or not handle.layers.stateful:
            return
        observer = handle.layers.observer
        if (handle.paused and observer is None) or handle.stats().last.skipped:  # after a skip, a scaler skips its step
            return
        momentum = ", and dgc applies momentum to them once more" if observer is not None else ""
        handle.layers.warn_once(
            "backward was averaged twice, and no optimizer stepped in between. The residual of the first average is "
            "added to the second. If gradients accumulate over several passes, run all but the last in "
            f"handle.no_sync(): otherwise averaged gradients are compressed again{momentum}. If the first average is "
            "not used, such as that of a GAN's discriminator while its generator learns, run that pass in "
            "handle.no_sync(), too. If both averages are used, as by SAM, or a step is skipped on purpose, ignore this "
            "warning"
        )

    def before_step(self, optimizer: torch.optim.Optimizer, *, trains: bool) -> None:
        """Note that an optimizer is about to step.

        Raises:
            UnsupportedError: it steps inside backward.
            RuntimeError: it has stepped several times in a row with gradients that were not averaged.
        """
        handle = self._handle()
        if handle is None or handle.removed:
            ignore(self)
            return
        ours = self.waiting.of(optimizer)
        first = next(ours, None)
        if first is None:
            return
        if first.grad is not None or any(p.grad is not None for p in ours):  # with a closure, gradients come later
            self._use(optimizer, handle)
        self._stepping = id(optimizer)

    def _use(self, optimizer: torch.optim.Optimizer, handle: Averages) -> None:
        """Check a step of an optimizer whose gradients have been computed."""
        name = type(optimizer).__name__
        observer = handle.layers.observer
        if not self._momentum_said:
            self._check_momentum(optimizer, observer, handle)
        if is_in_backward():
            raise UnsupportedError(
                f"{name} steps inside backward (in a hook of a parameter), before gradients are averaged; step it "
                "after backward has returned"
            )
        before, self._state = self._state, Turn.USED
        if before is Turn.AVERAGED and not self._set_up_checked:
            self._set_up_checked = True
            if handle.layers.stateful:
                self._check_set_up(optimizer, handle)
        if before is not Turn.CALLED or handle.paused:
            return
        self._local[optimizer] = steps = self._local.get(optimizer, 0) + 1
        if steps < STEPS_WITHOUT_AVERAGE:
            return
        if not any(
            map(says_something, self.waiting.of(optimizer))
        ):  # all zeros, as zero_grad(set_to_none=False) leaves them: this step trains nothing
            self._local[optimizer] = 0
            return
        raise RuntimeError(
            f"gradients are not averaged: {name} is about to make step {steps} in a row with gradients of the "
            "compressed model, which was called, but no backward pass through it was averaged. Convert a model "
            "(half(), to()) before it is wrapped, and compute gradients with backward(): those of torch.autograd.grad "
            "and torch.func are not averaged, except by an nb.Averager. If these steps are local on purpose, call "
            "handle.pause() or handle.remove() first"
        )

    def _check_momentum(self, optimizer: torch.optim.Optimizer, observer: State | None, handle: Averages) -> None:
        """Warn if the optimizer's momentum does not suit the spec: it may not have been passed at set-up, or a
        schedule may have changed it.
        """
        try:
            check_momentum(optimizer, observer, self.waiting.of(optimizer))
        except ValueError as error:
            self._momentum_said = True
            cycles = "If a learning rate schedule changes the momentum, pass cycle_momentum=False to the schedule"
            handle.layers.warn_once(f"{error}. {cycles}" if observer is not None and observer.momentum else f"{error}")

    def _check_set_up(self, optimizer: torch.optim.Optimizer, handle: Averages) -> None:
        """Warn of a scaler that the handle was not given, and of a run that resumes without the handle's state."""
        scaler = _scaler_of_this_step()
        if scaler is not None and scaler is not self._scaler:
            handle.layers.warn_once(
                "a GradScaler steps the optimizer, and compress_gradients was not given it. What has not been sent yet "
                "is then added to later gradients in the unit of an old loss scale. Pass grad_scaler= to "
                "compress_gradients"
            )
        if handle.step <= 1 and any(_has_trained(optimizer.state.get(p, {})) for p in self.waiting.of(optimizer)):
            handle.layers.warn_once(
                f"{type(optimizer).__name__} has stepped before, but residuals begin empty. If this run resumes from a "
                "checkpoint, load handle.state_dict() from it as well; otherwise what had not been sent never arrives. "
                "(narrowband.integrations does that in Accelerate, Lightning and Transformers.) If compression begins "
                "in the middle of a run on purpose, ignore this warning"
            )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped. Averages that its closure made count as used."""
        if self._stepping == id(optimizer):
            self._stepping = None
            if self._state is Turn.AVERAGED:
                self._state = Turn.USED


def _scaler_of_this_step() -> torch.amp.GradScaler | None:
    """Return the gradient scaler whose ``step`` has called the optimizer's; None if nobody scales gradients.

    A scaler leaves no trace on most optimizers, but it is among the callers.
    """
    step = torch.amp.GradScaler.step.__code__
    frame = sys._getframe()
    for _ in range(_CALLERS):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code is step:
            scaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
    return None


def _has_trained(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer's state of a parameter comes from training. Waits for the parameter's device.

    ``torch.distributed.checkpoint.state_dict`` makes one step with gradients of zero in order to create the state.
    """
    steps, velocity = state.get("step", 0), state.get("momentum_buffer")
    return float(steps) > 1 or (velocity is not None and bool(local(velocity).any()))
