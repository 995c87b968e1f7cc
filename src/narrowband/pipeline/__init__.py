"""The second place where compression is used: between the stages of a model that is split over machines.

===================  ===============================================================================
:mod:`.stage`        a stage of PyTorch's pipeline engine that sends and receives payloads
:mod:`.transfers`    what it sends and receives while it computes
:mod:`.boundary`     the same between two layers of one process
:mod:`.pairs`        the channels of a boundary
:mod:`.channel`      one tensor in one direction: order, warm-up, statistics, state
:mod:`.carriers`     how tensors travel: alone, compensated, by sample, at places of the other direction
:mod:`.agreement`    what neighbouring stages tell each other before the first step
:mod:`.warmup`       compiles the loops that a boundary needs, at set-up
===================  ===============================================================================
"""

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
