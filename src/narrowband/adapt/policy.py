"""Policies: make a plan for the next window of steps from the gradients summed over the last window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband import kernels
from narrowband.adapt.plan import LayerPlan, Plan
from narrowband.codecs import Threshold, TopK
from narrowband.codecs.indices import check_numel
from narrowband.codecs.sparse import density_of
from narrowband.feedback import Compression, compression
from narrowband.units import whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.adapt.tables import ErrorTable
    from narrowband.adapt.traffic import Traffic

__all__ = ["Constant", "GlobalTopK", "HardThreshold", "Policy", "as_choice", "plan_of", "planned", "search_space"]


class Policy(ABC):
    """Decides the spec of every layer.

    Attributes:
        every: steps between two decisions.
        warmup_steps: steps before the first decision, which are not compressed.
        last: number of steps before a decision whose gradients are summed; 0: all steps since the decision before.
    """

    name: ClassVar[str]
    every: int
    warmup_steps: int
    last: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.state_dict is not Policy.state_dict and cls.load_state_dict is Policy.load_state_dict:
            raise TypeError(
                f"{cls.__name__} has a state_dict and no load_state_dict, which handles call before every decision; "
                "write that method, too"
            )

    @property
    @abstractmethod
    def start(self) -> Compression:
        """The compression of all layers until the first decision."""

    @abstractmethod
    def decide(self, gradients: Mapping[str, Tensor], *, step: int, traffic: Traffic) -> Plan:
        """Return a plan for the next steps.

        It is called on rank 0 only, which sends the plan to all ranks. ``gradients`` are sums of averages over all
        ranks, as the steps delivered them, not gradients before compression. What one step's compression leaves out is
        in the sum as soon as error feedback has sent it. With ``dgc`` averages include momentum. Averages that are not
        finite are left out.

        Args:
            gradients: layer → sum of its averages since the last decision, or over the ``last`` steps: float32, in the
                layer's shape, for compressed layers only. Gradients of a scaled loss are divided by the scale.
            step: number of training steps so far.
            traffic: predicts the bytes that a rank sends for layers; see :class:`~narrowband.adapt.Traffic`.
        """

    def specs(self) -> list[str]:
        """Return the specs that layers may get, at least one of each kind."""
        return [str(self.start)]

    def check(self, layers: Collection[str]) -> None:  # noqa: B027  most take any layers
        """Raise ValueError if no decision is possible for a model with these layers. It is called at set-up, on rank 0
        only; all ranks raise the error.
        """

    def warm_up(self) -> None:  # noqa: B027  most use no loops of their own
        """Run the kernels of a decision once, so that no training step waits for their compilation."""

    def state_dict(self) -> dict[str, object]:
        """Return what the next decision depends on besides gradients, in types that JSON can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: the state is of another policy.
        """
        if state:
            raise ValueError(
                f"{self.name} has no state, but the saved state holds {', '.join(state)}; use the policy that saved it"
            )

    def _check_times(self) -> None:
        for name in ("every", "warmup_steps", "last"):
            setattr(self, name, whole_number(f"{self.name}: {name}", getattr(self, name)))
        if self.every < 1 or self.warmup_steps < 0:
            raise ValueError(
                f"{self.name}: every={self.every} must be at least 1 and warmup_steps={self.warmup_steps} at least 0"
            )
        if not 0 <= self.last <= self.every:
            raise ValueError(
                f"{self.name}: last={self.last} must be from 1 to every={self.every} steps, or 0 for all of them"
            )

    def sees(self, step: int) -> bool:
        """Return whether the next decision uses the averages of this step."""
        over = step - self.warmup_steps
        left = self.every - over % self.every if over >= 0 else -over
        return not self.last or left <= self.last


@dataclass
class Constant(Policy):
    """Gives all layers the same spec: the baseline for other policies.

    Args:
        spec: the spec of every layer.
        every: steps between decisions, which change nothing.
        warmup_steps: steps at the beginning that are not compressed.

    Raises:
        ValueError: a spec or a number is not valid.

    Example:
        >>> handle = nb.compress_gradients(model, nb.Constant("qsgd:bits=4"))
    """

    spec: str
    every: int = 1_000_000
    warmup_steps: int = 0
    name: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        self._check_times()
        compression(self.spec)

    @property
    def start(self) -> Compression:
        return compression(self.spec)

    def decide(self, gradients: Mapping[str, Tensor], *, step: int, traffic: Traffic) -> Plan:
        return plan_of([compression(self.spec)] * len(gradients), gradients, self, step=step, traffic=traffic)


@dataclass
class GlobalTopK(Policy):
    """Sends a share of the whole model's elements: the largest ones, in whatever layers they are.

    A layer's density is the share of its elements that are among the largest of the whole gradient. A layer that has
    none of these still sends one element.

    Args:
        density: share of all compressed elements that is sent.
        feedback: the feedback behind ``topk`` in layers' specs.
        every: steps between decisions.
        warmup_steps: steps before the first decision, which are not compressed.

    Raises:
        ValueError: a spec or a number is not valid.

    Example:
        >>> handle = nb.compress_gradients(model, nb.GlobalTopK(0.01, every=100))
    """

    density: float
    feedback: str = "ef"
    every: int = 500
    warmup_steps: int = 0
    name: ClassVar[str] = "global-topk"

    def __post_init__(self) -> None:
        self._check_times()
        _ = self.start

    @property
    def start(self) -> Compression:
        return compression(f"{TopK(density=self.density)}+{self.feedback}")

    def decide(self, gradients: Mapping[str, Tensor], *, step: int, traffic: Traffic) -> Plan:
        if not gradients:
            raise ValueError("no gradients were given, so there is no layer to choose for")
        numel = sum(x.numel() for x in gradients.values())
        k = TopK(density=self.density).kept((check_numel(numel),))
        flat = torch.cat([x.detach().reshape(-1).float() for x in gradients.values()])
        at = kernels.select_topk(flat, k)
        ends = torch.tensor([x.numel() for x in gradients.values()], dtype=torch.int64, device="cpu").cumsum(0)
        up_to = torch.searchsorted(at.long().cpu(), ends)
        counts = torch.diff(up_to, prepend=up_to.new_zeros(1)).tolist()
        chosen = [
            replace(self.start, codec=TopK(density=density_of(max(1, count), max(1, x.numel()))))
            for x, count in zip(gradients.values(), counts, strict=True)
        ]
        return plan_of(chosen, gradients, self, step=step, traffic=traffic)


@dataclass
class HardThreshold(Policy):
    """Sends all elements of at least a given magnitude, in every layer (Rethink-GS: Sahu et al., arXiv 2108.00951).

    How much is sent depends on the gradients of each step. The bytes in a plan are an estimate: those of the mean of a
    window's gradients. Noisy gradients have larger elements than their mean, so steps may send much more.
    ``handle.stats()`` counts what was sent.

    Args:
        value: the magnitude, in units of gradients.
        steps: number of gradients in a window's sum; None: as many as there were steps since the last decision.
        every: steps between decisions, which change nothing but the reported bytes.
        warmup_steps: steps before the first decision, which are not compressed.

    Raises:
        ValueError: a spec or a number is not valid.

    Example:
        >>> handle = nb.compress_gradients(model, nb.HardThreshold(1e-3))
    """

    value: float
    steps: int | None = None
    every: int = 500
    warmup_steps: int = 0
    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        self._check_times()
        _ = self.start
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"{self.name}: steps={self.steps} must be at least 1")

    @property
    def start(self) -> Compression:
        return compression(f"{Threshold(value=self.value)}+ef")

    def decide(self, gradients: Mapping[str, Tensor], *, step: int, traffic: Traffic) -> Plan:
        over = step - self.warmup_steps
        steps = self.steps or max(1, min(over, self.every) if over > 0 else step)
        payloads = [self.start.codec.encode(x.float() / steps).numel() for x in gradients.values()]
        return plan_of([self.start] * len(payloads), gradients, self, step=step, traffic=traffic, payloads=payloads)


def plan_of(
    chosen: Sequence[Compression],
    gradients: Mapping[str, Tensor],
    policy: Policy,
    *,
    step: int,
    traffic: Traffic,
    payloads: Sequence[int] | None = None,
) -> Plan:
    """Return the plan that gives layers these compressions, without errors.

    Args:
        chosen: one compression for each layer.
        gradients: layer → its gradient.
        policy: the policy that decided, at ``step``.
        traffic: predicts the bytes that a rank sends.
        payloads: bytes of each payload, where these depend on the data.
    """
    shapes = [tuple(x.shape) for x in gradients.values()]
    sizes = traffic.nbytes(list(zip(chosen, shapes, strict=True)), payloads)
    layers = (
        LayerPlan(name, shape, str(spec), nbytes, None)
        for name, shape, spec, nbytes in zip(gradients, shapes, chosen, sizes, strict=True)
    )
    return Plan(tuple(layers), repr(policy), traffic.world_size, step)


def planned(
    table: ErrorTable,
    chosen: Sequence[int],
    policy: Policy,
    *,
    step: int,
    traffic: Traffic,
    reference: Compression | None,
    budget: float | None,
) -> Plan:
    """Return the plan that gives each layer the choice in this column of a table.

    The plan's bytes are predicted for these layers together, by the collectives that they use then. The table's bytes
    are predicted as if all layers had the same choice.
    """
    specs = [table.choices[at] for at in chosen]
    sizes = traffic.nbytes(list(zip(specs, table.shapes, strict=True)))
    layers = tuple(
        LayerPlan(name, shape, str(spec), nbytes, float(table.errors[row, at]))
        for row, (name, shape, spec, nbytes, at) in enumerate(
            zip(table.layers, table.shapes, specs, sizes, chosen, strict=True)
        )
    )
    uniform = None if reference is None else float(table.sizes[:, table.column(reference)].sum())
    baseline = None if reference is None else str(reference)
    return Plan(layers, repr(policy), traffic.world_size, step, baseline, budget, uniform, str(policy.start))


def as_choice(chosen: Compression) -> Compression:
    """Return the choice for a layer in a model with ``chosen``: with ``dgc``, only the codec is chosen per layer.

    Momentum and warm-up remain the model's.
    """
    return chosen if chosen.feedback is None or chosen.feedback.mixes else Compression(chosen.codec)


def search_space(reference: str | Compression) -> list[str]:
    """Return the choices around a reference that the L-GreCo paper searches (section 5.1).

    These are all bits or ranks from half of the reference's to twice as many; or densities from a tenth of the
    reference's to ten times as much, by tenths.

    Raises:
        ValueError: the codec has neither bits nor rank nor density.

    Example:
        >>> search_space("qsgd:bits=4")
        ['qsgd:bits=2', 'qsgd:bits=3', 'qsgd:bits=4', 'qsgd:bits=5', 'qsgd:bits=6', 'qsgd:bits=7', 'qsgd:bits=8']
    """
    chosen = as_choice(compression(reference))
    variations = chosen.codec.variations()
    if variations is None:
        raise ValueError(f"{str(chosen)!r} has neither bits nor rank nor density to vary; give choices=[…]")
    key, values = variations
    method = chosen.feedback if chosen.feedback is not None and chosen.feedback.brings_codec else None
    changing = chosen.codec if method is None else method
    found = []
    for value in values:
        try:
            changed = replace(changing, **{key: value})  # type: ignore[type-var]
        except ValueError:  # the codec does not have these bits, or the density is above 1
            continue
        found.append(str(replace(chosen, codec=changed) if method is None else compression(changed)))  # type: ignore[arg-type]
    if str(chosen) not in found:
        raise ValueError(
            f"the choices around {str(chosen)!r} lack its own {key}={getattr(chosen.codec, key)}; give choices=[…]"
        )
    return found
