"""The communication hook that :func:`~narrowband.compress_gradients` registers with DDP, and a check that it is used.

DDP cannot unregister a communication hook. So the hook outlives its handle: after ``handle.remove()`` it averages as
DDP does without a hook, and a new handle can take it over. DDP also copies and pickles the hook's state object
(:mod:`narrowband.gradients.left`).

The check is for scripts that wrap a model in DDP but go on calling the inner module. Then nothing is averaged and
nothing fails, and the replicas silently diverge. PyTorch's global hooks run at every optimizer step in the process. If
an optimizer makes several steps in a row with gradients of the model's parameters and the model was not called
meanwhile, the last of them raises an error. So does a step with gradients of parameters that the model did not have at
set-up, because DDP does not average them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # what dist.GradBucket is, for type checkers

from narrowband.averaging.listening import Listener, listen
from narrowband.averaging.parameters import refuse_unaveraged
from narrowband.averaging.who import averaged_by, forget, remember
from narrowband.errors import UnsupportedError
from narrowband.gradients.left import Left

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from narrowband.averaging.layers import Layers

__all__ = ["Averaging", "Hook", "hook_of"]

#: The step in a row with gradients that did not come through the model at which an optimizer raises an error. A single
#: one may be the user's own warm-up; three in a row are a training loop.
STEPS_WITHOUT_CALL = 3


class Averaging(Protocol):
    """What a hook needs of the handle behind it."""

    @property
    def size(self) -> int:
        """How many ranks average."""

    @property
    def layers(self) -> Layers:
        """The layers that are averaged."""

    @property
    def paused(self) -> bool:
        """Whether averages are uncompressed for now."""

    def called(self, *, averaged: bool) -> None:
        """Note that the model was called, and whether DDP will average the gradients of this call."""

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a complete bucket of gradients."""


_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, Hook] = weakref.WeakKeyDictionary()


