"""Averages that no optimizer used, and what feedback held before them.

Feedback takes an average for something that will be applied: what was sent leaves the residual, and the rest of the
gradient waits there. Where optimizers take turns, as those of a GAN, this is wrong for some averages. The generator's
loss also gives the discriminator gradients. They are averaged, cleared, and never applied. So what feedback held before
is kept until an optimizer has used the average. If the average is thrown away, feedback gets that back: what was
applied and what waits is then the sum of the gradients that optimizers have stepped with.

Who has used what is noted elsewhere (:mod:`narrowband.averaging.waiting`). A run in which every average is used keeps
nothing here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import Tensor

    from narrowband.feedback import State

__all__ = ["Unused"]


class Unused:
    """What feedback held before averages that no optimizer has used yet, by the name of the parameter."""

    def __init__(self) -> None:
        self._former: dict[str, dict[str, Tensor]] = {}  # in the form of State.entries

    def keep(self, name: str, state: State | None, *, empty: bool) -> None:
        """Keep a copy of what feedback holds of a parameter that is about to be averaged, unless the average before
        waits still.

        Args:
            name: of the parameter.
            state: the feedback that it has; None if it has none.
            empty: whether feedback holds nothing yet, or zeros.
        """
        if state is not None and state.puts_back and name not in self._former:
            self._former[name] = {} if empty else {entry: x.clone() for entry, x in state.entries(name).items()}

    def forget(self, names: Iterable[str]) -> None:
        """Drop what was kept of these parameters: their averages were used."""
        for name in names:
            self._former.pop(name, None)

    def take_back(self, names: Iterable[str], state_of: Callable[[str], State | None]) -> None:
        """Give feedback back what it held before the averages of these parameters, as far as that was kept.

        Args:
            names: of the parameters.
            state_of: returns the feedback that a parameter has now; None if it has none.
        """
        for name in names:
            former, state = self._former.pop(name, None), state_of(name)
            if former is not None and state is not None:
                state.put_back(name, former)

    def move(self, name: str, was: State, now: State) -> None:
        """Move the residual of a parameter to another feedback; and the one before an average that waits, which may
        still be thrown away.

        Args:
            name: of the parameter.
            was: the feedback that it had.
            now: the feedback that it has from now on.
        """
        residual, former = was.take_residual(name), self._former.pop(name, None)
        if former is not None:
            was.put_back(name, former)
            before = was.take_residual(name)
            if before is not None:
                now.add_residual(name, before)
            self.keep(name, now, empty=before is None)
            if before is not None and residual is None:
                now.take_residual(name)
        if residual is not None:
            now.add_residual(name, residual)

    def clear(self) -> None:
        """Drop everything."""
        self._former.clear()

    def scale(self, factor: float) -> None:
        """Multiply everything by ``factor``, as :meth:`State.scale`."""
        for entries in self._former.values():
            for x in entries.values():
                x.mul_(factor)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that is kept."""
        return {f"{name}/{key}": x for name, entries in self._former.items() for key, x in entries.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of memory that is taken."""
        return sum(x.nbytes for x in self.state_dict().values())

    def saved(self, state: State, state_of: Callable[[str], State | None], used: Collection[str]) -> dict[str, Tensor]:
        """Return a feedback's state without the averages that wait: a run that resumes has no gradients.

        Args:
            state: the feedback.
            state_of: as in :meth:`take_back`.
            used: names of parameters whose averages count as used all the same.
        """
        found = state.state_dict()
        for name, former in self._former.items():
            if name not in used and state_of(name) is state:
                for entry in state.entries(name):
                    found.pop(entry, None)
                found |= former
        return found
