"""Where a benchmark's tensors live: on the CPU or on a GPU."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["Device", "check_device", "default_device", "moved", "wait_for"]

#: What users may ask for.
Device = Literal["cpu", "cuda"]


def default_device() -> Device:
    """CUDA where there is any."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: str | None) -> None:
    """Refuse a device that is not here; None, the default, always is.

    Raises:
        ValueError: it is none, or there is no CUDA here.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device={device!r} is none of cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: PyTorch finds no CUDA device here; narrowband doctor says more")


def moved(x: Any, device: str | torch.device) -> Any:
    """A tensor, on a device, and so are those in tuples, lists and dictionaries; anything else as it is."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, x)


def wait_for(device: str | torch.device) -> None:
    """Return when a GPU has done all it was told; at once for the CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
