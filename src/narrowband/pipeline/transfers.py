"""Sends and receives of a stage on the CPU that overlap with its computation.

gloo moves a message only when both ends have posted it. 1F1B posts what it needs next and waits for it, for its own
sends, too: links would idle while stages compute, and stages while links transfer. So a stage on the CPU sends and
receives by itself, and the schedule gets no operations from it. The stage posts receives before it needs the messages,
and waits for its sends at the end of the step. Each message has its own tag, so messages may arrive in any order.

The schedule sends and receives in two cases. On GPUs, waiting blocks a stream and not the process. And once schedules
with different numbers of micro-batches run a stage on the CPU, it cannot know how many messages the next step has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

__all__ = ["BACKWARD", "FORWARD", "Transfers"]

#: Directions: activations go forward, their gradients backward.
FORWARD, BACKWARD = 0, 1

#: For how many micro-batches receives are posted ahead of need: one that arrives during computation, and one more in
#: case a stage is late.
_AHEAD = 2


class Transfers:
    """The sends and receives that a stage has posted in a step.

    Args:
        stage: the index of the stage, from 0.
        stages: how many stages there are.
        device: the device of the stage.

    Attributes:
        numbers: the numbers of micro-batches per step of the schedules that run this stage.
    """

    def __init__(self, stage: int, stages: int, device: torch.device) -> None:
        self.numbers: set[int] = set()
        self._stage, self._boundaries, self._on_cpu = stage, stages - 1, device.type == "cpu"
        #: (direction, micro-batch) of the receives that have been posted.
        self._asked: set[tuple[int, int]] = set()
        #: By direction: sends that have not been waited for, one list for each micro-batch.
        self._leaving: tuple[list[list[tuple[dist.Work, Tensor]]], ...] = ([], [])
        self._backwards = 0

    @property
    def by_itself(self) -> bool:
        """Whether the stage sends and receives by itself, and not its schedule.

        For that, the stage must know how many micro-batches a step has. A schedule tells that number before its first
        step. Of several schedules, nothing tells which one runs a later step.
        """
        return self._on_cpu and len(self.numbers) == 1

    @property
    def takes_shorter(self) -> bool:
        """Whether a message may be shorter than the buffer that it is received into, as with gloo."""
        return self._on_cpu

    @property
    def _microbatches(self) -> int:
        """The number of micro-batches per step, where it is the same for all schedules."""
        (number,) = self.numbers
        return number

    def begin(self) -> None:
        """Begin a new step."""
        self._asked.clear()
        self._backwards = 0
        for leaving in self._leaving:
            leaving.clear()

    def send(self, ops: Sequence[dist.P2POp], direction: int, microbatch: int, *, training: bool) -> None:
        """Start to send a micro-batch's messages to a neighbour; the end of the step waits for them."""
        tag = self._tag(self._stage - direction, direction, microbatch)
        leaving = self._leaving[direction]
        leaving.append([(_started(dist.isend, op, tag, group_dst=op.group_peer), op.tensor) for op in ops])
        # In training, went_backward waits for activations, after the backward of the last micro-batch.
        if len(leaving) == self._microbatches and (direction == BACKWARD or not training):
            self._wait(direction)

    def went_backward(self) -> None:
        """Count the backward of a micro-batch. After the last one, activations have arrived: wait for their sends."""
        self._backwards += 1
        if self.by_itself and self._backwards == self._microbatches:
            self._wait(FORWARD)

    def _wait(self, direction: int) -> None:
        """Wait until all sends in a direction are complete."""
        for sent in self._leaving[direction]:
            for work, _ in sent:
                work.wait()
        self._leaving[direction].clear()

    def coming(self, direction: int, microbatch: int) -> list[int]:
        """Return the micro-batches to post receives for: this one and ``_AHEAD`` after it, unless they are posted."""
        last = min(microbatch + _AHEAD + 1, self._microbatches)
        found = [each for each in range(microbatch, last) if (direction, each) not in self._asked]
        self._asked.update((direction, each) for each in found)
        return found

    def receive(self, op: dist.P2POp, direction: int, microbatch: int) -> dist.Work:
        """Post a receive, and return the work to wait for before the message is used."""
        tag = self._tag(self._stage - 1 + direction, direction, microbatch)
        return _started(dist.irecv, op, tag, group_src=op.group_peer)

    def _tag(self, boundary: int, direction: int, microbatch: int) -> int:
        """Return the tag of a message, unique within a step. PyTorch's own messages have tag 0."""
        return 1 + 2 * (microbatch * self._boundaries + boundary) + direction


def _started(call: Callable[..., dist.Work | None], op: dist.P2POp, tag: int, **peer: int) -> dist.Work:
    """Start an operation without waiting for it."""
    work = call(op.tensor, group=op.group, tag=tag, **peer)
    assert work is not None  # None is for ranks outside of the group
    return work
