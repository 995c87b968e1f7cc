"""The fast paths of PyTorch's own transformer layers, which are taken in evaluation without gradients.

Their results differ from those of training in the last bits. PyTorch takes them only where no function mode is on, and
no hooks are on the layer. So that evaluation in a pass has the same bits as outside of it, the pass takes its mode and
its hook away while such a module runs. Nothing is saved for backward there.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from narrowband.activations.dynamo import without_mode
from narrowband.compiler import unseen

__all__ = ["FAST", "FastPaths"]

#: Modules that have a fast path.
FAST = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class FastPaths:
    """Lets modules take their fast paths in one pass, in one thread.

    Args:
        mode: the function mode of the pass.
        hook: the hook of the pass on the model itself.
    """

    def __init__(self, mode: TorchFunctionMode, hook: RemovableHandle) -> None:
        self._mode, self._hook = mode, hook
        self._thread = threading.get_ident()
        self._running: int | None = None  # id of the outermost module that may take its fast path
        self._undo = contextlib.ExitStack()

    @unseen
    def entering(self, module: nn.Module, args: Any) -> None:
        """Take mode and hook away if this module may take its fast path."""
        if not isinstance(module, FAST) or self._running is not None or self._thread != threading.get_ident():
            return
        if module.training or _needs_gradients(module, args):
            return
        self._running = id(module)
        self._undo.enter_context(without_mode(self._mode))
        hooks = self._hook.hooks_dict_ref()
        if hooks is not None and self._hook.id in hooks:
            self._undo.callback(hooks.__setitem__, self._hook.id, hooks.pop(self._hook.id))

    @unseen
    def leaving(self, module: nn.Module, *_: Any) -> None:
        """Put mode and hook back."""
        if self._running == id(module) and self._thread == threading.get_ident():
            self.close()

    def close(self) -> None:
        """Put mode and hook back if they are away, as where an exception prevented :meth:`leaving`."""
        self._running = None
        self._undo.close()


def _needs_gradients(module: nn.Module, args: Any) -> bool:
    """Whether a call may save something for backward. Without positional arguments inputs are not known, and may."""
    if not torch.is_grad_enabled():
        return False
    inputs = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
    return not inputs or any(x.requires_grad for x in (*inputs, *module.parameters()))
