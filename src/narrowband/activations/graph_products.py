"""Products in compiled graphs: backward computes them from factors that it has anyway, as it does of eager models.

The layer behind a gate saves the product of two tensors, and a layer behind RMS normalization the product with the
norm's weight. Backward needs the factors, too, and often has them already: the compiler computes gates and normalized
forms again where it can fuse them into other loops. It saves the product nevertheless, because a matrix product reads
its operands from memory, so that computing it again saves no time. But it saves memory.

As in :mod:`.recompute`, a product of rounded factors errs by |b| times the error of a plus |a| times that of b. Other
operators on the way from saved tensors to the product must not make errors much larger either; see :func:`_bears`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from narrowband.activations.graph_attention import before_first_use, same_values

if TYPE_CHECKING:
    from torch.fx import Graph, Node

__all__ = ["compute_products"]


def compute_products(forward: Graph, backward: Graph, gradients: set[str], group: int) -> None:
    """Have backward compute products that matrix products read, if it has their factors, instead of reading them.

    Nothing reads the placeholders of these products any more.

    Args:
        forward: the graph that saves what backward reads.
        backward: the graph to change, before anything in it is packed.
        gradients: names of its nodes that depend on incoming gradients.
        group: how many neighbours share a range.
    """
    saves: Any = forward.output_node().args[0]
    # Nodes of the two graphs that have the same name have the same values. Nodes that are added have other names.
    own = {x.name: x for x in backward.nodes if x.op != "output" and x.name not in gradients}
    for saved in saves:
        if not isinstance(saved, torch.fx.Node) or saved.op == "placeholder" or saves.count(saved) > 1:
            continue
        steps: list[Node] = []
        placeholder = own.get(saved.name)
        if placeholder is None or not placeholder.users or not all(map(_multiplies, placeholder.users)):
            continue
        if not _find(saved, own, steps, top=True) or not any(map(_is_product, steps)) or not _bears(steps, own, group):
            continue
        own |= _copied(steps, own, placeholder, backward)
        placeholder.replace_all_uses_with(own[saved.name])


def _copied(steps: list[Node], own: dict[str, Node], placeholder: Node, backward: Graph) -> dict[str, Node]:
    """Copy steps to the place where backward first uses a placeholder; return their names → the copies."""
    places = {node: place for place, node in enumerate(backward.nodes)}
    first = min(placeholder.users, key=places.__getitem__)
    there = {x.name: own[x.name] for step in steps for x in step.all_input_nodes if x not in steps}
    for given in there.values():
        before_first_use(backward, given, first)
    made: dict[str, Node] = {}
    with backward.inserting_before(first):
        for step in steps:
            made[step.name] = backward.node_copy(step, lambda x: made[x.name] if x.name in made else there[x.name])
    return made


def _multiplies(user: Node) -> bool:
    """Whether a node is a matrix product, or a view or cast that only matrix products read."""
    aten = torch.ops.aten
    if same_values(user):
        return bool(user.users) and all(map(_multiplies, user.users))
    return getattr(user.target, "overloadpacket", None) in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


def _is_product(node: Node) -> bool:
    return node.target is torch.ops.aten.mul.Tensor


def _find(node: Node, own: dict[str, Node], steps: list[Node], *, top: bool = False) -> bool:
    """Collect, in order, the products, views and casts by which a node is computed from what backward has.

    Return False where it is computed in another way, too. At the ``top`` is the node that backward shall not read.
    """
    if node in steps or (node.name in own and not top):
        return True
    if node.op == "placeholder" or not (_is_product(node) or same_values(node)):
        return False
    if not all(_find(x, own, steps) for x in node.all_input_nodes):
        return False
    steps.append(node)
    return True


def _bears(steps: list[Node], own: dict[str, Node], group: int) -> bool:
    """Whether all that the last step is computed from in backward may be rounded, as far as its own error goes.

    No operator may make errors much larger, as differences and exponentials do, other than those in a logistic
    function. A factor per row scales up small rows, and their errors with them, where they share a range with others.
    """
    aten = torch.ops.aten
    seen, left = set(steps), list(steps)
    while left:
        node = left.pop()
        if node.op == "placeholder":
            continue
        packet = getattr(node.target, "overloadpacket", None)
        if packet is aten.mul:
            if not _is_in_whole_groups(node, group):
                return False
        elif packet is aten.exp:
            if not all(map(_is_logistic, node.users)):
                return False
        elif packet is aten.div:
            if not _is_logistic(node.args[1]):
                return False
        elif packet not in (aten.add, aten.neg, aten.sigmoid, aten.tanh, aten.erf, aten.relu) and not same_values(node):
            return False
        new = [there for x in node.all_input_nodes if (there := own.get(x.name, x)) not in seen]
        seen.update(new)
        left += new
    return True


def _is_logistic(node: Any) -> bool:
    """Whether a node is 1 + exp(x)."""
    aten = torch.ops.aten
    if not isinstance(node, torch.fx.Node) or node.target is not aten.add.Tensor or node.args[1] != 1:
        return False
    return getattr(node.args[0], "target", None) is aten.exp.default


def _is_in_whole_groups(node: Node, group: int) -> bool:
    """Whether a product has no factor per row, or one of an exact tensor, or rows of whole groups of neighbours."""
    length = _length(node)
    if length == 1 or all(_length(x) in (length, None) for x in node.all_input_nodes):
        return True
    whole = [x for x in node.all_input_nodes if _length(x) != 1]
    return isinstance(length, int) and (length % group == 0 or all(_is_input(x) for x in whole))


def _length(node: Node) -> Any:
    """Return the size of a tensor's last dimension; None for anything else."""
    value = node.meta.get("val")
    return value.shape[-1] if isinstance(value, torch.Tensor) and value.dim() else None


def _is_input(node: Any) -> bool:
    """Whether a node is an input of the whole graph, which stays exact, or a view or cast of one."""
    while same_values(node):
        node = node.args[0]
    return node.op == "placeholder" and str(node.target).startswith("primals")
