"""Exchanges through a process group, which work everywhere: a packet is sent to each rank that needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from narrowband.transport.contract import Transport, check_exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.transport.contract import Range, Wanted

__all__ = ["Broadcast"]


class Broadcast(Transport):
    """Over the process group, gloo or NCCL: each rank's ranges go to the ranks that want them, one after the other.

    In step s of n − 1, rank i sends to rank i + s and receives from rank i − s. Memory beside the buffers is what one
    pair exchanges in one step; time is bounded by the time-out of the group.

    Args:
        group: the ranks; best one of its own, so that nothing comes between.
    """

    name = "broadcast"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank(group)
        if dist.get_backend(group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._asked: dict[tuple[tuple[Range, ...], ...], list[list[Range]]] = {}

    def exchange(self, outgoing: Tensor, incoming: Sequence[Tensor | None], wanted: Wanted) -> None:
        size = len(self._ranks)
        check_exchange(outgoing, incoming, wanted, self._rank, size)
        asked = self._what_others_want(wanted)
        for step in range(1, size):
            to, source = (self._rank + step) % size, (self._rank - step) % size
            buffer = incoming[source]
            assert buffer is not None
            sent = _gathered(outgoing, asked[to])
            received = _staging(buffer, wanted[source])
            operations = []
            if sent.numel():
                operations.append(dist.P2POp(dist.isend, sent, self._ranks[to], self._group))
            if received.numel():
                operations.append(dist.P2POp(dist.irecv, received, self._ranks[source], self._group))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            _scatter(received, buffer, wanted[source])

    def close(self) -> None:
        self._asked.clear()

    def _what_others_want(self, wanted: Wanted) -> list[list[Range]]:
        """Of this rank's buffer, by rank: told once for every plan."""
        key = tuple(tuple(ranges) for ranges in wanted)
        if key not in self._asked:
            everybody: list[Wanted] = [()] * len(self._ranks)
            dist.all_gather_object(everybody, key, group=self._group)
            self._asked[key] = [list(theirs[self._rank]) for theirs in everybody]
        return self._asked[key]


def _gathered(buffer: Tensor, ranges: Sequence[Range]) -> Tensor:
    """The ranges, one after the other: a view where they are one."""
    parts = [buffer[start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else buffer[:0]


def _staging(buffer: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Where the ranges arrive one after the other: in their place where they are one."""
    if len(ranges) == 1:
        return buffer[slice(*ranges[0])]
    return buffer.new_empty(sum(stop - start for start, stop in ranges))


def _scatter(received: Tensor, buffer: Tensor, ranges: Sequence[Range]) -> None:
    if len(ranges) == 1:
        return
    at = 0
    for start, stop in ranges:
        buffer[start:stop] = received[at : at + stop - start]
        at += stop - start
