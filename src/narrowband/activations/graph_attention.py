"""Fused attention in compiled graphs: backward runs its forward again, on what codes are restored to.

Fused attention saves its result o, and the logarithm l of each row's sum of exponentials. From these and q, k and v
backward computes, as FlashAttention does (Dao et al. 2022, arXiv 2205.14135, algorithm 4)::

    s = scale · q kᵀ     p = exp(s − l)     dp = do vᵀ     ds = p ∘ (dp − rowsum(do ∘ o))

With rounded q and k, but the l and o of the exact ones, an error in a score becomes a factor of p, and nothing bounds
it. A single token that is 200 times as large as the others was enough for inf. Computed from the rounded q, k and v, l
and o fit: each row of p sums to one, each row of ds to zero, and gradients are the exact ones at a point nearby. So o
and l need not be saved either, and o is computed again for all of its uses.

With dropout another run would drop other elements. There only l is computed again, which does not depend on dropout.

Softmax of simple operators is exp(s − max(s)) / sum. Where the compiler keeps scores, maxima and sums, the same goes
for these: backward takes maxima and sums of the rounded scores.
"""

from __future__ import annotations

import inspect
import operator
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.fx import Graph, Node

__all__ = [
    "Reruns",
    "before_first_use",
    "is_attention",
    "is_part",
    "multiplied",
    "reads_beside",
    "same_values",
    "scored",
]

#: Arguments that are added to scores, or that a user's function makes scores of: masks, biases, buffers.
_BESIDE = ("attn_mask", "attn_bias", "bias", "score_mod_other_buffers", "mask_mod_other_buffers")


def same_values(node: Node) -> bool:
    """Whether a node is a view, copy or cast of its first argument."""
    aten = torch.ops.aten
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    copies = (aten._to_copy, aten.clone, aten._unsafe_view, torch.ops.prims.convert_element_type)
    return node.target.is_view or node.target.overloadpacket in copies


def is_part(node: Node) -> bool:
    """Whether a node picks one of the views that ``split`` and similar operators return."""
    return node.target is operator.getitem and same_values(node.args[0])  # type: ignore[arg-type]


# ---- calls of attention ----------------------------------------------------------------------------------------------


