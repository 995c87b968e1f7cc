"""What compression lost, kept for later.

Behind a codec, after a ``+``, stands ``ef``: what was left out is added to the next gradient; ``ef-mixed``: the same,
and half of what ``topk`` keeps is chosen by the residual; ``ef21``: what is sent is the change of the gradient, and
there is no residual; or ``aq-sgd``, for activations: what is sent is the change of each sample. ``dgc`` and
``powersgd`` are methods, which bring their codec along.

A feedback holds state per key (a parameter's name). For each tensor and step it is called twice:
:meth:`Feedback.encode` when the tensor is to be sent, then, when the step is known to be good on every rank,
:meth:`Feedback.commit` with the payload that went out, or else :meth:`Feedback.roll_back`, which leaves the state as it
was, to the bit. Whoever receives calls :meth:`Feedback.deliver` in a good step, with what was decoded.

``aq-sgd`` and ``powersgd`` are no feedbacks in that sense. The first is for activations between the stages of a
pipeline: it keeps rows per sample (:class:`SampleStore`), and no gradient belongs to a sample.
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
