"""Payloads across ranks: all-reduce of payloads that add up, all-gather of those that do not, or a chunked reduction.

``engine.py`` keeps one order on all ranks; ``groups.py`` lends process groups; ``exchange.py`` holds the three ways to
average a set of tensors, and chooses; ``lowrank.py`` is a fourth, for factors that all ranks have in common.
"""

from __future__ import annotations

from narrowband.collectives.engine import Engine, Job, Wire, Worker
from narrowband.collectives.exchange import (
    COLLECTIVES,
    Exchange,
    Item,
    Peers,
    allreduce_nbytes,
    choose,
)
from narrowband.collectives.exchanges import exchange
from narrowband.collectives.groups import Loan, borrow
from narrowband.collectives.lowrank import LowRankReduce

__all__ = [
    "COLLECTIVES",
    "Engine",
    "Exchange",
    "Item",
    "Job",
    "Loan",
    "LowRankReduce",
    "Peers",
    "Wire",
    "Worker",
    "allreduce_nbytes",
    "borrow",
    "choose",
    "exchange",
]
