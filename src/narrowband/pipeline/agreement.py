"""Checks before the first step that two neighbouring stages have the same configuration and the same sample buffers."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from narrowband.pipeline.pairs import ChannelPairs

__all__ = ["Neighbour", "agree"]


class Neighbour(NamedTuple):
    """A stage on another rank that is next to a stage on this rank.

    Attributes:
        own, other: the indices of this rank's stage and of the neighbouring one.
        rank: the global rank of the other stage.
        group: a process group that both ranks are in.
        device: the device of the tensors that the group exchanges.
    """

    own: int
    other: int
    rank: int
    group: ProcessGroup | None
    device: torch.device

    def exchange(self, message: bytes) -> bytes:
        """Send a message of any length, and return the one that the other stage sends."""
        if self.own < self.other:  # the lower stage sends first, so that the two do not wait for each other
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


def agree(
    neighbour: Neighbour, channels: ChannelPairs, *, compress_in_eval: bool, step: int, samples: Tensor | None = None
) -> None:
    """Check that both ends of a boundary have the same configuration, and drop sample buffers that only one end has.

    Args:
        neighbour: the stage at the other end.
        channels: the channels of this end.
        compress_in_eval, step: the values of the stage at this end.
        samples: the sample ids of the first batch, if it is a training batch and a channel needs them. Of ranks that
            shuffle differently, one would take a sample's buffer for that of another, and no length would tell.

    Raises:
        ValueError: the two ends differ.
    """
    own = json.dumps([*channels.identity(), compress_in_eval, step, None if samples is None else _shown(samples)])
    theirs = neighbour.exchange(own.encode()).decode()
    if theirs != own:
        raise ValueError(
            f"stages {neighbour.own} and {neighbour.other} do not agree on [forward, backward, configuration, "
            f"compress_in_eval, steps done, samples]: {own} here, {theirs} there. Give all stages the same arguments "
            "and the same samples in the same order, and load states that were saved at the same step"
        )
    for channel in channels:
        ids = channel.reference_ids()
        if ids is not None:
            there = np.frombuffer(bytearray(neighbour.exchange(ids.cpu().numpy().tobytes())), np.int64)
            channel.keep_only(ids[torch.isin(ids, torch.from_numpy(there))])


def _shown(samples: Tensor) -> str:
    ids = torch.as_tensor(samples, dtype=torch.int64, device="cpu").contiguous()
    return f"{', '.join(map(str, ids[:4].tolist()))}, … ({len(ids)} ids, checksum {zlib.crc32(ids.numpy().tobytes())})"
