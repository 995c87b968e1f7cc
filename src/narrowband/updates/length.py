"""How far to go along a mean of updates, by how much of the updates is noise.

Adam, Muon and their kin take steps whose size does not depend on the size of gradients. One optimizer that saw the
batches of all N replicas would take a step about as long as a replica's own. The mean of N updates is shorter: what
they have in common stays, and what differs, the noise of their batches, cancels in part. So replicas that go to the
mean of their parameters go too slowly, by a factor between 1 (no noise) and √N (nothing but noise).

That factor can be measured, and the mean is made longer by it::

    length = √( mean of ‖Δᵢ‖² / ‖mean of Δᵢ‖² ),    at most √N

The norms are those of a sample of the elements, the same on all replicas, whose mean they find by an all-reduce of a
few kilobytes; both squares are averaged over rounds. Compression plays no part in it: the sample is of updates as they
were, before a codec and its residual. How long a mean is depends on N, so a round among another number of replicas
measures anew.

The step of plain SGD is proportional to the gradient, so its mean is as long as it should be: length 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

__all__ = ["MeasuredLength"]

#: Elements that are looked at, of all parameters.
SAMPLE = 1024

#: Measured in the first rounds, and then once in so many.
FIRST, EVERY = 10, 10

#: What is left of an average of squares when a new one comes.
_KEEPS = 0.8


class MeasuredLength:
    """The length of the outer step, measured as training goes on.

    Args:
        parts: for each flat tensor with updates, where those of parameters begin in it, and how long they are.
        seed: of the sample; the same on all replicas.
        device: where the tensors are.

    Attributes:
        value: the length for this round and the next; 1 before the first.
        rounds: how many have begun among as many replicas.
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
        self._size = 0  # of no measurement yet
        self.value = 1.0
        self.rounds = 0

    def begins(self, size: int) -> bool:
        """A round begins among so many replicas: whether it is measured in this one."""
        if size != self._size:
            self._own = self._mean = 0.0
            self._size, self.rounds = size, 0
            self.value = min(self.value, math.sqrt(size))
        due = self.rounds < FIRST or self.rounds % EVERY == 0
        self.rounds += 1
        return due

    @property
    def nbytes(self) -> int:
        """Bytes that are added up over replicas when it is measured."""
        return 4 * (sum(at.numel() for at in self._at) + 2)

    def sample(self, updates: Sequence[Tensor], *, share: float) -> Tensor:
        """This replica's part: the elements of its sample, their sum of squares, and whether it brings an update.

        Args:
            updates: the flat tensors.
            share: what they were scaled by where replicas count differently, on average 1; 0 of a replica that brings
                none. A square counts by the share, as an element does.
        """
        there = torch.cat([x.index_select(0, at).float() for x, at in zip(updates, self._at, strict=True)])
        squares = there.square().sum()[None] / (share or 1.0)
        return torch.cat([there, squares, there.new_full((1,), float(share > 0))])

    def take(self, part: Tensor, group: dist.ProcessGroup | None, size: int) -> None:
        """Add the parts of all replicas up, and measure. A collective; all replicas come to the same length."""
        dist.all_reduce(part, group=group)
        *there, own, brought = part.double().tolist()
        if round(brought) < size or not math.isfinite(own):
            return  # the sum would lack a part
        self._own = _KEEPS * self._own + own / size
        self._mean = _KEEPS * self._mean + sum(x * x for x in there) / size**2
        if self._mean > 0:
            self.value = min(math.sqrt(size), max(1.0, math.sqrt(self._own / self._mean)))

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs to go on with the same lengths."""
        return {"own": self._own, "mean": self._mean, "value": self.value, "rounds": self.rounds, "size": self._size}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self._own, self._mean, self.value = state["own"], state["mean"], state["value"]
        self.rounds, self._size = int(state["rounds"]), int(state.get("size", 0))  # earlier states do not say it
