"""Gradient compression for DistributedDataParallel, as one communication hook.

DDP cuts the gradients into buckets and calls the hook when a bucket is complete, while backward goes on. The hook feeds
the bucket to the core of averaging (:mod:`narrowband.averaging.core`) and returns a future. DDP waits for the futures
at the end of backward.

An error in an exchange must not leave DDP in the middle of its backward. So the buckets are filled with NaN, DDP
completes its work, and only then does ``backward()`` raise the error.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch

from narrowband.averaging.core import BROKE_OFF, is_in_backward
from narrowband.averaging.parameters import norms_of
from narrowband.averaging.who import averaged_by
from narrowband.errors import UnsupportedError
from narrowband.gradients.handle import GradientCompression
from narrowband.gradients.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import torch.distributed as dist
    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket
    from torch.nn.parallel import DistributedDataParallel

    from narrowband.averaging.settings import Settings
    from narrowband.gradients.hook import Hook

__all__ = ["DDPCompression", "at_the_end_of_backward"]


class DDPCompression(GradientCompression):
    """The handle of a model in DistributedDataParallel.

    Args:
        model: the wrapped model.
        hook: the model's communication hook.
        settings: how to compress and average.
        group: the ranks that average.
        tensors: name and tensor of everything that is averaged; by default the model's parameters.
        norms: the tensors among these that belong to normalization layers.
        inside: if ``tensors`` are shards of the parameters: the ranks of this node, which average the other shards.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        hook: Hook,
        settings: Settings,
        group: dist.ProcessGroup,
        *,
        tensors: Iterable[tuple[str, Tensor]] | None = None,
        norms: Collection[Tensor] | None = None,
        inside: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            averaged_by(model) if tensors is None else tensors,
            norms_of(model.module) if norms is None else norms,
            settings,
            group,
            set_up="compress_gradients",
            step="backward",
            inside=inside,
            mates=[] if inside is None else [inside],
            owners=None if tensors is None else dict(averaged_by(model)),
            later=at_the_end_of_backward,
        )
        self._all_used = not model.find_unused_parameters
        self._static = model.static_graph
        self._trained = sum(p.requires_grad for _, p in averaged_by(model))
        self._lacking = self._trained  # parameters whose gradients are still to come in this step
        # Whether the backward pass of the latest step returned. If buckets are missing all the same, parameters were
        # not used, of which DistributedDataParallel tells.
        self._returned = True
        self._buckets: list[list[str]] = []
        self._coming: list[list[str]] = []
        self._hook = weakref.ref(hook)
        self._model = weakref.ref(model)
        if self.size > 1:
            unused: Literal["versions", "hooks"] = "hooks" if model.gradient_as_bucket_view else "versions"
            old = "never" if self._all_used else unused
            self._steps = Steps(self, averaged_by(model), settings.grad_scaler, old=old)
            self._waiting = self._steps.waiting
            if model.require_forward_param_sync:  # else the pass before was in no_sync, and no step has followed
                self._waiting.begin_between_steps()
        hook.attach(self)

    def _zeros_count(self, *, in_backward: bool) -> bool:
        """See :meth:`Averaging._zeros_count`. False with ``find_unused_parameters``, because DDP drops the averages of
        parameters that no rank has used. False without a backward, because a rank that has run out of data (``join``)
        takes part with zeros.
        """
        return self._all_used and in_backward

    def called(self, *, averaged: bool) -> None:
        """Note that the model was called. The hook calls this.

        Args:
            averaged: whether that was outside of ``no_sync``.

        Raises:
            RuntimeError: the backward pass before ended early, while gradients were being exchanged.
        """
        if averaged and self._broke_off() and not self._returned:
            raise RuntimeError(f"forward: {BROKE_OFF}")
        if self._steps is not None:
            self._steps.called(averaged=averaged)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the model's own ``no_sync``; see :meth:`GradientCompression.no_sync`."""
        model = self._model()
        return nullcontext() if model is None else model.no_sync()

    def remove(self) -> None:
        """Remove compression: from now on the model averages as plain DDP does, bit for bit. Call on all ranks, between
        steps. It may also be called after a step that broke off; the model then has to be wrapped in DDP again.

        Residuals are dropped, so save :meth:`state_dict` first if you may want to resume. The handle's process group,
        threads and memory are released. :meth:`stats` stays available, and :func:`~narrowband.compress_gradients` may
        be called for the model again. Garbage collection of the model and the handle does the same. (The group is kept
        for the next handle among the same ranks.)

        Raises:
            RuntimeError: called inside backward.
            DisagreementError: another rank makes another call.
        """
        super().remove()
        self._detach()

    def _detach(self) -> None:
        hook = self._hook()
        if hook is not None and hook.handle is self:
            hook.detach()

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket. DDP calls the hook, and so this, when a bucket's gradients are ready."""
        if not self.in_step:
            self._begin()
        names = [self.layers.parameters.by_tensor[p].name for p in bucket.parameters()]
        return self.feed(bucket.buffer(), names, last=self._take(bucket, names))

    def _take(self, bucket: GradBucket, names: Sequence[str]) -> bool:
        """Note that a bucket has arrived, leave old gradients out, and return whether the bucket is the step's last.

        Args:
            bucket: the bucket.
            names: of what this rank averages of it.
        """
        by_name = self.layers.parameters.by_name
        self._coming.append([name for name in names if by_name[name].compressed])
        self._leave_out(bucket)
        last = self._is_last(bucket)
        if last:
            self._buckets, self._coming = [own for own in self._coming if own], []
        return last

    def _leave_out(self, bucket: GradBucket) -> None:
        """Set old gradients in a bucket to zero: those with which an optimizer has stepped already, and those that were
        not finite before.

        A parameter that this pass did not use may still have the gradient of an earlier step, as where each optimizer
        of a GAN clears only its own gradients. DDP puts it into the bucket as if it were new, and drops the average if
        no rank used the parameter. Feedback would take it for a gradient that has been sent.
        """
        steps = self._steps
        if steps is None or not self.layers.stateful or (self._all_used and not steps.waiting.spoilt):
            return
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if steps.waiting.is_spoilt(p) or (not self._all_used and steps.waiting.is_used_up(p)):
                gradient.zero_()

    def _is_last(self, bucket: GradBucket) -> bool:
        """Return whether a bucket is the last of this step. Call it once per bucket.

        In the first step of a static graph DDP says so of none if there are several, as with parameters of two dtypes
        or sparse gradients. All parameters are in buckets there.
        """
        self._lacking -= len(bucket.parameters())
        return bucket.is_last() or (self._static and not self._lacking)

    def _begin(self) -> None:
        """Begin a step: its first bucket has arrived."""
        self._check_join()
        self._lacking = self._trained
        self._returned = False
        at_the_end_of_backward(self._note_return)
        if self._steps is not None and is_in_backward():  # a rank that has run out of data has no backward
            self._steps.averaging()

    def _note_return(self) -> None:
        self._returned = True
        if self._steps is not None:
            self._steps.waiting.averaged()

    def _check_join(self) -> None:
        model = self._model()
        if model is not None and not getattr(model, "_divide_by_initial_world_size", True):
            raise UnsupportedError(
                "join(divide_by_initial_world_size=False) divides by the number of ranks that still have data, but "
                "compressed averages always divide by the number of all ranks; use "
                "join(divide_by_initial_world_size=True), the default"
            )


def at_the_end_of_backward(what: Callable[[], None]) -> bool:
    """Call ``what`` at the end of the backward pass that this thread runs, after DDP has completed its own part.

    An exception of ``what`` is raised from ``backward()``.

    Returns:
        False outside of a backward pass: ``what`` will not be called.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    try:
        # DDP queues its own callback after it has given the hook the last bucket. A callback that is queued by a
        # callback runs after all callbacks that were queued in backward.
        queue(lambda: queue(what))
    except RuntimeError:  # a rank that has run out of data calls hooks without a backward
        return False
    return True
