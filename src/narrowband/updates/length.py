"""Measure the factor by which the mean of updates is lengthened (``outer="auto"``), from how noisy the updates are.

Adam, Muon and similar optimizers take steps whose size does not depend on the size of gradients. One optimizer that saw
the batches of all N replicas would take a step about as long as a single replica's. The mean of N updates is shorter:
their common part stays, and the part that differs, the noise of their batches, cancels partly. So replicas that move to
the mean of their parameters move too slowly, by a factor between 1 (no noise) and √N (nothing but noise).

That factor is measured, and the mean is multiplied by it::

    length = √( mean of ‖Δᵢ‖² / ‖mean of Δᵢ‖² ),    at most √N

The norms are taken over a sample of the elements, the same on all replicas. Replicas average the sample by an
all-reduce of a few kilobytes. Both squared norms are averaged over rounds. Compression does not affect the measurement:
the sample is taken from the updates before the codec and the residual. The length of a mean depends on N, so the
measurement starts over when the number of replicas changes.

A step of plain SGD is proportional to the gradient, so the mean of its updates has the right length already: 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

__all__ = ["Length", "MeasuredLength"]

#: Number of elements in the sample, over all parameters.
SAMPLE = 1024

#: The length is measured in each of the first ``FIRST`` rounds, and then in every ``EVERY``-th.
FIRST, EVERY = 10, 10

#: Decay of the running sums of squares at each measurement. Their ratio is all that counts, so they are not normalized.
_KEEPS = 0.8


class Length:
    """A length that stays as it is.

    Attributes:
        value: the length.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def begin(self, updates: Sequence[Tensor], *, share: float, size: int) -> Tensor | None:
        """Begin a round among ``size`` replicas.

        Returns:
            What this replica brings to :meth:`take` (see :meth:`MeasuredLength.sample`); None if the length is not
            measured in this round.
        """
        return None

    def take(self, part: Tensor, group: dist.ProcessGroup | None, size: int) -> None:
        """Add up the parts of all replicas, and update the length. A collective; all replicas get the same length."""
        raise TypeError("a length that stays as it is cannot be measured")


class MeasuredLength(Length):
    """The length of the outer step, measured as training goes on.

    Args:
        parts: for each flat tensor of updates, (first element, number of elements) of each parameter in it.
        seed: seed by which the sample is drawn; the same on all replicas.
        device: device of the tensors.

    Attributes:
        value: the current length; 1 before the first measurement.
        rounds: number of rounds that have begun since the number of replicas last changed.
    """

    def __init__(self, parts: Sequence[Sequence[tuple[int, int]]], seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)
        total = sum(numel for part in parts for _, numel in part)
        self._at = []
        for part in parts:
            begins = torch.tensor([begin for begin, _ in part], dtype=torch.int64, device="cpu")
            numels = torch.tensor([numel for _, numel in part], dtype=torch.int64, device="cpu")
            own = int(numels.sum())
            numel = -(-SAMPLE * own // max(1, total))  # a rank's shards may all be empty
            place = torch.randint(max(1, own), (numel,), generator=generator, device="cpu")
            ends = numels.cumsum(0)
            which = torch.searchsorted(ends, place, right=True)
            self._at.append((begins[which] + place - (ends - numels)[which]).to(device))
        self._own = 0.0
        self._mean = 0.0
        self._size = 0  # number of replicas that the measurements are of; 0: none yet
        super().__init__(1.0)
        self.rounds = 0

    def begin(self, updates: Sequence[Tensor], *, share: float, size: int) -> Tensor | None:
        if size != self._size:
            self._own = self._mean = 0.0
            self._size, self.rounds = size, 0
            self.value = min(self.value, math.sqrt(size))
        due = self.rounds < FIRST or self.rounds % EVERY == 0
        self.rounds += 1
        return self.sample(updates, share=share) if due else None

    @property
    def nbytes(self) -> int:
        """Bytes of the all-reduce of one measurement."""
        return 4 * (sum(at.numel() for at in self._at) + 2)

    def sample(self, updates: Sequence[Tensor], *, share: float) -> Tensor:
        """Return this replica's input to the all-reduce: the sampled elements, their sum of squares, and 1 if the
        replica contributes an update, else 0.

        Args:
            updates: the flat tensors.
            share: the weight by which the updates were scaled, on average 1 over replicas; 0 if this replica
                contributes no update. The squares are weighted by ``share``, as the elements are.
        """
        there = torch.cat([x.index_select(0, at).float() for x, at in zip(updates, self._at, strict=True)])
        squares = there.square().sum()[None] / (share or 1.0)
        return torch.cat([there, squares, there.new_full((1,), float(share > 0))])

    def take(self, part: Tensor, group: dist.ProcessGroup | None, size: int) -> None:
        dist.all_reduce(part, group=group)
        *there, own, brought = part.double().tolist()
        if round(brought) < size or not math.isfinite(own):
            return  # some replica contributed no update, so the sums are incomplete
        self._own = _KEEPS * self._own + own / size
        self._mean = _KEEPS * self._mean + sum(x * x for x in there) / size**2
        if self._mean > 0:
            self.value = min(math.sqrt(size), max(1.0, math.sqrt(self._own / self._mean)))

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs to continue with the same lengths."""
        return {"own": self._own, "mean": self._mean, "value": self.value, "rounds": self.rounds, "size": self._size}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume from a :meth:`state_dict`."""
        self._own, self._mean, self.value = state["own"], state["mean"], state["value"]
        self.rounds, self._size = int(state["rounds"]), int(state.get("size", 0))  # states of earlier versions lack it
