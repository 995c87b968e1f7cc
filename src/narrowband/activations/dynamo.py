"""What has to be known of ``torch.compile`` around a forward pass: which modules it compiled, and whether they bear it.

Hooks on modules, the mode on functions and hooks on saved tensors are Python. Dynamo would see them, and compile them
along, anew for every pass: :func:`narrowband.compiler.unseen` hides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.overrides
from torch import nn

__all__ = ["compiled_modules", "eager_modules", "is_compiled_itself", "modules_of", "obstacle", "without_mode"]


def is_compiled_itself(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to this very module, or to its ``forward``.

    Example:
        >>> is_compiled_itself(torch.compile(nn.Linear(4, 4)))
        True
    """
    # What torch.compile returns, module or function, tells how it compiles; what torch.compiler.disable returns, not.
    # Modules look long for an attribute that they have not, and every pass asks all of them.
    own = vars(module)
    forward = own.get("forward") or getattr(type(module), "forward", None)
    configured = "get_compiler_config" in own or hasattr(forward, "get_compiler_config")
    return configured or module._compiled_call_impl is not None


def obstacle() -> str | None:
    """Why compiled models cannot be handled in this process, in a sentence; None where they can.

    Hooks have to know which node of the graph a tensor comes from and what backward does with it. PyTorch has no stable
    name for that.
    """
    try:
        from torch._functorch._aot_autograd.graph_compile import _get_saved_tensor_hook_context  # noqa: F401
    except ImportError:
        return (
            f"PyTorch {torch.__version__} does not say what a saved tensor of a compiled graph is; "
            "train without torch.compile, or use another version"
        )
    return None


def modules_of(model: nn.Module, is_closed: Callable[[nn.Module], bool] = lambda _: False) -> Iterator[nn.Module]:
    """A module and all inside of it, each once, but for what is inside of closed ones. Every pass looks through a
    model, and ``model.modules()`` takes five times as long.
    """
    seen, left = {id(model)}, [model]
    while left:
        module = left.pop()
        if not is_closed(module):
            for child in module._modules.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    left.append(child)
        yield module


def compiled_modules(model: nn.Module) -> list[nn.Module]:
    """Modules to which ``torch.compile`` was applied, the outermost ones."""
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
    """Modules that are neither compiled nor inside of one that is."""
    return [module for module in modules_of(model, is_compiled_itself) if not is_compiled_itself(module)]


@contextmanager
def without_mode(mode: torch.overrides.TorchFunctionMode) -> Iterator[None]:
    """Take a mode on functions away, also from below others."""
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
