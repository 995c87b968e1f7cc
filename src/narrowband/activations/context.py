"""``nb.compress_activations``: the context around a forward pass that packs the activations saved for backward.

Forward computes with exact activations. The tensors that autograd saves for backward go to a
:class:`~narrowband.activations.recorder.Recorder`: it quantizes large floating-point tensors, and restores them when
backward asks for them.

Source: Pan et al. 2021, Mesa (arXiv 2111.11124).
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from os import PathLike
from typing import Any, TypeVar, cast

import torch
from torch import distributed, nn
from torch.nn.modules import module as modules_of_torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from narrowband.activations.arena import Pieces
from narrowband.activations.dynamo import eager_modules
from narrowband.activations.evaluation import FAST, FastPaths
from narrowband.activations.modules import Modules
from narrowband.activations.operators import Watch
from narrowband.activations.policy import OPERATORS, ActivationPolicy, Bits
from narrowband.activations.ranges import Estimates
from narrowband.activations.recorder import Recorder
from narrowband.activations.regions import HookOfPass, Regions, active, rerouted
from narrowband.activations.sites import Sites
from narrowband.activations.stats import Saved, SavedStats
from narrowband.activations.warmup import warm_up
from narrowband.compiler import unseen
from narrowband.errors import UnsupportedError
from narrowband.stats import Stats
from narrowband.units import counted, format_bytes

__all__ = ["ActivationCompression", "compress_activations"]

log = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Models that a warning was logged for, since nothing of them was compressed, or compiled.
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_NEVER_ENTERED = (
    "compress_activations was called, but its result was never used as a context, so nothing was compressed; write "
    "'with nb.compress_activations(model):' around the forward pass"
)

#: Whether calls of a function return before it runs.
_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)

#: Model → range estimates. They live as long as the model, so that every step may create a new context.
_estimates: weakref.WeakKeyDictionary[nn.Module, Estimates] = weakref.WeakKeyDictionary()
#: Model → memory for its codes, which lives as long.
_pieces: weakref.WeakKeyDictionary[nn.Module, Pieces] = weakref.WeakKeyDictionary()


@unseen
def compress_activations(
    model: nn.Module, bits: Bits | None = None, *, policy: ActivationPolicy | None = None, **options: Any
) -> ActivationCompression:
    """Keep the activations that a model saves for backward in few bits, so that training takes less memory.

    Use the result as a context around the forward pass, or as a decorator of a function that runs it. Backward may run
    inside or outside of it. Ranges of codes are learned from step to step and belong to the model, so the context may
    be created once or in every step.

    Args:
        model: any module. A DataParallel or DistributedDataParallel around it is unwrapped.
        bits: 8, 4 or 2, short for ``policy=ActivationPolicy(bits=…)``; 8 where neither is given.
        policy: which tensors are kept in how many bits; see :class:`ActivationPolicy`.
        options: fields of a policy, such as ``operators={"softmax": "off"}``, where no policy is given.

    Raises:
        ValueError: a pattern of the policy matches no module; or a field of the policy has a value that it cannot have.
        TypeError: both a policy and fields of one are given; a field does not exist; or the model is no module, or the
            policy no :class:`ActivationPolicy`.

    Example:
        Tensors that the loss saves are outside of the model and stay unchanged:

        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> with nb.compress_activations(model, bits=8) as saved:
        ...     loss = model(torch.randn(32, 64)).square().mean()
        >>> loss.backward()
        >>> saved.raw_bytes, saved.kept_bytes, saved.ratio
        (73728, 16384, 4.5)
    """
    if isinstance(bits, ActivationPolicy):
        raise TypeError("bits is an ActivationPolicy; pass it by its name, as in compress_activations(model, policy=…)")
    if isinstance(bits, (str, PathLike)) and str(bits).endswith(".toml"):
        path = str(bits)
        raise TypeError(f"{path!r} is a file; if it holds a policy, pass policy=nb.ActivationPolicy.load({path!r})")
    if policy is not None and (bits is not None or options):
        given = ["bits"] * (bits is not None) + list(options)
        raise TypeError(
            f"{', '.join(given)} cannot be given together with policy: set it with dataclasses.replace(policy, …)"
        )
    there = [field.name for field in fields(ActivationPolicy)]
    for option in options:
        if option not in there:
            close = get_close_matches(option, there, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise TypeError(f"compress_activations has no argument {option!r}{hint} Valid names: {', '.join(there)}")
    if policy is None:
        policy = ActivationPolicy(bits=8 if bits is None else bits, **options)
    return ActivationCompression(model, policy)


class ActivationCompression(contextlib.ContextDecorator):
    """Context of :func:`compress_activations`. It yields a :class:`Saved`, which is complete when the context ends.

    It may be entered repeatedly, and by several threads at once, but not inside of another such context.

    Args:
        model: the model whose activations are compressed.
        policy: which tensors are kept in how many bits.

    Raises:
        TypeError: the model is no module, or the policy is no policy.
        ValueError: a pattern of the policy matches no module.
        UnsupportedError: the model is compiled in a way that cannot be handled, or by ``torch.jit``.
    """

    def __init__(self, model: nn.Module, policy: ActivationPolicy) -> None:
        _check_arguments(model, policy)
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        self.model = model
        self.policy = policy
        self.modules = Modules(model, policy)
        self._sites = Sites(self.modules, policy)
        self.estimates = _estimates.setdefault(model, Estimates(seed=_seed()))
        self._pieces = _pieces.setdefault(model, Pieces())
        self._total, self._last = SavedStats(), SavedStats()
        self._lock = threading.Lock()  # protects the statistics, which several threads add to
        warm_up(model, policy)
        self._never_entered = weakref.finalize(self, log.warning, _NEVER_ENTERED)

    def __repr__(self) -> str:
        """The model's class, the bits, and what passes have kept so far. It does not set up a copy (see below)."""
        own = vars(self)
        if not own.keys() >= {"model", "policy"}:
            return f"{type(self).__name__}(…)"
        total = own.get("_total", SavedStats())
        kept = f", kept {format_bytes(total.sent_bytes)} of {format_bytes(total.raw_bytes)}" if total.steps else ""
        return f"{type(self).__name__}({type(self.model).__name__}, bits={self.policy.bits}{kept})"

    def __getstate__(self) -> dict[str, Any]:
        """Copies and saved contexts are new ones, with the copy of the model, which has its own ranges."""
        return {"model": self.model, "policy": self.policy}

    def __getattr__(self, name: str) -> Any:
        """Set up a copy when it is first used. Until then its model may be incomplete, since models may hold one."""
        if name.startswith("__") or not vars(self).keys() >= {"model", "policy"}:
            raise AttributeError(name)
        ActivationCompression.__init__(self, self.model, self.policy)
        return object.__getattribute__(self, name)

    def __call__(self, function: _Function) -> _Function:
        """Return the function with the context around each of its calls.

        Raises:
            TypeError: calls of the function return before it runs, as those of generators and coroutines do.
        """
        if any(asks(function) for asks in _LATER):
            raise TypeError(
                f"compress_activations cannot decorate {getattr(function, '__name__', function)!r}: a generator or "
                "coroutine runs after its call has returned, and the context would have ended by then. Write 'with "
                "nb.compress_activations(model):' around the forward pass inside of it"
            )
        return super().__call__(function)

    @unseen
    def __enter__(self) -> Saved:
        self._never_entered.detach()
        if active.regions is not None:
            raise UnsupportedError(
                "compress_activations was entered inside another compress_activations in the same thread. They cannot "
                "be nested: use one context for a module that contains both models, such as an nn.ModuleList"
            )
        warm_up(self.model, self.policy)  # again, since autocast may be on by now
        self.estimates.decay = self.policy.decay  # for this pass: another context of the model may have another decay
        self.estimates.notes.receive()
        stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(stack.close)
            stack.enter_context(_collector.resting())
            modules = self.modules.walk()
            recorder = Recorder(self.modules, modules, self._sites, self.policy, self.estimates, self._pieces)
            hook = self._attach(recorder, modules, stack)
            try:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*recorder.hooks))
            except RuntimeError as error:
                refused = _refusal(error)
                if refused is None:
                    raise
                raise refused from error
            watch = stack.enter_context(Watch(recorder))
            if hook is not None and any(isinstance(module, FAST) for module in modules):
                fast = FastPaths(watch, hook)
                stack.callback(fast.close)
                stack.callback(modules_of_torch.register_module_forward_pre_hook(fast.entering).remove)
                stack.callback(modules_of_torch.register_module_forward_hook(fast.leaving, always_call=True).remove)
            undo.pop_all()
        active.regions, active.stack = Regions(recorder, watch), stack
        return recorder.saved

    def _attach(
        self, recorder: Recorder, modules: list[nn.Module], stack: contextlib.ExitStack
    ) -> RemovableHandle | None:
        """Install hooks that tell a recorder which module is running.

        Returns:
            The hook on the model itself; None where parts of it are compiled, and all others have hooks.
        """
        compiled = self.modules.check(modules)
        begins, entering, leaving = (
            HookOfPass(recorder.begins),
            HookOfPass(recorder.entering),
            HookOfPass(recorder.leaving),
        )
        for module in {*compiled, *self.modules.recomputed}:
            stack.enter_context(rerouted(module))
        if not compiled:
            stack.callback(modules_of_torch.register_module_forward_pre_hook(recorder.entering).remove)
            stack.callback(modules_of_torch.register_module_forward_hook(recorder.leaving, always_call=True).remove)
            hook = self.model.register_forward_pre_hook(begins, with_kwargs=True)
            stack.callback(hook.remove)
            return hook
        for module in eager_modules(self.model):  # no global module hooks: Dynamo would compile them into the graphs
            if module is self.model:
                stack.callback(module.register_forward_pre_hook(begins, with_kwargs=True).remove)
            stack.callback(module.register_forward_pre_hook(entering).remove)
            stack.callback(module.register_forward_hook(leaving, always_call=True).remove)
        return None

    @unseen
    def __exit__(self, *error: object) -> None:
        regions, stack = active.regions, active.stack
        active.regions = active.stack = None
        assert regions is not None
        assert stack is not None
        stack.close()
        refused = _refusal(error[1])
        if refused is not None:
            raise refused from cast("BaseException", error[1])
        self.estimates.notes.send()
        recorder = regions.recorder
        if error[0] is None:
            self._count(recorder.saved)
            if self.model not in _warned:
                self._warn(recorder)

    def _warn(self, recorder: Recorder) -> None:
        """Say why nothing was compressed, or compiled; once for each model, not in every step."""
        saved = recorder.saved
        if recorder.uncompiled and not self.modules.check():
            _warned.add(self.model)
            log.warning(
                "torch.compile was applied to something around the model that was given to compress_activations (%s), "
                "and all of it runs uncompiled inside of the context: give compress_activations the result of "
                "torch.compile(model), and call that",
                type(self.model).__name__,
            )
        if recorder.packed or self.policy.is_off:
            return
        if not saved.raw_bytes and not recorder.covered:
            return  # nothing was saved, as in no_grad
        _warned.add(self.model)
        if recorder.covered:
            log.warning(
                "nothing was compressed: the model ran inside other hooks on saved tensors, such as save_on_cpu. "
                "PyTorch calls only the innermost hooks, so they cannot be combined with compress_activations: remove "
                "one of the two"
            )
        elif not recorder.called:
            log.warning(
                "nothing was compressed: the model that was given to compress_activations (%s) was not called inside "
                "the context, and what other code saves for backward is not compressed",
                type(self.model).__name__,
            )
        elif saved.outliers:
            log.warning(
                "nothing was compressed: %s inf, NaN or outliers, or came after a tensor that does, "
                "and all others cannot be compressed (see min_numel=%d, and the dtype)",
                counted(saved.outliers, "tensor holds", "tensors hold"),
                self.policy.min_numel,
            )
        else:
            log.warning(
                "nothing was compressed. A tensor that is saved for backward is kept unchanged if the policy says "
                "'off' for it, if it has fewer than min_numel=%d elements, if its dtype is float64 or complex, if its "
                "operator does not tolerate rounding, if it is saved outside the model or between the graphs of "
                "torch.compile, or if torch.utils.checkpoint computes it again",
                self.policy.min_numel,
            )

    def _count(self, saved: Saved) -> None:
        last = SavedStats(saved.raw_bytes, saved.kept_bytes, 1, saved.outliers)
        with self._lock:
            self._total.add(last)
            self._last = last

    def stats(self) -> Stats[SavedStats]:
        """Return the bytes that were saved for backward: in total, and in the last run through the context.

        Example:
            >>> layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            >>> saving = nb.compress_activations(layers)
            >>> for _ in range(2):
            ...     with saving:
            ...         layers(torch.randn(32, 64)).square().mean().backward()
            >>> saving.stats().total.steps, saving.stats().total.ratio
            (2, 4.5)
        """
        with self._lock:
            return Stats(SavedStats(**vars(self._total)), SavedStats(**vars(self._last)))

    def state_dict(self) -> dict[str, Any]:
        """Return the ranges by name, (2, groups) float32 each, α and β; the random seed; and the number of draws.

        A name is ``module:operator:place``: the third tensor that the operator saves in a module has place 2, whether
        or not the first two are recomputed instead. The normalized input of layer normalization is named
        ``module:layer_norm:place:normalized``. ``module:attention:place:scores`` holds the error of attention scores
        instead of a width.
        """
        return {
            "estimates": self.estimates.state_dict(),
            "seed": self.estimates.seed,
            "draws": self.estimates.draws,
        }

    def load_state_dict(self, state: Any) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: this is not such a state, or is one of another model. Nothing has been changed then.
        """
        if not isinstance(state, Mapping) or set(state) != {"estimates", "seed", "draws"}:
            what = ", ".join(map(repr, state)) if isinstance(state, Mapping) else _shown(state)
            raise ValueError(f"expected a state with estimates, seed and draws, got {what or 'an empty one'}")
        for name in ("seed", "draws"):
            value = state[name]
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
                raise ValueError(f"{name} in the state must be a whole number of at least 0, got {_shown(value)}")
        if not isinstance(state["estimates"], Mapping):
            raise ValueError(f"estimates in the state must be ranges by name, got {_shown(state['estimates'])}")
        modules = {*self.modules.names}
        others = [name for name in state["estimates"] if _module_of(name) not in modules]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise ValueError(
                f"the state is of another model: it has a range for {others[0]!r}{more} (module:operator:place), and "
                f"this model has no such module. Its modules are: {', '.join(map(repr, sorted(modules)[:8]))}"
                f"{', …' if len(modules) > 8 else ''}"
            )
        self.estimates.load_state_dict(state["estimates"])
        self.estimates.seed, self.estimates.draws = state["seed"], state["draws"]


class _Collector:
    """Pauses Python's garbage collector during forward passes, in all threads.

    A pass creates many objects that live until backward. That many new objects trigger a collection, and after some
    steps a full collection, which looks at all objects of the process. So the objects of a pass are not counted: the
    collector's threshold is raised by their number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes = 0
        self._stopped = False
        self._before = 0  # the collector's count of new objects when the first of the running passes began
        #: The collector's threshold of new objects: as set by others, and as last set here.
        self._wanted = self._set = 0

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Pause the collector for a pass: the first of several concurrent passes stops it, the last one restarts it."""
        with self._lock:
            self._passes += 1
            if gc.isenabled():
                gc.disable()
                self._stopped, self._before = True, gc.get_count()[0]
        try:
            yield
        finally:
            with self._lock:
                self._passes = max(0, self._passes - 1)
                if not self._passes and self._stopped:
                    self._stopped = False
                    self._leave_out()
                    gc.enable()

    def start_in_child(self) -> None:
        """Restart the collector in a forked process, such as a worker of a data loader, which runs no pass."""
        self._lock, self._passes = threading.Lock(), 0
        if self._stopped:
            self._stopped = False
            gc.enable()

    def _leave_out(self) -> None:
        """Raise the threshold by the number of objects that passes created: they die soon, or in backward."""
        most, *older = gc.get_threshold()
        if most != self._set:
            self._wanted = most
        if self._wanted:  # with a threshold of 0 Python never collects
            self._set = self._wanted + max(0, gc.get_count()[0] - self._before)
            gc.set_threshold(self._set, *older)


_collector = _Collector()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_collector.start_in_child)


def _check_arguments(model: Any, policy: Any) -> None:
    """Check the model and the policy.

    Raises:
        TypeError: the model is no module, or the policy is no policy.
        UnsupportedError: the model is a ``torch.jit`` module.
    """
    if isinstance(model, type):
        name = model.__name__
        raise TypeError(
            f"compress_activations expects a model, got the class {name}: pass an instance, such as {name}(…)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"compress_activations expects a torch.nn.Module as the model, got {_shown(model)}. For a function, pass "
            "the module that the function calls"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            "compress_activations cannot see the operators of a torch.jit model: pass the module before it is "
            "scripted or traced. A scripted module inside a model is allowed, and is not compressed"
        )
    if not isinstance(policy, ActivationPolicy):
        raise TypeError(
            f"policy must be an nb.ActivationPolicy, got {_shown(policy)}. ActivationPolicy.load(path) reads one from "
            "a file, and ActivationPolicy.from_dict makes one from a dictionary"
        )


def _module_of(name: Any) -> str | None:
    """Return the module in the name of an estimate; None where the name is not that of an estimate."""
    own = r"(.*):([a-z_]+):\d+(:normalized|:scores)?"
    match = re.fullmatch(own, name, re.DOTALL) if isinstance(name, str) else None
    return match[1] if match is not None and match[2] in OPERATORS else None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:59] + '…'} ({type(value).__name__})"


def _refusal(error: object) -> UnsupportedError | None:
    """Return the error to raise where ``torch.func`` refused hooks on saved tensors; None for any other error."""
    text = f"{error}"
    if not isinstance(error, RuntimeError) or "torch.func" not in text or "saved tensor hooks" not in text:
        return None
    return UnsupportedError(
        "torch.func.grad, vjp, jacrev and hessian cannot be used together with compress_activations: it needs hooks on "
        "saved tensors, which PyTorch does not allow in these functions. Use torch.autograd.grad, or call them outside "
        "the context. torch.func.jvp, jacfwd and vmap work inside it"
    )


def _seed() -> int:
    """Return a seed from ``torch.initial_seed()`` that differs between ranks, so that rounding errors average out."""
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    return (torch.initial_seed() + rank) & 0xFFFFFFFF
