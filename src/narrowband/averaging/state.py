"""The format of a handle's state, and the checks before a state is loaded.

Everything here reads states and changes nothing, so that :meth:`GradientCompression.load_state_dict` either loads a
whole state on all ranks, or leaves every rank unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from narrowband.feedback import compression

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from narrowband.averaging.agreement import Facts

__all__ = ["VERSION", "check_state", "facts_of", "kept", "states_of_all_ranks"]

VERSION = 2


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


#: Key → (what belongs there, for errors; a check of the value).
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "spec": ("a spec string", lambda value: isinstance(value, str)),
    "step": ("a number of steps from 0 on", _is_count),
    "epoch": ("an epoch from 0 on, or None", lambda value: value is None or _is_count(value)),
    "paused": ("True or False", lambda value: isinstance(value, bool)),
    "layers": (
        "a dictionary from layers to spec strings",
        lambda value: isinstance(value, Mapping) and all(isinstance(x, str) for pair in value.items() for x in pair),
    ),
    "seed": ("an integer", lambda value: type(value) is int),
    "loss_scale": (
        "a finite number above 0, or None",
        lambda value: value is None or (isinstance(value, (int, float)) and 0 < value < math.inf),
    ),
    "rank": ("a rank from 0 on", _is_count),
    "world_size": ("a number of ranks", lambda value: _is_count(value) and value > 0),
    "feedback": ("a dictionary from layers to residuals", _is_mapping),
    "others": (
        "a dictionary from feedbacks to their residuals",
        lambda value: isinstance(value, Mapping) and all(map(_is_mapping, value.values())),
    ),
    "controller": ("a dictionary", _is_mapping),
    "memory formats": ("a dictionary", _is_mapping),
    "in turns": ("True, False or None", lambda value: value is None or isinstance(value, bool)),
    "since thrown": (
        "two numbers of averages",
        lambda value: isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_count, value)),
    ),
    "stepped": (
        "a dictionary with 'parameters', 'own' and 'any'",
        lambda value: (
            isinstance(value, Mapping)
            and isinstance(value.get("parameters"), (list, tuple))
            and all(isinstance(name, str) for name in value["parameters"])
            and all(isinstance(value.get(key), bool) for key in ("own", "any"))
        ),
    ),
}

#: Keys that states of earlier releases lack.
_ADDED = ("memory formats", "in turns", "since thrown", "stepped")

#: Keys whose values must be equal in the states of all ranks.
_SHARED = ("spec", "step", "epoch", "paused", "seed", "loss_scale", "world_size")


def check_state(state: object) -> Mapping[str, Any]:
    """Return the state after checking that it has the form that :meth:`GradientCompression.state_dict` returns.

    Raises:
        ValueError: not a state, a state of another version, a missing key, or an invalid value.
    """
    if not isinstance(state, Mapping):
        raise ValueError(
            f"expected a state that handle.state_dict() returned, got {type(state).__name__}; pass this rank's own "
            "state, or a list of all ranks' states"
        )
    if kept_apart := [key for key in state if re.fullmatch(r"shard\d+-rank\d+", str(key))]:
        raise ValueError(
            f"this is what handle.stateful saved on another rank ({', '.join(kept_apart)}): a file that one rank "
            "writes needs the list of all ranks' handle.state_dict() instead; handle.stateful is for "
            "torch.distributed.checkpoint, which keeps what every rank saved of it"
        )
    lacking = [key for key in ("version", *_FIELDS) if key not in state and key not in _ADDED]
    if "version" in state and state["version"] != VERSION:
        raise ValueError(
            f"the state has version {state['version']!r}, but this narrowband reads version {VERSION}; load the state "
            "with the narrowband that saved it, or begin without it"
        )
    if lacking:
        inside = [
            key for key, held in state.items() if isinstance(held, Mapping) and {"version", "feedback"} <= {*held}
        ]
        what = ", ".join(map(repr, lacking)) if "version" in state else "all that a state of compression has"
        hint = f": it is under {inside[0]!r} here" if inside else ", not the state of a model or an optimizer"
        raise ValueError(f"the state lacks {what}; pass what handle.state_dict() returned{hint}")
    for key, (expected, fits) in _FIELDS.items():
        if key in state and not fits(state[key]):
            raise ValueError(f"the state has {_short(state[key])} for {key!r}, expected {expected}")
    if state["rank"] >= state["world_size"]:
        raise ValueError(
            f"the state is of rank {state['rank']}, but was saved by {state['world_size']} ranks, so it is damaged"
        )
    for spec in (state["spec"], *state["layers"].values()):
        try:
            compression(spec)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"the state has an invalid spec: {error}") from error
    return state


def states_of_all_ranks(
    states: Sequence[object], facts_of: Callable[[Mapping[str, Any]], Facts]
) -> list[Mapping[str, Any]]:
    """Return the states of all ranks, in the order of ranks, after checking that they belong together.

    Args:
        states: in any order.
        facts_of: returns what must be equal in all states.

    Raises:
        ValueError: a rank's state is missing or given twice, or the states are of different steps or runs.
    """
    if not states:
        raise ValueError("the list of states is empty; pass this rank's own state, or the states of all ranks")
    checked = sorted((check_state(state) for state in states), key=lambda state: int(state["rank"]))
    ranks, size = [state["rank"] for state in checked], checked[0]["world_size"]
    if ranks != list(range(size)):
        raise ValueError(
            f"the states were saved by {size} ranks, but the list has those of ranks {ranks}; pass each rank's once"
        )
    all_facts = [facts_of(state) for state in checked]
    for key in dict.fromkeys(key for facts in all_facts for key in facts):
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(all_facts):
            values.setdefault(str(facts.get(key, "nothing")), []).append(rank)
        if len(values) > 1:
            who = "; ".join(f"{_short(value)} on rank(s) {', '.join(map(str, at))}" for value, at in values.items())
            raise ValueError(f"the states differ in {key} ({who}); pass states that one run saved at the same step")
    return checked


def facts_of(state: Mapping[str, Any]) -> Facts:
    """Return what ranks compare of the states that they are about to load."""
    return {
        "version": str(state["version"]),
        **{key: repr(state[key]) for key in _SHARED},
        "spec of layer": dict(state["layers"]),
        "plan": str(state["controller"].get("plan")),
    }


def kept(state: Mapping[str, Any]) -> dict[str, Mapping[str, Tensor]]:
    """Return the saved feedback of a rank, by the names of :attr:`Layers.states`."""
    return {"": state["feedback"], **state["others"]}


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]} …"
