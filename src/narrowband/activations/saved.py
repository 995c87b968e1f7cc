"""``nb.compress_activations``: what backward needs of a forward pass, kept in few bits.

Forward computes with exact activations. What autograd saves of them for backward passes through the hooks of a *pass*,
one run through the context: large floating tensors are quantized, and restored when backward asks for them. Parameters,
buffers, the model's inputs (which live anyway), integers and small tensors stay as they are, and so does what is saved
outside of the model, by a loss for example. A tensor that several operators save is quantized once.

Source: Pan et al. 2021, Mesa (arXiv 2111.11124).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, cast

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules_of_torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint

from narrowband.activations import operators, regions
from narrowband.activations.compiled import compiled_hooks, compiled_saving, is_compiled_itself, obstacle
from narrowband.activations.derived import Normalization, Origin, Original, Recipe, cast_to, original
from narrowband.activations.kept import (
    Arena,
    Arrangement,
    Estimates,
    Exact,
    Grouping,
    Outliers,
    Packed,
    Payload,
    Source,
    quantized,
)
from narrowband.activations.operators import COMPILED, CUSTOM, OTHER, Known, Watch, differentiates_forward
from narrowband.activations.policy import OPERATORS, ActivationPolicy, Bits
from narrowband.activations.regions import (
    compiled_modules,
    computed_again,
    eager_modules,
    graphs_behind,
    rerouted,
    unseen,
    without_mode,
)
from narrowband.activations.warmup import warm_up
from narrowband.errors import UnsupportedError

__all__ = ["ActivationCompression", "Kept", "Saved", "compress_activations"]

log = logging.getLogger(__name__)

#: Attributes by which modules of attention say how many heads they have.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "head_count")
#: Groups of channels in a model without attention.
_GROUPS = 8
#: Neighbours that share a range in a compiled graph.
_COMPILED_GROUP = 256

#: Names of autograd nodes whose results have their channels in the second dimension, wherever that is of use.
_SECOND = (
    "Convolution", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "MaxPool", "_MaxPool", "AvgPool", "Mkldnn",
)  # fmt: skip
#: Nodes between a parameter and what an operator is given of it: views, and autocast's change of dtype.
_OF_A_PARAMETER = tuple(
    f"{name}Backward0"
    for name in (
        "ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "AsStrided",
    )
)  # fmt: skip

_CHECKPOINT = Known("checkpoint", "last")


@dataclass
class Kept:
    """Bytes that backward keeps.

    Attributes:
        plain: without compression: of every saved tensor's memory, once.
        kept: with it.
        seconds: that packing took so far, and unpacking, once backward has run. On CUDA, of launching it.
        outliers: tensors that the policy would have in few bits, and that are kept as they are, since inf, NaN or an
            outlier is in them; see :class:`~narrowband.activations.kept.Bulk`.
    """

    plain: int = 0
    kept: int = 0
    seconds: float = 0.0
    outliers: int = 0

    @property
    def ratio(self) -> float:
        """How many times less is kept; 1 where nothing would be."""
        return self.plain / self.kept if self.kept else 1.0 if not self.plain else math.inf


@dataclass
class Saved:
    """What one pass through the context saved for backward.

    Attributes:
        by_operator: operator → bytes; see :data:`~narrowband.activations.policy.OPERATORS`.
        by_module: module → bytes, of what it saved itself; "" is the model, "(outside)" what no module saved.
    """

    by_operator: dict[str, Kept] = field(default_factory=dict)
    by_module: dict[str, Kept] = field(default_factory=dict)

    @property
    def bytes_plain(self) -> int:
        """Without compression."""
        return sum(kept.plain for kept in self.by_operator.values())

    @property
    def bytes_kept(self) -> int:
        """With it."""
        return sum(kept.kept for kept in self.by_operator.values())

    @property
    def ratio(self) -> float:
        """How many times less is kept."""
        return Kept(self.bytes_plain, self.bytes_kept).ratio

    @property
    def outliers(self) -> int:
        """Tensors that are kept as they are because inf, NaN or an outlier is in them."""
        return sum(kept.outliers for kept in self.by_operator.values())

    def add(self, operator: str, module: str, plain: int, kept: int, outliers: int = 0) -> None:
        """Count bytes, and tensors with outliers."""
        for table, name in ((self.by_operator, operator), (self.by_module, module)):
            entry = table.setdefault(name, Kept())
            entry.plain += plain
            entry.kept += kept
            entry.outliers += outliers


class _Memory:
    """One piece of memory that tensors of a pass lie in.

    Whether it lives anyway, whether it was counted, what is kept of it, and how what was in it can be computed again.
    It may be freed while the pass goes on, and its address used again.
    """

    __slots__ = ("alive", "exact", "payloads", "plain", "recipes", "reference")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.alive = False
        self.plain = False
        self.exact: weakref.ref[Exact] | None = None
        self.payloads: weakref.WeakValueDictionary[tuple[Any, ...], Payload] = weakref.WeakValueDictionary()
        self.recipes: dict[tuple[Any, ...], Recipe] = {}

    @property
    def is_kept(self) -> bool:
        """Whether all of it is, exactly."""
        return self.exact is not None and self.exact() is not None


class Pass:
    """One run through the context, in one thread."""

    def __init__(self, handle: ActivationCompression, model: nn.Module) -> None:
        self.handle = handle
        self.policy = handle.policy
        self.saved = Saved()
        self.arena = Arena()
        #: The operator at work, as far as the mode on functions sees it, and what it is given.
        self.operator: Known | None = None
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        #: The layer normalization at work.
        self.normalization: Normalization | None = None
        self._modules: list[tuple[int, str]] = []
        self._memories: dict[int, _Memory] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._live((*model.parameters(), *model.buffers()))
        self.packed = 0
        #: Whether a tensor had outliers that let errors of whatever is saved after it grow beyond measure.
        self.extreme = False
        #: On saved tensors. A graph holds them, and a model may hold a graph: so they do not hold the model.
        self.hooks = functools.partial(_pack, weakref.ref(self)), _unpack

    # ---- where we are ------------------------------------------------------------------------------------------------
    # Hooks on modules are called in all threads: each pass minds its own.

    @unseen
    def entering(self, module: nn.Module, _: Any) -> None:
        """A module begins."""
        if self is not getattr(_current, "at", None):
            return
        name = self.handle.names.get(module)
        if name is None and not self._modules:
            return
        if not self._modules:
            self._counts.clear()
        # Of modules that came later, the one around them answers.
        self._modules.append((id(module), self._modules[-1][1] if name is None else name))

    @unseen
    def leaving(self, module: nn.Module, *_: Any) -> None:
        """A module has ended."""
        if self is not getattr(_current, "at", None):
            return
        for place in reversed(range(len(self._modules))):
            if self._modules[place][0] == id(module):
                del self._modules[place:]  # with what KeyboardInterrupt kept from ending
                return

    @unseen
    def begins(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is given these: they live as long as whoever gave them wants."""
        if self is getattr(_current, "at", None):
            self._live(torch.utils._pytree.tree_leaves((args, kwargs)))

    def _live(self, those: Iterable[Any]) -> None:
        for x in those:
            if isinstance(x, Tensor) and not is_lazy(x) and _is_strided(x):
                memory = self._memory(x)
                memory.alive = memory.plain = True

    # ---- modules that take another way -------------------------------------------------------------------------------

    @unseen
    def routed(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a module that backward computes again, or of a compiled one, or of one that is both."""
        # Of what is in a checkpoint already nothing is kept; and the second time it has to go the same way.
        if module not in self.handle.recomputed or not torch.is_grad_enabled() or not self._saves_here():
            return _direct(module, call, *args, **kwargs)
        if not self._modules:
            self.begins(module, args, kwargs)
        self.entering(module, args)
        self.packed += 1
        try:
            return computed_again(module, functools.partial(_direct, module, call), args, kwargs)
        finally:
            self.leaving(module)

    def _saves_here(self) -> bool:
        """Whether what autograd saves comes to this pass: a checkpoint has hooks of its own."""
        return bool(torch._C._autograd._top_saved_tensors_default_hooks(True) == self.hooks)

    def compiled(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module of which torch.compile made graphs, and count what they keep."""
        name = self.handle.names.get(module)
        if name is None and not self._modules:
            return call(*args, **kwargs)
        if not self._modules:
            self.begins(module, args, kwargs)
        before = self.operator, self.arguments
        self.entering(module, args)
        self.operator, self.arguments = COMPILED, ((), {})
        try:
            with without_mode(_current.watch):
                with self._saving_of_graphs():
                    outputs = call(*args, **kwargs)
                # In a checkpoint nothing of a graph stays, and to look at it would be to compute it again.
                for tensors, plain, packed in graphs_behind(outputs, (args, kwargs)) if self._saves_here() else ():
                    self._count_graph(tensors, plain, packed)
            return outputs
        finally:
            self.leaving(module)
            self.operator, self.arguments = before

    def _saving_of_graphs(self) -> contextlib.AbstractContextManager[None]:
        bits, policy = self._bits(), self.policy
        if bits == "off" or not self._saves_here():
            return contextlib.nullcontext()
        hooks = compiled_hooks(
            bits,
            min_numel=max(policy.min_numel, _COMPILED_GROUP),
            group=_COMPILED_GROUP,
            stochastic=policy.rounding == "stochastic",
        )
        return compiled_saving(hooks, self.hooks)

    def _count_graph(self, tensors: Iterable[Tensor], plain: int, packed: int) -> None:
        """Count what a graph keeps, of which some is codes of so many bytes."""
        exact = -packed
        for x in tensors:
            memory = self._memory(x)
            if not memory.alive and not memory.plain:
                memory.plain = True
                exact += x.untyped_storage().nbytes()
        operator, module = self._place()
        self.saved.add(operator.name, module, exact + plain, exact + packed)
        self.packed += bool(packed)

    # ---- operators that keep less by themselves ----------------------------------------------------------------------

    def replaces(self, x: Any) -> bool:
        """Whether an operator of ours shall take the place of PyTorch's, for this input."""
        return (
            bool(self._modules)
            and type(x) is Tensor
            and x.requires_grad
            and torch.is_grad_enabled()
            and _is_plain(x)
            and x.numel() >= self.policy.min_numel
            and self._bits() != "off"
            # Not in a checkpoint: there, PyTorch compares what it saves now with what it saves when it computes again.
            and self._saves_here()
        )

    def keeps(self, kept: Tensor, *, plain: Tensor | int, and_bytes: int = 0) -> None:
        """One of our operators will save this; PyTorch's would keep a tensor, or so many bytes of its own, or both."""
        self._memory(kept).alive = True  # counted here, and kept as it is
        operator, module = self._place()
        if isinstance(plain, Tensor):
            memory = self._memory(plain)
            counted, memory.plain = memory.plain, True
            plain = 0 if counted else plain.untyped_storage().nbytes()
        self.saved.add(operator.name, module, plain + and_bytes, kept.numel())
        self.packed += 1

    # ---- results that are computed again -----------------------------------------------------------------------------

    def origin(self, x: Any) -> Origin | None:
        """What is kept of an operator's input, so that its result can be computed again; None: nothing, or it shall
        not be.
        """
        if (
            not self.policy.derive
            or not self._modules
            or type(x) is not Tensor
            or not _is_plain(x)
            or x.numel() < self.policy.min_numel
            or not self._saves_here()
        ):
            return None
        memory, arrangement = self._memory(x), Arrangement.of(x)
        key = _key(x, arrangement)
        exact = None if memory.exact is None else memory.exact()
        if exact is not None and arrangement.dense and exact.holds(x):
            return original(weakref.ref(exact))
        payload = memory.payloads.get(key)
        if payload is not None:
            return weakref.ref(payload)
        recipe = memory.recipes.get(key)
        return None if recipe is None else recipe.derivation

    def derive(self, y: Tensor, recipe: Recipe) -> None:
        """An operator's result can be computed again."""
        arrangement = Arrangement.of(y)
        if type(y) is Tensor and y.requires_grad and arrangement.dense:
            self._memory(y).recipes[_key(y, arrangement)] = recipe

    def _recipe(self, x: Tensor, arrangement: Arrangement, memory: _Memory) -> Recipe | None:
        """How a tensor that is saved can be computed again."""
        key = _key(x, arrangement)
        recipe = memory.recipes.get(key)
        if recipe is None:
            operand = self._operand_before_cast(x, arrangement)
            if operand is not None:
                there = Arrangement.of(operand)
                before = self._memory(operand).recipes.get(_key(operand, there))
                if before is not None:
                    recipe = memory.recipes[key] = Recipe(cast_to(x.dtype), before.derivation)
        return recipe

    def _operand_before_cast(self, x: Tensor, arrangement: Arrangement) -> Tensor | None:
        """What the operator at work was given, of which autocast made this tensor, or the one that it is a view of."""
        whole = _whole(x)
        node = whole.grad_fn
        if (
            node is None
            or node.name() != "ToCopyBackward0"
            or x._version != 0
            or not arrangement.dense
            or (x.numel(), x.storage_offset()) != (whole.numel(), whole.storage_offset())
        ):
            return None
        before = node.next_functions[0]
        for given in self._operands():
            if (given.grad_fn, given.output_nr) == before and Arrangement.of(given) == Arrangement.of(whole):
                return given
        return None

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def pack(self, x: Tensor) -> Exact | Packed:
        """What to keep of a tensor that autograd saves."""
        operator, module = self._place()
        where = _where(operator, module)
        if type(x) not in (Tensor, nn.Parameter) or not _is_strided(x) or differentiates_forward():
            return Exact(x, where)
        storage = x.untyped_storage()
        memory = self._memory(x)
        if _of_a_parameter(x):  # of one that came later than the pass
            memory.alive = memory.plain = True
        if memory.alive or storage.nbytes() == 0:
            return Exact(x, where)
        plain = 0 if memory.plain else storage.nbytes()
        memory.plain = True
        begin = time.perf_counter()
        source, arrangement, nbytes = self._source(x, memory, operator, module)
        if source is None:
            exact = Exact(x, where)
            self.saved.add(operator.name, module, plain, 0 if memory.is_kept else storage.nbytes())
            if not memory.is_kept:
                memory.exact = weakref.ref(exact)
            return exact
        self.saved.add(operator.name, module, plain, nbytes)
        self.packed += 1
        clock = self.saved.by_operator[operator.name]
        clock.seconds += time.perf_counter() - begin
        return Packed(x, arrangement, source, where, clock)

    def _source(
        self, x: Tensor, memory: _Memory, operator: Known, module: str
    ) -> tuple[Source | None, Arrangement, int]:
        """Codes of the tensor, or how it is computed again; how it lies in memory; and how many bytes are kept for it
        that were not before. Neither codes nor a computation: it is to be kept as it is.
        """
        where = _where(operator, module)
        arrangement = Arrangement.of(x)
        bits = self.policy.bits_for(operator.name, module)
        # Which of the tensors that the operator saves in this module this is: each has estimates of its own. All are
        # counted, also those that stay as they are today, so that names do not change with sizes.
        place = self._counts[module, operator.name] = self._counts.get((module, operator.name), -1) + 1
        if (
            bits == "off"
            or self.extreme
            or operator is COMPILED  # between graphs nothing says which operator it is
            or not self._modules
            or not _is_plain(x)
            or x.numel() < self.policy.min_numel
            or _is_expanded(x)
            or memory.is_kept
            or self._is_statistic(x, operator)
        ):
            return None, arrangement, 0
        parameter = self._parameter_before_cast(x)
        if parameter is not None:  # which lives anyway, and can be cast again
            cast = Original(Exact(parameter, where), x.dtype) if _is_cast_of(x, arrangement, parameter) else None
            return cast, arrangement, 0
        key = _key(x, arrangement)
        known = memory.payloads.get(key)
        if known is not None and known.bits >= bits:
            return known, arrangement, 0
        recipe = self._recipe(x, arrangement, memory)
        derivation = None if recipe is None else recipe.derivation()
        if derivation is not None and derivation.bits >= bits:
            return derivation, arrangement, derivation.count()
        name = f"{module}:{operator.name}:{place}"
        with torch.no_grad():
            if self.normalization is not None and self.normalization.takes(x):
                n = self.normalization.normalized(x)
                made = self._quantized(n, operator, f"{name}:normalized", module, bits)
                if made is None:
                    return None, arrangement, 0
                self.normalization.origin = weakref.ref(made)
                recipe = memory.recipes[key] = Recipe(self.normalization.input(x), self.normalization.origin)
                return recipe.derivation(), arrangement, made.nbytes
            made = self._quantized(x, operator, name, module, bits)
        if made is None:
            return None, arrangement, 0
        memory.payloads[key] = made
        return made, arrangement, made.nbytes

    def _quantized(
        self, x: Tensor | None, operator: Known, name: str, module: str, bits: Literal[8, 4, 2]
    ) -> Payload | None:
        """Codes of a tensor; None, which is counted, where there are outliers, or no tensor that has codes."""
        made: Payload | Outliers = Outliers(extreme=True)
        if x is not None:
            policy, estimates = self.policy, self.handle.estimates
            arrangement, grouping = Arrangement.of(x), self._grouping(x, operator, module)
            samples = self._samples(x, grouping) if policy.statistics == "sample" else 1
            rows = arrangement.rows(grouping, samples=samples)
            lines = arrangement.lines(x.detach(), rows)
            wide = lines if x.dtype in (torch.float32, torch.bfloat16) else lines.float()
            made = quantized(wide, rows, bits, x.dtype, self.arena, policy, estimates, name)
        if isinstance(made, Payload):
            return made
        self.extreme |= made.extreme
        self.saved.add(operator.name, module, 0, 0, outliers=1)
        return None

    def _grouping(self, x: Tensor, operator: Known, module: str) -> Grouping:
        """Heads where there are any, or else groups of channels."""
        if self.policy.granularity == "layer":
            return Grouping(x.dim() - 1, 1)
        heads = self.handle.attention_heads(module)
        kind = operator.kind
        if operator.name == "matmul" and any(operand.dim() < 3 for operand in self._operands()[-2:]):
            kind = "last"  # a product with one matrix is a linear layer
        if kind == "either":
            producer = x.grad_fn.name() if x.grad_fn is not None else ""
            kind = "second" if x.dim() > 2 and producer.startswith(_SECOND) else "last"
            if x.dim() == 4 and heads is not None and x.shape[1] == heads:
                kind = "heads"
        if kind == "heads":
            if x.dim() == 4:
                # (B, H, N, D), and (B, N, H, D) where heads are known to be there.
                dim = 2 if heads is not None and x.shape[1] != heads and x.shape[2] == heads else 1
                return Grouping(dim, x.shape[dim])
            if x.dim() == 3 and heads is not None and x.shape[0] % heads == 0:  # (B·H, N, D)
                return Grouping(0, heads, x.shape[0] // heads)
        dim = 1 if kind == "second" and x.dim() > 1 else x.dim() - 1
        # Batch normalization makes channels equally large, and with them their errors: each has its own range.
        each = x.shape[dim] if operator.name == "batch_norm" and self.policy.derive else None
        wanted = self.policy.groups or each or heads or self.handle.default_groups
        return Grouping(dim, _divisor(x.shape[dim], wanted))

    # ---- what is saved where -----------------------------------------------------------------------------------------

    def _place(self) -> tuple[Known, str]:
        operator = self.operator
        if operator is None:  # no operator of PyTorch, or one of its backward
            operator = _CHECKPOINT if _saved_by_checkpoint() else CUSTOM if self._modules else OTHER
        return operator, self._modules[-1][1] if self._modules else "(outside)"

    def _operands(self) -> list[Tensor]:
        """The tensors that the operator at work is given."""
        return [x for x in torch.utils._pytree.tree_leaves(self.arguments) if isinstance(x, Tensor)]

    def _samples(self, x: Tensor, grouping: Grouping) -> int:
        """How many samples the first dimension is made of: products make one of samples and tokens, or heads."""
        if grouping.dim == 0:
            return grouping.major
        given = next(iter(self._operands()), x)
        samples = given.shape[0] if given.dim() else 0
        return samples if samples and x.shape[0] % samples == 0 else x.shape[0]

    def _bits(self) -> Bits:
        operator, module = self._place()
        return self.policy.bits_for(operator.name, module)

    def _memory(self, x: Tensor) -> _Memory:
        storage = x.untyped_storage()
        known = self._memories.get(storage._cdata)
        if known is None or known.reference.expired():  # type: ignore[no-untyped-call]
            known = self._memories[storage._cdata] = _Memory(storage)
        return known

    def _is_statistic(self, x: Tensor, operator: Known) -> bool:
        """Means and deviations of normalization, and attention's log-sum-exp: few, and much depends on them."""
        if operator.name not in ("attention", "layer_norm", "batch_norm"):
            return False
        given = next(iter(self._operands()), x)
        if operator.name == "attention":  # a number per row of the scores; there may be more, to fill up
            per_row = x.shape[:-1] == given.shape[:-2] and x.shape[-1] >= given.shape[-2]
            return per_row or (x.shape[-1] == 1 and x.dim() == given.dim())
        return x.numel() < given.numel()

    def _parameter_before_cast(self, x: Tensor) -> Tensor | None:
        """The parameter of which autocast made this tensor, or the one that it is a view of."""
        node = x.grad_fn
        while node is not None and node.name() in _OF_A_PARAMETER:
            node = node.next_functions[0][0]
        if node is not None:
            parameter = getattr(node, "variable", None)
            return parameter if isinstance(parameter, nn.Parameter) else None
        if x.requires_grad:
            return None
        # Of one that is frozen nothing says where it comes from.
        whole = _whole(x)
        those = (given.detach() for given in self._operands() if _of_a_parameter(given) and given.dtype != x.dtype)
        same = (given for given in those if whole.shape == given.shape and torch.equal(whole, given.to(x.dtype)))
        return next(same, None)


def _where(operator: Known, module: str) -> str:
    return f"{operator.name} in {module or 'the model'}"


@unseen
def _pack(at: weakref.ref[Pass], x: Tensor) -> Exact | Packed:
    current = at()
    return Exact(x, "an operator") if current is None else current.pack(x)


@unseen
def _unpack(kept: Exact | Packed) -> Tensor:
    return kept.restore()


def _is_strided(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_nested and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _is_plain(x: Tensor) -> bool:
    floating = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return _is_strided(x) and floating and x.dim() > 0 and not x.is_neg() and not x.is_inference()


def _is_expanded(x: Tensor) -> bool:
    """Whether elements share memory: it is smaller than it looks."""
    return x.nbytes > x.untyped_storage().nbytes() or any(
        stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)
    )


def _key(x: Tensor, arrangement: Arrangement) -> tuple[Any, ...]:
    """Which values of its memory a tensor has, in whatever shape."""
    return x.storage_offset(), x._version, x.dtype, x.numel() if arrangement.dense else (x.shape, x.stride())


def _of_a_parameter(x: Tensor) -> bool:
    """Whether the tensor is a parameter, or a view of one."""
    return isinstance(_whole(x), nn.Parameter)


def _whole(x: Tensor) -> Tensor:
    """What the tensor is a view of, or itself."""
    return x if x._base is None else x._base


def _is_cast_of(x: Tensor, arrangement: Arrangement, parameter: Tensor) -> bool:
    """Whether a tensor's memory has the parameter's values in their order, in another dtype."""
    whole = _whole(x)
    node = whole.grad_fn  # None of what is frozen, and has been compared
    direct = node is None or getattr(node.next_functions[0][0], "variable", None) is parameter
    return (
        direct
        and x._version == 0
        and arrangement.dense
        and (x.numel(), x.storage_offset()) == (whole.numel(), whole.storage_offset())
        and (whole.shape, whole.stride()) == (parameter.shape, parameter.stride())
        and Arrangement.of(parameter).dense
    )


def _divisor(size: int, wanted: int) -> int:
    """The largest number of equal groups that is no larger than wanted."""
    return next(groups for groups in range(max(1, min(size, wanted)), 0, -1) if size % groups == 0)


def _saved_by_checkpoint() -> bool:
    """Whether torch.utils.checkpoint is what saves: what it calls may save, too."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename in _OURS or frame.f_code.co_filename.endswith(_DYNAMO)):
        frame = frame.f_back  # up to the hook's caller
    if frame is not None and frame.f_code is _APPLY:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == checkpoint.__file__


#: Files with code between the hook's caller and the hook.
_OURS = (__file__, operators.__file__, regions.__file__)
_DYNAMO = "/torch/_dynamo/eval_frame.py"
#: Between the hook and who calls an autograd function.
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


# ---- the handle ------------------------------------------------------------------------------------------------------

_current = threading.local()

#: Models of which nothing was compressed, and that was said.
_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()

#: The estimates of a model live as long as it does, so that every step may make its context anew.
_estimates: weakref.WeakKeyDictionary[nn.Module, Estimates] = weakref.WeakKeyDictionary()


@unseen
def compress_activations(
    model: nn.Module, bits: Bits | None = None, *, policy: ActivationPolicy | None = None, **options: Any
) -> ActivationCompression:
    """Keep what backward needs of a model's activations in few bits.

    Use what is returned as a context around the forward pass, or as a decorator of a function that runs it. Backward
    may be inside or outside. Ranges are learned from step to step; they belong to the model, so the context may be made
    once or in every step.

    Args:
        model: any module. DistributedDataParallel around it is seen through.
        bits: 8, 4 or 2, short for ``policy=ActivationPolicy(bits=…)``; 8 where neither is given.
        policy: what is kept in how many bits; see :class:`ActivationPolicy`.
        options: fields of a policy, such as ``operators={"softmax": "off"}``, where no policy is given.

    Raises:
        ValueError: a pattern of the policy matches no module; or a field of the policy has a value that it cannot have.
        TypeError: both a policy and fields of one; a field that does not exist; or what is no model, or no policy.

    Example:
        What the loss saves is outside of the model and stays as it is:

        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> with nb.compress_activations(model, bits=8) as saved:
        ...     loss = model(torch.randn(32, 64)).square().mean()
        >>> loss.backward()
        >>> saved.bytes_plain, saved.bytes_kept, saved.ratio
        (73728, 16384, 4.5)
    """
    if policy is not None and (bits is not None or options):
        given = ["bits"] * (bits is not None) + list(options)
        raise TypeError(f"{', '.join(given)}: given beside policy, whose field this is; use dataclasses.replace on it")
    there = [field.name for field in fields(ActivationPolicy)]
    for option in options:
        if option not in there:
            close = get_close_matches(option, there, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise TypeError(f"compress_activations takes no {option!r}{hint} There are: {', '.join(there)}")
    if policy is None:
        policy = ActivationPolicy(bits=8 if bits is None else bits, **options)
    return ActivationCompression(model, policy)


class ActivationCompression(contextlib.ContextDecorator):
    """Context of :func:`compress_activations`; it yields a :class:`Saved`, which is complete when the context ends.

    It may be entered again and again, and by several threads at once, but not inside of another one.

    Args:
        model: whose activations.
        policy: what is kept in how many bits.

    Raises:
        TypeError: one of these is something else.
        ValueError: a pattern of the policy matches no module.
        UnsupportedError: the model is compiled in a way that does not go with this.
    """

    def __init__(self, model: nn.Module, policy: ActivationPolicy) -> None:
        _check_arguments(model, policy)
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        self.model = model
        self.policy = policy
        names = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self.names = weakref.WeakKeyDictionary(
            {module: name.removesuffix("_orig_mod").removesuffix(".") for module, name in names.items()}
        )
        policy.check(self.names.values())
        self.recomputed = weakref.WeakSet(self._computed_again(model))
        self._refuse()
        self.estimates = _estimates.setdefault(model, Estimates(seed=_seed()))
        self.estimates.decay = policy.decay
        self._known_heads: dict[str, int | None] = {}
        own = [heads for heads in map(_own_heads, model.modules()) if heads is not None]
        self.default_groups = max(set(own), key=own.count) if own else _GROUPS
        warm_up(model, policy)

    @unseen
    def __enter__(self) -> Saved:
        if getattr(_current, "at", None) is not None:
            raise UnsupportedError(
                "compress_activations is entered inside of another one in the same thread: only one can decide what a "
                "tensor is kept in. Give the outer one a policy for both models"
            )
        warm_up(self.model, self.policy)  # autocast may be on by now
        at = Pass(self, self.model)
        stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(stack.close)
            self._attach(at, stack)
            try:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*at.hooks))
            except RuntimeError as error:
                refused = _refusal(error)
                if refused is None:
                    raise
                raise refused from error
            watch = stack.enter_context(Watch(at))
            undo.pop_all()
        _current.at, _current.stack, _current.watch = at, stack, watch
        return at.saved

    def _attach(self, at: Pass, stack: contextlib.ExitStack) -> None:
        """Let a pass know which module is at work."""
        self._refuse()  # it may have been compiled since
        compiled = [module for _, module in compiled_modules(self.model)]
        for module in {*compiled, *self.recomputed}:
            stack.enter_context(rerouted(module, _router))
        if not compiled:
            stack.callback(modules_of_torch.register_module_forward_pre_hook(at.entering).remove)
            stack.callback(modules_of_torch.register_module_forward_hook(at.leaving, always_call=True).remove)
            stack.callback(self.model.register_forward_pre_hook(at.begins, with_kwargs=True).remove)
            return
        for module in eager_modules(self.model):  # no hooks on all modules: Dynamo would compile them along
            if module is self.model:
                stack.callback(module.register_forward_pre_hook(at.begins, with_kwargs=True).remove)
            stack.callback(module.register_forward_pre_hook(at.entering).remove)
            stack.callback(module.register_forward_hook(at.leaving, always_call=True).remove)

    @unseen
    def __exit__(self, *error: object) -> None:
        at: Pass = _current.at
        stack: contextlib.ExitStack = _current.stack
        _current.at = _current.stack = _current.watch = None
        stack.close()
        refused = _refusal(error[1])
        if refused is not None:
            raise refused from cast("BaseException", error[1])
        nothing = error[0] is None and at.saved.bytes_plain and not at.packed and not at.saved.outliers
        if nothing and not self.policy.is_off and self.model not in _told:  # once, not in every step
            _told.add(self.model)
            log.warning(
                "nothing was compressed: all that was saved for backward is off in the policy, smaller than "
                "min_numel=%d elements, or was saved outside of the model",
                self.policy.min_numel,
            )

    def state_dict(self) -> dict[str, Any]:
        """Ranges by name, (2, groups) float32 each, α and β; the seed of random draws, and how many were made.

        A name is ``module:operator:place``: the third tensor that the operator saves in a module has the place 2,
        whether or not the first two are computed again instead. Of layer normalization's input in its normalized form
        it is ``module:layer_norm:place:normalized``.
        """
        return {
            "estimates": self.estimates.state_dict(),
            "seed": self.estimates.seed,
            "draws": self.estimates.draws,
        }

    def load_state_dict(self, state: Any) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            ValueError: it is something else, or of another model. Nothing has changed then.
        """
        if not isinstance(state, Mapping) or set(state) != {"estimates", "seed", "draws"}:
            what = ", ".join(map(repr, state)) if isinstance(state, Mapping) else _told_of(state)
            raise ValueError(f"a state has estimates, seed and draws, and this has {what or 'nothing'}")
        for name in ("seed", "draws"):
            value = state[name]
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
                raise ValueError(f"{name} of a state is a whole number, at least 0, and this is {_told_of(value)}")
        if not isinstance(state["estimates"], Mapping):
            raise ValueError(f"estimates of a state are ranges by name, and this is {_told_of(state['estimates'])}")
        modules = {*self.names.values()}
        others = [name for name in state["estimates"] if _module_of(name) not in modules]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            raise ValueError(
                f"the state is of another model: it has a range of {others[0]!r}{more}, module:operator:place, and the "
                f"model has no such module. There are: {', '.join(map(repr, sorted(modules)[:8]))}"
                f"{', …' if len(modules) > 8 else ''}"
            )
        self.estimates.load_state_dict(state["estimates"])
        self.estimates.seed, self.estimates.draws = state["seed"], state["draws"]

    # ---- what a pass asks --------------------------------------------------------------------------------------------

    def _computed_again(self, module: nn.Module) -> Iterator[nn.Module]:
        """Modules that backward computes again, the outermost ones."""
        if self.policy.checkpoints(self.names[module]):
            yield module
            return
        for child in module.children():
            yield from self._computed_again(child)

    def _refuse(self) -> None:
        """Raise UnsupportedError for what cannot be done to this model."""
        compiled = dict(compiled_modules(self.model))
        reason = obstacle() if compiled else None
        if reason is not None:
            raise UnsupportedError(reason)
        for whole in compiled.values():
            for module in whole.modules():
                if module is not whole and module in self.recomputed:
                    raise UnsupportedError(
                        f"modules: {self.names[module]!r} is to be computed again and lies inside of "
                        f"{self.names[whole] or 'the model'!r}, which is compiled: a graph has no modules. Name the "
                        "compiled module, or compile the modules one by one"
                    )

    def attention_heads(self, module: str) -> int | None:
        """Heads of the module of that name, or of the nearest around it that has any."""
        if self.policy.heads is not None:
            return self.policy.heads
        if module not in self._known_heads:
            found, name = None, module
            while found is None:
                with contextlib.suppress(AttributeError):
                    found = _own_heads(self.model.get_submodule(name))
                if not name:
                    break
                name = name.rpartition(".")[0]
            self._known_heads[module] = found
        return self._known_heads[module]


def _check_arguments(model: Any, policy: Any) -> None:
    """Raise TypeError for what is no model, or no policy."""
    if isinstance(model, type):
        name = model.__name__
        raise TypeError(f"compress_activations was given the class {name}: give it a model, such as {name}(…)")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"compress_activations was given {_told_of(model)} as the model: give it a torch.nn.Module, and around a "
            "function the module that the function calls"
        )
    if not isinstance(policy, ActivationPolicy):
        raise TypeError(
            f"policy is {_told_of(policy)}: give an nb.ActivationPolicy; ActivationPolicy.load(path) reads one from a "
            "file, and ActivationPolicy.from_dict takes a dictionary"
        )


def _module_of(name: Any) -> str | None:
    """The module in the name of an estimate; None where it is no such name."""
    match = re.fullmatch(r"(.*):([a-z_]+):\d+(:normalized)?", name, re.DOTALL) if isinstance(name, str) else None
    return match[1] if match is not None and match[2] in OPERATORS else None


def _told_of(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:59] + '…'} ({type(value).__name__})"


