"""narrowband trains PyTorch models over slow links and in little memory, by compressing what training sends and keeps.

Example:
    >>> import narrowband as nb
    >>> model = DistributedDataParallel(model)
    >>> handle = nb.compress_gradients(model, "qsgd:bits=4")
    >>> ...  # train as before
    >>> print(handle.stats().total.ratio)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from narrowband.activations import ActivationCompression, ActivationPolicy, compress_activations
from narrowband.adapt import Accordion, Constant, GlobalTopK, HardThreshold, KMeans, LGreCo, Plan, Policy
from narrowband.averaging import Averager
from narrowband.codecs import Codec, codec, register_codec
from narrowband.coded import CodedDataParallel, choose_redundancy
from narrowband.errors import DisagreementError, PayloadError, UnsupportedError
from narrowband.feedback import DGC, Compression, Feedback, PowerSGD, compression, register_feedback
from narrowband.gradients import DGCSGD, GradientCompression, StepStats, compress_gradients, measure_times
from narrowband.pipeline import Boundary
from narrowband.sharding import ShardCompression, ShardStats, compress_shards
from narrowband.stats import Stats
from narrowband.updates import ElasticUpdateCompression, Rendezvous, UpdateCompression, compress_updates

if TYPE_CHECKING:
    from narrowband.pipeline import CompressedStage
    from narrowband.report import Recorder

__version__ = "0.1.0"

__all__ = [
    "DGC",
    "DGCSGD",
    "Accordion",
    "ActivationCompression",
    "ActivationPolicy",
    "Averager",
    "Boundary",
    "Codec",
    "CodedDataParallel",
    "CompressedStage",
    "Compression",
    "Constant",
    "DisagreementError",
    "ElasticUpdateCompression",
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
    "Recorder",
    "Rendezvous",
    "ShardCompression",
    "ShardStats",
    "Stats",
    "StepStats",
    "UnsupportedError",
    "UpdateCompression",
    "__version__",
    "choose_redundancy",
    "codec",
    "compress_activations",
    "compress_gradients",
    "compress_shards",
    "compress_updates",
    "compression",
    "measure_times",
    "register_codec",
    "register_feedback",
]


def __getattr__(name: str) -> Any:
    """Import a name on first use, because PyTorch's pipeline engine takes seconds to import."""
    if name == "CompressedStage":
        from narrowband.pipeline import CompressedStage

        return CompressedStage
    if name == "Recorder":
        from narrowband.report import Recorder

        return Recorder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
