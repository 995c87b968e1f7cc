"""What loops find out of their data, where the host does not wait for a device to say so.

Loops tell whether what they saw was finite, and whether a payload was damaged. On a GPU an answer costs a wait: the
host would stand still until the device has done everything before, and the device would then stand still until the
host has launched what follows. So a caller that can go on without the answer opens a :class:`Findings`: loops then
answer that all is well, and note on the device what is so. What follows has to be right either way.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from narrowband.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["Findings", "holds", "open_place", "refuse_if"]

_open = threading.local()


class Findings:
    """Notes on a device: an int32 for each of the three below, which is not zero where something is wrong.

    Args:
        device: where they are.

    Example:
        >>> findings = Findings(torch.device("cpu"))
        >>> with findings.noting(Findings.OWN):
        ...     holds(torch.tensor(1.0).isfinite()), holds(torch.tensor(2.0) < 1.0)
        (True, True)
        >>> findings.places.tolist()
        [1, 0, 0]
    """

    #: Something of this rank is not finite; something of any rank is not; a payload is damaged.
    OWN, ANY, DAMAGED = range(3)

    def __init__(self, device: torch.device) -> None:
        self.places = torch.zeros(3, dtype=torch.int32, device=device)

    def place(self, what: int) -> Tensor:
        """The note of one of these, of shape (1,)."""
        return self.places[what : what + 1]

    @property
    def of_all(self) -> Tensor:
        """The notes that are of all ranks, of shape (2,): ``ANY`` and ``DAMAGED``."""
        return self.places[1:]

    def note(self, what: int, bad: Tensor | bool) -> None:
        """Note that something is wrong, if it is.

        Args:
            what: one of these.
            bad: a bool of one element; or one that the host knows.
        """
        if isinstance(bad, bool):
            if bad:
                self.place(what).fill_(1)
        else:
            self.place(what).bitwise_or_(bad.view(1).to(torch.int32))

    @contextmanager
    def noting(self, what: int) -> Iterator[None]:
        """In this thread, loops note what is not finite there, and damage in its own place."""
        before = getattr(_open, "findings", None)
        _open.findings = self, what
        try:
            yield
        finally:
            _open.findings = before


def holds(ok: Tensor) -> bool:
    """Whether one bool is true; or True, where that is noted instead."""
    found: tuple[Findings, int] | None = getattr(_open, "findings", None)
    if found is None:
        return bool(ok)
    found[0].note(found[1], ~ok)
    return True


def open_place(device: torch.device) -> Tensor | None:
    """Where to note what is not finite, on this device; None: the host waits for an answer."""
    found: tuple[Findings, int] | None = getattr(_open, "findings", None)
    return found[0].place(found[1]) if found is not None and found[0].places.device == device else None


def refuse_if(damaged: Tensor, message: str) -> None:
    """Raise PayloadError if one bool is true; or have that noted instead."""
    found: tuple[Findings, int] | None = getattr(_open, "findings", None)
    if found is not None:
        found[0].note(Findings.DAMAGED, damaged)
    elif bool(damaged):
        raise PayloadError(message)
