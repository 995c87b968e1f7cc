"""Gradient compression for DistributedDataParallel, as one communication hook.

DDP cuts the gradients into buckets and calls the hook when a bucket is complete, while backward goes on. The hook feeds
the bucket to the core of averaging (:mod:`narrowband.averaging.core`) and returns a future, for which DDP waits at the
end of backward.

An error in an exchange must not leave DDP in the middle of its backward. So its buckets are filled with NaN, DDP ends
its work, and then the error itself is raised from ``backward()``.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from narrowband.averaging.handle import Handle
from narrowband.averaging.parameters import norms_of
from narrowband.averaging.settings import EARLY_NBYTES, MESSAGE_NBYTES, Settings
from narrowband.errors import UnsupportedError
from narrowband.gradients.hook import hook_of
from narrowband.gradients.refused import what_it_is

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket

    from narrowband.adapt import Plan, Policy
    from narrowband.codecs import Codec
    from narrowband.collectives import Collective
    from narrowband.feedback import Compression, Method
    from narrowband.gradients.hook import Hook

__all__ = ["GradientCompression", "compress_gradients"]


def compress_gradients(
    ddp_model: DistributedDataParallel,
    spec: str | Codec | Compression | Method | Plan | Policy,
    *,
    min_numel: int = 1024,
    warmup_steps: int = 0,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    collective: Collective | Literal["auto"] = "auto",
    grad_scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    small: str | Codec = "uncompressed",
    message_nbytes: int = MESSAGE_NBYTES,
    early_nbytes: int = EARLY_NBYTES,
) -> GradientCompression:
    """Compress the gradients that ``ddp_model`` averages. Call it on all ranks, once, before the first backward.

    Args:
        ddp_model: the wrapped model; nothing else of the training loop changes.
        spec: codec and feedback, such as ``"topk:density=0.01+ef"``, ``"qsgd:bits=4"`` or ``"none"``; or a plan that
            has one for every layer; or a policy such as :class:`~narrowband.LGreCo`, which plans while training runs.
        min_numel: parameters with fewer elements count as small, as do all biases and norms.
        small: what happens to these: ``"uncompressed"``, they travel as they are; ``"fused"``, they make one vector of
            the whole model, compressed like any layer; or a codec for that vector which keeps more, such as
            ``"topk:density=0.03"``. Where 1 in 1,000 is sent, the small ones are most of the bytes otherwise.
        warmup_steps: average uncompressed until this many steps are done; early gradients change fast.
        process_group: the ranks to average over; by default the model's own.
        seed: for stochastic rounding and sampling. Equal seeds, equal runs.
        collective: ``"auto"`` takes the one that sends least (see :mod:`narrowband.collectives.choice`).
        grad_scaler: the scaler of mixed-precision training, if there is one. The residual is in units of scaled
            gradients, and is rescaled when the scale changes.
        optimizer: the one that will step, to check that momentum is not applied twice (``dgc`` applies it before the
            wire).

        message_nbytes: payloads of several buckets travel in one message until a rank has so many bytes to send.
        early_nbytes: where the small parameters of a model's end take so many bytes, they are sent before backward
            ends.

    ``model.join()`` works: ranks that have run out of data send zeros, and keep their residuals (with ``ef21``, which
    has no residual, zero counts as their gradient). Its
    ``divide_by_initial_world_size=False`` is refused by the first backward.

    Returns:
        A handle: :meth:`~GradientCompression.stats`, :meth:`~GradientCompression.pause`,
        :meth:`~GradientCompression.state_dict` …

    Raises:
        TypeError: not a DistributedDataParallel model; says what to do with what it is.
        ValueError: a spec, a number or a collective that does not exist, momentum in both places, or ranks that
            disagree.
        UnsupportedError: the model already has a hook, or does what no hook can follow; or a spec that is not for
            gradients (``aq-sgd``).

    Example:
        >>> model = DistributedDataParallel(model)
        >>> handle = nb.compress_gradients(model, "topk:density=0.01+ef")
        >>> loss(model(x)).backward()  # averages arrive compressed
        >>> print(f"{handle.stats().total.ratio:.0f}x less traffic")
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(f"compress_gradients takes a DistributedDataParallel model, not {what_it_is(ddp_model)}")
    settings = Settings.of(
        spec,
        min_numel=min_numel,
        warmup_steps=warmup_steps,
        seed=seed,
        collective=collective,
        small=small,
        message_nbytes=message_nbytes,
        early_nbytes=early_nbytes,
        grad_scaler=grad_scaler,
    )
    if small != "uncompressed" and ddp_model.find_unused_parameters:
        raise UnsupportedError(
            f"small={str(small)!r} cannot tell which parts of its vector had no gradient, which "
            "find_unused_parameters=True allows; use small='uncompressed'"
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in ddp_model.parameters()):
        raise UnsupportedError(
            "this model's optimizer steps inside backward (_apply_optimizer_in_backward), before the averages arrive; "
            "step it after backward instead"
        )
    hook = hook_of(ddp_model)
    group = process_group or ddp_model.process_group
    parameters = list(ddp_model.module.named_parameters())
    settings = settings.with_optimizer(optimizer, parameters, warn=dist.get_rank(group) == 0)
    return GradientCompression(ddp_model, hook, settings, group)


