"""Sites: what is known beforehand of the tensors that an operator saves at one place in a module.

Training repeats itself: in every step, the same operators save tensors of the same shapes. What follows from operator,
module, shapes and policy alone is found out once for each :class:`Site`, and lives as long as the context. Only what
depends on a tensor's memory and values is left to be looked at in every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from narrowband.activations.calls import CHECKPOINT, COMPILED, NAMED, OF_A_PARAMETER, Call, Operator
from narrowband.activations.layout import Arrangement, Cut
from narrowband.activations.storages import has_codes_of, is_expanded

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.activations.modules import Modules
    from narrowband.activations.packed import Place
    from narrowband.activations.policy import ActivationPolicy
    from narrowband.activations.stats import SavedBytes

__all__ = ["Site", "Sites", "Spot"]

#: How many sites a context remembers.
_MOST = 1 << 14


class Site:
    """What is known of tensors of one form that an operator saves at one place in a module.

    Args:
        x: such a tensor.
        call: the running call of the operator.
        operator: the operator.
        module: the name of the running module.
        nth: the number of the tensor among those that the operator saves in the module.
        modules: the modules of the model.
        policy: which tensors are kept in how many bits.

    Attributes:
        operator, module, nth: as given.
        place: operator and module, as a policy names them.
        name: the name of the tensor's estimate.
        bits: the bits that the policy has for it.
        arrangement: how it lies in memory.
        elements: tells its elements apart from others that begin at the same place in memory.
        neighbours: how many neighbouring elements share a range, where ranges are computed from every tensor.
        takes_codes: whether operator, dtype and layout bear codes.
        form: operator, shape, strides, dtype, and the name of the autograd node: what all tensors of the site share.
        forms: the shapes of the operator's operands; None where nothing depends on them.
        own: how the tensor itself is cut into rows; None as long as nobody has asked :meth:`cut`.
        may_be_mask: whether it may be the mask of attention.
        may_be_parameter: whether it may be a parameter that autocast has cast.
    """

    __slots__ = (
        "_cuts", "_modules", "_policy", "arrangement", "bits", "elements", "form", "forms", "may_be_mask",
        "may_be_parameter", "module", "name", "neighbours", "nth", "operator", "own", "place", "takes_codes",
    )  # fmt: skip

    def __init__(
        self, x: Tensor, call: Call, operator: Operator, module: str, nth: int, modules: Modules,
        policy: ActivationPolicy,
    ) -> None:  # fmt: skip
        self.operator, self.module, self.nth = operator, module, nth
        self._modules, self._policy = modules, policy
        self.place = operator.name, module
        self.name = f"{module}:{operator.name}:{nth}"
        self.bits = modules.bits(self.place)
        self.arrangement = arrangement = Arrangement.of(x)
        self.elements = x.numel() if arrangement.without_gaps else (x.shape, x.stride())
        self.neighbours = policy.neighbours
        if operator is CHECKPOINT and policy.granularity == "group":
            self.neighbours = arrangement.neighbours
        self.takes_codes = (
            operator is not COMPILED  # between graphs the operator is not known
            and (operator is not NAMED or policy.names(*self.place))
            and has_codes_of(x.dtype, x.dim())
            and (arrangement.without_gaps or not is_expanded(x))
            and not call.is_statistic(x, operator)
        )
        self.may_be_mask = operator.name == "attention" and len(call.operands()) > 3
        node = x.grad_fn
        self.may_be_parameter = node is None or node.name() in OF_A_PARAMETER
        self.form = _form(x, operator)
        self.forms = call.forms if _asks_for_operands(operator, policy) else None
        self.own: Cut | None = None
        #: By strides, since the normalized form of the tensor may have others.
        self._cuts: dict[Any, Cut] = {}

    def cut(self, x: Tensor, call: Call) -> Cut:
        """Return how the tensor, or its normalized form, is cut into rows."""
        stride = x.stride()
        found = self._cuts.get(stride)
        if found is None:
            policy, modules, arrangement = self._policy, self._modules, Arrangement.of(x)
            heads, groups = modules.heads(self.module), modules.default_groups
            grouping = call.grouping(x, self.operator, policy, heads, groups)
            samples = call.samples(x, grouping) if policy.statistics == "sample" else 1
            found = self._cuts[stride] = Cut.of(x, arrangement, arrangement.rows(grouping, samples=samples))
            if stride == self.form[2]:
                self.own = found
        return found


def _form(x: Tensor, operator: Operator) -> tuple[Any, ...]:
    """Return all of a tensor that a site depends on, and that may change from pass to pass."""
    node = x.grad_fn
    return operator, x.shape, x.stride(), x.dtype, None if node is None else node.name()


def _asks_for_operands(operator: Operator, policy: ActivationPolicy) -> bool:
    """Whether a site depends on the shapes of the operator's operands; see the methods of :class:`Call`."""
    return operator.kind == "heads" or operator.name in _OF_OPERANDS or policy.statistics == "sample"


#: Operators that save statistics, which the shape of their input tells apart from other tensors; see
#: :meth:`Call.is_statistic`.
_OF_OPERANDS = frozenset(("attention", "layer_norm", "batch_norm"))


class Spot:
    """One operator in one module during a pass.

    Args:
        place: operator and module, as a policy names them.
        tallies: the bytes of the operator, and those of the module.
        sites: number of a tensor among those that the operator saves in the module → its site in the last pass.

    Attributes:
        place, tallies, sites: as given.
        nth: the number of the tensor that was saved last; -1 before the first one.
    """

    __slots__ = ("nth", "place", "sites", "tallies")

    def __init__(self, place: Place, tallies: tuple[SavedBytes, SavedBytes], sites: dict[int, Site]) -> None:
        self.place, self.tallies, self.sites = place, tallies, sites
        self.nth = -1


class Sites:
    """The sites of a model under a policy.

    Args:
        modules: the modules of the model.
        policy: which tensors are kept in how many bits.
    """

    def __init__(self, modules: Modules, policy: ActivationPolicy) -> None:
        self._modules, self._policy = modules, policy
        self._known: dict[tuple[Any, ...], Site] = {}
        self._last: dict[Place, dict[int, Site]] = {}

    def spot(self, place: Place, tallies: tuple[SavedBytes, SavedBytes]) -> Spot:
        """Return the spot of an operator in a module, for a pass that begins."""
        return Spot(place, tallies, self._last.setdefault(place, {}))

    def of(self, x: Tensor, call: Call, operator: Operator, spot: Spot) -> Site:
        """Return the site of the last tensor of a spot. Almost always, it is the site that it had in the last pass."""
        nth, form = spot.nth, _form(x, operator)
        found = spot.sites.get(nth)
        if found is None or found.form != form or (found.forms is not None and found.forms != call.find_forms()):
            found = spot.sites[nth] = self.at(x, call, operator, spot.place[1], nth)
        return found

    def at(self, x: Tensor, call: Call, operator: Operator, module: str, nth: int) -> Site:
        """Return the site of a tensor; the arguments are those of :class:`Site`."""
        key = _form(x, operator), module, nth, call.find_forms()
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST:  # sizes vary so much that most of them will not recur
                self._known.clear()
                self._last.clear()
            found = self._known[key] = Site(x, call, operator, module, nth, self._modules, self._policy)
        return found
