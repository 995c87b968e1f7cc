"""Write, check and read the part of a checkpoint that is about rounds of updates.

The whole state is checked before any of it is loaded, so a state that does not fit changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

from narrowband.averaging.flat import real
from narrowband.units import counted
from narrowband.updates.fragments import due_after
from narrowband.updates.length import MeasuredLength

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from narrowband.updates.fragments import Fragment

__all__ = ["SavedRounds", "UnderWay"]

_KEYS = {"every", "fragments", "split", "steps", "anchor", "under way", "outer", "length", "skipped"}

#: What optimizers of torch.optim keep for each parameter in a tensor of the parameter's shape. Tensors of other names
#: may have any shape, and optimizers of other packages may keep anything under these names.
_LIKE_PARAMETERS = {
    "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta",
    "sum", "prev", "step_size", "ax",
}  # fmt: skip

_UNDER_WAY = {"at", "steps", "sample", "means"}


@dataclass(eq=False)
class UnderWay:
    """A fragment whose updates are being exchanged while the replica trains on.

    Attributes:
        at: index of the fragment.
        futures: one for each of its groups; done when the means have arrived.
        sample: the sample by which its length will be measured, if it is in this round.
        steps: optimizer steps that this replica has taken since the exchange began.
    """

    at: int
    futures: list[torch.futures.Future[Tensor]] = field(default_factory=list)
    sample: Tensor | None = None
    steps: int = 0


@dataclass(frozen=True)
class SavedRounds:
    """The part of a handle's state that is about its rounds; see :func:`~narrowband.compress_updates`.

    Attributes:
        fragments: the model's fragments, in order.
        every: optimizer steps from one round to the next.
        split: how the model is divided into fragments.
        residuals: where residuals are kept between rounds.
        overlap: steps that a fragment may be under way.
        outer: the outer optimizer, if there is one.
    """

    fragments: Sequence[Fragment]
    every: int
    split: str
    residuals: str
    overlap: int
    outer: Optimizer | None

    def written(
        self, tensors: Mapping[str, Tensor], *, steps: int, skipped: int, under_way: UnderWay | None
    ) -> dict[str, Any]:
        """Return this rank's state.

        Args:
            tensors: the averaged tensors by name.
            steps: optimizer steps since the last round.
            skipped: number of updates that were not finite.
            under_way: the fragment that is under way, if there is one.
        """
        anchors: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for fragment in self.fragments:
            if fragment.anchored:
                anchors |= fragment.copies(tensors)
            else:
                buffers |= fragment.copies_of_buffers(tensors)
        return {
            "every": self.every,
            "fragments": len(self.fragments),
            "split": self.split,
            "residuals": self.residuals,
            "steps": steps,
            "anchor": anchors,
            "buffers": buffers,  # right after a round, since forward passes change them before the first step
            "under way": None
            if under_way is None
            else {
                "at": under_way.at,
                "sample": under_way.sample,
                "steps": under_way.steps,
                "means": self.fragments[under_way.at].copies(tensors, of_updates=True),
            },
            "outer": None if self.outer is None else self.outer.state_dict(),
            "length": self.lengths(),
            "skipped": skipped,
        }

    def read(self, own: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> UnderWay | None:
        """Load fragments, their lengths and the outer optimizer from a rank's state, which :meth:`check` has accepted.
        Return the fragment that was under way, if there was one.
        """
        if self.outer is not None:
            self.outer.load_state_dict(own["outer"])
        self.load_lengths(own["length"])
        sent = own["under way"]
        for at, fragment in enumerate(self.fragments):
            if fragment.names[0] in own["anchor"]:
                fragment.load(tensors, own["anchor"], sent["means"] if sent is not None and sent["at"] == at else None)
            else:
                fragment.load_buffers(tensors, own.get("buffers", {}))  # states of earlier versions lack them
        if sent is None:
            return None
        sample = None if sent["sample"] is None else sent["sample"].to(device)
        return UnderWay(sent["at"], sample=sample, steps=sent["steps"])

    def lengths(self) -> list[dict[str, float]]:
        """Return the states of the lengths that are measured."""
        return [length.state_dict() for length in self._measured]

    def load_lengths(self, states: Sequence[Mapping[str, float]]) -> None:
        """Load the states of the lengths that are measured."""
        for length, state in zip(self._measured, states, strict=True):
            length.load_state_dict(state)

    @property
    def _measured(self) -> list[MeasuredLength]:
        return [each.length for each in self.fragments if isinstance(each.length, MeasuredLength)]

    def check(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Check that a rank's state can be loaded.

        Args:
            state: the state of the whole handle.
            tensors: the averaged tensors by name.

        Raises:
            ValueError: the state does not fit; the message says what.
        """
        own = _of_rounds(state)
        if own is None:
            raise ValueError("the state is not one of compress_updates; pass what its handle.state_dict() returned")
        here = {"every": self.every, "fragments": len(self.fragments), "split": self.split}
        for name, value in here.items():
            if own[name] != value:
                raise ValueError(f"the state was saved with {name}={own[name]}, and here it is {value}")
        if (where := own.get("residuals", "apart")) != self.residuals:
            raise ValueError(f"the state was saved with residuals={where!r}, here they are {self.residuals!r}")
        if (own["outer"] is None) != (self.outer is None):
            raise ValueError(
                "the state was saved with another outer=: either there or here, but not both, it is an optimizer"
            )
        if self.outer is not None:
            _check_outer(own["outer"], self.outer)
        if not isinstance(own["length"], Sequence) or len(own["length"]) != len(self._measured):
            raise ValueError(
                "the state was saved with another outer=: either there or here, but not both, it is 'auto'"
            )
        for length in own["length"]:
            _check_measured(length)
        if not _is_count(own["skipped"]):
            raise ValueError(f"the state has {own['skipped']!r} for 'skipped'; expected a whole number of at least 0")
        if not _is_count(own["steps"]) or own["steps"] >= max(2, self.every):
            raise ValueError(
                f"the state has {own['steps']!r} for 'steps'; expected a whole number below {max(2, self.every)}"
            )
        self._check_saved("parameters of the last round", own["anchor"], tensors, tensors)
        buffers = own.get("buffers", {})  # those that are not averaged any more are not loaded
        self._check_saved("buffers of the last round", buffers, buffers, tensors)
        anchored = [fragment.names[0] in own["anchor"] for fragment in self.fragments]
        for at, there in enumerate(anchored):
            # Without overlap, a fragment has no anchors from its round until the next step.
            has_come = not self.overlap and own["steps"] == due_after(at, self.every, len(anchored))
            if own["steps"] and not there and not has_come:
                raise ValueError("the state lacks the parameters of the last round")
        sent = own["under way"]
        if sent is None:
            return
        if not self.overlap:
            raise ValueError(
                "the state was saved during the exchange of a fragment, and here overlap=0; use overlap=1 or more"
            )
        at, steps, sample = sent["at"], sent["steps"], sent["sample"]
        if not (_is_count(at) and at < len(anchored) and anchored[at] and _is_count(steps) and steps < self.overlap):
            raise ValueError(f"the state is damaged: its fragment under way has at={at!r} and steps={steps!r}")
        self._check_saved("means", sent["means"], self.fragments[at].names, tensors)
        if not sent["means"]:
            raise ValueError("the state lacks the means of the fragment that is under way")
        length = self.fragments[at].length
        numel = length.nbytes // 4 if isinstance(length, MeasuredLength) else 0
        if sample is not None and not (_is_flat(sample, numel) and numel):
            raise ValueError("the state is damaged: the sample of its fragment under way has another shape or dtype")

    def _check_saved(
        self, what: str, saved: Mapping[str, Tensor], names: Iterable[str], tensors: Mapping[str, Tensor]
    ) -> None:
        """Raise ValueError unless the saved tensors fit the model and are finite, and all or none of each fragment's
        are there.
        """
        wanted = set(names)
        if others := saved.keys() - wanted:
            raise ValueError(f"the state's {what} do not fit the model: {min(map(str, others))}")
        for fragment in self.fragments:
            there = [name for name in fragment.names if name in wanted]
            if not any(name in saved for name in there):
                continue
            for name in there:
                x, here = saved.get(name), real(tensors[name])
                if not isinstance(x, Tensor) or (x.shape, x.dtype, x.layout) != (here.shape, here.dtype, here.layout):
                    raise ValueError(f"the state's {what} do not fit the model: {name}")
                if not bool(x.isfinite().all()):
                    raise ValueError(f"the state's {what} hold inf or NaN in {name}; load an earlier state")

    def moment_of(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Return where between two rounds a handle's state was saved, for ranks to compare: replicas at different
        places would not reach the next round together. Returns nothing for what is no state of updates, which
        :meth:`check` refuses.
        """
        own = _of_rounds(state)
        if own is None:
            return {}
        there = [str(at) for at, fragment in enumerate(self.fragments) if fragment.names[0] in own["anchor"]]
        sent = own["under way"]
        return {
            "steps since the last round": str(own["steps"]),
            "fragments that were stepped since theirs": ", ".join(there) or "none",
            "fragment under way": "none" if sent is None else f"{sent['at']}, for {counted(sent['steps'], 'step')}",
        }


def _of_rounds(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the part of a state that is about updates, or None if it is not formed as one."""
    own = state.get("updates")
    if not isinstance(own, Mapping) or not own.keys() >= _KEYS or not isinstance(own["anchor"], Mapping):
        return None
    if not isinstance(own.get("buffers", {}), Mapping):
        return None
    sent = own["under way"]
    if sent is None:
        return own
    whole = isinstance(sent, Mapping) and sent.keys() >= _UNDER_WAY and isinstance(sent["means"], Mapping)
    return own if whole else None


def _check_measured(state: object) -> None:
    """Raise ValueError unless this is what :meth:`MeasuredLength.state_dict` returned."""
    least = {"own": 0, "mean": 0, "value": 1, "rounds": 0, "size": 0}
    numbers = {"size": 0} | dict(state) if isinstance(state, Mapping) else {}  # earlier states lack the size
    for name, low in least.items():
        x = numbers.get(name)
        if not isinstance(x, (int, float)) or not low <= x < math.inf:
            raise ValueError(
                f"the state of a measured length has {x!r} for {name!r}; expected a number of at least {low}"
            )


def _check_outer(state: object, outer: Optimizer) -> None:
    """Raise ValueError if the state of an outer optimizer does not fit this one, is malformed or not finite."""
    groups = _groups(state)
    if groups is None or [len(names) for names in groups] != [len(group["params"]) for group in outer.param_groups]:
        raise ValueError("the state is of an outer optimizer with other parameter groups")
    kept = cast("Mapping[str, Any]", state).get("state")
    if not isinstance(kept, Mapping) or not all(isinstance(own, Mapping) for own in kept.values()):
        raise ValueError(
            "the state of the outer optimizer is damaged: its 'state' must hold a dictionary for each parameter"
        )
    parameters = {
        name: p
        for names, group in zip(groups, outer.param_groups, strict=True)
        for name, p in zip(names, group["params"], strict=True)
    }
    like = _LIKE_PARAMETERS if type(outer).__module__.startswith("torch.optim.") else set()
    for at, own in kept.items():
        p = parameters.get(at)
        for name, x in own.items():
            if isinstance(x, Tensor) and not (x.layout == torch.strided and bool(x.isfinite().all())):
                raise ValueError(f"the state's outer optimizer holds inf or NaN in its {name}; load an earlier state")
            if p is None or name not in like or x is None:
                continue
            if not isinstance(x, Tensor) or x.shape != p.shape:
                there = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
                raise ValueError(
                    f"the state is of an outer optimizer of another model: its {name} of parameter {at} has {there}, "
                    f"and the parameter here has shape {tuple(p.shape)}"
                )


def _is_count(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an int of at least 0."""
    return type(value) is int and value >= 0


def _is_flat(x: object, numel: int) -> bool:
    return isinstance(x, Tensor) and (x.shape, x.dtype, x.layout) == ((numel,), torch.float32, torch.strided)


def _groups(state: object) -> list[list[int]] | None:
    """Return the numbers of the parameters in each group of an optimizer's state; None if it is no such state."""
    try:
        groups = [list(group["params"]) for group in cast("Mapping[str, Any]", state)["param_groups"]]
    except (KeyError, TypeError):
        return None
    return groups if all(_is_count(number) for numbers in groups for number in numbers) else None
