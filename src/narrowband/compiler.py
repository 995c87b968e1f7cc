"""Work with ``torch.compile``: hide hooks from Dynamo, and refuse compiled autograd, which is not supported.

Hooks on parameters, modules and saved tensors are Python. When Dynamo compiles the code that calls them, it would
compile the hooks too: state that changes in every step would become guards, and communication a part of some graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame

from narrowband.errors import UnsupportedError

__all__ = ["refuse_compiled_autograd", "unseen"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: The C++ part of Dynamo, which is available before Dynamo itself is imported.
_DYNAMO: Any = eval_frame


def _skipping() -> Any:
    """Return Dynamo's strategy for skipping a frame and all that it calls; None if this PyTorch lacks these names."""
    try:
        action = _DYNAMO._FrameAction.SKIP
        return _DYNAMO._FrameExecStrategy(action, action)
    except AttributeError:
        return None


#: The strategy that :func:`unseen` sets on code objects.
_SKIP: Any = _skipping()


def unseen(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function so that Dynamo compiles neither it nor what it calls: they run as ordinary Python.

    Dynamo can reach a function in two ways, and both are blocked. When Dynamo *traces* the caller, it finds on the
    function the attribute that :func:`torch.compiler.disable` also sets, and breaks the graph there. When C++ calls the
    function, as autograd calls hooks, the interpreter asks Dynamo's callback before it runs the frame. The callback
    first looks at marks on the code object, and our mark says: skip this frame and all frames below it. A function that
    a module or a class defines has a code object of its own, which is marked directly. Functions that are created at
    run time share their code object with others, which Dynamo may compile, and a method may belong to anybody: these
    are called by a wrapper, whose code object is marked instead.

    This is safe: only code of this library is marked, and Dynamo's state is restored when the call returns. It is also
    cheap, because nothing is checked at run time. PyTorch's own decorator does more in every call than the wrapper,
    and imports Dynamo, which is slow; a step may make thousands of such calls, and hardly any of them is in compiled
    code.

    Args:
        function: any callable, such as a hook, or a method.

    Returns:
        The function itself, or a wrapper with the same name, arguments and result.

    Example:
        >>> @unseen
        ... def count(x):
        ...     return x.numel()
        >>> count(torch.ones(2, 3))
        6
    """
    if _SKIP is None:
        ours: Callable[_P, _T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return ours

    hidden = function if _has_code_of_its_own(function) else _called(function)
    _DYNAMO.set_code_exec_strategy(hidden.__code__, _SKIP)
    vars(hidden).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="narrowband runs it as it is written")
    return hidden


def _has_code_of_its_own(function: Any) -> bool:
    return isinstance(function, FunctionType) and "<locals>" not in function.__qualname__


def _called(function: Callable[_P, _T]) -> Callable[_P, _T]:
    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return function(*args, **kwargs)

    return wrapper


def refuse_compiled_autograd() -> None:
    """Refuse a backward pass that compiled autograd runs. Call this at the start of a backward pass.

    Compiled autograd does not signal the end of a backward pass, so nothing would wait for the averages. FSDP2 does not
    reduce gradients there either, because it does so in a callback at the end.

    Raises:
        UnsupportedError: compiled autograd runs this backward pass.
    """
    engine = sys.modules.get("torch._dynamo.compiled_autograd")  # whoever uses it has imported it
    if engine is not None and engine.in_compiled_autograd_region:
        raise UnsupportedError(
            "this backward pass is run by compiled autograd, which does not tell when it ends, so nothing would be "
            "averaged: leave torch._dynamo.config.compiled_autograd False, and call backward() outside of "
            "torch._dynamo.compiled_autograd. torch.compile of the model, its layers or the whole step works"
        )
