"""Feedback: keep what a codec loses, and make up for it in later steps.

A spec string names the feedback behind the codec, after a ``+``:

- ``ef``: error feedback; the part of a gradient that was not sent is added to the next gradient.
- ``ef-mixed``: the same, but half of the elements that ``topk`` sends are chosen by the residual.
- ``ef21``: sends the change of the gradient; there is no residual.
- ``aq-sgd``: for activations; sends how each sample has changed since its last visit.

``dgc`` and ``powersgd`` are methods: they bring their own codec, and stand alone in a spec string.

A feedback keeps state per key (a parameter's name). It is called twice for each tensor and step. First,
:meth:`Feedback.encode` makes the payload. Later, if the step is known to be good on every rank, :meth:`Feedback.commit`
takes the payload into the state; otherwise, :meth:`Feedback.roll_back` restores the state from before the step, to the
bit. In a good step, every receiver calls :meth:`Feedback.deliver` with the decoded mean.

``aq-sgd`` and ``powersgd`` derive from :class:`State`, but not from :class:`Feedback`. ``aq-sgd`` is for activations
between the stages of a pipeline, and keeps a row per sample (:class:`SampleStore`). The collectives of ``powersgd``
encode by themselves.
"""

from __future__ import annotations

from narrowband.feedback.aqsgd import AQSGD
from narrowband.feedback.base import Feedback, Layout, SampleState, State
from narrowband.feedback.dgc import DGC
from narrowband.feedback.ef import ErrorFeedback
from narrowband.feedback.ef21 import EF21
from narrowband.feedback.mixed import MixedFeedback
from narrowband.feedback.powersgd import PowerSGD
from narrowband.feedback.spec import Compression, Method, available, compression, methods, register_feedback
from narrowband.feedback.store import SampleStore

__all__ = [
    "AQSGD",
    "DGC",
    "EF21",
    "Compression",
    "ErrorFeedback",
    "Feedback",
    "Layout",
    "Method",
    "MixedFeedback",
    "PowerSGD",
    "SampleState",
    "SampleStore",
    "State",
    "available",
    "compression",
    "methods",
    "register_feedback",
]
