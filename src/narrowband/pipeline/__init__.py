"""Compression of pipeline parallelism: activations and gradients between the stages of a model split over machines.

======================  ===============================================================================
:mod:`.stage`           a stage of PyTorch's pipeline engine that sends and receives payloads
:mod:`.averaged_stage`  a stage whose gradients are averaged once per step
:mod:`.transfers`       on the CPU: sends and receives of a stage that overlap with its computation
:mod:`.boundary`        a boundary simulated between two layers of one process
:mod:`.pairs`           the channels of a boundary, two for each tensor
:mod:`.channel`         one tensor in one direction: order, warm-up, statistics, state
:mod:`.carriers`        how tensors travel: without feedback, with it, by sample, at the other direction's indices
:mod:`.agreement`       checks before the first step that neighbouring stages have the same configuration
:mod:`.warmup`          compiles at set-up the loops that a boundary needs
======================  ===============================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from narrowband.pipeline.boundary import Boundary
from narrowband.pipeline.channel import At, Channel, ChannelStats

if TYPE_CHECKING:
    from narrowband.pipeline.stage import CompressedStage

__all__ = ["At", "Boundary", "Channel", "ChannelStats", "CompressedStage"]


def __getattr__(name: str) -> Any:
    """Import :class:`CompressedStage` on first use: PyTorch's pipeline engine takes seconds to import."""
    if name == "CompressedStage":
        from narrowband.pipeline.stage import CompressedStage

        return CompressedStage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
