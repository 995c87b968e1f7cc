"""Calls of modules that take another way during a pass: compiled ones, and those that backward computes again.

Dynamo would compile what watches a pass along; see :mod:`.dynamo`. So while a pass lasts, what ``torch.compile`` put
into a module is wrapped: inside of it there is only what :mod:`.compiled` gives, and afterwards what the graphs keep is
counted. Modules around the compiled ones, and between them, are compressed operator by operator.

What is computed again is left to torch.utils.checkpoint, which has its own hooks on saved tensors: inside of it nothing
is packed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from narrowband.activations.calls import COMPILED, Call
from narrowband.activations.compiled import compiled_hooks, compiled_saving, graph_bytes
from narrowband.activations.dynamo import is_compiled_itself, without_mode
from narrowband.activations.recorder import Recorder
from narrowband.compiler import unseen

__all__ = ["Regions", "active", "graphs_behind", "recomputed", "rerouted"]

log = logging.getLogger(__name__)

#: Neighbours that share a range in a compiled graph.
_GROUP = 256


class Regions:
    """Calls of compiled and recomputed modules in one pass.

    Args:
        recorder: of the pass.
        mode: on functions, which compiled code must not see.
    """

    def __init__(self, recorder: Recorder, mode: TorchFunctionMode) -> None:
        self.recorder, self._mode = recorder, mode

    @unseen
    def call(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module that backward computes again, or a compiled one, or one that is both."""
        recorder = self.recorder
        # Of what is in a checkpoint already nothing is kept; and the second time it has to go the same way.
        if module not in recorder.modules.recomputed or not torch.is_grad_enabled() or not recorder.saves_here():
            return _direct(module, call, *args, **kwargs)
        with recorder.inside(module, args, kwargs):
            recorder.packed += 1
            return recomputed(module, functools.partial(_direct, module, call), args, kwargs)

    def call_compiled(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module of which torch.compile made graphs, and count what they keep."""
        recorder = self.recorder
        if not recorder.knows(module):
            return call(*args, **kwargs)
        between, graphs = recorder.between_graphs, 0
        with recorder.inside(module, args, kwargs, Call(COMPILED)), without_mode(self._mode):
            with self._saving_of_graphs():
                outputs = call(*args, **kwargs)
            # In a checkpoint nothing of a graph stays, and to look at it would be to compute it again.
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


#: Modules of which PyTorch made no graph, and about which a warning was given.
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _warn_of_no_graph(module: nn.Module, name: str | None, count: int) -> None:
    if module not in _warned:  # once, not in every step
        _warned.add(module)
        log.warning(
            "%s is to be compiled, and PyTorch made no graph of it. So nothing says which operators saved its tensors, "
            "and %d that might have been compressed were kept as they are. PyTorch does not compile its own modules, "
            "such as nn.Sequential or nn.TransformerEncoderLayer, by module.compile(): use torch.compile(module). Nor "
            'does it compile under torch.compiler.set_stance("force_eager"): with TORCHDYNAMO_DISABLE=1 in its '
            "place, operators are compressed one by one",
            f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})",
            count,
        )


class _Active(threading.local):
    """The pass that is open in this thread, and what ends it."""

    regions: Regions | None = None
    stack: contextlib.ExitStack | None = None


active = _Active()


def _direct(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a module, also when a checkpoint makes it, perhaps in another thread or after the pass."""
    if active.regions is None or not is_compiled_itself(module):
        return call(*args, **kwargs)
    return active.regions.call_compiled(module, call, args, kwargs)


class _Rerouted:
    """A module of which what is called is wrapped, by so many passes."""

    def __init__(self, module: nn.Module) -> None:
        self.passes = 0
        # Where Module.__call__ looks: Module.compile() leaves what it compiled in the one, all others in forward.
        self.attribute = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
        self.own = vars(module).get(self.attribute)
        self.call = getattr(module, self.attribute)
        inside = weakref.ref(module)

        @functools.wraps(self.call)  # with the marks of what may be compiled
        def route(*args: Any, **kwargs: Any) -> Any:
            there, regions = inside(), active.regions
            if there is None or regions is None:
                return self.call(*args, **kwargs)
            return regions.call(there, self.call, args, kwargs)

        setattr(module, self.attribute, route)

    def restore(self, module: nn.Module) -> None:
        if self.own is None:
            delattr(module, self.attribute)
        else:
            setattr(module, self.attribute, self.own)


_rerouted: weakref.WeakKeyDictionary[nn.Module, _Rerouted] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def rerouted(module: nn.Module) -> Iterator[None]:
    """Calls of a module go to the pass of their thread, if it has one. Several passes may last at once."""
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
