"""What two neighbouring stages tell each other before the first step: what they were set up with, and their samples."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from narrowband.pipeline.pairs import ChannelPairs

__all__ = ["Neighbour", "agree"]


class Neighbour(NamedTuple):
    """A stage that another rank has, beside one of this rank's.

    Attributes:
        own, other: which stages these are.
        rank: of the other; global.
        group: both ranks are in it.
        device: where the group's tensors are.
    """

    own: int
    other: int
    rank: int
    group: ProcessGroup | None
    device: torch.device

    def exchange(self, message: bytes) -> bytes:
        """Send a message of any length, and receive the other's."""
        if self.own < self.other:  # one of the two sends first
            self._send(message)
            return self._receive()
        theirs = self._receive()
        self._send(message)
        return theirs

    def _send(self, message: bytes) -> None:
        length = torch.tensor([len(message)], dtype=torch.int64, device=self.device)
        dist.send(length, dst=self.rank, group=self.group)
        if message:
            body = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self.device)
            dist.send(body, dst=self.rank, group=self.group)

    def _receive(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        dist.recv(length, src=self.rank, group=self.group)
        body = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if body.numel():
            dist.recv(body, src=self.rank, group=self.group)
        return body.cpu().numpy().tobytes()


def agree(neighbour: Neighbour, channels: ChannelPairs, *, compress_in_eval: bool, step: int) -> None:
    """Compare what both ends of a boundary were told, and go on with the samples that both hold.

    Args:
        neighbour: at the other end.
        channels: of this end.
        compress_in_eval, step: of the stage at this end.

    Raises:
        ValueError: the ends differ.
    """
    own = json.dumps([*channels.identity(), compress_in_eval, step])
    theirs = neighbour.exchange(own.encode()).decode()
    if theirs != own:
        raise ValueError(
            f"stages {neighbour.own} and {neighbour.other} do not agree on [forward, backward, configuration, "
            f"compress_in_eval, steps done]: {own} here, {theirs} there. Give all stages the same, and states of one "
            "step"
        )
    for channel in channels:
        ids = channel.reference_ids()
        if ids is not None:
            there = np.frombuffer(bytearray(neighbour.exchange(ids.cpu().numpy().tobytes())), np.int64)
            channel.keep_only(ids[torch.isin(ids, torch.from_numpy(there))])
