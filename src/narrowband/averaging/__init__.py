"""The core of averaging: compressed averages of tensors over all ranks, step by step, whatever the tensors are for."""

from __future__ import annotations

from narrowband.averaging.averager import Averager
from narrowband.averaging.stats import LayerStats, StepStats

__all__ = ["Averager", "LayerStats", "StepStats"]
