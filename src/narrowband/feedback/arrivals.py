"""What was delivered of payloads, for feedback that keeps the rest.

Most collectives deliver all that is sent. ``sparse_reduce`` delivers the largest sums only.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from narrowband import kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.kernels import Shared

__all__ = ["Arrivals"]


class Arrivals(NamedTuple):
    """The elements of some tensors that this rank sent and that were delivered.

    Attributes:
        tensors: where the elements of each tensor are in the tables.
        local: int32 (ranks, width): the elements that each owner got of this rank, as
            :func:`narrowband.kernels.split_shares_all` writes them.
        values: float32 of the same shape: their values; zero where an element was not delivered.
    """

    tensors: Sequence[Shared]
    local: Tensor
    values: Tensor

    def of(self, chosen: Sequence[int]) -> Arrivals:
        """Return those of some of the tensors."""
        return self._replace(tensors=[self.tensors[at] for at in chosen])

    def subtract_from(self, outs: Sequence[Tensor]) -> None:
        """Subtract what was delivered from flat float32 tensors, one for each. The host does not wait."""
        kernels.add_shares_all(outs, self.tensors, self.local, self.values, -1.0)

    def elements(self) -> list[tuple[Tensor, Tensor]]:
        """Return what was delivered of each tensor: indices (int32, ascending) and values. The host waits once."""
        there = self.values != 0.0
        before = torch.nn.functional.pad(there.sum(0).cumsum(0), (1, 0))
        ends = [end for tensor in self.tensors for end in (tensor.columns.start, tensor.columns.stop)]
        counts = before.index_select(0, torch.tensor(ends, dtype=torch.int64, device=before.device)).tolist()
        numbers = [end - begin for begin, end in pairwise(counts)][::2]
        found = []
        for tensor, number in zip(self.tensors, numbers, strict=True):
            mine = there[:, tensor.columns]
            whole = kernels.from_share(self.local[:, tensor.columns] - tensor.first, turn=tensor.turn)
            at, order = whole.masked_fill_(~mine, 2**31 - 1).view(-1).sort()
            found.append((at[:number], self.values[:, tensor.columns].reshape(-1)[order[:number]]))
        return found
