"""Predict, before any training, how long a step takes on a given link, and so whether compression pays.

``measure.py`` measures, in one process, when backward completes each bucket and how long codecs take with it.
``host.py`` and ``network.py`` measure what messages cost on this machine, and between machines. ``simulation.py``
simulates a step on any link, among any number of ranks. ``options.py`` and ``choices.py`` list the ways to train, and
``advice.py`` recommends one. ``facts.py`` has the measured effect of each on the loss.
"""

from __future__ import annotations

from narrowband.planning.advice import LOSS_TOLERANCE, Advice, Row, advise, call_of, outer_of
from narrowband.planning.choices import DEFAULT_CODECS, measured, options, plan_of
from narrowband.planning.facts import Fact, facts, known
from narrowband.planning.host import measure_host
from narrowband.planning.links import Cluster, Host, Link
from narrowband.planning.measure import Measured, measure_codec, measure_step, optimizer_of
from narrowband.planning.options import DDP, Network, Option, Predicted, predict, way_of
from narrowband.planning.profile import Bucket, Codec, Line, Piece, Profile, Share, Trained
from narrowband.planning.simulation import Arrival, Inside, Machine, Message, Outcome, Step, Transfer, simulate

__all__ = [
    "DDP",
    "DEFAULT_CODECS",
    "LOSS_TOLERANCE",
    "Advice",
    "Arrival",
    "Bucket",
    "Cluster",
    "Codec",
    "Fact",
    "Host",
    "Inside",
    "Line",
    "Link",
    "Machine",
    "Measured",
    "Message",
    "Network",
    "Option",
    "Outcome",
    "Piece",
    "Predicted",
    "Profile",
    "Row",
    "Share",
    "Step",
    "Trained",
    "Transfer",
    "advise",
    "call_of",
    "facts",
    "known",
    "measure_codec",
    "measure_host",
    "measure_step",
    "measured",
    "optimizer_of",
    "options",
    "outer_of",
    "plan_of",
    "predict",
    "simulate",
    "way_of",
]
