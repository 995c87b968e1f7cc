"""What a saved state of rounds has to be, so that a run can go on from it.

Everything is looked at before anything is loaded: a state that does not fit changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from narrowband.averaging.flat import real
from narrowband.updates.fragments import due_after

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from narrowband.updates.fragments import Fragment

__all__ = ["Expected", "check_updates", "moment_of"]

_KEYS = {"every", "fragments", "split", "steps", "anchor", "under way", "outer", "length", "skipped"}


@dataclass(frozen=True)
class Expected:
    """What the handle that loads a state was set up with; see :func:`~narrowband.compress_updates`.

    Attributes:
        every: optimizer steps from one round to the next.
        split: how the model is divided into fragments.
        residuals: where they wait.
        overlap: steps that a fragment may be under way.
        outer: the optimizer of the outer step, if there is one.
        lengths: how many are measured.
    """

    every: int
    split: str
    residuals: str
    overlap: int
    outer: Optimizer | None
    lengths: int


def check_updates(
    state: Mapping[str, Any], expected: Expected, fragments: Sequence[Fragment], tensors: Mapping[str, Tensor]
) -> None:
    """See that a rank's state can be loaded.

    Args:
        state: of the handle.
        expected: by the handle that loads it.
        fragments: of the model, in their order.
        tensors: what is averaged, by name.

    Raises:
        ValueError: says what does not fit.
    """
    own = state.get("updates")
    if not isinstance(own, Mapping) or not own.keys() >= _KEYS:
        raise ValueError("the state is not of updates; pass what compress_updates' handle.state_dict() returned")
    here = {"every": expected.every, "fragments": len(fragments), "split": expected.split}
    for name, value in here.items():
        if own[name] != value:
            raise ValueError(f"the state was saved with {name}={own[name]}, and here it is {value}")
    if (where := own.get("residuals", "apart")) != expected.residuals:
        raise ValueError(f"the state was saved with residuals={where!r}, here they are {expected.residuals!r}")
    if (own["outer"] is None) != (expected.outer is None):
        raise ValueError("the state is of another outer step: one of the two is an optimizer")
    if expected.outer is not None and _sizes(own["outer"]) != _sizes(expected.outer.state_dict()):
        raise ValueError("the state is of an outer optimizer with other parameter groups")
    if not isinstance(own["length"], Sequence) or len(own["length"]) != expected.lengths:
        raise ValueError("the state is of another outer step: one of the two is outer='auto'")
    if not 0 <= own["steps"] < max(2, expected.every):
        raise ValueError(f"the state is of {own['steps']} steps after a round, and every={expected.every}")
    _check_saved("parameters of the last round", own["anchor"], tensors, fragments, tensors)
    anchored = [fragment.names[0] in own["anchor"] for fragment in fragments]
    for at, there in enumerate(anchored):
        # Right after its round, in which the replica waited, a fragment has none until the next step.
        has_come = not expected.overlap and own["steps"] == due_after(at, expected.every, len(fragments))
        if own["steps"] and not there and not has_come:
            raise ValueError("the state lacks the parameters of the last round")
    sent = own["under way"]
    if sent is None:
        return
    if not expected.overlap:
        raise ValueError("the state has a fragment that is under way, and here overlap=0")
    if not (0 <= sent["at"] < len(anchored) and anchored[sent["at"]] and sent["steps"] < expected.overlap):
        raise ValueError("the state has a fragment that is under way, which cannot be")
    _check_saved("means", sent["means"], fragments[sent["at"]].names, fragments, tensors)


def moment_of(state: Mapping[str, Any], fragments: Sequence[Fragment]) -> dict[str, str]:
    """Where between two rounds a state was saved. Replicas that are at different places there do not come to the next
    round together. Of what is no state of updates nothing is said here; :func:`check_updates` refuses it.

    Args:
        state: of the handle.
        fragments: of the model, in their order.
    """
    own = state.get("updates")
    if not isinstance(own, Mapping) or not own.keys() >= _KEYS:
        return {}
    there = [str(at) for at, fragment in enumerate(fragments) if fragment.names[0] in own["anchor"]]
    sent = own["under way"]
    return {
        "steps since the last round": str(own["steps"]),
        "fragments that were stepped since theirs": ", ".join(there) or "none",
        "fragment under way": "none" if sent is None else f"{sent['at']}, for {sent['steps']} steps",
    }


def _check_saved(
    what: str,
    saved: Mapping[str, Tensor],
    names: Iterable[str],
    fragments: Sequence[Fragment],
    tensors: Mapping[str, Tensor],
) -> None:
    """Saved tensors fit the model; those of a fragment are all there or none."""
    wanted = set(names)
    for fragment in fragments:
        there = [name for name in fragment.names if name in wanted]
        if not any(name in saved for name in there):
            continue
        for name in there:
            x = saved.get(name)
            if x is None or x.shape != real(tensors[name]).shape:
                raise ValueError(f"the state's {what} do not fit the model: {name}")


def _sizes(state: object) -> list[int] | None:
    """How many parameters each group of an optimizer's state has; None where it is no such state."""
    try:
        return [len(group["params"]) for group in cast("Mapping[str, Any]", state)["param_groups"]]
    except (KeyError, TypeError):
        return None
