"""A plan says what every layer is compressed with, what that costs, and what it does to the gradient."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from narrowband.feedback import compression

__all__ = ["LayerPlan", "Plan"]

_VERSION = 1


@dataclass(frozen=True)
class LayerPlan:
    """One layer's part of a plan.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        spec: what it is compressed with.
        nbytes: of one rank's payload.
        error: L2 norm of what one encoding of the gradient that was looked at loses; None where nothing was looked at.
    """

    name: str
    shape: tuple[int, ...]
    spec: str
    nbytes: float
    error: float | None

    @property
    def family(self) -> str:
        """The codec or method, without its settings."""
        return self.spec.partition("+")[0].partition(":")[0]

    @property
    def dense_nbytes(self) -> int:
        """What the layer is without compression."""
        return 4 * math.prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """What every layer is compressed with, and how that came about.

    Attributes:
        layers: one each.
        policy: what decided, with its settings.
        step: when it decided, in steps of training.
        reference: the spec whose error was the budget; None where there was none.
        budget: what errors were allowed to add up to; None where there was none.
        reference_nbytes: what the reference would send; None where there is none.
        model: what the model has that the layers belong to: its feedback or method is theirs, where they name none.

    Example:
        >>> plan = Plan.load("plan.json")
        >>> handle = nb.compress_gradients(model, plan)
    """

    layers: tuple[LayerPlan, ...]
    policy: str
    step: int = 0
    reference: str | None = None
    budget: float | None = None
    reference_nbytes: float | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a plan needs at least one layer")
        names = [layer.name for layer in self.layers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the plan has these layers twice: {', '.join(twice)}")
        if self.model is not None:
            compression(self.model)
        for layer in self.layers:
            try:
                compression(layer.spec)
            except ValueError as error:
                raise ValueError(f"the plan's layer {layer.name!r}: {error}") from error

    @property
    def nbytes(self) -> float:
        """Of one rank's payloads together."""
        return math.fsum(layer.nbytes for layer in self.layers)

    @property
    def dense_nbytes(self) -> int:
        """Of the same layers, uncompressed."""
        return sum(layer.dense_nbytes for layer in self.layers)

    @property
    def ratio(self) -> float:
        """How many times less than uncompressed."""
        return self.dense_nbytes / self.nbytes

    @property
    def usual(self) -> str:
        """What the model has; if the plan does not say, the spec of most layers, of those with feedback if any has."""
        if self.model is not None:
            return self.model
        specs = [layer.spec for layer in self.layers]
        stateful = [spec for spec in specs if compression(spec).feedback is not None]
        return max(stateful or specs, key=(stateful or specs).count)

    def specs(self) -> dict[str, str]:
        """Layer → spec."""
        return {layer.name: layer.spec for layer in self.layers}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless the plan is for a model whose compressed layers have these shapes."""
        mine = {layer.name: tuple(layer.shape) for layer in self.layers}
        missing, unknown = sorted(shapes.keys() - mine.keys()), sorted(mine.keys() - shapes.keys())
        other = sorted(name for name in mine.keys() & shapes.keys() if mine[name] != tuple(shapes[name]))
        said = [
            f"{what} {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
            for what, names in (("lacks", missing), ("has the unknown", unknown), ("has other shapes for", other))
            if names
        ]
        if said:
            raise ValueError(f"this is the plan of another model: it {'; it '.join(said)}")

    # ---- files -------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """As text, which :meth:`from_json` reads."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote, or that somebody edited.

        Raises:
            ValueError: not JSON, not a plan, or with a spec that does not exist; says which.
        """
        try:
            said = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this plan is not JSON: {error}") from error
        if not isinstance(said, dict) or said.get("version") != _VERSION:
            raise ValueError(f"this is not a plan of version {_VERSION}")
        try:
            layers = tuple(_layer(layer) for layer in said["layers"])
            rest = {key: value for key, value in said.items() if key not in ("version", "layers")}
            return cls(layers, **rest)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this plan lacks something, or has something too many: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write to a file."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read from a file; see :meth:`from_json`."""
        try:
            return cls.from_json(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _layer(said: Mapping[str, Any]) -> LayerPlan:
    name, spec, nbytes, error, shape = (said[key] for key in ("name", "spec", "nbytes", "error", "shape"))
    unknown = said.keys() - {"name", "spec", "nbytes", "error", "shape"}
    if unknown:
        raise TypeError(f"a layer has no {', '.join(sorted(unknown))}")
    if not (isinstance(name, str) and isinstance(spec, str)):
        raise TypeError(f"name and spec are texts, not {name!r} and {spec!r}")
    numbers = [nbytes, *shape, *([] if error is None else [error])]
    if not all(isinstance(number, (int, float)) and number >= 0 for number in numbers):
        raise TypeError(f"shape, bytes and error of {name!r} are numbers from 0 on, not {numbers}")
    return LayerPlan(name, tuple(shape), spec, nbytes, error)
