"""Whether an optimizer's steps and a handle's averages take turns, as feedback supposes.

Feedback counts on every average being used, once. Some training loops break that, and nothing fails:

* the optimizer steps inside backward, parameter by parameter, before the average of any of them is there;
* gradients add up over several backward passes that are all averaged. Averages then come in again as if they were new
  gradients, and ``dgc`` applies momentum to them once more;
* averages are thrown away: those of a GAN's discriminator, when its generator learns. What feedback has not sent of
  them goes along with later gradients;
* the model is called, and its gradients come another way than averages do: from ``torch.autograd.grad``, or through a
  module that was converted (``.half()``, ``.to()``) inside of DistributedDataParallel, which then hears of none.

PyTorch tells of every optimizer's steps in the process. The first and the last are errors; the others, which may be
meant, a warning.
"""

from __future__ import annotations

import enum
import functools
import weakref
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from narrowband.averaging.core import is_in_backward
from narrowband.averaging.flat import local
from narrowband.averaging.optim import check_momentum
from narrowband.compiler import unseen
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch import Tensor

    from narrowband.averaging.layers import Layers
    from narrowband.averaging.stats import StepStats
    from narrowband.feedback import State
    from narrowband.stats import Stats

__all__ = ["STEPS_WITHOUT_AVERAGE", "Averages", "Steps", "Turn"]

#: An optimizer may step so often with gradients that nobody averaged. One may be a warm-up of somebody's own; three in
#: a row are a training loop.
STEPS_WITHOUT_AVERAGE = 3


class Averages(Protocol):
    """What is asked of a handle."""

    @property
    def layers(self) -> Layers:
        """What is averaged."""

    @property
    def paused(self) -> bool:
        """Whether averages are uncompressed for now."""

    @property
    def removed(self) -> bool:
        """Whether nothing is averaged any more."""

    def stats(self) -> Stats[StepStats]:
        """Of the steps so far."""


class Turn(enum.Enum):
    """Where a handle's averages and optimizers' steps stand."""

    #: Nothing is to be expected: all that was averaged has been used, and the model was not called since.
    USED = enum.auto()
    #: The model was called, and an average of that is to be expected.
    CALLED = enum.auto()
    #: There is an average that no optimizer has used.
    AVERAGED = enum.auto()


