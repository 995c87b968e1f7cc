"""Gradient compression for models that nothing else averages: plain modules, and replicas that FSDP2 shards.

A ``register_post_accumulate_grad_hook`` runs when a parameter has its gradient (with FSDP2: when this rank has its
shard of it). Gradients are sent in groups, from the model's end to its beginning, as DDP's buckets are. A group is fed
to the core of averaging when all of its gradients have arrived and all groups before it were fed, so that all ranks
send the same in the same order. At the end of backward, the missing gradients are sent as zeros, because no rank knows
whether another rank has a gradient there. Then backward waits for the averages and writes them into ``.grad``.

If a step has several backward passes, all but the last run inside :meth:`ModuleCompression.no_sync`; or all of them do,
and a call of :meth:`ModuleCompression.average` follows. A pipeline stage does the latter, since zero-bubble schedules
set ``grad`` themselves, which runs no hook. With a sharded model, the last pass must run outside, or the caller must
let FSDP2 reduce the accumulated gradients, as a stage does: before that there is nothing to average.

If the ranks of a replica hold parts of it and one part of the gradients is not finite, the other ranks would still
commit their feedback, while a gradient scaler skips the step on all ranks. So with feedback, the ranks of a replica
compare flags when all gradients of a step have arrived. If one rank has seen inf or NaN, each rank fills the last group
that it has a part of with NaN.

A step ends with the outermost backward, which hooks on the model's outputs detect. A checkpoint with
``use_reentrant=True`` runs backward inside of backward, and a parameter that it uses may get its gradient in several
parts. A part that arrives after the parameter was sent is an error. So is an inner backward if no tensors to hook were
found in the outputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowband.averaging.core import BROKE_OFF, is_in_backward
from narrowband.averaging.flat import groups_of
from narrowband.averaging.gradient_group import GradientGroup
from narrowband.averaging.parameters import norms_of, rounded, sparse_of
from narrowband.averaging.replicas import begin_with_the_first, groups_of_replica
from narrowband.averaging.who import averaged_by, bare, ddp_around, forget, remember, units_of
from narrowband.collectives import borrow
from narrowband.compiler import refuse_compiled_autograd, unseen
from narrowband.errors import UnsupportedError
from narrowband.gradients.handle import GradientCompression
from narrowband.gradients.left import Left
from narrowband.gradients.steps import Steps

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator, Mapping

    from torch.utils.hooks import RemovableHandle

    from narrowband.averaging.agreement import Facts
    from narrowband.averaging.parameters import Parameter
    from narrowband.averaging.settings import Settings
    from narrowband.collectives import Loan

__all__ = ["ModuleCompression"]


class ModuleCompression(GradientCompression):
    """The handle of a model that is not in DistributedDataParallel.

    Args:
        model: the plain or sharded module, or the wrapper that torch.compile made of it.
        settings: how to compress and average.
        group: the ranks that hold the same part of each replica.
        inside: the ranks that hold the parts of this replica, if it is sharded.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, group: dist.ProcessGroup, inside: dist.ProcessGroup | None = None
    ) -> None:
        module = bare(model)
        super().__init__(
            module.named_parameters(),
            norms_of(module),
            settings,
            group,
            set_up="compress_gradients",
            step="backward",
            inside=inside,
            mates=groups_of_replica(module),
        )
        begin_with_the_first(module, self.process_group)
        by_tensor = self.layers.parameters.by_tensor
        sparse = sparse_of(module)
        alone = {p for each in module.modules() if getattr(each, "sparse", False) for p in each.parameters(False)}
        self._groups = [
            GradientGroup(some, by_tensor, sparse) for some in groups_of(by_tensor, alone=alone.__contains__)
        ]
        self._tells_at = max((at for at, group in enumerate(self._groups) if group.numel), default=0)
        self._replica: Loan | None = None
        if inside is not None and dist.get_world_size(inside) > 1 and self.layers.stateful:
            self._replica = borrow(inside, self.device)
            self._return = weakref.finalize(self, self._replica.give_back)
        self._group_of = {p: at for at, group in enumerate(self._groups) for p in group.parameters}
        by_name = self.layers.parameters.by_name
        layers = ([name for name in group.names if by_name[name].compressed] for group in self._groups)
        self._buckets = [names for names in layers if names]
        self._module = weakref.ref(module)
        self._syncing = True
        self._torn = False  # whether a step broke off after some of its groups were fed
        self._sharded = any(hasattr(p, "device_mesh") for p in by_tensor)
        self._unreduced = False  # whether FSDP2 holds unreduced gradients of passes in no_sync
        self._small = _small_shards(module, by_name, settings.min_numel)
        if whole := _outside_of_units(module):
            self.layers.warn_once(
                f"{', '.join(whole)} are in no module that fully_shard was called with. The ranks of a replica do not "
                "average their gradients, so these parameters become different on each: call fully_shard(model) too"
            )
        if warning := rounded(module.named_parameters()):
            self.layers.warn_once(warning)
        self._reset()
        if self.size > 1:
            self._steps = Steps(self, ((own.name, p) for p, own in by_tensor.items()), settings.grad_scaler)
            self._waiting = self._steps.waiting
            self._waiting.begin_between_steps()
        own = weakref.ref(self)
        self._arrivals: dict[Tensor, RemovableHandle] = {p: _tell_of_arrival(p, own) for p in by_tensor}
        self._of_model = model.register_forward_hook(Outputs(own))
        remember(module, self, group)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Reset what belongs to a single step."""
        self._backward: int | None = None  # the id of the outermost backward, which ends the step
        self._lacking = [set(group.parameters) for group in self._groups]
        self._futures: list[torch.futures.Future[Tensor]] = []
        self._seen = torch.zeros((), dtype=torch.float32, device=self.device)  # NaN where a gradient was not finite
        self._any = False

    def called(self) -> None:
        """Note that the model was called.

        Raises:
            UnsupportedError: it was called by a DistributedDataParallel that averages the same gradients.
        """
        if self._syncing and (around := ddp_around()) is not None:
            twice = [name for name, p in averaged_by(around) if p in self.layers.parameters.by_tensor]
            if twice:
                raise UnsupportedError(
                    f"a DistributedDataParallel averages gradients of this model too, without compression ({twice[0]}"
                    f"{f' and {len(twice) - 1} more' if len(twice) > 1 else ''}); pass the DistributedDataParallel to "
                    "compress_gradients instead of the module inside it, or leave DistributedDataParallel out"
                )
        if self._steps is not None:
            self._steps.called(averaged=self._syncing)

    def begin(self, *, early: bool = True) -> None:
        """Note that the running backward pass reaches the model's parameters.

        Args:
            early: whether it has not reached any yet.
        """
        if self._removed:
            return
        if self._steps is not None and early:
            self._steps.waiting.begins()
        if not self._syncing:
            self._unreduced = self._sharded
            if self._steps is not None:
                self._steps.stays_local()
            return
        refuse_compiled_autograd()
        running = torch._C._current_graph_task_id()  # noqa: SLF001 - as torch.autograd.graph does
        if self._backward == running:
            return
        if self._backward is not None:  # the previous backward broke off before its end
            self._torn |= bool(self._futures)
            self._reset()
        if self._torn:
            raise RuntimeError(f"backward: {BROKE_OFF}")
        self._backward = running
        if early:
            self._hook_last()
        queue = torch.autograd.Variable._execution_engine.queue_callback
        # Runs after the callbacks of FSDP2, one of which reduces the rest of the gradients. If several handles average
        # in this pass, all of them send the rest before any waits: ranks may have called their models in other orders.
        end = unseen(self._end)

        @unseen
        def send() -> None:
            self._send_rest()
            queue(end)

        queue(unseen(lambda: queue(send)))

    def _hook_last(self) -> None:
        """Hook parameters again that users have hooked since, so that a gradient is sent as their hooks leave it."""
        own = weakref.ref(self)
        for p, hook in self._arrivals.items():
            if next(reversed(cast("Any", p)._post_accumulate_grad_hooks)) != hook.id:
                hook.remove()
                self._arrivals[p] = _tell_of_arrival(p, own)

    def arrived(self, p: Tensor) -> None:
        """Note that a parameter has its gradient, and feed all groups that are complete now."""
        if self._unreduced and hasattr(p, "device_mesh"):
            self._unreduced = False
        if self._removed or not self._syncing:
            return
        if self._backward is None:  # no hook on the model's outputs has called begin()
            if not is_in_backward():
                raise UnsupportedError(
                    "FSDP2 has reduced gradients outside of backward, as after set_manual_backward_finalization(True), "
                    "and compress_gradients averages them at the end of backward: leave that call out. PyTorch's "
                    "PipelineStage makes it: use CompressedStage there"
                )
            if _in_backward_of_another():
                raise UnsupportedError(
                    "activation checkpointing with use_reentrant=True runs backward inside of backward, and the end of "
                    "the outer one is detected by tensors in the model's output, but none were found: return tensors "
                    "in lists, tuples, dictionaries or dataclasses, or use use_reentrant=False. CodedDataParallel does "
                    "so, too, and averages by itself: there, leave compress_gradients out"
                )
            self.begin(early=False)
        self._any = True
        at = self._group_of[p]
        if at < len(self._futures):
            raise UnsupportedError(
                f"{self.layers.parameters.by_tensor[p].name} got another gradient in the same backward pass, after its "
                "gradient was sent; use activation checkpointing with use_reentrant=False"
            )
        self._lacking[at].discard(p)
        while len(self._futures) < len(self._groups) and self._is_ready(len(self._futures)):
            self._send()

    def _is_ready(self, at: int) -> bool:
        """Whether a group can be sent. The group at ``_tells_at`` waits for other ranks of the replica, so before it
        all gradients of the step must have arrived: until then, FSDP2's collectives there may need this rank.
        """
        waits = self._replica is not None and at >= self._tells_at
        return not any(self._lacking[at:]) if waits else not self._lacking[at]

    def _send(self) -> None:
        """Feed the next group to the core of averaging."""
        at = len(self._futures)
        if at == 0 and self._steps is not None:
            self._steps.averaging()
        group = self._groups[at]
        with torch.no_grad():
            buffer, absent = group.collect(self._waiting)
            if self._replica is not None:
                self._tell(buffer, at)
        self._futures.append(self.feed(buffer, group.names, last=group is self._groups[-1], absent=absent))

    def _step_facts(self) -> Facts:
        """Return which parameters are frozen, since these do not get the averages of other ranks."""
        return {"training": self.layers.parameters.frozen()}

    def _tell(self, buffer: Tensor, at: int) -> None:
        """Look for inf and NaN in a group. At group ``_tells_at``, compare with the replica's ranks, and fill the
        buffer with NaN if any rank has found some.
        """
        assert self._replica is not None
        if buffer.numel():
            low, high = buffer.aminmax()  # one pass, and unlike a sum it cannot overflow
            self._seen += low * 0 + high * 0
        if at == self._tells_at:
            bad = self._seen  # 0, or NaN
            self._replica.follow()
            try:
                dist.all_reduce(bad, group=self._replica.group)
            except RuntimeError:
                self._replica.broken = True
                raise
            buffer.masked_fill_(bad.isnan(), math.nan)

    def _send_rest(self) -> None:
        """Send the missing groups at the end of backward."""
        try:
            while self._any and len(self._futures) < len(self._groups):
                self._send()
        except BaseException:
            self._reset()
            raise

    @torch.no_grad()
    def _end(self) -> None:
        """End a step: write the averages into the gradients."""
        try:
            if self._any:  # otherwise this backward reached none of the model's parameters
                for group, future in zip(self._groups, self._futures, strict=True):
                    group.deliver(future.wait())
                if self._steps is not None:
                    self._steps.waiting.averaged([p for group in self._groups for p in group.left_out])
        finally:
            self._reset()
        module = self._module()
        if module is not None:  # not earlier: an error in a backward of FSDP2 leaves its parameters unsharded for good
            self.layers.parameters.check_all_known(module.named_parameters())

    # ---- what users call ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :meth:`GradientCompression.no_sync`. Inside, FSDP2 does not reduce gradients, either. It does so in a
        pass outside, so the last pass of a sharded model's step has to run outside.
        """
        module = self._module()
        before, self._syncing = self._syncing, False
        units = [] if module is None else units_of(module)
        try:
            for each in units:
                each.set_requires_gradient_sync(False)
            yield
        finally:
            self._syncing = before
            for each in units:
                each.set_requires_gradient_sync(before)

    def average(self) -> None:
        """Average the gradients that have added up in :meth:`no_sync`. Call on all ranks, outside of backward.

        For steps in which the last backward pass is not known to be the last. A parameter without a gradient counts as
        zeros. A call inside :meth:`no_sync` does nothing, since more passes follow.

        Not for models whose gradients FSDP2 has not reduced yet. Run their last pass outside of :meth:`no_sync`: it
        averages all accumulated gradients, and no call of this method is needed.

        Raises:
            RuntimeError: called inside backward, or after :meth:`remove`; or the exchange stopped earlier.
            UnsupportedError: FSDP2 holds gradients that it has not reduced; or a parameter requires a gradient that did
                not require one, or did not exist, at set-up.

        Example:
            >>> with handle.no_sync():  # doctest: +SKIP
            ...     for x, y in batches:
            ...         loss(model(x), y).backward()
            >>> handle.average()  # doctest: +SKIP
        """
        self._check_between_steps("average")
        if is_in_backward():
            raise RuntimeError("average was called inside backward; call it when backward has returned")
        if not self._syncing:
            return
        if self._unreduced:
            raise UnsupportedError(
                "average: FSDP2 reduces no gradients inside of no_sync, so the accumulated gradients are not in .grad "
                "yet; run the last backward pass of a step outside of no_sync, and leave average out"
            )
        self._any = True
        self._send_rest()
        self._end()

    def _broke_off(self) -> bool:
        torn = self._torn or (self._backward is not None and bool(self._futures))
        return super()._broke_off() or (torn and not is_in_backward())

    def remove(self) -> None:
        """Remove compression: gradients are no longer averaged, and every rank trains alone. Call on all ranks, between
        steps, or after a step that broke off.

        Raises:
            RuntimeError: called inside backward.
            DisagreementError: another rank makes another call.
        """
        super().remove()
        for hook in (*self._arrivals.values(), self._of_model):
            hook.remove()
        self._arrivals.clear()
        if self._replica is not None:
            self._replica.broken |= self._loan.broken
            self._return()
        module = self._module()
        if module is not None:
            forget(module, self)


