"""Choose the collective that averages a layer: a table of all collectives, and the cheapest one for a codec.

===================  ==================================================  =====================================
collective           what happens                                        bytes a rank sends (payload P, N ranks)
===================  ==================================================  =====================================
``all_reduce``       payloads are added up on their way                  2·(N−1)/N · P
``all_gather``       every rank receives all N payloads, decodes, adds   (N−1) · P
``scatter_reduce``   each rank averages one chunk, sends it encoded      2·(N−1)/N · P
``sparse_reduce``    each rank adds up what it owns, sends the largest   about 3·(N−1)/N · P
===================  ==================================================  =====================================

For sparse codecs, ``all_gather`` delivers everything that ranks send, while ``sparse_reduce`` delivers only the largest
sums. So ``auto`` takes ``sparse_reduce`` only where it sends less than half as much: from seven ranks on. Among
thousands of ranks ``sparse_reduce`` sends more than the table says: see :mod:`narrowband.collectives.sparse_reduce`.

``factor_reduce`` and ``half_rounds`` belong to PowerSGD. A rank sends 2·(N−1)/N · P bytes for factors of P bytes. A
feedback names the collective that it requires in :attr:`~narrowband.feedback.State.collective`.

:class:`LayerCollectives` chooses for all layers of a model, and predicts the bytes that each layer sends.

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

#: The collectives that users may ask for. Where several send as much, :func:`choose` takes the first of them.
Collective = Literal["all_reduce", "all_gather", "scatter_reduce", "sparse_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)

#: Name → class.
_EXCHANGES: dict[str, type[Exchange]] = {
    kind.name: kind for kind in (AllReduce, AllGather, ScatterReduce, SparseReduce, FactorReduce, HalfRounds)
}


def collective(name: str) -> type[Exchange]:
    """Return the class that implements a collective.

    Raises:
        KeyError: there is no such collective.
    """
    return _EXCHANGES[name]


def choose(codec: Codec, nbytes: int, size: int, feedback: State | None = None) -> type[Exchange]:
    """Return the collective with the least traffic among those that can carry a codec's payloads.

    Args:
        codec: encodes the tensors.
        nbytes: bytes of all payloads that one rank makes with this codec.
        size: number of ranks.
        feedback: the feedback behind the codec, if any.

    Example:
        >>> choose(nb.codec("topk:density=0.01"), nbytes=80_000, size=4).name
        'all_gather'
    """
    possible = [kind for kind in map(collective, COLLECTIVES) if kind.obstacle(codec, feedback) is None]
    return min(possible, key=lambda kind: kind.handicap * kind.traffic_nbytes(nbytes, size) + kind.overhead_nbytes)


def check(codec: Codec, name: Collective, feedback: State | None = None) -> None:
    """Raise UnsupportedError where a collective cannot carry a codec's payloads with this feedback."""
    obstacle = collective(name).obstacle(codec, feedback)
    if obstacle is not None:
        raise UnsupportedError(obstacle)


class LayerCollectives:
    """The collective of each layer of a model, and the bytes that it sends.

    The choice counts all layers whose codecs are of one class together, so that results do not depend on the groups in
    which gradients become ready. A codec of that class that the cheapest collective cannot carry gets another one.

    Args:
        layers: each layer's compression (codec and feedback) and shape.
        size: number of ranks.
        asked: the collective that the user asks for, or ``auto``.

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
        self._nbytes: dict[type[Codec], int] = {}  # class of codec → bytes of all its payloads
        self._chosen: dict[tuple[Codec, type], type[Exchange]] = {}  # filled as :meth:`of` is called
        for chosen, shape in layers:
            kind = type(chosen.codec)
            self._nbytes[kind] = self._nbytes.get(kind, 0) + chosen.codec.payload_nbytes(shape)

    def of(self, chosen: Compression) -> type[Exchange]:
        """Return the collective that carries payloads of this compression."""
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
        """Return the bytes that a rank sends per step for a layer of this shape, without the few of message trailers.

        Args:
            chosen: the layer's compression.
            shape: shape of its gradient, which is in float32.
            payload_nbytes: bytes of its payload, where these depend on the data; by default what the codec predicts.
        """
        nbytes = chosen.layer_nbytes(shape) if payload_nbytes is None else payload_nbytes
        return self.of(chosen).layer_traffic_nbytes(chosen.codec, shape, nbytes, self._size)
