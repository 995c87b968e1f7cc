"""What a choice costs: the bytes that a rank sends for a layer, by the collective that the choice travels by.

A payload of P bytes costs a rank (N−1)·P among N ranks where it is gathered, as that of top-k is among few, and
2·(N−1)/N·P where it is added up on its way, as factors of low rank are. Which is smaller depends on N. So a policy is
told N, and knows no process group.

Not counted is what a message has of its own, whatever it carries: four bytes that say whether its sender saw inf or
NaN. A codec's chunks for ``scatter_reduce`` are counted as one payload; their rounding up adds less than one group of
the codec per layer and rank. Gradients are taken to be float32; in half precision ``none`` sends half of what is said.
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
    """Bytes that a rank sends for layers, among so many ranks.

    Args:
        world_size: how many ranks average.
        model: what the model has: its feedback stands behind specs that name none. None: layers have what their specs
            say.
        collective: the one that users ask for, or ``auto``.

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
        """Bytes that a rank sends in a step for each layer of a model.

        Args:
            layers: what each has, and its shape. The collective is chosen for all with one kind of codec at once.
            payloads: bytes of each payload, where that depends on the data.
        """
        model = None if self.model is None else compression(self.model)
        found = [(chosen if model is None else chosen.beside(model), shape) for chosen, shape in layers]
        collectives = LayerCollectives(found, self.world_size, asked=self.collective)
        sizes = [None] * len(found) if payloads is None else payloads
        return [
            collectives.sent_nbytes(chosen, shape, size) for (chosen, shape), size in zip(found, sizes, strict=True)
        ]


def dense_nbytes(shape: Shape, world_size: int) -> int:
    """Bytes that a rank sends for a layer that is not compressed: a ring all-reduce in float32.

    Example:
        >>> dense_nbytes((1000, 500), world_size=4)
        3000000
    """
    return all_reduce_nbytes(4 * numel_of(shape), world_size)