class GradientCompression(Handle):
    """The handle of :func:`compress_gradients`. ``repr(handle)`` says what it does and what it has saved."""

    def __init__(
        self, model: DistributedDataParallel, hook: Hook, settings: Settings, group: dist.ProcessGroup
    ) -> None:
        super().__init__(
            model.module.named_parameters(),
            norms_of(model.module),
            settings,
            group,
            set_up="compress_gradients",
            step="backward",
            later=_at_the_end_of_backward,
        )
        self._buckets: list[list[str]] = []
        self._coming: list[list[str]] = []
        self._hook = weakref.ref(hook)
        self._model = weakref.ref(model)
        hook.attach(self)

    @property
    def buckets(self) -> list[list[str]]:
        """The layers of each bucket that DDP made, in the order in which they are sent, as of the last step."""
        return [list(names) for names in self._buckets]

    def remove(self) -> None:
        """Take compression off: the model averages as plain DDP does, to the bit. Call on all ranks, between steps.

        Residuals are dropped, so save :meth:`state_dict` before if you may want to go on. The process group, threads
        and memory of the handle are given back. :meth:`stats` remains, and
        :func:`~narrowband.compress_gradients` may be called for the model again. When the model and the handle are
        garbage, the same happens by itself. (The group is kept for the next handle among the same ranks.)

        Raises:
            RuntimeError: called inside backward.
            DisagreementError: some rank does something else.
        """
        super().remove()
        hook = self._hook()
        if hook is not None and hook.handle is self:
            hook.detach()

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket; for the hook, which DDP calls when a bucket's gradients are ready."""
        if not self.in_step:
            self._check_join()
        parameters = [self.layers.parameters.by_tensor[p] for p in bucket.parameters()]
        self._coming.append([parameter.name for parameter in parameters if parameter.compressed])
        if bucket.is_last():
            self._buckets, self._coming = [names for names in self._coming if names], []
        return self.feed(bucket.buffer(), [parameter.name for parameter in parameters], last=bucket.is_last())

    def _check_join(self) -> None:
        model = self._model()
        if model is not None and not getattr(model, "_divide_by_initial_world_size", True):
            raise UnsupportedError(
                "join(divide_by_initial_world_size=False) divides by the number of ranks that still have data, "
                "which compressed averages do not know; use join(divide_by_initial_world_size=True), the default"
            )


def _at_the_end_of_backward(what: Callable[[], None]) -> bool:
    """Call ``what`` when the backward that runs here has ended, after DDP has ended its part; False outside of one.

    What it raises, ``backward()`` raises.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    try:
        # DDP queues its own callback when the last bucket is with the hook. A callback that is queued by a callback is
        # called after all that were queued in backward.
        queue(lambda: queue(what))
    except RuntimeError:  # a rank that has run out of data calls hooks without a backward
        return False
    return True
