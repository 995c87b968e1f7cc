"""Compression with Accelerate: compress a prepared model, and save every rank's state in ``save_state`` folders.

Accelerate's own setting for communication hooks is a closed list, so the hook is registered with the prepared model.
Objects given to ``register_for_checkpointing`` are written by the main process only, which would lose the residuals of
all other ranks. So each rank writes and reads a file of its own, in hooks that Accelerate calls when it saves and
loads.

An accelerator does not tell whether it has loaded a checkpoint. A handle that is created after ``load_state`` would
silently begin with empty residuals. So this module wraps ``load_state`` to record the folder, and a handle that is
created later loads its state from there.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowband import gradients
from narrowband.errors import need
from narrowband.integrations.states import load, read, write
from narrowband.integrations.wrapped import ddp_in

need("accelerate", "1.1", "1", extra="accelerate")
from accelerate import Accelerator  # after the check of its version

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.hooks import RemovableHandle

    from narrowband.adapt import Plan, Policy
    from narrowband.codecs import Codec
    from narrowband.feedback import Compression, Method
    from narrowband.gradients import GradientCompression

__all__ = ["compress_gradients"]


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
    ddp = ddp_in(
        model, "call accelerator.prepare(model) first, in two processes or more; without GPUs of Accelerator(cpu=True)"
    )
    loaded = _loads.get(accelerator)
    if accelerator.step != (loaded.step if loaded else 0):
        raise RuntimeError(
            f"accelerator has counted {accelerator.step} batches: call compress_gradients before training begins"
        )
    options.setdefault("grad_scaler", accelerator.scaler)
    handle = gradients.compress_gradients(ddp, spec, **options)

    def name(models: list[nn.Module]) -> str:
        """Name the model's files as Accelerate does: it numbers its models and adds the number to all but the first."""
        number = next((i for i, each in enumerate(models) if ddp.module in each.modules()), 0)
        return f"narrowband_{number}" if number else "narrowband"

    def save(models: list[nn.Module], _: list[Any], folder: str) -> None:
        write(handle, folder, name(models))

    def restore(models: list[nn.Module], folder: str) -> None:
        load(handle, read(folder, name(models)), folder, strict=strict)

    for hook in _hooks.pop(ddp, ()):  # hooks of a handle that was removed
        hook.remove()
    _hooks[ddp] = (accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(restore))
    if loaded is not None:
        restore([found for each in loaded.models if (found := each()) is not None], loaded.folder)
    return handle


#: The hooks by model. Those of a removed handle stay until the next handle: they delete files of an earlier save.
_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[RemovableHandle, ...]] = weakref.WeakKeyDictionary()


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
        hook = self.register_load_state_pre_hook(lambda models, folder: found.append((folder, list(models))))
        try:
            load_state(self, *args, **kwargs)
        finally:
            hook.remove()
        for folder, models in found:
            _loads[self] = _Load(folder, [weakref.ref(model) for model in models], self.step)

    Accelerator.load_state = taking_down


_take_down_loads()
