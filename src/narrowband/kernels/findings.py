"""What loops find in their data, noted on the device so that the host need not wait for it.

Loops report whether their data was finite, and whether a payload was damaged. On a GPU, reading such a report is a
synchronization: the host waits until the device has finished all earlier work, and the device then idles until the host
has launched what follows. So a caller that can go on without the answer opens a :class:`Findings`: loops then return
that all is well, and note on the device what they really found. The work that follows has to be right in either case.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from narrowband.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["Findings", "Late", "answers", "holds", "open_place", "refuse_if"]

_open = threading.local()


class Findings:
    """Notes on a device: three int32, one per kind of finding below, nonzero if something is wrong.

    Args:
        device: where the notes are.

    Example:
        >>> findings = Findings(torch.device("cpu"))
        >>> with findings.noting(Findings.OWN):
        ...     holds(torch.tensor(1.0).isfinite()), holds(torch.tensor(2.0) < 1.0)
        (True, True)
        >>> findings.places.tolist()
        [1, 0, 0]
    """

    #: The kinds of findings: data of this rank is not finite; data of any rank is not finite; a payload is damaged.
    OWN, ANY, DAMAGED = range(3)

    def __init__(self, device: torch.device) -> None:
        self.places = torch.zeros(3, dtype=torch.int32, device=device)

    def place(self, what: int) -> Tensor:
        """Return the note of one kind, of shape (1,)."""
        return self.places[what : what + 1]

    @property
    def of_all(self) -> Tensor:
        """The notes that concern all ranks, of shape (2,): ``ANY`` and ``DAMAGED``."""
        return self.places[1:]

    def note(self, what: int, bad: Tensor | bool) -> None:
        """Note that something is wrong if ``bad`` is true.

        Args:
            what: the kind of finding.
            bad: a bool tensor of one element, or a bool that the host knows.
        """
        if isinstance(bad, bool):
            if bad:
                self.place(what).fill_(1)
        else:
            self.place(what).bitwise_or_(bad.view(1).to(torch.int32))

    def answer(self) -> bool:
        """Wait for the device, and return whether all data is finite.

        Raises:
            PayloadError: a payload is damaged.
        """
        *bad, damaged = self.places.tolist()
        if damaged:
            raise PayloadError("a payload is damaged: its indices are not sorted, or not those of its tensor")
        return not any(bad)

    @contextmanager
    def noting(self, what: int) -> Iterator[None]:
        """Make loops of this thread note instead of answer: non-finite data as ``what``, damage as ``DAMAGED``."""
        before = getattr(_open, "findings", None)
        _open.findings = self, what
        try:
            yield
        finally:
            _open.findings = before


class Late:
    """Numbers on their way from a device to the host, which reads them later and meanwhile goes on.

    Args:
        places: the numbers on the device. Later changes of it have no effect.

    Example:
        >>> late = Late(torch.tensor([0, 1], dtype=torch.int32))
        >>> late.has_arrived(), late.values()
        (True, [0, 1])
    """

    def __init__(self, places: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if places.is_cuda:
            here = torch.empty(places.shape, dtype=places.dtype, device="cpu", pin_memory=True)
            here.copy_(places, non_blocking=True)
            self._event = torch.cuda.current_stream(places.device).record_event()
        else:
            here = places.clone()
        self._numbers = here.numpy()

    def has_arrived(self) -> bool:
        """Whether :meth:`values` returns at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def values(self) -> list[Any]:
        """Return the numbers. Waits until the device has finished what it was given before them."""
        if self._event is not None:
            self._event.synchronize()
        return cast("list[Any]", self._numbers.tolist())


def holds(ok: Tensor) -> bool:
    """Return whether a bool tensor of one element is true; while findings are noted, note if not, and return True."""
    found: tuple[Findings, int] | None = getattr(_open, "findings", None)
    if found is None:
        return bool(ok)
    found[0].note(found[1], ~ok)
    return True


def open_place(device: torch.device) -> Tensor | None:
    """Return where loops note non-finite data on this device; None if the host waits for the answer instead."""
    found: tuple[Findings, int] | None = getattr(_open, "findings", None)
    return found[0].place(found[1]) if found is not None and found[0].places.device == device else None


def answers(device: torch.device) -> bool:
    """Whether loops on this device answer the host, rather than note what they find."""
    return open_place(device) is None


def refuse_if(damaged: Tensor, message: str) -> None:
    """Raise PayloadError if a bool tensor of one element is true. While findings are noted: note the damage instead."""
    found: tuple[Findings, int] | None = getattr(_open, "findings", None)
    if found is not None:
        found[0].note(Findings.DAMAGED, damaged)
    elif bool(damaged):
        raise PayloadError(message)
