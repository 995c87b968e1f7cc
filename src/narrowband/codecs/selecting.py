"""The interface of codecs that select elements and send each with its index.

Others may select in their place: a feedback chooses the indices itself (``ef-mixed``, ``dgc``), and the backward
direction of a pipeline boundary takes those of the forward direction (``reuse=forward``). Values can travel alone to a
receiver that has their indices.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from narrowband.codecs.base import Codec, Shape, dims, numel_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SelectingCodec"]


class SelectingCodec(Codec):
    """A codec that selects elements by magnitude and sends each with its index.

    With such a codec, a feedback can choose the indices itself (``ef-mixed``, ``dgc``), and the backward direction of a
    pipeline boundary can reuse those of the forward direction (``reuse=forward``).

    Attributes:
        density: the share of elements that is sent.
    """

    density: float

    @abstractmethod
    def rows(self, shape: Shape) -> int:
        """Return how many parts a tensor of this shape has; the same number of elements is selected in each."""

    @abstractmethod
    def kept(self, shape: Shape) -> int:
        """Return how many elements of a tensor of this shape are sent."""

    @abstractmethod
    def values_nbytes(self, k: int) -> int:
        """Return the bytes that k values take, without their indices."""

    @abstractmethod
    def largest(self, x: Tensor, shape: Shape, k: int, *, seed: int = 0) -> Tensor:
        """Return the indices (int32, ascending, into the flat tensor) of the k largest magnitudes in each row.

        Args:
            x: flat contiguous float32, not empty.
            shape: the shape of the tensor, from which its :meth:`rows` follow.
            k: how many to select in each row; a codec that samples may find fewer.
            seed: the seed of the sample.
        """

    @abstractmethod
    def pack(self, indices: Tensor, values: Tensor, *, shape: Shape, out: Tensor | None = None) -> Tensor:
        """Return the payload of a tensor of this shape that is zero except for these elements.

        Args:
            indices: int32, ascending, into the flat tensor; at most :meth:`kept` of them, and exactly that many unless
                :attr:`takes_any`.
            values: float32, one per index.
            out: as for :meth:`encode`.
        """

    @property
    def takes_any(self) -> bool:
        """Whether :meth:`largest` accepts any k, and :meth:`pack` any number of elements up to :meth:`kept`. If False,
        both take exactly as many as :meth:`kept` returns.
        """
        return True

    @property
    def sampled(self) -> bool:
        """Whether :meth:`largest` selects by a sample, and may find fewer elements than it is asked for."""
        return False

    def rounded(self, values: Tensor) -> Tensor:
        """Return ``values`` as they arrive after :meth:`pack`: the same tensor if they are sent as they are.

        Args:
            values: float32, flat.
        """
        places = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
        return self.decode_at(self.encode_at(values, places), places, torch.empty_like(values))

    def elements(self, payload: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
        at = self.places(payload, shape)
        dense = torch.empty(numel_of(shape), dtype=torch.float32, device=payload.device).view(dims(shape))
        self.decode(payload, dense)
        return at, dense.view(-1).index_select(0, at)

    def added(self, payload: Tensor, shape: Shape) -> tuple[Tensor, Tensor] | None:
        """Return what decoding adds to a float32 tensor of this shape, so that a payload is read once.

        Returns:
            (int32 indices, float32 values) for :func:`narrowband.kernels.sparse_accumulate`, which then gives the bits
            of :meth:`decode` with ``accumulate``. None: only :meth:`decode` gives them.

        Raises:
            PayloadError: the payload is not that of a tensor of this shape.
        """
        del payload, shape
        return None

    @abstractmethod
    def places(self, payload: Tensor, shape: Shape) -> Tensor:
        """Return the indices that a payload names: int32, ascending, into the flat tensor.

        Raises:
            PayloadError: the payload is not that of a tensor of this shape.
        """

    @abstractmethod
    def encode_at(self, x: Tensor, places: Tensor) -> Tensor:
        """Return a payload of values alone, :meth:`values_nbytes` long, for a receiver that has their indices.

        Args:
            x: float32, float16 or bfloat16, any shape.
            places: int32 (k,), ascending, into the flat tensor: the :meth:`places` of another payload.
        """

    @abstractmethod
    def decode_at(self, payload: Tensor, places: Tensor, out: Tensor) -> Tensor:
        """Write the values of :meth:`encode_at` at these indices of ``out``, and zero elsewhere; returns ``out``.

        Raises:
            PayloadError: the payload holds another number of values. Nothing has been written then.
        """
