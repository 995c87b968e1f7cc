"""Calls of modules that a pass reroutes: compiled modules, and modules that backward recomputes.

Dynamo would compile a pass's hooks and mode into its graphs; see :mod:`.dynamo`. So during a pass the callable that
``torch.compile`` put into a module is wrapped. Inside of the call only the hooks of :mod:`.compiled` are active, and
after it the bytes that the graphs keep are counted. Modules around and between compiled ones are compressed operator by
operator.

Recomputation is left to torch.utils.checkpoint, which has its own hooks on saved tensors: inside of it nothing is
packed.

A model may be copied or saved during a pass. Its copy is no part of the pass: it has its own callables again
(:class:`_Route`), and hooks that do nothing (:class:`HookOfPass`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from narrowband.activations.calls import COMPILED, Call
from narrowband.activations.compiled import compiled_hooks, compiled_saving, graph_bytes
from narrowband.activations.dynamo import is_compiled_itself, without_mode
from narrowband.activations.recorder import Recorder
from narrowband.activations.storages import tensors_in
from narrowband.compiler import unseen
from narrowband.units import counted

__all__ = ["HookOfPass", "Regions", "active", "graphs_behind", "recomputed", "rerouted"]

log = logging.getLogger(__name__)

#: How many neighbours share a range in a compiled graph, where the policy sets no number.
_GROUP = 256


class Regions:
    """Handles the calls of compiled and recomputed modules in one pass.

    Args:
        recorder: the recorder of the pass.
        mode: the function mode of the pass, which must be off in compiled code.
    """

    def __init__(self, recorder: Recorder, mode: TorchFunctionMode) -> None:
        self.recorder, self._mode = recorder, mode

    @unseen
    def call(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module that is recomputed, compiled, or both."""
        recorder = self.recorder
        # Inside of another checkpoint nothing is kept anyway, and its second run must take the same path as its first.
        if module not in recorder.modules.recomputed or not torch.is_grad_enabled() or not recorder.saves_here():
            return _direct(module, call, *args, **kwargs)
        with recorder.inside(module, args, kwargs):
            recorder.packed += 1
            return recomputed(module, functools.partial(_direct, module, call), args, kwargs)

    def call_compiled(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module that torch.compile compiled, and count what its graphs keep."""
        recorder = self.recorder
        if not recorder.knows(module):
            return call(*args, **kwargs)
        between, graphs = recorder.between_graphs, 0
        with recorder.inside(module, args, kwargs, Call(COMPILED)), without_mode(self._mode):
            with self._saving_of_graphs():
                outputs = call(*args, **kwargs)
            recorder.ran(outputs)
            # In a checkpoint graphs keep nothing, and reading their saved tensors would recompute them.
            for tensors, plain, packed in graphs_behind(outputs, (args, kwargs)) if recorder.saves_here() else ():
                recorder.keeps_graph(tensors, plain, packed)
                graphs += 1
        if not graphs and recorder.between_graphs > between:
            _warn_of_no_graph(module, recorder.modules.name_of(module), recorder.between_graphs - between)
        return outputs

    def _saving_of_graphs(self) -> contextlib.AbstractContextManager[None]:
        recorder = self.recorder
        bits, policy = recorder.bits(), recorder.policy
        if bits == "off" or not recorder.saves_here():
            return contextlib.nullcontext()
        group, stochastic = policy.neighbours or _GROUP, policy.rounding == "stochastic"
        hooks = compiled_hooks(bits, min_numel=max(policy.min_numel, group), group=group, stochastic=stochastic)
        return compiled_saving(hooks, recorder.hooks)


#: Modules that a warning was logged for, since PyTorch made no graph of them.
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _warn_of_no_graph(module: nn.Module, name: str | None, count: int) -> None:
    if module not in _warned:  # once, not in every step
        _warned.add(module)
        log.warning(
            "torch.compile was applied to %s, but PyTorch made no graph of it. So the operators that saved its tensors "
            "are unknown, and %s kept unchanged, which could have been compressed. module.compile() does "
            "not compile PyTorch's own modules, such as nn.Sequential or nn.TransformerEncoderLayer: use "
            'torch.compile(module). Under torch.compiler.set_stance("force_eager") nothing is compiled: set '
            "TORCHDYNAMO_DISABLE=1 instead, so that tensors are compressed operator by operator",
            f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})",
            counted(count, "tensor was", "tensors were"),
        )


class _Active(threading.local):
    """The pass that is open in this thread, and the stack whose closing ends it."""

    regions: Regions | None = None
    stack: contextlib.ExitStack | None = None


active = _Active()


def _direct(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module. A checkpoint may do this, too, perhaps in another thread or after the pass."""
    if active.regions is None or not is_compiled_itself(module):
        return call(*args, **kwargs)
    return active.regions.call_compiled(module, call, args, kwargs)


class _Route:
    """Takes the place of a module's callable, and lets the pass of the calling thread call that, if there is a pass.

    In a copied or loaded module it is replaced by what the original had before the pass.

    Args:
        module: the module.
        call: its callable.
        own: the callable as an attribute of the module itself; None if the module's class defines it.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any], own: Callable[..., Any] | None) -> None:
        functools.update_wrapper(self, call)  # keeps the attributes that tell whether a function may be compiled
        self._module, self._call, self._own = weakref.ref(module), call, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        there, regions = self._module(), active.regions
        if there is None or regions is None:
            return self._call(*args, **kwargs)
        return regions.call(there, self._call, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object]]:
        return (_forward_of, (self._module(),)) if self._own is None else (_itself, (self._own,))


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the forward method of a module that is just being copied or loaded."""
    return types.MethodType(type(module).forward, module)


def _itself(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


class _Rerouted:
    """A module whose callable is wrapped, with the number of passes that need it so."""

    def __init__(self, module: nn.Module) -> None:
        self.passes = 0
        # Module.__call__ calls _compiled_call_impl where Module.compile() has set it, and forward otherwise.
        self.attribute = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        self.own = vars(module).get(self.attribute)
        setattr(module, self.attribute, _Route(module, getattr(module, self.attribute), self.own))

    def restore(self, module: nn.Module) -> None:
        if self.own is None:
            delattr(module, self.attribute)
        else:
            setattr(module, self.attribute, self.own)


class HookOfPass:
    """A hook that a pass registers with a module. The hook of a copied or loaded module does nothing.

    Args:
        call: the hook. None, as in a copy: do nothing.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    @unseen
    def __call__(self, *args: Any) -> None:
        """Call the hook."""
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[type[HookOfPass], tuple[()]]:
        return type(self), ()


_rerouted: weakref.WeakKeyDictionary[nn.Module, _Rerouted] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def rerouted(module: nn.Module) -> Iterator[None]:
    """Route calls of a module to the pass of the calling thread, if it has one. Several passes may be open at once."""
    with _lock:
        if module not in _rerouted:
            _rerouted[module] = _Rerouted(module)
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


def recomputed(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a callable of a module, keep only its inputs, and call it again in backward.

    Every tensor in the arguments is an input, however nested. The second call has the same random numbers and autocast
    state as the first.
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
    """Keep a module's running statistics unchanged while it sees a batch again, which is in them already."""
    norms = [norm for norm in module.modules() if isinstance(norm, _NormBase) and norm.training]
    before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)  # through .data, so that the version counter does not change


def graphs_behind(outputs: Any, inputs: Any) -> Iterator[tuple[list[Tensor], int, int]]:
    """Find what each compiled graph between a call's outputs and its inputs keeps.

    Yields:
        For each graph: the tensors that it keeps, the bytes of the tensors that were packed, and the bytes of their
        codes.
    """
    seen = {x.grad_fn for x in tensors_in(inputs)} | {None}
    todo: list[Any] = [x.grad_fn for x in tensors_in(outputs)]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in type(node).__name__:
            tensors = [x for x in (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())) if x is not None]
            yield tensors, *graph_bytes(tensors)
        todo += [there for there, _ in node.next_functions]
