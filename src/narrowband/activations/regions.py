"""Calls of modules that take another way while a pass lasts: compiled ones, and those that backward computes again.

Hooks on modules, the mode on functions and hooks on saved tensors are Python. Dynamo would see them, and compile them
along, anew for every pass. So while a pass lasts, what ``torch.compile`` put into a module is wrapped: inside of it
there is only what :mod:`.compiled` gives, and afterwards what the graphs keep is counted. Modules around the compiled
ones, and between them, are compressed operator by operator as ever.

What is computed again is left to torch.utils.checkpoint, which has its own hooks on saved tensors: inside of it nothing
is quantized.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch.overrides
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from narrowband.activations.compiled import graph_bytes, is_compiled_itself

__all__ = ["compiled_modules", "computed_again", "eager_modules", "graphs_behind", "rerouted", "unseen", "without_mode"]

_T = TypeVar("_T")


def compiled_modules(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules to which ``torch.compile`` was applied, the outermost ones."""
    if is_compiled_itself(model):
        yield name, model
        return
    for child, module in model.named_children():
        yield from compiled_modules(module, f"{name}.{child}" if name else child)


def eager_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that are neither compiled nor inside of one that is."""
    if not is_compiled_itself(model):
        yield model
        for module in model.children():
            yield from eager_modules(module)


class Router(Protocol):
    """What a pass does with a call of a module."""

    def __call__(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


class _Rerouted:
    """A module of which what is called is wrapped, by so many passes."""

    def __init__(self, module: nn.Module, router: Callable[[], Router | None]) -> None:
        self.passes = 0
        # Where Module.__call__ looks: Module.compile() leaves what it compiled in the one, all others in forward.
        self.attribute = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        self.own = vars(module).get(self.attribute)
        self.call = getattr(module, self.attribute)
        inside = weakref.ref(module)

        @functools.wraps(self.call)  # with the marks of what may be compiled
        def route(*args: Any, **kwargs: Any) -> Any:
            there, to = inside(), router()
            if there is None or to is None:
                return self.call(*args, **kwargs)
            return to(there, self.call, args, kwargs)

        setattr(module, self.attribute, route)

    def restore(self, module: nn.Module) -> None:
        if self.own is None:
            delattr(module, self.attribute)
        else:
            setattr(module, self.attribute, self.own)


_rerouted: weakref.WeakKeyDictionary[nn.Module, _Rerouted] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def rerouted(module: nn.Module, router: Callable[[], Router | None]) -> Iterator[None]:
    """Calls of a module go to the router of their thread, if it has one. Several passes may last at once."""
    with _lock:
        if module not in _rerouted:
            _rerouted[module] = _Rerouted(module, router)
        _rerouted[module].passes += 1
    try:
        yield
    finally:
        with _lock:
            there = _rerouted[module]
            there.passes -= 1
            if not there.passes:
                del _rerouted[module]
                there.restore(module)


def computed_again(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call something of a module, keep its inputs, and call it again in backward.

    Tensors are inputs wherever they are in the arguments; random numbers and autocast are the same the second time.
    """
    leaves, structure = tree_flatten((args, kwargs))
    ran = False

    def run(*leaves: Any) -> Any:
        nonlocal ran
        args, kwargs = tree_unflatten(leaves, structure)
        with _unchanged_statistics(module) if ran else contextlib.nullcontext():
            ran = True
            return call(*args, **kwargs)

    return checkpoint(run, *leaves, use_reentrant=False)


@contextmanager
def _unchanged_statistics(module: nn.Module) -> Iterator[None]:
    """Running statistics of normalization in a module that sees a batch again have it in them already."""
    norms = [norm for norm in module.modules() if isinstance(norm, _NormBase) and norm.training]
    before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)  # which is no change to those who keep it


def unseen(function: Callable[..., _T]) -> Callable[..., _T]:
    """Let Dynamo look no further, if it is there at all: what is decorated runs as it is written, and so does what it
    calls. PyTorch's own decorator for that would import Dynamo, which takes seconds.
    """
    disabled: list[Callable[..., _T]] = []

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> _T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    return wrapper


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


def graphs_behind(outputs: Any, inputs: Any) -> Iterator[tuple[list[Tensor], int, int]]:
    """What each compiled graph between a call's outputs and its inputs keeps.

    Yields:
        Tensors, bytes that some of them hold codes of, and bytes of these codes.
    """
    seen = {_node(x) for x in tree_leaves(inputs)} | {None}
    todo = [_node(x) for x in tree_leaves(outputs)]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in type(node).__name__:
            tensors = [x for x in (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())) if x is not None]
            yield tensors, *graph_bytes(tensors)
        todo += [there for there, _ in node.next_functions]


def _node(x: Any) -> Any:
    return x.grad_fn if isinstance(x, Tensor) else None
