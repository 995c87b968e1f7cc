"""Compression with Accelerate: compress a prepared model, and save every rank's state in ``save_state`` folders.

Accelerate's own setting for communication hooks is a closed list, so the hook is registered with the prepared model.
Objects given to ``register_for_checkpointing`` are written by the main process only, which would lose the residuals of
all other ranks. So each rank writes and reads a file of its own, in hooks that Accelerate calls when it saves and
loads.

An accelerator does not tell whether it has loaded a checkpoint. A handle that is created after ``load_state`` would
silently begin with empty residuals. So this module wraps ``load_state``: handles load their states when it has loaded
models and optimizers, and a handle that is created later loads its state from the same folder.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowband import gradients, updates
from narrowband.errors import need
from narrowband.integrations.replica import Replica
from narrowband.integrations.states import load, read, write
from narrowband.integrations.wrapped import ddp_in

need("accelerate", "1.1", "1", extra="accelerate")
from accelerate import Accelerator  # after the check of its version
from accelerate.optimizer import AcceleratedOptimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from narrowband.adapt import Plan, Policy
    from narrowband.codecs import Codec
    from narrowband.feedback import Compression, Method
    from narrowband.gradients import GradientCompression
    from narrowband.integrations.replica import Saves
    from narrowband.updates import UpdateCompression

__all__ = ["compress_gradients", "compress_updates"]


def compress_gradients(
    accelerator: Accelerator,
    model: nn.Module,
    spec: str | Codec | Compression | Method | Plan | Policy,
    *,
    strict: bool = True,
    **options: Any,
) -> GradientCompression:
    """Compress what a prepared model sends, and let ``save_state`` and ``load_state`` of Accelerate include it.

    Call it on all ranks, after ``accelerator.prepare`` and before training begins. If ``load_state`` was called before,
    the handle loads its state at once, from the same folder.

    Args:
        accelerator: the accelerator that prepared the model. Its gradient scaler is used, if it has one.
        model: the model that ``prepare`` returned.
        spec: codec and feedback, see :func:`narrowband.compress_gradients`.
        strict: whether ``load_state`` raises if the checkpoint has no compression state, or states of another number of
            ranks. Otherwise residuals begin empty, or are shared out.
        options: further arguments of :func:`narrowband.compress_gradients`.

    Returns:
        The handle.

    Raises:
        UnsupportedError: the model is not prepared, or not for data parallelism.
        RuntimeError: training has begun.
        ValueError: ``load_state`` was called before, and the state in its checkpoint is missing or does not fit.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> handle = compress_gradients(accelerator, model, "topk:density=0.01+ef")
    """
    ddp = _prepared(accelerator, model, "compress_gradients")
    options.setdefault("grad_scaler", accelerator.scaler)
    handle = gradients.compress_gradients(ddp, spec, **options)
    _save_and_load(accelerator, ddp, handle, strict=strict)
    return handle


def compress_updates(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | AcceleratedOptimizer | Sequence[Optimizer | AcceleratedOptimizer],
    spec: str | Codec | Compression | Method | Plan | Policy,
    *,
    strict: bool = True,
    **options: Any,
) -> UpdateCompression:
    """Average the updates of a prepared model in place of its gradients, and let ``save_state`` and ``load_state`` of
    Accelerate include what each replica has for itself: residuals, the optimizer's moments, buffers.

    Call it on all ranks, after ``accelerator.prepare`` and before training begins. ``save_state`` then begins with a
    round, so that all replicas have the parameters that are saved. Call ``handle.average()`` before you evaluate the
    model, or save it in another way. If ``load_state`` was called before, the handle loads its state at once.

    Args:
        accelerator: the accelerator that prepared the model. Its gradient scaler is used, if it has one.
        model: the model that ``prepare`` returned.
        optimizer: the optimizer that ``prepare`` returned, or several.
        spec: codec and feedback, see :func:`narrowband.compress_updates`.
        strict: whether ``load_state`` raises if the checkpoint has no such states, or those of another number of ranks.
            Otherwise residuals begin empty, or are shared out, and optimizers go on with the moments of rank 0.
        options: further arguments of :func:`narrowband.compress_updates`.

    Returns:
        The handle.

    Raises:
        UnsupportedError: the model is not prepared, or not for data parallelism.
        RuntimeError: training has begun.
        ValueError: ``load_state`` was called before, and the state in its checkpoint is missing or does not fit.

    Example:
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> handle = compress_updates(accelerator, model, optimizer, "uniform:bits=2+ef", every=15)
    """
    ddp = _prepared(accelerator, model, "compress_updates")
    given = [optimizer] if not isinstance(optimizer, Sequence) else optimizer
    bare = [each.optimizer if isinstance(each, AcceleratedOptimizer) else each for each in given]
    options.setdefault("grad_scaler", accelerator.scaler)
    handle = updates.compress_updates(ddp, bare, spec, **options)
    _save_and_load(accelerator, ddp, Replica(handle), strict=strict, before=handle.average)
    return handle


def _prepared(accelerator: Accelerator, model: nn.Module, call: str) -> DistributedDataParallel:
    """Return the DistributedDataParallel that an accelerator has made of a model.

    Raises:
        UnsupportedError: there is none.
        RuntimeError: training has begun.
    """
    ddp = ddp_in(
        model, "call accelerator.prepare(model) first, in two processes or more; without GPUs of Accelerator(cpu=True)"
    )
    loaded = _loads.get(accelerator)
    if accelerator.step != (loaded.step if loaded else 0):
        raise RuntimeError(f"accelerator has counted {accelerator.step} batches: call {call} before training begins")
    return ddp


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _save_and_load(
    accelerator: Accelerator,
    ddp: DistributedDataParallel,
    state: Saves,
    *,
    strict: bool,
    before: Callable[[], None] | None = None,
) -> None:
    """Let ``save_state`` and ``load_state`` include a state of every rank; and load it now, from the folder of an
    earlier ``load_state``.

    Args:
        before: what is called before the state is saved.
    """
    module = weakref.ref(ddp.module)

    def name(models: Sequence[nn.Module]) -> str:
        """Name the model's files as Accelerate does: it numbers its models and adds the number to all but the first."""
        number = next((i for i, each in enumerate(models) if module() in list(each.modules())), 0)
        return f"narrowband_{number}" if number else "narrowband"

    def save(models: list[nn.Module], _: list[Any], folder: str) -> None:
        if before is not None and not state.removed:
            before()
        write(state, folder, name(models))

    def restore(models: Sequence[nn.Module], folder: str) -> None:
        load(state, read(folder, name(models)), folder, strict=strict)

    if (former := _hooks.pop(ddp, None)) is not None:  # of a handle that was removed
        former.remove()
    _hooks[ddp] = accelerator.register_save_state_pre_hook(save)
    _restores.setdefault(accelerator, {})[module] = restore
    loaded = _loads.get(accelerator)
    if loaded is not None:
        restore([found for each in loaded.models if (found := each()) is not None], loaded.folder)


