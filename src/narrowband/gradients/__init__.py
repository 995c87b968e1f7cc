"""Compress the gradients that data parallelism sends (the first of the library's places)."""

from __future__ import annotations

from narrowband.averaging.optim import DGCSGD
from narrowband.averaging.stats import LayerStats, StepStats
from narrowband.gradients.handle import GradientCompression
from narrowband.gradients.setup import compress_gradients
from narrowband.gradients.timing import measure_times

__all__ = ["DGCSGD", "GradientCompression", "LayerStats", "StepStats", "compress_gradients", "measure_times"]
