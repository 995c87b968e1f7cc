"""Place 1: what data parallelism sends."""

from __future__ import annotations

from narrowband.gradients.ddp import GradientCompression, compress_gradients
from narrowband.gradients.optim import DGCSGD
from narrowband.gradients.stats import Stats, StepStats

__all__ = ["DGCSGD", "GradientCompression", "Stats", "StepStats", "compress_gradients"]
