"""Payloads across ranks: how tensors that every rank has encoded become their average on all ranks.

``peers.py`` says who averages, ``groups.py`` lends them a process group, and ``engine.py`` keeps one order of
collectives on all ranks. ``exchange.py`` is what all collectives have in common; ``all_reduce.py``, ``all_gather.py``,
``scatter_reduce.py``, ``sparse_reduce.py``, and PowerSGD's ``factor_reduce.py`` and ``half_rounds.py`` are one each,
and ``choice.py`` takes the cheapest.
"""

from __future__ import annotations

from narrowband.collectives.choice import COLLECTIVES, Collective, LayerCollectives, check, choose, collective
from narrowband.collectives.engine import Engine, Job, Pending, Transfer
from narrowband.collectives.exchange import Exchange, Sent
from narrowband.collectives.executor import SerialExecutor
from narrowband.collectives.groups import Loan, borrow, can_send_from, group_of, new_group
from narrowband.collectives.operand import Operand
from narrowband.collectives.peers import Peers
from narrowband.collectives.traffic import all_gather_nbytes, all_reduce_nbytes, shares_of

__all__ = [
    "COLLECTIVES",
    "Collective",
    "Engine",
    "Exchange",
    "Job",
    "LayerCollectives",
    "Loan",
    "Operand",
    "Peers",
    "Pending",
    "Sent",
    "SerialExecutor",
    "Transfer",
    "all_gather_nbytes",
    "all_reduce_nbytes",
    "borrow",
    "can_send_from",
    "check",
    "choose",
    "collective",
    "group_of",
    "new_group",
    "shares_of",
]
