"""Which modules ``torch.compile`` compiled, and whether a forward pass can handle them.

A pass's hooks on modules and saved tensors and its function mode are Python code. Dynamo would compile them into the
graphs, again for every pass: :func:`narrowband.compiler.unseen` hides them from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.overrides
from torch import nn

__all__ = [
    "compiled_modules",
    "eager_modules",
    "is_compiled_itself",
    "is_in_compiled_code",
    "modules_of",
    "obstacle",
    "without_mode",
]


def is_compiled_itself(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to this very module, or to its ``forward``.

    Example:
        >>> is_compiled_itself(torch.compile(nn.Linear(4, 4)))
        True
    """
    # What torch.compile returns, module or function, has get_compiler_config; what torch.compiler.disable returns has
    # not. Look it up in vars(): nn.Module is slow to look up a missing attribute, and every pass asks all modules.
    own = vars(module)
    forward = own.get("forward") or getattr(type(module), "forward", None)
    configured = "get_compiler_config" in own or hasattr(forward, "get_compiler_config")
    return configured or module._compiled_call_impl is not None


def obstacle() -> str | None:
    """Return, in a sentence, why compiled models cannot be handled in this process; None where they can.

    Hooks must know which node of the graph a tensor comes from, and what backward does with it. PyTorch has no stable
    API for that.
    """
    try:
        from torch._functorch._aot_autograd.graph_compile import _get_saved_tensor_hook_context  # noqa: F401
    except ImportError:
        return (
            f"compress_activations does not support compiled models with PyTorch {torch.__version__}: train without "
            "torch.compile, or use another version of PyTorch"
        )
    return None


def modules_of(model: nn.Module, is_closed: Callable[[nn.Module], bool] | None = None) -> Iterator[nn.Module]:
    """Yield a module and all modules inside of it, each once, without those inside of closed modules.

    Every pass goes through the whole model, and ``model.modules()`` would also make a name for each module.
    """
    seen, left = {id(model)}, [model]
    while left:
        module = left.pop()
        if is_closed is None or not is_closed(module):
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    left.append(child)
        yield module


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules to which ``torch.compile`` was applied."""
    found = []

    def is_closed(module: nn.Module) -> bool:
        compiled = is_compiled_itself(module)
        if compiled:
            found.append(module)
        return compiled

    for _ in modules_of(model, is_closed):
        pass
    return found


def eager_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are neither compiled nor inside of a compiled one."""
    return [module for module in modules_of(model, is_compiled_itself) if not is_compiled_itself(module)]


def is_in_compiled_code() -> bool:
    """Whether something that ``torch.compile`` returned is running in this thread, and runs Python now."""
    file = getattr(sys.modules.get("torch._dynamo.eval_frame"), "__file__", None)  # whoever compiles has imported it
    frame: FrameType | None = sys._getframe(1) if file else None
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False


@contextmanager
def without_mode(mode: torch.overrides.TorchFunctionMode) -> Iterator[None]:
    """Remove a function mode from the stack of modes for a while, also where others are above it."""
    overrides: Any = torch.overrides
    above: list[Any] = []
    stack = overrides._get_current_function_mode_stack()
    for other in reversed(stack) if mode in stack else ():
        overrides._pop_mode()
        if other is mode:
            break
        above.append(other)
    for other in reversed(above):
        overrides._push_mode(other)
    try:
        yield
    finally:
        if mode in stack:
            for _ in above:
                overrides._pop_mode()
            for other in (mode, *reversed(above)):
                overrides._push_mode(other)
