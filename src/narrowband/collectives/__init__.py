"""Average compressed tensors over ranks: each rank encodes its tensor, and every rank ends up with the average.

- ``peers.py``: which ranks average with each other.
- ``groups.py``: lends them a process group.
- ``engine.py``: issues collectives in the same order on all ranks.
- ``exchange.py``: the base class of all collectives.
- ``all_reduce.py``, ``all_gather.py``, ``scatter_reduce.py``, ``sparse_reduce.py``: one collective each; so are
  ``factor_reduce.py`` and ``half_rounds.py``, which belong to PowerSGD.
- ``choice.py``: picks the cheapest collective.
"""

from __future__ import annotations

from narrowband.collectives.choice import COLLECTIVES, Collective, LayerCollectives, check, choose, collective
from narrowband.collectives.engine import Engine, Job, Pending, Transfer
from narrowband.collectives.exchange import Exchange, Sent
from narrowband.collectives.executor import SerialExecutor
from narrowband.collectives.groups import (
    Loan,
    borrow,
    can_send_from,
    group_of,
    group_or,
    is_gloo,
    new_group,
    to_connect,
    wait_for,
    waiting_in,
)
from narrowband.collectives.operand import Operand
from narrowband.collectives.peers import Peers
from narrowband.collectives.traffic import all_gather_nbytes, all_reduce_nbytes, reduce_scatter_nbytes, shares_of

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
    "group_or",
    "is_gloo",
    "new_group",
    "reduce_scatter_nbytes",
    "shares_of",
    "to_connect",
    "wait_for",
    "waiting_in",
]
