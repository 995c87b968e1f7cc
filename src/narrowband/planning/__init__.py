"""Does compression pay: what a step takes on a link, before anything is trained.

``measure.py`` finds out, in one process, when backward has its buckets and how long codecs take with them;
``simulation.py`` plays a step through on any link, among any number of ranks; ``options.py`` says what there is to
choose from, and ``advice.py`` which of it to take. ``facts.py`` knows what it costs in loss.
"""

from __future__ import annotations

from narrowband.planning.simulation import Arrival, Inside, Machine, Message, Outcome, Step, Transfer, simulate

__all__ = ["Arrival", "Inside", "Machine", "Message", "Outcome", "Step", "Transfer", "simulate"]
