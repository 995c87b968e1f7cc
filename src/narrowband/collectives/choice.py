"""Which collective averages what: the table of all, and the cheapest for a codec.

===================  ==================================================  =====================================
collective           what happens                                        bytes a rank sends (payload P, N ranks)
===================  ==================================================  =====================================
``all_reduce``       payloads are added up on their way                  2·(N−1)/N · P
``all_gather``       every rank receives all N payloads, decodes, adds   (N−1) · P
``scatter_reduce``   each rank averages one chunk, sends it encoded      2·(N−1)/N · P
``sparse_reduce``    each rank adds up what it owns, sends the largest   about 3·(N−1)/N · P
===================  ==================================================  =====================================

Where the largest elements are gathered, all that ranks send is delivered, and by ``sparse_reduce`` the largest sums
are. So ``auto`` takes that where it sends less than half, from seven ranks on. Among thousands of ranks it sends more
than the table says: :mod:`narrowband.collectives.sparse_reduce` says how much.

``factor_reduce`` and ``half_rounds``, 2·(N−1)/N · P for factors of P bytes, belong to PowerSGD. A feedback names the
collective that it brings in :attr:`~narrowband.feedback.State.collective`.

:class:`LayerCollectives` says it of all layers of a model, and how many bytes each of them takes.

A new collective is a subclass of :class:`~narrowband.collectives.exchange.Exchange` and an entry here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from narrowband.collectives.all_gather import AllGather
from narrowband.collectives.all_reduce import AllReduce
from narrowband.collectives.factor_reduce import FactorReduce
from narrowband.collectives.half_rounds import HalfRounds
from narrowband.collectives.scatter_reduce import ScatterReduce
from narrowband.collectives.sparse_reduce import SparseReduce
from narrowband.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from narrowband.codecs import Codec, Shape
    from narrowband.collectives.exchange import Exchange
    from narrowband.feedback import Compression, State

__all__ = ["COLLECTIVES", "Collective", "LayerCollectives", "check", "choose", "collective"]

#: What users may ask for.
Collective = Literal["all_reduce", "all_gather", "scatter_reduce", "sparse_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

#: The preferred first where several send as much.
_EXCHANGES: dict[str, type[Exchange]] = {
    kind.name: kind for kind in (AllReduce, AllGather, ScatterReduce, SparseReduce, FactorReduce, HalfRounds)
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
    return min(possible, key=lambda kind: kind.handicap * kind.traffic_nbytes(nbytes, size) + kind.overhead_nbytes)


def check(codec: Codec, name: Collective, feedback: State | None = None) -> None:
    """Raise UnsupportedError where a collective cannot carry a codec, or not with this feedback."""
    obstacle = collective(name).obstacle(codec, feedback)
    if obstacle is not None:
        raise UnsupportedError(obstacle)


class LayerCollectives:
    """By which collective each layer of a model travels, and what that takes.

    It is chosen for all layers with one kind of codec at once, so that results do not depend on the groups in which
    gradients become ready; of that kind, codecs that the cheapest collective cannot carry have another.

    Args:
        layers: what each layer has, its feedback included, and its shape.
        size: number of ranks.
        asked: the collective that users ask for, or ``auto``.

    Example:
        >>> chosen = nb.compression("topk:density=0.01+ef")
        >>> found = LayerCollectives([(chosen, (1000, 500))], size=4)
        >>> found.of(chosen).name, found.sent_nbytes(chosen, (1000, 500))
        ('all_gather', 76884)
    """

    def __init__(
        self,
        layers: Iterable[tuple[Compression, Shape]],
        size: int,
        *,
        asked: Collective | Literal["auto"] = "auto",
    ) -> None:
        self._size = size
        self._asked = asked
        self._nbytes: dict[type[Codec], int] = {}  # of all payloads with one kind of codec
        self._chosen: dict[tuple[Codec, type], type[Exchange]] = {}  # as it is first asked for
        for chosen, shape in layers:
            kind = type(chosen.codec)
            self._nbytes[kind] = self._nbytes.get(kind, 0) + chosen.codec.payload_nbytes(shape)

    def of(self, chosen: Compression) -> type[Exchange]:
        """How payloads of this compression travel."""
        if chosen.feedback is not None and chosen.feedback.collective is not None:
            return collective(chosen.feedback.collective)
        if self._asked != "auto":
            return collective(self._asked)
        codec = chosen.codec
        key = codec, type(chosen.feedback)
        if key not in self._chosen:
            self._chosen[key] = choose(codec, self._nbytes.get(type(codec), 0), self._size, chosen.feedback)
        return self._chosen[key]

    def sent_nbytes(self, chosen: Compression, shape: Shape, payload_nbytes: int | None = None) -> int:
        """Bytes that a rank sends in a step for a layer of this shape, but for the few that a message has of its own.

        Args:
            chosen: what it has.
            shape: of its gradient, in float32.
            payload_nbytes: of its payload, where that depends on the data; by default the codec's word.
        """
        nbytes = chosen.layer_nbytes(shape) if payload_nbytes is None else payload_nbytes
        return self.of(chosen).layer_traffic_nbytes(chosen.codec, shape, nbytes, self._size)
