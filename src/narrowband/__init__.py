"""narrowband trains PyTorch models over slow links and in little memory, by compressing what training sends and keeps.

Example:
    >>> import narrowband as nb
    >>> handle = nb.compress_gradients(DDP(model), "topk:density=0.01+ef")
    >>> ...  # train as before
    >>> print(handle.stats().total.ratio)
"""

from __future__ import annotations

from narrowband.adapt import Accordion, GlobalTopK, HardThreshold, KMeans, LGreCo, Plan, Policy, Uniform
from narrowband.codecs import Codec, codec
from narrowband.errors import PayloadError, UnsupportedError
from narrowband.feedback import DGC, Compression, Feedback, PowerSGD, compression
from narrowband.gradients import DGCSGD, GradientCompression, Stats, StepStats, compress_gradients, measure_times

__version__ = "0.1.0"

__all__ = [
    "DGC",
    "DGCSGD",
    "Accordion",
    "Codec",
    "Compression",
    "Feedback",
    "GlobalTopK",
    "GradientCompression",
    "HardThreshold",
    "KMeans",
    "LGreCo",
    "PayloadError",
    "Plan",
    "Policy",
    "PowerSGD",
    "Stats",
    "StepStats",
    "Uniform",
    "UnsupportedError",
    "__version__",
    "codec",
    "compress_gradients",
    "compression",
    "measure_times",
]
