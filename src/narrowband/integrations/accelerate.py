"""Accelerate: its prepared model is in DistributedDataParallel, and its ``save_state`` folders get every rank's state.

Accelerate's own setting for communication hooks is a closed list, so the hook is put into the prepared model. Objects
given to ``register_for_checkpointing`` are written by the main process only, which would lose the residuals of all
other ranks. So each rank writes and reads a file of its own, when Accelerate saves and loads and calls its hooks.

An accelerator does not say whether it has loaded anything. A handle that came after ``load_state`` would begin with
empty residuals, and nobody would know. So ``load_state`` is told here to take down the folder, and a later handle loads
its state from there.
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
from accelerate import Accelerator  # not before its version is known to do

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

    Call it on all ranks, after ``accelerator.prepare`` and before training begins. Where ``load_state`` came before,
    the handle loads its state at once, from the same folder.

    Args:
        accelerator: that prepared the model. Its gradient scaler is used, if it has one.
        model: as ``prepare`` returned it.
        spec: codec and feedback, see :func:`narrowband.compress_gradients`.
        strict: whether ``load_state`` is an error where the checkpoint has no state of compression, or that of another
            number of ranks. Otherwise residuals begin empty, or are shared out.
        options: more for :func:`narrowband.compress_gradients`.

    Returns:
        The handle.

    Raises:
        UnsupportedError: the model is not prepared, or not for data parallelism.
        RuntimeError: training has begun.
        ValueError: ``load_state`` came before, and its checkpoint lacks something.

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
        """Accelerate counts its models, and names the files of all but the first by their number."""
        number = next((i for i, each in enumerate(models) if ddp.module in each.modules()), 0)
        return f"narrowband_{number}" if number else "narrowband"

    def save(models: list[nn.Module], _: list[Any], folder: str) -> None:
        write(handle, folder, name(models))

    def restore(models: list[nn.Module], folder: str) -> None:
        load(handle, read(folder, name(models)), folder, strict=strict)

    for hook in _hooks.pop(ddp, ()):  # of a handle that was removed
        hook.remove()
    _hooks[ddp] = (accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(restore))
    if loaded is not None:
        restore([found for each in loaded.models if (found := each()) is not None], loaded.folder)
    return handle


#: A removed handle keeps them until the next one: they take away what an earlier save left in the same folder.
_hooks: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[RemovableHandle, ...]] = weakref.WeakKeyDictionary()


# ---- what was loaded before ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Load:
    """What an accelerator has loaded last: from where, into what, and which step it then had."""

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
