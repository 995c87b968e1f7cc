"""Saved activations under ``torch.compile``: packed inside the compiled forward, restored inside the compiled backward.

A compiled region is one autograd function, so hooks in Python would see all its saved tensors at once, parameters among
them, and would restore all of them before backward begins. Hooks that are graph modules are inlined instead:
AOTAutograd traces them once per saved tensor while it compiles, and puts their operators into both graphs. No Python
runs at run time, and the compiler may fuse and reorder the operators.

The compiler decides what is saved. Its partitioner may keep the input of a GELU and recompute the GELU. It calls the
hooks after that, and only for tensors that nothing but this graph holds (no inputs, parameters, outputs).

:mod:`.graph_codes` has the codes.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from narrowband.activations import graph_attention, graph_codes, graph_products
from narrowband.activations.graph_attention import (
    Reruns,
    is_attention,
    is_part,
    multiplied,
    reads_beside,
    same_values,
    scored,
)
from narrowband.activations.graph_products import compute_products
from narrowband.compiler import unseen
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

    Pack = Callable[[Tensor], Any]
    Unpack = Callable[[Any], Tensor]

__all__ = ["compiled_hooks", "compiled_saving", "graph_bytes"]

_PACKED = (torch.float32, torch.float16, torch.bfloat16)


# ---- hooks -----------------------------------------------------------------------------------------------------------


def compiled_hooks(
    bits: Literal[8, 4, 2], *, min_numel: int = 4096, group: int = 256, stochastic: bool = True
) -> tuple[GraphModule, GraphModule]:
    """Return hooks (pack, unpack) for ``torch.autograd.graph.saved_tensors_hooks`` around calls of compiled models.

    The model is compiled again once with the hooks on and once with them off. These tensors are kept unchanged: those
    that are not float32, float16, bfloat16 or masks; small tensors; copies of the graph's inputs (parameters in the
    dtype of autocast); and those that rounding would spoil: tensors with one number per row, such as statistics of
    normalization, what fused attention adds to scores, and whatever operators of other libraries read. Where backward
    asks for the sign of a value, as that of ReLU does, signs are kept. Masks are packed without loss, in one bit per
    element. Queries and keys of fused attention have 8 bits, and its forward runs again in backward: see
    :mod:`.graph_attention`. What it returns is not kept, except where it has dropout.

    A group that holds inf or NaN, or whose range exceeds float32, is restored as NaN.

    Args:
        bits: bits per element.
        min_numel: tensors with fewer elements are kept unchanged.
        group: how many elements share a range, a multiple of 8. A range takes 8 bytes.
        stochastic: round stochastically, which is unbiased; otherwise to nearest.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> with torch.autograd.graph.saved_tensors_hooks(*compiled_hooks(4)):
        ...     loss = torch.compile(model)(x).square().mean()
    """
    if bits not in (8, 4, 2):
        raise ValueError(f"bits={bits} must be 8, 4 or 2")
    if group < 8 or group % 8:
        raise ValueError(f"group={group} must be a positive multiple of 8")
    if min_numel < group:
        raise ValueError(f"min_numel={min_numel} must be at least group={group}: smaller tensors would be padded")
    return _hooks(bits, min_numel, group, stochastic)


@functools.cache  # compiled code is guarded by the identity of its hooks: return the same ones, and keep them alive
def _hooks(bits: int, min_numel: int, group: int, stochastic: bool) -> tuple[GraphModule, GraphModule]:
    options = {"bits": bits, "min_numel": min_numel, "group": group, "stochastic": stochastic}
    return _hook(_pack, options), _hook(_unpack, {"group": group})


def _hook(function: Callable[..., Any], options: dict[str, Any]) -> GraphModule:
    """Return a graph module of one call. AOTAutograd traces it for every saved tensor, so the call may read shapes."""
    graph = torch.fx.Graph()
    call = graph.call_function(function, (graph.placeholder("saved"),), options)
    graph.output(call)
    # The cache of compiled graphs on disk sees the call's name and options only; the hash covers its source.
    call.meta["is_wrapped"] = True
    call.meta["user_cache_hash"] = _source()
    module = torch.fx.GraphModule({}, graph)
    # Between compiled graphs autograd calls the module while Dynamo is active, which must not compile it. Every graph
    # module has a class of its own, so this changes no other module.
    kind: Any = type(module)
    kind.__call__ = unseen(kind.__call__)
    return module


@functools.cache
def _source() -> str:
    files = __file__, graph_attention.__file__, graph_codes.__file__, graph_products.__file__
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


_outside: ContextVar[tuple[Pack, Unpack] | None] = ContextVar("outside", default=None)


@contextmanager
def compiled_saving(
    hooks: tuple[GraphModule, GraphModule], between: tuple[Pack, Unpack] | None = None
) -> Iterator[None]:
    """Save tensors with the hooks of :func:`compiled_hooks`, and those saved outside of compiled graphs with others.

    A model may be compiled in parts, and graphs may break. The Python hooks ``between`` handle the tensors saved in
    between; without such hooks these are kept unchanged.

    Example:
        >>> with compiled_saving(compiled_hooks(8), (pack, unpack)):
        ...     loss = model(x).square().mean()
    """
    token = _outside.set(between)
    try:
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            yield
    finally:
        _outside.reset(token)


class _Outside:
    """A tensor saved outside of compiled graphs, with the hooks ``between`` of :func:`compiled_saving`."""

    __slots__ = ("_kept", "_unpack")

    def __init__(self, x: Tensor) -> None:
        hooks: tuple[Pack, Unpack] = _outside.get() or (_Unchanged, _Unchanged.restore)
        self._kept, self._unpack = hooks[0](x), hooks[1]

    def restore(self) -> Tensor:
        return self._unpack(self._kept)


class _Unchanged:
    """A tensor that is kept unchanged. With hooks, PyTorch itself no longer checks for in-place modifications."""

    __slots__ = ("_version", "_x")

    def __init__(self, x: Tensor) -> None:
        self._x = x.detach()  # a node that keeps its own output would otherwise be in a cycle that is never freed
        self._version = x._version

    def restore(self) -> Tensor:
        if self._x._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self._x.dtype} {list(self._x.shape)} is at version {self._x._version}; "
                f"expected version {self._version} instead"
            )
        return self._x


def _pack(x: Tensor, *, bits: int, min_numel: int, group: int, stochastic: bool) -> Any:
    saved = _Saved.current(group)
    if saved is None:
        return _Outside(x)
    if saved.is_unused():
        return _note(x, (), told=saved.is_told())
    if not _worth_packing(x, min_numel) or saved.copies_input():
        return x
    if x.dtype != torch.bool:
        if not saved.bears_rounding():
            return x
        if saved.is_computed_again():
            return _note(x, (), told=saved.is_told())
        saved.runs_attention_again()
    order = x.dim_order()
    x = x.permute(order)
    flat = x.reshape(-1)
    bits = 8 if saved.makes_scores() else bits
    form = x.dtype, bits, order, tuple(x.shape)
    if x.dtype == torch.bool:
        packed: tuple[Tensor, ...] = (graph_codes.packed(graph_codes.groups(flat, group).to(torch.int32), 1),)
    else:
        packed = graph_codes.encode(
            graph_codes.groups(flat, group).float(), bits, stochastic=stochastic, signs=saved.sign_matters()
        )
    return (*form, _note(flat, packed, told=saved.is_told()), *packed)


def _unpack(packed: Any, *, group: int) -> Tensor:
    if isinstance(packed, _Outside):
        return packed.restore()
    if isinstance(packed, Tensor):
        return packed
    dtype, bits, order, sizes, _, codes, *ranges = packed
    one_bit = dtype == torch.bool
    rows = (
        graph_codes.unpacked(codes, 1, group)
        if one_bit
        else graph_codes.decode(graph_codes.unpacked(codes, bits, group), *ranges)
    )
    numel = functools.reduce(operator.mul, sizes, 1)
    back = sorted(range(len(order)), key=order.__getitem__)
    restored: Tensor = rows.reshape(-1)[:numel].to(dtype).view(sizes).permute(back)
    return restored


def _note(x: Tensor, packed: tuple[Tensor, ...], *, told: bool) -> Tensor:
    """Return an empty tensor of shape (bytes before packing, 0, bytes after it).

    It is how a running graph, which may come from a cache, tells what it packed. If another note tells of the same
    memory (``told``), there are no bytes before packing.
    """
    return x.new_empty((0 if told else _nbytes(x), 0, sum(map(_nbytes, packed))), dtype=torch.uint8)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def graph_bytes(saved: Iterable[Tensor]) -> tuple[int, int]:
    """Return, for the tensors that a compiled graph saved, the bytes before packing and those after it."""
    notes = [x.shape for x in saved if x.dtype == torch.uint8 and x.dim() == 3 and x.shape[1] == 0]
    return sum(shape[0] for shape in notes), sum(shape[2] for shape in notes)


# ---- what is packed --------------------------------------------------------------------------------------------------


def _worth_packing(x: Tensor, min_numel: int) -> bool:
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    if x.layout != torch.strided or x.dtype not in (*_PACKED, torch.bool) or x.dim() == 0:
        return False
    # A size that depends on data counts as too small.
    return guard_or_false(x.numel() >= min_numel) and not guard_or_false(x.shape[-1] == 1)


class _Saved:
    """A saved tensor with its uses in the forward and backward graph.

    Backward may first compute other values from it: for example, the partitioner keeps the result of a linear layer,
    and recomputes normalization and GELU from it. Rounding the tensor rounds all these values, so all of them are
    followed, up to where incoming gradients enter.

    Args:
        node: the node of the forward graph that computes the tensor.
        forward: the graph that saves the tensor.
        backward: the graph that uses it.
        group: how many neighbours share a range.

    Raises:
        UnsupportedError: the tensor has another name in the backward graph, so that PyTorch does not find it either.
    """

    def __init__(self, node: Node, forward: Graph, backward: Graph, group: int) -> None:
        self._node = node
        gradients = _gradients.get(backward)
        if gradients is None:  # before packing adds nodes to the graph, and renames what is saved
            gradients = _gradients[backward] = _of_gradients(backward)
            compute_products(forward, backward, gradients, group)
        # Only the state of a random number generator has two names.
        placeholder = next((n for n in backward.find_nodes(op="placeholder") if n.name == node.name), None)
        if placeholder is None:
            raise UnsupportedError(
                f"the compiled graph draws random numbers twice ({node.name} is not in its backward): "
                "torch.utils.checkpoint around dropout or attention cannot be compiled together with compressed "
                "activations; compile what is inside torch.utils.checkpoint, or checkpoint without torch.compile"
            )
        self._saves: Sequence[Any] = forward.output_node().args[0]  # type: ignore[assignment]
        self._placeholder, self._reruns = placeholder, Reruns(forward, backward)
        self._users: list[Node] = []
        #: Nodes with the tensor's values; with its signs; and all that are computed from it without gradients.
        self._names, self._alike, self._derived = {placeholder}, {placeholder}, {placeholder}
        self._follow(gradients)

    @classmethod
    def current(cls, group: int) -> _Saved | None:
        """Return the tensor that AOTAutograd is calling the hook for; None where it is not compiling."""
        from torch._functorch._aot_autograd.graph_compile import _get_saved_tensor_hook_context

        context = _get_saved_tensor_hook_context()
        return None if context is None else cls(context["_node"], context["_fw_graph"], context["_bw_graph"], group)

    def is_unused(self) -> bool:
        """Whether backward does not read the tensor, as the result of attention that runs again."""
        return not self._placeholder.users

    def is_told(self) -> bool:
        """Whether the graph saves the same elements of the same memory before, in another shape."""
        mine = _memory(self._node)
        before = self._saves[: self._saves.index(self._node)]
        return any(isinstance(x, torch.fx.Node) and _memory(x) is mine for x in before)

    def copies_input(self) -> bool:
        """Whether the tensor is a view or cast of a graph input, such as a parameter in the dtype of autocast."""
        return self._origin().op == "placeholder"

    def _follow(self, gradients: set[str]) -> None:
        left = list(self._names)
        while left:
            node = left.pop()
            for user in node.users:
                if user in self._derived or user.op == "output":
                    continue
                same = same_values(user) or is_part(user)
                if same and node in self._names:
                    self._names.add(user)
                else:
                    self._users.append(user)
                if node in self._alike and (same or _is_relu(user)):
                    self._alike.add(user)
                if user.name not in gradients:
                    self._derived.add(user)
                    left.append(user)

    def bears_rounding(self) -> bool:
        """Whether the tensor may be rounded: it is an operator's first result, and no use of it forbids rounding."""
        origin = self._origin()
        if origin.target is operator.getitem and origin.args[1] != 0 and _has_extras(origin.args[0]):
            return False
        return not any(_is_foreign(user) or self._is_rough_for(user) for user in self._users)

    def _is_rough_for(self, user: Node) -> bool:
        if _asks_for_sign(user) and not _is_relu(user):  # fine for values with the tensor's signs, which are kept
            compared = [x for x in user.all_input_nodes if x in self._derived]
            return not all(x in self._alike for x in compared)
        if any(x in self._derived for x in multiplied(user)) and not self._reruns.bears_rounding(user):
            return True
        if self._reruns.is_statistic(user):
            return False
        return reads_beside(user, self._derived) or _is_rough(user, self._derived)

    def _origin(self) -> Node:
        """Return the node that computes the tensor's values, behind views and casts."""
        node = self._node
        while same_values(node) or is_part(node):
            node = node.args[0]  # type: ignore[assignment]
        return node

    def makes_scores(self) -> bool:
        """Whether backward computes scores of attention again from the tensor."""
        return any(x in self._derived for user in self._users for x in scored(user))

    def is_computed_again(self) -> bool:
        """Whether backward now computes the tensor, the result of attention that runs again, instead of reading it."""
        precise = self.sign_matters() or self.makes_scores()
        return not precise and self._reruns.computes(self._node, self._placeholder)

    def runs_attention_again(self) -> None:
        """Have forward of attention run again wherever backward of attention takes what is restored of the tensor."""
        for user in self._users:
            self._reruns.measure(user, self._derived)
            if any(x in self._derived for x in multiplied(user)):
                self._reruns.run(user)

    def sign_matters(self) -> bool:
        """Whether backward compares the tensor with zero."""
        return any(_asks_for_sign(user) for user in self._users)