def _tell_of_arrival(p: Tensor, handle: weakref.ref[ModuleCompression]) -> RemovableHandle:
    """Hook a parameter. The hook holds a weak reference, since the handle refers to the parameter."""

    def arrived(p: Tensor) -> None:
        if (own := handle()) is not None:
            own.arrived(p)

    register: Any = p.register_post_accumulate_grad_hook
    hooked: RemovableHandle = register(unseen(arrived))
    return hooked


def _in_backward_of_another() -> bool:
    """Whether this backward runs inside an autograd function's backward, as that of a reentrant checkpoint does."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _BACKWARD_OF_FUNCTIONS:
        frame = frame.f_back
    return frame is not None


#: The code object that runs the backward of autograd functions written in Python.
_BACKWARD_OF_FUNCTIONS = torch.autograd.function.BackwardCFunction.apply.__code__


def _small_shards(module: nn.Module, by_name: Mapping[str, Parameter], min_numel: int) -> set[str]:
    """Names of sharded matrices that are large enough to be compressed, but of which this rank's shard is not."""
    return {
        name
        for name, p in module.named_parameters()
        if name in by_name
        and not by_name[name].compressed
        and hasattr(p, "device_mesh")
        and p.dim() > 1
        and p.numel() >= min_numel
    }


def _outside_of_units(module: nn.Module) -> list[str]:
    """Names of trained parameters that FSDP2 does not shard, in a module that it shards otherwise."""
    if not units_of(module):
        return []
    return [name for name, p in module.named_parameters() if p.requires_grad and not hasattr(p, "device_mesh")]


