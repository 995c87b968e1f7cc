"""Plans: the spec of every layer, the bytes that it sends, and the error that it makes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from narrowband.adapt.traffic import dense_nbytes
from narrowband.errors import UnsupportedError
from narrowband.feedback import compression
from narrowband.files import write_text
from narrowband.units import counted, format_bytes, plain_number

__all__ = ["LayerPlan", "Plan"]

_VERSION = 2

_WRITTEN_BY = "Plan.save and `narrowband adapt --output` write plans"


@dataclass(frozen=True)
class LayerPlan:
    """One layer's part of a plan.

    Attributes:
        name: the parameter's name.
        shape: the parameter's shape.
        spec: the spec that compresses it.
        nbytes: bytes that a rank sends for it per step.
        error: L2 norm of the error of encoding the policy's gradient once; None if the policy measured no errors.
    """

    name: str
    shape: tuple[int, ...]
    spec: str
    nbytes: float
    error: float | None

    def __post_init__(self) -> None:
        given: Any = self.shape  # a user's policy may pass any type
        shape = list(map(plain_number, given)) if isinstance(given, (list, tuple)) else given
        for key in ("nbytes", "error"):
            object.__setattr__(self, key, plain_number(getattr(self, key)))  # the class is frozen
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        _check_keys(f"layer {self.name!r} of the plan", own | {"shape": shape}, _LAYER, {})
        object.__setattr__(self, "shape", tuple(shape))

    @property
    def family(self) -> str:
        """Name of the codec or method, without settings."""
        return self.spec.partition("+")[0].partition(":")[0]

    @property
    def numel(self) -> int:
        """Number of elements of the layer."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """The spec of every layer, and how it was decided. ``print(plan)`` shows a line per layer.

    Attributes:
        layers: one :class:`LayerPlan` per compressed layer.
        policy: the policy that decided, with its settings.
        world_size: the number of ranks for which bytes are counted.
        step: the training step at which the policy decided.
        reference: the spec whose error was the budget; None if there was none.
        budget: the limit of the sum of errors; None if there was none.
        reference_nbytes: bytes that a rank would send per step with the reference for all layers; None if there is no
            reference.
        model: the spec of the whole model. Layers whose specs name no feedback get this spec's feedback or method.

    Example:
        >>> plan = Plan.load("plan.json")
        >>> handle = nb.compress_gradients(model, plan)
    """

    layers: tuple[LayerPlan, ...]
    policy: str
    world_size: int
    step: int = 0
    reference: str | None = None
    budget: float | None = None
    reference_nbytes: float | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a plan needs at least one layer")
        for key in ("world_size", "step", "budget", "reference_nbytes"):
            object.__setattr__(self, key, plain_number(getattr(self, key)))
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        _check_keys("the plan", own | {"version": _VERSION, "layers": list(self.layers)}, _PLAN, _PLAN_OPTIONAL)
        names = [layer.name for layer in self.layers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the plan has these layers twice: {', '.join(twice)}")
        if self.model is not None:
            try:
                compression(self.model)
            except (ValueError, UnsupportedError) as error:
                raise ValueError(f"the plan's model: {error}") from error
        for layer in self.layers:
            try:
                compression(layer.spec)
            except (ValueError, UnsupportedError) as error:
                raise ValueError(f"the plan's layer {layer.name!r}: {error}") from error

    def __str__(self) -> str:
        """One line per layer: its spec, the bytes that a rank sends for it per step, and its name."""
        rows = [(each.spec, format_bytes(each.nbytes), each.name) for each in self.layers]
        spec, sent = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [f"{row[0]:<{spec}}  {row[1]:>{sent}}  {row[2]}" for row in rows]
        lines.append(
            f"each of {counted(self.world_size, 'rank')} sends {format_bytes(self.nbytes)} per step for all layers"
        )
        return "\n".join(lines)

    @property
    def nbytes(self) -> float:
        """Bytes that a rank sends per step for all layers."""
        return math.fsum(layer.nbytes for layer in self.layers)

    @property
    def dense_nbytes(self) -> int:
        """Bytes that a rank would send for the same layers without compression: a ring all-reduce in float32."""
        return sum(dense_nbytes(layer.shape, self.world_size) for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Compression ratio: ``dense_nbytes / nbytes``. 1 for one rank; infinite if only compression sends nothing."""
        return _ratio(self.dense_nbytes, self.nbytes)

    def layer_ratio(self, layer: LayerPlan) -> float:
        """Return the compression ratio of one layer."""
        return _ratio(dense_nbytes(layer.shape, self.world_size), layer.nbytes)

    @property
    def default(self) -> str:
        """Spec of layers that the plan does not name: ``model``, or else the most frequent spec with feedback.

        If no spec has feedback, it is the most frequent spec.
        """
        if self.model is not None:
            return self.model
        specs = [layer.spec for layer in self.layers]
        stateful = [spec for spec in specs if compression(spec).feedback is not None]
        return max(stateful or specs, key=(stateful or specs).count)

    def specs(self) -> dict[str, str]:
        """Return layer → spec."""
        return {layer.name: layer.spec for layer in self.layers}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless the plan is for a model whose compressed layers have these shapes."""
        mine = {layer.name: tuple(layer.shape) for layer in self.layers}
        missing, unknown = sorted(shapes.keys() - mine.keys()), sorted(mine.keys() - shapes.keys())
        other = sorted(name for name in mine.keys() & shapes.keys() if mine[name] != tuple(shapes[name]))
        differences = [
            f"{what} {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
            for what, names in (("lacks", missing), ("has the unknown", unknown), ("has other shapes for", other))
            if names
        ]
        if differences:
            raise ValueError(f"this is the plan of another model: it {'; it '.join(differences)}")

    # ---- files -------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the plan as JSON, which :meth:`from_json` reads."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that :meth:`to_json` wrote, or that a user edited.

        Raises:
            ValueError: the text is not JSON, not a plan, or a plan of another version; a key is missing or unknown; or
                a spec does not exist. The message says which.
        """
        try:
            values = json.loads(text, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"this is not a plan, or only a part of one: it is not JSON ({error}); {_WRITTEN_BY}"
            ) from error
        if not isinstance(values, dict) or "version" not in values:
            raise ValueError(f"this is not a plan: it is not a JSON object with a version; {_WRITTEN_BY}")
        if values["version"] != _VERSION:
            raise ValueError(
                f"the plan has version {values['version']!r}, but this narrowband reads version {_VERSION}; make the "
                "plan again with `narrowband adapt`"
            )
        _check_keys("the plan", values, _PLAN, _PLAN_OPTIONAL)
        layers = tuple(_layer(number, layer) for number, layer in enumerate(values["layers"]))
        return cls(layers, **{key: value for key, value in values.items() if key not in ("version", "layers")})

    def save(self, path: str | Path) -> None:
        """Write the plan to a file atomically, and create the folders above it."""
        write_text(Path(path), f"{self.to_json()}\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file; see :meth:`from_json`.

        Raises:
            ValueError: the file holds no plan; the message names the file and says what is wrong.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: this is not a plan: it is not text; {_WRITTEN_BY}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _ratio(dense: float, sent: float) -> float:
    if sent:
        return dense / sent
    return math.inf if dense else 1.0


#: Key in JSON → (description of a valid value, test of a value).
_Kinds = Mapping[str, tuple[str, Callable[[Any], bool]]]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary; refuse duplicate keys, of which ``json`` would silently drop one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at]))
        raise ValueError(f"the key {twice!r} is given twice")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _MOST


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


