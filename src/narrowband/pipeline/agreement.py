"""Bytes between two neighbouring stages, before the first step: each learns what the other was told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["exchange_bytes"]


def exchange_bytes(
    message: bytes, peer: int, group: ProcessGroup | None, device: torch.device, *, sends_first: bool
) -> bytes:
    """Send a message, and receive the peer's; one of the two sends first.

    Args:
        message: of any length.
        peer: global rank.
        group: both are in it.
        device: where the group's tensors are.
        sends_first: whether this rank does.
    """
    if sends_first:
        _send(message, peer, group, device)
        return _receive(peer, group, device)
    theirs = _receive(peer, group, device)
    _send(message, peer, group, device)
    return theirs


def _send(message: bytes, peer: int, group: ProcessGroup | None, device: torch.device) -> None:
    dist.send(torch.tensor([len(message)], dtype=torch.int64, device=device), dst=peer, group=group)
    if message:
        dist.send(torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device), dst=peer, group=group)


def _receive(peer: int, group: ProcessGroup | None, device: torch.device) -> bytes:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, src=peer, group=group)
    body = torch.empty(int(length), dtype=torch.uint8, device=device)
    if body.numel():
        dist.recv(body, src=peer, group=group)
    return body.cpu().numpy().tobytes()
