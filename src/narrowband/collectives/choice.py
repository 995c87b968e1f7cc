"""Which collective averages what: the table of all, and the cheapest for a codec.

===================  ==================================================  =====================================
collective           what happens                                        bytes a rank sends (payload P, N ranks)
===================  ==================================================  =====================================
``all_reduce``       payloads are added up on their way                  2·(N−1)/N · P
``all_gather``       every rank receives all N payloads, decodes, adds   (N−1) · P
``scatter_reduce``   each rank averages one chunk, sends it encoded      2·(N−1)/N · P
===================  ==================================================  =====================================

``factor_reduce`` and ``half_rounds``, 2·(N−1)/N · P for factors of P bytes, belong to PowerSGD. A feedback names the
collective that it brings in :attr:`~narrowband.feedback.State.collective`.

A new collective is a subclass of :class:`~narrowband.collectives.exchange.Exchange` and an entry here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from narrowband.collectives.all_gather import AllGather
from narrowband.collectives.all_reduce import AllReduce
from narrowband.collectives.factor_reduce import FactorReduce
from narrowband.collectives.half_rounds import HalfRounds
from narrowband.collectives.scatter_reduce import ScatterReduce
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from narrowband.codecs import Codec
    from narrowband.collectives.exchange import Exchange
    from narrowband.feedback import State

__all__ = ["COLLECTIVES", "Collective", "check", "choose", "collective"]

#: What users may ask for.
Collective = Literal["all_reduce", "all_gather", "scatter_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

#: The preferred first where several send as much.
_EXCHANGES: dict[str, type[Exchange]] = {
    kind.name: kind for kind in (AllReduce, AllGather, ScatterReduce, FactorReduce, HalfRounds)
}


def collective(name: str) -> type[Exchange]:
    """The exchange of a collective.

    Raises:
        KeyError: there is no such collective.
    """
    return _EXCHANGES[name]


def choose(codec: Codec, nbytes: int, size: int, feedback: State | None = None) -> type[Exchange]:
    """The collective with the least traffic among those that can carry a codec.

    Args:
        codec: what tensors are encoded with.
        nbytes: of all its payloads of one rank.
        size: number of ranks.
        feedback: what stands behind the codec.

    Example:
        >>> choose(nb.codec("topk:density=0.01"), nbytes=80_000, size=4).name
        'all_gather'
    """
    possible = [kind for kind in map(collective, COLLECTIVES) if kind.obstacle(codec, feedback) is None]
    return min(possible, key=lambda kind: kind.traffic_nbytes(nbytes, size) + kind.overhead_nbytes)


def check(codec: Codec, name: Collective, feedback: State | None = None) -> None:
    """Raise UnsupportedError where a collective cannot carry a codec, or not with this feedback."""
    obstacle = collective(name).obstacle(codec, feedback)
    if obstacle is not None:
        raise UnsupportedError(obstacle)
