"""The core of averaging: one step over all ranks, compressed, whatever made the tensors and whatever they are for."""

from __future__ import annotations

from narrowband.averaging.averager import Averager
from narrowband.averaging.stats import LayerStats, StepStats

__all__ = ["Averager", "LayerStats", "StepStats"]
