"""The exchange of each collective, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowband.collectives.exchange import Dense, Exchange, Gather, Item, Peers, ScatterReduce
from narrowband.collectives.lowrank import LowRankReduce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narrowband.feedback import State

__all__ = ["exchange"]

_EXCHANGES: dict[str, type[Exchange]] = {
    "dense": Dense,
    "gather": Gather,
    "scatter_reduce": ScatterReduce,
    "lowrank": LowRankReduce,
}


def exchange(
    collective: str, items: Sequence[Item], peers: Peers, *, measure: bool = False, state: State | None = None
) -> Exchange:
    """An exchange of ``items``, to be run on an engine's thread: ``it.encode(); engine.start(it.job(), done)``.

    Args:
        collective: its name.
        items: what to average.
        peers: the ranks.
        measure: whether the relative error is measured.
        state: of the feedback that brings the collective, if one does.
    """
    return _EXCHANGES[collective](items, peers, measure, state)