def _memory(node: Node) -> Node:
    """Return the node that allocates a tensor's memory, or the first view of it that has just the tensor's elements."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        of: Any = node.args[0]
        if not guard_or_false(of.meta["val"].numel() == node.meta["val"].numel()):
            break
        node = of
    return node


#: Backward graph → names of its nodes that depend on incoming gradients. A node would keep its graph alive.
_gradients: weakref.WeakKeyDictionary[Graph, set[str]] = weakref.WeakKeyDictionary()


def _of_gradients(backward: Graph) -> set[str]:
    found: set[str] = set()
    for node in backward.nodes:
        # PyTorch's own partitioner, too, recognizes incoming gradients by this name.
        given = node.op == "placeholder" and "tangents" in str(node.target)
        if given or any(x.name in found for x in node.all_input_nodes):
            found.add(node.name)
    return found


def _is_relu(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket is torch.ops.aten.relu


def _has_extras(node: Any) -> bool:
    """Whether an operator returns more than its result, such as statistics for its backward."""
    if isinstance(node.target, torch._ops.OpOverload):
        return len(node.target._schema.returns) > 1
    return str(node.target) == "flex_attention"


def _is_foreign(node: Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in ("aten", "prims", "inductor_prims")
    return str(node.target).startswith("triton_kernel_wrapper")


def _is_rough(node: Node, rounded: set[Node]) -> bool:
    """Whether an operator's result may change by far more than its operands in ``rounded`` do by rounding."""
    aten = torch.ops.aten
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    packet = node.target.overloadpacket
    if packet in (aten.le, aten.lt, aten.ge, aten.gt):
        return bool(node.args[1] != 0)  # comparisons with zero are fine: signs are kept
    if packet is aten.div:
        return node.args[1] in rounded and not _is_far_from_zero(node.args[1])
    if packet is aten.pow:
        return not isinstance(node.args[1], (int, float)) or node.args[1] not in (1, 2, 3, 4)
    if packet in (aten.reciprocal, aten.log, aten.log2, aten.log10, aten.log1p):
        return not _is_far_from_zero(node.args[0])
    return packet in (
        aten.eq, aten.ne, aten.rsqrt, aten.sqrt, aten.atan2, aten.remainder, aten.fmod, aten.floor, aten.ceil,
        aten.round, aten.trunc, aten.maximum, aten.minimum, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.sort,
        aten.topk, aten.hardtanh_backward,
        # Not rough, but codes are not precise enough: see _DELICATE in calls.py. Backends that decompose losses into
        # simpler operators show none of these.
        aten.sin, aten.cos, aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward,
    )  # fmt: skip


def _is_far_from_zero(x: Any) -> bool:
    """Whether rounding its operands changes a value by a small share of itself.

    True for exponentials, numbers of at least 0 and their sums, as the divisors of SiLU and softmax are.
    """
    if isinstance(x, (int, float)):
        return x >= 0
    aten = torch.ops.aten
    if not isinstance(x, torch.fx.Node) or not isinstance(x.target, torch._ops.OpOverload):
        return False
    packet = x.target.overloadpacket
    if packet is aten.add:
        return all(map(_is_far_from_zero, x.args)) and not x.kwargs
    if packet is aten.sum or same_values(x):
        return _is_far_from_zero(x.args[0])
    return packet is aten.exp


def _asks_for_sign(node: Node) -> bool:
    aten = torch.ops.aten
    if node.target is operator.getitem:  # picks one of several results; its users are followed
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return not is_attention(node)  # another nested graph may ask
    packet = node.target.overloadpacket
    if packet in (aten.le, aten.lt, aten.ge, aten.gt):
        return bool(node.args[1] == 0)
    if packet is aten.threshold_backward:
        return bool(node.args[2] == 0)
    return packet in (aten.relu, aten.sign, aten.sgn, aten.leaky_relu_backward)