def _refusal(error: object) -> UnsupportedError | None:
    """What it means here that PyTorch refused hooks on saved tensors; None if it did something else."""
    text = f"{error}"
    if not isinstance(error, RuntimeError) or "torch.func" not in text or "saved tensor hooks" not in text:
        return None
    return UnsupportedError(
        "torch.func.grad, vjp, jacrev and hessian cannot be used together with compress_activations: PyTorch allows no "
        "hooks on saved tensors in them, and by these activations are compressed. Use torch.autograd.grad, or leave "
        "the context for these calls. torch.func.jvp, jacfwd and vmap work inside"
    )


def _seed() -> int:
    """From what ``torch.manual_seed`` was given, and another one on every rank: so roundings average out over ranks."""
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    return (torch.initial_seed() + rank) & 0xFFFFFFFF


def _router() -> Callable[..., Any] | None:
    at: Pass | None = getattr(_current, "at", None)
    return None if at is None else at.routed


def _direct(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of a module, also when a checkpoint makes it, perhaps in another thread or after the pass."""
    at: Pass | None = getattr(_current, "at", None)
    if at is None or not is_compiled_itself(module):
        return call(*args, **kwargs)
    return at.compiled(module, call, args, kwargs)


def _own_heads(module: nn.Module) -> int | None:
    for name in _HEADS:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