#: What saves, by model. That of a removed handle stays until the next handle: it deletes files of an earlier save.
_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, RemovableHandle] = weakref.WeakKeyDictionary()
#: What loads, by accelerator and model.
_restores: weakref.WeakKeyDictionary[
    Accelerator, dict[weakref.ref[nn.Module], Callable[[Sequence[nn.Module], str], None]]
] = weakref.WeakKeyDictionary()


# ---- what was loaded before ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Load:
    """The last ``load_state`` of an accelerator: the folder, the models, and the accelerator's step after it."""

    folder: str
    models: list[weakref.ref[nn.Module]]
    step: int


_loads: weakref.WeakKeyDictionary[Accelerator, _Load] = weakref.WeakKeyDictionary()


def _take_down_loads() -> None:
    load_state = Accelerator.load_state

    @functools.wraps(load_state)
    def taking_down(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        found: list[tuple[str, list[nn.Module]]] = []

        def begins(models: list[nn.Module], folder: str) -> None:
            found.append((folder, list(models)))
            if _restores.get(self):
                self.wait_for_everyone()  # rank 0 may still be writing what the others are about to read

        hook = self.register_load_state_pre_hook(begins)
        try:
            load_state(self, *args, **kwargs)
        finally:
            hook.remove()
        for folder, models in found:
            _loads[self] = _Load(folder, [weakref.ref(model) for model in models], self.step)
            for restore in _restores.get(self, {}).values():
                restore(models, folder)

    Accelerator.load_state = taking_down


_take_down_loads()
