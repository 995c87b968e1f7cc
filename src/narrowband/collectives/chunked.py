"""A codec that encodes each of N chunks of a tensor by itself, so that every rank can average one chunk."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from narrowband.codecs import Codec, Shape
from narrowband.codecs.base import numel_of
from narrowband.collectives.primitives import spans_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Chunked"]


@dataclass(frozen=True)
class Chunked(Codec):
    """Encode a tensor chunk by chunk: the payload is the chunks' payloads end to end.

    Args:
        codec: encodes each chunk.
        chunks: number of chunks, one per rank.
    """

    codec: Codec
    chunks: int

    name = "chunked"

    def cut(self, numel: int) -> list[slice]:
        """Return where the chunks lie; some may be empty.

        Chunks begin at multiples of the codec's granularity and differ by one grain at most.
        """
        grain = self.codec.granularity
        grains = -(-numel // grain)
        at = [min(j * grains // self.chunks * grain, numel) for j in range(self.chunks + 1)]
        return [slice(begin, end) for begin, end in itertools.pairwise(at)]

    def sizes(self, numel: int) -> list[int]:
        """Return the payload bytes of each chunk. Chunks are encoded as float32, because their mean is float32."""
        return [self.codec.payload_nbytes(cut.stop - cut.start) for cut in self.cut(numel)]

    def all_sizes(self, numel: int) -> Tensor:
        """As :meth:`sizes`, as one tensor; fast even for 10,000 chunks."""
        grain = self.codec.granularity
        at = torch.arange(self.chunks + 1, dtype=torch.int64, device="cpu") * -(-numel // grain) // self.chunks * grain
        lengths: list[int] = at.clamp_(max=numel).diff().tolist()
        sizes = {length: self.codec.payload_nbytes(length) for length in set(lengths)}
        return torch.tensor([sizes[length] for length in lengths], dtype=torch.int64, device="cpu")

    @property
    def widens(self) -> bool:
        return True

    @property
    def encodes_several(self) -> bool:
        return self.codec.encodes_several

    def encode_all(
        self,
        xs: Sequence[Tensor],
        outs: Sequence[Tensor],
        *,
        seeds: Sequence[int],
        residuals: Sequence[Tensor] = (),
        decay: float = 1.0,
    ) -> bool:
        """Encode the chunks of all tensors as so many tensors."""
        chunks: list[Tensor] = []
        places: list[Tensor] = []
        draws: list[int] = []
        kept: list[Tensor] = []
        for i, (x, out, seed) in enumerate(zip(xs, outs, seeds, strict=True)):
            for j, cut, span in self._pieces(x.numel()):
                chunks.append(x[cut])
                places.append(out[span])
                draws.append(seed + j)
                kept += [residuals[i][cut]] if residuals else []
        return self.codec.encode_all(chunks, places, seeds=draws, residuals=kept, decay=decay)

    def _pieces(self, numel: int) -> list[tuple[int, slice, slice]]:
        """Return the number of each chunk that is not empty, its elements, and the bytes of its payload."""
        pieces = zip(self.cut(numel), spans_of(self.sizes(numel)), strict=True)
        return [(j, cut, span) for j, (cut, span) in enumerate(pieces) if cut.stop > cut.start]

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return sum(self.sizes(numel_of(shape)))

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        pieces = self._pieces(numel_of(shape))
        return all(self.codec.is_finite(payload[span], cut.stop - cut.start) for _, cut, span in pieces)

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        for j, cut, span in self._pieces(x.numel()):
            self.codec.encode(x[cut], seed=seed + j, out=out[span])

    def _decode(
        self,
        payload: Tensor,
        out: Tensor,
        shape: Shape,
        dtype: torch.dtype,
        seed: int,
        weight: float,
        accumulate: bool,
    ) -> None:
        for j, cut, span in self._pieces(out.numel()):
            self.codec.decode(payload[span], out[cut], seed=seed + j, weight=weight, accumulate=accumulate)