#: The largest number that a plan may have: larger integers cannot be converted to float.
_MOST = sys.float_info.max
_NUMBER, _NUMBER_OR_NULL = "a number from 0 on", "a number from 0 on, or null"
_PLAN: _Kinds = {
    "version": ("a number", _is_number),
    "layers": ("a list", lambda value: isinstance(value, list)),
    "policy": ("a text", _is_text),
    "world_size": ("a whole number from 1 on", lambda value: _is_whole(value) and value > 0),
}
_PLAN_OPTIONAL: _Kinds = {
    "step": ("a whole number from 0 on", _is_whole),
    "reference": ("a text or null", lambda value: value is None or _is_text(value)),
    "budget": (_NUMBER_OR_NULL, _is_number_or_none),
    "reference_nbytes": (_NUMBER_OR_NULL, _is_number_or_none),
    "model": ("a spec or null", lambda value: value is None or _is_text(value)),
}
_LAYER: _Kinds = {
    "name": ("a text", _is_text),
    "shape": (
        "a list of whole numbers",
        lambda value: isinstance(value, list) and all(map(_is_whole, value)),
    ),
    "spec": ("a text", _is_text),
    "nbytes": (_NUMBER, _is_number),
    "error": (_NUMBER_OR_NULL, _is_number_or_none),
}


def _check_keys(what: str, fields: Mapping[str, Any], required: _Kinds, optional: _Kinds) -> None:
    """Raise ValueError if a JSON object has a missing key, an unknown key, or an invalid value."""
    allowed = {**required, **optional}
    for key in required:
        if key not in fields:
            raise ValueError(f"{what} lacks the key {key!r}; it needs {', '.join(required)}")
    for key, value in fields.items():
        if key not in allowed:
            raise ValueError(f"{what} has the unknown key {key!r}; there are: {', '.join(allowed)}")
        kind, holds = allowed[key]
        if not holds(value):
            raise ValueError(f"{what} must have {kind} as {key!r}, not {value!r}")


def _layer(number: int, fields: Any) -> LayerPlan:
    if not isinstance(fields, dict):
        raise ValueError(f"layer {number} of the plan must be a JSON object with {', '.join(_LAYER)}, not {fields!r}")
    _check_keys(f"layer {fields.get('name', number)!r} of the plan", fields, _LAYER, {})
    return LayerPlan(fields["name"], tuple(fields["shape"]), fields["spec"], fields["nbytes"], fields["error"])
