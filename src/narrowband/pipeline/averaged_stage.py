"""A stage of PyTorch's own pipeline engine whose gradients are averaged once per step, after the last micro-batch.

Every micro-batch runs backward, and only the last may average. PyTorch's stage sees to that where DDP or FSDP2 averages
the stage's module. :class:`AveragedStage` also does so for handles of :func:`~narrowband.compress_gradients`, and
refuses what would average after single micro-batches, or never.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from narrowband.averaging.who import averaging_of, bare, ddp_of, units_of
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["AveragedStage"]


class AveragedStage(PipelineStage):
    """A pipeline stage that averages the gradients of its module among replicas, if anything does.

    Args:
        submodule: the part of the model that runs here.
        *args: the other arguments of ``PipelineStage``, as are ``**options``.

    Raises:
        UnsupportedError: PyTorch's stage cannot see what averages the submodule.
    """

    def __init__(self, submodule: nn.Module, *args: Any, **options: Any) -> None:
        if submodule is not bare(submodule) and ddp_of(submodule) is not None:
            raise UnsupportedError(
                "the submodule is torch.compile(DistributedDataParallel(part)), which PyTorch's stage does not "
                "recognize as a DistributedDataParallel: it would average after single micro-batches, and replicas "
                "would diverge. Compile first: DistributedDataParallel(torch.compile(part))"
            )
        super().__init__(submodule, *args, **options)

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        """Run backward without averaging: a handle of ``compress_gradients`` averages after the last micro-batch."""
        if backward_type == "input":
            # PyTorch looks for the module's parameters in the graph, which holds the unsharded ones, before it runs the
            # graph. Where FSDP2 has resharded after forward, it would find none, and they would get no gradients.
            for each in units_of(self.submod):
                each.unshard()
        handle = averaging_of(self.submod)
        with contextlib.nullcontext() if handle is None else handle.no_sync():
            return super().backward_maybe_with_nosync(backward_type, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradients of the parameters for a micro-batch; zero bubble schedules do this in a separate pass.

        Raises:
            UnsupportedError: DDP averages the module; or see :meth:`_check_units`.
        """
        if ddp_of(self.submod) is not None:
            raise UnsupportedError(
                "a zero bubble schedule computes gradients of parameters in a separate pass, which "
                "DistributedDataParallel does not notice, so replicas would diverge. Remove DistributedDataParallel, "
                "and average with compress_gradients(part, spec, process_group=…), where the spec 'none' does not "
                "compress"
            )
        self._check_units("a zero bubble schedule")
        return super().backward_weight_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Average gradients and scale them: once per step, after the backward of all micro-batches.

        Schedules call this in ``eval``, too, where parameters have the gradients of the last step, or none; nothing is
        averaged then.
        """
        if not self.has_backward:
            return
        handle = averaging_of(self.submod)
        if handle is None or self._reduces_in_two_calls:
            super().perform_reduce_grad(grad_scale_factor)
            return
        self._check_units("compress_gradients")
        with handle.no_sync():  # in here FSDP2 reduces among the ranks of one replica
            super().perform_reduce_grad(1)
        self._average(handle, grad_scale_factor)

    def start_gradient_reduction(self) -> None:
        """Let FSDP2 begin to reduce gradients among the ranks of one replica (newer versions of PyTorch call this)."""
        handle, stage = averaging_of(self.submod), cast("Any", super())
        with contextlib.nullcontext() if handle is None else handle.no_sync():
            stage.start_gradient_reduction()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """Wait for FSDP2, average gradients among the replicas, and scale them."""
        handle, stage = averaging_of(self.submod), cast("Any", super())
        if handle is None:
            stage.wait_for_gradient_reduction(grad_scale_factor)
            return
        stage.wait_for_gradient_reduction(1)
        self._average(handle, grad_scale_factor)

    def _average(self, handle: Any, grad_scale_factor: int) -> None:
        handle.average()
        if grad_scale_factor != 1:
            self.scale_grads(grad_scale_factor)

    def _check_units(self, who: str) -> None:
        """Check that PyTorch's stage will have FSDP2 reduce gradients after the last micro-batch.

        It does so only where ``fully_shard`` was called with the stage's module itself.

        Raises:
            UnsupportedError: ``fully_shard`` was called with modules inside of the stage's module only.
        """
        units: list[Any] = units_of(self.submod)
        if units and self.submod not in units:
            raise UnsupportedError(
                f"{who} needs FSDP2 to reduce gradients after the last micro-batch. PyTorch's stage does this only if "
                "fully_shard was called with the stage's module itself, but it was called only with modules inside "
                f"this {type(self.submod).__name__}: call fully_shard(part), too. If the part is compiled, compile its "
                "layers instead, or compile in place with part.compile()"
            )

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        with self._unnoticed():
            return super()._prepare_forward_infra(num_microbatches, *args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._unnoticed():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextlib.contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """Run the module such that nothing is left of the run, without averaging gradients and without compressing
        saved tensors.

        Where shapes are not given, PyTorch infers them before the first step: it runs a stage forward on uninitialized
        memory, and backward to its inputs. :func:`~narrowband.compress_activations` must neither learn ranges from that
        run nor count its bytes, so hooks here save tensors unchanged. DDP must not prepare to average either: it would
        average after the first micro-batch, and again after the last. Buffers, such as the statistics of batch norm,
        and the states of random generators are restored: a run that resumes infers shapes, too, and has to go on with
        the same bits.
        """
        model = ddp_of(self.submod) or averaging_of(self.submod)
        waiting = contextlib.nullcontext() if model is None else model.no_sync()
        plain = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _as_it_is)
        drawing = torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
        with waiting, plain, drawing, _restored(self.submod):
            yield

    @property
    def _reduces_in_two_calls(self) -> bool:
        """Whether PyTorch's stage lets FSDP2 reduce gradients in :meth:`start_gradient_reduction`, and waits for it in
        :meth:`wait_for_gradient_reduction`, as PyTorch 2.15 does. Schedules of several stages call these two instead of
        :meth:`perform_reduce_grad`, which calls both.
        """
        return hasattr(PipelineStage, "start_gradient_reduction") and isinstance(self.submod, FSDPModule)


def _as_it_is(x: Tensor) -> Tensor:
    return x


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore all buffers of a module at the end."""
    before = [(own, name, x, x.clone()) for own in module.modules() for name, x in own.named_buffers(recurse=False)]
    try:
        yield
    finally:
        for own, name, x, was in before:
            if getattr(own, name) is not x:
                setattr(own, name, x)
            x.data.copy_(was)  # not x itself: a backward pass that comes later may have saved it
