"""Messages of a stage on the CPU that travel while it computes.

gloo moves a message when both ends have asked for it, and 1F1B asks for what it needs next and waits, for its own
sends, too: links would idle while stages compute, and stages while links work. So a stage sends and receives by itself,
and schedules are told that there is nothing to do. It asks for the next messages before it needs them, and waits for
its sends when the step ends. Each message has a tag of its own, so their order is free. On GPUs waiting holds up a
stream and not the process, and schedules do it all. So they do on the CPU once schedules with different numbers of
micro-batches run a stage, which then cannot know how many messages the next step has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

__all__ = ["AHEAD", "BACKWARD", "FORWARD", "Transfers"]

#: Directions: of activations, and of their gradients.
FORWARD, BACKWARD = 0, 1

#: How many micro-batches are asked for before they are needed: one to arrive while one is computed with, and one more
#: for when a stage is late.
AHEAD = 2


class Transfers:
    """What a stage has sent and asked for in a step.

    Args:
        stage: which one, from 0.
        stages: how many there are.
        device: where it runs.

    Attributes:
        numbers: how many micro-batches a step of each schedule has that runs this stage.
    """

    def __init__(self, stage: int, stages: int, device: torch.device) -> None:
        self.numbers: set[int] = set()
        self._stage, self._boundaries, self._on_cpu = stage, stages - 1, device.type == "cpu"
        #: By direction and micro-batch.
        self._asked: set[tuple[int, int]] = set()
        #: By direction: what was sent and has not been waited for, a list for each micro-batch.
        self._leaving: tuple[list[list[tuple[dist.Work, Tensor]]], ...] = ([], [])
        self._backwards = 0

    @property
    def by_itself(self) -> bool:
        """Whether the stage sends and receives, and not its schedule.

        For that it has to know how many micro-batches a step has. A schedule says so before its first step, and never
        says which of several schedules runs a later one.
        """
        return self._on_cpu and len(self.numbers) == 1

    @property
    def _microbatches(self) -> int:
        """How many a step has, where all schedules agree on it."""
        (number,) = self.numbers
        return number

    def begin(self) -> None:
        """A new step begins."""
        self._asked.clear()
        self._backwards = 0
        for leaving in self._leaving:
            leaving.clear()

    def send(self, ops: Sequence[dist.P2POp], direction: int, microbatch: int, *, training: bool) -> None:
        """Send what a micro-batch has for a neighbour; it is waited for when the step ends."""
        tag = self._tag(self._stage - direction, direction, microbatch)
        leaving = self._leaving[direction]
        leaving.append([(_started(dist.isend, op, tag, group_dst=op.group_peer), op.tensor) for op in ops])
        # Of a step in training, activations are waited for when the last gradient has come back.
        if len(leaving) == self._microbatches and (direction == BACKWARD or not training):
            self._wait(direction)

    def went_backward(self) -> None:
        """A micro-batch has: after the last one, activations have long arrived."""
        self._backwards += 1
        if self.by_itself and self._backwards == self._microbatches:
            self._wait(FORWARD)

    def _wait(self, direction: int) -> None:
        """Until what was sent has arrived."""
        for sent in self._leaving[direction]:
            for work, _ in sent:
                work.wait()
        self._leaving[direction].clear()

    def coming(self, direction: int, microbatch: int, ahead: int) -> list[int]:
        """The micro-batches that are to be asked for now: this one and so many after it, if they were not before."""
        last = min(microbatch + ahead + 1, self._microbatches)
        found = [each for each in range(microbatch, last) if (direction, each) not in self._asked]
        self._asked.update((direction, each) for each in found)
        return found

    def receive(self, op: dist.P2POp, direction: int, microbatch: int) -> dist.Work:
        """Ask for a message; what to wait for before it is used."""
        tag = self._tag(self._stage - 1 + direction, direction, microbatch)
        return _started(dist.irecv, op, tag, group_src=op.group_peer)

    def _tag(self, boundary: int, direction: int, microbatch: int) -> int:
        """Of a message: no other one of a step has it. PyTorch's own have 0."""
        return 1 + 2 * (microbatch * self._boundaries + boundary) + direction


def _started(call: Callable[..., dist.Work | None], op: dist.P2POp, tag: int, **peer: int) -> dist.Work:
    """An operation that goes on while others begin."""
    work = call(op.tensor, group=op.group, tag=tag, **peer)
    assert work is not None  # it would be of a rank that is not in the group
    return work
