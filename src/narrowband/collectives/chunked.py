"""A codec that encodes each of N chunks of a tensor by itself, so that every rank can average one chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from narrowband.codecs import Codec, Shape
from narrowband.codecs.base import numel_of
from narrowband.collectives.primitives import spans_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Chunked"]


@dataclass(frozen=True)
class Chunked(Codec):
    """Encode a tensor chunk by chunk: the payload is the chunks' payloads end to end.

    Args:
        codec: encodes each chunk.
        chunks: number of chunks, one per rank.
        turn: by how many ranks the assignment of chunks to owners is rotated.
    """

    codec: Codec
    chunks: int
    turn: int = 0

    name = "chunked"

    def cut(self, numel: int) -> list[slice]:
        """Return where the chunk of each rank lies; some chunks may be empty.

        Chunks begin at multiples of the codec's granularity and differ by one grain at most. Which ranks own the longer
        chunks rotates from tensor to tensor, because the rank with the most bytes sets the length of the all-gather.
        """
        grain = self.codec.granularity
        grains = -(-numel // grain)
        at = [min(j * grains // self.chunks * grain, numel) for j in range(self.chunks + 1)]
        return [slice(at[j], at[j + 1]) for j in ((r + self.turn) % self.chunks for r in range(self.chunks))]

    def sizes(self, numel: int) -> list[int]:
        """Return the payload bytes of each chunk. Chunks are encoded as float32, because their mean is float32."""
        return [self.codec.payload_nbytes(cut.stop - cut.start) for cut in self.cut(numel)]

    def all_sizes(self, numel: int) -> Tensor:
        """As :meth:`sizes`, as one tensor; fast even for 10,000 ranks."""
        grain = self.codec.granularity
        at = torch.arange(self.chunks + 1, dtype=torch.int64, device="cpu") * -(-numel // grain) // self.chunks * grain
        lengths: list[int] = at.clamp_(max=numel).diff().tolist()
        sizes = {length: self.codec.payload_nbytes(length) for length in set(lengths)}
        of_all = torch.tensor([sizes[length] for length in lengths], dtype=torch.int64, device="cpu")
        return of_all.roll(-self.turn)

    def _nbytes(self, shape: Shape, dtype: torch.dtype) -> int:
        return sum(self.sizes(numel_of(shape)))

    def _is_finite(self, payload: Tensor, shape: Shape) -> bool:
        numel = numel_of(shape)
        pieces = zip(self.cut(numel), spans_of(self.sizes(numel)), strict=True)
        return all(self.codec.is_finite(payload[span], cut.stop - cut.start) for cut, span in pieces)

    def _encode(self, x: Tensor, shape: Shape, dtype: torch.dtype, out: Tensor, seed: int) -> None:
        for j, (cut, span) in enumerate(zip(self.cut(x.numel()), spans_of(self.sizes(x.numel())), strict=True)):
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
        for j, (cut, span) in enumerate(zip(self.cut(out.numel()), spans_of(self.sizes(out.numel())), strict=True)):
            self.codec.decode(payload[span], out[cut], seed=seed + j, weight=weight, accumulate=accumulate)