def hook_of(model: DistributedDataParallel) -> Hook:
    """Return a model's hook, or a new one, which :meth:`Hook.attach` registers.

    Raises:
        UnsupportedError: the model has another communication hook, or was wrapped with options that do not work with a
            hook.
    """
    # An inert entry in a model that is not in _hooks was copied along with another model. DDP has not registered it.
    model._comm_hooks = [
        entry for entry in model._comm_hooks if model in _hooks or not (type(entry[1]) is Hook and entry[1].inert)
    ]
    hook = _hooks.get(model)
    if getattr(model, "_use_python_reducer", False):
        raise UnsupportedError(
            'this model was wrapped with torch._dynamo.config.optimize_ddp="python_reducer", with which '
            "DistributedDataParallel does not wait for the averages of a hook; leave optimize_ddp=True, which works "
            "with torch.compile"
        )
    if getattr(model, "_delay_all_reduce_params", None):
        raise UnsupportedError(
            "this model was wrapped with delay_all_reduce_named_params. DistributedDataParallel waits for their "
            "averages only if later messages use the same process group, but compressed ones use another. Wrap the "
            "model without delay_all_reduce_named_params"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise UnsupportedError(
            "this model was wrapped with skip_all_reduce_unused_params=True, which leaves out buckets of unused "
            "parameters. Then the last bucket of a step is unknown, and backward would wait forever. Wrap the model "
            "without skip_all_reduce_unused_params; find_unused_parameters=True works"
        )
    if hook is None:
        if model._comm_hooks:  # DDP has no public attribute for this
            name = getattr(model._comm_hooks[0][0], "__qualname__", "a hook")
            raise UnsupportedError(f"this model has a communication hook already ({name}); DDP allows one")
        hook = Hook(model)
    return hook


class Hook(Left):
    """The state object of a model's communication hook; also registered as its forward pre-hook.

    Args:
        model: the model. None, as in the copy of a model: do nothing.
    """

    without = "its gradients are averaged uncompressed"

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        super().__init__()
        self.handle: Averaging | None = None
        self.watch: _Watch | None = None  # None for a single rank, which cannot diverge
        self._model = None if model is None else weakref.ref(model)
        self.group = None if model is None else model.process_group

    @property
    def has_handle(self) -> bool:
        return self.handle is not None

    @property
    def model(self) -> DistributedDataParallel | None:
        """The model whose hook this is; None if it is the hook of a copy, or the model is gone."""
        return None if self._model is None else self._model()

    @property
    def inert(self) -> bool:
        """Whether this is the hook of a copy."""
        return self._model is None

    def attach(self, handle: Averaging) -> None:
        """Let this handle average the model's gradients from now on. Register the hook if that has not been done."""
        model = self.model
        assert model is not None
        self.handle = handle
        remember(model, handle, model.process_group)
        if model not in _hooks:
            model.register_comm_hook(self, _on_bucket)
            model.register_forward_pre_hook(self)
            _hooks[model] = self
        if handle.size > 1:
            self.watch = _Watch(self, handle)

    def detach(self) -> None:
        """From now on, average as DDP does without a hook."""
        if (model := self.model) is not None:
            forget(model, self.handle)
        self.handle = self.watch = None

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Note that the model is called."""
        if not torch.is_grad_enabled():
            return
        if self.watch is not None:
            self.watch.used = True
            if self.handle is not None:
                self.handle.called(averaged=cast("DistributedDataParallel", module).require_backward_grad_sync)
        self.say_copied(module)


def _on_bucket(hook: Hook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    if hook.watch is not None:
        hook.watch.used = True
    return _average(hook, bucket) if hook.handle is None else hook.handle.on_bucket(bucket)


# DDP compares the hook's annotations with these types; postponed evaluation leaves strings there.
_on_bucket.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]})


def _average(hook: Hook, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average as DDP does without a hook, bit for bit: multiply by 1/N, then all-reduce."""
    buffer = bucket.buffer()
    buffer.mul_(1.0 / dist.get_world_size(hook.group))
    work = dist.all_reduce(buffer, group=hook.group, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return averaged


class _Watch(Listener):
    """Counts optimizer steps with gradients that did not come through the model.

    It outlives a DDP model that was never called. Scripts that keep only the inner module drop that model at once.
    """

    def __init__(self, hook: Hook, handle: Averaging) -> None:
        #: Whether the model was called, or sent a bucket, since the last step of an optimizer.
        self.used = False
        self._ever_used = False
        self._hook, self._handle = weakref.ref(hook), weakref.ref(handle)
        model = hook.model
        trained = [] if model is None else [p for _, p in averaged_by(model) if p.requires_grad]
        self._ours = {id(p): weakref.ref(p) for p in trained}
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        listen(self)
        _watches.add(self)
        self._ends = [weakref.finalize(p, _watches.discard, self) for p in trained[:1]]

    def _is_over(self) -> bool:
        """Whether compression was removed, or the model is gone after it was used."""
        hook = self._hook()
        return self._ever_used if hook is None else hook.watch is not self

    def _is_ours(self, p: Tensor) -> bool:
        reference = self._ours.get(id(p))
        return reference is not None and reference() is p

    def _check_all_known(self) -> None:
        """Raise an error for gradients of parameters that DDP does not know: it averages only those that it found when
        it was constructed, and ignores others silently.
        """
        hook = self._hook()
        model = None if hook is None else hook.model
        if model is not None:
            named = ((name, p) for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore)
            refuse_unaveraged(
                (name for name, p in named if p.grad is not None and p.requires_grad and not self._is_ours(p)),
                "call remove() on all ranks, wrap the module in DistributedDataParallel again, and set compression up",
            )

    def before_step(self, optimizer: torch.optim.Optimizer, *, trains: bool) -> None:
        """Check a step that an optimizer is about to make.

        Raises:
            RuntimeError: it has stepped several times in a row with gradients that were not averaged.
            UnsupportedError: the model has gradients of parameters that DDP does not know.
        """
        if not trains:
            return
        used, self.used = self.used, False
        if used:
            self._ever_used = True
            self._steps.clear()
        if self._is_over():
            _watches.discard(self)
            for end in self._ends:
                end.detach()  # it would keep this object as long as the parameter lives
            return
        handle = self._handle()
        if handle is not None and handle.paused:
            return
        if used:
            self._check_all_known()
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if not any(p.grad is not None and self._is_ours(p) for p in parameters):
            return
        self._steps[optimizer] = steps = self._steps.get(optimizer, 0) + 1
        if steps < STEPS_WITHOUT_CALL:
            return
        raise RuntimeError(
            f"gradients are not averaged: {type(optimizer).__name__} is about to make step {steps} in a row with "
            "gradients of the compressed model, but the model was not called between these steps. "
            "DistributedDataParallel averages only gradients of its own forward passes, so replicas become different. "
            "Write `model = DistributedDataParallel(model)` before compress_gradients and call that model. If these "
            "steps are local on purpose, call handle.pause() or handle.remove() first"
        )


#: Keeps the watches alive.
_watches: set[_Watch] = set()
