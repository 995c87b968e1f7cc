"""The second place where compression is used: between the stages of a model that is split over machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from narrowband.pipeline.boundary import Boundary
from narrowband.pipeline.channel import At, Channel, ChannelStats

if TYPE_CHECKING:
    from narrowband.pipeline.stage import CompressedStage

__all__ = ["At", "Boundary", "Channel", "ChannelStats", "CompressedStage"]


def __getattr__(name: str) -> Any:
    """PyTorch's pipeline engine takes seconds to import: only who uses it waits for it."""
    if name == "CompressedStage":
        from narrowband.pipeline.stage import CompressedStage

        return CompressedStage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
