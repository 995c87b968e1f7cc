"""The cost of a choice: bytes that a rank sends for a layer, by the collective that carries the choice's payload.

Among N ranks, a payload of P bytes costs a rank (N−1)·P bytes if it is all-gathered, as top-k is among few ranks, and
2·(N−1)/N·P bytes if it is all-reduced, as low-rank factors are. Which choice is smaller depends on N. So a policy is
given N, but no process group.

The prediction does not count a message's trailer: four bytes that say whether its sender saw inf or NaN. A codec's
chunks for ``scatter_reduce`` are counted as one payload; rounding them up adds less than one group of the codec per
layer and rank. Gradients are assumed to be float32; in half precision, ``none`` sends half of the predicted bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from narrowband.codecs.base import Shape, numel_of
from narrowband.collectives import Collective, LayerCollectives, all_reduce_nbytes
from narrowband.feedback import Compression, compression

__all__ = ["Traffic", "dense_nbytes"]


@dataclass(frozen=True)
class Traffic:
    """Predicts the bytes that a rank sends for layers.

    Args:
        world_size: number of ranks that average.
        model: the model's spec, whose feedback is used behind specs that name none. None: specs are taken as they are.
        collective: the collective that the user asks for, or ``auto``.

    Example:
        >>> layers = [(nb.compression(spec), (1000, 500)) for spec in ("topk:density=0.01+ef", "powersgd:rank=4")]
        >>> [Traffic(world_size).nbytes(layers) for world_size in (2, 16)]
        [[25628, 24000], [72420, 45000]]
    """

    world_size: int
    model: str | Compression | None = None
    collective: Collective | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size={self.world_size} must be at least 1")

    def nbytes(self, layers: Sequence[tuple[Compression, Shape]], payloads: Sequence[int] | None = None) -> list[int]:
        """Return the bytes that a rank sends per step for each layer of a model.

        Args:
            layers: each layer's compression and shape. Layers with one class of codec are counted together to choose
                their collective.
            payloads: bytes of each payload, where these depend on the data.
        """
        model = None if self.model is None else compression(self.model)
        found = [(chosen if model is None else chosen.beside(model), shape) for chosen, shape in layers]
        collectives = LayerCollectives(found, self.world_size, asked=self.collective)
        sizes = [None] * len(found) if payloads is None else payloads
        return [
            collectives.sent_nbytes(chosen, shape, size) for (chosen, shape), size in zip(found, sizes, strict=True)
        ]


def dense_nbytes(shape: Shape, world_size: int) -> int:
    """Return the bytes that a rank sends for an uncompressed layer: a ring all-reduce in float32.

    Example:
        >>> dense_nbytes((1000, 500), world_size=4)
        3000000
    """
    return all_reduce_nbytes(4 * numel_of(shape), world_size)
