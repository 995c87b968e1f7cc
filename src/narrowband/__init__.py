"""narrowband trains PyTorch models over slow links and in little memory, by compressing what training sends and keeps.

Example:
    >>> import narrowband as nb
    >>> model = DistributedDataParallel(model)
    >>> handle = nb.compress_gradients(model, "qsgd:bits=4")
    >>> ...  # train as before
    >>> print(handle.stats().total.ratio)
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowband.activations import ActivationCompression, ActivationPolicy, compress_activations
    from narrowband.adapt import Accordion, Constant, GlobalTopK, HardThreshold, KMeans, LGreCo, Plan, Policy
    from narrowband.averaging import Averager
    from narrowband.codecs import Codec, codec, register_codec
    from narrowband.coded import CodedDataParallel, choose_redundancy
    from narrowband.errors import DisagreementError, PayloadError, UnsupportedError
    from narrowband.feedback import DGC, Compression, Feedback, PowerSGD, compression, register_feedback
    from narrowband.gradients import DGCSGD, GradientCompression, StepStats, compress_gradients, measure_times
    from narrowband.pipeline import Boundary, CompressedStage
    from narrowband.report import Recorder
    from narrowband.sharding import ShardCompression, ShardStats, compress_shards
    from narrowband.stats import Stats
    from narrowband.updates import ElasticUpdateCompression, Rendezvous, UpdateCompression, compress_updates

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

#: Where each name comes from. It is imported on first use, so that a command line that trains nothing does not wait for
#: PyTorch, and nobody for a part that is not used.
_HOMES = {
    "activations": ("ActivationCompression", "ActivationPolicy", "compress_activations"),
    "adapt": ("Accordion", "Constant", "GlobalTopK", "HardThreshold", "KMeans", "LGreCo", "Plan", "Policy"),
    "averaging": ("Averager",),
    "codecs": ("Codec", "codec", "register_codec"),
    "coded": ("CodedDataParallel", "choose_redundancy"),
    "errors": ("DisagreementError", "PayloadError", "UnsupportedError"),
    "feedback": ("DGC", "Compression", "Feedback", "PowerSGD", "compression", "register_feedback"),
    "gradients": ("DGCSGD", "GradientCompression", "StepStats", "compress_gradients", "measure_times"),
    "pipeline": ("Boundary", "CompressedStage"),
    "report": ("Recorder",),
    "sharding": ("ShardCompression", "ShardStats", "compress_shards"),
    "stats": ("Stats",),
    "updates": ("ElasticUpdateCompression", "Rendezvous", "UpdateCompression", "compress_updates"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name, or one of the rooms that have names here, on first use."""
    if name in _HOMES:
        return import_module(f"narrowband.{name}")
    if name not in _HOME_OF:
        wrong = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(wrong, name=name, obj=sys.modules[__name__])  # with these Python says which name is near
    value = getattr(import_module(f"narrowband.{_HOME_OF[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *__all__})
