"""What decides: from gradients that were added up over a window of steps, a plan for the next window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from narrowband import kernels
from narrowband.adapt.plan import LayerPlan, Plan
from narrowband.codecs import Threshold, TopK
from narrowband.codecs.sparse import check_numel
from narrowband.feedback import Compression, compression
from narrowband.units import whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.adapt.tables import ErrorTable
    from narrowband.adapt.traffic import Traffic

__all__ = ["Constant", "GlobalTopK", "HardThreshold", "Policy", "as_choice", "plan_of", "planned", "search_space"]


class Policy(ABC):
    """Decides what every layer is compressed with.

    Attributes:
        every: steps between two decisions.
        warmup_steps: steps before the first one, which are not compressed.
        last: how many steps before a decision are looked at; 0: all since the one before.
    """

    name: ClassVar[str]
    every: int
    warmup_steps: int
    last: int = 0

    @property
    @abstractmethod
    def start(self) -> Compression:
        """What all layers have until the first decision."""

    @abstractmethod
    def decide(self, gradients: Mapping[str, Tensor], *, step: int, traffic: Traffic) -> Plan:
        """A plan for the steps to come.

        It is called on rank 0 alone, which sends the plan to all ranks. What a policy sees are averages over all ranks,
        as every step delivered them, and not the gradients before compression: what one step's compression leaves out
        is there as soon as error feedback has sent it. ``dgc`` delivers averages with momentum. What is not finite is
        left out.

        Args:
            gradients: layer → sum of its averages since the last decision, or over the ``last`` steps, float32, in the
                layer's shape; of compressed layers only. Gradients of a scaled loss are divided by the scale.
            step: how many steps of training there were.
            traffic: says how many bytes a rank sends for layers; see :class:`~narrowband.adapt.Traffic`.
        """

    def specs(self) -> list[str]:
        """Specs of all kinds that layers may get."""
        return [str(self.start)]

    def warm_up(self) -> None:  # noqa: B027  most use no loops of their own
        """Run once what a decision runs, so that no step waits for a compiler."""

    def state_dict(self) -> dict[str, object]:
        """What the next decision depends on beside its gradients, as JSON can hold it."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        if state:
            raise ValueError(f"{self.name} keeps no state, and there is one: {', '.join(state)}")

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
        """Whether the next decision looks at what this step delivers."""
        over = step - self.warmup_steps
        left = self.every - over % self.every if over >= 0 else -over
        return not self.last or left <= self.last


@dataclass
class Constant(Policy):
    """The same for all layers: what others are compared with.

    Args:
        spec: what every layer has.
        every: steps between decisions, which change nothing.
        warmup_steps: steps at the beginning that are not compressed.

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
    """As many of the whole model's elements as a density says, wherever they are largest.

    The densities of layers are those with which the largest elements of the whole gradient lie in them; a layer that
    has none of these still sends one element.

    Args:
        density: share of all compressed elements that is sent.
        feedback: what stands behind ``topk`` in layers' specs.
        every: steps between decisions.
        warmup_steps: steps before the first decision, which are not compressed.

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
            raise ValueError("there are no gradients, so there is nothing to choose for")
        numel = sum(x.numel() for x in gradients.values())
        k = TopK(density=self.density).kept((check_numel(numel),))
        flat = torch.cat([x.detach().reshape(-1).float() for x in gradients.values()])
        at = kernels.select_topk(flat, k)
        ends = torch.tensor([x.numel() for x in gradients.values()], dtype=torch.int64, device="cpu").cumsum(0)
        up_to = torch.searchsorted(at.long().cpu(), ends)
        counts = torch.diff(up_to, prepend=up_to.new_zeros(1)).tolist()
        chosen = [
            replace(self.start, codec=TopK(density=max(1, count) / max(1, x.numel())))
            for x, count in zip(gradients.values(), counts, strict=True)
        ]
        return plan_of(chosen, gradients, self, step=step, traffic=traffic)


@dataclass
class HardThreshold(Policy):
    """Whatever is at least so large, in every layer (Rethink-GS: Sahu et al., arXiv 2108.00951).

    How much is sent follows from the gradients; plans say what this window's sum, divided by ``steps``, would send.

    Args:
        value: the magnitude, in units of gradients.
        steps: how many gradients were added up.
        every: steps between decisions, which only take stock.
        warmup_steps: steps before the first decision, which are not compressed.

    Example:
        >>> handle = nb.compress_gradients(model, nb.HardThreshold(1e-3))
    """

    value: float
    steps: int = 1
    every: int = 500
    warmup_steps: int = 0
    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        self._check_times()
        _ = self.start
        if self.steps < 1:
            raise ValueError(f"{self.name}: steps={self.steps} must be at least 1")

    @property
    def start(self) -> Compression:
        return compression(f"{Threshold(value=self.value)}+ef")

    def decide(self, gradients: Mapping[str, Tensor], *, step: int, traffic: Traffic) -> Plan:
        payloads = [self.start.codec.encode(x.float() / self.steps).numel() for x in gradients.values()]
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
    """The plan that gives layers these compressions, whose errors nobody looked at.

    Args:
        chosen: one for each layer.
        gradients: layer → its gradient.
        policy: what decided, at ``step``.
        traffic: says how many bytes a rank sends.
        payloads: bytes of each payload, where that depends on the data.
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
    """The plan that takes these columns of a table. Its bytes are those of the layers together, by the collectives that
    they then travel by; the table's are those of each choice alone.
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
    """What a layer is given where the model has ``chosen``: with ``dgc``, momentum and warm-up stay the model's."""
    return chosen if chosen.feedback is None or chosen.feedback.mixes else Compression(chosen.codec)


def search_space(reference: str | Compression) -> list[str]:
    """The choices around a reference that the paper searches (section 5.1).

    Bits and ranks from half of the reference's to twice as many, one by one; densities from a tenth of it to ten times
    as much, by tenths.

    Raises:
        ValueError: a codec with neither bits nor rank nor density.

    Example:
        >>> search_space("qsgd:bits=4")
        ['qsgd:bits=2', 'qsgd:bits=3', 'qsgd:bits=4', 'qsgd:bits=5', 'qsgd:bits=6', 'qsgd:bits=7', 'qsgd:bits=8']
    """
    chosen = as_choice(compression(reference))
    variations = chosen.codec.variations()
    if variations is None:
        raise ValueError(f"{str(chosen)!r} has neither bits nor rank nor density to choose; give choices=[…]")
    key, values = variations
    method = chosen.feedback if chosen.feedback is not None and chosen.feedback.brings_codec else None
    changing = chosen.codec if method is None else method
    found = []
    for value in values:
        try:
            changed = replace(changing, **{key: value})  # type: ignore[type-var]
        except ValueError:  # bits that the codec does not have, a density above 1
            continue
        found.append(str(replace(chosen, codec=changed) if method is None else compression(changed)))  # type: ignore[arg-type]
    if str(chosen) not in found:
        raise ValueError(f"{str(chosen)!r}: {key}={getattr(chosen.codec, key)} is not in its own search space")
    return found
