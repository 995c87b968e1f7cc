"""Exchanges through a process group, which works everywhere: a packet is sent to each rank that needs it."""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from narrowband.transport.contract import Transport, check_exchange

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch import Tensor

    from narrowband.transport.contract import Range, Wanted

__all__ = ["Broadcast"]


class Broadcast(Transport):
    """Exchanges over a process group of gloo or NCCL: each rank sends its ranges to the ranks that want them, one rank
    after the other.

    In step s of n − 1, rank i sends to rank i + s and receives from rank i − s. Beside the buffers, this takes the
    memory of what one pair exchanges in one step.

    If an exchange breaks off, as by Ctrl-C, ranks are at different places in it. So the group is destroyed: this closes
    its connections, which ends the exchange of ranks that wait for this one.

    Args:
        group: the ranks. Pass a group that nothing else uses; the default group is never destroyed.
        timeout: how long to wait for a rank; None: as long as the group was told when it was made.
    """

    name = "broadcast"

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        self._group: dist.ProcessGroup | None = group
        self._timeout = timeout
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank(group)
        if dist.get_backend(group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._asked: dict[tuple[tuple[Range, ...], ...], list[list[Range]]] = {}
        self._ended = ""  # why there are no more exchanges

    def exchange(self, outgoing: Tensor, incoming: Sequence[Tensor | None], wanted: Wanted) -> None:
        check_exchange(outgoing, incoming, wanted, self._rank, len(self._ranks))
        if self._group is None:
            raise RuntimeError(self._ended)
        try:
            self._exchange(outgoing, incoming, wanted, self._group)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the frames hold references to the group
            self._end()
            if isinstance(error, ValueError):  # PyTorch does not know the group
                raise RuntimeError(
                    f"the process group was destroyed on rank {self._rank}, and the broadcast transport sends through "
                    "it; destroy it after the last step"
                ) from error
            if isinstance(error, RuntimeError):
                raise RuntimeError(
                    f"the exchange broke off on rank {self._rank}: another rank has ended, was stopped, or did not "
                    f"answer in time ({error}); wrap the model again on all ranks, and go on from a checkpoint"
                ) from error
            raise

    def _exchange(
        self, outgoing: Tensor, incoming: Sequence[Tensor | None], wanted: Wanted, group: dist.ProcessGroup
    ) -> None:
        size, asked = len(self._ranks), self._what_others_want(wanted, group)
        for step in range(1, size):
            to, source = (self._rank + step) % size, (self._rank - step) % size
            buffer = incoming[source]
            assert buffer is not None
            sent = _gathered(outgoing, asked[to])
            received = _staging(buffer, wanted[source])
            operations = []
            if sent.numel():
                operations.append(dist.P2POp(dist.isend, sent, self._ranks[to], group))
            if received.numel():
                operations.append(dist.P2POp(dist.irecv, received, self._ranks[source], group))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                if self._timeout is None or self.device.type != "cpu":  # with NCCL, such a wait holds the CPU up
                    work.wait()
                else:  # the group may have been made with less, so that ranks connect in time
                    work.wait(self._timeout)
            _scatter(received, buffer, wanted[source])

    def wait_at_most(self, timeout: timedelta) -> None:
        """See :meth:`Transport.wait_at_most`."""
        self._timeout = timeout
        if self._group is not None:
            self._group.set_timeout(timeout)

    def close(self) -> None:
        self._asked.clear()
        self._group, self._ended = None, self._ended or "the broadcast transport is closed"

    def break_off(self) -> None:
        """See :meth:`Transport.break_off`."""
        if self._group is not None:
            self._end()

    def _end(self) -> None:
        """Let go of the group: when nobody holds it, gloo's connections are closed. NCCL looks after its own."""
        group, self._group = self._group, None
        self._ended = "an earlier exchange broke off, so there can be no other; wrap the model again on all ranks"
        if group is not None and group is not dist.group.WORLD and self.device.type == "cpu":
            with contextlib.suppress(RuntimeError, ValueError):  # somebody else has ended it
                dist.destroy_process_group(group)
                # PyTorch names groups by how many there are: the next one is not to find the addresses of this one.
                dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)

    def _what_others_want(self, wanted: Wanted, group: dist.ProcessGroup) -> list[list[Range]]:
        """Return for each rank the ranges of this rank's buffer that it wants; asked for once for every ``wanted``."""
        key = tuple(tuple(ranges) for ranges in wanted)
        if key not in self._asked:
            everybody: list[Wanted] = [()] * len(self._ranks)
            dist.all_gather_object(everybody, key, group=group)
            self._asked[key] = [list(theirs[self._rank]) for theirs in everybody]
        return self._asked[key]


def _gathered(buffer: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return the ranges of a buffer, concatenated; a view if there is only one range."""
    parts = [buffer[start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else buffer[:0]


def _staging(buffer: Tensor, ranges: Sequence[Range]) -> Tensor:
    """Return memory to receive the concatenated ranges: their place in the buffer if there is only one range."""
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
