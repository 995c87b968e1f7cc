"""Place 1: what data parallelism sends."""

from __future__ import annotations

from narrowband.gradients.ddp import GradientCompression, compress_gradients
from narrowband.gradients.stats import Stats, StepStats

__all__ = ["GradientCompression", "Stats", "StepStats", "compress_gradients"]