class Outputs(Left):
    """A forward hook of the model. It puts hooks on the outputs, which detect that a backward pass begins.

    Args:
        handle: the handle to notify. None, as in the copy of a model: do nothing.
    """

    without = "its gradients are not averaged"

    def __init__(self, handle: weakref.ref[ModuleCompression] | None = None) -> None:
        super().__init__()
        self._handle = handle

    @property
    def handle(self) -> ModuleCompression | None:
        """The handle to notify of backward passes."""
        return None if self._handle is None else self._handle()

    @property
    def has_handle(self) -> bool:
        return self.handle is not None

    @unseen
    def __call__(self, module: nn.Module, _: Any, outputs: Any) -> None:
        """Notify the handle of the call, and hook the outputs."""
        if not torch.is_grad_enabled():
            return
        self.say_copied(module)
        if (own := self.handle) is not None:
            own.called()
            for x in _tensors_in(outputs):
                if x.grad_fn is not None:  # a leaf outlives the step, and would collect hooks
                    cast("Any", x).register_hook(self._began)

    @unseen
    def _began(self, _: Tensor) -> None:
        if (own := self.handle) is not None:
            own.begin()


def _tensors_in(outputs: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield all tensors in a model's outputs: in lists, tuples, dictionaries and dataclasses, as DDP looks for them.

    Args:
        outputs: of the model, or a part of them.
        seen: ids of the dataclasses visited so far, since they may refer to each other in cycles.
    """
    seen = set() if seen is None else seen
    for x in torch.utils._pytree.tree_leaves(outputs):
        if isinstance(x, Tensor):
            yield x
        elif dataclasses.is_dataclass(x) and not isinstance(x, type) and id(x) not in seen:
            seen.add(id(x))
            for field in dataclasses.fields(x):
                yield from _tensors_in(getattr(x, field.name, None), seen)
