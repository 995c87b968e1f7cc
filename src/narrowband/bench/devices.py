"""The device of a benchmark's tensors: the CPU or a GPU."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["Device", "check_device", "default_device", "moved", "wait_for"]

#: The devices that users may choose.
Device = Literal["cpu", "cuda"]


def default_device() -> Device:
    """Return ``cuda`` if there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str | None) -> None:
    """Check that a device is available. None, the default, always is.

    Raises:
        ValueError: there is no such device, or no CUDA here.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device={device!r} is none of cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: PyTorch finds no CUDA device here; narrowband doctor says more")


def moved(x: Any, device: str | torch.device) -> Any:
    """Move tensors to a device, also those in tuples, lists and dictionaries. Return other values as they are."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, x)


def wait_for(device: str | torch.device) -> None:
    """Wait until a GPU has finished all its work; return at once for the CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