class Steps:
    """The steps that optimizers make with the gradients of one handle.

    What happens in which state (:class:`Turn`), and which is next:

    ================  ==========  ================================================  =====================
    what happens      ``USED``    ``CALLED``                                        ``AVERAGED``
    ================  ==========  ================================================  =====================
    model called      CALLED      CALLED                                            AVERAGED
    pass stays local  USED        USED                                              AVERAGED
    pass is averaged  AVERAGED    AVERAGED                                          AVERAGED, and a warning
    optimizer steps   USED        USED; the third of one optimizer in a row raises  USED
    ================  ==========  ================================================  =====================

    An optimizer may run backward itself, in a closure. So nothing is warned of while it steps, and what was averaged
    meanwhile is used when it has. Nor is it before any optimizer has stepped: there are other ways to train.

    Args:
        handle: that averages them. It keeps this, and this does not keep it.
        parameters: whose gradients these are, as optimizers know them.
    """

    def __init__(self, handle: Averages, parameters: Iterable[Tensor]) -> None:
        self._handle = weakref.ref(handle)
        self._ours = {id(p): weakref.ref(p) for p in parameters if p.requires_grad}
        self._state = Turn.USED
        #: Who steps: the optimizer that is about it now, by its id; None between two steps; "nobody" before the first.
        self._stepping: int | Literal["nobody"] | None = "nobody"
        self._momentum_said = False
        #: How many steps in a row each optimizer has made with gradients that nobody averaged.
        self._local: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        _listen()
        _all.add(self)

    def called(self) -> None:
        """The model was called, and the gradients of that will be averaged."""
        if self._state is Turn.USED:
            self._state = Turn.CALLED

    def stays_local(self) -> None:
        """They will not: the model was called outside of ``no_sync``, and backward runs in it."""
        if self._state is Turn.CALLED:
            self._state = Turn.USED

    def averaging(self) -> None:
        """A step's gradients are about to be averaged."""
        if self._state is Turn.AVERAGED and self._stepping is None:
            self._warn()
        self._state = Turn.AVERAGED
        self._local.clear()

    def _warn(self) -> None:
        handle = self._handle()
        if handle is None or not handle.layers.stateful:
            return
        observer = handle.layers.observer
        if (handle.paused and observer is None) or handle.stats().last.skipped:  # then a scaler skips the step
            return
        momentum = ", and dgc applies momentum to it once more" if observer is not None else ""
        handle.layers.warn_once(
            "backward was averaged twice, and no optimizer stepped in between. What compression has not sent of the "
            "first average is added to the second. Where gradients add up over several passes, run all but the last in "
            f"handle.no_sync(): what has arrived is compressed again otherwise{momentum}. Where an average is thrown "
            "away, as that of a GAN's discriminator when its generator learns, run that pass in it, too. Where both "
            "are used, as by SAM, or a step is left out on purpose, go on"
        )

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step.

        Raises:
            UnsupportedError: inside backward.
            RuntimeError: it did so several times in a row with gradients that nobody averaged.
        """
        handle = self._handle()
        if handle is None or handle.removed:
            _all.discard(self)
            return
        ours = self._of(optimizer)
        first = next(ours, None)
        if first is None:
            return
        if first.grad is not None or any(p.grad is not None for p in ours):  # those of a closure are still to come
            self._use(optimizer, handle)
        self._stepping = id(optimizer)

    def _use(self, optimizer: torch.optim.Optimizer, handle: Averages) -> None:
        """An optimizer is about to step by gradients that are there."""
        name = type(optimizer).__name__
        observer = handle.layers.observer
        if observer is not None and not self._momentum_said:
            self._check_momentum(optimizer, observer, handle)
        if is_in_backward():
            raise UnsupportedError(
                f"{name} steps inside backward (in a hook of a parameter), before the averages arrive; step it when "
                "backward has returned"
            )
        before, self._state = self._state, Turn.USED
        if before is not Turn.CALLED or handle.paused:
            return
        self._local[optimizer] = steps = self._local.get(optimizer, 0) + 1
        if steps < STEPS_WITHOUT_AVERAGE:
            return
        if not any(
            map(_says_something, self._of(optimizer))
        ):  # as zero_grad(set_to_none=False) leaves them: it does not learn now
            self._local[optimizer] = 0
            return
        raise RuntimeError(
            f"nothing is averaged: {name} is about to make step {steps} in a row with gradients of the compressed "
            "model, which was called, but no backward pass through it was averaged. Convert a model (half(), to()) "
            "before it is wrapped, and let gradients come from backward(): those of torch.autograd.grad and torch.func "
            "stay with their rank, unless an nb.Averager averages them. If these steps are local on purpose, call "
            "handle.pause() or handle.remove() first"
        )

    def _check_momentum(self, optimizer: torch.optim.Optimizer, observer: State, handle: Averages) -> None:
        """Say so where momentum is not what it was at set-up, or nobody has looked there: schedules may cycle it."""
        try:
            check_momentum(optimizer, observer, self._of(optimizer))
        except ValueError as error:
            self._momentum_said = True
            handle.layers.warn_once(f"{error}. If a schedule changes it, give that cycle_momentum=False")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped, by the averages of its closure if it has one."""
        if self._stepping == id(optimizer):
            self._stepping = None
            if self._state is Turn.AVERAGED:
                self._state = Turn.USED

    def _of(self, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        """The parameters of an optimizer that are this handle's, too."""
        return (p for group in optimizer.param_groups for p in group["params"] if self._is_ours(p))

    def _is_ours(self, p: Tensor) -> bool:
        reference = self._ours.get(id(p))
        return reference is not None and reference() is p


def _says_something(p: Tensor) -> bool:
    """Whether a gradient is there and not all zeros."""
    if p.grad is None:
        return False
    x = local(p.grad)
    return bool((x._values() if x.is_sparse else x).any())


_all: weakref.WeakSet[Steps] = weakref.WeakSet()


@functools.cache
def _listen() -> None:
    """Hear of every optimizer's steps, for as long as the process lives."""

    @unseen
    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for each in tuple(_all):
            each.before_step(optimizer)

    @unseen
    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for each in tuple(_all):
            each.after_step(optimizer)

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
