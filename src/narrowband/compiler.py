"""What every place has to know of ``torch.compile``: how to hide from it, and which of its ways cannot be followed.

Hooks on parameters, modules and saved tensors are Python. Where Dynamo compiles what calls them, it would compile them
along: state that changes in every step would become guards, and what they send a part of some graph.
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

#: Its part in C++, which is there before Dynamo is imported.
_DYNAMO: Any = eval_frame


def _skipping() -> Any:
    """How Dynamo is told to pass by a frame and all that it calls; None where this PyTorch has not these names."""
    try:
        action = _DYNAMO._FrameAction.SKIP
        return _DYNAMO._FrameExecStrategy(action, action)
    except AttributeError:
        return None


#: What :func:`unseen` marks code with.
_SKIP: Any = _skipping()


def unseen(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let Dynamo look no further: what is decorated runs as it is written, and so does what it calls.

    Dynamo comes upon a function in two ways, and both are closed. Where it *traces* the caller, it finds the attribute
    that :func:`torch.compiler.disable` leaves, too, and breaks the graph there. Where C++ calls the function, as
    autograd calls hooks, the interpreter asks Dynamo's callback before it runs the frame; that looks at marks on the
    code first, and ours says: not this frame, and none below it. What a module or a class defines has code of its own,
    which is marked itself. Functions that are made anew share theirs with others, which may be seen, and a method may
    be anybody's: these are called by a wrapper, whose code is marked instead.

    That is safe: the mark is on code of this library alone, and Dynamo is put back as it was when the call returns. And
    it is cheap: nothing is asked. PyTorch's own decorator takes several times as long as the wrapper and imports
    Dynamo, which takes seconds; a step may have thousands of such calls, and next to never is one of them in compiled
    code.

    Args:
        function: any callable, such as a hook, or a method.

    Returns:
        It, or a function with its name, arguments and result.

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
    """For the start of a backward pass. Nothing tells of the end of one that compiled autograd runs, so nobody would
    wait for averages; nor does FSDP2 reduce gradients there, which it does in a callback at the end.

    Raises:
        UnsupportedError: it runs this one.
    """
    engine = sys.modules.get("torch._dynamo.compiled_autograd")  # who uses it has imported it
    if engine is not None and engine.in_compiled_autograd_region:
        raise UnsupportedError(
            "this backward pass is run by compiled autograd, which does not tell when it ends, so nothing would be "
            "averaged: leave torch._dynamo.config.compiled_autograd False, and call backward() outside of "
            "torch._dynamo.compiled_autograd. torch.compile of the model, its layers or the whole step works"
        )
