"""Does compression pay: what a step takes on a link, before anything is trained.

``measure.py`` finds out, in one process, when backward has its buckets and how long codecs take with them;
``simulation.py`` plays a step through on any link, among any number of ranks; ``options.py`` says what there is to
choose from, and ``advice.py`` which of it to take. ``facts.py`` knows what it costs in loss.
"""

from __future__ import annotations

from narrowband.planning.links import Cluster, Host, Link
from narrowband.planning.measure import Measured, measure_codec, measure_step, optimizer_of
from narrowband.planning.options import DDP, Network, Option, Predicted, predict, way_of
from narrowband.planning.profile import Bucket, Codec, Line, Piece, Profile
from narrowband.planning.simulation import Arrival, Inside, Machine, Message, Outcome, Step, Transfer, simulate

__all__ = [
    "DDP",
    "Arrival",
    "Bucket",
    "Cluster",
    "Codec",
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
    "Step",
    "Transfer",
    "measure_codec",
    "measure_step",
    "optimizer_of",
    "predict",
    "simulate",
    "way_of",
]
