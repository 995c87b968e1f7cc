"""Choose the compression of each layer while training runs.

A :class:`Policy` looks at gradients summed over a window of steps, and makes a :class:`Plan`: a spec for every layer.
"""

from __future__ import annotations

from narrowband.adapt.accordion import Accordion
from narrowband.adapt.kmeans import KMeans
from narrowband.adapt.lgreco import LGreCo
from narrowband.adapt.plan import LayerPlan, Plan
from narrowband.adapt.policy import Constant, GlobalTopK, HardThreshold, Policy, search_space
from narrowband.adapt.sensitivity import correlation, loss_table
from narrowband.adapt.tables import ErrorTable, error_table
from narrowband.adapt.timing import Times, bucket_priority, fit_times
from narrowband.adapt.traffic import Traffic

__all__ = [
    "Accordion",
    "Constant",
    "ErrorTable",
    "GlobalTopK",
    "HardThreshold",
    "KMeans",
    "LGreCo",
    "LayerPlan",
    "Plan",
    "Policy",
    "Times",
    "Traffic",
    "bucket_priority",
    "correlation",
    "error_table",
    "fit_times",
    "loss_table",
    "search_space",
]
