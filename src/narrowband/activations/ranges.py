"""Running estimates of the ranges of groups, from batch to batch.

Codes are the levels of a range of width α from β on (equations 3 and 5 of Pan et al. 2021, Mesa, arXiv 2111.11124)::

    x̃ = clip(round((x − β) · (2^b − 1) / α), 0, 2^b − 1)        (3)        x̂ = x̃ · α / (2^b − 1) + β        (5)
    α ← μ·α + (1 − μ)·(max − min),    β ← μ·β + (1 − μ)·min       (6, 7)

The paper updates the estimates with a batch and then quantizes it, which reads the batch twice. Here one pass makes
codes with the estimates of the batches before and finds the batch's extremes. Where updating the estimate with these
moves an end of a range by more than a small share of its width (:data:`DRIFT`), the tensor is quantized again, as in
the paper. So every range is the paper's within that share. An element beyond the range exceeds it by at most 1/μ times
as much as it exceeds the paper's range, since x − (μ·end + (1 − μ)·x) = μ·(x − end).

The paper clips a batch that is wider than its estimate, which makes the gradients of such a batch wrong by a fifth and
more. So a group that would need more than 1.25 times (:data:`WIDE`) the width gets its own range in that batch. This
rule is not the paper's; such a batch updates the estimates as any other does.

On a GPU none of this may wait for the device, since the host must run ahead of it. So the device determines ranges by
itself, and the host reads what it has to know about a batch during the next one: see :class:`Notes`.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from narrowband import kernels

__all__ = ["DRIFT", "JUMP", "WIDE", "Estimates", "Notes", "drift"]

#: The share of a range's width by which an end may differ from equations 6 and 7.
DRIFT = 0.02
#: A batch gets its own range where the union of its range and the estimate is more than this many times as wide as the
#: estimate. Below that, the batch is clipped.
WIDE = 1.25
#: A batch that is more than this many times as wide as its estimate gets 8 bits.
JUMP = 4


class Notes:
    """Numbers that a device notes about tensors and the host reads later.

    Each tensor has one float32, which :meth:`send` zeroes. Kernels that note a width keep the largest value until then.

    Example:
        >>> notes, cpu = Notes(), torch.device("cpu")
        >>> _ = notes.place("scores", cpu).fill_(3.0)
        >>> notes.send()
        >>> notes.receive()
        >>> notes.read("scores"), notes.read("scores"), notes.read("mix")
        (3.0, 0.0, 0.0)
    """

    def __init__(self) -> None:
        self._boards: dict[torch.device, _Board] = {}
        self._lock = threading.Lock()

    def place(self, name: str, device: torch.device) -> Tensor:
        """Return the tensor, of shape (1,), that the device writes its note about the named tensor to."""
        board = self._boards.get(device)
        found = None if board is None else board.places.get(name)
        if found is None:
            with self._lock:
                board = self._boards.get(device)
                if board is None:
                    board = self._boards[device] = _Board(device)
                found = board.place(name)
        return found

    def send(self) -> None:
        """Start to copy all notes to the host, without waiting."""
        with self._lock:
            for board in self._boards.values():
                board.send()

    def receive(self) -> None:
        """Take in the notes that have arrived, without waiting for others."""
        with self._lock:
            for board in self._boards.values():
                board.receive()

    def read(self, name: str, at_most: float = math.inf) -> float:
        """Return the note about a tensor; 0 where none has arrived.

        A note up to ``at_most`` is removed by reading it; a larger one remains.
        """
        found = 0.0
        for board in self._boards.values():
            if name in board.values:
                found = max(found, board.values[name])
                if found <= at_most:
                    board.values.pop(name, None)
        return found


class _Board:
    """The notes of one device.

    Attributes:
        values: name → a note that has arrived and has not been read; without zeros.
        places: name → where the device writes its note.
    """

    #: The initial capacity, in names.
    _ROOM = 512

    def __init__(self, device: torch.device) -> None:
        self.values: dict[str, float] = {}
        self._index: dict[str, int] = {}
        self.places: dict[str, Tensor] = {}
        self._there = torch.zeros(self._ROOM, dtype=torch.float32, device=device)
        self._on_its_way: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def place(self, name: str) -> Tensor:
        found = self.places.get(name)
        if found is None:
            at = self._index.setdefault(name, len(self._index))
            if at >= self._there.numel():
                self._there = torch.cat((self._there, torch.zeros_like(self._there)))
                self.places.clear()
            found = self.places[name] = self._there[at : at + 1]
        return found

    def send(self) -> None:
        if self._on_its_way is not None or not self._index:
            return
        there = self._there[: len(self._index)]
        if there.is_cuda:
            self._on_its_way = torch.empty(there.shape, dtype=torch.float32, device="cpu", pin_memory=True)
            self._on_its_way.copy_(there, non_blocking=True)
            self._event = torch.cuda.current_stream(there.device).record_event()
        else:
            self._on_its_way = there.clone()
        there.zero_()

    def receive(self) -> None:
        if self._on_its_way is None or (self._event is not None and not self._event.query()):  # type: ignore[no-untyped-call]
            return
        arrived, self._on_its_way, self._event = self._on_its_way.tolist(), None, None
        self.values = {name: value for name, value in zip(self._index, arrived, strict=False) if value}


class Estimates:
    """Running estimates of a model's ranges, α and β by name, float32 (groups,) each; and the number of random draws.

    Any thread may use them. Codes of a batch are made with what :meth:`get` returns, the estimate of the batches
    before, if the batch moves it little enough; see :func:`~narrowband.activations.packed.quantized`.

    Args:
        decay: μ.
        seed: the seed of random draws, 32 bits.
    """

    def __init__(self, decay: float = 0.9, seed: int = 0) -> None:
        self.decay = decay
        self.seed = seed
        self.draws = 0
        #: A batch's width over that of its estimate, infinite for a batch with outliers; errors of attention scores.
        self.notes = Notes()
        #: Names of tensors that have no running range, and had no outliers when the host last looked.
        self.good: set[str] = set()
        self._ranges: dict[str, Tensor] = {}  # (2, groups): α, β
        self._numbers: dict[str, float] = {}  # those of _ranges that :meth:`see` stored
        self._lock = threading.Lock()

    def draw(self) -> int:
        """Return the next seed."""
        with self._lock:
            self.draws += 1
            return self.seed << 32 | self.draws

    def get(self, name: str, groups: int, device: torch.device) -> Tensor | None:
        """Return the estimate, (2, groups): α, β. None where there is none yet."""
        estimate = self._ranges.get(name)
        if estimate is None or estimate.shape[1] != groups:
            return None
        if estimate.device != device:
            moved = estimate.to(device)
            self.replace(name, estimate, moved)  # store the copy, since estimates are updated in place
            return moved
        return estimate

    def observe(self, name: str, low: Tensor, high: Tensor) -> Tensor:
        """Update the estimate with a batch's extremes, and return it. The first batch becomes the estimate."""
        with self._lock:
            estimate = self._ranges.get(name)
            if estimate is None or estimate.shape[1] != low.numel():  # there is none, or the grouping has changed
                learned = torch.stack((high - low, low))
            else:
                learned, _, _ = kernels.learn_ranges(estimate.to(low.device), low, high, self.decay)
            self._ranges[name] = learned
        return learned

    def forget(self, name: str) -> None:
        """Drop the estimate of a tensor."""
        with self._lock:
            self._ranges.pop(name, None)

    def replace(self, name: str, expected: Tensor, learned: Tensor) -> bool:
        """Replace the expected estimate by another one. Return False where the expected one is no longer there."""
        with self._lock:
            there = self._ranges.get(name) is expected
            if there:
                self._ranges[name] = learned
        return there

    def seen(self, name: str) -> float | None:
        """Return the number that :meth:`see` stored under a name; None where there is none."""
        with self._lock:
            found = self._numbers.get(name)
            if found is None and name in self._ranges:  # of a state that was loaded
                found = self._numbers[name] = float(self._ranges[name][0, 0])
        return found

    def see(self, name: str, value: float) -> None:
        """Store a number, at least 0, under a name that no range has. The state holds it as the width of a range."""
        most = torch.finfo(torch.float32).max
        number = torch.tensor([[value if value < most else most], [0.0]], dtype=torch.float32, device="cpu")
        with self._lock:
            self._ranges[name], self._numbers[name] = number, float(number[0, 0])

    def state_dict(self) -> dict[str, Tensor]:
        """Return name → (2, groups) float32: α, then β. These are copies, since estimates may be views."""
        with self._lock:
            return {name: value.clone() for name, value in self._ranges.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: this is not such a state.
        """
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{name}: expected a tensor of shape (2, groups), got {type(value).__name__}")
            if (
                value.dim() != 2
                or value.shape[0] != 2
                or not value.is_floating_point()
                or value.layout != torch.strided
            ):
                raise ValueError(
                    f"{name}: expected a float tensor of shape (2, groups), got {tuple(value.shape)} of {value.dtype}"
                )
            if not bool(torch.isfinite(value).all()) or bool((value[0] < 0).any()):
                raise ValueError(f"{name}: widths and lower ends of ranges must be finite, and widths at least 0")
        with self._lock:
            self._numbers.clear()
            self._ranges = {
                name: value.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
                for name, value in state.items()
            }


@functools.lru_cache(maxsize=1 << 6)
def drift(decay: float) -> float:
    """Return the share of its width by which an end of an estimate must move for a tensor to be quantized again.

    A batch moves an end by 1 − μ times what it exceeds the end by. So for a μ close to 1 the share is smaller.
    """
    return min(DRIFT, (WIDE - 1) * (1 - decay))