def _names(node: Node) -> list[str]:
    """Return the names of the arguments that a call of attention takes; nothing for another operator."""
    if isinstance(node.target, torch._ops.OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
        return names if {"query", "key", "value"} <= {*names} else []
    if str(node.target) in ("flex_attention", "flex_attention_backward"):
        return list(inspect.signature(type(node.target).__call__).parameters)[1:]
    return []


def _arguments(node: Node) -> dict[str, Any]:
    return dict(zip(_names(node), node.args, strict=False)) | dict(node.kwargs)


def is_attention(node: Node) -> bool:
    """Whether a node is a call of fused attention, or of its backward."""
    return bool(_names(node))


def _is_backward(node: Node) -> bool:
    return {"out", "logsumexp"} <= {*_names(node)}


def scored(node: Node) -> list[Any]:
    """Return the queries and keys of a call of attention; nothing for another operator."""
    given = _arguments(node)
    return [given[name] for name in ("query", "key") if name in given]


def multiplied(node: Node) -> list[Any]:
    """Return the queries, keys and values that backward of attention takes; nothing for another operator."""
    return [*scored(node), _arguments(node)["value"]] if _is_backward(node) else []


def reads_beside(node: Node, rounded: set[Node]) -> bool:
    """Whether a call of attention takes one of these nodes as a mask, bias or buffer."""
    given = _arguments(node)
    return any(x in rounded for name in _BESIDE for x in _nodes(given.get(name)))


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.map_arg(value, found.append)
    return found


# ---- forward in backward ---------------------------------------------------------------------------------------------


@dataclass
class _Known:
    """What is known of a backward graph's calls, by the names of nodes: a node would keep its graph alive.

    Attributes:
        forward: the call that backward differentiates → the call of forward; None where backward has it already.
        results: the call of forward that runs again → its result in the backward graph.
        statistics: maxima and sums that backward takes of rounded scores.
    """

    forward: dict[str, str | None] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    statistics: set[str] = field(default_factory=set)


_known: weakref.WeakKeyDictionary[Graph, _Known] = weakref.WeakKeyDictionary()


class Reruns:
    """The calls of attention in a backward graph whose forward runs again.

    Args:
        forward: the graph that saves what backward reads.
        backward: the graph to change.
    """

    def __init__(self, forward: Graph, backward: Graph) -> None:
        self._forward, self._backward = forward, backward
        known = _known.get(backward)
        if known is None:  # before packing renames what is saved
            known = _known[backward] = _Known()
            for node in backward.nodes:
                if _is_backward(node):
                    self._find(node, known)
        self._known = known

    def _find(self, node: Node, known: _Known) -> None:
        saved = _origin(_arguments(node)["out"])
        if saved.op != "placeholder":  # a checkpoint runs forward in backward
            known.forward[node.name] = None
            return
        result = _origin(_named(self._forward, saved.name))
        call = result.args[0] if result.target is operator.getitem and result.args[1] == 0 else None
        if isinstance(call, torch.fx.Node) and is_attention(call) and _taken(call, node) is not None:
            known.forward[node.name] = call.name

    def bears_rounding(self, node: Node) -> bool:
        """Whether a call of attention's backward may take rounded tensors, since its forward can run again."""
        return node.name in self._known.forward

    def run(self, node: Node) -> None:
        """Have forward run again before a call of attention's backward, which then takes its results from that run."""
        name = self._known.forward[node.name]
        if name is None or name in self._known.results:
            return
        call = _named(self._forward, name)
        taken = _taken(call, node)
        assert taken is not None
        with self._backward.inserting_before(node):
            again = self._backward.call_function(call.target, *taken)  # type: ignore[arg-type]
            again.meta = dict(call.meta)
            result, logarithm = (self._backward.call_function(operator.getitem, (again, nth)) for nth in (0, 1))
            for nth, each in enumerate((result, logarithm)):
                each.meta["val"] = call.meta["val"][nth]
        self._known.results[name] = result.name
        if _drops(call):
            _replace(node, "logsumexp", logarithm)
            self._backward.erase_node(result)
        else:
            _replace(node, "out", result)
            _replace(node, "logsumexp", logarithm)

    def measure(self, node: Node, rounded: set[Node]) -> None:
        """Have a step of softmax take the maximum, or the sum of exponentials, of rounded scores, if it is saved."""
        aten = torch.ops.aten
        if node.target is aten.sub.Tensor:
            wanted = aten.amax if any(user.target is aten.exp.default for user in node.users) else None
        else:
            wanted = aten.sum if node.target is aten.div.Tensor else None
        if wanted is None:
            return
        of, saved = node.args[:2]
        if of not in rounded or not isinstance(of, torch.fx.Node) or not isinstance(saved, torch.fx.Node):
            return
        if saved.op != "placeholder" or (wanted is aten.sum and of.target is not aten.exp.default):
            return
        call = _named(self._forward, saved.name)
        same = [x.name for x in call.all_input_nodes] == [of.name]
        if same and getattr(call.target, "overloadpacket", None) is wanted:
            with self._backward.inserting_before(node):
                own = self._backward.node_copy(call, lambda _: of)
            self._known.statistics.add(own.name)
            node.update_arg(1, own)

    def is_statistic(self, node: Node) -> bool:
        """Whether backward takes a maximum or sum of rounded scores on purpose."""
        return node.name in self._known.statistics

    def computes(self, saved: Node, placeholder: Node) -> bool:
        """Whether a saved tensor is the result of attention that runs again; if so, it is not read any more.

        Args:
            saved: the tensor in the forward graph.
            placeholder: the tensor in the backward graph.
        """
        result = _origin(saved)
        call = result.args[0] if result.target is operator.getitem and result.args[1] == 0 else None
        if not isinstance(call, torch.fx.Node) or call.name not in self._known.results or _drops(call):
            return False
        views = []
        while saved is not result:
            views.append(saved)
            saved = saved.args[0]  # type: ignore[assignment]
        own = {node.name: node for node in self._backward.find_nodes(op="placeholder")}
        if any(x.name not in own for view in views for x in view.all_input_nodes if x not in (*views, result)):
            return False
        computed = _named(self._backward, self._known.results[call.name])
        places = {node: place for place, node in enumerate(self._backward.nodes)}
        first = min(placeholder.users, key=places.__getitem__)
        before_first_use(self._backward, computed, first)
        made = {result: computed}
        with self._backward.inserting_before(first):
            for view in reversed(views):
                made[view] = computed = self._backward.node_copy(view, lambda x: made[x] if x in made else own[x.name])
        placeholder.replace_all_uses_with(computed)
        return True


def before_first_use(graph: Graph, computed: Node, first: Node) -> None:
    """Compute a node, and all that it is computed from, before another node that is to use it."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    needed, left = {computed}, [computed]
    while left:
        for node in left.pop().all_input_nodes:
            if places[node] > places[first] and node not in needed:
                needed.add(node)
                left.append(node)
    for node in sorted(needed, key=places.__getitem__):
        if places[node] > places[first]:
            first.prepend(node)


def _origin(node: Node) -> Node:
    while same_values(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _named(graph: Graph, name: str) -> Node:
    found: Node = next(node for node in graph.nodes if node.name == name)
    return found


def _drops(call: Node) -> bool:
    return bool(_arguments(call).get("dropout_p", 0.0))


def _taken(call: Node, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with which a call of forward runs again before a call of backward, without dropout.

    None where backward does not take a tensor that forward took.
    """
    own = _arguments(node)
    if "fw_graph" in own:
        own["score_mod"] = own["fw_graph"]
    taken = {name: own.get(name, value) for name, value in _arguments(call).items()}
    if any(name not in own and _nodes(value) for name, value in taken.items()):
        return None
    if "dropout_p" in taken:
        taken["dropout_p"] = 0.0
    return tuple(taken[name] for name in _names(call)[: len(call.args)]), {name: taken[name] for name in call.kwargs}


def _replace(node: Node, name: str, value: Node) -> None:
    """Replace an argument of a call, and erase views of the former argument that nothing else reads."""
    at = _names(node).index(name)
    former: Any = node.args[at]
    node.update_arg(at, value)
    while not former.users and former.op != "placeholder":
        before = former.args[0]
        former.graph.erase_node(former)
        former = before
